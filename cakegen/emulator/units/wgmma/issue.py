"""wgmma of one warp: descriptors, chains of accumulators in flight, groups.

A warp computes its own 16 of the 64 rows. Between the instruction and the wait that covers its group, the accumulator
registers are in flight (reading one is a fault), and the operands in shared memory are held: a write to them is a
fault. The sum itself happens when the adversary says, in order along one accumulator (PTX ISA 9.7.15).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault, Where
from cakegen.emulator.machine.memory import SharedMemory
from cakegen.emulator.order.warp_order import WarpOrder
from cakegen.emulator.units.fragments import factor_cells
from cakegen.emulator.units.product_chains import MultiplyAdd, add_products
from cakegen.emulator.units.wgmma.batch import Batch, IssueRun, Part, Product, make_batch
from cakegen.emulator.units.wgmma.form import WgmmaForm
from cakegen.emulator.units.wgmma.operands import TileTable

Array = NDArray[Any]

# Type of a sum -> that of a register that holds it.
_REGISTER_TYPES = {"f4": "f4", "i4": "i4", "f2": "u4"}


class InFlight:
    """What a register holds while a wgmma owns it; whatever touches it raises."""

    def __init__(self, what: str, register: str = "an accumulator register") -> None:
        self._what = what
        self._register = register

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise Fault("pending-write", f"{self._register} is used while {self._what} is not waited for")

    def __getattr__(self, name: str) -> NoReturn:
        # numpy asks for its protocols first, and then for `__array__`
        if name.startswith("__"):
            raise AttributeError(name)
        self.__array__()


@dataclass(eq=False)
class Run:
    """Products of one accumulator that were issued together, and how many have been added.

    Parameters
    ----------
    sources
        The elements of A that a product has in registers, `[16, k]`; of none, where all are in shared memory.
    """

    part: Part
    sources: tuple[Array | None, ...] = ()
    done: int = 0

    @property
    def count(self) -> int:
        """How many products there are."""
        return self.part.fresh.size

    def add(self, host: ProductHost, shared: SharedMemory, last: int, sums: Array) -> Array:
        """Add the products up to one, which is not added."""
        part, first, self.done = self.part, self.done, last
        if part.tiles is not None:
            return add_products(host.multiply_add, shared.elements, part.tiles, part.fresh, (first, last), sums)
        for number in range(first, last):
            product = part.products[number]
            kind, tile = product.form.kind, product.tile
            elements = shared.data.view(f"u{kind.width}")
            left = elements[tile.a] if tile.a is not None else self.sources[number]
            assert left is not None
            before = np.zeros_like(sums) if part.fresh[number] else sums
            sums = kind.add(host.multiply_add, left, elements[tile.b], before)
        return sums


@dataclass(eq=False)
class Chain:
    """An accumulator in flight: wgmmas on the same registers, done in their order; `types` are the registers'."""

    form: WgmmaForm
    sums: Array
    token: InFlight
    types: tuple[np.dtype[Any], ...]
    pending: list[Run] = field(default_factory=list)


@dataclass(eq=False)
class Group:
    """What one `wgmma.commit_group` commits: how many products, their chains, the granules that they hold.

    Parameters
    ----------
    sources
        Registers that hold A, and what they held when the product was issued.
    """

    products: int = 0
    chains: set[Chain] = field(default_factory=set)
    held: list[Array] = field(default_factory=list)
    sources: list[tuple[int, Array]] = field(default_factory=list)


class ProductCta(Protocol):
    """A CTA, as far as wgmma goes."""

    @property
    def index(self) -> int:
        """Linear index in the grid."""

    @property
    def shared(self) -> SharedMemory:
        """Where operands are."""

    def match_warpgroup(self, warp: int, number: int, what: Sequence[Any]) -> None:
        """The four warps of a warpgroup must issue the same wgmmas with the same descriptors."""


class ProductWarp(Protocol):
    """A warp, as far as wgmma goes."""

    @property
    def index(self) -> int:
        """In its CTA."""

    @property
    def cta(self) -> ProductCta:
        """Its CTA."""

    @property
    def thread(self) -> WarpOrder | None:
        """How the checker of happens-before sees it; None: nothing is checked."""


class ProductHost(Protocol):
    """What wgmma asks of its launch."""

    @property
    def tiles(self) -> TileTable:
        """Where operands lie."""

    @property
    def multiply_add(self) -> MultiplyAdd:
        """The tensor core's arithmetic."""

    @property
    def accumulators(self) -> tuple[int, ...]:
        """Registers that hold sums, and those that are moved into them."""

    @property
    def constants(self) -> Sequence[Array]:
        """What the translated blocks hold as constants."""

    def schedule_products(self, warp: int, widths: Sequence[int]) -> list[bool]:
        """Products of so many columns were issued by the warp with that index; which read their operands at once."""


class WgmmaUnit:
    """The wgmma state of one warp."""

    def __init__(self, warp: ProductWarp, host: ProductHost) -> None:
        self._warp = warp
        self._host = host
        self._chains: dict[tuple[int, ...], Chain] = {}
        self._fresh: list[tuple[Batch, list[Chain]]] = []
        # of what is in `_fresh`, the elements of A that are in registers, a product each
        self._sources: list[Array | None] = []
        self._uncommitted = Group()
        self._groups: list[Group] = []
        self._issued = 0
        self._fenced: dict[int, Any] = {}
        self._slot = -1
        self._access = 0
        self._committed = 0

    @property
    def in_flight(self) -> bool:
        """Whether anything was issued that no wait has covered."""
        return bool(self._uncommitted.products or self._groups)

    @property
    def unfinished(self) -> int:
        """Products that were issued and that no wait has covered."""
        return sum(group.products for group in (*self._groups, self._uncommitted))

    def fence(self, R: list[Any]) -> None:
        """`wgmma.fence`: what registers hold now is there for the wgmmas that follow."""
        if self._warp.thread is not None:
            self._fenced = {index: R[index] for index in self._host.accumulators}

    def issue(self, run: IssueRun, R: list[Any]) -> None:
        """Some `wgmma.mma_async`; `flush` must follow before anything else touches memory."""
        warp, tiles = self._warp, self._host.tiles
        key = (run, warp.index % 4, run.key(R))
        batch = tiles.batches.get(key)
        if batch is None:
            batch = tiles.batches[key] = run.decode(R, warp.index, warp.cta.index, tiles, warp.cta.shared)
        warp.cta.match_warpgroup(warp.index, self._issued, batch.what)
        self._issued += len(batch.products)
        self._sources += [self._read_source(product.form, R) for product in batch.products]
        self._fresh.append((batch, [self._chain(part.form, R) for part in batch.parts]))

    def _read_source(self, form: WgmmaForm, R: list[Any]) -> Array | None:
        """A of a product from registers, which must not change until it is waited for (PTX ISA 9.7.15.7.1)."""
        if form.a >= 0:
            return None
        width = form.kind.width
        words = np.stack([R[index].view("u4") for index in form.a_registers])
        elements = words[:, :, None].view(f"u{width}")
        source = np.empty((16, form.kind.depth), elements.dtype)
        source[factor_cells(16, len(words), elements.shape[2])] = elements
        self._uncommitted.sources += [(index, R[index]) for index in form.a_registers]
        return source

    def flush(self) -> None:
        """What was issued since the last flush begins to read shared memory, all of it at once.

        Raises
        ------
        Fault
            What it reads is not there, is still being written, or nothing orders the read behind the write.
        """
        fresh, self._fresh = self._fresh, []
        sources, self._sources = self._sources, []
        for batch, chains in self._together(fresh):
            try:
                self._hold(batch.granules, batch.products[0].index)
            except Fault:
                for product in batch.products:
                    self._hold_alone(product)
                raise
            group = self._uncommitted
            group.held.append(batch.granules)
            group.products += len(batch.products)
            group.chains.update(chains)
            at_once = self._host.schedule_products(self._warp.index, batch.widths)
            for part, chain in zip(batch.parts, chains, strict=True):
                chain.pending.append(Run(part, tuple(sources[number] for number in part.numbers)))
                count = max((at + 1 for at, number in enumerate(part.numbers) if at_once[number]), default=0)
                if count:
                    self._execute(chain, count)

    def _together(self, fresh: list[tuple[Batch, list[Chain]]]) -> list[tuple[Batch, list[Chain]]]:
        """Several batches as one."""
        if len(fresh) < 2:
            return fresh
        products = tuple(product for batch, _ in fresh for product in batch.products)
        batch = self._host.tiles.batches.get(products)
        if batch is None:
            batch = self._host.tiles.batches[products] = make_batch(list(products), self._host.tiles)
        chains = {
            part.form.registers: chain for each, kept in fresh for part, chain in zip(each.parts, kept, strict=True)
        }
        return [(batch, [chains[part.form.registers] for part in batch.parts])]

    def _hold_alone(self, product: Product) -> None:
        """As of several, so that a fault names the product."""
        try:
            self._hold(product.tile.granules, product.index)
        except Fault as fault:
            raise fault.at(Where(product.form.instruction, self._warp.cta.index, self._warp.index, "0-31")) from None

    def _hold(self, granules: Array, index: int) -> None:
        """A wgmma reads shared memory by the asynchronous proxy; its group counts on the warp's own unit."""
        shared, thread = self._warp.cta.shared, self._warp.thread
        shared.begin_read(granules, "wgmma")
        if thread is None:
            return
        clocks = thread.clocks
        if self._slot < 0:
            self._slot = clocks.add_unit(self._warp.cta.index)
        if not self._access:
            self._access = clocks.begin(thread.at(index, None), "wgmma", self._slot, self._committed + 1)
        clocks.begin_read(thread, self._access, clocks.shadow(shared), granules)

    def _check_registers(self, form: WgmmaForm, R: list[Any]) -> None:
        """A new accumulator held its values at the last `wgmma.fence` (PTX ISA 9.7.15.7.1), or a source of a move did.

        A constant passes: the compiler moves it behind the fence, and the assembler then adds a fence of its own.
        """
        fenced = self._fenced
        if not form.accumulate or all(R[index] is fenced.get(index) for index in form.registers):
            return
        there = {id(value) for value in (*fenced.values(), *self._host.constants)}
        for number, index in enumerate(form.registers):
            value = R[index]
            if id(value) not in there and id(value.base) not in there:
                raise Fault(
                    "race",
                    f"accumulator register {number} was written, and no wgmma.fence follows before this reads it",
                )

    def _chain(self, form: WgmmaForm, R: list[Any]) -> Chain:
        chain = self._chains.get(form.registers)
        if chain is None:
            if self._warp.thread is not None:
                self._check_registers(form, R)
            stacked = np.stack([R[index] for index in form.registers]).view(_REGISTER_TYPES[form.kind.sum_type])
            token = InFlight(f"`{form.instruction.opcode}` at {form.instruction.place}")
            types = tuple(R[index].dtype for index in form.registers)
            chain = Chain(form, _to_matrix(stacked, form.kind.sum_type), token, types)
            self._chains[form.registers] = chain
            for index in form.registers:
                R[index] = token
        return chain

    def _execute(self, chain: Chain, count: int = -1) -> None:
        """Add all that is pending of an accumulator in its order; of the newest run, so many products (-1: all)."""
        newest = len(chain.pending) - 1
        for number, run in enumerate(chain.pending):
            last = count if number == newest and count >= 0 else run.count
            chain.sums = run.add(self._host, self._warp.cta.shared, last, chain.sums)
        newest_run = chain.pending[-1]
        chain.pending = [newest_run] if newest_run.done < newest_run.count else []

    def commit(self) -> None:
        """`wgmma.commit_group`."""
        self.flush()
        self._groups.append(self._uncommitted)
        self._committed += 1
        self._access = 0
        self._uncommitted = Group()

    def wait(self, pending_groups: int, R: list[Any]) -> None:
        """`wgmma.wait_group`: all but the newest groups are complete, and free what they held."""
        while len(self._groups) > pending_groups:
            group = self._groups.pop(0)
            for chain in group.chains:
                if chain.pending:
                    self._execute(chain)
            for granules in group.held:
                self._warp.cta.shared.end_read(granules)
            for index, value in group.sources:
                if R[index] is not value:
                    raise Fault("pending-read", "a register of A was written while its wgmma was in flight")
        if self._warp.thread is not None and self._slot >= 0:
            self._warp.thread.learn(self._slot, self._committed - len(self._groups))
        live = {chain for group in (*self._groups, self._uncommitted) for chain in group.chains}
        for key, chain in list(self._chains.items()):
            if chain not in live:
                self._write_back(chain, R)
                del self._chains[key]

    def _write_back(self, chain: Chain, R: list[Any]) -> None:
        written = _to_registers(chain.sums)
        for index, kind, values in zip(chain.form.registers, chain.types, written, strict=True):
            values = values if values.dtype == kind else values.view(kind)
            if R[index] is not chain.token:
                raise Fault("pending-write", "an accumulator register was written while its wgmma was in flight")
            R[index] = values
            self._fenced[index] = values


def _to_matrix(registers: Array, kind: str) -> Array:
    """`[n / 2, 32]` registers -> `[16, n]` rows of the warp; of f16, `[n / 4, 32]` of pairs.

    Register i of lane l holds row l / 4 + 8 ((i >> 1) & 1), column 8 (i >> 2) + 2 (l % 4) + (i & 1) (PTX ISA
    9.7.15.5.1); a pair is two that follow each other.
    """
    count = registers.shape[0]
    if kind == "f2":
        pairs = np.ascontiguousarray(registers)[:, :, None].view(kind).reshape(count // 2, 2, 8, 4, 2)
        return np.ascontiguousarray(pairs.transpose(1, 2, 0, 3, 4)).reshape(16, count * 4)
    cube = registers.reshape(count // 4, 2, 2, 8, 4)
    return np.ascontiguousarray(cube.transpose(1, 3, 0, 4, 2)).reshape(16, count * 2)


def _to_registers(matrix: Array) -> Array:
    """The inverse of `_to_matrix`."""
    n = matrix.shape[1]
    cube = matrix.reshape(2, 8, n // 8, 4, 2)
    if matrix.dtype.itemsize == 2:
        pairs = np.ascontiguousarray(cube.transpose(2, 0, 1, 3, 4)).reshape(n // 4, 64)
        return pairs.view("u4")
    return np.ascontiguousarray(cube.transpose(2, 0, 4, 1, 3)).reshape(n // 2, 32)

"""The machine: ready warps, pending operations, and the step in which the adversary chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault, Where
from cakegen.emulator.machine import reports, synchronise
from cakegen.emulator.machine.adversary import Adversary, ReadyWarps
from cakegen.emulator.machine.convergence import are_together
from cakegen.emulator.machine.memory import PARAM_WINDOW, SHARED_START, GlobalMemory
from cakegen.emulator.machine.module_memory import place_variables
from cakegen.emulator.machine.residency import LaunchShape, Prerequisite, Residency
from cakegen.emulator.machine.warp import Strand, Warp
from cakegen.emulator.order.access_order import AccessOrder
from cakegen.emulator.text.forms.writer import BANK_TYPES
from cakegen.emulator.text.ptx import MALFORMED, Kernel, malformed
from cakegen.emulator.text.reach import EXIT
from cakegen.emulator.text.translate import Program
from cakegen.emulator.units.pending import Pending
from cakegen.emulator.units.product_chains import MultiplyAdd
from cakegen.emulator.units.tcgen05.issue import TensorUnit
from cakegen.emulator.units.tensor_core import multiply_add_hopper
from cakegen.emulator.units.tma.tensor_view import MapRecord, TensorView, view_tensor
from cakegen.emulator.units.wgmma.operands import TileTable
from cakegen.errors import EmulationError

Array = NDArray[Any]

_BLOCKS_A_TURN = 4096
# How often strands that poll look again where nothing else can happen: a loop that gives up sooner does so.
MOST_POLLS = 512
_NS_A_READ = 8
MAP_BYTES = 128


@dataclass(eq=False)
class Machine:
    """One launch of one program.

    Parameters
    ----------
    values
        Kernel arguments in the order of its parameters: a tensor map's record, an address or an integer, or the bytes
        of any other value.
    barrier_names
        Offset in dynamic shared memory -> name.
    multiply_add
        The tensor core's arithmetic.
    name
        What reports call the launch.
    instruction_limit
        Warp-instructions after which the launch counts as one that never ends.
    checks
        Whether the order of accesses is checked (races, proxies).
    strict_tensor_order
        Whether tcgen05 instructions are ordered only where PTX ISA 9.7.16.6 says so; else one thread's mmas are too.
    strict_scopes
        Whether a write needs scopes that hold both threads to come behind a read; else any arrival and wait will do.
    """

    program: Program
    memory: GlobalMemory
    shape: LaunchShape
    values: Sequence[MapRecord | int | bytes]
    adversary: Adversary = field(default_factory=Adversary)
    barrier_names: Mapping[int, str] = field(default_factory=dict)
    multiply_add: MultiplyAdd = multiply_add_hopper
    instruction_limit: int = 2_000_000_000
    checks: bool = True
    strict_tensor_order: bool = True
    strict_scopes: bool = False
    on_retire: Callable[[int, int], None] = lambda done, total: None
    name: str = ""

    def __post_init__(self) -> None:
        kernel = self.kernel
        self.grid, self.block, self.cluster = self.shape.grid, self.shape.block, self.shape.cluster
        self.shape.check(kernel.name, kernel.cluster)
        if len(self.values) != len(kernel.parameters):
            raise EmulationError(
                f"{kernel.name} has {len(kernel.parameters)} parameters; got {len(self.values)} values"
            )
        self.instructions_run = 0
        self.time_ns = 1
        self.ready: ReadyWarps[Warp] = ReadyWarps()
        self.pending: list[Pending] = []
        self.watched: dict[int, list[Strand]] = {}
        self._polls_left = MOST_POLLS
        self.elect_salt = self.adversary.elect_salt()
        self.tiles = TileTable()
        self.tensor = TensorUnit(self.strict_tensor_order)
        self._parameters: dict[tuple[int, str], Array] = {}
        self._views: dict[int, TensorView] = {}
        self._maps: dict[int, MapRecord] = {}
        self._block = self._pack_parameters()
        self._stops: dict[int, synchronise.Stop] = {}
        self._converging = self.program.converging
        self._fresh = [np.full(32, 0xA5A5A5A5, "u4").astype(BANK_TYPES[bank]) for bank in kernel.banks]
        self._lay_out_shared()
        self.variables = place_variables(kernel, self.memory)
        self.clocks = self._watch_memory() if self.checks else None
        self.prerequisite = Prerequisite()
        limit = self.adversary.residency(self.shape.clusters, self.shape.cooperative)
        self.residency = Residency(self, limit)

    @property
    def kernel(self) -> Kernel:
        """The kernel's records."""
        return self.program.kernel

    @property
    def accumulators(self) -> tuple[int, ...]:
        """Registers that hold sums of wgmmas, and those that are moved into them."""
        return self.program.accumulators

    @property
    def constants(self) -> Sequence[Array]:
        """What the translated blocks hold as constants."""
        return self.program.writer.constants

    def fresh_registers(self) -> list[Any]:
        """A warp's registers at its start: poison."""
        return list(self._fresh)

    def _lay_out_shared(self) -> None:
        end, self.shared_symbols, dynamic = SHARED_START, {}, []
        for variable in self.kernel.shared:
            end = -(-end // variable.align) * variable.align
            if variable.num_bytes:
                self.shared_symbols[variable.name] = end
                end += variable.num_bytes
            else:
                dynamic.append(variable)
        for variable in dynamic:
            end = -(-end // variable.align) * variable.align
            self.shared_symbols[variable.name] = end
        self.dynamic_start = end
        self.shared_end = end + self.shape.dynamic_smem_bytes

    def _watch_memory(self) -> AccessOrder:
        # Each launch has clocks of its own: it sees all that was complete before it started, or behind its
        # `griddepcontrol.wait`; what launches side by side may touch of each other is `overlap`'s to check.
        clocks = AccessOrder(self.kernel.instructions, self.strict_scopes)
        for buffer in self.memory.buffers:
            if not buffer.read_only:
                clocks.watch(buffer, buffer.num_bytes, buffer.place)
        return clocks

    def _pack_parameters(self) -> bytes:
        block = bytearray()
        for parameter, value in zip(self.kernel.parameters, self.values, strict=True):
            block.extend(bytes(parameter.offset - len(block)))
            size = parameter.num_bytes
            if isinstance(value, int):
                value = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
            elif not isinstance(value, bytes):
                self._maps[parameter.offset] = value
                value = bytes(MAP_BYTES)
            if len(value) != size:
                raise EmulationError(
                    f"{self.kernel.name}: parameter {parameter.name} has {size} bytes; its value has {len(value)}"
                )
            block.extend(value)
        return bytes(block)

    def parameter(self, offset: int, kind: str) -> Array:
        """A kernel parameter as 32 equal lanes."""
        key = (offset, kind)
        if key not in self._parameters:
            end = offset + int(kind[1])
            if end > len(self._block) or any(at < end and offset < at + MAP_BYTES for at in self._maps):
                raise EmulationError(
                    f"parameter byte {offset} is read as a number; it is a tensor map, or none is there"
                )
            self._parameters[key] = np.repeat(np.frombuffer(self._block[offset:end], kind), 32)
        return self._parameters[key]

    def tensor_view(self, offset: int) -> TensorView:
        """The tensor map at an offset of the parameter block."""
        if offset not in self._views:
            record = self._maps.get(offset)
            if record is None:
                where = f"parameter byte {offset}" if offset >= 0 else f"generic address {offset + PARAM_WINDOW:#x}"
                raise Fault("descriptor", f"{where} is no tensor map of the kernel's parameters (cvta.param)")
            self._views[offset] = view_tensor(record, self.memory)
        return self._views[offset]

    def read_clock(self) -> int:
        """Modelled time in ns."""
        self.time_ns += _NS_A_READ
        return self.time_ns

    def issue(self, operation: Pending) -> None:
        """Something asynchronous begins; the adversary says when it happens."""
        if self.adversary.at_issue:
            self.land(operation)
        else:
            self.pending.append(operation)

    def land(self, operation: Pending) -> None:
        """Something that was issued happens."""
        operation.complete()

    def schedule_products(self, warp: int, widths: Sequence[int]) -> list[bool]:
        """wgmmas of so many columns were issued; which read their operands at once."""
        return self.adversary.products_at_issue(len(widths))

    def note_tensor_work(self, name: str, columns: int) -> None:
        """Something was issued to a CTA's tensor core: for machines that look on."""

    def wake(self, waiters: list[Strand]) -> None:
        """Let parked strands try again."""
        for strand in waiters:
            strand.waits_for = None
            self.make_ready(strand.warp)
        waiters.clear()

    def touch(self, addresses: Array) -> None:
        """Global words were written: wake who polls them."""
        for address in {int(address) & ~7 for address in addresses} & set(self.watched):
            self.wake(self.watched.pop(address))
            self._polls_left = MOST_POLLS

    def make_ready(self, warp: Warp) -> None:
        """Queue a warp, unless it is."""
        if not warp.queued and not warp.done:
            warp.queued = True
            self.ready.enter(warp)

    def run(self) -> None:
        """Run the launch alone, to its end.

        Raises
        ------
        Fault
            The program did something undefined, or can't go on.
        EmulationError
            It uses something that is not modelled.
        """
        with np.errstate(all="ignore"):
            while not self.ended:
                if not self.can_step() and not self.poll_again():
                    raise reports.deadlock([self])
                self.step()

    @property
    def ended(self) -> bool:
        """Every CTA has exited, and what was on its way then has arrived."""
        return not self.pending and self.residency.ended

    def can_step(self) -> bool:
        """Whether a warp can go on, or something that was issued can happen."""
        self.residency.fill()
        return bool(self.ready or self.pending)

    def poll_again(self) -> bool:
        """Let strands that wait for the change of a word look once more: a loop may count its polls, and give up.

        For a stream in which nothing can happen. False: nobody polls, or they have looked `MOST_POLLS` times since
        such a word was written.
        """
        if not self.watched or not self._polls_left:
            return False
        self._polls_left -= 1
        for waiters in list(self.watched.values()):
            self.wake(waiters)
        self.watched.clear()
        return True

    def step(self) -> None:
        """Let the adversary choose one warp, or one operation that was issued; it must be there (`can_step`).

        Raises
        ------
        Fault, EmulationError
            As `run`.
        """
        self._step()
        self.residency.retire()

    def _step(self) -> None:
        lands, index = self.adversary.choose(self.ready, len(self.pending))
        if lands:
            self._land_in_place(self.pending.pop(index))
            return
        warp = self.ready[index]
        if not self._go_on(warp):
            # others may have become ready behind it
            self.ready.leave(index)
            self._set_aside(warp)

    def _land_in_place(self, operation: Pending) -> None:
        """Let something happen; a fault names who issued it."""
        try:
            self.land(operation)
        except Fault as fault:
            raise (fault.at(operation.where) if operation.where else fault) from None

    def _go_on(self, warp: Warp) -> bool:
        """Run one warp up to its next stop; whether it can go on then."""
        self._turn(warp)
        if self.instructions_run > self.instruction_limit:
            raise Fault("deadlock", f"the launch still runs after {self.instructions_run} warp-instructions")
        return self._runnable(warp) is not None

    def _set_aside(self, warp: Warp) -> None:
        """A warp that can't go on has left the queue: it waits, or has ended."""
        warp.queued = False
        if warp.done:
            self.residency.finish_warp(warp)
        elif all(strand.waits_for is None for strand in warp.strands):
            raise reports.divergence(warp, self.kernel)

    def _turn(self, warp: Warp) -> None:
        """Run one warp up to its next stop."""
        strand = self._runnable(warp)
        stops = self.program.stops
        for _ in range(_BLOCKS_A_TURN):
            if strand is None:
                return
            pc = strand.pc
            if pc in stops:
                self._stop(warp, strand, pc)
                return
            strand = self._run_block(warp, strand)

    def _run_block(self, warp: Warp, strand: Strand) -> Strand | None:
        """Run the block at a strand's place; returns who of the warp goes on."""
        pc = strand.pc
        divergent = not strand.whole
        block = self.program.blocks.get((pc, divergent)) or self.program.block(pc, divergent)
        self.instructions_run += block.count
        try:
            result = block.run(warp, warp.registers, strand.mask) if divergent else block.run(warp, warp.registers)
        except (Fault, EmulationError, *MALFORMED) as error:
            index = block.lines[reports.line_in_block(error) - 2]
            raise self._locate(error, warp, strand, index) from None
        if divergent or result == EXIT or isinstance(result, tuple):
            self._follow(warp, strand, result)
            return self._runnable(warp)
        # a whole warp has one strand, and nothing in a block parks it
        strand.pc = result
        return strand

    def _follow(self, warp: Warp, strand: Strand, result: Any) -> None:
        if isinstance(result, tuple):
            taken, target, otherwise = result
            rest = Strand(warp, strand.mask & ~taken, otherwise)
            strand.mask = strand.mask & taken
            strand.pc = target
            warp.strands.append(rest)
        else:
            strand.pc = result
        if strand.pc == EXIT or len(warp.strands) > 1:
            warp.strands = [each for each in warp.strands if each.pc != EXIT]

    def _stop(self, warp: Warp, strand: Strand, pc: int) -> None:
        self.instructions_run += 1
        stop = self._stops.get(pc)
        if stop is None:
            stop = self._stops[pc] = synchronise.decode_stop(self.kernel.instructions[pc])
        where = Where(stop.instruction, warp.cta.index, warp.index, strand.lanes())
        try:
            synchronise.execute(self, strand, stop, where)
        except (Fault, EmulationError, *MALFORMED) as error:
            raise self._locate(error, warp, strand, pc) from None

    def _locate(self, error: Exception, warp: Warp, strand: Strand, index: int) -> EmulationError:
        where = Where(self.kernel.instructions[index], warp.cta.index, warp.index, strand.lanes())
        if isinstance(error, Fault):
            return error.at(where)
        if not isinstance(error, EmulationError):
            error = malformed(self.kernel.instructions[index], error)
        assert isinstance(error, EmulationError)
        return type(error)(f"{error}\n  at {where}")

    def _runnable(self, warp: Warp) -> Strand | None:
        """The strand that is furthest behind, of those that can go on."""
        strands = warp.strands
        if len(strands) == 1 and strands[0].waits_for is None and strands[0].whole:
            return strands[0]
        warp.merge()
        best = None
        for strand in warp.strands:
            if strand.waits_for is None and (best is None or strand.pc < best.pc) and self._is_whole(strand):
                best = strand
        return best

    def _is_whole(self, strand: Strand) -> bool:
        """Whether the lanes that an instruction wants are all there."""
        return strand.pc not in self._converging or are_together(strand, self.kernel.instructions[strand.pc])

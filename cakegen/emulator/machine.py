"""The machine: resident clusters, ready warps, pending operations, and the loop that lets the adversary choose.

Imports the rest of the package up to `synchronise`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator import reports, synchronise
from cakegen.emulator.adversary import Adversary
from cakegen.emulator.barriers import CountedBarrier
from cakegen.emulator.clocks import Clocks
from cakegen.emulator.copies import MapRecord, Pending, TensorView, view_tensor
from cakegen.emulator.expressions import BANK_TYPES
from cakegen.emulator.faults import Fault, Where
from cakegen.emulator.memory import SHARED_START, GlobalMemory, SharedMemory
from cakegen.emulator.ptx import Immediate, Kernel, Register
from cakegen.emulator.tcgen05 import check_tensor_exit
from cakegen.emulator.tcgen05_issue import TensorUnit
from cakegen.emulator.tensor_core import multiply_add_hopper
from cakegen.emulator.translate import EXIT, Program, needs_convergence
from cakegen.emulator.vector_clock import Position
from cakegen.emulator.warp import Cluster, Cta, Strand, Warp
from cakegen.emulator.wgmma import Product, TileTable, WgmmaUnit
from cakegen.errors import EmulationError

Array = NDArray[Any]
Triple = tuple[int, int, int]

_BLOCKS_A_TURN = 4096
_NS_A_READ = 8


@dataclass(frozen=True)
class LaunchShape:
    """Grid in CTAs, cluster, block, dynamic shared memory, and whether the whole grid is resident."""

    grid: Triple
    block: Triple
    cluster: Triple = (1, 1, 1)
    dynamic_smem_bytes: int = 0
    cooperative: bool = False


@dataclass(eq=False)
class Machine:
    """One launch of one program.

    Parameters
    ----------
    values
        Kernel arguments in the order of its parameters: a tensor map's record, an address, or an integer.
    barrier_names
        Offset in dynamic shared memory -> name.
    multiply_add
        The tensor core's arithmetic.
    instruction_limit
        Warp-instructions after which the launch counts as one that never ends.
    checks
        Whether the order of accesses is checked (races, proxies).
    strict_tensor_order
        Whether tcgen05 instructions are ordered only where PTX ISA 9.7.16.6 says so; else one thread's mmas are too.
    """

    program: Program
    memory: GlobalMemory
    shape: LaunchShape
    values: Sequence[MapRecord | int]
    adversary: Adversary = field(default_factory=Adversary)
    barrier_names: Mapping[int, str] = field(default_factory=dict)
    multiply_add: Callable[[Array, Array, Array], Array] = multiply_add_hopper
    instruction_limit: int = 2_000_000_000
    checks: bool = True
    strict_tensor_order: bool = True
    on_retire: Callable[[int, int], None] = lambda done, total: None

    def __post_init__(self) -> None:
        kernel = self.kernel
        self.grid, self.block, self.cluster = self.shape.grid, self.shape.block, self.shape.cluster
        if kernel.cluster is not None and kernel.cluster != self.cluster:
            raise EmulationError(f"{kernel.name}: text demands clusters of {kernel.cluster}, the launch {self.cluster}")
        if any(extent % size for extent, size in zip(self.grid, self.cluster, strict=True)):
            raise EmulationError(f"{kernel.name}: grid {self.grid} is not divisible by clusters of {self.cluster}")
        if len(self.values) != len(kernel.parameters):
            raise EmulationError(
                f"{kernel.name} has {len(kernel.parameters)} parameters; got {len(self.values)} values"
            )
        self.instructions_run = 0
        self.time_ns = 1
        self.ready: list[Warp] = []
        self.pending: list[Pending] = []
        self.resident: list[Cluster] = []
        self._unstarted: deque[int] = deque()
        self._ended: list[Cluster] = []
        self.watched: dict[int, list[Strand]] = {}
        self.elect_salt = self.adversary.elect_salt()
        self.tiles = TileTable()
        self.tensor = TensorUnit(self.strict_tensor_order)
        self._parameters: dict[tuple[int, str], Array] = {}
        self._views: dict[int, TensorView] = {}
        self._by_offset = {p.offset: v for p, v in zip(kernel.parameters, self.values, strict=True)}
        self._converging = frozenset(i for i, each in enumerate(kernel.instructions) if needs_convergence(each))
        self._fresh = [np.full(32, 0xA5A5A5A5, "u4").astype(BANK_TYPES[bank]) for bank in kernel.banks]
        self._lay_out_shared()
        self.clocks = self._watch_memory() if self.checks else None

    @property
    def kernel(self) -> Kernel:
        """The kernel's records."""
        return self.program.kernel

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

    def _watch_memory(self) -> Clocks:
        # Launches run one after another, and one sees all of what came before: each starts with new clocks. Launches
        # that overlap share theirs; `griddepcontrol.wait` then joins what all warps of the earlier one knew at its end.
        clocks = Clocks(self.kernel.instructions)
        for buffer in self.memory.buffers:
            if not buffer.read_only:
                clocks.watch(buffer, buffer.num_bytes, buffer.place, is_global=True)
        return clocks

    # ---- what instructions ask for ----

    def parameter(self, offset: int, kind: str) -> Array:
        """A kernel parameter as 32 equal lanes."""
        key = (offset, kind)
        if key not in self._parameters:
            value = self._by_offset.get(offset)
            if not isinstance(value, int):
                raise EmulationError(f"parameter byte {offset} is read as a number; it is {value}")
            bits = value & ((1 << 8 * int(kind[1])) - 1)
            self._parameters[key] = np.full(32, bits, f"u{kind[1]}").view(kind)
        return self._parameters[key]

    def tensor_view(self, offset: int) -> TensorView:
        """The tensor map at an offset of the parameter block."""
        if offset not in self._views:
            record = self._by_offset.get(offset)
            if record is None or isinstance(record, int):
                raise Fault("descriptor", f"parameter byte {offset} is no tensor map")
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

    def schedule_product(self, unit: WgmmaUnit, product: Product) -> None:
        """A wgmma was issued."""
        if self.adversary.product_at_issue():
            unit.execute(product)

    def wake(self, waiters: list[Strand]) -> None:
        """Let parked strands try again."""
        for strand in waiters:
            strand.waits_for = None
            self._make_ready(strand.warp)
        waiters.clear()

    def touch(self, addresses: Array) -> None:
        """Global words were written: wake who polls them."""
        for address in {int(address) & ~7 for address in addresses} & set(self.watched):
            self.wake(self.watched.pop(address))

    def _make_ready(self, warp: Warp) -> None:
        if not warp.queued and not warp.done:
            warp.queued = True
            self.ready.append(warp)

    # ---- the loop ----

    def run(self) -> None:
        """Run the launch to its end.

        Raises
        ------
        Fault
            The program did something undefined, or can't go on.
        EmulationError
            It uses something that is not modelled.
        """
        with np.errstate(all="ignore"):
            self._admit_and_run()

    def _admit_and_run(self) -> None:
        total = int(np.prod(self.grid)) // int(np.prod(self.cluster))
        limit = self.adversary.residency(total, self.shape.cooperative)
        self._unstarted = deque(range(total))
        retired = 0
        while self._unstarted or self.resident:
            while self._unstarted and len(self.resident) < limit:
                self._admit(self._unstarted.popleft())
            self._step()
            while self._ended:
                self.resident.remove(self._ended.pop())
                retired += 1
                self.on_retire(retired, total)

    @property
    def waiting(self) -> int:
        """Clusters that have not started."""
        return len(self._unstarted)

    def cancel_cluster(self) -> Triple | None:
        """The first CTA of a cluster that will not start, since somebody else does its work; None: refused.

        A cooperative grid starts as a whole, so that nothing is left to cancel.
        """
        if not self._unstarted or self.adversary.refuses_cancel():
            return None
        return self._corner(self._unstarted.popleft())

    def _step(self) -> None:
        if not self.ready and not self.pending:
            raise reports.deadlock(self)
        lands, index = self.adversary.choose(self.ready, len(self.pending))
        if lands:
            operation = self.pending.pop(index)
            try:
                self.land(operation)
            except Fault as fault:
                raise (fault.at(operation.where) if operation.where else fault) from None
            return
        warp = self.ready[index]
        self._turn(warp)
        if self.instructions_run > self.instruction_limit:
            raise Fault("deadlock", f"the launch still runs after {self.instructions_run} warp-instructions")
        if self._runnable(warp) is None:
            # others may have become ready behind it
            self.ready[index] = self.ready[-1]
            self.ready.pop()
            warp.queued = False
            if warp.done:
                self._finish_warp(warp)
            elif all(strand.waits_for is None for strand in warp.strands):
                raise reports.divergence(warp, self.kernel)

    def _turn(self, warp: Warp) -> None:
        """Run one warp up to its next stop."""
        for _ in range(_BLOCKS_A_TURN):
            strand = self._runnable(warp)
            if strand is None:
                return
            pc = strand.pc
            if pc in self.program.stops:
                self._stop(warp, strand, pc)
                return
            divergent = not strand.whole
            block = self.program.block(pc, divergent)
            self.instructions_run += block.count
            try:
                result = block.run(warp, warp.registers, strand.mask) if divergent else block.run(warp, warp.registers)
            except (Fault, EmulationError) as error:
                index = block.lines[reports.line_in_block(error) - 2]
                raise self._locate(error, warp, strand, index) from None
            self._follow(warp, strand, result)

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
        instruction = self.kernel.instructions[pc]
        where = Where(instruction, warp.cta.index, warp.index, strand.lanes())
        try:
            synchronise.execute(self, strand, instruction, where)
        except (Fault, EmulationError) as error:
            raise self._locate(error, warp, strand, pc) from None

    def _locate(self, error: EmulationError, warp: Warp, strand: Strand, index: int) -> EmulationError:
        where = Where(self.kernel.instructions[index], warp.cta.index, warp.index, strand.lanes())
        return error.at(where) if isinstance(error, Fault) else EmulationError(f"{error}\n  at {where}")

    def _runnable(self, warp: Warp) -> Strand | None:
        """The strand that is furthest behind, of those that can go on."""
        strands = warp.strands
        if len(strands) == 1 and strands[0].waits_for is None and strands[0].whole:
            return strands[0]
        warp.merge()
        best = None
        for strand in warp.strands:
            if strand.waits_for is None and (best is None or strand.pc < best.pc) and self._together(strand):
                best = strand
        return best

    def _together(self, strand: Strand) -> bool:
        """Whether the lanes that an instruction wants are all there."""
        if strand.pc not in self._converging:
            return True
        wanted = strand.warp.live_lanes()
        instruction = self.kernel.instructions[strand.pc]
        if "aligned" not in instruction.parts and instruction.root != "barrier" and instruction.operands:
            members = instruction.operands[-1]
            if instruction.root in ("shfl", "vote", "elect") or instruction.parts[1:2] == ("warp",):
                wanted = wanted & self._member_lanes(members, strand)
        return not (wanted & ~strand.mask).any()

    def _member_lanes(self, operand: Any, strand: Strand) -> Array:
        value = operand.value if isinstance(operand, Immediate) else 0xFFFFFFFF
        if isinstance(operand, Register):
            value = int(strand.warp.registers[operand.index][strand.mask][0])
        return (value >> np.arange(32) & 1).astype(np.bool_)

    # ---- clusters come and go ----

    def _corner(self, number: int) -> Triple:
        """Coordinates of a cluster's first CTA."""
        cx, cy, cz = self.cluster
        nx, ny = self.grid[0] // cx, self.grid[1] // cy
        return number % nx * cx, number // nx % ny * cy, number // (nx * ny) * cz

    def _admit(self, number: int) -> None:
        cluster = Cluster()
        cx, cy, cz = self.cluster
        corner = self._corner(number)
        threads = int(np.prod(self.block))
        for rank in range(cx * cy * cz):
            inside = (rank % cx, rank // cx % cy, rank // (cx * cy))
            x, y, z = (c + i for c, i in zip(corner, inside, strict=True))
            index = x + self.grid[0] * (y + self.grid[1] * z)
            shared = SharedMemory(rank, self.shared_end)
            cta = Cta(index, (x, y, z), inside, cluster, shared, self, Position(index, number))
            cluster.ctas.append(cta)
            for warp in range(-(-threads // 32)):
                mask = np.arange(32) < threads - 32 * warp
                cta.warps.append(Warp(self, cta, warp, list(self._fresh), mask))
        self.resident.append(cluster)
        if self.clocks is not None:
            self._admit_threads(self.clocks, cluster)
        for cta in cluster.ctas:
            for each in cta.warps:
                self._make_ready(each)

    def _admit_threads(self, clocks: Clocks, cluster: Cluster) -> None:
        positions = [cta.position for cta in cluster.ctas]
        for cta, threads in zip(cluster.ctas, clocks.admit(positions, len(cluster.ctas[0].warps)), strict=True):
            clocks.watch(cta.shared, cta.shared.num_bytes, cta.place, is_global=False)
            for warp, thread in zip(cta.warps, threads, strict=True):
                warp.thread = thread

    def _finish_warp(self, warp: Warp) -> None:
        if warp.wgmma.in_flight:
            raise Fault("exit", f"CTA {warp.cta.index} warp {warp.index} exits with wgmmas that nothing waited for")
        if warp.tensor.loads or warp.tensor.stores:
            raise Fault("exit", f"CTA {warp.cta.index} warp {warp.index} exits with tcgen05.ld or st not waited for")
        cta = warp.cta
        for barrier in cta.named.values():
            self._recount(barrier, cta.live_warps())
        self._recount(cta.cluster.barrier, cta.cluster.live_warps())
        if not cta.live_warps():
            reports.check_exit(self, cta)
            check_tensor_exit(self, cta)
            cta.shared.exited = True
        if not cta.cluster.live_warps():
            self._ended.append(cta.cluster)

    def _recount(self, barrier: CountedBarrier, live: list[Warp]) -> None:
        """A barrier of all threads waits for those that have not exited."""
        if barrier.complete_if_all(live):
            synchronise.pass_barrier(self, barrier)

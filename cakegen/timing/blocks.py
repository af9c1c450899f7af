"""What a basic block takes one warp: instructions in their order, each when its operands are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cakegen.emulator.text.block import Block
from cakegen.emulator.text.operand_text import registers_in
from cakegen.emulator.text.ptx import Instruction
from cakegen.timing.figures import DeviceFigures

# Instructions of PTX that the machine's code has none of: names of values, and addresses of windows.
_FREE = {"cvta", "mapa", "ret", "exit"}
_SPECIAL = {"ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh", "div", "rem"}
# Machine instructions of one PTX instruction where it is not one; a division is a subroutine.
_SEVERAL = {"div": 12, "rem": 12, "sqrt": 6}
_STORES = {"st", "stmatrix", "red"}


@dataclass(frozen=True)
class OpenLoad:
    """A load that the block does not use: cycles from the block's start to its value, and whether memory is global."""

    at: float
    is_global: bool


@dataclass(frozen=True)
class BlockCost:
    """Cycles of one warp on one block, alone on its scheduler.

    Parameters
    ----------
    issues
        Instructions that a scheduler issues.
    hit, miss
        From start to end where the L2 serves its global loads, and where HBM serves them.
    behind_wait
        Of these, what follows the last `wgmma.wait_group`; all of it where there is none.
    waits
        Whether there is one.
    uses
        Register that was written before the block -> cycles from its start to the first use.
    open_loads
        Register -> the load whose value it gets and that the block does not use.
    gpu_fences
        Fences at the scope of the GPU.
    """

    issues: float
    hit: float
    miss: float
    behind_wait: float
    waits: bool
    uses: dict[int, float]
    open_loads: dict[int, OpenLoad]
    gpu_fences: int


@dataclass
class _Clock:
    """In-order issue: a cycle an instruction, later where an operand is not there yet."""

    figures: DeviceFigures
    global_latency: float
    now: float = 0.0
    wait_at: float = -1.0
    issues: float = 0.0
    gpu_fences: int = 0
    ready: dict[int, float] = field(default_factory=dict)
    loads: dict[int, bool] = field(default_factory=dict)
    uses: dict[int, float] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)

    def run(self, instruction: Instruction) -> None:
        root, parts = instruction.root, instruction.parts
        targets, sources = _operands(instruction)
        for index in sources:
            if index not in self.written:
                self.uses.setdefault(index, self.now)
            self.now = max(self.now, self.ready.get(index, 0.0))
            self.loads.pop(index, None)
        free = root in _FREE or (root == "mov" and bool(sources) and not instruction.guard)
        count = 0 if free else _SEVERAL.get(root, 1)
        self.now += count / self.figures.issue_rate.value
        self.issues += count
        if parts[:2] == ("wgmma", "wait_group"):
            self.wait_at = self.now
        if root == "fence" and {"gpu", "sys"} & set(parts):
            self.gpu_fences += 1
        if root == "bra":
            self.now += self.figures.branch_latency.value
        latency = 0.0 if free else self._latency(root, parts)
        for index in targets:
            self.written.add(index)
            self.ready[index] = self.now + latency
            self.loads.pop(index, None)
            if root == "ld" and "param" not in parts:
                self.loads[index] = "global" in parts

    def _latency(self, root: str, parts: Sequence[str]) -> float:
        figures = self.figures
        if root == "ld":
            if "param" in parts:
                return figures.alu_latency.value
            return self.global_latency if "global" in parts else figures.shared_latency.value
        if root in ("shfl", "vote", "redux", "match"):
            return figures.shuffle_latency.value
        if root in ("ldmatrix", "atom"):
            return figures.shared_latency.value
        if root in _SPECIAL:
            return figures.special_latency.value * (2 if root in _SEVERAL else 1)
        return figures.alu_latency.value


def cost_of(block: Block, instructions: Sequence[Instruction], figures: DeviceFigures) -> BlockCost:
    """The cost of a block of a kernel."""
    clock = figures.clock.value
    hit = _walk(block, instructions, _Clock(figures, figures.load_l2_latency.value * clock))
    miss = _walk(block, instructions, _Clock(figures, figures.load_latency.value * clock))
    behind = hit.now - hit.wait_at if hit.wait_at >= 0 else hit.now
    open_loads = {index: OpenLoad(miss.ready[index], is_global) for index, is_global in miss.loads.items()}
    return BlockCost(hit.issues, hit.now, miss.now, behind, hit.wait_at >= 0, hit.uses, open_loads, hit.gpu_fences)


def _walk(block: Block, instructions: Sequence[Instruction], clock: _Clock) -> _Clock:
    last = -1
    for index, _ in block.written:
        # an instruction may have several lines
        if index != last:
            clock.run(instructions[index])
        last = index
    return clock


def _operands(instruction: Instruction) -> tuple[list[int], list[int]]:
    """(registers that it writes, registers that it reads)."""
    operands = instruction.operands
    stores = instruction.root in _STORES or instruction.root in ("bra", "wgmma", "prefetch", "fence", "membar")
    targets = [] if stores else list(registers_in(operands[:1]))
    sources = list(registers_in(operands if stores else operands[1:]))
    if instruction.root == "wgmma":
        # its accumulators are the tensor core's until the wait
        sources = []
    if instruction.guard is not None:
        sources.append(instruction.guard.index)
    return targets, sources

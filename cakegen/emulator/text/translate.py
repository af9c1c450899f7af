"""Kernel -> one Python function a basic block.

A block's function takes a warp, its registers and, in the divergent variant, the active lanes; it returns the next
instruction's index, or a split. Blocks end at branches, at labels, and before a *stop*: an instruction through which
warps meet, which `synchronise` executes and at which the adversary may choose another warp.

One line of a function is one instruction, so that a traceback's line says where a fault lies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cakegen.emulator.machine import collectives, lane_ops, own_memory
from cakegen.emulator.order.fences import decode_fence
from cakegen.emulator.text.block import Block
from cakegen.emulator.text.expressions import ExpressionWriter, environment
from cakegen.emulator.text.forms.accesses import load, store
from cakegen.emulator.text.forms.collectives import COLLECTIVES
from cakegen.emulator.text.forms.writer import TYPES
from cakegen.emulator.text.issue_runs import issue_later, issue_together
from cakegen.emulator.text.memo import MemoWriter
from cakegen.emulator.text.ptx import (
    MALFORMED,
    Instruction,
    Kernel,
    Label,
    Pair,
    Register,
    Symbol,
    Vector,
    malformed,
)
from cakegen.emulator.text.reach import EXIT, followers, require_an_end
from cakegen.emulator.text.stops import is_stop, needs_convergence
from cakegen.emulator.units.launch_control import query_text
from cakegen.emulator.units.warp_matrix.mma import decode_mma
from cakegen.emulator.units.warp_matrix.moves import decode_load, decode_move, decode_store
from cakegen.emulator.units.wgmma.batch import IssueRun
from cakegen.emulator.units.wgmma.form import decode_wgmma
from cakegen.errors import EmulationError, PtxError

# No effect here: hints and register counts.
_NO_EFFECT = {"setmaxnreg", "nanosleep", "prefetch", "prefetchu", "discard", "applypriority", "pmevent"}
_LINES = COLLECTIVES | {"ld": load, "st": store}


# What is decoded once, to be called with a warp and its active lanes; an instruction may need its own index.
_DECODED: dict[str, Callable[[Instruction, int], Callable[..., None]]] = {
    "fence": lambda instruction, _: decode_fence(instruction),
    "membar": lambda instruction, _: decode_fence(instruction),
    "ldmatrix": decode_load,
    "stmatrix": decode_store,
    "movmatrix": decode_move,
    "mma": decode_mma,
}


@dataclass(eq=False)
class Program:
    """A kernel with its blocks, translated when they are first reached; shared by all warps and launches."""

    kernel: Kernel
    writer: ExpressionWriter = field(init=False)
    blocks: dict[tuple[int, bool], Block] = field(init=False, default_factory=dict)
    scope: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.writer = ExpressionWriter(self.kernel)
        names = environment()
        for module in (lane_ops, collectives, own_memory):
            names |= module.environment()
        self.scope = names | {"K": self.writer.constants, "I": {}, "M": []}

    @functools.cached_property
    def memos(self) -> MemoWriter:
        """Who puts memos into blocks."""
        return MemoWriter(self.kernel, self.accumulators, self.scope["M"])

    @functools.cached_property
    def stops(self) -> frozenset[int]:
        """Instructions at which a block ends and `synchronise` takes over."""
        return frozenset(i for i, each in enumerate(self.kernel.instructions) if is_stop(each))

    @functools.cached_property
    def converging(self) -> frozenset[int]:
        """Instructions that want all lanes of the warp, or of their member mask."""
        return frozenset(i for i, each in enumerate(self.kernel.instructions) if needs_convergence(each))

    @functools.cached_property
    def accumulators(self) -> tuple[int, ...]:
        """Registers that hold sums of wgmmas, and those that are moved into them."""
        instructions = self.kernel.instructions
        forms = [decode_wgmma(each) for each in instructions if each.parts[:2] == ("wgmma", "mma_async")]
        held = {index for form in forms for index in form.registers}
        for each in instructions:
            if each.root == "mov" and len(each.operands) == 2:
                target, source = each.operands
                if isinstance(target, Register) and isinstance(source, Register) and target.index in held:
                    held.add(source.index)
        return tuple(sorted(held))

    def block(self, start: int, divergent: bool) -> Block:
        """The block that starts at an instruction."""
        key = (start, divergent)
        if key not in self.blocks:
            self.blocks[key] = _BlockWriter(self, start, divergent).write()
        return self.blocks[key]

    def translate_all(self) -> None:
        """Translate every block that control can reach: finds unknown forms, and a kernel without an end."""
        starts, after = [0], dict[int, tuple[int, ...]]()
        while starts:
            start = starts.pop()
            if start not in after:
                last = start if start in self.stops else self.block(start, False).written[-1][0]
                after[start] = followers(self.kernel.instructions[last], last)
                starts.extend(each for each in after[start] if each != EXIT)
        require_an_end(self.kernel, after)


class _BlockWriter:
    def __init__(self, program: Program, start: int, divergent: bool) -> None:
        self._program = program
        self._kernel = program.kernel
        self._writer = program.writer
        self._start = start
        self._divergent = divergent
        self._text: list[str] = []
        self._lines: list[int] = []
        # whether a wgmma was written whose read of its operands is still to come (`WgmmaUnit.flush`)
        self._flush = False

    def write(self) -> Block:
        index = self._start
        instructions = self._kernel.instructions
        count = 0
        while True:
            if index != self._start and self._ends_before(index):
                self._line(index - 1, f"return {index}")
                break
            if index >= len(instructions):
                last = f"{instructions[-1].place}: " if instructions else ""
                raise PtxError(
                    f"{last}{self._kernel.name}: control runs past the last instruction; end with ret or exit"
                )
            count += 1
            instruction = instructions[index]
            if self._write_one(index, instruction):
                break
            index += 1
        lines = issue_later(list(zip(self._lines, self._text, strict=True)), self._kernel)
        lines = issue_together(lines, self._program.scope["I"])
        name = f"<{self._kernel.name} block {self._start}>"
        program = self._program
        return Block(name, count, lines, self._divergent, lambda: program.memos, program.scope)

    def _write_one(self, index: int, instruction: Instruction) -> bool:
        """Write an instruction; whether it ends the block. Here malformed text gets its line."""
        try:
            if self._control(index, instruction):
                return True
            self._plain(index, instruction)
        except MALFORMED as error:
            raise malformed(instruction, error) from None
        except EmulationError as error:
            if "PTX line" in str(error):
                raise
            raise type(error)(f"{instruction.place}: {error}") from None
        return False

    def _ends_before(self, index: int) -> bool:
        if index in self._kernel.labels or index in self._program.stops:
            return True
        at_end = index >= len(self._kernel.instructions)
        return not at_end and self._divergent and needs_convergence(self._kernel.instructions[index])

    def _line(self, index: int, text: str) -> None:
        is_return = text.startswith("return")
        if self._flush and (is_return or not self._touches_registers_only(self._kernel.instructions[index])):
            text = f"w.wgmma.flush(); {text}"
            self._flush = False
        self._text.append(text)
        self._lines.append(index)

    def _touches_registers_only(self, instruction: Instruction) -> bool:
        root = instruction.root
        is_product = instruction.parts[:2] == ("wgmma", "mma_async")
        return is_product or root == "mov" or root in _NO_EFFECT or self._writer.knows(root)

    def _control(self, index: int, instruction: Instruction) -> bool:
        """Write a branch or an exit; False for anything else."""
        root = instruction.root
        if root not in ("bra", "ret", "exit"):
            return False
        operand = instruction.operands[0] if instruction.operands else None
        target = operand.target if isinstance(operand, Label) else EXIT
        if instruction.guard is None:
            self._line(index, f"return {target}")
            return True
        condition = f"R[{instruction.guard.index}]"
        if instruction.guard_negated:
            condition = f"~{condition}"
        if self._divergent:
            self._line(index, f"return divergent_branch({condition}, m, {target}, {index + 1})")
        else:
            self._line(index, f"return branch({condition}, {target}, {index + 1})")
        return True

    def _plain(self, index: int, instruction: Instruction) -> None:
        root = instruction.root
        mask = self._mask(instruction)
        if root in _DECODED:
            self._program.scope["I"][index] = _DECODED[root](instruction, index)
            self._line(index, f"I[{index}](w, {mask})")
        elif root in _NO_EFFECT:
            self._line(index, "pass")
        elif root == "clusterlaunchcontrol":
            target, response = instruction.operands
            query = query_text(instruction, self._writer.read(response, "c16"), mask)
            if query is None:
                raise self._writer.refuse(instruction)
            items = target.items if isinstance(target, Vector) else (target,)
            self._line(index, self._writer.assign_all(items, *query, mask))
        elif root == "mov" and any(isinstance(operand, Vector) for operand in instruction.operands):
            self._line(index, self._pack_or_unpack(instruction, mask))
        elif self._writer.knows(root):
            self._line(index, self._result(instruction, mask))
        elif root in _LINES:
            self._line(index, _LINES[root](self._writer, instruction, mask, index))
        elif root == "call":
            self._line(index, self._assert_failed(instruction, mask))
        elif root == "wgmma":
            self._line(index, self._wgmma(index, instruction, mask))
        else:
            raise self._writer.refuse(instruction)

    def _mask(self, instruction: Instruction) -> str:
        """The expression of the active lanes, `None` where all are."""
        if instruction.guard is None:
            return "m" if self._divergent else "None"
        guard = f"{'~' if instruction.guard_negated else ''}R[{instruction.guard.index}]"
        return f"({guard} & m)" if self._divergent else f"({guard})"

    def _result(self, instruction: Instruction, mask: str) -> str:
        """Arithmetic; where it has two results, both are computed before either is written."""
        text, kind = self._writer.value(instruction)
        target = instruction.operands[0]
        if not isinstance(target, Pair):
            return self._writer.assign(target, text, kind, mask)
        other, _ = self._writer.second_value(instruction)
        return self._writer.assign_all((target.first, target.second), f"({text}, {other})", kind, mask)

    def _pack_or_unpack(self, instruction: Instruction, mask: str) -> str:
        target, source = instruction.operands
        wide = instruction.parts[-1] == "b128"
        whole = "c16" if wide else TYPES[instruction.parts[-1]]
        vector = target if isinstance(target, Vector) else source
        assert isinstance(vector, Vector)
        part = f"u{int(whole[1:]) // len(vector.items)}"
        if isinstance(source, Vector):
            values = ", ".join(self._writer.read(item, part) for item in source.items)
            kind = whole if wide else f"u{whole[1]}"
            return self._writer.assign(target, f"pack([{values}], '{whole}')", kind, mask)
        text = f"unpack({self._writer.read(source, whole if wide else f'u{whole[1]}')}, '{part}')"
        return self._writer.assign_all(vector.items, text, part, mask)

    def _assert_failed(self, instruction: Instruction, mask: str) -> str:
        """The only call that is left in a body: `__assertfail`."""
        names = [operand.name for operand in instruction.operands if isinstance(operand, Symbol)]
        offsets = {each.name: each.offset for each in self._kernel.local}
        return f"assert_failed(w, {tuple(offsets[name] for name in names)}, {mask})"

    def _wgmma(self, index: int, instruction: Instruction, mask: str) -> str:
        """Of a whole warp, or under a guard that says the same in all lanes."""
        what, opcode = instruction.parts[1], instruction.opcode
        if self._divergent:
            return f"part_of_warp({opcode!r})"
        given = "" if instruction.guard is None else f"by_all({mask}, {opcode!r}) and "
        if what == "fence":
            return f"{given}w.wgmma.fence(R)"
        if what == "commit_group":
            return f"{given}w.wgmma.commit()"
        if what == "wait_group":
            (pending,) = instruction.operands
            return f"{given}w.wgmma.wait({getattr(pending, 'value', 0)}, R)"
        form = decode_wgmma(instruction)
        # one under a guard is a run of its own (`issue_runs`)
        self._program.scope["I"][index] = IssueRun(((form, index),)) if given else form
        self._flush = True
        return f"{given}w.wgmma.issue(I[{index}], R)"

"""Accesses moved in front of the wait before them.

An access that follows a wait in its basic block goes to the place where the wait begins, together with a copy of the
arithmetic between the two that its operands need. Registers are written once on each path in what NVRTC prints, so
that computing one of them twice changes nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

from cakegen.emulator.text.operand_text import registers_in
from cakegen.emulator.text.ptx import Instruction, Kernel, Label

Edit = tuple[int, int, str]

_WAITS = {("bar", "sync"), ("bar", "warp"), ("griddepcontrol", "wait"), ("wgmma", "wait_group"), ("barrier", "cluster")}
_ARITHMETIC = {"mov", "add", "sub", "mul", "mad", "div", "min", "max", "cvt", "cvta", "mapa"}
_ARITHMETIC |= {"shl", "shr", "and", "or", "xor", "not", "bfi", "selp", "setp"}


def hoists(kernel: Kernel, ptx: str) -> Iterator[tuple[str, Instruction, tuple[Edit, ...]]]:
    """(what was done, the access, the edits): of each kind of access the first one behind each wait."""
    instructions = kernel.instructions
    for index, instruction in enumerate(instructions):
        if _is_wait(instruction):
            yield from _behind(kernel, ptx, index, index + 1, index)
        elif instruction.root == "mbarrier" and instruction.parts[1] == "try_wait":
            head = max((label for label in kernel.labels if label <= index), default=0)
            if (leave := _loop_exit(kernel, index)) is not None:
                yield from _behind(kernel, ptx, head, leave, index)


def _is_wait(instruction: Instruction) -> bool:
    parts = instruction.parts
    return parts[:2] in _WAITS and "arrive" not in parts


def _loop_exit(kernel: Kernel, index: int) -> int | None:
    """Where a wait's loop goes on once it has succeeded: the target of the jump behind the test."""
    for number in range(index + 1, min(index + 6, len(kernel.instructions))):
        each = kernel.instructions[number]
        if each.root == "bra" and each.guard is not None:
            following = kernel.instructions[number + 1]
            if following.root == "bra" and following.guard is None and isinstance(following.operands[0], Label):
                return following.operands[0].target
            return number + 1
    return None


def _behind(
    kernel: Kernel, ptx: str, head: int, start: int, wait: int
) -> Iterator[tuple[str, Instruction, tuple[Edit, ...]]]:
    """Accesses of the block at `start` that can go in front of the instruction `head`."""
    seen: set[str] = set()
    for index in range(start, len(kernel.instructions)):
        instruction = kernel.instructions[index]
        if instruction.root in ("bra", "ret", "exit") or (index > start and index in kernel.labels):
            return
        kind = _access(instruction)
        if kind is None or kind in seen:
            continue
        seen.add(kind)
        needed = _slice(kernel, start, index)
        if needed is None:
            continue
        moved = [_text(ptx, each) for each in (*needed, instruction)]
        at = kernel.instructions[head].place.span[0]
        text = " ".join(f"{each};" for each in moved)
        what = f"{kind} in front of {'.'.join(kernel.instructions[wait].parts[:2])}"
        yield what, instruction, ((at, at, f"{text} "), (*instruction.place.span, ""))


def _access(instruction: Instruction) -> str | None:
    parts = instruction.parts
    if parts[0] in ("ld", "st", "stmatrix", "cp", "red", "atom", "wgmma", "tcgen05") and "param" not in parts:
        if parts[0] in ("wgmma", "tcgen05") and parts[1] not in ("mma_async", "mma", "ld", "st", "cp"):
            return None
        return ".".join(parts[:2])
    return "mbarrier.arrive" if parts[:2] == ("mbarrier", "arrive") else None


def _text(ptx: str, instruction: Instruction) -> str:
    start, end = instruction.place.span
    return ptx[start:end]


def _slice(kernel: Kernel, start: int, index: int) -> list[Instruction] | None:
    """The arithmetic of `start` to `index` that an access needs; None where it needs more than arithmetic."""
    wanted = set(_reads(kernel.instructions[index]))
    found: list[Instruction] = []
    for each in reversed(kernel.instructions[start:index]):
        if not wanted & set(_writes(each)):
            continue
        if each.root not in _ARITHMETIC or each.guard is not None:
            return None
        wanted = (wanted - set(_writes(each))) | set(_reads(each))
        found.insert(0, each)
    return found


def _writes(instruction: Instruction) -> list[int]:
    if instruction.root in ("st", "stmatrix", "red", "cp", "bar", "barrier", "fence", "bra"):
        return []
    return list(registers_in(instruction.operands[:1]))


def _reads(instruction: Instruction) -> list[int]:
    first = 0 if not _writes(instruction) or instruction.root in ("wgmma", "tcgen05", "mbarrier") else 1
    found = list(registers_in(instruction.operands[first:]))
    return found + ([instruction.guard.index] if instruction.guard is not None else [])

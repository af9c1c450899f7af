"""Loads that acquire or are relaxed, stores that release or are relaxed (PTX ISA 9.7.9.8, 9.7.9.12)."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Where
from cakegen.emulator.machine.lane_ops import in_shared_window, own_window, peer_of, within_window
from cakegen.emulator.machine.memory import OFFSET_MASK, RANK_SHIFT, SHARED_WINDOW
from cakegen.emulator.machine.operands import park, read_address, read_lanes, refused, write_lanes
from cakegen.emulator.machine.ports import HasMemory
from cakegen.emulator.machine.warp import Cta, Strand
from cakegen.emulator.order.vector_clock import SCOPES
from cakegen.emulator.text.forms.accesses import HINTS
from cakegen.emulator.text.forms.writer import TYPES
from cakegen.emulator.text.ptx import Instruction, Register, Vector

Array = NDArray[Any]

# Bytes by which polled words are told apart
_WORD = 8
_SPACES = {"global", "shared", "shared::cta", "shared::cluster"}
_VECTORS = {"v2", "v4", "v8"}
_KNOWN = {*_SPACES, *_VECTORS, *SCOPES, *HINTS, "relaxed", "acquire", "release"}


class WordHost(HasMemory, Protocol):
    """What strong accesses ask of their launch."""

    @property
    def watched(self) -> dict[int, list[Any]]:
        """Address of a word -> strands that poll it."""

    def touch(self, addresses: Array) -> None:
        """Global words were written."""


def strong_scope(parts: tuple[str, ...]) -> int:
    """The scope of a strong access; of an atomic without one, the GPU."""
    return next((SCOPES[part] for part in parts if part in SCOPES), SCOPES["gpu"])


def run_strong_access(machine: WordHost, strand: Strand, instruction: Instruction, active: Array, where: Where) -> None:
    """Run one: of a word or of a vector, in global or shared memory.

    A load that finds again what the same lanes found at the same instruction is a poll: it parks until the word is
    written. A vector is aligned to its size (PTX ISA 6.4.1.3), and stored as its elements would be (9.7.9.12).
    """
    kind = TYPES.get(instruction.parts[-1], "?")
    if not set(instruction.parts[1:-1]) <= _KNOWN or kind == "?":
        raise refused(instruction)
    address = instruction.operands[1] if instruction.root == "ld" else instruction.operands[0]
    cta, at = locate_words(strand, instruction, address, active)
    access = _load if instruction.root == "ld" else _store
    access(machine, strand, instruction, active, cta, at)


def locate_words(strand: Strand, instruction: Instruction, operand: Any, active: Array) -> tuple[Cta | None, Array]:
    """The CTA whose shared memory is meant (None: global memory), and the addresses of the active lanes."""
    warp = strand.warp
    spaces = _SPACES & set(instruction.parts)
    if not spaces:
        generic = read_address(strand, operand, "u8")[active]
        if not in_shared_window(generic, None):
            return None, generic
        at = within_window(generic)
        return peer_of(warp, at), at
    if "global" in spaces:
        return None, read_address(strand, operand, "u8")[active]
    at = read_address(strand, operand, "u4")[active]
    if "shared::cluster" in spaces:
        return peer_of(warp, at), at
    own_window(warp, at)
    return warp.cta, at


def _store(
    machine: WordHost, strand: Strand, instruction: Instruction, active: Array, cta: Cta | None, at: Array
) -> None:
    value = instruction.operands[1]
    width = int(TYPES[instruction.parts[-1]][1])
    words = value.items if isinstance(value, Vector) else (value,)
    values = np.stack([read_lanes(strand, word, f"u{width}")[active] for word in words], axis=1)
    rows = values.view(np.uint8).reshape(-1, len(words) * width)
    thread = strand.warp.thread
    place = (strand.pc - 1, active, strong_scope(instruction.parts))
    thread = thread and thread.at(*place, orders="release" in instruction.parts)
    if cta is not None:
        cta.shared.store(at, rows, thread)
    else:
        machine.memory.store(at, rows, strand.warp.cta.index, thread)
    machine.touch((word_keys(cta, at)[:, None] + np.arange(0, rows.shape[1], width, dtype=np.uint64)).ravel())


def word_keys(cta: Cta | None, at: Array) -> Array:
    """What words are called among those that are polled: global addresses, or a CTA and an offset above all of them."""
    if cta is None:
        return at
    offsets = at.astype(np.uint64) & np.uint64(OFFSET_MASK)
    return offsets + np.uint64(SHARED_WINDOW + (cta.index << RANK_SHIFT))


def _load(
    machine: WordHost, strand: Strand, instruction: Instruction, active: Array, cta: Cta | None, at: Array
) -> None:
    target = instruction.operands[0]
    kind = TYPES[instruction.parts[-1]]
    targets = target.items if isinstance(target, Vector) else (target,)
    width = int(kind[1]) * len(targets)
    thread = strand.warp.thread
    place = (strand.pc - 1, active, strong_scope(instruction.parts))
    thread = thread and thread.at(*place, orders="acquire" in instruction.parts)
    rows = machine.memory.load(at, width, thread) if cta is None else cta.shared.load(at, width, thread)
    if width <= _WORD and _polls(machine, strand, cta, at, rows):
        return
    items = np.ascontiguousarray(rows).view(kind).reshape(-1, len(targets))
    for number, each in enumerate(targets):
        values = np.zeros(32, kind)
        values[active] = items[:, number]
        bank = strand.warp.registers[each.index].dtype if isinstance(each, Register) else values.dtype
        write_lanes(strand, each, active, values.view(bank) if bank.itemsize == values.itemsize else values)


def _polls(machine: WordHost, strand: Strand, cta: Cta | None, at: Array, rows: Array) -> bool:
    """Whether a load is a poll that found nothing new: its strand parks."""
    poll = (strand.pc, int(at[0]), rows.tobytes())
    if poll != strand.last_poll or (at != at[0]).any():
        strand.last_poll = poll
        return False
    strand.pc -= 1
    if cta is None:
        buffer, offsets = machine.memory.find(at[:1], rows.shape[1], "poll")
        name = f"{buffer.name} + {int(offsets[0])}"
    else:
        name = cta.place(int(at[0]) & OFFSET_MASK)
    reason = f"a change of {name} from {int.from_bytes(rows[0].tobytes(), 'little')}"
    park(strand, machine.watched.setdefault(int(word_keys(cta, at[:1])[0]) & -_WORD, []), reason)
    strand.last_poll = None
    return True

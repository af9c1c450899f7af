"""`atom` and `red`: of integers, bits, floats and vectors, in global and shared memory (PTX ISA 9.7.13.5, 9.7.13.6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Where
from cakegen.emulator.machine.operands import read_lanes, refused, write_lanes
from cakegen.emulator.machine.strong_access import WordHost, locate_words, strong_scope, word_keys
from cakegen.emulator.machine.warp import Cta, Strand
from cakegen.emulator.order.vector_clock import SCOPES
from cakegen.emulator.text.arithmetic import add_bf16, bf16_value, flush_f32, maximum_f32, minimum_f32
from cakegen.emulator.text.half_arithmetic import add_f16
from cakegen.emulator.text.ptx import Instruction, Operand, Vector

Array = NDArray[Any]
# (what was there, b, c) -> what will be there, of elements.
Combine = Callable[[Array, Array, Array], Array]

_SPACES = {"global", "shared", "shared::cta", "shared::cluster"}
_MODIFIERS = {*_SPACES, *SCOPES, "relaxed", "acquire", "release", "acq_rel", "noftz", "L2::cache_hint"}
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
_MOST_BYTES = 16
# Type -> of an element in numpy, and elements of it.
_TYPES = {
    **{f"{letter}{bits}": (f"{'i' if letter == 's' else 'u'}{bits // 8}", 1) for letter in "usb" for bits in (32, 64)},
    "b16": ("u2", 1),
    "b128": ("u8", 2),
    "f32": ("f4", 1),
    "f64": ("f8", 1),
    "f16": ("f2", 1),
    "f16x2": ("f2", 2),
    "bf16": ("u2", 1),
    "bf16x2": ("u2", 2),
}
_INTEGERS = {"u32", "s32", "u64", "s64"}
_HALVES = {"f16", "f16x2", "bf16", "bf16x2"}


def _add(old: Array, b: Array, c: Array) -> Array:
    return np.asarray(old + b)


def _add_flushed(old: Array, b: Array, c: Array) -> Array:
    """fp32 in global memory: subnormal inputs and results become zeros of their sign."""
    return np.asarray(flush_f32(flush_f32(old) + flush_f32(b)))


def _inc(old: Array, b: Array, c: Array) -> Array:
    return np.where(old >= b, 0, old + 1).astype(old.dtype)


def _dec(old: Array, b: Array, c: Array) -> Array:
    return np.where((old == 0) | (old > b), b, old - 1).astype(old.dtype)


def _of_halves(name: str, kind: str) -> Combine:
    """`min` and `max`: of a number and NaN, the number."""
    choose = minimum_f32 if name == "min" else maximum_f32
    if kind.startswith("bf16"):
        return lambda old, b, c: (choose(bf16_value(old), bf16_value(b)).view(np.uint32) >> np.uint32(16)).astype("u2")
    return lambda old, b, c: choose(old.astype(np.float32), b.astype(np.float32)).astype(np.float16)


def _combination(name: str, kind: str, is_global: bool, is_vector: bool) -> Combine | None:
    """What an operation does to elements of a type; None: there is no such form."""
    if name == "add" and kind in _HALVES:
        return lambda old, b, c: (add_bf16 if kind.startswith("bf16") else add_f16)(old, b)
    if name == "add" and kind == "f32":
        return _add_flushed if is_global else _add
    if name == "add" and kind in {*_INTEGERS, "f64"} - {"s64"}:
        return _add
    if name in ("min", "max") and kind in _INTEGERS:
        choose = np.minimum if name == "min" else np.maximum
        return lambda old, b, c: choose(old, b)
    if name in ("min", "max") and kind in _HALVES and is_vector:
        return _of_halves(name, kind)
    if name in ("inc", "dec") and kind == "u32":
        return _inc if name == "inc" else _dec
    if name in ("and", "or", "xor") and kind in ("b32", "b64"):
        bitwise = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name]
        return lambda old, b, c: bitwise(old, b)
    if name == "exch" and kind in ("b32", "b64", "b128"):
        return lambda old, b, c: b
    if name == "cas" and kind in ("b16", "b32", "b64", "b128"):
        return lambda old, b, c: np.where((old == b).all(axis=1, keepdims=True), c, old)
    return None


@dataclass(frozen=True)
class _Form:
    """What an instruction says: how elements combine, the type of one, and the bytes of a register and of all."""

    combine: Combine
    element: str
    register_bytes: int
    registers: int
    address: Operand
    sources: tuple[Operand, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that a lane touches."""
        return self.register_bytes * self.registers


def _form_of(instruction: Instruction) -> _Form:
    *modifiers, kind = instruction.parts[1:]
    names = [part for part in modifiers if part not in _MODIFIERS and part not in _VECTORS]
    lengths = [_VECTORS[part] for part in modifiers if part in _VECTORS]
    element, count = _TYPES.get(kind, ("", 0))
    operands = instruction.operands[1:] if instruction.root == "atom" else instruction.operands
    address, *sources = operands
    if "L2::cache_hint" in modifiers:
        sources.pop()
    if len(names) != 1 or not count or len(lengths) > 1:
        raise refused(instruction)
    spaces = _SPACES & set(modifiers)
    # without a space, an address may be of either memory; fp32 in shared memory keeps its subnormals
    combine = _combination(names[0], kind, not any(each.startswith("shared") for each in spaces), bool(lengths))
    registers = lengths[0] if lengths else 1
    form_bytes = int(element[1:]) * count
    is_vector_type = kind == "f32" or kind in _HALVES
    wanted = 2 if names[0] == "cas" else 1
    legal = not lengths or (is_vector_type and "global" in spaces and form_bytes * registers <= _MOST_BYTES)
    if combine is None or len(sources) != wanted or not legal:
        raise refused(instruction)
    return _Form(combine, element, form_bytes, registers, address, tuple(sources))


def run_atomic(machine: WordHost, strand: Strand, instruction: Instruction, active: Array, where: Where) -> None:
    """One atomic of each active lane; those of lanes at one word follow each other."""
    form = _form_of(instruction)
    sources = [_read(strand, operand, form) for operand in form.sources]
    old = np.zeros((32, form.num_bytes), np.uint8)
    cta, addresses = locate_words(strand, instruction, form.address, active)
    at = np.zeros(32, addresses.dtype)
    at[active] = addresses
    for turn in _turns(at, active):
        old[turn] = _one_turn(machine, strand, instruction, form, cta, at[turn], turn, sources)
    if instruction.root == "atom":
        _write(strand, instruction.operands[0], active, old, form)


def _turns(at: Array, lanes: Array) -> Iterator[Array]:
    """Lanes in their order, as many together as touch different words."""
    numbers = np.flatnonzero(lanes)
    if np.unique(at[numbers]).size == numbers.size:
        yield lanes
        return
    for lane in numbers:
        yield np.arange(32) == lane


def _one_turn(
    machine: WordHost,
    strand: Strand,
    instruction: Instruction,
    form: _Form,
    cta: Cta | None,
    at: Array,
    lanes: Array,
    sources: list[Array],
) -> Array:
    """Read, combine and write the words of some lanes, which differ; the bytes that were there."""
    parts, thread = instruction.parts, strand.warp.thread
    acquires, releases = bool({"acquire", "acq_rel"} & set(parts)), bool({"release", "acq_rel"} & set(parts))
    place = (strand.pc - 1, lanes, strong_scope(parts))
    # the read of a `red` acquires nothing (PTX ISA 8.8)
    reader = thread and instruction.root == "atom" and thread.at(*place, orders=acquires)
    memory: Any = machine.memory if cta is None else cta.shared
    before = memory.load(at, form.num_bytes, reader or None)
    b, *rest = (source[lanes].view(form.element) for source in sources)
    after = form.combine(np.ascontiguousarray(before).view(form.element), b, rest[0] if rest else b)
    rows = np.ascontiguousarray(after, form.element).view(np.uint8)
    thread = thread and thread.at(*place, orders=releases, chained=True)
    if cta is None:
        machine.memory.store(at, rows, strand.warp.cta.index, thread)
    else:
        cta.shared.store(at, rows, thread)
    machine.touch((word_keys(cta, at)[:, None] + np.arange(0, form.num_bytes, 8, dtype=np.uint64)).ravel())
    return np.asarray(before)


def _read(strand: Strand, operand: Operand, form: _Form) -> Array:
    """`[32, bytes]` of a source."""
    items = operand.items if isinstance(operand, Vector) else (operand,)
    kind = "c16" if form.register_bytes == 16 else f"u{form.register_bytes}"
    columns = [np.ascontiguousarray(read_lanes(strand, item, kind)).view(np.uint8).reshape(32, -1) for item in items]
    return np.concatenate(columns, axis=1)


def _write(strand: Strand, target: Operand, active: Array, old: Array, form: _Form) -> None:
    items = target.items if isinstance(target, Vector) else (target,)
    kind = "c16" if form.register_bytes == 16 else f"u{form.register_bytes}"
    for number, item in enumerate(items):
        part = old[:, number * form.register_bytes : (number + 1) * form.register_bytes]
        write_lanes(strand, item, active, np.ascontiguousarray(part).view(kind)[:, 0])

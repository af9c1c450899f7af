"""Kernels of single instructions: PTX text of many forms, each on its own values, in one launch of the emulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cakegen.emulator.launches.launch import program_of
from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.machine.memory import Buffer, GlobalMemory
from cakegen.emulator.machine.residency import LaunchShape

_SLOT = 8
_BANKS = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}
_HEAD = """.version 9.0
.target {target}
.address_size 64
.visible .entry unit(.param .u64 results, .param .u64 values)
{{
.reg .b64 %out, %in, %slot, %zero;
.reg .b32 %thread;
ld.param.u64 %out, [results];
ld.param.u64 %in, [values];
mov.u32 %thread, %tid.x;
mul.wide.u32 %slot, %thread, {slot};
add.u64 %out, %out, %slot;
add.u64 %in, %in, %slot;
mov.b64 %zero, 0;
"""


@dataclass(frozen=True)
class Unit:
    """One instruction with its values and results.

    Parameters
    ----------
    opcode
        As written.
    sources
        An array with a value a thread, whose type is that of the register; or a text, which is written as it is.
    expected
        Its results, an array each: what they must be, bit for bit, but for NaNs where the type is a float's.
    """

    opcode: str
    sources: tuple[np.ndarray | str, ...]
    expected: tuple[np.ndarray, ...]


def unit(opcode: str, *sources: np.ndarray | str, gives: np.ndarray | tuple[np.ndarray, ...]) -> Unit:
    """An instruction and what it must give."""
    return Unit(opcode, sources, gives if isinstance(gives, tuple) else (gives,))


def check_units(units: list[Unit], target: str = "sm_100a") -> None:
    """Run all of them in one launch and compare."""
    assert units
    for each, found in zip(units, run_units(units, target), strict=True):
        for got, wanted in zip(found, each.expected, strict=True):
            same = got == wanted
            if got.dtype.kind == "f":
                integer = f"u{got.dtype.itemsize}"
                same = (got.view(integer) == wanted.view(integer)) | (np.isnan(got) & np.isnan(wanted))
            wrong = np.flatnonzero(~same)
            if wrong.size:
                lane = int(wrong[0])
                values = [source if isinstance(source, str) else source[lane] for source in each.sources]
                raise AssertionError(
                    f"{each.opcode} of {values}: got {got[lane]!r}, wanted {wanted[lane]!r}; {wrong.size} lanes differ"
                )


def run_units(units: list[Unit], target: str = "sm_100a") -> list[tuple[np.ndarray, ...]]:
    """The results of each instruction."""
    threads = len(units[0].expected[0])
    text, inputs, count = unit_text(units, target)
    values, results = np.zeros((max(1, len(inputs)), threads), np.uint64), np.zeros((count, threads), np.uint64)
    for row, source in zip(values, inputs, strict=False):
        row.view(source.dtype)[:: _SLOT // source.itemsize] = source
    run_text(text, results, values, threads)
    rows = iter(results)
    return [
        tuple(next(rows).view(wanted.dtype)[:: _SLOT // wanted.itemsize] for wanted in each.expected) for each in units
    ]


def run_text(
    text: str, results: np.ndarray, values: np.ndarray, threads: int, *, grid: int = 1, cluster: int = 1, **options: Any
) -> Machine:
    """Launch the entry `unit(results, values)` of a module."""
    buffers, starts = [], []
    for name, each, base in (("results", results, 1 << 32), ("values", values, 2 << 32)):
        buffers.append(Buffer(name, base, each.nbytes, output=name == "results", host=each.ctypes.data))
        starts.append(base)
    shape = LaunchShape((grid, 1, 1), (threads, 1, 1), (cluster, 1, 1), 0, False)
    machine = Machine(program_of(text, "unit"), GlobalMemory(buffers), shape, starts, Adversary("early"), **options)
    machine.run()
    return machine


def unit_text(units: list[Unit], target: str) -> tuple[str, list[np.ndarray], int]:
    """(PTX, the arrays that it reads, how many it writes)."""
    lines, inputs, count = [], [], 0
    row = len(units[0].expected[0]) * _SLOT
    for each in units:
        lines.append("{")
        sources = []
        for number, source in enumerate(each.sources):
            if isinstance(source, str):
                sources.append(source)
                continue
            address = f"[%in+{row * len(inputs)}]"
            inputs.append(source)
            lines += _load(f"s{number}", source.dtype, address)
            sources.append(f"s{number}")
        names = [f"d{number}" for number in range(len(each.expected))]
        for name, wanted in zip(names, each.expected, strict=True):
            lines.append(f".reg .{_bank(wanted.dtype)} {name};")
        lines.append(f"{each.opcode} {', '.join(['|'.join(names), *sources])};")
        for name, wanted in zip(names, each.expected, strict=True):
            lines += _store(name, wanted.dtype, f"[%out+{row * count}]")
            count += 1
        lines.append("}")
    return _HEAD.format(target=target, slot=_SLOT) + "\n".join(lines) + "\nret;\n}\n", inputs, count


def _bank(dtype: np.dtype) -> str:
    return "pred" if dtype.kind == "b" else _BANKS[dtype.itemsize]


def _load(name: str, dtype: np.dtype, address: str) -> list[str]:
    if dtype.kind != "b":
        return [f".reg .{_bank(dtype)} {name};", f"ld.global.{_bank(dtype)} {name}, {address};"]
    lines = [f".reg .b16 {name}b;", f"ld.global.u8 {name}b, {address};", f".reg .pred {name};"]
    return [*lines, f"setp.ne.u16 {name}, {name}b, 0;"]


def _store(name: str, dtype: np.dtype, address: str) -> list[str]:
    if dtype.kind != "b":
        return [f"st.global.b64 {address}, %zero;", f"st.global.{_bank(dtype)} {address}, {name};"]
    lines = [f"st.global.b64 {address}, %zero;", f".reg .b16 {name}b;", f"selp.u16 {name}b, 1, 0, {name};"]
    return [*lines, f"st.global.u8 {address}, {name}b;"]

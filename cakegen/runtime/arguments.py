"""Kernel arguments: bound once to plain values, packed once into a stable block. Imports tensor_map and registry.

`bind_arguments` needs no driver. `pack_arguments` lays the values out and encodes the tensor maps; nothing is rebuilt
when the kernel is launched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cakegen.arch import INT32_MAX
from cakegen.errors import LaunchError
from cakegen.registry import Program, TensorMapEntry
from cakegen.runtime import driver
from cakegen.runtime.operand import Operand
from cakegen.runtime.tensor_map import TensorMap, encode_tensor_map, view_matrix

_MAP_ALIGN = 64


@dataclass(frozen=True)
class Argument:
    """One kernel parameter: its kind and name as in the program's `arg_plan`, and its value.

    The value is a `TensorMap` (kind `tma_buffer`), an address (`buffer`) or an i32 (`parameter`).
    """

    kind: str
    name: str
    value: TensorMap | int


@dataclass(eq=False)
class ArgumentBlock:
    """Packed arguments: `pointers` is what `kernelParams` takes; `memory` and `table` keep them alive.

    Parameters
    ----------
    base
        Address of the first argument.
    """

    arguments: tuple[Argument, ...]
    pointers: int
    base: int
    memory: ctypes.Array[ctypes.c_char]
    table: ctypes.Array[ctypes.c_void_p]

    def take(self, other: ArgumentBlock) -> None:
        """Take the values of a block of the same parameters, in place: bound launches hold the address.

        The driver reads a launch's parameters while it is enqueued, so those of earlier launches do not change.
        """
        assert len(self.memory) == len(other.memory), (self.arguments, other.arguments)
        ctypes.memmove(self.base, other.base, len(self.memory) - _MAP_ALIGN)
        self.arguments = other.arguments


def bind_arguments(
    program: Program, matrices: Mapping[str, Operand], buffers: Mapping[str, int], parameters: Mapping[str, int]
) -> tuple[Argument, ...]:
    """Values for a program's `arg_plan`, in the kernel's parameter order.

    Parameters
    ----------
    program
        The program to bind.
    matrices
        Operands by name, for tensor maps.
    buffers
        Device addresses by name.
    parameters
        i32 values by name.

    Raises
    ------
    LaunchError
        The plan asks for a name that the caller does not have, or a value does not fit an i32.
    """
    maps = {entry.name: entry for entry in program.tensor_maps}
    bound = []
    for kind, name in program.arg_plan:
        if kind == "grid":
            continue
        known: Mapping[str, object] = {"tma_buffer": maps, "buffer": buffers, "parameter": parameters}.get(kind, {})
        if name not in known or (kind == "tma_buffer" and not _can_view(maps[name], matrices, parameters)):
            raise LaunchError(
                f"{program.name}: argument {name!r} of kind {kind!r} is not one that this runtime can bind; it has "
                f"{kind} values {sorted(known)}, matrices {sorted(matrices)}, parameters {sorted(parameters)}. "
                "Export with this version."
            )
        if kind == "tma_buffer":
            bound.append(Argument(kind, name, _view(maps[name], matrices[maps[name].operand], parameters)))
        elif kind == "buffer":
            bound.append(Argument(kind, name, buffers[name]))
        else:
            bound.append(Argument(kind, name, _checked_i32(program.name, name, parameters[name])))
    return tuple(bound)


def _can_view(entry: TensorMapEntry, matrices: Mapping[str, Operand], parameters: Mapping[str, int]) -> bool:
    return entry.operand in matrices and "num_tokens" in parameters


def _view(entry: TensorMapEntry, operand: Operand, parameters: Mapping[str, int]) -> TensorMap:
    """A `columns` view ends with this rank's slice, so that a box over its end reads zeros, not the next slice.

    A clipped box has the rows whose bytes the kernel expects: both follow from the parameter `num_tokens`.
    """
    entry = entry.for_tokens(parameters["num_tokens"])
    cols = operand.column_limit if entry.view == "columns" else operand.cols
    return view_matrix(entry, operand.address, operand.rows, cols, operand.pitch, operand.chunk_stride)


def _checked_i32(program: str, name: str, value: int) -> int:
    if not 0 <= value <= INT32_MAX:
        raise LaunchError(f"{program}: parameter {name} must be 0 … 2^31 - 1 = {INT32_MAX} (an i32); got {value}.")
    return value


def pack_arguments(
    arguments: tuple[Argument, ...], encode: Callable[[TensorMap, int], None] = encode_tensor_map
) -> ArgumentBlock:
    """Lay arguments out in one block: tensor maps at multiples of 64 bytes, pointers of 8, i32 of 4.

    `encode` writes a map to a host address; the default asks the driver.
    """
    sizes = {"tma_buffer": driver.TENSOR_MAP_BYTES, "buffer": 8, "parameter": 4}
    aligns = {"tma_buffer": _MAP_ALIGN, "buffer": 8, "parameter": 4}
    offsets, end = [], 0
    for argument in arguments:
        end = -(-end // aligns[argument.kind]) * aligns[argument.kind]
        offsets.append(end)
        end += sizes[argument.kind]
    memory = ctypes.create_string_buffer(end + _MAP_ALIGN)
    base = -(-ctypes.addressof(memory) // _MAP_ALIGN) * _MAP_ALIGN
    for argument, offset in zip(arguments, offsets, strict=True):
        if isinstance(argument.value, TensorMap):
            encode(argument.value, base + offset)
        elif argument.kind == "buffer":
            ctypes.c_uint64.from_address(base + offset).value = argument.value
        else:
            ctypes.c_int32.from_address(base + offset).value = argument.value
    table = (ctypes.c_void_p * len(arguments))(*(base + offset for offset in offsets))
    return ArgumentBlock(arguments, ctypes.addressof(table), base, memory, table)

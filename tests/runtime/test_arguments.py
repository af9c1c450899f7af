"""Argument packing: order, alignment, exact types, and values read back from the packed block."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest

from cakegen.errors import LaunchError
from cakegen.registry import Registry
from cakegen.runtime.arguments import Argument, bind_arguments, pack_arguments
from cakegen.runtime.operand import Operand
from cakegen.runtime.tensor_map import TensorMap

MAP = TensorMap("x", 0x1000, (64, 5, 112), (14336, 128), (64, 8, 2))


def fill(record: TensorMap, destination: int) -> None:
    ctypes.memset(destination, record.dims[1], 128)


def test_pack_keeps_order_alignment_and_types() -> None:
    second = dataclasses.replace(MAP, dims=(64, 6, 112))
    arguments = (
        Argument("parameter", "tokens", 7),
        Argument("tma_buffer", "x", MAP),
        Argument("buffer", "out", 0x7FFF_FFFF_FFF0),
        Argument("parameter", "pitch", 2**31 - 1),
        Argument("tma_buffer", "w", second),
    )
    block = pack_arguments(arguments, fill)
    pointers = (ctypes.c_void_p * 5).from_address(block.pointers)
    tokens, x, out, pitch, w = (address or 0 for address in pointers)
    assert ctypes.c_int32.from_address(tokens).value == 7
    assert ctypes.c_uint64.from_address(out).value == 0x7FFF_FFFF_FFF0
    assert ctypes.c_int32.from_address(pitch).value == 2**31 - 1
    assert (x % 64, w % 64, out % 8, tokens % 4) == (0, 0, 0, 0)
    assert ctypes.string_at(x, 128) == bytes([5]) * 128
    assert ctypes.string_at(w, 128) == bytes([6]) * 128


def test_packed_block_stays_inside_its_memory() -> None:
    block = pack_arguments(tuple(Argument("tma_buffer", str(index), MAP) for index in range(5)), fill)
    start = ctypes.addressof(block.memory)
    addresses = [address or 0 for address in block.table]
    assert min(addresses) >= start
    assert max(addresses) + 128 <= start + ctypes.sizeof(block.memory)


def operand(name: str, rows: int, cols: int, limit: int) -> Operand:
    return Operand(name, 0x10000, rows, cols, cols, 2, limit)


def ragged_program(registry: Registry) -> object:
    """A TP 16 tail of the product: its slice of 224 columns ends inside a chunk."""
    key = next(key for key in registry.kernels if "_kt32" in key and "_f" in key)
    return registry.program(key)


def test_columns_view_stops_at_the_ranks_slice(kimi_registry: Registry) -> None:
    program = ragged_program(kimi_registry)
    matrices = {
        "shared_down_weight": operand("shared_down_weight", 7168, 384, 384),
        "up_weight": operand("up_weight", 7168, 3584, 4 * 224),
        "shared_act": operand("shared_act", 3, 384, 384),
        "y_workspace": operand("y_workspace", 3, 3584, 4 * 224),
    }
    names = {name for kind, name in program.arg_plan if kind == "buffer"}  # type: ignore[attr-defined]
    parameters = {name: 1 for kind, name in program.arg_plan if kind == "parameter"}  # type: ignore[attr-defined]
    bound = bind_arguments(program, matrices, dict.fromkeys(names, 0x2000), parameters)  # type: ignore[arg-type]
    maps = {argument.name: argument.value for argument in bound if isinstance(argument.value, TensorMap)}
    assert maps["up_weight"].dims == (896, 7168, 1)
    assert maps["y_workspace"].dims == (896, 3, 1)
    assert maps["y_workspace"].strides_bytes[0] == 3584 * 2
    assert maps["shared_act"].dims == (64, 3, 6)
    assert [a.name for a in bound] == [n for k, n in program.arg_plan if k != "grid"]  # type: ignore[attr-defined]


def front_matrices(tokens: int) -> dict[str, Operand]:
    rows = {"gate_weight": 896, "down_weight": 3584, "shared_gate_up_weight": 768, "x": tokens}
    return {name: operand(name, count, 7168, 7168) for name, count in rows.items()}


@pytest.mark.parametrize(("tokens", "box"), [(1, (64, 1, 1)), (63, (64, 63, 1)), (64, (64, 64, 2)), (65, (64, 64, 2))])
def test_box_of_fewer_tokens_than_the_tile_has_their_rows_of_one_chunk(
    kimi_registry: Registry, tokens: int, box: tuple[int, int, int]
) -> None:
    keys = (key for key in kimi_registry.kernels if "_n64_" in key and "_d2_" in key and "sm_90a" in key)
    program = next(each for each in map(kimi_registry.program, keys) if each.role == "decode_front")
    buffers = {name: 0x2000 for kind, name in program.arg_plan if kind == "buffer"}
    parameters = {name: 1 for kind, name in program.arg_plan if kind == "parameter"} | {"num_tokens": tokens}
    bound = bind_arguments(program, front_matrices(tokens), buffers, parameters)
    boxes = {argument.name: argument.value.box for argument in bound if isinstance(argument.value, TensorMap)}
    assert boxes.pop("x") == box
    assert set(boxes.values()) == {entry.box for entry in program.tensor_maps if entry.name != "x"}
    del parameters["num_tokens"]
    with pytest.raises(LaunchError, match="argument 'gate_weight' of kind 'tma_buffer' is not one that this runtime"):
        bind_arguments(program, front_matrices(tokens), buffers, parameters)


def test_bind_refuses_an_unknown_name_and_a_wide_parameter(tiny_registry: Registry) -> None:
    program = next(p for p in tiny_registry.programs.values() if p.role == "tail_norm")
    buffers = {"routed": 16, "norm_weight": 16, "y_workspace": 16}
    parameters = {name: 1 for kind, name in program.arg_plan if kind == "parameter"}
    with pytest.raises(LaunchError, match=rf"{program.name}: argument 'norm_weight' of kind 'buffer'"):
        bind_arguments(program, {}, {k: v for k, v in buffers.items() if k != "norm_weight"}, parameters)
    with pytest.raises(LaunchError, match=r"routed_pitch must be 0 … 2\^31 - 1 = 2147483647 .* got 2147483648"):
        bind_arguments(program, {}, buffers, {**parameters, "routed_pitch": 2**31})

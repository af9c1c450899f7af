"""Packed weights: the order of memory, what accepts them, and the map that reads them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.models import tiny_model
from support.runtime.operands import front_operands, tail_operands

from cakegen.errors import LaunchError
from cakegen.registry import TensorMapEntry
from cakegen.runtime.packing import pack_weight, unpack_weight
from cakegen.runtime.reference import reference_front, reference_tail
from cakegen.runtime.tensor_map import view_matrix
from cakegen.runtime.validate import validate_front, validate_tail

MODEL = tiny_model()
FRONT_WEIGHTS = ("gate_weight", "down_weight", "shared_gate_up_weight")
TAIL_WEIGHTS = ("up_weight", "shared_down_weight")


def test_packed_weight_holds_chunks_of_64_columns_one_after_another() -> None:
    weight = torch.arange(6 * 192, dtype=torch.float32).reshape(6, 192).to(torch.bfloat16)
    packed = pack_weight(weight)
    assert packed.is_contiguous()
    for chunk in range(3):
        assert torch.equal(packed[chunk], weight[:, 64 * chunk : 64 * chunk + 64])
    assert torch.equal(unpack_weight(packed), weight)
    assert unpack_weight(weight) is weight


@pytest.mark.parametrize("shape", [(6, 100), (6,), (2, 6, 64)])
def test_weight_without_whole_chunks_is_not_packed(shape: tuple[int, ...]) -> None:
    with pytest.raises(LaunchError, match=r"whole chunks of 64 columns; got \["):
        pack_weight(torch.zeros(shape))


def test_reference_of_packed_weights_has_the_same_bits() -> None:
    front, tail = front_operands(MODEL, 2, 5), tail_operands(MODEL, 2, 5)
    inputs = [front[name] for name in ("x", *FRONT_WEIGHTS)]
    for packed, plain in zip(
        reference_front(MODEL.dims, inputs[0], *map(pack_weight, inputs[1:])),
        reference_front(MODEL.dims, *inputs),
        strict=True,
    ):
        assert torch.equal(packed, plain)
    names = ("routed", "norm_weight", "up_weight", "shared_act", "shared_down_weight")
    plain_tail = reference_tail(MODEL.dims, *(tail[name] for name in names), tp=2, rank=1)
    chosen = [pack_weight(tail[name]) if name in TAIL_WEIGHTS else tail[name] for name in names]
    for packed, plain in zip(reference_tail(MODEL.dims, *chosen, tp=2, rank=1), plain_tail, strict=True):
        assert torch.equal(packed, plain)


def test_validation_takes_any_weight_packed_and_reads_tp_from_it() -> None:
    front = front_operands(MODEL, 4, 3)
    for name in FRONT_WEIGHTS:
        request = validate_front(MODEL, **{**front, name: pack_weight(front[name])})
        operand = request.operands[name]
        assert (request.tp, operand.cols, operand.pitch) == (4, 512, 64)
        assert (operand.chunk_stride, operand.matrix_elems) == (64 * operand.rows, 512 * operand.rows)
    tail = tail_operands(MODEL, 4, 3)
    packed = {name: pack_weight(tail[name]) for name in TAIL_WEIGHTS}
    request = validate_tail(MODEL, **{**tail, **packed}, tp=4, rank=3)
    assert [request.operands[name].chunk_stride for name in TAIL_WEIGHTS] == [64 * 512] * 2


def test_packed_weight_of_another_shape_is_refused_with_both_shapes() -> None:
    front = front_operands(MODEL, 4, 3)
    packed = pack_weight(front["down_weight"])
    for wrong in (packed[:, :256].contiguous(), packed.transpose(0, 1), packed[:7]):
        with pytest.raises(LaunchError, match=r"\[512, 512\] bfloat16 .* or packed \[8, 512, 64\]"):
            validate_front(MODEL, **{**front, "down_weight": wrong})


def test_packed_map_differs_in_its_strides_alone() -> None:
    entry = TensorMapEntry("w", "w", "chunks", (64, 128, 1))
    plain = view_matrix(entry, 0x1000, rows=512, cols=192, pitch_elems=192)
    packed = view_matrix(entry, 0x1000, rows=512, cols=192, pitch_elems=64, chunk_elems=64 * 512)
    assert packed.strides_bytes == (128, 128 * 512)
    assert dataclasses.replace(packed, strides_bytes=plain.strides_bytes) == plain


def test_slice_that_ends_inside_a_chunk_needs_the_unpacked_weight() -> None:
    entry = TensorMapEntry("up_weight", "up_weight", "columns", (64, 128, 1))
    with pytest.raises(LaunchError, match=r"ends at column 224 = 3 \* 64 \+ 32\. Pass the weight unpacked"):
        view_matrix(entry, 0x1000, rows=512, cols=224, pitch_elems=64, chunk_elems=64 * 512)

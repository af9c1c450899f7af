"""Operands: what is accepted, and that each refusal names the operand and what it needs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import tiny_model
from support.runtime.fakes import FakeTensor
from support.runtime.operands import BF16, front_operands, tail_operands

from cakegen.errors import LaunchError
from cakegen.runtime.validate import validate_front, validate_tail

MODEL = tiny_model()
Change = Callable[[torch.Tensor], Any]


def pitched(rows: int, cols: int, gap: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(rows, cols + gap, dtype=dtype)[:, :cols]


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_front_tp_follows_from_the_gate_up_rows(tp: int) -> None:
    request = validate_front(MODEL, **front_operands(MODEL, tp, 3))
    assert (request.tp, request.tokens, request.partials) == (tp, 3, 1)
    assert list(request.operands) == list(front_operands(MODEL, tp, 3))


def test_front_honours_pitches_of_input_and_outputs() -> None:
    operands = front_operands(MODEL, 2, 5)
    operands["x"] = pitched(5, 512, 8)
    operands["logits"] = pitched(5, 384, 4, torch.float32)
    operands["latent"] = pitched(5, 512, 64)
    operands["shared_act"] = pitched(5, 512, 16)
    request = validate_front(MODEL, **operands)
    pitches = {name: request.operands[name].pitch for name in ("x", "logits", "latent", "shared_act")}
    assert pitches == {"x": 520, "logits": 388, "latent": 576, "shared_act": 528}


def test_a_single_row_has_no_pitch() -> None:
    operands = front_operands(MODEL, 2, 1)
    operands["x"] = torch.empty(1, 512, dtype=BF16).as_strided((1, 512), (7, 1))
    assert validate_front(MODEL, **operands).operands["x"].pitch == 512


FRONT_REFUSALS: list[tuple[str, Change, str]] = [
    (
        "x",
        lambda t: t.float(),
        r"front: x must be .*\[5, 512\] bfloat16 .* got \[5, 512\] float32.*\.to\(torch\.bfloat16\)",
    ),
    ("x", lambda t: t[0], r"front: x must be .*\[T, 512\]"),
    ("x", lambda t: t[:, :256], r"front: x must be .*\[5, 512\].*got \[5, 256\]"),
    ("x", lambda t: t.T.contiguous().T, r"front: x must be rows of stride 1.*strides \(1, 5\)"),
    ("x", lambda t: pitched(5, 512, 4), r"front: x must be of a row pitch .* 516 \* 2 bytes = 1032"),
    ("x", misaligned, r"front: x must be aligned to 16 bytes .*mod 16 = 2"),
    ("gate_weight", lambda t: t.T.contiguous().T, r"front: gate_weight must be contiguous \[384, 512\]"),
    ("gate_weight", lambda t: t.half(), r"gate_weight must be .* got \[384, 512\] float16"),
    (
        "down_weight",
        lambda t: pitched(512, 512, 8),
        r"down_weight must be contiguous .*strides \(520, 1\).*contiguous\(\)",
    ),
    ("shared_gate_up_weight", lambda t: t[:-1], r"shared_gate_up_weight must be \[2 \* I_LOCAL, 512\].*1024 / TP"),
    ("shared_gate_up_weight", lambda t: t[:300], r"shared_gate_up_weight must be \[2 \* I_LOCAL, 512\]"),
    ("logits", lambda t: t.to(BF16), r"logits must be .*\[5, 384\] float32"),
    ("latent", lambda t: t[:4], r"latent must be .*\[5, 512\].*got \[4, 512\]"),
    (
        "shared_act",
        lambda t: t[:, :-64],
        r"shared_act must be .*\[5, 512\] bfloat16 \(T by this rank's shared columns, 1024 / 2\)",
    ),
    ("latent", lambda t: FakeTensor(t), r"latent must be .* on cpu; got .* on cuda:0\. All operands"),
    ("latent", lambda t: t[:1].expand(5, 512), r"latent must be .*strides \(0, 1\)"),
]


@pytest.mark.parametrize(("name", "change", "message"), FRONT_REFUSALS)
def test_front_refuses(name: str, change: Change, message: str) -> None:
    operands = front_operands(MODEL, 2, 5)
    operands[name] = change(operands[name])
    with pytest.raises(LaunchError, match=message):
        validate_front(MODEL, **operands)


TAIL_REFUSALS: list[tuple[str, Change, str]] = [
    ("routed", lambda t: t[0], r"tail: routed must be .*\[P, T, 512\].*unsqueeze"),
    ("routed", lambda t: t[:0], r"tail: routed must be .*P >= 1"),
    ("routed", lambda t: torch.empty(2, 5, 513, dtype=BF16)[:, :, :512], r"routed must be .*513"),
    (
        "routed",
        lambda t: torch.empty(5132, dtype=BF16).as_strided((2, 5, 512), (2564, 512, 1)),
        r"2564 \* 2 bytes = 5128",
    ),
    ("norm_weight", lambda t: t[:-8], r"tail: norm_weight must be contiguous \[512\]"),
    ("norm_weight", lambda t: t.float(), r"norm_weight must be .*float32"),
    ("norm_weight", misaligned, r"norm_weight must be aligned"),
    ("up_weight", lambda t: t[:, :128].contiguous(), r"up_weight must be contiguous \[512, 512\] .*all columns"),
    (
        "shared_act",
        lambda t: t[:, :64],
        r"shared_act must be .*\[5, 256\] bfloat16 \(T by this rank's shared columns, 1024 / 4\)",
    ),
    ("shared_down_weight", lambda t: t[:-1], r"shared_down_weight must be contiguous \[512, 256\]"),
    ("out", lambda t: t.float(), r"out must be .*float32"),
    ("y_workspace", lambda t: t[:3], r"y_workspace must be .*\[5, 512\]"),
]


@pytest.mark.parametrize(("name", "change", "message"), TAIL_REFUSALS)
def test_tail_refuses(name: str, change: Change, message: str) -> None:
    operands = tail_operands(MODEL, 4, 5, partials=2)
    operands[name] = change(operands[name])
    with pytest.raises(LaunchError, match=message):
        validate_tail(MODEL, **operands, tp=4, rank=1)


@pytest.mark.parametrize(
    ("tp", "rank", "message"),
    [
        (3, 0, r"tp must .*divide the latent width 512; got 3 \(512 = 170 \* 3 \+ 2\)"),
        (0, 0, r"tp must be at least 1 .*got 0\."),
        (4, 4, "rank must be 0 … 3 for tp 4; got 4"),
        (4, -1, "-1"),
    ],
)
def test_tail_refuses_tp_and_rank(tp: int, rank: int, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        validate_tail(MODEL, **tail_operands(MODEL, 4, 5), tp=tp, rank=rank)


def test_tail_honours_pitch_and_partial_stride() -> None:
    operands = tail_operands(MODEL, 4, 5)
    operands["routed"] = torch.empty(3, 7, 520, dtype=BF16)[:, :5, :512]
    request = validate_tail(MODEL, **operands, tp=4, rank=3)
    routed = request.operands["routed"]
    assert (routed.pitch, routed.partial_stride, routed.partials) == (520, 3640, 3)
    assert request.up_col0 == 384
    assert request.operands["up_weight"].column_limit == 512
    assert routed.span_elems == 2 * 3640 + 4 * 520 + 512


def test_operand_behind_32_bit_offsets_is_refused() -> None:
    operands = front_operands(MODEL, 2, 2)
    operands["x"] = _apart(torch.empty(2, 512, dtype=BF16), (2**31, 1))
    rows = r"1 rows \* 2147483648 \+ 512 = 2147484160"
    with pytest.raises(LaunchError, match=rf"x must be at most 2\^31 - 1 = 2147483647 elements long.*{rows}"):
        validate_front(MODEL, **operands)


def test_partials_may_span_more_than_32_bits_but_no_two_may_be_so_far_apart() -> None:
    """Programs multiply a partial's number by the stride in 64 bits; the stride itself is an i32 parameter."""
    operands = tail_operands(MODEL, 4, 5)
    far = 2**31 - 8
    operands["routed"] = _apart(torch.empty(3, 5, 512, dtype=BF16), (far, 512, 1))
    routed = validate_tail(MODEL, **operands, tp=4, rank=0).operands["routed"]
    assert (routed.partial_stride, routed.span_elems) == (far, 2 * far + 5 * 512)
    operands["routed"] = _apart(torch.empty(2, 5, 512, dtype=BF16), (2**31, 512, 1))
    with pytest.raises(LaunchError, match=r"routed must be partials at most .* apart .* partial stride is 2147483648"):
        validate_tail(MODEL, **operands, tp=4, rank=0)


class _Apart(FakeTensor):
    """Claims strides that no test could allocate, and an address far above whatever the test did allocate."""

    strides: tuple[int, ...]

    def data_ptr(self) -> int:
        return 1 << 60

    def untyped_storage(self) -> Any:
        return SimpleNamespace(nbytes=lambda: 1 << 60)

    def stride(self, axis: int | None = None) -> Any:
        return self.strides if axis is None else self.strides[axis]


def _apart(tensor: torch.Tensor, strides: tuple[int, ...]) -> Any:
    claimed = _Apart(tensor)
    claimed.device, claimed.strides = torch.device("cpu"), strides
    return claimed


def test_output_that_overlaps_an_operand_is_refused() -> None:
    operands = tail_operands(MODEL, 4, 5)
    operands["y_workspace"] = operands["routed"][0]
    with pytest.raises(LaunchError, match=r"output y_workspace must share no memory .* routed has 0x"):
        validate_tail(MODEL, **operands, tp=4, rank=0)


def test_outputs_that_overlap_each_other_are_refused() -> None:
    operands = front_operands(MODEL, 2, 5)
    both = torch.empty(6, 512, dtype=BF16)
    operands["latent"], operands["shared_act"] = both[:5], both[1:]
    with pytest.raises(LaunchError, match=r"output latent must share no memory .* shared_act"):
        validate_front(MODEL, **operands)


def test_column_slices_of_one_buffer_are_apart() -> None:
    operands = front_operands(MODEL, 2, 5)
    both = torch.empty(5, 1024, dtype=BF16)
    operands["latent"], operands["shared_act"] = both[:, :512], both[:, 512:]
    validate_front(MODEL, **operands)
    operands["shared_act"] = both[:, 504 : 504 + 512]
    with pytest.raises(LaunchError, match="output latent must share no memory"):
        validate_front(MODEL, **operands)


def test_no_tokens_need_no_addresses() -> None:
    assert validate_front(MODEL, **front_operands(MODEL, 2, 0)).tokens == 0
    assert validate_tail(MODEL, **tail_operands(MODEL, 4, 0), tp=4, rank=0).tokens == 0


@pytest.mark.parametrize("name", ["x", "gate_weight", "shared_gate_up_weight", "logits", "shared_act"])
@pytest.mark.parametrize("kept_bytes", [0, 128])
def test_operand_whose_memory_was_freed_is_refused(name: str, kept_bytes: int) -> None:
    """Engines that offload or sleep shrink the storage behind a weight; its shape and strides stay as they were."""
    operands = front_operands(MODEL, 2, 5)
    storage = operands[name].untyped_storage()
    needed = storage.nbytes()
    storage.resize_(kept_bytes)
    message = rf"front: {name} must be backed by memory.* ends at byte {needed} of a storage of {kept_bytes} bytes"
    with pytest.raises(LaunchError, match=message):
        validate_front(MODEL, **operands)


def test_view_whose_memory_was_freed_is_refused() -> None:
    operands = tail_operands(MODEL, 2, 5)
    operands["out"] = torch.empty(9, 512, dtype=BF16)[4:]
    operands["out"].untyped_storage().resize_(0)
    with pytest.raises(LaunchError, match=r"tail: out must be backed by memory.* byte 9216 of a storage of 0 bytes"):
        validate_tail(MODEL, **operands, tp=2, rank=0)


def test_output_between_partials_of_a_token_shares_no_byte_with_them() -> None:
    """`[T, 3, latent]` in memory: partials in rows 0 and 2 of each token, y in row 1; of one token too."""
    for tokens in (1, 5):
        operands = tail_operands(MODEL, 4, tokens)
        memory = torch.empty(tokens, 3, 512, dtype=BF16)
        operands["routed"], operands["y_workspace"] = memory[:, ::2].transpose(0, 1), memory[:, 1]
        request = validate_tail(MODEL, **operands, tp=4, rank=0)
        assert request.operands["routed"].partial_stride == 1024
        for wrong in (memory[:, 2], memory.view(tokens, -1)[:, 504:1016], memory.view(tokens, -1)[:, 520:1032]):
            operands["y_workspace"] = wrong
            with pytest.raises(LaunchError, match=r"output y_workspace must share no memory .* routed has 0x"):
                validate_tail(MODEL, **operands, tp=4, rank=0)


def test_single_row_between_two_pitched_rows_shares_no_byte_with_them() -> None:
    operands = front_operands(MODEL, 2, 1)
    memory = torch.empty(2, 1100, dtype=BF16).view(-1)
    operands["latent"], operands["shared_act"] = memory[:512][None], memory[512:1024][None]
    validate_front(MODEL, **operands)
    operands["shared_act"] = memory[504:1016][None]
    with pytest.raises(LaunchError, match=r"output latent must share no memory .* shared_act"):
        validate_front(MODEL, **operands)

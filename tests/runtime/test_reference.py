"""The reference: the defined bits of y against a scalar program, and plain torch within one ulp."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.models import kimi_k3_model, tiny_model
from support.runtime.operands import front_operands, tail_operands

from cakegen.errors import LaunchError
from cakegen.functions import ACTIVATIONS
from cakegen.model import NamedFunction
from cakegen.runtime.activations import FUNCTIONS, activate
from cakegen.runtime.reference import ieee_sqrt, reference_front, reference_norm, reference_tail

BF16 = torch.bfloat16
EPS = 1e-5


def scalar_norm(routed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One row at a time, one lane at a time, in numpy fp32: the rule written a second time."""
    partials, tokens, latent = routed.shape
    f32 = np.float32
    rows = []
    for token in range(tokens):
        total = routed[0, token].float().numpy()
        for index in range(1, partials):
            total = total + routed[index, token].float().numpy()
        r = torch.from_numpy(total).to(BF16).float().numpy()
        lanes = [f32(0)] * 32
        for lane in range(32):
            for vector in range(lane, latent // 8, 32):
                for element in range(8):
                    value = r[vector * 8 + element]
                    lanes[lane] = f32(lanes[lane] + f32(value * value))
        for offset in (16, 8, 4, 2, 1):
            lanes = [f32(lanes[lane] + lanes[lane ^ offset]) for lane in range(32)]
        rstd = f32(1) / np.sqrt(f32(lanes[0] / f32(latent)) + f32(EPS))
        scaled = torch.from_numpy(r * f32(rstd)).to(BF16)
        rows.append((weight.float() * scaled.float()).to(BF16))
    return torch.stack(rows)


@pytest.mark.parametrize("latent", [8, 224, 512, 640, 3584])
@pytest.mark.parametrize("partials", [1, 3])
def test_reference_norm_equals_a_scalar_program_bit_for_bit(latent: int, partials: int) -> None:
    make = torch.Generator().manual_seed(latent + partials)
    routed = torch.randn(partials, 3, latent, generator=make).to(BF16)
    weight = torch.randn(latent, generator=make).to(BF16)
    assert torch.equal(
        reference_norm(routed, weight, EPS).view(torch.int16), scalar_norm(routed, weight).view(torch.int16)
    )


def test_roots_are_those_of_ieee() -> None:
    """A root that is an ulp off changes few elements of few rows of y: a random y seldom shows it."""
    values = torch.rand(1 << 16, generator=torch.Generator().manual_seed(3)) * 4
    assert np.array_equal(ieee_sqrt(values).numpy(), np.sqrt(values.numpy()))


def test_reference_norm_is_plain_torch_within_one_ulp() -> None:
    routed = torch.randn(2, 64, 3584, generator=torch.Generator().manual_seed(7)).to(BF16)
    weight = torch.ones(3584, dtype=BF16)
    total = (routed[0].float() + routed[1].float()).to(BF16).float()
    plain = (total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)).to(BF16)
    ours = reference_norm(routed, weight, EPS)
    steps = (ours.view(torch.int16).int() - plain.view(torch.int16).int()).abs()
    assert steps.max() <= 1
    assert (steps != 0).float().mean() < 0.01


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_reference_norm_keeps_a_bad_row_to_itself(bad: float) -> None:
    routed = torch.randn(1, 4, 512, generator=torch.Generator().manual_seed(1)).to(BF16)
    weight = torch.ones(512, dtype=BF16)
    good = reference_norm(routed, weight, EPS)
    routed[0, 2, 17] = bad
    poisoned = reference_norm(routed, weight, EPS)
    assert torch.equal(poisoned[[0, 1, 3]], good[[0, 1, 3]])
    assert not torch.equal(poisoned[2], good[2])


def test_reference_norm_refuses_a_width_of_broken_vectors() -> None:
    with pytest.raises(LaunchError, match="multiple of 8"):
        reference_norm(torch.zeros(1, 1, 12, dtype=BF16), torch.zeros(12, dtype=BF16), EPS)


def test_situ_is_its_formula() -> None:
    gate = torch.tensor([-30.0, -1.0, 0.0, 2.0, 30.0], dtype=torch.float64)
    up = torch.tensor([40.0, -3.0, 5.0, 25.0, -100.0], dtype=torch.float64)
    expected = 4 * np.tanh(gate.numpy() / 4) / (1 + np.exp(-gate.numpy())) * 25 * np.tanh(up.numpy() / 25)
    np.testing.assert_allclose(activate(kimi_k3_model().dims.activation, gate, up).numpy(), expected, rtol=1e-14)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_activation_is_the_formula_that_blocks_print(name: str) -> None:
    declared = ACTIVATIONS[name]
    numbers = tuple(1.5 + index for index, _ in enumerate(declared.parameters))
    gate = torch.linspace(-9, 9, 41, dtype=torch.float64)
    up = torch.linspace(4, -30, 41, dtype=torch.float64)
    names = {parameter.name: number for parameter, number in zip(declared.parameters, numbers, strict=True)}
    names |= {
        "max": lambda values, least: values.clamp(min=least),
        "g": gate,
        "u": up,
        "pi": math.pi,
        "sqrt": math.sqrt,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
    }
    expected = eval(declared.formula.replace("^", "**"), names)
    operands = (gate, up) if declared.gated else (up,)
    torch.testing.assert_close(activate(NamedFunction(name, numbers), *operands), expected)
    assert declared.functor


def test_activation_rounds_inside_where_it_is_declared_so() -> None:
    """In fp32, to bf16; fp64 is what programs are compared with, and rounded nowhere."""
    up = torch.tensor([1.0039, -2.0, 3.3333], dtype=torch.float32)
    relu2 = NamedFunction("relu2", ())
    assert activate(relu2, up).tolist() == [value**2 if value > 0 else 0.0 for value in up.to(BF16).tolist()]
    assert activate(relu2, up.double()).tolist() == [max(value, 0.0) ** 2 for value in up.double().tolist()]


def test_functor_of_an_activation_has_a_reference() -> None:
    assert {name for name, activation in ACTIVATIONS.items() if activation.functor} == set(FUNCTIONS)


def test_reference_front_in_fp64_agrees_with_rounded_fp32() -> None:
    model = tiny_model()
    operands = front_operands(model, 2, 9)
    inputs = [operands[name] for name in ("x", "gate_weight", "down_weight", "shared_gate_up_weight")]
    exact = reference_front(model.dims, *inputs, dtype=torch.float64)
    rounded = reference_front(model.dims, *inputs)
    assert [value.dtype for value in rounded] == [torch.float32, BF16, BF16]
    assert [tuple(value.shape) for value in rounded] == [(9, 384), (9, 512), (9, 512)]
    for value, reference in zip(rounded, exact, strict=True):
        tolerance = 1e-3 if value.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(value.double(), reference, atol=tolerance, rtol=tolerance)


def test_reference_tail_of_all_ranks_sums_to_tp_1() -> None:
    model, tp = tiny_model(), 4
    whole = tail_operands(model, 1, 5, partials=2)
    inputs = [whole[name] for name in ("routed", "norm_weight", "up_weight", "shared_act", "shared_down_weight")]
    y, out = reference_tail(model.dims, *inputs, tp=1, rank=0, dtype=torch.float64)
    width = model.dims.i_local(tp)
    total = torch.zeros_like(out)
    for rank in range(tp):
        columns = slice(rank * width, (rank + 1) * width)
        local = [*inputs[:3], inputs[3][:, columns], inputs[4][:, columns]]
        y_rank, part = reference_tail(model.dims, *local, tp=tp, rank=rank, dtype=torch.float64)
        assert torch.equal(y_rank, y)
        total += part
    torch.testing.assert_close(total, out, rtol=1e-12, atol=1e-12)

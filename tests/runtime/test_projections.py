"""The module of one layer's dense projections: weights by their checkpoint names, slices, and the layer itself."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from support.models import tiny_model
from support.runtime.operator_cases import checkpoint, tiny_latent_moe

from cakegen.errors import LaunchError
from cakegen.runtime import projections
from cakegen.runtime.projections import CHECKPOINT_NAMES, LatentMoeProjections
from cakegen.runtime.reference import reference_front, reference_tail

DIMS = tiny_model().dims
PREFIX = "model.layers.3.block_sparse_moe."
BF16_TOLERANCE = 1e-2


def rows(tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(tokens, DIMS.hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()


def layer(tp: int = 1, rank: int = 0, weights: dict[str, torch.Tensor] | None = None) -> LatentMoeProjections:
    made = LatentMoeProjections(tp=tp, rank=rank, moe=tiny_latent_moe())
    made.load_weights((weights or checkpoint(DIMS)).items())
    return made


def two_partials(logits: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    return torch.stack((latent * 0.75, latent * 0.25))


def test_layer_equals_the_reference_of_the_checkpoints_tensors() -> None:
    weights, x = checkpoint(DIMS), rows(5)
    gate_up = torch.cat((weights["shared_experts.gate_proj.weight"], weights["shared_experts.up_proj.weight"]))
    front = (weights["gate.weight"], weights["routed_expert_down_proj.weight"], gate_up)
    _, latent, shared_act = reference_front(DIMS, x, *front)
    tail = (weights["routed_expert_norm.weight"], weights["routed_expert_up_proj.weight"])
    down = weights["shared_experts.down_proj.weight"]
    _, expected = reference_tail(DIMS, two_partials(latent, latent), *tail, shared_act, down, tp=1, rank=0)
    with torch.inference_mode():
        assert torch.equal(layer(weights=weights)(x, two_partials), expected)


@pytest.mark.parametrize("tp", [2, 16])
def test_ranks_add_up_to_the_whole(tp: int) -> None:
    x = rows(3)
    expected = layer()(x, two_partials).double()
    total = sum(layer(tp, rank)(x, two_partials).double() for rank in range(tp))
    # each rank rounds its part to bf16
    torch.testing.assert_close(total, expected, atol=2 * BF16_TOLERANCE, rtol=2 * BF16_TOLERANCE)


def test_slices_fill_the_same_parameters_as_the_whole() -> None:
    tp, rank, weights = 4, 3, checkpoint(DIMS)
    width = DIMS.i_local(tp)
    mine = slice(rank * width, (rank + 1) * width)
    sliced = dict(weights)
    for name in ("gate_proj", "up_proj"):
        sliced[f"shared_experts.{name}.weight"] = weights[f"shared_experts.{name}.weight"][mine]
    sliced["shared_experts.down_proj.weight"] = weights["shared_experts.down_proj.weight"][:, mine]
    whole, part = layer(tp, rank, weights).state_dict(), layer(tp, rank, sliced).state_dict()
    assert all(torch.equal(whole[name], part[name]) for name in whole)


def test_loading_takes_files_in_any_order_and_passes_over_other_tensors() -> None:
    made = LatentMoeProjections(moe=tiny_latent_moe())
    named = [(PREFIX + name, tensor) for name, tensor in checkpoint(DIMS).items()]
    others: list[tuple[str, Any]] = [(PREFIX + "experts.0.w1.weight", None), ("gate.weight", None)]
    assert made.load_weights([*others, *named[4:]], PREFIX) == {name for name, _ in named[4:]}
    assert set(made.missing_weights) == {name.removeprefix(PREFIX) for name, _ in named[:4]}
    assert made.gate_weight.isnan().all()
    made.load_weights(reversed(named[:4]), PREFIX)
    assert made.missing_weights == ()
    assert not any(parameter.isnan().any() for parameter in made.parameters())


def test_state_dict_survives_a_file() -> None:
    first, file = layer(2, 1), io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = LatentMoeProjections(tp=2, rank=1, moe=tiny_latent_moe())
    second.load_state_dict(torch.load(file), assign=True)
    assert torch.equal(first(rows(2), two_partials), second(rows(2), two_partials))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "gate.weight",
            torch.zeros(7, 512).bfloat16(),
            r"gate.weight must be bfloat16 \[384, 512\] \(whole\) for TP 4",
        ),
        ("routed_expert_norm.weight", torch.zeros(512), r"got torch.float32 \[512\]"),
        (
            "shared_experts.down_proj.weight",
            torch.zeros(512, 512).bfloat16(),
            r"\[512, 1024\] \(whole\) or \[512, 256\] \(rank 1's slice\) for TP 4; got torch.bfloat16 \[512, 512\]",
        ),
    ],
)
def test_tensor_of_another_shape_or_type_is_refused(name: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        layer(4, 1).load_weights([(name, tensor)])


@pytest.mark.parametrize(("tp", "rank"), [(3, 0), (0, 0), (2, 2), (2, -1)])
def test_impossible_rank_is_refused(tp: int, rank: int) -> None:
    with pytest.raises(LaunchError, match=rf"latent width 512 .* 1024, .*got tp {tp}, rank {rank}"):
        LatentMoeProjections(tp=tp, rank=rank, moe=tiny_latent_moe())


def test_published_model_has_the_published_shapes() -> None:
    with torch.device("meta"):
        made = LatentMoeProjections(tp=8, rank=7)
    assert {name: tuple(parameter.shape) for name, parameter in made.named_parameters()} == {
        "gate_weight": (896, 7168),
        "down_weight": (3584, 7168),
        "norm_weight": (3584,),
        "up_weight": (7168, 3584),
        "shared_gate_up_weight": (1536, 7168),
        "shared_down_weight": (7168, 768),
    }
    assert set(CHECKPOINT_NAMES.values()) == set(dict(made.named_parameters()))
    with pytest.raises(LaunchError, match=r"meta device; call to_empty"):
        made.load_weights(checkpoint(DIMS).items())


def test_overlap_reaches_both_operators_and_loading_waits_for_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(projections, "_finish_writes", waited.append)
    for overlap in (False, True):
        made = LatentMoeProjections(moe=tiny_latent_moe(), overlap=overlap)
        made.load_weights(checkpoint(DIMS).items())
        given: list[bool] = []

        def noted(operator: Any, given: list[bool] = given) -> Any:
            return lambda *inputs, **options: given.append(options["overlap"]) or operator(*inputs, **options)

        made._front, made._tail = noted(made._front), noted(made._tail)
        assert torch.equal(made(rows(2), two_partials), layer()(rows(2), two_partials))
        assert given == [overlap, overlap]
    assert waited == [torch.device("cpu")]


def test_compiled_module_is_one_graph() -> None:
    made, x = layer(2, 1), rows(4)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(compiled(x, two_partials), made(x, two_partials))


@pytest.mark.parametrize("odd", ["no", "", 1, None])
def test_overlap_that_is_no_flag_is_refused(odd: Any) -> None:
    with pytest.raises(LaunchError, match=rf"LatentMoeProjections: overlap must be True or False; got {odd!r}"):
        LatentMoeProjections(moe=tiny_latent_moe(), overlap=odd)

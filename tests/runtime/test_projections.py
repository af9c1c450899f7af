"""The module of one layer's dense projections: weights by their checkpoint names, slices, and the layer itself."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.models import tiny_model
from support.runtime.operator_cases import checkpoint, tiny_latent_moe

from cakegen.errors import LaunchError, OperandError, RegistryError
from cakegen.runtime import projections
from cakegen.runtime.operators import operators_of
from cakegen.runtime.projections import CHECKPOINT_NAMES, LatentMoeProjections
from cakegen.runtime.reference import reference_front, reference_tail

DIMS = tiny_model().dims
PREFIX = "model.layers.3.block_sparse_moe."
BF16_TOLERANCE = 1e-2


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """A compilation that was refused leaves what it knows of the frames on its way to later ones."""
    yield
    torch._dynamo.reset()


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
    assert made.load_weights([*others, *named[4:]], PREFIX, strict=False) == {
        "shared_gate_up_weight",
        "shared_down_weight",
    }
    assert set(made.missing_weights) == {name.removeprefix(PREFIX) for name, _ in named[:4]}
    assert made.gate_weight.isnan().all()
    made.load_weights(reversed(named[:4]), PREFIX)
    assert made.missing_weights == ()
    assert not any(parameter.isnan().any() for parameter in made.parameters())


def test_weights_that_do_not_come_are_refused_with_the_prefix_that_there_is() -> None:
    made = LatentMoeProjections(moe=tiny_latent_moe())
    named = [("language_model." + PREFIX + name, tensor) for name, tensor in checkpoint(DIMS).items()]
    with pytest.raises(OperandError) as caught:
        made.load_weights(named, PREFIX)
    assert "must not end without gate.weight, routed_expert_down_proj.weight," in str(caught.value)
    assert f"7 names were passed over, and none begins with {PREFIX!r}" in str(caught.value)
    assert f"such names stand below 'language_model.{PREFIX}'. Name the prefix that the file has" in str(caught.value)
    with pytest.raises(OperandError, match=r"such names stand without a prefix"):
        made.load_weights(checkpoint(DIMS).items(), PREFIX)
    with pytest.raises(OperandError, match=r"without routed_expert_norm.weight; 0 names were passed over\."):
        made.load_weights((n, t) for n, t in checkpoint(DIMS).items() if n != "routed_expert_norm.weight")
    full = layer()
    with pytest.raises(OperandError, match=r"must not end without any tensor of this layer; 7 names"):
        full.load_weights(named, PREFIX)
    assert full.load_weights([]) == set()


def test_half_of_a_parameter_is_no_loaded_parameter() -> None:
    made = LatentMoeProjections(moe=tiny_latent_moe())
    gate, up = "shared_experts.gate_proj.weight", "shared_experts.up_proj.weight"
    assert made.load_weights([(gate, checkpoint(DIMS)[gate])], strict=False) == set()
    assert up in made.missing_weights
    assert gate not in made.missing_weights
    assert made.load_weights([(up, checkpoint(DIMS)[up])], strict=False) == {"shared_gate_up_weight"}


@pytest.mark.parametrize("sliced", [False, True])
def test_merged_gate_and_up_rows_fill_the_same_as_the_two(sliced: bool) -> None:
    tp, rank, weights = 4, 3, checkpoint(DIMS)
    halves = [weights.pop(f"shared_experts.{name}_proj.weight") for name in ("gate", "up")]
    expected = layer(tp, rank).shared_gate_up_weight
    if sliced:
        width = DIMS.i_local(tp)
        halves = [half[rank * width : (rank + 1) * width] for half in halves]
    made = LatentMoeProjections(tp=tp, rank=rank, moe=tiny_latent_moe())
    made.load_weights([*weights.items(), ("shared_experts.gate_up_proj.weight", torch.cat(halves))])
    assert made.missing_weights == ()
    assert torch.equal(made.shared_gate_up_weight, expected)


def test_merged_rows_that_are_odd_are_refused() -> None:
    with pytest.raises(
        OperandError, match=r"gate_up_proj.weight must be a matrix of shared_experts.gate_proj.weight ab"
    ):
        layer().load_weights([("shared_experts.gate_up_proj.weight", torch.zeros(3, 512).bfloat16())])


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        (torch.float8_e4m3fn, "a quantised one means nothing without its scale: multiply the two in fp32"),
        (torch.uint8, "a quantised one means nothing without its scale"),
        (torch.float32, r"Pass tensor.to\(torch.bfloat16\), if it may be rounded"),
        (torch.bfloat16, "another rank's slice"),
    ],
)
def test_tensor_of_another_type_is_refused_with_what_to_do(dtype: torch.dtype, advice: str) -> None:
    shape = (7, 7) if dtype == torch.bfloat16 else (DIMS.experts, DIMS.hidden)
    with pytest.raises(OperandError, match=rf"gate.weight must be bfloat16 .*{advice}"):
        layer().load_weights([("gate.weight", torch.zeros(shape).to(dtype))])


def test_state_dict_counts_as_loading_alone_and_inside_another_module() -> None:
    state = layer(2, 1).state_dict()
    made = LatentMoeProjections(tp=2, rank=1, moe=tiny_latent_moe())
    whole = torch.nn.ModuleDict({"moe": made})
    whole.load_state_dict({f"moe.{name}": tensor for name, tensor in state.items()})
    assert made.missing_weights == ()
    made(rows(1), two_partials)
    unfilled = LatentMoeProjections(tp=2, rank=1, moe=tiny_latent_moe()).state_dict()
    made.load_state_dict(unfilled)
    assert set(made.missing_weights) == set(CHECKPOINT_NAMES)


@pytest.mark.usefixtures("fresh_dynamo")
def test_call_before_the_weights_is_refused_and_names_them() -> None:
    made = LatentMoeProjections(moe=tiny_latent_moe())
    named = dict(checkpoint(DIMS))
    last = named.pop("routed_expert_up_proj.weight")
    made.load_weights(named.items(), strict=False)
    for call in (
        lambda: made(rows(1), two_partials),
        lambda: made.front(rows(1)),
        lambda: torch.compile(made, backend="aot_eager")(rows(1), two_partials),
    ):
        with pytest.raises(LaunchError, match=r"LatentMoeProjections: routed_expert_up_proj.weight must be loaded bef"):
            call()
    made.up_weight.copy_(last)
    made(rows(1), two_partials)
    assert made.missing_weights == ()


def test_memory_in_the_place_of_meta_parameters_is_not_taken_for_weights() -> None:
    with torch.device("meta"):
        made = LatentMoeProjections(moe=tiny_latent_moe())
    assert set(made.missing_weights) == set(CHECKPOINT_NAMES)
    assert made(torch.empty(2, DIMS.hidden, device="meta", dtype=torch.bfloat16), two_partials).shape == (2, 512)
    torch.nn.Sequential(made).to_empty(device="cpu")
    assert all(bool(parameter.isnan().all()) for parameter in made.parameters())
    with pytest.raises(LaunchError, match=r"must be loaded before a call"):
        made(rows(1), two_partials)
    made.load_weights(checkpoint(DIMS).items())
    assert made.float().bfloat16().missing_weights == ()


@pytest.mark.usefixtures("fresh_dynamo")
def test_input_that_autograd_records_is_refused_rather_than_left_without_a_gradient() -> None:
    made, x = layer(), rows(2).requires_grad_()
    compiled = torch.compile(made, backend="aot_eager")
    for call in (made, compiled):
        with pytest.raises(
            Exception, match=r"tiny_latent_moe_front: inputs must need no gradient, since there is no b"
        ):
            call(x, two_partials)
    with pytest.raises(LaunchError, match=r"tiny_latent_moe_tail: inputs must need no gradient"):
        made.tail(rows(2).requires_grad_(), made.front(rows(2))[2])
    with torch.no_grad():
        made(x, two_partials)
    with torch.inference_mode():
        made(x, two_partials)


def test_module_can_be_pickled_and_copied() -> None:
    first, x, file = layer(2, 1), rows(3), io.BytesIO()
    expected = first(x, two_partials)
    torch.save(first, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for second in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first), loaded):
        assert (second.tp, second.rank, second.missing_weights) == (2, 1, ())
        assert torch.equal(second(x, two_partials), expected)
    assert operators_of("tiny_latent_moe").front is first._front


def test_module_of_an_export_that_is_not_here_can_not_be_loaded() -> None:
    first = layer()
    first._export = "absent"
    with pytest.raises(RegistryError, match="absent"):
        pickle.loads(pickle.dumps(first))


def test_loading_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="cakegen")
    made = LatentMoeProjections(moe=tiny_latent_moe())
    made.load_weights([("gate.weight", checkpoint(DIMS)["gate.weight"]), ("other", torch.zeros(1))], strict=False)
    made.load_state_dict(layer().state_dict())
    told = [record.getMessage() for record in caplog.records if record.name == "cakegen.runtime.projections"]
    assert told[0].startswith("load_weights: used 1 names below '', passed over 1; missing: routed_expert_down_proj")
    assert told[-1] == "load_state_dict: missing: none"


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

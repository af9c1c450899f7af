"""Every way to cut and run a prefill GEMM, adversarial timing, models nobody chose, and rows up to 32-bit offsets.

`device_facts` of smaller devices reach the cuts that this device does not plan by itself. A build with
-DCAKEGEN_CHAOS sleeps, by a seed, before waits, arrivals, copies and stores.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

import pytest
import torch
from support.gpu.cases import (
    BF16_TOLERANCE,
    Case,
    Checks,
    FrontCase,
    GuardedPartials,
    TailCase,
    Weights,
    make_weights,
    rendered_tree,
    run_twice,
)
from support.gpu.checks import check_chunks, check_front, check_tail
from support.gpu.prefill import ROWS, Example, examples
from support.models import changed, hopper, one_tile_models, tiny_ragged_model
from support.random_models import random_model

from cakegen.errors import LaunchError
from cakegen.model import DeviceFacts, Model
from cakegen.registry import Registry
from cakegen.rules import CutRules, HopperTile
from cakegen.runtime import LatentMoe

CHAOS = ("-DCAKEGEN_CHAOS",)
SEEDS = {"tiny_latent_moe": range(1, 21), "kimi_k3_latent_moe": range(1, 4)}
Record = Callable[[str, object], None]


def models_of_devices(registry: Registry, flags: tuple[str, ...] = ()) -> Iterator[LatentMoe]:
    """The model as it is, and with each of its tiles in turn: on this device and on those of its export."""
    target = registry.model.target("sm_90a")
    assert target is not None
    for model in (registry.model, *one_tile_models(registry.model)):
        of_model = dataclasses.replace(registry, model=model)
        yield LatentMoe(of_model, compile_flags=flags)
        for sm_count in target.sm_counts:
            yield LatentMoe(of_model, device_facts=DeviceFacts.nominal("sm_90a", sm_count), compile_flags=flags)


def label_of(moe: LatentMoe, example: Example) -> str:
    """What a finding names: the device, the tiles that its plan prefers, the request."""
    costs = {tile.block_n: tile.iter_percent for tile in hopper(moe.model).prefill.tiles}
    return f"{moe._device_facts} tiles {costs} % {example}"


def case_of(example: Example, moe: LatentMoe, weights: Weights, partials: GuardedPartials) -> FrontCase | TailCase:
    """An example's case, of the last rank."""
    if example.stage == "front":
        return FrontCase(moe, weights, example.tp, example.tp - 1, partials)
    return TailCase(moe, weights, example.tp, example.tp - 1, example.partials, partials)


def check_example(checks: Checks, case: Case, example: Example, label: str) -> None:
    """Values, guards, relaunch, and equal bits of a call of fewer rows with the same plan."""
    tokens = (example.tokens, example.tokens - 100)
    if isinstance(case, FrontCase):
        check_front(checks, case, tokens, label)
    else:
        check_tail(checks, case, tokens, label)


def test_every_form_matches(
    prefill_moe: LatentMoe, prefill_weights: Weights, partials: GuardedPartials, record_property: Record
) -> None:
    """Every form that each device plans, on this one: their grids differ where their forms do not."""
    checks = Checks()
    forms: dict[DeviceFacts | None, set[Hashable]] = {}
    for moe in models_of_devices(prefill_moe.registry):
        for example in examples(moe, forms.setdefault(moe._device_facts, set())):
            case = case_of(example, moe, prefill_weights, partials)
            check_example(checks, case, example, label_of(moe, example))
    record_property("forms", len(set().union(*forms.values())))
    record_property("cases", checks.settle())


def test_ragged_cut_slices_match(
    device: torch.device, tmp_path: Path, partials: GuardedPartials, record_property: Record
) -> None:
    """A latent slice that ends inside a K iteration of a tile that is cut: no form of the two exports has both."""
    model = tiny_ragged_model()
    registry = rendered_tree(model, tmp_path)
    weights = make_weights(model, device, 3, tokens=ROWS)
    checks = Checks()
    seen: set[Hashable] = set()
    for moe in models_of_devices(registry):
        for example in examples(moe, seen, ("tail",)):
            for rank in {0, example.tp - 1}:
                case = TailCase(moe, weights, example.tp, rank, example.partials, partials)
                check_example(checks, case, example, f"{label_of(moe, example)} rank {rank}")
    assert any({"ragged", "split_k"} <= set(form) for form in seen if isinstance(form, tuple))
    record_property("cases", checks.settle())


def test_chaos_seeds_do_not_change_a_bit(
    prefill_moe: LatentMoe, prefill_weights: Weights, partials: GuardedPartials, record_property: Record
) -> None:
    """Every form of the small model with 20 seeds, of the large one with 3."""
    checks = Checks()
    record = prefill_moe.wait_record(prefill_weights.x.device)
    seen: set[Hashable] = set()
    for chaotic in models_of_devices(prefill_moe.registry, CHAOS):
        calm = LatentMoe(chaotic.registry, device_facts=chaotic._device_facts)
        for example in examples(chaotic, seen):
            case = case_of(example, calm, prefill_weights, partials)
            expected = tuple(value.clone() for value in case.prepare(example.tokens)())
            runner = case.prepare(example.tokens, moe=chaotic)
            for seed in SEEDS[prefill_moe.model.name]:
                # a launch reads the seed when it runs, so the one before it must have ended
                torch.cuda.synchronize()
                record.write_chaos_seed(seed)
                case.poison()
                for name, value, other in zip(case.names, runner(), expected, strict=True):
                    checks.equal(f"{label_of(chaotic, example)} {name} seed {seed}", value, other)
    torch.cuda.synchronize()
    record.write_chaos_seed(0)
    record_property("forms", len(seen))
    record_property("cases", checks.settle())


def _random_tile(tile: HopperTile, chance: random.Random) -> HopperTile:
    """With a ring of two stages at least, and an end and segments that cost something or nothing."""
    return dataclasses.replace(
        tile,
        num_stages=chance.randint(2, tile.num_stages),
        epilogue_iters=chance.choice((0, 2)),
        segment_cost=chance.choice((0, 1)),
    )


def random_prefill_model(seed: int) -> Model:
    """A random model whose prefill thresholds are random too; its rings may be shallow, its raster narrow."""
    chance = random.Random(seed)
    model = random_model(seed)
    return changed(
        model,
        hopper__prefill__raster_m_tiles=2 * chance.randint(1, 8),
        hopper__prefill__cut=CutRules(chance.randint(1, 4), chance.randint(2, 4), 1, 1),
        hopper__prefill__tiles=tuple(_random_tile(tile, chance) for tile in hopper(model).prefill.tiles),
    )


@pytest.mark.parametrize("seed", range(6))
def test_random_model_matches(
    seed: int, device: torch.device, tmp_path: Path, partials: GuardedPartials, record_property: Record
) -> None:
    model = random_prefill_model(seed)
    registry = rendered_tree(model, tmp_path)
    weights = make_weights(model, device, seed, tokens=2000)
    checks = Checks()
    counts = sorted({1, min(2, model.max_partials)})
    target = model.target("sm_90a")
    assert target is not None
    for sm_count in target.sm_counts:
        moe = LatentMoe(registry, device_facts=DeviceFacts.nominal("sm_90a", sm_count))
        for tp in target.tp_degrees:
            label = f"seed {seed} {sm_count} SMs tp {tp}"
            tokens = (129, 300, 777, 2000)
            moe.warm_up(device, tp, tokens=tokens, partials=counts)
            check_front(checks, FrontCase(moe, weights, tp, tp - 1, partials), tokens, label)
            for count in counts:
                check_tail(checks, TailCase(moe, weights, tp, tp - 1, count, partials), tokens, f"{label} P {count}")
    record_property("cases", checks.settle())


def most_rows(model: Model) -> int:
    """Rows at which the widest operand of either stage, its pitch gap included, ends just below 2^31 elements."""
    dims = model.dims
    pitch = max(dims.hidden, dims.latent, dims.experts, dims.shared_intermediate) + 64
    return (2**31 - 1) // pitch


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 8])
def test_rows_up_to_32_bit_offsets_match(
    prefill_moe: LatentMoe, device: torch.device, partials: GuardedPartials, tp: int, record_property: Record
) -> None:
    """An export without a limit of its own: element offsets reach 2^31 - 1, and byte offsets pass 2^32."""
    endless = dataclasses.replace(prefill_moe.model, max_tokens=2**31 - 1)
    moe = LatentMoe(dataclasses.replace(prefill_moe.registry, model=endless))
    tokens = most_rows(endless)
    torch.cuda.empty_cache()
    weights = make_weights(endless, device, 9, tokens=tokens, partials=1)
    checks = Checks()
    for case in (
        FrontCase(moe, weights, tp, tp - 1, partials),
        TailCase(moe, weights, tp, tp - 1, 1, partials),
    ):
        values = run_twice(checks, case, case.prepare(tokens), tokens, f"tp {tp}")
        check_chunks(checks, case, values, f"tp {tp}")
    record_property("tokens", tokens)
    record_property("cases", checks.settle())


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [24, 300])
def test_partials_that_span_more_than_32_bits_match(
    prefill_moe: LatentMoe,
    prefill_weights: Weights,
    partials: GuardedPartials,
    tokens: int,
    device: torch.device,
    record_property: Record,
) -> None:
    """Three partials 2^30 elements apart: the last begins at element 2^31, byte 2^32."""
    latent, stride = prefill_moe.model.dims.latent, 2**30
    case = TailCase(prefill_moe, prefill_weights, 8, 3, 3, partials)
    torch.cuda.empty_cache()
    memory = torch.empty(2 * stride + tokens * latent, dtype=torch.bfloat16, device=device)
    routed = memory.as_strided((3, tokens, latent), (stride, latent, 1))
    routed.copy_(case.routed[:, :tokens])
    checks = Checks()
    y, out = case.expected(slice(tokens))
    values = run_twice(checks, case, case.prepare(tokens, routed=routed), tokens, f"T {tokens}")
    checks.equal(f"T {tokens} y", values[0], y)
    checks.close(f"T {tokens} out", values[1], out, BF16_TOLERANCE)
    record_property("cases", checks.settle())


@pytest.fixture(autouse=True)
def returned_memory() -> Iterator[None]:
    """Give large blocks back: the next test may need them in another shape."""
    yield
    torch.cuda.empty_cache()


@pytest.mark.slow
def test_operands_beyond_32_bit_offsets_are_refused(warm_prefill: dict[str, LatentMoe], device: torch.device) -> None:
    moe = warm_prefill["kimi"]
    dims = moe.model.dims
    tokens = 2**31 // dims.hidden + 1
    x = torch.empty(tokens, dims.hidden, dtype=torch.bfloat16, device=device)
    span = tokens * dims.hidden
    few = torch.empty(2 * dims.i_local(8), dims.hidden, dtype=torch.bfloat16, device=device)
    with pytest.raises(LaunchError, match=rf"x must be at most 2\^31 - 1 .*It spans .* = {span} elements; split"):
        moe.prepare_front(x, few, few, few, few, few, few)

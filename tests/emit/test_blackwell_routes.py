"""Every request of the Blackwell parts resolves to committed programs, and no committed one is out of reach."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import pytest

from cakegen import paths
from cakegen.arch import ARCHITECTURES
from cakegen.model import DeviceFacts
from cakegen.plan import Plan, decode_smem, family_of, plan_route
from cakegen.plan.gemm_layout import blackwell_gemm_smem
from cakegen.plan.records import DecodeForm, GemmForm, Launch
from cakegen.registry import Program, Registry, load_registry

EXPORTS = sorted(path.parent.name for path in paths.generated_root().glob("*/cake_jit.py"))
BLACKWELL = tuple(arch.name for arch in ARCHITECTURES.values() if arch.family == "sm100")
FAMILY = family_of("sm_100a")
DECODE_THREADS, GEMM_THREADS = 192, 320
# of the published planner at TP 1 and 8 with 148 SMs; the 23 of decode are compared in tests/plan/test_decode.py
PUBLISHED_PREFILL = {
    *(f"front:i{i_local}{evict}" for i_local in (6144, 768) for evict in ("", "e1")),
    *("tail_norm:e0", "tail_norm:e1"),
    *(f"tail_gemm:{form}" for form in ("tp1e0f0t1", "tp1e1f1t1", "tp1e1f1s6t1")),
    *(f"tail_gemm:{form}" for form in ("tp8e0f0t1", "tp8e1f0t1", "tp8e0f0s9n128")),
}


@pytest.fixture(scope="module", params=EXPORTS)
def registry(request: pytest.FixtureRequest) -> Registry:
    return load_registry(request.param)


def plans(registry: Registry, arch: str, partials: tuple[int, ...]) -> Iterator[Plan]:
    """Both stages at every T of decode and both ends of every range of prefill, for all TP degrees and SM counts."""
    target = registry.model.target(arch)
    assert target is not None
    counts = [
        tokens for span in FAMILY.token_ranges(registry.model, registry.model.max_tokens) for tokens in ends(span)
    ]
    for sm_count in target.sm_counts:
        device = DeviceFacts.nominal(arch, sm_count)
        for tp in target.tp_degrees:
            for tokens in counts:
                request = {"tp": tp, "tokens": tokens, "device": device}
                yield plan_route(registry.model, stage="front", partials=1, **request)
                for count in partials:
                    yield plan_route(registry.model, stage="tail", partials=count, **request)


def ends(span: range) -> tuple[int, ...]:
    return tuple(dict.fromkeys((span[0], span[-1])))


@functools.cache
def reached(export: str, arch: str) -> frozenset[str]:
    found = plans(load_registry(export), arch, (1, 2, 3, 4))
    return frozenset(launch.key for plan in found for launch in plan.launches)


def test_the_known_parts_are_declared() -> None:
    model = load_registry("kimi_k3_latent_moe").model
    assert BLACKWELL == ("sm_100a", "sm_103a")
    for arch in BLACKWELL:
        target = model.target(arch)
        assert target is not None
        assert (target.sm_counts, target.tp_degrees) == ((148, 152), (1, 2, 4, 8, 16))


@pytest.mark.parametrize("arch", BLACKWELL)
def test_every_route_is_registered(registry: Registry, arch: str) -> None:
    """T = 1 to the largest, P = 1 to 4; what lies between the ends of a range is the next test's."""
    for key in reached(registry.export, arch):
        assert arch in registry.program(key).arches, key


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("sm_count", [148, 152])
def test_ends_of_ranges_reach_the_keys_of_every_token_count(tp: int, sm_count: int) -> None:
    """All 16256 sizes of prefill; P changes nothing there."""
    registry = load_registry("kimi_k3_latent_moe")
    request = {"tp": tp, "partials": 1, "device": DeviceFacts.nominal("sm_100a", sm_count)}
    found: set[str] = set()
    for span in FAMILY.token_ranges(registry.model, registry.model.max_tokens):
        if span[0] <= FAMILY.decode(registry.model).max_tokens:
            continue
        for stage in ("front", "tail"):
            keys = [launched(registry, stage, tokens, **request) for tokens in span]
            found |= set().union(*keys)
            assert keys[0] != keys[-1] or set(keys) == {keys[0]}, f"{stage}, T = {span}"
    assert found <= reached(registry.export, "sm_100a")


def launched(registry: Registry, stage: str, tokens: int, **request: object) -> tuple[str, ...]:
    plan = plan_route(registry.model, stage=stage, tokens=tokens, **request)  # type: ignore[arg-type]
    return tuple(launch.key for launch in plan.launches)


@pytest.mark.parametrize("pairs", [56, 66, 70])
def test_device_that_holds_fewer_pairs_has_its_programs(pairs: int) -> None:
    """The driver may count fewer than SMs // 2."""
    registry = load_registry("kimi_k3_latent_moe")
    device = dataclasses.replace(DeviceFacts.nominal("sm_100a", 148), resident_pairs=pairs)
    for span in FAMILY.token_ranges(registry.model, registry.model.max_tokens):
        for tokens in ends(span):
            for tp in (1, 2, 4, 8, 16):
                for stage in ("front", "tail"):
                    keys = launched(registry, stage, tokens, tp=tp, partials=1, device=device)
                    assert set(keys) <= set(registry.kernels), (stage, tp, tokens)


def test_partials_change_no_prefill_launch(registry: Registry) -> None:
    for tp in (1, 8):
        for tokens in (129, 300, 512, 5000):
            request = {"stage": "tail", "tp": tp, "tokens": tokens, "device": DeviceFacts.nominal("sm_100a", 148)}
            one, *others = (plan_route(registry.model, partials=partials, **request) for partials in (1, 2, 3, 4))
            assert all(other.launches == one.launches for other in others)


def test_the_published_keys_are_registered() -> None:
    registry = load_registry("kimi_k3_latent_moe")
    assert set(registry.kernels) >= PUBLISHED_PREFILL
    assert reached(registry.export, "sm_100a") >= PUBLISHED_PREFILL


def test_every_program_is_reached_and_is_one_text_for_both_architectures(registry: Registry) -> None:
    keys = reached(registry.export, "sm_100a")
    assert keys == reached(registry.export, "sm_103a")
    committed = {key for key in registry.kernels if set(registry.program(key).arches) & set(BLACKWELL)}
    assert committed == keys
    for key in committed:
        assert set(registry.program(key).arches) == set(BLACKWELL), key


def test_launch_record_is_what_the_plan_computes(registry: Registry) -> None:
    for plan in plans(registry, "sm_100a", (1, 2)):
        for launch in plan.launches:
            if isinstance(launch.form, DecodeForm):
                _check_decode(registry.program(launch.key), launch.form)
            elif isinstance(launch.form, GemmForm):
                _check_gemm(registry, registry.program(launch.key), launch)


def _check_decode(program: Program, form: DecodeForm) -> None:
    record = program.launch
    assert record.dynamic_smem_bytes == decode_smem(form).total_bytes <= 232448
    assert record.cluster == (form.cluster_ctas, 1, 1)
    assert record.cooperative == form.needs_residency
    assert record.block == (DECODE_THREADS, 1, 1)
    boxes = {entry.name: entry.box for entry in program.tensor_maps}
    tokens = "x" if form.stage == "front" else "shared_act"
    assert boxes[tokens] == (64, form.n_pad, form.chunks_per_stage)


def _check_gemm(registry: Registry, program: Program, launch: Launch) -> None:
    """A grid whose CTAs wait for each other's rows is resident as a whole, a cluster an item."""
    form, record = launch.form, program.launch
    assert isinstance(form, GemmForm)
    assert record.dynamic_smem_bytes == blackwell_gemm_smem(form).total_bytes <= 232448
    assert (record.block, record.cluster) == ((GEMM_THREADS, 1, 1), (2, 1, 1))
    assert record.cooperative == form.fused_norm
    assert record.programmatic == (form.stage == "tail" and not form.fused_norm)
    assert launch.grid_ctas == (2 * dict(launch.parameters)["num_items"], 1, 1)
    assert ("out" in {entry.name for entry in program.tensor_maps}) == (form.stage == "tail" and form.staged_store)
    assert registry.constants(launch.key) == dict(form.constants)

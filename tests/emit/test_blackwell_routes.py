"""Every decode request of the Blackwell parts resolves to committed programs, and no committed one is out of reach."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cakegen import paths
from cakegen.arch import ARCHITECTURES
from cakegen.model import DeviceFacts
from cakegen.plan import Plan, decode_smem, plan_route
from cakegen.plan.records import DecodeForm
from cakegen.registry import Program, Registry, load_registry

EXPORTS = sorted(path.parent.name for path in paths.generated_root().glob("*/cake_jit.py"))
BLACKWELL = tuple(arch.name for arch in ARCHITECTURES.values() if arch.family == "sm100")
THREADS = 192


@pytest.fixture(scope="module", params=EXPORTS)
def registry(request: pytest.FixtureRequest) -> Registry:
    return load_registry(request.param)


def decode_plans(registry: Registry, arch: str, partials: tuple[int, ...]) -> Iterator[Plan]:
    """Both stages at every T of decode, every TP degree and SM count that the export declares."""
    target = registry.model.target(arch)
    assert target is not None
    for sm_count in target.sm_counts:
        device = DeviceFacts.nominal(arch, sm_count)
        for tp in target.tp_degrees:
            for tokens in range(1, registry.model.decode.max_tokens + 1):
                request = {"tp": tp, "tokens": tokens, "device": device}
                yield plan_route(registry.model, stage="front", partials=1, **request)
                for count in partials:
                    yield plan_route(registry.model, stage="tail", partials=count, **request)


def test_the_known_parts_are_declared() -> None:
    model = load_registry("kimi_k3_latent_moe").model
    assert BLACKWELL == ("sm_100a", "sm_103a")
    for arch in BLACKWELL:
        target = model.target(arch)
        assert target is not None
        assert (target.sm_counts, target.tp_degrees) == ((148, 152), (1, 2, 4, 8, 16))


@pytest.mark.parametrize("arch", BLACKWELL)
def test_every_decode_route_is_registered(registry: Registry, arch: str) -> None:
    plans = 0
    for plan in decode_plans(registry, arch, tuple(range(1, 9))):
        plans += 1
        for launch in plan.launches:
            assert launch.key in registry.kernels, f"{arch}, {plan.device.sm_count} SMs: {launch.key}"
            assert arch in registry.program(launch.key).arches, launch.key
    target = registry.model.target(arch)
    assert target is not None
    assert plans == len(target.sm_counts) * len(target.tp_degrees) * 128 * 9


def test_every_program_is_reached_and_is_one_text_for_both_architectures(registry: Registry) -> None:
    reached = {
        arch: {launch.key for plan in decode_plans(registry, arch, (1, 2)) for launch in plan.launches}
        for arch in BLACKWELL
    }
    assert reached["sm_100a"] == reached["sm_103a"]
    committed = {key for key in registry.kernels if set(registry.program(key).arches) & set(BLACKWELL)}
    assert committed == reached["sm_100a"]
    for key in committed:
        assert set(registry.program(key).arches) == set(BLACKWELL), key


def test_launch_record_is_what_the_plan_computes(registry: Registry) -> None:
    for plan in decode_plans(registry, "sm_100a", (1, 2)):
        for launch in plan.launches:
            if isinstance(launch.form, DecodeForm):
                _check_launch(registry, registry.program(launch.key), launch.form)
                assert launch.grid_ctas == (launch.form.grid_ctas, 1, 1)


def _check_launch(registry: Registry, program: Program, form: DecodeForm) -> None:
    record = program.launch
    assert record.dynamic_smem_bytes == decode_smem(form, registry.model).total_bytes <= 232448
    assert record.cluster == (form.cluster_ctas, 1, 1)
    assert record.cooperative == form.needs_residency
    assert record.block == (THREADS, 1, 1)
    boxes = {entry.name: entry.box for entry in program.tensor_maps}
    tokens = "x" if form.stage == "front" else "shared_act"
    assert boxes[tokens] == (64, form.n_pad, form.chunks_per_stage)

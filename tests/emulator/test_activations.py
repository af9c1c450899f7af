"""Gated activations other than the exports': their fronts against fp64, decode and prefill, on every architecture."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.models import tiny_model

from cakegen.arch import architecture
from cakegen.emit import render_tree, write_exports
from cakegen.emulator import Options
from cakegen.emulator.launches.cases import Case, emulate_case
from cakegen.functions import ACTIVATIONS
from cakegen.model import Model, NamedFunction, Target
from cakegen.registry import Registry, load_registry

pytestmark = pytest.mark.emulator

ARCHES = ("sm_90a", "sm_100a", "sm_103a")
SM_COUNT = 6
OTHERS = ("swiglu", "geglu_tanh")


def model_of(activation: str) -> Model:
    """The small model at one TP degree and SM count; decode ends at 128 tokens."""
    tiny = tiny_model()
    dims = dataclasses.replace(tiny.dims, activation=NamedFunction(activation, ()))
    targets = tuple(Target(arch, (8,), (SM_COUNT,)) for arch in ARCHES)
    return dataclasses.replace(tiny, name=f"{activation}_moe", dims=dims, targets=targets)


@pytest.fixture(scope="module", params=OTHERS)
def activated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Registry:
    model = model_of(request.param)
    root: Path = tmp_path_factory.mktemp(model.name)
    write_exports(root, [render_tree(model, model.name)])
    return load_registry(root / model.name)


# of each architecture a decode and a prefill, each schedule twice
@pytest.mark.parametrize(
    ("arch", "tokens", "schedule"),
    [
        ("sm_90a", 5, "early"),
        ("sm_90a", 385, "late"),
        ("sm_100a", 5, "random"),
        ("sm_100a", 129, "early"),
        ("sm_103a", 5, "late"),
        ("sm_103a", 129, "random"),
    ],
)
def test_front_with_another_activation_matches_fp64(activated: Registry, arch: str, tokens: int, schedule: str) -> None:
    case = Case("front", 8, tokens, sm_count=SM_COUNT, arch=arch)
    report = emulate_case(activated, case, Options(schedule, 1, "wide"))
    assert report.problems == ()
    (launch,) = case.plan(activated.model).launches
    source = activated.read(activated.program(launch.key).kernel_source)
    assert f"using Activation = {ACTIVATIONS[activated.model.dims.activation.name].functor};" in source
    assert "kSitu" not in source
    assert architecture(arch).family in source


def test_programs_of_two_activations_differ_by_name(activated: Registry) -> None:
    names = {
        name.rsplit("_", 1)[1] for name, each in activated.programs.items() if each.role.startswith("decode_front")
    }
    other = next(name for name in OTHERS if name != activated.model.dims.activation.name)
    tree = render_tree(model_of(other), f"{other}_moe")
    assert names
    assert not any(digest in path for path in tree.files for digest in names)

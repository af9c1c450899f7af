"""The kernel's parameters, which follow from the argument plan, and the signature that declares them."""

from __future__ import annotations

import dataclasses

import pytest
from models import tiny_model

from cakegen import paths
from cakegen.emit.decode import norm_program
from cakegen.emit.environment import render_template, template_environment
from cakegen.emit.program import ProgramSpec
from cakegen.errors import EmitError
from cakegen.plan.records import NormForm
from cakegen.registry import LaunchRecord, TensorMapEntry

ARGUMENTS = (
    ("tma_buffer", "y_workspace"),
    ("buffer", "routed"),
    ("buffer", "y_workspace"),
    ("parameter", "num_tokens"),
    ("grid", "grid_x"),
)


@pytest.fixture
def spec() -> ProgramSpec:
    norm = norm_program(tiny_model(), NormForm(rows_per_cta=4, early_trigger=True), "sm90")
    return dataclasses.replace(norm, arg_plan=ARGUMENTS)


def test_parameters_are_the_argument_plan_without_the_grid(spec: ProgramSpec) -> None:
    assert spec.parameters == (
        ("const __grid_constant__ TensorMap", "y_workspace_map"),
        ("const u16*", "routed"),
        ("u16*", "y_workspace"),
        ("i32", "num_tokens"),
    )


def test_only_a_clipped_map_renames_its_program(spec: ProgramSpec) -> None:
    """Tables speak of programs by name, and most have no such map."""
    entry = TensorMapEntry("y_workspace", "y_workspace", "chunks", (64, 8, 1))
    whole = dataclasses.replace(spec, tensor_maps=(entry,))
    clipped = dataclasses.replace(spec, tensor_maps=(dataclasses.replace(entry, token_parts=2),))
    assert "token_parts" not in whole.canonical
    assert '"token_parts":2' in clipped.canonical
    assert whole.name != clipped.name


def test_buffer_without_a_type_is_refused(spec: ProgramSpec) -> None:
    unknown = dataclasses.replace(spec, arg_plan=(("buffer", "scales"),))
    message = r"tail_norm: buffer 'scales' has no C\+\+ type; those with one are routed, .*Add it to BUFFER_TYPES of"
    with pytest.raises(EmitError, match=message):
        assert unknown.parameters


@pytest.mark.parametrize(
    ("cluster_ctas", "smem_bytes", "attributes"),
    [
        (1, 0, "__launch_bounds__(Cfg::kNumThreads)\n"),
        (1, 4096, "__launch_bounds__(Cfg::kNumThreads, 1)\n"),
        (2, 4096, "__cluster_dims__(2, 1, 1)\n__launch_bounds__(Cfg::kNumThreads, 1)\n"),
    ],
)
def test_signature_follows_the_launch(spec: ProgramSpec, cluster_ctas: int, smem_bytes: int, attributes: str) -> None:
    launch = LaunchRecord((128, 1, 1), (cluster_ctas, 1, 1), False, False, False, smem_bytes)
    spec = dataclasses.replace(spec, launch=launch)
    text = render_template(template_environment(paths.templates_root()), "kernels/signature.cuh", {"spec": spec})
    assert text == (
        f'extern "C" __global__ void\n{attributes}kernel_{spec.name}(\n'
        "    const __grid_constant__ TensorMap y_workspace_map,\n"
        "    const u16* routed,\n"
        "    u16* y_workspace,\n"
        "    i32 num_tokens) {\n"
    )

"""A program's text: constants, signature and call, which follow from its constants, argument plan and operands."""

from __future__ import annotations

import dataclasses

import pytest
from support.models import tiny_model

from cakegen import paths
from cakegen.emit.decode import norm_program
from cakegen.emit.environment import render_template, template_environment
from cakegen.emit.operands import plain
from cakegen.emit.program import Constant, Operand, ProgramSpec
from cakegen.emit.tree import KERNEL_TEMPLATE
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
        ("u32", "num_tokens"),
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
    message = r"tail_norm: buffer 'scales' has no C\+\+ type; those with one are logits, .*Name an operand of the block"
    with pytest.raises(EmitError, match=message):
        assert unknown.parameters


def text_of(spec: ProgramSpec) -> str:
    """The program from `struct Cfg` on."""
    context = {"spec": spec, "headers": ["cake_body.cuh"], "about": ["What a CTA does."]}
    text = render_template(template_environment(paths.templates_root()), KERNEL_TEMPLATE, context)
    assert text.startswith('#include "cake_body.cuh"\n\nusing namespace cake;\n\n// What a CTA does.\n//\n')
    return text[text.index("struct Cfg {") :]


@pytest.mark.parametrize(
    ("cluster_ctas", "smem_bytes", "attributes"),
    [
        (1, 0, "__launch_bounds__(Cfg::kNumThreads)\n"),
        (1, 4096, "__launch_bounds__(Cfg::kNumThreads, 1)\n"),
        (2, 4096, "__cluster_dims__(2, 1, 1)\n__launch_bounds__(Cfg::kNumThreads, 1)\n"),
    ],
)
def test_signature_follows_the_launch_and_the_argument_plan(
    spec: ProgramSpec, cluster_ctas: int, smem_bytes: int, attributes: str
) -> None:
    launch = LaunchRecord((128, 1, 1), (cluster_ctas, 1, 1), False, False, False, smem_bytes)
    spec = dataclasses.replace(spec, launch=launch)
    _, _, behind = text_of(spec).partition("\n};\n\n")
    assert behind.startswith(
        f'extern "C" __global__ void\n{attributes}kernel_{spec.name}(\n'
        "    const __grid_constant__ TensorMap y_workspace_map,\n"
        "    const u16* routed,\n"
        "    u16* y_workspace,\n"
        "    u32 num_tokens) {\n"
    )


def test_constants_are_typed_by_their_values_and_a_text_names_a_macro(spec: ProgramSpec) -> None:
    constants = (
        Constant("kFlag", True, "a flag"),
        Constant("kCount", 3, "a count"),
        Constant("kScale", 0.5, "a scale"),
        Constant("kBlocks", "K2_ITERS", "from the compile line"),
    )
    spec = dataclasses.replace(spec, constants=constants)
    members, _, _ = text_of(spec).partition("\n};\n")
    assert members.splitlines()[1:] == [
        "    static constexpr bool kFlag = true;  // a flag",
        "    static constexpr int kCount = 3;  // a count",
        "    static constexpr float kScale = 0.5f;  // a scale",
        "    static constexpr u32 kBlocks = K2_ITERS;  // from the compile line",
    ]


def test_program_with_a_wait_record_has_an_identity(spec: ProgramSpec) -> None:
    waiting = dataclasses.replace(spec, arg_plan=(*ARGUMENTS, ("buffer", "wait_record")))
    assert f"    static constexpr u32 kProgramId = {waiting.program_id:#010x}u;" in text_of(waiting)
    assert "kProgramId" not in text_of(spec)


def test_body_is_called_with_structs_of_parameters_and_parameters(spec: ProgramSpec) -> None:
    operands = (
        Operand(("y_workspace_map", "routed"), "Inputs"),
        Operand((), "Nothing"),
        *plain("num_tokens"),
    )
    spec = dataclasses.replace(spec, operands=operands)
    _, _, call = text_of(spec).partition(") {\n")
    assert call == (
        "    tail_norm<Cfg>(\n"
        "        Inputs{\n"
        "            y_workspace_map, routed},\n"
        "        Nothing{},\n"
        "        num_tokens);\n"
        "}\n"
    )

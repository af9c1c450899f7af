"""The table of operands is what functions take, programs bind and operators declare."""

from __future__ import annotations

import inspect

import pytest
from models import kimi_k3_model

from cakegen.emit.program import BUFFER_TYPES
from cakegen.operands import STAGES, inputs_of, outputs_of, shape_of, weights_of
from cakegen.registry import load_registry
from cakegen.runtime import LatentMoe
from cakegen.runtime.validate import validate_front, validate_tail

# what a launch is given beside operands
OF_THE_LAUNCH = {"partials", "counters", "wait_record"}


def test_functions_take_the_operands_of_their_stage() -> None:
    for stage, functions in (
        ("front", (LatentMoe.prepare_front, validate_front)),
        ("tail", (LatentMoe.prepare_tail, validate_tail)),
    ):
        for function in functions:
            names = list(inspect.signature(function).parameters)[1:]
            inputs = [spec.name for spec in inputs_of(stage)]
            assert names[: len(inputs)] == inputs
            assert {spec.name for spec in outputs_of(stage)} <= set(names)


@pytest.mark.parametrize("export", ["kimi_k3_latent_moe", "tiny_latent_moe"])
def test_programs_bind_operands_of_their_stage_and_nothing_else(export: str) -> None:
    seen = {stage: set() for stage in STAGES}
    for program in load_registry(export).programs.values():
        stage = "front" if "front" in program.role else "tail"
        names = {name for kind, name in program.arg_plan if kind in ("tma_buffer", "buffer")}
        assert names - OF_THE_LAUNCH <= {spec.name for spec in STAGES[stage]}
        seen[stage] |= names - OF_THE_LAUNCH
        for entry in program.tensor_maps:
            assert entry.operand in {spec.name for spec in STAGES[stage]}
    assert seen == {stage: {spec.name for spec in specs} for stage, specs in STAGES.items()}


def test_buffers_have_the_type_of_their_operand() -> None:
    for spec in (*STAGES["front"], *STAGES["tail"]):
        # a weight and x are read through tensor maps alone
        kind = BUFFER_TYPES.get(spec.name)
        if kind is not None:
            assert ("float" in kind) == spec.fp32, spec.name
            if not spec.output and spec.name != "shared_act":
                assert kind.startswith("const "), spec.name


def test_shapes_are_a_ranks_share() -> None:
    dims = kimi_k3_model().dims
    shapes = {
        stage: {spec.name: shape_of(spec, dims, i_local=768, tokens=5, partials=3) for spec in specs}
        for stage, specs in STAGES.items()
    }
    assert shapes["front"] == {
        "x": (5, 7168),
        "gate_weight": (896, 7168),
        "down_weight": (3584, 7168),
        "shared_gate_up_weight": (1536, 7168),
        "logits": (5, 896),
        "latent": (5, 3584),
        "shared_act": (5, 768),
    }
    assert shapes["tail"] == {
        "routed": (3, 5, 3584),
        "norm_weight": (3584,),
        "up_weight": (7168, 3584),
        "shared_act": (5, 768),
        "shared_down_weight": (7168, 768),
        "y_workspace": (5, 3584),
        "out": (5, 7168),
    }
    assert [spec.name for spec in weights_of("tail")] == ["norm_weight", "up_weight", "shared_down_weight"]

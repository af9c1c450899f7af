"""The table of operands is what functions take, programs bind and operators declare."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models import kimi_k3_model

import cakegen
from cakegen import runtime
from cakegen.emit.operands import names_of
from cakegen.emit.program import buffer_types
from cakegen.operands import named, shape_of
from cakegen.registry import load_registry

# what a launch is given beside operands
DIMS = kimi_k3_model().dims
STAGES, FRONT, TAIL = DIMS.stages, DIMS.rows_stage, DIMS.sum_stage
OF_THE_LAUNCH = {"partials", "counters", "wait_record"}


def test_functions_take_the_operands_of_their_stage() -> None:
    for stage, functions in (
        (
            "front",
            (runtime.kimi_k3_latent_moe_front, runtime.prepare_kimi_k3_latent_moe_front),
        ),
        ("tail", (runtime.kimi_k3_latent_moe_tail, runtime.prepare_kimi_k3_latent_moe_tail)),
    ):
        for function in functions:
            names = [name for name in inspect.signature(function).parameters if name != "self"]
            inputs = [spec.name for spec in STAGES[stage].inputs]
            assert names[: len(inputs)] == inputs
            assert {spec.name for spec in STAGES[stage].outputs} <= set(names)


def test_programs_walk_what_waits_for_no_norm_first() -> None:
    assert [segment.tokens.short for segment in TAIL.along_k] == ["shared_act", "y"]
    assert [segment.shares_k for segment in TAIL.along_k] == [False, True]
    assert names_of(TAIL.mapped) == ("shared_down_weight", "up_weight", "shared_act", "y_workspace")
    assert names_of(FRONT.mapped) == ("gate_weight", "down_weight", "shared_gate_up_weight", "x")


def test_tolerances_are_those_of_the_contract() -> None:
    assert DIMS.tolerances == {"logits": 1e-3, "latent": 1e-2, "shared_act": 1e-2, "y": 0.0, "out": 1e-2}


def test_values_in_the_order_of_the_table_are_named() -> None:
    assert named(FRONT.outputs, (1, 2, 3)) == {"logits": 1, "latent": 2, "shared_act": 3}
    with pytest.raises(ValueError, match="shorter"):
        named(FRONT.outputs, (1, 2))


_NAMES = {spec.name for stage in STAGES.values() for spec in stage.operands}
# words that a layer of the model is spoken of with as well
_WORDS = {"x", "latent", "out", "logits", "routed", "shared_act"}
# where parameters of a function, names of a checkpoint or fields of a declaration are called so
_DECLARED = {"operands.py", "runtime/projections.py", "spec/block.py"}


def _strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            names = [each.value for each in node.elts if isinstance(each, ast.Constant) and each.value in _NAMES]
        elif isinstance(node, ast.Dict):
            keys = [key for key in node.keys if isinstance(key, ast.Constant)]
            names = [key.value for key in keys if key.value in _NAMES]
        else:
            continue
        if len(names) > 1 or set(names) - _WORDS:
            yield node.lineno, ", ".join(names)


def test_no_list_of_operand_names_stands_a_second_time() -> None:
    root = Path(cakegen.__file__).parent
    found = [
        f"{path.relative_to(root)}:{line}: {names}"
        for path in sorted(root.rglob("*.py"))
        if str(path.relative_to(root)) not in _DECLARED
        for line, names in _strings(ast.parse(path.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize("export", ["kimi_k3_latent_moe", "tiny_latent_moe"])
def test_programs_bind_operands_of_their_stage_and_nothing_else(export: str) -> None:
    seen = {stage: set() for stage in STAGES}
    for program in load_registry(export).programs.values():
        stage = "front" if "front" in program.role else "tail"
        names = {name for kind, name in program.arg_plan if kind in ("tma_buffer", "buffer")}
        assert names - OF_THE_LAUNCH <= {spec.name for spec in STAGES[stage].operands}
        seen[stage] |= names - OF_THE_LAUNCH
        for entry in program.tensor_maps:
            assert entry.operand in {spec.name for spec in STAGES[stage].operands}
    assert seen == {name: {spec.name for spec in stage.operands} for name, stage in STAGES.items()}


def test_buffers_have_the_type_of_their_operand() -> None:
    assert dict(buffer_types(DIMS)) == {
        "logits": "float*",
        "latent": "u16*",
        "shared_act": "u16*",
        "routed": "const u16*",
        "norm_weight": "const u16*",
        "y_workspace": "u16*",
        "out": "u16*",
    }


def test_shapes_are_a_ranks_share() -> None:
    dims = DIMS
    shapes = {
        name: {spec.name: shape_of(spec, dims, i_local=768, tokens=5, partials=3) for spec in stage.operands}
        for name, stage in STAGES.items()
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
    assert [spec.name for spec in TAIL.weights] == ["norm_weight", "up_weight", "shared_down_weight"]

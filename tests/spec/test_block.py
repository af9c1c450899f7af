"""Declarations of blocks: the shared ones parse and print, and what does not fit together is refused."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cakegen import paths
from cakegen.block import Block, RowsStage, SumStage, parse_call
from cakegen.block_text import formula_lines
from cakegen.cli.main import main
from cakegen.errors import SpecError
from cakegen.functions import ACTIVATIONS, NORMS
from cakegen.model import NamedFunction
from cakegen.operands import Product, Segment, stages_of
from cakegen.operands import RowsStage as Rows
from cakegen.operands import SumStage as Total
from cakegen.spec import parse_export, read_export
from cakegen.spec.block import block_file, parse_block, read_block
from cakegen.spec.honoured import missing_parts

BLOCKS = sorted(file.stem for file in (paths.exports_root() / "blocks").glob("*.toml"))
PLANNED = sorted((paths.exports_root() / "planned").glob("*.toml"))
BUILT = ("latent_moe", "latent_moe_relu2")
"""Blocks that programs have."""
TABLE = tomllib.loads(block_file("latent_moe").read_text())


@pytest.mark.parametrize("name", BUILT)
def test_operands_of_a_block_that_programs_have_are_those_that_it_declares(name: str) -> None:
    block = read_block(block_file(name))
    assert missing_parts(block) == ()
    front, tail = block.stages
    assert isinstance(front, RowsStage)
    assert isinstance(tail, SumStage)
    rows, total = stages_of(block)[front.name], stages_of(block)[tail.name]
    assert isinstance(rows, Rows)
    assert isinstance(total, Total)
    assert [front.input, *(product.weight for product in front.products)] == [spec.name for spec in rows.inputs]
    assert [product.output for product in front.products] == [spec.name for spec in rows.outputs]
    for product, known in zip(front.products, rows.products, strict=True):
        assert isinstance(known, Product)
        assert (product.gated, product.dtype == "fp32") == (known.gated, known.output.fp32)
        assert known.weight.shape[1] == front.k
    for segment, part in zip(tail.segments, total.segments, strict=True):
        assert isinstance(part, Segment)
        assert (segment.weight, segment.operand) == (part.weight.name, part.tokens.name)
        assert (segment.held == "whole") == part.shares_k
        assert (segment.prepared is not None) == (part.prepared is not None)
        if segment.prepared is not None and part.prepared is not None:
            assert segment.prepared.sum_of == part.prepared.partials.name
            assert segment.prepared.norm_weight == (part.prepared.weight.name if part.prepared.weight else "")
            assert (part.prepared.output in total.outputs) == segment.prepared.output
    assert tail.output == total.outputs[-1].name


def test_operands_of_a_block_without_a_norm_or_a_gate() -> None:
    front, tail = stages_of(read_block(block_file("latent_moe_relu2"))).values()
    assert [spec.name for spec in tail.inputs] == ["routed", "up_weight", "shared_act", "shared_down_weight"]
    assert [spec.name for spec in tail.outputs] == ["out"]
    assert [spec.name for spec in tail.mapped] == ["shared_down_weight", "up_weight", "shared_act", "reduced"]
    assert front.inputs[-1].shape == ("shared_intermediate / TP", "hidden")


MISSING = {
    "muse_spark_latent_moe": {
        "block: no program yet for front: logits: a scale",
        "block: no program yet for front: logits: a weight in fp32",
        "block: no program yet for front: latent: a norm behind a product",
        "block: no program yet for tail: segments whose operands are prepared; bodies add two",
    },
    "nemotron3_super_latent_moe": {
        "targets: TP 8 leaves 672 shared-expert columns a rank, which is not a multiple of 128",
        "targets: TP 16 leaves 336 shared-expert columns a rank",
    },
}


@pytest.mark.parametrize("file", PLANNED, ids=lambda file: file.stem)
def test_planned_export_is_read_and_refused_with_what_is_missing(file: Path) -> None:
    assert {file.stem for file in PLANNED} == {*MISSING, "nemotron3_ultra_latent_moe"}
    spec = read_export(file)
    assert spec.name == file.stem
    assert len(file.read_text().splitlines()) <= 40
    if file.stem not in MISSING:
        assert parse_export(file) == spec
        return
    with pytest.raises(SpecError) as caught:
        parse_export(file)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"planned/{file.name}: ") for line in lines)
    for part in MISSING[file.stem]:
        assert any(part in line for line in lines), part


@pytest.mark.parametrize("name", BLOCKS)
def test_block_prints_each_operand_with_its_shape(name: str) -> None:
    block = read_block(block_file(name))
    numbers = {symbol: 64 + index for index, symbol in enumerate((*block.widths, *block.numbers))}
    text = "\n".join(formula_lines(block, numbers))
    for operand in [product.output for product in block.products] + [segment.operand for segment in block.segments]:
        assert f"{operand} [T, " in text
    for width in block.widths:
        assert f"{width} {numbers[width]}" in text
    for part in (*block.products, *block.segments):
        assert f"{part.weight} [" in text


def test_show_prints_a_block_as_formulas() -> None:
    result = CliRunner().invoke(main, ["show", "--block", "kimi_k3_latent_moe"])
    assert result.exit_code == 0, result.output
    for line in (
        "front, of x [T, hidden 7168] bf16:",
        "  logits [T, experts 896] fp32 = x @ gate_weight.T",
        "    situ(g, u) = 4.0 * tanh(g / 4.0) * sigmoid(g) * 25.0 * tanh(u / 25.0)",
        "    shared_gate_up_weight [2 * shared_intermediate 6144 / TP, hidden 7168] bf16",
        "    kimi_rms(r) = w * (r / sqrt(m + 1e-05)); m the mean of squares of the row r",
    ):
        assert line in result.output.splitlines()
    planned = CliRunner().invoke(main, ["show", "--block", "muse_spark_latent_moe"])
    assert "    logits_scale = 0.1767766952966369" in planned.output.splitlines()
    assert "no program yet for front: logits: a scale, logits_scale" in planned.output.splitlines()


def test_show_block_refuses_options_of_programs() -> None:
    result = CliRunner().invoke(main, ["show", "--block", "kimi_k3_latent_moe", "--source"])
    assert result.exit_code == 2
    assert "--block reads an export alone" in result.output


def test_export_names_a_block_of_its_own(tmp_path: Path) -> None:
    """In a file beside it, or in the export itself; either is the shared block here."""
    text = (paths.exports_root() / "kimi_k3_latent_moe" / "export.toml").read_text()
    beside, within = tmp_path / "beside.toml", tmp_path / "within.toml"
    (tmp_path / "own.toml").write_text(block_file("latent_moe").read_text())
    beside.write_text(text.replace('block = "latent_moe"', 'block = "own.toml"'))
    stages = block_file("latent_moe").read_text().replace("[[stages", "[[block.stages")
    within.write_text(text.replace('block = "latent_moe"\n', "") + stages)
    assert parse_export(beside) == parse_export(within)
    (tmp_path / "own.toml").write_text(block_file("latent_moe_relu2").read_text())
    with pytest.raises(SpecError, match=r"beside.toml: model.norm_eps: unknown key"):
        parse_export(beside)


def edited(path: str, value: Any) -> dict[str, Any]:
    """The block of programs with another value somewhere; None takes a key away."""
    table = copy.deepcopy(TABLE)
    *outer, last = path.split(".")
    at: Any = table
    for part in outer:
        at = at[int(part)] if part.isdigit() else at[part]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return table


REFUSED = {
    "no stage": ("stages", [], "block.stages: needs 1 to 32 tables"),
    "another form": ("stages.0.form", "columns", "block.stages.0.form = 'columns': needs 'rows'"),
    "unknown key": ("stages.0.products.0.bias", "b", "block.stages.0.products.0.bias: unknown key"),
    "no weight": ("stages.0.products.0.weight", None, "block.stages.0.products.0.weight: missing"),
    "another dtype": ("stages.0.products.0.dtype", "fp8", "block.stages.0.products.0.dtype = 'fp8'"),
    "a number for a name": ("stages.1.n", 7168, "block.stages.1.n = 7168"),
    "no product": ("stages.0.products", [], "block.stages.0.products: needs 1 to 32; got 0"),
    "a name": ("stages.1.segments.0.prepared.sum_of", "Routed", "prepared.sum_of = 'Routed': a name is a lower-case"),
    "no call": ("stages.0.products.2.activation", "situ(", "activation = 'situ(': needs a call"),
    "no such activation": ("stages.0.products.2.activation", "selu", "there is no selu; use one of situ, swiglu"),
    "no such norm": ("stages.1.segments.0.prepared.norm", "layer", "there is no layer; use one of kimi_rms"),
    "arguments": (
        "stages.0.products.2.activation",
        "situ(situ_beta)",
        "situ takes 2 numbers (beta, linear_beta); got 1",
    ),
    "an argument": ("stages.1.segments.0.prepared.norm", "kimi_rms(1.5)", "eps = 1.5 must lie between 0 and 1"),
    "a norm without a weight": ("stages.1.segments.0.prepared.norm_weight", None, "a norm needs a weight"),
    "a weight twice": ("stages.1.segments.0.weight", "gate_weight", "gate_weight names a weight 2 times"),
    "an output twice": ("stages.0.products.0.output", "latent", "latent names what a block computes 2 times"),
    "an output like a weight": ("stages.1.output", "gate_weight", "names a weight and what a block computes"),
    "a width as a number": ("stages.0.products.0.scale", "hidden", "hidden is an extent, and a number of a function"),
    "another width": ("stages.1.segments.1.k", "latent", "k = latent, but its operand shared_act has"),
    "a share where all are needed": (
        "stages.1.segments.1.split",
        "none",
        "holds a rank's share of shared_intermediate",
    ),
    "all where a share is needed": ("stages.0.products.2.split", "replicated", "holds all of shared_intermediate"),
    "held without a split": ("stages.1.segments.0.split", "none", "held = 'whole' says how split = 'k' is held"),
}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.replace(" ", "_"))
def test_block_that_does_not_fit_together_is_refused(case: str) -> None:
    path, value, message = REFUSED[case]
    with pytest.raises(SpecError) as caught:
        parse_block(edited(path, value))
    assert message in str(caught.value)
    assert all(line.startswith("block") for line in str(caught.value).splitlines())


UNHONOURED = {
    "no activation": (
        "stages.0.products.2.activation",
        None,
        "front: products that are fp32 without an activation, bf",
    ),
    "scale": ("stages.0.products.0.scale", "logits_scale", "front: logits: a scale, logits_scale"),
    "rows of logits": ("stages.0.products.0.split", "rows", "front: logits: split = 'rows' of a product without an"),
    "rows of out": ("stages.1.segments.1.split", "rows", "tail: shared_down_weight: split = 'rows'"),
    "no y": ("stages.1.segments.0.prepared.output", False, "tail: up_weight: a normed sum that is not written"),
    "a slice of the up weight": (
        "stages.1.segments.0.held",
        "slice",
        "of which a rank holds its columns of the weight",
    ),
    "a given operand": ("stages.1.segments.0.prepared", None, "an operand, y_workspace, that no product of the block"),
    "the other norm": (
        "stages.1.segments.0.prepared.norm",
        "centred_rms(norm_eps)",
        "tail: up_weight: the norm centred_rms behind a sum",
    ),
    "a written sum": (
        "stages.1.segments.0.prepared",
        {"sum_of": "routed", "output": True},
        "tail: up_weight: a sum of partials without a norm that is written",
    ),
    "all of a normed sum": ("stages.1.segments.0.split", "none", "split = 'none' of a normed sum"),
    "one segment": ("stages.1.segments", TABLE["stages"][1]["segments"][:1], "segments whose operands are prepared;"),
    "the order of products": (
        "stages.0.products",
        [TABLE["stages"][0]["products"][at] for at in (1, 0, 2)],
        "products that are bf16 without an activation, fp32 without",
    ),
    "another stage": ("stages.0.name", "input", "a stage named input; routes and operators call it front"),
    "a reserved name": (
        "stages.0.products.0.weight",
        "num_tokens",
        "an operand named num_tokens, as calls and launches",
    ),
}


def test_block_may_have_names_of_its_own() -> None:
    table = edited("stages.0.products.0.weight", "router_weight")
    table["stages"][1]["segments"][0]["prepared"]["sum_of"] = "experts_sums"
    assert missing_parts(parse_block(table)) == ()


def test_extent_of_another_name_is_refused() -> None:
    text = block_file("latent_moe").read_text().replace('"experts"', '"routed_experts"')
    assert missing_parts(parse_block(tomllib.loads(text))) == ("an extent named routed_experts; plans call it experts",)


@pytest.mark.parametrize("case", UNHONOURED, ids=lambda case: case.replace(" ", "_"))
def test_block_that_programs_do_not_have_is_named_part_by_part(case: str) -> None:
    path, value, message = UNHONOURED[case]
    table = edited(path, value)
    if case == "all of a normed sum":
        table["stages"][1]["segments"][0]["held"] = "slice"
    if case == "rows of out":  # whole operands, or the declaration itself does not fit
        table = edited("stages.0.products.2.split", "replicated")
        table["stages"][1]["segments"][1]["split"] = "rows"
    parts = missing_parts(parse_block(table))
    assert any(message in part for part in parts), parts


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("swiglu", NamedFunction("swiglu", ())),
        ("geglu_tanh", NamedFunction("geglu_tanh", ())),
        ("situ(2.0, norm_eps)", NamedFunction("situ", (2.0, 1e-5))),
        ("situ(situ_linear_beta, situ_beta)", NamedFunction("situ", (25.0, 4.0))),
    ],
)
def test_gated_activation_of_a_block_reaches_the_model(tmp_path: Path, call: str, expected: NamedFunction) -> None:
    """By symbol or by value; a symbol that the block no longer has is none of the model's."""
    text = (paths.exports_root() / "kimi_k3_latent_moe" / "export.toml").read_text()
    text = text.replace('block = "latent_moe"', 'block = "own.toml"')
    text = "\n".join(line for line in text.splitlines() if not line.startswith("situ_") or line.split()[0] in call)
    (tmp_path / "export.toml").write_text(text)
    own = block_file("latent_moe").read_text().replace("situ(situ_beta, situ_linear_beta)", call)
    (tmp_path / "own.toml").write_text(own)
    dims = parse_export(tmp_path / "export.toml").to_model().dims
    assert dims.activation == expected
    assert dims.norm_eps == 1e-5


def test_stages_in_another_order_have_no_program() -> None:
    table = {"stages": TABLE["stages"][::-1]}
    assert missing_parts(parse_block(table))[0].startswith(
        "stages of the forms sum, rows; programs are written for one"
    )


def test_unknown_block_is_refused_with_those_that_there_are() -> None:
    for name in ("latent", "../latent_moe", "Latent"):
        with pytest.raises(
            SpecError, match=r"no such block; there is: latent_moe, latent_moe_input_norm, latent_moe_relu2"
        ):
            block_file(name)


def test_table_that_is_no_block_is_refused() -> None:
    for table in ([], {"stage": []}, {"stages": TABLE["stages"], "name": "x"}):
        with pytest.raises(SpecError, match=r"block: needs \[\[stages\]\] and nothing else"):
            parse_block(table)


@pytest.mark.parametrize("text", ["situ(", "situ()x", "1situ", "situ(a b)", "situ(,)", "", "situ(A)"])
def test_text_that_is_no_call_is_none(text: str) -> None:
    assert parse_call(text) is None


def test_gated_activations_are_those_of_two_operands() -> None:
    assert {name for name, activation in ACTIVATIONS.items() if activation.gated} == {"situ", "swiglu", "geglu_tanh"}
    assert not set(ACTIVATIONS) & set(NORMS), "a call names one function"
    assert isinstance(read_block(block_file("latent_moe_relu2")), Block)

"""What an export file may not declare: each refusal names the file and the field, and shows the arithmetic."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
from support.models import hopper, of_family, tiny_model
from support.random_models import model_toml, random_model

from cakegen import paths
from cakegen.errors import SpecError
from cakegen.model import Model, ModelDims, Target
from cakegen.rules import BlackwellRules, HopperRules, rule_fields
from cakegen.spec import parse_export
from cakegen.spec.block import block_file, read_block
from cakegen.spec.sections import TargetSection, model_section, section_of


def test_sections_have_the_fields_of_their_records() -> None:
    block = read_block(block_file("latent_moe"))
    assert list(model_section(block).model_fields) == [*block.widths, *block.numbers]
    assert {*block.widths, "norm_eps", "activation", "block"} == {field.name for field in dataclasses.fields(ModelDims)}
    assert list(TargetSection.model_fields) == [field.name for field in dataclasses.fields(Target)]


@pytest.mark.parametrize("record", [HopperRules, BlackwellRules])
def test_every_rule_has_more_than_one_legal_value(record: type) -> None:
    """A rule with one is no rule: it is a fact of the kernels."""
    tables, seen = [record], 0
    while tables:
        table = tables.pop()
        assert list(section_of(table).model_fields) == [field.name for field in dataclasses.fields(table)]
        for field in rule_fields(table):
            if field.table is not None:
                tables.append(field.table)
                continue
            meaning, seen = field.meaning, seen + 1
            assert meaning.text
            if meaning.one_of:
                assert len(meaning.one_of) > 1
            else:
                assert meaning.at_least is not None, field.name
                assert meaning.at_most is not None, field.name
                assert meaning.at_most - meaning.at_least >= (meaning.multiple_of or 1), field.name
    assert seen > 20


def parse_text(tmp_path: Path, text: str) -> Model:
    file = tmp_path / "tiny" / "export.toml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return parse_export(file).to_model()


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse_text(tmp_path, text)
    message = str(caught.value)
    assert all(line.startswith("tiny/export.toml: ") for line in message.splitlines())
    return message


@pytest.mark.parametrize("seed", range(20))
def test_random_model_survives_its_file(tmp_path: Path, seed: int) -> None:
    model = random_model(seed)
    assert parse_text(tmp_path, model_toml(model)) == model


EDITS = {
    "unknown key": ("hidden = 512", "hidden = 512\nhiden = 512", ["model.hiden: unknown key"]),
    "missing key": ("hidden = 512\n", "", ["model.hidden: missing"]),
    "unknown section": ("[hopper]", "[encode]\nx = 1\n[hopper]", ["encode: unknown key"]),
    "unknown rule": ("max_stages = 12", "max_stagse = 12", ["hopper.decode.max_stagse: unknown key"]),
    "rule that may not be left out": ("max_stages = 12", "max_stages = false", ["hopper.decode.max_stages: missing"]),
    "text for a number": ("hidden = 512", 'hidden = "512"', ["model.hidden = '512'"]),
    "float for an int": ("hidden = 512", "hidden = 512.0", ["model.hidden = 512.0"]),
    "bool for an int": ("max_stages = 12", "max_stages = true", ["hopper.decode.max_stages = True"]),
    "not finite": ("norm_eps = 1e-05", "norm_eps = nan", ["model.norm_eps = nan"]),
    "no eps": ("norm_eps = 1e-05", "norm_eps = 0.0", ["model.norm_eps = 0.0", "greater than 0"]),
    "eps that is no float": (
        "norm_eps = 1e-05",
        "norm_eps = 1e-46",
        ["model.norm_eps", "1.17549435e-38 or more"],
    ),
    "eps that is flushed": ("norm_eps = 1e-05", "norm_eps = 1e-38", ["model.norm_eps = 1e-38", "flushed to it"]),
    "beta that is no float": ("situ_beta = 4.0", "situ_beta = 5e-324", ["model.situ_beta = 5e-324"]),
    "negative beta": ("situ_beta = 4.0", "situ_beta = -4.0", ["model.situ_beta = -4.0"]),
    "token tile": (
        "n_pads = [8, 16, 32, 64, 128]",
        "n_pads = [8, 24, 128]",
        ["decode.n_pads: 24 is none", "8, 16, 32"],
    ),
    "token tile of the other family": (
        "n_pads = [8, 16, 32, 64, 128]",
        "n_pads = [8, 96, 128]",
        [
            "blackwell.decode.n_pads: 96 is none of [8, 16, 32, 64, 128]",
            "the widest token tile of a kernel has 128 rows",
        ],
    ),
    "rule of the other family": (
        "narrow = false",
        "narrow = { block_m = 96, max_n_pad = 64 }",
        ["blackwell.decode.front.narrow: Blackwell's MMA has 128 rows, all of one tile; leave it out"],
    ),
    "half a tile of 24 tokens": (
        "split_finalize_n_pad = 32",
        "split_finalize_n_pad = 24",
        ["hopper.decode.split_finalize_n_pad = 24", "halves are whole groups of 8 tokens"],
    ),
    "narrow weight tile": ("block_m = 96", "block_m = 80", ["front.narrow.block_m = 80", "64 or 96", "whole warps"]),
    "falling tiles": (
        "n_pads = [8, 16, 32, 64, 128]",
        "n_pads = [16, 8, 128]",
        ["decode.n_pads: 8 follows 16"],
    ),
    "tile of no CTA": (
        "max_cta_tokens = 192",
        "max_cta_tokens = 150",
        ["max_cta_tokens = 150", "multiple of 8"],
    ),
    "tile between two": (
        "max_cta_tokens = 192",
        "max_cta_tokens = 152",
        ["152 is none of", "160, 192"],
    ),
    "no tile": ("n_pads = [8, 16, 32, 64, 128]", "n_pads = []", ["blackwell.decode.n_pads = []"]),
    "no ring": ("max_stages = 12", "max_stages = 0", ["hopper.decode.max_stages = 0"]),
    "few tokens": (
        "max_tokens = 16384",
        "max_tokens = 64",
        ["max_tokens = 64 is below the widest of hopper.decode"],
    ),
    "no partials": ("max_partials = 64", "max_partials = 0", ["requests.max_partials = 0"]),
    "32 bits": ("max_tokens = 16384", "max_tokens = 1048576", []),
    "offsets": ("hidden = 512", "hidden = 131072", ["16384 tokens * 131072 columns = 2147483648", "2147483647"]),
    "half a tile": ("hidden = 512", "hidden = 576", ["model.hidden = 576", "576 = 4 * 128 + 64"]),
    "router tile": ("experts = 384", "experts = 392", ["model.experts = 392", "392 = 3 * 128 + 8"]),
    "unknown arch": ('"sm_90a"', '"sm_99a"', ["'sm_99a' is not supported", "sm_90a, sm_100a, sm_103a"]),
    "arch twice": ('"sm_100a"', '"sm_90a"', ["targets: arch: sm_90a follows sm_90a"]),
    "indivisible TP": ("[1, 2, 4, 8, 16]", "[1, 3]", ["TP 3 does not divide model.latent = 512", "512 = 170 * 3 + 2"]),
    "TP twice": ("[1, 2, 4, 8, 16]", "[1, 1]", ["tp_degrees: 1 follows 1"]),
    "no TP": ("[1, 2, 4, 8, 16]", "[]", ["targets.0.tp_degrees = []"]),
    "shared tile": ("[1, 2, 4, 8, 16]", "[32]", ["TP 32 leaves 32 shared-expert columns", "32 = 0 * 64 + 32"]),
    "no SM": ("sm_counts = [3, 6, 48, 114, 132]", "sm_counts = [0]", ["targets.0.sm_counts.0 = 0"]),
    "norm of a wide CTA": (
        "\nnorm_rows_per_cta = 4",
        "\nnorm_rows_per_cta = 33",
        ["hopper.norm_rows_per_cta = 33", "a row a warp; a CTA has at most 32 warps"],
    ),
    "pause behind the first fill": (
        "[blackwell.decode.tail.staged.staggered]\nfrom_n_pad = 16\npause_unit = 2",
        "[blackwell.decode.tail.staged.staggered]\nfrom_n_pad = 16\npause_unit = 40",
        ["would pause before unit 40; it ends after", "Lower decode.tail.staged.staggered.pause_unit to"],
    ),
    "ring of one stage": (
        "block_n = 256, num_stages = 4",
        "block_n = 256, num_stages = 1",
        ["hopper.prefill.tiles.0.num_stages = 1", "free a stage when they have issued the next one"],
    ),
    "odd raster": (
        "raster_m_tiles = 16\ntiles",
        "raster_m_tiles = 15\ntiles",
        ["hopper.prefill.raster_m_tiles = 15", "two row tiles"],
    ),
    "odd raster with tensor memory": (
        "raster_m_tiles = 16\nevict",
        "raster_m_tiles = 15\nevict",
        ["blackwell.prefill.raster_m_tiles = 15", "two row tiles"],
    ),
    "deep GEMM ring": (
        "num_stages = 4",
        "num_stages = 5",
        [
            "front, TP 1, 193 tokens",
            "sm_90a with 3 SMs",
            "tiles of 256 columns does not fit: 5 stages * 49152 bytes = 245760 of 232448",
            "Set hopper.prefill.tiles.0.num_stages to 4 at most",
        ],
    ),
    "ragged halves": ("block_n = 224", "block_n = 216", ["hopper.prefill.tiles.1.block_n = 216", "whole 8 columns"]),
    "wide MMA": ("block_n = 224", "block_n = 288", ["hopper.prefill.tiles.1.block_n = 288", "wgmma has N <= 256"]),
    "tile of three": ("tile_groups = 1", "tile_groups = 3", ["hopper.prefill.tiles.6.tile_groups = 3", "1 or 2"]),
    "too many sums": (
        "block_n = 224, num_stages = 4, tile_groups = 2",
        "block_n = 224, num_stages = 4, tile_groups = 1",
        [
            "hopper.prefill.tiles.1.block_n = 224",
            "128 / 1 rows * 224 columns / 128 threads = 224 sums a thread; registers hold 128",
            "Set it to 128 at most, or tile_groups to 2",
        ],
    ),
    "tile twice": (
        "block_n = 192",
        "block_n = 224",
        ["hopper.prefill.tiles.2", "224 columns with tile_groups = 2", "first in hopper.prefill.tiles.1; keep one"],
    ),
    "cheap first tile": (
        "iter_percent = 100",
        "iter_percent = 99",
        ["hopper.prefill.tiles.0.iter_percent = 99", "percents of the first tile's; set it to 100"],
    ),
    "no saving": (
        "min_saving = 1\n",
        "min_saving = 0\n",
        ["cut.min_saving = 0", "saves nothing is none"],
    ),
    "wide logits": ("experts = 384", "experts = 131072", ["16384 tokens * 131072 columns = 2147483648", "2147483647"]),
    "name": ('name = "tiny_latent_moe"', 'name = "Tiny MoE"', ["name = 'Tiny MoE'"]),
    "not TOML": ("[hopper]", "[hopper", ["not a TOML file", "line"]),
}


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.replace(" ", "_"))
def test_edit_is_refused_with_field_and_arithmetic(tmp_path: Path, edit: str) -> None:
    before, after, words = EDITS[edit]
    text = model_toml(tiny_model())
    assert before in text
    if not words:
        # a limit that these dimensions stay under
        assert parse_text(tmp_path, text.replace(before, after, 1)).max_tokens == 2**20
        return
    message = refusal(tmp_path, text.replace(before, after, 1))
    for word in words:
        assert word in message


def test_export_without_prefill_tiles_is_refused(tmp_path: Path) -> None:
    text = re.sub(r"tiles = \[.*?\n\]", "tiles = []", model_toml(tiny_model()), flags=re.DOTALL)
    assert "hopper.prefill.tiles = []" in refusal(tmp_path, text)


def test_rules_for_a_family_without_a_target_are_refused(tmp_path: Path) -> None:
    text = model_toml(of_family(tiny_model(), "sm_90a")) + "\n[blackwell.decode]\nmax_stages = 6\n"
    assert "blackwell: no [[targets]] section has an architecture of that family; add one or" in refusal(tmp_path, text)


def test_fault_of_the_shared_rules_names_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export that overrides nothing is not to blame."""
    shared = tmp_path / "exports"
    for folder in ("rules", "blocks"):
        shutil.copytree(paths.exports_root() / folder, shared / folder)
    file = shared / "rules" / "hopper.toml"
    file.write_text(file.read_text().replace("max_stages = 12", "max_stages = 99", 1))
    monkeypatch.setattr(paths, "exports_root", lambda: shared)
    text = model_toml(of_family(tiny_model(), "sm_90a"))
    text = text[: text.index("[hopper]")]
    message = refusal(tmp_path, text)
    assert message.startswith("tiny/export.toml: hopper.decode.max_stages = 99: ")
    assert message.endswith("(of rules/hopper.toml)")
    file.unlink()
    with pytest.raises(SpecError, match=r"No such file or directory; the rules of hopper are the file exports/rules/"):
        parse_text(tmp_path, text)


def test_file_of_rules_beside_the_export_is_read_and_must_lie_there(tmp_path: Path) -> None:
    text = model_toml(of_family(tiny_model(), "sm_90a"))
    head = f'hopper = "own.toml"\n{text[: text.index("[hopper]")]}'
    (tmp_path / "tiny").mkdir()
    with pytest.raises(SpecError, match=r"No such file.*tiny/export\.toml: hopper names it: a file of that"):
        parse_text(tmp_path, head)
    (tmp_path / "tiny" / "own.toml").write_text("[decode]\nmax_stages = 5\n")
    assert hopper(parse_text(tmp_path, head)).decode.max_stages == 5
    assert "hopper = '../own.toml': must be the name of a file beside" in refusal(
        tmp_path, head.replace("own.toml", "../own.toml")
    )


def test_slice_that_a_tensor_map_can_not_address_is_refused(tmp_path: Path) -> None:
    tiny = tiny_model()
    model = dataclasses.replace(
        tiny,
        dims=dataclasses.replace(tiny.dims, latent=128, shared_intermediate=4096),
        targets=(Target("sm_90a", (1, 32), (132,)),),
        blackwell=None,
    )
    message = refusal(tmp_path, model_toml(model))
    assert "TP 32 leaves 4 columns of model.latent = 8 bytes a row" in message
    assert "multiples of 16 bytes (8 columns)" in message


def test_ring_that_can_not_hold_the_outputs_is_refused_by_the_planner(tmp_path: Path) -> None:
    text = model_toml(tiny_model()).replace("max_stages = 12", "max_stages = 2", 1)
    message = refusal(tmp_path, text)
    assert "front, TP 1, 97 tokens" in message
    assert "sm_90a with 3 SMs" in message
    assert str(128 * (128 * 4 + 16)) in message, "the bytes of the output tile"
    assert "Raise decode.max_stages" in message


def test_sm_count_without_a_plan_is_refused(tmp_path: Path) -> None:
    tiny = tiny_model()
    model = dataclasses.replace(tiny, targets=(Target("sm_90a", (1,), (132,)), Target("sm_100a", (1,), (1,))))
    assert "sm_100a with 1 SMs" in refusal(tmp_path, model_toml(model))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        parse_export(tmp_path / "export.toml")


def test_all_that_is_wrong_with_shapes_is_told_at_once_with_a_way_out_each(tmp_path: Path) -> None:
    tiny = tiny_model()
    model = dataclasses.replace(
        tiny,
        dims=dataclasses.replace(tiny.dims, hidden=520, experts=392),
        max_tokens=16,
        targets=(Target("sm_90a", (1, 3, 5), (132,)),),
        blackwell=None,
    )
    lines = refusal(tmp_path, model_toml(model)).splitlines()
    for field, way_out in (
        ("requests.max_tokens = 16 is below", "raise the first or drop the token tile"),
        ("model.experts = 392 is not a multiple of 128", "Use a multiple, such as 512"),
        ("model.hidden = 520 is not a multiple of 128", "Use a multiple, such as 640"),
        ("TP 3 does not divide model.latent", "drop the degree"),
        ("TP 5 does not divide model.latent", "drop the degree"),
    ):
        (line,) = (line for line in lines if field in line)
        assert way_out in line
    assert len(lines) == len(set(lines))


def test_a_refusal_of_many_plans_is_told_once(tmp_path: Path) -> None:
    text = model_toml(tiny_model()).replace("max_stages = 12", "max_stages = 2", 1)
    reasons = [line.partition(" SMs: ")[2] for line in refusal(tmp_path, text).splitlines()]
    assert len(reasons) == len(set(reasons)) > 1
    assert all("Raise " in reason for reason in reasons)

"""What an export file may not declare: each refusal names the file and the field, and shows the arithmetic."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from models import tiny_model
from random_models import model_toml, random_model

from cakegen.errors import SpecError
from cakegen.model import Family, Model, ModelDims, Target
from cakegen.rules import DecodeRules, HopperPrefillRules, HopperTile, PrefillRules
from cakegen.spec import parse_export
from cakegen.spec.sections import (
    DecodeSection,
    HopperTileSection,
    KernelSection,
    ModelSection,
    PrefillSection,
    PrefillSm90Section,
    TargetSection,
)


@pytest.mark.parametrize(
    ("section", "record"),
    [
        (ModelSection, ModelDims),
        (TargetSection, Target),
        (KernelSection, Family),
        (DecodeSection, DecodeRules),
        (PrefillSection, PrefillRules),
        (PrefillSm90Section, HopperPrefillRules),
        (HopperTileSection, HopperTile),
    ],
)
def test_section_has_the_fields_of_its_record(section: type, record: type) -> None:
    assert list(section.model_fields) == [field.name for field in dataclasses.fields(record)]  # type: ignore[attr-defined]


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
    "unknown section": ("[decode]", "[encode]\nx = 1\n[decode]", ["encode: unknown key"]),
    "text for a number": ("hidden = 512", 'hidden = "512"', ["model.hidden = '512'"]),
    "float for an int": ("hidden = 512", "hidden = 512.0", ["model.hidden = 512.0"]),
    "bool for an int": ("max_stages = 12", "max_stages = true", ["decode.max_stages = True"]),
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
    "weight tile": ("block_m = 128", "block_m = 64", ["decode.block_m = 64", "two halves of 64 rows"]),
    "chunk width": ("block_k = 64", "block_k = 32", ["decode.block_k = 32", "128-byte swizzle row"]),
    "token tile": ("n_pads = [8, 16, 32, 64, 128]", "n_pads = [8, 24, 128]", ["decode.n_pads.1 = 24", "8, 16, 32"]),
    "falling tiles": ("n_pads = [8, 16, 32, 64, 128]", "n_pads = [16, 8, 128]", ["decode.n_pads: 8 follows 16"]),
    "narrow tiles": ("n_pads = [8, 16, 32, 64, 128]", "n_pads = [8, 64]", ["holds 64 tokens", "max_tokens is 128"]),
    "tile of no CTA": ("max_cta_tokens = 192", "max_cta_tokens = 150", ["max_cta_tokens = 150 is none of", "160, 192"]),
    "no tile": ("n_pads = [8, 16, 32, 64, 128]", "n_pads = []", ["decode.n_pads = []"]),
    "no ring": ("max_stages = 12", "max_stages = 0", ["decode.max_stages = 0"]),
    "few tokens": ("max_tokens = 16384", "max_tokens = 64", ["requests.max_tokens = 64", "decode.max_tokens = 128"]),
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
    "kernel twice": ('name = "tail_norm"', 'name = "decode"', ["decode for sm90: declared twice"]),
    "kernel's name": (
        'name = "tail_norm"',
        'name = "tail_nrom"',
        ["kernels: tail_nrom for sm90: no such kernel family", "decode, tail_norm, front_gemm, tail_gemm"],
    ),
    "norm of a wide CTA": (
        "\nnorm_rows_per_cta = 4",
        "\nnorm_rows_per_cta = 33",
        ["prefill.norm_rows_per_cta = 33", "a row a warp; a CTA has at most 32 warps"],
    ),
    "pause behind the first fill": (
        "stagger_units = 2",
        "stagger_units = 40",
        ["would pause before unit 40; it ends after", "Lower decode.stagger_units to"],
    ),
    "ring of one stage": (
        "block_n = 256\nnum_stages = 4",
        "block_n = 256\nnum_stages = 1",
        ["prefill_sm90.tiles.0.num_stages = 1", "free a stage when they have issued the next one"],
    ),
    "kernel's family": (
        'arch_family = "sm90"',
        'arch_family = "sm80"',
        ["no such family of architectures", "sm100, sm90"],
    ),
    "template path": ("kernels/sm90/decode.cu", "../decode.cu", ["kernels.0.template"]),
    "odd raster": (
        "raster_m_tiles = 16\nstream_k_min_ipc",
        "raster_m_tiles = 15\nstream_k_min_ipc",
        ["prefill_sm90.raster_m_tiles = 15", "two row tiles"],
    ),
    "odd raster with tensor memory": (
        "raster_m_tiles = 16\nfront_epilogue",
        "raster_m_tiles = 15\nfront_epilogue",
        ["prefill.raster_m_tiles = 15", "two row tiles"],
    ),
    "row tile that is no product's": (
        "block_m = 128\nblock_n = 256\nblock_k = 64\nraster",
        "block_m = 64\nblock_n = 256\nblock_k = 64\nraster",
        ["prefill.block_m = 64", "a pair has M = 256"],
    ),
    "deep GEMM ring": (
        "num_stages = 4",
        "num_stages = 5",
        [
            "front, TP 1, 193 tokens",
            "sm_90a with 3 SMs",
            "tiles of 256 columns does not fit: 5 stages * 49152 bytes = 245760 of 232448",
            "Set prefill_sm90.tiles.0.num_stages to 4 at most",
        ],
    ),
    "ragged halves": ("block_n = 224", "block_n = 216", ["prefill_sm90.tiles.1.block_n = 216", "whole 8 columns"]),
    "wide MMA": ("block_n = 224", "block_n = 288", ["prefill_sm90.tiles.1.block_n = 288", "wgmma has N <= 256"]),
    "tile of three": ("tile_groups = 1", "tile_groups = 3", ["prefill_sm90.tiles.6.tile_groups = 3", "take turns"]),
    "too many sums": (
        "block_n = 224\nnum_stages = 4\ntile_groups = 2",
        "block_n = 224\nnum_stages = 4\ntile_groups = 1",
        [
            "prefill_sm90.tiles.1.block_n = 224",
            "128 / 1 rows * 224 columns / 128 threads = 224 sums a thread; registers hold 128",
            "Set it to 128 at most, or tile_groups to 2",
        ],
    ),
    "tile twice": (
        "block_n = 192",
        "block_n = 224",
        ["prefill_sm90.tiles.2", "224 columns with tile_groups = 2", "first in prefill_sm90.tiles.1; keep one"],
    ),
    "cheap first tile": (
        "iter_percent = 100",
        "iter_percent = 99",
        ["prefill_sm90.tiles.0.iter_percent = 99", "percents of the first tile's; set it to 100"],
    ),
    "no saving": ("stream_k_min_saving = 1\n", "stream_k_min_saving = 0\n", ["prefill_sm90.stream_k_min_saving = 0"]),
    "reserve": ("barrier_bytes = 1024", "barrier_bytes = 1000", ["decode.barrier_bytes = 1000", "multiple of 1024"]),
    "no flags": (
        "flag_bytes = 1024",
        "flag_bytes = 0",
        ["decode.flag_bytes = 0", "keeps its seed there"],
    ),
    "wide logits": ("experts = 384", "experts = 131072", ["16384 tokens * 131072 columns = 2147483648", "2147483647"]),
    "name": ('name = "tiny_latent_moe"', 'name = "Tiny MoE"', ["name = 'Tiny MoE'"]),
    "not TOML": ("[decode]", "[decode", ["not a TOML file", "line"]),
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
    text = model_toml(tiny_model())
    head = text[: text.index("[[prefill_sm90.tiles]]")]
    assert "prefill_sm90.tiles: missing" in refusal(tmp_path, head)
    assert "prefill_sm90.tiles = []" in refusal(tmp_path, head + "tiles = []\n")


def test_slice_that_a_tensor_map_can_not_address_is_refused(tmp_path: Path) -> None:
    tiny = tiny_model()
    model = dataclasses.replace(
        tiny,
        dims=dataclasses.replace(tiny.dims, latent=128, shared_intermediate=4096),
        targets=(Target("sm_90a", (1, 32), (132,)),),
        families=tuple(family for family in tiny.families if family.arch_family == "sm90"),
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

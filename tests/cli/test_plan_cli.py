"""`cakegen plan`: what it prints for one request, for a range, and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import click.testing
import pytest
from support.call_counts import calls_of
from support.models import kimi_k3_model

from cakegen.cli.plan import parse_tokens, plan_command
from cakegen.errors import BenchError, PlanError
from cakegen.measured import MeasuredRow, MeasuredTable, render_table

B200 = ("--sm-count", "148", "--arch", "sm_100a")


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A registry that holds the product's model; the names that were asked for."""
    asked: list[str] = []

    def load_registry(export: str) -> SimpleNamespace:
        asked.append(export)
        return SimpleNamespace(model=kimi_k3_model())

    monkeypatch.setattr("cakegen.registry.load_registry", load_registry)
    return asked


def run(*arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(plan_command, arguments)


def test_plan_prints_key_grid_and_rules(registry: list[str]) -> None:
    result = run("--stage", "tail", "--tp", "8", "--tokens", "16", "--partials", "1", *B200)
    assert result.exit_code == 0, result.output
    symbol = "kimi_k3_latent_moe_decode_g112_n16_r5_d1_p0_w0_t0_56_0_k7_12_o7168_c2_f_sb_rs_np_st2_ww"
    assert f"launch 1: decode:{symbol}\n" in result.output
    assert "grid_ctas   112 x 1 x 1\n" in result.output
    assert "smem        232448 of 232448 bytes\n" in result.output
    assert "130048 resident) // 18432 bytes a stage = 5, at most 12" in result.output
    assert registry == ["kimi_k3_latent_moe"]


def test_plan_prints_prefill_parameters() -> None:
    result = run("--stage", "tail", "--tp", "1", "--tokens", "1024", *B200)
    assert "launch 1: tail_norm:e1\n" in result.output
    assert "launch 2: tail_gemm:tp1e0f0t1\n" in result.output
    expected = "m_tiles=8 num_items=148 full_items=74 sk_ipc=79 sk_max_seg=3 sk_total=5776"
    assert f"parameters  {expected}\n" in result.output


def test_plan_folds_equal_neighbours_into_one_row() -> None:
    result = run("--stage", "tail", "--tp", "8", "--tokens", "1:600", *B200)
    rows = [line.split() for line in result.output.splitlines()[1:] if not line.startswith(" " * 14)]
    spans = [row[0] for row in rows]
    assert spans == ["1:8", "9:16", "17:32", "33:64", "65:128", "129:256", "257:511", "512", "513:600"]
    assert "tail_norm:e0  [65 x 1 x 1 … 128 x 1 x 1]" in result.output


def test_plan_json_has_one_exact_object_a_line() -> None:
    result = run("--stage", "front", "--tp", "8", "--tokens", "128:129", "--partials", "3", "--json", *B200)
    decode, prefill = (json.loads(line) for line in result.output.splitlines())
    for plan in (decode, prefill):
        assert plan.pop("max_dynamic_smem_bytes") == 232448
        assert all({"field", "value", "reason"} == set(rule) for rule in plan.pop("rules"))
    request = {"stage": "front", "tp": 8, "partials": 3, "arch": "sm_100a", "sm_count": 148}
    key = "decode:kimi_k3_latent_moe_decode_g94_n128_r7_d1_p0_w0_t7_28_12_k112_0_o3584_c2_la"
    assert decode == {
        **request,
        "tokens": 128,
        "launches": [
            {
                "key": key,
                "grid_ctas": [94, 1, 1],
                "parameters": {"weights_ahead": 3},
                "overlapping": {"weights_ahead": 3},
                "threads": 192,
                "cluster_ctas": 2,
                "cooperative": False,
                "dynamic_smem_bytes": 231424,
                "programmatic": False,
                "overlap": True,
            }
        ],
    }
    parameters = {
        "m_tiles": 2,
        "num_items": 48,
        "full_items": 0,
        "sk_ipc": 56,
        "sk_max_seg": 2,
        "sk_total": 2688,
    }
    assert prefill == {
        **request,
        "tokens": 129,
        "launches": [
            {
                "key": "front:i768e1",
                "grid_ctas": [96, 1, 1],
                "parameters": parameters,
                "overlapping": None,
                "threads": 320,
                "cluster_ctas": 2,
                "cooperative": False,
                "dynamic_smem_bytes": 231424,
                "programmatic": False,
                "overlap": False,
            }
        ],
    }


@pytest.mark.parametrize("stage", ["front", "tail"])
def test_every_token_count_is_planned_in_few_calls(stage: str) -> None:
    results = []
    calls = calls_of(lambda: results.append(run("--stage", stage, "--tp", "1", "--tokens", "1:16384", "--json", *B200)))
    assert len(results[0].output.splitlines()) == 16384
    # 262 a count of the front, 362 of the tail: seconds for all
    assert calls < 500 * 16384


def test_plan_takes_export_and_resident_pairs(registry: list[str]) -> None:
    common = ("--stage", "tail", "--tp", "1", "--tokens", "32", "--export", "other")
    paired = run(*common)
    single = run(*common, "--resident-pairs", "55")
    assert "_pair_memory_halves@sm_90a" in paired.output
    assert "_memory@sm_90a" in single.output
    assert "tail_tp1_n32_r11_memory@sm_90a" in single.output
    assert registry == ["other", "other"]


def test_plan_shows_what_it_can_before_it_refuses() -> None:
    result = run("--stage", "front", "--tp", "8", "--tokens", "16257:16385", "--arch", "sm_90a", "--sm-count", "132")
    assert isinstance(result.exception, PlanError)
    assert "16257:16384" in result.output


@pytest.mark.parametrize("text", ["", "x", "1:y", "9:8", "1:2:3", "5:", ":5", f"1:{10**30}", str(2**31)])
def test_plan_refuses_malformed_tokens(text: str) -> None:
    result = run("--stage", "front", "--tp", "8", "--tokens", text)
    assert result.exit_code == 2
    assert "--tokens" in result.output


def test_tokens_are_one_count_or_an_inclusive_range() -> None:
    assert list(parse_tokens("16")) == [16]
    assert list(parse_tokens("3:5")) == [3, 4, 5]


H200 = ("--stage", "tail", "--tp", "1", "--sm-count", "132")


def table_file(tmp_path: Path, *rows: MeasuredRow) -> str:
    provenance = {"commit": "0123456789abcdef", "date": "2026-11-29T19:48:59+00:00"}
    file = tmp_path / "t.json"
    file.write_text(render_table(MeasuredTable("NVIDIA H200", 132, provenance, rows)))
    return str(file)


def test_plan_names_the_measured_rows_beside_it_and_which_way_is_faster(tmp_path: Path) -> None:
    keys = ("tail_norm:e1@sm_90a", "tail_gemm:old@sm_90a")
    chains = {"joined": 100.0, "separate": 110.0}
    rows = [MeasuredRow("tail", 1, tokens, keys, us, chains) for tokens, us in ((256, 120.0), (512, 105.0))]
    file = table_file(tmp_path, *rows)
    between = run(*H200, "--tokens", "300", "--measured", file)
    assert between.exit_code == 0, between.output
    assert between.output.split("measured on ")[1] == (
        "NVIDIA H200, 132 SMs, commit 0123456789ab, 2026-11-29, P = 1 (h200_132.json)\n"
        "  T 256    ours 120 us; stock chains: joined 100 us, separate 110 us\n"
        "  T 512    ours 105 us; stock chains: joined 100 us, separate 110 us\n"
        "  faster   joined: at least 3% faster in each; ours / joined is 1.200 at T 256, 1.050 at T 512\n"
        "  launched the programs above: backend='auto' takes no stock chain\n"
    )
    measured = run(*H200, "--tokens", "512", "--measured", file)
    assert "measured with other programs: tail_norm:e1@sm_90a, tail_gemm:old@sm_90a\n" in measured.output
    assert "tail_gemm:old" not in measured.output.split("measured on ")[0]
    literal = json.loads(run(*H200, "--tokens", "512", "--measured", file, "--json").output)["measured"]
    assert literal == [
        {
            "table": "h200_132.json",
            "device": "NVIDIA H200",
            "commit": "0123456789abcdef",
            "faster": "joined",
            "rows": [{"tokens": 512, "ours_us": 105.0, "chains_us": {"joined": 100.0, "separate": 110.0}}],
        }
    ]


def test_plan_of_another_device_names_no_row_and_refuses_a_named_table(tmp_path: Path) -> None:
    file = table_file(tmp_path, MeasuredRow("tail", 1, 256, ("tail_norm:e1@sm_90a",), 120.0, {"joined": 100.0}))
    arguments = ("--stage", "tail", "--tp", "1", "--tokens", "256", "--measured", file)
    for device in (("--sm-count", "114"), B200, ("--arch", "sm_100a", "--sm-count", "132")):
        result = run(*arguments, *device)
        assert isinstance(result.exception, BenchError)
        assert f"{file}: measured on NVIDIA H200 with 132 SMs; the plan is for" in str(result.exception)
        plain = run(*arguments[:-2], *device)
        assert (plain.exit_code, "measured" in plain.output) == (0, False), plain.output


def test_plan_looks_into_the_exports_own_tables() -> None:
    result = run(*H200, "--tokens", "256")
    assert "measured on NVIDIA H200, 132 SMs" in result.output
    assert "(h200_132.json)\n  T 256    ours " in result.output

"""`cakegen mutate`: from keys to a table, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import click.testing

from cakegen.cli.main import main

KEY = "decode:tiny_latent_moe_decode_g4_n8_r11_d1_p0_w0_t0_4_0_k1_2_o512_c1@sm_90a"


def run(*arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(main, ["mutate", *arguments])


def test_mutants_are_run_and_counted_and_the_run_is_not_repeated(tmp_path: Path) -> None:
    out, kept = tmp_path / "results.jsonl", tmp_path / "survivors.jsonl"
    arguments = [KEY, "--operator", "parity", "--operator", "swap", "--seeds", "0", "--out", str(out)]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("tiny_latent_moe sm_90a, early, late, 0 seeds and a chain, NVRTC")
    rows = {line.split()[0]: line.split() for line in result.output.splitlines() if line}
    assert rows["parity"][-2:] == ["100.0", "%"]
    assert rows["swap"][-2:] == ["100.0", "%"]
    before = out.read_text()
    assert run(*arguments).exit_code == 0
    assert out.read_text() == before
    assert run("--table", "--out", str(out), "--survivors", str(kept)).output == result.output
    assert kept.read_text() == ""


def test_survivor_is_kept_with_its_line(tmp_path: Path) -> None:
    out, kept = tmp_path / "results.jsonl", tmp_path / "survivors.jsonl"
    entry = {"operator": "count", "change": "+1", "instruction": "bar.sync 0", "line": "f();", "key": "k", "site": "s"}
    header = {"export": "x", "arch": "sm_90a", "seeds": 1, "nvrtc": "NVRTC"}
    out.write_text(f"{json.dumps(header)}\n{json.dumps({**entry, 'outcome': 'survived'})}\n")
    result = run("--table", "--out", str(out), "--survivors", str(kept))
    assert "unexplained: count (+1) `bar.sync 0`\n  f();" in result.output
    assert json.loads(kept.read_text()) == {**entry, "kind": "unexplained"}


def test_no_programs_and_unknown_operators_are_usage_errors() -> None:
    result = run()
    assert result.exit_code == 2
    assert "give KEYs or --programs" in result.output
    result = run(KEY, "--operator", "melt")
    assert result.exit_code == 2
    assert "no operator melt; there is: bytes, column, count" in result.output

"""`cakegen mutate`: from keys to a table, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import click.testing

import cakegen
from cakegen.cli.main import main

CHAIN = Path(cakegen.__file__).parents[1] / "examples" / "emulate" / "chain"
KEY = "decode:tail_tp8_n8_r11_apart@sm_90a"


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
    assert "no operator melt; there is: accumulate, allocation, bytes" in result.output


def test_files_that_can_not_be_read_are_named(tmp_path: Path) -> None:
    file = tmp_path / "programs.txt"
    file.write_bytes(b"\xff\xfe")
    result = run("--programs", str(file))
    assert result.exit_code == 2
    assert f"{file}: is no text" in result.stderr.replace("\n", "")
    result = run("--table", "--out", str(tmp_path / "none.jsonl"))
    assert result.exit_code == 1
    assert result.stderr == f"cakegen: {tmp_path}/none.jsonl: No such file or directory\n"


def test_kernel_of_a_launch_file_is_mutated(tmp_path: Path) -> None:
    """The second of two launches: its store, its wait for the first one, and its barrier matter."""
    out = tmp_path / "results.jsonl"
    files = ["--cuda", str(CHAIN.with_suffix(".cu")), "--launch", str(CHAIN.with_suffix(".json"))]
    chosen = ["--entry", "consume", "--operator", "drop-wait", "--operator", "drop-store", "--seeds", "1"]
    result = run(*files, *chosen, "--out", str(out))
    assert result.exit_code == 0, result.output
    assert result.output.startswith("chain sm_90a, early, late, 1 seeds, NVRTC")
    found = {(entry["operator"], entry["line"]): entry for entry in map(json.loads, out.read_text().splitlines()[1:])}
    assert found["drop-wait", "griddepcontrol_wait();"]["outcome"] in ("programmatic", "unwritten-read")
    assert found["drop-wait", "__syncthreads();"]["outcome"] == "unwritten-read"
    assert found["drop-store", "sums[i] = squares[i] + staged[63 - threadIdx.x];"]["outcome"] == "output"


def test_launch_files_and_keys_are_told_apart() -> None:
    files = ["--cuda", str(CHAIN.with_suffix(".cu")), "--launch", str(CHAIN.with_suffix(".json"))]
    for arguments in ([KEY, *files], files[:2], files[2:], [*files, "--launch", files[3]]):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "as many --launch files" in result.output

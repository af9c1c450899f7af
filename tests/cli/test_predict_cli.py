"""`cakegen predict`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cakegen.cli.main import main
from cakegen.emulator.launches.cases import Case
from cakegen.registry import load_registry

REQUEST = ("predict", "--export", "tiny_latent_moe", "--stage", "tail", "--tp", "8", "--tokens", "8")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, arguments)
    return result.exit_code, result.output


def test_a_request_is_told_with_its_bound_its_floor_and_its_waits() -> None:
    status, output = run(*REQUEST)
    assert status == 0
    first, floor, *_ = output.splitlines()
    assert first.startswith("tiny_latent_moe tail, TP 8, T = 8 on NVIDIA H200: ")
    assert first.endswith(" us predicted, from a cold L2")
    assert floor.startswith("no program takes less than ")
    assert "bound by " in output
    assert " us for stage_full" in output


def test_json_says_the_same_and_what_each_part_is_worth() -> None:
    status, output = run(*REQUEST, "--json", "--what-if")
    assert status == 0
    found = json.loads(output[output.index("{") :])
    assert found["microseconds"] > found["floor_us"]
    assert min(found["better"].values()) < found["microseconds"]
    assert set(found["busy"]) == {"memory", "L2", "SM ingress", "tensor", "issue"}


def measured_file(tmp_path: Path, microseconds: float) -> Path:
    keys = [launch.key for launch in Case("tail", 8, 8).plan(load_registry("tiny_latent_moe").model).launches]
    row = {"kind": "row", "status": "timed", "stage": "tail", "tp": 8, "tokens": 8, "keys": keys}
    other = row | {"tokens": 4, "keys": ["decode:of_another_tree@sm_90a"]}
    times = {"ours_us": microseconds, "bytes": 100_000, "flops": 1000}
    file = tmp_path / "results.jsonl"
    file.write_text("\n".join(json.dumps(each) for each in ({"kind": "header"}, row | times, other | times)) + "\n")
    return file


def test_rows_that_were_measured_stand_beside_their_predictions(tmp_path: Path) -> None:
    table = tmp_path / "rows.tsv"
    file = measured_file(tmp_path, 10.0)
    status, output = run("predict", "--export", "tiny_latent_moe", "--against", str(file), "--tsv", str(table))
    assert status == 0
    assert "1 decode rows on NVIDIA H200; errors of the prediction: median " in output
    assert "of 0 pairs" in output
    head, line = (text.split("\t") for text in table.read_text().splitlines())
    found = dict(zip(head, line, strict=True))
    assert (found["stage"], found["tp"], found["tokens"], found["measured_us"]) == ("tail", "8", "8", "10.00")
    assert float(found["error"]) == pytest.approx(float(found["predicted_us"]) / 10 - 1, abs=2e-3)
    # 100 kB take 22 ns beside the launch
    assert float(found["roofline_us"]) == pytest.approx(4.47, abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("predict", "--stage", "tail"), "needs --stage, --tp and --tokens; or --against FILE"),
        ((*REQUEST, "--tsv", "x.tsv"), "is written by --against"),
        ((*REQUEST, "--device", "h900"), "h900: no such device file"),
    ],
)
def test_what_does_not_belong_together_is_refused(arguments: tuple[str, ...], message: str) -> None:
    status, output = run(*arguments)
    assert status != 0
    assert message in output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "is no file of `cakegen bench --json` (KeyError: 'kind')"),
        ('{"kind": "header"}', "holds no timed row; `cakegen bench` writes such a file"),
    ],
)
def test_a_file_without_rows_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(text + "\n")
    status, output = run("predict", "--against", str(file))
    assert status == 1
    assert message in output


def test_a_file_of_other_programs_is_refused(tmp_path: Path) -> None:
    status, output = run("predict", "--against", str(measured_file(tmp_path, 10.0)))
    assert status == 2
    assert "no such decode row of it has the programs of today's kimi_k3_latent_moe" in output

"""`cakegen emulate`: what it prints, and its errors."""

from __future__ import annotations

import re

import click.testing
import pytest
import torch

from cakegen.cli.main import main
from cakegen.emulator import Fault
from cakegen.emulator.launches.cases import CaseReport
from cakegen.emulator.launches.stream import LaunchReport

TINY = ("emulate", "--model", "tiny_latent_moe")


def run(*arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(main, [*TINY, *arguments])


def test_request_runs_under_every_seed_and_is_compared() -> None:
    result = run("--stage", "tail", "--tp", "8", "--tokens", "3", "--rank", "5", "--partials", "2", "--seeds", "2")
    assert result.exit_code == 0, result.output
    assert "tiny_latent_moe tail: TP 8 rank 5, T = 3, P = 2, planned for 132 SMs of sm_90a" in result.output
    lines = result.output.splitlines()
    assert [line.split(":")[0] for line in lines[2:]] == ["  seed 0", "  seed 1", "  bits"]
    assert all("y bit for bit, out " in line and " warp-instructions in " in line for line in lines[2:4])
    assert re.fullmatch("  bits: y [0-9a-f]{8}, out [0-9a-f]{8}", lines[4])


def test_key_finds_its_own_request() -> None:
    key = "decode:tail_tp8_n8_r11_staged@sm_90a"
    result = run(key, "--schedule", "late")
    assert result.exit_code == 0, result.output
    assert key in result.output
    assert "  late: y bit for bit" in result.output


def test_target_is_an_option_and_decides_the_sms() -> None:
    request = ("--stage", "tail", "--tp", "8", "--tokens", "3", "--schedule", "early", "--arithmetic", "wide")
    result = run(*request, "--arch", "sm_100a", "--tensor-order", "practice")
    assert result.exit_code == 0, result.output
    assert "SMs of sm_100a" in result.output
    assert "y bit for bit" in result.output


@pytest.mark.parametrize("arguments", [(), ("--stage", "tail", "--tp", "8"), ("decode:x", "--tokens", "3")])
def test_incomplete_or_double_request_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "--stage, --tp and --tokens" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decode:x", "--rank", "0"), "--rank is of --stage, --tp and --tokens; KEY finds its own request"),
        (("decode:x", "--sm-count", "8"), "--sm-count is of --stage"),
        (("decode:x", "--entry", "f"), "--entry is of --launch, which is not there"),
        (("decode:x", "--option", "-DN=4"), "--option is of --launch"),
    ],
)
def test_option_that_would_change_nothing_is_a_usage_error(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, message in result.output) == (2, True), result.output


def test_bits_tell_values_apart_and_may_not_depend_on_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = LaunchReport("decode:x", 100, 0.5, "0123abcd")
    outs = iter([torch.zeros(3).bfloat16(), torch.zeros(3).bfloat16(), torch.tensor([0, 0, 1e-3]).bfloat16()])

    def emulate(*arguments: object, **options: object) -> CaseReport:
        return CaseReport((launch,), {"out": 0.0}, (), {"out": next(outs)})

    monkeypatch.setattr("cakegen.emulator.launches.cases.emulate_case", emulate)
    result = run("--stage", "tail", "--tp", "8", "--tokens", "3", "--seeds", "3")
    assert result.exit_code == 1
    assert "  bits: out b0f66adc" in result.output
    assert "cakegen: seed 2: out has other bits than with seed 0; no schedule may change any" in result.output


def test_wrong_output_and_fault_end_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = LaunchReport("decode:x", 100, 0.5, "0123abcd")
    report = CaseReport((launch,), {"y": 3.0, "out": 0.5}, ("out is outside",), {})
    monkeypatch.setattr("cakegen.emulator.launches.cases.emulate_case", lambda *args, **options: report)
    result = run("--stage", "tail", "--tp", "8", "--tokens", "3", "--seed", "4")
    assert result.exit_code == 1
    assert "  seed 4: y differs in 3, out 5.0e-01; 100 warp-instructions in 0.5 s (200/s)" in result.output
    assert "cakegen: seed 4: out is outside" in result.output

    def fail(*args: object, **options: object) -> CaseReport:
        raise Fault("deadlock", "nobody can go on")

    monkeypatch.setattr("cakegen.emulator.launches.cases.emulate_case", fail)
    result = run("--stage", "tail", "--tp", "8", "--tokens", "3")
    assert result.exit_code == 1
    assert "cakegen: deadlock: nobody can go on" in result.output

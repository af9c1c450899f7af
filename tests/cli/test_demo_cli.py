"""`cakegen demo`: a verdict early and last, with what ran, what did not and when; a wrong value is a failure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from cakegen.cli import compile as compile_cli
from cakegen.cli import demo, demo_request, export
from cakegen.cli.compile import Job, jobs_of
from cakegen.cli.main import main
from cakegen.cli.selection import Selection
from cakegen.emulator import EmulatedRunner, Options
from cakegen.emulator.launches import cases
from cakegen.emulator.launches.cases import Case, Comparison
from cakegen.errors import EmulationError, SealError
from cakegen.model import DeviceFacts, Model
from cakegen.registry import Registry, load_registry
from cakegen.runtime.prepared import Outputs

RECORDING = Path(__file__).resolve().parents[2] / "benchmarks" / "demo" / "two_cores.txt"
LINE = re.compile(r" *\d+\.\d s  \S.*| *\d+\.\d s    (?:\S+|not run) +\S.*| {10}\s*\S.*|")


def run_demo(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["demo", "--tables", str(folder / "tables"), *arguments])


def texts(result: Result) -> list[str]:
    """The lines without their seconds; every line has them, or goes on with one that does."""
    lines = result.stdout.splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    return [" ".join(line[10:].split()) for line in lines if line]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_request, "why_nothing_launches", lambda registry: "this test wants none")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a GPU: torch computes what programs would, and every call takes 3.1 us."""
    place = demo_request.Place("Some GPU", "cpu", "reference", DeviceFacts.nominal("sm_90a", 132))
    monkeypatch.setattr(demo_request, "why_nothing_launches", lambda registry: None)
    monkeypatch.setattr(demo_request, "gpu_place", lambda: place)
    monkeypatch.setattr(demo_request, "_microseconds", lambda call: "3.1")


@pytest.mark.emulator
@pytest.mark.usefixtures("no_gpu")
def test_demo_without_a_gpu_emulates_compares_and_says_what_it_did_not_run(tmp_path: Path) -> None:
    result = run_demo(tmp_path, "--tokens", "1", "--export", demo.SMALL_EXPORT)
    assert result.exit_code == 0, result.output
    lines = texts(result)
    words = [line.split()[0] for line in lines]
    part = ["plan"] * 2 + ["compile"] * 4 + ["emulate", "compare"] * 2 + ["PASS"]
    first = lines.index("1. small model: tiny_latent_moe, TP 8, the emulator, planned for sm_90a with 132 SMs")
    assert words[first + 1 : first + 1 + len(part)] == part, "the first verdict comes behind one part"
    assert words[first + 1 + len(part)] == "2."
    emulated = [line for line in lines if line.startswith("emulate ")]
    assert [line.endswith("3 schedules (random, early, late): the same bits in each") for line in emulated] == [
        *(True, True),
        *(False, False),
    ]
    assert "1 schedule (random)" in emulated[-1]
    verdict = lines[lines.index("verdict") + 1 :]
    values = 384 + 512 + 128 + 512 + 512
    assert verdict[0] == "not run launches on a GPU (this test wants none); on a supported one: `make gpu-test`"
    programs = len(jobs_of(load_registry(demo.SMALL_EXPORT), Selection()))
    assert verdict[1] == (
        f"not run {programs - 2} of {programs} programs of tiny_latent_moe, other plans, generated trees: "
        "`make demo DEMO=--full`"
    )
    assert verdict[2] == "not run tiny_latent_moe in schedules early and late: `make demo DEMO=--full`"
    assert verdict[3].startswith(f"PASS small model: {values:,} values agree with fp64, error up to ")
    assert verdict[3].endswith("; the same bits in 3 schedules")
    assert verdict[4].startswith(f"PASS tiny_latent_moe: {values:,} values agree with fp64, error up to ")
    assert verdict[4].endswith("; 1 schedule")
    assert re.fullmatch(
        rf"PASS in \d+ s \(\d+ s of processor time\): {2 * values:,} values agree with fp64, error up to .*", verdict[5]
    )
    assert len(verdict) == 6


@pytest.mark.usefixtures("no_gpu")
def test_demo_says_the_machine_and_the_tolerances_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.Demo, "run", lambda *arguments: "ran")
    monkeypatch.setattr(demo_request, "total_words", lambda compared: "all agree")
    monkeypatch.setattr(demo, "_processor", lambda: "Some Processor 9000")
    lines = texts(run_demo(tmp_path))
    assert lines[0].startswith("cakegen 0.1.0")
    assert lines[1].startswith("machine: Some Processor 9000, ")
    assert lines[2] == "no launches: this test wants none"
    assert lines[6].endswith(
        "logits 0.001 * (1 + |v|); latent, shared_act, out 0.01 * (1 + |v|); y none, every bit counts"
    )
    assert [line.partition(":")[0] for line in lines if line[0].isdigit()] == [
        *("1. small model, decode", "2. small model, prefill", "3. kimi_k3_latent_moe"),
    ]


@pytest.mark.usefixtures("gpu")
def test_demo_on_a_gpu_takes_the_same_order_with_launches_and_times(tmp_path: Path) -> None:
    result = run_demo(tmp_path, "--tokens", "1", "--tokens", "4", "--export", demo.SMALL_EXPORT)
    assert result.exit_code == 0, result.output
    lines = texts(result)
    words = [line.split()[0] for line in lines]
    first = lines.index("1. small model: tiny_latent_moe, TP 8, Some GPU, sm_90a with 132 SMs")
    runs = words[first + words[first:].index("launch") : first + words[first:].index("PASS")]
    assert runs == ["launch", "compare"] * 4
    assert lines[first - 3] == "GPU: Some GPU; programs are launched on it"
    assert "launch tail, T = 4: 3.1 us, the mean of 200 (warm caches)" in lines
    verdict = lines[lines.index("verdict") + 1 :]
    assert [line for line in verdict if line.startswith("not run")] == [
        line for line in verdict if line.endswith("other plans, generated trees: `make demo DEMO=--full`")
    ]
    assert verdict[-2].endswith("; launched")
    assert verdict[-1].startswith("PASS in ")


@pytest.mark.usefixtures("gpu")
def test_full_demo_goes_on_with_schedules_trees_plans_and_every_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for every program of the export; two of them are compiled here. The check of trees has its own tests."""
    asked: list[Selection] = []
    schedules: list[Sequence[str]] = []

    def two_of(registry: Registry, selection: Selection) -> list[Job]:
        asked.append(selection)
        return jobs_of(registry, selection)[:2]

    def passed(self: demo.Demo, registry: Registry, place: object, counts: object, given: Sequence[str]) -> str:
        schedules.append(given)
        self.compared.append(Comparison("out", 1, 0.0, 0.0, 0.01))
        return "ran"

    monkeypatch.setattr(compile_cli, "jobs_of", two_of)
    monkeypatch.setattr(export, "check_trees", lambda say: say("some tree: 3 same"))
    monkeypatch.setattr(demo.Demo, "run", passed)
    result = run_demo(tmp_path, "--full", "--tokens", "8", "--export", demo.SMALL_EXPORT)
    assert result.exit_code == 0, result.output
    assert asked == [Selection()]
    assert schedules == [demo.SCHEDULES, demo.SCHEDULES]
    lines = texts(result)
    assert "check some tree: 3 same" in lines
    assert any(line.startswith("plan sm_103a with 152 SMs, tail, T = 8: ") for line in lines)
    verdict = lines[lines.index("verdict") + 1 :]
    assert not any(line.startswith("not run") for line in verdict)
    assert [line.partition(":")[0] for line in verdict[2:-1]] == ["PASS generated trees", "PASS plans", "PASS programs"]
    assert verdict[3] == "PASS plans: 6 requests"
    assert verdict[4].startswith("PASS programs: 2 of 2 programs: ")


@pytest.mark.usefixtures("gpu")
def test_table_has_a_line_for_each_program_that_was_compiled(tmp_path: Path) -> None:
    result = run_demo(tmp_path, "--tokens", "1", "--tokens", "200", "--export", demo.SMALL_EXPORT)
    assert result.exit_code == 0, result.output
    head, *rows = (tmp_path / "tables" / f"{demo.SMALL_EXPORT}.tsv").read_text().splitlines()
    assert head.split("\t")[:3] == ["program", "arch", "registers"]
    assert len(rows) == len(set(rows)) == 5, "both parts compile the same five"
    lines = texts(result)
    families = [line.split()[1].removesuffix(":") for line in lines if " s of compiling" in line]
    assert families == ["decode_front", "decode_tail", "front_gemm", "tail_gemm", "tail_norm"] * 2
    most = max(int(row.split("\t")[2]) for row in rows if "front:i128" in row)
    assert any(f"front_gemm: 1 program, at most {most} registers a thread, no spills; " in line for line in lines)


@pytest.mark.usefixtures("gpu")
def test_wrong_value_fails_its_part_and_the_next_part_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cases.compare_outputs
    calls = 0

    def once_wrong(model: Model, case: Case, operands: demo_request.Tensors) -> list[Comparison]:
        nonlocal calls
        calls += 1
        first, *rest = right(model, case, operands)
        return [dataclasses.replace(first, error=0.5, share=7.0), *rest] if calls == 1 else [first, *rest]

    monkeypatch.setattr(cases, "compare_outputs", once_wrong)
    result = run_demo(tmp_path, "--tokens", "1", "--export", demo.SMALL_EXPORT)
    assert result.exit_code == 1
    problem = "front, T = 1: logits is outside atol = rtol = 0.001: largest error 0.5"
    lines = texts(result)
    verdict = lines[lines.index("verdict") + 1 :]
    assert f"FAIL {problem}" in lines
    assert [line for line in verdict if line.startswith("PASS")] == [line for line in lines if "PASS tiny_" in line]
    assert verdict[-2] == f"FAIL small model: {problem}"
    assert re.fullmatch(r"FAIL in \d+ s \(\d+ s of processor time\): small model", verdict[-1])


@pytest.mark.usefixtures("gpu")
def test_tp_degree_that_the_export_lacks_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    result = run_demo(tmp_path, "--tp", "3", "--tokens", "1", "--export", demo.SMALL_EXPORT)
    assert result.exit_code == 1
    assert not isinstance(result.exception, ValueError)
    assert any(line.startswith("FAIL ") and "TP 3" in line for line in texts(result))


@pytest.mark.usefixtures("gpu")
def test_tree_that_differs_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(say: Callable[[str], None]) -> None:
        raise SealError("1 changed\nedited by hand")

    monkeypatch.setattr(export, "check_trees", differs)
    monkeypatch.setattr(demo.Demo, "run", lambda *arguments: "ran")
    monkeypatch.setattr(demo.Demo, "compile_all", lambda *arguments: "compiled")
    result = run_demo(tmp_path, "--full", "--export", demo.SMALL_EXPORT)
    assert result.exit_code == 1
    assert "FAIL generated trees: 1 changed" in texts(result)


class Wavering(EmulatedRunner):
    """Writes another value in each call."""

    def __init__(self, output: torch.Tensor) -> None:
        self.options, self.reports, self.output, self.calls = Options(), (), output, 0

    def __call__(self) -> Outputs:
        self.calls += 1
        self.output.fill_(self.calls)
        return (self.output,)


def test_other_bits_in_another_schedule_are_an_error() -> None:
    output = torch.empty(2)
    with pytest.raises(
        EmulationError,
        match=r"^tail, T = 1: out has other bits in schedule late than in early; no schedule may change any$",
    ):
        demo_request.emulate("tail, T = 1", Wavering(output), {"out": output}, ("early", "late"))


def test_why_nothing_launches_tells_a_missing_gpu_from_an_unsupported_one(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = load_registry(demo.SMALL_EXPORT)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in str(demo_request.why_nothing_launches(registry))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no CUDA device" in str(demo_request.why_nothing_launches(registry))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert "Some GPU: compute capability 8.9 is not supported" in str(demo_request.why_nothing_launches(registry))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert demo_request.why_nothing_launches(registry) is None


def test_help_of_demo_fits_80_columns() -> None:
    shown = CliRunner().invoke(main, ["demo", "--help"], terminal_width=80).output
    assert "--full" in shown
    assert [line for line in shown.splitlines() if len(line) > 80] == []


def test_recorded_demo_gave_its_first_verdict_within_60_seconds_and_its_last_within_180() -> None:
    lines = RECORDING.read_text("utf-8").splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    verdicts = [float(line.split()[0]) for line in lines if " PASS" in line]
    assert verdicts[0] <= 60
    assert verdicts[-1] <= 180
    assert re.fullmatch(r" +\d+\.\d s  PASS in \d+ s \(\d+ s of processor time\): .*", lines[-1])
    assert re.fullmatch(r" +\d+\.\d s  cakegen [\d.]+\+g[0-9a-f]{12}: .*", lines[0]), "of a commit, unchanged"
    assert re.fullmatch(r" +\d+\.\d s  machine: \S.*, 2 processors, Python .*", lines[1])

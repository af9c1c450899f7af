"""Traces: what a viewer needs of the JSON, what the tracks say, and that a traced run is the same run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click.testing
import pytest

from cakegen.cli.main import main
from cakegen.emulator import Options
from cakegen.emulator.launches import cases
from cakegen.emulator.launches.cases import Case, CaseReport, emulate_case
from cakegen.emulator.trace.chrome import laned, role_of, write_trace
from cakegen.emulator.trace.recorder import COPY, PRODUCT, RUN, WAIT, Cause, LaunchTrace, Span, Trace, Track
from cakegen.emulator.trace.timeline import write_timeline
from cakegen.emulator.units.barriers import MBarrier
from cakegen.errors import CompileError, EmulationError
from cakegen.registry import Registry

TAIL = Case("tail", 1, 32)
Event = dict[str, Any]


@pytest.fixture(scope="module")
def traced(registry: Registry) -> tuple[Trace, CaseReport]:
    trace = Trace()
    return trace, emulate_case(registry, TAIL, Options("random", 0, "wide", machine=trace.machine))


@pytest.fixture(scope="module")
def events(
    traced: tuple[Trace, CaseReport], registry: Registry, tmp_path_factory: pytest.TempPathFactory
) -> list[Event]:
    file = tmp_path_factory.mktemp("trace") / "trace.json"
    write_trace(traced[0], file, lambda name, line: registry.read(name).splitlines()[line - 1])
    document = json.loads(file.read_text())
    assert "modelled step" in document["otherData"]["time"]
    found: list[Event] = document["traceEvents"]
    return found


def threads(events: list[Event]) -> Iterator[tuple[tuple[int, int], list[Event]]]:
    spans = [event for event in events if event["ph"] == "X"]
    for place in sorted({(event["pid"], event["tid"]) for event in spans}):
        yield place, [event for event in spans if (event["pid"], event["tid"]) == place]


def test_traced_run_is_the_run_without_a_trace(registry: Registry, traced: tuple[Trace, CaseReport]) -> None:
    plain = emulate_case(registry, TAIL, Options("random", 0, "wide"))
    assert [launch.schedule_hash for launch in plain.launches] == [each.schedule_hash for each in traced[1].launches]
    assert [launch.instructions for launch in plain.launches] == [each.instructions for each in traced[1].launches]


def test_spans_of_a_thread_follow_each_other(events: list[Event]) -> None:
    count = 0
    for place, spans in threads(events):
        end = 0.0
        for span in spans:
            assert span["dur"] > 0
            assert span["ts"] >= end - 1e-6, place
            end = span["ts"] + span["dur"]
            count += 1
    assert count > 100


def test_times_rise_through_the_file(events: list[Event]) -> None:
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)


def test_every_thread_and_process_has_a_name(events: list[Event]) -> None:
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    used = {(event["pid"], event["tid"]) for event in events if event["ph"] in "Xi"}
    assert used <= set(names)
    assert {pid for pid, _ in used} <= processes
    assert {"warp 7: produce", "warp 0: multiply_and_store", "warp 4: normalise", "copies"} <= set(names.values())


def test_waits_say_what_ended_them(events: list[Event]) -> None:
    waits = [event for event in events if event.get("cat") == WAIT]
    assert all({"until", "of"} == set(event["args"]) for event in waits)
    full = [event for event in waits if event["name"].startswith("waits for stage_full")]
    assert full
    assert all("copies" in event["args"]["of"] for event in full)
    empty = [event for event in waits if event["name"].startswith("waits for stage_empty")]
    assert empty
    assert all("warp" in event["args"]["of"] for event in empty)


def test_ring_is_never_fuller_than_it_is_long_and_ends_empty(traced: tuple[Trace, CaseReport]) -> None:
    (launch,) = traced[0].launches
    stages = len({phase.barrier for phase in launch.phases if phase.barrier.startswith("stage_full[")})
    levels = launch.occupancy(0)["stage"]
    assert stages > 1
    assert all(0 <= level <= stages for _, level in levels)
    assert max(level for _, level in levels) > 0
    # the last stage is drained, but nobody waits for it to be empty
    assert levels[-1][1] <= 1


def test_all_kinds_of_spans_are_there(traced: tuple[Trace, CaseReport]) -> None:
    (launch,) = traced[0].launches
    assert {span.kind for span in launch.spans} == {RUN, WAIT, COPY, PRODUCT}
    assert launch.clusters[0] == (0, 1)


def test_tensor_core_of_blackwell_has_a_track(registry: Registry) -> None:
    """The wait for the sums ends with the last product: a commit's arrival comes from there."""
    trace = Trace()
    emulate_case(registry, Case("tail", 4, 16, arch="sm_100a"), Options("random", 0, "wide", machine=trace.machine))
    spans = [span for launch in trace.launches for span in launch.spans]
    products = [span for span in spans if span.kind == PRODUCT]
    assert {span.name for span in products} == {"m128n16k16"}
    waits = [span for span in spans if span.name == "waits for sums_full"]
    assert waits
    for wait in waits:
        assert wait.cause is not None
        assert wait.cause.track.name == "tensor core"
        assert wait.end >= max(span.end for span in products if span.track == wait.cause.track)


def test_barrier_in_the_place_of_a_gone_one_has_a_past_of_its_own(registry: Registry) -> None:
    """An mbarrier may be invalidated and its words be another's; Python hands its identity out again as well."""
    trace = Trace()
    machines: list[Any] = []

    def machine(*arguments: Any, **options: Any) -> Any:
        machines.append(trace.machine(*arguments, **options))
        return machines[-1]

    emulate_case(registry, Case("tail", 8, 1), Options("random", 0, "wide", machine=machine))
    traced, cause = machines[0], Cause(1.0, Track(0, 0, "warp 0"), "warp 0")
    cta, before = SimpleNamespace(index=0), len(trace.launches[0].phases)
    for number in range(1, 21):
        barrier = MBarrier("again", 1)
        traced._note(cta, barrier, (0, 1, 0), cause)
        traced._note(cta, barrier, (1, 1, 0), cause)
        del barrier
        assert len(trace.launches[0].phases) == before + number


def test_lanes_keep_overlapping_spans_apart() -> None:
    track = Track(0, 0, "copies")
    spans = [Span(track, COPY, "a", 0, 10), Span(track, COPY, "b", 5, 8), Span(track, COPY, "c", 9, 12)]
    assert [(lane, span.name) for lane, span in laned(spans)] == [(0, "a"), (1, "b"), (1, "c")]


def test_role_is_the_call_with_most_stops() -> None:
    track = Track(0, 7, "warp 7")
    launch = LaunchTrace("x", lines={track: {(("k.cu", 1),): 2, (("k.cu", 2),): 9, (("k.cu", 3),): 1}})
    texts = {1: "set_up(operands);", 2: "  produce(operands, rank);", 3: "while (true) {"}
    assert role_of(launch, track, lambda file, line: texts[line]) == "produce"
    assert role_of(launch, Track(0, 1, "warp 1"), lambda file, line: texts[line]) == ""


def test_command_writes_both_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the timeline")
    trace, picture = tmp_path / "t.json", tmp_path / "t.svg"
    arguments = ["emulate", "--model", "tiny_latent_moe", "--stage", "front", "--tp", "8", "--tokens", "3"]
    arguments += ["--arithmetic", "wide", "--trace", str(trace), "--timeline", str(picture)]
    result = click.testing.CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(trace.read_text())["traceEvents"]
    assert "<svg" in picture.read_text()


def test_picture_of_an_unknown_kind_is_refused(tmp_path: Path, traced: tuple[Trace, CaseReport]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the timeline")
    with pytest.raises(EmulationError, match=r"t\.odd: matplotlib writes no '\.odd' files; it writes \..*\.svg"):
        write_timeline(traced[0], tmp_path / "t.odd")
    with pytest.raises(EmulationError, match="holds no launch that ran"):
        write_timeline(Trace(), tmp_path / "t.svg")


@pytest.mark.parametrize(("option", "name"), [("--trace", "t.json"), ("--timeline", "t.svg")])
def test_file_that_can_not_be_made_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, name: str
) -> None:
    if option == "--timeline":
        pytest.importorskip("matplotlib", reason="matplotlib draws the timeline")

    def refuse(*arguments: object, **options: object) -> None:
        raise CompileError("no compiler")

    monkeypatch.setattr(cases, "emulate_case", refuse)
    arguments = ["emulate", "--model", "tiny_latent_moe", "--stage", "front", "--tp", "8", "--tokens", "3"]
    result = click.testing.CliRunner().invoke(main, [*arguments, option, str(tmp_path / name)])
    assert (result.exit_code, "cakegen: no compiler" in result.output) == (1, True), result.output


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("--trace", "nowhere/t.json", "there is no folder"),
        ("--timeline", "nowhere/t.svg", "there is no folder"),
        ("--timeline", "t.odd", "matplotlib writes no '.odd' files"),
    ],
)
def test_file_that_can_not_be_written_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, name: str, message: str
) -> None:
    if name == "t.odd":
        pytest.importorskip("matplotlib", reason="matplotlib draws the timeline")
    monkeypatch.setattr(cases, "emulate_case", lambda *_, **__: pytest.fail("it ran"))
    arguments = ["emulate", "--model", "tiny_latent_moe", "--stage", "front", "--tp", "8", "--tokens", "3"]
    result = click.testing.CliRunner().invoke(main, [*arguments, option, str(tmp_path / name)])
    assert result.exit_code != 0
    assert message in " ".join(result.output.split()), result.output

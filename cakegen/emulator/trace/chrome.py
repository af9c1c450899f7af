"""A trace as JSON that trace viewers open (Chrome's trace event format, which Perfetto reads).

A CTA is a process, a warp or a lane of an asynchronous unit a thread. One microsecond of the file is one modelled step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cakegen.emulator.trace.recorder import COPY, LaunchTrace, Span, Trace, Track

AXIS = (
    "1 us is one modelled step: a warp's instruction; what copies and products take is a round number, no measurement"
)
# Numbers of processes of a launch; of threads of a unit whose spans overlap.
_LAUNCH_STRIDE, _LANES = 1_000_000, 100
# (file, line) of a source -> its text, or nothing
ReadLine = Callable[[str, int], str]


def write_trace(trace: Trace, file: Path, read_line: ReadLine = lambda name, number: "") -> None:
    """Write a trace.

    Parameters
    ----------
    read_line
        Finds the call that names a warp's role.
    """
    events = [event for number, launch in enumerate(trace.launches) for event in _events(launch, number, read_line)]
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0.0)))
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"time": AXIS}}
    file.write_text(json.dumps(document), encoding="utf-8")


def _most_stops(lines: dict[tuple[tuple[str, int], ...], int]) -> tuple[tuple[str, int], ...]:
    return max(reversed(lines), key=lambda each: lines[each])


def role_of(launch: LaunchTrace, track: Track, read_line: ReadLine) -> str:
    """The function that a warp spends most stops in, of those that the kernel calls, or that its only call calls."""
    lines = launch.lines.get(track, {})
    if not lines:
        return ""
    # of two that are equal the later one: set-up comes first
    calls = _most_stops(lines)
    # where all warps of a launch stand in one call of the kernel, it is the call of a body, which calls the roles
    is_body = len(launch.lines) > 1 and len({_most_stops(each)[-1] for each in launch.lines.values()}) == 1
    place = calls[0] if is_body else calls[-1]
    match = re.match(r"(?:[\w:<>]+ )*(\w+)\s*[(<]", read_line(*place).strip())
    return match.group(1) if match and match.group(1) not in ("if", "while", "for") else ""


def laned(spans: list[Span]) -> Iterator[tuple[int, Span]]:
    """Spans of one track, each with a lane in which no other overlaps it."""
    free: list[float] = []
    for span in sorted(spans, key=lambda each: each.begin):
        lane = next((number for number, end in enumerate(free) if end <= span.begin), len(free))
        free[lane : lane + 1] = [span.end]
        yield lane, span


def by_track(launch: LaunchTrace) -> dict[Track, list[Span]]:
    """The spans of each track that took any time."""
    found: dict[Track, list[Span]] = {}
    for span in launch.spans:
        if span.end > span.begin:
            found.setdefault(span.track, []).append(span)
    return dict(sorted(found.items()))


def _events(launch: LaunchTrace, number: int, read_line: ReadLine) -> Iterator[dict[str, Any]]:
    base = number * _LAUNCH_STRIDE
    named: set[tuple[int, int]] = set()
    tracks = by_track(launch)
    for cta in sorted({track.cta for track in tracks} | {phase.cta for phase in launch.phases}):
        title = {"name": f"{launch.name}: CTA {cta}"}
        yield {"ph": "M", "name": "process_name", "pid": base + cta, "tid": 0, "args": title}
        yield from _barrier_events(launch, cta, base + cta)
    for track, spans in tracks.items():
        role = role_of(launch, track, read_line)
        for lane, span in laned(spans):
            thread = (track.order + 1) * _LANES + lane
            pid = base + track.cta
            if (pid, thread) not in named:
                named.add((pid, thread))
                name = f"{track.name}: {role}" if role else f"{track.name} {lane}" if lane else track.name
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": name}}
                yield {
                    "ph": "M",
                    "name": "thread_sort_index",
                    "pid": pid,
                    "tid": thread,
                    "args": {"sort_index": thread},
                }
            yield _span_event(span, pid, thread)


def _span_event(span: Span, pid: int, thread: int) -> dict[str, Any]:
    event = {"ph": "X", "name": span.name, "cat": span.kind, "pid": pid, "tid": thread}
    event |= {"ts": span.begin, "dur": span.end - span.begin}
    if span.cause is not None:
        by = span.cause.track
        event["args"] = {"until": span.cause.what, "of": f"CTA {by.cta} {by.name}"}
    elif span.kind == COPY:
        event["args"] = {"steps": span.end - span.begin}
    return event


def _barrier_events(launch: LaunchTrace, cta: int, pid: int) -> Iterator[dict[str, Any]]:
    phases = [phase for phase in launch.phases if phase.cta == cta]
    if phases:
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": 1, "args": {"name": "barriers: phases"}}
    for phase in phases:
        name = f"{phase.barrier} phase {phase.number}"
        yield {"ph": "i", "s": "t", "name": name, "cat": "phase", "pid": pid, "tid": 1, "ts": phase.time}
    for ring, levels in launch.occupancy(cta).items():
        for time, level in levels:
            yield {
                "ph": "C",
                "name": f"{ring}: filled stages",
                "pid": pid,
                "tid": 0,
                "ts": time,
                "args": {"stages": level},
            }

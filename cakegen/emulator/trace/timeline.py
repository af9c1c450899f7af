"""One cluster's pipeline of a trace as a picture."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from cakegen.emulator.trace.chrome import ReadLine, by_track, laned, role_of
from cakegen.emulator.trace.recorder import COPY, PRODUCT, RUN, WAIT, LaunchTrace, Span, Trace, Track
from cakegen.errors import EmulationError

_COLOURS = {RUN: "#4878a8", COPY: "#6aa56a", PRODUCT: "#d98c3f"}
# Waits by what they wait for; more families than colours share them.
_WAIT_COLOURS = ("#c8504f", "#b07aa1", "#8c6d4f", "#e0a0a0", "#7f7f7f", "#c9b037")
_AXIS = "modelled steps (a warp's instruction is one; copies and products take round numbers, not measured ones)"
_BAR, _LANE_ROWS = 0.8, 4
# Arrows only for waits that take this share of the picture.
_ARROW_SHARE = 0.02


def write_timeline(trace: Trace, file: Path, read_line: ReadLine = lambda name, number: "", launch: int = -1) -> None:
    """Draw the first cluster of a launch: who runs, who waits for whom, and how full the rings are.

    Parameters
    ----------
    launch
        Index of the launch among those that ran; the last one by default.

    Raises
    ------
    EmulationError
        matplotlib is not installed or does not know the file's kind, or the trace is empty.
    """
    launches = [each for each in trace.launches if each.clusters and by_track(each)]
    if not launches:
        raise EmulationError("the trace holds no launch that ran, so there is nothing to draw")
    pyplot = require_drawing(file)
    chosen = launches[launch]
    ctas = chosen.clusters[min(chosen.clusters)]
    rows = {track: spans for track, spans in by_track(chosen).items() if track.cta in ctas}
    rings = [(cta, ring, levels) for cta in ctas for ring, levels in chosen.occupancy(cta).items()]
    places = _places(rows)
    height = 1.6 + 0.24 * len(places) + 0.7 * len(rings)
    figure, axes = pyplot.subplots(
        1 + len(rings),
        figsize=(14, height),
        sharex=True,
        layout="constrained",
        squeeze=False,
        gridspec_kw={"height_ratios": [0.24 * len(places) + 0.6, *([0.7] * len(rings))]},
    )
    _draw_rows(axes[0, 0], chosen, rows, places, read_line)
    for plot, (cta, ring, levels) in zip(axes[1:, 0], rings, strict=True):
        times, filled = zip(*levels, strict=True)
        plot.step((0, *times), (0, *filled), where="post", color=_COLOURS[COPY])
        plot.set_ylabel(f"CTA {cta}\n{ring}s\nfilled", fontsize=7, rotation=0, ha="right", va="center")
        plot.tick_params(labelsize=7)
    axes[-1, 0].set_xlabel(_AXIS, fontsize=8)
    axes[0, 0].set_title(f"{chosen.name}: an arrow leads from what ends a wait to who waited", fontsize=8)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def require_drawing(file: Path) -> Any:
    """matplotlib's pyplot, if it can write such a file; asked before a run whose picture is wanted.

    Raises
    ------
    EmulationError
        matplotlib is not installed or does not know the file's kind.
    """
    try:
        import_module("matplotlib").use("Agg")
        pyplot = import_module("matplotlib.pyplot")
    except ImportError as error:
        raise EmulationError(f"a timeline needs matplotlib ({error}); `pip install matplotlib`") from None
    known = pyplot.figure().canvas.get_supported_filetypes()
    pyplot.close()
    if file.suffix[1:].lower() not in known:
        raise EmulationError(f"{file}: matplotlib writes no {file.suffix!r} files; it writes .{', .'.join(known)}")
    return pyplot


def _places(rows: dict[Track, list[Span]]) -> dict[tuple[Track, int], int]:
    """Row of each track's lane, from the top."""
    lanes = [(track, lane) for track, spans in rows.items() for lane in sorted({lane for lane, _ in laned(spans)})]
    kept = [each for each in lanes if each[1] < _LANE_ROWS]
    return {each: number for number, each in enumerate(kept)}


def _draw_rows(
    axes: Any,
    launch: LaunchTrace,
    rows: dict[Track, list[Span]],
    places: dict[tuple[Track, int], int],
    read_line: ReadLine,
) -> None:
    end = max(span.end for spans in rows.values() for span in spans)
    families: dict[str, str] = {}
    arrows = []
    for track, spans in rows.items():
        for lane, span in laned(spans):
            row = places.get((track, lane))
            if row is None:
                continue
            colour = _COLOURS.get(span.kind) or _wait_colour(span, families)
            axes.barh(row, span.end - span.begin, _BAR, span.begin, color=colour, edgecolor="white", linewidth=0.3)
            source = span.cause and next((places[each] for each in places if each[0] == span.cause.track), None)
            if span.kind == WAIT and source is not None and span.end - span.begin > _ARROW_SHARE * end:
                arrows.append((span.end, source, row))
    for time, source, row in arrows:
        style = {"arrowstyle": "->", "color": "black", "linewidth": 0.6}
        axes.annotate("", (time, row), (time, source), arrowprops=style)
    axes.set_yticks(list(places.values()), [_label(launch, *each, read_line) for each in places], fontsize=7)
    axes.set_xlim(0, end)
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.tick_params(labelsize=7)
    patch = import_module("matplotlib.patches").Patch
    legend = {
        "runs": _COLOURS[RUN],
        "copy on its way": _COLOURS[COPY],
        "matrix products": _COLOURS[PRODUCT],
        **families,
    }
    handles = [patch(color=colour, label=name) for name, colour in legend.items()]
    axes.figure.legend(handles=handles, fontsize=7, ncols=len(handles), loc="outside upper center")


def _wait_colour(span: Span, families: dict[str, str]) -> str:
    """A colour for each barrier or ring; an arrow in the picture says who ended the wait."""
    family = span.name.partition("[")[0]
    return families.setdefault(family, _WAIT_COLOURS[len(families) % len(_WAIT_COLOURS)])


def _label(launch: LaunchTrace, track: Track, lane: int, read_line: ReadLine) -> str:
    if lane:
        return ""
    role = role_of(launch, track, read_line)
    return f"CTA {track.cta} {track.name}" + (f": {role}" if role else "")

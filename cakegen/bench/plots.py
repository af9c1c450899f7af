"""Plots of results. Imports matplotlib where a plot is drawn, records and errors; no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from cakegen.bench.records import GEMM, RowRecord
from cakegen.errors import BenchError

_FRONT, _TAIL = "tab:blue", "tab:orange"
_DPI = 130
_STYLES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (1, 3)))


def write_plots(records: Sequence[RowRecord], title: str, folder: Path) -> tuple[Path, ...]:
    """Draw `ratio.png`, `limit.png` and `roofline.png`.

    Parameters
    ----------
    records
        Rows; those that were not timed are left out.
    title
        Device and commit, above each plot.
    folder
        Where the files go.

    Raises
    ------
    BenchError
        matplotlib is not installed, or no row was timed.
    """
    timed = [record for record in records if record.ours_us]
    if not timed:
        raise BenchError("no row was timed, so there is nothing to plot")
    try:
        import_module("matplotlib").use("Agg")
        pyplot = import_module("matplotlib.pyplot")
    except ImportError as error:
        raise BenchError(f"plots need matplotlib ({error}); `pip install matplotlib`") from None
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Callable[[Any, list[RowRecord]], None]] = {
        "ratio": _draw_ratio,
        "limit": _draw_limit,
        "roofline": _draw_roofline,
    }
    return tuple(_write(pyplot, name, draw, timed, title, folder) for name, draw in drawn.items())


def _write(
    pyplot: Any,
    name: str,
    draw: Callable[[Any, list[RowRecord]], None],
    records: list[RowRecord],
    title: str,
    folder: Path,
) -> Path:
    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    draw(axes, records)
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3, which="both")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)
    return path


def _series(records: list[RowRecord]) -> list[tuple[str, str, Any, list[RowRecord]]]:
    """Label, colour, line style and rows of each stage and TP degree."""
    degrees = sorted({record.tp for record in records})
    styles = dict(zip(degrees, _STYLES, strict=False))
    found = []
    for stage, colour in (("front", _FRONT), ("tail", _TAIL)):
        for tp in degrees:
            rows = sorted((r for r in records if (r.stage, r.tp) == (stage, tp)), key=lambda r: r.tokens)
            if rows:
                found.append((f"{stage} TP {tp}", colour, styles.get(tp, "-"), rows))
    return found


def _draw_ratio(axes: Any, records: list[RowRecord]) -> None:
    """rival / ours by T; a losing row is a red cross."""
    for label, colour, style, rows in _series(records):
        compared = [row for row in rows if row.ratio is not None]
        if not compared:
            continue
        tokens, ratios = [row.tokens for row in compared], [row.ratio for row in compared]
        axes.plot(tokens, ratios, color=colour, linestyle=style, marker=".", label=label)
    losing = [record for record in records if record.loses]
    if losing:
        points = ([r.tokens for r in losing], [r.ratio for r in losing])
        axes.plot(*points, "x", color="red", markersize=9, label="a stock chain is faster")
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens")
    axes.set_ylabel("time of the fastest stock chain / ours")


def _draw_limit(axes: Any, records: list[RowRecord]) -> None:
    """Ours as lines, limits as dots, by T."""
    for label, colour, style, rows in _series(records):
        axes.plot([r.tokens for r in rows], [r.ours_us for r in rows], color=colour, linestyle=style, label=label)
        limited = [row for row in rows if row.limit_us]
        axes.plot([r.tokens for r in limited], [r.limit_us for r in limited], ".", color=colour, alpha=0.6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens (dots: the limit measured in the same run)")
    axes.set_ylabel("microseconds")


def _draw_roofline(axes: Any, records: list[RowRecord]) -> None:
    """TFLOP/s over FLOP per byte, under the best rates that this run's limits reached."""
    limited = [record for record in records if record.limit_us]
    gemms = [r.flops / r.limit_us / 1e6 for r in limited if r.limit_us and r.limit == GEMM]
    streams = [r.weight_bytes / r.limit_us / 1e6 for r in limited if r.limit_us and r.limit != GEMM]
    intensities = [record.flops / record.bytes for record in records]
    ends = (min(intensities), max(intensities))
    if streams:
        rate = max(streams)
        # up to where the products take over, if this run measured them
        knee = min(ends[1], max(gemms) / rate) if gemms else ends[1]
        slope = (ends[0], max(knee, ends[0]))
        axes.plot(slope, [rate * end for end in slope], color="black", label=f"stream probe {rate:.2f} TB/s")
    if gemms:
        axes.axhline(max(gemms), color="gray", label=f"cuBLAS {max(gemms):.0f} TFLOP/s")
    for label, colour, style, rows in _series(records):
        points = ([r.flops / r.bytes for r in rows], [r.tflop_per_s for r in rows])
        axes.plot(*points, color=colour, linestyle=style, marker=".", label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte")
    axes.set_ylabel("TFLOP/s")

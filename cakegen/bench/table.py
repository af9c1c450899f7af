"""Leaf module: results as plain text. Imports the records and their comparison; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cakegen.bench.compare import Change, Cliff, Mean
from cakegen.bench.records import TIMED, RowRecord

LOSES = "LOSES"
_REASON_COLS = 100
_ROW_COLUMNS = (
    "stage", "TP", "T", "ours us", "min", "packed us", "spread", "noise", "rival us", "ratio", "rival", "limit us",
    "ours/limit", "rotation us", "floor us", "TB/s", "TFLOP/s", "",
)  # fmt: skip


def render_rows(records: Iterable[RowRecord]) -> str:
    """One line a row; a row that loses says so, and one that was not timed says why."""
    ordered = sorted(records, key=lambda r: (r.stage, r.tp, r.tokens))
    return _columns(_ROW_COLUMNS, [_row_cells(record) for record in ordered])


def _row_cells(record: RowRecord) -> tuple[str, ...]:
    mark = LOSES if record.loses else ""
    if record.status != TIMED:
        mark = _reason(record)
    return (
        record.stage,
        str(record.tp),
        str(record.tokens),
        _number(record.ours_us),
        _number(record.ours_min_us),
        _number(record.packed_us),
        _percent(record.spread),
        _percent(record.noise),
        _number(record.rival_us),
        _number(record.ratio),
        record.rival or "-",
        _number(record.limit_us),
        _number(record.limit_ratio),
        _number(record.rotation_us),
        _number(record.floor_us),
        _number(record.tb_per_s),
        _number(record.tflop_per_s),
        mark,
    )


def render_line(record: RowRecord) -> str:
    """A row in one line of progress."""
    row = f"{record.row!s:22}"
    if record.status != TIMED:
        return f"{row} {_reason(record)}"
    return (
        f"{row} ours {_number(record.ours_us):>7} us, rival {_number(record.rival_us):>7} ({record.rival or '-'}), "
        f"ratio {_number(record.ratio)}, limit {_number(record.limit_us)}{'  ' + LOSES if record.loses else ''}"
    )


def _reason(record: RowRecord) -> str:
    """Why a row was not timed, cut to a line."""
    text = " ".join((record.problem or "").split())
    return f"{record.status}: {text if len(text) <= _REASON_COLS else text[: _REASON_COLS - 1] + '…'}"


def render_means(means: Sequence[Mean], cliffs: Sequence[Cliff]) -> str:
    """Geometric means, then the cliffs."""
    cells = [
        (mean.name, _number(mean.ratio), f"{mean.wins} of {mean.compared}", _number(mean.limit_ratio)) for mean in means
    ]
    text = _columns(("geometric mean", "rival/ours", "rows won", "ours/limit"), cells)
    lines = [f"cliff: {c.row} takes {c.ratio:.2f} of the time of T {c.next_tokens}" for c in cliffs]
    return "\n".join((text, *lines))


def render_changes(changes: Iterable[Change]) -> str:
    """One line a row: before, after, and the change where it is beyond noise."""
    cells = [
        (
            str(change.row),
            _number(change.before_us),
            _number(change.after_us),
            "-" if change.ratio is None else f"{(change.ratio - 1) * 100:+.1f} %",
            _verdict(change),
        )
        for change in changes
    ]
    return _columns(("row", "before us", "after us", "change", ""), cells)


def _verdict(change: Change) -> str:
    if change.ratio is None:
        return "only in one run"
    if not change.beyond_noise:
        return ""
    return "FASTER" if change.ratio < 1 else "SLOWER"


def render_others(others: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The objects that are not rows (chains, host costs, the flush's own check): fields by name, a line each."""
    lines = []
    for kind, records in others.items():
        if kind in ("header", "end"):
            continue
        for record in records:
            lines.append(f"{kind}: {', '.join(_fields(record))}")
    return "\n".join(lines)


def _fields(record: Mapping[str, Any]) -> Iterator[str]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from (f"{name}[{key}] {_plain(item)}" for key, item in value.items())
        else:
            yield f"{name} {_plain(value)}"


def _plain(value: Any) -> str:
    return _number(value) if isinstance(value, float) else str(value)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 1000:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f}%"


def _columns(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns; the last one, of remarks, is left as it is."""
    widths = [max(len(cell) for cell in column) for column in zip(titles, *rows, strict=True)]
    lines = []
    for row in (titles, *rows):
        padded = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        lines.append("  ".join((*padded, row[-1])).rstrip())
    return "\n".join(lines)

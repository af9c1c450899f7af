"""A review as one HTML page that needs nothing else: no network, no other file. Imports jinja2 and this package."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from cakegen.review.compare import STATUSES, UNCHANGED, ExportReview, TextChange
from cakegen.review.edits import decision_groups, model_edits, text_edits
from cakegen.review.report import (
    COST_COLUMNS,
    WORST_ROWS,
    Review,
    cost_rows,
    cost_summary,
    counted,
    remark,
    touched_keys,
    worst_first,
)
from cakegen.review.shown import shown

_CONTEXT_LINES = 3
_PAGE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Cell:
    """One line of one side: its number (0: no such line) and its text in (text, whether it differs) pieces."""

    number: int
    pieces: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Row:
    """Two lines side by side; `kind` is `equal`, `replace`, `delete`, `insert` or `gap`."""

    kind: str
    before: Cell
    after: Cell


def render_html(review: Review) -> str:
    """All of a review as one page: differences side by side, every part collapsible, texts escaped."""
    review = shown(review)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["counted"] = counted
    template = environment.from_string(_PAGE.read_text(encoding="utf-8"))
    pairs = worst_first(review, review.exports)
    edits = [(edit, list(side_by_side(edit.change))) for edit in text_edits(review.exports)]
    return template.render(
        title=review.title,
        clean=review.clean,
        exports=[_export(review, export) for export in review.exports],
        fields=model_edits(review.exports),
        edits=[(edit, rows) for edit, rows in edits if not edit.follows],
        following=[(edit, rows) for edit, rows in edits if edit.follows],
        groups=decision_groups(review.exports),
        columns=COST_COLUMNS,
        costs=list(cost_rows(review, pairs)),
        cost_summary=cost_summary([entry for _, entry in pairs]),
        failures=[(entry.keys[0], entry.failure) for _, entry in pairs if entry.failure],
        worst=WORST_ROWS,
    )


def _export(review: Review, export: ExportReview) -> dict[str, Any]:
    return {
        "name": export.export,
        "counts": [(status, export.count(status)) for status in STATUSES],
        "verdict": review.verdict(export),
        "touched": [(entry, remark(entry)) for entry in touched_keys(export)],
        "unchanged": [entry.key for entry in export.keys if entry.status == UNCHANGED],
    }


def side_by_side(change: TextChange) -> Iterator[Row]:
    """The lines of a difference in pairs, with three lines of context and a gap between distant parts."""
    matcher = difflib.SequenceMatcher(None, change.before, change.after, autojunk=False)
    for position, group in enumerate(matcher.get_grouped_opcodes(_CONTEXT_LINES)):
        if position:
            yield Row("gap", Cell(0, ()), Cell(0, ()))
        for kind, old_first, old_end, new_first, new_end in group:
            for offset in range(max(old_end - old_first, new_end - new_first)):
                old, new = old_first + offset, new_first + offset
                before = change.before[old] if old < old_end else None
                after = change.after[new] if new < new_end else None
                yield _row(kind, before, old + 1, after, new + 1)


def _row(kind: str, before: str | None, old: int, after: str | None, new: int) -> Row:
    if before is None or after is None:
        kind = "insert" if before is None else "delete"
        return Row(kind, _whole(before, old), _whole(after, new))
    if kind == "equal":
        return Row(kind, _whole(before, old), _whole(after, new))
    start, end = _shared_ends(before, after)
    return Row(kind, Cell(old, _pieces(before, start, end)), Cell(new, _pieces(after, start, end)))


def _whole(text: str | None, number: int) -> Cell:
    return Cell(0, ()) if text is None else Cell(number, ((text, False),))


def _shared_ends(before: str, after: str) -> tuple[int, int]:
    """How many characters two lines share in front, and behind that at their end."""
    shorter = min(len(before), len(after))
    start = next((i for i in range(shorter) if before[i] != after[i]), shorter)
    room = shorter - start
    end = next((i for i in range(room) if before[-1 - i] != after[-1 - i]), room)
    return start, end


def _pieces(text: str, start: int, end: int) -> tuple[tuple[str, bool], ...]:
    cut = len(text) - end
    pieces = ((text[:start], False), (text[start:cut], True), (text[cut:], False))
    return tuple(piece for piece in pieces if piece[0])

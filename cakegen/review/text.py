"""A review as plain text, for a terminal. Imports this package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cakegen.review.compare import ExportReview, FieldChange, TextChange
from cakegen.review.report import (
    COST_COLUMNS,
    Review,
    cost_rows,
    counted,
    differing_costs,
    remark,
    split_touched,
    touched_keys,
)
from cakegen.review.shown import shown


def render_text(review: Review) -> str:
    """All of a review as lines of text."""
    review = shown(review)
    lines = [review.title]
    for export in review.exports:
        lines += ["", *_export_lines(review, export)]
    return "\n".join(lines) + "\n"


def _export_lines(review: Review, export: ExportReview) -> Iterator[str]:
    yield f"{export.export}: {export.summary}"
    if not (export.model or export.texts or touched_keys(export)):
        return
    if export.model:
        yield "  model"
        yield from _field_lines(export.model, "    ")
    listed, folded = split_touched(export)
    for entry in listed:
        note = remark(entry)
        yield f"  {entry.status:8} {entry.key}{f'  ({note})' if note else ''}"
        yield from _field_lines(entry.fields, "    ")
    if folded:
        yield f"  changed  {len(folded)} more keys  (a header alone; named below its difference)"
    yield f"  {review.verdict(export)}"
    yield from (f"    {line}" for line in _table([COST_COLUMNS, *cost_rows(differing_costs(review.costs_of(export)))]))
    for cost in review.costs_of(export):
        yield from (f"    {line}" for line in cost.failure.splitlines())
    for change in export.texts:
        yield from _difference(change)


def _field_lines(changes: Sequence[FieldChange], indent: str) -> Iterator[str]:
    width = max((len(change.name) for change in changes), default=0)
    yield from (f"{indent}{change.name:{width}}  {change.before} -> {change.after}" for change in changes)


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    if len(rows) < 2:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _difference(change: TextChange) -> Iterator[str]:
    yield ""
    yield f"  {change.title}; {counted(len(change.keys), 'key')}:"
    yield from (f"    {key}" for key in change.keys)
    yield from change.unified()

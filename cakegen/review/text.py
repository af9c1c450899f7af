"""A review as plain text, for a terminal. Imports this package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cakegen.review.compare import ExportReview
from cakegen.review.edits import TextEdit, decision_groups, model_edits, text_edits
from cakegen.review.report import (
    COST_COLUMNS,
    WORST_ROWS,
    Review,
    cost_rows,
    cost_summary,
    remark,
    split_touched,
    touched_keys,
    worst_first,
)
from cakegen.review.shown import shown

_NAMED_KEYS = 4
_LISTED_KEYS = 20


def render_text(review: Review) -> str:
    """A review as lines of text: edits, decisions, cost, texts that follow from decisions, keys."""
    review = shown(review)
    lines = [review.title, ""]
    for export in review.exports:
        lines.append(f"{export.export}: {export.summary}")
        if export.model or export.texts or touched_keys(export):
            lines.append(f"  {review.verdict(export)}")
    edits = text_edits(review.exports)
    lines += _edited(review, [edit for edit in edits if not edit.follows])
    lines += _decisions(review)
    lines += _costs(review)
    lines += (line for edit in edits if edit.follows for line in _difference(edit))
    lines += (line for export in review.exports for line in _keys(export))
    return "\n".join(lines) + "\n"


def _edited(review: Review, edits: Sequence[TextEdit]) -> Iterator[str]:
    fields = model_edits(review.exports)
    if fields:
        yield from ("", "model")
    width = max((len(edit.field.name) for edit in fields), default=0)
    for edit in fields:
        field = edit.field
        yield f"  {field.name:{width}}  {field.before} -> {field.after}  ({', '.join(edit.exports)})"
    for text in edits:
        yield from _difference(text)


def _decisions(review: Review) -> Iterator[str]:
    groups = decision_groups(review.exports)
    if groups:
        yield from ("", "decisions")
    for group in groups:
        yield f"  {group.title}"
        width = max(len(field.name) for field in group.fields)
        yield from (f"    {field.name:{width}}  {field.before} -> {field.after}" for field in group.fields)
        if group.remark:
            yield f"    {group.remark}"


def _costs(review: Review) -> Iterator[str]:
    pairs = worst_first(review, review.exports)
    if not pairs:
        return
    yield from ("", f"compiled to other code: {cost_summary([entry for _, entry in pairs])}")
    yield from (f"  {line}" for line in _table([COST_COLUMNS, *cost_rows(review, pairs[:WORST_ROWS])]))
    if len(pairs) > WORST_ROWS:
        yield f"  and {len(pairs) - WORST_ROWS} more, none of them worse; --format html lists them"
    for export, entry in pairs:
        if entry.failure:
            yield f"  {export}: {entry.keys[0]} does not compile"
            yield from (f"    {line}" for line in entry.failure.splitlines())


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _difference(edit: TextEdit) -> Iterator[str]:
    yield from ("", edit.title)
    yield from edit.change.unified()
    for export, keys in edit.keys:
        more = f" and {len(keys) - _NAMED_KEYS} more" if len(keys) > _NAMED_KEYS else ""
        yield from (f"  {export}: {key}" for key in keys[:_NAMED_KEYS])
        if more:
            yield f"  {export}:{more}"


def _keys(export: ExportReview) -> Iterator[str]:
    listed, folded = split_touched(export)
    if listed or folded:
        yield from ("", f"keys of {export.export}")
    for entry in listed[:_LISTED_KEYS]:
        note = remark(entry)
        yield f"  {entry.status:8} {entry.key}{f'  ({note})' if note else ''}"
    if len(listed) > _LISTED_KEYS:
        yield f"  and {len(listed) - _LISTED_KEYS} more keys; --format html lists them"
    if folded:
        yield f"  changed  {len(folded)} more keys  (a header alone)"

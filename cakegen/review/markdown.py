"""A review as Markdown, for a comment on a change or the summary of a CI run. Imports this package."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from cakegen.review.compare import UNCHANGED, ExportReview, FieldChange
from cakegen.review.edits import Keys, TextEdit, decision_groups, model_edits, text_edits
from cakegen.review.parts import COST, DECISIONS, EDIT, FOLLOWING, KEYS, Part, fit_parts
from cakegen.review.report import (
    COST_COLUMNS,
    WORST_ROWS,
    Review,
    cost_rows,
    cost_summary,
    counted,
    remark,
    split_touched,
    worst_first,
)
from cakegen.review.shown import shown

_PLAIN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 /(),.-]|_(?=[A-Za-z0-9]))*")
# without backticks, backslashes and bars, which end a code span or a table's cell
_KEY = re.compile(r"[A-Za-z0-9 _:;.,@+*=/()<>{}\[\]!?&%#$^~'\"-]*[A-Za-z0-9_:;.,@+*=/()<>{}\[\]!?&%#$^~'\"-]")

_LISTED_KEYS = 20
# a table of so many rows and a difference of so many lines stand open
_OPEN_ROWS = 20
_OPEN_LINES = 60

DEFAULT_LIMIT = 60_000
"""Characters of a comment that hosts take (GitHub: 65536), less some room for what a bot writes around it."""


def render_markdown(review: Review, limit: int = DEFAULT_LIMIT) -> str:
    """All of a review; what would pass `limit` characters is shortened or left out, and counted: key lists first.

    Parameters
    ----------
    limit
        Most characters of the whole text.
    """
    review = shown(review)
    selection = f", keys {' '.join(_code(pattern) for pattern in review.selection)}" if review.selection else ""
    head = [f"### generated programs: {_word(review.base)} → working tree{selection}", ""]
    head += [f"* **{_word(export.export)}**: {export.summary}; {review.verdict(export)}" for export in review.exports]
    parts = list(_parts(review))
    note = "\n{} of {} parts are left out of {} characters, {} shortened; `cakegen diff --format html` shows all.\n"
    fitted = fit_parts(parts, limit - len("\n".join(head)) - len(note) - 16)
    kept = [text for text in fitted if text is not None]
    text = "\n".join([*head, *(f"\n{part}" for part in kept), ""])
    left_out = len(parts) - len(kept)
    cut = sum(text is not None and text != part.text for part, text in zip(parts, fitted, strict=True))
    return text + note.format(left_out, len(parts), limit, cut) if left_out or cut else text


def _parts(review: Review) -> Iterator[Part]:
    """The parts of all exports, in reading order, each with its rank; each stands alone."""
    edits = text_edits(review.exports)
    yield from _edited(review, [edit for edit in edits if not edit.follows])
    groups = decision_groups(review.exports)
    if groups:
        rows = [(group.title, _fields_inline(group.fields), group.remark) for group in groups]
        table = _table(("keys", "decisions", ""), [(_counted_keys(row[0]), *row[1:]) for row in rows])
        yield Part(DECISIONS, f"{counted(len(groups), 'group')} of decisions", table, opened=len(groups) <= _OPEN_ROWS)
    yield from _costs(review)
    yield from (_difference(edit, FOLLOWING) for edit in edits if edit.follows)
    yield from (part for export in review.exports for part in _key_lists(export))
    yield from (Part(KEYS, f"keys: {_title(edit)}", _key_list(edit.keys)) for edit in edits)


def _edited(review: Review, edits: Sequence[TextEdit]) -> Iterator[Part]:
    fields = model_edits(review.exports)
    if fields:
        rows = [
            (_code(e.field.name), _code(e.field.before), _code(e.field.after), ", ".join(map(_word, e.exports)))
            for e in fields
        ]
        table = _table(("field", "before", "after", "exports"), rows)
        yield Part(EDIT, f"model: {counted(len(fields), 'field')}", table, opened=True)
    yield from (_difference(edit, EDIT) for edit in edits)


def _costs(review: Review) -> Iterator[Part]:
    pairs = worst_first(review, review.exports)
    if pairs:
        rows = [(_word(row[0]), *map(_plain, row[1:-1]), _code(row[-1])) for row in cost_rows(review, pairs)]
        title = f"compiled to other code: {_plain(cost_summary([entry for _, entry in pairs]))}"
        yield Part(COST, title, _table(COST_COLUMNS, rows[:WORST_ROWS]), opened=True)
        if len(rows) > WORST_ROWS:
            further = _table(COST_COLUMNS, rows[WORST_ROWS:])
            yield Part(KEYS, f"compiled to other code: {len(rows) - WORST_ROWS} more, none worse", further)
    failures = [entry.failure for _, entry in pairs if entry.failure]
    if failures:
        yield Part(COST, f"{len(failures)} do not compile", "\n".join(failures), language="", opened=True)


def _key_lists(export: ExportReview) -> Iterator[Part]:
    listed, folded = split_touched(export)
    rows = [(entry.status, _code(entry.key), remark(entry, _code)) for entry in listed]
    if folded:
        rows.append(("changed", f"{len(folded)} more keys", "a header alone; listed with it"))
    if rows:
        title = f"{_word(export.export)}: {counted(len(listed) + len(folded), 'key')}"
        yield Part(KEYS, title, _table(("", "key", "differs in"), rows))
    unchanged = [entry.key for entry in export.keys if entry.status == UNCHANGED]
    if unchanged and rows:
        listing = "\n".join(f"* {_code(key)}" for key in unchanged)
        yield Part(KEYS, f"{_word(export.export)}: {len(unchanged)} unchanged", listing)


def _difference(edit: TextEdit, rank: int) -> Part:
    lines = edit.change.unified()
    opened = rank == EDIT and len(lines) <= _OPEN_LINES
    return Part(rank, _title(edit), "\n".join(lines), language="diff", opened=opened)


def _title(edit: TextEdit) -> str:
    names = edit.title.removeprefix(edit.change.title).removeprefix(" (").removesuffix(")")
    return f"{_word(edit.change.title)} ({_counted_keys(names)})"


def _counted_keys(text: str) -> str:
    """`3 keys of one, 4 of another`, whose names are those of folders."""
    return text if _word(plain := text.replace(";", ",")) == plain else _html_code(text)


def _key_list(keys: Keys) -> str:
    lines = []
    for export, names in keys:
        lines += [f"* {_code(f'{export}: {key}')}" for key in names[:_LISTED_KEYS]]
        if len(names) > _LISTED_KEYS:
            lines.append(f"* and {len(names) - _LISTED_KEYS} more of {_word(export)}")
    return "\n".join(lines)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _fields_inline(changes: Sequence[FieldChange]) -> str:
    return "<br>".join(f"{_code(change.name)} {_code(change.before)} → {_code(change.after)}" for change in changes)


def _word(text: str) -> str:
    """A name as plain text, also within HTML; as code where a host could read markup, a link or a call into it."""
    return text if _PLAIN.fullmatch(text) and "www." not in text else _html_code(text)


def _code(text: str) -> str:
    """Inline code, so that `@sm_90a` in a key calls nobody."""
    return f"`{text}`" if _KEY.fullmatch(text) else _html_code(text)


def _html_code(text: str) -> str:
    """Code whose every mark is written by its number, which neither Markdown nor HTML reads as a mark."""
    return f"<code>{''.join(c if c.isalnum() or c == ' ' else f'&#{ord(c)};' for c in text)}</code>" if text else ""


def _plain(text: str) -> str:
    return text.replace("->", "→")

"""A review as Markdown, for a comment on a change or the summary of a CI run. Imports this package."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from cakegen.review.compare import UNCHANGED, ExportReview, FieldChange, TextChange
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

_PLAIN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 /(),.-]|_(?=[A-Za-z0-9]))*")
# without backticks, backslashes and bars, which end a code span or a table's cell
_KEY = re.compile(r"[A-Za-z0-9 _:;.,@+*=/()<>{}\[\]!?&%#$^~'\"-]*[A-Za-z0-9_:;.,@+*=/()<>{}\[\]!?&%#$^~'\"-]")

# from what stays longest to what goes first
_EDIT, _COST, _LISTING, _UNCHANGED = range(4)
_LISTED_KEYS = 20

DEFAULT_LIMIT = 60_000
"""Characters of a comment that hosts take (GitHub: 65536), less some room for what a bot writes around it."""


def render_markdown(review: Review, limit: int = DEFAULT_LIMIT) -> str:
    """All of a review; parts that would pass `limit` characters are left out and counted: listings before edits.

    Parameters
    ----------
    limit
        Most characters of the whole text.
    """
    review = shown(review)
    selection = f", keys {' '.join(_code(pattern) for pattern in review.selection)}" if review.selection else ""
    head = [f"### generated programs: {_word(review.base)} → working tree{selection}", ""]
    head += [f"* **{_word(export.export)}**: {export.summary}; {review.verdict(export)}" for export in review.exports]
    blocks = [block for export in review.exports for block in _blocks(review, export)]
    note = "\n{} of {} parts are left out of {} characters; `cakegen diff --format html` shows them all.\n"
    used = len("\n".join(head)) + len(note) + 16
    order = sorted(range(len(blocks)), key=lambda index: (blocks[index][0], len(blocks[index][1]), index))
    kept: set[int] = set()
    for index in order:
        size = len(blocks[index][1]) + 2
        if used + size <= limit:
            used += size
            kept.add(index)
    text = "\n".join([*head, *(f"\n{blocks[index][1]}" for index in sorted(kept)), ""])
    left_out = len(blocks) - len(kept)
    return text + note.format(left_out, len(blocks), limit) if left_out else text


def _blocks(review: Review, export: ExportReview) -> Iterator[tuple[int, str]]:
    """The parts of one export, in reading order, each with its rank; each stands alone.

    Where not all fit, what was edited stays longest, and what follows from it goes first.
    """
    if export.model:
        table = _table(("field", "before", "after"), _field_rows(export.model))
        yield _EDIT, _folded(f"{_word(export.export)}: model", table, True)
    touched = touched_keys(export)
    if touched:
        listed, folded = split_touched(export)
        rows = [
            (entry.status, _code(entry.key), remark(entry, _code), _fields_inline(entry.fields)) for entry in listed
        ]
        if folded:
            rows.append(("changed", f"{len(folded)} more keys", "a header alone; named below its difference", ""))
        title = f"{_word(export.export)}: {counted(len(touched), 'key')}"
        yield _LISTING, _folded(title, _table(("", "key", "differs in", "decisions"), rows), len(rows) <= 20)
    costs = list(cost_rows(differing_costs(review.costs_of(export))))
    if costs:
        table = _table(COST_COLUMNS, [(_word(row[0]), *map(_plain, row[1:-1]), _code(row[-1])) for row in costs])
        yield _COST, _folded(f"{_word(export.export)}: compiled to other code", table, len(costs) <= 20)
    failures = [cost.failure for cost in review.costs_of(export) if cost.failure]
    if failures:
        title = f"{_word(export.export)}: {len(failures)} do not compile"
        yield _COST, _folded(title, _fenced("\n".join(failures), ""), True)
    for change in export.texts:
        yield _EDIT, _difference(export, change)
    unchanged = [entry.key for entry in export.keys if entry.status == UNCHANGED]
    if unchanged and touched:
        listing = "\n".join(f"* {_code(key)}" for key in unchanged)
        yield _UNCHANGED, _folded(f"{_word(export.export)}: {len(unchanged)} unchanged", listing)


def _difference(export: ExportReview, change: TextChange) -> str:
    keys = "\n".join(f"* {_code(key)}" for key in change.keys[:_LISTED_KEYS])
    if len(change.keys) > _LISTED_KEYS:
        keys += f"\n* and {len(change.keys) - _LISTED_KEYS} more"
    body = f"{_fenced(chr(10).join(change.unified()), 'diff')}\n\n{keys}"
    return _folded(f"{_word(export.export)}: {_word(change.title)} ({counted(len(change.keys), 'key')})", body)


def _folded(title: str, body: str, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{title}</summary>\n\n{body}\n\n</details>"


def _fenced(text: str, language: str) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _field_rows(changes: Sequence[FieldChange]) -> list[tuple[str, str, str]]:
    return [(_code(change.name), _code(change.before), _code(change.after)) for change in changes]


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

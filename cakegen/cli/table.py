"""Tables for a terminal of any width: a key is never cut; columns that matter less go. Imports nothing of cakegen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_GAP = "  "


def fitted_lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, first_to_go: Sequence[str]
) -> Iterator[str]:
    """A table in lines of at most `width` characters, save for a last cell that is longer by itself.

    Parameters
    ----------
    columns
        Names; cells of the last one, such as keys, stand whole, and below the others where they do not fit beside them.
    first_to_go
        Columns that are left out where the width lacks, the first of them first.
    """
    widths = [max(len(cell) for cell in cells) for cells in zip(columns, *rows, strict=True)]
    kept = list(range(len(columns)))
    for name in first_to_go:
        if _total(widths, kept) <= width:
            break
        kept.remove(columns.index(name))
    below = _total(widths, kept) > width
    beside = kept[:-1] if below else kept
    for row in (columns, *rows):
        yield _GAP.join(f"{row[at]:{widths[at]}}" for at in beside).rstrip()
        if below:
            yield f"{_GAP}{row[-1]}"


def _total(widths: Sequence[int], kept: Sequence[int]) -> int:
    return sum(widths[at] for at in kept) + len(_GAP) * (len(kept) - 1)

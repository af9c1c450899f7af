"""Results of a campaign as a table, with the survivors and why they survive.

A site counts as killed when the mutant of any program at it is. What is left is matched with the explanations: a list
of objects whose `operator`, `change`, `instruction`, `line`, `site` and `key` are patterns (`*` where one is missing),
with a `kind` and a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from cakegen.emulator.mutation.trial import ALIVE
from cakegen.errors import EmulationError

# Why a mutant survives: it does what the program does; the emulator can't tell; nobody knows yet.
EQUIVALENT, BLIND, OPEN = "equivalent", "not seen", "unexplained"
_PATTERNS = ("operator", "change", "instruction", "line", "site", "key")


@dataclass(frozen=True)
class Explanation:
    """Why some mutants survive.

    Parameters
    ----------
    patterns
        Field of a result -> shell pattern that it matches.
    kind
        `equivalent` or `not seen`.
    """

    patterns: dict[str, str]
    kind: str
    why: str

    def matches(self, entry: dict[str, Any]) -> bool:
        """Whether it speaks of a result."""
        return all(fnmatchcase(entry[name], pattern) for name, pattern in self.patterns.items())


def read_explanations(file: Path) -> tuple[Explanation, ...]:
    """The explanations of a file.

    Raises
    ------
    EmulationError
        It is no JSON list of objects of texts; or an entry has another field, another kind, or no sentence.
    """
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EmulationError(f"{file}: no JSON ({error}); it needs a list of explanations") from None
    whole = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    if not whole or not all(isinstance(text, str) for entry in entries for text in entry.values()):
        raise EmulationError(
            f"{file}: needs a list of explanations, each an object of texts; see `cakegen docs mutation`"
        )
    found = []
    for number, entry in enumerate(entries, 1):
        kind, why = entry.pop("kind", ""), entry.pop("why", "")
        unknown = set(entry) - set(_PATTERNS)
        if kind not in (EQUIVALENT, BLIND) or not why or unknown or not entry:
            raise EmulationError(
                f"{file}: entry {number} needs a `why`, a `kind` ({EQUIVALENT} or {BLIND}), and a pattern of some of "
                f"{', '.join(_PATTERNS)}; got kind {kind!r}, why {why!r} and {', '.join(entry) or 'no pattern'}"
            )
        # brackets mean themselves: PTX is full of them
        patterns = {name: text.replace("[", "[[]") for name, text in entry.items()}
        found.append(Explanation(patterns, kind, why))
    return tuple(found)


@dataclass(frozen=True)
class Survivor:
    """A site that no schedule showed in any program: one of its results, and the explanation where there is one."""

    entry: dict[str, Any]
    explanation: Explanation | None

    @property
    def kind(self) -> str:
        """Why, in a word."""
        return self.explanation.kind if self.explanation else OPEN


def survivors_of(results: Iterable[dict[str, Any]], explanations: Sequence[Explanation]) -> list[Survivor]:
    """The sites that survived, each with an explanation where every one of its results has one.

    Of several the one is named that claims less: that the emulator can't tell.
    """
    at: dict[str, list[dict[str, Any]]] = {}
    for entry in results:
        at.setdefault(entry["site"], []).append(entry)
    found = []
    for entries in at.values():
        if any(entry["outcome"] not in ALIVE for entry in entries):
            continue
        survivors = [Survivor(entry, _explanation_of(entry, explanations)) for entry in entries]
        found.append(min(survivors, key=lambda survivor: (OPEN, BLIND, EQUIVALENT).index(survivor.kind)))
    return found


def _explanation_of(entry: dict[str, Any], explanations: Sequence[Explanation]) -> Explanation | None:
    return next((why for why in explanations if why.matches(entry)), None)


def render_table(header: dict[str, Any], results: Sequence[dict[str, Any]], survivors: Sequence[Survivor]) -> str:
    """Operator by operator: mutants run, sites, sites killed, and the rest by kind; then the same for all."""
    rows = [_row(name, results, survivors) for name in dict.fromkeys(entry["operator"] for entry in results)]
    rows.sort(key=lambda row: row[0])
    total = ("all", *(str(sum(int(row[column]) for row in rows)) for column in range(1, 8)))
    titles = ("operator", "mutants", "killed", "sites", "killed", EQUIVALENT, BLIND, OPEN, "of what can be seen")
    lines = [titles, *(_with_share(row) for row in rows), _with_share(total)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    text = [
        "  ".join(cell.ljust(width) if not column else cell.rjust(width) for column, (cell, width) in cells).rstrip()
        for cells in (enumerate(zip(line, widths, strict=True)) for line in lines)
    ]
    # launch files have no chain
    chain = " and a chain" if header["export"] else ""
    what = header["export"] or ", ".join(header["keys"])
    head = f"{what} {header['arch']}, early, late, {header['seeds']} seeds{chain}, {header['nvrtc']}"
    return "\n".join([head, "", *text])


def _row(operator: str, results: Sequence[dict[str, Any]], survivors: Sequence[Survivor]) -> tuple[str, ...]:
    mine = [entry for entry in results if entry["operator"] == operator]
    killed = [entry for entry in mine if entry["outcome"] not in ALIVE]
    kinds = [survivor.kind for survivor in survivors if survivor.entry["operator"] == operator]
    sites, killed_sites = ({entry["site"] for entry in group} for group in (mine, killed))
    numbers = (
        len(mine),
        len(killed),
        len(sites),
        len(killed_sites),
        *(kinds.count(k) for k in (EQUIVALENT, BLIND, OPEN)),
    )
    return (operator, *(str(number) for number in numbers))


def _with_share(row: tuple[str, ...]) -> tuple[str, ...]:
    """A row with the killed share of the sites that are not equivalent."""
    killed, rest = int(row[4]), int(row[6]) + int(row[7])
    return (*row, f"{100 * killed / (killed + rest):.1f} %" if killed + rest else "")


def render_survivors(survivors: Sequence[Survivor]) -> str:
    """One paragraph a survivor: what was done, where, and why it survives."""
    lines = []
    for survivor in sorted(survivors, key=lambda each: (each.kind, each.entry["operator"], each.entry["line"])):
        entry = survivor.entry
        lines.append(f"{survivor.kind}: {entry['operator']} ({entry['change']}) `{entry['instruction']}`")
        lines.append(f"  {entry['line']}")
        if survivor.explanation:
            lines.append(f"  {survivor.explanation.why}")
    return "\n".join(lines)


def survivors_json(survivors: Sequence[Survivor]) -> str:
    """What is committed of the survivors: one object a line."""
    fields = ("site", "operator", "change", "instruction", "line", "key")
    kept = [{name: survivor.entry[name] for name in fields} | {"kind": survivor.kind} for survivor in survivors]
    kept.sort(key=lambda each: (each["operator"], each["line"], each["site"]))
    return "".join(json.dumps(each) + "\n" for each in kept)

"""What was edited, each edit once over all exports; and what follows from it. Imports this package.

A field of a model and a shared header are edits, and so is a difference of programs whose decisions are the same. Where
decisions differ, texts follow from them: such differences are grouped once more, by all but their numbers, since the
decisions give those.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cakegen.review.compare import ExportReview, FieldChange, KeyReview, TextChange

# follows from sizes and counts, which are decisions of their own
_FOLLOWING_FIELD = re.compile(r"k\w+Offset|k\w+Bytes")
_NUMBER = re.compile(r"\d+")

Keys = tuple[tuple[str, tuple[str, ...]], ...]
"""Keys of each export: (export, keys) pairs."""


@dataclass(frozen=True)
class ModelEdit:
    """A field that differs in the same way in the models of some exports."""

    field: FieldChange
    exports: tuple[str, ...]


@dataclass(frozen=True)
class TextEdit:
    """A difference of texts, with the keys that it touches in each export.

    Parameters
    ----------
    follows
        Whether decisions differ behind every one of its keys.
    variants
        Differences that are this one but for their numbers, itself included; 1 where it is the only one.
    """

    change: TextChange
    keys: Keys
    follows: bool
    variants: int = 1

    @property
    def title(self) -> str:
        """`cake_device_tma.cuh (3 keys of one, 4 of another)`."""
        variants = f"; one of {self.variants} that differ in numbers alone" if self.variants > 1 else ""
        return f"{self.change.title} ({count_keys(self.keys)}{variants})"


@dataclass(frozen=True)
class DecisionGroup:
    """Decisions that differ in the same way behind some keys.

    Parameters
    ----------
    fields
        The decisions.
    following
        Of how many further fields, at most, the value follows from them: offsets and sizes of parts of memory.
    keys
        Changed keys, and added ones that replace another.
    """

    fields: tuple[FieldChange, ...]
    following: int
    keys: Keys

    @property
    def title(self) -> str:
        """`15 keys of one`."""
        return count_keys(self.keys)

    @property
    def remark(self) -> str:
        """How many fields follow; empty where none does."""
        if not self.following:
            return ""
        return f"{self.following} offset{'' if self.following == 1 else 's'} and sizes follow"


def count_keys(keys: Keys) -> str:
    """`3 keys of one, 4 of another`."""
    words = [f"{len(names)} of {export}" for export, names in keys]
    (_, first), *_ = keys
    return ", ".join([words[0].replace(" ", " key " if len(first) == 1 else " keys ", 1), *words[1:]])


def model_edits(exports: Iterable[ExportReview]) -> list[ModelEdit]:
    """Fields of the exports' models, each change once."""
    found: dict[FieldChange, list[str]] = {}
    for export in exports:
        for field in export.model:
            found.setdefault(field, []).append(export.export)
    return [ModelEdit(field, tuple(names)) for field, names in found.items()]


def text_edits(exports: Sequence[ExportReview]) -> list[TextEdit]:
    """Differences of texts, each once; headers first, then what no decision explains, then what follows from some."""
    fields = {(export.export, entry.key): entry.fields for export in exports for entry in export.keys}
    found: dict[tuple[object, ...], list[tuple[str, TextChange]]] = {}
    follows: set[tuple[object, ...]] = set()
    for export in exports:
        for change in export.texts:
            explained = change.part != "header" and all(fields[export.export, key] for key in change.keys)
            lines = change.hunk_lines()
            words = tuple(_NUMBER.sub("#", line) for line in lines) if explained else lines
            identity = (change.part, explained, change.title if change.part == "header" else "", words)
            found.setdefault(identity, []).append((export.export, change))
            follows |= {identity} if explained else set()
    edits = [_merged(members, identity in follows) for identity, members in found.items()]
    order = ("header", "kernel", "binding")
    return sorted(edits, key=lambda edit: (edit.follows, order.index(edit.change.part), -_number(edit.keys)))


def _merged(members: Sequence[tuple[str, TextChange]], follows: bool) -> TextEdit:
    keys: dict[str, list[str]] = {}
    for export, change in members:
        keys.setdefault(export, []).extend(change.keys)
    _, shown = max(members, key=lambda member: len(member[1].keys))
    variants = len({change.hunk_lines() for _, change in members})
    roles = dict.fromkeys(role for _, change in members for role in change.roles)
    title = f"{shown.part}, {', '.join(roles)}" if roles else shown.title
    merged = TextChange(shown.part, title, shown.before, shown.after, shown.keys, tuple(roles))
    return TextEdit(merged, _frozen(keys), follows, variants)


def decision_groups(exports: Iterable[ExportReview]) -> list[DecisionGroup]:
    """Keys by the decisions that differ behind them; most keys first."""
    found: dict[tuple[FieldChange, ...], list[tuple[str, KeyReview]]] = {}
    for export in exports:
        for entry in export.keys:
            if entry.fields:
                found.setdefault(_leading(entry.fields), []).append((export.export, entry))
    groups = []
    for leading, members in found.items():
        keys: dict[str, list[str]] = {}
        for name, entry in members:
            keys.setdefault(name, []).append(entry.key)
        following = max(len(entry.fields) for _, entry in members) - len(leading)
        groups.append(DecisionGroup(leading, following, _frozen(keys)))
    return sorted(groups, key=lambda group: -_number(group.keys))


def _leading(fields: tuple[FieldChange, ...]) -> tuple[FieldChange, ...]:
    """The fields that do not follow from others; all, where that leaves none."""
    return tuple(field for field in fields if not _FOLLOWING_FIELD.fullmatch(field.name)) or fields


def _frozen(keys: Mapping[str, Sequence[str]]) -> Keys:
    return tuple((export, tuple(names)) for export, names in keys.items())


def _number(keys: Keys) -> int:
    return sum(len(names) for _, names in keys)

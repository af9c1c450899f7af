"""A review whose names and texts can stand in any format. Imports visible and this package."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cakegen.review.compare import ExportReview, FieldChange, KeyReview, TextChange
from cakegen.review.cost import CostChange
from cakegen.review.report import Review
from cakegen.visible import visible


def shown(review: Review) -> Review:
    """The same review with every control character, half of a surrogate pair and turn of direction spelled out.

    A name loses its line ends, too; a line of a text keeps its tabs, and a compiler's log its lines.
    """
    costs = review.costs
    if costs is not None:
        costs = {visible(export): [_cost(entry) for entry in entries] for export, entries in costs.items()}
    return replace(
        review,
        base=visible(review.base),
        exports=tuple(_export(export) for export in review.exports),
        costs=costs,
        selection=_words(review.selection),
    )


def _words(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(visible(word) for word in words)


def _lines(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(visible(line, "\t") for line in lines)


def _export(export: ExportReview) -> ExportReview:
    return ExportReview(
        visible(export.export),
        _fields(export.model),
        tuple(_key(entry) for entry in export.keys),
        tuple(_text(change) for change in export.texts),
    )


def _fields(changes: Iterable[FieldChange]) -> tuple[FieldChange, ...]:
    return tuple(FieldChange(*_words((change.name, change.before, change.after))) for change in changes)


def _key(entry: KeyReview) -> KeyReview:
    return replace(
        entry,
        key=visible(entry.key),
        role=visible(entry.role),
        arches=_words(entry.arches),
        replaces=None if entry.replaces is None else visible(entry.replaces),
        fields=_fields(entry.fields),
    )


def _text(change: TextChange) -> TextChange:
    return TextChange(
        change.part,
        visible(change.title),
        _lines(change.before),
        _lines(change.after),
        _words(change.keys),
        _words(change.roles),
    )


def _cost(entry: CostChange) -> CostChange:
    return replace(entry, keys=_words(entry.keys), arch=visible(entry.arch), failure=visible(entry.failure, "\n\t"))

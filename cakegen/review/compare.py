"""Two trees of one export, paired by logical key. Imports errors and this package.

A program's name is a hash, and stands in its text; so a program that only has another name would look changed from its
first line on. Names are therefore taken out of both sides before they are compared.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cakegen.renamed_keys import renamed_keys
from cakegen.review.trees import Tree

UNCHANGED, CHANGED, ADDED, REMOVED = "unchanged", "changed", "added", "removed"
STATUSES = (CHANGED, ADDED, REMOVED, UNCHANGED)
_SEAL = re.compile(r"^(?://|#|<!--) seal: sha256 [0-9a-f]{64}.*\n", re.MULTILINE)
_CONSTANT = re.compile(r"^\s*static constexpr \w+ (\w+) = ([^;]+);", re.MULTILINE)
_DIGEST_DIGITS = 20
# what a record says beside its decisions: names that are hashes, digests that follow from the texts
_NO_DECISIONS = ("sources", "headers", "closure_digest")
_LEAST_LIKENESS = 0.6
# fields by which the records of a list are told apart
_NAMING = ("name", "arch_family", "arch")


@dataclass(frozen=True)
class FieldChange:
    """One decision that differs; `-` stands for a side that does not have it."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class KeyReview:
    """One logical key.

    Parameters
    ----------
    status
        `unchanged`, `changed`, `added` or `removed`.
    role
        What its program does.
    arches
        Targets of its program: the new one's, or the old one's where the key is gone.
    replaces
        Of an added key: the removed key that is most like it, with which it is compared.
    parts
        What differs: `record`, `kernel`, `binding`, `header`.
    fields
        Planner decisions that differ: members of `struct Cfg`, launch record, barriers, compile-line constants.
    """

    key: str
    status: str
    role: str
    arches: tuple[str, ...]
    replaces: str | None = None
    parts: tuple[str, ...] = ()
    fields: tuple[FieldChange, ...] = ()


@dataclass(frozen=True)
class TextChange:
    """One difference between texts, shown once for all keys that share it.

    Parameters
    ----------
    part
        `kernel`, `binding` or `header`.
    title
        File name of a header; else the part and the roles.
    before, after
        Lines, names taken out.
    keys
        Keys whose program has this difference (of a header: includes it).
    roles
        Of a kernel or a binding: what the programs do that have it.
    """

    part: str
    title: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    keys: tuple[str, ...]
    roles: tuple[str, ...] = ()

    def unified(self) -> list[str]:
        """The unified difference, without a file header."""
        return list(difflib.unified_diff(self.before, self.after, lineterm="", n=3))[2:]

    def hunk_lines(self) -> tuple[str, ...]:
        """The difference without its line numbers and its context: what makes two differences the same."""
        return _hunk_lines(self.before, self.after)


@dataclass(frozen=True)
class ExportReview:
    """All that differs between two trees of one export."""

    export: str
    model: tuple[FieldChange, ...]
    keys: tuple[KeyReview, ...]
    texts: tuple[TextChange, ...]

    def count(self, status: str) -> int:
        """Number of keys with a status."""
        return sum(entry.status == status for entry in self.keys)

    @property
    def summary(self) -> str:
        """`2 changed, 1 added, 0 removed, 120 unchanged`."""
        return ", ".join(f"{self.count(status)} {status}" for status in STATUSES)


def compare_trees(old: Tree | None, new: Tree | None) -> ExportReview:
    """Pair the programs of two trees by key; None where an export exists on one side only."""
    sides = [tree for tree in (new, old) if tree is not None]
    assert sides, "an export that neither side has"
    export = sides[0].export
    old, new = old or _nothing(export), new or _nothing(export)
    old = _with_todays_keys(old, new)
    replaced = dict(_pair_renamed(old, new))
    entries = [_review_key(old, new, key, replaced) for key in sorted({*old.kernels, *new.kernels})]
    model = _changes(dict(_flatten(old.model)), dict(_flatten(new.model)))
    return ExportReview(export, model, tuple(entries), tuple(_text_changes(old, new, entries)))


def narrow_review(review: ExportReview, patterns: Sequence[str]) -> ExportReview:
    """Of a comparison, the keys that match a pattern, or whose removed predecessor does, and what differs of them."""

    def wanted(key: str) -> bool:
        return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)

    keys = tuple(entry for entry in review.keys if wanted(entry.key) or (entry.replaces and wanted(entry.replaces)))
    kept = {entry.key for entry in keys}
    texts = [replace(change, keys=tuple(key for key in change.keys if key in kept)) for change in review.texts]
    return ExportReview(review.export, review.model, keys, tuple(change for change in texts if change.keys))


def _with_todays_keys(old: Tree, new: Tree) -> Tree:
    """An old tree whose keys are called as the new one calls them, where the same program's key was only renamed."""
    today = {key: name for key, name in renamed_keys().items() if name in new.kernels and key not in new.kernels}
    kernels = {today.get(key, key): program for key, program in old.kernels.items()}
    lines = {today.get(key, key): constants for key, constants in old.specializations.items()}
    return replace(old, kernels=kernels, specializations=lines)


def _nothing(export: str) -> Tree:
    return Tree(export, {}, {}, {}, {}, {})


def _review_key(old: Tree, new: Tree, key: str, replaced: Mapping[str, str]) -> KeyReview:
    if key not in new.kernels:
        return KeyReview(key, REMOVED, *_role_and_arches(old, key))
    role, arches = _role_and_arches(new, key)
    before = key if key in old.kernels else replaced.get(key)
    if before is None:
        return KeyReview(key, ADDED, role, arches)
    fields = _changes(_decisions(old, before), _decisions(new, key))
    texts = [part for part in ("kernel", "binding") if text_of(old, before, part) != text_of(new, key, part)]
    shared = ["header"] if _headers(old, before) != _headers(new, key) else []
    recorded = any(not _is_constant(change) for change in fields)
    parts = (*(["record"] if recorded else []), *texts, *shared)
    if before != key:
        return KeyReview(key, ADDED, role, arches, before, parts, fields)
    return KeyReview(key, CHANGED if parts else UNCHANGED, role, arches, None, parts, fields)


def _role_and_arches(tree: Tree, key: str) -> tuple[str, tuple[str, ...]]:
    record = tree.record(key)
    return str(record.get("role", "")), tuple(str(arch) for arch in record.get("arches", ()))


def _pair_renamed(old: Tree, new: Tree) -> Iterator[tuple[str, str]]:
    """(added key, removed key) pairs of one role: a key spells its plan, so another plan is another key."""
    gone = [key for key in sorted(old.kernels) if key not in new.kernels]
    added = [key for key in sorted(new.kernels) if key not in old.kernels]
    likeness = [
        (difflib.SequenceMatcher(None, _words(before), _words(after), autojunk=False).ratio(), after, before)
        for after in added
        for before in gone
        if _role_and_arches(old, before) == _role_and_arches(new, after)
    ]
    taken: set[str] = set()
    for ratio, after, before in sorted(likeness, key=lambda entry: (-entry[0], entry[1], entry[2])):
        if ratio >= _LEAST_LIKENESS and not taken & {f"+{after}", f"-{before}"}:
            taken |= {f"+{after}", f"-{before}"}
            yield after, before


def _words(key: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+|[^a-z\d]", key)


def text_of(tree: Tree, key: str, part: str) -> str:
    """A key's kernel or binding without its seal and its program's name; empty where the tree does not hold it."""
    name = tree.kernels[key]
    digest = name.rpartition("_")[2]
    text = _SEAL.sub("", tree.source(key, part)).replace(name, "<program>")
    if re.fullmatch(rf"[0-9a-f]{{{_DIGEST_DIGITS}}}", digest):
        text = text.replace(f"0x{digest[:8]}", "<program id>")
    return text


def header_text(tree: Tree, name: str) -> str:
    """A shared header without its seal."""
    return _SEAL.sub("", tree.texts.get(name, ""))


def _headers(tree: Tree, key: str) -> list[tuple[str, str]]:
    return [(str(name), header_text(tree, str(name))) for name in tree.record(key).get("headers", ())]


def _decisions(tree: Tree, key: str) -> dict[str, str]:
    """Every decision behind a key: of its text's `struct Cfg`, of its record, and of its compile line."""
    found = dict(_CONSTANT.findall(text_of(tree, key, "kernel")))
    for name, value in tree.record(key).items():
        if name not in _NO_DECISIONS:
            found |= dict(_flatten(value, str(name)))
    return found | {f"-D{name}": str(value) for name, value in tree.specializations.get(key, {}).items()}


def _is_constant(change: FieldChange) -> bool:
    """Whether a field is a member of `struct Cfg`, which is part of the kernel's text."""
    return re.fullmatch(r"k[A-Z]\w*", change.name) is not None


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Nested literals as (dotted name, text) pairs; named things of a list by name, so that none shifts others."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flatten(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, Sequence) and not isinstance(value, str) and value and _names_of(value) is not None:
        grouped: dict[str, list[str]] = {}
        for name, inner in zip(_names_of(value) or (), value, strict=True):
            if isinstance(inner, Mapping):
                yield from _flatten({k: v for k, v in inner.items() if k not in _NAMING}, f"{path}.{name}")
            else:
                grouped.setdefault(name, []).extend(str(item) for item in inner if item != name)
        yield from ((f"{path}.{name}", ", ".join(words)) for name, words in grouped.items())
    else:
        yield path, _listed(value)


def _names_of(items: Sequence[Any]) -> list[str] | None:
    """The name of each item of a list of records (its number, where it has none) or of (kind, name) and (name, count)
    pairs; None for other lists.
    """
    if all(isinstance(item, Mapping) for item in items):
        words = [[item[word] for word in _NAMING if word in item] for item in items]
        names = [".".join(map(str, found)) or str(number) for number, found in enumerate(words)]
    elif all(isinstance(item, list) and len(item) == 2 for item in items):
        names = [item[1] if isinstance(item[1], str) else item[0] for item in items]
    else:
        return None
    return [str(name) for name in names] if all(isinstance(name, str) for name in names) else None


def _listed(value: Any) -> str:
    return ", ".join(str(item) for item in value) if isinstance(value, list) else str(value)


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[FieldChange, ...]:
    names = [*after, *(name for name in before if name not in after)]
    return tuple(
        FieldChange(name, before.get(name, "-"), after.get(name, "-"))
        for name in names
        if before.get(name) != after.get(name)
    )


def _text_changes(old: Tree, new: Tree, entries: Sequence[KeyReview]) -> Iterator[TextChange]:
    """Headers first, each once; then kernels and bindings, programs with one and the same difference together."""
    compared = [entry for entry in entries if entry.parts]
    for name in sorted({str(n) for tree in (old, new) for r in tree.modules.values() for n in r.get("headers", ())}):
        before, after = header_text(old, name), header_text(new, name)
        keys = [entry.key for entry in compared if name in new.record(entry.key).get("headers", ())]
        if before != after:
            yield TextChange("header", name, tuple(before.splitlines()), tuple(after.splitlines()), tuple(keys))
    groups: dict[tuple[str, ...], list[tuple[KeyReview, str, str]]] = {}
    seen: dict[tuple[str, str, str], tuple[str, ...]] = {}
    for part in ("kernel", "binding"):
        for entry in compared:
            if part not in entry.parts:
                continue
            before, after = text_of(old, entry.replaces or entry.key, part), text_of(new, entry.key, part)
            identity = seen.get((part, before, after))
            if identity is None:
                lines = _hunk_lines(before.splitlines(), after.splitlines())
                identity = seen[part, before, after] = (part, str(bool(entry.fields)), *lines)
            groups.setdefault(identity, []).append((entry, before, after))
    for (part, *_), members in groups.items():
        _, before, after = members[0]
        served = tuple(entry.key for entry, _, _ in members)
        roles = tuple(dict.fromkeys(entry.role for entry, _, _ in members))
        sides = tuple(before.splitlines()), tuple(after.splitlines())
        yield TextChange(part, f"{part}, {', '.join(roles)}", *sides, served, roles)


def _hunk_lines(before: Sequence[str], after: Sequence[str]) -> tuple[str, ...]:
    lines = difflib.unified_diff(before, after, lineterm="", n=0)
    return tuple(["@@" if line.startswith("@@") else line for line in lines][2:])

"""The keys that an export reaches, remembered on disk: a walk over all plans takes seconds. Imports plan and reach.

An entry names, for each key, one request that launches it. Reading it plans those requests again, so a damaged entry,
or one of another planner, is found by what it says; and its file's name is a digest of the model and of the sources
that a walk depends on, so that an entry is of this planner. It is written beside and renamed, and several processes may
write it at once: all write the same.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cakegen.emit.reach import ReachedKey, Witness, reached_key, reached_keys, walk
from cakegen.errors import CakeError
from cakegen.model import Model

MOST_ENTRIES = 16
"""In the folder; the oldest go when another is written."""
_SOURCES = ("arch.py", "model.py", "plan/*.py", "rules/*.py", "emit/reach.py", "emit/walk.py")


def remembered_keys(model: Model, folder: Path) -> tuple[ReachedKey, ...]:
    """`reached_keys`, from an entry in a folder where there is one, else with a walk that leaves one there.

    Raises
    ------
    CakeError
        As `reached_keys`. A folder that can't be read or written raises nothing.
    """
    entry = folder / f"{_digest(model)}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError, CakeError):
        return _read(model, json.loads(entry.read_text(encoding="utf-8")))
    witnesses = walk(model)
    with contextlib.suppress(OSError):
        _write(entry, witnesses.values())
    return reached_keys(model)


def _digest(model: Model) -> str:
    return hashlib.sha256(f"{sources_digest()}\n{model!r}".encode()).hexdigest()


@functools.cache
def sources_digest() -> str:
    """Identity of what a walk depends on beside the model."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        for file in sorted(package.glob(pattern)):
            raw = file.read_bytes()
            digest.update(f"{file.relative_to(package).as_posix()} {len(raw)}\n".encode() + raw)
    return digest.hexdigest()


def _read(model: Model, entry: Any) -> tuple[ReachedKey, ...]:
    """The keys of an entry, each planned again.

    Raises
    ------
    ValueError
        A request launches another key, or the entry holds none.
    """
    witnesses = [Witness(**record) for record in entry]
    found = tuple(reached_key(model, witness) for witness in witnesses)
    if not found or [each.key for each in found] != sorted({each.key for each in found}):
        raise ValueError("keys are missing or out of order")
    return found


def _write(entry: Path, witnesses: Iterable[Witness]) -> None:
    # as the compile cache, which may be above it, makes its folders
    entry.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    entry.parent.mkdir(exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=entry.parent, suffix=".partial")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump([vars(witness) for witness in witnesses], stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, entry)
    except BaseException:
        os.unlink(name)
        raise
    for old in sorted(entry.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)[:-MOST_ENTRIES]:
        old.unlink(missing_ok=True)

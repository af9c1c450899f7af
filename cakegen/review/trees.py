"""Generated trees as plain text: of the files on disk, or of a git revision. Imports errors, plain_files and registry.

A registry is read as bare literals, not as this version's records, so that a tree of an older schema can be compared
with the present one. What its tables hold apart is joined: a program has one record, whatever the schema. A tree is
data of others: a symbolic link in it is refused and never followed, and what it holds is bounded.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cakegen import plain_files
from cakegen.errors import RegistryError, ReviewError
from cakegen.registry import (
    JSON_NAMES,
    REGISTRY_FILE,
    SHARED_FILE,
    SHARED_FOLDER,
    SharedHeader,
    header_closure,
    parse_shared_table,
    parse_tables,
)
from cakegen.review.git_output import parse_listing, parse_objects
from cakegen.review.whole_records import parse_whole_records

# git-ls-tree: the mode of a symbolic link, whose object holds the name that it leads to
_LINK_MODE = "120000"
_MOST_TREES_BYTES = 256 * 2**20
_PLAIN_FILES = "Trees are plain files, as `cakegen export` writes them."


@dataclass(frozen=True)
class Tree:
    """One generated tree.

    Parameters
    ----------
    export
        Its folder's name.
    model
        `MODEL`, as nested dicts and lists.
    modules
        A whole record a program, by its name.
    kernels, specializations
        The registry's tables, as they stand.
    texts
        Sources and headers by file name.
    """

    export: str
    model: Mapping[str, Any]
    modules: Mapping[str, Mapping[str, Any]]
    kernels: Mapping[str, str]
    specializations: Mapping[str, Mapping[str, int]]
    texts: Mapping[str, str]

    def record(self, key: str) -> Mapping[str, Any]:
        """The registry's record of the program behind a key."""
        return self.modules[self.kernels[key]]

    def source(self, key: str, part: str) -> str:
        """Text of the `kernel` or `binding` half of a key's program, by the ending of its file's name; empty if none.

        By the name and not the place in the record's list: an old registry may list one half only.
        """
        names = (str(name) for name in self.record(key).get("sources", ()))
        return next((self.texts.get(name, "") for name in names if name.endswith(f"_{part}.cu")), "")


@dataclass(frozen=True)
class Revision:
    """A commit of the repository that holds a folder: its full name, and the name that the user gave."""

    commit: str
    named: str

    @property
    def label(self) -> str:
        """`HEAD (8ccd58c)`."""
        return f"{self.named} ({self.commit[:7]})"


def read_trees(folder: Path) -> dict[str, Tree]:
    """The trees below a folder on disk, by export.

    Raises
    ------
    RegistryError
        A registry can't be read.
    ReviewError
        A file can't be read.
    """
    files: dict[str, bytes] = {}
    for name in _names_below(folder):
        try:
            files[name] = plain_files.read_below(folder, name)
        except OSError as error:
            raise ReviewError(
                f"{folder / name}: {error.strerror}; the tree can't be compared without it. {_PLAIN_FILES}"
            ) from None
        _check_total(sum(map(len, files.values())), str(folder))
    return _trees(files, str(folder))


def _names_below(folder: Path) -> list[str]:
    """Files below a folder, and links to folders, which are not entered."""
    names = []
    for where, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]
        for name in (*files, *links):
            relative = (Path(where) / name).relative_to(folder).as_posix()
            # what a write leaves beside a tree for a moment begins with a dot
            if not relative.startswith("."):
                names.append(relative)
    return sorted(names)


def _check_total(size_bytes: int, where: str) -> None:
    if size_bytes > _MOST_TREES_BYTES:
        raise ReviewError(
            f"{where}: its files have more than {_MOST_TREES_BYTES} bytes; a review reads no more. {_PLAIN_FILES}"
        )


def resolve_revision(folder: Path, named: str, *, merge_base: bool = False) -> Revision:
    """The commit that a name stands for in the repository of a folder.

    Parameters
    ----------
    merge_base
        Take the commit at which the history of `named` and of HEAD parted.

    Raises
    ------
    ReviewError
        No git, no repository, no such revision, or no common history.
    """
    try:
        commit = _git(folder, "rev-parse", "--verify", "--end-of-options", f"{named}^{{commit}}").decode().strip()
    except ReviewError as error:
        raise ReviewError(
            f"{named!r} names no commit ({error}). Name a branch, a tag or a commit of the repository that holds"
            f" {folder}"
        ) from None
    if not merge_base:
        return Revision(commit, named)
    try:
        commit = _git(folder, "merge-base", commit, "HEAD").decode().strip()
    except ReviewError as error:
        raise ReviewError(
            f"{named} and HEAD have no common commit in this clone ({error}). A shallow clone holds too little "
            "history: fetch all of it (`git fetch --unshallow`, or fetch-depth: 0)."
        ) from None
    return Revision(commit, f"merge base of {named}")


def read_revision(folder: Path, revision: Revision) -> dict[str, Tree]:
    """The trees that a folder held in a commit, by export; none where it did not exist.

    Raises
    ------
    ReviewError
        git failed.
    RegistryError
        A registry can't be read.
    """
    folder = folder.resolve()
    listing = _git(folder, "ls-tree", "-r", "-l", "-z", revision.commit, ".")
    files = [file for file in parse_listing(listing, revision.label) if not file.path.startswith(".")]
    for file in files:
        _check_blob(f"{revision.label}: {file.path}", file.mode, file.num_bytes)
    _check_total(sum(file.num_bytes for file in files), revision.label)
    contents = _read_blobs(folder, [file.object_id for file in files])
    return _trees({file.path: content for file, content in zip(files, contents, strict=True)}, revision.label)


def _check_blob(where: str, mode: str, size_bytes: int) -> None:
    if mode == _LINK_MODE:
        raise ReviewError(f"{where}: is a symbolic link, which is not followed. {_PLAIN_FILES}")
    if size_bytes > plain_files.MOST_SOURCE_BYTES:
        raise ReviewError(
            f"{where}: has {size_bytes} bytes; at most {plain_files.MOST_SOURCE_BYTES} are read. {_PLAIN_FILES}"
        )


def _read_blobs(folder: Path, names: Sequence[str]) -> list[bytes]:
    """Contents of git objects, through one process (git-cat-file, "batch output")."""
    if not names:
        return []
    stream = _git(folder, "cat-file", "--batch", given="".join(f"{name}\n" for name in names).encode())
    return parse_objects(stream, names)


def _git(folder: Path, *arguments: str, given: bytes | None = None) -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], input=given, capture_output=True)
    except OSError as error:
        raise ReviewError(f"git can't be run ({error.strerror}); `cakegen diff` reads the base from it") from None
    except ValueError as error:
        raise ReviewError(f"{error} in {arguments[-1][:80]!a}, which is no name that git could take") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise ReviewError(f"{folder}: git {arguments[0]} failed: {said}")
    return done.stdout


def _trees(files: Mapping[str, bytes], where: str) -> dict[str, Tree]:
    by_export: dict[str, dict[str, str]] = {}
    for name, content in files.items():
        export, _, rest = name.partition("/")
        by_export.setdefault(export, {})[rest] = content.decode("utf-8", "replace")
    shared = by_export.get(SHARED_FOLDER, {})
    return {
        export: _tree(export, texts, shared, f"{where}: {export}/{REGISTRY_FILE}")
        for export, texts in sorted(by_export.items())
        if REGISTRY_FILE in texts
    }


def _tree(export: str, texts: Mapping[str, str], shared: Mapping[str, str], where: str) -> Tree:
    values = _values(texts[REGISTRY_FILE], shared, where)
    tables = [values[name] for name in ("MODEL", "MODULES", "KERNELS", "SPECIALIZATIONS")]
    if not all(isinstance(table, dict) for table in tables):
        raise RegistryError(f"{where}: MODEL, MODULES, KERNELS and SPECIALIZATIONS must be dicts; export again")
    model, modules, kernels, specializations = tables
    for key, name in kernels.items():
        if not isinstance(key, str) or not isinstance(name, str) or not isinstance(modules.get(name), dict):
            raise RegistryError(f"{where}: MODULES holds no record for the program of {key!r}; export again")
        _check_record(where, name, modules[name])
    for key, constants in specializations.items():
        if not isinstance(constants, dict) or not all(type(value) is int for value in constants.values()):
            raise RegistryError(f"{where}: SPECIALIZATIONS of {key!r} must be a dict of ints; export again")
    sources = {name.rpartition("/")[2]: text for name, text in texts.items() if "/" in name} | dict(shared)
    return Tree(export, model, modules, kernels, specializations, sources)


def _values(text: str, shared: Mapping[str, str], where: str) -> dict[str, Any]:
    """What a registry assigns, with a whole record a program; of schema 1 and 2 as of the present one."""
    if JSON_NAMES not in text.splitlines():
        return parse_whole_records(text, where)
    values = parse_tables(text, where)
    table = parse_shared_table(shared.get(SHARED_FILE, ""), f"{where.partition(':')[0]}: {SHARED_FOLDER}/{SHARED_FILE}")
    try:
        modules = {name: _joined(name, row, values, table) for name, row in values["MODULES"].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise RegistryError(f"{where}: damaged MODULES ({type(error).__name__}: {error}); export again") from None
    return values | {"MODULES": modules}


def _joined(
    name: str, row: Mapping[str, Any], values: Mapping[str, Any], table: Mapping[str, SharedHeader]
) -> dict[str, Any]:
    """A program's record with what its row names."""
    own = {field: value for field, value in row.items() if field != "includes"}
    return {
        **own,
        "sources": [f"{name}_kernel.cu", f"{name}_binding.cu"],
        "headers": list(header_closure(row["includes"], lambda header: table[header].includes)),
        "flags": values["FLAGS"][row["flags"]],
        "arg_plan": values["ARG_PLANS"][row["arg_plan"]],
        "tensor_maps": values["TENSOR_MAPS"][row["tensor_maps"]],
        "barriers": values["BARRIERS"][row["barriers"]],
        "launch": values["LAUNCHES"][row["launch"]],
    }


def _check_record(where: str, name: str, record: Mapping[str, Any]) -> None:
    """What a comparison and a compilation rely on, in every schema so far; the rest is compared as it stands."""
    for field in ("sources", "headers", "arches", "flags"):
        words = record.get(field)
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise RegistryError(f"{where}: {name}: {field} must be a list of texts; got {words!r}. Export again.")
    launch = record.get("launch")
    if not isinstance(launch, dict) or type(launch.get("dynamic_smem_bytes")) is not int:
        raise RegistryError(
            f"{where}: {name}: launch must be a dict with dynamic_smem_bytes; got {launch!r}. Export again."
        )

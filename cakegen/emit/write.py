"""The one module that writes generated trees, and the check that compares one. Imports errors, registry and emit.

Writing is all or nothing: the whole tree is written beside the old one and synced, then the two folders change places.
Where the file system can exchange two names in one step, a kill at any moment leaves the old tree or the new one in
place; where it can't, a kill between two renames leaves both beside, and the next write completes the swap.

A check writes nothing. A write replaces and removes nothing but what an export wrote: it looks at each file first, and
at what an interrupted export left beside.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cakegen.emit.seal import is_generated, is_intact
from cakegen.emit.shared import render_shared_table
from cakegen.emit.tree import RenderedTree
from cakegen.errors import EmitError, SealError
from cakegen.registry import REGISTRY_FILE, SHARED_FILE, SHARED_FOLDER

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@dataclass(frozen=True)
class TreeDifference:
    """How a tree on disk differs from what its export writes now; paths are relative and sorted.

    Parameters
    ----------
    changed
        Their seal is intact, but the export would write another text.
    edited
        Their text is not what their own seal says: somebody edited them.
    missing, stale
        Not on disk; on disk but no longer written.
    same
        How many files are equal.
    """

    changed: tuple[str, ...]
    edited: tuple[str, ...]
    missing: tuple[str, ...]
    stale: tuple[str, ...]
    same: int

    @property
    def clean(self) -> bool:
        """Whether nothing differs."""
        return not (self.changed or self.edited or self.missing or self.stale)

    @property
    def summary(self) -> str:
        """`N changed, M same, K stale`; a missing or an edited file counts as changed."""
        changed = len(self.changed) + len(self.edited) + len(self.missing)
        return f"{changed} changed, {self.same} same, {len(self.stale)} stale"


def compare_tree(root: Path, files: Mapping[str, str]) -> TreeDifference:
    """Compare a tree on disk with the texts of its export, byte by byte; nothing on disk is touched."""
    if not root.parent.is_dir():
        return TreeDifference((), (), tuple(sorted(files)), (), 0)
    with _only_user(root.parent):
        return _compare(root, files)


def _compare(root: Path, files: Mapping[str, str]) -> TreeDifference:
    changed: list[str] = []
    edited: list[str] = []
    missing: list[str] = []
    present = _files_below(root)
    for name in sorted(files):
        if name not in present:
            missing.append(name)
            continue
        raw = _content(root / name)
        if raw != files[name].encode():
            (changed if is_intact(raw.decode("utf-8", "replace")) else edited).append(name)
    stale = tuple(sorted(present - set(files)))
    same = len(files) - len(changed) - len(edited) - len(missing)
    return TreeDifference(tuple(changed), tuple(edited), tuple(missing), stale, same)


def check_tree(
    root: Path, files: Mapping[str, str], command: str | None = None, remedy: str | None = None
) -> TreeDifference:
    """Refuse a tree that is not exactly what its export writes.

    Parameters
    ----------
    command
        What to run in order to write the tree again, for the message; `cakegen export <folder's name>` by default.
    remedy
        What the message ends with where no command writes this tree.

    Raises
    ------
    SealError
        Something differs; the message counts, and names each file.
    """
    difference = compare_tree(root, files)
    if difference.clean:
        return difference
    lines = [f"{root}: {difference.summary}"]
    left = [path.name for path in (_outgoing(root), _incoming(root)) if os.path.lexists(path)]
    lines += [f"  left beside      {name} (an export was interrupted; the next one finishes it)" for name in left]
    lines += [f"  edited by hand   {name}" for name in difference.edited]
    lines += [f"  changed          {name}" for name in difference.changed]
    lines += [f"  missing          {name}" for name in difference.missing]
    foreign = [name for name in difference.stale if _is_foreign(root / name)]
    lines += [f"  stale            {name}" for name in difference.stale if name not in foreign]
    lines += [f"  not generated    {name}" for name in foreign]
    first = "move hand edits into a template or the export"
    if foreign:
        first += ", and away what no export wrote,"
    lines.append(remedy or f"Run `{command or f'cakegen export {root.name}'}` to write it again; {first} first.")
    raise SealError("\n".join(lines))


def write_tree(root: Path, files: Mapping[str, str]) -> TreeDifference:
    """Write a tree, all or nothing, and drop what the export no longer writes.

    Returns
    -------
    TreeDifference
        What was different before; a clean one means that nothing was touched.

    Raises
    ------
    EmitError
        The folder holds a file that no export wrote (nothing is lost then), is none, or can't be written.
    """
    with _writing(root.parent):
        return _write(root, files)


def write_exports(folder: Path, trees: Sequence[RenderedTree]) -> dict[str, TreeDifference]:
    """Write the trees of some exports below a folder, and the headers that they share. Each folder is all or nothing.

    The headers come first: every tree that is there finds all that it includes, at any moment.

    Returns
    -------
    dict
        What was different before, by name of a folder.

    Raises
    ------
    EmitError
        As `write_tree` and `shared_files`.
    """
    with _writing(folder):
        files = {SHARED_FOLDER: shared_files(folder, trees), **{tree.export: tree.files for tree in trees}}
        return {name: _write(folder / name, texts) for name, texts in files.items()}


def shared_files(folder: Path, trees: Sequence[RenderedTree]) -> dict[str, str]:
    """What the shared folder beside some trees must hold: their headers, those of other trees there, and the table.

    Headers that none of the trees includes are kept as they are where another tree lies in the folder, which may.

    Raises
    ------
    EmitError
        Two trees give one header different texts, or somebody edited one that would be kept.
    """
    headers: dict[str, str] = {}
    for tree in trees:
        for name, text in tree.headers.items():
            if headers.setdefault(name, text) != text:
                raise EmitError(f"{tree.export}: would write another {name} than {trees[0].export}; a header is shared")
    written = {tree.export for tree in trees}
    if any(file.parent.name not in written for file in folder.glob(f"[!.]*/{REGISTRY_FILE}")):
        headers |= {name: text for name, text in _kept_headers(folder / SHARED_FOLDER).items() if name not in headers}
    return {**headers, SHARED_FILE: render_shared_table(headers)}


def _kept_headers(shared: Path) -> dict[str, str]:
    kept = {}
    for file in shared.glob("*.cuh"):
        kept[file.name] = _content(file).decode("utf-8", "replace")
        if not is_intact(kept[file.name]):
            raise EmitError(f"{file}: edited by hand, and other trees include it; run `cakegen export` for those first")
    return kept


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_user(folder):
            yield
    except OSError as error:
        raise EmitError(f"{folder}: can't write the tree: {error.strerror} ({error.filename})") from error


def _write(root: Path, files: Mapping[str, str]) -> TreeDifference:
    _refuse_no_folder(root)
    _recover(root)
    difference = _compare(root, files)
    if not difference.clean:
        _refuse_foreign(root, (*difference.changed, *difference.edited, *difference.stale))
        _write_beside(_incoming(root), files)
        _swap(root)
    return difference


def _incoming(root: Path) -> Path:
    return root.parent / f".{root.name}.new"


def _outgoing(root: Path) -> Path:
    return root.parent / f".{root.name}.old"


@contextlib.contextmanager
def _only_user(folder: Path) -> Iterator[None]:
    """Hold the folder's own lock, which leaves no file behind and ends with the process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _files_below(root: Path) -> set[str]:
    """Whatever is no folder: files, links (to folders too), and what is neither; but not Python's own bytecode."""
    found = (path for path in root.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(root).as_posix() for path in found if not _is_bytecode(path)}


def _is_bytecode(path: Path) -> bool:
    """Whether Python keeps a file beside a module that is there: pip compiles a registry that it installs."""
    folder = path.parent
    if folder.name != "__pycache__" or folder.is_symlink() or path.suffix != ".pyc" or path.is_symlink():
        return False
    return path.is_file() and (folder.parent / f"{path.name.partition('.')[0]}.py").is_file()


def _content(path: Path) -> bytes:
    """What a plain file holds; nothing of a link, and of what would block."""
    return path.read_bytes() if path.is_file() and not path.is_symlink() else b""


def _refuse_no_folder(root: Path) -> None:
    if root.is_symlink() or (root.exists() and not root.is_dir()):
        kind = "a symbolic link" if root.is_symlink() else "no folder"
        raise EmitError(f"{root}: is {kind}, and a tree would take its place; move it away, or name another --dest")


def _refuse_foreign(root: Path, names: tuple[str, ...]) -> None:
    for name in names:
        path = root / name
        if _is_foreign(path):
            raise EmitError(f"{path}: no export wrote this file, and writing the tree would drop it; move it away")


def _is_foreign(path: Path) -> bool:
    """Whether a file is none that an export wrote."""
    return not is_generated(_content(path).decode("utf-8", "replace"))


def _is_torn(path: Path) -> bool:
    """Whether a file is the beginning of one that an export writes, which was interrupted."""
    raw = _content(path)
    head = b"Generated by cakegen"
    return path.is_file() and not path.is_symlink() and (head in raw[:200] or not raw)


def _write_beside(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as stream:
            stream.write(text.encode())
            stream.flush()
            os.fsync(stream.fileno())
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            _sync_folder(path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(root: Path) -> None:
    """Put the new folder in place of the old one, and drop the old one."""
    if not root.exists():
        os.rename(_incoming(root), root)
    elif _exchange(_incoming(root), root):
        shutil.rmtree(_incoming(root))
    else:
        os.rename(root, _outgoing(root))
        os.rename(_incoming(root), root)
        shutil.rmtree(_outgoing(root))
    _sync_folder(root.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step (Linux renameat2, man 2 rename); False where the file system can't."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    failed = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE))
    return bool(failed == 0)


def _recover(root: Path) -> None:
    """Finish an interrupted swap, and drop what it left: the old folder moves only once the new one is whole.

    Raises
    ------
    EmitError
        A folder of that name holds what no export wrote.
    """
    leftovers = [path for path in (_outgoing(root), _incoming(root)) if os.path.lexists(path)]
    for leftover in leftovers:
        _refuse_no_folder(leftover)
        for name in sorted(_files_below(leftover)):
            if _is_foreign(leftover / name) and not _is_torn(leftover / name):
                raise EmitError(
                    f"{leftover / name}: no export wrote this file, and {leftover.name} is what an interrupted export "
                    "leaves, which the next one removes; move it away"
                )
    if _outgoing(root).exists() and not root.exists():
        os.rename(_incoming(root) if _incoming(root).exists() else _outgoing(root), root)
    for leftover in leftovers:
        if leftover.exists():
            shutil.rmtree(leftover)

"""Where the compile cache is, whether it is ours, and which files in it are. Imports errors only.

Layout: `<root>/v<schema>/<key>.cubin`, `<key>.lock`, `<key>.<hex>.partial`, and the marker that says who made the
folder. A cubin runs on the device with the rights of who loads it, so a folder that another user owns or can write is
not used. Nothing is removed but files of these names, in folders with the marker (or in the default place, where
versions before the marker wrote), and no symbolic link is followed on the way.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from cakegen.errors import CompileError

CACHE_VARIABLE = "CAKEGEN_CACHE_DIR"
CACHE_SCHEMA = 3
ENTRY_SUFFIX = ".cubin"
LOCK_SUFFIX = ".lock"
PARTIAL_SUFFIX = ".partial"
MARKER_FILE = "cakegen-cache.txt"
_MARKER_TEXT = b"This folder was made by cakegen, which removes cubins, locks and partial files from it.\n"
_SCHEMA_NAME = re.compile(r"v[0-9]{1,6}")
_OWN_NAME = re.compile(r"[0-9a-f]{64}(?:\.cubin|\.lock|\.[0-9a-f]{32}\.partial)")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_root() -> Path:
    """The cache's folder: `CAKEGEN_CACHE_DIR` (`~` is the home folder), else `cakegen` in the XDG cache folder.

    Raises
    ------
    CompileError
        The user has no home folder, and what is set needs one.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if not named:
        return default_root()
    try:
        return Path(named).expanduser()
    except RuntimeError:
        raise CompileError(
            f"{CACHE_VARIABLE}={named}: there is no such home folder. Name the folder by its whole path."
        ) from None


def default_root() -> Path:
    """Where the cache is unless `CAKEGEN_CACHE_DIR` names another place: `cakegen` in the XDG cache folder, `~/.cache`.

    Raises
    ------
    CompileError
        The user has no home folder, and `XDG_CACHE_HOME` is not set.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return Path(base) / "cakegen"
    try:
        return Path.home() / ".cache" / "cakegen"
    except RuntimeError:
        raise CompileError(
            f"no folder for the compile cache: user {os.getuid()} has no home, and neither {CACHE_VARIABLE} nor "
            f"XDG_CACHE_HOME is set. Set {CACHE_VARIABLE} to a folder that can be written."
        ) from None


def schema_folder() -> Path:
    """The folder of this schema's entries.

    Raises
    ------
    CompileError
        As `cache_root`.
    """
    return cache_root() / f"v{CACHE_SCHEMA}"


def make_schema_folder() -> Path:
    """The folder of this schema's entries, made and marked where it is not there yet.

    Raises
    ------
    CompileError
        As `cache_root`; or the folder is not this user's alone, or holds files that cakegen did not write.
    OSError
        It can't be made.
    """
    folder = schema_folder()
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.mkdir(exist_ok=True, mode=0o700)
    refuse_strangers(folder)
    if has_marker(folder):
        return folder
    # a process may have been killed between the folder and its marker
    if not all(_OWN_NAME.fullmatch(name) for name in os.listdir(folder) if name != MARKER_FILE):
        raise CompileError(
            f"{folder}: holds files that cakegen did not write, and no {MARKER_FILE}. Set {CACHE_VARIABLE} to a folder "
            "of the cache's own."
        )
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(folder / MARKER_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        with open(descriptor, "wb") as stream:
            stream.write(_MARKER_TEXT)
    return folder


def refuse_strangers(folder: Path) -> None:
    """Refuse a folder of the cache, or one above it up to the cache's, that another user owns or can write.

    The administrator may own it. The cache's own folder may be reached through links; it must lead to none.

    Raises
    ------
    CompileError
        As said; the message says what to do.
    """
    for place in (folder.parent.resolve(), folder):
        try:
            status = os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise _unreadable(place, error) from None
        if stat.S_ISLNK(status.st_mode):
            raise CompileError(f"{place}: is a symbolic link, which the compile cache does not follow; remove it")
        if status.st_uid not in (os.geteuid(), 0):
            raise CompileError(
                f"{place}: belongs to user {status.st_uid}, who could put programs there that you "
                f"would run. Set {CACHE_VARIABLE} to a folder of your own."
            )
        if status.st_mode & _OTHERS_WRITE and stat.S_ISDIR(status.st_mode):
            raise CompileError(
                f"{place}: other users can write it (mode {stat.S_IMODE(status.st_mode):o}), and could put programs "
                f"there. Run `chmod go-w {place}`, or set {CACHE_VARIABLE} to a folder of your own."
            )


def has_marker(folder: Path) -> bool:
    """Whether cakegen made a folder of the cache."""
    try:
        return stat.S_ISREG(os.lstat(folder / MARKER_FILE).st_mode)
    except OSError:
        return False


def cache_files(suffix: str) -> list[Path]:
    """The cache's own files with a suffix, of every schema.

    Raises
    ------
    CompileError
        There is no folder for a cache, it can't be read, is not this user's alone, or holds a folder of a schema's name
        that cakegen did not make.
    """
    return sorted(path for path in _own_files() if path.suffix == suffix)


def _own_files() -> Iterator[Path]:
    root = cache_root()
    default = not os.environ.get(CACHE_VARIABLE)
    for name in _names_in(root):
        folder = root / name
        if _SCHEMA_NAME.fullmatch(name) is None:
            continue
        refuse_strangers(folder)
        if not folder.is_dir():
            continue
        if not default and not has_marker(folder):
            raise CompileError(
                f"{folder}: holds no {MARKER_FILE}, so cakegen did not make it, and lists and removes nothing there. "
                f"Move it away; or, if it is a cache of an earlier version, make that file in it."
            )
        yield from (folder / each for each in _names_in(folder) if _OWN_NAME.fullmatch(each))


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        # below what is no folder there is none either
        if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not os.path.lexists(folder):
            return []
        raise _unreadable(folder, error) from None


def _unreadable(folder: Path, error: OSError) -> CompileError:
    return CompileError(
        f"{folder}: can't be read ({error.strerror}); set {CACHE_VARIABLE} to a folder that can be read and written"
    )

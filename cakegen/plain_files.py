"""Leaf module: reads plain files of folders that others may have filled. Imports nothing of cakegen.

A symbolic link is never followed: it may lead to a file that only this user may read. What is no regular file is not
opened for long: a FIFO would block. A size is known before anything is read.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path, PurePosixPath

MOST_SOURCE_BYTES = 4 * 2**20
"""Largest file of a generated tree that is read; the registry of the published export has a fifth of that."""


def read_below(root: Path, name: str, most_bytes: int = MOST_SOURCE_BYTES) -> bytes:
    """A file below a folder; of the way from the folder to the file, nothing may be a symbolic link.

    Parameters
    ----------
    root
        The folder; itself it may be reached through links.
    name
        Relative, parts separated by `/`.
    most_bytes
        Refuse a larger file.

    Raises
    ------
    OSError
        It can't be read, leads through a symbolic link or out of the folder, is no regular file, or is too large.
    """
    *folders, last = PurePosixPath(name).parts or ("",)
    if PurePosixPath(name).is_absolute() or ".." in (*folders, last):
        raise OSError(errno.EINVAL, "leads out of its folder", str(root / name))
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        where = root
        for folder in folders:
            where = where / folder
            inner = _open(where, folder, descriptor, os.O_DIRECTORY)
            os.close(descriptor)
            descriptor = inner
        return _read(root / name, last, descriptor, most_bytes)
    finally:
        os.close(descriptor)


def read_plain(file: Path, most_bytes: int) -> bytes:
    """A file that is itself no symbolic link; folders above it may be.

    Raises
    ------
    OSError
        As `read_below`.
    """
    return _read(file, str(file), None, most_bytes)


def as_text(raw: bytes) -> str:
    """A file's UTF-8 text with line ends as Python reads them.

    Raises
    ------
    UnicodeDecodeError
        It is not UTF-8.
    """
    return raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def _read(file: Path, name: str, folder: int | None, most_bytes: int) -> bytes:
    descriptor = _open(file, name, folder, 0)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(file))
        if status.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"has {status.st_size} bytes; at most {most_bytes} are read", str(file))
        with open(descriptor, "rb", closefd=False) as stream:
            return stream.read(most_bytes)
    finally:
        os.close(descriptor)


def _open(file: Path, name: str, folder: int | None, kind: int) -> int:
    try:
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | kind, dir_fd=folder)
    except OSError as error:
        try:
            linked = stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        except OSError:
            linked = False
        if linked:
            raise OSError(errno.ELOOP, "is a symbolic link, which is not followed", str(file)) from None
        raise OSError(error.errno, error.strerror, str(file)) from None

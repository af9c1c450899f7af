"""What git prints of a commit's files, as records: listings (`ls-tree`) and contents (`cat-file --batch`)."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cakegen.errors import ReviewError

# git-ls-tree -l: mode, type, object, size ("-" of what is no file), tab, path
_ENTRY = re.compile(rb"(\d{6}) (\w{1,16}) ([0-9a-f]{40,64}) +(\d{1,18}|-)\t(.+)", re.DOTALL)
# git-cat-file, "batch output"
_HEAD = re.compile(rb"[0-9a-f]{40,64} \w{1,16} (\d{1,18})")


@dataclass(frozen=True)
class GitFile:
    """One file of a commit: its mode in octal digits, its object, its size, and its path from the folder."""

    mode: str
    object_id: str
    num_bytes: int
    path: str


def parse_listing(listing: bytes, where: str) -> list[GitFile]:
    """The files of `git ls-tree -r -l -z`; other entries, such as submodules, are left out.

    Parameters
    ----------
    where
        What to call it in a message: the revision.

    Raises
    ------
    ReviewError
        It is no such listing.
    """
    files = []
    for line in listing.split(b"\0"):
        entry = _ENTRY.fullmatch(line)
        if entry is None:
            if line:
                raise ReviewError(f"{where}: git ls-tree printed an entry that can't be read: {_shown(line)}")
            continue
        mode, kind, object_id, size, path = entry.groups()
        if kind == b"blob" and size != b"-":
            files.append(GitFile(mode.decode(), object_id.decode(), int(size), os.fsdecode(path)))
    return files


def parse_objects(stream: bytes, names: Sequence[str]) -> list[bytes]:
    """The contents that `git cat-file --batch` printed, in the order of the objects' names.

    Raises
    ------
    ReviewError
        An object is missing, or the stream ends early.
    """
    contents, at = [], 0
    for name in names:
        end = stream.find(b"\n", at)
        head = _HEAD.fullmatch(stream[at : max(end, at)])
        if head is None:
            raise ReviewError(f"git cat-file: object {name} can't be read ({_shown(stream[at : max(end, at)])})")
        start, size = end + 1, int(head[1])
        if len(stream) <= start + size:
            raise ReviewError(
                f"git cat-file: object {name} has {size} bytes, and {len(stream) - start} came; the clone is damaged,"
                " or git was stopped. Run `git fsck`"
            )
        contents.append(stream[start : start + size])
        at = start + size + 1
    return contents


def _shown(text: bytes) -> str:
    return ascii(text[:80].decode(errors="replace"))

"""Files of folders that others fill: no link is followed, nothing blocks, nothing large is read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cakegen.plain_files import as_text, read_below, read_plain


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "root" / "a" / "plain").write_bytes(b"one\r\ntwo\rthree\n")
    (tmp_path / "secret").write_text("secret")
    return tmp_path / "root"


def test_plain_file_is_read_whole(folder: Path) -> None:
    assert read_below(folder, "a/plain") == b"one\r\ntwo\rthree\n"
    assert read_plain(folder / "a" / "plain", 100) == b"one\r\ntwo\rthree\n"
    assert as_text(read_below(folder, "a/plain")) == (folder / "a" / "plain").read_text() == "one\ntwo\nthree\n"


def test_root_itself_may_be_reached_through_a_link(folder: Path) -> None:
    (folder.parent / "link").symlink_to(folder)
    assert read_below(folder.parent / "link", "a/plain")


@pytest.mark.parametrize("kind", ["file", "folder", "dangling"])
def test_link_is_refused_with_its_name(folder: Path, kind: str) -> None:
    target = {"file": folder.parent / "secret", "folder": folder / "a", "dangling": folder / "nothing"}[kind]
    (folder / "link").symlink_to(target)
    name = "link/plain" if kind == "folder" else "link"
    with pytest.raises(OSError, match=r"is a symbolic link, which is not followed: '.*/root/link'") as caught:
        read_below(folder, name)
    assert caught.value.errno == errno.ELOOP
    if kind != "folder":
        with pytest.raises(OSError, match="is a symbolic link"):
            read_plain(folder / "link", 100)


@pytest.mark.parametrize("name", ["../secret", "a/../../secret", "/etc/hostname"])
def test_name_that_leads_out_of_the_folder_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(OSError, match="leads out of its folder"):
        read_below(folder, name)


def test_fifo_and_folder_are_refused_at_once(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    for name in ("pipe", "a"):
        with pytest.raises(OSError, match="is no regular file"):
            read_below(folder, name)


def test_size_is_bounded(folder: Path) -> None:
    with pytest.raises(OSError, match="has 15 bytes; at most 14 are read"):
        read_plain(folder / "a" / "plain", 14)


def test_missing_file_is_named(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="root/a/none"):
        read_below(folder, "a/none")

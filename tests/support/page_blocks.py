"""Runs the blocks of a page in a folder of its own, in order, and compares what they print with what the page says.

A block ```` ```sh ```` runs in bash, ```` ```python ```` in a Python of its own; with `refused` behind the language it
must fail. A block ```` ```text ```` behind one holds lines that it printed, in order; `…` stands for anything.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import cakegen

ROOT = Path(cakegen.__file__).resolve().parents[1]
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
FENCE = re.compile(r"^```(sh|python|text)( refused)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Block:
    """Code of a page, whether it must fail, and the lines that the page says it prints."""

    language: str
    refused: bool
    code: str
    printed: str = ""


def read_blocks(page: Path) -> list[Block]:
    """The page's blocks that run, each with the text behind it."""
    blocks: list[Block] = []
    for language, refused, code in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "text":
            blocks[-1].printed += code
        else:
            blocks.append(Block(language, bool(refused), code))
    return blocks


def copy_checkout(folder: Path) -> None:
    """A checkout of what the command line reads of this one, committed, for a page that changes it; the small model."""
    left_out = shutil.ignore_patterns("__pycache__", "kimi_k3_latent_moe")
    for name in ("cakegen", "exports", "templates", "generated"):
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    identity = ("-c", "user.name=page", "-c", "user.email=page")
    for words in (("init", "--quiet"), ("add", "."), (*identity, "commit", "--quiet", "--message", "as it is")):
        subprocess.run(
            ["git", "-C", str(folder), *words], check=True, env=os.environ | {"GIT_CONFIG_GLOBAL": os.devnull}
        )


def command_environment(folder: Path, package_root: Path = ROOT) -> dict[str, str]:
    """An environment in which `cakegen` and `python` are those of `package_root`, with a git identity of its own.

    The commands are put into `folder/.bin`; the compile cache is the machine's.
    """
    commands = folder / ".bin"
    commands.mkdir()
    command = commands / "cakegen"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cakegen "$@"\n')
    command.chmod(0o755)
    (commands / "python").symlink_to(sys.executable)
    foreign = ("GIT_", "CAKEGEN_BUNDLE", "CAKEGEN_COMMIT")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return environment | {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(package_root),
        "GIT_CONFIG_GLOBAL": os.devnull,
        **{f"GIT_{who}_{what}": "page" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }


def run_blocks(page: Path, folder: Path, package_root: Path = ROOT) -> None:
    """Run a page in `folder`.

    Parameters
    ----------
    package_root
        Where the `cakegen` that it runs is.
    """
    environment = command_environment(folder, package_root)
    for block in read_blocks(page):
        program = ["bash", "-euo", "pipefail", "-c"] if block.language == "sh" else [sys.executable, "-c"]
        done = subprocess.run(
            [*program, block.code],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        assert (done.returncode != 0) == block.refused, f"{page.name}\n{block.code}\n{done.stdout}"
        missing = next(missing_lines(block.printed, done.stdout), None)
        assert missing is None, (
            f"{page.name}: not printed, or not in this order: {missing}\n{block.code}\n{done.stdout}"
        )


def missing_lines(wanted: str, printed: str) -> Iterator[str]:
    """Lines that are not among the printed ones, or not behind those before them; how wide spaces are is free."""
    lines = (" ".join(line.split()) for line in printed.splitlines())
    for line in filter(str.strip, wanted.splitlines()):
        pattern = re.compile(".*".join(map(re.escape, " ".join(line.split()).split("…"))))
        if not any(pattern.fullmatch(candidate) for candidate in lines):
            yield line

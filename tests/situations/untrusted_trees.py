"""A tree says what must reach no tool: options, texts, names, links."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.compile.hostile_input import ASKERS, OTHERS, READERS, REFUSED_FLAGS, WAYS_OUT
from support.compile.sources import HEADER, PLAIN, PLAIN_REQUEST, request_of
from support.models import tiny_model
from support.review.trees import EXPORT, commit_all, git, small_programs, write_small_tree

from cakegen.compile import compile_cubin
from cakegen.errors import CompileError, RegistryError, ReviewError
from cakegen.model import to_literal
from cakegen.registry import load_registry
from cakegen.review import Review, compare_trees, render_html, render_markdown, render_text
from cakegen.review.trees import read_revision, read_trees, resolve_revision

SECRET = "TOPSECRET words"


def _flag_at_the_compiler(folder: Path, flag: str) -> None:
    with pytest.raises(CompileError, match="none that a tree may ask for"):
        compile_cubin(replace(PLAIN_REQUEST, flags=(flag,)))


def _flag_in_a_registry(folder: Path, flag: str) -> None:
    program = small_programs()[0]
    record = program.record()
    program.record = lambda: record | {"flags": [*record["flags"], flag]}  # type: ignore[method-assign]
    write_small_tree(folder, [program], model=to_literal(tiny_model()))
    with pytest.raises(RegistryError, match=r"none that a tree may ask for|needs printable texts"):
        load_registry(folder / EXPORT)


def _text(folder: Path, hostile: str, in_header: bool) -> None:
    secret = folder / "secret.txt"
    secret.write_text(f"{SECRET}\n")
    text = hostile.format(secret)
    request = request_of(text + PLAIN)
    if in_header:
        request = replace(PLAIN_REQUEST, headers=(("scaled.cuh", f"{HEADER}\n{text}"),))
    with pytest.raises(CompileError) as caught:
        compile_cubin(request)
    assert SECRET not in str(caught.value)
    assert "it is there" not in str(caught.value)


def _name(folder: Path, name: str, render: Callable[[Review], str]) -> None:
    first, second, norm = small_programs()
    write_small_tree(folder, [first, second, norm])
    old = read_trees(folder)[EXPORT]
    write_small_tree(folder, [replace(first, key=name, stages=9, role=name), second, norm])
    compared = compare_trees(old, read_trees(folder)[EXPORT])
    text = render(Review("HEAD (1234567)", (compared,), None, "", (name,)))
    assert text.encode()
    assert text.replace("\n", "").replace("\t", "").isprintable()
    assert f"`{name}`" not in text or "`" not in name


def _link(folder: Path, place: str, committed: bool) -> None:
    trees = folder / "repository" / "generated"
    trees.mkdir(parents=True)
    git(trees.parent, "init", "-q", "-b", "main")
    write_small_tree(trees, small_programs())
    link, outside = trees / place, folder / "outside"
    if link.exists():
        link.rename(outside)
    else:
        outside.write_text(SECRET)
    link.symlink_to(outside)
    if committed:
        commit_all(trees.parent, "a link")
    with pytest.raises(ReviewError, match="is a symbolic link, which is not followed"):
        read_revision(trees, resolve_revision(trees, "HEAD")) if committed else read_trees(trees)


def situations() -> dict[str, Callable[[Path], None]]:
    """Each option, text, name and link on each of its ways."""
    found: dict[str, Callable[[Path], None]] = {}
    for flag in REFUSED_FLAGS:
        found[f"option {flag!a} at the compiler"] = functools.partial(_flag_at_the_compiler, flag=flag)
        found[f"option {flag!a} in a registry"] = functools.partial(_flag_in_a_registry, flag=flag)
    for kind, texts in (("reads", READERS), ("asks", ASKERS), ("other", OTHERS)):
        for way, text in texts.items():
            for where in ("kernel", "header"):
                found[f"{kind}: {way} in a {where}"] = functools.partial(
                    _text, hostile=text, in_header=where == "header"
                )
    for name in WAYS_OUT:
        for render in (render_text, render_markdown, render_html):
            found[f"name {name!a} by {render.__name__}"] = functools.partial(_name, name=name, render=render)
    for place in (f"{EXPORT}/csrc/cake_small/more.cuh", f"{EXPORT}/cake_jit.py", f"{EXPORT}/csrc", EXPORT):
        for committed in (False, True):
            where = "in a commit" if committed else "on disk"
            found[f"link at {place} {where}"] = functools.partial(_link, place=place, committed=committed)
    return found

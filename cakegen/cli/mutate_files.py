"""`cakegen mutate --cuda FILE --launch FILE`: anybody's kernels broken on purpose. Imports cakegen inside functions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cakegen.cli.emulate_files import FileRequest, bind_launch, load_text, make_buffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cakegen.emulator.mutation.sequences import SequenceTarget


def sequence_targets(requests: Sequence[FileRequest]) -> tuple[SequenceTarget, ...]:
    """What launch files run, each as a target of mutation, called after its launch file.

    Raises
    ------
    SpecError, CompileError, LaunchError
        A file is wrong.
    """
    names = [request.launch.stem for request in requests if request.launch is not None]
    if len(set(names)) < len(requests):
        raise click.UsageError("give a --launch for each --cuda or --ptx, in their order, each with another name")
    return tuple(_target(request) for request in requests)


def _target(request: FileRequest) -> SequenceTarget:
    from cakegen.emulator.mutation.sequences import SequenceTarget
    from cakegen.emulator.text.parse import parse_kernel
    from cakegen.spec.launch_file import parse_launch_file

    assert request.launch is not None
    file = parse_launch_file(request.launch)
    launches = tuple(bind_launch(each, request.entry, file) for each in file.launches)
    symbol = request.entry or launches[0].entry
    ptx = load_text(request, sorted({symbol, *(each.entry for each in launches)}))
    made = {name: make_buffer(name, each, request.launch.parent) for name, each in file.buffers.items()}
    buffers = tuple((name, each.role, each.element, each.array.copy()) for name, each in made.items())
    files = set(parse_kernel(ptx, symbol).files.values())
    return SequenceTarget(request.launch.stem, ptx, symbol, launches, buffers, _sources(request, files))


def _sources(request: FileRequest, names: set[str]) -> dict[str, tuple[str, ...]]:
    """The lines of the files that a kernel's line information names, as far as its folders hold them."""
    found: dict[str, tuple[str, ...]] = {}
    for folder in (request.source.parent, *request.include):
        for name in names - set(found):
            path = Path(folder) / name
            if path.is_file():
                found[name] = tuple(path.read_text(encoding="utf-8", errors="replace").splitlines())
    return found

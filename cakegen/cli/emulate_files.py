"""`cakegen emulate --ptx/--cuda FILE --launch FILE`: anybody's kernels. Imports cakegen inside functions."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cakegen.emulator import LaunchReport, Options
    from cakegen.emulator.launches.arrays import HostBuffer
    from cakegen.emulator.launches.sequence import Argument, KernelLaunch
    from cakegen.emulator.text.translate import Program
    from cakegen.spec.launch_file import BufferSection, LaunchFile

CLEAN, FAULT, BAD_INPUT, NOT_MODELLED, MISMATCH, GIVEN_UP = range(6)
"""Exit statuses; 2 is click's for a wrong command line, too."""

MOST_TEXT_BYTES = 1 << 26
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")


@dataclass(frozen=True)
class FileRequest:
    """What to run: a PTX file, or a CUDA file and how to compile it; the launch file; where results go.

    Parameters
    ----------
    entry
        The kernel of launches that name none.
    out
        Folder for the buffers that launches may write, as they are after the last schedule.
    """

    ptx: Path | None
    cuda: Path | None
    launch: Path | None
    entry: str | None
    out: Path | None
    arch: str
    include: tuple[Path, ...]
    nvrtc_options: tuple[str, ...]

    @property
    def source(self) -> Path:
        """The file of the kernels."""
        file = self.ptx or self.cuda
        assert file is not None
        return file


def run_files(request: FileRequest, schedules: Sequence[Options]) -> int:
    """Run a launch file's launches under some schedules; prints a verdict for each, and returns the exit status."""
    from cakegen.errors import CompileError, EmulationError, LaunchError, LimitError, PtxError, SpecError
    from cakegen.spec.launch_file import parse_launch_file

    if request.launch is None or (request.ptx is None) == (request.cuda is None):
        raise click.UsageError("give --launch and either --ptx or --cuda")
    try:
        launches = parse_launch_file(request.launch)
        entries = sorted({each.entry or request.entry or "" for each in launches.launches})
        return _run_schedules(request, launches, request.launch.parent, load_programs(request, entries), schedules)
    except PtxError as error:
        click.echo(f"cakegen: {request.source}: {error}", err=True)
        return BAD_INPUT
    except (CompileError, LaunchError, SpecError, OSError) as error:
        click.echo(f"cakegen: {error}", err=True)
        return BAD_INPUT
    except LimitError as error:
        click.echo(f"cakegen: {error}", err=True)
        return GIVEN_UP
    except EmulationError as error:
        click.echo(f"cakegen: {error}", err=True)
        return NOT_MODELLED


def load_programs(request: FileRequest, entries: Sequence[str]) -> dict[str, Program]:
    """The translated kernels of a request's source by their names; raises as `load_text`.

    Raises
    ------
    EmulationError
        A kernel holds something that is not modelled.
    """
    from cakegen.emulator import program_of

    text = load_text(request, entries)
    return {entry: program_of(text, entry) for entry in entries}


def load_text(request: FileRequest, entries: Sequence[str]) -> str:
    """The PTX of a request's source.

    Raises
    ------
    SpecError
        The file is no text, or has no such entry; the message lists those that it has.
    CompileError
        NVRTC refused the CUDA text.
    """
    from cakegen.errors import SpecError

    size = request.source.stat().st_size
    if size > MOST_TEXT_BYTES:
        raise SpecError(f"{request.source}: {size} bytes; a PTX or a CUDA file of at most {MOST_TEXT_BYTES} is read")
    try:
        text = request.source.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{request.source}: is no text ({error}); give a PTX or a CUDA file") from None
    if request.cuda is not None:
        text = _compile(request, text, entries)
    known = _ENTRY.findall(text)
    for entry in entries:
        if entry not in known:
            named = f"no entry {entry!r}" if entry else "a launch names no entry: give one there, or --entry"
            raise SpecError(f"{request.source}: {named}; it has {', '.join(known) or 'none'}")
    return text


def _compile(request: FileRequest, text: str, entries: Sequence[str]) -> str:
    from cakegen.compile import CompileRequest, compile_ptx

    file = request.source
    folders = (file.parent, *request.include)
    options = ("-std=c++17", "-lineinfo", *(f"--include-path={folder}" for folder in folders), *request.nvrtc_options)
    # so that reports name the file and its own lines
    text = f'#line 1 "{file.name}"\n{text}'
    return compile_ptx(CompileRequest(file.stem, request.arch, text, (), (), (), entries[0]), options)


def _run_schedules(
    request: FileRequest,
    launches: LaunchFile,
    folder: Path,
    programs: Mapping[str, Program],
    schedules: Sequence[Options],
) -> int:
    """Run under one schedule after another up to a fault; the buffers that are written are those of the last."""
    from cakegen.emulator import Fault
    from cakegen.emulator.launches.sequence import run_sequence

    bound = [bind_launch(each, request.entry, launches) for each in launches.launches]
    status = CLEAN
    sums: list[dict[str, int]] = []
    written: dict[str, HostBuffer] = {}
    for options in schedules:
        name = f"seed {options.seed}" if options.schedule == "random" else options.schedule
        buffers = {key: make_buffer(key, each, folder) for key, each in launches.buffers.items()}
        written = {key: each for key, each in buffers.items() if each.role != "read"}
        try:
            reports = run_sequence(programs, bound, buffers, options)
        except Fault as fault:
            click.echo(f"{name}: {fault}")
            status = FAULT
            break
        differences = [_difference(each, launches.buffers[key], folder) for key, each in written.items()]
        problems = [each for each in differences if each]
        sums.append({key: zlib.crc32(each.array.tobytes()) for key, each in written.items()})
        click.echo(f"{name}: {'; '.join(problems) or 'clean'}; {_summary(reports, sums[-1])}")
        status = MISMATCH if problems else status
    differing = [key for key in written if len({each[key] for each in sums}) > 1]
    if differing:
        click.echo(f"the schedule decides the bits of {', '.join(differing)}")
    if request.out is not None:
        _write(written, request.out)
    return status


def _summary(reports: Sequence[LaunchReport], sums: Mapping[str, int]) -> str:
    instructions = sum(report.instructions for report in reports)
    seconds = sum(report.seconds for report in reports)
    hashes = " ".join(report.schedule_hash for report in reports)
    values = ", ".join(f"{key} {value:08x}" for key, value in sums.items())
    return f"{instructions} warp-instructions in {seconds:.1f} s, schedule {hashes}; crc32 of {values}"


def _write(buffers: Mapping[str, HostBuffer], out: Path) -> None:
    import numpy as np

    out.mkdir(parents=True, exist_ok=True)
    for name, buffer in buffers.items():
        np.save(out / f"{name}.npy", buffer.array)


def bind_launch(section: Any, entry: str | None, launches: LaunchFile) -> KernelLaunch:
    """A launch of a launch file."""
    from cakegen.emulator.launches.sequence import KernelLaunch
    from cakegen.emulator.machine.residency import LaunchShape
    from cakegen.spec.launch_file import triple

    shape = LaunchShape(
        triple(section.grid),
        triple(section.block),
        triple(section.cluster),
        section.dynamic_smem_bytes,
        section.cooperative,
    )
    return KernelLaunch(
        section.entry or entry or "",
        shape,
        tuple(_argument(each, launches) for each in section.arguments),
        section.programmatic,
        {offset: name for name, offset in section.barriers.items()},
    )


def _argument(section: Any, launches: LaunchFile) -> Argument:
    from cakegen.emulator.launches.arrays import scalar_bytes
    from cakegen.emulator.launches.sequence import BufferArgument, MapArgument

    if section.kind == "buffer":
        return BufferArgument(section.name, section.offset_bytes)
    if section.kind == "bytes":
        return bytes.fromhex(section.hex)
    if section.kind == "tensor_map":
        return MapArgument(
            section.name,
            section.element or launches.buffers[section.name].element,
            section.dims,
            section.strides_bytes,
            section.box,
            section.swizzle,
            section.offset_bytes,
        )
    return scalar_bytes(section.kind, section.value)


def make_buffer(name: str, section: BufferSection, folder: Path) -> HostBuffer:
    """A buffer with its first values; files are relative to `folder`."""
    from cakegen.emulator.launches.arrays import HostBuffer, fill_array, read_array

    if section.file is not None:
        return HostBuffer(name, section.role, section.element, read_array(name, section.element, folder / section.file))
    assert section.shape is not None
    fill = "poison" if section.fill is None else section.fill
    return HostBuffer(name, section.role, section.element, fill_array(section.element, section.shape, fill, name))


def _difference(buffer: HostBuffer, section: BufferSection, folder: Path) -> str | None:
    """What is wrong with a buffer's values in words, or None."""
    from cakegen.emulator.launches.arrays import compare_arrays, read_array

    expect = section.expect
    if expect is None:
        return None
    wanted = read_array(f"{buffer.name} (expected)", buffer.element, folder / expect.file)
    return compare_arrays(buffer.name, buffer.element, buffer.array, wanted, expect.atol, expect.rtol)

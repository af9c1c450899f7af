"""`cakegen bundle`: cubins to ship, so that a machine needs no compiler. Imports cakegen inside functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cakegen.cli.options import refuse_ignored
from cakegen.cli.selection import selected_by, take_selection

if TYPE_CHECKING:
    from cakegen.cli.compile import Job


@click.command("bundle")
@selected_by
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder of the bundle.")
@click.option("--jobs", type=click.IntRange(min=1), help="Programs at once; by default one a processor.")
@click.option("--sign", "private_key", type=click.Path(path_type=Path, dir_okay=False), help="Sign with this PEM key.")
@click.option(
    "--verify",
    "public_key",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --check: refuse what this PEM key did not sign.",
)
@click.option("--check", is_flag=True, help="Write nothing; fail unless OUT holds all of it, whole. Needs no compiler.")
def bundle_command(
    out: Path,
    export: str,
    jobs: int | None,
    private_key: Path | None,
    public_key: Path | None,
    check: bool,
    **selection: Any,
) -> None:
    """Compile programs into a folder that the runtime takes in place of a compiler.

    KEY is a logical key, a program's name, or a pattern of either; without one, every program is taken. A process uses
    the folder where CAKEGEN_BUNDLE names it, or where it is given to LatentMoe.
    """
    from cakegen.cli.compile import jobs_of
    from cakegen.registry import load_registry

    if check:
        refuse_ignored("is of a compilation; --check compiles nothing", "jobs", "private_key")
    else:
        refuse_ignored("is of --check; a bundle that is written is signed with --sign", "public_key")
    registry = load_registry(export)
    selected = jobs_of(registry, take_selection(selection))
    if check:
        _check(out, registry.export, selected, public_key)
    else:
        _write(out, registry.export, selected, jobs, private_key)


def _write(out: Path, export: str, selected: Sequence[Job], jobs: int | None, private_key: Path | None) -> None:
    from cakegen.cli.compile import compile_with_progress, failures_of
    from cakegen.compile import CompiledProgram
    from cakegen.compile.bundle import write_bundle
    from cakegen.errors import CompileError

    outcomes = compile_with_progress(selected, jobs)
    failures = failures_of(selected, outcomes)
    if failures:
        raise CompileError("\n".join([*failures, f"{out}: not written, since {len(failures)} programs failed"]))
    compiled = [
        (job.request, outcome, job.keys)
        for job, outcome in zip(selected, outcomes, strict=True)
        if isinstance(outcome, CompiledProgram)
    ]
    write_bundle(out, export, compiled, private_key)
    total_bytes = sum(len(program.cubin) for _, program, _ in compiled)
    targets = ", ".join(sorted({request.arch for request, _, _ in compiled}))
    signed = f", signed with {private_key}" if private_key is not None else ""
    click.echo(f"{len(compiled)} programs of {export} for {targets}, {total_bytes} bytes, in {out}{signed}")


def _check(out: Path, export: str, selected: Sequence[Job], public_key: Path | None) -> None:
    from cakegen.compile.bundle import find_bundle, open_bundle
    from cakegen.errors import CompileError

    bundle = find_bundle(export, out) if public_key is None else open_bundle(out, public_key)
    assert bundle is not None, "a bundle that is named is opened or refused"
    if bundle.export != export:
        raise CompileError(f"bundle {out} is of export {bundle.export}; {export} is needed")
    faults = []
    for job in selected:
        try:
            bundle.program(job.request)
        except CompileError as error:
            faults.append(str(error))
    if faults:
        raise CompileError("\n".join([*faults, f"{out}: {len(faults)} of {len(selected)} programs can't be used"]))
    signed = f", signed by {public_key}" if public_key is not None else ""
    click.echo(f"{out}: {len(selected)} programs of {export}, whole, compiled by {bundle.compiler}{signed}")

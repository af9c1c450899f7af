"""`cakegen show`: one program from its declaration to its launch. Imports cakegen inside functions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import click

from cakegen.cli.options import refuse_ignored
from cakegen.cli.selection import Selection, select_keys, selected_by, take_selection

if TYPE_CHECKING:
    from cakegen.plan import Plan
    from cakegen.registry import Program, Registry

_SOURCE_LINES = 40


@click.command("show")
@selected_by
@click.option("--source", is_flag=True, help="Print the source alone, in one piece.")
@click.option("--block", is_flag=True, help="KEY is an export, or its file: print what it computes, as formulas.")
@click.option("--explain", is_flag=True, help="Spell the key out, a line a part; any key will do, of any export.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, one line a program.")
def show_command(export: str, source: bool, block: bool, explain: bool, as_json: bool, **selection: Any) -> None:
    """Explain programs: what is declared, the plan that reaches each, its source, and its launch.

    KEY is a logical key, a program's name, or a pattern of either. With --source: the program as one text that compiles
    alone, each header in the place of its first include. With --explain: what each part of the key says.
    With --block: what an export declares, whether or not programs have it all.
    """
    from cakegen.registry import load_registry

    chosen = take_selection(selection)
    if block:
        refuse_ignored("is of a program; --block reads an export alone", "source", "export", "explain", "as_json")
        for line in (line for name in chosen.patterns for line in _block(name)):
            click.echo(line)
        return
    _tell_renamed(chosen.patterns)
    if explain:
        refuse_ignored("is of a program; --explain reads keys alone", "source", "export", "as_json")
        _explain(chosen.patterns)
        return
    registry = load_registry(export)
    programs = _programs(registry, chosen)
    if as_json:
        refuse_ignored("is printed alone; --json names the files", "source")
        from cakegen.cli.show_json import program_literal

        for (program, keys), reach in zip(programs, _reach_of(registry, programs), strict=True):
            click.echo(json.dumps(program_literal(registry, program, keys, reach.first, list(reach.requests()))))
        return
    if source:
        for program, keys in programs:
            click.echo(_flat(registry, program, keys), nl=False)
        return
    for (program, keys), reach in zip(programs, _reach_of(registry, programs), strict=True):
        _show(registry, program, keys, reach)


def _block(name: str) -> Iterator[str]:
    from cakegen.block_text import formula_lines
    from cakegen.cli.export import export_files
    from cakegen.spec import read_export
    from cakegen.spec.honoured import missing_parts

    (file,) = export_files(name)
    spec = read_export(file)
    yield f"{spec.name} ({file.parent.name}/{file.name})"
    yield from formula_lines(spec.block, spec.model.model_dump())
    for part in missing_parts(spec.block):
        yield f"no program yet for {part}"


def _tell_renamed(patterns: Iterable[str]) -> None:
    from cakegen.renamed_keys import renamed_keys

    for key in patterns:
        if key in renamed_keys():
            click.echo(f"{key} is called {renamed_keys()[key]} today", err=True)


def _explain(keys: Iterable[str]) -> None:
    from cakegen.plan.keys import explain_key
    from cakegen.renamed_keys import renamed_keys

    for key in keys:
        for line in explain_key(renamed_keys().get(key, key)):
            click.echo(line)


def _programs(registry: Registry, chosen: Selection) -> list[tuple[Program, list[str]]]:
    """Each chosen program once, with the keys that it is shown for: of a program by its name, all.

    Raises
    ------
    click.UsageError
        Nothing is chosen, or nothing matches.
    """
    if chosen == Selection():
        raise click.UsageError("give KEYs, or --stage, --tp, --tokens or --arch; `cakegen list` prints all keys")
    served: dict[str, list[str]] = {}
    for key in select_keys(registry, chosen):
        served.setdefault(registry.kernels[key], []).append(key)
    return [(registry.programs[name], keys) for name, keys in served.items()]


def _show(registry: Registry, program: Program, keys: list[str], reach: _Reach) -> None:
    sections = (
        ("declared", _declared(registry)),
        ("plan", _planned(reach, keys)),
        ("source", _source(registry, program)),
        ("launch", _launch(registry, program, keys)),
    )
    for title, lines in sections:
        click.echo(f"{title}:")
        for line in lines:
            click.echo(f"  {line}".rstrip())


def _declared(registry: Registry) -> Iterator[str]:
    model = registry.model
    yield f"export {registry.export} (exports/{registry.export}/export.toml)"
    yield _fields(model.dims)
    yield f"up to {model.max_tokens} tokens, {model.max_partials} partials"
    for target in model.targets:
        yield f"{target.arch}: TP {_listed(target.tp_degrees)}; SM counts {_listed(target.sm_counts)}"


def _planned(reach: _Reach, keys: list[str]) -> Iterator[str]:
    first = reach.first
    if first is None:
        yield "no plan of the declared targets reaches it"
        return
    for line in reach.requests():
        yield f"reached by {line}"
    for launch in first.launches:
        if launch.key in keys:
            yield f"key {launch.key}, grid of {' x '.join(map(str, launch.grid_ctas))} CTAs"
            yield _fields(launch.form)
    yield f"rules, for {first.tokens} tokens and {first.partials} partials on {first.device.sm_count} SMs:"
    for rule in first.rules:
        yield f"  {rule.field} = {rule.value}: {rule.reason}"


def _reach_of(registry: Registry, programs: Sequence[tuple[Program, list[str]]]) -> list[_Reach]:
    """For each program what reaches one of its keys: all plans are walked once, however many programs there are."""
    from cakegen.emit.reach import reached_plans

    found = [_Reach() for _ in programs]
    by_key: dict[str, list[int]] = {}
    for number, (_, keys) in enumerate(programs):
        for key in keys:
            by_key.setdefault(key, []).append(number)
    for plan in reached_plans(registry.model):
        for number in {number for launch in plan.launches for number in by_key.get(launch.key, ())}:
            found[number].add(plan)
    return found


@dataclass
class _Reach:
    """The plans that launch one of some keys: the first whole, of all what they were asked for."""

    first: Plan | None = None
    tokens: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def add(self, plan: Plan) -> None:
        self.first = self.first or plan
        device = f"{plan.device.arch} with {plan.device.sm_count} SMs"
        partials = f", {plan.partials} partials" if plan.stage == "tail" else ""
        self.tokens.setdefault((f"{plan.stage} TP {plan.tp}{partials}", device), []).append(plan.tokens)

    def requests(self) -> Iterator[str]:
        """One line for each stage, TP degree, device and partial count, with the token counts as ranges."""
        devices: dict[tuple[str, str], list[str]] = {}
        for (request, device), counts in self.tokens.items():
            devices.setdefault((request, _ranges(counts)), []).append(device)
        for (request, counts_text), found in devices.items():
            yield f"{request}, T {counts_text}: {', '.join(found)}"


def _ranges(counts: list[int]) -> str:
    runs: list[list[int]] = []
    for count in counts:
        if runs and count == runs[-1][1] + 1:
            runs[-1][1] = count
        else:
            runs.append([count, count])
    return ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)


def _flat(registry: Registry, program: Program, keys: list[str]) -> str:
    """For a program's first target, and the compile line of the key, or of the first key that the program serves."""
    from cakegen.compile import flat_source, request_for
    from cakegen.errors import RegistryError

    if not keys:
        raise RegistryError(f"{registry.export}: no key leads to {program.name}, and its compile line is that of a key")
    return flat_source(request_for(registry, keys[0], program.arches[0]))


def _source(registry: Registry, program: Program) -> Iterator[str]:
    for name in (*program.sources, *program.headers):
        yield f"{registry.path(name)}"
    lines = registry.read(program.kernel_source).splitlines()
    yield ""
    yield from lines[:_SOURCE_LINES]
    if len(lines) > _SOURCE_LINES:
        yield f"… {len(lines) - _SOURCE_LINES} more lines; --source prints them all, with the headers"


def _launch(registry: Registry, program: Program, keys: list[str]) -> Iterator[str]:
    yield f"program {program.name}, role {program.role}, kernel {program.kernel_symbol}"
    yield _fields(program.launch)
    yield f"flags {' '.join(program.flags)}"
    for key in keys:
        constants = registry.constants(key)
        if constants:
            yield f"constants of {key}: {', '.join(f'{name}={value}' for name, value in constants.items())}"
    for kind, name in program.arg_plan:
        yield f"{kind} {name}"
    for entry in program.tensor_maps:
        yield f"tensor map {entry.name}: {entry.operand} by {entry.view}, box {' x '.join(map(str, entry.box))}"
    for barrier, count in program.barriers:
        yield f"barrier {barrier}: {count}"
    for arch, digest in program.closure_digest:
        yield f"closure {arch} {digest}"


def _fields(record: object) -> str:
    assert dataclasses.is_dataclass(record)
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    # of a choice its name, in lower case
    return ", ".join(f"{name} {v.name.lower() if isinstance(v, Enum) else v}" for name, v in values.items())


def _listed(values: Iterable[int]) -> str:
    return ", ".join(str(value) for value in values)

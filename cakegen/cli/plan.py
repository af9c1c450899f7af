"""`cakegen plan`: what a request launches and why, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cakegen.cli.names import ARCH, EXPORT
from cakegen.cli.options import refuse_ignored

if TYPE_CHECKING:
    from cakegen.measured import MeasuredTable, Verdict
    from cakegen.model import DeviceFacts
    from cakegen.plan import Launch, LaunchShape, Plan


@click.command("plan")
@click.option("--stage", required=True, type=click.Choice(["front", "tail"]), help="Half of the block.")
@click.option("--tp", required=True, type=int, help="Tensor-parallel degree.")
@click.option("--tokens", required=True, metavar="T|FIRST:LAST", help="Token count, or a range of them.")
@click.option("--partials", default=1, show_default=True, help="Partial sums of the routed experts (tail).")
@click.option("--arch", default="sm_90a", show_default=True, type=ARCH, help="Architecture.")
@click.option("--sm-count", type=int, help="SMs of the device; default: the largest known part.")
@click.option("--resident-pairs", type=int, help="Two-CTA clusters that run at once; default: half the SMs.")
@click.option(
    "--export",
    "export",
    default="kimi_k3_latent_moe",
    show_default=True,
    type=EXPORT,
    help="Export, or a tree's folder.",
)
@click.option(
    "--measured",
    "table_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Look the request up in this table of `cakegen tune`; default: those of the export.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, one line a token count.")
def plan_command(
    stage: str,
    tp: int,
    tokens: str,
    partials: int,
    arch: str,
    sm_count: int | None,
    resident_pairs: int | None,
    export: str,
    table_file: Path | None,
    as_json: bool,
) -> None:
    """Print the launches of a request, their keys, the rule that chose each field, and what was measured.

    With a range of token counts: a table, in which neighbours with one plan share a row.
    """
    from cakegen.plan import plan_route
    from cakegen.registry import load_registry

    counts = parse_tokens(tokens)
    if len(counts) > 1 and not as_json:
        refuse_ignored("is looked up for one token count; for a range take --json", "table_file")
    device = _device_facts(arch, sm_count, resident_pairs)
    model = load_registry(export).model
    plans = (plan_route(model, stage=stage, tp=tp, tokens=count, partials=partials, device=device) for count in counts)
    tables = _tables(table_file, model.name, device)
    lines: Iterable[str]
    if as_json:
        lines = (
            json.dumps(plan_literal(plan, partials) | _rules_literal(plan) | _measured_literal(plan, tables))
            for plan in plans
        )
    elif len(counts) == 1:
        plan = next(plans)
        lines = (*_describe(plan), *_describe_measured(plan, tables))
    else:
        lines = _table(plans)
    for line in lines:
        click.echo(line)


def parse_tokens(text: str) -> range:
    """`16` or `1:16384` (both ends included).

    Raises
    ------
    click.BadParameter
        It is neither, or the range is empty, or a count is more than kernels can hold.
    """
    from cakegen.arch import INT32_MAX

    first, colon, last = text.partition(":")
    try:
        counts = range(int(first), int(last if colon else first) + 1)
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a count nor FIRST:LAST", param_hint="--tokens") from None
    if not counts:
        raise click.BadParameter(f"{text!r} holds no count: {first} > {last}", param_hint="--tokens")
    if counts[-1] > INT32_MAX:
        raise click.BadParameter(f"{text!r}: kernels count tokens in int32, up to {INT32_MAX}", param_hint="--tokens")
    return counts


def _device_facts(arch: str, sm_count: int | None, resident_pairs: int | None) -> DeviceFacts:
    import dataclasses

    from cakegen.arch import architecture
    from cakegen.model import DeviceFacts

    sms = max(part.sm_count for part in architecture(arch).parts) if sm_count is None else sm_count
    device = DeviceFacts.nominal(arch, sms)
    return device if resident_pairs is None else dataclasses.replace(device, resident_pairs=resident_pairs)


def plan_literal(plan: Plan, partials: int) -> dict[str, Any]:
    """A plan as the JSON object of `--json`; `partials` as requested, also where the stage ignores it."""
    from cakegen.plan import family_of

    family = family_of(plan.device.arch)
    return {
        "stage": plan.stage,
        "tp": plan.tp,
        "tokens": plan.tokens,
        "partials": partials,
        "arch": plan.device.arch,
        "sm_count": plan.device.sm_count,
        "launches": [_launch_literal(launch, family.launch_shape(launch.form)) for launch in plan.launches],
    }


def _launch_literal(launch: Launch, shape: LaunchShape) -> dict[str, object]:
    """A launch, the parameters that change where it overlaps the one before it (null: it does not), and its shape."""
    import dataclasses

    overlaps = shape.overlap and launch.overlap is not None
    return {
        "key": launch.key,
        "grid_ctas": list(launch.grid_ctas),
        "parameters": dict(launch.parameters),
        "overlapping": dict(launch.overlap or ()) if overlaps else None,
        **dataclasses.asdict(shape),
    }


def _rules_literal(plan: Plan) -> dict[str, object]:
    """The rules that chose each field, and the most shared memory of a CTA, for `--json`."""
    rules = [{"field": rule.field, "value": rule.value, "reason": rule.reason} for rule in plan.rules]
    return {"max_dynamic_smem_bytes": plan.device.max_dynamic_smem_bytes, "rules": rules}


def _tables(file: Path | None, export: str, device: DeviceFacts) -> tuple[MeasuredTable, ...]:
    """Tables of devices like this one: the named file's, or the export's.

    Raises
    ------
    BenchError
        The named table can't be read, or is of another device.
    """
    from cakegen.arch import architecture
    from cakegen.errors import BenchError
    from cakegen.measured import read_table, tables_of

    suffix = architecture(device.arch).key_suffix
    if file is None:
        return tuple(table for table in tables_of(export) if table.covers(device.sm_count, suffix))
    table = read_table(file)
    if not table.covers(device.sm_count, suffix):
        raise BenchError(
            f"{file}: measured on {table.device} with {table.sm_count} SMs; the plan is for {device.sm_count} SMs of"
            f" {device.arch}. Choose the device by --arch and --sm-count, or name another table"
        )
    return (table,)


def _judge(plan: Plan, table: MeasuredTable) -> Verdict:
    from cakegen.measured import judge_request

    return judge_request(table, stage=plan.stage, tp=plan.tp, tokens=plan.tokens)


def _measured_literal(plan: Plan, tables: tuple[MeasuredTable, ...]) -> dict[str, object]:
    """What the tables say of a plan, for `--json`; nothing where there is none."""
    verdicts = [(table, _judge(plan, table)) for table in tables]
    found = [
        {
            "table": table.file_name,
            "device": table.device,
            "commit": table.provenance["commit"],
            "faster": verdict.faster,
            "rows": [
                {"tokens": row.tokens, "ours_us": row.ours_us, "chains_us": dict(row.chains_us)} for row in verdict.rows
            ],
        }
        for table, verdict in verdicts
    ]
    return {"measured": found} if found else {}


def _describe_measured(plan: Plan, tables: tuple[MeasuredTable, ...]) -> Iterator[str]:
    """The entries of each table that are nearest to a plan, and which way they say is faster."""
    from cakegen.measured import OURS

    keys = tuple(launch.key for launch in plan.launches)
    for table in tables:
        verdict = _judge(plan, table)
        yield f"measured on {table.title}{', P = 1' if plan.stage == 'tail' else ''} ({table.file_name})"
        for row in verdict.rows:
            chains = ", ".join(f"{name} {us:.4g} us" for name, us in row.chains_us.items())
            yield f"  T {row.tokens:<6} ours {row.ours_us:.4g} us; stock chains: {chains}"
            if row.tokens == plan.tokens and row.keys != keys:
                yield f"           measured with other programs: {', '.join(row.keys)}"
        yield f"  faster   {verdict.faster}: {verdict.reason}"
        if verdict.faster != OURS:
            yield "  launched the programs above: backend='auto' takes no stock chain"


def _grid(launch: Launch) -> str:
    return " x ".join(str(extent) for extent in launch.grid_ctas)


def _parameters(launch: Launch) -> str:
    return " ".join(f"{name}={value}" for name, value in launch.parameters)


def _describe(plan: Plan) -> Iterator[str]:
    """One plan: its launches, then its rules."""
    from cakegen.plan import family_of

    device, family = plan.device, family_of(plan.device.arch)
    yield (
        f"{plan.stage} TP {plan.tp}, T = {plan.tokens}, P = {plan.partials} on {device.arch}: {device.sm_count} SMs,"
        f" {device.resident_pairs} resident pairs"
    )
    for number, launch in enumerate(plan.launches, 1):
        yield f"launch {number}: {launch.key}"
        yield f"  grid_ctas   {_grid(launch)}"
        if launch.parameters:
            yield f"  parameters  {_parameters(launch)}"
        shape = family.launch_shape(launch.form)
        yield f"  cta         {shape.threads} threads, {shape.cluster_ctas} a cluster"
        yield f"  smem        {shape.dynamic_smem_bytes} of {device.max_dynamic_smem_bytes} bytes"
        yield f"  attributes  {_attributes(launch, shape)}"
    yield "rules"
    fields = max(len(rule.field) for rule in plan.rules)
    values = max(len(str(rule.value)) for rule in plan.rules)
    for rule in plan.rules:
        yield f"  {rule.field:{fields}}  {rule.value!s:{values}}  {rule.reason}"


def _attributes(launch: Launch, shape: LaunchShape) -> str:
    """How a launch follows the one before it, and whether its CTAs wait for each other."""
    follows = "ordinary"
    if shape.programmatic:
        follows = "programmatic: overlaps the launch before it"
    elif shape.overlap and launch.overlap is not None:
        changed = " ".join(
            f"{name}={value}" for name, value in launch.overlap if (name, value) not in launch.parameters
        )
        follows = f"may overlap the launch before it{f', then with {changed}' if changed else ''}"
    return f"{follows}{'; cooperative: the whole grid is resident' if shape.cooperative else ''}"


def _table(plans: Iterator[Plan]) -> Iterator[str]:
    """Neighbouring token counts with one plan as one row; a norm's grid, which follows T, as its range."""
    from cakegen.errors import PlanError

    yield f"{'tokens':>13}  launches (key, grid in CTAs, parameters)"
    first = last = next(plans)
    try:
        for plan in plans:
            if _row_identity(first) != _row_identity(plan):
                yield from _row(first, last)
                first = plan
            last = plan
    except PlanError:
        # a refused count ends the table, not the row before it
        yield from _row(first, last)
        raise
    yield from _row(first, last)


def _row_identity(plan: Plan) -> tuple[object, ...]:
    from cakegen.plan import NormForm

    return tuple(
        (launch.key, None if isinstance(launch.form, NormForm) else launch.grid_ctas, launch.parameters)
        for launch in plan.launches
    )


def _row(first: Plan, last: Plan) -> Iterator[str]:
    span = str(first.tokens) if first.tokens == last.tokens else f"{first.tokens}:{last.tokens}"
    for index, (low, high) in enumerate(zip(first.launches, last.launches, strict=True)):
        grid = _grid(low) if low.grid_ctas == high.grid_ctas else f"{_grid(low)} … {_grid(high)}"
        yield f"{span if index == 0 else '':>13}  {low.key}  [{grid}]  {_parameters(low)}".rstrip()

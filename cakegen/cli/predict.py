"""`cakegen predict`: microseconds of a request on a device that need not be there. Imports cakegen inside functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cakegen.cli.names import EXPORT
from cakegen.cli.options import refuse_ignored

if TYPE_CHECKING:
    from cakegen.emulator.launches.cases import Case
    from cakegen.registry import Registry
    from cakegen.timing import DeviceFigures, Prediction

_BAR = 40
_WAITS = 6
_FACTOR = 1.1


@click.command("predict")
@click.option("--stage", type=click.Choice(["front", "tail"]), help="Half of the block.")
@click.option("--tp", type=int, help="Tensor-parallel degree.")
@click.option("--tokens", type=int, help="Token count.")
@click.option("--partials", default=1, show_default=True, help="Partial sums of the routed experts (tail).")
@click.option("--rank", default=0, show_default=True, help="Rank whose slice the tail multiplies.")
@click.option(
    "--export",
    "export",
    default="kimi_k3_latent_moe",
    show_default=True,
    type=EXPORT,
    help="Export, or a tree's folder.",
)
@click.option("--device", default="h200", show_default=True, help="Device file of the package, or a TOML file.")
@click.option("--what-if", is_flag=True, help="Make each part of the device 10 % better in turn: ten times as long.")
@click.option("--json", "as_json", is_flag=True, help="The same as one JSON object.")
@click.option(
    "--against",
    "measured",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Predict decode rows of a file of `cakegen bench`: all, or those of --stage, --tp and --tokens.",
)
@click.option("--tsv", type=click.Path(dir_okay=False, path_type=Path), help="Where --against writes its rows.")
def predict_command(
    stage: str | None,
    tp: int | None,
    tokens: int | None,
    partials: int,
    rank: int,
    export: str,
    device: str,
    what_if: bool,
    as_json: bool,
    measured: Path | None,
    tsv: Path | None,
) -> None:
    """Predict what a request takes on a device, and say which part of the device holds it up.

    The programs run on the emulator in the order of modelled time. No GPU is needed, and none is measured: the figures
    of the device are a file, in which each has its source. `cakegen docs predict` says what is modelled.
    """
    from cakegen.emulator.launches.cases import Case
    from cakegen.registry import load_registry
    from cakegen.timing import load_device

    figures, registry = load_device(device), load_registry(export)
    if measured is not None:
        refuse_ignored("is of one request; --against takes those of its file", "partials", "rank", "what_if", "as_json")
        _against(registry, figures, measured, (stage, tp, tokens), tsv)
        return
    refuse_ignored("is written by --against", "tsv")
    if stage is None or tp is None or tokens is None:
        raise click.UsageError("needs --stage, --tp and --tokens; or --against FILE")
    case = Case(stage, tp, tokens, partials, figures.sm_count, rank, figures.arch)
    _one(registry, case, figures, what_if, as_json)


def _one(registry: Registry, case: Case, figures: DeviceFigures, what_if: bool, as_json: bool) -> None:
    from cakegen.timing import predict

    prediction = predict(registry, case, figures)
    gains = list(_gains(registry, case, figures, prediction)) if what_if else []
    if as_json:
        click.echo(json.dumps(_literal(prediction, gains)))
        return
    for line in _describe(registry.export, case, figures, prediction):
        click.echo(line)
    if gains:
        click.echo(f"with a part {_FACTOR - 1:.0%} better:")
    for part, microseconds in gains:
        saved = prediction.microseconds - microseconds
        click.echo(f"  {part:16} {microseconds:8.2f} us  {-saved:+.2f} us, {-saved / prediction.microseconds:+.1%}")


def _gains(
    registry: Registry, case: Case, figures: DeviceFigures, prediction: Prediction
) -> Iterator[tuple[str, float]]:
    """(part, microseconds with it better), the part that is worth most first."""
    from cakegen.cli.progress import progress
    from cakegen.timing import BETTER, better, predict

    found = {}
    with progress(len(BETTER), "predict", "predicted", "devices") as advance:
        for part in BETTER:
            found[part] = predict(registry, case, better(figures, part, _FACTOR)).microseconds
            advance(part)
    yield from sorted(found.items(), key=lambda each: each[1])


def _describe(export: str, case: Case, figures: DeviceFigures, prediction: Prediction) -> Iterator[str]:
    request = f"{case.stage}, TP {case.tp}, T = {case.tokens}"
    yield f"{export} {request} on {figures.name}: {prediction.microseconds:.2f} us predicted, from a cold L2"
    yield (
        f"no program takes less than {prediction.floor_us:.2f} us: {prediction.memory_bytes / 1e6:.1f} MB at "
        f"{figures.memory_rate.value / 1e3:.2f} TB/s, and {figures.launch.value / 1e3:.2f} us of a launch"
    )
    for key, time in prediction.launches:
        yield f"  {key}: {time.end / 1e3:.2f} us, {time.ctas} CTAs, {time.instructions} warp-instructions"
    yield f"bound by {prediction.bound}; of the time between start and end, the busiest of each part worked:"
    for part, share in prediction.busy.items():
        yield f"  {part:12} {share:5.0%} {'#' * round(_BAR * share)}"
    yield "what the warps of a CTA waited for, in the mean of the CTAs:"
    for _, time in prediction.launches:
        waits = sorted(time.waits.items(), key=lambda each: -each[1])
        for (warp, what), ns in waits[:_WAITS]:
            yield f"  warp {warp:2} {ns / time.ctas / 1e3:7.2f} us for {what}"


def _literal(prediction: Prediction, gains: list[tuple[str, float]]) -> dict[str, object]:
    launches = [
        {"key": key, "us": time.end / 1e3, "ctas": time.ctas, "instructions": time.instructions}
        for key, time in prediction.launches
    ]
    return {
        "microseconds": prediction.microseconds,
        "floor_us": prediction.floor_us,
        "bound": prediction.bound,
        "memory_bytes": prediction.memory_bytes,
        "busy": prediction.busy,
        "launches": launches,
        "better": dict(gains),
    }


def _against(
    registry: Registry,
    figures: DeviceFigures,
    file: Path,
    wanted: tuple[str | None, int | None, int | None],
    tsv: Path | None,
) -> None:
    from cakegen.cli.progress import progress
    from cakegen.timing import COLUMNS, compare, predict, ranked_right, read_rows, same_programs, summary

    rows = [
        row
        for row in same_programs(registry, read_rows(file), figures, decode_only=True)
        if all(want in (None, have) for want, have in zip(wanted, (row.stage, row.tp, row.tokens), strict=True))
    ]
    if not rows:
        raise click.UsageError(f"{file}: no such decode row of it has the programs of today's {registry.export}")
    found = []
    with progress(len(rows), "predict", "predicted", "rows") as advance, _lines_to(tsv) as write:
        write("\t".join(COLUMNS))
        for row in rows:
            found.append(compare(row, predict(registry, row.case(figures), figures), figures))
            write("\t".join(found[-1].cells()))
            advance(f"{row.stage} TP {row.tp}, T = {row.tokens}")
    right, pairs = ranked_right(found)
    errors = summary([each.error for each in found])
    click.echo(f"{len(found)} decode rows on {figures.name}; errors of the prediction: {errors}")
    click.echo(f"errors of the roofline: {summary([each.roofline_error for each in found])}")
    click.echo(f"of {pairs} pairs of TP degrees that differ by more than 8 %, {right} are in the right order")


@contextmanager
def _lines_to(file: Path | None) -> Iterator[Callable[[str], None]]:
    """What takes a line: a file, which holds every row that was done, or stdout."""
    if file is None:
        yield click.echo
        return
    with file.open("w", encoding="utf-8") as opened:

        def write(line: str) -> None:
            opened.write(line + "\n")
            opened.flush()

        yield write

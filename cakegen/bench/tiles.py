"""Times every prefill tile of Hopper at rows where a plan has the choice. Imports runtime, torch and this package."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from cakegen.bench.arms import Arm, capture_checked, prepare_ours
from cakegen.bench.cuda_clock import CudaClock
from cakegen.bench.operands import Case, make_operands
from cakegen.bench.provenance import read_provenance
from cakegen.bench.rows import LONG_TOKENS, Row, grouped_rows
from cakegen.bench.stats import Summary
from cakegen.bench.timing import Call, Clock, time_alternating
from cakegen.errors import BenchError
from cakegen.plan import GemmForm, Plan, family_of
from cakegen.registry import Registry
from cakegen.rules import HopperTile
from cakegen.runtime import LatentMoe

ARCH = "sm_90a"
"""Whose plans choose among tiles."""
REPEATS = 21
REPEATS_LONG = 9
COLUMNS = ("stage", "tp", "tokens", "block_n", "tile_groups", "full_items", "sk_ipc", "us", "spread")
_PROVENANCE = ("device", "sm_count", "date", "commit", "driver", "nvrtc", "torch")


@dataclass(frozen=True)
class TileTime:
    """What a row takes with one of the tiles.

    Parameters
    ----------
    full_items, sk_ipc
        Whole tiles, and K iterations of an item of the cut ones (0: none is cut).
    chosen
        Whether the plan takes these tiles by itself.
    """

    row: Row
    tile: HopperTile
    full_items: int
    sk_ipc: int
    time: Summary
    chosen: bool


def measure_tiles(registry: Registry, rows: Sequence[Row], repeats: int | None, say: Callable[[str], None]) -> str:
    """Time each tile at the rows that prefill serves, on torch's current device, as `cakegen bench` times an arm.

    Parameters
    ----------
    repeats
        Timed calls of a tile; None: 21, and 9 from T = 4096 on.
    say
        Gets a line of progress for each row.

    Returns
    -------
    str
        The table, as tab-separated text.

    Raises
    ------
    CakeError
        There is no Hopper device, prefill serves none of the rows, or a program's result is wrong.
    """
    device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    clock = CudaClock(device)
    times: list[TileTime] = []
    with clock.active():
        for found in time_tiles(registry, rows, device, clock, repeats):
            times += found
            say(_line(found))
    if not times:
        raise BenchError(f"decode serves all {len(rows)} rows, or {device} is not Hopper: there is no tile to choose")
    return render_tiles(times, read_provenance(device))


def time_tiles(
    registry: Registry,
    rows: Sequence[Row],
    device: torch.device,
    clock: Clock,
    repeats: int | None,
    backend: str = "auto",
) -> Iterator[list[TileTime]]:
    """The times of each row that prefill serves, as they are measured; parameters as of `measure_tiles`.

    `backend="emulator"` rehearses it without a device.
    """
    model = registry.model
    hopper = family_of(ARCH)
    moes = {
        tile: LatentMoe(dataclasses.replace(registry, model=model.preferring(tile))) for tile in hopper.tiles(model)
    }
    plain = LatentMoe(registry)
    # one CTA serves fewer; of more tokens decode has those whose tile two CTAs split
    candidates = [row for row in rows if row.tokens > hopper.decode(model).max_cta_tokens]
    for group in grouped_rows(candidates):
        operands = make_operands(model.dims, group[0], device, seed=0)
        for moe in moes.values() if backend == "auto" else ():
            moe.warm_up(device, group[0].tp, tokens={row.tokens for row in group}, stages=(group[0].stage,))
        for row in sorted(group, key=lambda row: row.tokens):
            case = operands.case_of(row)
            chosen = _gemm(_prepare(plain, case, backend)[0])
            if chosen is not None:
                yield _time_row(moes, case, chosen, clock, repeats, backend)


def _prepare(moe: LatentMoe, case: Case, backend: str) -> tuple[Plan, Arm]:
    runner, outputs = prepare_ours(moe, case, backend)
    assert runner.plan is not None
    return runner.plan, Arm(runner, outputs)


def _gemm(plan: Plan) -> GemmForm | None:
    form = plan.launches[-1].form
    return form if isinstance(form, GemmForm) and plan.device.arch == ARCH else None


def _time_row(
    moes: Mapping[HopperTile, LatentMoe],
    case: Case,
    chosen: GemmForm,
    clock: Clock,
    repeats: int | None,
    backend: str,
) -> list[TileTime]:
    plans: dict[HopperTile, Plan] = {}
    calls: dict[str, Call] = {}
    for tile, moe in moes.items():
        plans[tile], arm = _prepare(moe, case, backend)
        calls[_name(tile)] = capture_checked(arm, case, clock, case.dims.tolerances)
    rounds = repeats or (REPEATS_LONG if case.row.tokens >= LONG_TOKENS else REPEATS)
    times = time_alternating(calls, clock, rounds)
    found = []
    for tile, plan in plans.items():
        parameters = dict(plan.launches[-1].parameters)
        ipc = parameters["sk_ipc"] if parameters["sk_total"] else 0
        is_chosen = (tile.block_n, tile.tile_groups) == (chosen.block_n, chosen.tile_groups)
        found.append(TileTime(case.row, tile, parameters["full_items"], ipc, times[_name(tile)], is_chosen))
    return found


def _name(tile: HopperTile) -> str:
    return f"{tile.block_n}{' in turns' if tile.tile_groups == 1 else ''}"


def _line(times: Sequence[TileTime]) -> str:
    cells = "  ".join(f"{_name(each.tile)}{'*' if each.chosen else ''} {each.time.median_us:.4g}" for each in times)
    return f"{times[0].row}, us by columns of a tile (*: chosen): {cells}"


def render_tiles(times: Iterable[TileTime], provenance: Mapping[str, object]) -> str:
    """The table behind lines of `#` that say where it is from."""
    lines = [f"# {name}: {provenance[name]}" for name in _PROVENANCE]
    lines.append("\t".join(COLUMNS))
    for each in times:
        row, plan = each.row, (each.tile.block_n, each.tile.tile_groups, each.full_items, each.sk_ipc)
        measured = (f"{each.time.median_us:.5g}", f"{each.time.spread:.3f}")
        lines.append("\t".join(map(str, (row.stage, row.tp, row.tokens, *plan, *measured))))
    return "\n".join(lines) + "\n"

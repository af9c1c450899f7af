"""How a persistent GEMM cuts its trailing wave, as pure functions of tile counts. Imports only the model's records.

A GEMM runs whole tiles first, an item each; the cut tiles' K iterations are one flattened line of `sk_total`, of which
item `j` covers `[j * sk_ipc, (j + 1) * sk_ipc)`. Where an item ends inside a tile, that tile has segments whose fp32
partials are summed in a fixed order.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from cakegen.rules import CutRules, FrontHalves, HopperTile, StreamK


@dataclass(frozen=True)
class Split:
    """The items of a GEMM, and why.

    Parameters
    ----------
    num_items
        Cluster-sized units of work: one an SM100 cluster, spread over the resident clusters on Hopper.
    full_items
        Items that are whole tiles.
    sk_ipc
        K iterations of one item of the cut tiles.
    sk_max_seg
        Most segments of one cut tile.
    sk_total
        K iterations of all cut tiles (0: none is cut).
    reason
        The rule that chose, with its numbers.
    """

    num_items: int
    full_items: int
    sk_ipc: int
    sk_max_seg: int
    sk_total: int
    reason: str

    @property
    def parameters(self) -> tuple[tuple[str, int], ...]:
        """Run-time parameters of the launch."""
        names = ("num_items", "full_items", "sk_ipc", "sk_max_seg", "sk_total")
        return tuple((name, getattr(self, name)) for name in names)


@dataclass(frozen=True)
class CutCosts:
    """What bounds a cut, and what it costs; all in K iterations of one pair.

    Parameters
    ----------
    min_ipc
        Fewest iterations of an item.
    max_segments
        Most segments of a tile.
    epilogue
        The end of each piece: of a whole tile, or of an item's part of a tile.
    epilogues_hidden
        All ends but the last run while the next piece is multiplied.
    segment
        Each segment of a tile after the first.
    min_saving
        What a cut must save at least.
    wider_min_saving
        What a cut of two waves must save at least over anything narrower.
    """

    min_ipc: int
    max_segments: int
    epilogue: int
    epilogues_hidden: bool
    segment: int
    min_saving: int
    wider_min_saving: int

    def ends(self, pieces: int) -> int:
        """What the ends of pieces that one pair runs cost."""
        return self.epilogue * (min(pieces, 1) if self.epilogues_hidden else pieces)


@dataclass(frozen=True)
class Cut:
    """A way to cut, and what the whole GEMM then costs in K iterations of one pair."""

    cost: int
    split: Split


def whole_tiles(tiles: int, num_k: int, reason: str) -> Split:
    """Every tile is one item over all of K."""
    return Split(tiles, tiles, num_k, 1, 0, reason)


def plan_halves(tiles: int, num_k: int, resident: int, rules: FrontHalves | None) -> Split:
    """The SM100 front's rule: the trailing wave's tiles run as two aligned K halves, or nothing is cut.

    Parameters
    ----------
    tiles
        Pair tiles of the launch.
    num_k
        K iterations of a tile.
    resident
        Pairs that run at once.
    """
    waves, rem = divmod(tiles, resident)
    if rem == 0:
        return whole_tiles(tiles, num_k, f"{tiles} tiles are {waves} full waves of {resident}")
    if rules is None:
        return whole_tiles(tiles, num_k, "no tile of a front is cut")
    if 2 * rem > resident:
        return whole_tiles(tiles, num_k, f"2 * {rem} trailing halves exceed {resident} resident pairs")
    if num_k % 2:
        return whole_tiles(tiles, num_k, f"{num_k} K iterations have no aligned halves")
    half = num_k // 2
    saving = num_k - half - rules.epilogue_iters
    whole = (waves + 1) * num_k
    least = f"{rules.min_saving_percent} % of {waves + 1} * {num_k} = {whole} iterations"
    arithmetic = f"{num_k} - {half} - {rules.epilogue_iters} = {saving}"
    if 100 * saving < rules.min_saving_percent * whole:
        return whole_tiles(tiles, num_k, f"halves would save {arithmetic}, under {least}")
    reason = f"{rem} trailing tiles run as 2 * {rem} <= {resident} halves: saves {arithmetic}, at least {least}"
    return Split(tiles + rem, tiles - rem, half, 2, rem * num_k, reason)


@functools.lru_cache(maxsize=1024)
def plan_stream_k(tiles: int, num_k: int, reuse: int, resident: int, rules: StreamK | None) -> Split:
    """The SM100 tail's rule: cut the trailing wave (or it and one wave more) into equal runs of K iterations.

    Parameters
    ----------
    tiles, num_k, resident
        As in `plan_halves`.
    reuse
        Pair rows of a raster group that share a weight column.
    """
    waves, rem = divmod(tiles, resident)
    if rem == 0:
        return whole_tiles(tiles, num_k, f"{tiles} tiles are {waves} full waves of {resident}")
    if rules is None:
        return whole_tiles(tiles, num_k, "no tile of a tail is cut")
    short_reuse, limit = 1 < reuse < rules.full_reuse, rules.max_remainder_percent
    if num_k < rules.min_chunks:
        return whole_tiles(tiles, num_k, f"{num_k} K iterations, under {rules.min_chunks}")
    if short_reuse and waves == 0:
        return whole_tiles(tiles, num_k, f"reuse {reuse} is partial and {tiles} tiles are no full wave of {resident}")
    if short_reuse and 100 * rem > limit * resident:
        return whole_tiles(tiles, num_k, f"reuse {reuse} is partial and {rem} tiles exceed {limit} % of {resident}")
    cuts = [rem] if short_reuse or waves == 0 else [rem, rem + resident]
    costs = _sm100_costs(rules)
    found = [option for cut in cuts if (option := cheapest_cut(tiles, cut, num_k, resident, costs)) is not None]
    if not found:
        return whole_tiles(tiles, num_k, f"no cut of {cuts} tiles keeps {costs.max_segments} segments a tile")
    best = min(found, key=lambda option: option.cost)
    whole = whole_cost(tiles, num_k, resident, costs)
    if whole - best.cost < costs.min_saving:
        return whole_tiles(tiles, num_k, _no_saving(best.cost, whole, costs.min_saving))
    return best.split


@functools.lru_cache(maxsize=1024)
def plan_waves(tiles: int, num_k: int, resident: int, costs: CutCosts) -> Cut:
    """Hopper's rule, for both GEMMs: a ladder from whole tiles to wider cuts, each rung of which must pay.

    Parameters
    ----------
    tiles, num_k, resident
        As in `plan_halves`.
    costs
        Those of the tile's kind.
    """
    waves, rem = divmod(tiles, resident)
    whole = whole_cost(tiles, num_k, resident, costs)

    def uncut(reason: str) -> Cut:
        return Cut(whole, whole_tiles(tiles, num_k, reason))

    if rem == 0:
        return uncut(f"{tiles} tiles are {waves} full waves of {resident}")
    # 1. whole tiles; 2. the trailing wave is cut; 3. with it the wave before, for which the workspace is far larger
    cuts = {rem: costs.min_saving}
    if waves:
        cuts[rem + resident] = costs.wider_min_saving
    found = {cut: option for cut in cuts if (option := cheapest_cut(tiles, cut, num_k, resident, costs)) is not None}
    if not found:
        return uncut(f"no cut of {list(cuts)} tiles keeps {costs.max_segments} segments a tile")
    least, chosen = whole, None
    for cut, option in found.items():
        if least - option.cost >= cuts[cut]:
            least, chosen = option.cost, option
    cheapest = min(found, key=lambda cut: found[cut].cost)
    return chosen or uncut(_no_saving(found[cheapest].cost, whole, cuts[cheapest]))


def _no_saving(cost: int, whole: int, least: int) -> str:
    return f"the cheapest cut costs {cost} of {whole} iterations: saves {whole - cost}, under {least}"


def _sm100_costs(rules: StreamK) -> CutCosts:
    """Epilogues are free there: the accumulators lie in tensor memory and are read out while the next tile runs."""
    return CutCosts(
        min_ipc=rules.min_ipc,
        max_segments=rules.max_segments,
        epilogue=0,
        epilogues_hidden=True,
        segment=rules.segment_cost,
        min_saving=rules.min_saving,
        wider_min_saving=rules.min_saving,
    )


def hopper_costs(rules: CutRules, tile: HopperTile) -> CutCosts:
    """Of one kind of tile, in its own iterations. Where the warpgroups take turns, ends are hidden."""
    return CutCosts(
        min_ipc=rules.min_ipc,
        max_segments=rules.max_segments,
        epilogue=tile.epilogue_iters,
        epilogues_hidden=tile.tile_groups == 1,
        segment=tile.segment_cost,
        min_saving=rules.min_saving,
        wider_min_saving=rules.wider_min_saving,
    )


def whole_cost(tiles: int, num_k: int, resident: int, costs: CutCosts) -> int:
    """What whole tiles cost: every wave, the trailing one included, takes a tile's time."""
    waves = -(-tiles // resident)
    return waves * num_k + costs.ends(waves)


def max_segments(cut_tiles: int, num_k: int, ipc: int) -> int:
    """Most items that share one of the cut tiles."""
    return _most_touched(cut_tiles * num_k, num_k, ipc)


def max_pieces(total: int, num_k: int, ipc: int) -> int:
    """Most tiles that one item has a part of."""
    return _most_touched(total, ipc, num_k)


def _most_touched(total: int, run: int, cell: int) -> int:
    """Most cells of a line of `total` that one run touches: both follow each other, the last run may be short."""
    # a run begins at a multiple of both lengths' greatest divisor inside its first cell
    bound, most = (cell - math.gcd(run, cell) + run - 1) // cell + 1, 0
    for begin in range(0, total, run):
        most = max(most, (min(total, begin + run) - 1) // cell - begin // cell + 1)
        if most == bound:
            break
    return most


def cheapest_cut(tiles: int, cut: int, num_k: int, resident: int, costs: CutCosts) -> Cut | None:
    """The cheapest way to run the last `cut` tiles as equal runs, at most one a resident pair.

    Returns
    -------
    Cut | None
        None where every way leaves a tile with too many segments, or an item with too few iterations.
    """
    total, full_items = cut * num_k, tiles - cut
    waves = -(-full_items // resident)
    best: tuple[int, int, int] | None = None
    seen_ipc = 0
    for runs in range(min(resident, total // costs.min_ipc), 0, -1):
        ipc = -(-total // runs)
        if ipc == seen_ipc:
            continue
        seen_ipc = ipc
        # items only grow from here on
        if best is not None and waves * num_k + ipc + costs.ends(waves + 1) >= best[0]:
            break
        segments = max_segments(cut, num_k, ipc)
        if segments > costs.max_segments:
            continue
        pieces = max_pieces(total, num_k, ipc)
        cost = waves * num_k + ipc + costs.ends(waves + pieces) + costs.segment * (segments - 1)
        if best is None or cost < best[0]:
            best = (cost, ipc, segments)
    if best is None:
        return None
    cost, ipc, segments = best
    whole = whole_cost(tiles, num_k, resident, costs)
    reason = (
        f"the last {cut} of {tiles} tiles run as items of {ipc} iterations, at most {segments} segments a tile: cost"
        f" {cost} instead of {whole}, saves {whole - cost} (at least {costs.min_saving})"
    )
    return Cut(cost, Split(full_items + -(-total // ipc), full_items, ipc, segments, total, reason))

"""How a persistent GEMM cuts its trailing wave, as pure functions of tile counts. Imports only the model's records.

A GEMM runs whole tiles first, an item each; the cut tiles' K iterations are one flattened line of `sk_total`, of which
item `j` covers `[j * sk_ipc, (j + 1) * sk_ipc)`. Where an item ends inside a tile, that tile has segments whose fp32
partials are summed in a fixed order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from cakegen.model import PrefillRules


@dataclass(frozen=True)
class Split:
    """The items of a GEMM, and why.

    Parameters
    ----------
    num_items
        Cluster-sized units of work; the grid is two CTAs an item.
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


def whole_tiles(tiles: int, num_k: int, reason: str) -> Split:
    """Every tile is one item over all of K."""
    return Split(tiles, tiles, num_k, 1, 0, reason)


def plan_halves(tiles: int, num_k: int, resident: int, rules: PrefillRules) -> Split:
    """The front's rule: the trailing wave's tiles run as two aligned K halves, or nothing is cut.

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
    if 2 * rem > resident:
        return whole_tiles(tiles, num_k, f"2 * {rem} trailing halves exceed {resident} resident pairs")
    if num_k % 2:
        return whole_tiles(tiles, num_k, f"{num_k} K iterations have no aligned halves")
    half = num_k // 2
    saving = num_k - half - rules.front_epilogue_iters
    whole = (waves + 1) * num_k
    least = f"{rules.front_min_saving_percent} % of {waves + 1} * {num_k} = {whole} iterations"
    arithmetic = f"{num_k} - {half} - {rules.front_epilogue_iters} = {saving}"
    if 100 * saving < rules.front_min_saving_percent * whole:
        return whole_tiles(tiles, num_k, f"halves would save {arithmetic}, under {least}")
    reason = f"{rem} trailing tiles run as 2 * {rem} <= {resident} halves: saves {arithmetic}, at least {least}"
    return Split(tiles + rem, tiles - rem, half, 2, rem * num_k, reason)


def max_segments(cut_tiles: int, num_k: int, ipc: int) -> int:
    """Most items that share one of the cut tiles."""
    return max((x * num_k + num_k - 1) // ipc - x * num_k // ipc + 1 for x in range(cut_tiles))


@functools.lru_cache(maxsize=1024)
def plan_stream_k(tiles: int, num_k: int, reuse: int, resident: int, rules: PrefillRules) -> Split:
    """The tail's rule: cut the trailing wave (or it and one wave more) into equal runs of K iterations.

    Parameters
    ----------
    tiles, num_k, resident
        As in `plan_halves`.
    reuse
        Pair rows of a raster group that share a weight column.
    """
    waves, rem = divmod(tiles, resident)
    short_reuse = 1 < reuse < rules.stream_k_full_reuse
    limit = rules.stream_k_max_remainder_percent
    if rem == 0:
        return whole_tiles(tiles, num_k, f"{tiles} tiles are {waves} full waves of {resident}")
    if num_k < rules.stream_k_min_chunks:
        return whole_tiles(tiles, num_k, f"{num_k} K iterations, under {rules.stream_k_min_chunks}")
    if short_reuse and waves == 0:
        return whole_tiles(tiles, num_k, f"reuse {reuse} is partial and {tiles} tiles are no full wave of {resident}")
    if short_reuse and 100 * rem > limit * resident:
        return whole_tiles(tiles, num_k, f"reuse {reuse} is partial and {rem} tiles exceed {limit} % of {resident}")
    cuts = [rem] if short_reuse or waves == 0 else [rem, rem + resident]
    whole = (waves + 1) * num_k
    found = [option for cut in cuts if (option := _cheapest_cut(tiles, cut, num_k, resident, rules)) is not None]
    if not found:
        return whole_tiles(tiles, num_k, f"no cut of {cuts} tiles keeps {rules.stream_k_max_segments} segments a tile")
    cost, split = min(found, key=lambda option: option[0])
    saving = whole - cost
    if saving < rules.stream_k_min_saving:
        reason = (
            f"the cheapest cut costs {cost} of {whole} iterations: saves {saving}, under {rules.stream_k_min_saving}"
        )
        return whole_tiles(tiles, num_k, reason)
    return split


def _cheapest_cut(tiles: int, cut: int, num_k: int, resident: int, rules: PrefillRules) -> tuple[int, Split] | None:
    """The cheapest way to run the last `cut` tiles as equal runs, with its cost in K iterations of one pair."""
    total, full_items = cut * num_k, tiles - cut
    best: tuple[int, int, int] | None = None
    seen_ipc = 0
    for runs in range(min(resident, total // rules.stream_k_min_ipc), 0, -1):
        ipc = -(-total // runs)
        if ipc == seen_ipc:
            continue
        seen_ipc = ipc
        segments = max_segments(cut, num_k, ipc)
        cost = full_items // resident * num_k + ipc + rules.stream_k_segment_cost * (segments - 1)
        if segments <= rules.stream_k_max_segments and (best is None or cost < best[0]):
            best = (cost, ipc, segments)
    if best is None:
        return None
    cost, ipc, segments = best
    whole = (tiles // resident + 1) * num_k
    reason = (
        f"the last {cut} of {tiles} tiles run as items of {ipc} iterations, at most {segments} segments a tile: cost"
        f" {cost} instead of {whole}, saves {whole - cost} (at least {rules.stream_k_min_saving})"
    )
    return cost, Split(full_items + -(-total // ipc), full_items, ipc, segments, total, reason)

"""Plans the norm of a Hopper prefill tail: inside the GEMM or before it. Imports the model and the plan's records."""

from __future__ import annotations

from cakegen.plan.gemm import pair_rows_of
from cakegen.plan.records import GEMM_BLOCK_M, Rule
from cakegen.plan.workspace import MMA_WARPGROUPS
from cakegen.rules import HopperPrefillRules, HopperTile

MOST_ROW_COUNTERS = 1024
"""Control words that a fused norm may take: a counter a pair row, and one of CTAs."""


def can_fuse_norm(tile: HopperTile, tokens: int, partials: int) -> bool:
    """Whether the GEMM of a tile normalises the rows itself."""
    return partials == 1 and tile.tile_groups == MMA_WARPGROUPS and _row_counters(tokens) <= MOST_ROW_COUNTERS


def norm_cost_iters(tile: HopperTile, down: int, tokens: int, partials: int, rules: HopperPrefillRules) -> int:
    """What the norm adds to the GEMM's time, in iterations of the table's first tile.

    Parameters
    ----------
    down
        Shared-down iterations of a tile, which come first and need no normalised row.
    """
    if can_fuse_norm(tile, tokens, partials):
        first = norm_first_rows(down, tokens, rules)
        return rules.norm.first_iters - (-first // rules.norm.first_rows_per_iter) if first else 0
    return rules.norm.launch_iters - (-tokens // rules.norm.launch_rows_per_iter)


def norm_first_rows(down: int, tokens: int, rules: HopperPrefillRules) -> int:
    """Rows that a fused norm has done before anything is multiplied.

    Of the rows of the first tiles of all pairs those that could not be normalised beside their shared-down iterations.
    Few rows beside few iterations all come first: those iterations are over before a norm warp has stored a row.
    """
    rows, every = _first_tiles_rows(tokens, rules), rules.norm.all_first
    if every is not None and down < every.under_iters and rows < every.under_rows:
        return rows
    return max(rows - down * rules.norm.hidden_rows_per_iter, 0)


def _first_tiles_rows(tokens: int, rules: HopperPrefillRules) -> int:
    return min(tokens, rules.raster_m_tiles * GEMM_BLOCK_M)


def fused_norm_rule(tile: HopperTile, tokens: int, partials: int) -> Rule:
    """Whether the norm runs inside the GEMM, and why.

    Three warps of each CTA multiply nothing; they have registers for a row, but not for the fp32 sums of several
    partials, nor has a CTA any where its warpgroups take turns.
    """
    turns = "take turns with its tiles" if tile.tile_groups < MMA_WARPGROUPS else "share its tiles"
    reason = (
        f"P = {partials} (needs 1: sums of several take more registers), a CTA's warpgroups {turns} (needs them shared,"
        f" for the same reason), {_row_counters(tokens)} counters of rows (up to {MOST_ROW_COUNTERS})"
    )
    return Rule("fused_norm", can_fuse_norm(tile, tokens, partials), reason)


def _row_counters(tokens: int) -> int:
    return pair_rows_of(tokens) + 1


def first_rows_rule(down: int, tokens: int, rules: HopperPrefillRules) -> Rule:
    """Why the MMA warps normalise so many rows first."""
    every = rules.norm.all_first
    also = (
        ""
        if every is None
        else f"; all of fewer than {every.under_rows} with fewer than {every.under_iters} iterations"
    )
    reason = (
        f"{_first_tiles_rows(tokens, rules)} rows of the first {rules.raster_m_tiles} row tiles of {GEMM_BLOCK_M} -"
        f" {down} shared-down iterations * {rules.norm.hidden_rows_per_iter} normalised beside them, at least 0{also}"
    )
    return Rule("norm_first_rows", norm_first_rows(down, tokens, rules), reason)


def trigger_rule() -> Rule:
    """Why the norm always releases the GEMM at entry.

    The release takes effect when the last norm CTA has started, so a GEMM CTA can't keep a norm CTA from running. It
    takes nearly all registers and shared memory of an SM, and so starts only where the norm's CTAs have drained: it
    slows none of them down either. Meanwhile it runs the shared-down iterations, which need no normalised row. A late
    release would leave those SMs idle until the last norm CTA has stored.
    """
    reason = (
        "a GEMM CTA needs an SM to itself, so it starts where norm CTAs have drained, after the last of them has"
        " started: it delays none, and runs its shared-down iterations before it waits for the norm"
    )
    return Rule("norm.early_trigger", True, reason)

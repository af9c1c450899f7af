"""Plans the norm of a Hopper prefill tail: inside the GEMM or before it. Imports the model and the plan's records."""

from __future__ import annotations

from cakegen.plan.gemm import pair_rows_of
from cakegen.plan.records import Rule
from cakegen.plan.workspace import MMA_WARPGROUPS
from cakegen.rules import HopperPrefillRules, HopperTile

MOST_ROW_COUNTERS = 1024
"""Control words that a fused norm may take: a counter a pair row, and one of CTAs."""


def can_fuse_norm(tile: HopperTile, tokens: int, partials: int, rules: HopperPrefillRules) -> bool:
    """Whether the GEMM of a tile normalises the rows itself."""
    return partials == 1 and tile.tile_groups == MMA_WARPGROUPS and _row_counters(tokens, rules) <= MOST_ROW_COUNTERS


def norm_cost_iters(tile: HopperTile, down: int, tokens: int, partials: int, rules: HopperPrefillRules) -> int:
    """What the norm adds to the GEMM's time, in iterations of the table's first tile.

    Parameters
    ----------
    down
        Shared-down iterations of a tile, which come first and need no normalised row.
    """
    if can_fuse_norm(tile, tokens, partials, rules):
        return -(-min(norm_first_rows(down, rules), tokens) // rules.norm_first_rows_per_iter)
    return rules.norm_launch_iters - (-tokens // rules.norm_launch_rows_per_iter)


def norm_first_rows(down: int, rules: HopperPrefillRules) -> int:
    """Rows that a fused norm has done before anything is multiplied: those of the first tiles of all pairs, or none."""
    return 0 if down >= rules.norm_hidden_iters else rules.raster_m_tiles * rules.block_m


def fused_norm_rule(tile: HopperTile, tokens: int, partials: int, rules: HopperPrefillRules) -> Rule:
    """Whether the norm runs inside the GEMM, and why.

    Three warps of each CTA multiply nothing; they have registers for a row, but not for the fp32 sums of several
    partials, nor has a CTA any where its warpgroups take turns.
    """
    turns = "take turns with its tiles" if tile.tile_groups < MMA_WARPGROUPS else "share its tiles"
    reason = (
        f"P = {partials} (needs 1: sums of several take more registers), a CTA's warpgroups {turns} (needs them shared,"
        f" for the same reason), {_row_counters(tokens, rules)} counters of rows (up to {MOST_ROW_COUNTERS})"
    )
    return Rule("fused_norm", can_fuse_norm(tile, tokens, partials, rules), reason)


def _row_counters(tokens: int, rules: HopperPrefillRules) -> int:
    return pair_rows_of(rules.block_m, tokens) + 1


def first_rows_rule(down: int, rules: HopperPrefillRules) -> Rule:
    """Why so many rows are normalised first."""
    reason = (
        f"{down} shared-down iterations (from {rules.norm_hidden_iters} on they hide the norm of the first"
        f" {rules.raster_m_tiles} row tiles of {rules.block_m}; the MMA warps normalise these first otherwise)"
    )
    return Rule("norm_first_rows", norm_first_rows(down, rules), reason)


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

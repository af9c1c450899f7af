"""Leaf module: the tile choices and thresholds that the planners decide by, as an export declares them.

Frozen dataclasses of numbers, like all of `cakegen.model`, whose `Model` holds one of each. No imports of the project.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeRules:
    """Tile choices and thresholds of the decode planner.

    A ring stage holds one or two K chunks of a weight tile (`[block_m, block_k]` bf16) and of the tokens
    (`[n_pad, block_k]` bf16).

    Parameters
    ----------
    max_tokens, max_cta_tokens
        Largest T of decode, and most tokens of the tile that one CTA multiplies; what needs more is prefill.
    n_pads
        Token tiles, rising; a request takes the first that holds it.
    block_m, block_k
        Weight rows and columns of a chunk; a shared tile is `block_m / 2` gate rows and their up rows.
    max_stages
        Most stages of the ring, which takes what shared memory leaves.
    barrier_bytes, flag_bytes, single_landing_bytes
        Reserved in front of the ring: mbarriers, other words, and the landing zone of a CTA without a partner.
    depth2_min_stages_single, depth2_min_stages_pair
        The front loads two chunks a stage where the ring then keeps so many stages (one CTA a tile, or a pair).
    alias_n_pad, alias_min_chunks
        From this token tile and so many chunks a CTA on, a pair's sums land in the drained ring.
    staged_max_down_units, staged_min_stages
        The tail stages routed rows where a CTA has at most so many shared-down units and its ring so many stages.
    staged_wide_n_pad
        From this token tile on, the cold fill beside staged rows is staggered.
    resident_tokens_staged, resident_tokens_long, resident_tokens_short
        Largest T whose normalised rows stay in shared memory: with staged rows, with more down units than
        `staged_max_down_units`, with fewer.
    resident_min_stages
        Stages that the ring must keep beside resident rows.
    small_n_pad, small_min_stages_plain
        Up to this token tile one stage is left free, but a ring without staged or resident rows keeps so many.
    issue_ahead
        Weight stages that are issued before the row loads, where a gate holds those back.
    front_ahead
        Weight stages that the front issues before it waits for an earlier launch, in an ordinary launch.
    overlap_ahead_n_pad
        Up to this token tile, a launch that overlaps the one before it issues its whole ring of weights first.
    overlap_min_sm_percent
        A launch of CTAs without a partner overlaps the one before it where it has CTAs for so many percent of the SMs.
    stagger_units, split_finalize_n_pad
        The unit before which a staggered fill pauses; the token tile from which on both CTAs finish (0: rank 0 alone).
    front_split_n_pad, front_split_min_sm_percent
        From this token tile on (0: never), two CTAs of a front's tile split the tokens instead of K, where all CTAs are
        so many percent of the SMs.
    tail_split_n_pad, tail_split_max_chunks, tail_split_long_n_pad
        From this token tile on (0: never), two CTAs of a tail's tile split the tokens instead of K; of more than so
        many K chunks, from the second token tile on.
    tail_depth2_min_stages
        Two CTAs of a tail's tile load two chunks a stage where the ring then keeps so many stages (0: never).
    tail_short_stages, tail_short_split_chunks
        Most stages of a tail of few K chunks: up to `tail_split_max_chunks` where a pair splits them, up to so many
        where two CTAs load all of them.
    narrow_block_m, narrow_n_pad
        Hopper's weight rows of a front's tile up to this token tile, where as many pairs run at once (0: `block_m`).
    """

    max_tokens: int
    max_cta_tokens: int
    n_pads: tuple[int, ...]
    block_m: int
    block_k: int
    max_stages: int
    barrier_bytes: int
    flag_bytes: int
    single_landing_bytes: int
    depth2_min_stages_single: int
    depth2_min_stages_pair: int
    alias_n_pad: int
    alias_min_chunks: int
    staged_max_down_units: int
    staged_min_stages: int
    staged_wide_n_pad: int
    resident_tokens_staged: int
    resident_tokens_long: int
    resident_tokens_short: int
    resident_min_stages: int
    small_n_pad: int
    small_min_stages_plain: int
    issue_ahead: int
    front_ahead: int
    overlap_ahead_n_pad: int
    overlap_min_sm_percent: int
    stagger_units: int
    split_finalize_n_pad: int
    front_split_n_pad: int
    front_split_min_sm_percent: int
    tail_split_n_pad: int
    tail_split_max_chunks: int
    tail_split_long_n_pad: int
    tail_depth2_min_stages: int
    tail_short_stages: int
    tail_short_split_chunks: int
    narrow_block_m: int
    narrow_n_pad: int


@dataclass(frozen=True)
class PrefillRules:
    """Tile choices and thresholds of the SM100 prefill planner (T > decode's max_tokens).

    K is counted in chunks of `block_k` columns, costs and savings in K iterations of one pair.

    Parameters
    ----------
    block_m, block_n, block_k
        Rows of one CTA, columns of a pair's tile, columns of a chunk.
    raster_m_tiles
        Row tiles that share the weights while they are in L2.
    front_epilogue_iters, front_min_saving_percent
        The front's trailing tiles run as two K halves where that saves so much of the whole, with the epilogue counted
        as so many iterations.
    front_evict_first_pair_rows
        Up to so many pair rows the weights are streamed evict-first.
    narrow_block_n, narrow_stages, narrow_min_tp, narrow_tokens
        The tail's narrow tiles and their ring: from this TP on, at exactly so many tokens.
    default_stages
        Ring stages of all others.
    short_ring_stages, short_ring_max_tokens, short_ring_tp
        The tail's shorter ring: at this TP, up to so many tokens.
    stream_k_min_chunks, stream_k_min_ipc, stream_k_max_segments
        The tail's trailing wave is cut from so many chunks on, into items of at least so many iterations, at most so
        many of them to a tile.
    stream_k_segment_cost, stream_k_min_saving
        What a further segment of a tile costs, and what a cut must save.
    stream_k_max_remainder_percent, stream_k_full_reuse
        Below so many pair rows a group, a cut needs a full wave before it, and at most so much of one behind it.
    fused_norm_min_down_chunks, fused_norm_rows_per_cta
        The norm runs inside the GEMM where so many shared-down chunks hide it, at most so many rows a CTA.
    norm_rows_per_cta
        Rows of a CTA of the stand-alone norm, on every architecture.
    """

    block_m: int
    block_n: int
    block_k: int
    raster_m_tiles: int
    front_epilogue_iters: int
    front_min_saving_percent: int
    front_evict_first_pair_rows: int
    narrow_block_n: int
    narrow_stages: int
    narrow_min_tp: int
    narrow_tokens: int
    default_stages: int
    short_ring_stages: int
    short_ring_max_tokens: int
    short_ring_tp: int
    stream_k_min_chunks: int
    stream_k_min_ipc: int
    stream_k_max_segments: int
    stream_k_segment_cost: int
    stream_k_min_saving: int
    stream_k_max_remainder_percent: int
    stream_k_full_reuse: int
    fused_norm_min_down_chunks: int
    fused_norm_rows_per_cta: int
    norm_rows_per_cta: int


MAX_ITER_PERCENT = 1000
"""Of `HopperTile.iter_percent`: so dear a tile pays only where ends of tiles cost many times their iterations."""


@dataclass(frozen=True)
class HopperTile:
    """One way to lay out a Hopper prefill GEMM, and what it costs. Costs are counted in K iterations of this tile.

    Parameters
    ----------
    block_n
        Weight rows of a tile; both CTAs of a pair multiply by all of them, and each loads half.
    num_stages
        K iterations that the ring in shared memory holds.
    tile_groups
        Warpgroups of a CTA that share each tile. With 2, each has half of the rows. With 1 they take turns, each with
        whole tiles, so that only the last tile's end is not hidden behind another's multiplications.
    iter_percent
        What an iteration costs, in percent of one of the first tile of the table. A narrower tile multiplies less in
        it, and reads the tokens more often.
    epilogue_iters
        What the end of a piece (a whole tile, or an item's part of a cut tile) costs, whether it stores the output or
        fp32 partials: the accumulators are read out, and nothing is multiplied meanwhile.
    segment_cost
        What each segment of a cut tile after the first costs the CTA that sums them.
    """

    block_n: int
    num_stages: int
    tile_groups: int
    iter_percent: int
    epilogue_iters: int
    segment_cost: int


@dataclass(frozen=True)
class HopperPrefillRules:
    """Tile choices and costs of the Hopper prefill planner (T > decode's max_tokens).

    A pair of CTAs computes a tile of `2 * block_m` tokens by `block_n` weight rows in steps of `block_k` columns: a K
    iteration. Costs and savings are counted in K iterations of one pair, so that they do not depend on the clock.

    Parameters
    ----------
    block_m
        Tokens of one CTA.
    block_k
        Columns of a K iteration.
    raster_m_tiles
        Row tiles of `block_m` that pass a weight tile one after another, so that it is read from L2.
    stream_k_min_ipc
        Fewest K iterations of an item of the cut tiles.
    stream_k_max_segments
        Most items that may share one cut tile; the partials' workspace grows with it.
    stream_k_min_saving
        Fewest iterations that a cut of the trailing wave must save over whole tiles.
    stream_k_wider_min_saving
        Fewest iterations that cutting the wave before it too must save over the better of those two: it reads weights
        at more places at once, and its workspace is far larger.
    norm_launch_iters, norm_launch_rows_per_iter
        What a norm in a launch of its own adds to the tail, in iterations of the first tile: so many, and one for so
        many rows.
    norm_first_iters, norm_first_rows_per_iter
        What a fused norm's first rows add, if there are any: so many iterations, and one for so many rows.
    norm_hidden_rows_per_iter
        Rows of the first tiles that are normalised beside each shared-down iteration; the others come first.
    norm_hidden_iters, norm_hidden_min_rows
        All rows come first where there are fewer shared-down iterations, and fewer rows, than these.
    tiles
        The tiles that a plan may take: it takes the cheapest, and of equals the first. Keys spell all but the first.
    """

    block_m: int
    block_k: int
    raster_m_tiles: int
    stream_k_min_ipc: int
    stream_k_max_segments: int
    stream_k_min_saving: int
    stream_k_wider_min_saving: int
    norm_launch_iters: int
    norm_launch_rows_per_iter: int
    norm_first_iters: int
    norm_first_rows_per_iter: int
    norm_hidden_rows_per_iter: int
    norm_hidden_iters: int
    norm_hidden_min_rows: int
    tiles: tuple[HopperTile, ...]

    def preferring(self, tile: HopperTile) -> HopperPrefillRules:
        """These rules with costs at which a plan takes one of the tiles, whatever the others would save."""
        tiles = (dataclasses.replace(t, iter_percent=1 if t == tile else MAX_ITER_PERCENT) for t in self.tiles)
        return dataclasses.replace(self, tiles=tuple(tiles))

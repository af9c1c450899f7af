"""Leaf module: the device memory that a launch needs beside its operands. Imports only the plan's records.

The one place for both sizes: the runtime allocates by them, and the kernels index what it allocates. Both belong to one
runner, and every launch leaves the control words at zero.
"""

from __future__ import annotations

from cakegen.plan.records import DecodeForm, GemmForm, Launch

PAIR_CTAS = 2
# Each warpgroup of a Hopper CTA hands over its own rows' sums, and so counts its own arrivals; on Blackwell each group
# of four epilogue warps its own columns'.
MMA_WARPGROUPS = 2
EPILOGUE_GROUPS = 2


def partials_elems(launch: Launch) -> int:
    """fp32 elements of the segments' sums: `[cut tiles, sk_max_seg, 2 CTAs, block_m, block_n]` (0: nothing is cut)."""
    if not isinstance(launch.form, GemmForm):
        return 0
    segments = _cut_tiles(launch, launch.form) * dict(launch.parameters)["sk_max_seg"]
    return segments * PAIR_CTAS * launch.form.block_m * launch.form.block_n


def control_words(launch: Launch) -> int:
    """int32 words that are zero before and after each launch.

    A GEMM counts the arrivals of segments, `[cut tiles, 2 CTAs, warpgroups of a tile]`; if it normalises too, the rows
    of each pair row of tiles behind them, and the CTAs that need no more of those. A decode tail whose CTAs wait for
    each other's normalised rows counts those with one word.
    """
    if isinstance(launch.form, GemmForm):
        norm_words = dict(launch.parameters)["m_tiles"] // PAIR_CTAS + 1 if launch.form.fused_norm else 0
        return _cut_tiles(launch, launch.form) * PAIR_CTAS * launch.form.tile_groups + norm_words
    return int(isinstance(launch.form, DecodeForm) and launch.form.needs_residency)


def _cut_tiles(launch: Launch, form: GemmForm) -> int:
    return dict(launch.parameters)["sk_total"] // form.num_k

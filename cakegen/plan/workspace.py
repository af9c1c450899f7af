"""Leaf module: the device memory that a launch needs beside its operands. Imports only the plan's records.

The one place for both sizes: the runtime allocates by them, and the kernels index what it allocates. Both belong to one
runner, and every launch leaves the control words at zero.
"""

from __future__ import annotations

from cakegen.plan.records import DecodeForm, GemmForm, Launch, NormForm

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

    A tail whose CTAs wait for each other's normalised rows counts those: with the first word, or, where a Hopper GEMM
    normalises them, by pair rows of tiles behind the others, with one more for the CTAs that need no more of them. A
    GEMM counts the arrivals of segments, `[cut tiles, 2 CTAs, groups of a tile]`.
    """
    words = norm_words(launch.form)
    if isinstance(launch.form, GemmForm):
        parameters = dict(launch.parameters)
        if "norm_first_rows" in parameters:
            words = -(-parameters["m_tiles"] // PAIR_CTAS) + 1
        words += _cut_tiles(launch, launch.form) * PAIR_CTAS * launch.form.tile_groups
    return words


def norm_words(form: DecodeForm | NormForm | GemmForm) -> int:
    """Control words by which all CTAs of a launch wait for the whole of y that they normalise."""
    if isinstance(form, DecodeForm):
        return int(form.needs_residency)
    return int(isinstance(form, GemmForm) and form.fused_norm)


def _cut_tiles(launch: Launch, form: GemmForm) -> int:
    return dict(launch.parameters)["sk_total"] // form.num_k

"""Plans a weight-streaming decode launch (T <= the model's decode maximum), as pure functions.

Choices are taken in stages (shape, partition, operands kept in shared memory, ring), each a ladder of rules; each
leaves a `Rule` that says why. Imports errors, the model and the rest of `plan`; no torch, no pydantic, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cakegen.errors import PlanError
from cakegen.model import DeviceFacts, ModelDims
from cakegen.plan.records import DecodeForm, NormPlace, Rule, Sharing
from cakegen.plan.shape import DecodeShape, narrow_front
from cakegen.plan.smem import (
    BARRIER_BYTES,
    BF16_BYTES,
    FLAG_BYTES,
    SWIZZLE_PERIOD_BYTES,
    DecodeSmem,
    a_chunk_bytes,
    a_pad_bytes,
    b_chunk_bytes,
    decode_smem,
    larger_half,
    mma_tokens,
    pushed_bytes,
)
from cakegen.rules import DecodeRules


@dataclass(frozen=True)
class Ring:
    """A ring's depth, the K chunks of each stage, and the arithmetic that gave the depth."""

    num_stages: int
    chunks_per_stage: int
    arithmetic: str


def pair_rule(shape: DecodeShape, device: DeviceFacts) -> Rule:
    """Whether two CTAs should split a tile's K (value 2) or one CTA keeps it (value 1)."""
    ctas, short = 2 * shape.tiles, min(shape.segments)
    if ctas > device.sm_count:
        return Rule("cluster_ctas", 1, f"2 * {shape.tiles} tiles = {ctas} CTAs exceed {device.sm_count} SMs")
    if short < 2:
        return Rule("cluster_ctas", 1, f"a K segment has {short} chunk: a pair needs one a rank")
    if shape.n_pad % 4:
        return Rule("cluster_ctas", 1, f"n_pad {shape.n_pad} is no multiple of 4, which a pair's exchange needs")
    if device.resident_pairs < 1:
        return Rule("cluster_ctas", 1, f"the device holds no pair ({device.resident_pairs} resident)")
    return Rule("cluster_ctas", 2, f"2 * {shape.tiles} tiles = {ctas} CTAs fit {device.sm_count} SMs: pairs split K")


def token_parts_rule(shape: DecodeShape, pair: Rule, rules: DecodeRules, device: DeviceFacts) -> Rule:
    """Whether two CTAs of a tile split the tokens (value 2): they exchange no sums, but both load all weights."""
    field = "token_parts"
    if shape.stage == "front":
        front = rules.front.split_tokens
        if front is None:
            return Rule(field, 1, "no front splits the tokens")
        percent = 200 * shape.tiles // device.sm_count
        least, fits = front.from_n_pad, percent >= front.min_sm_percent
        where = f"{percent} % of the SMs have a CTA (at least {front.min_sm_percent} %)"
    else:
        tail, chunks = rules.tail.split_tokens, sum(shape.segments)
        if tail is None:
            return Rule(field, 1, "no tail splits the tokens")
        long = chunks > tail.max_chunks
        where = f"{chunks} K chunks, which both load, are {'over' if long else 'up to'} {tail.max_chunks}"
        if long and tail.long_from_n_pad is None:
            return Rule(field, 1, where)
        least, fits = (tail.long_from_n_pad or 0) if long else tail.from_n_pad, True
    splits = pair.value == 2 and least <= shape.n_pad and fits
    reason = f"{pair.value} CTAs a tile (needs 2), n_pad {shape.n_pad} (from {least}): {where}"
    return Rule(field, 2 if splits else 1, reason)


def sharing_of(shape: DecodeShape, pair: Rule, parts: Rule) -> tuple[Sharing, Rule]:
    """How a tile is shared, and why its CTAs are a cluster or are none."""
    if parts.value == 2:
        reason = f"2 * {shape.tiles} CTAs split the tokens: none needs another's sums"
        return Sharing.TOKENS, Rule("cluster_ctas", 1, reason)
    return (Sharing.PAIR if pair.value == 2 else Sharing.ALONE), pair


def is_alias(shape: DecodeShape, sharing: Sharing, rules: DecodeRules) -> bool:
    """Whether the partner's sums land in the drained ring: the handshake pays for wide tokens over a long K."""
    alias, half = rules.landing_alias, sum(shape.segments) // 2
    if alias is None or sharing is not Sharing.PAIR:
        return False
    return shape.n_pad >= alias.from_n_pad and half >= alias.from_chunks


def is_split(shape: DecodeShape, sharing: Sharing, rules: DecodeRules) -> bool:
    """Whether each CTA of a pair finishes half of the tokens: it halves the exchange and the stores of wide tiles."""
    least = rules.split_finalize_n_pad
    return sharing is Sharing.PAIR and least is not None and least <= shape.n_pad


def plan_ring(
    shape: DecodeShape,
    sharing: Sharing,
    chunks_per_stage: int,
    extra_bytes: int,
    rules: DecodeRules,
    device: DeviceFacts,
) -> Ring:
    """As many ring stages as shared memory holds beside the landing zone and `extra_bytes`, up to the rules' limit.

    The count can be 0; `refuse_misfit` says so with the arithmetic.
    """
    form = base_form(shape, sharing, rules)
    landing = 0 if form.landing_alias else form.landing_bytes
    limit = device.max_dynamic_smem_bytes
    free = limit - BARRIER_BYTES - FLAG_BYTES - landing - extra_bytes
    stage = chunks_per_stage * (a_chunk_bytes(shape.block_m) + b_chunk_bytes(mma_tokens(form)))
    stage += a_pad_bytes(shape.gated, shape.block_m)
    fits = max(0, free // stage)
    most, of_what = rules.max_stages, ""
    short = rules.tail.short_ring
    if short is not None and is_short(shape, sharing, rules):
        most, of_what = short.max_stages, " of a short K"
    arithmetic = (
        f"({limit} - {BARRIER_BYTES} barriers - {FLAG_BYTES} flags - {landing} landing"
        f" - {extra_bytes} resident) // {stage} bytes a stage = {fits}, at most {most}{of_what}"
    )
    return Ring(min(fits, most), chunks_per_stage, arithmetic)


def is_short(shape: DecodeShape, sharing: Sharing, rules: DecodeRules) -> bool:
    """Whether a tail has so few K chunks that a long ring delays it.

    The first weights of all rings queue in front of what the norm loads and of `y`, and there is no time to make up
    for that later.
    """
    short, chunks = rules.tail.short_ring, sum(shape.segments)
    if short is None or shape.stage != "tail" or sharing is Sharing.ALONE:
        return False
    return chunks <= (short.pair_chunks if sharing is Sharing.PAIR else short.split_chunks)


def base_form(shape: DecodeShape, sharing: Sharing, rules: DecodeRules) -> DecodeForm:
    """A form with every optional feature off, one chunk a stage and no ring yet; a tail's norm stands apart."""
    form = DecodeForm(
        stage=shape.stage,
        tp=shape.tp,
        n_pad=shape.n_pad,
        block_m=shape.block_m,
        gated=shape.gated,
        num_stages=0,
        chunks_per_stage=1,
        sharing=sharing,
        router_tiles=shape.router_tiles,
        latent_tiles=shape.latent_tiles,
        shared_tiles=shape.shared_tiles,
        k1_cols=shape.k1_cols,
        k2_chunks=shape.k2_chunks,
        out_cols=shape.out_cols,
        norm=NormPlace.APART if shape.normed else NormPlace.NONE,
        issue_gate=0,
        stagger_units=0,
        landing_bytes=rules.single_landing_bytes,
        landing_alias=is_alias(shape, sharing, rules),
        split_finalize=is_split(shape, sharing, rules),
    )
    return replace(form, landing_bytes=pushed_bytes(form)) if sharing is Sharing.PAIR else form


def plan_decode_front(
    shape: DecodeShape, dims: ModelDims, rules: DecodeRules, device: DeviceFacts, min_stages: int
) -> tuple[DecodeForm, tuple[Rule, ...]]:
    """The front's one launch. Its CTAs are independent, so a grid above the SM count runs in waves.

    Parameters
    ----------
    min_stages
        Fewest stages that a ring of the device's family can have.

    Raises
    ------
    PlanError
        The launch does not fit the device's shared memory.
    """
    pair = pair_rule(shape, device)
    parts = token_parts_rule(shape, pair, rules, device)
    sharing, partition = sharing_of(shape, pair, parts)
    width, shape = _narrow(shape, sharing, dims, rules, device)
    form = base_form(shape, sharing, rules)
    chunks, depth_rule = _front_depth(shape, sharing, rules, device)
    ring = plan_ring(shape, sharing, chunks, 0, rules, device)
    form = replace(form, chunks_per_stage=chunks, num_stages=ring.num_stages)
    refuse_misfit(form, ring, device, min_stages)
    return form, (
        n_pad_rule(shape, rules),
        parts,
        partition,
        width,
        grid_rule(form),
        depth_rule,
        alias_rule(form, rules),
        split_rule(form, rules),
        overlap_rule(form, rules, device),
        Rule("num_stages", ring.num_stages, ring.arithmetic),
        Rule("needs_residency", False, "no CTA waits for another outside its cluster"),
    )


def _narrow(
    shape: DecodeShape, sharing: Sharing, dims: ModelDims, rules: DecodeRules, device: DeviceFacts
) -> tuple[Rule, DecodeShape]:
    """Weight rows of a front's tile: fewer where as many pairs run at once, so that more SMs stream the weights."""
    wide, narrow = f"{shape.tiles} tiles of {shape.block_m} rows", rules.front.narrow
    if narrow is None:
        return Rule("block_m", shape.block_m, f"{wide}; no narrower ones for {device.arch}"), shape
    if sharing is not Sharing.PAIR or shape.n_pad > narrow.max_n_pad:
        cluster = 2 if sharing is Sharing.PAIR else 1
        limits = f"cluster {cluster} (needs 2), n_pad {shape.n_pad} (at most {narrow.max_n_pad})"
        return Rule("block_m", shape.block_m, f"{wide}; narrower ones: {limits}"), shape
    narrower = narrow_front(shape, dims, narrow.block_m)
    ctas = 2 * narrower.tiles
    fits = ctas <= device.sm_count and narrower.tiles <= device.resident_pairs
    reason = (
        f"{wide}; {narrower.tiles} of {narrower.block_m} are {ctas} CTAs{'' if fits else ', too many'} "
        f"for {device.sm_count} SMs and {device.resident_pairs} resident pairs"
    )
    chosen = narrower if fits else shape
    return Rule("block_m", chosen.block_m, reason), chosen


def _front_depth(shape: DecodeShape, sharing: Sharing, rules: DecodeRules, device: DeviceFacts) -> tuple[int, Rule]:
    field, chunks = "chunks_per_stage", shape.k1_chunks
    pair, front = sharing is Sharing.PAIR, rules.front
    needed = front.depth2_min_stages_pair if pair else front.depth2_min_stages_single
    stages = plan_ring(shape, sharing, 2, 0, rules, device).num_stages
    cluster = 2 if pair else 1
    if chunks % 2 or chunks // 2 < cluster:
        return 1, Rule(field, 1, f"{chunks} chunks do not give each of {cluster} CTAs a whole stage of two")
    if stages < needed:
        return 1, Rule(field, 1, f"a ring of two-chunk stages would keep {stages} stages, under {needed}")
    return 2, Rule(
        field, 2, f"{chunks} chunks are even and a ring of two-chunk stages keeps {stages}, at least {needed}"
    )


def weights_ahead(form: DecodeForm, rules: DecodeRules, overlap: bool) -> int:
    """Weight stages that a launch issues before it waits for the launch before it.

    Parameters
    ----------
    overlap
        The launch may start while the one before it runs, and has time for weights.
    """
    whole_ring = rules.overlap_ahead_n_pad
    if overlap and whole_ring is not None and form.n_pad <= whole_ring:
        return form.num_stages
    return min(rules.front.weights_ahead, form.num_stages) if form.stage == "front" else form.issue_gate


def overlap_rule(form: DecodeForm, rules: DecodeRules, device: DeviceFacts) -> Rule:
    """Whether a launch may overlap the one before it.

    Its CTAs then take the SMs that fall free one by one. A pair takes both of a TPC; CTAs without a partner, where they
    are far fewer than the SMs, come to share TPCs of which they could have had one each.
    """
    least = rules.overlap_min_sm_percent
    percent = 100 * form.grid_ctas // device.sm_count
    reason = (
        f"cluster {form.cluster_ctas} (needs 2, or CTAs for {least} % of the SMs; {form.grid_ctas} are {percent} % of"
        f" {device.sm_count})"
    )
    return Rule("overlap", form.cluster_ctas == 2 or percent >= least, reason)


def n_pad_rule(shape: DecodeShape, rules: DecodeRules) -> Rule:
    """Why the tokens are padded to `n_pad`."""
    choices = ", ".join(str(n) for n in rules.n_pads)
    return Rule("n_pad", shape.n_pad, f"the smallest of {choices} that holds T = {shape.tokens}")


def grid_rule(form: DecodeForm) -> Rule:
    """How the grid follows from tiles and cluster."""
    return Rule("grid_ctas", form.grid_ctas, f"{form.tiles} tiles * {form.sharing.ctas} CTAs")


def alias_rule(form: DecodeForm, rules: DecodeRules) -> Rule:
    """Why the landing zone is, or is not, in the drained ring."""
    alias, half = rules.landing_alias, (form.k1_chunks + form.k2_chunks) // 2
    if alias is None:
        return Rule("landing_alias", False, "sums never land in the ring")
    reason = (
        f"cluster {form.cluster_ctas} (needs 2), n_pad {form.n_pad} (needs {alias.from_n_pad}), half of K"
        f" {half} chunks (needs {alias.from_chunks})"
    )
    return Rule("landing_alias", form.landing_alias, reason)


def split_rule(form: DecodeForm, rules: DecodeRules) -> Rule:
    """Why one CTA of a pair, or both, finish the tokens."""
    least = rules.split_finalize_n_pad
    reason = f"cluster {form.cluster_ctas} (needs 2), n_pad {form.n_pad} (from {least})"
    return Rule("split_finalize", form.split_finalize, "rank 0 finishes all tokens" if least is None else reason)


def refuse_misfit(form: DecodeForm, ring: Ring, device: DeviceFacts, min_stages: int) -> None:
    """Refuse a form that its device can't hold.

    Raises
    ------
    PlanError
        The ring has too few stages, or its first fill would pause behind its end; an operand is off the swizzle's
        alignment; or the epilogue's tile does not fit the drained ring.
    """
    where = f"decode {form.stage} TP {form.tp} n_pad={form.n_pad} on {device.arch}"
    if form.num_stages < min_stages:
        raise PlanError(
            f"{where}: {form.num_stages} ring stages fit, at least {min_stages} are needed: {ring.arithmetic}. Raise"
            " decode.max_stages, or drop the token tile from decode.n_pads."
        )
    if form.stagger_units > form.num_stages:
        raise PlanError(
            f"{where}: the first fill of the ring would pause before unit {form.stagger_units}; it ends after"
            f" {form.num_stages} stages, and a wait for stage 0 means its first filling no more. Lower"
            f" decode.tail.staged.staggered.pause_unit to {form.num_stages} at most."
        )
    layout = decode_smem(form)
    assert layout.total_bytes <= device.max_dynamic_smem_bytes  # the ring took no more than was left
    _refuse_misaligned(where, layout)
    _refuse_staging(where, form, layout)


def _refuse_misaligned(where: str, layout: DecodeSmem) -> None:
    period = SWIZZLE_PERIOD_BYTES
    offsets = (
        ("A ring", layout.a_ring_offset),
        ("B ring", layout.b_ring_offset),
        ("resident B", layout.resident_b_offset),
    )
    for name, offset in offsets:
        if offset % period:
            raise PlanError(
                f"{where}: the {name} would start at byte {offset} = {period} * {offset // period} + {offset % period};"
                f" the 128-byte swizzle needs a multiple of {period}. Make single_landing_bytes a multiple of it, and"
                " n_pad one of 8."
            )


def _refuse_staging(where: str, form: DecodeForm, layout: DecodeSmem) -> None:
    ring_bytes = layout.a_ring_bytes + layout.b_ring_bytes
    landing = layout.staging_offset - layout.a_ring_offset
    needed = landing + layout.staging_bytes
    if needed > ring_bytes:
        raise PlanError(
            f"{where}: the epilogue needs {landing} landing + {layout.staging_bytes} output = {needed} bytes of the"
            f" drained ring, which has {layout.a_ring_bytes} + {layout.b_ring_bytes} = {ring_bytes} ({form.num_stages}"
            " stages). Raise decode.max_stages, or drop the token tile from decode.n_pads."
        )


def down_units(shape: DecodeShape, sharing: Sharing) -> int:
    """Shared-down units that a CTA waits for: of rank 0, or half of those that two CTAs load both."""
    return shape.k2_chunks if sharing is Sharing.ALONE else larger_half(shape.k2_chunks)


def resident_bytes(shape: DecodeShape, sharing: Sharing) -> int:
    """The resident B operand: the up chunks of rank 0."""
    up_units = larger_half(shape.k1_chunks) if sharing is Sharing.PAIR else shape.k1_chunks
    return up_units * b_chunk_bytes(shape.n_pad)


def staged_bytes(shape: DecodeShape) -> int:
    """Staged routed rows, of all of a tail's latent columns, and the norm weight behind them."""
    return (shape.n_pad + 1) * shape.tp * shape.k1_cols * BF16_BYTES

"""Plans a weight-streaming decode launch (T <= the model's decode maximum), as pure functions.

Choices are taken in stages (shape, partition, operands kept in shared memory, ring), each a ladder of rules; each
leaves a `Rule` that says why. Imports errors, the model and the rest of `plan`; no torch, no pydantic, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cakegen.arch import architecture
from cakegen.errors import PlanError
from cakegen.model import DeviceFacts, Model
from cakegen.plan.records import DecodeForm, Rule
from cakegen.plan.shape import DecodeShape, narrow_front
from cakegen.plan.smem import (
    BF16_BYTES,
    SWIZZLE_PERIOD_BYTES,
    DecodeSmem,
    a_chunk_bytes,
    a_pad_bytes,
    b_chunk_bytes,
    decode_smem,
    landing_bytes,
    larger_half,
    mma_tokens,
)

# Hopper's MMA warps free a stage when they have issued the next one: with a single stage neither side could move.
_MIN_STAGES = {"sm90": 2}


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


def token_parts_rule(shape: DecodeShape, pair: Rule, model: Model, device: DeviceFacts) -> Rule:
    """Whether two CTAs of a tile split the tokens (value 2): they exchange no sums, but both load all weights."""
    rules, chunks = model.decode, sum(shape.segments)
    if shape.stage == "front":
        least, percent = rules.front_split_n_pad, 200 * shape.tiles // device.sm_count
        fits = percent >= rules.front_split_min_sm_percent
        where = f"{percent} % of the SMs have a CTA (at least {rules.front_split_min_sm_percent} %)"
    else:
        long = chunks > rules.tail_split_max_chunks
        least, fits = rules.tail_split_long_n_pad if long else rules.tail_split_n_pad, True
        where = f"{chunks} K chunks, which both load, are {'over' if long else 'up to'} {rules.tail_split_max_chunks}"
    splits = pair.value == 2 and 0 < least <= shape.n_pad and fits
    reason = f"{pair.value} CTAs a tile (needs 2), n_pad {shape.n_pad} (from {least}; 0: never): {where}"
    return Rule("token_parts", 2 if splits else 1, reason)


def split_tokens(shape: DecodeShape) -> tuple[DecodeShape, Rule]:
    """A shape whose tiles have two CTAs, each for half of the tokens; and why they are no cluster."""
    reason = f"2 * {shape.tiles} CTAs split the tokens: none needs another's sums"
    return replace(shape, token_parts=2), Rule("cluster_ctas", 1, reason)


def is_alias(shape: DecodeShape, cluster_ctas: int, model: Model) -> bool:
    """Whether the partner's sums land in the drained ring: the handshake pays for wide tokens over a long K."""
    rules = model.decode
    half = sum(shape.segments) // 2
    return cluster_ctas == 2 and shape.n_pad >= rules.alias_n_pad and half >= rules.alias_min_chunks


def is_split(shape: DecodeShape, cluster_ctas: int, model: Model) -> bool:
    """Whether each CTA of a pair finishes half of the tokens: it halves the exchange and the stores of wide tiles."""
    least = model.decode.split_finalize_n_pad
    return cluster_ctas == 2 and 0 < least <= shape.n_pad


def plan_ring(
    shape: DecodeShape, cluster_ctas: int, chunks_per_stage: int, extra_bytes: int, model: Model, device: DeviceFacts
) -> Ring:
    """As many ring stages as shared memory holds beside the landing zone and `extra_bytes`, up to the model's limit.

    The count can be 0; `refuse_misfit` says so with the arithmetic.
    """
    rules = model.decode
    form = base_form(shape, cluster_ctas, model)
    landing = 0 if form.landing_alias else landing_bytes(rules, form)
    limit = device.max_dynamic_smem_bytes
    free = limit - rules.barrier_bytes - rules.flag_bytes - landing - extra_bytes
    stage = chunks_per_stage * (a_chunk_bytes(rules, shape.block_m) + b_chunk_bytes(rules, mma_tokens(form)))
    stage += a_pad_bytes(rules, shape.stage, shape.block_m)
    fits = max(0, free // stage)
    most, of_what = rules.max_stages, ""
    if is_short(shape, cluster_ctas, model):
        most, of_what = rules.tail_short_stages, " of a short K"
    arithmetic = (
        f"({limit} - {rules.barrier_bytes} barriers - {rules.flag_bytes} flags - {landing} landing"
        f" - {extra_bytes} resident) // {stage} bytes a stage = {fits}, at most {most}{of_what}"
    )
    return Ring(min(fits, most), chunks_per_stage, arithmetic)


def is_short(shape: DecodeShape, cluster_ctas: int, model: Model) -> bool:
    """Whether a tail has so few K chunks that a long ring delays it.

    The first weights of all rings queue in front of what the norm loads and of `y`, and there is no time to make up
    for that later.
    """
    rules, chunks = model.decode, sum(shape.segments)
    if shape.stage != "tail" or cluster_ctas * shape.token_parts != 2:
        return False
    return chunks <= (rules.tail_split_max_chunks if cluster_ctas == 2 else rules.tail_short_split_chunks)


def base_form(shape: DecodeShape, cluster_ctas: int, model: Model) -> DecodeForm:
    """A form with every optional feature off, one chunk a stage and no ring or symbol yet."""
    return DecodeForm(
        stage=shape.stage,
        tp=shape.tp,
        n_pad=shape.n_pad,
        block_m=shape.block_m,
        num_stages=0,
        chunks_per_stage=1,
        cluster_ctas=cluster_ctas,
        grid_ctas=cluster_ctas * shape.token_parts * shape.tiles,
        router_tiles=shape.router_tiles,
        latent_tiles=shape.latent_tiles,
        shared_tiles=shape.shared_tiles,
        k1_chunks=shape.k1_chunks,
        k2_chunks=shape.k2_chunks,
        k1_cols=shape.k1_cols,
        k1_ragged_cols=shape.k1_ragged_cols,
        out_cols=shape.out_cols,
        fused_norm=False,
        resident_b=False,
        staged_rows=False,
        issue_gate=0,
        no_prefetch=False,
        stagger_units=0,
        wide_wait=False,
        landing_alias=is_alias(shape, cluster_ctas, model),
        split_finalize=is_split(shape, cluster_ctas, model),
        token_parts=shape.token_parts,
        needs_residency=False,
        symbol="",
    )


def spell_symbol(form: DecodeForm, model: Model) -> str:
    """The name that spells a decode form; the logical key is `decode:` + symbol (+ the architecture's suffix)."""
    head = (
        f"{model.name}_decode_g{form.grid_ctas}_n{form.n_pad}_r{form.num_stages}_d{form.chunks_per_stage}_p0_w0"
        f"_t{form.router_tiles}_{form.latent_tiles}_{form.shared_tiles}_k{form.k1_chunks}_{form.k2_chunks}"
        f"_o{form.out_cols}_c{form.cluster_ctas}"
    )
    suffixes = (
        (f"_m{form.block_m}", form.block_m != model.decode.block_m),
        ("_f", form.fused_norm),
        (f"_g{form.issue_gate}", form.issue_gate),
        ("_sb", form.resident_b),
        ("_rs", form.staged_rows),
        ("_np", form.no_prefetch),
        (f"_st{form.stagger_units}", form.stagger_units),
        ("_ww", form.wide_wait),
        ("_la", form.landing_alias),
        ("_sf", form.split_finalize),
        (f"_tt{form.token_parts}", form.token_parts > 1),
        (f"_kt{form.k1_ragged_cols}", form.k1_ragged_cols),
    )
    return head + "".join(suffix for suffix, is_set in suffixes if is_set)


def plan_decode_front(shape: DecodeShape, model: Model, device: DeviceFacts) -> tuple[DecodeForm, tuple[Rule, ...]]:
    """The front's one launch. Its CTAs are independent, so a grid above the SM count runs in waves.

    Raises
    ------
    PlanError
        The launch does not fit the device's shared memory.
    """
    pair = pair_rule(shape, device)
    parts = token_parts_rule(shape, pair, model, device)
    if parts.value == 2:
        shape, pair = split_tokens(shape)
    cluster = 2 if pair.value == 2 else 1
    width = _width_rule(shape, cluster, model, device)
    if width.value != shape.block_m:
        shape = narrow_front(shape, model)
    form = base_form(shape, cluster, model)
    chunks, depth_rule = _front_depth(shape, cluster, model, device)
    ring = plan_ring(shape, cluster, chunks, 0, model, device)
    form = replace(form, chunks_per_stage=chunks, num_stages=ring.num_stages)
    refuse_misfit(form, ring, model, device)
    rules = (
        n_pad_rule(shape, model),
        parts,
        pair,
        width,
        grid_rule(form),
        depth_rule,
        alias_rule(form, model),
        split_rule(form, model),
        overlap_rule(form, model, device),
        Rule("num_stages", ring.num_stages, ring.arithmetic),
        Rule("needs_residency", False, "no CTA waits for another outside its cluster"),
    )
    return replace(form, symbol=spell_symbol(form, model)), rules


def _width_rule(shape: DecodeShape, cluster_ctas: int, model: Model, device: DeviceFacts) -> Rule:
    """Weight rows of a front's tile: fewer where as many pairs run at once, so that more SMs stream the weights."""
    wide = f"{shape.tiles} tiles of {shape.block_m} rows"
    if not model.decode.narrow_block_m:
        return Rule("block_m", shape.block_m, f"{wide}; no narrower ones for {device.arch}")
    if cluster_ctas != 2 or shape.n_pad > model.decode.narrow_n_pad:
        limits = f"cluster {cluster_ctas} (needs 2), n_pad {shape.n_pad} (at most {model.decode.narrow_n_pad})"
        return Rule("block_m", shape.block_m, f"{wide}; narrower ones: {limits}")
    narrow = narrow_front(shape, model)
    ctas = 2 * narrow.tiles
    fits = ctas <= device.sm_count and narrow.tiles <= device.resident_pairs
    reason = (
        f"{wide}; {narrow.tiles} of {narrow.block_m} are {ctas} CTAs{'' if fits else ', too many'} "
        f"for {device.sm_count} SMs and {device.resident_pairs} resident pairs"
    )
    return Rule("block_m", narrow.block_m if fits else shape.block_m, reason)


def _front_depth(shape: DecodeShape, cluster: int, model: Model, device: DeviceFacts) -> tuple[int, Rule]:
    rules, field = model.decode, "chunks_per_stage"
    chunks = shape.k1_chunks
    needed = rules.depth2_min_stages_pair if cluster == 2 else rules.depth2_min_stages_single
    stages = plan_ring(shape, cluster, 2, 0, model, device).num_stages
    if chunks % 2 or chunks // 2 < cluster:
        return 1, Rule(field, 1, f"{chunks} chunks do not give each of {cluster} CTAs a whole stage of two")
    if stages < needed:
        return 1, Rule(field, 1, f"a ring of two-chunk stages would keep {stages} stages, under {needed}")
    return 2, Rule(
        field, 2, f"{chunks} chunks are even and a ring of two-chunk stages keeps {stages}, at least {needed}"
    )


def weights_ahead(form: DecodeForm, model: Model, overlap: bool) -> int:
    """Weight stages that a launch issues before it waits for the launch before it.

    Parameters
    ----------
    overlap
        The launch may start while the one before it runs, and has time for weights.
    """
    rules = model.decode
    if overlap and form.n_pad <= rules.overlap_ahead_n_pad:
        return form.num_stages
    return min(rules.front_ahead, form.num_stages) if form.stage == "front" else form.issue_gate


def overlap_rule(form: DecodeForm, model: Model, device: DeviceFacts) -> Rule:
    """Whether a launch may overlap the one before it.

    Its CTAs then take the SMs that fall free one by one. A pair takes both of a TPC; CTAs without a partner, where they
    are far fewer than the SMs, come to share TPCs of which they could have had one each.
    """
    least = model.decode.overlap_min_sm_percent
    percent = 100 * form.grid_ctas // device.sm_count
    reason = (
        f"cluster {form.cluster_ctas} (needs 2, or CTAs for {least} % of the SMs; {form.grid_ctas} are {percent} % of"
        f" {device.sm_count})"
    )
    return Rule("overlap", form.cluster_ctas == 2 or percent >= least, reason)


def n_pad_rule(shape: DecodeShape, model: Model) -> Rule:
    """Why the tokens are padded to `n_pad`."""
    choices = ", ".join(str(n) for n in model.decode.n_pads)
    return Rule("n_pad", shape.n_pad, f"the smallest of {choices} that holds T = {shape.tokens}")


def grid_rule(form: DecodeForm) -> Rule:
    """How the grid follows from tiles and cluster."""
    ctas = form.cluster_ctas * form.token_parts
    return Rule("grid_ctas", form.grid_ctas, f"{form.tiles} tiles * {ctas} CTAs")


def alias_rule(form: DecodeForm, model: Model) -> Rule:
    """Why the landing zone is, or is not, in the drained ring."""
    rules, half = model.decode, (form.k1_chunks + form.k2_chunks) // 2
    reason = (
        f"cluster {form.cluster_ctas} (needs 2), n_pad {form.n_pad} (needs {rules.alias_n_pad}), half of K"
        f" {half} chunks (needs {rules.alias_min_chunks})"
    )
    return Rule("landing_alias", form.landing_alias, reason)


def split_rule(form: DecodeForm, model: Model) -> Rule:
    """Why one CTA of a pair, or both, finish the tokens."""
    least = model.decode.split_finalize_n_pad
    reason = f"cluster {form.cluster_ctas} (needs 2), n_pad {form.n_pad} (from {least}; 0: never)"
    return Rule("split_finalize", form.split_finalize, reason)


def refuse_misfit(form: DecodeForm, ring: Ring, model: Model, device: DeviceFacts) -> None:
    """Refuse a form that its device can't hold.

    Raises
    ------
    PlanError
        The ring has too few stages, or its first fill would pause behind its end; an operand is off the swizzle's
        alignment; or the epilogue's tile does not fit the drained ring.
    """
    where = f"decode {form.stage} TP {form.tp} n_pad={form.n_pad} on {device.arch}"
    least = _MIN_STAGES.get(architecture(device.arch).family, 1)
    if form.num_stages < least:
        raise PlanError(
            f"{where}: {form.num_stages} ring stages fit, at least {least} are needed: {ring.arithmetic}. Raise"
            " decode.max_stages, drop the token tile from decode.n_pads, or reserve fewer bytes."
        )
    if form.stagger_units > form.num_stages:
        raise PlanError(
            f"{where}: the first fill of the ring would pause before unit {form.stagger_units}; it ends after"
            f" {form.num_stages} stages, and a wait for stage 0 means its first filling no more. Lower"
            f" decode.stagger_units to {form.num_stages} at most."
        )
    layout = decode_smem(form, model)
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
                f" the 128-byte swizzle needs a multiple of {period}. Make barrier_bytes, flag_bytes and"
                " single_landing_bytes multiples of it, and n_pad one of 8."
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


def down_units(shape: DecodeShape, cluster_ctas: int) -> int:
    """Shared-down units that a CTA waits for: of rank 0, or half of those that two CTAs load both."""
    return shape.k2_chunks if cluster_ctas * shape.token_parts == 1 else larger_half(shape.k2_chunks)


def resident_bytes(shape: DecodeShape, cluster_ctas: int, model: Model) -> int:
    """The resident B operand: the up chunks of rank 0."""
    up_units = shape.k1_chunks if cluster_ctas == 1 else larger_half(shape.k1_chunks)
    return up_units * b_chunk_bytes(model.decode, shape.n_pad)


def staged_bytes(shape: DecodeShape, model: Model) -> int:
    """Staged routed rows and the norm weight behind them."""
    return (shape.n_pad + 1) * model.dims.latent * BF16_BYTES

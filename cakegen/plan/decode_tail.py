"""Plans the decode tail: the norm in the launch where the grid is resident, or a launch of its own before it.

Imports errors, the model and the rest of `plan`; no torch, no pydantic, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cakegen.model import DeviceFacts, Model
from cakegen.plan.decode import (
    Ring,
    alias_rule,
    base_form,
    down_units,
    grid_rule,
    is_short,
    n_pad_rule,
    overlap_rule,
    pair_rule,
    plan_ring,
    refuse_misfit,
    resident_bytes,
    spell_symbol,
    split_rule,
    split_tokens,
    staged_bytes,
    token_parts_rule,
)
from cakegen.plan.records import DecodeForm, Rule
from cakegen.plan.shape import DecodeShape


@dataclass(frozen=True)
class TailPlan:
    """The tail's decode form, whether a norm launch goes before it, and why."""

    form: DecodeForm
    rules: tuple[Rule, ...]

    @property
    def separate_norm(self) -> bool:
        """The norm needs a launch of its own."""
        return not self.form.fused_norm


@dataclass(frozen=True)
class _Operands:
    """What the fused norm keeps in shared memory, and the ring beside it."""

    resident_b: bool
    staged_rows: bool
    ring: Ring
    depth: Rule
    rules: tuple[Rule, ...]


def plan_decode_tail(shape: DecodeShape, model: Model, device: DeviceFacts) -> TailPlan:
    """The tail's launch or launches, by the first rung that the device can hold.

    Raises
    ------
    PlanError
        The launch does not fit the device's shared memory.
    """
    pair = pair_rule(shape, device)
    # 1. The preferred partition, norm fused. 2. Where its grid can't be resident but must: one CTA a tile.
    parts = token_parts_rule(shape, pair, model, device)
    rungs = [pair]
    if parts.value == 2:
        shape, alone = split_tokens(shape)
        rungs = [alone]
    elif pair.value == 2:
        short = f"{shape.tiles} pairs can't be resident ({device.resident_pairs} can): one CTA a tile"
        rungs.append(Rule("cluster_ctas", 1, short))
    for partition in rungs:
        plan = _fused(shape, partition, parts, model, device)
        if not plan.form.needs_residency or is_resident(plan.form, device):
            return plan
    # 3. A norm launch, then a form without the counter.
    return _unfused(shape, pair, parts, model, device)


def is_resident(form: DecodeForm, device: DeviceFacts) -> bool:
    """Whether the whole grid of a form runs at once."""
    if form.cluster_ctas == 2:
        return form.tiles <= device.resident_pairs
    return form.grid_ctas <= device.sm_count


def _fused(shape: DecodeShape, partition: Rule, parts: Rule, model: Model, device: DeviceFacts) -> TailPlan:
    cluster = 2 if partition.value == 2 else 1
    operands = _operands(shape, cluster, model, device)
    stages, ring_rule = _tail_stages(shape, operands.ring, _min_stages(operands, model), model)
    gate, gate_rule = _issue_gate(shape, cluster, operands, stages, model)
    wide = operands.staged_rows and shape.n_pad >= model.decode.staged_wide_n_pad
    form = replace(
        base_form(shape, cluster, model),
        num_stages=stages,
        chunks_per_stage=operands.ring.chunks_per_stage,
        fused_norm=True,
        resident_b=operands.resident_b,
        staged_rows=operands.staged_rows,
        issue_gate=gate,
        no_prefetch=wide,
        stagger_units=model.decode.stagger_units if wide else 0,
        wide_wait=wide and cluster == 2,
        needs_residency=not operands.resident_b,
    )
    refuse_misfit(form, operands.ring, model, device)
    form = replace(form, symbol=spell_symbol(form, model))
    rules = (
        *_first_rules(shape, partition, parts, operands.depth, form, model),
        Rule("fused_norm", True, _residency_reason(form, device)),
        *operands.rules,
        gate_rule,
        ring_rule,
        *_wide_rules(shape, form, model),
        Rule("needs_residency", form.needs_residency, _residency_reason(form, device)),
    )
    return TailPlan(form, (*rules, overlap_rule(form, model, device)))


def _unfused(shape: DecodeShape, partition: Rule, parts: Rule, model: Model, device: DeviceFacts) -> TailPlan:
    cluster = 2 if partition.value == 2 else 1
    ring, depth = _ring(shape, cluster, 0, model, device)
    stages, ring_rule = _tail_stages(shape, ring, model.decode.small_min_stages_plain, model)
    form = replace(base_form(shape, cluster, model), num_stages=stages, chunks_per_stage=ring.chunks_per_stage)
    refuse_misfit(form, ring, model, device)
    form = replace(form, symbol=spell_symbol(form, model))
    reason = (
        f"{shape.tiles} tiles exceed {device.sm_count} SMs ({device.resident_pairs} pairs): a grid that waits for its"
        " own counter could not be resident, so the norm is a launch of its own"
    )
    rules = (
        *_first_rules(shape, partition, parts, depth, form, model),
        Rule("fused_norm", False, reason),
        ring_rule,
        Rule("needs_residency", False, "no CTA waits for another outside its cluster"),
    )
    return TailPlan(form, (*rules, overlap_rule(form, model, device)))


def _ring(shape: DecodeShape, cluster: int, extra_bytes: int, model: Model, device: DeviceFacts) -> tuple[Ring, Rule]:
    """The ring beside `extra_bytes`, and the chunks of a stage: two where K divides into such stages and enough fit.

    The bytes that a weight's row has in two chunks lie side by side in memory.
    """
    field, needed = "chunks_per_stage", model.decode.tail_depth2_min_stages
    single = plan_ring(shape, cluster, 1, extra_bytes, model, device)
    ctas = cluster * shape.token_parts
    if not needed or ctas != 2:
        return single, Rule(field, 1, f"{ctas} CTA(s) a tile (needs 2), at least {needed} stages (0: never)")
    if is_short(shape, cluster, model):
        return single, Rule(field, 1, "the ring of a short K is short, and so are its stages")
    # Those that split the tokens add up K as a pair does, half by half: a token gets the same bits from either.
    if shape.k1_ragged_cols or any(chunks % 4 for chunks in shape.segments):
        reason = f"half of {shape.k1_chunks} or of {shape.k2_chunks} chunks is no whole number of stages of two"
        return single, Rule(field, 1, reason)
    double = plan_ring(shape, cluster, 2, extra_bytes, model, device)
    keeps = f"a ring of two-chunk stages keeps {double.num_stages}, at least {needed}"
    if double.num_stages < needed:
        return single, Rule(field, 1, f"{keeps} are needed")
    return double, Rule(field, 2, keeps)


def _first_rules(
    shape: DecodeShape, partition: Rule, parts: Rule, depth: Rule, form: DecodeForm, model: Model
) -> tuple[Rule, ...]:
    return (
        n_pad_rule(shape, model),
        parts,
        partition,
        Rule("block_m", form.block_m, f"{form.tiles} tiles of {form.block_m} rows"),
        grid_rule(form),
        depth,
        alias_rule(form, model),
        split_rule(form, model),
    )


def _residency_reason(form: DecodeForm, device: DeviceFacts) -> str:
    if not form.needs_residency:
        return "each CTA normalises the rows it multiplies: none waits for another"
    if form.cluster_ctas == 2:
        return f"CTAs wait for the norm's counter; {form.tiles} pairs <= {device.resident_pairs} resident pairs"
    return f"CTAs wait for the norm's counter; {form.grid_ctas} CTAs <= {device.sm_count} SMs"


def _resident_limit(down: int, staged: bool, model: Model) -> tuple[int, str]:
    """The largest T whose normalised rows stay in shared memory, and the rung that gave it."""
    rules = model.decode
    if staged:
        return rules.resident_tokens_staged, "rows can be staged"
    if down > rules.staged_max_down_units:
        return rules.resident_tokens_long, f"{down} down units > {rules.staged_max_down_units} hide the norm"
    return rules.resident_tokens_short, f"{down} down units <= {rules.staged_max_down_units}, rows not staged"


def _operands(shape: DecodeShape, cluster: int, model: Model, device: DeviceFacts) -> _Operands:
    rules, down = model.decode, down_units(shape, cluster)
    resident_size, staged_size = resident_bytes(shape, cluster, model), staged_bytes(shape, model)
    possible = shape.partials == 1 and down <= rules.staged_max_down_units
    limit, why = _resident_limit(down, possible, model)
    if shape.token_parts > 1:
        limit, why = 0, "CTAs that split the tokens keep none"
    resident = shape.tokens <= limit
    staged = possible and resident
    staged_why = f"P = {shape.partials} (needs 1), {down} down units (at most {rules.staged_max_down_units})"
    if staged:
        ring = plan_ring(shape, cluster, 1, resident_size + staged_size, model, device)
        if ring.num_stages < rules.staged_min_stages:
            staged_why += f"; but the ring would keep {ring.num_stages} stages, under {rules.staged_min_stages}"
            staged = False
            limit, why = _resident_limit(down, False, model)
            resident = shape.tokens <= limit
    elif possible:
        staged_why += f"; T = {shape.tokens} > {limit} leaves no resident operand to stage for"
    resident_why = f"T = {shape.tokens}, at most {limit}: {why}"
    if resident and not staged:
        ring = plan_ring(shape, cluster, 1, resident_size, model, device)
        if ring.num_stages < rules.resident_min_stages:
            resident_why += f"; but the ring would keep {ring.num_stages} stages, under {rules.resident_min_stages}"
            resident = False
    ring, depth = _ring(shape, cluster, resident_size * resident + staged_size * staged, model, device)
    return _Operands(
        resident,
        staged,
        ring,
        depth,
        (Rule("staged_rows", staged, staged_why), Rule("resident_b", resident, resident_why)),
    )


def _min_stages(operands: _Operands, model: Model) -> int:
    rules = model.decode
    if operands.staged_rows:
        return rules.staged_min_stages
    return rules.resident_min_stages if operands.resident_b else rules.small_min_stages_plain


def _tail_stages(shape: DecodeShape, ring: Ring, floor: int, model: Model) -> tuple[int, Rule]:
    """The ring's depth; few tokens take one stage fewer, but not below `floor`."""
    small = model.decode.small_n_pad
    if shape.n_pad > small:
        return ring.num_stages, Rule("num_stages", ring.num_stages, ring.arithmetic)
    stages = min(ring.num_stages, max(ring.num_stages - 1, floor))
    reason = f"{ring.arithmetic}; n_pad {shape.n_pad} <= {small}: one fewer, not below {floor}"
    return stages, Rule("num_stages", stages, reason)


def _issue_gate(shape: DecodeShape, cluster: int, operands: _Operands, stages: int, model: Model) -> tuple[int, Rule]:
    """Weight stages issued before the rows are loaded; all of them down units of every rank.

    None where a stage has two chunks: K is long then, and a gate gained nothing (H200, 2026-11-30).
    """
    rules, down, chunks = model.decode, down_units(shape, cluster), operands.ring.chunks_per_stage
    if operands.staged_rows or down > rules.staged_max_down_units or chunks == 2:
        reason = (
            f"rows staged: {operands.staged_rows}; {down} down units (a gate needs at most"
            f" {rules.staged_max_down_units}), {chunks} chunk(s) a stage (needs 1)"
        )
        return 0, Rule("issue_gate", 0, reason)
    gate = min(rules.issue_ahead, shape.k2_chunks // cluster, stages)
    reason = f"{down} down units <= {rules.staged_max_down_units} are short: {gate} weight stages go before the rows"
    return gate, Rule("issue_gate", gate, reason)


def _wide_rules(shape: DecodeShape, form: DecodeForm, model: Model) -> tuple[Rule, ...]:
    wide = f"rows staged: {form.staged_rows}; n_pad {shape.n_pad} (wide from {model.decode.staged_wide_n_pad})"
    return (
        Rule("no_prefetch", form.no_prefetch, wide),
        Rule("stagger_units", form.stagger_units, wide),
        Rule("wide_wait", form.wide_wait, f"{wide}; cluster {form.cluster_ctas} (needs 2)"),
    )

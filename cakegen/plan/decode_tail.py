"""Plans the decode tail: the norm in the launch where the grid is resident, or a launch of its own before it.

Imports errors, the model and the rest of `plan`; no torch, no pydantic, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cakegen.model import DeviceFacts
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
    sharing_of,
    split_rule,
    staged_bytes,
    token_parts_rule,
)
from cakegen.plan.records import BLOCK_K, DecodeForm, NormPlace, Rule, Sharing
from cakegen.plan.shape import DecodeShape
from cakegen.rules import DecodeRules


@dataclass(frozen=True)
class TailPlan:
    """The tail's decode form, whether a norm launch goes before it, and why."""

    form: DecodeForm
    rules: tuple[Rule, ...]

    @property
    def separate_norm(self) -> bool:
        """The norm needs a launch of its own."""
        return self.form.norm is NormPlace.APART


@dataclass(frozen=True)
class _Setting:
    """What every choice of one tail depends on beside how its tiles are shared."""

    shape: DecodeShape
    rules: DecodeRules
    device: DeviceFacts
    parts: Rule
    min_stages: int


@dataclass(frozen=True)
class _Operands:
    """Where the fused norm's rows are, and the ring beside them."""

    norm: NormPlace
    ring: Ring
    depth: Rule
    rules: tuple[Rule, ...]


def plan_decode_tail(shape: DecodeShape, rules: DecodeRules, device: DeviceFacts, min_stages: int) -> TailPlan:
    """The tail's launch or launches, by the first rung that the device can hold.

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
    setting = _Setting(shape, rules, device, parts, min_stages)
    sharing, partition = sharing_of(shape, pair, parts)
    if not shape.normed:
        return _unfused(
            setting, sharing, partition, "the block has no norm: a partial, or their sum, is multiplied as it is"
        )
    # 1. The preferred partition, norm fused. 2. Where its grid can't be resident but must: one CTA a tile.
    rungs = [(sharing, partition)]
    if sharing is Sharing.PAIR:
        short = f"{shape.tiles} pairs can't be resident ({device.resident_pairs} can): one CTA a tile"
        rungs.append((Sharing.ALONE, Rule("cluster_ctas", 1, short)))
    for rung in rungs:
        plan = _fused(setting, *rung)
        if not plan.form.needs_residency or is_resident(plan.form, device):
            return plan
    # 3. A norm launch, then a form without the counter.
    reason = (
        f"{shape.tiles} tiles exceed {device.sm_count} SMs ({device.resident_pairs} pairs): a grid that waits for its"
        " own counter could not be resident, so the norm is a launch of its own"
    )
    return _unfused(setting, sharing, pair, reason)


def is_resident(form: DecodeForm, device: DeviceFacts) -> bool:
    """Whether the whole grid of a form runs at once."""
    if form.sharing is Sharing.PAIR:
        return form.tiles <= device.resident_pairs
    return form.grid_ctas <= device.sm_count


def _fused(setting: _Setting, sharing: Sharing, partition: Rule) -> TailPlan:
    shape, rules, device = setting.shape, setting.rules, setting.device
    operands = _operands(setting, sharing)
    stages, ring_rule = _tail_stages(shape, operands.ring, operands.norm, rules)
    gate, gate_rule = _issue_gate(shape, sharing, operands, stages, rules)
    pause, pause_rules = _stagger(shape, sharing, operands.norm, rules)
    form = replace(
        base_form(shape, sharing, rules),
        num_stages=stages,
        chunks_per_stage=operands.ring.chunks_per_stage,
        norm=operands.norm,
        issue_gate=gate,
        stagger_units=pause,
    )
    refuse_misfit(form, operands.ring, device, setting.min_stages)
    return TailPlan(
        form,
        (
            *_first_rules(setting, partition, operands.depth, form),
            Rule("fused_norm", True, _residency_reason(form, device)),
            *operands.rules,
            gate_rule,
            ring_rule,
            *pause_rules,
            Rule("needs_residency", form.needs_residency, _residency_reason(form, device)),
            overlap_rule(form, rules, device),
        ),
    )


def _unfused(setting: _Setting, sharing: Sharing, partition: Rule, reason: str) -> TailPlan:
    shape, rules, device = setting.shape, setting.rules, setting.device
    ring, depth = _ring(setting, sharing, 0)
    stages, ring_rule = _tail_stages(shape, ring, NormPlace.APART, rules)
    form = replace(base_form(shape, sharing, rules), num_stages=stages, chunks_per_stage=ring.chunks_per_stage)
    refuse_misfit(form, ring, device, setting.min_stages)
    return TailPlan(
        form,
        (
            *_first_rules(setting, partition, depth, form),
            Rule("fused_norm", False, reason),
            ring_rule,
            Rule("needs_residency", False, "no CTA waits for another outside its cluster"),
            overlap_rule(form, rules, device),
        ),
    )


def _ring(setting: _Setting, sharing: Sharing, extra_bytes: int) -> tuple[Ring, Rule]:
    """The ring beside `extra_bytes`, and the chunks of a stage: two where K divides into such stages and enough fit.

    The bytes that a weight's row has in two chunks lie side by side in memory.
    """
    shape, rules, device = setting.shape, setting.rules, setting.device
    field, needed = "chunks_per_stage", rules.tail.depth2_min_stages
    single = plan_ring(shape, sharing, 1, extra_bytes, rules, device)
    if needed is None:
        return single, Rule(field, 1, "a stage of a tail is one chunk")
    if sharing is Sharing.ALONE:
        return single, Rule(field, 1, f"1 CTA a tile (needs 2), at least {needed} stages")
    if is_short(shape, sharing, rules):
        return single, Rule(field, 1, "the ring of a short K is short, and so are its stages")
    # Those that split the tokens add up K as a pair does, half by half: a token gets the same bits from either.
    if shape.k1_cols % BLOCK_K or any(chunks % 4 for chunks in shape.segments):
        reason = f"half of {shape.k1_chunks} or of {shape.k2_chunks} chunks is no whole number of stages of two"
        return single, Rule(field, 1, reason)
    double = plan_ring(shape, sharing, 2, extra_bytes, rules, device)
    keeps = f"a ring of two-chunk stages keeps {double.num_stages}, at least {needed}"
    if double.num_stages < needed:
        return single, Rule(field, 1, f"{keeps} are needed")
    return double, Rule(field, 2, keeps)


def _first_rules(setting: _Setting, partition: Rule, depth: Rule, form: DecodeForm) -> tuple[Rule, ...]:
    return (
        n_pad_rule(setting.shape, setting.rules),
        setting.parts,
        partition,
        Rule("block_m", form.block_m, f"{form.tiles} tiles of {form.block_m} rows"),
        grid_rule(form),
        depth,
        alias_rule(form, setting.rules),
        split_rule(form, setting.rules),
    )


def _residency_reason(form: DecodeForm, device: DeviceFacts) -> str:
    if not form.needs_residency:
        return "each CTA normalises the rows it multiplies: none waits for another"
    if form.sharing is Sharing.PAIR:
        return f"CTAs wait for the norm's counter; {form.tiles} pairs <= {device.resident_pairs} resident pairs"
    return f"CTAs wait for the norm's counter; {form.grid_ctas} CTAs <= {device.sm_count} SMs"


def _resident_limit(down: int, can_stage: bool, rules: DecodeRules) -> tuple[int, str]:
    """The largest T whose normalised rows stay in shared memory, and the rung that gave it."""
    tail = rules.tail
    if can_stage and tail.staged is not None:
        return tail.staged.max_tokens, "rows can be staged"
    if down > tail.short_down_units:
        return tail.resident_tokens_long, f"{down} down units > {tail.short_down_units} hide the norm"
    return tail.resident_tokens_short, f"{down} down units <= {tail.short_down_units}, rows not staged"


def _operands(setting: _Setting, sharing: Sharing) -> _Operands:
    """Where the rows are normalised: staged where they can be, else kept where few, else through memory."""
    shape, rules, device = setting.shape, setting.rules, setting.device
    tail, down = rules.tail, down_units(shape, sharing)
    resident_size, staged_size = resident_bytes(shape, sharing), staged_bytes(shape)
    can_stage = tail.staged is not None and shape.partials == 1 and down <= tail.short_down_units
    limit, why = _resident_limit(down, can_stage, rules)
    if sharing is Sharing.TOKENS:
        limit, why = 0, "CTAs that split the tokens keep none"
    resident = shape.tokens <= limit
    staged = can_stage and resident
    staged_why = f"P = {shape.partials} (needs 1), {down} down units (at most {tail.short_down_units})"
    if tail.staged is None:
        staged_why = "no tail stages rows"
    elif staged:
        ring = plan_ring(shape, sharing, 1, resident_size + staged_size, rules, device)
        if ring.num_stages < tail.staged.min_stages:
            staged_why += f"; but the ring would keep {ring.num_stages} stages, under {tail.staged.min_stages}"
            staged = False
            limit, why = _resident_limit(down, False, rules)
            resident = shape.tokens <= limit
    elif can_stage:
        staged_why += f"; T = {shape.tokens} > {limit} leaves no resident operand to stage for"
    resident_why = f"T = {shape.tokens}, at most {limit}: {why}"
    if resident and not staged:
        ring = plan_ring(shape, sharing, 1, resident_size, rules, device)
        if ring.num_stages < tail.resident_min_stages:
            resident_why += f"; but the ring would keep {ring.num_stages} stages, under {tail.resident_min_stages}"
            resident = False
    ring, depth = _ring(setting, sharing, resident_size * resident + staged_size * staged)
    kept = NormPlace.RESIDENT if resident else NormPlace.MEMORY
    place = NormPlace.STAGED if staged else kept
    return _Operands(
        place, ring, depth, (Rule("staged_rows", staged, staged_why), Rule("resident_b", resident, resident_why))
    )


def _tail_stages(shape: DecodeShape, ring: Ring, norm: NormPlace, rules: DecodeRules) -> tuple[int, Rule]:
    """The ring's depth; few tokens take one stage fewer, but not below what their rows need beside them."""
    small, tail = rules.tail.small, rules.tail
    if small is None or shape.n_pad > small.max_n_pad:
        return ring.num_stages, Rule("num_stages", ring.num_stages, ring.arithmetic)
    floor = small.min_stages
    if norm is NormPlace.RESIDENT:
        floor = tail.resident_min_stages
    elif norm is NormPlace.STAGED and tail.staged is not None:
        floor = tail.staged.min_stages
    stages = min(ring.num_stages, max(ring.num_stages - 1, floor))
    reason = f"{ring.arithmetic}; n_pad {shape.n_pad} <= {small.max_n_pad}: one fewer, not below {floor}"
    return stages, Rule("num_stages", stages, reason)


def _issue_gate(
    shape: DecodeShape, sharing: Sharing, operands: _Operands, stages: int, rules: DecodeRules
) -> tuple[int, Rule]:
    """Weight stages issued before the rows are loaded; all of them down units of every rank.

    None where a stage has two chunks: K is long then, and a gate gained nothing (H200, 2026-11-30).
    """
    down, chunks, few = down_units(shape, sharing), operands.ring.chunks_per_stage, rules.tail.short_down_units
    staged = operands.norm is NormPlace.STAGED
    if staged or down > few or chunks == 2:
        reason = (
            f"rows staged: {staged}; {down} down units (a gate needs at most {few}), {chunks} chunk(s) a stage"
            " (needs 1)"
        )
        return 0, Rule("issue_gate", 0, reason)
    cluster = 2 if sharing is Sharing.PAIR else 1
    gate = min(rules.tail.weights_ahead, shape.k2_chunks // cluster, stages)
    reason = f"{down} down units <= {few} are short: {gate} weight stages go before the rows"
    return gate, Rule("issue_gate", gate, reason)


def _stagger(shape: DecodeShape, sharing: Sharing, norm: NormPlace, rules: DecodeRules) -> tuple[int, tuple[Rule, ...]]:
    """The unit before which the first fill pauses beside staged rows (0: never), and what follows from it."""
    staggered = rules.tail.staged.staggered if rules.tail.staged is not None else None
    pause = 0
    if staggered is not None and norm is NormPlace.STAGED and shape.n_pad >= staggered.from_n_pad:
        pause = staggered.pause_unit
    least = "never" if staggered is None else f"from {staggered.from_n_pad}"
    wide = f"rows staged: {norm is NormPlace.STAGED}; n_pad {shape.n_pad} (wide {least})"
    cluster = 2 if sharing is Sharing.PAIR else 1
    return pause, (
        Rule("no_prefetch", pause > 0, wide),
        Rule("stagger_units", pause, wide),
        Rule("wide_wait", pause > 0 and cluster == 2, f"{wide}; cluster {cluster} (needs 2)"),
    )

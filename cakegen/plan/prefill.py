"""Plans the SM100 prefill launches (T above the decode maximum): persistent two-CTA GEMMs, and the tail's norm.

Imports errors, arch, the model and the rest of `plan`; no torch, no pydantic, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from cakegen.arch import architecture
from cakegen.model import DeviceFacts, Model
from cakegen.plan.gemm import Launches, gemm_parameters, pair_rows_of, parameter_rules, refuse_no_pair
from cakegen.plan.norm import norm_grid_ctas, norm_launch, sum_launches, sum_rule
from cakegen.plan.records import BLOCK_K, GEMM_BLOCK_M, GemmForm, Launch, Rule
from cakegen.plan.shape import exact, latent_columns, shared_columns
from cakegen.plan.stream_k import Split, plan_halves, plan_stream_k
from cakegen.rules import BlackwellPrefillRules, BlackwellRules


def plan_prefill(
    model: Model, rules: BlackwellRules, stage: str, tp: int, tokens: int, partials: int, device: DeviceFacts
) -> Launches:
    """The launches of one stage.

    Raises
    ------
    PlanError
        The device holds no pair, or a dimension does not divide into tiles.
    """
    refuse_no_pair(model, stage, tokens, device)
    if stage == "front":
        return _plan_front(model, rules, tp, tokens, device)
    return _plan_tail(model, rules, tp, tokens, partials, device)


def _rows_reason(tokens: int) -> str:
    return f"ceil({tokens} / {GEMM_BLOCK_M}), rounded up to even"


def _grid_rule(split: Split) -> Rule:
    return Rule("grid_ctas", 2 * split.num_items, f"{split.num_items} items * 2 CTAs")


def _plan_front(model: Model, of_family: BlackwellRules, tp: int, tokens: int, device: DeviceFacts) -> Launches:
    rules, dims = of_family.prefill, model.dims
    where = f"prefill front: TP {tp}"
    i_local = exact(dims.shared_intermediate, tp, where, "shared_intermediate", "TP degree")
    router_tiles = -(-dims.experts // rules.block_n)
    latent_tiles = -(-dims.latent // rules.block_n)
    shared_tiles = -(-i_local // shared_columns(dims, rules.block_n))
    num_k = exact(dims.hidden, BLOCK_K, where, "hidden", "columns of a K block")
    n_tiles, pair_rows = router_tiles + latent_tiles + shared_tiles, pair_rows_of(tokens)
    split = plan_halves(pair_rows * n_tiles, num_k, device.resident_pairs, rules.halves)
    evict, evict_rule = _evict_first(pair_rows, rules)
    form = GemmForm(
        stage="front",
        tp=tp,
        block_m=GEMM_BLOCK_M,
        block_n=rules.block_n,
        num_k=num_k,
        num_stages=rules.num_stages,
        evict_first=evict,
        fused_norm=False,
        staged_store=False,
        k1_ragged_cols=0,
        constants=(("I_LOCAL", i_local), ("N_TILES", n_tiles), ("S_TILES", shared_tiles)),
    )
    key = f"front:i{i_local}{'e1' if evict else ''}{architecture(device.arch).key_suffix}"
    launch = Launch(key, (2 * split.num_items, 1, 1), gemm_parameters(2 * pair_rows, split), form)
    tiles = f"{router_tiles} router + {latent_tiles} latent + {shared_tiles} shared tiles"
    why = (
        Rule("n_tiles", n_tiles, f"{tiles} of {rules.block_n} columns"),
        *parameter_rules(2 * pair_rows, _rows_reason(tokens), split),
        _grid_rule(split),
        evict_rule,
    )
    return (launch,), why


def _evict_first(pair_rows: int, rules: BlackwellPrefillRules) -> tuple[bool, Rule]:
    most = rules.evict_first_pair_rows
    evict = most is not None and pair_rows <= most
    reason = "no front streams its weights evict-first" if most is None else f"{pair_rows} pair rows (at most {most})"
    return evict, Rule("evict_first", evict, reason)


@dataclass(frozen=True)
class _Instance:
    """A tail GEMM's tile width, ring and final store."""

    block_n: int
    num_stages: int
    staged_store: bool
    reason: str


def _tail_instance(rules: BlackwellPrefillRules, tp: int, tokens: int) -> _Instance:
    short, narrow = rules.short_ring, rules.narrow
    # few rows against the whole shared expert: one stage makes room for the staged store
    if short is not None and tp == short.tp and tokens <= short.max_tokens:
        return _Instance(rules.block_n, short.num_stages, True, f"TP {tp} and T = {tokens} <= {short.max_tokens}")
    # the one row count at which narrow tiles fill the waves better
    if narrow is not None and tp >= narrow.min_tp and tokens == narrow.tokens:
        reason = f"TP {tp} >= {narrow.min_tp} and T = {tokens}"
        return _Instance(narrow.block_n, narrow.num_stages, False, reason)
    return _Instance(rules.block_n, rules.num_stages, True, f"no narrower rule holds for TP {tp}, T = {tokens}")


def _plan_tail(
    model: Model, of_family: BlackwellRules, tp: int, tokens: int, partials: int, device: DeviceFacts
) -> Launches:
    rules, dims = of_family.prefill, model.dims
    where = f"prefill tail: TP {tp}"
    instance = _tail_instance(rules, tp, tokens)
    n_tiles = -(-dims.hidden // instance.block_n)
    latent_slice = latent_columns(dims, tp, where)
    up = -(-latent_slice // BLOCK_K)
    i_local = exact(dims.shared_intermediate, tp, where, "shared_intermediate", "TP degree")
    down = exact(i_local, BLOCK_K, where, "shared_intermediate / TP", "columns of a K block")
    pair_rows = pair_rows_of(tokens)
    reuse = min(rules.raster_m_tiles // 2, pair_rows)
    split = plan_stream_k(pair_rows * n_tiles, up + down, reuse, device.resident_pairs, rules.stream_k)
    one_wave = split.num_items <= device.resident_pairs
    if dims.normed:
        fused, fused_rule = _fused_norm(split, one_wave, down, tokens, rules, device)
    else:
        fused, fused_rule = False, sum_rule(partials)
    form = GemmForm(
        stage="tail",
        tp=tp,
        block_m=GEMM_BLOCK_M,
        block_n=instance.block_n,
        num_k=up + down,
        num_stages=instance.num_stages,
        evict_first=one_wave,
        fused_norm=fused,
        staged_store=instance.staged_store,
        k1_ragged_cols=latent_slice % BLOCK_K,
        constants=(("K1_ITERS", up), ("K2_ITERS", down), ("NUM_K_ITERS", up + down)),
        normed=dims.normed,
    )
    key = spell_tail_key(form, rules) + architecture(device.arch).key_suffix
    gemm = Launch(key, (2 * split.num_items, 1, 1), gemm_parameters(2 * pair_rows, split), form)
    wave = f"{split.num_items} items against {device.resident_pairs} resident pairs"
    why = (
        *(Rule(name, getattr(form, name), instance.reason) for name in ("block_n", "num_stages", "staged_store")),
        *parameter_rules(2 * pair_rows, _rows_reason(tokens), split),
        _grid_rule(split),
        Rule("evict_first", one_wave, f"{wave}: one wave reads each weight once"),
        fused_rule,
    )
    rows_per_cta = of_family.norm_rows_per_cta
    if not dims.normed:
        return (*sum_launches(rows_per_cta, tokens, partials, device), gemm), why
    if fused:
        return (gemm,), why
    early, trigger_rule = _norm_trigger(gemm.grid_ctas[0], norm_grid_ctas(rows_per_cta, tokens), device)
    return (norm_launch(rows_per_cta, tokens, early, device), gemm), (*why, trigger_rule)


def _fused_norm(
    split: Split, one_wave: bool, down: int, tokens: int, rules: BlackwellPrefillRules, device: DeviceFacts
) -> tuple[bool, Rule]:
    norm, grid = rules.fused_norm, 2 * split.num_items
    if norm is None:
        return False, Rule("fused_norm", False, "no tail fuses its norm")
    rows = norm.rows_per_cta * grid
    fused = one_wave and rows >= tokens and down >= norm.min_down_chunks
    reason = (
        f"{split.num_items} items against {device.resident_pairs} resident pairs (needs one wave), {grid} CTAs take"
        f" {rows} rows (needs {tokens}), {down} down blocks (needs {norm.min_down_chunks} to hide the norm)"
    )
    return fused, Rule("fused_norm", fused, reason)


def _norm_trigger(gemm_ctas: int, norm_ctas: int, device: DeviceFacts) -> tuple[bool, Rule]:
    sms = device.sm_count
    early = gemm_ctas > sms or gemm_ctas + norm_ctas <= sms
    reason = f"GEMM grid {gemm_ctas}, norm grid {norm_ctas}, {sms} SMs: early when the first exceeds them or both fit"
    return early, Rule("norm.early_trigger", early, reason)


def spell_tail_key(form: GemmForm, rules: BlackwellPrefillRules) -> str:
    """The logical key of a tail GEMM without the architecture's suffix."""
    parts = (
        (f"s{form.num_stages}", form.num_stages != rules.num_stages),
        (f"n{form.block_n}", form.block_n != rules.block_n),
        ("t1", form.staged_store),
    )
    head = f"tail_gemm:tp{form.tp}e{int(form.evict_first)}f{int(form.fused_norm)}"
    return head + "".join(text for text, is_set in parts if is_set)

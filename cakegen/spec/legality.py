"""What must fit together in a model: shapes, tensor-map limits, and a plan for every request. Imports model and plan.

Each refusal names the field, shows the arithmetic, and says the way out; `parse_export` puts the file in front.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from cakegen.arch import INT32_MAX
from cakegen.errors import PlanError, SpecError
from cakegen.model import DeviceFacts, Model, Target
from cakegen.plan import Family, family_of, plan_route
from cakegen.plan.records import GEMM_BLOCK_M
from cakegen.plan.shape import BLOCK_M, shared_columns
from cakegen.plan.smem import BF16_BYTES
from cakegen.rules import HopperTile

# CUDA driver API, cuTensorMapEncodeTiled: global strides are multiples of 16 bytes.
TMA_ALIGN_BYTES = 16
WARPGROUP_THREADS = 128
# fp32 accumulators of an MMA thread: half of its 255 registers, so that addresses and a cut tile's sums fit beside them
MAX_SUMS = 128


def check_model(model: Model) -> None:
    """Refuse a model that can't be addressed, tiled or planned on each of its targets.

    Raises
    ------
    SpecError
        All that is wrong, a line each. What can only be asked of what is right so far, such as a plan, is asked last.
    """
    for faults in (_target_faults, _shape_faults, _plan_faults):
        found = list(dict.fromkeys(faults(model)))
        if found:
            raise SpecError("\n".join(found))


def _shape_faults(model: Model) -> Iterator[str]:
    for family in dict.fromkeys(family_of(target.arch) for target in model.targets):
        yield from _decode_faults(model, family)
        yield from _gemm_tile_faults(family.rules_name, family.tiles(model))
    yield from _offset_faults(model)
    yield from _tile_faults(model)
    for tp in dict.fromkeys(tp for target in model.targets for tp in target.tp_degrees):
        yield from _slice_faults(model, tp)


def _target_faults(model: Model) -> Iterator[str]:
    if not model.targets:
        yield "targets: none declared; add a [[targets]] section with an arch and its tp_degrees"
    yield from _rising_faults("targets: arch", sorted(target.arch for target in model.targets))
    for target in model.targets:
        yield from _rising_faults(f"targets: {target.arch}: tp_degrees", target.tp_degrees)
        yield from _rising_faults(f"targets: {target.arch}: sm_counts", target.sm_counts)


def _rising_faults(field: str, values: Sequence[int] | Sequence[str]) -> Iterator[str]:
    for before, after in itertools.pairwise(values):
        if not before < after:  # type: ignore[operator]  # both are of one kind
            yield (f"{field}: {after} follows {before}; list each once, in rising order")


def _decode_faults(model: Model, family: Family) -> Iterator[str]:
    rules, where = family.decode(model), f"{family.rules_name}.decode"
    for field, why in family.refused_rules(rules):
        yield (f"{where}.{field}: {why}; leave it out")
    yield from _rising_faults(f"{where}.n_pads", rules.n_pads)
    for n_pad in rules.n_pads:
        if n_pad not in family.token_tiles:
            yield (
                f"{where}.n_pads: {n_pad} is none of {list(family.token_tiles)}, the token tiles that kernels are"
                f" written for: {family.why_token_tiles}. Use one of those"
            )
    if rules.max_cta_tokens not in rules.n_pads or rules.max_cta_tokens > family.max_cta_tokens:
        yield (
            f"{where}.max_cta_tokens = {rules.max_cta_tokens} is none of {where}.n_pads = {list(rules.n_pads)} up to"
            f" {family.max_cta_tokens}: up to it requests are decode, and a CTA multiplies a whole tile. Use the widest"
            " tile that a CTA can have"
        )
    if model.max_tokens < rules.max_tokens:
        yield (
            f"requests.max_tokens = {model.max_tokens} is below the widest of {where}.n_pads = {list(rules.n_pads)}; "
            "raise the first or drop the token tile"
        )


def _offset_faults(model: Model) -> Iterator[str]:
    dims = model.dims
    least_tp = min(tp for target in model.targets for tp in target.tp_degrees)
    # the row operands of both stages: x and out; latent, routed and y; logits; shared_act
    widest = max(dims.hidden, dims.latent, dims.experts, dims.i_local(least_tp))
    if model.max_tokens * widest > INT32_MAX:
        yield (
            f"requests.max_tokens: {model.max_tokens} tokens * {widest} columns = {model.max_tokens * widest}; "
            f"kernels take offsets within one matrix as int32, up to {INT32_MAX}. Lower max_tokens"
        )


def _tile_faults(model: Model) -> Iterator[str]:
    dims = model.dims
    for name, rows in (("experts", dims.experts), ("latent", dims.latent), ("hidden", dims.hidden)):
        if rows % BLOCK_M:
            yield (
                f"model.{name} = {rows} is not a multiple of {BLOCK_M} ({rows} = {rows // BLOCK_M} * {BLOCK_M} + "
                f"{rows % BLOCK_M}), the weight rows of a tile: they would not fill their last one. Use a multiple,"
                f" such as {(rows // BLOCK_M + 1) * BLOCK_M}"
            )


def _gemm_tile_faults(family: str, tiles: Sequence[HopperTile]) -> Iterator[str]:
    """What a table of prefill tiles must keep beside each field's bounds; the planner checks the rings."""
    seen: dict[tuple[int, int], int] = {}
    for number, tile in enumerate(tiles):
        where = f"{family}.prefill.tiles.{number}"
        if number == 0 and tile.iter_percent != 100:
            yield (
                f"{where}.iter_percent = {tile.iter_percent}: iterations cost percents of the first tile's;"
                " set it to 100, and the others' in proportion"
            )
        sums = tile.block_n * GEMM_BLOCK_M // (tile.tile_groups * WARPGROUP_THREADS)
        if sums > MAX_SUMS:
            yield (
                f"{where}.block_n = {tile.block_n}: a warpgroup's {GEMM_BLOCK_M} / {tile.tile_groups} rows *"
                f" {tile.block_n} columns / {WARPGROUP_THREADS} threads = {sums} sums a thread; registers hold"
                f" {MAX_SUMS}. Set it to {tile.block_n * MAX_SUMS // sums} at most, or tile_groups to 2"
            )
        earlier = seen.setdefault((tile.block_n, tile.tile_groups), number)
        if earlier != number:
            yield (
                f"{where}: tiles of {tile.block_n} columns with tile_groups = {tile.tile_groups} are declared twice,"
                f" first in {family}.prefill.tiles.{earlier}; keep one"
            )


def _slice_faults(model: Model, tp: int) -> Iterator[str]:
    """One rank's share of the latent and of the shared expert: whole, tiled, and addressable by a tensor map."""
    dims = model.dims
    latent = (("latent", dims.latent),) if dims.shares_latent else ()
    for name, whole in (*latent, ("shared_intermediate", dims.shared_intermediate)):
        if whole % tp:
            yield (
                f"targets: TP {tp} does not divide model.{name} = {whole} "
                f"({whole} = {whole // tp} * {tp} + {whole % tp}); drop the degree"
            )
            continue
        share_bytes = whole // tp * BF16_BYTES
        if share_bytes % TMA_ALIGN_BYTES:
            yield (
                f"targets: TP {tp} leaves {whole // tp} columns of model.{name} = {share_bytes} bytes a row; a tensor "
                f"map needs rows that are multiples of {TMA_ALIGN_BYTES} bytes ({TMA_ALIGN_BYTES // BF16_BYTES} "
                "columns). Drop the degree"
            )
    i_local, rows = dims.i_local(tp), shared_columns(dims, BLOCK_M)
    if dims.shared_intermediate % tp == 0 and i_local % rows:
        what = "gate rows and their up rows" if dims.rows_stage.gated else "rows"
        yield (
            f"targets: TP {tp} leaves {i_local} shared-expert columns a rank, which is not a multiple of {rows} "
            f"({i_local} = {i_local // rows} * {rows} + {i_local % rows}; a shared tile is {rows} {what}); drop the "
            "degree"
        )


def _plan_faults(model: Model) -> Iterator[str]:
    """Plan every token tile, and some prefill sizes, for each target: what can't be planned can't be declared.

    A refusal that many requests meet is told once, with the first of them.
    """
    told: set[str] = set()
    for target in model.targets:
        for tp, sm_count, tokens, partials in _requests(model, target):
            device = DeviceFacts.nominal(target.arch, sm_count)
            for stage, count in (("front", 1), ("tail", partials)):
                try:
                    plan_route(model, stage=stage, tp=tp, tokens=tokens, partials=count, device=device)
                except PlanError as error:
                    if str(error) in told:
                        continue
                    told.add(str(error))
                    where = f"{stage}, TP {tp}, {tokens} tokens, {count} partials, {target.arch} with {sm_count} SMs"
                    yield f"{where}: {error}"


def _requests(model: Model, target: Target) -> Iterator[tuple[int, int, int, int]]:
    rules = family_of(target.arch).decode(model)
    edges = {1, *rules.token_edges} | {n_pad + 1 for n_pad in rules.n_pads}
    tokens = {t for t in edges if 1 <= t <= rules.max_tokens}
    size = rules.max_tokens + 1
    while size < model.max_tokens:
        tokens.add(size)
        size *= 2
    tokens.add(model.max_tokens)
    for tp in target.tp_degrees:
        for sm_count in target.sm_counts:
            for count in sorted(tokens):
                for partials in sorted({1, model.max_partials}):
                    yield tp, sm_count, count, partials

"""Plans the Hopper prefill launches (T above the decode maximum): persistent GEMMs of CTA pairs, and the tail's norm.

A pair computes a tile of 2 * block_m tokens by block_n weight rows; each CTA keeps its own tokens and loads half of
the weights for both. The last of an uneven number of row tiles has no second: there a pair's tile is block_m tokens by
2 * block_n weight rows, each CTA with its own weights. The grid is what is resident, and cluster c runs items c,
c + clusters, …: a static schedule, in which no CTA waits for one of another cluster. Tiles need not divide anything: a
ragged last row tile loads the last block_m rows there are and stores its own, and columns past the end are masked. Only
K must come in whole iterations, except for the latent slice, whose tensor map fills with zeros.

Imports errors, arch, the model and the rest of `plan`; no torch, no pydantic, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cakegen.arch import INT32_MAX, architecture
from cakegen.errors import PlanError
from cakegen.model import DeviceFacts, Model
from cakegen.plan.gemm import Launches, gemm_parameters, parameter_rules, refuse_no_pair
from cakegen.plan.norm import norm_launch, sum_launches, sum_rule
from cakegen.plan.norm_sm90 import (
    can_fuse_norm,
    first_rows_rule,
    fused_norm_rule,
    norm_cost_iters,
    norm_first_rows,
    trigger_rule,
)
from cakegen.plan.records import BLOCK_K, GEMM_BLOCK_M, GemmForm, Launch, Rule
from cakegen.plan.shape import exact, latent_columns, shared_columns
from cakegen.plan.smem import BF16_BYTES
from cakegen.plan.stream_k import Cut, hopper_costs, plan_waves
from cakegen.rules import HopperPrefillRules, HopperRules, HopperTile


def plan_prefill_sm90(
    model: Model, rules: HopperRules, stage: str, tp: int, tokens: int, partials: int, device: DeviceFacts
) -> Launches:
    """The launches of one stage.

    Raises
    ------
    PlanError
        The device holds no pair or not a ring, the model has no tile, a dimension does not divide into K iterations,
        or a coordinate would not fit 32 bits.
    """
    refuse_no_pair(model, stage, tokens, device)
    if not rules.prefill.tiles:
        raise PlanError(
            f"{model.name} {stage}: T = {tokens}: hopper.prefill.tiles is empty, and a plan takes one of its tiles. No"
            " export declares that, so the registry is damaged; export again."
        )
    if stage == "front":
        return _plan_front(model, rules, tp, tokens, device)
    return _plan_tail(model, rules, tp, tokens, partials, device)


def pair_tiles_of(m_tiles: int, n_tiles: int) -> int:
    """Tiles of a launch, a pair's each: two row tiles by a column of tiles, or the lone last one by two columns."""
    return m_tiles // 2 * n_tiles + m_tiles % 2 * -(-n_tiles // 2)


def _spell_pair_tiles(m_tiles: int, n_tiles: int) -> str:
    whole = f"{m_tiles // 2} pair rows * {n_tiles} columns of tiles"
    return f"{whole} + ceil({n_tiles} / 2) of the lone row tile" if m_tiles % 2 else whole


def _m_tiles_of(tokens: int) -> int:
    return -(-tokens // GEMM_BLOCK_M)


def _plan_front(model: Model, of_family: HopperRules, tp: int, tokens: int, device: DeviceFacts) -> Launches:
    rules, dims = of_family.prefill, model.dims
    where = f"prefill front: TP {tp}"
    i_local = exact(dims.shared_intermediate, tp, where, "shared_intermediate", "TP degree")
    num_k = exact(dims.hidden, BLOCK_K, where, "hidden", "columns of a K iteration")

    def columns(block_n: int) -> tuple[int, int, int]:
        return -(-dims.experts // block_n), -(-dims.latent // block_n), -(-i_local // shared_columns(dims, block_n))

    tile, cut, tile_rule = _choose_tile(
        lambda block_n: sum(columns(block_n)), lambda _: 0, num_k, tokens, rules, device
    )
    router_tiles, latent_tiles, shared_tiles = columns(tile.block_n)
    n_tiles = router_tiles + latent_tiles + shared_tiles
    form = _form(
        "front",
        tp,
        tile,
        num_k=num_k,
        k1_ragged_cols=0,
        fused_norm=False,
        constants=(("I_LOCAL", i_local), ("N_TILES", n_tiles), ("S_TILES", shared_tiles)),
    )
    key = f"front:i{i_local}{_spell_tile(tile, rules)}{architecture(device.arch).key_suffix}"
    launch, why = _gemm_launch(key, form, n_tiles, cut, tokens, model, rules, device)
    tiles = f"{router_tiles} router + {latent_tiles} latent + {shared_tiles} shared tiles of {tile.block_n} columns"
    iterations = Rule("num_k", form.num_k, f"{dims.hidden} hidden columns / {BLOCK_K}")
    return (launch,), (tile_rule, Rule("n_tiles", n_tiles, tiles), iterations, *why)


def _plan_tail(
    model: Model, of_family: HopperRules, tp: int, tokens: int, partials: int, device: DeviceFacts
) -> Launches:
    rules, dims = of_family.prefill, model.dims
    where = f"prefill tail: TP {tp}"
    latent_slice = latent_columns(dims, tp, where)
    i_local = exact(dims.shared_intermediate, tp, where, "shared_intermediate", "TP degree")
    whole, rest = divmod(latent_slice, BLOCK_K)
    up = whole + (rest > 0)
    down = exact(i_local, BLOCK_K, where, "shared_intermediate / TP", "columns of a K iteration")

    def columns(block_n: int) -> int:
        return -(-dims.hidden // block_n)

    def norm_iters(tile: HopperTile) -> int:
        return norm_cost_iters(tile, down, tokens, partials, rules) if dims.normed else 0

    tile, cut, tile_rule = _choose_tile(columns, norm_iters, up + down, tokens, rules, device)
    fused = dims.normed and can_fuse_norm(tile, tokens, partials)
    n_tiles = columns(tile.block_n)
    form = _form(
        "tail",
        tp,
        tile,
        num_k=up + down,
        k1_ragged_cols=rest,
        fused_norm=fused,
        normed=dims.normed,
        constants=(("K1_ITERS", up), ("K2_ITERS", down), ("NUM_K_ITERS", up + down)),
    )
    ragged = f"kt{form.k1_ragged_cols}" if form.k1_ragged_cols else ""
    norm = "f1" if fused else ""
    key = f"tail_gemm:tp{tp}{norm}{ragged}{_spell_tile(tile, rules)}{architecture(device.arch).key_suffix}"
    launch, why = _gemm_launch(key, form, n_tiles, cut, tokens, model, rules, device)
    slice_rule = f"{latent_slice} latent columns a rank = {whole} * {BLOCK_K} + {rest}"
    tiles = Rule("n_tiles", n_tiles, f"ceil({dims.hidden} hidden columns / {tile.block_n})")
    iterations = Rule("num_k", up + down, f"{down} shared-down iterations, then {up} of the latent slice")
    why = (
        tile_rule,
        tiles,
        iterations,
        Rule("k1_ragged_cols", form.k1_ragged_cols, slice_rule),
        fused_norm_rule(tile, tokens, partials) if dims.normed else sum_rule(partials),
        *why,
    )
    if not dims.normed:
        return (*sum_launches(of_family.norm_rows_per_cta, tokens, partials, device), launch), why
    if not fused:
        return (norm_launch(of_family.norm_rows_per_cta, tokens, True, device), launch), (*why, trigger_rule())
    first = first_rows_rule(down, tokens, rules)
    launch = replace(launch, parameters=((first.field, norm_first_rows(down, tokens, rules)), *launch.parameters))
    return (launch,), (*why, first)


def _choose_tile(
    n_tiles_of: Callable[[int], int],
    norm_iters: Callable[[HopperTile], int],
    num_k: int,
    tokens: int,
    rules: HopperPrefillRules,
    device: DeviceFacts,
) -> tuple[HopperTile, Cut, Rule]:
    """The tile whose plan costs least, with its cut; the first of those that cost the same.

    Parameters
    ----------
    n_tiles_of
        Columns of tiles by a tile's width.
    norm_iters
        What the norm adds beside a GEMM of a tile, in iterations of the first tile.
    """
    m_tiles = _m_tiles_of(tokens)
    choices = []
    for tile in rules.tiles:
        tiles = pair_tiles_of(m_tiles, n_tiles_of(tile.block_n))
        choices.append((tile, plan_waves(tiles, num_k, device.resident_pairs, hopper_costs(rules.cut, tile))))
    tile, cut = min(choices, key=lambda choice: choice[0].iter_percent * choice[1].cost + 100 * norm_iters(choice[0]))
    costs = ", ".join(
        f"{cut.cost} * {tile.iter_percent}{_spell_norm(norm_iters(tile))} with {tile.block_n}" for tile, cut in choices
    )
    return tile, cut, Rule("block_n", tile.block_n, f"cheapest in iterations * percent: {costs} columns")


def _spell_norm(iters: int) -> str:
    return f" + {iters} * 100 for the norm" if iters else ""


def _spell_tile(tile: HopperTile, rules: HopperPrefillRules) -> str:
    """What a key says of a tile that is not the first."""
    if tile == rules.tiles[0]:
        return ""
    turns = "p1" if tile.tile_groups == 1 else ""
    return f"s{tile.num_stages}n{tile.block_n}{turns}"


def _form(
    stage: str,
    tp: int,
    tile: HopperTile,
    *,
    num_k: int,
    k1_ragged_cols: int,
    fused_norm: bool,
    normed: bool = True,
    constants: tuple[tuple[str, int], ...],
) -> GemmForm:
    return GemmForm(
        stage=stage,
        tp=tp,
        block_m=GEMM_BLOCK_M,
        block_n=tile.block_n,
        num_k=num_k,
        num_stages=tile.num_stages,
        evict_first=False,
        fused_norm=fused_norm,
        normed=normed,
        staged_store=True,
        k1_ragged_cols=k1_ragged_cols,
        constants=constants,
        tile_groups=tile.tile_groups,
    )


def _gemm_launch(
    key: str,
    form: GemmForm,
    n_tiles: int,
    cut: Cut,
    tokens: int,
    model: Model,
    rules: HopperPrefillRules,
    device: DeviceFacts,
) -> tuple[Launch, tuple[Rule, ...]]:
    """The persistent GEMM over `n_tiles` columns of tiles, and why its parameters are what they are."""
    resident = device.resident_pairs
    m_tiles = _m_tiles_of(tokens)
    where = f"{model.name} prefill {form.stage}: TP {form.tp}, T = {tokens} on {device.arch}"
    _refuse_wide(where, m_tiles, n_tiles)
    ring = _ring_rules(where, rules, device)[form.block_n, form.tile_groups]
    split = cut.split
    clusters = min(split.num_items, resident)
    launch = Launch(key, (2 * clusters, 1, 1), gemm_parameters(m_tiles, split), form)
    grid = f"2 CTAs * min({split.num_items} items, {resident} resident pairs)"
    why = (
        Rule("tiles", pair_tiles_of(m_tiles, n_tiles), _spell_pair_tiles(m_tiles, n_tiles)),
        *parameter_rules(m_tiles, f"ceil({tokens} / {GEMM_BLOCK_M})", split),
        Rule("grid_ctas", 2 * clusters, grid),
        ring,
    )
    return launch, why


def _refuse_wide(where: str, m_tiles: int, n_tiles: int) -> None:
    rows, tiles = m_tiles * GEMM_BLOCK_M, pair_tiles_of(m_tiles, n_tiles)
    for name, arithmetic, value in (
        ("token row", f"{m_tiles} row tiles * {GEMM_BLOCK_M}", rows),
        ("tile number", _spell_pair_tiles(m_tiles, n_tiles), tiles),
    ):
        if value > INT32_MAX:
            raise PlanError(
                f"{where}: the last {name} is {arithmetic} = {value}; kernels and tensor maps count in int32, up to"
                f" {INT32_MAX}. Split the tokens into several calls."
            )


def _ring_rules(where: str, rules: HopperPrefillRules, device: DeviceFacts) -> dict[tuple[int, int], Rule]:
    """The ring of each tile, by its columns and groups, against shared memory, whichever tile is taken.

    Barriers and the staged store go beside it, which the emitter lays out.
    """
    limit, found = device.max_dynamic_smem_bytes, {}
    for number, tile in enumerate(rules.tiles):
        stage = (GEMM_BLOCK_M + tile.block_n) * BLOCK_K * BF16_BYTES
        arithmetic = f"{tile.num_stages} stages * {stage} bytes = {tile.num_stages * stage} of {limit}"
        if tile.num_stages * stage > limit:
            raise PlanError(
                f"{where}: the ring of tiles of {tile.block_n} columns does not fit: {arithmetic}. Set"
                f" hopper.prefill.tiles.{number}.num_stages to {limit // stage} at most."
            )
        found[tile.block_n, tile.tile_groups] = Rule("num_stages", tile.num_stages, arithmetic)
    return found

"""Roles, barriers and edges of the prefill GEMMs, by architecture family. Pure."""

from __future__ import annotations

from cakegen.emit.operands import results_of
from cakegen.emit.pipeline import COUNTER, Barrier, Edge, Pipeline
from cakegen.model import ModelDims
from cakegen.plan.gemm_layout import EPILOGUE_WARPS, GROUP_WARPS, TURNS
from cakegen.plan.records import GemmForm
from cakegen.plan.workspace import MMA_WARPGROUPS, PAIR_CTAS

SUMS_READERS = PAIR_CTAS * EPILOGUE_WARPS
ITEM_READERS = PAIR_CTAS * (1 + EPILOGUE_WARPS) + 1
"""A loader and the epilogue warps, and the thread that multiplies for both."""


def hopper_gemm_pipeline(dims: ModelDims, form: GemmForm) -> Pipeline:
    """What the warps of a pair of Hopper's CTAs hand to each other."""
    full = Barrier(
        *("stage_full", form.num_stages, 1),
        "the own producer's arrive.expect_tx; complete with the bytes of tokens and weights",
    )
    empty = Barrier(
        *("stage_empty", form.num_stages, form.tile_groups * GROUP_WARPS * PAIR_CTAS),
        "one lane of each MMA warp that reads it, of both CTAs, since both write to it",
    )
    mma = "both CTAs' MMA warps"
    barriers = [full, empty]
    edges = [
        Edge("both producers", "tokens, half of both's weights, TMA", mma, full.name),
        Edge(mma, "a stage that is read", "both producers", empty.name),
    ]
    if form.tile_groups == 1:
        next_turn = "one lane of each warp of the other warpgroup, once its last wgmma of a tile is issued"
        turn = Barrier("turn", MMA_WARPGROUPS, GROUP_WARPS, next_turn)
        barriers.append(turn)
        edges.append(Edge("an MMA warpgroup", "the turn to multiply", "the CTA's other", turn.name))
    if form.fused_norm:
        rows = "spare warps, first MMA warps"
        edges.append(Edge(rows, "rows of y, a pair row of tiles", "all producers", f"{COUNTER}s"))
    edges += _segments(dims, "MMA warpgroup", form)
    rows = (
        "A pair of CTAs owns a tile of 256 x kBlockN: each its 128 token rows, both the same weight rows, of which each"
        " loads half for both. A lone last row tile is taken two columns at a time, 128 x 2 kBlockN: each CTA its "
        "weight rows, both the same tokens, of which each loads every other K block for both. Of an uneven number of "
        "columns the last is a pair's, as elsewhere."
    )
    about = f"{rows} {_order(form)}Persistent: cluster c runs items c, c + clusters, ..."
    return Pipeline(about, (*barriers,), (*edges,))


def blackwell_gemm_pipeline(dims: ModelDims, form: GemmForm) -> Pipeline:
    """What the warps of a pair of Blackwell's CTAs hand to each other."""
    full = Barrier(
        *("stage_full", form.num_stages, 1),
        "in CTA 0, its loader's arrive.expect_tx; complete with the bytes of both CTAs' copies",
    )
    empty = Barrier(
        *("stage_empty", form.num_stages, 1), "in each CTA, the commit behind the products that read the stage of both"
    )
    sums_full = Barrier("sums_full", TURNS, 1, "in each CTA, the commit behind the last product of a tile")
    sums_empty = Barrier(*("sums_empty", TURNS, SUMS_READERS), "in CTA 0, one lane of each epilogue warp of both CTAs")
    barriers = [full, empty, sums_full, sums_empty]
    loader, mma, epilogue = "each CTA's loader", "CTA 0's MMA thread", "epilogue warps"
    edges = [
        Edge(loader, "tokens, half of the weights, TMA", mma, full.name),
        Edge(mma, "a stage that is read", loader, empty.name),
        Edge(mma, "sums in tensor memory", epilogue, sums_full.name),
        Edge(epilogue, "an accumulator that is read", mma, sums_empty.name),
    ]
    if form.fused_norm:
        arrived = Barrier("rows_arrived", 1, 1, "one epilogue thread, once this CTA has arrived at the grid counter")
        barriers.append(arrived)
        edges.append(
            Edge("epilogue warps, first", "y of rows cta, cta + grid, ...", "loaders of all CTAs", f"{COUNTER}s[0]")
        )
        edges.append(Edge("epilogue warps, first", "the CTA's arrival", loader, arrived.name))
        items = "The grid has a cluster an item, all of them resident."
    else:
        item_full = Barrier(
            *("item_full", TURNS, 1), "in each CTA, its loader's arrive.expect_tx of the answer's kAnswerBytes"
        )
        item_empty = Barrier(
            *("item_empty", TURNS, ITEM_READERS),
            "in CTA 0, whoever has read the answer: 2 loaders, the MMA thread, the epilogue warps",
        )
        barriers += [item_full, item_empty]
        edges.append(Edge("launch control", "the item that follows", "all roles", item_full.name))
        edges.append(Edge("all roles", "an answer that is read", "CTA 0's loader", item_empty.name))
        items = (
            "The grid has a cluster an item; a cluster that has finished one takes the place of a cluster that has not "
            "started."
        )
    edges += _segments(dims, "epilogue group", form)
    tile = (
        "A pair of CTAs owns a tile of 256 x kBlockN: each its 128 token rows and half of the weight rows; the tensor "
        "core of each multiplies its tokens with both halves."
    )
    return Pipeline(f"{tile} {_order(form)}{items}", (*barriers,), (*edges,))


def _segments(dims: ModelDims, finisher: str, form: GemmForm) -> list[Edge]:
    return [
        Edge(f"{finisher}, cut tile", "fp32 partials", "the tile's last to come", f"{COUNTER}s"),
        Edge(f"{finisher}, the last", "its rows of the tile", results_of(dims, form.stage)),
    ]


def _order(form: GemmForm) -> str:
    if form.stage == "front":
        return ""
    if not form.normed:
        return "K runs over the shared-down blocks, then over the up blocks. "
    if form.fused_norm:
        return "K runs over the shared-down blocks first: they do not need y, whose rows are normalised meanwhile. "
    return "K runs over the shared-down blocks first: they do not need y, so the launch overlaps its norm's. "

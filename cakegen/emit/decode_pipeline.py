"""Roles, barriers and edges of the decode programs, by architecture family. Pure."""

from __future__ import annotations

from cakegen.emit.decode_tokens import has_two_sums
from cakegen.emit.operands import results_of
from cakegen.emit.pipeline import COUNTER, Barrier, Edge, Pipeline
from cakegen.model import ModelDims
from cakegen.plan.family import WarpRoles
from cakegen.plan.records import DecodeForm

FINISHING_WARPS = 4
"""Warps that hold and store a tile's sums."""


Part = tuple[tuple[Barrier, ...], tuple[Edge, ...]]


def decode_pipeline(dims: ModelDims, form: DecodeForm, warps: WarpRoles) -> Pipeline:
    """What the warps of a decode program's CTA hand to each other."""
    parts = (_ring(dims, form, warps), _sums(warps), _pair(form, warps), _norm(form, warps), _end(dims, form, warps))
    return Pipeline(
        _about(form),
        tuple(barrier for barriers, _ in parts for barrier in barriers),
        tuple(edge for _, edges in parts for edge in edges),
    )


def _about(form: DecodeForm) -> str:
    if form.cluster_ctas == 2:
        tile = "A pair of CTAs splits the K of a tile of weight rows, and both run this"
    elif form.token_parts > 1:
        tile = "The two CTAs of a tile of weight rows split the tokens, and each runs this alone"
    else:
        tile = "A CTA multiplies a tile of weight rows"
    sums = "two sums, which are added at the end" if has_two_sums(form) else "one accumulator"
    whose = "Each CTA's K" if form.cluster_ctas == 2 else "K"
    if form.stage == "tail":
        return f"{tile}. {whose} is the shared-down units, then the up units, into {sums}."
    # a front's tile has one accumulator or two, by what its rows are
    return f"{tile}. K goes into {sums}." if has_two_sums(form) else f"{tile}."


def _ring(dims: ModelDims, form: DecodeForm, warps: WarpRoles) -> Part:
    loaded = (segment for segment in dims.sum_stage.along_k if segment.prepared is None or not form.resident_b)
    tokens = "tokens" if form.stage == "front" else " | ".join(segment.tokens.short for segment in loaded)
    freed = (
        "one lane of each MMA warp, once its wgmmas that read the stage are complete"
        if warps.multiplier == warps.finishers
        else "the commit behind the products that read the stage"
    )
    arrivals = FINISHING_WARPS if warps.multiplier == warps.finishers else 1
    full = Barrier("stage_full", form.num_stages, 1, "the producer's arrive.expect_tx; complete with the copies' bytes")
    empty = Barrier("stage_empty", form.num_stages, arrivals, freed)
    edges = [
        Edge("producer warp", f"weights, {tokens} by TMA", warps.multiplier, full.name),
        Edge(warps.multiplier, "a stage that is read", "producer warp", empty.name),
    ]
    if form.stagger_units:
        edges.append(Edge("the ring's first copies", "that stage 0 has landed", "producer warp", full.name))
    return (full, empty), tuple(edges)


def _sums(warps: WarpRoles) -> Part:
    if warps.multiplier == warps.finishers:
        return (), ()
    full = Barrier("sums_full", 1, 1, f"the {warps.multiplier}'s commit behind its last product")
    return (full,), (Edge(warps.multiplier, "sums in tensor memory", warps.finishers, full.name),)


def _pair(form: DecodeForm, warps: WarpRoles) -> Part:
    if form.cluster_ctas == 1:
        return (), ()
    giver, taker = ("both ranks", "the partner") if form.split_finalize else ("rank 1", "rank 0")
    landed = Barrier(
        "partner_sum", 1, 1, "pre-armed at set-up where sums land; complete with the kLandingBytes of the partner"
    )
    edges = [Edge(f"{warps.finishers} of {giver}", "fp32 sums by st.async", f"those of {taker}", landed.name)]
    if not form.landing_alias:
        return (landed,), tuple(edges)
    drained = Barrier(
        "ring_drained", 1, FINISHING_WARPS, f"one lane of each of the {warps.finishers} where sums land, on its partner"
    )
    taker, giver = ("both ranks", "the partner") if form.split_finalize else ("rank 0", "rank 1")
    edges.append(
        Edge(f"{warps.finishers} of {taker}", "the drained ring, to land in", f"those of {giver}", drained.name)
    )
    return (landed, drained), tuple(edges)


def _norm(form: DecodeForm, warps: WarpRoles) -> Part:
    if not form.fused_norm:
        return (), ()
    normers = warps.normers
    barriers: list[Barrier] = []
    edges: list[Edge] = []

    def add(barrier: Barrier, source: str, what: str, target: str) -> None:
        barriers.append(barrier)
        edges.append(Edge(source, what, target, barrier.name))

    if form.staged_rows:
        staged = "the producer's arrive.expect_tx of the norm weight and the routed rows"
        add(Barrier("rows_staged", 1, 1, staged), "producer warp", "routed rows, norm weight", normers)
    if form.issue_gate:
        issued = "one lane of each warp that normalises, once its first row's loads are issued, or it has none"
        add(Barrier("rows_issued", 1, warps.norm, issued), normers, "loads are issued", "producer warp")
    if form.resident_b:
        resident = f"one lane of the {normers}, once all have written and fenced the resident operand"
        add(Barrier("y_resident", 1, 1, resident), normers, "y of the own up units, in shared memory", warps.multiplier)
    else:
        edges.append(Edge(normers, "y of rows cta, cta + grid, ...", "producer warps of all CTAs", f"{COUNTER}s[0]"))
        arrived = f"one lane of the {normers}, once this CTA has arrived at the counter"
        add(Barrier("rows_arrived", 1, 1, arrived), normers, "the CTA's arrival", "producer warp")
    return tuple(barriers), tuple(edges)


def _end(dims: ModelDims, form: DecodeForm, warps: WarpRoles) -> Part:
    stores = warps.finishers
    if form.cluster_ctas == 2 and not form.split_finalize:
        stores += " of rank 0"
    return (), (Edge(stores, "rows staged over the ring", results_of(dims, form.stage)),)

"""Hopper's prefill tiles in a tree: each serves every stage and degree, and the device preamble has its MMA."""

from __future__ import annotations

import dataclasses
import re

from models import changed, hopper, tiny_model

from cakegen import paths
from cakegen.emit.environment import template_environment
from cakegen.emit.reach import reached_keys, reached_plans
from cakegen.emit.tree import render_preambles
from cakegen.model import Model, Target
from cakegen.plan.records import DecodeForm

DEGREES = (4, 8)


def small_model() -> Model:
    """One part, on which plans alone take few of the tiles."""
    return dataclasses.replace(tiny_model(), targets=(Target("sm_90a", DEGREES, (6,)),))


def test_each_tile_serves_each_stage_and_degree() -> None:
    model = small_model()
    found: dict[tuple[str, int], set[tuple[object, object]]] = {}
    for entry in reached_keys(model):
        if entry.program.role.endswith("_gemm"):
            constants = dict(entry.constants)
            # the shared expert's columns of a rank, of the tail in K iterations
            columns = constants["I_LOCAL"] if "I_LOCAL" in constants else 64 * constants["K2_ITERS"]
            widths = found.setdefault((entry.program.role, columns), set())
            widths.add((entry.program.value("kBlockN"), entry.program.value("kTileGroups")))
    assert set(found) == {(role, 1024 // tp) for role in ("front_gemm", "tail_gemm") for tp in DEGREES}
    tiles = {(tile.block_n, tile.tile_groups) for tile in hopper(model).prefill.tiles}
    assert set(map(frozenset, found.values())) == {frozenset(tiles)}


def test_preamble_has_the_mma_of_each_width_and_no_other() -> None:
    model = small_model()
    few = changed(model, hopper__prefill__tiles=hopper(model).prefill.tiles[:2])
    for each in (model, few):
        environment = template_environment(paths.templates_root())
        specs = [entry.program for entry in reached_keys(each)]
        text = render_preambles(environment, each.name, specs)[f"cake_{each.name}_device_sm90.cuh"]
        widths = [int(width) for width in re.findall(r"void wgmma_m64_k16<(\d+)>", text)]
        forms = [plan.launches[-1].form for plan in reached_plans(each)]
        tokens = {form.n_pad // form.token_parts for form in forms if isinstance(form, DecodeForm)}
        assert widths == sorted(tokens | {tile.block_n for tile in hopper(each).prefill.tiles})

"""Hopper's prefill tiles in a tree: each serves every stage and degree, and includes the MMA of its width."""

from __future__ import annotations

import dataclasses
import re

from support.models import changed, hopper, tiny_model

from cakegen.emit import render_tree
from cakegen.emit.reach import reached_keys, reached_plans
from cakegen.emit.shared import included_closure
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
            values = {constant.name: constant.value for constant in entry.program.constants}
            widths.add((values["kBlockN"], values["kTileGroups"]))
    assert set(found) == {(role, 1024 // tp) for role in ("front_gemm", "tail_gemm") for tp in DEGREES}
    tiles = {(tile.block_n, tile.tile_groups) for tile in hopper(model).prefill.tiles}
    assert set(map(frozenset, found.values())) == {frozenset(tiles)}


def test_each_program_includes_the_mma_of_its_width_and_no_other() -> None:
    model = small_model()
    few = changed(model, hopper__prefill__tiles=hopper(model).prefill.tiles[:2])
    for each in (model, few):
        tree = render_tree(each, each.name)
        specs = {entry.program.name: entry.program for entry in reached_keys(each)}
        used = set()
        for name, spec in specs.items():
            texts = {**tree.headers, "kernel": tree.files[f"csrc/cake_{each.name}/{name}_kernel.cu"]}
            included = "".join(texts[header] for header in included_closure("kernel", texts))
            widths = {int(width) for width in re.findall(r"void wgmma_m64_k16<(\d+)>", included)}
            own = {entry.value for entry in spec.constants if entry.name in ("kNPad", "kBlockN")}
            assert widths == own, name
            used |= widths
        assert {name for name in tree.headers if "_mma_" in name} == {f"cake_device_wgmma_mma_n{n}.cuh" for n in used}
        forms = [plan.launches[-1].form for plan in reached_plans(each)]
        tokens = {form.n_pad // form.token_parts for form in forms if isinstance(form, DecodeForm)}
        assert used == tokens | {tile.block_n for tile in hopper(each).prefill.tiles}

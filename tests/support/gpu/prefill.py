"""What the prefill tests on a GPU share: token counts, an example of every form, and a tree with an edited kernel."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from support.emit.sealed_trees import resealed
from support.gpu.cases import GuardedPartials, remembered
from support.models import hopper

from cakegen.model import DeviceFacts, Model
from cakegen.plan import control_words, form_of, partials_elems, plan_route
from cakegen.plan.gemm import PAIR_TOKENS
from cakegen.plan.records import Plan
from cakegen.registry import SHARED_FOLDER, Registry, load_registry
from cakegen.runtime import LatentMoe
from cakegen.runtime.device import open_device

ROWS = 16384
DEGREES = (1, 2, 4, 8, 16)
STAGES = ("front", "tail")
# both sides of row tiles and of pair rows, counts that fill neither, a row tile behind full pair rows and behind a full
# raster group, and powers of two
TOKENS = (
    *(129, 130, 192, 255, 256, 257, 300, 384, 511, 512, 513, 640, 768, 1000, 1024),
    *(1536, 2048, 2100, 3000, 4096, 8192, ROWS),
)
ROW_TILE = 128
PAIR_ROWS = 2 * ROW_TILE


@dataclass(frozen=True)
class Example:
    """A request whose plan has a form that no earlier example had."""

    stage: str
    tp: int
    tokens: int
    partials: int


def facts_of(moe: LatentMoe) -> DeviceFacts:
    """What a model's calls are planned for."""
    return moe._device_facts or open_device(0).facts


def plan_of(moe: LatentMoe, stage: str, tp: int, tokens: int, partials: int = 1) -> Plan:
    """The plan of a request, without its operands."""
    return plan_route(moe.model, stage=stage, tp=tp, tokens=tokens, partials=partials, device=facts_of(moe))


def examples(
    moe: LatentMoe,
    seen: set[Hashable],
    stages: Sequence[str] = STAGES,
    degrees: Sequence[int] = DEGREES,
    most_rows: int = ROWS,
    partials: Sequence[int] = (1, 2),
) -> Iterator[Example]:
    """The smallest token count of every form that is not in `seen` yet, a little short of its last row tile's end.

    A tail of one partial may normalise inside its GEMM; that of two never does, and stands for those of more.
    """
    for stage in stages:
        counts = [count for count in partials if count <= moe.model.max_partials] if stage == "tail" else [1]
        for tp, count in itertools.product(degrees, counts):
            for row_tiles in range(2, most_rows // ROW_TILE + 1):
                tokens = row_tiles * ROW_TILE - 5
                forms = {form_of(launch) for launch in plan_of(moe, stage, tp, tokens, count).launches}
                if not forms <= seen:
                    seen |= forms
                    yield Example(stage, tp, tokens, count)


def form_tokens(moe: LatentMoe, stage: str, tp: int, partials: int = 1) -> list[int]:
    """One token count for every form of one stage, degree and number of partials."""
    return [example.tokens for example in examples(moe, set(), (stage,), (tp,), partials=(partials,))]


def cut_tokens(moe: LatentMoe, stage: str, tp: int) -> int:
    """The smallest multiple of a pair row whose plan keeps partials."""
    for tokens in range(PAIR_ROWS, ROWS + 1, PAIR_ROWS):
        if any(partials_elems(launch) for launch in plan_of(moe, stage, tp, tokens).launches):
            return tokens
    raise AssertionError(f"{moe.model.name} {stage}: TP {tp} cuts nothing")


def words_of(plan: Plan) -> int:
    """Control words of a runner of this plan."""
    return max(control_words(launch) for launch in plan.launches)


def guarded_partials(model: Model, device: torch.device, sm_count: int) -> GuardedPartials:
    """Room for every plan: fewer than two waves of pair tiles are cut, so fewer than there are multiprocessors."""
    rules = hopper(model).prefill
    tile = PAIR_TOKENS * max(tile.block_n for tile in rules.tiles)
    return GuardedPartials(device, sm_count * rules.cut.max_segments * tile)


def edited_tree(registry: Registry, folder: Path, header: str, pattern: str, replacement: str) -> Registry:
    """A copy of a tree in which one place of one header is another text; every program has the digests of its files."""
    root = Path(shutil.copytree(registry.root, folder / registry.export))
    shared = Path(shutil.copytree(registry.shared, folder / SHARED_FOLDER))
    text, count = re.subn(pattern, replacement, (shared / header).read_text(encoding="utf-8"))
    assert count == 1, f"{header}: {count} places match {pattern!r}"
    (shared / header).write_text(text, encoding="utf-8")
    return remembered(resealed(load_registry(root)))

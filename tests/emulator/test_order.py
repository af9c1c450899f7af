"""Happens-before and proxies: patterns that must stay clean under every schedule, and what each reports when broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.emulator import order_between_ctas, order_in_a_cta
from support.emulator.order_pattern import Pattern

from cakegen.emulator import Fault
from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import Machine
from cakegen.runtime.tensor_map import TensorMap

Launch = Callable[..., Machine]
Make = Callable[..., np.ndarray]

SCHEDULES = [("early", 0), ("late", 0), ("random", 0), ("random", 1), ("random", 2)]
NAMES = [f"{kind}{seed}" for kind, seed in SCHEDULES]

PATTERNS = order_in_a_cta.PATTERNS | order_between_ctas.PATTERNS


def run(
    launch: Launch, array: Make, pattern: Pattern, source: str, schedule: tuple[str, int], **options: Any
) -> np.ndarray:
    out, data, counter = array(np.zeros(1024), np.uint32), array(np.arange(1024), np.uint32), array([0], np.uint32)
    record = array(np.full(16, 1 << 60), np.uint64)
    # 4 boxes of 8 rows of 64 bf16 elements: 1 KiB each
    box = TensorMap("map", data.ctypes.data, (64, 8, 4), (128, 1024), (64, 8, 1))
    launch(
        source,
        out,
        data,
        counter,
        record,
        box,
        grid=pattern.grid,
        block=pattern.block,
        cluster=pattern.cluster,
        cooperative=pattern.cooperative,
        smem=16384,
        adversary=Adversary(*schedule),
        **options,
    )
    return out


@pytest.mark.parametrize("name", PATTERNS)
def test_correct_pattern_is_clean_under_every_schedule(launch: Launch, array: Make, name: str) -> None:
    pattern = PATTERNS[name]
    outputs = [run(launch, array, pattern, pattern.source, schedule).tolist() for schedule in SCHEDULES]
    assert all(each == outputs[0] for each in outputs)


BREAKS = [(name, number) for name, pattern in PATTERNS.items() for number in range(len(pattern.broken))]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=NAMES)
@pytest.mark.parametrize(("name", "number"), BREAKS)
def test_broken_pattern_is_reported_under_every_schedule(
    launch: Launch, array: Make, name: str, number: int, schedule: tuple[str, int]
) -> None:
    pattern = PATTERNS[name]
    old, new, kinds, words = pattern.broken[number]
    assert old in pattern.source
    with pytest.raises(Fault) as caught:
        run(launch, array, pattern, pattern.source.replace(old, new, 1), schedule)
    assert caught.value.kind in kinds, caught.value
    assert words in str(caught.value)


REFILL = "a stage that the partner refills after reads"
CLUSTER_SCOPES = (
    ("mbarrier_arrive_cluster_after_reads(", "mbarrier_arrive_cluster("),
    ("mbarrier_wait(smem, (i & 1) ^ 1", "mbarrier_wait_cluster(smem, (i & 1) ^ 1"),
)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=NAMES)
@pytest.mark.parametrize("narrow", [None, 0, 1])
def test_strict_scopes_want_the_clusters_scope_between_reads_and_a_refill(
    launch: Launch, array: Make, schedule: tuple[str, int], narrow: int | None
) -> None:
    """PTX ISA 8.7: release and acquire must each hold both threads; a completion reaches a wait of any scope."""
    pattern = PATTERNS[REFILL]
    source = pattern.source
    for number, (old, new) in enumerate(CLUSTER_SCOPES):
        source = source if number == narrow else source.replace(old, new)
    if narrow is None:
        run(launch, array, pattern, source, schedule, strict_scopes=True)
        return
    with pytest.raises(Fault, match=r"its scope does not hold both threads|nothing orders the two") as caught:
        run(launch, array, pattern, source, schedule, strict_scopes=True)
    assert caught.value.kind == "race"

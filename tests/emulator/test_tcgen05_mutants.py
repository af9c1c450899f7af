"""Each of the hand-written tcgen05 programs with one line broken: some schedule must report it, by the right kind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.units.tensor_core import bf16_to_f32, multiply_add_wide
from cakegen.runtime.tensor_map import TensorMap

Launch = Callable[..., Machine]
Make = Callable[..., np.ndarray]

SCHEDULES = [("early", 0), ("late", 0), ("random", 0), ("random", 1), ("random", 2), ("random", 3)]
ONE, PAIR, CONTROL = "gemm_one_cta", "gemm_pair", "gemm_launch_control"
# (program, old text, new text, kinds); `numbers`: no fault, but a wrong result
MUTANTS = {
    "refill without the empty barrier": (
        ONE,
        "mbarrier_wait(smem + kEmpty + 8 * stage, i / kStages % 2 ^ 1, watch);",
        "",
        "pending-read pending-write race barrier",
    ),
    "empty barrier's parity flipped": (ONE, "i / kStages % 2 ^ 1", "i / kStages % 2", "deadlock"),
    "too few bytes expected": (
        ONE,
        "mbarrier_arrive_expect_tx(full, kStage)",
        "mbarrier_arrive_expect_tx(full, kBytesA)",
        "pending-write race barrier deadlock",
    ),
    "no fence behind the full barrier": (
        ONE,
        "mbarrier_wait(smem + kFull + 8 * stage, i / kStages % 2, watch);\n        tensor_fence_after();",
        "mbarrier_wait(smem + kFull + 8 * stage, i / kStages % 2, watch);",
        "fence",
    ),
    "mma without the full barrier": (
        ONE,
        "mbarrier_wait(smem + kFull + 8 * stage, i / kStages % 2, watch);",
        "",
        "pending-write unwritten-read race fence",
    ),
    "no commit for the accumulator": (ONE, "tensor_commit<1>(smem + kAccFull);", "", "deadlock"),
    "accumulator announced before its last mmas": (
        ONE,
        "        tensor_commit<1>(smem + kEmpty + 8 * stage);\n    }\n    tensor_commit<1>(smem + kAccFull);",
        "        tensor_commit<1>(smem + kEmpty + 8 * stage);\n"
        "        if (i == blocks - 2) tensor_commit<1>(smem + kAccFull);\n    }",
        "pending-write race exit fence",
    ),
    "sums start anew at each block": (ONE, "i + k > 0", "k > 0", "numbers"),
    "second block of K from the first one's row": (
        ONE,
        "at + kBytesA + 32 * k",
        "at + kBytesA + 32 * (k & 1)",
        "numbers",
    ),
    "epilogue does not wait": (
        ONE,
        "mbarrier_wait(smem + kAccFull, 0, watch);",
        "",
        "unwritten-read pending-write race",
    ),
    "columns freed before they are read": (
        ONE,
        "    __syncthreads();\n    tensor_fence_after();\n    if (warp == 1) tensor_dealloc",
        "    if (warp == 1) tensor_dealloc",
        "out-of-bounds pending-write pending-read race",
    ),
    "only the leader hears that a stage is empty": (
        PAIR,
        "tensor_commit_multicast<2>(smem + kEmpty + 8 * turn.stage, 3)",
        "tensor_commit_multicast<2>(smem + kEmpty + 8 * turn.stage, 1)",
        "deadlock",
    ),
    "leader expects its own bytes only": (
        PAIR,
        "mbarrier_arrive_expect_tx(full, 2 * kStage)",
        "mbarrier_arrive_expect_tx(full, kStage)",
        "pending-write unwritten-read race barrier deadlock",
    ),
    "each CTA's bytes on its own barrier": (
        PAIR,
        "(smem + kFull + 8 * turn.stage) & kLeader",
        "smem + kFull + 8 * turn.stage",
        "deadlock",
    ),
    "accumulator reused without its empty barrier": (
        PAIR,
        "mbarrier_wait_cluster(smem + kAccEmpty + 8 * acc.stage, acc.parity ^ 1, watch);",
        "",
        "pending-read race fence barrier",
    ),
    "epilogue gives back without a fence": (
        PAIR,
        "    tensor_fence_before();\n    warp_sync();",
        "    warp_sync();",
        "fence",
    ),
    "one arrival too few for an accumulator": (
        PAIR,
        "mbarrier_init(smem + kAccEmpty + 8 * acc, 2 * kEpilogueWarps)",
        "mbarrier_init(smem + kAccEmpty + 8 * acc, 2 * kEpilogueWarps - 1)",
        "pending-read race fence barrier",
    ),
    "loads not waited for before the hand-over": (PAIR, "        tensor_wait_loads();\n", "", "pending-write"),
    "both tiles in one accumulator": (
        PAIR,
        "const u32 sums = base + acc.stage * kTileN;",
        "const u32 sums = base;",
        "pending-read pending-write race unwritten-read fence",
    ),
    "b of the peer from the leader's rows": (
        PAIR,
        "problem.column(tile) + rank * (kTileN / 2)",
        "problem.column(tile)",
        "numbers",
    ),
    "no rendezvous at the end": (
        PAIR,
        "    warp_sync();\n    rendezvous();\n    if (warp == 1) tensor_dealloc<2>",
        "    warp_sync();\n    if (warp == 1) tensor_dealloc<2>",
        "out-of-bounds pending-write pending-read exit race tensor-memory deadlock",
    ),
    "response read and never given back": (
        CONTROL,
        "            if (lane_id() == 0) take(smem, item);\n",
        "",
        "deadlock",
    ),
    "request over a response that is still read": (
        CONTROL,
        "if (cluster_ctarank() == 0) mbarrier_wait_cluster(smem + kTaken + 8 * turn.stage, turn.parity ^ 1, watch);",
        "",
        "race pending-write barrier",
    ),
    "the peer does not expect the response": (
        CONTROL,
        "mbarrier_arrive_expect_tx(smem + kScheduled + 8 * turn.stage, 16);",
        "mbarrier_arrive_expect_tx(smem + kScheduled + 8 * turn.stage, 16 - 16 * cluster_ctarank());",
        "deadlock barrier pending-write",
    ),
}


def run(launch: Launch, array: Make, name: str, source: str, adversary: Adversary) -> bool:
    """Whether a program's result is right."""
    m, n, k = (128, 64, 320) if name == ONE else (512, 192, 256)
    boxes = (128, 64) if name == ONE else (128, 32)
    make = np.random.default_rng(7)
    a, b = (
        array((make.integers(-8, 9, (rows, k)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
        for rows in (m, n)
    )
    maps = [
        TensorMap(name, matrix.ctypes.data, (64, len(matrix), k // 64), (2 * k, 128), (64, rows, 1))
        for name, matrix, rows in (("a", a, boxes[0]), ("b", b, boxes[1]))
    ]
    out, record = array(np.full((m, n), np.nan), np.float32), array(np.full(16, 1 << 60), np.uint64)
    tiles = () if name == ONE else (m // 256 * (n // 64),)
    grid, cluster = {ONE: (1, 1), PAIR: (4, 2), CONTROL: (12, 2)}[name]
    options = {"block": 192, "smem": 75 * 1024, "arch": "sm_100a", "multiply_add": multiply_add_wide}
    arguments = (*maps, out, n, k, *tiles, record, a, b)
    launch(source, *arguments, grid=grid, cluster=cluster, adversary=adversary, **options)
    return np.array_equal(out, bf16_to_f32(a) @ bf16_to_f32(b).T)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_reported(launch: Launch, array: Make, program: Callable[[str], str], mutant: str) -> None:
    name, old, new, kinds = MUTANTS[mutant]
    text = program(name)
    assert old in text
    found = []
    for schedule in SCHEDULES:
        try:
            right = run(launch, array, name, text.replace(old, new), Adversary(*schedule))
            found.append("clean" if right else "numbers")
        except Fault as fault:
            found.append(fault.kind)
        if found[-1] != "clean":
            break
    assert found[-1] in kinds.split(), found

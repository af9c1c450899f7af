"""Cycles of blocks: dependent instructions wait, independent ones do not."""

from __future__ import annotations

import pytest

from cakegen.emulator.text.parse import parse_kernel
from cakegen.emulator.text.translate import Program
from cakegen.timing.blocks import BlockCost, cost_of
from cakegen.timing.figures import load_device

FIGURES = load_device("h200")
ALU, BRANCH = FIGURES.alu_latency.value, FIGURES.branch_latency.value
HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 p)\n{\n"
REGISTERS = ".reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b64 %rd<9>; .reg .pred %p<3>;\n"


def cost(body: str) -> BlockCost:
    program = Program(parse_kernel(f"{HEAD}{REGISTERS}{body}\nret;\n}}\n", "k"))
    return cost_of(program.block(0, False), program.kernel.instructions, FIGURES)


def test_a_chain_takes_the_latency_of_each() -> None:
    chain = cost("add.s32 %r1, %r0, 1; add.s32 %r2, %r1, 1; add.s32 %r3, %r2, 1;")
    apart = cost("add.s32 %r1, %r0, 1; add.s32 %r2, %r0, 1; add.s32 %r3, %r0, 1;")
    assert chain.issues == apart.issues == 3
    assert apart.hit == 3
    assert chain.hit == 3 + 2 * ALU
    assert chain.uses == apart.uses == {0: 0.0}


def test_names_of_values_cost_nothing() -> None:
    assert cost("mov.u32 %r1, %r0; cvta.to.global.u64 %rd1, %rd0;").issues == 0
    assert cost("mov.u32 %r1, 7;").issues == 1


def test_memory_decides_what_a_load_takes() -> None:
    used = cost("ld.global.u32 %r1, [%rd0]; add.s32 %r2, %r1, 1;")
    clock = FIGURES.clock.value
    assert used.hit == 2 + FIGURES.load_l2_latency.value * clock
    assert used.miss == 2 + FIGURES.load_latency.value * clock
    assert not used.open_loads


def test_a_load_that_the_block_does_not_use_stays_open() -> None:
    found = cost("ld.global.u32 %r1, [%rd0]; ld.shared.u32 %r2, [%r0]; ld.shared.u32 %r3, [%r0]; add.s32 %r4, %r3, 1;")
    assert {index: load.is_global for index, load in found.open_loads.items()} == {
        register("%r1"): True,
        register("%r2"): False,
    }
    assert found.hit == 4 + FIGURES.shared_latency.value


def register(name: str) -> int:
    text = f"{HEAD}{REGISTERS}mov.u32 {name}, 0;\nret;\n}}\n"
    target = parse_kernel(text, "k").instructions[0].operands[0]
    return target.index  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("body", "issues"), [("ex2.approx.f32 %f1, %f0;", 1), ("div.rn.f32 %f1, %f0, %f2;", 12), ("bra L; L:", 1)]
)
def test_instructions_count_as_the_machine_has_them(body: str, issues: int) -> None:
    assert cost(body).issues == issues


def test_a_taken_branch_and_a_fence_are_counted() -> None:
    assert cost("bra L; L:").hit == 1 + BRANCH
    assert cost("fence.acq_rel.gpu; fence.proxy.async;").gpu_fences == 1

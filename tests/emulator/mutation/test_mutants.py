"""Mutants of whole programs: edits that leave readable PTX, and accesses that move in front of their wait."""

from __future__ import annotations

import pytest

from cakegen.emulator.mutation.mutants import HOIST, Mutant, mutants_of
from cakegen.emulator.mutation.operators import OPERATORS
from cakegen.emulator.mutation.targets import Target, target_of
from cakegen.emulator.text.parse import parse_kernel
from cakegen.registry import Registry

KEY = "decode:tail_tp1_n8_r6_d2_pair_resident@sm_90a"

PTX = """.target sm_90a
.visible .entry k(.param .u64 a)
{
.reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
ld.param.u64 %rd1, [a];
mov.u32 %r1, 1024;
$L_wait:
{ .reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%r1], 0; selp.u32 %r2, 1, 0, p; }
setp.eq.s32 %p1, %r2, 0;
@%p1 bra $L_wait;
bra.uni $L_done;
$L_done:
add.s32 %r3, %r1, 64;
ld.shared.b32 %r4, [%r3];
st.global.u32 [%rd1], %r4;
bar.sync 0;
mov.u32 %r5, 7;
st.shared.b32 [%r3], %r5;
ret;
}
"""


@pytest.fixture(scope="module")
def target(registry: Registry) -> Target:
    return target_of(registry, KEY, "sm_90a")


def hoists(ptx: str) -> dict[str, Mutant]:
    return {mutant.change: mutant for mutant in mutants_of(ptx, "k") if mutant.operator == HOIST}


def opcodes(ptx: str) -> list[str]:
    return [instruction.opcode for instruction in parse_kernel(ptx, "k").instructions]


def test_access_goes_in_front_of_the_loop_that_waits_with_the_arithmetic_it_needs() -> None:
    found = hoists(PTX)
    text = found["ld.shared in front of mbarrier.try_wait"].apply(PTX)
    lines = text.splitlines()
    assert lines[7].startswith("{ .reg .pred p; add.s32 %r3, %r1, 64; ld.shared.b32 %r4, [%r3]; mbarrier.try_wait")
    # the arithmetic stays where it was, the access does not
    assert opcodes(text).count("add.s32") == 2
    assert opcodes(text).count("ld.shared.b32") == 1
    assert len(lines) == len(PTX.splitlines())


def test_access_behind_a_barrier_goes_in_front_of_it() -> None:
    text = hoists(PTX)["st.shared in front of bar.sync"].apply(PTX)
    order = opcodes(text)
    assert order.index("st.shared.b32") < order.index("bar.sync")


def test_access_that_needs_another_access_stays() -> None:
    # the store's value is what the load brings
    assert "st.global in front of mbarrier.try_wait" not in hoists(PTX)


def test_every_mutant_of_a_program_can_be_read_and_differs(target: Target) -> None:
    symbol = target.request.kernel_symbol
    plain = [instruction.text for instruction in parse_kernel(target.ptx, symbol).instructions]
    some = target.mutants[::7]
    assert len(some) > 50
    for mutant in some:
        changed = [instruction.text for instruction in parse_kernel(mutant.apply(target.ptx), symbol).instructions]
        assert changed != plain, (mutant.operator, mutant.change)


def test_operators_of_the_architecture_find_sites(target: Target) -> None:
    found = {mutant.operator for mutant in target.mutants}
    blackwell = {"leak", "column", "quadrant", "allocation"}
    # the pairs of a decode program share no box, and store none
    rest = {"multicast", "sources-only"}
    assert found == {operator.name for operator in OPERATORS} - blackwell - rest | {HOIST}


def test_site_is_the_chain_of_source_lines(target: Target) -> None:
    waits = [mutant for mutant in target.mutants if mutant.operator == "parity"]
    lines = {target.kernel_line(mutant) for mutant in waits}
    assert "mbarrier_wait(smem + Cfg::kStageFullOffset + ring.stage * 8, ring.phase, watch);" in lines
    operator, change, root, chain = target.site(waits[0])
    assert (operator, change, root) == ("parity", "flipped", "mbarrier")
    # the instruction, the loop around it, then the kernel's lines
    assert chain[1] == "while (!mbarrier_try_wait(barrier, parity)) {"
    assert target.kernel_line(waits[0]) == chain[2]

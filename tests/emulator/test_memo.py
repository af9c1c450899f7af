"""Runs of register arithmetic that are remembered: the same registers as without, and the same faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cakegen.emulator import Fault
from cakegen.emulator.text.issue_runs import issue_later
from cakegen.emulator.text.memo import MemoWriter, is_pure, registers_of
from cakegen.emulator.text.parse import parse_kernel
from cakegen.emulator.text.translate import Program
from cakegen.emulator.units.wgmma.issue import InFlight

KERNEL = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry chain(.param .u64 chain_param_0)
{
 .reg .b32 %r<12>;
 .reg .b64 %rd<4>;
 .reg .pred %p<2>;
 ld.param.u64 %rd1, [chain_param_0];
 mov.u32 %r1, %tid.x;
 add.s32 %r2, %r1, 5;
 shl.b32 %r3, %r2, 2;
 xor.b32 %r4, %r3, %r1;
 and.b32 %r5, %r4, 255;
 add.s32 %r6, %r5, %r6;
 st.global.u32 [%rd1], %r6;
 ret;
}
"""


def program() -> Program:
    return Program(parse_kernel(KERNEL, "chain"))


def block_of(made: Program) -> tuple[Any, list[Any], dict[str, int]]:
    """The run's memo, registers to put values into, and index by the last digit of `%r`."""
    made.translate_all()
    registers: list[Any] = [np.zeros(32, np.uint32) for _ in made.kernel.banks]
    names = {
        each.operands[0].name: each.operands[0].index
        for each in made.kernel.instructions
        if each.operands and hasattr(each.operands[0], "index")
    }
    made.block(2, False).run  # noqa: B018  # a memo is written with its function
    (memo,) = made.scope["M"]
    return memo, registers, names


def test_run_is_recalled_with_its_outputs_alone() -> None:
    memo, registers, names = block_of(program())
    registers[names["%r1"]] = np.arange(32, dtype=np.uint32)
    assert not memo.recall(registers)
    registers[names["%r6"]] = left = np.arange(32, dtype=np.uint32) + 7
    memo.keep(registers)
    registers[names["%r6"]] = np.zeros(32, np.uint32)
    before = registers[names["%r4"]]
    assert memo.recall(registers)
    assert registers[names["%r6"]] is left
    assert registers[names["%r4"]] is before, "nobody else reads it"


def test_other_inputs_are_no_hit() -> None:
    memo, registers, names = block_of(program())
    assert not memo.recall(registers)
    memo.keep(registers)
    registers[names["%r1"]] = np.ones(32, np.uint32)
    assert not memo.recall(registers)


def test_run_on_data_is_given_up() -> None:
    memo, registers, names = block_of(program())
    for number in range(64):
        registers[names["%r1"]] = np.full(32, number, np.uint32)
        assert not memo.recall(registers)
        memo.keep(registers)
    registers[names["%r1"]] = np.full(32, 3, np.uint32)
    assert not memo.recall(registers), "it was kept, and is no longer looked for"


def test_register_in_flight_is_left_to_the_instruction_that_reads_it() -> None:
    made = program()
    memo, registers, names = block_of(made)
    registers[names["%r1"]] = InFlight("a load")
    assert not memo.recall(registers)
    with pytest.raises(Fault, match="is used while a load is not waited for"):
        made.block(2, False).run(None, registers)


def test_line_of_a_block_names_its_instruction() -> None:
    made = program()
    lines = made.block(2, False).lines
    assert lines == [2, 2, 3, 4, 5, 6, 6, 7, 8]
    assert [made.kernel.instructions[index].root for index in dict.fromkeys(lines)][:3] == ["add", "shl", "xor"]


def test_excluded_register_stops_a_run() -> None:
    made = program()
    kernel = made.kernel
    lines = [(index, f"R[{index}] = R[{index + 1}]") for index in range(2, 7)]
    (shift,) = (each for each in kernel.instructions if each.root == "shl")
    rewritten = MemoWriter(kernel, registers_of(shift), []).rewrite(lines, False)
    assert rewritten == lines, "what is left on either side is too short"


@pytest.mark.parametrize("text", ["R[3] = w.clock()", "t = unpack(R[1], 'u4'); R[2] = t[0]", "load_global(w, R[1])"])
def test_what_depends_on_more_than_registers_is_not_remembered(text: str) -> None:
    assert not is_pure(text)


def test_wgmma_waits_for_arithmetic_that_has_nothing_to_do_with_it() -> None:
    kernel = program().kernel
    issue = (2, "w.wgmma.issue(I[2], R)")  # add %r2, %r1
    uses, apart, fence = (3, "R[1] = R[2]"), (6, "R[1] = R[2]"), (7, "w.wgmma.fence(R)")
    assert issue_later([issue, apart, fence], kernel) == [apart, issue, fence]
    assert issue_later([issue, uses, apart], kernel) == [issue, uses, apart]


def test_block_that_does_not_run_is_not_compiled() -> None:
    made = program()
    made.translate_all()
    assert "run" not in vars(made.block(2, False))
    assert not made.scope["M"]

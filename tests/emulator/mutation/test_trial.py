"""Trials: what a schedule shows of a mutant, and the stream of launches that overlap."""

from __future__ import annotations

import pytest

from cakegen.emulator.mutation.targets import target_of
from cakegen.emulator.mutation.trial import CHAIN, RequestTrial, schedules
from cakegen.errors import EmulationError
from cakegen.registry import Registry

FRONT = "decode:front_tp16_n8_r7_d2_m96_pair@sm_90a"
GEMM = "tail_gemm:tp16kt32s6n128p1@sm_90a"

pytestmark = [pytest.mark.emulator, pytest.mark.xdist_group("mutation")]


def test_only_overlapping_launches_show_a_lost_wait_for_earlier_ones(registry: Registry) -> None:
    trial = RequestTrial(registry, target_of(registry, FRONT, "sm_90a"), seeds=1)
    waits = [
        mutant
        for mutant in trial.reached(trial.target.mutants)
        if mutant.operator == "drop-wait" and mutant.instruction.text.startswith("griddepcontrol.wait")
    ]
    verdicts = {any("produce<" in line for line in trial.target.source_lines(each)): trial.run(each) for each in waits}
    assert len(verdicts) == len(waits) == 2
    assert (verdicts[True].outcome, verdicts[True].schedule) == ("unwritten-read", "chain")
    assert "elements of out that nothing has written" in verdicts[True].message
    # the matrix warps store what follows from the producer's loads
    assert verdicts[False].outcome == "survived"


def test_chain_is_the_last_schedule() -> None:
    assert list(schedules(2)) == [("early", 0), ("late", 0), ("random", 0), ("random", 1), CHAIN]


def test_name_may_choose_the_sms_and_the_tokens_of_the_request(registry: Registry) -> None:
    target = target_of(registry, f"{GEMM}/6/512", "sm_90a")
    assert (target.case.sm_count, target.case.tokens, target.name) == (6, 512, f"{GEMM}/6/512")
    with pytest.raises(EmulationError, match="does not launch it; leave out what is behind the slash"):
        target_of(registry, f"{GEMM}/6/8", "sm_90a")

"""Mutated texts of every format: a result or one of our errors; and what once failed, for ever.

`CAKEGEN_FUZZ_MUTATIONS` sets how many of each (300 by default); with `-m thorough` those up to number 2000 follow, with
`-m long` there are 100,000. Their counts are in `benchmarks/fuzz/`, made by `tests/support/fuzz/table.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.fuzz.formats import CORPUS, FORMATS, TAKEN, mutation, run_mutations

DEFAULT_MUTATIONS = 300
MUTATIONS = int(os.environ.get("CAKEGEN_FUZZ_MUTATIONS", DEFAULT_MUTATIONS))
THOROUGH_MUTATIONS, LONG_MUTATIONS = 2000, 100_000
# of the thorough ones, so many are a test
PART = 425


@pytest.mark.parametrize("name", FORMATS)
def test_mutations_are_read_or_refused(name: str, tmp_path: Path) -> None:
    count = run_mutations(name, range(MUTATIONS), tmp_path)
    assert count.tracebacks == []
    assert count.taken + count.refused == MUTATIONS
    assert count.refused > 0


@pytest.mark.parametrize(
    "numbers",
    [
        *(
            pytest.param(range(first, min(first + PART, THOROUGH_MUTATIONS)), marks=pytest.mark.thorough)
            for first in range(MUTATIONS, THOROUGH_MUTATIONS, PART)
        ),
        pytest.param(range(LONG_MUTATIONS), marks=pytest.mark.long),
    ],
    ids=lambda numbers: f"{numbers.start}-{numbers.stop}",
)
@pytest.mark.parametrize("name", FORMATS)
def test_many_mutations_are_read_or_refused(name: str, numbers: range, tmp_path: Path) -> None:
    assert run_mutations(name, numbers, tmp_path).tracebacks == []


@pytest.mark.parametrize("name", FORMATS)
def test_whole_texts_are_read(name: str, tmp_path: Path) -> None:
    """So that what a mutation meets is not a refusal of all."""
    outcomes = [FORMATS[name].read(text, tmp_path) for text in FORMATS[name].whole]
    assert TAKEN in outcomes
    assert mutation(name, 1) == mutation(name, 1)
    assert len({mutation(name, number) for number in range(20)}) > 5


REFUSALS = {
    "align_zero": r"PTX line 6: .align 0; it must be a power of two",
    "endless": "PTX line 7: from 'add.s32 %r1, %r1, 1' on no ret, exit or trap can be reached: it never ends",
    "huge_registers": "PTX line 6: 900000000 registers; at most 262144 are kept apart",
    "huge_shared": "PTX line 6: s has 99999999999 bytes; a CTA has at most 232448",
    "operand_count": "PTX line 7: 'add.s32 %r1, %r2': add has 3 operands",
    "unclosed_parameters": "PTX line 4: .entry patience: its list of parameters never ends",
    "unknown_symbol": "PTX line 7: nothing is called nowhere: no parameter, and no variable",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_text_of_the_corpus_is_refused_with_its_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It was a traceback, or gigabytes, or an hour."""
    from cakegen.cli.emulate_files import BAD_INPUT, FileRequest, run_files
    from cakegen.emulator import Options

    launch = CORPUS / "patience.json"
    request = FileRequest(CORPUS / f"{name}.ptx", None, launch, None, None, "sm_100a", (), ())
    assert run_files(request, [Options()]) == BAD_INPUT
    assert f"{name}.ptx: {REFUSALS[name]}" in capsys.readouterr().err

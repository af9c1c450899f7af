"""Bodies of programs: what tells two apart, and that a quick run takes every one of them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from support.emulator.bodies import (
    ARCHES,
    SMALL,
    Body,
    body_of,
    compiled_rows,
    current_rows,
    every_key,
    quick_keys,
    quick_rows,
    recorded,
)
from support.emulator.sweep import Sweep, cases_of, run_case

from cakegen.compile import CompileRequest, compile_ptx
from cakegen.registry import load_registry

HEADER = """
template <class Cfg>
__device__ __forceinline__ void scale(float* out, unsigned count) {
    for (unsigned at = threadIdx.x; at < count; at += Cfg::kStep) {
        if constexpr (Cfg::kSquared) {
            out[at] *= out[at];
        } else {
            out[at] += Cfg::kAdded;
        }
    }
}
"""
SOURCE = """
#include "scale.cuh"
struct Cfg {{
    static constexpr unsigned kStep = {step};
    static constexpr bool kSquared = {squared};
    static constexpr float kAdded = {added};
}};
extern "C" __global__ void {symbol}(float* {operand}, unsigned count) {{ scale<Cfg>({operand}, count); }}
"""


def digest(squared: str, step: int = 32, added: str = "1.5f", symbol: str = "kernel_a", operand: str = "out") -> str:
    source = SOURCE.format(step=step, squared=squared, added=added, symbol=symbol, operand=operand)
    request = CompileRequest("a", "sm_90a", source, (("scale.cuh", HEADER),), ("-std=c++17",), (), symbol)
    return body_of(compile_ptx(request))


def row(key: str, body: str, export: str = SMALL) -> Body:
    return Body(export, "sm_90a", key, f"program of {key}", body)


def keys(rows: Iterable[Body]) -> list[str]:
    return [each.key for each in rows]


def test_forms_that_one_header_chooses_between_are_two_bodies_and_both_are_taken() -> None:
    """Their names, constants and immediates may differ as they like: those make no body."""
    sums = [digest("false"), digest("false", 64, "2.5f", "kernel_of_another_name", "destination")]
    squares = [digest("true"), digest("true", 64)]
    assert sums[0] == sums[1]
    assert squares[0] == squares[1]
    rows = [row(f"k{number}", body) for number, body in enumerate([*sums, *squares])]
    assert {each.body for each in quick_rows(rows)} == {sums[0], squares[0]}
    assert len(quick_rows(rows)) == 2


def test_both_ends_of_the_token_tiles_of_a_body_are_taken() -> None:
    rows = [row(f"decode:tail_tp8_n{tile}_r4@sm_90a", "a") for tile in (16, 8, 192, 128)]
    assert keys(quick_rows(rows)) == ["decode:tail_tp8_n8_r4@sm_90a", "decode:tail_tp8_n192_r4@sm_90a"]
    prefill = [row(key, "b") for key in ("front:i64@sm_90a", "front:i64s4n224@sm_90a", "front:i64s6n144@sm_90a")]
    assert keys(quick_rows(prefill)) == ["front:i64s6n144@sm_90a", "front:i64@sm_90a"]


def test_of_equal_tiles_the_one_with_the_fewest_weights_is_taken() -> None:
    of_degrees = [row(f"decode:tail_tp{tp}_n8_r4@sm_90a", "a") for tp in (2, 16, 4)]
    assert keys(quick_rows(of_degrees)) == ["decode:tail_tp16_n8_r4@sm_90a"]
    of_slices = [row(f"decode:m_decode_g8_n16_r5_k{chunks}_9_c2", "a") for chunks in (56, 4, 14)]
    assert keys(quick_rows(of_slices)) == ["decode:m_decode_g8_n16_r5_k4_9_c2"]


def test_small_model_stands_for_a_body_that_it_has() -> None:
    rows = [row("decode:n8", "a", "large"), row("decode:n16", "a")]
    rows += [row("decode:n32", "b", "large"), row("decode:n8", "b", "large")]
    taken = [(each.export, each.key, each.body) for each in quick_rows(rows)]
    assert taken == [(SMALL, "decode:n16", "a"), ("large", "decode:n8", "b")]


def test_key_that_the_table_does_not_know_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new program is a body of its own until the table says otherwise."""
    changed = next(each for each in recorded() if each.export == SMALL and each.key not in quick_keys(SMALL, each.arch))
    known = tuple(each for each in recorded() if each.program != changed.program)
    monkeypatch.setattr("support.emulator.bodies.recorded", lambda: known)
    current_rows.cache_clear()
    try:
        assert changed.key in quick_keys(SMALL, changed.arch)
    finally:
        current_rows.cache_clear()


def test_table_holds_every_program_of_every_export() -> None:
    """Of texts as they are: after an edit of a template, write the table again with the command of the module."""
    unknown = [each.key for each in current_rows() if each.body.startswith("unknown")]
    assert unknown == [], "run `python tests/support/emulator/bodies.py`"
    assert len(current_rows()) == len(list(every_key()))


def test_every_body_is_in_the_quick_set() -> None:
    taken = {(each.arch, each.body) for each in quick_rows(current_rows())}
    assert taken == {(each.arch, each.body) for each in current_rows()}


# a body is of one role, so that bodies of different roles need no comparison
ROLES = sorted({(arch, registry.program(key).role) for registry, arch, key in every_key()})


@pytest.mark.thorough
@pytest.mark.parametrize(("arch", "role"), ROLES)
def test_every_body_that_is_compiled_is_in_the_quick_set(arch: str, role: str) -> None:
    """Whatever the table holds, and whichever compiler wrote it."""
    taken = {(each.export, each.key) for each in quick_rows(current_rows()) if each.arch == arch}
    of_role = [place for place in every_key() if place[1] == arch and place[0].program(place[2]).role == role]
    compiled = compiled_rows(keys=of_role)
    assert {each.body for each in compiled if (each.export, each.key) in taken} == {each.body for each in compiled}


LARGE = [each for each in quick_rows(current_rows()) if each.export != SMALL]


@pytest.mark.emulator
@pytest.mark.parametrize("taken", LARGE, ids=lambda each: f"{each.export}-{each.key}")
def test_body_that_the_small_model_lacks_matches_the_reference(taken: Body) -> None:
    """At full size, under one random schedule; tables of `benchmarks/emulator/` hold all of its keys."""
    torch.set_num_threads(1)
    registry = load_registry(taken.export)
    sweep = Sweep(taken.export, taken.arch, 0, False, f"^{taken.key}$")
    ((case,),) = cases_of(registry, sweep).values()
    assert run_case(registry, case, sweep.schedules)[0] == "clean"


def test_architectures_of_the_table_are_those_with_texts_of_their_own() -> None:
    texts = {arch for registry, _, key in every_key() for arch in registry.program(key).arches}
    assert set(ARCHES) <= texts
    assert texts - set(ARCHES) == {"sm_103a"}

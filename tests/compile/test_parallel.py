"""Many programs at once, and requests built from a registry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.compile.sources import HEADER, PLAIN, PLAIN_REQUEST

from cakegen.compile import CompiledProgram, CompileRequest, Outcome, compile_many, request_for
from cakegen.errors import CompileError, RegistryError
from cakegen.registry import LaunchRecord, Program, Registry, file_digest

SCALES = [replace(PLAIN_REQUEST, constants=(("SCALE", scale),)) for scale in range(1, 5)]
BROKEN = replace(PLAIN_REQUEST, name="broken", source="int broken = ;")


@pytest.mark.parametrize("workers", [1, 2, 8, None])
def test_compile_many_keeps_the_order_and_reports_each_once(workers: int | None) -> None:
    done: list[CompileRequest] = []
    outcomes = compile_many(SCALES, workers, lambda request, outcome: done.append(request))
    assert [isinstance(outcome, CompiledProgram) for outcome in outcomes] == [True] * 4
    assert [(r.constants, len(done)) for r in sorted(done, key=lambda r: r.constants)] == [
        (r.constants, 4) for r in SCALES
    ]
    assert len({outcome.cubin for outcome in outcomes if isinstance(outcome, CompiledProgram)}) == 4


def test_compile_many_returns_a_refusal_and_goes_on() -> None:
    outcomes = compile_many([SCALES[0], BROKEN, SCALES[1]], 2)
    assert [type(outcome) for outcome in outcomes] == [CompiledProgram, CompileError, CompiledProgram]
    assert "broken_kernel.cu(1): error" in str(outcomes[1])


def test_compile_many_compiles_equal_requests_once() -> None:
    done: list[Outcome] = []
    outcomes = compile_many([SCALES[0]] * 5, 2, lambda request, outcome: done.append(outcome))
    assert len(done) == 1
    assert outcomes == done * 5


def test_compile_many_of_nothing_is_nothing() -> None:
    assert compile_many([]) == []


def test_compile_many_refuses_no_workers() -> None:
    with pytest.raises(CompileError, match="at least 1 worker; got 0"):
        compile_many(SCALES, 0)


def test_compile_many_passes_on_what_its_callback_raises() -> None:
    def stop(request: CompileRequest, outcome: Outcome) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_many(SCALES, 1, stop)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """One program in a tree of its own; the model plays no part in compiling."""
    program = Program(
        name="plain",
        role="decode_front",
        headers=("scaled.cuh",),
        arches=("sm_90a",),
        flags=("-std=c++17",),
        ffi_entry="run",
        arg_plan=(("buffer", "out"), ("parameter", "count")),
        tensor_maps=(),
        barriers=(),
        launch=LaunchRecord((128, 1, 1), (1, 1, 1), False, False, False, 0),
        digests=(("plain_kernel.cu", file_digest(PLAIN)), ("scaled.cuh", file_digest(HEADER))),
    )
    tree = Registry(
        root=tmp_path / "small",
        export="small",
        model=None,  # type: ignore[arg-type]
        programs={"plain": program},
        kernels={"decode:a": "plain", "decode:b": "plain"},
        specializations={"decode:a": {"SCALE": 3, "AGAIN": 1}},
    )
    tree.csrc.mkdir(parents=True)
    (tree.csrc / "plain_kernel.cu").write_text(PLAIN)
    tree.shared.mkdir()
    (tree.shared / "scaled.cuh").write_text(HEADER)
    return tree


def test_request_for_joins_program_sources_and_constants(registry: Registry) -> None:
    request = request_for(registry, "decode:a", "sm_90a", ("-DCAKEGEN_CHAOS",))
    expected = replace(PLAIN_REQUEST, flags=("-std=c++17", "-DCAKEGEN_CHAOS"), constants=(("AGAIN", 1), ("SCALE", 3)))
    assert request == replace(expected, kernel_symbol="kernel_plain")
    assert isinstance(compile_many([request])[0], CompiledProgram)


def test_request_for_gives_each_key_its_own_constants(registry: Registry) -> None:
    assert request_for(registry, "decode:b", "sm_90a").constants == ()


def test_request_for_refuses_an_architecture_that_the_program_lacks(registry: Registry) -> None:
    with pytest.raises(CompileError, match="decode:a: plain is written for sm_90a; got sm_100a"):
        request_for(registry, "decode:a", "sm_100a")


def test_request_for_refuses_an_unknown_key(registry: Registry) -> None:
    with pytest.raises(RegistryError, match="no program for key 'decode:c'"):
        request_for(registry, "decode:c", "sm_90a")


def test_request_for_names_a_source_that_is_missing(registry: Registry) -> None:
    (registry.shared / "scaled.cuh").unlink()
    with pytest.raises(RegistryError, match=r"scaled\.cuh: No such file.*cakegen export small"):
        request_for(registry, "decode:a", "sm_90a")


def test_request_for_refuses_sources_that_the_registry_was_not_written_with(registry: Registry) -> None:
    """A package that is replaced under a running server: its registry is in memory, its sources are read later."""
    assert request_for(registry, "decode:a", "sm_90a").source == PLAIN
    (registry.shared / "scaled.cuh").write_text(HEADER + " ")
    with pytest.raises(RegistryError, match=r"scaled\.cuh: not the file of this registry .* restart"):
        request_for(registry, "decode:a", "sm_90a")
    (registry.shared / "scaled.cuh").write_bytes(b"\xff")
    with pytest.raises(RegistryError, match=r"scaled\.cuh: not UTF-8"):
        request_for(registry, "decode:a", "sm_90a")

"""Control words and the wait record."""

from __future__ import annotations

import gc

import pytest
from cuda.bindings import driver as real
from runtime_fakes import Machine

from cakegen.errors import LaunchError
from cakegen.registry import Registry
from cakegen.runtime import control
from cakegen.runtime.control import (
    MIN_RETIRED,
    RESERVED_SLOTS,
    SLAB_SLOTS,
    SLOT_BYTES,
    ControlWord,
    DeviceControl,
    describe_wait_record,
    open_control,
)
from cakegen.runtime.device import open_device


def opened(machine: Machine) -> DeviceControl:
    return open_control(open_device(0))


def test_words_are_zeroed_apart_and_on_a_stream_of_their_own(machine: Machine) -> None:
    words = [opened(machine).take_word().address for _ in range(SLAB_SLOTS)]
    assert len(set(words)) == SLAB_SLOTS
    assert all(word % SLOT_BYTES == 0 for word in words)
    memory = [call for call in machine.driver.calls if call.startswith(("cuMem", "cuStream"))]
    assert memory[-4:] == ["cuStreamCreate", "cuMemsetD8Async", "cuStreamSynchronize", "cuStreamDestroy"]


def lend_to_the_reserve(owner: DeviceControl) -> list[ControlWord]:
    """Take words until one more would refill."""
    return [owner.take_word() for _ in range(SLAB_SLOTS - RESERVED_SLOTS + 1)]


def test_retired_words_come_back_only_after_a_synchronise(machine: Machine) -> None:
    owner = opened(machine)
    words = lend_to_the_reserve(owner)
    for word in words[:MIN_RETIRED]:
        owner.retire_word(word)
    machine.driver.calls.clear()
    again = {owner.take_word().address for _ in range(MIN_RETIRED)}
    assert again & {word.address for word in words[:MIN_RETIRED]}
    assert not again & {word.address for word in words[MIN_RETIRED:]}
    assert "cuCtxSynchronize" in machine.driver.calls
    assert "cuMemAlloc" not in machine.driver.calls


def test_few_retired_words_are_not_worth_a_synchronise(machine: Machine) -> None:
    owner = opened(machine)
    words = lend_to_the_reserve(owner)
    owner.retire_word(words[5])
    machine.driver.calls.clear()
    owner.take_word()
    assert "cuMemAlloc" in machine.driver.calls
    assert "cuCtxSynchronize" not in machine.driver.calls


def test_refused_synchronise_allocates_instead(machine: Machine) -> None:
    owner = opened(machine)
    words = lend_to_the_reserve(owner)
    for word in words:
        owner.retire_word(word)
    machine.driver.failures["cuCtxSynchronize"] = real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    fresh = {owner.take_word().address for _ in range(SLAB_SLOTS)}
    assert not fresh & {word.address for word in words}


def test_captured_words_never_come_back(machine: Machine) -> None:
    owner = opened(machine)
    words = lend_to_the_reserve(owner)
    for word in words:
        word.captured = True
        owner.retire_word(word)
    fresh = {owner.take_word().address for _ in range(SLAB_SLOTS)}
    assert not fresh & {word.address for word in words}
    assert "cuCtxSynchronize" not in machine.driver.calls


def test_reserve_serves_a_capture_and_then_refuses_before_the_driver_is_asked(machine: Machine) -> None:
    owner = opened(machine)
    lend_to_the_reserve(owner)
    machine.capturing = True
    machine.driver.calls.clear()
    for _ in range(RESERVED_SLOTS - 1):
        owner.take_word()
    with pytest.raises(LaunchError, match="all control words are lent"):
        owner.take_word()
    assert machine.driver.calls == []


def test_wait_record_starts_from_the_environment(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAKEGEN_WAIT_SECONDS", "0.25")
    monkeypatch.setenv("CAKEGEN_CHAOS_SEED", "77")
    record = opened(machine).wait_record
    assert record.words[:3] == (250_000_000, 77, 0)
    record.write_chaos_seed(5)
    record.write_wait_limit(60)
    assert record.words[:2] == (60_000_000_000, 5)


def test_wait_record_defaults_to_two_seconds(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CAKEGEN_WAIT_SECONDS", raising=False)
    monkeypatch.delenv("CAKEGEN_CHAOS_SEED", raising=False)
    assert opened(machine).wait_record.words == (2_000_000_000, *[0] * 15)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_wait_limit_refuses_nonsense(machine: Machine, seconds: float) -> None:
    with pytest.raises(LaunchError, match="wait limit"):
        opened(machine).wait_record.write_wait_limit(seconds)


def test_bad_environment_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAKEGEN_WAIT_SECONDS", "soon")
    with pytest.raises(LaunchError, match="CAKEGEN_WAIT_SECONDS must be a number; got 'soon'"):
        opened(machine)


def test_unclaimed_record_says_nothing(tiny_registry: Registry) -> None:
    assert describe_wait_record((2_000_000_000, 0, 0, *[0] * 6), (tiny_registry,)) is None


def test_claimed_record_names_program_cta_warp_barrier_and_parity(tiny_registry: Registry) -> None:
    key, name = next((k, n) for k, n in tiny_registry.kernels.items() if k.startswith("decode:"))
    program = tiny_registry.programs[name]
    first, count = program.barriers[0]
    assert count > 1, "the example needs a barrier with stages"
    words = (2_000_000_000, 0, 1, int(name.rsplit("_", 1)[-1][:8], 16), 17, 4, 1, 1, 0)
    report = describe_wait_record(words, (tiny_registry,))
    assert report is not None
    for part in (name, key, program.role, "CTA 17", "warp 4", f"barrier {first}[1]", "parity 1 expected", "2 s"):
        assert part in report
    behind = (*words[:6], count, *words[7:])
    second, stages = program.barriers[1]
    assert f"barrier {second}{'[0]' if stages > 1 else ''}" in (describe_wait_record(behind, (tiny_registry,)) or "")


def test_claimed_record_of_the_grid_counter_and_of_an_unknown_program(tiny_registry: Registry) -> None:
    words = (2_000_000_000, 0, 1, 0xDEADBEEF, 3, 2, control.GRID_COUNTER, 0, 41)
    report = describe_wait_record(words, (tiny_registry,)) or ""
    assert "unknown program deadbeef" in report
    assert "the grid's arrival counter" in report
    assert "return to 0; it holds 41" in report


def test_finaliser_takes_no_lock(machine: Machine) -> None:
    owner = opened(machine)
    word = owner.take_word()
    with owner._lock:
        owner.retire_word(word)
    gc.collect()
    assert list(owner._retired) == [word.address]

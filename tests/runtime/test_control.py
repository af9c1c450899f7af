"""Control words and the wait record."""

from __future__ import annotations

import gc
import itertools

import pytest
from cuda.bindings import driver as real
from support.models import kimi_k3_model
from support.runtime.fakes import Machine

from cakegen.errors import LaunchError
from cakegen.model import DeviceFacts
from cakegen.plan import control_words, plan_route
from cakegen.registry import Registry
from cakegen.runtime import control
from cakegen.runtime.control import (
    RESERVED_SLOTS,
    SLOT_SIZES,
    WORD_BYTES,
    ControlWords,
    DeviceControl,
    describe_wait_record,
    open_control,
)
from cakegen.runtime.device import open_device
from cakegen.runtime.streams import ForeignStream, KnownStream

LARGEST = SLOT_SIZES[-1][0] // WORD_BYTES
# the fewest words that each size of slot is taken for, with the slots of a slab
SIZES = [(1, *SLOT_SIZES[0]), (SLOT_SIZES[0][0] // WORD_BYTES + 1, *SLOT_SIZES[1])]
every_size = pytest.mark.parametrize(("count", "slot_bytes", "slots"), SIZES)


def opened(machine: Machine) -> DeviceControl:
    return open_control(open_device(0))


@every_size
def test_words_are_apart_and_in_slots_of_their_size(machine: Machine, count: int, slot_bytes: int, slots: int) -> None:
    owner = opened(machine)
    addresses = sorted(owner.take_words(count).address for _ in range(2 * slots))
    assert all(address % slot_bytes == 0 for address in addresses)
    assert all(after - before >= slot_bytes for before, after in itertools.pairwise(addresses))


def test_slabs_are_zeroed_on_a_stream_of_their_own(machine: Machine) -> None:
    opened(machine)
    memory = [call for call in machine.driver.calls if call.startswith(("cuMemA", "cuMems", "cuStream"))]
    slab = ["cuMemAlloc", "cuStreamCreate", "cuMemsetD8Async", "cuStreamSynchronize", "cuStreamDestroy"]
    assert memory == slab * len(SLOT_SIZES)


def test_a_slot_is_the_smallest_that_holds_the_words(machine: Machine) -> None:
    owner = opened(machine)
    small, large = (pool.slot_bytes // WORD_BYTES for pool in owner._pools)
    for count, pool in ((1, 0), (small, 0), (small + 1, 1), (large, 1)):
        assert owner.take_words(count).home is owner._pools[pool].retired


def test_more_words_than_a_slot_holds_are_refused(machine: Machine) -> None:
    message = rf"{LARGEST + 1} control words need {WORD_BYTES * (LARGEST + 1)} bytes; a runner has at most 8192"
    with pytest.raises(LaunchError, match=message):
        opened(machine).take_words(LARGEST + 1)


def test_a_slot_holds_the_words_of_every_plan_of_the_largest_part() -> None:
    """Cut tiles are fewer than two waves, so their number grows with the multiprocessors alone."""
    model = kimi_k3_model()
    most = 0
    for tokens in range(256, model.max_tokens + 1, 256):
        for stage, tp in (("front", 2), ("front", 8), ("tail", 1), ("tail", 8)):
            device = DeviceFacts.nominal("sm_90a", 132)
            plan = plan_route(model, stage=stage, tp=tp, tokens=tokens, partials=1, device=device)
            most = max(most, *(control_words(launch) for launch in plan.launches))
    assert 0 < most <= LARGEST


HERE, ELSEWHERE = KnownStream(0x5EA), KnownStream(0xCA)
"""Streams of runners: one on which they were called, and one that another thread captures."""


def lend_to_the_reserve(owner: DeviceControl, count: int, slots: int) -> list[ControlWords]:
    """Take words until one more would refill."""
    return [owner.take_words(count) for _ in range(slots - RESERVED_SLOTS + 1)]


@every_size
def test_retired_words_come_back_once_their_streams_are_done(
    machine: Machine, count: int, slot_bytes: int, slots: int
) -> None:
    owner = opened(machine)
    lent = lend_to_the_reserve(owner, count, slots)
    few = slots // 4
    for words in lent[:few]:
        owner.retire_words(words, (HERE,))
    machine.driver.calls.clear()
    machine.driver.synchronised.clear()
    again = {owner.take_words(count).address for _ in range(few)}
    assert again & {words.address for words in lent[:few]}
    assert not again & {words.address for words in lent[few:]}
    assert machine.driver.synchronised == [HERE.handle]
    assert "cuMemAlloc" not in machine.driver.calls


@every_size
def test_words_come_back_while_another_thread_captures_and_its_capture_survives(
    machine: Machine, count: int, slot_bytes: int, slots: int
) -> None:
    """A wait for the whole context would end the capture, whatever the mode of this thread."""
    owner = opened(machine)
    lent = lend_to_the_reserve(owner, count, slots)
    machine.driver.captured_streams = {ELSEWHERE.handle}
    for at, words in enumerate(lent):
        owner.retire_words(words, (HERE, ELSEWHERE) if at % 2 else (HERE,))
    free, busy = ({words.address for words in lent[at::2]} for at in range(2))
    again = {owner.take_words(count).address for _ in range(len(lent) // 2)}
    assert machine.driver.broken_captures == set()
    assert again & free
    assert not again & busy
    machine.driver.captured_streams = set()
    again |= {owner.take_words(count).address for _ in range(len(lent) // 2)}
    assert again & busy


@every_size
def test_few_retired_words_are_not_worth_a_synchronise(
    machine: Machine, count: int, slot_bytes: int, slots: int
) -> None:
    owner = opened(machine)
    lent = lend_to_the_reserve(owner, count, slots)
    for words in lent[: slots // 4 - 1]:
        owner.retire_words(words, (HERE,))
    machine.driver.calls.clear()
    machine.driver.synchronised.clear()
    owner.take_words(count)
    assert "cuMemAlloc" in machine.driver.calls
    assert HERE.handle not in machine.driver.synchronised


@every_size
def test_words_of_a_destroyed_stream_come_back_once_its_event_is_complete(
    machine: Machine, count: int, slot_bytes: int, slots: int
) -> None:
    owner = opened(machine)
    lent = lend_to_the_reserve(owner, count, slots)
    foreign = ForeignStream(0xDEAD, owner.device.context)
    assert foreign.marks[0]() == 0
    machine.driver.busy, machine.driver.destroyed = {0xDEAD}, {0xDEAD}
    for words in lent:
        owner.retire_words(words, (HERE, foreign))
    machine.driver.failures["cuEventSynchronize"] = real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    fresh = {owner.take_words(count).address for _ in range(slots // 2)}
    assert not fresh & {words.address for words in lent}
    machine.driver.failures.clear()
    again = {owner.take_words(count).address for _ in range(slots)}
    assert again & {words.address for words in lent}
    assert machine.driver.busy == set()


@every_size
def test_full_device_is_served_from_what_is_there(machine: Machine, count: int, slot_bytes: int, slots: int) -> None:
    """An engine leaves no memory free: the reserve serves, then what was given back, and only then the call fails."""
    owner = opened(machine)
    lent = lend_to_the_reserve(owner, count, slots)
    machine.driver.failures["cuMemAlloc"] = real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    owner.retire_words(lent[0], (HERE,))
    taken = [owner.take_words(count).address for _ in range(RESERVED_SLOTS)]
    assert lent[0].address in taken
    assert len(set(taken)) == RESERVED_SLOTS
    with pytest.raises(LaunchError, match="cuMemAlloc for control words failed: CUDA_ERROR_OUT_OF_MEMORY"):
        owner.take_words(count)


@every_size
def test_captured_words_never_come_back(machine: Machine, count: int, slot_bytes: int, slots: int) -> None:
    owner = opened(machine)
    lent = lend_to_the_reserve(owner, count, slots)
    for words in lent:
        words.captured = True
        owner.retire_words(words, (HERE,))
    fresh = {owner.take_words(count).address for _ in range(slots)}
    assert not fresh & {words.address for words in lent}


@every_size
def test_reserve_serves_a_capture_before_the_driver_is_asked(
    machine: Machine, count: int, slot_bytes: int, slots: int
) -> None:
    owner = opened(machine)
    lend_to_the_reserve(owner, count, slots)
    machine.capturing = True
    machine.driver.calls.clear()
    for _ in range(RESERVED_SLOTS - 1):
        owner.take_words(count)
    assert machine.driver.calls == []


@every_size
def test_capture_that_spends_the_reserve_allocates_in_relaxed_mode_and_never_synchronises(
    machine: Machine, count: int, slot_bytes: int, slots: int
) -> None:
    owner = opened(machine)
    lent = lend_to_the_reserve(owner, count, slots)
    for words in lent:
        owner.retire_words(words, (HERE,))
    machine.capturing = True
    machine.driver.calls.clear()
    fresh = {owner.take_words(count).address for _ in range(RESERVED_SLOTS + slots)}
    assert len(fresh) == RESERVED_SLOTS + slots
    assert not fresh & {words.address for words in lent}
    calls = machine.driver.calls
    modes = [at for at, call in enumerate(calls) if call == "cuThreadExchangeStreamCaptureMode"]
    assert modes[0] < calls.index("cuMemAlloc") < modes[1]


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


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("CAKEGEN_WAIT_SECONDS", "soon", "CAKEGEN_WAIT_SECONDS must be a number; got 'soon'"),
        ("CAKEGEN_WAIT_SECONDS", "0", "environment: CAKEGEN_WAIT_SECONDS: wait limit must be between 0 and 1e9"),
        ("CAKEGEN_WAIT_SECONDS", "nan", "environment: CAKEGEN_WAIT_SECONDS: wait limit must be between 0 and 1e9"),
        ("CAKEGEN_CHAOS_SEED", "inf", "CAKEGEN_CHAOS_SEED must be a whole number; got 'inf'"),
        ("CAKEGEN_CHAOS_SEED", "1.5", "CAKEGEN_CHAOS_SEED must be a whole number; got '1.5'"),
    ],
)
def test_bad_environment_is_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(LaunchError, match=message):
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
    words = owner.take_words(1)
    with owner._lock:
        owner.retire_words(words, (HERE,))
    gc.collect()
    assert list(owner._pools[0].retired) == [words]

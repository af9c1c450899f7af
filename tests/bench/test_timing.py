"""The measuring loop, rehearsed with a clock that records what it was asked."""

from __future__ import annotations

import gc

import pytest
from support.bench.fakes import FakeClock

from cakegen.bench.timing import WARM_ROUNDS, copies_for, time_alternating, time_rotating


def named_calls(*names: str) -> dict[str, object]:
    def make(name: str) -> object:
        def call() -> None:
            pass

        call.__name__ = name
        return call

    return {name: make(name) for name in names}


def names_in(events: list[object]) -> list[str]:
    return [event if isinstance(event, str) else getattr(event, "__name__", "hold") for event in events]


def test_every_timed_call_has_a_clean_flush_before_it_and_arms_take_turns() -> None:
    clock = FakeClock()
    time_alternating(named_calls("a", "b", "c"), clock, 3)  # type: ignore[arg-type]
    events = names_in(clock.events)
    assert events[0] == "hold"
    assert events[1::2] == ["flush"] * 3 * (WARM_ROUNDS + 3)
    order = events[2::2]
    turns = [order[start : start + 3] for start in range(0, len(order), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert turns[:3] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]


def test_samples_reach_their_own_arm_and_warm_rounds_are_dropped() -> None:
    times = {"a": 10.0, "b": 20.0}

    def script(call: object, number: int) -> float:
        warm = number <= WARM_ROUNDS * 2
        return 9999.0 if warm else times[call.__name__]  # type: ignore[attr-defined]

    found = time_alternating(named_calls("a", "b"), FakeClock(script), 5)  # type: ignore[arg-type]
    assert {name: (s.median_us, s.min_us, s.count) for name, s in found.items()} == {
        "a": (10.0, 10.0, 5),
        "b": (20.0, 20.0, 5),
    }


def test_another_flush_can_stand_before_the_calls() -> None:
    clock = FakeClock()
    time_alternating(named_calls("a"), clock, 1, before=clock.flush_dirty)  # type: ignore[arg-type]
    assert "flush" not in clock.events
    assert clock.events.count("dirty") == WARM_ROUNDS + 1


def test_no_arms_give_no_times() -> None:
    assert time_alternating({}, FakeClock(), 3) == {}


def test_rotation_flushes_nothing_and_drops_its_first_turn() -> None:
    clock = FakeClock(lambda call, number: 500.0 if number <= 3 else 7.0)
    found = time_rotating(list(named_calls("a", "b", "c").values()), clock, 7)  # type: ignore[arg-type]
    assert names_in(clock.events) == ["hold", *["a", "b", "c"] * 4]
    assert (found.median_us, found.count) == (7.0, 9)


def test_rotation_stays_below_what_the_driver_queues() -> None:
    clock = FakeClock()
    time_rotating(list(named_calls(*"abcdefgh").values()), clock, 10_000)  # type: ignore[arg-type]
    assert len(clock.events) - 1 <= 208


@pytest.mark.parametrize("weight_bytes", [4_500_000, 17_432_576, 120 * 2**20, 240_390_144])
def test_all_copies_but_one_exceed_twice_the_l2(weight_bytes: int) -> None:
    l2_bytes = 60 * 2**20
    copies = copies_for(weight_bytes, l2_bytes)
    assert (copies - 1) * weight_bytes > 2 * l2_bytes
    assert (copies - 2) * weight_bytes <= 2 * l2_bytes


def test_small_weights_are_not_rotated() -> None:
    assert copies_for(1_000_000, 60 * 2**20) == 0


def test_collection_is_off_in_the_loop_and_on_again_behind_it() -> None:
    seen = []
    time_alternating({"a": lambda: seen.append(gc.isenabled())}, FakeClock(), 1)
    assert seen == [False] * (WARM_ROUNDS + 1)
    assert gc.isenabled()

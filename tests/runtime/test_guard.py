"""Locks end in an error: in a handler that interrupts its own thread, in a child forked while one is held."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.runtime.fakes import Machine
from support.runtime.operands import tail_operands
from support.runtime.prepare import on_gpu, prepare_front, prepare_tail

from cakegen.errors import LaunchError
from cakegen.registry import Registry
from cakegen.runtime import LatentMoe, control, device, guard, programs, routes, streams, workspace
from cakegen.runtime.guard import GuardedLock, Section

AGAIN = r"this thread is in the middle of it already\. A signal handler or a finaliser that interrupted it must not"


def answer_of_child(ask: Callable[[], Any]) -> str:
    """What a forked child says, or the error that it met; a child that hangs fails the test."""
    reader, writer = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        try:
            writer.send(str(ask()))
        except LaunchError as error:
            writer.send(f"LaunchError: {error}")

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    try:
        assert reader.poll(60), "the child hangs"
        return str(reader.recv())
    finally:
        child.kill()
        child.join(30)


class InsideOf:
    """Runs something once, in the middle of a function of a module, in the thread that calls it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, work: Callable[[], Any]) -> None:
        original, self.outcomes = getattr(module, name), []

        def interrupted(*arguments: Any, **options: Any) -> Any:
            if not self.outcomes:
                self.outcomes.append("")
                try:
                    self.outcomes[0] = str(work())
                except LaunchError as error:
                    self.outcomes[0] = f"LaunchError: {error}"
            return original(*arguments, **options)

        monkeypatch.setattr(module, name, interrupted)


@pytest.mark.parametrize("make", [GuardedLock, Section])
def test_thread_that_enters_again_is_refused_and_may_enter_afterwards(make: type[Section]) -> None:
    section = make("the work")
    with section, pytest.raises(LaunchError, match=f"^the work: {AGAIN}"), section:
        pass
    with section:
        pass


def test_other_threads_wait_for_a_lock_and_enter_a_section() -> None:
    lock, section, done = GuardedLock("the lock"), Section("the section"), []

    def enter(guarded: Section) -> None:
        with guarded:
            done.append(guarded)

    with section:
        thread = threading.Thread(target=enter, args=(section,))
        thread.start()
        thread.join(60)
        assert done == [section]
    with lock:
        thread = threading.Thread(target=enter, args=(lock,))
        thread.start()
        thread.join(0.05)
        assert lock not in done
    thread.join(60)
    assert done == [section, lock]


def test_wait_for_another_thread_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MOST_WAIT_SECONDS", 0.01)
    lock, errors = GuardedLock("the lock"), []

    def enter() -> None:
        try:
            with lock:
                pass
        except LaunchError as error:
            errors.append(str(error))

    with lock:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join(60)
    assert errors[0].startswith("the lock: another thread has been in the middle of it for 0.01 s, longer than")
    with lock:
        pass


@pytest.mark.parametrize("holder", ["another thread", "this thread"])
def test_child_forked_while_a_lock_is_held_takes_it(holder: str) -> None:
    lock, held, done = GuardedLock("the lock"), threading.Event(), threading.Event()

    def enter() -> str:
        with lock:
            return "entered"

    def hold() -> None:
        with lock:
            held.set()
            done.wait(60)

    if holder == "this thread":
        with lock:
            assert answer_of_child(enter) == "entered"
    else:
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(60)
        assert answer_of_child(enter) == "entered"
        done.set()
        thread.join(60)
    assert enter() == "entered"


SITES = {
    "a device is opened": (device, "_read_device"),
    "control memory is allocated": (control, "DeviceControl"),
    "control words are lent": (control.driver, "is_capturing"),
    "a program is loaded": (programs.driver, "load_kernel"),
}


@pytest.mark.parametrize("site", SITES)
def test_prepare_in_a_signal_handler_inside_of_prepare_ends_in_an_error_or_a_runner(
    machine: Machine, tiny_registry: Registry, monkeypatch: pytest.MonkeyPatch, site: str
) -> None:
    """The outer call goes on, whatever the handler got."""
    moe = LatentMoe(tiny_registry)
    inside = InsideOf(monkeypatch, *SITES[site], lambda: prepare_tail(moe))
    runner = prepare_tail(moe)
    runner()
    assert len(machine.driver.launches) == len(runner.launches)
    assert inside.outcomes[0].startswith(("LaunchError: ", "<cakegen.runtime.runner.ProgramRunner"))
    if site != "control words are lent":
        assert "this thread is in the middle of it already" in inside.outcomes[0]


def test_handler_that_loads_what_its_thread_loads_in_another_table_is_refused(
    machine: Machine, tiny_registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compile cache locks an entry by its file, and the thread would wait for itself."""
    other = LatentMoe(tiny_registry)
    inside = InsideOf(monkeypatch, machine.compiler, "cached_cubin", lambda: prepare_front(other))
    prepare_front(LatentMoe(tiny_registry))
    assert inside.outcomes[0].startswith("LaunchError: compiling or loading a program: this thread is in the middle")
    prepare_front(other)


def test_prepare_in_a_real_signal_handler_is_told_so(
    machine: Machine, tiny_registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    moe, outcomes = LatentMoe(tiny_registry), []

    def handle(number: int, frame: object) -> None:
        try:
            prepare_front(moe)
        except LaunchError as error:
            outcomes.append(str(error))

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        InsideOf(monkeypatch, programs.driver, "load_kernel", lambda: signal.raise_signal(signal.SIGUSR1))
        prepare_front(moe)()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(machine.driver.launches) == 1
    assert len(outcomes) == 1
    assert "this thread is in the middle of it already" in outcomes[0]


def test_child_forked_while_another_thread_prepares_does_not_hang(
    machine: Machine, tiny_registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent's thread holds the locks of a device, of control memory, of a program, of streams and workspaces."""
    moe, held, done = LatentMoe(tiny_registry), threading.Event(), threading.Event()
    # made here: torch's own threads are not in the child
    operands = on_gpu(tail_operands(moe.model, 2, 64))
    locks = [device._lock, control._controls_lock, streams._known_lock, workspace._shared_lock, programs._loading]

    def hold(rest: list[Section]) -> None:
        if not rest:
            held.set()
            done.wait(60)
            return
        with rest[0]:
            hold(rest[1:])

    thread = threading.Thread(target=hold, args=(locks,))
    thread.start()
    held.wait(60)
    try:
        # the fakes work in a child too: where nothing hangs the call is served
        assert answer_of_child(lambda: type(moe.prepare_tail(**operands, tp=2, rank=0)).__name__) == "ProgramRunner"
    finally:
        done.set()
        thread.join(60)


def test_child_forked_while_a_plan_is_looked_up_does_not_hang(machine: Machine, tiny_registry: Registry) -> None:
    table = routes.RouteTable(tiny_registry, programs.ProgramTable(tiny_registry), None)
    with table._lock:
        assert answer_of_child(lambda: table.load(device.open_device(0), "front", 2, 5, 1).plan.tokens) == "5"

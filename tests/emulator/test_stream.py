"""Launches of one stream: what `griddepcontrol` orders, and what it does not (PTX ISA 9.7.13.13)."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.models import hopper

from cakegen.compile import CompileRequest, compile_ptx, request_for
from cakegen.emulator import Fault, Options, emulate_calls, load_program, program_of
from cakegen.emulator.launches.cases import Case, compare, emulate_case, make_operands
from cakegen.emulator.launches.stream import QueuedLaunch, Stream
from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.machine.memory import Buffer
from cakegen.emulator.machine.residency import LaunchShape
from cakegen.emulator.text.translate import Program
from cakegen.plan import DecodeForm
from cakegen.plan.decode import weights_ahead
from cakegen.registry import Registry
from cakegen.runtime.validate import validate_front, validate_tail

Make = Callable[..., np.ndarray]
SCHEDULES = [("early", 0), ("late", 0), *(("random", seed) for seed in range(4))]
# Under which launches of a stream overlap for certain.
OVERLAPPING = ("late", 0)
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
TRIGGER = 'asm volatile("griddepcontrol.launch_dependents;" ::: "memory");'


@functools.cache
def compiled(body: str) -> Program:
    """A kernel on three buffers of words: `a`, `b` and `c`."""
    text = f"""extern "C" __global__ void kernel_test(unsigned* a, unsigned* b, unsigned* c) {{
        const unsigned t = threadIdx.x + blockIdx.x * blockDim.x;
        {body}
    }}"""
    options = ("-std=c++17", "-lineinfo")
    return program_of(
        compile_ptx(CompileRequest("test", "sm_90a", text, (), options, (), "kernel_test")), "kernel_test"
    )


def run(
    array: Make, *bodies: str, schedule: tuple[str, int] = OVERLAPPING, ctas: int = 4, programmatic: bool = True
) -> list[np.ndarray]:
    """Run kernels of `ctas` CTAs of 32 threads one after another; `a` starts as 0, 1, 2, …, the others as zeros."""
    words = [array(np.arange(ctas * 32), np.uint32), *(array(np.zeros(ctas * 32), np.uint32) for _ in range(2))]
    buffers = [Buffer(name, each.ctypes.data, each.nbytes) for name, each in zip("abc", words, strict=True)]

    def queued(number: int, body: str) -> QueuedLaunch:
        def make(memory: Any) -> Machine:
            shape = LaunchShape((ctas, 1, 1), (32, 1, 1))
            addresses = [each.ctypes.data for each in words]
            return Machine(compiled(body), memory, shape, addresses, Adversary(*schedule), name=f"kernel {number}")

        return QueuedLaunch(f"kernel {number}", programmatic, make)

    Stream([queued(number, body) for number, body in enumerate(bodies)], buffers, Adversary(*schedule)).run()
    return words


def fault_of(array: Make, *bodies: str, **options: Any) -> Fault:
    with pytest.raises(Fault) as caught:
        run(array, *bodies, **options)
    return caught.value


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("first", [f"{TRIGGER} b[t] = a[t] * 3;", f"b[t] = a[t] * 3; {TRIGGER}", "b[t] = a[t] * 3;"])
def test_dependent_that_waits_sees_all_of_the_launch_before(array: Make, first: str, schedule: tuple[str, int]) -> None:
    """However early the trigger comes, and also where it is left to the exit."""
    second = f"__shared__ unsigned s[32]; s[threadIdx.x] = t; __syncthreads(); {WAIT} c[t] = b[t ^ 32] + s[0];"
    a, b, c = run(array, first, second, schedule=schedule)
    t = np.arange(a.size)
    assert (b == t * 3).all()
    assert (c == (t ^ 32) * 3 + t // 32 * 32).all()


@pytest.mark.parametrize("first", [f"{TRIGGER} b[t] = a[t];", f"b[t] = a[t]; {TRIGGER}", "b[t] = a[t];"])
def test_read_without_a_wait_is_reported(array: Make, first: str) -> None:
    """Neither the trigger nor an exit makes anything visible."""
    fault = fault_of(array, first, f"c[t] = b[t]; {WAIT}")
    assert fault.kind == "programmatic"
    assert "griddepcontrol.wait must come before" in fault.message
    assert "kernel 0" in fault.message
    assert "kernel 1" in fault.message
    assert fault.launch.startswith("launch ")


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ("b[t] = a[t];", "a[t] = 7;", r"kernel \d (writes|reads) a \+ \d+, which kernel \d has (read|written)"),
        ("b[t] = a[t];", "b[t] = 7;", r"kernel \d writes b \+ \d+, which kernel \d has written"),
        ("atomicAdd(b, 1);", "atomicAdd(b, 1);", r"kernel \d (reads|writes) b \+ 0, which kernel \d has"),
    ],
    ids=["write what is read", "write what is written", "two atomics"],
)
def test_write_without_a_wait_is_reported(array: Make, first: str, second: str, what: str) -> None:
    fault = fault_of(array, f"{TRIGGER} {first}", f"{second} {WAIT}")
    assert fault.kind == "programmatic"
    assert re.search(what, fault.message)


def test_conflict_is_seen_whichever_launch_comes_first(array: Make) -> None:
    found = set()
    for seed in range(100):
        try:
            run(array, f"{TRIGGER} b[t] = a[t];", "c[t] = b[t];", schedule=("random", seed), ctas=1)
        except Fault as fault:
            found.add((fault.kind, fault.message.split(",")[0].split(" + ")[0]))
    assert found == {("programmatic", "kernel 0 writes b"), ("programmatic", "kernel 1 reads b")}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_ordinary_launch_needs_no_wait(array: Make, schedule: tuple[str, int]) -> None:
    _, b, c = run(array, f"{TRIGGER} b[t] = a[t];", f"{WAIT} c[t] = b[t];", programmatic=False, schedule=schedule)
    assert (b == c).all()
    _, b, c = run(array, f"{TRIGGER} b[t] = a[t];", "c[t] = b[t]; b[t] = 1;", programmatic=False, schedule=schedule)
    assert (c == np.arange(c.size)).all()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_launches_may_touch_different_bytes_and_read_the_same(array: Make, schedule: tuple[str, int]) -> None:
    _, b, c = run(
        array, f"{TRIGGER} if (t % 2) b[t] = a[t];", "if (t % 2 == 0) b[t] = a[t]; c[t] = a[t];", schedule=schedule
    )
    assert (b == c).all()


def test_wait_of_one_thread_holds_for_those_behind_its_barrier(array: Make) -> None:
    waits = f"if (threadIdx.x == 0) {WAIT}"
    for schedule in SCHEDULES:
        run(array, f"{TRIGGER} b[t] = a[t];", f"{waits} __syncthreads(); c[t] = b[t];", schedule=schedule)
    others = f"{waits} else c[t] = b[t];"
    assert fault_of(array, f"{TRIGGER} b[t] = a[t];", others).kind == "programmatic"


def test_wait_covers_the_launch_before_and_what_that_one_waited_for(array: Make) -> None:
    first, third = f"{TRIGGER} b[t] = a[t];", f"{WAIT} c[t] = b[t];"
    for schedule in SCHEDULES:
        _, b, c = run(array, first, f"{TRIGGER} {WAIT}", third, schedule=schedule)
        assert (b == c).all()
    fault = fault_of(array, first, TRIGGER, third)
    assert fault.kind == "programmatic"
    assert "kernel 2" in fault.message
    assert "kernel 0" in fault.message


def test_fifth_launch_of_a_chain_waits_for_room(array: Make) -> None:
    """Launches that touch nothing of each other may all be in flight; the marks tell four of them apart."""
    bodies = [f"{TRIGGER} if (t / 16 == {number}) b[t] = t;" for number in range(8)]
    _, b, _ = run(array, *bodies)
    assert (b == np.arange(128)).all()


def test_launch_that_hangs_is_reported_with_the_one_that_waits_for_it(array: Make) -> None:
    hangs = f'{TRIGGER} if (t == 0) {{ while (true) {{ unsigned v; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" '
    hangs += ': "=r"(v) : "l"(b) : "memory"); if (v) break; } }'
    fault = fault_of(array, hangs, f"{WAIT} c[t] = b[t];")
    assert fault.kind == "deadlock"
    assert "kernel 1 CTA 0 warp 0 lanes 0-31" in fault.message
    assert "waits for the completion of the launch before it in the stream in `griddepcontrol.wait" in fault.message
    assert "waits for a change of b + 0 from 0" in fault.message


def test_one_seed_is_one_schedule(registry: Registry) -> None:
    case = Case("tail", 8, 200)
    reports = [emulate_case(registry, case, Options("random", seed, "wide")) for seed in (1, 1, 2)]
    hashes = [tuple(launch.schedule_hash for launch in report.launches) for report in reports]
    assert hashes[0] == hashes[1] != hashes[2]


def without_wait(old: str, new: str) -> Callable[[Registry, str, str], Program]:
    """Programs whose tail GEMM lacks a wait."""

    def load(registry: Registry, key: str, arch: str) -> Program:
        if not key.startswith("tail_gemm"):
            return load_program(registry, key, arch)
        request = request_for(registry, key, arch, ("-lineinfo",))
        assert any(old in text for _, text in request.headers)
        headers = tuple((name, text.replace(old, new)) for name, text in request.headers)
        request = dataclasses.replace(request, headers=headers)
        return program_of(compile_ptx(request), request.kernel_symbol)

    return load


def test_tail_gemm_that_does_not_wait_for_its_norm_is_reported(registry: Registry) -> None:
    load = without_wait("griddepcontrol_wait();\n                norm_done", "norm_done")
    with pytest.raises(Fault) as caught:
        emulate_case(registry, Case("tail", 8, 200, partials=2), Options("late", 0, "wide"), load=load)
    assert caught.value.kind in ("programmatic", "unwritten-read")
    assert "y_workspace" in caught.value.message
    assert "griddepcontrol.wait" in caught.value.message
    assert "tail_norm" in caught.value.message


@pytest.mark.parametrize("schedule", [("late", 0), ("random", 1), ("random", 3)], ids=str)
@pytest.mark.parametrize(
    ("tokens", "partials"), [(8, 1), (200, 1), (200, 2)], ids=["decode", "fused prefill", "prefill"]
)
def test_layers_that_overlap_are_clean(
    registry: Registry, tokens: int, partials: int, schedule: tuple[str, int]
) -> None:
    """Two layers in one stream; every program waits before it touches what an earlier launch may still use."""
    model = registry.model
    front, tail = Case("front", 8, tokens), Case("tail", 8, tokens, partials, rank=3)
    of_front, of_tail = make_operands(model, front), make_operands(model, tail)
    of_tail["shared_act"] = of_front["shared_act"]
    calls = [
        (validate_front(model, **of_front), front.plan(model)),
        (validate_tail(model, **of_tail, tp=8, rank=3), tail.plan(model)),
    ]
    emulate_calls(registry, [*calls, *calls], Options(*schedule, "wide"), overlap=True)
    assert compare(model, front, of_front)[1] == []
    assert compare(model, tail, of_tail)[1] == []


def test_overlapping_launch_reads_as_many_weights_ahead_as_on_a_device(registry: Registry) -> None:
    model, front = registry.model, Case("front", 8, 8)
    plan = front.plan(model)
    call = (validate_front(model, **make_operands(model, front)), plan)
    names = [name for kind, name in registry.program(plan.launches[0].key).arg_plan if kind != "grid"]
    seen: list[Any] = []

    def machine(*arguments: Any, **options: Any) -> Machine:
        made = Machine(*arguments, **options)
        seen.append(made.values[names.index("weights_ahead")])
        return made

    for overlap in (False, True):
        emulate_calls(registry, [call], Options("early", 0, "wide", machine=machine), overlap=overlap)
    form = plan.launches[0].form
    assert isinstance(form, DecodeForm)
    rules = hopper(model).decode
    assert seen == [weights_ahead(form, rules, False), form.num_stages]
    assert form.num_stages > rules.front.weights_ahead

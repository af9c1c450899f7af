"""Where programs see arrays: far from each other, and the same in every run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cakegen.compile import CompileRequest, compile_ptx
from cakegen.emulator.faults import Fault
from cakegen.emulator.launches.address_space import AddressSpace
from cakegen.emulator.launches.arrays import HostBuffer
from cakegen.emulator.launches.launch import program_of
from cakegen.emulator.launches.sequence import BufferArgument, KernelLaunch, run_sequence
from cakegen.emulator.machine.residency import LaunchShape

pytestmark = pytest.mark.emulator

GIB = 1 << 30


def test_neighbours_of_a_heap_are_far_apart_in_the_order_given() -> None:
    space = AddressSpace([(0x5040, 0x40), (0x5000, 0x40), (0x9010, 16)])
    first, second, third = space[0x5040], space[0x5000], space[0x9010]
    assert first + GIB < second
    assert second + GIB < third
    assert (first % 64, second % 64, third % 64) == (0, 0, 16)


def test_addresses_do_not_depend_on_the_heap() -> None:
    here = AddressSpace([(0x70000, 64), (0x10000, 64)])
    there = AddressSpace([(0x20000, 64), (0x90000, 64)])
    assert (here[0x70000], here[0x10000]) == (there[0x20000], there[0x90000])


def test_column_ranges_of_one_matrix_keep_their_distance() -> None:
    space = AddressSpace([(0x5020, 0x400), (0x7000, 64), (0x5000, 0x400), (0x5400, 0x40)])
    assert space[0x5020] - space[0x5000] == 0x20
    assert space[0x5400] - space[0x5000] == 0x400, "it overlaps the first"
    assert abs(space[0x7000] - space[0x5000]) > GIB


def test_no_array_stays_none() -> None:
    assert AddressSpace([])[0] == 0


@pytest.mark.parametrize("body", ["out[0] = a[n];", "b[n] = 1; out[0] = 0;"], ids=["read", "write"])
def test_access_past_the_end_is_reported_where_another_array_begins(
    launch: Callable[..., Any], array: Callable[..., np.ndarray], body: str
) -> None:
    """On a heap, the array behind `a` or `b` lies in the same block of memory."""
    block = array(np.zeros(256), np.uint32)
    a, b, out = block[:64], block[64:128], block[128:129]
    source = f'extern "C" __global__ void kernel_test(unsigned* a, unsigned* b, unsigned* out, int n) {{ {body} }}'
    with pytest.raises(Fault, match=r"which is in no tensor; it is byte 256 of argument [01], which has 256") as caught:
        launch(source, a, b, out, 64)
    assert caught.value.kind == "out-of-bounds"


def test_buffers_of_a_sequence_are_apart_too() -> None:
    """The index that leads from one array of the heap to another leads nowhere."""
    text = 'extern "C" __global__ void kernel_test(unsigned* a, unsigned* b, long long n) { b[0] = a[n]; }'
    request = CompileRequest("test", "sm_90a", text, (), ("-std=c++17",), (), "kernel_test")
    program = program_of(compile_ptx(request), "kernel_test")
    buffers = {name: HostBuffer(name, "update", "u32", np.zeros(4, np.uint32)) for name in "ab"}
    distance = (buffers["b"].address - buffers["a"].address) // 4
    arguments = (BufferArgument("a"), BufferArgument("b"), np.int64(distance).tobytes())
    with pytest.raises(Fault, match="which is in no tensor"):
        run_sequence(
            {"kernel_test": program},
            [KernelLaunch("kernel_test", LaunchShape((1, 1, 1), (1, 1, 1)), arguments)],
            buffers,
        )

"""Which granules of global memory a box reads, for every size of its elements; bulk copies and prefetches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.machine.memory import GRANULE, Buffer
from cakegen.emulator.units.tma.copies import bulk_landing
from cakegen.emulator.units.tma.tensor_view import TensorView
from cakegen.runtime.tensor_map import TensorMap

PREFETCH = """extern "C" __global__ void kernel_test(u32* out, const u32* words) {
    if (threadIdx.x < 2) bulk_prefetch_l2(words + %s, %s);
    out[threadIdx.x] = ld_global_kept_v4(words + threadIdx.x * 4).y;
}"""

pytestmark = pytest.mark.emulator

PITCH, ROWS, FIRST = 64, 8, 128


@pytest.mark.parametrize("corner", [(0, 1), (-1, 0), (1, 7)], ids=str)
@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
def test_box_reads_the_granules_of_its_bytes(
    array: Callable[..., np.ndarray], element_bytes: int, corner: tuple[int, int]
) -> None:
    memory = array(np.zeros(FIRST + PITCH * ROWS), np.uint8)
    buffer = Buffer("x", memory.ctypes.data, memory.nbytes)
    width = PITCH // element_bytes
    box = (32 // element_bytes, 2)
    record = TensorMap(
        "map", memory.ctypes.data + FIRST, (width, ROWS), (PITCH,), box, "none", element_bytes=element_bytes
    )
    column, row = corner[0] * box[0], corner[1]
    inside = [
        FIRST + PITCH * y + element_bytes * x
        for y in range(row, min(row + box[1], ROWS))
        for x in range(max(column, 0), min(column + box[0], width))
    ]
    expected = sorted({byte // GRANULE for byte in inside})
    assert sorted(TensorView(record, buffer).granules((column, row)).tolist()) == expected


@pytest.mark.parametrize(("source", "num_bytes", "start"), [(0, 8, 0), (8, 16, 0), (0, 16, 8), (0, 0, 0)])
def test_bulk_copy_of_an_odd_size_is_reported(source: int, num_bytes: int, start: int) -> None:
    """PTX ISA, cp.async.bulk: the size and both addresses are multiples of 16."""
    nowhere: Any = None
    with pytest.raises(
        Fault, match=rf"cp\.async\.bulk of {num_bytes} bytes, {source:#x} -> {start:#x}: multiples of 16"
    ):
        bulk_landing(nowhere, source, num_bytes, nowhere, start, 0, nowhere)


def test_bulk_prefetch_has_no_effect_and_a_kept_load_reads(
    launch: Callable[..., Machine], array: Callable[..., np.ndarray]
) -> None:
    out, words = array(np.zeros(32), np.uint32), array(np.arange(128), np.uint32)
    launch(PREFETCH % ("threadIdx.x * 64", "256"), out, words)
    assert out.tolist() == list(range(1, 128, 4))
    assert words.tolist() == list(range(128))


@pytest.mark.parametrize(
    ("place", "size", "told"),
    [
        ("threadIdx.x * 2", "256", "256 bytes at 0x[0-9a-f]+0008"),
        ("threadIdx.x * 64", "256 + threadIdx.x * 8", "264 bytes at 0x[0-9a-f]+0100"),
    ],
)
def test_bulk_prefetch_of_other_than_multiples_of_16_bytes_is_reported(
    launch: Callable[..., Machine], array: Callable[..., np.ndarray], place: str, size: str, told: str
) -> None:
    """The second lane's is the wrong one."""
    out, words = array(np.zeros(32), np.uint32), array(np.arange(256), np.uint32)
    with pytest.raises(Fault, match=f"a prefetch of {told}: both must be multiples of 16"):
        launch(PREFETCH % (place, size), out, words)


def test_copy_of_the_form_for_the_own_cta_to_another_is_reported(
    launch: Callable[..., Machine], array: Callable[..., np.ndarray]
) -> None:
    """PTX ISA 9.7.9.25.4: with `.shared::cta` the destination lies in the CTA that issues the copy."""
    source = """extern "C" __global__ void kernel_test(u32* out, const u32* from) {
        const u32 smem = smem_base(), t = threadIdx.x;
        if (t == 0) { mbarrier_init(smem, 1); fence_mbarrier_init(); mbarrier_arrive_expect_tx(smem, 16); }
        cluster_arrive(); cluster_wait();
        if (t == 0)
            asm volatile("cp.async.bulk.SPACE.global.mbarrier::complete_tx::bytes [%0], [%1], 16, [%2];"
                :: "r"(mapa(smem + 1024, cluster_ctarank() ^ 1)), "l"(from), "r"(mapa(smem, cluster_ctarank() ^ 1))
                : "memory");
        u32 done = 0;
        while (!done)
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                : "=r"(done) : "r"(smem) : "memory");
        if (t < 4) out[blockIdx.x * 4 + t] = ld_shared_v4(smem + 1024).x;
        cluster_arrive(); cluster_wait();
    }"""
    out, words = array(np.zeros(8), np.uint32), array(np.arange(5, 9), np.uint32)
    shape = {"grid": 2, "cluster": 2, "smem": 2048}
    launch(source.replace("SPACE", "shared::cluster"), out, words, **shape)
    assert out.tolist() == [5] * 8
    with pytest.raises(Fault, match=r"a shared::cta operation on an address of cluster rank [01]"):
        launch(source.replace("SPACE", "shared::cta"), out, words, **shape)

"""Known faults of drivers and compilers: the table is whole, and what it says is done is done."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cakegen import paths
from cakegen.arch import ARCHITECTURES
from cakegen.known_faults import KNOWN_FAULTS, SMALL_MAP_BYTES, cleared, clears_small_maps
from cakegen.registry import SHARED_FOLDER, TensorMapEntry
from cakegen.runtime import driver
from cakegen.runtime.tensor_map import TensorMap, encode_tensor_map, view_matrix

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "known-faults.md"
ONES = 2**64 - 1


def chunks_of(rows: int, cols: int, pitch: int = 0) -> TensorMap:
    return view_matrix(TensorMapEntry("x", "x", "chunks", (64, 8, 1)), 1 << 20, rows, cols, pitch or cols)


@pytest.mark.parametrize(
    ("record", "small"),
    [
        (chunks_of(1, 7168), True),
        (chunks_of(9, 7168), True),
        (chunks_of(10, 7168), False),
        (chunks_of(18, 3584), True),
        (chunks_of(19, 3584), False),
        (chunks_of(2, 512, pitch=40_000), True),
        (chunks_of(3, 512, pitch=40_000), False),
        (chunks_of(1024, 64), False),
        (TensorMap("x", 1 << 20, (64, 8), (128,), (64, 8)), False),
        (TensorMap("x", 1 << 20, (64, 8), (256,), (64, 8)), True),
        (TensorMap("x", 1 << 20, (64,), (), (64,)), False),
    ],
)
def test_small_and_loose_maps_are_told_by_their_span_and_strides(record: TensorMap, small: bool) -> None:
    assert record.is_small_and_loose is small
    assert SMALL_MAP_BYTES == 131072


@pytest.mark.parametrize(
    ("version", "arch", "clears"),
    [
        ((12, 8), "sm_100a", True),
        ((13, 1), "sm_103a", True),
        ((13, 3), "sm_100a", True),
        ((13, 4), "sm_100a", False),
        ((13, 0), "sm_90a", False),
    ],
)
def test_driver_and_target_decide(version: tuple[int, int], arch: str, clears: bool) -> None:
    assert clears_small_maps(version, (arch,)) is clears


def test_bit_of_a_small_map_is_cleared_where_the_driver_has_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that sets every bit: of a small, loose map one is taken back, of others none."""
    memory = ctypes.create_string_buffer(256)
    base = -(-ctypes.addressof(memory) // 64) * 64

    def encode(destination: int, *_: object) -> int:
        ctypes.memset(destination, 0xFF, 128)
        return 0

    monkeypatch.setattr(driver, "tensor_map_encoder", lambda: encode)
    small, large = chunks_of(4, 512), chunks_of(512, 512)
    for record, clears, second in ((small, True, ONES - (1 << 21)), (small, False, ONES), (large, True, ONES)):
        encode_tensor_map(record, base, clears_small=clears)
        words = (ctypes.c_uint64 * 16).from_address(base)
        assert list(words) == [ONES, second, *[ONES] * 14]


HOST_TEST = """
#include "cake_host_small_maps.cuh"
#include <cstdio>
#include <initializer_list>
int main() {
    using namespace cake_host;
    %s
    for (int version : {12080, 13010, 13030, 13039, 13040}) {
        for (int major : {9, 10, 12}) std::printf("%%d", driver_has_the_fault(version, major));
    }
    std::printf(" %%llx\\n", static_cast<unsigned long long>(without_the_faulty_bit(~uint64_t{0})));
}
"""


def test_binding_tells_the_same_maps_drivers_and_bit_as_the_runtime(tmp_path: Path) -> None:
    """The host half's own function, run: both take their figures from one table."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    records = [chunks_of(rows, cols) for rows in (1, 9, 10, 18, 19, 40) for cols in (64, 3584, 7168)]
    records.append(TensorMap("x", 1 << 20, (64, 8), (256,), (64, 8)))
    calls = []
    for record in records:
        dims, strides = (", ".join(map(str, values)) for values in (record.dims, record.strides_bytes))
        calls.append(
            f"{{ const uint64_t d[] = {{{dims}}}; const uint64_t s[] = {{{strides}}};"
            f' std::printf("%d", is_small_and_loose({len(record.dims)}, d, s, {record.element_bytes})); }}'
        )
    (tmp_path / "main.cpp").write_text(HOST_TEST % "\n    ".join(calls))
    shared = paths.generated_root() / SHARED_FOLDER
    command = [compiler, "-std=c++17", "-Wall", "-Werror", f"-I{shared}", "main.cpp", "-o", "main"]
    subprocess.run(command, cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout.split()
    small = [record.is_small_and_loose for record in records]
    assert {True, False} == set(small)
    versions = [(12, 8), (13, 1), (13, 3), (13, 3), (13, 4)]
    faulty = [
        clears_small_maps(
            version, [name for name, arch in ARCHITECTURES.items() if arch.compute_capability[0] == major]
        )
        for version in versions
        for major in (9, 10, 12)
    ]
    assert printed == ["".join(str(int(each)) for each in (*small, *faulty)), f"{cleared(ONES):x}"]


def test_each_row_of_the_table_is_whole_and_its_test_is_there() -> None:
    names = [fault.name for fault in KNOWN_FAULTS]
    assert len(set(names)) == len(names) > 2
    for fault in KNOWN_FAULTS:
        assert fault.first <= fault.last
        assert {*fault.arches} <= {*ARCHITECTURES}
        assert fault.component in ("driver", "nvrtc")
        file, _, test = fault.test.partition("::")
        assert f"def {test}(" in (TESTS / file).read_text("utf-8"), fault.test


def test_page_of_known_faults_names_each_with_its_test() -> None:
    text = PAGE.read_text("utf-8")
    rows = re.findall(r"^\| `([a-z0-9.-]+)` \|", text, re.MULTILINE)
    assert rows == [fault.name for fault in KNOWN_FAULTS]
    for fault in KNOWN_FAULTS:
        assert f"`{fault.test}`" in text

"""`cakegen emulate --ptx/--cuda --launch`: the examples, their verdicts, and the exit statuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from cakegen.cli.main import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "emulate"

pytestmark = pytest.mark.emulator


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["emulate", *map(str, arguments)])


def example(kind: str, source: str, launch: str, *more: object) -> Result:
    return run(f"--{kind}", EXAMPLES / source, "--launch", EXAMPLES / launch, *more)


@pytest.mark.parametrize(
    ("kind", "source", "launch", "more"),
    [
        ("cuda", "axpy.cu", "axpy.json", ("--entry", "axpy")),
        ("cuda", "chain.cu", "chain.json", ()),
        ("ptx", "tile.ptx", "tile.json", ()),
    ],
)
def test_example_is_clean_and_gives_its_expected_values(
    kind: str, source: str, launch: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    for schedule in (("--seeds", 4), ("--schedule", "early"), ("--schedule", "late")):
        result = example(kind, source, launch, *more, *schedule, "--out", tmp_path)
        assert result.exit_code == 0, result.output
        assert ": clean; " in result.output
    for name, buffer in json.loads((EXAMPLES / launch).read_text())["buffers"].items():
        assert (tmp_path / f"{name}.npy").exists() == (buffer["role"] != "read")
        if "expect" in buffer:
            assert (np.load(tmp_path / f"{name}.npy") == np.load(EXAMPLES / buffer["expect"]["file"])).all()


def test_example_with_a_missing_wait_ends_with_a_fault_and_its_line() -> None:
    result = example("cuda", "chain.cu", "missing_wait.json", "--seeds", 3)
    assert result.exit_code == 1
    first, *rest = result.output.splitlines()
    assert first.split(":")[:2] in (["seed 0", " programmatic"], ["seed 0", " unwritten-read"])
    line = next(n for n, text in enumerate((EXAMPLES / "chain.cu").read_text().splitlines(), 1) if "+ seeds[i]" in text)
    assert f"at chain.cu:{line} (PTX line" in result.output
    assert rest[-1] == "  in launch 2 of 2, consume_at_once"
    assert "seed 1" not in result.output


def written(tmp_path: Path, source: str, **changes: Any) -> tuple[Path, Path]:
    """A CUDA file, and a launch file for one kernel `f` of one warp with a buffer `x` of 32 words."""
    (tmp_path / "f.cu").write_text(source)
    launch = {"entry": "f", "grid": [1], "block": [32], "arguments": [{"kind": "buffer", "name": "x"}]}
    buffer = {"role": "update", "element": "u32", "shape": [32], "fill": "index"}
    content = {"version": 1, "buffers": {"x": buffer | changes.pop("x", {})}, "launches": [launch | changes]}
    (tmp_path / "f.json").write_text(json.dumps(content))
    return tmp_path / "f.cu", tmp_path / "f.json"


def run_written(tmp_path: Path, body: str, *more: object, parameters: str = "unsigned* x", **changes: Any) -> Result:
    source, launch = written(tmp_path, f'extern "C" __global__ void f({parameters}) {{ {body} }}', **changes)
    return run("--cuda", source, "--launch", launch, *more)


STORE = "x[threadIdx.x] = 7;"


@pytest.mark.parametrize(
    ("body", "changes", "message"),
    [
        (STORE, {"x": {"role": "read"}}, "output: x + 0 is written; it is an input"),
        ("if (threadIdx.x < 30) x[threadIdx.x] = 7;", {"x": {"role": "write", "fill": "poison"}},
         "output: 8 bytes of x were never written"),
        ("x[threadIdx.x + 1] = 7;", {}, "out-of-bounds: write of 4 bytes at x + 128"),
        ("x[0] += 1; if (threadIdx.x == 0) asm volatile(\"trap;\");", {}, "trap: the program gave up"),
    ],
)  # fmt: skip
def test_fault_ends_with_status_1(tmp_path: Path, body: str, changes: dict[str, Any], message: str) -> None:
    result = run_written(tmp_path, body, **changes)
    assert (result.exit_code, message in result.output) == (1, True), result.output


@pytest.mark.parametrize(
    ("body", "changes", "message"),
    [
        (STORE, {"entry": "g"}, "the PTX must define .entry g once, not 0 times"),
        (STORE, {"arguments": []}, "launch 1, f: the kernel has 1 parameters; got 0 arguments"),
        (STORE, {"arguments": [{"kind": "i32", "value": 1}]},
         "launch 1, f, argument 1: has 4 bytes; parameter f_param_0 has 8"),
        (STORE, {"arguments": [{"kind": "i32", "value": 2**31}]}, "must be a whole number"),
        (STORE, {"arguments": [{"kind": "buffer", "name": "x", "offset_bytes": 128}]}, "byte 128 of x, which has 128"),
        ("x[0] = nothing;", {}, 'identifier "nothing" is undefined'),
        (STORE, {"x": {"shape": None, "fill": None, "file": "none.npy"}}, "buffer x: "),
        (STORE, {"block": [2000]}, "2000 threads"),
    ],
)  # fmt: skip
def test_wrong_input_ends_with_status_2(tmp_path: Path, body: str, changes: dict[str, Any], message: str) -> None:
    result = run_written(tmp_path, body, **changes)
    assert (result.exit_code, message in result.output) == (2, True), result.output


def test_source_that_is_no_text_ends_with_status_2(tmp_path: Path) -> None:
    source, launch = written(tmp_path, "")
    source.write_bytes(b"\x7fELF\xff")
    for kind in ("--ptx", "--cuda"):
        result = run(kind, source, "--launch", launch)
        assert (result.exit_code, "f.cu: is no text" in result.output) == (2, True), result.output


def test_tensor_map_that_no_driver_takes_is_wrong_input(tmp_path: Path) -> None:
    record = {"kind": "tensor_map", "name": "x", "dims": [8, 4], "strides_bytes": [16], "box": [8, 2]}
    parameters = "const __grid_constant__ Map x"
    struct = "struct alignas(64) Map { char bytes[128]; };\n"
    for change, message in (
        ({"strides_bytes": [24]}, "strides_bytes[0] must be a multiple of 16"),
        ({"dims": [8, 9]}, "the tensor map ends at byte 160 of x, which has 128"),
        ({"box": [2, 2]}, "box[0] must be a multiple of 16 bytes"),
        ({"element": "u8", "dims": [16, 4], "box": [4, 1]}, "4 elements * 1 bytes = 4"),
    ):
        source, launch = written(tmp_path, "", arguments=[record | {"strides_bytes": [16]} | change])
        source.write_text(f'{struct}extern "C" __global__ void f({parameters}) {{ if (x.bytes[0]) __trap(); }}')
        result = run("--cuda", source, "--launch", launch)
        assert (result.exit_code, message in result.output) == (2, True), result.output


def test_what_is_not_modelled_ends_with_status_3(tmp_path: Path) -> None:
    result = run_written(tmp_path, 'unsigned y; asm volatile("mov.u32 %0, %%pm0;" : "=r"(y)); x[threadIdx.x] = y;')
    assert (result.exit_code, "is not modelled" in result.output) == (3, True), result.output


def test_other_values_than_the_expected_end_with_status_4(tmp_path: Path) -> None:
    np.save(tmp_path / "wanted.npy", np.full(32, 7, np.uint32))
    result = run_written(tmp_path, "if (threadIdx.x) " + STORE, x={"expect": {"file": "wanted.npy"}})
    assert result.exit_code == 4
    assert "seed 0: 1 of 32 elements of x differ from the expected bits; " in result.output


def test_bits_that_the_schedule_decides_are_named(tmp_path: Path) -> None:
    body = "if (threadIdx.x == 0) x[1 + atomicAdd(x, 1)] = blockIdx.x + 40;"
    result = run_written(tmp_path, body, "--seeds", 8, grid=[8])
    assert result.exit_code == 0, result.output
    assert "the schedule decides the bits of x" in result.output


def test_scalars_structs_and_options_reach_the_kernel(tmp_path: Path) -> None:
    source, launch = written(
        tmp_path,
        "",
        arguments=[
            {"kind": "i8", "value": -3},
            {"kind": "f64", "value": 2.5},
            {"kind": "bytes", "hex": "01000000" + "02000000" + "0300000000000000"},
            {"kind": "buffer", "name": "x", "offset_bytes": 4},
        ],
    )
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "pair.h").write_text("struct Pair { int a, b; long long c; };\n")
    source.write_text(
        '#include "pair.h"\nextern "C" __global__ void f(signed char s, double d, Pair p, unsigned* x) {\n'
        "  if (threadIdx.x == 0) { x[0] = s * 100; x[1] = d * 2; x[2] = p.a * 100 + p.b * 10 + p.c; x[3] = N; }\n}\n"
    )
    arguments = ("--include", tmp_path / "more", "--option=-DN=11", "--out", tmp_path / "out")
    result = run("--cuda", source, "--launch", launch, *arguments)
    assert result.exit_code == 0, result.output
    assert np.load(tmp_path / "out" / "x.npy")[:5].astype(np.int32).tolist() == [0, -300, 5, 123, 11]


# One warp stores to tensor memory and loads again, at a lane of another warp.
LANE_OF_ANOTHER = """
  __shared__ unsigned at;
  unsigned r = threadIdx.x + 3, smem = __cvta_generic_to_shared(&at);
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 32;" :: "r"(smem) : "memory");
  __syncthreads();
  const unsigned lane = at + (32 << 16);
  asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};" :: "r"(lane), "r"(r) : "memory");
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];" : "=r"(r) : "r"(lane) : "memory");
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
  x[threadIdx.x] = r;
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 32;" :: "r"(at) : "memory");
"""


def test_tensor_order_holds_for_the_launches_of_a_file(tmp_path: Path) -> None:
    strict = run_written(tmp_path, LANE_OF_ANOTHER, "--arch", "sm_100a")
    assert strict.exit_code == 1, strict.output
    assert "which may touch lanes 0 to 31 only" in strict.output
    out = tmp_path / "out"
    practice = run_written(tmp_path, LANE_OF_ANOTHER, "--arch", "sm_100a", "--tensor-order", "practice", "--out", out)
    assert practice.exit_code == 0, practice.output
    assert np.load(out / "x.npy").tolist() == [3 + lane for lane in range(32)]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--launch", EXAMPLES / "axpy.json"),
        ("--ptx", EXAMPLES / "tile.ptx"),
        ("--ptx", EXAMPLES / "tile.ptx", "--cuda", EXAMPLES / "axpy.cu", "--launch", EXAMPLES / "axpy.json"),
    ],
)
def test_command_line_that_says_too_little_is_refused(arguments: tuple[object, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "give --launch and either --ptx or --cuda" in result.output


def test_command_line_that_says_too_much_is_refused() -> None:
    result = run("--ptx", EXAMPLES / "tile.ptx", "--launch", EXAMPLES / "tile.json", "--tp", 8)
    assert result.exit_code == 2
    assert "--launch says what to run; no KEY" in result.output


def test_entry_that_is_not_there_is_named_with_those_that_are() -> None:
    result = run("--ptx", EXAMPLES / "tile.ptx", "--launch", EXAMPLES / "axpy.json")
    assert result.exit_code == 2
    assert "a launch names no entry: give one there, or --entry; it has copy_tile" in result.output

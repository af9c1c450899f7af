"""Errors that no other test words, with their numbers; and a rule that every message stands in some test."""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.compile.sources import PLAIN_REQUEST
from support.models import tiny_model
from support.runtime.fakes import FakeDriver
from support.small_registry import registry_text, registry_values, small_record

import cakegen
from cakegen.compile import compile_cubin, load_nvrtc
from cakegen.compile.cubin import CubinReader
from cakegen.emit import filters
from cakegen.errors import CompileError, EmitError, LaunchError, RegistryError, SpecError
from cakegen.model import to_literal
from cakegen.registry import TensorMapEntry, load_registry
from cakegen.runtime import driver
from cakegen.runtime.control import WAIT_RECORD_WORDS, WaitRecord
from cakegen.runtime.plain import check_tensors, check_whole
from cakegen.runtime.tensor_map import view_matrix
from cakegen.spec.legality import check_model

PACKAGE = Path(cakegen.__file__).parent
# layers whose every message must stand in a test
WORDED = ("arch", "model", "registry", "plan", "spec", "emit", "compile", "runtime", "review", "doctor", "timing")
# so many characters of a message, between two of its numbers, must stand in a test
SHARED_CHARACTERS = 12


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("i32", "7", "filter i32 needs an int; got str '7'"),
        ("i32", True, "filter i32 needs an int; got bool True"),
        ("i32", 2**31, "filter i32 needs a value in [-2147483648, 2147483647]; got 2147483648"),
        ("f32", 1e39, "filter f32 needs a finite number within float's range; got 1e+39"),
        ("f32", float("nan"), "filter f32 needs a finite number within float's range; got nan"),
        ("boolean", 1, "filter boolean needs a bool; got int 1"),
        ("cpp_type", None, "filter cpp_type needs a bool, int, float or a macro's name; got NoneType None"),
        ("comment", 3, "filter comment needs text; got int 3"),
        ("comment", "a\nb", "filter comment needs one printable line without comment marks; got 'a\\nb'"),
        ("comment", "a */ b", "filter comment needs one printable line without comment marks; got 'a */ b'"),
        ("string", "ü", "filter string needs printable ASCII text; got str 'ü'"),
    ],
)
def test_filter_refuses_with_what_it_got(name: str, value: object, message: str) -> None:
    with pytest.raises(EmitError) as caught:
        getattr(filters, name)(value)
    assert str(caught.value) == message


def test_cubin_that_is_none_is_told_by_its_first_bytes() -> None:
    with pytest.raises(CompileError, match=r"^x: not a cubin: 5 bytes that begin b'\.ver', not a 64-bit ELF file$"):
        CubinReader(b".vers", "x")


def test_cubin_without_a_register_count_or_a_symbol_table_is_refused() -> None:
    cubin = compile_cubin(PLAIN_REQUEST).cubin
    renamed = cubin.replace(b"\0.nv.info\0", b"\0.nv.none\0")
    assert renamed != cubin
    with pytest.raises(CompileError, match=r"^x: the cubin holds no register count for kernel_plain$"):
        CubinReader(renamed, "x").resources("kernel_plain")
    table, entry_bytes, count = (int.from_bytes(cubin[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62)))
    (kind,) = (
        table + i * entry_bytes + 4
        for i in range(count)
        if cubin[table + i * entry_bytes + 4 : table + i * entry_bytes + 8] == (2).to_bytes(4, "little")
    )
    bare = cubin[:kind] + (1).to_bytes(4, "little") + cubin[kind + 4 :]
    with pytest.raises(CompileError, match=rf"damaged cubin of {len(cubin)} bytes \(0 symbol tables, not 1\)"):
        CubinReader(bare, "x")


def test_failed_compiler_call_names_the_call_and_the_library() -> None:
    nvrtc = load_nvrtc()
    with pytest.raises(CompileError, match=r"nvrtcGetCUBINSize failed with NVRTC_ERROR_\w+$") as caught:
        nvrtc._checked("nvrtcGetCUBINSize", None, None)
    assert str(caught.value).startswith(f"NVRTC ({nvrtc.path}): ")


def test_refused_source_names_all_options() -> None:
    wrong = dataclasses.replace(PLAIN_REQUEST, source="int broken = ;")
    options = r"--gpu-architecture=sm_90a -std=c\+\+17 -DSCALE=3 --ptxas-options=-v"
    with pytest.raises(
        CompileError, match=rf"^plain for sm_90a, NVRTC .*: NVRTC_ERROR_COMPILATION with options {options}"
    ):
        compile_cubin(wrong)


def test_view_that_no_tensor_map_has_is_named() -> None:
    entry = TensorMapEntry("x", "x", "rows", (64, 8, 1))
    with pytest.raises(LaunchError, match=r"^tensor map x: view must be 'chunks' or 'columns'; got 'rows'\.$"):
        view_matrix(entry, 0, 8, 64, 64)


def test_model_without_a_target_is_refused() -> None:
    with pytest.raises(SpecError, match=r"^targets: none declared; add a \[\[targets\]\] section"):
        check_model(dataclasses.replace(tiny_model(), targets=()))


def test_degrees_out_of_order_name_the_two() -> None:
    model = tiny_model()
    falling = dataclasses.replace(model.targets[0], tp_degrees=(1, 4, 2))
    with pytest.raises(SpecError, match=r"^targets: sm_90a: tp_degrees: 2 follows 4; list each once, in rising order$"):
        check_model(dataclasses.replace(model, targets=(falling,)))


@pytest.mark.parametrize(
    ("table", "value", "message"),
    [
        (
            "MODULES",
            {"../one": {}},
            "ProgramEntry: needs the fields ['arches', 'arg_plan', 'barriers', 'ffi_entry', 'flags', "
            "'includes', 'launch', 'role', 'tensor_maps']; got []",
        ),
        ("EXPORT", "../a", "EXPORT: needs a plain file name of letters, digits, '_' and '.'; got '../a'"),
        (
            "LAUNCHES",
            {"launch_0": {**small_record()["launch"], "block": [2048, 1, 1]}},
            "LAUNCHES['launch_0']: block (2048, 1, 1), cluster (1, 1, 1): 1 … 1024 each",
        ),
        (
            "LAUNCHES",
            {"launch_0": {**small_record()["launch"], "dynamic_smem_bytes": -1}},
            "LAUNCHES['launch_0']: -1 bytes of shared memory; 0 … 2147483647",
        ),
        ("FLAGS", {"flags_0": [90]}, "FLAGS['flags_0'][0]: needs str; got 90"),
        ("BARRIERS", {"barriers_0": [["full", 1, 2]]}, "BARRIERS['barriers_0'][0]: needs 2 items; got 3"),
    ],
)
def test_row_of_a_registry_is_refused_with_its_table(tmp_path: Path, table: str, value: Any, message: str) -> None:
    values = registry_values("small", to_literal(tiny_model()), {"one": small_record()}, {"a": "one"}, {})
    (tmp_path / "cake_jit.py").write_text(registry_text(values | {table: value}))
    with pytest.raises(RegistryError) as caught:
        load_registry(tmp_path)
    assert f"cake_jit.py: damaged tables (RegistryError: {message}); export again" in str(caught.value)


@pytest.mark.parametrize("seconds", [0, -1.5, 1e9, float("nan")])
def test_wait_limit_out_of_bounds_is_refused_with_its_value(seconds: float) -> None:
    words = (ctypes.c_uint64 * WAIT_RECORD_WORDS)()
    record = WaitRecord(ctypes.addressof(words), 0)
    with pytest.raises(LaunchError, match=rf"between 0 and 1e9 seconds; got {re.escape(repr(seconds))}$"):
        record.write_wait_limit(seconds)


def test_driver_that_fails_to_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver()
    module = SimpleNamespace(
        cuInit=lambda flags: (fake.CUresult.CUDA_ERROR_NO_DEVICE,),
        CUresult=fake.CUresult,
        cuGetErrorName=fake.cuGetErrorName,
        cuGetErrorString=fake.cuGetErrorString,
    )
    monkeypatch.setattr(driver, "importlib", SimpleNamespace(import_module=lambda name: module))
    with pytest.raises(LaunchError, match=r"^cuInit failed: CUDA_ERROR_NO_DEVICE \(as the driver words it\)$"):
        driver.bindings.__wrapped__()


def test_driver_too_old_for_a_function_names_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "call", lambda name, *a, what="": (0, 0))
    monkeypatch.setattr(driver, "versions", lambda: "driver for CUDA 11.8, NVRTC 13.0")
    with pytest.raises(
        LaunchError, match=r"^the driver has no cuLaunchKernelEx; it came with CUDA 12\.0\. driver for CUDA 11"
    ):
        driver.c_function("cuLaunchKernelEx", 12000)


def test_cubin_that_the_driver_refuses_is_told_with_its_size_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver()
    fake.failures["cuLibraryLoadData"] = fake.CUresult.CUDA_ERROR_UNSUPPORTED_PTX_VERSION
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    wanted = r"CUDA_ERROR_UNSUPPORTED_PTX_VERSION .*; 3 bytes of cubin; driver for CUDA 13\.0, "
    with pytest.raises(LaunchError, match=wanted):
        driver.load_kernel(b"abc", "kernel_plain", 0)


X = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "front: x must be a torch.Tensor; got list. Convert it, e.g. torch.from_numpy."),
        (
            X.to_sparse(),
            "front: x must be a strided tensor; got layout torch.sparse_coo. Call .to_dense().",
        ),
        (
            torch._neg_view(X),
            "front: x must be memory that holds its values; got a negated view of other memory. Call .resolve_neg().",
        ),
    ],
)
def test_operand_that_is_no_plain_tensor_is_told_what_it_is(value: object, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        check_tensors("front", {"x": value}, {})
    assert str(caught.value) == message


def test_output_that_autograd_records_is_refused_only_while_it_records() -> None:
    output = torch.zeros(2, requires_grad=True)
    check_tensors("front", {"x": output}, {})
    with torch.no_grad():
        check_tensors("front", {}, {"logits": output})
    with pytest.raises(
        LaunchError, match=r"^front: logits must be an output without a gradient; got one that autograd"
    ):
        check_tensors("front", {}, {"logits": output})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (True, "tail: tp must be a whole number; got bool 'True'."),
        (8.0, "tail: tp must be a whole number; got float '8.0'."),
        ("8", "tail: tp must be a whole number; got str '8'."),
        (torch.ones(2), "tail: tp must be a whole number; got Tensor 'tensor([1., 1.])'."),
    ],
)
def test_number_that_is_not_whole_is_told_what_it_is(value: object, message: str) -> None:
    assert check_whole("tail", "tp", torch.tensor(8)) == 8
    with pytest.raises(LaunchError) as caught:
        check_whole("tail", "tp", value)
    assert str(caught.value) == message


def raised_messages(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Line and literal parts of each error that a module raises; parts of a few characters only are left out."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and node.exc is not None:
            parts = [n.value for n in ast.walk(node.exc) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            if any(len(part) >= SHARED_CHARACTERS for part in parts):
                yield node.lineno, parts


def texts_of_tests() -> str:
    """Every text of every test, as it stands and as the pattern that it may be."""
    texts: list[str] = []
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts += [node.value, re.sub(r"\\(.)", r"\1", node.value)]
    return "\n".join(texts)


def test_every_message_stands_in_a_test() -> None:
    """A refusal that no test words may say anything. Not a proof: the test must still raise it."""
    tested = texts_of_tests()
    files = [f for layer in WORDED for f in (*PACKAGE.glob(f"{layer}.py"), *PACKAGE.glob(f"{layer}/*.py"))]
    missing = []
    for file in files:
        for line, parts in raised_messages(file):
            pieces = (p[i : i + SHARED_CHARACTERS] for p in parts for i in range(len(p) - SHARED_CHARACTERS + 1))
            if not any(piece in tested for piece in pieces):
                missing.append(f"{file.relative_to(PACKAGE)}:{line}: {' … '.join(parts)}")
    assert missing == []

"""The cubin reader against whole, cut and changed cubins."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compile.sources import PLAIN_REQUEST, WGMMA_SERIALIZED, request_of

from cakegen.compile import load_nvrtc
from cakegen.compile.cubin import CubinReader
from cakegen.compile.program import compile_cubin
from cakegen.errors import CompileError


@pytest.fixture(scope="module")
def cubin() -> bytes:
    return compile_cubin(PLAIN_REQUEST).cubin


def test_functions_hold_the_kernel_and_its_called_functions() -> None:
    request = request_of(WGMMA_SERIALIZED)
    built = load_nvrtc().build(request.source, "x.cu", (), ("--gpu-architecture=sm_90a",))
    reader = CubinReader(built.code, "x")
    assert reader.functions.count("kernel_plain") == 1
    assert len(reader.functions) == 2


def test_resources_agree_with_the_assembler(cubin: bytes) -> None:
    compiled = compile_cubin(PLAIN_REQUEST)
    resources = CubinReader(cubin, "plain").resources("kernel_plain")
    assert (
        f"Used {resources.registers} registers, used 1 barriers, {resources.static_smem_bytes} bytes smem"
        in compiled.log
    )


def test_resources_of_an_absent_kernel_are_refused(cubin: bytes) -> None:
    with pytest.raises(CompileError, match=r"found 0\. The cubin defines: kernel_plain"):
        CubinReader(cubin, "plain").resources("kernel_other")


@settings(max_examples=200, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_cut_cubin_is_refused_or_read_alike(cubin: bytes, share: float) -> None:
    """Whatever is cut off, the reader never fails otherwise than with its own error."""
    cut = cubin[: int(len(cubin) * share)]
    try:
        found = CubinReader(cut, "cut").resources("kernel_plain")
    except CompileError:
        return
    assert found == CubinReader(cubin, "whole").resources("kernel_plain")


@settings(max_examples=500, deadline=None)
@given(at=st.integers(0, 1 << 14), value=st.integers(0, 255))
def test_changed_cubin_never_fails_with_a_foreign_error(cubin: bytes, at: int, value: int) -> None:
    changed = bytearray(cubin)
    changed[at % len(changed)] = value
    with contextlib.suppress(CompileError):
        CubinReader(bytes(changed), "changed").resources("kernel_plain")

"""Every header of `templates/device` and `templates/kernels` compiles alone: it includes what it names."""

from __future__ import annotations

import pytest

from cakegen import paths
from cakegen.arch import architecture
from cakegen.compile import CompileRequest, compile_ptx
from cakegen.emit.environment import template_environment
from cakegen.emit.program import COMPILE_FLAGS
from cakegen.emit.shared import HeaderPool
from cakegen.errors import CompileError

ROOT = paths.templates_root()
HEADERS = sorted(
    file.relative_to(ROOT).as_posix() for folder in ("device", "kernels") for file in (ROOT / folder).glob("*.cuh")
)
ARCHES = ("sm_90a", "sm_100a")
# instructions that one family alone has
DEVICE_FAMILIES = {
    "wgmma": "sm90",
    "wgmma_mma": "sm90",
    "launch_control": "sm100",
    "tcgen05": "sm100",
    "tcgen05_pair": "sm100",
    "tensor_memory": "sm100",
    "tma_pair": "sm100",
    "wide_store": "sm100",
}
VALUES: dict[str, tuple[dict[str, int], ...]] = {"device/wgmma_mma.cuh": ({"n": 8}, {"n": 96}, {"n": 256})}


def arches_of(header: str) -> list[str]:
    """The targets whose families have what a header holds."""
    stem = header.rpartition("/")[2].removesuffix(".cuh")
    named = stem.rpartition("_")[2] if header.startswith("kernels/") else DEVICE_FAMILIES.get(stem, "")
    families = {architecture(arch).family for arch in ARCHES}
    return [arch for arch in ARCHES if named not in families or architecture(arch).family == named]


def request_for_header(header: str, values: dict[str, int], arch: str) -> CompileRequest:
    pool = HeaderPool(template_environment(ROOT))
    source = f'#include "{pool.header(header, **values)}"\nextern "C" __global__ void kernel_alone() {{}}\n'
    return CompileRequest("alone", arch, source, tuple(pool.texts().items()), COMPILE_FLAGS, (), "kernel_alone")


@pytest.mark.parametrize(
    ("header", "arch", "values"),
    [
        (header, arch, values)
        for header in HEADERS
        for arch in arches_of(header)
        for values in VALUES.get(header, ({},))
    ],
)
def test_header_compiles_alone(header: str, arch: str, values: dict[str, int]) -> None:
    assert ".entry kernel_alone" in compile_ptx(request_for_header(header, values, arch))


def test_header_that_counts_on_another_is_refused() -> None:
    request = request_for_header("kernels/ring.cuh", {}, "sm_90a")
    lacking = tuple((name, text.replace('#include "cake_device_base.cuh"\n', "")) for name, text in request.headers)
    assert lacking != request.headers
    with pytest.raises(CompileError, match=r"cake_kernels_ring\.cuh\(\d+\): error: identifier \"u32\" is undefined"):
        compile_ptx(CompileRequest("alone", "sm_90a", request.source, lacking, request.flags, (), "kernel_alone"))

"""A small template folder, so that tests of the emitter do not depend on the kernels' templates."""

from __future__ import annotations

from pathlib import Path

import pytest

KERNEL = """\
#include "${device_common | file_name}"
#include "${device_family | file_name}"

//# says what the kernel is
struct Cfg {
//% for constant in spec.constants
    static constexpr ${constant.value | cpp_type} ${constant.name | ident} = ${constant.value | literal};
//% endfor
};

extern "C" __global__ void kernel_${spec.name | ident}() {}
"""
PARTS = {
    "device/common.cuh": '#pragma once\n#include "${header("device/base.cuh") | file_name}"\n',
    "device/base.cuh": "#pragma once\nusing u32 = unsigned int;\n",
    "device/sm90.cuh": "#pragma once\nusing u64 = unsigned long long;\n",
    "device/wgmma_mma.cuh": '#pragma once\n#include "${header("device/sm90.cuh") | file_name}"\n// ${n | i32}\n',
    "device/sm100.cuh": "#pragma once\nusing u64 = unsigned long long;\n",
    "host/common.cuh": "#pragma once\n#include <cuda.h>\n",
    "host/binding.cu": '#include "${header("host/common.cuh") | file_name}"\nint run_${spec.name | ident};\n',
    "kernels/sm90/decode.cu": KERNEL,
    "kernels/sm100/decode.cu": KERNEL,
    "kernels/sm90/front_gemm.cu": KERNEL,
    "kernels/sm90/tail_gemm.cu": KERNEL,
    "kernels/tail_norm.cu": KERNEL.replace('#include "${device_family | file_name}"\n', ""),
}


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    """A folder of templates with the families that the test models declare."""
    root = tmp_path / "templates"
    for name, text in PARTS.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    return root

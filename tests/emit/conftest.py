"""A small template folder, so that tests of the emitter do not depend on the kernels' templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from cakegen.plan import FAMILIES

KERNEL = """\
//% for header in headers
#include "${header | file_name}"
//% endfor

//# says what the kernel is
struct Cfg {
//% for constant in spec.constants
    static constexpr ${constant.value | cpp_type} ${constant.name | ident} = ${constant.value | literal};
//% endfor
};

extern "C" __global__ void kernel_${spec.name | ident}() {}
"""
INCLUDE_BASE = '#pragma once\n\n#include "device/base.cuh"\n'
PARTS = {
    "device/base.cuh": "#pragma once\nusing u32 = unsigned int;\n",
    "device/wgmma.cuh": "#pragma once\nusing u64 = unsigned long long;\n",
    "device/wgmma_mma.cuh": '#pragma once\n\n#include "device/wgmma.cuh"\n// ${n | i32}\n',
    "host/common.cuh": "#pragma once\n#include <cuda.h>\n",
    "host/binding.cu": '#include "host/common.cuh"\nint run_${spec.name | ident};\n',
    "kernels/program.cu": KERNEL,
    "kernels/activation.cuh": "#pragma once\n",
    **{body: INCLUDE_BASE for family in FAMILIES.values() for body in family.bodies.values()},
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

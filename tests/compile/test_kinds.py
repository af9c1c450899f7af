"""One program of each kind, as PTX: it reads every parameter, and waits for the launch before it.

Programs of a kind have the same body, switches and call; what differs is sizes.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.emit.program_kinds import kind_of

from cakegen import paths
from cakegen.compile import CompileRequest, compile_ptx, request_for
from cakegen.compile.nvrtc import load_nvrtc
from cakegen.registry import Registry, load_registry

# one worker compiles them all, once
pytestmark = pytest.mark.xdist_group("kinds")

EXPORTS = sorted(path.parent.name for path in paths.generated_root().glob("*/cake_jit.py"))


@functools.cache
def examples() -> tuple[tuple[Registry, str], ...]:
    """A tree and a key for each kind."""
    found: dict[Hashable, tuple[Registry, str]] = {}
    for registry in map(load_registry, EXPORTS):
        for key in registry.kernels:
            found.setdefault(kind_of(registry, registry.program(key)), (registry, key))
    return tuple(found.values())


@functools.cache
def ptx_of_each_kind() -> dict[str, str]:
    """PTX by key."""

    def compiled(example: tuple[Registry, str]) -> str:
        registry, key = example
        return compile_ptx(request_for(registry, key, registry.program(key).arches[0]))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip((key for _, key in examples()), pool.map(compiled, examples()), strict=True))


def unread_parameters(ptx: str, symbol: str, names: list[str]) -> list[str]:
    """Parameters of a kernel that no instruction names."""
    _, _, behind = ptx.partition(f".entry {symbol}(")
    declared, _, body = behind.partition(")")
    numbers = re.findall(rf"\b{symbol}_param_(\d+)", declared)
    assert [int(number) for number in numbers] == list(range(len(names)))
    return [name for number, name in enumerate(names) if not re.search(rf"\b{symbol}_param_{number}\b", body)]


def test_kinds_are_some_dozens_and_of_every_role() -> None:
    programs = [registry.program(key) for registry, key in examples()]
    assert {program.role for program in programs} == {
        *("decode_front", "decode_tail", "tail_norm", "front_gemm", "tail_gemm"),
    }
    assert 20 < len(programs) < 150


def test_every_parameter_of_a_program_is_read() -> None:
    unread: dict[str, list[str]] = {}
    for registry, key in examples():
        program = registry.program(key)
        arguments = [argument for argument in program.arg_plan if argument[0] != "grid"]
        names = [f"{name}_map" if kind == "tma_buffer" else name for kind, name in arguments]
        found = unread_parameters(ptx_of_each_kind()[key], program.kernel_symbol, names)
        if found:
            unread[key] = found
    assert unread == {}, "by key, what a program leaves unread"


def unused_constants(request: CompileRequest) -> list[str]:
    """Members of `struct Cfg` that nothing uses, barriers' offsets among them: a compiler warns of each use."""
    member = re.compile(r"static constexpr ([\w ]+ (k\w+)(?:\[\])? =)")
    marked = dataclasses.replace(request, source=member.sub(r"[[deprecated]] static constexpr \1", request.source))
    options = [f"--gpu-architecture={request.arch.replace('sm_', 'compute_')}", *request.options]
    built = load_nvrtc().build(marked.source, f"{request.name}_kernel.cu", request.headers, options, ptx=True)
    assert built.status == 0, built.log
    used = re.findall(r'"(?:Cfg::)?(k\w+)[^"]*" (?:\(declared[^)]*\) )?was declared deprecated', built.log)
    return [name for _, name in member.findall(request.source) if name not in used]


def test_every_constant_and_barrier_of_a_program_is_used() -> None:
    def unused(example: tuple[Registry, str]) -> list[str]:
        registry, key = example
        return unused_constants(request_for(registry, key, registry.program(key).arches[0]))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip((key for _, key in examples()), pool.map(unused, examples()), strict=True))
    assert {key: names for key, names in found.items() if names} == {}


def test_constant_that_nothing_uses_is_found() -> None:
    registry, key = examples()[0]
    request = request_for(registry, key, registry.program(key).arches[0])
    spare = request.source.replace("struct Cfg {", "struct Cfg {\n    static constexpr int kSpare = 7;", 1)
    assert unused_constants(dataclasses.replace(request, source=spare)) == ["kSpare"]


def test_every_program_waits_for_the_launch_before_it() -> None:
    """Any of them may follow a launch that has released its dependents early."""
    assert [key for key, text in ptx_of_each_kind().items() if "griddepcontrol.wait" not in text] == []


def test_parameter_that_no_instruction_names_is_found() -> None:
    ptx = (
        ".visible .entry kernel_a(\n\t.param .u64 kernel_a_param_0,\n\t.param .u32 kernel_a_param_1,\n"
        "\t.param .u32 kernel_a_param_2\n)\n{\n\tld.param.u64 \t%rd1, [kernel_a_param_0];\n}\n"
    )
    assert unread_parameters(ptx, "kernel_a", ["out", "pitch", "count"]) == ["pitch", "count"]

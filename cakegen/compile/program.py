"""One program: from its text to a cubin that has been looked at, or to PTX. Imports errors, arch and this package.

A cubin is never returned empty, without its kernel, or with code that costs the design: local memory, ignored
`setmaxnreg`, serialised wgmma and injected waits are errors here, whatever the compiler calls them. What a kernel takes
is read from its cubin. The three others are told by the log alone, so a compilation that leaves none is refused.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cakegen.arch import architecture
from cakegen.compile.cubin import CubinReader
from cakegen.compile.nvrtc import Nvrtc, NvrtcOutput, load_nvrtc
from cakegen.compile.permitted import check_request, own_log
from cakegen.compile.requests import CompileRequest
from cakegen.errors import CompileError, PlanError

# The options that this module sets itself; a request that sets them too would not be what its key says.
_RESERVED_OPTIONS = (
    "-arch",
    "--gpu-architecture",
    "--gpu-code",
    "--gpu-name",
    "-dlto",
    "--dlink-time-opt",
    "-pch",
    "--pch",
)
_VERBOSE = "--ptxas-options=-v"
# ptxas advisories that mean a kernel other than the one written. By their words too, since a cause has its own code:
# C7508 and each kind of serialised wgmma (C7510, C7511, …) open with "Potential Performance Loss", and C7517 and C7519
# say that a wait or an arrive "is injected".
_COSTLY_ADVISORIES = re.compile(r"\(C(?:7508|7510|7517|7519)\)|Potential Performance Loss|is injected in around")
CHAOS_FLAG = "-DCAKEGEN_CHAOS"
"""Builds with seeded sleeps, which only tests run: sleeps may cost registers that a program has none of to spare."""


@dataclass(frozen=True)
class ResourceReport:
    """What one compiled kernel takes, and what it took to compile.

    Parameters
    ----------
    registers, static_smem_bytes, stack_bytes, parameter_bytes
        As in `KernelResources`, read from the cubin.
    spill_bytes
        What all local stores and loads of the cubin move, each counted once; 0, since more is an error.
    cubin_bytes
        Size of the cubin.
    compile_ms
        Wall time of the compilation, also where the cubin now comes from the cache.
    """

    registers: int
    static_smem_bytes: int
    stack_bytes: int
    parameter_bytes: int
    spill_bytes: int
    cubin_bytes: int
    compile_ms: float


@dataclass(frozen=True)
class CompiledProgram:
    """A cubin with its report. `compiler` names NVRTC's version; `cached` says that it was not compiled just now."""

    name: str
    arch: str
    kernel_symbol: str
    cubin: bytes
    log: str
    compiler: str
    report: ResourceReport
    cached: bool


def compile_cubin(request: CompileRequest) -> CompiledProgram:
    """Compile one program to a cubin for its exact target. Needs no GPU and no driver.

    Raises
    ------
    CompileError
        NVRTC is missing or does not know the target; the source is refused (the message holds the log); the cubin is
        empty or lacks the kernel; the compiler spilled or changed what was written.
    """
    nvrtc = load_nvrtc()
    nvrtc.require(request.arch)
    start = time.perf_counter()
    output = _build(nvrtc, request, ptx=False)
    elapsed_ms = (time.perf_counter() - start) * 1e3
    if not output.code:
        raise CompileError(f"{_where(nvrtc, request)}: the compiler reported success and returned an empty cubin")
    _refuse_costly_code(nvrtc, request, output.log)
    compiled = examine_cubin(
        request,
        output.code,
        log=output.log,
        compiler=compiler_version(nvrtc),
        compile_ms=elapsed_ms,
        cached=False,
    )
    _refuse_silence(nvrtc, request, output.log)
    return compiled


def compile_ptx(request: CompileRequest, user_options: Sequence[str] | None = None) -> str:
    """Compile one program to PTX text for its target's virtual architecture.

    Parameters
    ----------
    user_options
        Options that the user names for a file of their own. They go to the compiler as they are, and the text may
        include what they lead to. None: the request comes from a tree, and reaches for nothing but itself.

    Raises
    ------
    CompileError
        As for `compile_cubin`, up to the checks that need machine code.
    """
    nvrtc = load_nvrtc()
    nvrtc.require(request.arch)
    text = _build(nvrtc, request, ptx=True, user_options=user_options).code.decode()
    count = len(re.findall(rf"\.entry\s+{re.escape(request.kernel_symbol)}\b", text))
    if count != 1:
        raise CompileError(
            f"{_where(nvrtc, request)}: the PTX must define .entry {request.kernel_symbol} once, not {count} times"
        )
    return text


def examine_cubin(
    request: CompileRequest, cubin: bytes, *, log: str, compiler: str, compile_ms: float, cached: bool
) -> CompiledProgram:
    """Read a cubin's own account of its kernel and pair them up.

    Raises
    ------
    CompileError
        The bytes are no cubin, do not define the request's kernel exactly once, or use local memory.
    """
    reader = CubinReader(cubin, f"{request.name} for {request.arch}")
    resources = reader.resources(request.kernel_symbol)
    spill_bytes = reader.local_access_bytes
    if (resources.stack_bytes or spill_bytes) and CHAOS_FLAG not in request.flags:
        raise CompileError(
            f"{request.name} for {request.arch}, {compiler}: {resources.stack_bytes} bytes of stack, {spill_bytes} "
            "bytes of register spills or local arrays (stores and loads); a program of cakegen has none. Give a thread "
            f"more registers, or less to hold at once. Full log:\n{log}"
        )
    report = ResourceReport(
        registers=resources.registers,
        static_smem_bytes=resources.static_smem_bytes,
        stack_bytes=resources.stack_bytes,
        parameter_bytes=resources.parameter_bytes,
        spill_bytes=spill_bytes,
        cubin_bytes=len(cubin),
        compile_ms=compile_ms,
    )
    return CompiledProgram(request.name, request.arch, request.kernel_symbol, cubin, log, compiler, report, cached)


def compiler_version(nvrtc: Nvrtc) -> str:
    """The compiler's version as cache keys and reports spell it: `nvrtc-13.0.88`."""
    return f"nvrtc-{nvrtc.release}"


def _build(
    nvrtc: Nvrtc, request: CompileRequest, *, ptx: bool, user_options: Sequence[str] | None = None
) -> NvrtcOutput:
    own_file = user_options is not None
    for flag in (*request.flags, *(user_options or ())):
        if flag.split("=")[0] in _RESERVED_OPTIONS:
            raise CompileError(f"{request.name}: option {flag!r} is set by cakegen itself; give the target as arch")
    if not own_file:
        check_request(request)
    try:
        target = architecture(request.arch).name
    except PlanError as error:
        raise CompileError(f"{request.name}: {error}") from None
    options = [f"--gpu-architecture={target.replace('sm_', 'compute_') if ptx else target}", *request.options]
    options += user_options or ()
    if not ptx:
        options += [_VERBOSE, *nvrtc.fresh_options]
    output = nvrtc.build(request.source, f"{request.name}_kernel.cu", request.headers, options, ptx=ptx)
    if not own_file:
        output = replace(output, log=own_log(output.log, request))
    if output.status != 0:
        log = output.log or "(the compiler left no log)"
        raise CompileError(f"{_where(nvrtc, request)}: {output.status_name} with options {' '.join(options)}\n{log}")
    return output


def _refuse_costly_code(nvrtc: Nvrtc, request: CompileRequest, log: str) -> None:
    found = [line.strip() for line in log.splitlines() if _COSTLY_ADVISORIES.search(line)]
    if found:
        listed = "\n".join(found)
        raise CompileError(
            f"{_where(nvrtc, request)}: the code is not what the template says:\n{listed}\n\nFull log:\n{log}"
        )


def _refuse_silence(nvrtc: Nvrtc, request: CompileRequest, log: str) -> None:
    """The assembler reports on every kernel that it is given (`-v`); where it did not, it did not run."""
    if request.kernel_symbol not in log:
        raise CompileError(
            f"{_where(nvrtc, request)}: the log holds no report on {request.kernel_symbol}, so the code came out of a "
            "cache and whether it is what the template says can't be seen. Set CUDA_CACHE_DISABLE=1 and compile again."
        )


def _where(nvrtc: Nvrtc, request: CompileRequest) -> str:
    return f"{request.name} for {request.arch}, {nvrtc.label}"

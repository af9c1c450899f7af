"""The NVRTC library: finding it, naming it, and one call that turns text into code. Imports only errors and arch.

NVRTC's C interface is the same dozen functions in CUDA 12 and 13, so the library is called through ctypes: one build of
cakegen then works with either wheel, whatever the major version of `cuda.bindings` (which loads NVRTC of its own major
version only), and every message can name the very file that was loaded. ctypes releases the interpreter lock during a
call, so threads compile in parallel.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cakegen.arch import ARCHITECTURES, architecture
from cakegen.errors import CompileError, PlanError

NVRTC_PATH_VARIABLE = "CAKEGEN_NVRTC"
_NO_CACHE = "--no-cache"
_CALL_ARGTYPES = {
    "nvrtcVersion": (ctypes.c_void_p, ctypes.c_void_p),
    "nvrtcGetNumSupportedArchs": (ctypes.c_void_p,),
    "nvrtcGetSupportedArchs": (ctypes.c_void_p,),
    "nvrtcCreateProgram": (
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ),
    "nvrtcCompileProgram": (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
    "nvrtcDestroyProgram": (ctypes.c_void_p,),
    "nvrtcGetProgramLogSize": (ctypes.c_void_p, ctypes.c_void_p),
    "nvrtcGetProgramLog": (ctypes.c_void_p, ctypes.c_char_p),
    "nvrtcGetCUBINSize": (ctypes.c_void_p, ctypes.c_void_p),
    "nvrtcGetCUBIN": (ctypes.c_void_p, ctypes.c_char_p),
    "nvrtcGetPTXSize": (ctypes.c_void_p, ctypes.c_void_p),
    "nvrtcGetPTX": (ctypes.c_void_p, ctypes.c_char_p),
}
_load_lock = threading.Lock()


def _renew_lock() -> None:
    """In a forked child, which lacks the thread that may have held the lock."""
    global _load_lock
    _load_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


@dataclass(frozen=True)
class NvrtcOutput:
    """What one NVRTC program gave: `status` 0 and the code, or a failure and its log."""

    status: int
    status_name: str
    log: str
    code: bytes


class Nvrtc:
    """One loaded NVRTC library.

    Parameters
    ----------
    path
        The file that was loaded; named in every message.
    handle
        The ctypes library.

    Notes
    -----
    NVRTC documentation, "Basic usage" and "Supported compile options" (12.9 and 13.0).
    """

    def __init__(self, path: Path, handle: ctypes.CDLL) -> None:
        self.path = path
        self._handle = handle
        for name, argtypes in _CALL_ARGTYPES.items():
            function = getattr(handle, name)
            function.argtypes = argtypes
            function.restype = ctypes.c_int
        handle.nvrtcGetErrorString.argtypes = (ctypes.c_int,)
        handle.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._checked("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        count = ctypes.c_int()
        self._checked("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._checked("nvrtcGetSupportedArchs", numbers)
        self.supported = tuple(numbers)

    @functools.cached_property
    def release(self) -> str:
        """The exact release, patch included (`13.0.88`), which the interface does not tell but the PTX it writes does.

        Raises
        ------
        CompileError
            This NVRTC can't compile even an empty text, as when its built-in functions are not beside it.
        """
        probe = self.build("", "probe.cu", (), (f"--gpu-architecture=compute_{self.supported[-1]}",), ptx=True)
        if probe.status != 0:
            raise CompileError(f"{self.label}: {probe.status_name} on an empty text: {probe.log}")
        comments = [line for line in probe.code.decode().splitlines() if line.startswith("//")]
        found = re.search(r"\bV(\d+\.\d+\.\d+)", " ".join(comments))
        return found.group(1) if found else " ".join(comments)

    @functools.cached_property
    def fresh_options(self) -> tuple[str, ...]:
        """What makes this NVRTC compile a program that it has compiled before: it would else leave no log.

        Since 12.9 it takes what the driver's cache holds, silently, and knows the option (tried with 12.8, which has
        neither, 12.9, 13.0 and 13.5). Asked of the library and not derived from its version.
        """
        options = (f"--gpu-architecture=compute_{self.supported[-1]}", _NO_CACHE)
        return (_NO_CACHE,) if self.build("", "probe.cu", (), options, ptx=True).status == 0 else ()

    @property
    def label(self) -> str:
        """Version and file for messages: `NVRTC 13.0 (…/libnvrtc.so.13)`."""
        return f"NVRTC {self.version[0]}.{self.version[1]} ({self.path})"

    def require(self, arch: str) -> None:
        """Check that this library can compile for `arch`, before it is asked to.

        Raises
        ------
        CompileError
            The target is not one of cakegen's, or this NVRTC is too old or too new for it.
        """
        try:
            needed = architecture(arch)
        except PlanError as error:
            raise CompileError(f"{self.label}: {error}") from None
        number = needed.compute_capability[0] * 10 + needed.compute_capability[1]
        if number in self.supported and self.version >= needed.min_nvrtc:
            return
        known = ", ".join(str(value) for value in self.supported)
        least = ".".join(str(part) for part in needed.min_nvrtc)
        raise CompileError(
            f"{self.label} does not know {arch}; it supports {known}. {arch} needs NVRTC {least} or newer: install "
            f"nvidia-cuda-nvrtc >= {least}, or set {NVRTC_PATH_VARIABLE} to such a library."
        )

    def build(
        self,
        source: str,
        file_name: str,
        headers: Sequence[tuple[str, str]],
        options: Sequence[str],
        *,
        ptx: bool = False,
    ) -> NvrtcOutput:
        """Compile one translation unit from memory; a refusal is a value, not an exception.

        Parameters
        ----------
        source, file_name
            The text, and the virtual name it has in the log.
        headers
            (include name, text) pairs; nothing is read from disk for them.
        options
            NVRTC options, in order.
        ptx
            Return PTX text rather than a cubin.
        """
        names = (ctypes.c_char_p * len(headers))(*(name.encode() for name, _ in headers))
        texts = (ctypes.c_char_p * len(headers))(*(text.encode() for _, text in headers))
        program = ctypes.c_void_p()
        self._checked(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.encode(),
            file_name.encode(),
            len(headers),
            texts,
            names,
        )
        try:
            encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._handle.nvrtcCompileProgram(program, len(options), encoded)
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode("utf-8", "replace").strip()
            code = self._read(program, "PTX" if ptx else "CUBIN") if status == 0 else b""
        finally:
            self._handle.nvrtcDestroyProgram(ctypes.byref(program))
        return NvrtcOutput(status, self._error_name(status), log, code.rstrip(b"\0") if ptx else code)

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._checked(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        self._checked(f"nvrtcGet{what}", program, buffer)
        return buffer.raw[: size.value]

    def _error_name(self, status: int) -> str:
        return str(self._handle.nvrtcGetErrorString(status).decode())

    def _checked(self, call: str, *arguments: object) -> None:
        status = getattr(self._handle, call)(*arguments)
        if status != 0:
            raise CompileError(f"NVRTC ({self.path}): {call} failed with {self._error_name(status)}")


def load_nvrtc() -> Nvrtc:
    """The NVRTC of this process: the file named by `CAKEGEN_NVRTC`, else the one that cuda-python's path finder finds.

    The rule of the path finder: a library that the process has loaded already, the installed wheels, the environment's
    toolkit folders, the system's loader.

    Raises
    ------
    CompileError
        No NVRTC can be loaded; the message lists what was tried.
    """
    with _load_lock:
        return _load(os.environ.get(NVRTC_PATH_VARIABLE, ""))


@functools.lru_cache(maxsize=8)
def _load(named: str) -> Nvrtc:
    if named:
        return _open(Path(named), f"{NVRTC_PATH_VARIABLE}={named}")
    try:
        from cuda import pathfinder
    except ImportError as error:
        raise CompileError(
            f"NVRTC: cuda.pathfinder can't be imported ({error}). Install cuda-python, or set {NVRTC_PATH_VARIABLE} "
            "to a libnvrtc.so file."
        ) from None
    try:
        found = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    except (pathfinder.DynamicLibNotFoundError, RuntimeError) as error:
        raise CompileError(
            f"NVRTC was not found. Install nvidia-cuda-nvrtc >= {_least_for_all()}, or set {NVRTC_PATH_VARIABLE} to a "
            f"libnvrtc.so file. The search said: {error}"
        ) from None
    return _open(Path(str(found)), "cuda.pathfinder")


def _open(path: Path, origin: str) -> Nvrtc:
    """Load the library and, before it, its built-in functions: the wheels' libnvrtc does not find its own sibling."""
    version = re.sub(r"^libnvrtc\.so\.?", "", path.resolve().name)
    siblings = sorted(path.resolve().parent.glob("libnvrtc-builtins.so*"))
    try:
        for sibling in (s for s in siblings if s.name.startswith(f"libnvrtc-builtins.so.{version.split('.')[0]}")):
            ctypes.CDLL(str(sibling), mode=ctypes.RTLD_GLOBAL)
        return Nvrtc(path, ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        raise CompileError(
            f"NVRTC: {path} (from {origin}) can't be used: {error}. It must be a libnvrtc.so of CUDA 12.9 or newer."
        ) from None


def _least_for_all() -> str:
    least = max(arch.min_nvrtc for arch in ARCHITECTURES.values())
    return ".".join(str(part) for part in least)

"""A compile request, and the way to it from a registry's key: the only place that joins the two. Imports registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cakegen.errors import CompileError
from cakegen.registry import Registry


@dataclass(frozen=True)
class CompileRequest:
    """Everything that a cubin depends on, beside the compiler itself.

    Parameters
    ----------
    name
        The program; its text is `<name>_kernel.cu` in the log.
    arch
        Exact target (`sm_90a`).
    source
        Text of the kernel file.
    headers
        (include name, text) pairs that the source includes.
    flags
        Compiler options, in order, without the target.
    constants
        (macro, value) pairs, given to the compiler as `-D<macro>=<value>`.
    kernel_symbol
        The `extern "C"` kernel that the cubin must define.
    """

    name: str
    arch: str
    source: str
    headers: tuple[tuple[str, str], ...]
    flags: tuple[str, ...]
    constants: tuple[tuple[str, int], ...]
    kernel_symbol: str

    @property
    def options(self) -> tuple[str, ...]:
        """Options after the target: flags, then constants, as the compiler gets them."""
        return (*self.flags, *(f"-D{macro}={value}" for macro, value in self.constants))


def request_for(registry: Registry, key: str, arch: str, extra_flags: Sequence[str] = ()) -> CompileRequest:
    """The request that compiles the program behind a logical key.

    Parameters
    ----------
    registry
        A generated tree.
    key
        A logical key of it.
    arch
        Target; one of the program's.
    extra_flags
        Options after the program's own (`-DCAKEGEN_CHAOS`); they are part of the cache's key as all options are.

    Raises
    ------
    RegistryError
        No such key, a source file is missing, or the sources are not those that the registry was written with.
    CompileError
        The program is not written for `arch`.
    """
    program = registry.program(key)
    if arch not in program.arches:
        raise CompileError(f"{key}: {program.name} is written for {', '.join(program.arches)}; got {arch}")
    (_, source), *headers = registry.closure(program)
    return CompileRequest(
        name=program.name,
        arch=arch,
        source=source,
        headers=tuple(headers),
        flags=(*program.flags, *extra_flags),
        constants=tuple(sorted(registry.constants(key).items())),
        kernel_symbol=program.kernel_symbol,
    )

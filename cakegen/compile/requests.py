"""From a registry's key to a compile request: the only place that joins the two. Imports registry and this package."""

from __future__ import annotations

from collections.abc import Sequence

from cakegen.compile.program import CompileRequest
from cakegen.errors import CompileError
from cakegen.registry import Registry


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
    (_, source), *headers = registry.closure(program, arch)
    return CompileRequest(
        name=program.name,
        arch=arch,
        source=source,
        headers=tuple(headers),
        flags=(*program.flags, *extra_flags),
        constants=tuple(sorted(registry.constants(key).items())),
        kernel_symbol=program.kernel_symbol,
    )

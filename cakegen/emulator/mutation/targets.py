"""Which programs are mutated, and where in the source a mutant is. Imports mutants, cases, compile and registry.

Programs that come from one template hold the same sites again and again. A *site* is an operator's change at a chain
of source lines: the line that the instruction was inlined from, and the lines that call it. A few programs hold every
site of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from cakegen.compile import CompileRequest, compile_ptx, request_for
from cakegen.emulator.cases import Case, find_case
from cakegen.emulator.mutation.mutants import Mutant, mutants_of
from cakegen.registry import Registry

# Line information changes no instruction, and says where each comes from.
_FLAGS = ("-lineinfo",)
# (operator, change, first part of the opcode, source lines from the innermost call out)
Site = tuple[str, str, str, tuple[str, ...]]


@dataclass(frozen=True)
class Target:
    """One program: its key, its compilation, and its PTX."""

    key: str
    request: CompileRequest
    ptx: str

    @cached_property
    def mutants(self) -> tuple[Mutant, ...]:
        """Every mutant of it."""
        return mutants_of(self.ptx, self.request.kernel_symbol)

    @cached_property
    def _sources(self) -> dict[str, list[str]]:
        return {name: text.splitlines() for name, text in self.request.headers}

    @cached_property
    def _kernel_lines(self) -> list[str]:
        return self.request.source.splitlines()

    def source_lines(self, mutant: Mutant) -> tuple[str, ...]:
        """The text of the source lines of a mutant, from the innermost inlined call out."""
        return tuple(
            self._sources.get(file, self._kernel_lines)[line - 1].strip()
            for file, line in mutant.instruction.place.source
        )

    def kernel_line(self, mutant: Mutant) -> str:
        """The innermost line outside of the device functions, which hold one instruction each."""
        for file, line in mutant.instruction.place.source:
            if file not in self._sources:
                return self._kernel_lines[line - 1].strip()
        return self.source_lines(mutant)[0] if mutant.instruction.place.source else mutant.instruction.text

    def site(self, mutant: Mutant) -> Site:
        """What makes a mutant the same in another program."""
        return mutant.operator, mutant.change, mutant.instruction.root, self.source_lines(mutant)

    def case(self, registry: Registry) -> Case:
        """A request that launches it."""
        return find_case(registry, self.key)


def target_of(registry: Registry, key: str, arch: str) -> Target:
    """A key's program, compiled to PTX."""
    request = request_for(registry, key, arch, _FLAGS)
    return Target(key, request, compile_ptx(request))


def distinct_targets(registry: Registry, arch: str) -> Iterator[Target]:
    """The programs of an architecture, each once: several keys may share one."""
    seen: set[str] = set()
    for key, name in registry.kernels.items():
        if arch in registry.program(key).arches and name not in seen:
            seen.add(name)
            yield target_of(registry, key, arch)

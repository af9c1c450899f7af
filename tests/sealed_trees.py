"""Registries whose digests are those of their files now: for tests that edit a tree's text."""

from __future__ import annotations

from dataclasses import replace

from cakegen.registry import Program, Registry, closure_digest


def sealed(registry: Registry, program: Program) -> Program:
    """A program with the digests of its files."""
    texts = [(name, registry.read(name)) for name in (program.kernel_source, *program.headers)]
    digests = ((arch, closure_digest(arch, texts, program.flags)) for arch in program.arches)
    return replace(program, closure_digest=tuple(digests))


def resealed(registry: Registry) -> Registry:
    """A registry in memory, all of whose programs have the digests of their files."""
    return replace(registry, programs={name: sealed(registry, each) for name, each in registry.programs.items()})

"""Registries whose digests are those of their files now: for tests that edit a tree's text."""

from __future__ import annotations

from dataclasses import replace

from cakegen.registry import Program, Registry, file_digest


def sealed(registry: Registry, program: Program) -> Program:
    """A program with the digests of its files."""
    return replace(program, digests=tuple((name, file_digest(registry.read(name))) for name, _ in program.digests))


def resealed(registry: Registry) -> Registry:
    """A registry in memory, all of whose programs have the digests of their files."""
    return replace(registry, programs={name: sealed(registry, each) for name, each in registry.programs.items()})

"""What the bundles that a process would take hold of their exports' programs. Imports compile and registry."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from cakegen.compile.bundle import BUNDLE_VARIABLE, Bundle, open_bundle, request_identity
from cakegen.compile.requests import request_for
from cakegen.doctor.finding import ABSENT, OK, PROBLEM, Finding
from cakegen.errors import CakeError, CompileError
from cakegen.registry import Registry, load_registry


def examine_bundles(registry: Registry | None) -> Iterator[Finding]:
    """One finding for each folder that `CAKEGEN_BUNDLE` names.

    Parameters
    ----------
    registry
        The export that is looked at; a bundle of another one is compared with the one of that name that is shipped.
    """
    for part in os.environ.get(BUNDLE_VARIABLE, "").split(os.pathsep):
        if not part:
            continue
        try:
            bundle = open_bundle(Path(part))
        except CompileError as error:
            yield Finding("bundle", PROBLEM, str(error), {"path": part})
            continue
        yield _bundle(part, bundle, registry)


def _bundle(part: str, bundle: Bundle, registry: Registry | None) -> Finding:
    """Where a bundle is named nothing is compiled, so a program that it lacks is a request that is refused."""
    export, count = bundle.export, len(bundle.programs)
    arches = sorted({line.arch for line in bundle.programs.values()})
    targets = ", ".join(arches) or "no target"
    facts: dict[str, object] = {"path": part, "export": export, "programs": count, "arches": arches}
    try:
        if registry is None or registry.export != export:
            registry = load_registry(export)
        needed = _identities(registry, arches)
    except CakeError as error:
        text = f"{part}: {count} programs of {export} for {targets}, compared with nothing ({error})"
        return Finding("bundle", ABSENT, text, facts)
    held = len(needed & set(bundle.programs))
    facts |= {"needed": len(needed), "held": held}
    text = f"{part}: {held} of {len(needed)} programs of {export} for {targets}"
    again = f"`cakegen bundle --export {export} --out {part}` makes it again"
    if held < count:
        text += f"; {count - held} are of other sources than those here, and are never used: {again}"
        return Finding("bundle", PROBLEM, text, facts)
    if held < len(needed) or not arches:
        text += f"; what needs another is refused, since nothing is compiled: {again}"
        return Finding("bundle", ABSENT, text, facts)
    return Finding("bundle", OK, text, facts)


def _identities(registry: Registry, arches: Sequence[str]) -> set[str]:
    """Of every program that an export has for some targets."""
    return {
        request_identity(request_for(registry, key, arch))
        for key in registry.kernels
        for arch in arches
        if arch in registry.program(key).arches
    }

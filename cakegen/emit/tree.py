"""Model -> {path: text}: every file of one generated tree, and the headers that it includes. Pure: writes nothing.

<export>/csrc/cake_<export>/<program>_kernel.cu, <program>_binding.cu     a pair a program
<export>/cake_jit.py                                                      the registry: tables
<export>/README.md                                                        key -> file -> meaning
shared/cake_<template>.cuh                                                headers, once for all exports
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cakegen import paths
from cakegen.emit.environment import template_environment
from cakegen.emit.index import TreeProgram, render_readme, render_registry
from cakegen.emit.program import ProgramSpec
from cakegen.emit.reach import ReachedKey, reached_keys
from cakegen.emit.seal import MAX_COLUMNS, included_files, render_sealed
from cakegen.emit.shared import HeaderPool, included_closure
from cakegen.errors import EmitError
from cakegen.model import Model
from cakegen.plan import FAMILIES
from cakegen.registry import REGISTRY_FILE, SHARED_FOLDER

KERNEL_TEMPLATE = "kernels/program.cu"
BINDING_TEMPLATE = "host/binding.cu"
README_FILE = "README.md"


@dataclass(frozen=True)
class RenderedTree:
    """An export as text.

    Parameters
    ----------
    export
        Its name.
    files
        By path below `<export>/`.
    headers
        What its programs include, by file name; they stand in the folder `shared`.
    """

    export: str
    files: dict[str, str]
    headers: dict[str, str]


def render_tree(
    model: Model, export: str, templates: Path | None = None, keys: Sequence[ReachedKey] | None = None
) -> RenderedTree:
    """All files of an export.

    Parameters
    ----------
    model
        What to plan and write.
    export
        The model's name; it prefixes every file.
    templates
        Folder of the templates; the package's own by default.
    keys
        What the model reaches, where the caller knows; by default a walk over all plans finds out.

    Raises
    ------
    EmitError
        A template is wrong, a text breaks a rule of generated files, or a route has no template.
    PlanError
        A plan does not fit.
    """
    if export != model.name:
        raise EmitError(f"export {export!r} holds the model {model.name!r}; the two names must be the same")
    if export == SHARED_FOLDER:
        raise EmitError(f"no export can be called {export!r}: that is the folder of the headers that exports share")
    pool = HeaderPool(template_environment(templates or paths.templates_root()))
    sources, programs = dict[str, str](), list[TreeProgram]()
    for name, served in _keys_by_program(reached_keys(model) if keys is None else keys).items():
        spec = served[0].program
        kernel = sources[f"{name}_kernel.cu"] = render_kernel(pool, spec)
        sources[f"{name}_binding.cu"] = render_binding(pool, spec)
        programs.append(TreeProgram(name, spec, served, tuple(included_files(kernel))))
    headers = _included(sources, pool.texts())
    files = {f"csrc/cake_{export}/{file}": text for file, text in sources.items()}
    for file, body, kind in (
        (REGISTRY_FILE, render_registry(model, programs, sources), "Registry"),
        (README_FILE, render_readme(model, programs), "Index"),
    ):
        files[file] = render_sealed(file, export, f"{kind} of {len(programs)} programs.", body)
    return RenderedTree(export, dict(sorted(files.items())), dict(sorted(headers.items())))


def _included(sources: dict[str, str], headers: dict[str, str]) -> dict[str, str]:
    """Of the headers, those that a source includes, directly or not."""
    known = {**headers, **sources}
    used = {name for source in sources for name in included_closure(source, known)}
    return {name: text for name, text in headers.items() if name in used}


def _keys_by_program(keys: Sequence[ReachedKey]) -> dict[str, tuple[ReachedKey, ...]]:
    """The keys that each program serves, by its name. One name stands for one specification, comments included."""
    found: dict[str, list[ReachedKey]] = {}
    for entry in keys:
        served = found.setdefault(entry.program.name, [])
        if served and served[0].program != entry.program:
            differing = [
                field.name
                for field in dataclasses.fields(ProgramSpec)
                if getattr(served[0].program, field.name) != getattr(entry.program, field.name)
            ]
            raise EmitError(
                f"{entry.program.name}: {served[0].key} and {entry.key} share one canonical form but differ in "
                f"{', '.join(differing)}; what differs must be part of the form, or the same"
            )
        served.append(entry)
    return {name: tuple(found[name]) for name in sorted(found)}


def render_kernel(pool: HeaderPool, spec: ProgramSpec) -> str:
    """The device half of a program, sealed."""
    headers = [pool.header(header.template, **dict(header.values)) for header in spec.headers]
    about = textwrap.wrap(spec.pipeline.about, MAX_COLUMNS - len("// "), break_on_hyphens=False)
    body = pool.render(KERNEL_TEMPLATE, {"spec": spec, "headers": headers, "about": about})
    return render_sealed(f"{spec.name}_kernel.cu", spec.export, spec.summary, body)


def render_binding(pool: HeaderPool, spec: ProgramSpec) -> str:
    """The host half of a program, sealed."""
    body = pool.render(BINDING_TEMPLATE, {"spec": spec, "gemm_grid": FAMILIES[spec.arch_family].gemm_grid})
    return render_sealed(f"{spec.name}_binding.cu", spec.export, f"Host half of {spec.summary}", body)

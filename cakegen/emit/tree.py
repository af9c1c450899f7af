"""Model -> {path: text}: every file of one generated tree, and the headers that it includes. Pure: writes nothing.

<export>/csrc/cake_<export>/<program>_kernel.cu, <program>_binding.cu     a pair a program
<export>/cake_jit.py                                                      the registry: tables
<export>/README.md                                                        key -> file -> meaning
shared/cake_<template>.cuh                                                headers, once for all exports
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from cakegen import paths
from cakegen.emit.environment import render_template, template_environment
from cakegen.emit.index import TreeProgram, render_readme, render_registry
from cakegen.emit.program import ProgramSpec
from cakegen.emit.reach import ReachedKey, reached_keys
from cakegen.emit.seal import included_files, render_sealed
from cakegen.emit.shared import HeaderPool, included_closure, seal_header
from cakegen.errors import EmitError
from cakegen.model import Model
from cakegen.registry import REGISTRY_FILE, SHARED_FOLDER

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
    environment = template_environment(templates or paths.templates_root())
    pool = HeaderPool(environment)
    sources, parts, programs = dict[str, str](), dict[str, str](), list[TreeProgram]()
    for name, served in _keys_by_program(reached_keys(model) if keys is None else keys).items():
        spec = served[0].program
        for part_name, text in render_shared_parts(environment, pool, spec).items():
            if parts.setdefault(part_name, text) != text:
                raise EmitError(f"{name}: would write another {part_name} than an earlier program; name its part apart")
        kernel = sources[f"{name}_kernel.cu"] = render_kernel(environment, pool, spec)
        sources[f"{name}_binding.cu"] = render_binding(environment, pool, spec)
        programs.append(TreeProgram(name, spec, served, tuple(included_files(kernel))))
    headers = _included(sources, {**pool.texts(), **parts})
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
            raise EmitError(
                f"{entry.program.name}: two specifications share one canonical form but differ in their comments, "
                f"summary or template: {served[0].program} and {entry.program}"
            )
        served.append(entry)
    return {name: tuple(found[name]) for name in sorted(found)}


def render_shared_parts(environment: jinja2.Environment, pool: HeaderPool, spec: ProgramSpec) -> dict[str, str]:
    """The parts of a kernel's text that stand in files of their own, by file name, sealed."""
    texts = {}
    for part in spec.shared:
        body = render_template(environment, part.template, _context(pool, spec))
        summary = "Shared by kernels, which include it after their struct Cfg and read their own constants in it."
        once = "" if body.startswith("#pragma once") else "#pragma once\n\n"
        texts[_part_file(part.part)] = seal_header(_part_file(part.part), summary, once + body)
    return texts


def _part_file(part: str) -> str:
    return f"cake_{part}.cuh"


def render_kernel(environment: jinja2.Environment, pool: HeaderPool, spec: ProgramSpec) -> str:
    """The device half of a program, sealed."""
    body = render_template(environment, spec.template, _context(pool, spec))
    return render_sealed(f"{spec.name}_kernel.cu", spec.export, spec.summary, body)


def render_binding(environment: jinja2.Environment, pool: HeaderPool, spec: ProgramSpec) -> str:
    """The host half of a program, sealed."""
    body = render_template(environment, BINDING_TEMPLATE, _context(pool, spec))
    return render_sealed(f"{spec.name}_binding.cu", spec.export, f"Host half of {spec.summary}", body)


def _context(pool: HeaderPool, spec: ProgramSpec) -> dict[str, Any]:
    """What kernel and binding templates may name."""
    return {
        "spec": spec,
        "header": pool.header,
        "device_common": pool.header("device/common.cuh"),
        "device_family": _family_header(pool, spec),
        "shared": {part.name: _part_file(part.part) for part in spec.shared},
    }


def _family_header(pool: HeaderPool, spec: ProgramSpec) -> str:
    """What only one family's kernels use; of Hopper with the one width of wgmma that the program multiplies with."""
    widths = [entry.value for entry in spec.constants if entry.name in ("kNPad", "kBlockN")]
    if spec.arch_family == "sm90" and widths:
        return pool.header("device/wgmma_mma.cuh", n=int(widths[0]))
    return pool.header(f"device/{spec.arch_family}.cuh")

"""Model -> {path: text}: every file of one generated tree. Pure: reads templates, writes nothing.

csrc/cake_<export>/<program>_kernel.cu, <program>_binding.cu     a pair a program
csrc/cake_<export>/cake_<export>_device_common.cuh               shared by every kernel
csrc/cake_<export>/cake_<export>_device_<family>.cuh             shared by one family of architectures
csrc/cake_<export>/cake_<export>_<part>.cuh                      shared by many kernels, behind their Cfg
csrc/cake_<export>/cake_<export>_host_common.cuh                 shared by every binding
cake_jit.py                                                      the registry: literals
README.md                                                        key -> file -> meaning
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from cakegen import paths
from cakegen.emit.environment import render_template, template_environment
from cakegen.emit.index import TreeProgram, render_readme, render_registry
from cakegen.emit.program import ProgramSpec
from cakegen.emit.reach import ReachedKey, reached_keys
from cakegen.emit.seal import included_files, render_sealed
from cakegen.errors import EmitError
from cakegen.model import Model
from cakegen.registry import REGISTRY_FILE

BINDING_TEMPLATE = "host/binding.cu"
README_FILE = "README.md"


def render_tree(
    model: Model, export: str, templates: Path | None = None, keys: Sequence[ReachedKey] | None = None
) -> dict[str, str]:
    """All files of an export, by their path below `generated/<export>/`.

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
    environment = template_environment(templates or paths.templates_root())
    served = _keys_by_program(reached_keys(model) if keys is None else keys)
    texts = render_preambles(environment, export, [keys[0].program for keys in served.values()])
    programs = []
    for name, keys in served.items():
        spec = keys[0].program
        for part_name, text in render_shared_parts(environment, spec).items():
            if texts.setdefault(part_name, text) != text:
                raise EmitError(f"{name}: would write another {part_name} than an earlier program; name its part apart")
        texts[f"{name}_kernel.cu"] = render_kernel(environment, spec)
        texts[f"{name}_binding.cu"] = render_binding(environment, spec)
        programs.append(TreeProgram(name, spec, keys, _closure(f"{name}_kernel.cu", texts)))
    files = {f"csrc/cake_{export}/{file}": text for file, text in texts.items()}
    for file, body, kind in (
        (REGISTRY_FILE, render_registry(model, programs, texts), "Registry"),
        (README_FILE, render_readme(model, programs), "Index"),
    ):
        files[file] = render_sealed(file, export, f"{kind} of {len(programs)} programs.", body)
    return dict(sorted(files.items()))


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


def preamble_name(export: str, part: str) -> str:
    """File name of a shared preamble; `part` is `device_common`, `device_<family>` or `host_common`."""
    return f"cake_{export}_{part}.cuh"


def render_preambles(environment: jinja2.Environment, export: str, specs: Sequence[ProgramSpec]) -> dict[str, str]:
    """The shared preambles of these programs by file name, sealed: device, one a family of architectures, and host."""
    parts = {"device_common": ("device/common.cuh", "Device preamble of every kernel.")}
    for family in sorted({spec.arch_family for spec in specs}):
        parts[f"device_{family}"] = (f"device/{family}.cuh", f"Device preamble of the {family} kernels.")
    parts["host_common"] = ("host/common.cuh", "Host preamble of every binding.")
    context = {"export": export, "wgmma_widths": _wgmma_widths(specs)}
    texts = {}
    for part, (template, summary) in parts.items():
        name = preamble_name(export, part)
        body = render_template(environment, template, context)
        texts[name] = render_sealed(name, export, summary, body)
    return texts


def _wgmma_widths(specs: Sequence[ProgramSpec]) -> list[int]:
    """N of every Hopper MMA: tokens of a decode tile, weight rows of a prefill tile."""
    constants = [entry for spec in specs if spec.arch_family == "sm90" for entry in spec.constants]
    return sorted({int(entry.value) for entry in constants if entry.name in ("kNPad", "kBlockN")})


def render_shared_parts(environment: jinja2.Environment, spec: ProgramSpec) -> dict[str, str]:
    """The parts of a kernel's text that stand in files of their own, by file name, sealed."""
    texts = {}
    for part in spec.shared:
        name = preamble_name(spec.export, part.part)
        body = render_template(environment, part.template, _context(spec))
        summary = "Shared by kernels, which include it after their struct Cfg and read their own constants in it."
        texts[name] = render_sealed(name, spec.export, summary, f"#pragma once\n\n{body}")
    return texts


def render_kernel(environment: jinja2.Environment, spec: ProgramSpec) -> str:
    """The device half of a program, sealed."""
    body = render_template(environment, spec.template, _context(spec))
    return render_sealed(f"{spec.name}_kernel.cu", spec.export, spec.summary, body)


def render_binding(environment: jinja2.Environment, spec: ProgramSpec) -> str:
    """The host half of a program, sealed."""
    body = render_template(environment, BINDING_TEMPLATE, _context(spec))
    return render_sealed(f"{spec.name}_binding.cu", spec.export, f"Host half of {spec.summary}", body)


def _context(spec: ProgramSpec) -> dict[str, Any]:
    """What kernel and binding templates may name."""
    return {
        "spec": spec,
        "device_common": preamble_name(spec.export, "device_common"),
        "device_family": preamble_name(spec.export, f"device_{spec.arch_family}"),
        "host_common": preamble_name(spec.export, "host_common"),
        "shared": {part.name: preamble_name(spec.export, part.part) for part in spec.shared},
    }


def _closure(source: str, texts: dict[str, str]) -> tuple[str, ...]:
    """Preambles that a source includes, directly or not, in the order of inclusion."""
    seen: list[str] = []
    pending = included_files(texts[source])
    while pending:
        name = pending.pop(0)
        if name not in texts:
            raise EmitError(f"{source}: includes {name!r}, which the export does not write; it writes preambles only")
        if name not in seen:
            seen.append(name)
            pending.extend(included_files(texts[name]))
    return tuple(seen)

"""A rendered tree -> what an engine needs that compiles with nvcc and loads through TVM-FFI. Pure: writes nothing.

<program>_kernel.cu, <program>_binding.cu     a pair a program; the binding includes the kernel
cake_*.cuh                                    what they include
manifest.json                                 keys, compile lines, arguments and launches; MODEL, to plan with
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from cakegen.emit.program import COMPILE_FLAGS
from cakegen.emit.seal import included_files, render_sealed_json
from cakegen.emit.tree import RenderedTree
from cakegen.errors import EmitError
from cakegen.registry import REGISTRY_FILE, closure_digest, file_digest, header_closure, parse_tables

MANIFEST_FILE = "manifest.json"
SCHEMA_VERSION = 1
LIBRARY_FLAGS = (*COMPILE_FLAGS, "-shared", "-Xcompiler", "-fPIC")
"""nvcc's options of every binding, beside its key's own and the include folders of TVM-FFI and DLPack."""


def select_ffi_files(tree: RenderedTree, arches: Sequence[str] = (), match: str = "*") -> dict[str, str]:
    """The sources of some keys and their manifest, by file name; all in one folder.

    Parameters
    ----------
    tree
        An export.
    arches
        Targets to compile for (all that there are, by default); a program of none of them is left out.
    match
        Pattern of the keys, with `*` and `?`.

    Raises
    ------
    EmitError
        No key matches, or none of a target.
    """
    export, registry = tree.export, parse_tables(tree.files[REGISTRY_FILE], REGISTRY_FILE)
    programs, keys = registry["MODULES"], _selected_keys(registry, export, arches, match)
    names = sorted({registry["KERNELS"][key] for key in keys})
    known = {**tree.headers, **{path.rpartition("/")[2]: text for path, text in tree.files.items() if "/" in path}}
    pending, sources = [f"{name}_binding.cu" for name in names], dict[str, str]()
    while pending:
        file = pending.pop()
        sources[file] = known[file]
        pending += [name for name in included_files(sources[file]) if name in known and name not in sources]
    values = {
        "schema": SCHEMA_VERSION,
        "export": export,
        "nvcc": list(LIBRARY_FLAGS),
        "model": registry["MODEL"],
        "programs": {name: _program(name, programs[name], registry, tree.headers) for name in names},
        "keys": {
            key: {"program": registry["KERNELS"][key], "nvcc": _key_flags(registry["SPECIALIZATIONS"].get(key, {}), to)}
            for key, to in keys.items()
        },
    }
    summary = f"{len(names)} programs for {len(keys)} logical keys: compile lines, arguments, launches."
    command = f"cakegen export {export} --dest DIR {spell_selection(arches, match)}"
    manifest = render_sealed_json(export, summary, command, values)
    return dict(sorted({**sources, MANIFEST_FILE: manifest}.items()))


def spell_selection(arches: Sequence[str], match: str) -> str:
    """The layout and what it selects, as the command line spells them."""
    options = ["--layout tvm-ffi", *(f"--arch {arch}" for arch in arches)]
    return " ".join(options if match == "*" else [*options, f"--match '{match}'"])


def _selected_keys(
    registry: Mapping[str, Any], export: str, arches: Sequence[str], match: str
) -> dict[str, tuple[str, ...]]:
    """Keys that match, each with the targets to compile it for."""
    found, served = {}, set[str]()
    for key, name in registry["KERNELS"].items():
        targets = registry["MODULES"][name]["arches"]
        chosen = tuple(arch for arch in targets if not arches or arch in arches)
        if chosen and fnmatchcase(key, match):
            found[key] = chosen
            served.update(chosen)
    missing = sorted(set(arches) - served)
    if missing or not found:
        present = sorted({arch for program in registry["MODULES"].values() for arch in program["arches"]})
        raise EmitError(
            f"{export}: no key matches {match!r} for {', '.join(missing) or 'any target'}; the export has "
            f"{len(registry['KERNELS'])} keys for {', '.join(present)}. `cakegen list` prints them"
        )
    return found


def _program(
    name: str, entry: Mapping[str, Any], registry: Mapping[str, Any], headers: Mapping[str, str]
) -> dict[str, Any]:
    included = header_closure(entry["includes"], lambda header: included_files(headers[header]))
    kernel = f"{name}_kernel.cu"
    closure = [(kernel, registry["FILES"][kernel]), *((header, file_digest(headers[header])) for header in included)]
    flags = registry["FLAGS"][entry["flags"]]
    return {
        "kernel": kernel,
        "binding": f"{name}_binding.cu",
        "role": entry["role"],
        "ffi_entry": entry["ffi_entry"],
        "arg_plan": registry["ARG_PLANS"][entry["arg_plan"]],
        "tensor_maps": registry["TENSOR_MAPS"][entry["tensor_maps"]],
        "launch": registry["LAUNCHES"][entry["launch"]],
        "closure_digest": {arch: closure_digest(arch, closure, flags) for arch in entry["arches"]},
    }


def _key_flags(constants: Mapping[str, int], arches: Sequence[str]) -> list[str]:
    """The targets and the compile line's constants of one key."""
    numbers = [arch.removeprefix("sm_") for arch in arches]
    targets = [flag for number in numbers for flag in ("-gencode", f"arch=compute_{number},code=sm_{number}")]
    return targets + [f"-D{name}={value}" for name, value in constants.items()]

"""Writes registries by hand, for tests: from whole records, in the tables that `cakegen.registry` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cakegen.emit.shared import render_shared_table
from cakegen.registry import JSON_NAMES, SCHEMA_VERSION, SHARED_FILE, SHARED_FOLDER, file_digest

# field of a record -> table that holds it
TABLES = {
    "flags": "FLAGS",
    "arg_plan": "ARG_PLANS",
    "tensor_maps": "TENSOR_MAPS",
    "barriers": "BARRIERS",
    "launch": "LAUNCHES",
}
NO_DIGEST = "0" * 64


def small_record(**fields: Any) -> dict[str, Any]:
    """A whole record: one kernel of two arguments that includes nothing."""
    launch = {
        "block": [128, 1, 1],
        "cluster": [1, 1, 1],
        "cooperative": False,
        "programmatic": False,
        "overlap": False,
        "dynamic_smem_bytes": 0,
    }
    return {
        "role": "tail_norm",
        "includes": [],
        "arches": ["sm_90a"],
        "ffi_entry": "run",
        "flags": ["-std=c++17"],
        "arg_plan": [["buffer", "out"], ["parameter", "count"]],
        "tensor_maps": [],
        "barriers": [],
        "launch": launch,
        **fields,
    }


def registry_values(
    export: str,
    model: Any,
    records: Mapping[str, Mapping[str, Any]],
    kernels: Mapping[str, str],
    specializations: Mapping[str, Mapping[str, int]],
    sources: Mapping[str, str] | None = None,
    schema: str | int = SCHEMA_VERSION,
) -> dict[str, Any]:
    """What the module assigns; a source that is not given has a digest that no text has."""
    tables: dict[str, dict[str, Any]] = {name: {} for name in TABLES.values()}
    modules = {}
    for name, record in records.items():
        modules[name] = dict(record)
        for field, table in TABLES.items():
            value = record[field]
            row = next((row for row, known in tables[table].items() if known == value), f"{field}_{len(tables[table])}")
            tables[table][row] = value
            modules[name][field] = row
    files = {f"{name}_{half}.cu": NO_DIGEST for name in records for half in ("kernel", "binding")}
    files |= {name: file_digest(text) for name, text in (sources or {}).items()}
    return {
        "SCHEMA_VERSION": schema,
        "EXPORT": export,
        "MODEL": model,
        **tables,
        "FILES": files,
        "MODULES": modules,
        "KERNELS": dict(kernels),
        "SPECIALIZATIONS": {key: dict(constants) for key, constants in specializations.items()},
    }


def registry_text(values: Mapping[str, Any]) -> str:
    """A registry module."""
    return (
        "\n".join([JSON_NAMES, *(f"{name} = {json.dumps(value, indent=1)}" for name, value in values.items())]) + "\n"
    )


def write_headers(folder: Path, headers: Mapping[str, str]) -> None:
    """The shared folder beside the trees of a folder."""
    shared = folder / SHARED_FOLDER
    shared.mkdir(parents=True, exist_ok=True)
    for name, text in {**headers, SHARED_FILE: render_shared_table(headers)}.items():
        (shared / name).write_text(text)


def write_sources(root: Path, export: str, sources: Mapping[str, str]) -> None:
    """The sources of a tree."""
    csrc = root / "csrc" / f"cake_{export}"
    csrc.mkdir(parents=True, exist_ok=True)
    for name, text in sources.items():
        (csrc / name).write_text(text)

"""What `cakegen show --json` says of a program. Imports cakegen inside functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cakegen.plan import Plan
    from cakegen.registry import Program, Registry


def program_literal(
    registry: Registry, program: Program, keys: Sequence[str], first: Plan | None, requests: Sequence[str]
) -> dict[str, Any]:
    """A program as a JSON object: its record, the keys that it is shown for, and what reaches them.

    Parameters
    ----------
    first
        The first plan that launches one of the keys, whose rules are told; None where no plan does.
    requests
        In words what is asked for where one of the keys is launched.
    """
    from cakegen.cli.list import sentence_of

    rules = first.rules if first else ()
    return {
        "export": registry.export,
        "program": program.name,
        "role": program.role,
        "sentence": sentence_of(registry, program.name),
        "arches": list(program.arches),
        "keys": {key: registry.constants(key) for key in keys},
        "requests": list(requests),
        "rules": [{"field": rule.field, "value": rule.value, "reason": rule.reason} for rule in rules],
        "files": [str(registry.path(name)) for name in (*program.sources, *program.headers)],
        "kernel_symbol": program.kernel_symbol,
        "launch": dataclasses.asdict(program.launch),
        "flags": list(program.flags),
        "arguments": [{"kind": kind, "name": name} for kind, name in program.arg_plan],
        "tensor_maps": [dataclasses.asdict(entry) for entry in program.tensor_maps],
        "barriers": [{"name": name, "count": count} for name, count in program.barriers],
        "closure_digest": dict(program.closure_digest),
    }

"""Rules of a family: its file below `exports/rules`, what an export overrides, and the file's text with its comments.

Imports errors, paths, model, the rules and their sections.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cakegen import paths
from cakegen.errors import SpecError
from cakegen.model import from_literal
from cakegen.rules import field_meaning, nested_table, rule_fields
from cakegen.spec.faults import explain, frozen
from cakegen.spec.sections import section_of
from cakegen.toml_file import read_toml

_COLUMNS = 120


def rules_file(name: str) -> Path:
    """Where the rules of a family are that all exports share."""
    return paths.exports_root() / "rules" / f"{name}.toml"


def parse_rules(record: type, name: str, overrides: Mapping[str, Any]) -> Any:
    """A family's rules: those of its file, where an export says nothing else.

    Parameters
    ----------
    record
        Their dataclass.
    name
        Of the file, and of the export's table.
    overrides
        That table. A table in it is laid over the file's; `false` leaves out what the file has; anything else replaces.

    Raises
    ------
    SpecError
        The file can't be read; a key is unknown, missing or out of bounds.
    """
    file = rules_file(name)
    shared = read_toml(file, f"the rules of {name} are the file exports/rules/{name}.toml")
    try:
        section = section_of(record).model_validate(frozen(overlay(shared, overrides)))
    except ValidationError as error:
        lines = (f"{name}.{_fault(record, entry, file, overrides)}" for entry in error.errors())
        raise SpecError("\n".join(lines)) from None
    return from_literal(record, section.model_dump(exclude_none=True))


def overlay(shared: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """One table laid over another: tables in tables likewise, `false` takes a key away, all else replaces."""
    merged = dict(shared)
    for key, value in overrides.items():
        if value is False:
            merged.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = overlay(merged[key], value)
        else:
            merged[key] = value
    return merged


def _fault(record: type, entry: Any, file: Path, overrides: Mapping[str, Any]) -> str:
    location = [part for part in entry["loc"] if isinstance(part, int) or not part.startswith("tuple[")]
    declared: Any = overrides
    for part in location:
        if isinstance(declared, Mapping) and part in declared:
            declared = declared[part]
        elif not isinstance(declared, (list, tuple)):
            return f"{explain(entry, _why(record, location))} (of {file.parent.name}/{file.name})"
    return explain(entry, _why(record, location))


def _why(record: type, location: Sequence[Any]) -> str:
    """What a field's bounds come from."""
    *tables, name = (part for part in location if isinstance(part, str))
    for part in tables:
        field = next((field for field in rule_fields(record) if field.name == part), None)
        table = None if field is None else nested_table(field.kind)
        if table is None:
            return ""
        record = table
    known = {field.name for field in rule_fields(record)}
    return field_meaning(record, name).why if name in known else ""


def render_rules(name: str, rules: Any) -> str:
    """The text of a family's file: every rule with its value, and above it what it means, its unit and its bounds."""
    head = (
        f"# Rules of {name}, for every export. One that needs another value has it in its own table [{name}]; `false`"
        " there leaves a rule out, and a rule that is left out never holds. The comments are those of cakegen/rules;"
        " what values were chosen by stands in measured.tsv."
    )
    return "\n".join([*_wrapped(head), "", *_table(rules, "")]) + "\n"


def _table(rules: Any, where: str) -> Iterator[str]:
    nested = []
    for field in rule_fields(type(rules)):
        value = getattr(rules, field.name)
        if field.table is not None and not isinstance(value, tuple):
            nested.append((field, value))
            continue
        yield from _wrapped(f"# {field.meaning.comment}")
        if value is None:
            yield f"# {field.name} is left out"
        elif field.table is None:
            yield f"{field.name} = {list(value) if isinstance(value, tuple) else value}"
        else:
            yield from (
                line
                for each in rule_fields(field.table)
                for line in _wrapped(f"#   {each.name}: {each.meaning.comment}")
            )
            yield f"{field.name} = ["
            yield from (f"    {{ {', '.join(f'{k} = {v}' for k, v in vars(entry).items())} }}," for entry in value)
            yield "]"
    for field, value in nested:
        path = f"{where}.{field.name}" if where else field.name
        yield ""
        yield from _wrapped(f"# {field.meaning.comment}")
        if value is None:
            yield f"# [{path}] is left out"
        else:
            yield f"[{path}]"
            yield from _table(value, path)


def _wrapped(comment: str) -> list[str]:
    return textwrap.wrap(comment, _COLUMNS, subsequent_indent="# ", break_on_hyphens=False)

"""Reads an export file: TOML -> `ExportSpec` -> `Model`. Imports model records, the sections and their legality."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cakegen.arch import ARCHITECTURES
from cakegen.errors import SpecError
from cakegen.model import Family, Model, ModelDims, Target
from cakegen.rules import DecodeRules, HopperPrefillRules, HopperTile, PrefillRules
from cakegen.spec.legality import check_model
from cakegen.spec.sections import (
    DecodeSection,
    DecodeSm90Section,
    HopperTileSection,
    KernelSection,
    ModelSection,
    Name,
    PrefillSection,
    PrefillSm90Section,
    RequestsSection,
    Section,
    TargetSection,
)


class ExportSpec(Section):
    """A whole export file. Its name is the model's, and prefixes every generated file."""

    name: Name
    model: ModelSection
    requests: RequestsSection
    targets: tuple[TargetSection, ...]
    kernels: tuple[KernelSection, ...]
    decode: DecodeSection
    decode_sm90: DecodeSm90Section
    prefill: PrefillSection
    prefill_sm90: PrefillSm90Section

    def to_model(self) -> Model:
        """The records that planner, emitter and runtime share.

        Raises
        ------
        SpecError
            An architecture is not in the table. (`parse_export` has refused all else that can't be planned.)
        """
        return Model(
            name=self.name,
            dims=ModelDims(**self.model.model_dump()),
            max_tokens=self.requests.max_tokens,
            max_partials=self.requests.max_partials,
            targets=tuple(_target(section) for section in self.targets),
            families=tuple(Family(**section.model_dump()) for section in self.kernels),
            decode=DecodeRules(**self.decode.model_dump()),
            decode_sm90=DecodeRules(**(self.decode.model_dump() | self.decode_sm90.model_dump())),
            prefill=PrefillRules(**self.prefill.model_dump()),
            prefill_sm90=_hopper_rules(self.prefill_sm90),
        )


def parse_export(path: Path) -> ExportSpec:
    """Read and check one export file.

    Parameters
    ----------
    path
        The TOML file.

    Raises
    ------
    SpecError
        The file is missing or not TOML; a key is unknown, missing or out of bounds; or the declared model can't be
        planned or addressed on one of its targets.
    """
    where = f"{path.parent.name}/{path.name}"
    try:
        table = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}; an export is a file exports/<name>/export.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{where}: not a TOML file: {error}") from None
    try:
        spec = ExportSpec.model_validate(_frozen(table))
    except ValidationError as error:
        raise SpecError("\n".join(f"{where}: {_explain(entry)}" for entry in error.errors())) from None
    try:
        check_model(spec.to_model())
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    return spec


def _target(section: TargetSection) -> Target:
    arch = ARCHITECTURES.get(section.arch)
    if arch is None:
        known = ", ".join(ARCHITECTURES)
        raise SpecError(f"targets: architecture {section.arch!r} is not supported; use one of {known}")
    known_parts = tuple(sorted({part.sm_count for part in arch.parts}))
    return Target(section.arch, section.tp_degrees, section.sm_counts or known_parts)


def _hopper_rules(section: PrefillSm90Section) -> HopperPrefillRules:
    tiles = tuple(HopperTile(**tile.model_dump()) for tile in section.tiles)
    return HopperPrefillRules(**(section.model_dump() | {"tiles": tiles}))


def _frozen(value: Any) -> Any:
    """TOML arrays as tuples, which a strict model takes for tuples."""
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _explain(entry: Any) -> str:
    """One fault: the field, what was received, what is needed and why, what to do."""
    location = [part for part in entry["loc"] if isinstance(part, int) or not part.startswith("tuple[")]
    field = ".".join(str(part) for part in location)
    if entry["type"] == "extra_forbidden":
        return f"{field}: unknown key; remove it, or correct its spelling"
    if entry["type"] == "missing":
        return f"{field}: missing; every key of the file is required, so that nothing hides in a default"
    reason = _reason(location)
    return f"{field} = {_shown(entry['input'])}: {entry['msg']}{f' ({reason})' if reason else ''}"


def _shown(value: Any) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _reason(location: list[Any]) -> str | None:
    """The description of a field, where its section gives one."""
    sections: dict[tuple[str, ...], type[Section]] = {
        ("decode",): DecodeSection,
        ("decode_sm90",): DecodeSm90Section,
        ("prefill",): PrefillSection,
        ("prefill_sm90",): PrefillSm90Section,
        ("prefill_sm90", "tiles"): HopperTileSection,
    }
    *tables, name = (part for part in location if isinstance(part, str))
    section = sections.get(tuple(tables))
    field = section.model_fields.get(name) if section else None
    return field.description if field else None

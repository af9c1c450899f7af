"""Reads an export file: TOML -> `ExportSpec` -> `Model`. Imports model records, the sections and their legality."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from cakegen.arch import ARCHITECTURES, architecture
from cakegen.errors import SpecError
from cakegen.model import Model, ModelDims, Target
from cakegen.plan import FAMILIES
from cakegen.spec.faults import explain, frozen, read_toml
from cakegen.spec.legality import check_model
from cakegen.spec.rules_file import parse_rules
from cakegen.spec.sections import ModelSection, Name, RequestsSection, Section, TargetSection


class ExportSpec(Section):
    """A whole export file. Its name is the model's, and prefixes every generated file.

    `hopper` and `blackwell` hold what it lays over the rules that all exports share: a table, or the name of a file
    beside the export that holds it.
    """

    name: Name
    model: ModelSection
    requests: RequestsSection
    targets: tuple[TargetSection, ...]
    hopper: dict[str, Any] = Field(default_factory=dict)
    blackwell: dict[str, Any] = Field(default_factory=dict)

    def to_model(self) -> Model:
        """The records that planner, emitter and runtime share.

        Raises
        ------
        SpecError
            An architecture is not in the table, or a rule is out of bounds. (`parse_export` has refused all else that
            can't be planned.)
        """
        targets = tuple(_target(section) for section in self.targets)
        served = {architecture(target.arch).family for target in targets}
        rules: dict[str, Any] = {}
        for family in FAMILIES.values():
            overrides = getattr(self, family.rules_name)
            if family.name in served:
                rules[family.rules_name] = parse_rules(family.rules_record, family.rules_name, overrides)
            elif overrides:
                raise SpecError(
                    f"{family.rules_name}: no [[targets]] section has an architecture of that family; add one or drop"
                    " the table"
                )
        return Model(
            name=self.name,
            dims=ModelDims(**self.model.model_dump()),
            max_tokens=self.requests.max_tokens,
            max_partials=self.requests.max_partials,
            targets=targets,
            hopper=rules.get("hopper"),
            blackwell=rules.get("blackwell"),
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
    table = read_toml(path, "an export is a file exports/<name>/export.toml")
    for family in FAMILIES.values():
        beside = table.get(family.rules_name)
        if isinstance(beside, str):
            if not re.fullmatch(r"[A-Za-z0-9_-]+\.toml", beside):
                raise SpecError(
                    f"{where}: {family.rules_name} = {beside!r}: must be the name of a file beside the export, such as"
                    f" {family.rules_name}.toml, or a table"
                )
            why = f"{where}: {family.rules_name} names it: a file of that family's rules beside the export"
            table[family.rules_name] = read_toml(path.parent / beside, why)
    try:
        spec = ExportSpec.model_validate(frozen(table))
    except ValidationError as error:
        raise SpecError("\n".join(f"{where}: {explain(entry)}" for entry in error.errors())) from None
    try:
        check_model(spec.to_model())
    except SpecError as error:
        raise SpecError("\n".join(f"{where}: {line}" for line in str(error).splitlines())) from None
    return spec


def _target(section: TargetSection) -> Target:
    arch = ARCHITECTURES.get(section.arch)
    if arch is None:
        known = ", ".join(ARCHITECTURES)
        raise SpecError(f"targets: architecture {section.arch!r} is not supported; use one of {known}")
    known_parts = tuple(sorted({part.sm_count for part in arch.parts}))
    return Target(section.arch, section.tp_degrees, section.sm_counts or known_parts)

"""Reads an export file: TOML -> `ExportSpec` -> `Model`. Imports model records, the sections and their legality."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, create_model

from cakegen.arch import ARCHITECTURES, architecture
from cakegen.block import Block, parse_call
from cakegen.errors import SpecError
from cakegen.model import Model, ModelDims, NamedFunction, Target
from cakegen.plan import FAMILIES
from cakegen.spec.block import block_file, parse_block, read_block
from cakegen.spec.faults import explain, frozen
from cakegen.spec.honoured import missing_parts
from cakegen.spec.legality import check_model
from cakegen.spec.rules_file import parse_rules
from cakegen.spec.sections import Name, RequestsSection, Section, TargetSection, model_section
from cakegen.toml_file import read_toml


class ExportSpec(Section):
    """A whole export file. Its name is the model's, and prefixes every generated file.

    `block` is what the model computes: the name of a file of `exports/blocks`, or of one beside the export, or its
    stages. `model` holds the numbers of the block's symbols; its fields follow from the block (`model_section`).
    `hopper` and `blackwell` hold what it lays over the rules that all exports share: a table, or the name of a file
    beside the export that holds it.
    """

    name: Name
    block: Block
    model: Section
    requests: RequestsSection
    targets: tuple[TargetSection, ...]
    hopper: dict[str, Any] = Field(default_factory=dict)
    blackwell: dict[str, Any] = Field(default_factory=dict)

    def to_model(self) -> Model:
        """The records that planner, emitter and runtime share.

        Raises
        ------
        SpecError
            Programs do not have a part of the block; an architecture is not in the table; or a rule is out of bounds.
            (`parse_export` has refused all else that can't be planned.)
        """
        missing = missing_parts(self.block)
        if missing:
            raise SpecError("\n".join(f"block: no program yet for {part}" for part in missing))
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
            dims=self._dims(),
            max_tokens=self.requests.max_tokens,
            max_partials=self.requests.max_partials,
            targets=targets,
            hopper=rules.get("hopper"),
            blackwell=rules.get("blackwell"),
        )

    def _dims(self) -> ModelDims:
        """With the values of the functions that the block calls, in the place of their symbols."""
        numbers = self.model.model_dump()
        (activation,) = (product.activation for product in self.block.products if product.activation)
        (norm,) = (segment.prepared.norm for segment in self.block.segments if segment.prepared is not None)
        widths = {width: numbers[width] for width in self.block.widths}
        (norm_eps,) = _values(norm, numbers).numbers if norm else (None,)
        return ModelDims(**widths, norm_eps=norm_eps, activation=_values(activation, numbers), block=self.block)


def _values(text: str, numbers: dict[str, Any]) -> NamedFunction:
    call = parse_call(text)
    assert call is not None  # the block was read
    values = (numbers[each] if isinstance(each, str) else each for each in call.arguments)
    return NamedFunction(call.function, tuple(values))


def parse_export(path: Path) -> ExportSpec:
    """Read and check one export file, whose programs can be planned.

    Parameters
    ----------
    path
        The TOML file.

    Raises
    ------
    SpecError
        As `read_export`; or programs do not have a part of the block, or the declared model can't be planned or
        addressed on one of its targets.
    """
    spec = read_export(path)
    try:
        check_model(spec.to_model())
    except SpecError as error:
        raise _at(path, error) from None
    return spec


def read_export(path: Path) -> ExportSpec:
    """Read one export file, whether or not programs have its block.

    Raises
    ------
    SpecError
        The file is missing or not TOML; or a key is unknown, missing or out of bounds.
    """
    where = f"{path.parent.name}/{path.name}"
    table = read_toml(path, "an export is a file exports/<name>/export.toml")
    for family in FAMILIES.values():
        beside = table.get(family.rules_name)
        if isinstance(beside, str):
            why = f"{where}: {family.rules_name} names it: a file of that family's rules beside the export"
            table[family.rules_name] = read_toml(_beside(path, family.rules_name, beside), why)
    section: type[ExportSpec] = ExportSpec
    if "block" in table:
        try:
            table["block"] = _block(path, table["block"])
        except SpecError as error:
            raise _at(path, error) from None
        section = _section_of(table["block"])
    try:
        return section.model_validate({key: frozen(value) for key, value in table.items()})
    except ValidationError as error:
        raise SpecError("\n".join(f"{where}: {explain(entry)}" for entry in error.errors())) from None


def _at(path: Path, error: SpecError) -> SpecError:
    where = f"{path.parent.name}/{path.name}"
    return SpecError("\n".join(f"{where}: {line}" for line in str(error).splitlines()))


def _beside(path: Path, field: str, name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9_-]+\.toml", name):
        raise SpecError(
            f"{path.parent.name}/{path.name}: {field} = {name!r}: must be the name of a file beside the export, such as"
            f" {field}.toml, or a table"
        )
    return path.parent / name


def _block(path: Path, value: Any) -> Block:
    """A file's block: by the name of one that exports share, by the name of a file beside it, or as its stages."""
    if not isinstance(value, str):
        return parse_block(value)
    return read_block(path.parent / value if re.fullmatch(r"[A-Za-z0-9_-]+\.toml", value) else block_file(value))


@functools.cache
def _section_of(block: Block) -> type[ExportSpec]:
    return create_model("ExportSpec", __base__=ExportSpec, model=(model_section(block), ...))


def _target(section: TargetSection) -> Target:
    arch = ARCHITECTURES.get(section.arch)
    if arch is None:
        known = ", ".join(ARCHITECTURES)
        raise SpecError(f"targets: architecture {section.arch!r} is not supported; use one of {known}")
    known_parts = tuple(sorted({part.sm_count for part in arch.parts}))
    return Target(section.arch, section.tp_degrees, section.sm_counts or known_parts)

"""Which family an architecture is of: the one place where a name becomes an object. Imports arch and both families."""

from __future__ import annotations

from cakegen.arch import architecture
from cakegen.plan.blackwell import Blackwell
from cakegen.plan.family import Family
from cakegen.plan.hopper import Hopper

FAMILIES: dict[str, Family] = {family.name: family for family in (Hopper(), Blackwell())}
"""By `Architecture.family`."""


def family_of(arch: str) -> Family:
    """The family of an architecture.

    Raises
    ------
    PlanError
        The architecture is not supported.
    """
    return FAMILIES[architecture(arch).family]

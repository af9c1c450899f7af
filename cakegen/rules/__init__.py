"""Leaf package: what the planners decide by, as an export or the files of its families declare it.

Frozen dataclasses of numbers. Every field says once, in a `Meaning`, what it is for, its unit and its bounds: the
strict sections of an export file, the comments of the rules' files and `cakegen new` take them from there. A table that
is None is a rule that never holds.
"""

from cakegen.rules.blackwell import (
    BlackwellPrefillRules,
    BlackwellRules,
    EarlyFusedNorm,
    FrontHalves,
    NarrowGemm,
    ShortGemmRing,
    StreamK,
)
from cakegen.rules.decode import (
    DecodeRules,
    FrontRules,
    FrontSplit,
    LandingAlias,
    NarrowTiles,
    ShortRing,
    SmallTile,
    StagedRows,
    StaggeredFill,
    TailRules,
    TailSplit,
)
from cakegen.rules.hopper import AllRowsFirst, CutRules, HopperPrefillRules, HopperRules, HopperTile, NormCosts
from cakegen.rules.meaning import Meaning, field_meaning, nested_table, rule_fields

__all__ = [
    "AllRowsFirst",
    "BlackwellPrefillRules",
    "BlackwellRules",
    "CutRules",
    "DecodeRules",
    "EarlyFusedNorm",
    "FrontHalves",
    "FrontRules",
    "FrontSplit",
    "HopperPrefillRules",
    "HopperRules",
    "HopperTile",
    "LandingAlias",
    "Meaning",
    "NarrowGemm",
    "NarrowTiles",
    "NormCosts",
    "ShortGemmRing",
    "ShortRing",
    "SmallTile",
    "StagedRows",
    "StaggeredFill",
    "StreamK",
    "TailRules",
    "TailSplit",
    "field_meaning",
    "nested_table",
    "rule_fields",
]

"""Pure planning: a model, a request and device facts give a `Plan`. No torch, no pydantic, no I/O."""

from cakegen.plan.families import FAMILIES, family_of
from cakegen.plan.family import Family
from cakegen.plan.form import form_of
from cakegen.plan.records import (
    DecodeForm,
    Form,
    GemmForm,
    Launch,
    LaunchShape,
    NormForm,
    NormPlace,
    Plan,
    Rule,
    Sharing,
)
from cakegen.plan.resident import plan_resident
from cakegen.plan.route import plan_route
from cakegen.plan.smem import DecodeSmem, UnitShare, decode_smem, unit_shares
from cakegen.plan.workspace import control_words, partials_elems

__all__ = [
    "FAMILIES",
    "DecodeForm",
    "DecodeSmem",
    "Family",
    "Form",
    "GemmForm",
    "Launch",
    "LaunchShape",
    "NormForm",
    "NormPlace",
    "Plan",
    "Rule",
    "Sharing",
    "UnitShare",
    "control_words",
    "decode_smem",
    "family_of",
    "form_of",
    "partials_elems",
    "plan_resident",
    "plan_route",
    "unit_shares",
]

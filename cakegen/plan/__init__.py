"""Pure planning: a model, a request and device facts give a `Plan`. No torch, no pydantic, no I/O."""

from cakegen.plan.form import form_of
from cakegen.plan.records import DecodeForm, GemmForm, Launch, NormForm, Plan, Rule
from cakegen.plan.route import plan_route
from cakegen.plan.smem import DecodeSmem, UnitShare, decode_smem, unit_shares

__all__ = [
    "DecodeForm",
    "DecodeSmem",
    "GemmForm",
    "Launch",
    "NormForm",
    "Plan",
    "Rule",
    "UnitShare",
    "decode_smem",
    "form_of",
    "plan_route",
    "unit_shares",
]

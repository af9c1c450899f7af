"""Pure planning: a model, a request and device facts give a `Plan`. No torch, no pydantic, no I/O."""

from cakegen.plan.decode import weights_ahead
from cakegen.plan.form import form_of
from cakegen.plan.records import DecodeForm, GemmForm, Launch, NormForm, Plan, Rule
from cakegen.plan.route import plan_route
from cakegen.plan.smem import DecodeSmem, UnitShare, decode_smem, unit_shares
from cakegen.plan.workspace import control_words, partials_elems

__all__ = [
    "DecodeForm",
    "DecodeSmem",
    "GemmForm",
    "Launch",
    "NormForm",
    "Plan",
    "Rule",
    "UnitShare",
    "control_words",
    "decode_smem",
    "form_of",
    "partials_elems",
    "plan_route",
    "unit_shares",
    "weights_ahead",
]

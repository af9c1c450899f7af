"""The activation of a front's programs: the functor that their bodies call, and its constants. Pure."""

from __future__ import annotations

from cakegen.emit.program import Constant, Header
from cakegen.functions import ACTIVATIONS
from cakegen.model import Model


def front_activation(model: Model, stage: str) -> str:
    """The functor that a program's `Cfg` names; empty for a stage that calls none."""
    return ACTIVATIONS[model.dims.activation.name].functor if stage == "front" else ""


def activation_headers(stage: str) -> tuple[Header, ...]:
    """Where the functors are."""
    return (Header("kernels/activation.cuh"),) if stage == "front" else ()


def activation_constants(model: Model) -> tuple[Constant, ...]:
    """What the functor reads of `Cfg`: `kSituBeta` for the parameter `beta` of `Situ`."""
    activation = ACTIVATIONS[model.dims.activation.name]
    return tuple(
        Constant(f"k{activation.functor}{''.join(map(str.capitalize, each.name.split('_')))}", number, each.meaning)
        for each, number in zip(activation.parameters, model.dims.activation.numbers, strict=True)
    )

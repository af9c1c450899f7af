"""`backend="emulator"`: for which device to plan, and the way to the emulator. Imports errors, model, plan, programs.

The emulator imports this package, so this package can't import it: it is found by its name, here and nowhere else, and
only when it is asked for. What it must offer is `Emulator`.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from cakegen.arch import architecture
from cakegen.errors import LaunchError, PlanError
from cakegen.model import DeviceFacts, Model
from cakegen.plan import plan_route
from cakegen.plan.records import Plan
from cakegen.registry import Registry
from cakegen.runtime.prepared import Runner
from cakegen.runtime.programs import check_registered
from cakegen.runtime.validate import Request

DEFAULT_ARCH = "sm_90a"
_DOOR = "cakegen.emulator"


class Emulator(Protocol):
    """What is behind the door."""

    def EmulatedRunner(
        self, registry: Registry, request: Request, plan: Plan, compile_flags: tuple[str, ...]
    ) -> Runner:
        """A runner that emulates a validated call by its plan."""


def emulated_facts(model: Model, arch: str | DeviceFacts | None) -> DeviceFacts:
    """The device to plan for: an architecture with the most SMs that the export plans for, or facts as they are.

    Raises
    ------
    LaunchError
        The architecture is unknown, or the export has no target of it.
    """
    if isinstance(arch, DeviceFacts):
        return arch
    name = DEFAULT_ARCH if arch is None else arch
    try:
        architecture(name)
    except PlanError as error:
        raise LaunchError(f"backend='emulator': {error}") from None
    target = model.target(name)
    if target is None:
        known = ", ".join(each.arch for each in model.targets)
        raise LaunchError(f"backend='emulator': {model.name} has no target {name}; it has {known}")
    return DeviceFacts.nominal(name, max(target.sm_counts))


def prepare_emulated(
    registry: Registry, request: Request, facts: DeviceFacts, compile_flags: tuple[str, ...]
) -> Runner:
    """A runner that emulates a call on its CPU tensors.

    Raises
    ------
    CakeError
        The tensors are elsewhere; no plan or program serves the request; a program does not compile, or uses
        something that the emulator does not model.
    """
    if request.device.type != "cpu":
        raise LaunchError(
            f"{request.stage}: backend='emulator' runs on the CPU and needs CPU tensors; got tensors on "
            f"{request.device}. backend='auto' launches on a GPU."
        )
    plan = plan_route(
        registry.model,
        stage=request.stage,
        tp=request.tp,
        tokens=request.tokens,
        partials=request.partials,
        device=facts,
    )
    check_registered(registry, plan, f"an emulated {facts.arch}")
    return _open_door().EmulatedRunner(registry, request, plan, compile_flags)


def _open_door() -> Emulator:
    return cast(Emulator, importlib.import_module(_DOOR))

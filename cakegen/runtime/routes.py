"""Plans with their loaded programs, the last ones of them remembered. Imports plan, registry, device, programs."""

from __future__ import annotations

import collections
import logging
import weakref
from dataclasses import dataclass

from cakegen.model import DeviceFacts
from cakegen.plan import plan_resident, plan_route
from cakegen.plan.records import Plan
from cakegen.registry import Registry
from cakegen.runtime.device import Device
from cakegen.runtime.guard import GuardedLock
from cakegen.runtime.programs import (
    LoadedProgram,
    ProgramTable,
    check_registered,
    check_residency,
    measure_resident_pairs,
)

_log = logging.getLogger(__name__)

MOST_ROUTES = 4096
"""Front and tail of every decode size, and a prefill's sizes: a route is planned and checked again when it is gone."""


@dataclass(frozen=True)
class Route:
    """A plan and its programs, loaded on one device."""

    plan: Plan
    programs: tuple[LoadedProgram, ...]


class RouteTable:
    """The routes of one export.

    Parameters
    ----------
    programs
        Where programs are loaded.
    device_facts
        What to plan for, instead of what the driver says.
    most
        Routes to keep; the one that was not used for longest is dropped.
    """

    def __init__(
        self, registry: Registry, programs: ProgramTable, device_facts: DeviceFacts | None, most: int = MOST_ROUTES
    ) -> None:
        self._registry = registry
        self._programs = programs
        self._device_facts = device_facts
        self._most = most
        self._lock = GuardedLock("looking up a plan")
        self._kept: collections.OrderedDict[tuple[int, DeviceFacts, str, int, int, int], Route] = (
            collections.OrderedDict()
        )
        _tables.add(self)

    def __len__(self) -> int:
        return len(self._kept)

    def plan(self, device: Device, stage: str, tp: int, tokens: int, partials: int) -> Plan:
        """The plan of a request on a device; loads nothing."""
        facts = self._device_facts or device.facts
        return plan_route(self._registry.model, stage=stage, tp=tp, tokens=tokens, partials=partials, device=facts)

    def load(self, device: Device, stage: str, tp: int, tokens: int, partials: int) -> Route:
        """The route of a request on a device, loaded at first use.

        Raises
        ------
        CakeError
            No plan or program serves it, or a program does not compile or load.
        """
        key = (device.ordinal, self._device_facts or device.facts, stage, tp, tokens, partials)
        with self._lock:
            route = self._kept.get(key)
            if route is not None:
                self._kept.move_to_end(key)
                return route
        route = self._load(device, stage, tp, tokens, partials)
        with self._lock:
            # under the facts it was planned with, which may be lower than those it was asked with
            self._kept[(key[0], route.plan.device, *key[2:])] = route
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return route

    def clear(self) -> None:
        """Forget all routes: their programs are unloaded."""
        with self._lock:
            self._kept.clear()

    def _load(self, device: Device, stage: str, tp: int, tokens: int, partials: int) -> Route:
        """Plan and load, for as many resident pairs as the loaded programs really have.

        The figure becomes the device's, so that later plans begin with it.
        """

        def plan_of(facts: DeviceFacts) -> Plan:
            return plan_route(self._registry.model, stage=stage, tp=tp, tokens=tokens, partials=partials, device=facts)

        def load(plan: Plan) -> tuple[LoadedProgram, ...]:
            check_registered(self._registry, plan, f"cuda:{device.ordinal}")
            return tuple(self._programs.load(device, launch.key) for launch in plan.launches)

        def measure(plan: Plan) -> int | None:
            programs = load(plan)
            return None if self._device_facts is not None else measure_resident_pairs(device, plan, programs)

        plan = plan_resident(self._device_facts or device.facts, plan_of, measure)
        if self._device_facts is None:
            device.lower_resident_pairs(plan.device.resident_pairs)
        programs = load(plan)
        for launch, loaded in zip(plan.launches, programs, strict=True):
            if loaded.program.launch.cooperative:
                check_residency(device, loaded, launch)
        keys = ", ".join(launch.key for launch in plan.launches)
        _log.debug("cuda:%d: %s TP %d, T %d, P %d: %s", device.ordinal, stage, tp, tokens, partials, keys)
        return Route(plan, programs)


_tables: weakref.WeakSet[RouteTable] = weakref.WeakSet()


def clear_routes() -> None:
    """Forget the routes of every table."""
    for table in list(_tables):
        table.clear()

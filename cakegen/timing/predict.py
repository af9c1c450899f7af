"""Microseconds of a request on a device, from its programs and the device's figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from cakegen.emulator.launches.cases import Case
from cakegen.emulator.launches.launch import Options, emulate_plan
from cakegen.emulator.machine.residency import LaunchShape
from cakegen.emulator.text.translate import Program
from cakegen.operands import STAGES, shape_of
from cakegen.plan.records import Plan
from cakegen.registry import Registry
from cakegen.runtime.validate import Request, validate_front, validate_tail
from cakegen.timing.figures import DeviceFigures
from cakegen.timing.machine import InOrder, LaunchTime, TimedMachine, no_products
from cakegen.timing.pipes import MemorySystem

_SM_SHARED_BYTES, _CTA_RESERVED_BYTES, _SM_THREADS = 228 * 1024, 1024, 2048
"""CUDA C++ Programming Guide, table of compute capabilities 9.0 and 10.0."""


@dataclass(frozen=True)
class Prediction:
    """What a request takes.

    Parameters
    ----------
    microseconds
        Between the events around a captured call, the launch included, from a cold L2.
    bound
        The part of the device that worked longest, or `latency` where none worked half of the time.
    launches
        (key, its account), in order.
    floor_us
        The bytes that HBM serves at its rate, and a launch: no program of the request is faster.
    """

    microseconds: float
    bound: str
    launches: tuple[tuple[str, LaunchTime], ...]
    floor_us: float

    def busy(self) -> dict[str, float]:
        """Part -> share of the time between the launches' starts and ends in which it worked."""
        total = sum(time.end for _, time in self.launches)
        parts: dict[str, float] = defaultdict(float)
        for _, time in self.launches:
            for part, busy in time.busy.items():
                parts[part] += busy / total
        return dict(parts)


def predict(registry: Registry, case: Case, figures: DeviceFigures) -> Prediction:
    """What a request takes on a device.

    Raises
    ------
    CakeError
        The request, the plan or a program is refused.
    """
    request, plan = _request(registry, case)
    machines: list[TimedMachine] = []
    system = MemorySystem(figures)
    options = Options("early", checks=False, machine=_maker(figures, system, machines))
    emulate_plan(registry, request, plan, options)
    launches = tuple((machine.name, machine.finish()) for machine in machines)
    return _conclude(launches, figures)


def _maker(
    figures: DeviceFigures, system: MemorySystem, machines: list[TimedMachine]
) -> Callable[..., TimedMachine]:
    def make(
        program: Program, memory: Any, shape: LaunchShape, values: Any, schedule: Any, *names: Any, **options: Any
    ) -> TimedMachine:
        schedule = InOrder(clusters_at_once=clusters_at_once(shape, figures))
        arguments = (program, memory, shape, values, schedule, names[0], no_products)
        # each launch has an account of its own; what the L2 holds goes on
        machine = TimedMachine(*arguments, figures=figures, system=system.next_launch(), **options)
        machines.append(machine)
        return machine

    return make


def clusters_at_once(shape: LaunchShape, figures: DeviceFigures) -> int:
    """Clusters that are resident on a device, by shared memory and threads."""
    threads, ctas = shape.block[0] * shape.block[1] * shape.block[2], shape.ctas // shape.clusters
    by_shared = _SM_SHARED_BYTES // (shape.dynamic_smem_bytes + _CTA_RESERVED_BYTES)
    return max(1, figures.sm_count * min(by_shared, _SM_THREADS // threads) // ctas)


def _conclude(launches: tuple[tuple[str, LaunchTime], ...], figures: DeviceFigures) -> Prediction:
    body = sum(time.end for _, time in launches) + figures.launch_gap.value * (len(launches) - 1)
    memory = sum(time.memory_bytes for _, time in launches) / figures.memory_rate.value
    prediction = Prediction((figures.launch.value + body) / 1e3, "", launches, (figures.launch.value + memory) / 1e3)
    part, share = max(prediction.busy().items(), key=lambda each: each[1])
    return replace(prediction, bound=part if share >= 0.5 else "latency")


def _request(registry: Registry, case: Case) -> tuple[Request, Plan]:
    """A request whose operands hold nothing in particular."""
    model, stage = registry.model, STAGES[case.stage]
    sizes = {"i_local": model.dims.i_local(case.tp), "tokens": case.tokens, "partials": case.partials}

    def made(spec: Any) -> torch.Tensor:
        dtype = torch.float32 if spec.fp32 and spec in stage.outputs else torch.bfloat16
        return torch.empty(shape_of(spec, model.dims, **sizes), dtype=dtype)

    operands: Mapping[str, torch.Tensor] = {spec.name: made(spec) for spec in stage.operands}
    if case.stage == "front":
        return validate_front(model, **operands), case.plan(model)
    return validate_tail(model, **operands, tp=case.tp, rank=case.rank), case.plan(model)

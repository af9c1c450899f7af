"""Microseconds of a request on a device, from its programs and the device's figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from cakegen.arch import architecture
from cakegen.emulator.launches.cases import Case, planned_call
from cakegen.emulator.launches.launch import Options, emulate_plan
from cakegen.emulator.machine.residency import LaunchShape
from cakegen.emulator.text.translate import Program
from cakegen.emulator.units.product_chains import add_nothing
from cakegen.operands import OperandSpec, shape_of
from cakegen.plan.records import Plan
from cakegen.registry import Registry
from cakegen.runtime.validate import Request
from cakegen.timing.figures import DeviceFigures
from cakegen.timing.machine import InOrder, LaunchTime, TimedMachine
from cakegen.timing.pipes import MemorySystem

# CUDA C++ Programming Guide, compute capabilities 9.0 and 10.0.
_SM_THREADS = 2048
_LATENCY = "latency"
_BUSY_ENOUGH = 0.5
BETTER = {
    "memory": ("memory_rate",),
    "memory latency": ("memory_latency", "load_latency"),
    "L2": ("l2_rate",),
    "L2 latency": ("l2_latency", "load_l2_latency", "atomic", "fence_gpu"),
    "SM ingress": ("sm_ingress",),
    "tensor": ("product_rate", "shared_rate"),
    "issue": ("issue_rate", "alu_latency", "special_latency", "shared_latency", "shuffle_latency", "branch_latency"),
    "waits": ("wait_wake", "barrier_wake", "cluster_wake", "product_latency", "copy_issue", "peer_latency"),
    "launch": ("launch", "launch_gap", "store_drain"),
}
"""Part of a device -> the figures that are made better together, to see what the part is worth."""


@dataclass(frozen=True)
class Prediction:
    """What a request takes.

    Parameters
    ----------
    microseconds
        Between the events around a captured call, the launch included, from a cold L2.
    bound
        The part of the device that worked longest; `latency` where none worked half of the time.
    launches
        (key, its account), in order.
    floor_us
        What HBM takes to serve the bytes, and a launch: no program that reads them takes less.
    """

    microseconds: float
    bound: str
    launches: tuple[tuple[str, LaunchTime], ...]
    floor_us: float

    @property
    def busy(self) -> dict[str, float]:
        """Part -> share of the time between the launches' starts and ends in which it worked."""
        total = sum(time.end for _, time in self.launches)
        parts: dict[str, float] = defaultdict(float)
        for _, time in self.launches:
            for part, busy in time.busy.items():
                parts[part] += busy / total
        return dict(parts)

    @property
    def memory_bytes(self) -> int:
        """That HBM served."""
        return sum(time.memory_bytes for _, time in self.launches)


def predict(registry: Registry, case: Case, figures: DeviceFigures) -> Prediction:
    """What a request takes on a device.

    Raises
    ------
    CakeError
        The request, the plan or a program is refused, or a program does something undefined.
    """
    request, plan = _request(registry, case)
    machines: list[TimedMachine] = []
    options = Options("early", checks=False, machine=_maker(figures, MemorySystem(figures), machines))
    emulate_plan(registry, request, plan, options)
    launches = tuple((machine.name, machine.finish()) for machine in machines)
    return _conclude(launches, figures)


def better(figures: DeviceFigures, part: str, factor: float) -> DeviceFigures:
    """The device with a part made better: rates times a factor, and times divided by it."""
    found = figures.figures()
    changed: dict[str, Any] = {
        name: found[name].scaled(factor if found[name].is_rate else 1 / factor) for name in BETTER[part]
    }
    return replace(figures, **changed)


def clusters_at_once(shape: LaunchShape, figures: DeviceFigures) -> int:
    """Clusters that are resident on a device, by shared memory and threads."""
    threads, ctas = shape.block[0] * shape.block[1] * shape.block[2], shape.ctas // shape.clusters
    by_shared = architecture(figures.arch).resident_ctas(shape.dynamic_smem_bytes)
    return max(1, figures.sm_count * min(by_shared, _SM_THREADS // threads) // ctas)


def _maker(figures: DeviceFigures, system: MemorySystem, machines: list[TimedMachine]) -> Callable[..., TimedMachine]:
    def make(
        program: Program,
        memory: Any,
        shape: LaunchShape,
        values: Any,
        schedule: object,
        barriers: Any,
        arithmetic: object,
        **options: Any,
    ) -> TimedMachine:
        # a device has a schedule of its own, and nobody looks at what products are
        in_order = InOrder(clusters_at_once=clusters_at_once(shape, figures))
        arguments = (program, memory, shape, values, in_order, barriers, add_nothing)
        machine = TimedMachine(*arguments, figures=figures, system=system.next_launch(), **options)
        machines.append(machine)
        return machine

    return make


def _conclude(launches: tuple[tuple[str, LaunchTime], ...], figures: DeviceFigures) -> Prediction:
    body = sum(time.end for _, time in launches) + figures.launch_gap.value * (len(launches) - 1)
    prediction = Prediction((figures.launch.value + body) / 1e3, _LATENCY, launches, 0.0)
    floor = figures.launch.value + prediction.memory_bytes / figures.memory_rate.value
    part, share = max(prediction.busy.items(), key=lambda each: each[1])
    return replace(prediction, bound=part if share >= _BUSY_ENOUGH else _LATENCY, floor_us=floor / 1e3)


def _request(registry: Registry, case: Case) -> tuple[Request, Plan]:
    """A request whose operands hold nothing in particular."""
    model, stage = registry.model, registry.model.dims.stages[case.stage]
    i_local = model.dims.i_local(case.tp)

    def made(spec: OperandSpec) -> torch.Tensor:
        dtype = torch.float32 if spec.fp32 and spec in stage.outputs else torch.bfloat16
        shape = shape_of(spec, model.dims, i_local=i_local, tokens=case.tokens, partials=case.partials)
        return torch.empty(shape, dtype=dtype)

    return planned_call(model, case, {spec.name: made(spec) for spec in stage.operands})

"""Cluster launch control: a running cluster takes the place of one that has not started.

PTX ISA 9.7.13.17 (try_cancel), 9.7.13.18 (query_cancel). A response is 16 opaque bytes; here three numbers and a word
that says what came of the request. A request may fail at any time, also while clusters still wait.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault, Where
from cakegen.emulator.machine.memory import SHARED_WINDOW
from cakegen.emulator.machine.operands import locate, read_address, refused
from cakegen.emulator.machine.ports import Issues, Triple
from cakegen.emulator.machine.warp import Strand, Warp
from cakegen.emulator.text.ptx import Instruction
from cakegen.emulator.units.tma.copies import Landing, linear_write

Array = NDArray[Any]

RESPONSE_BYTES = 16
_GRANTED, _REFUSED = 0xC1C0DE01, 0xC1C0DE00
_FORM = {"async", "shared::cta", "mbarrier::complete_tx::bytes", "multicast::cluster::all", "b128"}


class Cancels(Protocol):
    """Knows which clusters have not started."""

    def cancel_cluster(self) -> Triple | None:
        """The first CTA of a cluster that will not start; None: refused."""


class LaunchControlHost(Issues, Protocol):
    """What cluster launch control asks of its launch."""

    @property
    def residency(self) -> Cancels:
        """Which clusters are there."""


def run_launch_control(
    machine: LaunchControlHost, strand: Strand, instruction: Instruction, active: Array, where: Where
) -> None:
    """`clusterlaunchcontrol.try_cancel.async`: the response lands in this CTA, or in all of its cluster."""
    parts = set(instruction.parts[2:])
    if parts - _FORM or not {"async", "mbarrier::complete_tx::bytes", "b128"} <= parts:
        raise refused(instruction)
    narrow = "shared::cta" in parts
    kind, base = ("u4", 0) if narrow else ("u8", SHARED_WINDOW)
    responses, barriers = (read_address(strand, operand, kind) for operand in instruction.operands)
    for lane in np.flatnonzero(active):
        cta, start = locate(strand, int(responses[lane]) - base, False)
        _, barrier = locate(strand, int(barriers[lane]) - base, False)
        if start % RESPONSE_BYTES:
            raise Fault("out-of-bounds", f"try_cancel writes its response to {start:#x}: not a multiple of 16")
        if cta.launches_refused:
            raise Fault("launch-control", f"CTA {cta.index} asks again after it has seen a request fail")
        decided: list[Array] = []

        def response(decided: list[Array] = decided) -> Array:
            if not decided:
                decided.append(_decide(machine))
            return decided[0]

        for target in cta.cluster.ctas if "multicast::cluster::all" in parts else [cta]:
            if target.shared.exited:
                raise Fault("exit", f"try_cancel with a response to CTA {target.index}, which has exited")
            target.barrier_at(barrier)
            spans = ((start, RESPONSE_BYTES),)
            landing = Landing(
                target, spans, barrier, response, linear_write(start), "the response to try_cancel", where
            )
            landing.begin(strand.warp.at(strand.pc - 1, active))
            machine.issue(landing)


def _decide(machine: LaunchControlHost) -> Array:
    corner = machine.residency.cancel_cluster()
    words = [0, 0, 0, _REFUSED] if corner is None else [*corner, _GRANTED]
    return np.array(words, np.uint32).view(np.uint8)


def query_text(instruction: Instruction, response: str, mask: str) -> tuple[str, str] | None:
    """`query_cancel` in a block: (expression of its results, their numpy type); None: no such form."""
    _, family, what, *types = instruction.parts
    arguments = f"(w, {response}, {mask})"
    if (family, what, types) == ("query_cancel", "is_canceled", ["pred", "b128"]):
        return f"(is_canceled{arguments},)", "?"
    if (family, what, types) == ("query_cancel", "get_first_ctaid", ["v4", "b32", "b128"]):
        return f"first_ctaid{arguments}", "u4"
    axis = {"get_first_ctaid::x": 0, "get_first_ctaid::y": 1, "get_first_ctaid::z": 2}.get(what)
    if axis is None or family != "query_cancel" or types != ["b32", "b128"]:
        return None
    return f"(first_ctaid{arguments}[{axis}],)", "u4"


def is_canceled(w: Warp, response: Array, mask: Array | None) -> Array:
    """`query_cancel.is_canceled`: whether each lane's response grants a cluster."""
    words = _words(response)
    active = np.ones(32, np.bool_) if mask is None else mask
    if not np.isin(words[3][active], (_GRANTED, _REFUSED)).all():
        raise Fault("launch-control", "query_cancel of 16 bytes that are no response to a try_cancel")
    granted: Array = words[3] == _GRANTED
    if not granted[active].all():
        w.cta.launches_refused = True
    return granted


def first_ctaid(w: Warp, response: Array, mask: Array | None) -> Array:
    """`query_cancel.get_first_ctaid`: `[4, 32]`; of a request that failed it is undefined."""
    words = _words(response)
    active = np.ones(32, np.bool_) if mask is None else mask
    if (words[3][active] != _GRANTED).any():
        raise Fault("launch-control", "get_first_ctaid of a response that cancelled nothing")
    return words


def _words(response: Array) -> Array:
    return np.ascontiguousarray(response.reshape(-1, 1).view(np.uint32).T)

"""`fence` and `membar` as what they do to a thread's clock.

PTX ISA 9.7.13.4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.order.shadow import GLOBAL_SPACE, OWN_SHARED, PEER_SHARED
from cakegen.emulator.order.vector_clock import CLUSTER, SCOPES
from cakegen.emulator.order.warp_order import WarpOrder
from cakegen.emulator.text.ptx import Instruction
from cakegen.errors import EmulationError

Mask = NDArray[np.bool_] | None


class Fencing(Protocol):
    """A warp, as far as fences go."""

    @property
    def thread(self) -> WarpOrder | None:
        """How the checker of happens-before sees it; None: nothing is checked."""


Fence = Callable[[Fencing, Mask], None]

# `membar.gl` is `fence.sc.gpu` (PTX ISA 9.7.13.4)
_SCOPES = {**SCOPES, "gl": SCOPES["gpu"]}
# Where a proxy fence covers writes: with `.shared::cta`, not those to the shared memory of other CTAs
_ASYNC_SPACES = {
    (): (GLOBAL_SPACE, OWN_SHARED, PEER_SHARED),
    ("global",): (GLOBAL_SPACE,),
    ("shared::cta",): (OWN_SHARED,),
    ("shared::cluster",): (OWN_SHARED, PEER_SHARED),
}


def decode_fence(instruction: Instruction) -> Fence:
    """What a fence does, decoded once.

    Raises
    ------
    EmulationError
        A form that is not modelled.
    """
    effect = _effect(instruction)
    if effect is None:
        raise EmulationError(f"{instruction.place}: {instruction.text!r}: this form of fence is not modelled")

    def fence(warp: Fencing, lanes: Mask) -> None:
        if warp.thread is not None and (lanes is None or lanes.any()):
            effect(warp.thread, lanes)

    return fence


def _effect(instruction: Instruction) -> Callable[[WarpOrder, Mask], None] | None:
    kind, *rest = instruction.parts[1:] if instruction.root == "fence" else ("sc", *instruction.parts[1:])
    if kind == "mbarrier_init":
        return lambda thread, _: thread.fence_initialised()
    if kind in ("acq_rel", "sc", "acquire", "release"):
        # a restricted fence (`sync_restrict`) orders what a handshake needs, at the scope of the cluster
        scopes = [_SCOPES[part] for part in rest if part in _SCOPES]
        scope = scopes[0] if scopes else CLUSTER
        return lambda thread, lanes: thread.fence(lanes, scope, releases=kind != "acquire", acquires=kind != "release")
    if kind == "proxy" and rest[0] == "async" and tuple(rest[1:]) in _ASYNC_SPACES:
        spaces = _ASYNC_SPACES[tuple(rest[1:])]
        return lambda thread, lanes: thread.fence_proxy(lanes, spaces)
    if kind == "proxy" and rest[0] == "async::generic":
        # the acquiring half orders reads, which need no fence here
        spaces = _ASYNC_SPACES[()] if rest[1] == "release" else ()
        return lambda thread, lanes: thread.fence_proxy(lanes, spaces)
    if kind == "proxy" and rest[0] in ("tensormap::generic", "alias"):
        # maps are constant parameters here, and no address has an alias
        return lambda thread, lanes: None
    return None

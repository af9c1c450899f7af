"""`fence` and `membar` as what they do to a thread's clock. Imports ptx, vector_clock and errors.

PTX ISA 9.7.13.4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cakegen.emulator.ptx import Instruction
from cakegen.emulator.vector_clock import CLUSTER, FENCED_GLOBAL, FENCED_SHARED, SCOPES
from cakegen.errors import EmulationError

if TYPE_CHECKING:
    from cakegen.emulator.thread import Thread
    from cakegen.emulator.warp import Warp

Fence = Callable[["Warp"], None]

# `membar.gl` is `fence.sc.gpu` (PTX ISA 9.7.13.4)
_SCOPES = {**SCOPES, "gl": SCOPES["gpu"]}
_ASYNC_ROWS = {
    (): (FENCED_SHARED, FENCED_GLOBAL),
    ("global",): (FENCED_GLOBAL,),
    ("shared::cta",): (FENCED_SHARED,),
    ("shared::cluster",): (FENCED_SHARED,),
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

    def fence(warp: Warp) -> None:
        if warp.thread is not None:
            effect(warp.thread)

    return fence


def _effect(instruction: Instruction) -> Callable[[Thread], None] | None:
    kind, *rest = instruction.parts[1:] if instruction.root == "fence" else ("sc", *instruction.parts[1:])
    if kind == "mbarrier_init":
        return lambda thread: thread.fence_initialised()
    if kind in ("acq_rel", "sc", "acquire", "release"):
        # a restricted fence (`sync_restrict`) orders what a handshake needs, at the scope of the cluster
        scopes = [_SCOPES[part] for part in rest if part in _SCOPES]
        scope = scopes[0] if scopes else CLUSTER
        return lambda thread: thread.fence(scope, releases=kind != "acquire", acquires=kind != "release")
    if kind == "proxy" and rest[0] == "async" and tuple(rest[1:]) in _ASYNC_ROWS:
        rows = _ASYNC_ROWS[tuple(rest[1:])]
        return lambda thread: thread.fence_proxy(rows)
    if kind == "proxy" and rest[0] == "async::generic":
        # the acquiring half orders reads, which need no fence here
        return lambda thread: thread.fence_proxy((FENCED_SHARED, FENCED_GLOBAL) if rest[1] == "release" else ())
    if kind == "proxy" and rest[0] in ("tensormap::generic", "alias"):
        # maps are constant parameters here, and no address has an alias
        return lambda thread: None
    return None

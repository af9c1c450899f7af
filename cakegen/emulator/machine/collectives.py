"""What blocks call where lanes of a warp look at each other: shuffles, votes, matches, reductions.

A mask is None where all 32 lanes are active; what lanes outside of it get is nobody's.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.warp import Warp
from cakegen.emulator.text.arithmetic import maximum_f32, maximum_nan, minimum_f32, minimum_nan, shuffle
from cakegen.errors import EmulationError

Lanes = NDArray[Any]
Mask = NDArray[np.bool_] | None

_LANE_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)
_ALL_MEMBERS = b"\xff" * 128
_CANONICAL_NAN = np.uint32(0x7FFFFFFF).view(np.float32)
_REDUCTIONS: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min_f32": minimum_f32,
    "max_f32": maximum_f32,
    "min_nan": minimum_nan,
    "max_nan": maximum_nan,
}


def environment() -> dict[str, Any]:
    """Names that blocks use."""
    names = "shuffle_lanes sync_lanes vote_ballot vote_any vote_all vote_uni elect_lane"
    return {name: globals()[name] for name in (*names.split(), "match_lanes", "reduce_lanes", "active_mask")}


def shuffle_lanes(w: Warp, mode: str, value: Lanes, b: Lanes, c: Lanes, members: Lanes, mask: Mask) -> Any:
    """`shfl.sync`; reading a lane that does not take part is a fault."""
    result, inside = shuffle(mode, value, b, c)
    active = _require_members(w, members, mask)
    if active is not None:
        source, _ = shuffle(mode, np.arange(32, dtype=np.uint32), b, c)
        listed = members >> source & np.uint32(1) != 0
        if not (active[source] & listed)[active].all():
            raise Fault("divergence", "shfl.sync reads a lane that does not execute it")
    return result, inside


def _require_members(w: Warp, members: Lanes, mask: Mask) -> Mask:
    """The active lanes, or None where all 32 are and name all 32.

    Raises
    ------
    Fault
        A lane executes it whose own mask leaves it out, or names a lane that does not execute it with the same mask.
    """
    if mask is None and members.tobytes() == _ALL_MEMBERS:
        return None
    active = np.ones(32, np.bool_) if mask is None else mask
    # [lane that executes it, lane that it names]
    named = (members[:, None] & _LANE_BITS != 0)[active]
    own = members[active]
    if not (own & _LANE_BITS[active]).all():
        raise Fault("divergence", f"a lane executes it that its member mask {int(own[0]):#x} leaves out")
    if (named & w.live_lanes() & ~active).any():
        raise Fault("divergence", f"a lane of its member mask {int(own[0]):#x} does not execute it")
    if (named & active & (members != own[:, None])).any():
        raise Fault("divergence", "its lanes name each other with different member masks")
    return active


def sync_lanes(w: Warp, members: Lanes, mask: Mask) -> None:
    """`bar.warp.sync`."""
    w.sync_lanes(_require_members(w, members, mask))


def vote_ballot(w: Warp, predicate: Lanes, members: Lanes, mask: Mask) -> Lanes:
    """`vote.sync.ballot.b32`: of the lanes that each lane's mask names."""
    active = _require_members(w, members, mask)
    voted = predicate if active is None else predicate & active
    ballots: Lanes = np.uint32((_LANE_BITS * voted).sum()) & members
    return ballots


def vote_any(w: Warp, predicate: Lanes, members: Lanes, mask: Mask) -> Lanes:
    """`vote.sync.any.pred`."""
    return np.asarray(vote_ballot(w, predicate, members, mask) != 0)


def vote_all(w: Warp, predicate: Lanes, members: Lanes, mask: Mask) -> Lanes:
    """`vote.sync.all.pred`."""
    return np.asarray(vote_ballot(w, ~predicate, members, mask) == 0)


def elect_lane(w: Warp, members: Lanes, mask: Mask) -> Any:
    """`elect.sync`: one lane of the mask, the same for the same mask; which one is the launch's choice."""
    among = _require_members(w, members, mask)
    if among is not None and (members[among] != members[among][0]).any():
        raise EmulationError("elect.sync of lanes with several member masks at once is not modelled")
    active = np.arange(32) if among is None else np.flatnonzero(among)
    lane = int(active[w.machine.elect_salt % active.size])
    return np.full(32, lane, np.uint32), np.arange(32) == lane


def vote_uni(w: Warp, predicate: Lanes, members: Lanes, mask: Mask) -> Lanes:
    """`vote.sync.uni.pred`: all of them, or none."""
    ballots = vote_ballot(w, predicate, members, mask)
    return np.asarray((ballots == 0) | (ballots == _named_and_active(members, mask)))


def _named_and_active(members: Lanes, mask: Mask) -> Lanes:
    """The lanes that each lane's mask names, without those that have exited."""
    return members if mask is None else members & np.uint32(_LANE_BITS[mask].sum())


def active_mask(mask: Mask) -> Lanes:
    """`activemask.b32`."""
    return np.full(32, 0xFFFFFFFF if mask is None else _LANE_BITS[mask].sum(), np.uint32)


def match_lanes(w: Warp, mode: str, value: Lanes, members: Lanes, mask: Mask) -> tuple[Lanes, Lanes]:
    """`match.sync`: the lanes with this lane's value; of `all`, every lane of the mask or none, and whether."""
    _require_members(w, members, mask)
    named = _named_and_active(members, mask)
    same = (value[:, None] == value[None, :]) @ _LANE_BITS.astype(np.uint64)
    found = same.astype(np.uint32) & named
    if mode == "any":
        return found, found != 0
    agree = found == named
    return np.where(agree, named, np.uint32(0)), agree


def reduce_lanes(w: Warp, operation: str, value: Lanes, members: Lanes, mask: Mask) -> Lanes:
    """`redux.sync`: over the lanes that each lane's mask names."""
    _require_members(w, members, mask)
    named = _named_and_active(members, mask)
    combine, result = _REDUCTIONS[operation], np.zeros_like(value)
    for group in np.unique(named if mask is None else named[mask]):
        inside = group & _LANE_BITS != 0
        total = functools.reduce(combine, np.split(value[inside], np.count_nonzero(inside)))
        if value.dtype.kind == "f" and np.isnan(total[0]):
            total = np.array([_CANONICAL_NAN])
        result = np.where(named == group, total, result)
    return result

"""What special registers hold that stay what they are (PTX ISA 10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cakegen.arch import ARCHITECTURES
from cakegen.errors import EmulationError

Triple = tuple[int, int, int]

_LANE = np.arange(32, dtype=np.uint64)
_BELOW = (np.uint64(1) << _LANE) - np.uint64(1)
_UP_TO = (np.uint64(2) << _LANE) - np.uint64(1)
_EVERY = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class ThreadPlace:
    """Where a warp stands in its launch.

    Parameters
    ----------
    warp
        Its index in the CTA.
    cta, coordinates, cluster_coordinates, rank
        The CTA's linear index, its place in the grid and in its cluster, and its rank there.
    dynamic_bytes, shared_bytes
        Shared memory of the CTA: of the dynamic part, and up to its end.
    """

    target: str
    grid: Triple
    block: Triple
    cluster: Triple
    warp: int
    cta: int
    coordinates: Triple
    cluster_coordinates: Triple
    rank: int
    dynamic_bytes: int
    shared_bytes: int


def read_special(name: str, place: ThreadPlace) -> NDArray[np.uint32]:
    """A special register as 32 lanes.

    Raises
    ------
    EmulationError
        It is not modelled.
    """
    register, _, axis = name.partition(".")
    value = _vectors(place)[register]["xyz".index(axis)] if axis else _scalars(place).get(name)
    if value is None:
        raise EmulationError(f"special register %{name} is not modelled")
    return np.broadcast_to(np.asarray(value, np.uint32), (32,)).copy()


def _vectors(place: ThreadPlace) -> dict[str, Any]:
    x, y, _ = (np.uint64(extent) for extent in place.block)
    thread = np.uint64(32 * place.warp) + _LANE
    pairs = tuple(zip(place.coordinates, place.grid, place.cluster, strict=True))
    return {
        "tid": (thread % x, thread // x % y, thread // (x * y)),
        "ntid": place.block,
        "ctaid": place.coordinates,
        "nctaid": place.grid,
        "cluster_ctaid": place.cluster_coordinates,
        "cluster_nctaid": place.cluster,
        "clusterid": [at // size for at, _, size in pairs],
        "nclusterid": [count // size for _, count, size in pairs],
    }


def _scalars(place: ThreadPlace) -> dict[str, Any]:
    known = ARCHITECTURES.get(place.target, ARCHITECTURES["sm_90a"])
    sm_count = max(part.sm_count for part in known.parts)
    ctas = int(np.prod(place.cluster))
    return {
        "laneid": _LANE,
        "warpid": place.warp,
        # the ISA lets it be the most that an SM holds
        "nwarpid": 64,
        # CTAs take SMs in turn: which are free when is not modelled
        "smid": place.cta % sm_count,
        "nsmid": sm_count,
        "gridid": 1,
        "cluster_ctarank": place.rank,
        "cluster_nctarank": ctas,
        "is_explicit_cluster": ctas > 1,
        "lanemask_eq": np.uint64(1) << _LANE,
        "lanemask_lt": _BELOW,
        "lanemask_le": _UP_TO,
        "lanemask_gt": _EVERY ^ _UP_TO,
        "lanemask_ge": _EVERY ^ _BELOW,
        "dynamic_smem_size": place.dynamic_bytes,
        "total_smem_size": place.shared_bytes,
    }

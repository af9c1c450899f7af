"""Leaf module: the records that planner, emitter and runtime share. No torch, no pydantic, no I/O.

Everything here is a frozen dataclass of numbers and strings, so that a plan is a pure function of hashable values
and a registry can hold a model as a literal. Sizes in bytes end in `_bytes`; K is counted in chunks of `block_k`.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

from cakegen.arch import architecture
from cakegen.errors import RegistryError

R = TypeVar("R")


@dataclass(frozen=True)
class ModelDims:
    """Dimensions and constants of one latent mixture-of-experts block.

    front: `x [T, hidden]` -> logits `[T, experts]` fp32, latent `[T, latent]` bf16, shared_act
    `[T, shared_intermediate / TP]` bf16. tail: routed `[P, T, latent]` and shared_act -> out `[T, hidden]` bf16.
    """

    hidden: int
    latent: int
    experts: int
    shared_intermediate: int
    norm_eps: float
    situ_beta: float
    situ_linear_beta: float

    def i_local(self, tp: int) -> int:
        """Shared-expert columns of one rank."""
        return self.shared_intermediate // tp

    def latent_slice(self, tp: int) -> int:
        """Latent columns that one rank multiplies in the tail."""
        return self.latent // tp


@dataclass(frozen=True)
class DecodeRules:
    """Tile choices and thresholds of the decode planner.

    A ring stage holds one or two K chunks of a weight tile (`[block_m, block_k]` bf16) and of the tokens
    (`[n_pad, block_k]` bf16).

    Parameters
    ----------
    max_tokens
        Largest T of decode; more is prefill.
    n_pads
        Token tiles, rising; a request takes the first that holds it.
    block_m, block_k
        Weight rows and columns of a chunk; a shared tile is `block_m / 2` gate rows and their up rows.
    max_stages
        Most stages of the ring, which takes what shared memory leaves.
    barrier_bytes, flag_bytes, single_landing_bytes
        Reserved in front of the ring: mbarriers, other words, and the landing zone of a CTA without a partner.
    depth2_min_stages_single, depth2_min_stages_pair
        The front loads two chunks a stage where the ring then keeps so many stages (one CTA a tile, or a pair).
    alias_n_pad, alias_min_chunks
        From this token tile and so many chunks a CTA on, a pair's sums land in the drained ring.
    staged_max_down_units, staged_min_stages
        The tail stages routed rows where a CTA has at most so many shared-down units and its ring so many stages.
    staged_wide_n_pad
        From this token tile on, the cold fill beside staged rows is staggered.
    resident_tokens_staged, resident_tokens_long, resident_tokens_short
        Largest T whose normalised rows stay in shared memory: with staged rows, with more down units than
        `staged_max_down_units`, with fewer.
    resident_min_stages
        Stages that the ring must keep beside resident rows.
    small_n_pad, small_min_stages_plain
        Up to this token tile one stage is left free, but a ring without staged or resident rows keeps so many.
    issue_ahead
        Weight stages that are issued before the row loads, where a gate holds those back.
    front_ahead
        Weight stages that the front issues before it waits for an earlier launch, in an ordinary launch.
    overlap_ahead_n_pad
        Up to this token tile, a launch that overlaps the one before it issues its whole ring of weights first.
    stagger_units, split_finalize_n_pad
        The unit before which a staggered fill pauses; the token tile from which on both CTAs finish (0: rank 0 alone).
    narrow_block_m, narrow_n_pad
        Hopper's weight rows of a front's tile up to this token tile, where as many pairs run at once (0: `block_m`).
    """

    max_tokens: int
    n_pads: tuple[int, ...]
    block_m: int
    block_k: int
    max_stages: int
    barrier_bytes: int
    flag_bytes: int
    single_landing_bytes: int
    depth2_min_stages_single: int
    depth2_min_stages_pair: int
    alias_n_pad: int
    alias_min_chunks: int
    staged_max_down_units: int
    staged_min_stages: int
    staged_wide_n_pad: int
    resident_tokens_staged: int
    resident_tokens_long: int
    resident_tokens_short: int
    resident_min_stages: int
    small_n_pad: int
    small_min_stages_plain: int
    issue_ahead: int
    front_ahead: int
    overlap_ahead_n_pad: int
    stagger_units: int
    split_finalize_n_pad: int
    narrow_block_m: int
    narrow_n_pad: int


@dataclass(frozen=True)
class PrefillRules:
    """Tile choices and thresholds of the SM100 prefill planner (T > decode's max_tokens).

    K is counted in chunks of `block_k` columns, costs and savings in K iterations of one pair.

    Parameters
    ----------
    block_m, block_n, block_k
        Rows of one CTA, columns of a pair's tile, columns of a chunk.
    raster_m_tiles
        Row tiles that share the weights while they are in L2.
    front_epilogue_iters, front_min_saving_percent
        The front's trailing tiles run as two K halves where that saves so much of the whole, with the epilogue counted
        as so many iterations.
    front_evict_first_pair_rows
        Up to so many pair rows the weights are streamed evict-first.
    narrow_block_n, narrow_stages, narrow_min_tp, narrow_tokens
        The tail's narrow tiles and their ring: from this TP on, at exactly so many tokens.
    default_stages
        Ring stages of all others.
    short_ring_stages, short_ring_max_tokens, short_ring_tp
        The tail's shorter ring: at this TP, up to so many tokens.
    stream_k_min_chunks, stream_k_min_ipc, stream_k_max_segments
        The tail's trailing wave is cut from so many chunks on, into items of at least so many iterations, at most so
        many of them to a tile.
    stream_k_segment_cost, stream_k_min_saving
        What a further segment of a tile costs, and what a cut must save.
    stream_k_max_remainder_percent, stream_k_full_reuse
        Below so many pair rows a group, a cut needs a full wave before it, and at most so much of one behind it.
    fused_norm_min_down_chunks, fused_norm_rows_per_cta
        The norm runs inside the GEMM where so many shared-down chunks hide it, at most so many rows a CTA.
    norm_rows_per_cta
        Rows of a CTA of the stand-alone norm, on every architecture.
    """

    block_m: int
    block_n: int
    block_k: int
    raster_m_tiles: int
    front_epilogue_iters: int
    front_min_saving_percent: int
    front_evict_first_pair_rows: int
    narrow_block_n: int
    narrow_stages: int
    narrow_min_tp: int
    narrow_tokens: int
    default_stages: int
    short_ring_stages: int
    short_ring_max_tokens: int
    short_ring_tp: int
    stream_k_min_chunks: int
    stream_k_min_ipc: int
    stream_k_max_segments: int
    stream_k_segment_cost: int
    stream_k_min_saving: int
    stream_k_max_remainder_percent: int
    stream_k_full_reuse: int
    fused_norm_min_down_chunks: int
    fused_norm_rows_per_cta: int
    norm_rows_per_cta: int


MAX_ITER_PERCENT = 1000
"""Of `HopperTile.iter_percent`: so dear a tile pays only where ends of tiles cost many times their iterations."""


@dataclass(frozen=True)
class HopperTile:
    """One way to lay out a Hopper prefill GEMM, and what it costs. Costs are counted in K iterations of this tile.

    Parameters
    ----------
    block_n
        Weight rows of a tile; both CTAs of a pair multiply by all of them, and each loads half.
    num_stages
        K iterations that the ring in shared memory holds.
    tile_groups
        Warpgroups of a CTA that share each tile. With 2, each has half of the rows. With 1 they take turns, each with
        whole tiles, so that only the last tile's end is not hidden behind another's multiplications.
    iter_percent
        What an iteration costs, in percent of one of the first tile of the table. A narrower tile multiplies less in
        it, and reads the tokens more often.
    epilogue_iters
        What the end of a piece (a whole tile, or an item's part of a cut tile) costs, whether it stores the output or
        fp32 partials: the accumulators are read out, and nothing is multiplied meanwhile.
    segment_cost
        What each segment of a cut tile after the first costs the CTA that sums them.
    """

    block_n: int
    num_stages: int
    tile_groups: int
    iter_percent: int
    epilogue_iters: int
    segment_cost: int


@dataclass(frozen=True)
class HopperPrefillRules:
    """Tile choices and costs of the Hopper prefill planner (T > decode's max_tokens).

    A pair of CTAs computes a tile of `2 * block_m` tokens by `block_n` weight rows in steps of `block_k` columns: a K
    iteration. Costs and savings are counted in K iterations of one pair, so that they do not depend on the clock.

    Parameters
    ----------
    block_m
        Tokens of one CTA.
    block_k
        Columns of a K iteration.
    raster_m_tiles
        Row tiles of `block_m` that pass a weight tile one after another, so that it is read from L2.
    stream_k_min_ipc
        Fewest K iterations of an item of the cut tiles.
    stream_k_max_segments
        Most items that may share one cut tile; the partials' workspace grows with it.
    stream_k_min_saving
        Fewest iterations that a cut of the trailing wave must save over whole tiles.
    stream_k_wider_min_saving
        Fewest iterations that cutting the wave before it too must save over the better of those two: it reads weights
        at more places at once, and its workspace is far larger.
    norm_launch_iters, norm_launch_rows_per_iter
        What a norm in a launch of its own adds to the tail, in iterations of the first tile: so many, and one for so
        many rows.
    norm_first_rows_per_iter
        Rows of a fused norm's first ones that cost an iteration.
    norm_hidden_iters
        So many shared-down iterations hide the norm of the first tiles' rows.
    tiles
        The tiles that a plan may take: it takes the cheapest, and of equals the first. Keys spell all but the first.
    """

    block_m: int
    block_k: int
    raster_m_tiles: int
    stream_k_min_ipc: int
    stream_k_max_segments: int
    stream_k_min_saving: int
    stream_k_wider_min_saving: int
    norm_launch_iters: int
    norm_launch_rows_per_iter: int
    norm_first_rows_per_iter: int
    norm_hidden_iters: int
    tiles: tuple[HopperTile, ...]

    def preferring(self, tile: HopperTile) -> HopperPrefillRules:
        """These rules with costs at which a plan takes one of the tiles, whatever the others would save."""
        tiles = (dataclasses.replace(t, iter_percent=1 if t == tile else MAX_ITER_PERCENT) for t in self.tiles)
        return dataclasses.replace(self, tiles=tuple(tiles))


@dataclass(frozen=True)
class Target:
    """One architecture that an export serves: its TP degrees and the SM counts of the parts to plan for."""

    arch: str
    tp_degrees: tuple[int, ...]
    sm_counts: tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """One kernel family of an export: which template writes it for one architecture family."""

    name: str
    arch_family: str
    template: str


@dataclass(frozen=True)
class Model:
    """All that planning needs: what the registry's `MODEL` literal holds."""

    name: str
    dims: ModelDims
    max_tokens: int
    max_partials: int
    targets: tuple[Target, ...]
    families: tuple[Family, ...]
    decode: DecodeRules
    decode_sm90: DecodeRules
    prefill: PrefillRules
    prefill_sm90: HopperPrefillRules

    def target(self, arch: str) -> Target | None:
        """The target for an architecture, or None where the export does not serve it."""
        return next((t for t in self.targets if t.arch == arch), None)

    def for_family(self, arch_family: str) -> Model:
        """This model with the decode rules of one architecture family in `decode`."""
        if arch_family != "sm90" or self.decode == self.decode_sm90:
            return self
        return dataclasses.replace(self, decode=self.decode_sm90)

    def template_for(self, family: str, arch_family: str) -> str | None:
        """The template of a kernel family, or None where the export declares none."""
        found = (f.template for f in self.families if (f.name, f.arch_family) == (family, arch_family))
        return next(found, None)


@dataclass(frozen=True)
class DeviceFacts:
    """What a plan may depend on of a device.

    Parameters
    ----------
    arch
        Architecture name (`sm_90a`).
    sm_count
        Streaming multiprocessors that a launch may use.
    resident_pairs
        Two-CTA clusters that can be resident at once with one CTA an SM: the driver's occupancy where there is a
        device, else `sm_count // 2`.
    max_dynamic_smem_bytes
        Dynamic shared memory of one CTA.
    """

    arch: str
    sm_count: int
    resident_pairs: int
    max_dynamic_smem_bytes: int

    @staticmethod
    def nominal(arch: str, sm_count: int) -> DeviceFacts:
        """Facts of a device that is not at hand: every two SMs can hold a pair."""
        return DeviceFacts(arch, sm_count, sm_count // 2, architecture(arch).max_dynamic_smem_bytes)


def to_literal(record: Any) -> Any:
    """A record as nested dicts, lists, numbers and strings: what a registry can hold as a literal."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {f.name: to_literal(getattr(record, f.name)) for f in dataclasses.fields(record)}
    if isinstance(record, tuple):
        return [to_literal(item) for item in record]
    return record


def from_literal(cls: type[R], literal: Any) -> R:
    """The inverse of `to_literal`.

    Raises
    ------
    RegistryError
        A field is missing, unknown, or of the wrong type.
    """
    return typing.cast(R, _convert(cls, literal, cls.__name__))


def _convert(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = _hints(kind)
        if not isinstance(value, dict) or set(value) != set(hints):
            got = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise RegistryError(f"{where}: needs exactly the fields {sorted(hints)}; got {got}")
        return kind(**{name: _convert(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})
    if typing.get_origin(kind) is tuple:
        return _convert_tuple(typing.get_args(kind), value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and type(value) is not kind:
        raise RegistryError(f"{where}: needs {kind.__name__}; got {value!r}")
    return value


def _convert_tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    """`tuple[X, ...]`, or `tuple[X, Y]` of exactly as many items."""
    if not isinstance(value, (list, tuple)):
        raise RegistryError(f"{where}: needs a list; got {type(value).__name__}")
    items = kinds[:1] * len(value) if kinds[-1] is Ellipsis else kinds
    if len(value) != len(items):
        raise RegistryError(f"{where}: needs {len(items)} items; got {len(value)}")
    return tuple(_convert(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(items, value, strict=True)))


@functools.cache
def _hints(record: type) -> dict[str, Any]:
    return typing.get_type_hints(record)

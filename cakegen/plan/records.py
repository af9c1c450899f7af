"""Leaf module: what a plan is. Imports only model.

A plan is a frozen record with every decision and the rule that took it; printing it explains the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from cakegen.model import DeviceFacts


@dataclass(frozen=True)
class DecodeForm:
    """Every decision of one weight-streaming decode program.

    A CTA owns `block_m` weight rows (a shared tile: block_m / 2 gate rows and as many up rows), or half of their K in
    a pair. `symbol` spells the whole record.

    Parameters
    ----------
    stage, tp
        `front` or `tail`; tensor-parallel degree.
    n_pad
        Token rows of the MMA's B operand.
    block_m
        Weight rows of a tile.
    num_stages, chunks_per_stage
        Ring depth, and K chunks of one stage.
    cluster_ctas, grid_ctas
        1 (a CTA owns its tile) or 2 (a pair splits K); CTAs of the launch.
    router_tiles, latent_tiles, shared_tiles
        Tiles by class; in the tail `latent_tiles` counts the output's tiles.
    k1_chunks, k2_chunks
        front: chunks of hidden, and 0. tail: chunks of the latent slice (up), and of the shared-expert slice (down).
    k1_cols
        Columns behind `k1_chunks`: `k1_chunks * block_k`, or fewer where the last chunk is partly out of bounds.
    k1_ragged_cols
        Columns of that last chunk where it is partly out of bounds (0: every chunk is whole).
    fused_norm, resident_b, staged_rows
        The tail normalises inside the launch; keeps its share of y in shared memory as a B operand; copies the
        routed rows to shared memory first.
    out_cols
        Columns of latent (front) or of out (tail).
    issue_gate
        Weight stages issued before the row loads (0: no gate).
    no_prefetch, stagger_units, wide_wait
        No tensor-map prefetch; the fill pauses before this unit (0: never); only the epilogue waits for the cluster.
        Programs of the family sm90 always wait there alone, so the last changes their key and nothing else.
    landing_alias
        The partner's sums land in the drained ring.
    split_finalize
        Each CTA of a pair finishes half of the tokens; else rank 0 finishes all.
    token_parts
        CTAs of a tile that split the tokens: 2, each of which multiplies all of K for its half of them, or 1.
    needs_residency
        CTAs wait for each other through a counter in global memory, so the whole grid must be resident (cooperative).
    """

    stage: str
    tp: int
    n_pad: int
    block_m: int
    num_stages: int
    chunks_per_stage: int
    cluster_ctas: int
    grid_ctas: int
    router_tiles: int
    latent_tiles: int
    shared_tiles: int
    k1_chunks: int
    k2_chunks: int
    k1_cols: int
    k1_ragged_cols: int
    out_cols: int
    fused_norm: bool
    resident_b: bool
    staged_rows: bool
    issue_gate: int
    no_prefetch: bool
    stagger_units: int
    wide_wait: bool
    landing_alias: bool
    split_finalize: bool
    token_parts: int
    needs_residency: bool
    symbol: str

    @property
    def tiles(self) -> int:
        """Weight tiles of the launch."""
        return self.router_tiles + self.latent_tiles + self.shared_tiles


@dataclass(frozen=True)
class NormForm:
    """The stand-alone norm: `early_trigger` releases dependents at entry, else after the stores."""

    rows_per_cta: int
    early_trigger: bool


@dataclass(frozen=True)
class GemmForm:
    """One persistent prefill GEMM instance (front or tail): what its key spells, and its compile-line constants.

    Parameters
    ----------
    stage, tp
        `front` or `tail`; tensor-parallel degree.
    block_m, block_n
        Tokens of one CTA, of which a pair has two; weight rows of the pair's tile.
    num_k
        K iterations of a tile.
    num_stages
        K iterations that the ring holds.
    evict_first, fused_norm, staged_store
        Weights are streamed past L2; the tail normalises inside the launch; the final store goes through shared memory.
    k1_ragged_cols
        tail: columns of the latent slice in its last K iteration, where they do not fill it (0: they do).
    constants
        Compile-line constants, where several keys share one program.
    tile_groups
        Warpgroups of a CTA that share each tile. Hopper has two that multiply: with 1 they take turns, each with whole
        tiles, so that one stores while the other multiplies. Blackwell has two groups of epilogue warps, which always
        share a tile.
    """

    stage: str
    tp: int
    block_m: int
    block_n: int
    num_k: int
    num_stages: int
    evict_first: bool
    fused_norm: bool
    staged_store: bool
    k1_ragged_cols: int
    constants: tuple[tuple[str, int], ...]
    tile_groups: int = 2


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a plan: the program by its logical key, the grid in CTAs, run-time parameters by name.

    `overlap`: a caller may have it overlap the launch before it, if its program can.
    """

    key: str
    grid_ctas: tuple[int, int, int]
    parameters: tuple[tuple[str, int], ...]
    form: DecodeForm | NormForm | GemmForm
    overlap: bool = True


@dataclass(frozen=True)
class Rule:
    """Why a field has its value: the rule in words, with its numbers."""

    field: str
    value: object
    reason: str


@dataclass(frozen=True)
class Plan:
    """The launches that serve one request, in order, and the reason of each decision."""

    stage: str
    tp: int
    tokens: int
    partials: int
    device: DeviceFacts
    launches: tuple[Launch, ...]
    rules: tuple[Rule, ...]

"""Leaf module: what a plan is. Imports only model.

A plan is a frozen record with every decision and the rule that took it; printing it explains the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cakegen.model import DeviceFacts

BLOCK_K = 64
"""Columns of a K chunk, everywhere: a row of 64 bf16 is one 128-byte swizzle row."""
GEMM_BLOCK_M = 128
"""Tokens of a prefill CTA, everywhere: two Hopper warpgroups of 64, or the lanes of Blackwell's tensor memory."""


class Sharing(Enum):
    """How the CTAs of a decode tile share it."""

    ALONE = "one CTA owns the tile"
    PAIR = "a pair splits K"
    TOKENS = "two CTAs split the tokens"

    @property
    def ctas(self) -> int:
        """CTAs of a tile."""
        return 1 if self is Sharing.ALONE else 2


class NormPlace(Enum):
    """Where the routed rows of a launch are normalised."""

    NONE = "nowhere: there are none (a front), or the block has no norm"
    APART = "in a launch of its own before this one"
    MEMORY = "in the launch, through the workspace of y"
    RESIDENT = "in the launch; a CTA keeps its share of y in shared memory as a B operand"
    STAGED = "likewise, and the routed rows are copied to shared memory first"


@dataclass(frozen=True)
class DecodeForm:
    """Every decision of one weight-streaming decode program; a logical key spells the whole record.

    A CTA owns `block_m` weight rows (a gated shared tile: block_m / 2 gate rows and as many up rows), or shares them
    with a second one.

    Parameters
    ----------
    stage, tp
        `front` or `tail`; tensor-parallel degree.
    n_pad
        Token rows of the MMA's B operand, of both CTAs where they split the tokens.
    block_m
        Weight rows of a tile.
    gated
        A front's shared tiles are half gate rows, half up rows.
    num_stages, chunks_per_stage
        Ring depth, and K chunks of one stage.
    sharing
        How the CTAs of a tile share it.
    router_tiles, latent_tiles, shared_tiles
        Tiles by class; in the tail `latent_tiles` counts the output's tiles.
    k1_cols, k2_chunks
        front: columns of hidden, and 0. tail: columns of the latent slice (up), and chunks of the shared slice (down).
    out_cols
        Columns of latent (front) or of out (tail).
    norm
        Where the tail's rows are normalised.
    issue_gate
        Weight stages issued before the row loads (0: no gate).
    stagger_units
        The unit before which the first fill pauses (0: never). A launch that pauses prefetches no tensor map, and only
        its epilogue waits for the cluster. Programs of the family sm90 always wait there alone.
    landing_bytes
        Where a partner's sums land, or the reserve of a CTA without one.
    landing_alias
        The sums land in the drained ring.
    split_finalize
        Each CTA of a pair finishes half of the tokens; else rank 0 finishes all.
    """

    stage: str
    tp: int
    n_pad: int
    block_m: int
    gated: bool
    num_stages: int
    chunks_per_stage: int
    sharing: Sharing
    router_tiles: int
    latent_tiles: int
    shared_tiles: int
    k1_cols: int
    k2_chunks: int
    out_cols: int
    norm: NormPlace
    issue_gate: int
    stagger_units: int
    landing_bytes: int
    landing_alias: bool
    split_finalize: bool

    @property
    def tiles(self) -> int:
        """Weight tiles of the launch."""
        return self.router_tiles + self.latent_tiles + self.shared_tiles

    @property
    def cluster_ctas(self) -> int:
        """2: a pair splits a tile's K; else 1."""
        return 2 if self.sharing is Sharing.PAIR else 1

    @property
    def token_parts(self) -> int:
        """CTAs of a tile that split the tokens: 2, each of which multiplies all of K for its half of them, or 1."""
        return 2 if self.sharing is Sharing.TOKENS else 1

    @property
    def grid_ctas(self) -> int:
        """CTAs of the launch."""
        return self.tiles * self.sharing.ctas

    @property
    def k1_chunks(self) -> int:
        """Chunks of `k1_cols`, the last of which may be partly out of bounds."""
        return -(-self.k1_cols // BLOCK_K)

    @property
    def k1_ragged_cols(self) -> int:
        """Columns of that last chunk where it is partly out of bounds (0: every chunk is whole)."""
        return self.k1_cols % BLOCK_K

    @property
    def fused_norm(self) -> bool:
        """The tail normalises inside the launch."""
        return self.norm in (NormPlace.MEMORY, NormPlace.RESIDENT, NormPlace.STAGED)

    @property
    def resident_b(self) -> bool:
        """A CTA keeps its share of y in shared memory as a B operand."""
        return self.norm in (NormPlace.RESIDENT, NormPlace.STAGED)

    @property
    def staged_rows(self) -> bool:
        """The routed rows are copied to shared memory first."""
        return self.norm is NormPlace.STAGED

    @property
    def needs_residency(self) -> bool:
        """CTAs wait for each other through a counter in global memory, so the whole grid must be resident."""
        return self.norm is NormPlace.MEMORY

    @property
    def no_prefetch(self) -> bool:
        """No tensor-map prefetch."""
        return self.stagger_units > 0

    @property
    def wide_wait(self) -> bool:
        """Only the epilogue waits for the cluster."""
        return self.stagger_units > 0 and self.sharing is Sharing.PAIR


@dataclass(frozen=True)
class NormForm:
    """What prepares rows in a launch of its own: adds partials up and normalises the sum, or only adds them up.

    `early_trigger` releases dependents at entry, else after the stores.
    """

    rows_per_cta: int
    early_trigger: bool
    normed: bool = True


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
    normed
        Of a tail: its rows are normalised, inside the launch or in one before it.
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
    normed: bool = True


Form = DecodeForm | NormForm | GemmForm


@dataclass(frozen=True)
class LaunchShape:
    """What a form fixes of a launch, as the registry's record has it.

    Parameters
    ----------
    threads, cluster_ctas
        Threads of a CTA, CTAs of a cluster.
    cooperative
        CTAs of the whole grid wait for each other.
    dynamic_smem_bytes
        Dynamic shared memory of a CTA.
    programmatic
        Always launched so that it may start while the launch before it runs.
    overlap
        Launched so where a caller asks for it.
    """

    threads: int
    cluster_ctas: int
    cooperative: bool
    dynamic_smem_bytes: int
    programmatic: bool
    overlap: bool


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a plan: the program by its logical key, the grid in CTAs, run-time parameters by name.

    Parameters
    ----------
    overlap
        Parameters that have another value where a caller has it overlap the launch before it; None: it may not.
    """

    key: str
    grid_ctas: tuple[int, int, int]
    parameters: tuple[tuple[str, int], ...]
    form: Form
    overlap: tuple[tuple[str, int], ...] | None = ()


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

    @property
    def route(self) -> str:
        """`decode` or `prefill`: which programs serve it."""
        return "decode" if any(isinstance(launch.form, DecodeForm) for launch in self.launches) else "prefill"

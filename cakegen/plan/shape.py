"""What both decode stages derive from the model before any choice: tiles and K chunks of one rank.

Imports only the model, errors and the plan's records.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cakegen.errors import PlanError
from cakegen.model import ModelDims
from cakegen.plan.records import BLOCK_K
from cakegen.rules import DecodeRules

BLOCK_M = 128
"""Weight rows of a tile, everywhere but in a front's narrow ones: two of wgmma's MMAs, or one of tcgen05's."""


@dataclass(frozen=True)
class DecodeShape:
    """Tiles and K chunks of one rank for one request; fields as in `DecodeForm`, and whether rows are normalised."""

    stage: str
    tp: int
    tokens: int
    partials: int
    n_pad: int
    block_m: int
    gated: bool
    normed: bool
    router_tiles: int
    latent_tiles: int
    shared_tiles: int
    k1_cols: int
    k2_chunks: int
    out_cols: int

    @property
    def tiles(self) -> int:
        """Weight tiles of the launch."""
        return self.router_tiles + self.latent_tiles + self.shared_tiles

    @property
    def k1_chunks(self) -> int:
        """Chunks of `k1_cols`, the last of which may be partly out of bounds."""
        return -(-self.k1_cols // BLOCK_K)

    @property
    def segments(self) -> tuple[int, ...]:
        """Chunks of each K segment that exists."""
        return tuple(chunks for chunks in (self.k1_chunks, self.k2_chunks) if chunks)


def decode_shape(
    dims: ModelDims, rules: DecodeRules, *, stage: str, tp: int, tokens: int, partials: int
) -> DecodeShape:
    """Tiles and chunks of a decode launch of at most `rules.max_tokens` tokens.

    Raises
    ------
    PlanError
        A dimension does not divide into whole tiles or chunks. Only the latent slice of the tail may end in a partial
        chunk: its tensor map ends there and fills with zeros.
    """
    where = f"{stage}: TP {tp}"
    i_local = exact(dims.shared_intermediate, tp, where, "shared_intermediate", "TP degree")
    n_pad = next(n for n in rules.n_pads if n >= tokens)
    if stage == "front":
        gated = dims.rows_stage.gated
        rows, what = (BLOCK_M // 2, "gate rows of a tile") if gated else (BLOCK_M, "rows of a tile")
        exact(dims.hidden, BLOCK_K, where, "hidden", "columns of a K chunk")
        return DecodeShape(
            stage, tp, tokens, 1, n_pad, BLOCK_M, gated, False,
            router_tiles=exact(dims.experts, BLOCK_M, where, "experts", "rows of a tile"),
            latent_tiles=exact(dims.latent, BLOCK_M, where, "latent", "rows of a tile"),
            shared_tiles=exact(i_local, rows, where, "shared_intermediate / TP", what),
            k1_cols=dims.hidden,
            k2_chunks=0,
            out_cols=dims.latent,
        )  # fmt: skip
    return DecodeShape(
        stage, tp, tokens, partials, n_pad, BLOCK_M, False, dims.normed,
        router_tiles=0,
        latent_tiles=exact(dims.hidden, BLOCK_M, where, "hidden", "rows of a tile"),
        shared_tiles=0,
        k1_cols=latent_columns(dims, tp, where),
        k2_chunks=exact(i_local, BLOCK_K, where, "shared_intermediate / TP", "columns of a K chunk"),
        out_cols=dims.hidden,
    )  # fmt: skip


def narrow_front(shape: DecodeShape, dims: ModelDims, block_m: int) -> DecodeShape:
    """A front in tiles of fewer weight rows: more tiles, the last two of a class may overlap."""
    return replace(
        shape,
        block_m=block_m,
        router_tiles=-(-dims.experts // block_m),
        latent_tiles=-(-dims.latent // block_m),
        shared_tiles=-(-dims.i_local(shape.tp) // (block_m // 2 if shape.gated else block_m)),
    )


def shared_columns(dims: ModelDims, tile_columns: int) -> int:
    """Columns of shared_act in a tile: half of it where the tile is half gate columns, half matching up columns."""
    return tile_columns // 2 if dims.rows_stage.gated else tile_columns


def latent_columns(dims: ModelDims, tp: int, where: str) -> int:
    """Latent columns that one rank multiplies.

    Raises
    ------
    PlanError
        Ranks share them, and TP does not divide them.
    """
    return exact(dims.latent, tp, where, "latent", "TP degree") if dims.shares_latent else dims.latent


def exact(value: int, divisor: int, where: str, name: str, what: str) -> int:
    """`value / divisor`, which must be whole.

    Raises
    ------
    PlanError
        It is not, or the value is too small for one.
    """
    if value < divisor or value % divisor:
        whole = value // divisor * divisor
        raise PlanError(
            f"{where}: {name} = {value} does not divide by {divisor} ({what}): "
            f"{value} - {whole} = {value - whole} left over. Choose a multiple of {divisor}."
        )
    return value // divisor

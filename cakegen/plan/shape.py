"""What both decode stages derive from the model before any choice: tiles and K chunks of one rank.

Imports only the model, errors and the plan's records.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cakegen.errors import PlanError
from cakegen.model import Model


@dataclass(frozen=True)
class DecodeShape:
    """Tiles and K chunks of one rank for one request; fields as in `DecodeForm`."""

    stage: str
    tp: int
    tokens: int
    partials: int
    n_pad: int
    block_m: int
    router_tiles: int
    latent_tiles: int
    shared_tiles: int
    k1_chunks: int
    k2_chunks: int
    k1_cols: int
    k1_ragged_cols: int
    out_cols: int
    token_parts: int = 1

    @property
    def tiles(self) -> int:
        """Weight tiles of the launch."""
        return self.router_tiles + self.latent_tiles + self.shared_tiles

    @property
    def segments(self) -> tuple[int, ...]:
        """Chunks of each K segment that exists."""
        return tuple(chunks for chunks in (self.k1_chunks, self.k2_chunks) if chunks)


def decode_shape(model: Model, stage: str, tp: int, tokens: int, partials: int) -> DecodeShape:
    """Tiles and chunks of a decode launch.

    Raises
    ------
    PlanError
        A dimension does not divide into whole tiles or chunks. Only the latent slice of the tail may end in a partial
        chunk: its tensor map ends there and fills with zeros.
    """
    rules, dims = model.decode, model.dims
    where = f"{stage}: TP {tp}"
    i_local = exact(dims.shared_intermediate, tp, where, "shared_intermediate", "TP degree")
    n_pad = next((n for n in rules.n_pads if n >= tokens), None)
    if n_pad is None:
        raise PlanError(f"{where}: no n_pad of {rules.n_pads} holds T = {tokens}; add a wider one")
    if stage == "front":
        half = rules.block_m // 2
        return DecodeShape(
            stage, tp, tokens, 1, n_pad, rules.block_m,
            router_tiles=exact(dims.experts, rules.block_m, where, "experts", "rows of a tile"),
            latent_tiles=exact(dims.latent, rules.block_m, where, "latent", "rows of a tile"),
            shared_tiles=exact(i_local, half, where, "shared_intermediate / TP", "gate rows of a tile"),
            k1_chunks=exact(dims.hidden, rules.block_k, where, "hidden", "columns of a K chunk"),
            k2_chunks=0,
            k1_cols=dims.hidden,
            k1_ragged_cols=0,
            out_cols=dims.latent,
        )  # fmt: skip
    latent_slice = exact(dims.latent, tp, where, "latent", "TP degree")
    return DecodeShape(
        stage, tp, tokens, partials, n_pad, rules.block_m,
        router_tiles=0,
        latent_tiles=exact(dims.hidden, rules.block_m, where, "hidden", "rows of a tile"),
        shared_tiles=0,
        k1_chunks=-(-latent_slice // rules.block_k),
        k2_chunks=exact(i_local, rules.block_k, where, "shared_intermediate / TP", "columns of a K chunk"),
        k1_cols=latent_slice,
        k1_ragged_cols=latent_slice % rules.block_k,
        out_cols=dims.hidden,
    )  # fmt: skip


def narrow_front(shape: DecodeShape, model: Model) -> DecodeShape:
    """A front in tiles of `narrow_block_m` weight rows: more tiles, the last two of a class may overlap."""
    rows, dims = model.decode.narrow_block_m, model.dims
    return replace(
        shape,
        block_m=rows,
        router_tiles=-(-dims.experts // rows),
        latent_tiles=-(-dims.latent // rows),
        shared_tiles=-(-dims.i_local(shape.tp) // (rows // 2)),
    )


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

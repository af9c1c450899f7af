"""Weights in the order in which programs read them. Imports torch, errors and tensor_map."""

from __future__ import annotations

import torch

from cakegen.errors import OperandError
from cakegen.runtime.tensor_map import CHUNK_COLS


def packed_shape(rows: int, cols: int) -> tuple[int, int, int]:
    """Shape of a packed weight `[rows, cols]`: chunks of 64 columns, each with all rows."""
    return (cols // CHUNK_COLS, rows, CHUNK_COLS)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """A weight as the programs read it fastest: `[rows, cols]` bf16 -> `[cols / 64, rows, 64]`, contiguous, a copy.

    A tile's K chunk of 128 rows is then 16 KiB in a row, not 128 pieces of 128 bytes. Every function of this package
    takes a packed weight in place of the checkpoint's tensor, and gives the same bits, so the original need not be
    kept; `unpack_weight` restores it.

    Raises
    ------
    OperandError
        The weight is no matrix of whole chunks.
    """
    if weight.dim() != 2 or weight.shape[1] % CHUNK_COLS:
        raise OperandError(
            f"pack_weight: needs a matrix of whole chunks of {CHUNK_COLS} columns; got {list(weight.shape)}. Such a "
            "weight serves unpacked."
        )
    rows, cols = weight.shape
    return weight.reshape(rows, cols // CHUNK_COLS, CHUNK_COLS).transpose(0, 1).contiguous()


def unpack_weight(packed: torch.Tensor) -> torch.Tensor:
    """The matrix `[rows, cols]` of a packed weight; a matrix is returned as it is."""
    if packed.dim() == 2:
        return packed
    chunks, rows, cols = packed.shape
    return packed.transpose(0, 1).reshape(rows, chunks * cols)

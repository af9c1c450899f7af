"""The tiles of a Hopper prefill GEMM, counted one by one, for tests of their number."""

from __future__ import annotations

BLOCK_M = 128


def count_pair_tiles(tokens: int, n_tiles: int) -> int:
    """A pair takes two row tiles and a column of tiles; of a last row tile without a second, two columns."""
    rows, count = list(range(0, tokens, BLOCK_M)), 0
    while len(rows) > 1:
        del rows[:2]
        count += n_tiles
    columns = list(range(n_tiles)) if rows else []
    while columns:
        del columns[:2]
        count += 1
    return count

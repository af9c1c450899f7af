"""Leaf module: which rows are measured, and the work of each. Imports errors and model; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from cakegen.errors import BenchError
from cakegen.model import ModelDims

BF16_BYTES = 2
FP32_BYTES = 4
STAGES = ("front", "tail")
TABLES = ("main", "full", "decode", "prefill")
MAIN_TPS = (1, 8)
FULL_TPS = (1, 2, 4, 8, 16)
MAIN_TOKENS = tuple(2**power for power in range(15))
"""1, 2, 4 … 16384: with two stages and two TP degrees, the 60 rows that are compared with others."""
RAGGED_TOKENS = (24, 48, 96, 130, 192, 384, 768, 1536, 3000)
"""Between the powers of two, so that no cliff hides there."""
LONG_TOKENS = 4096
"""From here on a call takes a millisecond or so, and fewer calls are timed."""
DECODE_TOKENS = 128
"""Rows of up to so many tokens are decode rows, whatever serves them, so that tables of all devices compare."""
GROUP_ENDS = (16, 128, 1024)
"""Largest T of the first groups of rows."""


@dataclass(frozen=True)
class Row:
    """One request that is measured: stage, tensor-parallel degree, tokens."""

    stage: str
    tp: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.stage} TP {self.tp} T {self.tokens}"


@dataclass(frozen=True)
class Work:
    """What a row has to do at least: bytes of weights, bytes of tokens (read and written once), products and sums."""

    weight_bytes: int
    token_bytes: int
    flops: int

    @property
    def bytes(self) -> int:
        """All bytes that must cross the memory bus once."""
        return self.weight_bytes + self.token_bytes


def select_rows(
    table: str,
    decode_max_tokens: int,
    *,
    stages: Sequence[str] = (),
    tps: Sequence[int] = (),
    tokens: Sequence[int] = (),
    served: Sequence[int] = FULL_TPS,
) -> tuple[Row, ...]:
    """The rows of a named table, by stage, TP and rising T.

    Parameters
    ----------
    table
        `main` (60 rows), `full` (ragged T and more TP degrees too), or main's rows up to (`decode`) or above
        (`prefill`) the decode limit.
    decode_max_tokens
        The model's decode limit.
    stages, tps, tokens
        Each, where given, stands for the table's own list; `tokens` is then taken as it is.
    served
        TP degrees that the export has: the table's own list loses the others.

    Raises
    ------
    BenchError
        An unknown table or stage, or nothing is left.
    """
    if table not in TABLES:
        raise BenchError(f"rows {table!r} are not known; known: {', '.join(TABLES)}")
    unknown = sorted(set(stages) - set(STAGES))
    if unknown:
        raise BenchError(f"stage {unknown[0]!r} is not known; known: {', '.join(STAGES)}")
    counts = sorted(set(tokens)) if tokens else _tokens_of(table, decode_max_tokens)
    own = FULL_TPS if table == "full" else MAIN_TPS
    degrees = sorted(set(tps)) if tps else [tp for tp in own if tp in served]
    if not degrees:
        raise BenchError(f"rows {table!r} are of TP {list(own)}; the export has TP {list(served)}. Name some with --tp")
    if not counts or counts[0] < 1 or degrees[0] < 1:
        raise BenchError(f"rows {table!r}: T and TP must be at least 1; got T {list(counts)}, TP {list(degrees)}")
    return tuple(
        Row(stage, tp, count) for stage in STAGES if stage in (stages or STAGES) for tp in degrees for count in counts
    )


def _tokens_of(table: str, decode_max_tokens: int) -> list[int]:
    counts = sorted({*MAIN_TOKENS, *RAGGED_TOKENS} if table == "full" else MAIN_TOKENS)
    if table == "decode":
        return [count for count in counts if count <= decode_max_tokens]
    if table == "prefill":
        return [count for count in counts if count > decode_max_tokens]
    return counts


def grouped_rows(rows: Iterable[Row]) -> Iterator[tuple[Row, ...]]:
    """Neighbours that share operands and elementwise kernels: one stage and TP degree, T of one magnitude.

    The largest T comes first in a group: a compiler that fits a kernel to the first shape it sees then fits it to that.
    """
    for _, group in groupby(rows, key=lambda row: (row.stage, row.tp, sum(row.tokens > end for end in GROUP_ENDS))):
        yield tuple(sorted(group, key=lambda row: -row.tokens))


def work_of(dims: ModelDims, row: Row, partials: int = 1) -> Work:
    """The least work of a row: every operand is read once and every output written once.

    The tail reads only its rank's columns of `up_weight`, and writes `y` once.
    """
    i_local, hidden, tokens = dims.i_local(row.tp), dims.hidden, row.tokens
    if row.stage == "front":
        weights = (dims.experts + dims.latent + (1 + dims.rows_stage.gated) * i_local) * hidden
        in_bytes = hidden * BF16_BYTES
        out_bytes = dims.experts * FP32_BYTES + (dims.latent + i_local) * BF16_BYTES
        return Work(weights * BF16_BYTES, tokens * (in_bytes + out_bytes), 2 * tokens * weights)
    weights = (dims.latent_slice(row.tp) + i_local) * hidden
    written = dims.latent if dims.sum_stage.preparation.written else 0
    token_elems = partials * dims.latent + i_local + written + hidden
    norm = dims.latent if dims.normed else 0
    return Work((weights + norm) * BF16_BYTES, tokens * token_elems * BF16_BYTES, 2 * tokens * weights)

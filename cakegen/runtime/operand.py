"""Matrices in memory, by address and strides, and whether two share a byte. Imports nothing of cakegen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operand:
    """A row-major matrix `[rows, cols]` in memory, or `partials` of them; pitches in elements.

    Parameters
    ----------
    pitch
        Elements from one row to the next; `cols` where there is at most one row.
    column_limit
        Columns that a `columns` view may read: up to the end of this rank's slice.
    chunk_stride
        Elements from one 64-column chunk of a packed weight to the next, whose rows lie 64 elements apart (0: the
        matrix is row-major).
    """

    name: str
    address: int
    rows: int
    cols: int
    pitch: int
    element_bytes: int
    column_limit: int
    partials: int = 1
    partial_stride: int = 0
    chunk_stride: int = 0

    @property
    def matrix_elems(self) -> int:
        """Elements of one matrix, from the first to behind the last."""
        return self.rows * self.cols if self.chunk_stride else (self.rows - 1) * self.pitch + self.cols

    @property
    def span_elems(self) -> int:
        """Elements of all partials, from the first to behind the last."""
        return (self.partials - 1) * self.partial_stride + self.matrix_elems

    @property
    def end(self) -> int:
        """Address behind the last byte."""
        return self.address + self.span_elems * self.element_bytes


def overlap(first: Operand, second: Operand) -> bool:
    """Whether two operands share a byte; column ranges of one pitched buffer count as apart.

    A single row lies in any buffer's columns. So do partials, where their stride is no multiple of the pitch
    (token-major in memory).
    """
    if not first.rows or not second.rows or first.end <= second.address or second.end <= first.address:
        return False
    rows = _column_ranges(first), _column_ranges(second)
    pitches = {pitch for pitch, _ in rows if pitch}
    if len(pitches) != 1:
        return True
    pitch = pitches.pop()
    widths = first.cols * first.element_bytes, second.cols * second.element_bytes
    offsets = [(there - here) % pitch for here in rows[0][1] for there in rows[1][1]]
    return not all(widths[0] <= offset and offset + widths[1] <= pitch for offset in offsets)


def _column_ranges(operand: Operand) -> tuple[int, list[int]]:
    """Bytes from a row to the next (0: there is one), and where the columns of each partial begin."""
    size = operand.element_bytes
    pitch, stride = operand.pitch * size, operand.partial_stride * size
    if operand.rows == 1:
        return stride, [operand.address]
    return pitch, [operand.address + number * stride for number in range(operand.partials)]

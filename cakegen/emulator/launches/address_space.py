"""Where a program sees arrays of this machine's memory: each far from all others.

Arrays that a heap placed side by side would hide an access past the end of one of them: it would be an access to the
next. And what a report says would depend on the heap.
"""

from __future__ import annotations

from collections.abc import Iterable

# Farther than any array is long; the last region stays below the windows of the generic address space.
_REGION_BYTES = 1 << 40
# What torch and numpy promise of an allocation; a program sees addresses with the same remainder.
_ALIGN_BYTES = 64


class AddressSpace:
    """Addresses of a device for spans of this machine's memory, the same in every run.

    Spans that overlap, such as two column ranges of one matrix, keep their distance; all others get a region each, in
    the order of the first that begins it.

    Parameters
    ----------
    spans
        (address here, bytes) of every array.
    """

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        ends: dict[int, int] = {}
        for start, num_bytes in spans:
            ends[start] = max(ends.get(start, 0), start + num_bytes)
        first, end = 0, 0
        region_of: dict[int, int] = {}
        for start in sorted(ends):
            if start >= end:
                first = start
            region_of[start] = first
            end = max(end, ends[start])
        regions: dict[int, int] = {}
        for start in ends:
            first = region_of[start]
            regions.setdefault(first, (len(regions) + 1) * _REGION_BYTES + first % _ALIGN_BYTES)
        self._seen = {start: regions[region_of[start]] + start - region_of[start] for start in ends}

    def __getitem__(self, address: int) -> int:
        """What a program is given for the start of a span; 0, no array, stays 0."""
        return self._seen[address] if address else 0

"""A `Clock` on a CUDA device: graphs, events and flushes through torch. Imports torch and errors.

A time is what two events on the stream are apart, with the launch of one graph between them. It holds the launch, which
`floor_us` of a row tells: a kernel of the same shape that reads nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cakegen.bench.timing import Call
from cakegen.errors import BenchError

FLUSH_L2_MULTIPLE = 4
"""More than twice the L2 is needed. Four times takes about 55 us on an H200, longer than the host needs for a flush,
two events and a graph, so that the host stays ahead of the device."""

SPIN_CYCLES_PER_US = 2000.0
"""Cycles of a microsecond at 2 GHz, more than the SM clock of any supported part: a hold never ends early."""

_WARM_CALLS = 2
_cuda: Any = torch.cuda  # partly annotated


class CapturedCall:
    """A CUDA graph of one call; keeps what it launches alive."""

    def __init__(self, graph: torch.cuda.CUDAGraph, call: Call) -> None:
        self._graph = graph
        self._call = call

    def __call__(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


class CudaClock:
    """The first use of a device for measuring.

    Parameters
    ----------
    device
        A CUDA device.

    Raises
    ------
    BenchError
        No CUDA device is there.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" or not torch.cuda.is_available():
            raise BenchError(f"timing needs a CUDA device; got {device}, and torch finds {torch.cuda.device_count()}")
        self.device = device
        self.stream = _cuda.Stream(device)
        self.l2_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)
        self._events: list[tuple[Any, Any]] = []
        with self.active():
            elems = FLUSH_L2_MULTIPLE * self.l2_bytes // 4
            self._lines = torch.rand(elems, device=device)
            self._sum = torch.zeros((), device=device)
            # reads every line; writes the sum and the kilobytes of the blocks' partial sums
            self._flush = self.capture(lambda: torch.sum(self._lines, 0, out=self._sum))
            self._dirty = self.capture(lambda: self._lines.fill_(1.0))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make the clock's stream current: everything that is measured is made and run on it."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def capture(self, call: Call) -> Callable[[], None]:
        """Run a call until it is warm, then capture it.

        `torch.cuda.graph` would empty the allocator's cache and collect garbage each time, which takes longer than a
        row.

        Raises
        ------
        Exception
            Whatever the call raised.
        """
        for _ in range(_WARM_CALLS):
            call()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            call()
        except BaseException:
            # ends the capture, so that the stream is usable; the first error is the one to report
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        return CapturedCall(graph, call)

    def hold(self, microseconds: float) -> None:
        """Spin on the device."""
        _cuda._sleep(int(microseconds * SPIN_CYCLES_PER_US))

    def flush(self) -> None:
        """Read a buffer of four times the L2."""
        self._flush()

    def flush_dirty(self) -> None:
        """Write the same buffer."""
        self._dirty()

    def timed(self, call: Call) -> None:
        """Enqueue event, call, event."""
        start, stop = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
        start.record(self.stream)
        call()
        stop.record(self.stream)
        self._events.append((start, stop))

    def settle(self) -> list[float]:
        """Microseconds between the events of each timed call."""
        self.stream.synchronize()
        events, self._events = self._events, []
        return [start.elapsed_time(stop) * 1e3 for start, stop in events]

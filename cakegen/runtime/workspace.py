"""Device memory for the fp32 partials of split prefill GEMMs, shared by the runners of one stream.

Imports torch, errors, driver and streams. Control words are not here: they belong to a runner.
"""

from __future__ import annotations

import threading

import torch

from cakegen.errors import LaunchError
from cakegen.runtime import driver
from cakegen.runtime.streams import KnownStream, known_stream

FP32_BYTES = 4


class Workspace:
    """fp32 partials for all runners of one stream at a time.

    A split tile's segments meet here within one launch and leave nothing behind, so runners that follow each other in
    a stream share the memory; runners on two streams at once would overwrite each other, and are refused. It grows
    when a runner is prepared, never when one is called. Make one for each stream that prefills.

    Parameters
    ----------
    device
        A CUDA device.
    """

    _grows_in_capture = False

    def __init__(self, device: torch.device | str | int) -> None:
        chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if chosen.type != "cuda":
            raise LaunchError(f"Workspace: needs a CUDA device; got {chosen}")
        self.device = torch.device("cuda", torch.cuda.current_device() if chosen.index is None else chosen.index)
        self.lock = threading.RLock()
        """Held from `enter` to the launch behind it, so that no other thread is let in between."""
        self._partials: torch.Tensor | None = None
        # the stream that torch's allocator knows of, and the one of the last launch
        self._home: int | None = None
        self._stream: KnownStream | None = None
        # memory that is still written to, by a graph or by a launch elsewhere, though no runner may hold it
        self._kept: list[torch.Tensor] = []

    @property
    def bytes(self) -> int:
        """Bytes that are allocated now."""
        held = {id(tensor): tensor for tensor in (*self._kept, self._partials) if tensor is not None}
        return sum(tensor.numel() for tensor in held.values()) * FP32_BYTES

    def reserve(self, elems: int) -> torch.Tensor:
        """At least `elems` fp32 elements; a runner keeps what it was bound to, also after the workspace has grown.

        Raises
        ------
        LaunchError
            It would have to grow while the current stream is being captured.
        """
        with self.lock:
            if self._partials is None or self._partials.numel() < elems:
                if not self._grows_in_capture and driver.is_capturing(self.device.index):
                    there = 0 if self._partials is None else self._partials.numel() * FP32_BYTES
                    raise LaunchError(
                        f"workspace of {self.device}: {elems * FP32_BYTES} bytes of fp32 partials are needed, "
                        f"{there} are there, and the current stream is being captured, where nothing can be "
                        "allocated. Prepare the runner before the capture, on any stream, and only call it there; or "
                        f"pass a Workspace on which reserve({elems}) was called before."
                    )
                if self._partials is not None and self._stream is not None and self._stream.handle != self._home:
                    # its last launch may be in flight where the allocator does not look before it lends memory again
                    self.keep(self._partials)
                self._home = driver.current_stream(self.device.index)
                self._partials = torch.empty(elems, dtype=torch.float32, device=self.device)
            return self._partials

    def keep(self, partials: torch.Tensor) -> None:
        """Keep memory that `reserve` gave as long as the workspace lives: a graph writes there at each replay."""
        with self.lock:
            if all(each is not partials for each in self._kept):
                self._kept.append(partials)

    def enter(self, stream: int, context: int) -> None:
        """Note a launch on a stream; asks the driver only where the stream is another than last time.

        Who launches keeps `lock` from here until the launch is enqueued.

        In a capture nothing is checked: which stream replays the graph is the caller's choice, and so is that no other
        uses this workspace meanwhile.

        Parameters
        ----------
        stream, context
            Handles of torch's current stream and of the device's context.

        Raises
        ------
        LaunchError
            Work that uses this workspace is unfinished on another stream, or failed there.
        """
        with self.lock:
            last = self._stream
            if last is not None and stream == last.handle:
                return
            if driver.is_capturing(self.device.index):
                return
            if last is not None:
                with driver.using_context(context):
                    idle = last.is_idle()
                if not idle:
                    raise LaunchError(
                        f"workspace of {self.device}: stream {last.handle:#x} still uses its fp32 partials, and "
                        f"stream {stream:#x} would overwrite them. Make a Workspace for each stream, or synchronise "
                        "between them."
                    )
            self._stream = known_stream(self.device.index, stream, context)


class CallWorkspace(Workspace):
    """fp32 partials of one call: a temporary of torch's allocator, inside a capture from the graph's own pool."""

    _grows_in_capture = True

    @property
    def address(self) -> int:
        """Device address of the partials; 0 where the call keeps none."""
        return 0 if self._partials is None else self._partials.data_ptr()


_shared_lock = threading.Lock()
_shared: dict[tuple[int, int], Workspace] = {}


def stream_workspace(ordinal: int) -> Workspace:
    """The workspace of torch's current stream of a device: what runners get that are given none."""
    key = (ordinal, driver.current_stream(ordinal))
    with _shared_lock:
        if key not in _shared:
            _shared[key] = Workspace(ordinal)
        return _shared[key]

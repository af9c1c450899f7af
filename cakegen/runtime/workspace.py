"""Device memory for the fp32 partials of split prefill GEMMs, shared by the runners of one stream.

Imports torch, errors, driver, guard and streams. Control words are not here: they belong to a runner.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import weakref
from dataclasses import dataclass

import torch

from cakegen.errors import LaunchError
from cakegen.runtime import driver
from cakegen.runtime.guard import GuardedLock
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
                self._partials = self._allocate(elems)
            return self._partials

    def _allocate(self, elems: int) -> torch.Tensor:
        return torch.empty(elems, dtype=torch.float32, device=self.device)

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


MOST_FOREIGN = 4
"""Workspaces of other libraries' streams that are kept for the next runner there, and freed partials for the next."""


@dataclass(eq=False)
class _LastUse:
    """What a workspace that is gone leaves behind: its partials, and the stream of their last launch."""

    ordinal: int
    partials: torch.Tensor | None = None
    stream: KnownStream | None = None
    context: int = 0

    def is_over(self) -> bool:
        """Whether that launch is complete; one that was lost with its context never is."""
        if self.stream is None:
            return True
        with contextlib.suppress(LaunchError), driver.using_context(self.context):
            return self.stream.is_idle()
        return False


class ForeignWorkspace(Workspace):
    """The workspace of a stream that another library may destroy: its memory serves other streams after it.

    torch's allocator keeps what was allocated on a stream for that very stream, which here never comes again. So
    partials go from one such workspace to the next, once their last launch is complete.
    """

    def __init__(self, device: int) -> None:
        super().__init__(device)
        self._last = _LastUse(device)
        # a deque: a finaliser may run inside any other code of this thread, so it takes no lock
        weakref.finalize(self, _freed.append, self._last).atexit = False

    def reserve(self, elems: int) -> torch.Tensor:
        """As `Workspace.reserve`."""
        self._last.partials = super().reserve(elems)
        return self._last.partials

    def _allocate(self, elems: int) -> torch.Tensor:
        found = _take_freed(self._last.ordinal, elems)
        return super()._allocate(elems) if found is None else found

    def keep(self, partials: torch.Tensor) -> None:
        """As `Workspace.keep`: for as long as the process lives, since nobody else holds this workspace."""
        super().keep(partials)
        _captured.add(self)

    def enter(self, stream: int, context: int) -> None:
        """As `Workspace.enter`."""
        super().enter(stream, context)
        self._last.stream, self._last.context = self._stream, context


_shared_lock = GuardedLock("looking up a workspace")
_shared: dict[tuple[int, int], Workspace] = {}
# of foreign streams: the last ones used, all that some runner holds, and those whose memory a graph holds
_recent: collections.OrderedDict[tuple[int, int], ForeignWorkspace] = collections.OrderedDict()
_foreign: weakref.WeakValueDictionary[tuple[int, int], ForeignWorkspace] = weakref.WeakValueDictionary()
_captured: set[ForeignWorkspace] = set()
_freed: collections.deque[_LastUse] = collections.deque()


def stream_workspace(ordinal: int) -> Workspace:
    """The workspace of torch's current stream of a device: what runners get that are given none."""
    key = (ordinal, driver.current_stream(ordinal))
    with _shared_lock:
        if driver.stream_is_foreign(ordinal):
            return _foreign_workspace(key)
        if key not in _shared:
            _shared[key] = Workspace(ordinal)
        return _shared[key]


def free_workspaces() -> None:
    """Give the memory of all shared workspaces back to torch; no launch that uses one is in flight or follows."""
    with _shared_lock:
        for table in (_shared, _recent, _captured, _freed):
            table.clear()


def _foreign_workspace(key: tuple[int, int]) -> ForeignWorkspace:
    """Of a stream that may be gone tomorrow: kept while a runner holds it, or while few came after it."""
    found = _recent.pop(key, None) or _foreign.get(key)
    if found is None:
        found = _foreign[key] = ForeignWorkspace(key[0])
    _recent[key] = found
    while len(_recent) > MOST_FOREIGN:
        _recent.popitem(last=False)
    return found


def _take_freed(ordinal: int, elems: int) -> torch.Tensor | None:
    """The smallest freed partials of a device that are large enough; of the rest the largest `MOST_FOREIGN` stay."""
    left = [_freed.popleft() for _ in range(len(_freed))]
    over = [each for each in left if each.partials is not None and each.is_over()]
    busy = [each for each in left if each.partials is not None and each not in over]
    over.sort(key=_elems)
    found = next((each for each in over if each.ordinal == ordinal and _elems(each) >= elems), None)
    rest = [each for each in over if each is not found]
    _freed.extend((*busy, *rest[-MOST_FOREIGN:]))
    return None if found is None else found.partials


def _elems(last: _LastUse) -> int:
    return 0 if last.partials is None else last.partials.numel()


def _forget_all() -> None:
    """In a forked child: the parent's memory is not this process's, and its finalisers find nothing to free."""
    for table in (_shared, _recent, _captured, _freed):
        table.clear()


os.register_at_fork(after_in_child=_forget_all)

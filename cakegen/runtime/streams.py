"""Completion and order of streams, whoever captures a graph meanwhile. Imports errors, driver and guard.

No driver call is defined on the handle of a stream that was destroyed, and a driver may crash on one. So a stream is
asked by its handle only if it is torch's own, which lives as long as the process; any other may be destroyed at any
time, and is asked by an event that was recorded there behind the last call.

Nothing here waits for the whole context: that ends every capture in it, whatever the mode of the thread that waits
(CUDA C++ Programming Guide, CUDA graphs, prohibited operations).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from cakegen.errors import LaunchError
from cakegen.runtime import driver
from cakegen.runtime.guard import GuardedLock


class KnownStream:
    """A stream on which something was called: one of torch's own.

    `known_stream` makes one object for each stream, which all that remember the stream share.

    Attributes
    ----------
    handle
        The CUstream.
    waits, marks
        What a call on the stream runs before and behind its launches, each a function that returns a CUresult: nothing
        here.
    """

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.waits: tuple[Callable[[], int], ...] = ()
        self.marks: tuple[Callable[[], int], ...] = ()

    def is_idle(self) -> bool:
        """Whether all work of the stream is complete; for the stream's context, which is current.

        A stream that is being captured counts as busy; to query it would end its capture.

        Raises
        ------
        LaunchError
            The driver has no answer, since the context is lost.
        """
        module = driver.bindings()
        result, captured = _ask_capture(self.handle)
        if captured or not _is_complete("cuStreamIsCapturing", self.handle, result):
            return False
        # in the mode that threads start with, another thread's capture may forbid the question, or be ended by it
        with driver.relaxed_capture():
            (result,) = module.cuStreamQuery(self.handle)
        return _is_complete("cuStreamQuery", self.handle, result)

    def finish(self) -> bool:
        """Wait for all work of the stream; false where that can't be waited for: it is captured, or failed.

        For sections of `driver.relaxed_capture`.
        """
        module = driver.bindings()
        result, captured = _ask_capture(self.handle)
        if result != module.CUresult.CUDA_SUCCESS or captured:
            return False
        (result,) = module.cuStreamSynchronize(self.handle)
        return bool(result == module.CUresult.CUDA_SUCCESS)

    def order_before(self, behind: int) -> None:
        """Make another stream wait, on the device, for all that this one holds now; the host waits for nothing.

        If this one is being captured it is left out: an event of it would draw the other into the capture.

        Parameters
        ----------
        behind
            Handle of a stream of the same context, which is current; it is not being captured.

        Raises
        ------
        LaunchError
            The driver refuses: among others where this is the default stream, and another that waits for it is
            captured.
        """
        module = driver.bindings()
        result, captured = _ask_capture(self.handle)
        if _refused_for_capture(result):
            raise LaunchError(
                f"{_failure('cuStreamIsCapturing', self.handle, result)}. A stream that waits for the default stream "
                "is being captured. Call this runner on one stream, or capture on streams that do not (torch's own)."
            )
        if result != module.CUresult.CUDA_SUCCESS:
            raise _failure("cuStreamIsCapturing", self.handle, result)
        if captured:
            return
        event = _create_event()
        try:
            driver.call("cuEventRecord", event, self.handle)
            driver.call("cuStreamWaitEvent", behind, event, 0)
        finally:
            # the driver keeps it until the stream has passed it
            driver.call("cuEventDestroy", event)


class ForeignStream(KnownStream):
    """A stream of another library (torch.cuda.ExternalStream), which may be destroyed at any time.

    Only its wait and its mark name the handle, in a call on that very stream. All else asks the event, which knows the
    calls, and not what else is enqueued behind them.

    Notes
    -----
    A stream may get the handle of one that was destroyed while the device still has work of the first (seen on an H200,
    driver 580.159.04, 2026-11-30). The two share this object: so each call begins with a wait for the one before it,
    which costs nothing on the device where both are on one stream.
    """

    def __init__(self, handle: int, context: int) -> None:
        super().__init__(handle)
        with driver.using_context(context), driver.relaxed_capture():
            self._event = _create_event()
        weakref.finalize(self, _destroy_event, self._event, context).atexit = False
        self.waits = (_outside_captures(handle, "cuStreamWaitEvent", handle, self._event, 0),)
        self.marks = (_outside_captures(handle, "cuEventRecord", self._event, handle),)

    def is_idle(self) -> bool:
        """Whether the calls on it are complete; one that is being captured says so too: a capture is no work."""
        with driver.relaxed_capture():
            (result,) = driver.bindings().cuEventQuery(self._event)
        return _is_complete("cuEventQuery", self.handle, result)

    def finish(self) -> bool:
        """Wait for the calls on it; false where they failed. For sections of `driver.relaxed_capture`."""
        module = driver.bindings()
        (result,) = module.cuEventSynchronize(self._event)
        return bool(result == module.CUresult.CUDA_SUCCESS)

    def order_before(self, behind: int) -> None:
        """Make another stream wait, on the device, for the calls on this one; a capture here takes no part.

        Parameters
        ----------
        behind
            As in `KnownStream.order_before`.

        Raises
        ------
        LaunchError
            The driver refuses.
        """
        driver.call("cuStreamWaitEvent", behind, self._event, 0, what=f"work of stream {self.handle:#x}")


_known: weakref.WeakValueDictionary[tuple[int, int], KnownStream] = weakref.WeakValueDictionary()
_known_lock = GuardedLock("noting a stream")


def known_stream(ordinal: int, handle: int, context: int) -> KnownStream:
    """The one object of torch's current stream of a device, as long as anything remembers the stream.

    Parameters
    ----------
    handle
        Its handle, which the caller has just read (`driver.current_stream`).
    context
        Handle of the device's context.

    Raises
    ------
    LaunchError
        The stream is another library's, and the driver has no event left.
    """
    with _known_lock:
        known = _known.get((ordinal, handle))
        if known is None:
            known = ForeignStream(handle, context) if driver.stream_is_foreign(ordinal) else KnownStream(handle)
            _known[ordinal, handle] = known
        return known


def wait_failure(stream: int, result: int) -> LaunchError:
    """The error for one of `KnownStream.waits` that returned another result than success."""
    return _failure("cuStreamWaitEvent", stream, driver.bindings().CUresult(result))


def mark_failure(stream: int, result: int) -> LaunchError:
    """The error for one of `KnownStream.marks` that returned another result than success."""
    return _failure("cuEventRecord", stream, driver.bindings().CUresult(result))


def _outside_captures(stream: int, name: str, *arguments: Any) -> Callable[[], int]:
    """One driver call on a live stream, nothing while it is captured; the function returns a CUresult.

    An event that was recorded in a capture belongs to the graph, and nothing outside of it could wait for it.
    """

    def call() -> int:
        _, captured = _ask_capture(stream)
        return 0 if captured else int(getattr(driver.bindings(), name)(*arguments)[0])

    return call


def _create_event() -> Any:
    return driver.call("cuEventCreate", driver.bindings().CUevent_flags.CU_EVENT_DISABLE_TIMING)


def _destroy_event(event: Any, context: int) -> None:
    """A finaliser: it runs in any thread, in the middle of anything, and has nobody to report to."""
    with contextlib.suppress(LaunchError), driver.using_context(context):
        driver.call("cuEventDestroy", event)


def _ask_capture(stream: int) -> tuple[Any, bool]:
    """Whether a live stream is being captured, with the result of the question, which harms no capture."""
    module = driver.bindings()
    result, status = module.cuStreamIsCapturing(stream)
    none = module.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    return result, bool(result == module.CUresult.CUDA_SUCCESS and status != none)


def _is_complete(name: str, stream: int, result: Any) -> bool:
    """The answer of a question, where "not ready", and "not while some stream is captured", are a no."""
    kinds = driver.bindings().CUresult
    if result == kinds.CUDA_ERROR_NOT_READY or _refused_for_capture(result):
        return False
    if result != kinds.CUDA_SUCCESS:
        raise _failure(name, stream, result)
    return True


def _failure(name: str, stream: int, result: Any) -> LaunchError:
    return LaunchError(f"{name} for stream {stream:#x} failed: {driver.result_text(driver.bindings(), result)}")


def _refused_for_capture(result: Any) -> bool:
    """Whether a call failed since some stream is captured; nothing else is wrong then."""
    return str(result.name).startswith("CUDA_ERROR_STREAM_CAPTURE")

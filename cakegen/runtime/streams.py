"""Completion and order of streams, whoever captures a graph meanwhile. Imports errors and driver.

A wait for the whole context ends every capture in it, whatever the mode of the thread that waits (CUDA C++ Programming
Guide, CUDA graphs, prohibited operations): so all but a stream that was destroyed is asked for by its handle.
"""

from __future__ import annotations

from typing import Any

from cakegen.errors import LaunchError
from cakegen.runtime import driver


def is_idle(stream: int) -> bool:
    """Whether all work of a stream is complete, after a wait for the current context if the stream was destroyed.

    One that is being captured counts as busy; to query it would end its capture.
    """
    module = driver.bindings()
    result, captured = _ask_capture(stream)
    if result == module.CUresult.CUDA_SUCCESS and not captured:
        # in the mode that threads start with, another thread's capture may forbid the question, or be ended by it
        with driver.relaxed_capture():
            (result,) = module.cuStreamQuery(stream)
    if captured or result == module.CUresult.CUDA_ERROR_NOT_READY or _refused_for_capture(result):
        return False
    if result != module.CUresult.CUDA_SUCCESS:
        _wait_for_destroyed(stream)
    return True


def _wait_for_destroyed(stream: int) -> None:
    """Its work may still run, and no handle names it any more: the host waits for all that the context holds."""
    driver.call("cuCtxSynchronize", what=f"stream {stream:#x}, which was destroyed behind work that others wait for")


def finish_stream(stream: int) -> bool:
    """Wait for all work of a stream; false where that can't be waited for: it is captured, was destroyed, or failed.

    For sections of `driver.relaxed_capture`.
    """
    module = driver.bindings()
    result, captured = _ask_capture(stream)
    if result != module.CUresult.CUDA_SUCCESS or captured:
        return False
    (result,) = module.cuStreamSynchronize(stream)
    return bool(result == module.CUresult.CUDA_SUCCESS)


def order_streams(ahead: int, behind: int) -> None:
    """Make a stream wait, on the device, for all that another stream holds now; the host waits for nothing.

    A stream that is being captured is left out: an event of it would draw the other into the capture. For one that was
    destroyed the host waits after all, for the whole context.

    Parameters
    ----------
    ahead, behind
        Handles of two streams of the current context; the second is not being captured.

    Raises
    ------
    LaunchError
        The driver refuses: among others where the first is the default stream, and another that waits for it is
        captured.
    """
    module = driver.bindings()
    result, captured = _ask_capture(ahead)
    if _refused_for_capture(result):
        text = driver.result_text(module, result)
        raise LaunchError(
            f"cuStreamIsCapturing for stream {ahead:#x} failed: {text}. A stream that waits for the default stream is "
            "being captured. Call this runner on one stream, or capture on streams that do not (torch's own)."
        )
    if result != module.CUresult.CUDA_SUCCESS:
        _wait_for_destroyed(ahead)
        return
    if captured:
        return
    event = driver.call("cuEventCreate", module.CUevent_flags.CU_EVENT_DISABLE_TIMING)
    try:
        driver.call("cuEventRecord", event, ahead)
        driver.call("cuStreamWaitEvent", behind, event, 0)
    finally:
        # the driver keeps it until the stream has passed it
        driver.call("cuEventDestroy", event)


def _ask_capture(stream: int) -> tuple[Any, bool]:
    """Whether a stream is being captured, with the result of the question, which harms no capture."""
    module = driver.bindings()
    result, status = module.cuStreamIsCapturing(stream)
    none = module.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    return result, bool(result == module.CUresult.CUDA_SUCCESS and status != none)


def _refused_for_capture(result: Any) -> bool:
    """Whether a call failed since some stream is captured; nothing else is wrong then."""
    return str(result.name).startswith("CUDA_ERROR_STREAM_CAPTURE")

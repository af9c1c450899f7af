"""Everything that the runtime holds on devices, given back. Imports the rest of this package but the operators."""

from __future__ import annotations

import weakref
from typing import Protocol

from cakegen.runtime import driver
from cakegen.runtime.capture import refuse_in_capture
from cakegen.runtime.control import free_controls
from cakegen.runtime.device import opened_devices
from cakegen.runtime.programs import unload_programs
from cakegen.runtime.routes import clear_routes
from cakegen.runtime.runner import end_runners
from cakegen.runtime.workspace import free_workspaces


class KeepsRunners(Protocol):
    """Something that keeps runners for later calls."""

    def forget(self) -> None:
        """Drop them."""


FORGET: weakref.WeakSet[KeepsRunners] = weakref.WeakSet()
"""Who else keeps runners: the operators enter themselves."""


def release_device_memory() -> None:
    """Give back what the runtime holds on every device, in every `LatentMoe` of the process.

    Programs are unloaded; control words, wait records and shared workspaces are freed; the operators forget their
    calls. Runners that were prepared before refuse to be called from now on. What is prepared later loads and allocates
    anew, through the compile cache. A `Workspace` of the caller's, weights and operands are the caller's.

    Destroy captured graphs first: a replay would run programs that are gone. No other thread may use the runtime
    meanwhile. The devices are waited for.

    Raises
    ------
    LaunchError
        The current stream is being captured, or the driver refuses, as it does where the context is lost.
    """
    devices = opened_devices()
    for device in devices:
        todo = "Call it outside of the capture, and destroy graphs before it."
        refuse_in_capture(device.ordinal, "release_device_memory waits for the device and unloads programs", todo)
    for device in devices:
        with driver.using_context(device.context):
            driver.call("cuCtxSynchronize", what=f"cuda:{device.ordinal}")
    end_runners("release_device_memory was called after this runner was prepared; prepare it again.")
    for keeper in list(FORGET):
        keeper.forget()
    clear_routes()
    free_workspaces()
    unload_programs()
    free_controls()

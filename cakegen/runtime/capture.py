"""What a graph capture refuses, before any driver call. Imports errors, driver, control, device and programs.

Inside a capture nothing can be compiled or loaded, and a driver call that allocates may end the capture; so a call that
would need either is refused from memory alone, with the line that makes it warm.
"""

from __future__ import annotations

from collections.abc import Callable

from cakegen.errors import LaunchError
from cakegen.plan.records import Plan
from cakegen.runtime import driver
from cakegen.runtime.control import opened_control
from cakegen.runtime.device import Device, opened_device
from cakegen.runtime.programs import ProgramTable
from cakegen.runtime.validate import Request


def refuse_in_capture(ordinal: int, what: str, todo: str) -> None:
    """Refuse, if the current stream of a device is being captured.

    Raises
    ------
    LaunchError
        It is.
    """
    if driver.is_capturing(ordinal):
        raise LaunchError(
            f"{what}, and the current stream is being captured, where nothing can be allocated or loaded. {todo}"
        )


def refuse_cold(
    request: Request, ordinal: int, plan: Callable[[Device, str, int, int, int], Plan], programs: ProgramTable
) -> None:
    """Refuse a request inside a capture, if something that it needs is not there yet.

    Parameters
    ----------
    plan
        Plans the request on an opened device; a pure function of its arguments.
    programs
        Where its programs would be.

    Raises
    ------
    LaunchError
        The current stream is being captured, and the device, its control memory or a program is cold.
    """
    if not driver.is_capturing(ordinal):
        return
    device = opened_device(ordinal)
    if device is None:
        cold = f"cuda:{ordinal} was not used before"
    elif opened_control(ordinal) is None:
        cold = f"cuda:{ordinal} has no control memory yet"
    else:
        launches = plan(device, request.stage, request.tp, request.tokens, request.partials).launches
        keys = [launch.key for launch in launches if programs.find(device, launch.key) is None]
        if not keys:
            return
        cold = f"{', '.join(keys)}: not loaded on cuda:{ordinal}"
    refuse_in_capture(ordinal, f"{request.stage}: {cold}", f"Add before the capture: {warm_up_line(request, ordinal)}")


def warm_up_line(request: Request, ordinal: int) -> str:
    """The line that makes a request warm; `moe` is the `LatentMoe` that prepares it."""
    partials = f", partials=({request.partials},)" if request.stage == "tail" else ""
    return (
        f'moe.warm_up("cuda:{ordinal}", {request.tp}, tokens=({request.tokens},){partials}, '
        f'stages=("{request.stage}",)), where moe is kimi_k3_latent_moe() or the LatentMoe that prepares'
    )

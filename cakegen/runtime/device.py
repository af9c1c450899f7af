"""What the driver says of a device, read once a process. Imports arch, errors, model and driver."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from cakegen.arch import Architecture, architecture_of
from cakegen.errors import LaunchError, PlanError
from cakegen.model import DeviceFacts
from cakegen.runtime import driver

_lock = threading.Lock()
_opened: dict[int, Device] = {}


@dataclass(eq=False)
class Device:
    """An opened device: its facts and its primary context (which torch uses too), retained for the process's life.

    Parameters
    ----------
    ordinal
        Index as torch and the driver count visible devices.
    sm_count
        Multiprocessors that the driver reports.
    context
        Handle of the primary context.
    resident_pairs
        Two-CTA clusters that can be resident at once with one CTA a multiprocessor. Starts at `sm_count // 2` and
        falls when the occupancy of a loaded program shows that the device's clusters of multiprocessors, or a limit
        set from outside, hold fewer.
    """

    ordinal: int
    name: str
    arch: Architecture
    sm_count: int
    max_dynamic_smem_bytes: int
    context: int
    resident_pairs: int = field(init=False)

    def __post_init__(self) -> None:
        self.resident_pairs = self.sm_count // 2

    @property
    def facts(self) -> DeviceFacts:
        """What planning may depend on."""
        return DeviceFacts(self.arch.name, self.sm_count, self.resident_pairs, self.max_dynamic_smem_bytes)

    def lower_resident_pairs(self, measured: int) -> bool:
        """Take an occupancy into account; whether the facts changed.

        A measurement never raises the figure: a program with little shared memory fits more than once on a
        multiprocessor, and the planner counts one CTA each.
        """
        with _lock:
            lower = measured < self.resident_pairs
            if lower:
                self.resident_pairs = measured
        return lower


def opened_device(ordinal: int) -> Device | None:
    """The device if it was opened before; asks no driver."""
    return _opened.get(ordinal)


def open_device(ordinal: int) -> Device:
    """Open a device, or return it if it is open.

    Raises
    ------
    LaunchError
        No driver, no such device, or one that no export can serve.
    """
    with _lock:
        if ordinal not in _opened:
            _opened[ordinal] = _read_device(ordinal)
        return _opened[ordinal]


def _read_device(ordinal: int) -> Device:
    kinds = driver.bindings().CUdevice_attribute
    handle = driver.call("cuDeviceGet", ordinal, what=f"cuda:{ordinal}")

    def attribute(name: str) -> int:
        kind = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(driver.call("cuDeviceGetAttribute", kind, handle, what=f"{name} of cuda:{ordinal}"))

    name = driver.call("cuDeviceGetName", 128, handle).split(b"\0")[0].decode()
    capability = (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR"))
    try:
        arch = architecture_of(capability)
    except PlanError as error:
        raise LaunchError(f"cuda:{ordinal} ({name}): {error}. backend='reference' runs on any device.") from None
    return Device(
        ordinal=ordinal,
        name=name,
        arch=arch,
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        max_dynamic_smem_bytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        context=int(driver.call("cuDevicePrimaryCtxRetain", handle, what=f"cuda:{ordinal}")),
    )

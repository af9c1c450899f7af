"""What the driver says of a device, read once a process. Imports arch, errors, model, driver and guard."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from cakegen.arch import Architecture, architecture_of
from cakegen.errors import LaunchError, PlanError
from cakegen.model import DeviceFacts
from cakegen.runtime import driver
from cakegen.runtime.guard import GuardedLock

_lock = GuardedLock("opening a device")
_opened: dict[int, Device] = {}


def _forget_all() -> None:
    """In a forked child, which would take the parent's contexts for its own and never ask the driver."""
    _opened.clear()


os.register_at_fork(after_in_child=_forget_all)


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

    def lower_resident_pairs(self, measured: int) -> None:
        """Begin later plans with an occupancy that was measured.

        A measurement never raises the figure: a program with little shared memory fits more than once on a
        multiprocessor, and the planner counts one CTA each.
        """
        with _lock:
            self.resident_pairs = min(self.resident_pairs, measured)


def opened_device(ordinal: int) -> Device | None:
    """The device if it was opened before; asks no driver."""
    return _opened.get(ordinal)


def opened_devices() -> tuple[Device, ...]:
    """The devices that were opened before."""
    return tuple(_opened.values())


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


@dataclass(frozen=True)
class DeviceAttributes:
    """What the driver says of a device, supported or not, without a context on it."""

    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    sm_count: int
    max_dynamic_smem_bytes: int


def read_attributes(ordinal: int) -> DeviceAttributes:
    """Ask the driver for a device's attributes; creates no context.

    Raises
    ------
    LaunchError
        No driver, or no such device.
    """
    kinds = driver.bindings().CUdevice_attribute
    handle = driver.call("cuDeviceGet", ordinal, what=f"cuda:{ordinal}")

    def attribute(name: str) -> int:
        kind = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(driver.call("cuDeviceGetAttribute", kind, handle, what=f"{name} of cuda:{ordinal}"))

    return DeviceAttributes(
        ordinal=ordinal,
        name=driver.call("cuDeviceGetName", 128, handle).split(b"\0")[0].decode(),
        compute_capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        max_dynamic_smem_bytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
    )


def count_devices() -> int:
    """Number of devices that the driver shows this process.

    Raises
    ------
    LaunchError
        No driver can be used.
    """
    return int(driver.call("cuDeviceGetCount"))


def _read_device(ordinal: int) -> Device:
    found = read_attributes(ordinal)
    try:
        arch = architecture_of(found.compute_capability)
    except PlanError as error:
        raise LaunchError(f"cuda:{ordinal} ({found.name}): {error}. backend='reference' runs on any device.") from None
    handle = driver.call("cuDeviceGet", ordinal, what=f"cuda:{ordinal}")
    return Device(
        ordinal=ordinal,
        name=found.name,
        arch=arch,
        sm_count=found.sm_count,
        max_dynamic_smem_bytes=found.max_dynamic_smem_bytes,
        context=int(driver.call("cuDevicePrimaryCtxRetain", handle, what=f"cuda:{ordinal}")),
    )

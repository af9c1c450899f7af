"""Memory that the runtime owns on a device: zeroed control words, and the record of a wait that gave up.

Everything here is allocated when a device is first prepared for and stays until `release_device_memory` is called,
since a captured graph may use it for as long.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cakegen.errors import LaunchError
from cakegen.registry import Program, Registry
from cakegen.runtime import driver
from cakegen.runtime.device import Device
from cakegen.runtime.guard import GuardedLock
from cakegen.runtime.streams import KnownStream

SLOT_SIZES = ((128, 512), (8192, 64))
"""Bytes of a slot and slots of a slab. A fused norm's counter is alone in its L2 line, so that two runners never share
one; a split GEMM counts arrivals in four words for each of up to 256 cut tiles, and one that normalises up to 1024 more
for its rows."""

WORD_BYTES = 4
RESERVED_SLOTS = 16
WAIT_RECORD_WORDS = 16
WAIT_VARIABLE = "CAKEGEN_WAIT_SECONDS"
DEFAULT_WAIT_SECONDS = 2.0
GRID_COUNTER = 0xFFFF
_NS_PER_SECOND = 1_000_000_000
Number = TypeVar("Number", int, float)


@dataclass(eq=False)
class ControlWords:
    """Zeroed int32 words in device memory, lent to one runner. Every launch leaves them at zero.

    `captured` says that a graph holds the address: the words are then never lent again, since the graph may be
    replayed after its runner is gone. `streams` are those on which the runner was called, once it is gone.
    """

    address: int
    home: collections.deque[ControlWords]
    captured: bool = False
    streams: tuple[KnownStream, ...] = ()


class WaitRecord:
    """A host-mapped record of u64 words that bounded waits read their limit from and report to.

    Words: 0 wait limit in ns, 1 chaos seed, 2 claim flag, 3 program id, 4 CTA, 5 warp, 6 barrier, 7 parity or value
    awaited, 8 value observed. The first wait that gives up claims the record, fills it in and traps. The memory is the
    host's, so it can be read after the trap has destroyed the context.
    """

    def __init__(self, host_address: int, device_address: int) -> None:
        self.device_address = device_address
        self._host_address = host_address
        self._words = (ctypes.c_uint64 * WAIT_RECORD_WORDS).from_address(host_address)
        self._words[:] = [0] * WAIT_RECORD_WORDS

    @property
    def words(self) -> tuple[int, ...]:
        """All words as they are now."""
        return tuple(self._words)

    @property
    def claimed(self) -> bool:
        """Whether a wait gave up."""
        return self._words[2] != 0

    def write_wait_limit(self, seconds: float) -> None:
        """Set how long a wait may take before it gives up; holds for launches from now on.

        Raises
        ------
        LaunchError
            Not above 0, or 1e9 seconds or more (a u64 of nanoseconds must hold a multiple of it).
        """
        if not 0 < seconds < 1e9:
            raise LaunchError(f"wait limit must be between 0 and 1e9 seconds; got {seconds!r}")
        self._words[0] = int(seconds * _NS_PER_SECOND)

    def write_chaos_seed(self, seed: int) -> None:
        """Set the seed of the delays in programs compiled with -DCAKEGEN_CHAOS; 0 asks for none."""
        self._words[1] = seed & (2**64 - 1)

    def free(self) -> None:
        """Free the memory; what it held can still be read here."""
        self._words = (ctypes.c_uint64 * WAIT_RECORD_WORDS)(*self._words)
        driver.call("cuMemFreeHost", self._host_address, what="wait record")


class _Pool:
    """Zeroed slots of one size, lent and taken back. Its user holds a lock."""

    def __init__(self, slot_bytes: int, slab_slots: int) -> None:
        self.slot_bytes = slot_bytes
        self._slab_slots = slab_slots
        self._slabs: list[int] = []
        self.free: list[int] = []
        self._add_slab()
        # appended to by finalisers, which may run inside any other code of this thread: no lock there
        self.retired: collections.deque[ControlWords] = collections.deque()

    def refill(self, *, capturing: bool) -> None:
        """Take back the slots of runners that are gone, if they are many, or allocate another slab.

        To take back waits for streams, which this thread does not do inside its own capture; then a slab serves as
        well. A full device is no error as long as a slot is free.

        Raises
        ------
        LaunchError
            No slot is left, and no memory for a slab.
        """
        if not capturing and len(self.retired) >= self._slab_slots // 4:
            self._take_back()
        if len(self.free) >= RESERVED_SLOTS:
            return
        try:
            self._add_slab()
        except LaunchError:
            if not self.free and not capturing:
                self._take_back()
            if not self.free:
                raise

    def _add_slab(self) -> None:
        slots = _allocate_slab(self.slot_bytes, self._slab_slots)
        self._slabs.append(slots[0])
        self.free.extend(slots)

    def free_slabs(self) -> None:
        """Free all memory; no slot of it is in use."""
        self.free.clear()
        while self._slabs:
            driver.call("cuMemFree", self._slabs.pop(), what="control words")

    def _take_back(self) -> None:
        """Free the retired slots whose streams are done; a kernel of a runner that is gone may be in flight.

        Stream by stream, since a wait for the context would end the captures of other threads.
        """
        words = [self.retired.popleft() for _ in range(len(self.retired))]
        done = {stream: stream.finish() for stream in {stream for each in words for stream in each.streams}}
        for each in words:
            if all(done[stream] for stream in each.streams):
                self.free.append(each.address)
            else:
                self.retired.append(each)


class DeviceControl:
    """The control words and the wait record of one device. Safe to use from several threads."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._lock = GuardedLock(f"lending control words of cuda:{device.ordinal}")
        self._pools: list[_Pool] = []
        with driver.using_context(device.context), driver.relaxed_capture():
            self.wait_record = _allocate_wait_record()
            try:
                for slot_bytes, slots in SLOT_SIZES:
                    self._pools.append(_Pool(slot_bytes, slots))
            except LaunchError:
                # the error to tell is the first one
                with contextlib.suppress(LaunchError):
                    self._free()
                raise

    def free(self) -> None:
        """Free the words and the wait record; nothing on the device uses them any more."""
        with driver.using_context(self.device.context), driver.relaxed_capture():
            self._free()

    def _free(self) -> None:
        for pool in self._pools:
            pool.free_slabs()
        self.wait_record.free()

    def take_words(self, count: int) -> ControlWords:
        """Lend `count` zeroed int32.

        A few slots stay in reserve for runners that are prepared inside a capture. Where a capture spends them (a whole
        model in one graph), a slab is allocated there too: in relaxed mode, and zeroed on a stream of its own, so that
        the graph holds nothing of it.

        Raises
        ------
        LaunchError
            More words than a slot holds, or the device has no memory left.
        """
        needed = count * WORD_BYTES
        pool = next((pool for pool in self._pools if needed <= pool.slot_bytes), None)
        if pool is None:
            most = self._pools[-1].slot_bytes
            raise LaunchError(f"{count} control words need {needed} bytes; a runner has at most {most}")
        with self._lock:
            capturing = driver.is_capturing(self.device.ordinal)
            if len(pool.free) < (1 if capturing else RESERVED_SLOTS):
                with driver.using_context(self.device.context), driver.relaxed_capture():
                    pool.refill(capturing=capturing)
            return ControlWords(pool.free.pop(), pool.retired)

    def retire_words(self, words: ControlWords, streams: Iterable[KnownStream]) -> None:
        """Take back the words of a runner that is gone, which was called on some streams; a finaliser."""
        if not words.captured:
            words.streams = tuple(streams)
            words.home.append(words)


def _allocate_slab(slot_bytes: int, slots: int) -> list[int]:
    """Addresses of zeroed slots; complete before it returns, so that any stream may use them."""
    bytes_ = slots * slot_bytes
    with contextlib.ExitStack() as undo:
        base = int(driver.call("cuMemAlloc", bytes_, what="control words"))
        undo.callback(_try_to, "cuMemFree", base)
        _write_zeros(base, bytes_)
        undo.pop_all()
    return [base + slot * slot_bytes for slot in range(slots)]


def _write_zeros(base: int, bytes_: int) -> None:
    """On a stream of its own: the default stream would wait for, or break, another thread's capture."""
    flags = driver.bindings().CUstream_flags.CU_STREAM_NON_BLOCKING
    with contextlib.ExitStack() as undo:
        stream = driver.call("cuStreamCreate", flags, what="control words")
        undo.callback(_try_to, "cuStreamDestroy", stream)
        driver.call("cuMemsetD8Async", base, 0, bytes_, stream, what="control words")
        driver.call("cuStreamSynchronize", stream, what="control words")
        undo.pop_all()
        driver.call("cuStreamDestroy", stream, what="control words")


def _try_to(name: str, *arguments: object) -> None:
    """A driver call that gives something back behind an error, which is the one to tell."""
    with contextlib.suppress(LaunchError):
        driver.call(name, *arguments)


def _allocate_wait_record() -> WaitRecord:
    module = driver.bindings()
    wait_seconds = _environment_number(WAIT_VARIABLE, float, DEFAULT_WAIT_SECONDS)
    chaos_seed = _environment_number("CAKEGEN_CHAOS_SEED", int, 0)
    flags = module.CU_MEMHOSTALLOC_DEVICEMAP | module.CU_MEMHOSTALLOC_PORTABLE
    with contextlib.ExitStack() as undo:
        host = int(driver.call("cuMemHostAlloc", WAIT_RECORD_WORDS * 8, flags, what="wait record"))
        undo.callback(_try_to, "cuMemFreeHost", host)
        record = WaitRecord(host, int(driver.call("cuMemHostGetDevicePointer", host, 0, what="wait record")))
        try:
            record.write_wait_limit(wait_seconds)
        except LaunchError as error:
            raise LaunchError(f"environment: {WAIT_VARIABLE}: {error}") from None
        record.write_chaos_seed(chaos_seed)
        undo.pop_all()
    return record


def _environment_number(name: str, kind: type[Number], default: Number) -> Number:
    text = os.environ.get(name, "")
    try:
        return kind(text) if text else default
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise LaunchError(f"environment: {name} must be {what}; got {text!r}") from None


_controls_lock = GuardedLock("allocating control memory")
_controls: dict[int, DeviceControl] = {}


def _forget_all() -> None:
    """In a forked child: the memory is the parent's."""
    _controls.clear()


os.register_at_fork(after_in_child=_forget_all)


def opened_control(ordinal: int) -> DeviceControl | None:
    """The control memory of a device if it was allocated before; asks no driver."""
    return _controls.get(ordinal)


def open_control(device: Device) -> DeviceControl:
    """The control memory of a device, allocated at first use."""
    with _controls_lock:
        if device.ordinal not in _controls:
            _controls[device.ordinal] = DeviceControl(device)
        return _controls[device.ordinal]


def free_controls() -> None:
    """Free the control memory of every device, which nothing there uses any more.

    Raises
    ------
    LaunchError
        The driver refuses.
    """
    with _controls_lock:
        while _controls:
            _, control = _controls.popitem()
            control.free()


def describe_wait_record(words: Sequence[int], registries: Iterable[Registry]) -> str | None:
    """A claimed wait record in a sentence, or None where no wait gave up.

    Parameters
    ----------
    words
        `WaitRecord.words`.
    registries
        Where to look up the program and the names of its barriers.
    """
    limit_ns, _, claimed, program_id, cta, warp, barrier, awaited, observed = words[:9]
    if not claimed:
        return None
    found = _find_program(program_id, registries)
    name = f"program {found[0].name} ({found[0].role}; {found[1]})" if found else f"unknown program {program_id:08x}…"
    if barrier == GRID_COUNTER:
        what = f"the grid's arrival counter to return to {awaited}; it holds {observed}"
    else:
        what = f"{_barrier_name(found[0] if found else None, barrier)} (parity {awaited} expected, observed {observed})"
    limit = limit_ns / _NS_PER_SECOND
    return (
        f"A wait gave up after {limit:g} s: {name}, CTA {cta}, warp {warp}, waited for {what}. The context is lost; "
        "start a new process. CAKEGEN_WAIT_SECONDS raises the limit, for a sanitizer or a debugger."
    )


def _find_program(program_id: int, registries: Iterable[Registry]) -> tuple[Program, str] | None:
    for registry in registries:
        for name, program in registry.programs.items():
            if name.rsplit("_", 1)[-1].startswith(f"{program_id:08x}"):
                keys = [key for key, owner in registry.kernels.items() if owner == name]
                return program, f"keys {', '.join(keys)}" if keys else "no key"
    return None


def _barrier_name(program: Program | None, index: int) -> str:
    """Name and stage of the barrier at an index, counted in barriers from the start of shared memory."""
    position = index
    for name, count in program.barriers if program else ():
        if position < count:
            return f"barrier {name}[{position}]" if count > 1 else f"barrier {name}"
        position -= count
    return f"barrier {index}"

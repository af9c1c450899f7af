"""Compiled programs in the contexts of devices. Imports registry, compile, device and driver.

A program is compiled once a machine (through the cache) or taken from a bundle, and loaded once a device. Inside a
graph capture nothing is loaded: `find` answers from memory, and `load` refuses before it asks the driver.
"""

from __future__ import annotations

import collections
import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cakegen import compile as compilation
from cakegen.compile.bundle import find_bundle
from cakegen.errors import CompileError, LaunchError, UnregisteredError
from cakegen.plan.records import Launch, Plan
from cakegen.registry import Program, Registry
from cakegen.runtime import driver
from cakegen.runtime.device import Device
from cakegen.runtime.guard import GuardedLock, Section

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedProgram:
    """A program's kernel in one device's context."""

    key: str
    program: Program
    kernel: driver.Kernel


class ProgramTable:
    """The programs of one registry, compiled with the registry's flags and extra ones.

    Parameters
    ----------
    bundle
        Folder of cubins to take instead of compiling; None: one of `CAKEGEN_BUNDLE`, where that names one.
    """

    def __init__(
        self, registry: Registry, compile_flags: tuple[str, ...] = (), bundle: str | os.PathLike[str] | None = None
    ) -> None:
        self._registry = registry
        self._flags = compile_flags
        self._bundle = bundle
        self._loaded: dict[tuple[int, str], LoadedProgram] = {}
        self._locks: collections.defaultdict[tuple[int, str], GuardedLock] = collections.defaultdict(
            lambda: GuardedLock("loading a program")
        )
        self._table_lock = GuardedLock("looking up a program")
        _tables.add(self)

    def find(self, device: Device, key: str) -> LoadedProgram | None:
        """The program of a key if it is loaded on a device."""
        return self._loaded.get((device.ordinal, key))

    def load(self, device: Device, key: str) -> LoadedProgram:
        """The program of a key on a device, compiled and loaded at first use; threads that meet here load once.

        Raises
        ------
        RegistryError
            The export has no such key.
        CompileError
            The compiler refused the source, or the bundle does not hold what it would compile to.
        LaunchError
            The current stream is being captured, the program does not serve the device, or the driver refused it.
        """
        found = self.find(device, key)
        if found is not None:
            return found
        if driver.is_capturing(device.ordinal):
            raise LaunchError(
                f"{key}: not loaded on cuda:{device.ordinal}, and the current stream is being captured, where no "
                "program can be loaded. Call warm_up, or prepare a runner of this shape, before the capture."
            )
        with self._table_lock:
            lock = self._locks[device.ordinal, key]
        with lock, _loading:
            found = self.find(device, key)
            return found if found is not None else self._load(device, key)

    def _load(self, device: Device, key: str) -> LoadedProgram:
        program = self._registry.program(key)
        if device.arch.name not in program.arches:
            raise LaunchError(
                f"{key}: {program.name} serves {', '.join(program.arches)}; cuda:{device.ordinal} is {device.arch.name}"
            )
        request = compilation.request_for(self._registry, key, device.arch.name, self._flags)
        bundle = find_bundle(self._registry.export, self._bundle)
        started = time.perf_counter()
        compiled = compilation.cached_cubin(request) if bundle is None else bundle.program(request)
        with driver.using_context(device.context), driver.relaxed_capture():
            kernel = driver.load_kernel(compiled.cubin, program.kernel_symbol, program.launch.dynamic_smem_bytes)
        origin = "from a bundle" if bundle is not None else "from the cache" if compiled.cached else "compiled"
        took_ms = (time.perf_counter() - started) * 1e3
        _log.info("%s: loaded on cuda:%d, %s, in %.1f ms", key, device.ordinal, origin, took_ms)
        _kernels.append((device.context, kernel))
        loaded = LoadedProgram(key, program, kernel)
        self._loaded[device.ordinal, key] = loaded
        return loaded

    def load_all(
        self,
        device: Device,
        keys: Sequence[str],
        workers: int | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compile the programs of several keys side by side, unless a bundle holds them, then load them.

        Parameters
        ----------
        workers
            Compiler threads; by default one a processor.
        on_progress
            Called with the steps that are done and those there are; a program is two, to compile and to load it.

        Raises
        ------
        CompileError
            The compiler refused one.
        LaunchError
            As `load`.
        """
        cold = [key for key in keys if self.find(device, key) is None]
        # several keys may share a request
        requests = dict.fromkeys(
            compilation.request_for(self._registry, key, device.arch.name, self._flags) for key in cold
        )
        steps, done = len(requests) + len(cold), itertools.count(1)

        def report(*_: object) -> None:
            if on_progress is not None:
                on_progress(next(done), steps)

        bundle = find_bundle(self._registry.export, self._bundle)
        if bundle is not None:
            for request in requests:
                bundle.program(request)
                report()
        else:
            with _loading:
                outcomes = compilation.compile_many(list(requests), workers=workers, on_done=report)
            for outcome in outcomes:
                if isinstance(outcome, CompileError):
                    raise outcome
        for key in cold:
            self.load(device, key)
            report()

    def forget(self) -> None:
        """Forget every program: all of them are unloaded."""
        self._loaded.clear()


# the compiler and its cache hold locks of their own, which a handler in the same thread would wait for
_loading = Section("compiling or loading a program")
_tables: weakref.WeakSet[ProgramTable] = weakref.WeakSet()
# by context: a table may be gone before the runners that launch its programs
_kernels: collections.deque[tuple[int, driver.Kernel]] = collections.deque()


def unload_programs() -> None:
    """Unload every program that was loaded; no launch of one is in flight or follows.

    Raises
    ------
    LaunchError
        The driver refuses.
    """
    for table in list(_tables):
        table.forget()
    while _kernels:
        context, kernel = _kernels.popleft()
        with driver.using_context(context), driver.relaxed_capture():
            kernel.unload()


def check_registered(registry: Registry, plan: Plan, where: str) -> None:
    """Refuse a plan whose programs an export does not hold; `where` names the device.

    Raises
    ------
    UnregisteredError
        As said; the message names the program and the SM counts that the export is for.
    """
    for launch in plan.launches:
        if launch.key not in registry.kernels:
            target = registry.model.target(plan.device.arch)
            counts = ", ".join(str(count) for count in target.sm_counts) if target else "none"
            raise UnregisteredError(
                f"{plan.stage}: T = {plan.tokens}, TP {plan.tp}, P = {plan.partials} on {where} "
                f"({plan.device.sm_count} SMs, {plan.device.resident_pairs} resident pairs) needs {launch.key}, "
                f"which {registry.export} does not hold; it is for {counts} SMs. Add the count to its target."
            )


def measure_resident_clusters(device: Device, loaded: LoadedProgram, launch: Launch) -> int:
    """Clusters of a launch that can be resident on the device at once, as the driver counts them."""
    with driver.using_context(device.context):
        return driver.max_active_clusters(loaded.kernel, loaded.program.launch, launch.grid_ctas)


def measure_resident_pairs(device: Device, plan: Plan, programs: tuple[LoadedProgram, ...]) -> int | None:
    """The fewest two-CTA clusters of a plan's launches that the device holds at once; None where none has any."""
    pairs = [
        measure_resident_clusters(device, loaded, launch)
        for launch, loaded in zip(plan.launches, programs, strict=True)
        if loaded.program.launch.cluster == (2, 1, 1)
    ]
    return min(pairs, default=None)


def check_residency(device: Device, loaded: LoadedProgram, launch: Launch) -> None:
    """Refuse a launch whose CTAs wait for each other but can't all be resident.

    Raises
    ------
    LaunchError
        The grid does not fit; the message shows the arithmetic.
    """
    record = loaded.program.launch
    x, y, z = launch.grid_ctas
    grid, cluster = x * y * z, record.cluster[0] * record.cluster[1] * record.cluster[2]
    if cluster > 1:
        resident = measure_resident_clusters(device, loaded, launch) * cluster
    else:
        with driver.using_context(device.context):
            resident = driver.max_active_ctas_per_sm(loaded.kernel, record) * device.sm_count
    if grid > resident:
        raise LaunchError(
            f"{launch.key}: its CTAs wait for each other, so all {grid} must be resident at once; cuda:"
            f"{device.ordinal} ({device.name}) holds {resident}, with clusters of {cluster} and "
            f"{record.dynamic_smem_bytes} bytes of shared memory a CTA. Give device_facts with fewer multiprocessors "
            "or resident pairs, and another form is planned."
        )

"""`backend="emulator"` of the public functions: a runner that emulates its plan.

The runtime takes it from `cakegen.emulator` (`runtime.emulation`) when the backend is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from cakegen.emulator.launches.launch import DEFAULT_OPTIONS, Options, emulate_plan, load_program
from cakegen.emulator.launches.stream import LaunchReport
from cakegen.errors import LaunchError
from cakegen.plan.records import Plan
from cakegen.registry import Registry
from cakegen.runtime import driver
from cakegen.runtime.prepared import Outputs, Runner
from cakegen.runtime.validate import Request


class EmulatedRunner(Runner):
    """A call of generated programs on this machine's CPU; every call starts from the values that the buffers hold.

    Parameters
    ----------
    request, plan
        A validated call of CPU tensors, and its plan.
    compile_flags
        Options for the compiler after the registry's own.

    Attributes
    ----------
    options
        Schedule, seed and arithmetic of the calls to come; equal options give equal schedules.
    on_progress
        Called with (clusters that have ended, clusters of the launch) during a call.
    reports
        Of the last call, one a launch.

    Raises
    ------
    CompileError
        A program does not compile.
    EmulationError
        A program uses something that is not modelled.
    """

    def __init__(self, registry: Registry, request: Request, plan: Plan, compile_flags: tuple[str, ...]) -> None:
        super().__init__(request, plan)
        self.options: Options = DEFAULT_OPTIONS
        self.on_progress: Callable[[int, int], None] = lambda done, total: None
        self.reports: tuple[LaunchReport, ...] = ()
        self._registry = registry
        self._plan = plan
        self._load = functools.partial(load_program, compile_flags=compile_flags)
        for launch in plan.launches:
            self._load(registry, launch.key, plan.device.arch)

    def __call__(self) -> Outputs:
        """Emulate the launches.

        Raises
        ------
        Fault
            A program did something undefined, can't go on, or left an output unwritten.
        LaunchError
            The current CUDA stream is being captured: nothing of this call would be in the graph. Or an operand is no
            longer where it was prepared.
        """
        if driver.is_capturing():
            raise LaunchError(
                f"{self._request.stage}: backend='emulator' runs on the CPU, and the current stream is being captured; "
                "the graph would hold nothing of this call. Call it outside of the capture."
            )
        self.check_operands()
        self.reports = emulate_plan(
            self._registry, self._request, self._plan, self.options, on_progress=self.on_progress, load=self._load
        )
        return self.outputs

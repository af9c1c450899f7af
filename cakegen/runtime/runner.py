"""Prepared calls. A runner launches what was bound for it on torch's current stream, and nothing else.

Imports driver, streams, control, arguments and prepared. A call plans nothing, allocates nothing, synchronises nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cakegen.errors import LaunchError
from cakegen.known_faults import clears_small_maps
from cakegen.plan import control_words, partials_elems
from cakegen.plan.records import Launch, Plan
from cakegen.registry import LaunchRecord, Registry
from cakegen.runtime import driver, streams
from cakegen.runtime.arguments import ArgumentBlock, bind_arguments, pack_arguments
from cakegen.runtime.control import ControlWords, DeviceControl, describe_wait_record, opened_control
from cakegen.runtime.device import Device
from cakegen.runtime.operand import Operand
from cakegen.runtime.prepared import Outputs, Runner
from cakegen.runtime.programs import LoadedProgram
from cakegen.runtime.tensor_map import encode_tensor_map
from cakegen.runtime.validate import Request
from cakegen.runtime.workspace import FP32_BYTES, Workspace

MOST_STREAMS = 64
"""Streams that a runner remembers beside those with work of it in flight."""


@dataclass(eq=False)
class BoundLaunch:
    """One kernel launch whose attributes, grid and arguments are fixed."""

    loaded: LoadedProgram
    launch: Launch
    block: ArgumentBlock
    record: LaunchRecord
    config: Any = field(init=False)

    def __post_init__(self) -> None:
        self.config = driver.launch_config(self.record, self.launch.grid_ctas)

    def describe(self) -> str:
        """The launch in words, for an error."""
        program, record = self.loaded.program, self.record
        return (
            f"program {program.name} (key {self.launch.key}), grid_ctas {self.launch.grid_ctas}, cluster "
            f"{record.cluster}, block {record.block}, {record.dynamic_smem_bytes} bytes of dynamic shared memory, "
            f"cooperative {record.cooperative}, programmatic {record.programmatic}"
        )

    def bind_stream(self, stream: int) -> Callable[[], int]:
        """The launch on one stream (cuLaunchKernelEx): a call returns a CUresult."""
        return driver.bind_launch(self.config, self.loaded.kernel.function, self.block.pointers, stream)

    def failure(self, result: int) -> LaunchError:
        """The error for a result other than success."""
        module = driver.bindings()
        text = driver.result_text(module, module.CUresult(result))
        return LaunchError(f"cuLaunchKernelEx failed: {text}; {self.describe()}")


class ProgramRunner(Runner):
    """A call of generated programs.

    Parameters
    ----------
    workspace
        Where the fp32 partials of split tiles go; None where the plan splits none.
    overlap
        Launches whose record allows it may start while the launch before them runs.
    """

    def __init__(
        self,
        request: Request,
        plan: Plan,
        programs: tuple[LoadedProgram, ...],
        device: Device,
        control: DeviceControl,
        registry: Registry,
        workspace: Workspace | None,
        overlap: bool = False,
    ) -> None:
        super().__init__(request, plan)
        self._device = device
        self._ordinal = device.ordinal
        self._read_stream = driver.stream_reader()
        self._registry = registry
        self._workspace = workspace
        self._partials = None if workspace is None else workspace.reserve(workspace_elems(request, plan))
        self._room_offset = plan_partials(plan) * FP32_BYTES
        # where a call outside captures went last
        self._stream: int | None = None
        # by stream: what a call there runs; the current stream's is made now, another's at its first call
        self._bound: dict[int, tuple[Callable[[], int], ...]] = {}
        self._known: dict[int, streams.KnownStream] = {}
        self._ended = ""
        self._words = self._take_words(control, plan)
        self._unmarked = self._words is not None or self._partials is not None
        self._buffers = {
            "wait_record": control.wait_record.device_address,
            "counters": 0 if self._words is None else self._words.address,
            "partials": 0 if self._partials is None else self._partials.data_ptr(),
        }
        self._overlap = overlap
        self.launches = tuple(
            BoundLaunch(loaded, launch, *self._pack(request, loaded, launch))
            for loaded, launch in zip(programs, plan.launches, strict=True)
        )
        self._bind_stream(driver.current_stream(device.ordinal))
        _live.add(self)

    def _pack(self, request: Request, loaded: LoadedProgram, launch: Launch) -> tuple[ArgumentBlock, LaunchRecord]:
        """A launch's arguments on a request's operands, and its attributes."""
        record, own = decide_overlap(launch, loaded.program.launch, self._overlap)
        operands = request.placed(self._buffers["partials"] + self._room_offset)
        buffers = self._buffers | {name: operand.address for name, operand in operands.items()}
        parameters = run_parameters(request, operands) | own
        clears = clears_small_maps(driver.driver_version(), (self._device.arch.name,))
        encode = functools.partial(encode_tensor_map, clears_small=clears)
        return pack_arguments(bind_arguments(loaded.program, operands, buffers, parameters), encode), record

    def _bind(self, request: Request) -> None:
        """Rewrite the arguments of all launches, once all of them are packed."""
        if self._ended:
            raise LaunchError(self._ended)
        blocks = [self._pack(request, each.loaded, each.launch)[0] for each in self.launches]
        for bound, block in zip(self.launches, blocks, strict=True):
            bound.block.take(block)

    def _take_words(self, control: DeviceControl, plan: Plan) -> ControlWords | None:
        """Counters of one launch at a time: the launches of a plan follow each other, and each leaves them at zero."""
        count = max(control_words(launch) for launch in plan.launches)
        if count == 0:
            return None
        words = control.take_words(count)
        weakref.finalize(self, control.retire_words, words, self._known.values())
        return words

    def __call__(self) -> Outputs:
        """Launch on torch's current stream of the operands' device."""
        if self._checks:
            self.check_operands()
        stream = self._read_stream(self._ordinal)
        workspace = self._workspace
        if self._unmarked and driver.is_capturing(self._ordinal):
            self._mark_captured()
        if workspace is not None:
            workspace.lock.acquire()
        try:
            if workspace is not None:
                workspace.enter(stream, self._device.context)
            if stream != self._stream:
                self._move_to(stream)
            for position, launch in enumerate(self._bound[stream]):
                result = launch()
                if result:
                    self._launch_in_context(stream, position, result)
        except LaunchError as error:
            raise with_wait_report(error, self._ordinal, self._registry) from None
        finally:
            if workspace is not None:
                workspace.lock.release()
        return self.outputs

    def _mark_captured(self) -> None:
        """Note that a graph holds addresses of what this runner takes beside its operands."""
        self._unmarked = False
        if self._words is not None:
            self._words.captured = True
        if self._workspace is not None and self._partials is not None:
            self._workspace.keep(self._partials)

    def release_operands(self) -> None:
        """Keep no tensor alive any more, neither operands nor partials; a call then returns nothing.

        For a cache whose user vouches, at each call, that live operands are at the addresses that are bound.
        """
        self.outputs = ()
        self._request = dataclasses.replace(self._request, tensors={}, outputs=())
        self._workspace = self._partials = None

    def end(self, why: str) -> None:
        """Refuse every later call with a reason: what was bound is gone, or can't be used in this process."""
        self._ended = why
        self._workspace = self._partials = self._stream = None
        self._bound.clear()

    def _move_to(self, stream: int) -> None:
        """Order a call on another stream behind the last one; which stream replays a capture is the caller's choice.

        One comparison in a call that stays on its stream; an event only where it changes.
        """
        if stream not in self._bound:
            self._bind_stream(stream)
        if driver.is_capturing(self._ordinal):
            return
        if self._stream is not None:
            with driver.using_context(self._device.context):
                self._known[self._stream].order_before(stream)
        # only now: a call after one that failed must wait all the same
        self._stream = stream

    def _bind_stream(self, stream: int) -> None:
        """Bind the launches to torch's current stream, and what a stream that may be destroyed needs around them."""
        if self._ended:
            raise LaunchError(self._ended)
        if len(self._bound) >= MOST_STREAMS:
            self._forget_idle_streams()
        known = self._known[stream] = streams.known_stream(self._ordinal, stream, self._device.context)
        self._bound[stream] = (*known.waits, *(launch.bind_stream(stream) for launch in self.launches), *known.marks)

    def _forget_idle_streams(self) -> None:
        """Streams that a server makes and destroys are not remembered for ever; their handles come again."""
        with driver.using_context(self._device.context):
            idle = [handle for handle, known in self._known.items() if handle != self._stream and known.is_idle()]
        for handle in idle:
            del self._bound[handle], self._known[handle]

    def _launch_in_context(self, stream: int, position: int, result: int) -> None:
        """Launch (or wait, or mark) again, in the device's own context, what failed in another.

        A thread that has done nothing on the device yet has no context, or another device's, and its launch is refused
        without effect: so the question which one it has, 1.1 us of a call of 7 (H200's host), is asked only then.
        """
        if not driver.context_is_current(self._device.context):
            with driver.using_context(self._device.context):
                result = self._bound[stream][position]()
        if not result:
            return
        known = self._known[stream]
        launch = position - len(known.waits)
        if launch < 0:
            raise streams.wait_failure(stream, result)
        if launch == len(self.launches):
            raise streams.mark_failure(stream, result)
        # behind the launches before the one that failed: they may be all that the stream's next user can wait for
        with driver.using_context(self._device.context):
            for mark in known.marks:
                mark()
        raise self.launches[launch].failure(result)


# a runner that is gone leaves this by itself
_live: weakref.WeakSet[ProgramRunner] = weakref.WeakSet()


def end_runners(why: str) -> None:
    """End every runner of this process; see `ProgramRunner.end`."""
    for runner in list(_live):
        runner.end(why)


os.register_at_fork(after_in_child=lambda: end_runners(f"this runner was prepared before a fork, and {driver.FORKED}"))


def decide_overlap(launch: Launch, record: LaunchRecord, overlap: bool) -> tuple[LaunchRecord, dict[str, int]]:
    """A launch's attributes and its own i32 values; the emulator asks here too.

    Parameters
    ----------
    record
        Attributes of its program.
    overlap
        See `ProgramRunner`.
    """
    values = dict(launch.parameters)
    if overlap and launch.overlap is not None and record.overlap:
        record = dataclasses.replace(record, programmatic=True)
        values |= dict(launch.overlap)
    return record, values


def plan_partials(plan: Plan) -> int:
    """fp32 elements of workspace that a plan's launches need; they follow each other, so the largest serves all."""
    return max(partials_elems(launch) for launch in plan.launches)


def workspace_elems(request: Request, plan: Plan) -> int:
    """fp32 elements of workspace that a call needs: what its launches do, and behind it room for prepared tokens."""
    return plan_partials(plan) - (-request.room_bytes // FP32_BYTES)


def run_parameters(request: Request, operands: Mapping[str, Operand]) -> dict[str, int]:
    """The i32 parameters of a request by the names that `arg_plan` uses; pitches in elements.

    `operands`: all of the request's, placed.
    """
    parameters = {"num_tokens": request.tokens, "num_partials": request.partials, "up_col0": request.up_col0}
    for name, operand in operands.items():
        parameters[f"{request.shorts.get(name, name)}_pitch"] = operand.pitch
        parameters[f"{name}_partial_stride"] = operand.partial_stride
    return parameters


def with_wait_report(error: LaunchError, ordinal: int, registry: Registry) -> LaunchError:
    """The error, and behind it what the device's wait record says, if a wait gave up."""
    control = opened_control(ordinal)
    report = describe_wait_record(control.wait_record.words, (registry,)) if control is not None else None
    return LaunchError(f"{error}\n{report}") if report else error

"""A plan on CPU tensors: the same validation, planner, registry and argument binding as on a device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from cakegen.compile import CompileRequest, compile_ptx, request_for
from cakegen.emulator.faults import Fault
from cakegen.emulator.launches.address_space import AddressSpace
from cakegen.emulator.launches.stream import LaunchReport, QueuedLaunch, Stream
from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.extents import Extents, joined, rows_extents
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.machine.memory import Buffer, GlobalMemory
from cakegen.emulator.machine.residency import LaunchShape
from cakegen.emulator.text.parse import parse_kernel
from cakegen.emulator.text.translate import Program
from cakegen.emulator.units.tensor_core import multiply_add_hopper, multiply_add_wide
from cakegen.errors import EmulationError
from cakegen.plan import control_words, partials_elems
from cakegen.plan.records import Launch, Plan
from cakegen.registry import Program as ProgramRecord
from cakegen.registry import Registry
from cakegen.runtime.arguments import bind_arguments
from cakegen.runtime.operand import Operand
from cakegen.runtime.runner import decide_overlap, run_parameters
from cakegen.runtime.tensor_map import TensorMap
from cakegen.runtime.validate import Request

ARITHMETIC = {"hopper": multiply_add_hopper, "wide": multiply_add_wide}
# A wait's limit in ns of modelled time that no run reaches: a wait that can't end is found by who waits for whom.
_NEVER_NS = 1 << 62
_RECORD_WORDS = 16
# Line information makes a fault name the line of the source; it changes no instruction.
_FLAGS = ("-lineinfo",)


@dataclass(frozen=True)
class Options:
    """How to run: the adversary's schedule and seed, and the tensor core's arithmetic (`hopper` or `wide`).

    `checks` says whether the order of accesses is checked (races, proxies). A launch that still runs after
    `instruction_limit` warp-instructions counts as one that never ends; a run that takes longer than `seconds_limit`
    is given up, which is no verdict. `machine` makes the machine of a launch:
    `Machine`, or one that also looks on. `tensor_order`: tcgen05 instructions are ordered only where the ISA says so
    (`strict`), or as programs widely assume (`practice`). `scopes`: a write comes behind a read by any arrival and wait
    (`practice`), or by scopes that hold both threads (`strict`).
    """

    schedule: str = "random"
    seed: int = 0
    arithmetic: str = "hopper"
    checks: bool = True
    instruction_limit: int = 2_000_000_000
    seconds_limit: float | None = None
    machine: Callable[..., Machine] = Machine
    tensor_order: str = "strict"
    scopes: str = "practice"

    def build_machine(
        self,
        program: Program,
        memory: GlobalMemory,
        shape: LaunchShape,
        values: Sequence[TensorMap | int | bytes],
        barriers: Mapping[int, str],
        name: str,
        on_retire: Callable[[int, int], None] = lambda done, total: None,
    ) -> Machine:
        """The machine of one launch under these options; arguments as in `Machine`."""
        return self.machine(
            program,
            memory,
            shape,
            values,
            Adversary(self.schedule, self.seed),
            barriers,
            ARITHMETIC[self.arithmetic],
            instruction_limit=self.instruction_limit,
            on_retire=on_retire,
            checks=self.checks,
            strict_tensor_order=self.tensor_order == "strict",
            strict_scopes=self.scopes == "strict",
            name=name,
        )


DEFAULT_OPTIONS = Options()


def emulate_plan(
    registry: Registry,
    request: Request,
    plan: Plan,
    options: Options = DEFAULT_OPTIONS,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    load: Callable[[Registry, str, str], Program] | None = None,
) -> tuple[LaunchReport, ...]:
    """Run a plan's launches, in the order of a stream, on the request's CPU tensors.

    Parameters
    ----------
    request
        A validated call (`validate_front`, `validate_tail`) of CPU tensors; its outputs are written.
    plan
        What `plan_route` says for it, for any device that the export serves.
    on_progress
        Called with (clusters that have ended, clusters of the launch).
    load
        Where programs come from; by default from NVRTC, remembered.

    Raises
    ------
    Fault
        A program did something undefined, can't go on, or left an output unwritten.
    EmulationError
        It uses something that is not modelled, or the tensors are not on the CPU.
    """
    return emulate_calls(registry, [(request, plan)], options, on_progress=on_progress, load=load)


def emulate_calls(
    registry: Registry,
    calls: Sequence[tuple[Request, Plan]],
    options: Options = DEFAULT_OPTIONS,
    *,
    overlap: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    load: Callable[[Registry, str, str], Program] | None = None,
) -> tuple[LaunchReport, ...]:
    """Run several calls in one stream, such as the front and the tail of one layer; see `emulate_plan`.

    As in the runtime, a call has control words of its own, and all calls of a stream share the partials.

    Parameters
    ----------
    overlap
        Make every launch programmatic whose program offers it, as `overlap` of the runtime's functions does.

    Raises
    ------
    Fault, EmulationError
        As `emulate_plan`.
    """
    for request, _ in calls:
        if request.device.type != "cpu":
            raise EmulationError(f"{request.stage}: the emulator works on CPU tensors; got {request.device}")
    with torch.no_grad():
        scratch, rooms = _Scratch([plan for _, plan in calls]), [_room(request) for request, _ in calls]
        held = [request.placed(room.ctypes.data) for (request, _), room in zip(calls, rooms, strict=True)]
        operands = [operand for each in held for operand in each.values()]
        space = AddressSpace([*((each.address, each.end - each.address) for each in operands), *scratch.spans])
        written = [_written(request) for request, _ in calls]
        buffers = [*_operand_buffers(list(zip(held, written, strict=True)), space), *scratch.buffers(space)]
    queue: list[QueuedLaunch] = []
    for number, (request, plan) in enumerate(calls):
        placed = {name: replace(each, address=space[each.address]) for name, each in held[number].items()}
        addresses = {name: each.address for name, each in placed.items()}
        addresses |= {name: space[address] for name, address in scratch.addresses(number).items()}
        context = _Call(registry, request, plan.device.arch, placed, addresses, options, on_progress)
        for launch in plan.launches:
            program = (load or load_program)(registry, launch.key, plan.device.arch)
            queue.append(context.queue(launch, program, overlap))
    stream = Stream(queue, buffers, Adversary(options.schedule, options.seed), options.seconds_limit)
    stream.run()
    _check_outputs(buffers)
    scratch.check()
    return stream.reports()


class _Scratch:
    """What launches need beside their operands, and the runtime owns."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        words = [max(control_words(launch) for launch in plan.launches) for plan in plans]
        elems = max(partials_elems(launch) for plan in plans for launch in plan.launches)
        self._counters = [_aligned(count, np.int32) for count in words]
        self._partials = _aligned(elems, np.float32)
        self._partials.fill(np.nan)
        self._record = _aligned(_RECORD_WORDS, np.uint64)
        self._record[0] = _NEVER_NS

    def addresses(self, call: int) -> dict[str, int]:
        """Addresses by the names that `arg_plan` uses; 0 for what no launch needs."""
        return {name: array.ctypes.data if array.size else 0 for name, array in self._arrays(self._counters[call])}

    def _arrays(self, counters: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        yield "counters", counters
        yield "partials", self._partials
        yield "wait_record", self._record

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Address and bytes of every array."""
        return [(array.ctypes.data, array.nbytes) for _, array in self._allocated()]

    def _allocated(self) -> list[tuple[str, np.ndarray]]:
        arrays = [("counters", counters) for counters in self._counters[1:]]
        arrays += self._arrays(self._counters[0])
        return [(name, array) for name, array in arrays if array.size]

    def buffers(self, space: AddressSpace) -> list[Buffer]:
        """As allocations; the partials of a segment come from one CTA."""
        return [
            Buffer(name, space[host := array.ctypes.data], array.nbytes, output=name == "partials", host=host)
            for name, array in self._allocated()
        ]

    def check(self) -> None:
        """Refuse control words that a launch did not leave at zero."""
        for counters in self._counters:
            if counters.any():
                raise Fault("output", f"control words are {counters.tolist()} after the launch; each leaves them at 0")


def _aligned(count: int, dtype: type) -> np.ndarray:
    size = count * np.dtype(dtype).itemsize
    raw = np.zeros(size + 256, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + size].view(dtype)


def _room(request: Request) -> np.ndarray:
    """Memory for the operand of a request that has none, full of NaN."""
    room = _aligned(request.room_bytes, np.uint8)
    room.fill(0xFF)
    return room


def _written(request: Request) -> list[str]:
    """Names of what a call writes: its outputs, and what it prepares for itself."""
    outputs = {id(tensor) for tensor in request.outputs}
    names = [name for name, tensor in request.tensors.items() if id(tensor) in outputs]
    return names if request.unplaced is None else [*names, request.unplaced.name]


def _operand_buffers(calls: Sequence[tuple[Mapping[str, Operand], list[str]]], space: AddressSpace) -> list[Buffer]:
    """One allocation a matrix: what one call writes and a later one reads is an output.

    Inputs may share bytes; those that do are one allocation.

    Parameters
    ----------
    calls
        The operands of each, and the names of what it writes.
    """
    outputs: dict[int, Buffer] = {}
    inputs: list[_Input] = []
    for operands, names in calls:
        for name in names:
            operand = operands[name]
            outputs[operand.address] = _buffer(name, operand.address, operand_extents(operand), space, output=True)
        for name, operand in operands.items():
            if name not in names:
                inputs = _with_input(inputs, _Input((name,), operand.address, operand_extents(operand)))
    reads = [
        _buffer(" and ".join(each.names), each.address, each.extents, space)
        for each in inputs
        if each.address not in outputs
    ]
    return [*outputs.values(), *reads]


@dataclass(frozen=True)
class _Input:
    """Inputs that share bytes: their names, where the first begins, and what they hold from there."""

    names: tuple[str, ...]
    address: int
    extents: Extents

    def beside(self, other: _Input) -> tuple[Extents, Extents]:
        """What both hold, from where the first of them begins."""
        first = min(self.address, other.address)
        return self.extents.moved(self.address - first), other.extents.moved(other.address - first)


def _with_input(inputs: Sequence[_Input], new: _Input) -> list[_Input]:
    """The inputs and one more, joined with those whose bytes it shares."""
    apart = []
    for each in inputs:
        ours, theirs = new.beside(each)
        if ours.share_bytes(theirs):
            names = tuple(dict.fromkeys((*each.names, *new.names)))
            new = _Input(names, min(each.address, new.address), joined((ours, theirs)))
        else:
            apart.append(each)
    return [*apart, new]


def operand_extents(operand: Operand) -> Extents:
    """The bytes that an operand holds, from its address on."""
    size = operand.element_bytes
    if operand.chunk_stride:
        return rows_extents(operand.matrix_elems * size, 1, 0)
    pitch, plane = operand.pitch * size, operand.partial_stride * size
    return rows_extents(operand.cols * size, operand.rows, pitch, operand.partials, plane)


def _buffer(name: str, address: int, extents: Extents, space: AddressSpace, *, output: bool = False) -> Buffer:
    held = None if extents.dense else extents
    base, size = space[address], extents.num_bytes
    return Buffer(name, base, size, held, output=output, read_only=not output, host=address)


@dataclass(frozen=True)
class _Call:
    """What all launches of one call share; operands and addresses as programs see them."""

    registry: Registry
    request: Request
    arch: str
    operands: dict[str, Operand]
    addresses: dict[str, int]
    options: Options
    on_progress: Callable[[int, int], None]

    def queue(self, launch: Launch, program: Program, overlap: bool) -> QueuedLaunch:
        """A launch with its arguments bound."""
        record = self.registry.program(launch.key)
        attributes, own = decide_overlap(launch, record.launch, overlap)
        parameters = run_parameters(self.request, self.operands) | own
        arguments = bind_arguments(record, self.operands, self.addresses, parameters)

        def make(memory: GlobalMemory) -> Machine:
            shape, names = launch_shape(record, launch), barrier_names(record)
            values = [argument.value for argument in arguments]
            return self.options.build_machine(program, memory, shape, values, names, launch.key, self.on_progress)

        return QueuedLaunch(launch.key, attributes.programmatic, make)


def launch_shape(record: ProgramRecord, launch: Launch) -> LaunchShape:
    """A launch's shape from its registry record and its plan."""
    attributes = record.launch
    return LaunchShape(
        launch.grid_ctas,
        attributes.block,
        attributes.cluster,
        attributes.dynamic_smem_bytes,
        attributes.cooperative,
    )


def barrier_names(record: ProgramRecord) -> dict[int, str]:
    """Offset in dynamic shared memory -> `stage_full[2]`, from the order in the registry's record."""
    names = [f"{name}[{i}]" if count > 1 else name for name, count in record.barriers for i in range(count)]
    return {8 * index: name for index, name in enumerate(names)}


def load_program(registry: Registry, key: str, arch: str, compile_flags: tuple[str, ...] = ()) -> Program:
    """The translated program of a key, compiled by NVRTC with line information; remembered by what it is made of."""
    return _translated(request_for(registry, key, arch, (*_FLAGS, *compile_flags)))


@functools.lru_cache(maxsize=64)
def _translated(request: CompileRequest) -> Program:
    return program_of(compile_ptx(request), request.kernel_symbol)


def program_of(ptx: str, symbol: str) -> Program:
    """A program from PTX text; every block is translated, so that an unknown instruction is found here.

    Raises
    ------
    EmulationError
        The text holds something that is not modelled.
    """
    program = Program(parse_kernel(ptx, symbol))
    program.translate_all()
    return program


def _check_outputs(buffers: list[Buffer]) -> None:
    for buffer in buffers:
        if buffer.output and buffer.name != "partials" and (missing := buffer.unwritten_bytes()):
            raise Fault("output", f"{missing} bytes of {buffer.name} were never written")

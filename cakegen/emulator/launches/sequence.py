"""Anybody's kernels: a sequence of launches that share arrays of this machine's memory.

What `cakegen emulate --launch FILE` runs; docs/emulate-launch.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cakegen.emulator.faults import Fault
from cakegen.emulator.launches.address_space import AddressSpace
from cakegen.emulator.launches.arrays import ELEMENTS, HostBuffer
from cakegen.emulator.launches.launch import DEFAULT_OPTIONS, Options
from cakegen.emulator.launches.stream import LaunchReport, QueuedLaunch, Stream
from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import MAP_BYTES, Machine
from cakegen.emulator.machine.memory import Buffer, GlobalMemory
from cakegen.emulator.machine.residency import LaunchShape
from cakegen.emulator.text.translate import Program
from cakegen.errors import LaunchError
from cakegen.runtime.tensor_map import TensorMap


@dataclass(frozen=True)
class BufferArgument:
    """A pointer into a buffer."""

    buffer: str
    offset_bytes: int = 0


@dataclass(frozen=True)
class MapArgument:
    """A tensor map by value (`const __grid_constant__ CUtensorMap`); fields as in `TensorMap`."""

    buffer: str
    element: str
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str = "none"
    offset_bytes: int = 0


Argument = BufferArgument | MapArgument | bytes


@dataclass(frozen=True)
class KernelLaunch:
    """One launch: a kernel's name, its shape, and its arguments in the order of its parameters.

    Parameters
    ----------
    programmatic
        It may start once every CTA of the launch before it has triggered or exited.
    barrier_names
        Offset of an mbarrier in dynamic shared memory -> what reports call it.
    """

    entry: str
    shape: LaunchShape
    arguments: tuple[Argument, ...]
    programmatic: bool = False
    barrier_names: dict[int, str] = field(default_factory=dict)


def run_sequence(
    programs: Mapping[str, Program],
    launches: Sequence[KernelLaunch],
    buffers: Mapping[str, HostBuffer],
    options: Options = DEFAULT_OPTIONS,
) -> tuple[LaunchReport, ...]:
    """Run launches in the order of one stream; buffers are written in place.

    Parameters
    ----------
    programs
        By the names of their entries.

    Raises
    ------
    LaunchError
        An argument does not fit its parameter, or a launch's shape is none that a device takes.
    Fault
        A kernel did something undefined, can't go on, or left part of a `write` buffer unwritten.
    EmulationError
        A kernel uses something that is not modelled.
    """
    space = AddressSpace((each.address, each.array.nbytes) for each in buffers.values())
    allocations = {name: _allocation(name, each, space) for name, each in buffers.items()}
    queue = [
        _queued(number, launch, programs[launch.entry], allocations, options) for number, launch in enumerate(launches)
    ]
    adversary = Adversary(options.schedule, options.seed)
    stream = Stream(queue, list(allocations.values()), adversary, options.seconds_limit)
    stream.run()
    for allocation in allocations.values():
        if allocation.output and (missing := allocation.unwritten_bytes()):
            raise Fault("output", f"{missing} bytes of {allocation.name} were never written")
    return stream.reports()


def _allocation(name: str, buffer: HostBuffer, space: AddressSpace) -> Buffer:
    writes, reads = buffer.role == "write", buffer.role == "read"
    base, size = space[buffer.address], buffer.array.nbytes
    return Buffer(name, base, size, output=writes, read_only=reads, host=buffer.address)


def _queued(
    number: int, launch: KernelLaunch, program: Program, buffers: Mapping[str, Buffer], options: Options
) -> QueuedLaunch:
    kernel = program.kernel
    where = f"launch {number + 1}, {launch.entry}"
    if len(launch.arguments) != len(kernel.parameters):
        raise LaunchError(
            f"{where}: the kernel has {len(kernel.parameters)} parameters; got {len(launch.arguments)} arguments"
        )
    values = [_value(f"{where}, argument {at + 1}", each, buffers) for at, each in enumerate(launch.arguments)]
    for at, (value, parameter) in enumerate(zip(values, kernel.parameters, strict=True)):
        size = 8 if isinstance(value, int) else MAP_BYTES if isinstance(value, TensorMap) else len(value)
        if size != parameter.num_bytes:
            raise LaunchError(
                f"{where}, argument {at + 1}: has {size} bytes; parameter {parameter.name} has {parameter.num_bytes}"
            )

    def make(memory: GlobalMemory) -> Machine:
        return options.build_machine(program, memory, launch.shape, values, launch.barrier_names, launch.entry)

    return QueuedLaunch(launch.entry, launch.programmatic, make)


def _value(where: str, argument: Argument, buffers: Mapping[str, Buffer]) -> int | bytes | TensorMap:
    if isinstance(argument, bytes):
        return argument
    buffer = buffers[argument.buffer]
    if argument.offset_bytes >= buffer.num_bytes:
        raise LaunchError(f"{where}: byte {argument.offset_bytes} of {buffer.name}, which has {buffer.num_bytes}")
    address = buffer.base + argument.offset_bytes
    if isinstance(argument, BufferArgument):
        return address
    size = np.dtype(ELEMENTS[argument.element]).itemsize
    last = sum((n - 1) * step for n, step in zip(argument.dims, (size, *argument.strides_bytes), strict=False))
    end = argument.offset_bytes + last + size
    if end > buffer.num_bytes:
        raise LaunchError(f"{where}: the tensor map ends at byte {end} of {buffer.name}, which has {buffer.num_bytes}")
    name = f"on {buffer.name}"
    shape = (argument.dims, argument.strides_bytes, argument.box)
    return TensorMap(name, address, *shape, argument.swizzle, element_bytes=size, element=argument.element)

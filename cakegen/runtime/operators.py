"""The front and the tail as torch operators: for torch.compile, CUDA-graph trees and torch.export.

Importing this module defines those of the published export; `define_operators` defines another export's. Imports torch
and the rest of this package, which does not import it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cakegen.errors import LaunchError, OperandError
from cakegen.model import ModelDims
from cakegen.operands import Stage, named, shape_of, share_of
from cakegen.runtime import driver, kimi_k3_latent_moe, shared_latent_moe
from cakegen.runtime.guard import GuardedLock
from cakegen.runtime.latent_moe import LatentMoe
from cakegen.runtime.prepared import Runner
from cakegen.runtime.release import FORGET
from cakegen.runtime.runner import ProgramRunner
from cakegen.runtime.workspace import FP32_BYTES, CallWorkspace

NAMESPACE = "cakegen"
MOST_RUNNERS = 2048
"""Prepared calls that an export's operators keep: front and tail of 64 layers at 16 token counts."""

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Operators:
    """The operators of one export.

    `front(x, gate_weight, down_weight, shared_gate_up_weight)` returns new `(logits, latent, shared_act)`;
    `tail(routed, norm_weight, up_weight, shared_act, shared_down_weight, tp=, rank=)` returns new `(y, out)`. The
    `_out` variants take the outputs as keywords (`y_workspace` for y), write them and return nothing. All take
    `overlap=False`. Shapes and options are those of `LatentMoe.prepare_front` and `prepare_tail`. On CUDA tensors
    generated programs run, on CPU tensors the torch reference or the emulator.
    """

    front: Any
    front_out: Any
    tail: Any
    tail_out: Any


class PreparedCalls:
    """Runners by all that their launches depend on: addresses, shapes, strides, and the stream.

    They keep no tensor alive: a call that finds its runner brings live operands at the same addresses. Two calls that
    share a runner share its outputs, so they can't run at once anyway. fp32 partials are a temporary of each call, from
    torch's allocator: the layers of a stream pass the same memory on, two streams never share it, and a graph's
    partials are in the graph's own pool.

    Parameters
    ----------
    most
        Runners to keep; the one that was not used for longest is dropped.
    """

    def __init__(self, most: int = MOST_RUNNERS) -> None:
        self._most = most
        self._lock = GuardedLock("looking up a prepared call")
        # with the number of partials that a runner was bound to, and their address
        self._kept: OrderedDict[tuple[Any, ...], tuple[Runner, int, int]] = OrderedDict()

        FORGET.add(self)

    def __len__(self) -> int:
        return len(self._kept)

    def forget(self) -> None:
        """Drop every kept runner."""
        with self._lock:
            self._kept.clear()

    def run(self, prepare: Callable[..., Runner], operands: Tensors, options: dict[str, Any]) -> None:
        """Run a call on torch's current stream.

        Parameters
        ----------
        prepare
            `LatentMoe.prepare_front` or `prepare_tail`.
        operands, options
            Its arguments; those of the options that are tensors are operands too.
        """
        device = operands[0].device
        ordinal = device.index
        if ordinal is None:  # a CPU tensor: torch calls a CUDA kernel where any operand is there, and this refuses
            prepare(*operands, **options)  # type: ignore[unreachable]  # torch's stubs know no device without an index
            return
        stream = driver.current_stream(ordinal)
        key = (prepare, stream, *options, *map(_identity, (*operands, *options.values())))
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
        workspace = None
        if kept is not None:
            runner, partials, address = kept
            if partials:
                workspace = CallWorkspace(device)
                workspace.reserve(partials)
            if workspace is None or workspace.address == address:
                runner()
                return
        workspace = workspace or CallWorkspace(device)
        runner = prepare(*operands, **options, workspace=workspace)
        runner()
        if isinstance(runner, ProgramRunner):
            self._keep(key, runner, workspace)

    def _keep(self, key: tuple[Any, ...], runner: ProgramRunner, workspace: CallWorkspace) -> None:
        runner.release_operands()
        with self._lock:
            self._kept[key] = (runner, workspace.bytes // FP32_BYTES, workspace.address)
            self._kept.move_to_end(key)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)


def _identity(value: Any) -> Any:
    """All that a launch depends on of an operand, whose address also tells its device; a number is itself."""
    if isinstance(value, int):
        return value
    return value.data_ptr(), value.shape, value.stride(), value.dtype


# What a stage takes beside its operands.
_NUMBERS = {"front": "bool overlap=False", "tail": "int tp, int rank, bool overlap=False"}
# torch must hand over the strides that the fake kernels saw: an activation's rows may be pitched, a weight's not
_TAGS = (getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),)

_defined_lock = GuardedLock("defining operators")
CPU_BACKENDS = ("reference", "emulator")


@dataclass(frozen=True)
class _Defined:
    """What an export's operators are over; torch drops them with the library."""

    moe: LatentMoe
    cpu_backend: str
    operators: Operators
    library: Any


_defined: dict[str, _Defined] = {}


def define_operators(moe: LatentMoe, *, cpu_backend: str | None = None) -> Operators:
    """The operators `cakegen::<export>_front` and `_tail` with their `out` overloads, defined at first use.

    Parameters
    ----------
    cpu_backend
        What they run on CPU tensors: `reference`, or `emulator`, the programs themselves. None: what they were defined
        with, at first `reference`.

    Raises
    ------
    LaunchError
        Those of the export are defined over another `LatentMoe` or backend: torch knows an operator by its name alone.
    """
    export = moe.registry.export
    if cpu_backend is not None and cpu_backend not in CPU_BACKENDS:
        raise OperandError(f"define_operators: cpu_backend is {' or '.join(CPU_BACKENDS)}; got {cpu_backend!r}.")
    with _defined_lock:
        if export not in _defined:
            _defined[export] = _define(export, moe, cpu_backend or "reference")
        found = _defined[export]
    if found.moe is not moe:
        raise LaunchError(
            f"{NAMESPACE}::{export}_front is defined over another LatentMoe of this export, and torch knows an "
            "operator by its name alone. Use shared_latent_moe(export) everywhere."
        )
    if cpu_backend not in (None, found.cpu_backend):
        raise LaunchError(
            f"{NAMESPACE}::{export}_front is defined with cpu_backend={found.cpu_backend!r}, and torch knows an "
            f"operator by its name alone. Name {cpu_backend!r} at the first definition in the process."
        )
    return found.operators


def operators_of(export: str) -> Operators:
    """The operators of an export as this process defined them, or those of the shipped export of that name.

    Raises
    ------
    RegistryError
        None are defined, and no such export is shipped.
    """
    with _defined_lock:
        found = _defined.get(export)
    return define_operators(shared_latent_moe(export)) if found is None else found.operators


def _define(export: str, moe: LatentMoe, cpu_backend: str) -> _Defined:
    library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    calls = PreparedCalls()
    stages = moe.model.dims.stages
    for stage in stages:
        _define_stage(library, f"{export}_{stage}", stage, moe, calls, cpu_backend)
    packets = getattr(torch.ops, NAMESPACE)
    front, tail = (getattr(packets, f"{export}_{stage}") for stage in stages)
    return _Defined(moe, cpu_backend, Operators(front.default, front.out, tail.default, tail.out), library)


def _define_stage(library: Any, name: str, stage: str, moe: LatentMoe, calls: PreparedCalls, cpu_backend: str) -> None:
    """Both overloads of a stage's operator."""
    prepare, call = (moe.prepare_front, moe.front) if stage == "front" else (moe.prepare_tail, moe.tail)
    dims = moe.model.dims
    table = dims.stages[stage]
    outputs = table.outputs

    def allocate(inputs: Tensors) -> Tensors:
        return _empty_outputs(table, dims, inputs)

    def launch(*inputs: torch.Tensor, **options: Any) -> None:
        if torch.is_grad_enabled():
            refuse_gradients(name, inputs)
        calls.run(prepare, inputs, options)

    def compute(*inputs: torch.Tensor, **options: Any) -> None:
        if torch.is_grad_enabled():
            refuse_gradients(name, inputs)
        call(*inputs, **options, backend=cpu_backend)

    def fake(*inputs: torch.Tensor, **_: Any) -> Tensors:
        refuse_gradients(name, inputs)
        return allocate(inputs)

    def functional(run: Callable[..., None]) -> Callable[..., Tensors]:
        def of_inputs(*inputs: torch.Tensor, overlap: bool = False, **of_rank: int) -> Tensors:
            written = allocate(inputs)
            run(*inputs, **named(outputs, written), **of_rank, overlap=overlap)
            return written

        return of_inputs

    _define_schemas(library, name, stage, table)
    _implement(library, name, functional, launch, compute, fake)


def refuse_gradients(name: str, inputs: Tensors) -> None:
    """Refuse an input that autograd records: no gradient would flow through, and nothing would say so.

    Raises
    ------
    LaunchError
        One is.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        raise LaunchError(
            f"{NAMESPACE}::{name}: inputs must need no gradient, since there is no backward pass; autograd records "
            "one. Call under torch.inference_mode() or torch.no_grad(), or detach the inputs."
        )


def _define_schemas(library: Any, name: str, stage: str, table: Stage) -> None:
    """Both overloads: one returns new outputs, the other writes those that it is given."""
    inputs = ", ".join(f"Tensor {spec.name}" for spec in table.inputs)
    inputs += f", *, {_NUMBERS[stage]}"
    outputs = table.outputs
    returned = ", ".join(f"Tensor {spec.short}" for spec in outputs)
    written = ", ".join(f"Tensor({mark}!) {spec.name}" for mark, spec in zip("abcdef", outputs, strict=False))
    library.define(f"{name}({inputs}) -> ({returned})", tags=_TAGS)
    library.define(f"{name}.out({inputs}, {written}) -> ()", tags=_TAGS)


def _empty_outputs(stage: Stage, dims: ModelDims, inputs: Tensors) -> Tensors:
    """Room for a stage's outputs on the device of its first input, in extents that the inputs tell."""
    extents: dict[str, int] = {}
    i_local = 0
    for spec, tensor in zip(stage.inputs, inputs, strict=True):
        # a packed weight's rows are its second extent, its columns the product of the others
        shape = tensor.shape if spec.kind != "weight" or tensor.dim() == 2 else (tensor.shape[1], -1)
        extents.update(zip(spec.shape, shape, strict=True))
        i_local = i_local or share_of(spec, shape)
    return tuple(
        inputs[0].new_empty(
            shape_of(spec, dims, i_local=i_local, tokens=extents["T"]),
            dtype=torch.float32 if spec.fp32 else torch.bfloat16,
        )
        for spec in stage.outputs
    )


def _implement(
    library: Any,
    name: str,
    functional: Callable[[Callable[..., None]], Callable[..., Tensors]],
    launch: Callable[..., None],
    compute: Callable[..., None],
    fake: Callable[..., Tensors],
) -> None:
    """Both overloads of an operator for CUDA, for CPU, and for tensors without values.

    Defined through `Library`, not `torch.library.custom_op`, whose wrappers cost each call several microseconds.
    """
    for run, key in ((launch, "CUDA"), (compute, "CPU")):
        library.impl(name, functional(run), key)
        library.impl(f"{name}.out", run, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    torch.library.register_fake(f"{NAMESPACE}::{name}.out", lambda *inputs, **outputs: None, lib=library)


KIMI_K3 = define_operators(kimi_k3_latent_moe())
"""`torch.ops.cakegen.kimi_k3_latent_moe_front` and `_tail`, with their `out` overloads."""

"""Operands of the front and the tail: checked against the model, and reduced to addresses and pitches.

Imports torch, errors, arch, model, operands, operand, packing and tensor_map. Asks no driver, so that it holds for CPU
tensors (backend='reference') as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

import torch

from cakegen.arch import INT32_MAX
from cakegen.errors import OperandError, OperandKindError
from cakegen.model import Model, ModelDims
from cakegen.operands import OperandSpec, Stage, shape_of, share_of
from cakegen.runtime.operand import Operand, overlap
from cakegen.runtime.packing import packed_shape
from cakegen.runtime.plain import check_tensors, check_whole
from cakegen.runtime.tensor_map import CHUNK_COLS

ALIGN_BYTES = 16
Operands = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Request:
    """A validated call: what the planner needs, the operands, and the tensors to keep alive.

    Parameters
    ----------
    stage
        `front` or `tail`.
    operands
        By the names that the registry's `arg_plan` uses.
    outputs
        What the function returns.
    tensors
        Every tensor of the call, by its parameter's name.
    validate
        Checks other tensors for the same call, given by those names.
    up_col0
        First latent column of this rank's slice (tail).
    unplaced
        An operand without memory: prepared tokens of several partials that the caller does not ask for. Whoever
        launches has room for it; see `placed`.
    shorts
        What operands are called as results, where that is not by their names.
    """

    stage: str
    tp: int
    rank: int
    tokens: int
    partials: int
    device: torch.device
    operands: dict[str, Operand]
    outputs: tuple[torch.Tensor, ...]
    tensors: Operands
    validate: Callable[..., Request] = field(repr=False, compare=False)
    up_col0: int = 0
    unplaced: Operand | None = None
    shorts: Mapping[str, str] = field(default_factory=dict)

    @property
    def room_bytes(self) -> int:
        """Memory that `placed` needs."""
        return 0 if self.unplaced is None else self.unplaced.matrix_elems * self.unplaced.element_bytes

    def placed(self, address: int) -> dict[str, Operand]:
        """All operands, with the one that had no memory at an address."""
        if self.unplaced is None:
            return self.operands
        return self.operands | {self.unplaced.name: replace(self.unplaced, address=address)}


@dataclass
class _Check:
    """Checks of one call; every refusal starts with the stage and the operand."""

    stage: str
    device: torch.device
    operands: dict[str, Operand] = field(default_factory=dict)

    def refuse(self, name: str, tensor: torch.Tensor, need: str, todo: str) -> NoReturn:
        shape = list(tensor.shape)
        got = f"{shape} {_dtype_name(tensor.dtype)}, strides {tuple(tensor.stride())}, on {tensor.device}"
        raise OperandError(f"{self.stage}: {name} must be {need}; got {got}. {todo}")

    def stage_operands(
        self, dims: ModelDims, stage: Stage, tensors: Mapping[str, torch.Tensor], *, i_local: int, tokens: int
    ) -> None:
        """Check every operand of the stage by the table of them, but the partials, which tell the number of tokens."""
        shared = dims.shared_intermediate
        for spec in stage.operands:
            tensor, shape = tensors[spec.name], shape_of(spec, dims, i_local=i_local, tokens=tokens)
            why = spec.why.format(i_local=i_local, shared=shared, tp=shared // i_local)
            if spec.kind == "weight":
                self.weight(spec.name, tensor, (shape[0], shape[1]), why)
            elif spec.kind == "vector":
                self.vector(spec.name, tensor, shape[0], why)
            elif spec.kind == "rows":
                dtype = torch.float32 if spec.fp32 else torch.bfloat16
                self.matrix(spec.name, tensor, (shape[0], shape[1]), why, dtype=dtype, pitched=True)

    def matrix(
        self,
        name: str,
        tensor: torch.Tensor,
        shape: tuple[int, int],
        why: str,
        *,
        dtype: torch.dtype = torch.bfloat16,
        pitched: bool = False,
    ) -> None:
        """Check a matrix (`pitched`: rows may be apart) and note its operand."""
        rows, cols = shape
        layout = "rows of stride 1 in a" if pitched else "contiguous"
        need = f"{layout} [{rows}, {cols}] {_dtype_name(dtype)} ({why}) on {self.device}"
        self._kind(name, tensor, dtype, need)
        if tuple(tensor.shape) != shape:
            self.refuse(name, tensor, need, "Pass the checkpoint's tensor for this rank, or an output of this shape.")
        row_stride, col_stride = tensor.stride()
        pitch = row_stride if rows > 1 else cols
        if col_stride != 1 or pitch < cols or (not pitched and pitch != cols):
            self.refuse(name, tensor, need, "Call .contiguous().")
        self._note(tensor, Operand(name, tensor.data_ptr(), rows, cols, pitch, tensor.element_size(), cols))

    def weight(self, name: str, tensor: torch.Tensor, shape: tuple[int, int], why: str) -> None:
        """Check a weight: contiguous and row-major, or packed (`pack_weight`)."""
        if tensor.dim() != 3:
            self.matrix(name, tensor, shape, why)
            return
        rows, cols = shape
        packed = packed_shape(rows, cols)
        need = f"contiguous [{rows}, {cols}] bfloat16 ({why}), or packed {list(packed)}, on {self.device}"
        self._kind(name, tensor, torch.bfloat16, need)
        if tuple(tensor.shape) != packed or not tensor.is_contiguous():
            self.refuse(name, tensor, need, "Pass what pack_weight made of the checkpoint's tensor for this rank.")
        size, chunk = tensor.element_size(), rows * CHUNK_COLS
        operand = Operand(name, tensor.data_ptr(), rows, cols, CHUNK_COLS, size, cols, chunk_stride=chunk)
        self._note(tensor, operand)

    def vector(self, name: str, tensor: torch.Tensor, length: int, why: str) -> None:
        """Check a contiguous bf16 vector."""
        need = f"contiguous [{length}] bfloat16 ({why}) on {self.device}"
        self._kind(name, tensor, torch.bfloat16, need)
        if tuple(tensor.shape) != (length,) or tensor.stride(0) != 1:
            self.refuse(name, tensor, need, "Pass the checkpoint's tensor, contiguous.")
        self._note(tensor, Operand(name, tensor.data_ptr(), 1, length, length, tensor.element_size(), length))

    def partials(self, name: str, tensor: torch.Tensor, latent: int) -> None:
        """Check the routed partials `[P, T, latent]`: both outer strides are free."""
        need = f"rows of stride 1 in a [P, T, {latent}] bfloat16 (P >= 1 partials of T tokens) on {self.device}"
        self._kind(name, tensor, torch.bfloat16, need)
        if tensor.dim() != 3 or tensor.shape[2] != latent or tensor.shape[0] < 1:
            self.refuse(name, tensor, need, "One partial is routed.unsqueeze(0).")
        partials, rows, _ = tensor.shape
        partial_stride, row_stride, col_stride = tensor.stride()
        pitch = row_stride if rows > 1 else latent
        partial_stride = partial_stride if partials > 1 else 0
        if col_stride != 1 or pitch < latent or partial_stride < 0:
            self.refuse(name, tensor, need, "Call .contiguous().")
        size = tensor.element_size()
        operand = Operand(name, tensor.data_ptr(), rows, latent, pitch, size, latent, partials, partial_stride)
        if partial_stride * size % ALIGN_BYTES:
            todo = f"The partial stride is {partial_stride} * {size} bytes = {partial_stride * size}."
            self.refuse(name, tensor, f"partials a multiple of {ALIGN_BYTES} bytes apart (vector loads)", todo)
        self._note(tensor, operand)

    def _kind(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, need: str) -> None:
        if tensor.device != self.device:
            self.refuse(name, tensor, need, "All operands of a call live on one device.")
        if tensor.dtype != dtype:
            self.refuse(name, tensor, need, f"Call .to(torch.{_dtype_name(dtype)}).")

    def _note(self, tensor: torch.Tensor, operand: Operand) -> None:
        """Check what depends on the address and the pitch; an operand without elements has neither."""
        name, size = operand.name, operand.element_bytes
        if operand.rows and operand.address % ALIGN_BYTES:
            rest = operand.address % ALIGN_BYTES
            todo = f"Its address is {operand.address:#x} (mod {ALIGN_BYTES} = {rest}); slice elsewhere or copy."
            self.refuse(name, tensor, f"aligned to {ALIGN_BYTES} bytes (vector and tensor-map accesses)", todo)
        if operand.rows > 1 and operand.pitch * size % ALIGN_BYTES:
            todo = f"Its row pitch is {operand.pitch} * {size} bytes = {operand.pitch * size}; pad the rows or copy."
            self.refuse(name, tensor, f"of a row pitch that is a multiple of {ALIGN_BYTES} bytes", todo)
        # partials may lie further apart in all: programs multiply their number and stride in 64 bits
        if operand.matrix_elems > INT32_MAX:
            rows = f"{operand.rows - 1} rows * {operand.pitch} + {operand.cols} = {operand.matrix_elems}"
            need = f"at most 2^31 - 1 = {INT32_MAX} elements long (32-bit offsets)"
            self.refuse(name, tensor, need, f"It spans {rows} elements; split the call.")
        if operand.partial_stride > INT32_MAX:
            need = f"partials at most 2^31 - 1 = {INT32_MAX} elements apart (an i32 parameter)"
            self.refuse(name, tensor, need, f"The partial stride is {operand.partial_stride}; copy them together.")
        self._backed(tensor, operand)
        self.operands[name] = operand

    def _backed(self, tensor: torch.Tensor, operand: Operand) -> None:
        """Check that the memory is there: a storage can be shrunk behind its tensors, whose shapes stay."""
        storage = tensor.untyped_storage()
        behind = tensor.storage_offset() * operand.element_bytes + operand.end - operand.address
        if operand.rows and behind > storage.nbytes():
            todo = (
                f"Its last element ends at byte {behind} of a storage of {storage.nbytes()} bytes, which was shrunk or "
                "freed; load it again first."
            )
            self.refuse(operand.name, tensor, "backed by memory", todo)

    def outputs_apart(self, outputs: Iterable[OperandSpec]) -> None:
        """Refuse an output that shares bytes with another operand.

        Raises
        ------
        OperandError
            One does.
        """
        seen = set()
        for spec in outputs:
            seen.add(spec.name)
            first = self.operands[spec.name]
            for second in self.operands.values():
                if second.name in seen or not overlap(first, second):
                    continue
                raise OperandError(
                    f"{self.stage}: output {spec.name} must share no memory with another operand; it has bytes "
                    f"{first.address:#x} … {first.end:#x}, {second.name} has {second.address:#x} … {second.end:#x}. "
                    "Allocate them apart."
                )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def given_operands(
    name: str, stage: Stage, operands: Sequence[torch.Tensor], by_name: Mapping[str, torch.Tensor]
) -> Operands:
    """The operands of a call, by name, from those that it gives by position and by name.

    Raises
    ------
    OperandKindError
        One is missing, given twice, or not of the stage.
    """
    order, names = stage.positional_names, stage.names
    given = dict(zip(order, operands, strict=False))
    if (
        len(operands) <= len(order)
        and len(given) + len(by_name) == len(names)
        and given.keys() | by_name.keys() == names
    ):
        return given | dict(by_name)
    twice = [each for each in by_name if each in given]
    unknown = [each for each in by_name if each not in names]
    missing = [each for each in names if each not in given and each not in by_name]
    faults = (("missing", missing), ("given twice", twice), ("unknown", unknown))
    said = "; ".join(f"{what}: {', '.join(each)}" for what, each in faults if each)
    many = f"{len(operands)} by position of at most {len(order)}"
    raise OperandKindError(
        f"{name}: takes {', '.join(order)} by position or by name"
        f"{''.join(f', and {each} by name' for each in names if each not in order)}; got {many}. {said}".rstrip()
    )


def validate_front(model: Model, **tensors: torch.Tensor) -> Request:
    """Check the operands of a front, by name; TP follows from the rows of the weight that is split over it.

    Raises
    ------
    OperandError
        An operand is not what the model needs; the message names it.
    """
    dims, stage = model.dims, model.dims.rows_stage
    _check_kinds("front", stage, tensors)
    x = tensors[stage.tokens.name]
    check = _Check("front", x.device)
    if x.dim() != 2:
        need = f"rows of stride 1 in a [T, {dims.hidden}] bfloat16"
        check.refuse(stage.tokens.name, x, need, "Flatten the batch into tokens.")
    tokens = int(x.shape[0])
    i_local = _front_i_local(check, model, tensors)
    check.stage_operands(dims, stage, tensors, i_local=i_local, tokens=tokens)
    check.outputs_apart(stage.outputs)
    return Request(
        stage="front",
        tp=dims.shared_intermediate // i_local,
        rank=0,
        tokens=tokens,
        partials=1,
        device=x.device,
        operands=check.operands,
        outputs=tuple(tensors[spec.name] for spec in stage.outputs),
        tensors=tensors,
        validate=partial(validate_front, model),
    )


def _front_i_local(check: _Check, model: Model, tensors: Operands) -> int:
    """A rank's share, from the rows of the weight whose product is split over TP."""
    dims = model.dims
    (product,) = dims.rows_stage.activated
    spec, whole = product.weight, dims.shared_intermediate
    weight, unit = tensors[spec.name], 2 if product.gated else 1
    rows = {2: int(weight.shape[0]), 3: int(weight.shape[1])}[weight.dim()] if weight.dim() in (2, 3) else 0
    if rows < unit or rows % unit or whole % share_of(spec, (rows, dims.hidden)):
        extent = "2 * I_LOCAL" if product.gated else "I_LOCAL"
        need = f"[{extent}, {dims.hidden}] bfloat16 with I_LOCAL = {whole} / TP for a whole TP"
        todo = "Concatenate this rank's gate rows and up rows." if product.gated else "Pass this rank's rows."
        check.refuse(spec.name, weight, need, todo)
    return share_of(spec, (rows, dims.hidden))


def validate_tail(model: Model, *, tp: int, rank: int, **tensors: torch.Tensor) -> Request:
    """Check the operands of a tail, by name.

    Raises
    ------
    OperandError
        An operand, `tp` or `rank` is not what the model needs; the message names it.
    """
    dims, stage = model.dims, model.dims.sum_stage
    _check_kinds("tail", stage, tensors)
    tp, rank = _check_rank(model, tp, rank)
    prepared = stage.preparation
    routed = tensors[prepared.partials.name]
    check = _Check("tail", routed.device)
    check.partials(prepared.partials.name, routed, dims.latent)
    partials, tokens, _ = (int(extent) for extent in routed.shape)
    check.stage_operands(dims, stage, tensors, i_local=dims.i_local(tp), tokens=tokens)
    check.outputs_apart(stage.outputs)
    unplaced = None
    if not prepared.written:
        unplaced = _sum_of(prepared.output.name, check.operands[prepared.partials.name])
        if partials == 1:
            check.operands[unplaced.name], unplaced = unplaced, None
    first, width = dims.latent_begin(tp, rank), dims.latent_slice(tp)
    for segment in stage.segments:
        for spec in (segment.weight, segment.tokens) if segment.shares_k else ():
            check.operands[spec.name] = replace(check.operands[spec.name], column_limit=first + width)
    return Request(
        stage="tail",
        tp=tp,
        rank=rank,
        tokens=tokens,
        partials=partials,
        device=routed.device,
        operands=check.operands,
        outputs=tuple(tensors[spec.name] for spec in stage.outputs),
        tensors=tensors,
        validate=partial(validate_tail, model, tp=tp, rank=rank),
        up_col0=first,
        unplaced=unplaced,
        shorts={prepared.output.name: prepared.output.short},
    )


def _sum_of(name: str, partials: Operand) -> Operand:
    """One matrix for the sum of partials: the partial itself where there is one, else dense rows without memory."""
    if partials.partials == 1:
        return replace(partials, name=name)
    return Operand(name, 0, partials.rows, partials.cols, partials.cols, partials.element_bytes, partials.cols)


def _check_kinds(name: str, stage: Stage, tensors: Operands) -> None:
    """Refuse operands of a stage that are no tensors with memory of their own (`check_tensors`)."""
    inputs, outputs = ({spec.name: tensors[spec.name] for spec in specs} for specs in (stage.inputs, stage.outputs))
    check_tensors(name, inputs, outputs)


def _check_rank(model: Model, tp: int, rank: int) -> tuple[int, int]:
    tp, rank = check_whole("tail", "tp", tp), check_whole("tail", "rank", rank)
    for name, width in split_widths(model.dims):
        if tp < 1 or width % tp:
            rest = f" ({width} = {width // tp} * {tp} + {width % tp})" if tp > 0 else ""
            raise OperandError(f"tail: tp must be at least 1 and divide the {name} width {width}; got {tp}{rest}.")
    if not 0 <= rank < tp:
        raise OperandError(f"tail: rank must be 0 … {tp - 1} for tp {tp}; got {rank}.")
    return tp, rank


def split_widths(dims: ModelDims) -> tuple[tuple[str, int], ...]:
    """The widths that ranks share, by what they are called."""
    latent = (("latent", dims.latent),) if dims.shares_latent else ()
    return (*latent, ("shared-expert", dims.shared_intermediate))

"""Random operands of rows, their fp64 reference, and the check that comes before every timing. Imports torch, runtime.

Operands are made once for a stage and TP degree; a row takes the first T tokens, and its reference the first T rows,
since rows of a result do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from cakegen.bench.rows import Row
from cakegen.errors import BenchError
from cakegen.model import ModelDims
from cakegen.operands import named, shape_of
from cakegen.runtime.packing import pack_weight
from cakegen.runtime.reference import reference_outputs

BF16 = torch.bfloat16


def rival_tolerances(dims: ModelDims) -> dict[str, float]:
    """By result: a stock chain rounds to bf16 between its kernels, so it is held to the same function, not rounding."""
    composed = {product.output for product in dims.rows_stage.activated} | {dims.sum_stage.output}
    return {
        spec.short: dims.tolerances[spec.short] if spec.fp32 else 4e-2 if spec in composed else 2e-2
        for stage in dims.stages.values()
        for spec in stage.outputs
    }


@dataclass(eq=False)
class FrontWeights:
    """One rank's weights of the front. `joined [experts + latent + 2 * I_LOCAL, hidden]` holds all rows.

    The three tensors are its row ranges: a stock chain that wants them concatenated and a program that wants them
    apart read the same bytes.
    """

    dims: ModelDims
    joined: torch.Tensor
    gate: torch.Tensor
    down: torch.Tensor
    gate_up: torch.Tensor

    @staticmethod
    def of(joined: torch.Tensor, dims: ModelDims) -> FrontWeights:
        """Weights over a tensor of all rows."""
        rows = [shape_of(spec, dims, i_local=0)[0] for spec in dims.rows_stage.weights]
        rows[-1] = joined.shape[0] - sum(rows)
        return FrontWeights(dims, joined, *torch.split(joined, rows))

    def packed(self) -> FrontWeights:
        """The same weights packed (`pack_weight`), beside the joined tensor as it is."""
        return FrontWeights(self.dims, self.joined, *map(pack_weight, self.streamed()))

    def operands(self) -> dict[str, torch.Tensor]:
        """By name."""
        return named(self.dims.rows_stage.weights, self.streamed())

    def copy(self, dims: ModelDims) -> FrontWeights:
        """The same weights at other addresses."""
        return FrontWeights.of(self.joined.clone(), dims)

    def streamed(self) -> tuple[torch.Tensor, ...]:
        """The matrices that a call reads."""
        return self.gate, self.down, self.gate_up


@dataclass(eq=False)
class TailWeights:
    """One rank's weights of the tail: maybe `norm [latent]`, `up [hidden, latent]`, `down [hidden, I_LOCAL]`."""

    norm: torch.Tensor | None
    up: torch.Tensor
    down: torch.Tensor
    columns: slice
    dims: ModelDims
    _joined: torch.Tensor | None = None

    @property
    def joined(self) -> torch.Tensor:
        """`[up slice | down]`, `[hidden, latent / TP + I_LOCAL]`: a copy, made once, for chains that concatenate."""
        if self._joined is None:
            self._joined = torch.cat((self.up[:, self.columns], self.down), dim=1)
        return self._joined

    def packed(self) -> TailWeights:
        """The same weights with both matrices packed (`pack_weight`)."""
        return TailWeights(self.norm, pack_weight(self.up), pack_weight(self.down), self.columns, self.dims)

    def operands(self) -> dict[str, torch.Tensor]:
        """By name."""
        norm = () if self.norm is None else (self.norm,)
        return named(self.dims.sum_stage.weights, (*norm, self.up, self.down))

    def copy(self, dims: ModelDims) -> TailWeights:
        """The same weights at other addresses."""
        return TailWeights(
            None if self.norm is None else self.norm.clone(), self.up.clone(), self.down.clone(), self.columns, dims
        )

    def streamed(self) -> tuple[torch.Tensor, ...]:
        """The matrices that a call reads."""
        return self.up[:, self.columns], self.down


Weights = FrontWeights | TailWeights


@dataclass(eq=False)
class Case:
    """One row's operands and what must come out.

    Parameters
    ----------
    inputs
        front: `x [T, hidden]`. tail: `routed [1, T, latent]`, `shared_act [T, I_LOCAL]`. All bf16.
    expected
        fp64 outputs by name; `y` with its defined bf16 bits.
    joined_tokens
        `[T, latent / TP + I_LOCAL]`, in a chain: where its stock front and tail meet.
    """

    row: Row
    rank: int
    dims: ModelDims
    weights: Weights
    inputs: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor] = field(repr=False)
    joined_tokens: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the operands are."""
        return self.weights.streamed()[0].device

    def operands(self) -> dict[str, torch.Tensor]:
        """What the row's stage reads, by name."""
        return self.inputs | self.weights.operands()

    def rooms(self) -> dict[str, torch.Tensor]:
        """Room for each output of the row's stage, by name."""
        i_local, tokens = self.dims.i_local(self.row.tp), self.row.tokens
        return {
            spec.name: self.empty(
                shape_of(spec, self.dims, i_local=i_local, tokens=tokens)[1], torch.float32 if spec.fp32 else BF16
            )
            for spec in self.dims.stages[self.row.stage].outputs
        }

    def empty(self, cols: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        """Room for an output `[T, cols]`."""
        return torch.empty(self.row.tokens, cols, dtype=dtype, device=self.device)

    def shared_act_room(self) -> torch.Tensor:
        """Where a stock front puts shared_act: into the joined tokens of the tail behind it, where there are some."""
        i_local = self.dims.i_local(self.row.tp)
        return self.empty(i_local) if self.joined_tokens is None else self.joined_tokens[:, -i_local:]

    def on(self, weights: Weights) -> Case:
        """The same row over other weights."""
        return replace(self, weights=weights)


def rank_of(tp: int) -> int:
    """The rank that is measured: 1 where there is one, since rank 0 has the best alignment of all."""
    return 1 if tp > 1 else 0


@dataclass(eq=False)
class Operands:
    """Operands of one stage and TP degree for up to `tokens` rows."""

    case: Case

    def case_of(self, row: Row) -> Case:
        """The case of a row of this group; views, nothing is copied."""
        count = row.tokens
        inputs = {
            name: value[:, :count] if value.dim() == 3 else value[:count] for name, value in self.case.inputs.items()
        }
        expected = {name: value[:count] for name, value in self.case.expected.items()}
        return replace(self.case, row=row, inputs=inputs, expected=expected)


def make_operands(dims: ModelDims, row: Row, device: torch.device, seed: int) -> Operands:
    """Random operands of a row, with products of order 1, and their reference.

    Raises
    ------
    BenchError
        The TP degree does not divide the model.
    """
    if (dims.shares_latent and dims.latent % row.tp) or dims.shared_intermediate % row.tp:
        raise BenchError(
            f"{row}: TP must divide the latent width {dims.latent} and the shared-expert width "
            f"{dims.shared_intermediate}"
        )
    normal = _Normal(torch.Generator(device).manual_seed(seed), device)
    rank = rank_of(row.tp)
    weights: Weights = (
        make_front_weights(dims, row.tp, normal)
        if row.stage == "front"
        else make_tail_weights(dims, row.tp, rank, normal)
    )
    i_local, stage = dims.i_local(row.tp), dims.stages[row.stage]
    inputs = {
        spec.name: normal(*shape_of(spec, dims, i_local=i_local, tokens=row.tokens))
        for spec in stage.inputs
        if spec not in stage.weights
    }
    given = inputs | weights.operands()
    expected = reference_outputs(row.stage, dims, given, tp=row.tp, rank=rank, dtype=torch.float64)
    return Operands(Case(row, rank, dims, weights, inputs, expected))


class _Normal:
    """bf16 normal numbers of one generator."""

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        self._generator = generator
        self._device = device

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=self._generator, device=self._device)
        return values.mul_(scale).to(BF16)


def make_front_weights(dims: ModelDims, tp: int, normal: _Normal) -> FrontWeights:
    """Weights of the front whose products with normal tokens are normal; an activation's are twice as wide, to reach
    its bounds.
    """
    shapes = [shape_of(spec, dims, i_local=dims.i_local(tp)) for spec in dims.rows_stage.weights]
    weights = FrontWeights.of(normal(sum(rows for rows, _ in shapes), dims.hidden, scale=dims.hidden**-0.5), dims)
    for product, weight in zip(dims.rows_stage.products, weights.streamed(), strict=True):
        weight *= 1 + product.activated
    return weights


def make_tail_weights(dims: ModelDims, tp: int, rank: int, normal: _Normal) -> TailWeights:
    """Weights of the tail whose two products have variance 1 each."""
    width, i_local, first = dims.latent_slice(tp), dims.i_local(tp), dims.latent_begin(tp, rank)
    lengths = {segment.weight: i_local if segment.prepared is None else width for segment in dims.sum_stage.segments}
    made = [
        normal(*shape_of(spec, dims, i_local=i_local), scale=lengths.get(spec, 1) ** -0.5)
        for spec in dims.sum_stage.weights
    ]
    norm = made[0] if dims.normed else None
    up, down = made[-2:]
    return TailWeights(norm, up, down, slice(first, first + width), dims)


def normal_source(device: torch.device, seed: int) -> _Normal:
    """A seeded source of normal bf16 tensors."""
    return _Normal(torch.Generator(device).manual_seed(seed), device)


def find_faults(
    outputs: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerances: Mapping[str, float]
) -> list[str]:
    """What is wrong with outputs, in words; a NaN, which is what unwritten elements hold, is wrong.

    Parameters
    ----------
    outputs
        By name; a chain may leave some out.
    expected
        What they are compared with.
    tolerances
        atol = rtol by name; 0 asks for equal bits.
    """
    faults = []
    for name, value in outputs.items():
        wanted, tolerance = expected[name], tolerances[name]
        if tolerance == 0:
            wrong = value.view(torch.int16) != wanted.view(torch.int16)
            need = "equal bits"
        else:
            wide = wanted.double()
            wrong = ~((value.double() - wide).abs() <= tolerance + tolerance * wide.abs())
            need = f"atol = rtol = {tolerance:g}"
        count = int(wrong.sum())
        if count:
            faults.append(f"{name}: {count} of {wrong.numel()} elements outside {need}")
    return faults


def poison(outputs: Mapping[str, torch.Tensor]) -> None:
    """Fill outputs with NaN."""
    for value in outputs.values():
        value.fill_(float("nan"))

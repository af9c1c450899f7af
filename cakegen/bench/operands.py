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
from cakegen.runtime.packing import pack_weight
from cakegen.runtime.reference import reference_front, reference_tail

BF16 = torch.bfloat16
TOLERANCES = {"logits": 1e-3, "latent": 1e-2, "shared_act": 1e-2, "out": 1e-2, "y": 0.0}
"""atol = rtol against fp64; `y` equals the reference bit for bit."""
RIVAL_TOLERANCES = {"logits": 1e-3, "latent": 2e-2, "shared_act": 4e-2, "out": 4e-2, "y": 2e-2}
"""A stock chain rounds to bf16 between its kernels, so it is held to the same function, not to the same rounding."""


@dataclass(eq=False)
class FrontWeights:
    """One rank's weights of the front. `joined [experts + latent + 2 * I_LOCAL, hidden]` holds all rows.

    The three tensors are its row ranges: a stock chain that wants them concatenated and a program that wants them
    apart read the same bytes.
    """

    joined: torch.Tensor
    gate: torch.Tensor
    down: torch.Tensor
    gate_up: torch.Tensor

    @staticmethod
    def of(joined: torch.Tensor, dims: ModelDims) -> FrontWeights:
        """Weights over a tensor of all rows."""
        rows = [dims.experts, dims.latent, joined.shape[0] - dims.experts - dims.latent]
        return FrontWeights(joined, *torch.split(joined, rows))

    def packed(self) -> FrontWeights:
        """The same weights packed (`pack_weight`), beside the joined tensor as it is."""
        return FrontWeights(self.joined, pack_weight(self.gate), pack_weight(self.down), pack_weight(self.gate_up))

    def copy(self, dims: ModelDims) -> FrontWeights:
        """The same weights at other addresses."""
        return FrontWeights.of(self.joined.clone(), dims)

    def streamed(self) -> tuple[torch.Tensor, ...]:
        """The matrices that a call reads."""
        return self.gate, self.down, self.gate_up


@dataclass(eq=False)
class TailWeights:
    """One rank's weights of the tail: `norm [latent]`, `up [hidden, latent]`, `down [hidden, I_LOCAL]`."""

    norm: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    columns: slice
    _joined: torch.Tensor | None = None

    @property
    def joined(self) -> torch.Tensor:
        """`[up slice | down]`, `[hidden, latent / TP + I_LOCAL]`: a copy, made once, for chains that concatenate."""
        if self._joined is None:
            self._joined = torch.cat((self.up[:, self.columns], self.down), dim=1)
        return self._joined

    def packed(self) -> TailWeights:
        """The same weights with both matrices packed (`pack_weight`)."""
        return TailWeights(self.norm, pack_weight(self.up), pack_weight(self.down), self.columns)

    def copy(self, dims: ModelDims) -> TailWeights:
        """The same weights at other addresses."""
        return TailWeights(self.norm.clone(), self.up.clone(), self.down.clone(), self.columns)

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
    if dims.latent % row.tp or dims.shared_intermediate % row.tp:
        raise BenchError(
            f"{row}: TP must divide the latent width {dims.latent} and the shared-expert width "
            f"{dims.shared_intermediate}"
        )
    normal = _Normal(torch.Generator(device).manual_seed(seed), device)
    rank = rank_of(row.tp)
    if row.stage == "front":
        weights: Weights = make_front_weights(dims, row.tp, normal)
        inputs = {"x": normal(row.tokens, dims.hidden)}
    else:
        weights = make_tail_weights(dims, row.tp, rank, normal)
        inputs = {
            "routed": normal(1, row.tokens, dims.latent),
            "shared_act": normal(row.tokens, dims.i_local(row.tp)),
        }
    return Operands(Case(row, rank, dims, weights, inputs, _expected(dims, row, rank, weights, inputs)))


class _Normal:
    """bf16 normal numbers of one generator."""

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        self._generator = generator
        self._device = device

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=self._generator, device=self._device)
        return values.mul_(scale).to(BF16)


def make_front_weights(dims: ModelDims, tp: int, normal: _Normal) -> FrontWeights:
    """Weights of the front whose products with normal tokens are normal; SiTU's operands twice as wide, to reach its
    bounds.
    """
    rows = dims.experts + dims.latent + 2 * dims.i_local(tp)
    joined = normal(rows, dims.hidden, scale=dims.hidden**-0.5)
    joined[dims.experts + dims.latent :] *= 2
    return FrontWeights.of(joined, dims)


def make_tail_weights(dims: ModelDims, tp: int, rank: int, normal: _Normal) -> TailWeights:
    """Weights of the tail whose two products have variance 1 each."""
    width, i_local = dims.latent_slice(tp), dims.i_local(tp)
    return TailWeights(
        norm=normal(dims.latent),
        up=normal(dims.hidden, dims.latent, scale=width**-0.5),
        down=normal(dims.hidden, i_local, scale=i_local**-0.5),
        columns=slice(rank * width, (rank + 1) * width),
    )


def normal_source(device: torch.device, seed: int) -> _Normal:
    """A seeded source of normal bf16 tensors."""
    return _Normal(torch.Generator(device).manual_seed(seed), device)


def _expected(
    dims: ModelDims, row: Row, rank: int, weights: Weights, inputs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    if isinstance(weights, FrontWeights):
        of_front = (inputs["x"], weights.gate, weights.down, weights.gate_up)
        logits, latent, shared_act = reference_front(dims, *of_front, dtype=torch.float64)
        return {"logits": logits, "latent": latent, "shared_act": shared_act}
    of_tail = (inputs["routed"], weights.norm, weights.up, inputs["shared_act"], weights.down)
    y, out = reference_tail(dims, *of_tail, tp=row.tp, rank=rank, dtype=torch.float64)
    return {"y": y, "out": out}


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

"""The dense projections of one layer as a module: front and tail around the caller's routed experts.

Imports torch, errors, checkpoint, operators and latent_moe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from cakegen.errors import LaunchError, OperandError
from cakegen.model import ModelDims
from cakegen.operands import shape_of
from cakegen.runtime import kimi_k3_latent_moe
from cakegen.runtime.checkpoint import (
    CHECKPOINT_NAMES,
    MERGED_NAMES,
    other_prefixes,
    part_of,
    rank_slice,
    unmerged,
)
from cakegen.runtime.latent_moe import LatentMoe
from cakegen.runtime.operators import define_operators, operators_of
from cakegen.runtime.plain import check_flag
from cakegen.runtime.validate import split_widths

__all__ = ["CHECKPOINT_NAMES", "MERGED_NAMES", "LatentMoeProjections", "RoutedExperts"]
RoutedExperts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_log = logging.getLogger(__name__)


class LatentMoeProjections(torch.nn.Module):
    """Front and tail of one layer, with this rank's weights.

    The parameters are what the operators take: `gate_weight`, `down_weight`, `norm_weight` and `up_weight` whole,
    `shared_gate_up_weight [2 * I_LOCAL, hidden]` (gate rows, then up rows) and `shared_down_weight [hidden, I_LOCAL]`
    of this rank. They hold NaN until `load_weights`, or `load_state_dict` under these names, has filled them, and a
    call before that is refused. A module can be copied and pickled; where it is loaded, its export must be shipped, or
    its operators defined first. There is no backward pass: an input that autograd records is refused.

    Parameters
    ----------
    tp, rank
        Tensor-parallel degree and this rank.
    moe
        The export; by default the published one. Layers share it, and with it the programs and prepared calls.
    device
        Where the parameters are; torch's default device otherwise.
    overlap
        Let decode launches read these weights before the launch before them has ended (`LatentMoe.prepare_front`). Who
        writes the parameters later, other than by `load_weights`, synchronises before the next call.

    Raises
    ------
    LaunchError
        `tp` does not divide the model's widths, or there is no such rank.
    """

    gate_weight: torch.nn.Parameter
    down_weight: torch.nn.Parameter
    norm_weight: torch.nn.Parameter
    up_weight: torch.nn.Parameter
    shared_gate_up_weight: torch.nn.Parameter
    shared_down_weight: torch.nn.Parameter

    def __init__(
        self,
        *,
        tp: int = 1,
        rank: int = 0,
        moe: LatentMoe | None = None,
        device: torch.device | str | None = None,
        overlap: bool = False,
    ) -> None:
        super().__init__()
        moe = moe or kimi_k3_latent_moe()
        _check_rank(moe.model.dims, tp, rank)
        check_flag(type(self).__name__, "overlap", overlap)
        self.tp, self.rank, self.overlap = tp, rank, overlap
        self._weights = moe.model.dims.rows_stage.weights
        operators = define_operators(moe)
        self._export = moe.registry.export
        self._front, self._tail = operators.front, operators.tail
        for name, shape in _shapes(moe.model.dims, tp).items():
            values = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
            self.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
        self._missing = set(CHECKPOINT_NAMES)

    @property
    def missing_weights(self) -> tuple[str, ...]:
        """Checkpoint names whose values are not here: their part of a parameter holds a NaN, or has no memory.

        What nothing is known of is looked at, so a parameter that was filled in another way than by `load_weights`
        counts. The answer waits for the device.
        """
        self._missing = {own for own in self._missing if _is_unfilled(self._part(own))}
        return tuple(sorted(self._missing))

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], prefix: str = "", *, strict: bool = True
    ) -> set[str]:
        """Fill the parameters from checkpoint tensors, in any order.

        Parameters
        ----------
        weights
            Names and bf16 tensors: whole, or already this rank's slice; gate and up rows of the shared expert apart or
            merged (`MERGED_NAMES`). Names of others (the routed experts) are passed over.
        prefix
            What stands before `gate.weight` and the rest, such as `model.layers.3.block_sparse_moe.`.
        strict
            Refuse to end with a weight that is not here, or without having used any tensor. False: for one file of
            several; `missing_weights` then tells what is left.

        Returns
        -------
        set
            Names of the parameters that this call wrote and that are now whole.

        Raises
        ------
        OperandError
            A tensor has neither the whole's nor the slice's shape, or is not bf16; or see `strict`.
        LaunchError
            The parameters have no memory.
        """
        passed: list[str] = []
        used: set[str] = set()
        for name, tensor in weights:
            own = name.removeprefix(prefix)
            if not name.startswith(prefix) or own not in (*CHECKPOINT_NAMES, *MERGED_NAMES):
                passed.append(name)
                continue
            for each, values in unmerged(own, tensor):
                self._fill(each, name, values)
                used.add(each)
        if used and self.overlap:
            _finish_writes(self.gate_weight.device)
        missing = self.missing_weights
        _log.info(
            "load_weights: used %d names below %r, passed over %d; missing: %s",
            *(len(used), prefix, len(passed), ", ".join(missing) or "none"),
        )
        if strict and (missing or (passed and not used)):
            raise OperandError(_why_incomplete(missing, passed, prefix))
        incomplete = {CHECKPOINT_NAMES[own] for own in missing}
        return {CHECKPOINT_NAMES[own] for own in used} - incomplete

    def _part(self, own: str) -> torch.Tensor:
        return part_of(self.get_parameter(CHECKPOINT_NAMES[own]).detach(), own)

    def _fill(self, own: str, name: str, tensor: torch.Tensor) -> None:
        part = self._part(own)
        if part.is_meta:
            raise LaunchError("load_weights: the parameters are on the meta device; call to_empty(device=…) first.")
        part.copy_(rank_slice(own, name, tensor, list(part.shape), self.tp, self.rank))
        self._missing.discard(own)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """torch's hook of `load_state_dict`, also as a part of another module."""
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        written = {own for own, parameter in CHECKPOINT_NAMES.items() if prefix + parameter in state_dict}
        self._missing |= written
        _log.info("load_state_dict: missing: %s", ", ".join(self.missing_weights) or "none")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """torch's hook of `to`, `to_empty` and the like: memory that takes the place of none holds NaN."""
        without = [name for name, parameter in self.named_parameters(recurse=False) if parameter.is_meta]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name in without:
            parameter = self.get_parameter(name)
            if not parameter.is_meta:
                parameter.detach().fill_(float("nan"))
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What pickle and copy keep: operators belong to a process, and are found again by the export's name."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_front", "_tail")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        operators = operators_of(self._export)
        self._front, self._tail = operators.front, operators.tail

    def _require_weights(self) -> None:
        """Refuse a call whose result would be NaN. Under torch.compile no value can be looked at."""
        unknown = torch.compiler.is_compiling() or _is_capturing(self.gate_weight)
        missing = sorted(self._missing) if unknown else self.missing_weights
        absent = [own for own in missing if not self._part(own).is_meta]
        if absent:
            raise LaunchError(
                f"{type(self).__name__}: {', '.join(absent)} must be loaded before a call; the parameters still hold "
                "NaN. Call load_weights or load_state_dict; where they were filled otherwise, ask missing_weights once "
                "before torch.compile or a capture."
            )

    def front(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`x [T, hidden]` bf16 -> logits `[T, experts]` fp32, latent `[T, latent]`, shared_act `[T, I_LOCAL]` bf16."""
        if self._missing:
            self._require_weights()
        weights = (self.get_parameter(spec.name) for spec in self._weights)
        logits, latent, shared_act = self._front(x, *weights, overlap=self.overlap)
        return logits, latent, shared_act

    def tail(self, routed: torch.Tensor, shared_act: torch.Tensor) -> torch.Tensor:
        """Routed `[P, T, latent]` or `[T, latent]` bf16 -> this rank's `out [T, hidden]`, to be summed over ranks."""
        if self._missing:
            self._require_weights()
        partials = routed.unsqueeze(0) if routed.dim() == 2 else routed
        weights = (self.norm_weight, self.up_weight, shared_act, self.shared_down_weight)
        _, out = self._tail(partials, *weights, tp=self.tp, rank=self.rank, overlap=self.overlap)
        result: torch.Tensor = out
        return result

    def forward(self, x: torch.Tensor, routed_experts: RoutedExperts) -> torch.Tensor:
        """One layer without its all-reduce.

        Parameters
        ----------
        x
            `[T, hidden]` bf16.
        routed_experts
            From logits and latent rows to the routed experts' partial sums: `[P, T, latent]` or `[T, latent]` bf16,
            complete over the ranks, since the norm is of the whole sum.

        Returns
        -------
        torch.Tensor
            `out [T, hidden]` bf16; with TP > 1 the caller sums it over the ranks.
        """
        logits, latent, shared_act = self.front(x)
        return self.tail(routed_experts(logits, latent), shared_act)

    def extra_repr(self) -> str:
        """TP degree, rank and overlap, for `repr`."""
        return f"tp={self.tp}, rank={self.rank}, overlap={self.overlap}"


def _is_unfilled(part: torch.Tensor) -> bool:
    return part.is_meta or bool(part.isnan().any())


def _is_capturing(parameter: torch.Tensor) -> bool:
    return parameter.is_cuda and torch.cuda.is_current_stream_capturing()


def _why_incomplete(missing: tuple[str, ...], passed: list[str], prefix: str) -> str:
    """What `load_weights` says of weights that did not come."""
    what = f"without {', '.join(missing)}" if missing else "without any tensor of this layer"
    got = f"{len(passed)} names were passed over"
    if passed and not any(name.startswith(prefix) for name in passed):
        got += f", and none begins with {prefix!r}"
    others = [other for other in other_prefixes(passed) if other != prefix]
    if others:
        got += f"; such names stand {_places(others)}"
    return (
        f"load_weights: must not end {what}; {got}. Name the prefix that the file has; where files come one by one, "
        "pass strict=False, and ask missing_weights behind the last."
    )


def _places(prefixes: list[str]) -> str:
    return " and ".join(f"below {prefix!r}" if prefix else "without a prefix" for prefix in prefixes)


def _finish_writes(device: torch.device) -> None:
    """Wait for the copies on the current stream: a launch that overlaps the one before it does not."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _shapes(dims: ModelDims, tp: int) -> dict[str, tuple[int, ...]]:
    specs = (spec for stage in dims.stages.values() for spec in stage.weights)
    return {spec.name: shape_of(spec, dims, i_local=dims.i_local(tp)) for spec in specs}


def _check_rank(dims: ModelDims, tp: int, rank: int) -> None:
    widths = split_widths(dims)
    if tp < 1 or any(width % tp for _, width in widths) or not 0 <= rank < tp:
        divided = " and ".join(f"the {name} width {width}" for name, width in widths)
        raise OperandError(
            f"LatentMoeProjections: tp must divide {divided}, and rank be 0 … tp - 1; got tp {tp}, rank {rank}."
        )

"""The dense projections of one layer as a module: front and tail around the caller's routed experts.

Imports torch, errors, operators and latent_moe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from cakegen.errors import LaunchError
from cakegen.model import ModelDims
from cakegen.operands import FRONT, STAGES, shape_of
from cakegen.runtime import kimi_k3_latent_moe
from cakegen.runtime.latent_moe import LatentMoe
from cakegen.runtime.operators import define_operators
from cakegen.runtime.plain import check_flag

CHECKPOINT_NAMES = {
    "gate.weight": "gate_weight",
    "routed_expert_down_proj.weight": "down_weight",
    "routed_expert_norm.weight": "norm_weight",
    "routed_expert_up_proj.weight": "up_weight",
    "shared_experts.gate_proj.weight": "shared_gate_up_weight",
    "shared_experts.up_proj.weight": "shared_gate_up_weight",
    "shared_experts.down_proj.weight": "shared_down_weight",
}
"""Names below a layer's `block_sparse_moe.`, as published loaders of the checkpoint read them, and the parameter that
each fills or half fills. The router's `gate.e_score_correction_bias` and the routed experts are the caller's."""

RoutedExperts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class LatentMoeProjections(torch.nn.Module):
    """Front and tail of one layer, with this rank's weights.

    The parameters are what the operators take: `gate_weight`, `down_weight`, `norm_weight` and `up_weight` whole,
    `shared_gate_up_weight [2 * I_LOCAL, hidden]` (gate rows, then up rows) and `shared_down_weight [hidden, I_LOCAL]`
    of this rank. They hold NaN until `load_weights`, or `load_state_dict` under these names, has filled them.

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
        operators = define_operators(moe)
        self._front, self._tail = operators.front, operators.tail
        for name, shape in _shapes(moe.model.dims, tp).items():
            values = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
            self.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
        self._missing = set(CHECKPOINT_NAMES)

    @property
    def missing_weights(self) -> tuple[str, ...]:
        """Checkpoint names that `load_weights` has not seen yet."""
        return tuple(sorted(self._missing))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], prefix: str = "") -> set[str]:
        """Fill the parameters from checkpoint tensors, one after another; files may come in any order and number.

        Parameters
        ----------
        weights
            Names and bf16 tensors: whole, or already this rank's slice. Names of others (the routed experts) are
            passed over.
        prefix
            What stands before `gate.weight` and the rest, such as `model.layers.3.block_sparse_moe.`.

        Returns
        -------
        set
            The names that were used.

        Raises
        ------
        LaunchError
            A tensor has neither the whole's nor the slice's shape, or is not bf16; or the parameters have no memory.
        """
        used = set()
        for name, tensor in weights:
            own = name.removeprefix(prefix)
            if name.startswith(prefix) and own in CHECKPOINT_NAMES:
                self._fill(own, name, tensor)
                self._missing.discard(own)
                used.add(name)
        if used and self.overlap:
            _finish_writes(self.gate_weight.device)
        return used

    def _fill(self, own: str, name: str, tensor: torch.Tensor) -> None:
        parameter = self.get_parameter(CHECKPOINT_NAMES[own]).detach()
        if parameter.is_meta:
            raise LaunchError("load_weights: the parameters are on the meta device; call to_empty(device=…) first.")
        dim = 1 if own == "shared_experts.down_proj.weight" else 0 if own.startswith("shared_experts.") else None
        if dim == 0:
            gate, up = parameter.chunk(2)
            parameter = gate if own == "shared_experts.gate_proj.weight" else up
        local = list(parameter.shape)
        whole = [extent * (self.tp if at == dim else 1) for at, extent in enumerate(local)]
        got = list(tensor.shape)
        if tensor.dtype != torch.bfloat16 or got not in (local, whole):
            either = f"{whole} (whole)" if whole == local else f"{whole} (whole) or {local} (rank {self.rank}'s slice)"
            raise LaunchError(
                f"load_weights: {name} must be bfloat16 {either} for TP {self.tp}; got {tensor.dtype} {got}. "
                "The checkpoint does not quantise these tensors: name another prefix, or convert on purpose."
            )
        if dim is not None and got != local:
            tensor = tensor.narrow(dim, self.rank * local[dim], local[dim])
        parameter.copy_(tensor)

    def front(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`x [T, hidden]` bf16 -> logits `[T, experts]` fp32, latent `[T, latent]`, shared_act `[T, I_LOCAL]` bf16."""
        weights = (self.get_parameter(spec.name) for spec in FRONT.weights)
        logits, latent, shared_act = self._front(x, *weights, overlap=self.overlap)
        return logits, latent, shared_act

    def tail(self, routed: torch.Tensor, shared_act: torch.Tensor) -> torch.Tensor:
        """Routed `[P, T, latent]` or `[T, latent]` bf16 -> this rank's `out [T, hidden]`, to be summed over ranks."""
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


def _finish_writes(device: torch.device) -> None:
    """Wait for the copies on the current stream: a launch that overlaps the one before it does not."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _shapes(dims: ModelDims, tp: int) -> dict[str, tuple[int, ...]]:
    specs = (spec for stage in STAGES.values() for spec in stage.weights)
    return {spec.name: shape_of(spec, dims, i_local=dims.i_local(tp)) for spec in specs}


def _check_rank(dims: ModelDims, tp: int, rank: int) -> None:
    widths = (dims.latent, dims.shared_intermediate)
    if tp < 1 or any(width % tp for width in widths) or not 0 <= rank < tp:
        raise LaunchError(
            f"LatentMoeProjections: tp must divide the latent width {widths[0]} and the shared-expert width "
            f"{widths[1]}, and rank be 0 … tp - 1; got tp {tp}, rank {rank}."
        )

"""Names of a layer's tensors in the checkpoint, and what of each a rank keeps. Imports torch and errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from cakegen.errors import OperandError

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
MERGED_NAMES = {
    "shared_experts.gate_up_proj.weight": ("shared_experts.gate_proj.weight", "shared_experts.up_proj.weight"),
}
"""Tensors that an engine has merged: rows of the first, then as many of the second."""
MOST_PREFIXES = 3
"""So many other prefixes are named where none of the names has the one that was asked for."""


def unmerged(own: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor under the names of the checkpoint: a merged one as its halves, any other as it is."""
    names = MERGED_NAMES.get(own)
    if names is None:
        yield own, tensor
        return
    if tensor.dim() != 2 or tensor.shape[0] % 2:
        raise OperandError(
            f"load_weights: {own} must be a matrix of {names[0]} above as many rows of {names[1]}; got "
            f"{list(tensor.shape)}. Pass the two under their own names."
        )
    yield from zip(names, tensor.chunk(2), strict=True)


def part_of(parameter: torch.Tensor, own: str) -> torch.Tensor:
    """What a checkpoint's tensor fills of its parameter."""
    if own in ("shared_experts.gate_proj.weight", "shared_experts.up_proj.weight"):
        gate, up = parameter.chunk(2)
        return gate if own == "shared_experts.gate_proj.weight" else up
    return parameter


def rank_slice(own: str, name: str, tensor: torch.Tensor, local: list[int], tp: int, rank: int) -> torch.Tensor:
    """A rank's part of a checkpoint's tensor, which is whole, or that part already.

    Parameters
    ----------
    own, name
        Its name in the checkpoint, and as it was given.
    local
        Shape of the part.

    Raises
    ------
    OperandError
        It is neither, or not bf16.
    """
    dim = 1 if own == "shared_experts.down_proj.weight" else 0 if own.startswith("shared_experts.") else None
    whole = [extent * (tp if at == dim else 1) for at, extent in enumerate(local)]
    got = list(tensor.shape)
    if tensor.dtype != torch.bfloat16 or got not in (local, whole):
        either = f"{whole} (whole)" if whole == local else f"{whole} (whole) or {local} (rank {rank}'s slice)"
        raise OperandError(
            f"load_weights: {name} must be bfloat16 {either} for TP {tp}; got {tensor.dtype} {got}. {_remedy(tensor)}"
        )
    return tensor if dim is None or got == local else tensor.narrow(dim, rank * local[dim], local[dim])


def _remedy(tensor: torch.Tensor) -> str:
    if tensor.dtype == torch.bfloat16:
        return "Is it another model's, or another rank's slice?"
    if tensor.is_floating_point() and tensor.element_size() > 1:
        return "Pass tensor.to(torch.bfloat16), if it may be rounded."
    return (
        "The published checkpoint does not quantise these tensors, and a quantised one means nothing without its "
        "scale: multiply the two in fp32, and pass the product as bfloat16."
    )


def other_prefixes(names: Iterable[str]) -> list[str]:
    """What stands before names of the checkpoint's tensors; the first few that differ."""
    known = (*CHECKPOINT_NAMES, *MERGED_NAMES)
    found: dict[str, None] = {}
    for name in names:
        for own in known:
            before = name.removesuffix(own)
            if before != name and (not before or before.endswith(".")):
                found.setdefault(before)
    return list(found)[:MOST_PREFIXES]

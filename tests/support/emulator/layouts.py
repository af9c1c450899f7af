"""Legal layouts of the operands of a front and a tail, for tests on every backend.

Each takes contiguous operands and returns others: views of wider memory, or operands that share memory. What is no
operand's is filled with `GUARD`, and must keep it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from typing import Any

import torch

from cakegen.runtime import LatentMoe, pack_weight, unpack_weight
from cakegen.runtime.tensor_map import CHUNK_COLS

Operands = dict[str, torch.Tensor]
GUARD = -7.0
OUTPUTS = {"front": ("logits", "latent", "shared_act"), "tail": ("y_workspace", "out")}


def guarded(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.full(shape, GUARD, dtype=like.dtype, device=like.device)


def filled(view: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return view.copy_(values)


def pitched(value: torch.Tensor) -> torch.Tensor:
    """Rows a quarter of a KiB further apart than they are long, behind three rows of others."""
    gap = 256 // value.element_size()
    *outer, rows, cols = value.shape
    return filled(guarded(value, *outer, rows + 3, cols + gap)[..., 3:, gap // 2 : gap // 2 + cols], value)


def pitched_rows(given: Operands) -> Operands:
    rows = {"x", "logits", "latent", "routed", "shared_act", "out", "y_workspace"}
    return {name: pitched(value) if name in rows else value for name, value in given.items()}


def every_third_row(given: Operands) -> Operands:
    changed = dict(given)
    for name in set(given) & {"x", "logits", "latent", "shared_act", "out", "y_workspace"}:
        value = given[name]
        changed[name] = filled(guarded(value, 3 * value.shape[0], value.shape[1])[1::3], value)
    return changed


def column_ranges_of_one_matrix(given: Operands) -> Operands:
    """All bf16 rows, inputs and outputs, side by side in one matrix, 16 columns apart."""
    names = [name for name in given if name in ("x", "latent", "shared_act", "out", "y_workspace")]
    like = given["shared_act"]
    both = guarded(like, like.shape[0], sum(given[name].shape[1] + 16 for name in names))
    changed, first = dict(given), 0
    for name in names:
        cols = given[name].shape[1]
        changed[name] = filled(both[:, first : first + cols], given[name])
        first += cols + 16
    return changed


def weights_in_one_storage(given: Operands) -> Operands:
    """Weights and vectors behind each other in one allocation, each at a multiple of 16 bytes."""
    names = [name for name in given if name.endswith("weight")]
    like = given[names[0]]
    storage = guarded(like, 8 + sum(given[name].numel() + 8 for name in names))
    changed, first = dict(given), 8
    for name in names:
        value = given[name]
        changed[name] = filled(storage[first : first + value.numel()].view(value.shape), value)
        first += value.numel() + 8
    return changed


def weights_that_share_rows(given: Operands) -> Operands:
    """Each weight begins 16 bytes behind the last in the same memory: they are only read."""
    names = [name for name in given if name.endswith("weight")]
    longest = max(given[name].numel() for name in names)
    like = next(given[name] for name in names if given[name].numel() == longest)
    storage = torch.cat((like.reshape(-1), like.reshape(-1)[: 8 * len(names)]))
    return given | {
        name: storage[8 * number : 8 * number + given[name].numel()].view(given[name].shape)
        for number, name in enumerate(names)
    }


def packed_weights(given: Operands) -> Operands:
    names = {"gate_weight", "down_weight", "shared_gate_up_weight", "up_weight", "shared_down_weight"}
    return {name: pack_weight(value) if name in names else value for name, value in given.items()}


def token_major_partials(given: Operands) -> Operands:
    """`[T, P, latent]` in memory."""
    return given | {"routed": given["routed"].transpose(0, 1).contiguous().transpose(0, 1)}


def token_major_pitched_partials(given: Operands) -> Operands:
    partials, tokens, latent = given["routed"].shape
    memory = guarded(given["routed"], tokens, partials + 1, latent + 8)
    return given | {"routed": filled(memory[:, 1:, 8:].transpose(0, 1), given["routed"])}


def y_between_token_major_partials(given: Operands) -> Operands:
    """`[T, 2 * P, latent]` in memory, a partial in every second row and `y` in the row behind the first."""
    partials, tokens, latent = given["routed"].shape
    memory = guarded(given["routed"], tokens, 2 * partials, latent)
    routed = filled(memory[:, ::2].transpose(0, 1), given["routed"])
    return given | {"routed": routed, "y_workspace": memory[:, 1]}


def partials_far_apart(given: Operands) -> Operands:
    partials, tokens, latent = given["routed"].shape
    memory = guarded(given["routed"], 5 * partials, tokens + 2, latent + 16)
    return given | {"routed": filled(memory[1::5, 1 : tokens + 1, :latent], given["routed"])}


def one_partial_many_times(given: Operands) -> Operands:
    return given | {"routed": given["routed"][:1].expand(given["routed"].shape)}


def partials_that_overlap(given: Operands) -> Operands:
    """Each partial begins 16 bytes behind the last."""
    partials, tokens, latent = given["routed"].shape
    memory = given["routed"].reshape(-1).contiguous()
    return given | {"routed": memory.as_strided((partials, tokens, latent), (8, latent, 1))}


def partials_between_rows(given: Operands) -> Operands:
    """Neither stride is a multiple of the other."""
    partials, tokens, latent = given["routed"].shape
    row, plane = partials * (latent + 8) + 40, latent + 8
    memory = guarded(given["routed"], (partials - 1) * plane + (tokens - 1) * row + latent)
    return given | {"routed": filled(memory.as_strided((partials, tokens, latent), (plane, row, 1)), given["routed"])}


EITHER: dict[str, Callable[[Operands], Operands]] = {
    "contiguous": dict,
    "pitched rows": pitched_rows,
    "every third row": every_third_row,
    "column ranges of one matrix": column_ranges_of_one_matrix,
    "weights in one storage": weights_in_one_storage,
    "weights that share rows": weights_that_share_rows,
    "packed weights": packed_weights,
}
TAIL_ONLY: dict[str, Callable[[Operands], Operands]] = {
    "token-major partials": token_major_partials,
    "token-major partials, pitched": token_major_pitched_partials,
    "y between token-major partials": y_between_token_major_partials,
    "partials far apart": partials_far_apart,
    "one partial many times": one_partial_many_times,
    "partials that overlap": partials_that_overlap,
    "partials between rows": partials_between_rows,
}
LAYOUTS = [(stage, name) for stage, names in (("front", EITHER), ("tail", EITHER | TAIL_ONLY)) for name in names]


def laid_out(stage: str, name: str, contiguous: Operands) -> Operands:
    """Contiguous operands in one of `LAYOUTS`."""
    return (EITHER | TAIL_ONLY)[name](contiguous) if stage == "tail" else EITHER[name](contiguous)


class LayoutCheck:
    """Compares calls of one model and backend with calls on plain copies, whose results are remembered by values."""

    def __init__(self, moe: LatentMoe, **options: Any) -> None:
        self._moe = moe
        self._options = options
        self._known: dict[Hashable, Operands] = {}

    def check(self, stage: str, operands: Operands, **options: Any) -> None:
        """A call gives the bits of a call on plain copies, and writes nothing but its outputs."""
        plain, names = self._plain(stage, operands, options), OUTPUTS[stage]
        bases = {id(base): base for name in names if (base := operands[name]._base) is not None}
        wanted = {key: base.clone() for key, base in bases.items()}
        self._run(stage, operands, options)
        for name in names:
            value, base = operands[name], operands[name]._base
            assert not bool(value.isnan().any()), name
            assert torch.equal(value, plain[name]), name
            if base is not None:
                wanted[id(base)].as_strided(value.shape, value.stride(), value.storage_offset()).copy_(plain[name])
        for key, base in bases.items():
            assert torch.equal(base, wanted[key]), "bytes beside an output were written"

    def _run(self, stage: str, operands: Operands, options: dict[str, Any]) -> None:
        run = self._moe.front if stage == "front" else self._moe.tail
        run(**operands, **options, **self._options)

    def _plain(self, stage: str, operands: Operands, options: dict[str, Any]) -> Operands:
        inputs = [value for name, value in operands.items() if name not in OUTPUTS[stage]]
        key = (stage, tuple(options.items()), *map(_digest, inputs))
        if key not in self._known:
            plain = {name: value.clone(memory_format=torch.contiguous_format) for name, value in operands.items()}
            self._run(stage, plain, options)
            self._known[key] = plain
        return self._known[key]


def _digest(value: torch.Tensor) -> Hashable:
    plain = unpack_weight(value) if value.dim() == 3 and value.shape[-1] == CHUNK_COLS else value
    return tuple(plain.shape), hashlib.sha256(plain.contiguous().view(torch.int16).cpu().numpy().tobytes()).digest()

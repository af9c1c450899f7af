"""Runs generated programs: validation, planning, loading, launching. Never imports spec, emit, jinja2, pydantic, click.

Importing this package needs neither torch nor a driver: the names below are imported when they are first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cakegen.registry import load_registry
from cakegen.runtime.guard import GuardedLock

if TYPE_CHECKING:
    import torch

    from cakegen.model import DeviceFacts
    from cakegen.runtime.latent_moe import LatentMoe
    from cakegen.runtime.packing import pack_weight, unpack_weight
    from cakegen.runtime.prepared import Outputs, Runner
    from cakegen.runtime.release import release_device_memory
    from cakegen.runtime.workspace import Workspace

__all__ = [
    "LatentMoe",
    "Runner",
    "Workspace",
    "generated_program_available",
    "kimi_k3_latent_moe",
    "kimi_k3_latent_moe_front",
    "kimi_k3_latent_moe_tail",
    "pack_weight",
    "prepare_kimi_k3_latent_moe_front",
    "prepare_kimi_k3_latent_moe_tail",
    "release_device_memory",
    "shared_latent_moe",
    "unpack_weight",
]


_HOMES = {
    "LatentMoe": "latent_moe",
    "Outputs": "prepared",
    "Runner": "prepared",
    "Workspace": "workspace",
    "pack_weight": "packing",
    "release_device_memory": "release",
    "unpack_weight": "packing",
}
_shared_lock = GuardedLock("loading an export")
_shared: dict[str, LatentMoe] = {}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is asked for: `cakegen doctor` looks at a machine that may have none."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def shared_latent_moe(export: str) -> LatentMoe:
    """The one `LatentMoe` of an export that a process shares, and with it the loaded programs."""
    from cakegen.runtime.latent_moe import LatentMoe

    found = _shared.get(export)
    if found is None:
        with _shared_lock:
            found = _shared.get(export)
            if found is None:
                found = _shared[export] = LatentMoe(load_registry(export))
    return found


def kimi_k3_latent_moe() -> LatentMoe:
    """The published export, as the functions below use it."""
    return shared_latent_moe("kimi_k3_latent_moe")


def prepare_kimi_k3_latent_moe_front(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    down_weight: torch.Tensor,
    shared_gate_up_weight: torch.Tensor,
    logits: torch.Tensor,
    latent: torch.Tensor,
    shared_act: torch.Tensor,
    *,
    backend: str = "auto",
    workspace: Workspace | None = None,
    overlap: bool = False,
    arch: str | DeviceFacts | None = None,
) -> Runner:
    """Prepare a front; see `LatentMoe.prepare_front`.

    `x [T, 7168]` bf16, `gate_weight [896, 7168]`, `down_weight [3584, 7168]`, `shared_gate_up_weight
    [2 * 6144 / TP, 7168]` bf16 -> `logits [T, 896]` fp32, `latent [T, 3584]`, `shared_act [T, 6144 / TP]` bf16.
    """
    operands = (x, gate_weight, down_weight, shared_gate_up_weight, logits, latent, shared_act)
    return kimi_k3_latent_moe().prepare_front(
        *operands, backend=backend, workspace=workspace, overlap=overlap, arch=arch
    )


def kimi_k3_latent_moe_front(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    down_weight: torch.Tensor,
    shared_gate_up_weight: torch.Tensor,
    logits: torch.Tensor,
    latent: torch.Tensor,
    shared_act: torch.Tensor,
    *,
    backend: str = "auto",
    workspace: Workspace | None = None,
    overlap: bool = False,
    arch: str | DeviceFacts | None = None,
) -> Outputs:
    """Prepare and run a front once; returns `(logits, latent, shared_act)`."""
    operands = (x, gate_weight, down_weight, shared_gate_up_weight, logits, latent, shared_act)
    return prepare_kimi_k3_latent_moe_front(
        *operands, backend=backend, workspace=workspace, overlap=overlap, arch=arch
    )()


def prepare_kimi_k3_latent_moe_tail(
    routed: torch.Tensor,
    norm_weight: torch.Tensor,
    up_weight: torch.Tensor,
    shared_act: torch.Tensor,
    shared_down_weight: torch.Tensor,
    out: torch.Tensor,
    *,
    tp: int,
    rank: int,
    y_workspace: torch.Tensor,
    backend: str = "auto",
    workspace: Workspace | None = None,
    overlap: bool = False,
    arch: str | DeviceFacts | None = None,
) -> Runner:
    """Prepare a tail; see `LatentMoe.prepare_tail`.

    `routed [P, T, 3584]`, `norm_weight [3584]`, `up_weight [7168, 3584]`, `shared_act [T, 6144 / TP]`,
    `shared_down_weight [7168, 6144 / TP]` -> `y_workspace [T, 3584]`, `out [T, 7168]`; all bf16.
    """
    return kimi_k3_latent_moe().prepare_tail(
        routed,
        norm_weight,
        up_weight,
        shared_act,
        shared_down_weight,
        out,
        tp=tp,
        rank=rank,
        y_workspace=y_workspace,
        backend=backend,
        workspace=workspace,
        overlap=overlap,
        arch=arch,
    )


def kimi_k3_latent_moe_tail(
    routed: torch.Tensor,
    norm_weight: torch.Tensor,
    up_weight: torch.Tensor,
    shared_act: torch.Tensor,
    shared_down_weight: torch.Tensor,
    out: torch.Tensor,
    *,
    tp: int,
    rank: int,
    y_workspace: torch.Tensor,
    backend: str = "auto",
    workspace: Workspace | None = None,
    overlap: bool = False,
    arch: str | DeviceFacts | None = None,
) -> Outputs:
    """Prepare and run a tail once; returns `(y_workspace, out)`."""
    return prepare_kimi_k3_latent_moe_tail(
        routed,
        norm_weight,
        up_weight,
        shared_act,
        shared_down_weight,
        out,
        tp=tp,
        rank=rank,
        y_workspace=y_workspace,
        backend=backend,
        workspace=workspace,
        overlap=overlap,
        arch=arch,
    )()


def generated_program_available(
    device: torch.device | str | int, stage: str, tp: int, num_tokens: int, num_partials: int = 1
) -> bool:
    """Whether a generated program serves a request on a device; compiles and loads nothing.

    It initialises CUDA: ask in the process that serves, not in one that forks it later.
    """
    return kimi_k3_latent_moe().program_available(device, stage, tp, num_tokens, num_partials)

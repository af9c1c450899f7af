"""The calls of FlashInfer's `flashinfer.kimi_k3_latent_moe`, with its arguments, results, exceptions and attributes.

A caller changes its import line and nothing else. `docs/flashinfer.md` says what differs. Written from the published
interface; nothing of FlashInfer is imported or copied. Imports torch, errors, plan and runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from cakegen.errors import OperandError, OperandKindError, PlanError
from cakegen.operands import named
from cakegen.runtime import Runner, kimi_k3_latent_moe
from cakegen.runtime import generated_program_available as program_available
from cakegen.runtime.prepared import Outputs

__all__ = [
    "KimiK3LatentMoeRunner",
    "PreparedLaunch",
    "generated_program_available",
    "kimi_k3_latent_moe_front",
    "kimi_k3_latent_moe_tail",
    "prepare_kimi_k3_latent_moe_front",
    "prepare_kimi_k3_latent_moe_tail",
]
BACKEND = "cake"
SUPPORTED_TP = (1, 8)
REQUIRED_TOKENS = tuple(2**power for power in range(15))
"""T of the requests that all must have programs where no request is named."""


@dataclass(frozen=True)
class PreparedLaunch:
    """One launch of a runner: its stage, the logical key of its program, and the program's name."""

    stage: str
    key: str
    module: str


@dataclass(frozen=True)
class KimiK3LatentMoeRunner:
    """A prepared call; calling it launches on the current stream, and allocates and waits for nothing.

    Parameters
    ----------
    stage
        `front` or `tail`.
    tp, rank, num_tokens
        Of the request; a front says rank 0.
    arch
        The device's architecture, such as `sm_90a`.
    route
        `decode` or `prefill`.
    plan
        What the planner decided, by field.
    launches
        In order.
    outputs
        What a call returns: `(logits, latent, shared_act)` or `(y_workspace, out)`.
    runner
        The call itself, with all that `cakegen.runtime.Runner` offers.
    """

    stage: str
    tp: int
    rank: int
    num_tokens: int
    arch: str
    route: str
    plan: Mapping[str, object] = field(repr=False)
    launches: tuple[PreparedLaunch, ...] = field(repr=False)
    outputs: Outputs = field(repr=False)
    runner: Runner = field(repr=False, compare=False)

    @property
    def kernel_keys(self) -> tuple[str, ...]:
        """Logical keys of the launches, in order."""
        return tuple(launch.key for launch in self.launches)

    @property
    def module_names(self) -> tuple[str, ...]:
        """Names of the launches' programs, in order."""
        return tuple(launch.module for launch in self.launches)

    @property
    def launch_count(self) -> int:
        """Launches of one call."""
        return len(self.launches)

    def launch(self) -> Outputs:
        """Launch on the current stream; returns the outputs."""
        return self.runner()

    __call__ = launch


def prepare_kimi_k3_latent_moe_front(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    down_weight: torch.Tensor,
    shared_gate_up_weight: torch.Tensor,
    logits: torch.Tensor,
    latent: torch.Tensor,
    shared_act: torch.Tensor,
    *,
    backend: str = BACKEND,
) -> KimiK3LatentMoeRunner:
    """Prepare a front of one rank for many launches; see `cakegen.runtime.prepare_kimi_k3_latent_moe_front`.

    Raises
    ------
    ValueError
        An operand, the TP degree, the backend or the device is not what the call takes.
    TypeError
        An operand is no tensor.
    NotImplementedError
        No program is registered for the device's number of multiprocessors.
    """
    operands = (x, gate_weight, down_weight, shared_gate_up_weight, logits, latent, shared_act)
    given = named(kimi_k3_latent_moe().model.dims.rows_stage.operands, operands)
    _check_call("front", backend, given)
    _check_degree(_degree_of(shared_gate_up_weight), f"shared_gate_up_weight {list(shared_gate_up_weight.shape)}")
    return _prepared(lambda: kimi_k3_latent_moe().prepare_front(*operands))


def kimi_k3_latent_moe_front(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    down_weight: torch.Tensor,
    shared_gate_up_weight: torch.Tensor,
    logits: torch.Tensor,
    latent: torch.Tensor,
    shared_act: torch.Tensor,
    *,
    backend: str = BACKEND,
) -> Outputs:
    """Prepare a front and launch it once; returns `(logits, latent, shared_act)`. Raises as preparing does."""
    operands = (x, gate_weight, down_weight, shared_gate_up_weight, logits, latent, shared_act)
    return prepare_kimi_k3_latent_moe_front(*operands, backend=backend)()


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
    backend: str = BACKEND,
) -> KimiK3LatentMoeRunner:
    """Prepare a tail of one rank for many launches; see `cakegen.runtime.prepare_kimi_k3_latent_moe_tail`.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As `prepare_kimi_k3_latent_moe_front`.
    """
    inputs = (routed, norm_weight, up_weight, shared_act, shared_down_weight)
    given = named(kimi_k3_latent_moe().model.dims.sum_stage.operands, (*inputs, y_workspace, out))
    _check_call("tail", backend, given)
    tp, rank = int(tp), int(rank)
    _check_degree(tp, f"tp {tp}")
    return _prepared(lambda: kimi_k3_latent_moe().prepare_tail(*inputs, out, tp=tp, rank=rank, y_workspace=y_workspace))


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
    backend: str = BACKEND,
) -> torch.Tensor:
    """Prepare a tail and launch it once; returns `out` alone. Raises as preparing does."""
    operands = (routed, norm_weight, up_weight, shared_act, shared_down_weight, out)
    options = {"tp": tp, "rank": rank, "backend": backend}
    prepare_kimi_k3_latent_moe_tail(*operands, y_workspace=y_workspace, **options)()  # type: ignore[arg-type]
    return out


def generated_program_available(
    device: torch.device | str | int,
    stage: str | None = None,
    tp: int | None = None,
    num_tokens: int | None = None,
    num_partials: int = 1,
) -> bool:
    """Whether generated programs serve a device: one request, or every power of two of T at TP 1 and 8.

    Raises
    ------
    ValueError
        Of stage, tp and num_tokens some are given and some are not.
    """
    if stage is None and tp is None and num_tokens is None:
        return all(
            program_available(device, each, degree, tokens)
            for each in ("front", "tail")
            for degree in SUPPORTED_TP
            for tokens in REQUIRED_TOKENS
        )
    if stage is None or tp is None or num_tokens is None:
        given = f"stage {stage!r}, tp {tp!r}, num_tokens {num_tokens!r}"
        raise OperandError(
            f"generated_program_available: needs stage, tp and num_tokens, or none of them; got {given}."
        )
    return tp in SUPPORTED_TP and program_available(device, stage, tp, num_tokens, num_partials)


def _check_call(stage: str, backend: str, operands: Mapping[str, torch.Tensor]) -> None:
    """What the published calls refuse and those of cakegen do not: rows apart, packed weights, other backends."""
    if backend != BACKEND:
        raise OperandError(
            f"{stage}: backend must be {BACKEND!r} here; got {backend!r}. cakegen.runtime has the emulator and the "
            "reference."
        )
    for name, tensor in operands.items():
        if not isinstance(tensor, torch.Tensor):
            raise OperandKindError(f"{stage}: {name} must be a torch.Tensor; got {type(tensor).__name__}.")
        if tensor.layout == torch.strided and not tensor.is_contiguous():
            raise OperandError(
                f"{stage}: {name} must be contiguous; got {list(tensor.shape)}, strides {tuple(tensor.stride())}. Call "
                ".contiguous(); cakegen.runtime takes rows that lie apart."
            )


def _check_degree(tp: int, what: str) -> None:
    if tp not in SUPPORTED_TP:
        raise OperandError(
            f"{what}: TP must be {' or '.join(map(str, SUPPORTED_TP))} here, as published; cakegen.runtime serves more."
        )


def _degree_of(shared_gate_up_weight: torch.Tensor) -> int:
    """The TP degree that the gated weight's rows tell; 0 where they tell none."""
    rows = 2 * kimi_k3_latent_moe().model.dims.shared_intermediate
    matrix = shared_gate_up_weight.dim() == 2 and shared_gate_up_weight.shape[0] > 0
    own = shared_gate_up_weight.shape[0] if matrix else 0
    return rows // own if own and rows % own == 0 else 0


def _prepared(prepare: Callable[[], Runner]) -> KimiK3LatentMoeRunner:
    try:
        runner = prepare()
    except PlanError as error:
        raise OperandError(str(error)) from error
    programs = kimi_k3_latent_moe().registry
    launches = tuple(PreparedLaunch(runner.stage, key, programs.kernels[key]) for key in runner.kernel_keys)
    plan = {} if runner.plan is None else {rule.field: rule.value for rule in runner.plan.rules}
    arch = "" if runner.plan is None else runner.plan.device.arch
    request = (runner.stage, runner.tp, runner.rank, runner.num_tokens, arch, runner.route)
    return KimiK3LatentMoeRunner(*request, plan, launches, runner.outputs, runner)

"""One export at work: prepares, warms up and runs its front and tail. Imports registry, plan and this package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from cakegen.errors import CakeError, LaunchError, OperandError, OperandKindError
from cakegen.model import DeviceFacts
from cakegen.plan import family_of
from cakegen.plan.records import Plan
from cakegen.registry import Registry
from cakegen.runtime.capture import refuse_cold, refuse_in_capture
from cakegen.runtime.control import WaitRecord, describe_wait_record, open_control, opened_control
from cakegen.runtime.device import Device, open_device, opened_device
from cakegen.runtime.emulation import emulated_facts, prepare_emulated
from cakegen.runtime.plain import check_flag, check_whole, check_wholes
from cakegen.runtime.prepared import EmptyRunner, Outputs, ReferenceRunner, Runner
from cakegen.runtime.programs import ProgramTable
from cakegen.runtime.reference import reference_outputs
from cakegen.runtime.routes import RouteTable
from cakegen.runtime.runner import ProgramRunner, with_wait_report, workspace_elems
from cakegen.runtime.validate import Request, given_operands, validate_front, validate_tail
from cakegen.runtime.workspace import Workspace, stream_workspace

BACKENDS = ("auto", "emulator", "reference")


class LatentMoe:
    """The front and the tail of one export.

    Parameters
    ----------
    registry
        The generated tree (`load_registry`).
    device_facts
        What to plan for, instead of what the driver says: a smaller device than the real one reaches other forms.
    compile_flags
        Options for the compiler after the registry's own, such as `-DCAKEGEN_CHAOS`.
    bundle
        Folder that `cakegen bundle` wrote; programs come from there and none is compiled. None: see `CAKEGEN_BUNDLE`.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        device_facts: DeviceFacts | None = None,
        compile_flags: tuple[str, ...] = (),
        bundle: str | None = None,
    ) -> None:
        self.registry = registry
        self.model = registry.model
        self._device_facts = device_facts
        self._compile_flags = compile_flags
        self._programs = ProgramTable(registry, compile_flags, bundle)
        self._routes = RouteTable(registry, self._programs, device_facts)

    def prepare_front(
        self,
        *operands: torch.Tensor,
        backend: str = "auto",
        workspace: Workspace | None = None,
        overlap: bool = False,
        arch: str | DeviceFacts | None = None,
        **by_name: torch.Tensor,
    ) -> Runner:
        """Validate, plan, load and bind a front; the runner returns its outputs, `(logits, latent, shared_act)`.

        Parameters
        ----------
        operands
            What the block's rows stage names, in its order, by position or by name; of the published export
            `x`, `gate_weight`, `down_weight`, `shared_gate_up_weight`, `logits`, `latent`, `shared_act`:

            `x [T, hidden]` bf16; rows may be pitched (a multiple of 16 bytes), as the outputs' rows may. Weights
            `[experts, hidden]`, `[latent, hidden]`, `[2 * I_LOCAL, hidden]` bf16 (`[I_LOCAL, hidden]` of an activation
            without a gate), contiguous, used in place. TP follows from the last. Each may be packed instead
            (`pack_weight`): read faster, to the same bits. Outputs `[T, experts]` fp32, `[T, latent]` and
            `[T, I_LOCAL]` bf16.
        backend
            `auto`: generated programs, on CUDA tensors. `emulator`: the same programs' PTX on the CPU, on CPU tensors.
            `reference`: torch, on any device.
        workspace
            Where split prefill GEMMs keep fp32 partials; None: the one of the current stream.
        overlap
            Let a decode launch start while the launch before it on the stream ends: weights are read before that one
            has completed, everything else after. Only for streams on which no launch writes these weights. Ignored
            where a program does not offer it.
        arch
            With `emulator`: the architecture, or the facts of a device, to plan for; None: `device_facts`, or `sm_90a`.

        Raises
        ------
        CakeError
            An operand, the device or the shape is refused, a program does not compile or load, or something cold
            would have to be loaded inside a graph capture.
        """
        given = given_operands("front", self.model.dims.rows_stage, operands, by_name)
        return self._prepare(validate_front(self.model, **given), backend, workspace, arch, overlap)

    def prepare_tail(
        self,
        *operands: torch.Tensor,
        tp: int,
        rank: int,
        backend: str = "auto",
        workspace: Workspace | None = None,
        overlap: bool = False,
        arch: str | DeviceFacts | None = None,
        **by_name: torch.Tensor,
    ) -> Runner:
        """Validate, plan, load and bind a tail; the runner returns its outputs, `(y_workspace, out)`.

        Parameters
        ----------
        operands
            What the block's sum stage names, in its order and then its output, by position or by name; prepared tokens
            by name alone. Of the published export `routed`, `norm_weight`, `up_weight`, `shared_act`,
            `shared_down_weight`, `out`, and by name `y_workspace`:

            `routed [P, T, latent]` bf16 partials; row pitch and partial stride are free (multiples of 16 bytes).
            Weights `[latent]`, `[hidden, latent]` (all columns; the rank's slice is read in place) and
            `[hidden, I_LOCAL]` bf16, of which the last two may be packed. `shared_act [T, I_LOCAL]` bf16, as the front
            wrote it. Outputs `[T, hidden]` and `[T, latent]` bf16; with `tp` > 1 the caller all-reduces `out`.
        tp, rank
            Tensor-parallel degree and this rank.
        backend, workspace, overlap, arch
            As in `prepare_front`. The workspace also has the sum of several partials where the block has no norm.

        Raises
        ------
        CakeError
            As `prepare_front`.
        """
        given = given_operands("tail", self.model.dims.sum_stage, operands, by_name)
        return self._prepare(validate_tail(self.model, **given, tp=tp, rank=rank), backend, workspace, arch, overlap)

    def prepare(
        self, stage: str, operands: Mapping[str, torch.Tensor], *, tp: int, rank: int, **options: Any
    ) -> Runner:
        """`prepare_front` or `prepare_tail` with operands by name and their options.

        A front's TP degree follows from its operands, and its ranks differ in nothing else.
        """
        prepare: Callable[..., Runner] = self.prepare_front if stage == "front" else self.prepare_tail
        of_rank = {} if stage == "front" else {"tp": tp, "rank": rank}
        return prepare(**of_rank, **options, **operands)

    def front(self, *operands: torch.Tensor, **options: Any) -> Outputs:
        """Prepare and run a front once; operands as in `prepare_front`."""
        return self.prepare_front(*operands, **options)()

    def tail(self, *operands: torch.Tensor, **options: Any) -> Outputs:
        """Prepare and run a tail once; operands as in `prepare_tail`."""
        return self.prepare_tail(*operands, **options)()

    def program_available(
        self, device: torch.device | str | int, stage: str, tp: int, num_tokens: int, num_partials: int = 1
    ) -> bool:
        """Whether a generated program of this export serves a request on a device; compiles and loads nothing.

        False without a driver, on a device of another architecture, and for a shape that no plan covers. A call of
        no tokens launches nothing; it is answered as one of a token.
        """
        try:
            opened = open_device(_ordinal(torch.device(device)))
            counts = {"tp": tp, "num_tokens": num_tokens, "num_partials": num_partials}
            tp, tokens, partials = (check_whole(str(stage), name, value) for name, value in counts.items())
            plan = self._routes.plan(opened, str(stage), tp, max(1, tokens), partials)
        except (CakeError, TypeError, ValueError, RuntimeError):  # torch.device raises the last three for what is none
            return False
        return all(
            launch.key in self.registry.kernels and opened.arch.name in self.registry.program(launch.key).arches
            for launch in plan.launches
        )

    def warm_up(
        self,
        device: torch.device | str | int,
        tp: int,
        *,
        tokens: Iterable[int] | None = None,
        partials: Iterable[int] = (1,),
        stages: Iterable[str] = ("front", "tail"),
        workers: int | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> tuple[str, ...]:
        """Compile and load every program that a set of token counts needs, so that nothing is cold in a capture.

        Parameters
        ----------
        device
            A CUDA device.
        tp
            Tensor-parallel degree.
        tokens
            Token counts to serve; by default 1 to the decode limit of the device's architecture.
        partials
            Numbers of routed partials to serve.
        stages
            `front`, `tail` or both.
        workers
            Compiler threads; by default one a processor.
        on_progress
            Called with the steps that are done and those there are: each cold program is compiled, then loaded.

        Returns
        -------
        tuple
            The logical keys that are now loaded.

        Raises
        ------
        CakeError
            An argument is of the wrong kind, a request has no plan, or a program does not compile or load.
        """
        tp = check_whole("warm_up", "tp", tp)
        chosen = None if tokens is None else check_wholes("warm_up", "tokens", tokens)
        numbers = {"front": (1,), "tail": check_wholes("warm_up", "partials", partials)}
        opened = self._open(_ordinal(torch.device(device)))
        every = range(1, family_of(opened.arch.name).decode(self.model).max_cta_tokens + 1)
        requests = [
            (stage, tp, count, number)
            for stage in ((stages,) if isinstance(stages, str) else stages)
            for number in numbers.get(stage, (1,))
            for count in (every if chosen is None else chosen)
            if count
        ]
        plans = [self._routes.plan(opened, *request) for request in requests]
        keys = dict.fromkeys(launch.key for plan in plans for launch in plan.launches)
        self._programs.load_all(opened, tuple(keys), workers, on_progress)
        open_control(opened)
        routes = [self._routes.load(opened, *request) for request in requests]
        return tuple(dict.fromkeys(launch.key for route in routes for launch in route.plan.launches))

    def wait_record(self, device: torch.device | str | int) -> WaitRecord:
        """The wait record of a device, to set the wait limit or the chaos seed; allocated if it was not."""
        return open_control(self._open(_ordinal(torch.device(device)))).wait_record

    def wait_report(self, device: torch.device | str | int) -> str | None:
        """What a wait that gave up on a device left behind, in a sentence; None where none did."""
        control = opened_control(_ordinal(torch.device(device)))
        return None if control is None else describe_wait_record(control.wait_record.words, (self.registry,))

    def _prepare(
        self,
        request: Request,
        backend: str,
        workspace: Workspace | None,
        arch: str | DeviceFacts | None,
        overlap: bool,
    ) -> Runner:
        _check_options(request, backend, workspace, arch, overlap)
        if backend == "reference":
            return EmptyRunner(request, None) if request.tokens == 0 else ReferenceRunner(request, self._compute)
        if backend == "emulator":
            facts = emulated_facts(self.model, self._device_facts if arch is None else arch)
            if request.tokens == 0:
                return EmptyRunner(request, None)
            return prepare_emulated(self.registry, request, facts, self._compile_flags)
        if request.device.type != "cuda":
            raise OperandError(
                f"{request.stage}: backend='auto' launches generated programs and needs CUDA tensors; got tensors on "
                f"{request.device}. backend='emulator' runs the same programs on the CPU; backend='reference' computes "
                "with torch on any device."
            )
        if request.tokens == 0:
            return EmptyRunner(request, None)
        ordinal = _ordinal(request.device)
        refuse_cold(request, ordinal, self._routes.plan, self._programs)
        try:
            device = self._open(ordinal)
            control = open_control(device)
            route = self._routes.load(device, request.stage, request.tp, request.tokens, request.partials)
            chosen = _workspace_for(request, route.plan, ordinal, workspace)
            return ProgramRunner(request, route.plan, route.programs, device, control, self.registry, chosen, overlap)
        except LaunchError as error:
            raise with_wait_report(error, ordinal, self.registry) from None

    def _compute(self, request: Request) -> Outputs:
        """What a request gives, by torch."""
        given = request.tensors
        return tuple(
            reference_outputs(request.stage, self.model.dims, given, tp=request.tp, rank=request.rank).values()
        )

    def _open(self, ordinal: int) -> Device:
        device = opened_device(ordinal)
        if device is None:
            refuse_in_capture(ordinal, f"cuda:{ordinal} was not used before", "Call it before the capture.")
            device = open_device(ordinal)
        facts = self._device_facts
        if facts is not None and facts.arch != device.arch.name:
            raise LaunchError(f"device_facts are of {facts.arch}; cuda:{ordinal} ({device.name}) is {device.arch.name}")
        return device


def _check_options(request: Request, backend: str, workspace: Any, arch: object, overlap: object) -> None:
    check_flag(request.stage, "overlap", overlap)
    if arch is not None and backend != "emulator":
        raise OperandError(
            f"{request.stage}: arch={arch!r} says what backend='emulator' plans for; backend={backend!r} takes none."
        )
    if backend not in BACKENDS:
        raise OperandError(f"{request.stage}: backend must be one of {', '.join(BACKENDS)}; got {backend!r}.")
    if workspace is not None and not isinstance(workspace, Workspace):
        raise OperandKindError(
            f"{request.stage}: workspace must be a Workspace or None; got {type(workspace).__name__}."
        )
    if workspace is not None and workspace.device != request.device:
        raise OperandError(
            f"{request.stage}: the workspace is on {workspace.device}, operands on {request.device}; make one there."
        )


def _workspace_for(request: Request, plan: Plan, ordinal: int, workspace: Workspace | None) -> Workspace | None:
    """The caller's workspace, or the current stream's; None where the call keeps nothing there."""
    if workspace_elems(request, plan) == 0:
        return None
    return stream_workspace(ordinal) if workspace is None else workspace


def _ordinal(device: torch.device) -> int:
    """Index of a CUDA device; torch's current one where the name has none."""
    if device.type != "cuda":
        raise LaunchError(f"generated programs need a CUDA device; got {device}.")
    try:
        return device.index if device.index is not None else torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:  # torch without CUDA, or without a driver
        raise LaunchError(f"torch {torch.__version__} has no current CUDA device ({error}).") from None

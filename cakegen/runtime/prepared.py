"""Prepared calls of any backend: their operands are checked and exchanged here. Imports torch, errors and validate."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from cakegen.errors import LaunchError, OperandError
from cakegen.plan.records import Plan
from cakegen.runtime.operand import Operand
from cakegen.runtime.validate import Request

Outputs = tuple[torch.Tensor, ...]
CHECK_VARIABLE = "CAKEGEN_CHECK_CALLS"


def checks_calls() -> bool:
    """Whether `CAKEGEN_CHECK_CALLS` asks that each call looks at its operands first.

    Raises
    ------
    LaunchError
        It is neither 0 nor 1.
    """
    text = os.environ.get(CHECK_VARIABLE, "")
    if text not in ("", "0", "1"):
        raise LaunchError(f"environment: {CHECK_VARIABLE} must be 0 or 1; got {text!r}.")
    return text == "1"


class Runner:
    """A prepared call; calling it launches on the current stream and returns the outputs.

    It keeps its operands alive. Capture it into a CUDA graph freely, and keep the runner (or at least its operands and
    its `Workspace`, where it was given one) as long as the graph. A runner has one set of outputs: a call on another
    stream than the last waits there, on the device, for the last. Calls inside captures are not ordered so, and one
    runner belongs to one thread at a time.
    """

    def __init__(self, request: Request, plan: Plan | None) -> None:
        self.outputs: Outputs = request.outputs
        self.plan = plan
        self._request = request
        self._shapes = _shapes(request)
        self._checks = checks_calls()

    def __call__(self) -> Outputs:
        """Run the call."""
        raise NotImplementedError

    @property
    def stage(self) -> str:
        """`front` or `tail`."""
        return self._request.stage

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return self._request.tp

    @property
    def rank(self) -> int:
        """This rank; a front's ranks differ in nothing, and say 0."""
        return self._request.rank

    @property
    def num_tokens(self) -> int:
        """T."""
        return self._request.tokens

    @property
    def route(self) -> str:
        """`decode` or `prefill`: which programs serve the call; `reference`: torch does; `empty`: it has no tokens."""
        if self.plan is not None:
            return self.plan.route
        return "reference" if self.num_tokens else "empty"

    @property
    def kernel_keys(self) -> tuple[str, ...]:
        """Logical keys of the launches of one call, in order."""
        return () if self.plan is None else tuple(launch.key for launch in self.plan.launches)

    @property
    def launch_count(self) -> int:
        """Kernel launches of one call."""
        return len(self.kernel_keys)

    def check_operands(self) -> None:
        """Refuse operands that are no longer what was prepared; each call does so under `CAKEGEN_CHECK_CALLS=1`.

        A call launches on the addresses that were bound. A tensor that was resized, given other memory (`set_`, an
        assignment to `.data`) or emptied since then is elsewhere, and the launch would read or write what is now at
        its old place.

        Raises
        ------
        LaunchError
            One is; the message names it.
        """
        request = self._request
        if not request.tensors:
            return
        moved = "It was right when the runner was prepared: bind what it is now with rebind, or prepare again."
        for name, tensor in request.tensors.items():
            if tensor.shape != self._shapes[name]:
                shapes = f"{list(self._shapes[name])}; it is {list(tensor.shape)}"
                raise OperandError(f"{request.stage}: {name} must be of the shape that was prepared, {shapes}. {moved}")
        try:
            found = request.validate(**request.tensors)
        except LaunchError as error:
            raise type(error)(f"{error} {moved}") from None
        for name, bound in request.operands.items():
            now = found.operands[name]
            if now != bound:
                raise OperandError(
                    f"{request.stage}: {name} must be where it was prepared, at {_place(bound)}; it is at "
                    f"{_place(now)}. {moved}"
                )

    def rebind(self, **operands: torch.Tensor) -> None:
        """Take other tensors for some operands, or the same ones where they are now, from the next call on.

        They are checked as `prepare` checks them, and where one is refused nothing changes. The plan stays, so tokens,
        partials, TP, rank and device must. A graph that was captured before replays with the operands of its capture.

        Parameters
        ----------
        operands
            By the names of `prepare`'s parameters; none: all as they are now.

        Raises
        ------
        LaunchError
            An operand is unknown, missing, or not what the call needs.
        """
        bound = self._request
        for name in operands:
            if name not in self._shapes:
                raise OperandError(f"{bound.stage}: rebind has no operand {name!r}; it has {', '.join(self._shapes)}.")
        given = bound.tensors | operands
        missing = [name for name in self._shapes if name not in given]
        if missing:
            raise OperandError(
                f"{bound.stage}: rebind needs every operand, since this runner keeps none alive; {', '.join(missing)} "
                "are missing."
            )
        request = bound.validate(**given)
        for fact in ("tokens", "partials", "tp", "rank", "device"):
            before, now = getattr(bound, fact), getattr(request, fact)
            if before != now:
                raise OperandError(
                    f"{bound.stage}: rebind keeps the plan, which is for {fact} {before}; got {now}. Prepare another "
                    "runner for it."
                )
        self._bind(request)
        self._request, self.outputs, self._shapes = request, request.outputs, _shapes(request)

    def _bind(self, request: Request) -> None:
        """Make the next call one of other operands; nothing, where a call reads them from the request."""


class EmptyRunner(Runner):
    """A call of no tokens: there is nothing to launch, and no driver is asked."""

    def __call__(self) -> Outputs:
        """Return the empty outputs."""
        return self.outputs


class ReferenceRunner(Runner):
    """A call of the torch reference, which writes its results to the caller's outputs."""

    def __init__(self, request: Request, compute: Callable[[Request], Outputs]) -> None:
        super().__init__(request, None)
        self._compute = compute

    def __call__(self) -> Outputs:
        """Compute and copy; allocates, unlike a generated program."""
        if self._checks:
            self.check_operands()
        for output, value in zip(self.outputs, self._compute(self._request), strict=True):
            output.copy_(value)
        return self.outputs


def _shapes(request: Request) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in request.tensors.items()}


def _place(operand: Operand) -> str:
    layout = f"[{operand.partials} x {operand.rows} x {operand.cols}], row pitch {operand.pitch} elements"
    return f"{operand.address:#x} ({layout}, {operand.element_bytes} bytes each)"

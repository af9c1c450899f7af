"""What the GPU tests share: weights of a whole model, guarded memory, and checks that are counted without waiting.

A check is a 0-dim tensor on the device that must be zero; `Checks.settle` reads all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from cakegen.model import Model
from cakegen.registry import Registry, load_registry
from cakegen.runtime import LatentMoe, Workspace
from cakegen.runtime.prepared import Runner
from cakegen.runtime.reference import reference_front, reference_tail
from cakegen.runtime.runner import plan_partials

BF16 = torch.bfloat16
TOKENS = 192
ALL_ROWS = slice(None)
BF16_TOLERANCE = 1e-2
FP32_TOLERANCE = 1e-3
# NaNs that no instruction makes
_CANARIES = {BF16: (torch.int16, 0x7FA5), torch.float32: (torch.int32, 0x7FA5A5A5)}


@dataclass
class Checks:
    """Counts of wrong elements by label, read at the end so that nothing waits in between."""

    labels: list[str] = field(default_factory=list)
    counts: list[torch.Tensor] = field(default_factory=list)

    def zero(self, label: str, count: torch.Tensor) -> None:
        """`count` elements are wrong; must be 0."""
        self.labels.append(label)
        self.counts.append(count)

    def equal(self, label: str, value: torch.Tensor, expected: torch.Tensor) -> None:
        """Two tensors have the same bits, NaNs included."""
        kind = _CANARIES[value.dtype][0]
        self.zero(label, (value.view(kind) != expected.view(kind)).sum())

    def close(self, label: str, value: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
        """Every element is within `tolerance * (1 + |expected|)`; a NaN is not."""
        error = (value.double() - expected).abs()
        self.zero(label, (~(error <= tolerance + tolerance * expected.abs())).sum())

    def settle(self) -> int:
        """Assert that all counts are zero, naming the first wrong ones; returns how many there were."""
        assert self.counts, "nothing was checked"
        values = torch.stack(self.counts).tolist()
        wrong = [f"{label}: {count}" for label, count in zip(self.labels, values, strict=True) if count]
        assert not wrong, f"{len(wrong)} of {len(values)} checks fail: " + "; ".join(wrong[:8])
        return len(values)


class Guarded:
    """An output inside a larger buffer of canaries: columns on both sides, rows before and behind."""

    def __init__(
        self, like: torch.Tensor, cols: int, dtype: torch.dtype = BF16, left: int = 16, right: int = 8
    ) -> None:
        """Room for the rows of `like`, on its device."""
        kind, self.canary = _CANARIES[dtype]
        self.buffer = torch.empty(like.shape[-2] + 2, left + cols + right, dtype=dtype, device=like.device)
        self.bits = self.buffer.view(kind)
        self.columns = slice(left, left + cols)

    def view(self, tokens: int) -> torch.Tensor:
        """The output of a call of so many tokens; everything else stays guarded."""
        return self.buffer[1 : 1 + tokens, self.columns]

    def poison(self) -> None:
        """Fill output and guards."""
        self.bits.fill_(self.canary)

    def faults(self, tokens: int) -> torch.Tensor:
        """Elements of the output that were not written, and guards that were."""
        inside = self.bits[1 : 1 + tokens, self.columns] == self.canary
        untouched = (self.bits == self.canary).sum() - inside.sum()
        return inside.sum() + (self.bits.numel() - inside.numel() - untouched)


class GuardedPartials:
    """A workspace whose fp32 partials are NaN before a call, with a margin behind them that no program may touch."""

    MARGIN = 4096

    def __init__(self, device: torch.device, elems: int) -> None:
        self.workspace = Workspace(device)
        kind, self.canary = _CANARIES[torch.float32]
        self.bits = self.workspace.reserve(elems + self.MARGIN).view(kind)

    def poison(self) -> None:
        """Fill partials and margin."""
        self.bits.fill_(self.canary)

    def faults(self, runner: Runner) -> torch.Tensor:
        """Elements behind those of a runner's plan that were written."""
        assert runner.plan is not None
        used = plan_partials(runner.plan)
        assert used + self.MARGIN <= self.bits.numel(), "the workspace has grown: reserve more"
        return (self.bits[used:] != self.canary).sum()


@dataclass
class Weights:
    """All ranks' weights of one model, and inputs of some rows."""

    gate: torch.Tensor
    down: torch.Tensor
    shared_gate: torch.Tensor
    shared_up: torch.Tensor
    norm: torch.Tensor
    up: torch.Tensor
    shared_down: torch.Tensor
    x: torch.Tensor
    other_x: torch.Tensor
    routed: torch.Tensor
    shared_act: torch.Tensor


def make_weights(model: Model, device: torch.device, seed: int = 0, tokens: int = TOKENS, partials: int = 3) -> Weights:
    """Random weights that give products of order 1, and activations whose rows are pitched with NaN between them."""
    dims = model.dims
    make = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=make, device=device) * scale).to(BF16)

    def rows(cols: int, *outer: int) -> torch.Tensor:
        buffer = torch.full((*outer, tokens, cols + 64), float("nan"), dtype=BF16, device=device)
        buffer[..., :cols] = normal(*outer, tokens, cols)
        return buffer[..., :cols]

    return Weights(
        gate=normal(dims.experts, dims.hidden, scale=dims.hidden**-0.5),
        down=normal(dims.latent, dims.hidden, scale=dims.hidden**-0.5),
        # twice as wide, so that the bounds of SiTU are felt
        shared_gate=normal(dims.shared_intermediate, dims.hidden, scale=2 * dims.hidden**-0.5),
        shared_up=normal(dims.shared_intermediate, dims.hidden, scale=2 * dims.hidden**-0.5),
        norm=normal(dims.latent),
        up=normal(dims.hidden, dims.latent, scale=dims.latent**-0.5),
        shared_down=normal(dims.hidden, dims.shared_intermediate, scale=dims.shared_intermediate**-0.5),
        x=rows(dims.hidden),
        other_x=rows(dims.hidden),
        routed=rows(dims.latent, partials),
        shared_act=rows(dims.shared_intermediate),
    )


class _Case:
    """What both stages share: the outputs, their guards, and the partials of split GEMMs."""

    outputs: tuple[Guarded, ...]
    names: tuple[str, ...]
    partials: GuardedPartials | None

    @property
    def workspace(self) -> Workspace | None:
        """What a runner is given; None: the current stream's."""
        return None if self.partials is None else self.partials.workspace

    def poison(self) -> None:
        """Fill the outputs, their guards, and the partials."""
        for guarded in (*self.outputs, *((self.partials,) if self.partials else ())):
            guarded.poison()

    def check_guards(self, checks: Checks, runner: Runner, tokens: int, label: str) -> None:
        """Every output element was written, and nothing else was."""
        for name, output in zip(self.names, self.outputs, strict=True):
            checks.zero(f"{label} {name} guards", output.faults(tokens))
        if self.partials is not None:
            checks.zero(f"{label} margin of the partials", self.partials.faults(runner))


class FrontCase(_Case):
    """One rank's front: operands, guarded outputs, and the fp64 reference."""

    names = ("logits", "latent", "shared_act")
    tolerances = (FP32_TOLERANCE, BF16_TOLERANCE, BF16_TOLERANCE)

    def __init__(
        self, moe: LatentMoe, weights: Weights, tp: int, rank: int = 0, partials: GuardedPartials | None = None
    ) -> None:
        dims = moe.model.dims
        width = dims.i_local(tp)
        columns = slice(rank * width, (rank + 1) * width)
        self.moe, self.tp, self.x, self.device, self.partials = moe, tp, weights.x, weights.x.device, partials
        gate_up = torch.cat((weights.shared_gate[columns], weights.shared_up[columns]))
        self.weights = (weights.gate, weights.down, gate_up)
        self.outputs = (
            Guarded(self.x, dims.experts, torch.float32, 4, 4),
            Guarded(self.x, dims.latent),
            Guarded(self.x, width),
        )

    def expected(self, rows: slice = ALL_ROWS) -> tuple[torch.Tensor, ...]:
        """fp64 outputs of some rows."""
        return reference_front(self.moe.model.dims, self.x[rows], *self.weights, dtype=torch.float64)

    def prepare(self, tokens: int, *, x: torch.Tensor | None = None, moe: LatentMoe | None = None) -> Runner:
        """A runner of the first rows, with poisoned outputs."""
        rows = (self.x if x is None else x)[:tokens]
        self.poison()
        views = (output.view(tokens) for output in self.outputs)
        return (moe or self.moe).prepare_front(rows, *self.weights, *views, workspace=self.workspace)


class TailCase(_Case):
    """One rank's tail: operands, guarded outputs, and the reference."""

    names = ("y", "out")

    def __init__(
        self,
        moe: LatentMoe,
        weights: Weights,
        tp: int,
        rank: int,
        num_partials: int,
        partials: GuardedPartials | None = None,
    ) -> None:
        dims = moe.model.dims
        width = dims.i_local(tp)
        columns = slice(rank * width, (rank + 1) * width)
        self.moe, self.tp, self.rank, self.device, self.partials = moe, tp, rank, weights.x.device, partials
        self.routed, self.shared_act = weights.routed[:num_partials], weights.shared_act[:, columns]
        self.norm, self.up, self.shared_down = weights.norm, weights.up, weights.shared_down[:, columns].contiguous()
        self.outputs = (Guarded(weights.x, dims.latent), Guarded(weights.x, dims.hidden))

    def expected(self, rows: slice = ALL_ROWS) -> tuple[torch.Tensor, torch.Tensor]:
        """`y` with its defined bits and the fp64 `out` of some rows."""
        operands = (self.routed[:, rows], self.norm, self.up, self.shared_act[rows], self.shared_down)
        return reference_tail(self.moe.model.dims, *operands, tp=self.tp, rank=self.rank, dtype=torch.float64)

    def prepare(
        self,
        tokens: int,
        *,
        routed: torch.Tensor | None = None,
        shared_act: torch.Tensor | None = None,
        moe: LatentMoe | None = None,
    ) -> Runner:
        """A runner of the first rows, with poisoned outputs."""
        self.poison()
        return (moe or self.moe).prepare_tail(
            (self.routed if routed is None else routed)[:, :tokens],
            self.norm,
            self.up,
            (self.shared_act if shared_act is None else shared_act)[:tokens],
            self.shared_down,
            self.outputs[1].view(tokens),
            tp=self.tp,
            rank=self.rank,
            y_workspace=self.outputs[0].view(tokens),
            workspace=self.workspace,
        )


Case = FrontCase | TailCase


def run_twice(checks: Checks, case: Case, runner: Runner, tokens: int, label: str) -> tuple[torch.Tensor, ...]:
    """Run, check the guards, run again on poisoned outputs, check equal bits; returns copies of the outputs."""
    first = tuple(value.clone() for value in runner())
    case.check_guards(checks, runner, tokens, label)
    case.poison()
    for name, again, value in zip(case.names, runner(), first, strict=True):
        checks.equal(f"{label} {name} relaunch", again, value)
    return first


def keys_of(runner: Runner) -> tuple[str, ...]:
    """Logical keys that a runner launches."""
    assert runner.plan is not None
    return tuple(launch.key for launch in runner.plan.launches)


def token_of_each_route(prepare: Callable[[int], Runner]) -> list[int]:
    """The largest token count of every route: one example a program (or pair of programs)."""
    found: dict[tuple[str, ...], int] = {}
    for count in range(TOKENS, 0, -1):
        found.setdefault(keys_of(prepare(count)), count)
    return sorted(found.values())


def spans(runners: list[Runner], streams: list[torch.cuda.Stream], launches: int) -> list[tuple[float, float]]:
    """Start and end in ms of each runner's launches on its stream; all streams wait for one gate, about 10 ms away."""
    start, gate = torch.cuda.Event(enable_timing=True), torch.cuda.Event()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in runners]
    torch.cuda.synchronize()
    start.record()
    torch.cuda._sleep(20_000_000)
    gate.record()
    for stream, runner, (begin, end) in zip(streams, runners, events, strict=True):
        with torch.cuda.stream(stream):
            stream.wait_event(gate)
            begin.record()
            for _ in range(launches):
                runner()
            end.record()
    torch.cuda.synchronize()
    return [(start.elapsed_time(begin), start.elapsed_time(end)) for begin, end in events]


REGISTRIES: list[Registry] = []
"""Every tree that a test loaded, so that the report of a stuck wait can name its program."""


def rendered_tree(model: Model, folder: Path) -> Registry:
    """Export a model into a folder and read it back; skips where the template engine is not installed."""
    pytest.importorskip("jinja2")
    from cakegen.emit import render_tree, write_exports

    write_exports(folder / "trees", [render_tree(model, model.name)])
    return remembered(load_registry(folder / "trees" / model.name))


def remembered(registry: Registry) -> Registry:
    """Note a tree for the report of a stuck wait."""
    REGISTRIES.append(registry)
    return registry

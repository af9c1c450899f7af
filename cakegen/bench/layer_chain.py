"""A captured chain of layers with weights of their own: what serving sees of these programs. Imports runtime and torch.

front -> stand-in experts -> tail -> next front. The experts stand in by nothing at all: a front's latent is the tail's
only partial, so that the chain holds no time but that of the two stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cakegen.bench.arms import Arm, WrongResult, build_ours
from cakegen.bench.measure import Bench, build_rival, pointwise_to_try
from cakegen.bench.operands import (
    Case,
    FrontWeights,
    TailWeights,
    make_front_weights,
    make_tail_weights,
    normal_source,
    poison,
    rank_of,
)
from cakegen.bench.products import CUBLAS
from cakegen.bench.records import OURS, RIVAL_PREFIX, TIMED, UNSERVED, WRONG, fastest_limit, fastest_rival
from cakegen.bench.rivals import RIVALS
from cakegen.bench.rows import STAGES, Row, work_of
from cakegen.bench.stream_probe import BOX_SHAPES, StreamProbe
from cakegen.bench.timing import Call, time_alternating
from cakegen.model import ModelDims
from cakegen.registry import Registry
from cakegen.runtime import LatentMoe
from cakegen.runtime.reference import reference_outputs

LAYERS = 4
CHAIN_TOKENS = (1, 16, 64, 128)
_LARGEST_ERROR = 0.03
"""Relative error (norms) of a layer's output against the fp32 reference of the layer's own input. Whole chains are not
compared: a rounding in the first layer has grown to a tenth of the output by the fourth."""


@dataclass(eq=False)
class Layer:
    """Weights of one layer on one rank."""

    front: FrontWeights
    tail: TailWeights


@dataclass(frozen=True)
class Link:
    """How a chain's arms are built. `joined`: front and tail meet in one buffer of joined tokens."""

    name: str
    front: Callable[[Case], Arm]
    tail: Callable[[Case], Arm]
    joined: bool = False


def measure_chains(bench: Bench, tps: Sequence[int], tokens: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A record for each TP degree and T of `CHAIN_TOKENS` that was asked for: microseconds of a layer, by arm."""
    for tp in tps:
        layers = _make_layers(bench, tp)
        links = list(_links(bench, layers[0].tail))
        # the largest T first, as in a group of rows
        for count in sorted(set(CHAIN_TOKENS) & set(tokens), reverse=True):
            yield _measure_chain(bench, layers, links, tp, count)


def _make_layers(bench: Bench, tp: int) -> list[Layer]:
    dims, normal = bench.moe.model.dims, normal_source(bench.device, bench.settings.seed)
    return [
        Layer(make_front_weights(dims, tp, normal), make_tail_weights(dims, tp, rank_of(tp), normal))
        for _ in range(LAYERS)
    ]


def _measure_chain(bench: Bench, layers: list[Layer], links: Sequence[Link], tp: int, tokens: int) -> dict[str, Any]:
    x = normal_source(bench.device, bench.settings.seed + tokens)(tokens, bench.moe.model.dims.hidden)
    calls: dict[str, Call] = {}
    unavailable, status = dict(bench.notes), TIMED
    for link in links:
        try:
            captured, outs = _capture_chain(bench, layers, x, tp, link)
            captured()
            _check_layers(bench, layers, [x, *outs], tp)
        except Exception as error:
            # raises if the device is lost
            bench.clock.settle()
            if link.name.startswith(OURS):
                status = WRONG if isinstance(error, WrongResult) else UNSERVED
            unavailable[link.name] = f"{type(error).__name__}: {str(error)[:300]}"
        else:
            calls[link.name] = captured
    if bench.probe is not None:
        calls |= _capture_probes(bench.probe, bench, layers)
    times = time_alternating(calls, bench.clock, bench.settings.rounds(tokens))
    per_layer = {name: summary.median_us / LAYERS for name, summary in times.items()}
    rival, limit = fastest_rival(times), fastest_limit(times)
    works = [work_of(bench.moe.model.dims, Row(stage, tp, tokens)) for stage in STAGES]
    return {
        "tp": tp,
        "tokens": tokens,
        "layers": LAYERS,
        "status": status,
        "ours_us": per_layer.get(OURS),
        "rival": rival,
        "rival_us": per_layer[rival] if rival else None,
        "limit": limit,
        "limit_us": per_layer[limit] if limit else None,
        "weight_bytes": sum(work.weight_bytes for work in works),
        "layer_us": per_layer,
        "unavailable": unavailable,
    }


def _links(bench: Bench, tail: TailWeights) -> Iterator[Link]:
    """Ours, its launches overlapped; ours one after another; ours without any programmatic launch; each stock
    chain, and the joined one of each library.
    """
    backend = bench.settings.backend
    ours = partial(build_ours, bench.moe, backend=backend, overlap=True)
    yield Link(OURS, ours, ours)
    ours = partial(build_ours, bench.moe, backend=backend)
    yield Link(f"{OURS} apart", ours, ours)
    serial = serial_registry(bench.moe.registry)
    if serial is not None:
        ours = partial(build_ours, LatentMoe(serial), backend=backend)
        yield Link(f"{OURS} serial", ours, ours)
    if not bench.settings.rivals:
        return
    pointwise = pointwise_to_try(bench, tail)[0]
    of_libraries = [(f"joined {library.name}", library) for library in bench.libraries]
    for label, products in (("separate", CUBLAS), ("joined", CUBLAS), *of_libraries):
        name = label.partition(" ")[0]
        front, back = (partial(build_rival, RIVALS[stage][name], pointwise, products) for stage in STAGES)
        yield Link(f"{RIVAL_PREFIX}{label}", front, back, joined=name == "joined")


def serial_registry(registry: Registry) -> Registry | None:
    """The registry with every programmatic launch turned into an ordinary one; None where there is none.

    A program's `griddepcontrol` instructions do nothing in an ordinary launch, so the results are the same.
    """
    if not any(program.launch.programmatic for program in registry.programs.values()):
        return None
    programs = {
        name: dataclasses.replace(program, launch=dataclasses.replace(program.launch, programmatic=False))
        for name, program in registry.programs.items()
    }
    return dataclasses.replace(registry, programs=programs)


def _capture_chain(
    bench: Bench, layers: list[Layer], x: torch.Tensor, tp: int, link: Link
) -> tuple[Call, list[torch.Tensor]]:
    """All layers in one graph, and the output of each, which is the next one's input."""
    dims, rank, tokens = bench.moe.model.dims, rank_of(tp), x.shape[0]
    calls: list[Call] = []
    outs: list[torch.Tensor] = []
    for layer in layers:
        case = Case(Row("front", tp, tokens), rank, dims, layer.front, {dims.rows_stage.tokens.name: x}, {})
        if link.joined:
            case.joined_tokens = case.empty(dims.latent_slice(tp) + dims.i_local(tp))
        first = link.front(case)
        inputs = _behind(dims, first.outputs)
        behind = Case(Row("tail", tp, tokens), rank, dims, layer.tail, inputs, {}, case.joined_tokens)
        second = link.tail(behind)
        calls += [first.call, second.call]
        x = second.outputs[dims.sum_stage.output.short]
        outs.append(x)
    captured = bench.clock.capture(partial(_run_all, calls))
    # what the replay that is checked does not write stays NaN
    poison({str(number): out for number, out in enumerate(outs)})
    return captured, outs


def _behind(dims: ModelDims, results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a tail reads of a front's results; `latent` stands in for the experts' only partial."""
    stage = dims.sum_stage
    names = {spec.name for spec in stage.inputs}
    return {stage.preparation.partials.name: results["latent"][None]} | {
        key: results[key] for key in results if key in names
    }


def _run_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _check_layers(bench: Bench, layers: list[Layer], xs: Sequence[torch.Tensor], tp: int) -> None:
    """`xs`: the chain's input, then the output of each layer."""
    dims = bench.moe.model.dims
    for number, (layer, x, out) in enumerate(zip(layers, xs, xs[1:], strict=False)):
        given = {dims.rows_stage.tokens.name: x, **layer.front.operands()}
        between = _behind(dims, reference_outputs("front", dims, given, tp=tp, rank=rank_of(tp)))
        given = between | layer.tail.operands()
        wanted = reference_outputs("tail", dims, given, tp=tp, rank=rank_of(tp))[dims.sum_stage.output.short]
        error = float((out.double() - wanted.double()).norm() / wanted.double().norm())
        if not error <= _LARGEST_ERROR:
            raise WrongResult(
                f"layer {number} of a chain of {LAYERS}: relative error {error:.3g} against the reference of its own "
                f"input; at most {_LARGEST_ERROR} is rounding to bf16"
            )


def _capture_probes(probe: StreamProbe, bench: Bench, layers: list[Layer]) -> dict[str, Call]:
    """Each variant of the stream probe over every weight of the chain, a launch a stage."""
    parts = [part.streamed() for layer in layers for part in (layer.front, layer.tail)]
    return {
        shape.name: bench.clock.capture(partial(_run_all, [probe.arm(shape, part).call for part in parts]))
        for shape in BOX_SHAPES
    }

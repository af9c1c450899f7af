"""Which routes each device here can take, and why not the others. Imports arch, plan, registry and runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cakegen.arch import Architecture, architecture_of
from cakegen.doctor.finding import ABSENT, OK, PROBLEM, Finding
from cakegen.errors import CakeError, LaunchError, PlanError
from cakegen.model import DeviceFacts, Model
from cakegen.plan import family_of, plan_route
from cakegen.registry import Registry, load_registry
from cakegen.runtime.device import DeviceAttributes, count_devices, read_attributes

STAGES = ("front", "tail")


def examine_devices(export: str) -> Iterator[Finding]:
    """Look at each device, and at each route on it: front and tail, decode and prefill.

    Parameters
    ----------
    export
        Export whose programs are asked for, or a tree's folder.
    """
    try:
        count = count_devices()
    except LaunchError as error:
        yield Finding("devices", ABSENT, f"none: {error}", {"count": 0})
        return
    if count == 0:
        yield Finding("devices", ABSENT, "none: the driver shows this process no device", {"count": 0})
        return
    try:
        registry = load_registry(export)
    except CakeError as error:
        yield Finding("routes", PROBLEM, str(error), {})
        registry = None
    for ordinal in range(count):
        yield from _device(ordinal, registry)


def _device(ordinal: int, registry: Registry | None) -> Iterator[Finding]:
    topic = f"cuda:{ordinal}"
    try:
        found = read_attributes(ordinal)
    except LaunchError as error:
        yield Finding(topic, PROBLEM, str(error), {"ordinal": ordinal})
        return
    major, minor = found.compute_capability
    facts = {"ordinal": ordinal, "name": found.name, "compute_capability": f"{major}.{minor}"}
    facts |= {"sm_count": found.sm_count, "max_dynamic_smem_bytes": found.max_dynamic_smem_bytes}
    text = f"{found.name}, compute capability {major}.{minor}, {found.sm_count} SMs"
    try:
        arch = architecture_of(found.compute_capability)
    except PlanError as error:
        yield Finding(topic, ABSENT, f"{text}: {error}. backend='reference' runs on any device", facts)
        return
    yield Finding(topic, OK, f"{text}, {arch.name}", {**facts, "arch": arch.name})
    if registry is not None:
        yield from examine_routes(registry, found, arch)


def examine_routes(registry: Registry, found: DeviceAttributes, arch: Architecture) -> Iterator[Finding]:
    """One finding a route: the TP degrees that have programs for every token count tried, or why one has none.

    The planner is given half of the SMs as resident pairs; a device that holds fewer is planned for again at launch.
    """
    pairs = found.sm_count // 2
    device = DeviceFacts(arch.name, found.sm_count, pairs, found.max_dynamic_smem_bytes)
    target = registry.model.target(arch.name)
    degrees = target.tp_degrees if target is not None else ()
    tried = _token_counts(registry.model, arch.name) if target is not None else {"decode": (), "prefill": ()}
    for stage in STAGES:
        for phase, counts in tried.items():
            refusals = {tp: why_refused(registry, device, stage, tp, counts) for tp in degrees}
            yield _route(found.ordinal, stage, phase, arch.name, refusals)


def _route(ordinal: int, stage: str, phase: str, arch: str, refusals: dict[int, str]) -> Finding:
    served = [tp for tp, reason in refusals.items() if not reason]
    refused = {tp: reason for tp, reason in refusals.items() if reason}
    facts = {"ordinal": ordinal, "stage": stage, "phase": phase, "tp": served}
    facts["refused"] = {str(tp): reason for tp, reason in refused.items()}
    words = [f"TP {', '.join(map(str, served))}"] if served else []
    if refused:
        tp, reason = next(iter(refused.items()))
        words.append(f"not TP {', '.join(map(str, refused))} (TP {tp}: {reason})")
    text = "; ".join(words) or f"the export declares no target {arch}"
    state = OK if served and not refused else ABSENT
    return Finding(f"cuda:{ordinal} {stage} {phase}", state, text, facts)


def _token_counts(model: Model, arch: str) -> dict[str, tuple[int, ...]]:
    """A few token counts of each phase: one of each token tile, and prefill from its first row to its last."""
    decode, most = family_of(arch).decode(model), model.max_tokens
    last = decode.max_cta_tokens
    prefill = sorted({count for count in (last + 1, 4 * last, 16 * last, most) if last < count <= most})
    return {"decode": tuple(n for n in decode.n_pads if n <= last), "prefill": tuple(prefill)}


def why_refused(registry: Registry, device: DeviceFacts, stage: str, tp: int, counts: Sequence[int]) -> str:
    """Why a route does not serve one of some token counts; empty where it serves all."""
    for tokens in counts:
        try:
            plan = plan_route(registry.model, stage=stage, tp=tp, tokens=tokens, partials=1, device=device)
        except PlanError as error:
            return str(error)
        for launch in plan.launches:
            name = registry.kernels.get(launch.key)
            if name is None:
                return f"T = {tokens} needs {launch.key}, which {registry.export} does not hold"
            if device.arch not in registry.programs[name].arches:
                return f"T = {tokens} needs {launch.key}, whose program is not written for {device.arch}"
    return ""

"""The diagram of a program is what its warps do: who waits at each barrier and who arrives there, on the emulator.

One program of each kind of the small model runs once: those of a kind have the same arrows and switches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import pytest
from support.emit.program_kinds import switches_of
from support.emit.program_tools import load_tool

from cakegen.emulator import Options
from cakegen.emulator.launches.cases import Case, emulate_case, find_cases
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.machine.memory import OFFSET_MASK
from cakegen.emulator.machine.operands import active_lanes, locate, read_address
from cakegen.emulator.machine.warp import Strand, Warp
from cakegen.emulator.text.ptx import Instruction
from cakegen.errors import PlanError
from cakegen.plan import family_of
from cakegen.registry import Program, Registry, load_registry

CLAIMS: Any = load_tool("program_claims")
EXPORT = "tiny_latent_moe"
ARCHES = ("sm_90a", "sm_100a")
# (rank in the cluster, index of the warp)
Warps = frozenset[tuple[int, int]]

pytestmark = pytest.mark.emulator


@dataclasses.dataclass
class Seen:
    """By a barrier's name, without its number: who waits, who arrives, and whose copies and remote stores it counts."""

    waits: defaultdict[str, set[tuple[int, int]]]
    arrives: defaultdict[str, set[tuple[int, int]]]
    sends: defaultdict[str, set[tuple[int, int]]]


def use_of(instruction: Instruction) -> tuple[str, int] | None:
    """What an instruction does with an mbarrier, and which operand that is."""
    root, parts = instruction.root, instruction.parts
    if root == "mbarrier" and parts[1] in ("try_wait", "test_wait"):
        return "waits", 1
    if root == "mbarrier" and parts[1] == "arrive":
        return "arrives", 1
    if root == "tcgen05" and parts[1] == "commit":
        return "arrives", 0
    if root == "st" and parts[1] == "async":
        return "sends", 2
    if root == "cp" and "mbarrier::complete_tx::bytes" in parts:
        return "sends", 2 if "tensor" in parts else 3
    return None


class WatchedMachine(Machine):
    """Notes who uses which barrier."""

    def __init__(self, seen: Seen, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._seen = seen

    def _stop(self, warp: Warp, strand: Strand, pc: int) -> None:
        instruction = self.kernel.instructions[pc]
        use = use_of(instruction)
        if use is not None and (active := active_lanes(strand, instruction)).any():
            address = int(read_address(strand, instruction.operands[use[1]], "u4")[active][0])
            is_local = instruction.root == "tcgen05"
            cta, offset = (warp.cta, address & OFFSET_MASK) if is_local else locate(strand, address, True)
            name = cta.barrier_at(offset).name.partition("[")[0]
            getattr(self._seen, use[0])[name].add((warp.cta.shared.rank, warp.index))
        super()._stop(warp, strand, pc)


def watched(registry: Registry, case: Case) -> Seen:
    """What the last launch of a case does."""
    launches: list[Seen] = []

    def machine(*arguments: Any, **options: Any) -> Machine:
        launches.append(Seen(*(defaultdict(set) for _ in dataclasses.fields(Seen))))
        return WatchedMachine(launches[-1], *arguments, **options)

    report = emulate_case(registry, case, Options("random", 0, "wide", checks=False, machine=machine))
    assert report.problems == ()
    return launches[-1]


def constants_of(text: str) -> dict[str, int]:
    """Members of `struct Cfg` that are whole numbers."""
    return {name: int(value) for name, value in re.findall(r"static constexpr int (k\w+) = (\d+);", text)}


def warps_of(phrase: str, program: Program, constants: dict[str, int], previous: str) -> Warps:
    """The warps that a diagram's words stand for; "those" are the ones of the source."""
    cfg, ranks = constants, range(program.launch.cluster[0])
    of_rank = re.search(r"(?:of rank|CTA) (\d)\b", phrase)
    if of_rank:
        ranks = range(int(of_rank[1]), int(of_rank[1]) + 1)
    role = re.sub(
        r"^(?:each CTA's|both CTAs'|CTA 0's|both) | of (?:both ranks|rank \d|the partner|all CTAs)$", "", phrase
    )
    role = re.sub(r" of .*$", "", previous) if role == "those" else role
    if program.role.startswith("decode"):
        producer, is_hopper = cfg["kProducerWarp"], "sm_90a" in program.arches
        indices = {
            "producer warp": range(producer, producer + 1),
            "the ring's first copies": range(producer, producer + 1),
            "MMA warps": range(4),
            "norm warps": range(4, producer),
            "epilogue warps": range(4),
            "MMA warp": range(producer + 1, producer + 2),
        }[role]
        assert is_hopper == (role in ("MMA warps", "norm warps")) or role not in ("MMA warps", "norm warps", "MMA warp")
    elif "sm_90a" in program.arches:
        mma = cfg["kMmaWarps"]
        indices = {
            "producers": range(mma, mma + 1),
            "MMA warps": range(mma),
            "an MMA warpgroup": range(mma),
            "the CTA's other": range(mma),
        }[role]
    else:
        first, last = cfg["kFirstEpilogueWarp"], cfg["kNumThreads"] // 32
        if role == "all roles":
            return frozenset(
                (rank, warp) for rank in ranks for warp in range(last) if warp != cfg["kMmaWarp"] or rank == 0
            )
        indices = {
            "loader": range(1),
            "loaders": range(1),
            # whose answer each loader expects
            "launch control": range(1),
            "MMA thread": range(cfg["kMmaWarp"], cfg["kMmaWarp"] + 1),
            "epilogue warps": range(first, last),
            "epilogue warps, first": range(first, last),
        }[role]
    return frozenset((rank, index) for rank in ranks for index in indices)


def differences(program: Program, text: str, seen: Seen) -> list[str]:
    """Where a diagram's arrows differ from what was seen, in words."""
    cfg, found = constants_of(text), []
    drawn: defaultdict[str, tuple[set[tuple[int, int]], set[tuple[int, int]]]] = defaultdict(lambda: (set(), set()))
    for edge in CLAIMS.edges_of(text):
        name = edge.by.partition("[")[0]
        if name and not name.startswith("counter"):
            drawn[name][0].update(warps_of(edge.source, program, cfg, ""))
            drawn[name][1].update(warps_of(edge.target, program, cfg, edge.source))
    arrivals = {name: arrivals for name, _, arrivals in CLAIMS.barriers_of(text)}
    for name, (sources, targets) in drawn.items():
        waits, gives = seen.waits[name], seen.sends[name] or seen.arrives[name]
        # a ring of more stages than the model has units is filled once
        if waits != targets and (waits or name != "stage_empty"):
            found.append(f"{name}: drawn to {sorted(targets)}, and {sorted(waits)} wait for it")
        # where fewer arrivals than warps complete it, some warp of them arrives for all
        a_cta = len(sources) // len({rank for rank, _ in sources})
        if not gives <= sources or (gives != sources and arrivals[name] >= a_cta):
            found.append(f"{name}: drawn from {sorted(sources)}, and {sorted(gives)} arrive or send")
    unused = {name for used in (seen.waits, seen.arrives, seen.sends) for name, warps in used.items() if warps}
    if unused != set(drawn):
        found.append(f"drawn are {sorted(drawn)}, used {sorted(unused)}")
    return found


def diagram_kind(registry: Registry, program: Program) -> Hashable:
    """Role, switches, and the arrows without the numbers of their barriers."""
    text = registry.read(program.kernel_source)
    edges = ((edge.source, edge.target, edge.by.partition("[")[0]) for edge in CLAIMS.edges_of(text))
    return program.role, program.arches, switches_of(text), *edges


@functools.cache
def cases(arch: str) -> dict[str, Case]:
    """A request that launches the first key of each kind, by key."""
    registry = load_registry(EXPORT)
    kinds = {
        diagram_kind(registry, program): key
        for key in reversed(registry.kernels)
        if arch in (program := registry.program(key)).arches and program.barriers
    }
    found = find_cases(registry, tuple(kinds.values()), arch)
    return {key: in_turns(registry, key, case) for key, case in found.items()}


def in_turns(registry: Registry, key: str, case: Case) -> Case:
    """A request for so few SMs that warpgroups which take turns have several tiles each."""
    program = registry.program(key)
    if not re.search(r"kTileGroups = 1;", registry.read(program.kernel_source)):
        return case
    model = registry.model
    for tokens, tile in itertools.product((case.tokens, 512, 1024), family_of(case.arch).tiles(model)):
        few = dataclasses.replace(case, tokens=tokens, sm_count=6, tile=tile)
        with contextlib.suppress(PlanError):
            if few.plan(model).launches[-1].key == key:
                return few
    return case


KEYS = [(arch, key) for arch in ARCHES for key in cases(arch)]


@pytest.mark.parametrize(("arch", "key"), KEYS)
def test_edges_of_a_diagram_are_what_warps_do(arch: str, key: str) -> None:
    registry = load_registry(EXPORT)
    program = registry.program(key)
    case = cases(arch)[key]
    assert differences(program, registry.read(program.kernel_source), watched(registry, case)) == []

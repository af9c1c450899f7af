"""Which programs are mutated, and where in the source a mutant is.

Programs that come from one template hold the same sites again and again. A *site* is an operator's change at a chain
of source lines: the line that the instruction was inlined from, and the lines that call it. A few programs hold every
site of all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from cakegen.compile import CompileRequest, compile_ptx, request_for
from cakegen.emulator.launches.cases import Case, find_case
from cakegen.emulator.mutation.mutants import Mutant, mutants_of
from cakegen.errors import EmulationError, PlanError
from cakegen.plan import family_of
from cakegen.registry import Registry

# Line information changes no instruction, and says where each comes from.
_FLAGS = ("-lineinfo",)
# Of `templates/device/` (`generated/shared`): a function of such a header wraps one instruction.
_DEVICE_HEADER = "cake_device_"
# (operator, change, first part of the opcode, source lines from the innermost call out)
Site = tuple[str, str, str, tuple[str, ...]]


class Mutated:
    """A program whose mutants are run: its PTX, and the text that it came from.

    Parameters
    ----------
    name
        What it is called; the same name, the same program.
    symbol
        Its entry.
    """

    name: str
    ptx: str
    symbol: str

    @cached_property
    def mutants(self) -> tuple[Mutant, ...]:
        """Every mutant of it."""
        return mutants_of(self.ptx, self.symbol)

    def source_lines(self, mutant: Mutant) -> tuple[str, ...]:
        """The text of the source lines of a mutant, from the innermost inlined call out."""
        raise NotImplementedError

    def kernel_line(self, mutant: Mutant) -> str:
        """The innermost line outside of the device functions, which hold one instruction each."""
        raise NotImplementedError

    def site(self, mutant: Mutant) -> Site:
        """What makes a mutant the same in another program."""
        return mutant.operator, mutant.change, mutant.instruction.root, self.source_lines(mutant)


@dataclass(frozen=True)
class Target(Mutated):
    """A program of an export and a request that launches it: its key, its compilation, its PTX, the request.

    Parameters
    ----------
    many_tokens
        The request has more tokens than the one that would be chosen.
    """

    key: str
    request: CompileRequest
    ptx: str
    case: Case
    many_tokens: bool = False

    @property
    def name(self) -> str:  # type: ignore[override]
        """`KEY/SMS`, with the SM count that its request is planned for, or `KEY/SMS/TOKENS`; `target_of` reads it."""
        name = f"{self.key}/{self.case.sm_count}"
        return f"{name}/{self.case.tokens}" if self.many_tokens else name

    @property
    def symbol(self) -> str:  # type: ignore[override]
        """Its entry."""
        return self.request.kernel_symbol

    @cached_property
    def _sources(self) -> dict[str, list[str]]:
        return {name: text.splitlines() for name, text in self.request.headers}

    def source_lines(self, mutant: Mutant) -> tuple[str, ...]:
        """As `Mutated` has it, of headers alone: a program's own text is one call, and says nothing of a site."""
        return tuple(line for _, line in self._placed_lines(mutant))

    def kernel_line(self, mutant: Mutant) -> str:
        """As `Mutated` has it."""
        lines = list(self._placed_lines(mutant))
        outside = (line for file, line in lines if not file.startswith(_DEVICE_HEADER))
        return next(outside, lines[0][1] if lines else mutant.instruction.text)

    def _placed_lines(self, mutant: Mutant) -> Iterator[tuple[str, str]]:
        for file, line in mutant.instruction.place.source:
            if file in self._sources:
                yield file, self._sources[file][line - 1].strip()


def target_of(registry: Registry, name: str, arch: str) -> Target:
    """A key's program, compiled to PTX.

    Parameters
    ----------
    name
        `KEY`, or `KEY/SMS`: with the request that launches it on a device of so many SMs; `KEY/SMS/TOKENS`: with so
        many tokens.

    Raises
    ------
    EmulationError
        No request that was tried launches it there.
    """
    key, sm_count, tokens = (*name.split("/"), "", "")[:3]
    case = _with_padding(registry, find_case(registry, key, arch), key)
    if sm_count:
        case = dataclasses.replace(case, sm_count=int(sm_count), tokens=int(tokens or case.tokens))
        # where another tile is the cheaper one there, the key's own is taken all the same
        tiles = (case.tile, *family_of(arch).tiles(registry.model))
        cases = [dataclasses.replace(case, tile=tile) for tile in tiles]
        case = next((each for each in cases if _launches(registry, each, key)), case)
        if not _launches(registry, case, key):
            raise EmulationError(f"{key}: {case} does not launch it; leave out what is behind the slash")
    request = request_for(registry, key, arch, _FLAGS)
    return Target(key, request, compile_ptx(request), case, bool(tokens))


def _with_padding(registry: Registry, case: Case, key: str) -> Case:
    """The same with a few tokens fewer, where that launches the same program: its tile then has rows of padding."""
    for tokens in (case.tokens - 3, case.tokens - 1):
        fewer = dataclasses.replace(case, tokens=tokens)
        if tokens > 0 and _launches(registry, fewer, key):
            return fewer
    return case


def _launches(registry: Registry, case: Case, key: str) -> bool:
    try:
        return any(launch.key == key for launch in case.plan(registry.model).launches)
    except PlanError:
        return False


def all_targets(registry: Registry, arch: str) -> Iterator[Target]:
    """The programs of an architecture, each once: several keys may share one.

    Twice where two SM counts reach it, the most and the fewest: with few SMs a CTA works on many tiles, with many the
    tiles are cut.

    Raises
    ------
    EmulationError
        The export does not serve the architecture.
    """
    seen: set[str] = set()
    spec = registry.model.target(arch)
    if spec is None:
        served = ", ".join(target.arch for target in registry.model.targets)
        raise EmulationError(f"{registry.export} is not exported for {arch!r}; it is for {served}")
    for key, name in registry.kernels.items():
        if arch not in registry.program(key).arches or name in seen:
            continue
        seen.add(name)
        target = target_of(registry, key, arch)
        yield target
        for sm_count in sorted(spec.sm_counts):
            case = dataclasses.replace(target.case, sm_count=sm_count)
            if sm_count < target.case.sm_count and _launches(registry, case, key):
                yield dataclasses.replace(target, case=case)
                break

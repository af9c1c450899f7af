"""What the programs of two trees compile to, side by side. Imports compile, errors and this package.

Needs NVRTC and no toolkit: a cubin's own sections hold all of it. An instruction takes 16 bytes on every architecture
that cakegen writes for, and a function ends with repeated padding, which is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cakegen.compile import CompiledProgram, CompileRequest, Outcome, compile_many, load_nvrtc
from cakegen.compile.cubin import CubinReader
from cakegen.errors import CompileError
from cakegen.review.compare import ADDED, REMOVED, ExportReview, KeyReview
from cakegen.review.trees import Tree

INSTRUCTION_BYTES = 16


@dataclass(frozen=True)
class Cost:
    """What one compiled program takes.

    Parameters
    ----------
    registers
        Of a thread.
    spill_bytes
        Register spills, stores and loads.
    smem_bytes
        Static and dynamic shared memory of a CTA.
    instructions
        Machine instructions of all functions, without the padding at a function's end.
    code_bytes
        Size of the machine code, padding included.
    code
        The machine code itself.
    """

    registers: int
    spill_bytes: int
    smem_bytes: int
    instructions: int
    code_bytes: int
    code: bytes


@dataclass(frozen=True)
class CostChange:
    """One program for one target, before and after; None on a side that has no such program.

    Parameters
    ----------
    keys
        The logical keys that share it.
    failure
        Why a side could not be compiled; empty where all could.
    """

    keys: tuple[str, ...]
    arch: str
    before: Cost | None
    after: Cost | None
    failure: str = ""

    @property
    def same_code(self) -> bool:
        """Whether both sides compile to the same machine code, byte by byte."""
        return self.before is not None and self.after is not None and self.before.code == self.after.code


@dataclass(frozen=True)
class _Pair:
    keys: list[str]
    before: CompileRequest | None
    after: CompileRequest | None
    smem_bytes: tuple[int, int]


def measure_costs(
    review: ExportReview,
    old: Tree | None,
    new: Tree | None,
    workers: int | None = None,
    on_done: Callable[[str], None] | None = None,
) -> list[CostChange]:
    """Compile every program that a change touches, as it was and as it is, through the compile cache.

    Parameters
    ----------
    workers
        Threads; by default one for each processor that this process may use.
    on_done
        Called with a program's name after each compilation.

    Raises
    ------
    CompileError
        There is no compiler; what it refuses is told by the entry.
    """
    load_nvrtc()
    pairs = _pairs(review, old, new)
    requests = _requests(pairs)
    notify = (lambda request, _: on_done(request.name)) if on_done is not None else None
    outcomes = dict(zip(requests, compile_many(requests, workers, notify), strict=True))
    return [_change(pair, outcomes) for pair in pairs]


def count_compilations(review: ExportReview, old: Tree | None, new: Tree | None) -> int:
    """How many programs `measure_costs` compiles."""
    return len(_requests(_pairs(review, old, new)))


def _requests(pairs: Sequence[_Pair]) -> list[CompileRequest]:
    return list(dict.fromkeys(r for pair in pairs for r in (pair.before, pair.after) if r is not None))


def _pairs(review: ExportReview, old: Tree | None, new: Tree | None) -> list[_Pair]:
    """The compilations behind the keys that differ, each once; what is equal on both sides is not compiled."""
    found: dict[tuple[CompileRequest | None, CompileRequest | None], _Pair] = {}
    for entry in review.keys:
        if not entry.parts and entry.status not in (ADDED, REMOVED):
            continue
        for arch in _arches(entry, old):
            before_key = entry.key if entry.status != ADDED else entry.replaces
            before = _request(old, before_key, arch) if before_key is not None else None
            after = _request(new, entry.key, arch) if entry.status != REMOVED else None
            smem = (_smem(old, before_key) if before else 0, _smem(new, entry.key) if after else 0)
            if before != after or smem[0] != smem[1]:
                found.setdefault((before, after), _Pair([], before, after, smem)).keys.append(entry.key)
    return list(found.values())


def _arches(entry: KeyReview, old: Tree | None) -> Sequence[str]:
    """Targets of either side, sorted."""
    before = entry.replaces or entry.key
    earlier = old.record(before).get("arches", ()) if old is not None and before in old.kernels else ()
    return sorted({*entry.arches, *(str(arch) for arch in earlier)})


def _request(tree: Tree | None, key: str, arch: str) -> CompileRequest | None:
    """As `request_for` makes it of a registry; None where the tree's program is not written for the target."""
    assert tree is not None, "a side that holds the key"
    record = tree.record(key)
    if arch not in record.get("arches", ()):
        return None
    name = tree.kernels[key]
    return CompileRequest(
        name=name,
        arch=arch,
        source=tree.source(key, "kernel"),
        headers=tuple((header, tree.texts.get(header, "")) for header in record["headers"]),
        flags=tuple(record["flags"]),
        constants=tuple(sorted(tree.specializations.get(key, {}).items())),
        kernel_symbol=f"kernel_{name}",
    )


def _smem(tree: Tree | None, key: str | None) -> int:
    assert tree is not None
    assert key is not None
    return int(tree.record(key)["launch"]["dynamic_smem_bytes"])


def _change(pair: _Pair, outcomes: Mapping[CompileRequest, Outcome]) -> CostChange:
    failures, costs = [], []
    for side, request, smem in zip(("before", "after"), (pair.before, pair.after), pair.smem_bytes, strict=True):
        outcome = outcomes[request] if request is not None else None
        if isinstance(outcome, CompileError):
            failures.append(f"{side}: {outcome}")
        costs.append(cost_of(outcome, smem) if isinstance(outcome, CompiledProgram) else None)
    arch = next(request.arch for request in (pair.after, pair.before) if request is not None)
    return CostChange(tuple(pair.keys), arch, costs[0], costs[1], "\n".join(failures))


def cost_of(program: CompiledProgram, dynamic_smem_bytes: int) -> Cost:
    """What a compiled program takes, with the dynamic shared memory of its launch."""
    code = CubinReader(program.cubin, f"{program.name} for {program.arch}").functions_code
    return Cost(
        registers=program.report.registers,
        spill_bytes=program.report.spill_bytes,
        smem_bytes=program.report.static_smem_bytes + dynamic_smem_bytes,
        instructions=sum(_count_instructions(body) for body in code),
        code_bytes=sum(len(body) for body in code),
        code=b"".join(code),
    )


def _count_instructions(code: bytes) -> int:
    """Instructions of one function; the last one, as often as it is repeated, is padding."""
    words = [code[at : at + INSTRUCTION_BYTES] for at in range(0, len(code), INSTRUCTION_BYTES)]
    while len(words) > 1 and words[-1] == words[-2]:
        words.pop()
    return len(words)

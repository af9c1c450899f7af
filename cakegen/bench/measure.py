"""Measures rows: operands, check, capture, timing, record. Imports runtime, torch and this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from cakegen.bench.arms import Arm, WrongResult, build_ours, capture_checked
from cakegen.bench.libraries import Library
from cakegen.bench.operands import Case, TailWeights, Weights, make_operands
from cakegen.bench.pointwise import Pointwise, make_pointwise
from cakegen.bench.products import CUBLAS, Cublas
from cakegen.bench.records import (
    FLOOR,
    GEMM,
    OURS,
    OURS_AGAIN,
    OURS_PACKED,
    RIVAL_PREFIX,
    TIMED,
    UNSERVED,
    WRONG,
    RowRecord,
    fastest_rival,
    row_record,
)
from cakegen.bench.rivals import RIVALS, Builder, gemm_limit, tolerances_of
from cakegen.bench.rows import DECODE_TOKENS, LONG_TOKENS, Row, grouped_rows, work_of
from cakegen.bench.stats import Summary
from cakegen.bench.stream_probe import StreamProbe
from cakegen.bench.timing import Call, Clock, copies_for, time_alternating, time_rotating
from cakegen.errors import BenchError, CakeError
from cakegen.runtime import LatentMoe

REPEATS = 41
REPEATS_LONG = 11


@dataclass(frozen=True)
class Settings:
    """What a run measures beside its rows.

    Parameters
    ----------
    repeats
        Timed calls of an arm; None: 41, and 11 from T = 4096 on.
    rivals, rotation
        Whether stock chains run, and whether copies of the weights are rotated over.
    compile_rivals
        Whether stock chains try torch.compile.
    libraries
        Kernel libraries, by name, whose GEMMs take cuBLAS's place in the stock chains, where they run.
    search
        Whether libraries may search for their fastest configuration of each shape; it takes minutes.
    seed
        Of all random operands.
    backend
        Backend of our arm; `reference` rehearses a run without a GPU.
    """

    repeats: int | None = None
    rivals: bool = True
    rotation: bool = True
    compile_rivals: bool = True
    libraries: tuple[str, ...] = ()
    search: bool = False
    seed: int = 0
    backend: str = "auto"

    def rounds(self, tokens: int) -> int:
        """Timed calls of an arm in a row of so many tokens."""
        if self.repeats is not None:
            return self.repeats
        return REPEATS_LONG if tokens >= LONG_TOKENS else REPEATS


@dataclass(eq=False)
class Bench:
    """Everything a measurement needs; the clock's stream must be current (`CudaClock.active`).

    Parameters
    ----------
    probe
        The stream probe, or None where it can't run.
    notes
        Why something does not run here, by name; goes into every row.
    libraries
        Kernel libraries that run here.
    """

    moe: LatentMoe
    device: torch.device
    clock: Clock
    probe: StreamProbe | None
    settings: Settings = field(default_factory=Settings)
    notes: dict[str, str] = field(default_factory=dict)
    libraries: tuple[Library, ...] = ()


def measure_rows(bench: Bench, rows: Sequence[Row]) -> Iterator[RowRecord]:
    """Measure rows, group by group; each record is yielded when it is complete.

    Raises
    ------
    CakeError
        The device is lost, or TP does not divide the model. A row that can't be served, or is wrong, is a record.
    """
    for group in grouped_rows(rows):
        operands = make_operands(bench.moe.model.dims, group[0], bench.device, bench.settings.seed)
        copies: list[Weights] = [operands.case.weights]
        packed = operands.case.weights.packed()
        pointwise = pointwise_to_try(bench, operands.case.weights)
        for row in group:
            yield RowMeasurement(bench, operands.case_of(row), pointwise, copies, packed).measure()
        del operands, copies, packed
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def pointwise_to_try(bench: Bench, weights: Weights) -> list[Pointwise]:
    """Elementwise kernels of stock chains over some weights: compiled ones first, eager ones where those fail."""
    columns = weights.columns if isinstance(weights, TailWeights) else slice(None)
    hows = (True, False) if bench.settings.compile_rivals else (False,)
    return [make_pointwise(bench.moe.model.dims, columns, compiled=compiled) for compiled in hows]


class RowMeasurement:
    """One row on its way: arms that ran, those that did not, and the record.

    Parameters
    ----------
    pointwise
        Elementwise kernels to try for the rivals, the best first.
    copies
        Copies of the weights that rows of the group share; grown here as needed, the first is the case's own.
    packed
        The weights packed.
    """

    def __init__(
        self, bench: Bench, case: Case, pointwise: Sequence[Pointwise], copies: list[Weights], packed: Weights
    ) -> None:
        self._bench = bench
        self._case = case
        self._pointwise = pointwise
        self._copies = copies
        self._packed = packed
        self._unavailable = dict(bench.notes)
        self._builders: dict[str, Callable[[Case], Arm]] = {}

    def measure(self) -> RowRecord:
        """Check, time and summarise."""
        bench, case = self._bench, self._case
        rounds = bench.settings.rounds(case.row.tokens)
        calls: dict[str, Call] = {}
        status, problem, keys = self._add_ours(calls)
        if bench.settings.rivals:
            self._add_rivals(calls)
        self._add_limits(calls)
        arms = time_alternating(calls, bench.clock, rounds)
        return row_record(
            case.row,
            work_of(case.dims, case.row),
            arms,
            keys=keys,
            rotations=self._rotate(arms, rounds) if bench.settings.rotation else {},
            status=status,
            problem=problem,
            unavailable=self._unavailable,
        )

    def _add_ours(self, calls: dict[str, Call]) -> tuple[str, str | None, tuple[str, ...]]:
        """Our arm, twice for the noise; or the status and reason why it is not timed."""
        bench, case = self._bench, self._case

        def build(chosen: Case) -> Arm:
            return build_ours(bench.moe, chosen, bench.settings.backend)

        try:
            arm = build(case)
        except CakeError as error:
            return UNSERVED, str(error), ()
        try:
            calls[OURS] = capture_checked(arm, case, bench.clock, case.dims.tolerances)
        except WrongResult as error:
            return WRONG, str(error), arm.keys
        calls[OURS_AGAIN] = bench.clock.capture(arm.call)
        self._builders[OURS] = build
        try:
            calls[OURS_PACKED] = capture_checked(build(case.on(self._packed)), case, bench.clock, case.dims.tolerances)
        except CakeError as error:
            self._unavailable[OURS_PACKED] = str(error)
        return TIMED, None, arm.keys

    def _add_rivals(self, calls: dict[str, Call]) -> None:
        chains = RIVALS[self._case.row.stage]
        # what runs with cuBLAS's products is what the libraries' chains get
        works: Pointwise = self._pointwise[0]
        for name in chains:
            for pointwise in self._pointwise:
                if self._try_rival(calls, name, pointwise, CUBLAS):
                    works = pointwise
                    break
        for library in self._bench.libraries:
            for name in library.chains[self._case.row.stage]:
                self._try_rival(calls, name, works, library)

    def _try_rival(self, calls: dict[str, Call], name: str, pointwise: Pointwise, products: Cublas) -> bool:
        """Whether a chain runs here and is right; a stock chain may fail with any exception."""
        case, clock = self._case, self._bench.clock
        label = chain_label(name, pointwise, products)
        build = partial(build_rival, RIVALS[case.row.stage][name], pointwise, products)
        try:
            calls[label] = capture_checked(build(case), case, clock, tolerances_of(case.dims, name))
        except Exception as error:
            # raises if the device is lost, which is no chain's private trouble
            clock.settle()
            self._unavailable[label] = f"{type(error).__name__}: {str(error)[:300]}"
            return False
        self._builders[label] = build
        return True

    def _add_limits(self, calls: dict[str, Call]) -> None:
        bench, case = self._bench, self._case
        streamed = case.weights.streamed()
        arms: dict[str, Arm] = {}
        if bench.probe is not None:
            arms[FLOOR] = bench.probe.floor(streamed[0])
        if case.row.tokens > DECODE_TOKENS:
            arms[GEMM] = gemm_limit(case)
        elif bench.probe is not None:
            arms |= bench.probe.arms(streamed)
        calls |= {name: bench.clock.capture(arm.call) for name, arm in arms.items()}

    def _rotate(self, arms: Mapping[str, Summary], rounds: int) -> dict[str, Summary]:
        """Ours and the fastest rival over copies of the weights; nothing where those would be too many."""
        bench, case = self._bench, self._case
        weight_bytes = work_of(case.dims, case.row).weight_bytes
        wanted = copies_for(weight_bytes, bench.clock.l2_bytes)
        if not wanted:
            return {}
        while len(self._copies) < wanted:
            self._copies.append(case.weights.copy(case.dims))
        names = [name for name in (OURS, fastest_rival(arms)) if name in self._builders]
        rotations = {}
        for name in names:
            # an arm owns its buffers: it must live as long as its graph
            built = [self._builders[name](case.on(weights)) for weights in self._copies]
            captured = [bench.clock.capture(arm.call) for arm in built]
            rotations[name] = time_rotating(captured, bench.clock, rounds)
        return rotations


def build_rival(build: Builder, pointwise: Pointwise, products: Cublas, case: Case) -> Arm:
    """A stock chain for a case, with its other arguments in front."""
    return build(case, pointwise, products)


def chain_label(name: str, pointwise: Pointwise, products: Cublas) -> str:
    """A chain's arm: its name, then the library if it is not cuBLAS, then `eager` if nothing is compiled."""
    words = [name]
    if products is not CUBLAS:
        words.append(products.name)
    if pointwise.how != "compiled":
        words.append(pointwise.how)
    return RIVAL_PREFIX + " ".join(words)


def warm_up(bench: Bench, rows: Sequence[Row]) -> None:
    """Compile and load the programs of all rows side by side; what can't be served is left to its row."""
    for stage, tp in dict.fromkeys((row.stage, row.tp) for row in rows):
        tokens = [row.tokens for row in rows if (row.stage, row.tp) == (stage, tp)]
        served = [count for count in tokens if bench.moe.program_available(bench.device, stage, tp, count)]
        if served:
            bench.moe.warm_up(bench.device, tp, tokens=served, stages=(stage,))


def check_flush(bench: Bench, rounds: int = REPEATS) -> dict[str, object]:
    """Show what the flush does to a timing: the stream of the front's weights after each kind, and rotating.

    The clean flush is right where it agrees with rotation, in which nothing is flushed at all; a flush that writes
    leaves dirty lines, and the timed call pays for their write-back.

    Raises
    ------
    BenchError
        There is no stream probe.
    """
    if bench.probe is None:
        raise BenchError(f"the flush is checked with the stream probe: {bench.notes.get('stream', 'not available')}")
    row = Row("front", 1, 1)
    case = make_operands(bench.moe.model.dims, row, bench.device, bench.settings.seed).case
    copies: list[Weights] = [case.weights]
    weight_bytes = work_of(case.dims, row).weight_bytes
    while len(copies) < copies_for(weight_bytes, bench.clock.l2_bytes):
        copies.append(case.weights.copy(case.dims))
    calls = []
    for weights in copies:
        arms = bench.probe.arms(weights.streamed())
        calls.append({name: bench.clock.capture(arm.call) for name, arm in arms.items()})
    clean = time_alternating(calls[0], bench.clock, rounds)
    name = min(clean, key=lambda arm: clean[arm].median_us)
    dirty = time_alternating({name: calls[0][name]}, bench.clock, rounds, before=bench.clock.flush_dirty)
    rotation = time_rotating([call[name] for call in calls], bench.clock, rounds)
    return {
        "probe": name,
        "weight_bytes": weight_bytes,
        "clean_us": clean[name].median_us,
        "dirty_us": dirty[name].median_us,
        "rotation_us": rotation.median_us,
    }

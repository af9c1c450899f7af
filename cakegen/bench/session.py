"""One run of `cakegen bench` on a device: everything in order, each result on disk before the next is measured.

Imports runtime, torch and this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from cakegen.bench.cuda_clock import FLUSH_L2_MULTIPLE, CudaClock
from cakegen.bench.host_cost import measure_host
from cakegen.bench.layer_chain import measure_chains
from cakegen.bench.measure import REPEATS, REPEATS_LONG, Bench, Settings, check_flush, measure_rows, warm_up
from cakegen.bench.provenance import read_clocks, read_provenance
from cakegen.bench.records import ResultFile, RowRecord
from cakegen.bench.rehearsal import open_libraries
from cakegen.bench.rows import LONG_TOKENS, STAGES, Row
from cakegen.bench.stream_probe import StreamProbe
from cakegen.bench.table import render_line, render_others
from cakegen.errors import CakeError
from cakegen.registry import Registry
from cakegen.runtime import LatentMoe

RESULTS_FILE = "results.jsonl"
PROTOCOL = (
    "Microseconds between two events around the launch of a CUDA graph of one call, the launch included (floor_us: the "
    "same for a kernel that reads nothing). Cold, clean L2: before every timed call a buffer of "
    f"{FLUSH_L2_MULTIPLE} times the L2 is read. Arms alternate in one process, their order shifting each round; "
    f"medians of {REPEATS} calls ({REPEATS_LONG} from T = {LONG_TOKENS} on) unless repeats says otherwise; spread = "
    "(p90 - p10) / median; noise: the same arm twice. Every arm's captured graph was replayed over poisoned outputs "
    "and compared with fp64 before it was timed. rotation_us: no flush, copies of the weights beyond twice the L2 in "
    "turn. limit: the fastest stream probe over the row's weights up to the decode limit, above it cuBLAS on the "
    "row's joined shape."
)


@dataclass(frozen=True)
class Run:
    """What one run measures.

    Parameters
    ----------
    rows
        Rows, in the order to measure.
    chains, host
        Whether the layer chain and the host's costs are measured too.
    """

    rows: tuple[Row, ...]
    settings: Settings = field(default_factory=Settings)
    chains: bool = True
    host: bool = True


def run_bench(registry: Registry, run: Run, folder: Path, say: Callable[[str], None]) -> Path:
    """Measure on torch's current device and write `results.jsonl` into a folder.

    Parameters
    ----------
    say
        Gets a line of progress for each result.

    Returns
    -------
    Path
        The file; complete but for its last line where a later measurement failed.

    Raises
    ------
    CakeError
        There is no supported device, or the file exists. What can't be served, or is wrong, is a result.
    """
    device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    clock = CudaClock(device)
    with clock.active():
        bench = Bench(LatentMoe(registry), device, clock, None, run.settings)
        _open_probe(bench)
        header = {
            **read_provenance(device),
            "libraries": _open_libraries(bench, say),
            "export": registry.export,
            "protocol": PROTOCOL,
            "settings": asdict(run.settings),
        }
        path = folder / RESULTS_FILE
        results = ResultFile(path, header)
        try:
            _measure_into(results, bench, run, say)
            results.write("end", {"clocks": read_clocks(device)})
        except Exception as error:
            # a trapped program destroys the context; what it waited for is in host memory
            reason = f"{type(error).__name__}: {error}"
            results.write("end", {"problem": reason, "wait": bench.moe.wait_report(device)})
            raise
        finally:
            results.close()
    return path


def _measure_into(results: ResultFile, bench: Bench, run: Run, say: Callable[[str], None]) -> None:
    done = 0
    for kind, record in measure_all(bench, run, say):
        results.write(kind, record)
        if isinstance(record, RowRecord):
            done += 1
            say(f"[{done:{len(str(len(run.rows)))}}/{len(run.rows)}] {render_line(record)}")
        else:
            say(render_others({kind: [record]}))


def _open_probe(bench: Bench) -> None:
    assert bench.device.index is not None
    try:
        bench.probe = StreamProbe(bench.device.index)
    except (CakeError, ImportError) as error:
        bench.notes["stream"] = str(error)


def _open_libraries(bench: Bench, say: Callable[[str], None]) -> dict[str, str]:
    """Give the bench the kernel libraries that run here; the version of each, or why it does not run."""
    settings = bench.settings
    if not settings.rivals or not settings.libraries:
        return {}
    say(f"opening {', '.join(settings.libraries)} …")
    opened = open_libraries(settings.libraries, bench.device, search=settings.search)
    bench.libraries = opened.libraries
    for name, found in opened.found.items():
        say(f"{name}: {found}")
    return opened.found


def measure_all(bench: Bench, run: Run, say: Callable[[str], None]) -> Iterator[tuple[str, RowRecord | dict[str, Any]]]:
    """Every result of a run with its kind, as it is measured."""
    say(f"compiling what {len(run.rows)} rows need …")
    warm_up(bench, run.rows)
    if bench.probe is not None:
        yield "protocol", check_flush(bench)
    for record in measure_rows(bench, run.rows):
        yield "row", record
    if run.chains and {row.stage for row in run.rows} == set(STAGES):
        for chain in measure_chains(bench, *_chain_axes(run.rows)):
            yield "chain", chain
    if run.host:
        for cost in measure_host(bench):
            yield "host", cost


def _chain_axes(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    return sorted({row.tp for row in rows}), sorted({row.tokens for row in rows})

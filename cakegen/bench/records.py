"""Leaf module: results as JSON lines. Imports errors, rows and stats; no torch.

The first line of a file is its provenance (`kind` `header`); then one object a line: `row` (see `RowRecord`),
`protocol`, `chain`, `host`; the last is `end`, with the clocks and the power behind the run. A run that was killed
lacks its end, and everything before holds.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cakegen.bench.rows import Row, Work
from cakegen.bench.stats import Summary
from cakegen.errors import BenchError

SCHEMA = 1
TIMED = "timed"
UNSERVED = "unserved"
WRONG = "wrong"
OURS, OURS_AGAIN, OURS_PACKED = "ours", "ours again", "ours packed"
FLOOR, GEMM = "floor", "gemm"
"""Names of arms that are not rivals; a stream probe's begins with `stream `, a rival's is prefixed with `rival `."""
RIVAL_PREFIX = "rival "


@dataclass(frozen=True)
class RowRecord:
    """One measured row. Times are microseconds from a clean, cold L2, medians unless the name says otherwise.

    Parameters
    ----------
    stage, tp, tokens
        The row.
    status
        `timed`; `unserved` (no generated program; `problem` says why) or `wrong` (its result is): then not timed.
    keys
        Logical keys of our launches.
    ours_us, ours_min_us, spread
        Our median and minimum, and (90th - 10th percentile) / median.
    packed_us
        Ours on packed weights; None where they can't serve.
    noise
        How far the same arm's second median lies from the first, as a part of it.
    rival, rival_us, ratio
        The fastest stock chain (a kernel library's name behind it, where its GEMMs are not cuBLAS's), its median, and
        rival / ours: above 1 we are faster.
    limit, limit_us, limit_ratio
        What sets the row's limit (a stream probe, or `gemm`), its median, and ours / limit.
    floor_us
        A launch that reads nothing, in the same graph form; it is part of every time here.
    rotation_us, rival_rotation_us
        Without a flush, rotating over copies of the weights.
    tb_per_s, tflop_per_s
        All bytes and all products of the row over our median.
    arms
        Every arm's `median_us`, `min_us`, `spread`, `count`.
    unavailable
        Arms that did not run here, and why.
    """

    stage: str
    tp: int
    tokens: int
    status: str
    problem: str | None = None
    keys: tuple[str, ...] = ()
    ours_us: float | None = None
    ours_min_us: float | None = None
    spread: float | None = None
    packed_us: float | None = None
    noise: float | None = None
    rival: str | None = None
    rival_us: float | None = None
    ratio: float | None = None
    limit: str | None = None
    limit_us: float | None = None
    limit_ratio: float | None = None
    floor_us: float | None = None
    rotation_us: float | None = None
    rival_rotation_us: float | None = None
    tb_per_s: float | None = None
    tflop_per_s: float | None = None
    weight_bytes: int = 0
    bytes: int = 0
    flops: int = 0
    arms: dict[str, dict[str, float]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)

    @property
    def row(self) -> Row:
        """What was measured."""
        return Row(self.stage, self.tp, self.tokens)

    @property
    def loses(self) -> bool:
        """Whether a stock chain is faster."""
        return self.ratio is not None and self.ratio < 1


def row_record(
    row: Row,
    work: Work,
    arms: Mapping[str, Summary],
    *,
    keys: tuple[str, ...] = (),
    rotations: Mapping[str, Summary] | None = None,
    status: str = TIMED,
    problem: str | None = None,
    unavailable: Mapping[str, str] | None = None,
) -> RowRecord:
    """A record from the summaries of a row's arms; whatever was not timed stays None."""
    rotations = rotations or {}
    ours, again, rival, limit = arms.get(OURS), arms.get(OURS_AGAIN), fastest_rival(arms), fastest_limit(arms)
    ours_us = ours.median_us if ours else None
    rival_us = arms[rival].median_us if rival else None
    limit_us = arms[limit].median_us if limit else None
    return RowRecord(
        stage=row.stage,
        tp=row.tp,
        tokens=row.tokens,
        status=status,
        problem=problem,
        keys=keys,
        ours_us=ours_us,
        ours_min_us=ours.min_us if ours else None,
        spread=ours.spread if ours else None,
        packed_us=_median(arms.get(OURS_PACKED)),
        noise=abs(again.median_us / ours.median_us - 1) if ours and again else None,
        rival=rival.removeprefix(RIVAL_PREFIX) if rival else None,
        rival_us=rival_us,
        ratio=_ratio(rival_us, ours_us),
        limit=limit,
        limit_us=limit_us,
        limit_ratio=_ratio(ours_us, limit_us),
        floor_us=_median(arms.get(FLOOR)),
        rotation_us=_median(rotations.get(OURS)),
        rival_rotation_us=_median(rotations.get(rival)) if rival else None,
        tb_per_s=work.bytes / ours_us / 1e6 if ours_us else None,
        tflop_per_s=work.flops / ours_us / 1e6 if ours_us else None,
        weight_bytes=work.weight_bytes,
        bytes=work.bytes,
        flops=work.flops,
        arms={name: dataclasses.asdict(summary) for name, summary in arms.items()},
        unavailable=dict(unavailable or {}),
    )


def fastest_rival(arms: Mapping[str, Summary]) -> str | None:
    """Name of the stock chain with the least median."""
    return _fastest(arms, (name for name in arms if name.startswith(RIVAL_PREFIX)))


def fastest_limit(arms: Mapping[str, Summary]) -> str | None:
    """Name of the arm that sets the limit: the fastest probe, or the GEMM."""
    return _fastest(arms, (name for name in arms if name == GEMM or name.startswith("stream ")))


def _fastest(arms: Mapping[str, Summary], names: Iterable[str]) -> str | None:
    return min(names, key=lambda name: arms[name].median_us, default=None)


def _median(summary: Summary | None) -> float | None:
    return summary.median_us if summary else None


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


class ResultFile:
    """Writes results line by line, each on disk before the next is measured.

    Raises
    ------
    BenchError
        The file exists: results are not overwritten.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = path.open("x", encoding="utf-8")
        except FileExistsError:
            raise BenchError(f"{path}: holds results already; choose another folder with --out") from None
        self.write("header", {"schema": SCHEMA, **header})

    def write(self, kind: str, record: Mapping[str, Any] | RowRecord) -> None:
        """Append one object; floats are cut to six significant digits."""
        fields = dataclasses.asdict(record) if isinstance(record, RowRecord) else dict(record)
        self._file.write(json.dumps({"kind": kind, **_rounded(fields)}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value


@dataclass(frozen=True)
class Results:
    """A file of results: its header, its rows, and every other object by kind."""

    header: dict[str, Any]
    rows: tuple[RowRecord, ...]
    others: dict[str, list[dict[str, Any]]]


def read_results(path: Path) -> Results:
    """Read a file of results, complete or cut off.

    Raises
    ------
    BenchError
        It can't be read, begins with no header, or is of another schema.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BenchError(f"{path}: {reason}; `cakegen bench` writes results.jsonl files") from None
    objects = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not objects or objects[0].get("kind") != "header" or objects[0].get("schema") != SCHEMA:
        raise BenchError(f"{path}: must begin with a header of schema {SCHEMA}; `cakegen bench` writes such files")
    others: dict[str, list[dict[str, Any]]] = {}
    rows = []
    for number, record in enumerate(objects[1:], 2):
        kind = record.pop("kind", "")
        if kind == "row":
            rows.append(_row(path, number, record))
        else:
            others.setdefault(kind, []).append(record)
    return Results(objects[0], tuple(rows), others)


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise BenchError(f"{path} line {number}: no JSON ({error})") from None
    if not isinstance(record, dict):
        raise BenchError(f"{path} line {number}: needs an object; got {type(record).__name__}")
    return record


def _row(path: Path, number: int, record: dict[str, Any]) -> RowRecord:
    record["keys"] = tuple(record.get("keys", ()))
    try:
        return RowRecord(**record)
    except TypeError as error:
        raise BenchError(f"{path} line {number}: not a row of schema {SCHEMA} ({error})") from None

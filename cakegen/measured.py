"""Leaf module: what rows took on a device, as files beside the export, and which way is faster. Imports errors, paths.

A table is one device's, by its name and SM count. `cakegen tune` writes it; `cakegen plan` names its entries.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cakegen import paths
from cakegen.errors import BenchError

SCHEMA = 1
FOLDER = "measured"
OURS = "ours"
MARGIN = 1.03
"""A stock chain counts as faster where ours takes at least so many times as long; less is not told apart from noise."""
Key = tuple[str, int, int]


@dataclass(frozen=True)
class MeasuredRow:
    """Medians of one row in microseconds, of a CUDA graph from a clean, cold L2.

    Parameters
    ----------
    keys
        Logical keys of our launches when it was measured.
    chains_us
        Stock chains by name, as `cakegen.bench.rivals` names them; at least one.
    """

    stage: str
    tp: int
    tokens: int
    keys: tuple[str, ...]
    ours_us: float
    chains_us: Mapping[str, float]

    @property
    def key(self) -> Key:
        """Stage, TP degree, tokens."""
        return self.stage, self.tp, self.tokens

    @property
    def fastest(self) -> str:
        """Name of the fastest stock chain."""
        return min(self.chains_us, key=lambda name: self.chains_us[name])

    def ratio(self, chain: str) -> float:
        """How many times as long as a chain ours takes; 0 where that chain was not measured."""
        chain_us = self.chains_us.get(chain)
        return self.ours_us / chain_us if chain_us else 0.0

    def faster(self) -> str:
        """The fastest chain where it is faster by the margin, else `ours`."""
        return self.fastest if self.ratio(self.fastest) >= MARGIN else OURS


@dataclass(frozen=True)
class MeasuredTable:
    """Rows of one device, by stage, TP degree and rising T.

    Parameters
    ----------
    device, sm_count
        As the driver names the device, and its streaming multiprocessors.
    provenance
        Driver, NVRTC, torch, date, commit and protocol of the run, in words.
    """

    device: str
    sm_count: int
    provenance: Mapping[str, str]
    rows: tuple[MeasuredRow, ...]

    @property
    def file_name(self) -> str:
        """`NVIDIA H200` with 132 SMs is `h200_132.json`."""
        words = re.sub(r"[^a-z0-9]+", "_", self.device.lower().removeprefix("nvidia ")).strip("_")
        return f"{words}_{self.sm_count}.json"

    @property
    def title(self) -> str:
        """The device, and the commit and day of the run."""
        of = self.provenance
        return f"{self.device}, {self.sm_count} SMs, commit {of['commit'][:12]}, {of['date'][:10]}"

    def covers(self, sm_count: int, key_suffix: str) -> bool:
        """Whether it is of a device with so many SMs, of the architecture whose keys end so."""
        return self.sm_count == sm_count and all(
            key.endswith(key_suffix) if key_suffix else "@" not in key for row in self.rows for key in row.keys
        )


@dataclass(frozen=True)
class Verdict:
    """Which way a table says is faster for a request, and the rows that say so.

    Parameters
    ----------
    faster
        `ours`, or a stock chain's name.
    rows
        The nearest rows of the same stage and TP degree at or below, and at or above T: one where T was measured
        itself or lies at an end of the table, none where the table has no such stage and degree.
    reason
        In words, with the numbers.
    """

    faster: str
    rows: tuple[MeasuredRow, ...]
    reason: str


def judge_request(table: MeasuredTable, *, stage: str, tp: int, tokens: int) -> Verdict:
    """Look a request up. A chain is faster only where one and the same chain is, on both sides of T."""
    rows = [row for row in table.rows if (row.stage, row.tp) == (stage, tp)]
    below = max((row for row in rows if row.tokens <= tokens), key=lambda row: row.tokens, default=None)
    above = min((row for row in rows if row.tokens >= tokens), key=lambda row: row.tokens, default=None)
    nearest = tuple(dict.fromkeys(row.key for row in (below, above) if row is not None))
    found = tuple(row for row in rows if row.key in nearest)
    if not rows:
        return Verdict(OURS, found, f"no row of {stage} TP {tp}")
    if below is None or above is None:
        return Verdict(OURS, found, f"no row of {stage} TP {tp} at or {'above' if below else 'below'} T {tokens}")
    chains = [name for name in below.chains_us if all(row.ratio(name) >= MARGIN for row in found)]
    chosen = max(chains, key=lambda name: min(row.ratio(name) for row in found), default=None)
    times = ", ".join(f"{row.ratio(chosen or row.fastest):.3f} at T {row.tokens}" for row in found)
    if chosen is None:
        return Verdict(OURS, found, f"no chain is {MARGIN - 1:.0%} faster in each; ours / the fastest is {times}")
    return Verdict(chosen, found, f"at least {MARGIN - 1:.0%} faster in each; ours / {chosen} is {times}")


def tables_of(export: str) -> tuple[MeasuredTable, ...]:
    """Every table that an export ships, by file name; none where it ships none.

    Raises
    ------
    BenchError
        One of them is damaged.
    """
    folder = measured_folder(export)
    return tuple(read_table(file) for file in sorted(folder.glob("*.json")))


def measured_folder(export: str) -> Path:
    """Where the tables of an export are."""
    return paths.exports_root() / export / FOLDER


def render_table(table: MeasuredTable) -> str:
    """The text of a table's file: JSON, a line a row."""
    head = {"schema": SCHEMA, "device": table.device, "sm_count": table.sm_count, "provenance": dict(table.provenance)}
    rows = ",\n".join(f"    {json.dumps(_row_literal(row))}" for row in table.rows)
    return f'{json.dumps(head, indent=2)[:-2]},\n  "rows": [\n{rows}\n  ]\n}}\n'


def _row_literal(row: MeasuredRow) -> dict[str, Any]:
    return {
        "stage": row.stage,
        "tp": row.tp,
        "tokens": row.tokens,
        "ours_us": row.ours_us,
        "chains_us": dict(row.chains_us),
        "keys": list(row.keys),
    }


def read_table(file: Path) -> MeasuredTable:
    """Read a table's file.

    Raises
    ------
    BenchError
        It can't be read, is of another schema, or a value is not what a table holds.
    """
    remedy = "write it again with `cakegen tune`"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise BenchError(f"{file}: no JSON ({error}); {remedy}") from None
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        raise BenchError(f"{file}: must be an object of schema {SCHEMA}; {remedy}")
    try:
        provenance = {name: _text(value) for name, value in values["provenance"].items()}
        _text(provenance["commit"]), _text(provenance["date"])
        rows = tuple(_row(record) for record in values["rows"])
        table = MeasuredTable(_text(values["device"]), _count(values["sm_count"]), provenance, rows)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BenchError(f"{file}: damaged ({type(error).__name__}: {error}); {remedy}") from None
    keys = [row.key for row in table.rows]
    if keys != sorted(set(keys)):
        raise BenchError(f"{file}: rows must rise by stage, TP and T, each once; {remedy}")
    return table


def _row(record: Any) -> MeasuredRow:
    chains = {_text(name): _time(value) for name, value in record["chains_us"].items()}
    if not chains:
        raise ValueError("a row without a stock chain")
    stage, keys = _text(record["stage"]), tuple(_text(key) for key in record["keys"])
    return MeasuredRow(stage, _count(record["tp"]), _count(record["tokens"]), keys, _time(record["ours_us"]), chains)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is no count")
    return value


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{value!r} is no time in microseconds")
    return float(value)

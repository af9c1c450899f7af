"""Leaf module: a measured table from recorded results, what it changes, and how a table is written. Imports errors,
measured and records.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cakegen.bench.records import RIVAL_PREFIX, TIMED, WRONG, Results, RowRecord
from cakegen.errors import BenchError
from cakegen.measured import MARGIN, OURS, MeasuredRow, MeasuredTable, render_table

_PROVENANCE = ("export", "driver", "nvrtc", "torch", "triton", "cakegen", "commit", "date", "protocol")


def table_of(results: Results, source: str) -> MeasuredTable:
    """The table of a whole run: every row that was timed, beside each stock chain that ran.

    Parameters
    ----------
    source
        Where the results come from, for an error.

    Raises
    ------
    BenchError
        The run was cut off or failed, a program's result was wrong, no row was timed beside a stock chain, or the
        device is not named.
    """
    remedy = "measure again: `cakegen tune`"
    endings = results.others.get("end", [])
    if not endings or "problem" in endings[-1]:
        why = endings[-1]["problem"] if endings else "it lacks its last line"
        raise BenchError(f"{source}: the run did not end well ({why}); a table is of a whole run, so {remedy}")
    wrong = [str(record.row) for record in results.rows if record.status == WRONG]
    if wrong:
        raise BenchError(f"{source}: wrong results in {', '.join(wrong)}; a wrong program's time says nothing")
    rows = [row for record in results.rows if (row := _row(record)) is not None]
    if not rows:
        raise BenchError(f"{source}: no row was timed beside a stock chain, so nothing can be compared; {remedy}")
    if len({row.key for row in rows}) < len(rows):
        raise BenchError(f"{source}: a row stands there twice; {remedy}")
    head = results.header
    device, sm_count = head.get("device"), head.get("sm_count")
    if not isinstance(device, str) or not isinstance(sm_count, int):
        raise BenchError(f"{source}: the header names no device with its SM count; got {device!r} and {sm_count!r}")
    provenance = {name: str(head.get(name, "unknown")) for name in _PROVENANCE}
    provenance["driver_version"] = str(head.get("clocks", {}).get("driver_version", "unknown"))
    return MeasuredTable(device, sm_count, provenance, tuple(sorted(rows, key=lambda row: row.key)))


def _row(record: RowRecord) -> MeasuredRow | None:
    chains = {
        name.removeprefix(RIVAL_PREFIX): arm["median_us"]
        for name, arm in record.arms.items()
        if name.startswith(RIVAL_PREFIX)
    }
    if record.status != TIMED or record.ours_us is None or not chains:
        return None
    return MeasuredRow(record.stage, record.tp, record.tokens, record.keys, record.ours_us, chains)


def write_table(table: MeasuredTable, file: Path) -> None:
    """Write a table as `write_whole` does.

    Raises
    ------
    BenchError
        The folder can't be written.
    """
    write_whole(render_table(table), file)


def write_whole(text: str, file: Path) -> None:
    """Write a text beside the old one, sync it, and let it take the old one's place; a kill leaves one of them whole.

    Raises
    ------
    BenchError
        The folder can't be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as beside:
                beside.write(text)
                beside.flush()
                os.fsync(beside.fileno())
            Path(name).chmod(0o644)
            os.replace(name, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise BenchError(f"{file}: can't be written ({error.strerror}); name another file with --out") from None


def describe_table(table: MeasuredTable) -> Iterator[str]:
    """How many rows each side wins, how many each chain does, and each row that a stock chain wins."""
    lost = [row for row in table.rows if row.faster() != OURS]
    yield (
        f"{len(table.rows)} rows: in {len(table.rows) - len(lost)} no stock chain is {MARGIN - 1:.0%} faster, "
        f"in {len(lost)} one is"
    )
    for name in dict.fromkeys(name for row in table.rows for name in row.chains_us):
        count = sum(row.ratio(name) >= MARGIN for row in table.rows)
        yield f"  {name}: {count} of {sum(name in row.chains_us for row in table.rows)}"
    for row in lost:
        yield (
            f"  {_name(row)}: ours {row.ours_us:.4g} us, {row.fastest} {row.chains_us[row.fastest]:.4g} us: "
            f"ours takes {row.ratio(row.fastest):.3f} times as long"
        )


def describe_changes(before: MeasuredTable, after: MeasuredTable) -> Iterator[str]:
    """Rows that came or went, whose winner changed, or whose own or fastest stock time moved by the margin."""
    earlier, later = ({row.key: row for row in table.rows} for table in (before, after))
    for key in sorted({*earlier, *later}):
        old, now = earlier.get(key), later.get(key)
        if now is None:
            assert old is not None
            yield f"  {_name(old)}: gone"
        elif old is None:
            yield f"  {_name(now)}: added, ours {now.ours_us:.4g} us"
        elif old.faster() != now.faster() or _moved(old.ours_us, now.ours_us) or _moved(_stock_us(old), _stock_us(now)):
            yield (
                f"  {_name(now)}: ours {old.ours_us:.4g} -> {now.ours_us:.4g} us, fastest stock chain "
                f"{_stock_us(old):.4g} -> {_stock_us(now):.4g} us, faster {old.faster()} -> {now.faster()}"
            )


def _name(row: MeasuredRow) -> str:
    return f"{row.stage} TP {row.tp} T {row.tokens}"


def _stock_us(row: MeasuredRow) -> float:
    return row.chains_us[row.fastest]


def _moved(before_us: float, after_us: float) -> bool:
    return max(before_us, after_us) / min(before_us, after_us) >= MARGIN

"""Counts what becomes of mutated texts: `python tests/support/fuzz/table.py FORMAT --first N --count N`.

Adds a row to `benchmarks/fuzz/mutations.tsv`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.fuzz.formats import FORMATS, run_mutations  # noqa: E402

TABLE = ROOT / "benchmarks" / "fuzz" / "mutations.tsv"
COLUMNS = ("format", "first", "count", "taken", "refused", "tracebacks", "over_8_s", "slowest_s")


def main() -> int:
    """Run a range of numbers, and write its row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    wanted = parser.parse_args()
    if not TABLE.exists():
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        TABLE.write_text("\t".join(COLUMNS) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        numbers = range(wanted.first, wanted.first + wanted.count)
        found = run_mutations(wanted.format, numbers, Path(folder))
    row = (wanted.format, wanted.first, wanted.count, found.taken, found.refused, len(found.tracebacks))
    with TABLE.open("a") as table:
        table.write("\t".join(map(str, (*row, found.over_limit, round(found.slowest_s, 2)))) + "\n")
    for number, what in found.tracebacks:
        sys.stderr.write(f"{wanted.format}:{number}: {what}\n")
    return int(bool(found.tracebacks or found.over_limit))


if __name__ == "__main__":
    sys.exit(main())

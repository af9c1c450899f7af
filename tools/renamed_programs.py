"""Pairs the programs of an older commit's trees with today's, by key: `python tools/renamed_programs.py REVISION`.

Writes `benchmarks/renamed_programs.tsv`: what a program of REVISION is called today, so that a record that names it, or
the digest of its texts, is still a record of something. REVISION is the commit whose names the records have. Tables of
`cakegen compile` get today's names of their keys' programs instead; no figure is touched.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cakegen.errors import CakeError, ReviewError
from cakegen.renamed_keys import renamed_keys
from cakegen.review.trees import Tree, read_revision, read_trees, resolve_revision

ROOT = Path(__file__).resolve().parents[1]
GENERATED, TABLE = ROOT / "generated", ROOT / "benchmarks" / "renamed_programs.tsv"
STATIC, STATIC_EXPORT = ROOT / "benchmarks" / "static" / "blackwell.tsv", "kimi_k3_latent_moe"
COLUMNS = ("export", "old", "texts", "new", "keys")
DIGEST_DIGITS = 12
"""Of a digest of texts, as many as the emulator's tables have."""


def pair_programs(old: Tree, new: Tree) -> Iterator[dict[str, str]]:
    """A row a program of the old tree, by name.

    Raises
    ------
    ReviewError
        The new tree lacks a key, or serves the keys of one old program by several programs.
    """
    served: dict[str, list[str]] = {}
    for key, name in old.kernels.items():
        served.setdefault(name, []).append(renamed_keys().get(key, key))
    for name, keys in sorted(served.items()):
        today = {new.kernels.get(key, "") for key in keys}
        if len(today) != 1 or "" in today:
            raise ReviewError(
                f"{old.export}: the keys of {name} need one program of today's tree; they have"
                f" {', '.join(sorted(today)) or 'none'} ({', '.join(keys)})"
            )
        digests: Mapping[str, str] = old.modules[name]["closure_digest"]
        texts = " ".join(f"{arch}:{digest[:DIGEST_DIGITS]}" for arch, digest in digests.items())
        row = (old.export, name, texts, today.pop(), " ".join(sorted(keys)))
        yield dict(zip(COLUMNS, row, strict=True))


def renamed_rows(text: str, new: Tree) -> str:
    """A table of `cakegen compile` with the names that the programs of its keys have in a tree."""
    rows = list(csv.DictReader(text.splitlines(), delimiter="\t"))
    today = [{**row, "program": new.kernels[row["keys"].split()[0]]} for row in rows]
    return "\n".join(["\t".join(rows[0]), *("\t".join(row.values()) for row in today)]) + "\n"


def read_table(file: Path = TABLE) -> list[dict[str, str]]:
    """The rows of the table."""
    with file.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream, delimiter="\t"))


def main(arguments: Sequence[str]) -> int:
    """Write the table; 1 with a message where a tree can't be read or paired."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    try:
        old, new = read_revision(GENERATED, resolve_revision(GENERATED, arguments[0])), read_trees(GENERATED)
        rows = [row for export in sorted(old) for row in pair_programs(old[export], new[export])]
        static = renamed_rows(STATIC.read_text(encoding="utf-8"), new[STATIC_EXPORT])
    except CakeError as error:
        print(error, file=sys.stderr)
        return 1
    with TABLE.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    STATIC.write_text(static, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

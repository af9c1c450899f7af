"""Distinct bodies of programs: which keys a quick run takes so that no code path is left out.

A body is what a program's PTX does, without names, register numbers, immediates and what follows from those: how
often a loop is unrolled, how an index is computed, how wide a product is. It is the set of the instructions that touch
memory, synchronise, or compute with floats, and the kind of the program's text: its role, switches and call. So two
forms of one header that `if constexpr` chooses between are two bodies, and programs of one body differ in sizes alone.

`python tests/support/emulator/bodies.py` writes the table `bodies.tsv`, from which a test knows each key's body without
a compiler. A row holds as long as its program's texts, flags and constants are the same; the command compiles what has
changed (`--all`: every key).
"""

from __future__ import annotations

import csv
import functools
import hashlib
import re
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.emit.program_kinds import kind_of  # noqa: E402

from cakegen import paths  # noqa: E402
from cakegen.compile import compile_ptx, request_for  # noqa: E402
from cakegen.registry import REGISTRY_FILE, Registry, load_registry  # noqa: E402

TABLE = Path(__file__).with_name("bodies.tsv")
SMALL = "tiny_latent_moe"
"""The export whose programs stand for a body wherever it has one: it is emulated in a second, the full size in ten."""
ARCHES = ("sm_90a", "sm_100a")
"""Architectures that have texts of their own: sm_103a compiles the text of sm_100a."""
WIDEST_TILE = 256
"""Columns of the prefill tile whose width a key leaves out."""
_LINE_COMMENT = re.compile(r"//.*")
_BLOCK_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
# `.file` and its like begin with a dot, special registers with a percent sign
_OPCODE = re.compile(r"(?<![\w.%$\"/])([a-z][a-z0-9_]*(?:\.[\w:]+)+)")
_SIZE = re.compile(r"m\d+n\d+k\d+|\.x\d+|\.v\d+")
_INTEGER = re.compile(
    r"(?:mov|add|addc|sub|mul|mad|div|rem|neg|abs|min|max|and|or|xor|not|shl|shr|shf|lop3|bfe|bfi|prmt|set|setp|selp|"
    r"cvt|cvta|bra)\.(?!.*f(?:16|32|64))"
)
_TILE = re.compile(r"n(\d+)")
_DEGREE = re.compile(r"tp(\d+)")
_CHUNKS = re.compile(r"_k(\d+)_")


@dataclass(frozen=True)
class Body:
    """A key's row: digests of what its program is compiled from, and of its body."""

    export: str
    arch: str
    key: str
    program: str
    body: str

    @property
    def tile(self) -> int:
        """Columns of the token tile, as its key spells it."""
        found = _TILE.search(self.key)
        return int(found[1]) if found else WIDEST_TILE


def body_of(ptx: str, kind: Hashable = ()) -> str:
    """The digest of what a kernel does; see above."""
    text = _LINE_COMMENT.sub("", ptx[ptx.index(".entry") :])
    opcodes = {without_size(opcode) for opcode in _OPCODE.findall(text) if not _INTEGER.match(opcode)}
    return hashlib.sha256(repr((kind, sorted(opcodes))).encode()).hexdigest()[:16]


def without_size(opcode: str) -> str:
    """An opcode without the shape of a product, a repetition, or the width of a vector."""
    return _SIZE.sub("", opcode)


def program_digest(registry: Registry, key: str) -> str:
    """What a key's PTX follows from: its device texts without comments, flags and constants."""
    program = registry.program(key)
    names = [name for name in (program.kernel_source, *program.headers) if "_host_" not in name]
    identity = (
        f"{[_code(registry.path(name)) for name in names]}{program.flags}{sorted(registry.constants(key).items())}"
    )
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


@functools.cache
def _code(path: Path) -> str:
    text = _LINE_COMMENT.sub("", _BLOCK_COMMENT.sub("", path.read_text("utf-8")))
    lines = (line.strip() for line in text.splitlines())
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()


def every_key() -> Iterator[tuple[Registry, str, str]]:
    """Every key of every export in the tree, for each architecture whose text is its own."""
    for file in sorted(paths.generated_root().glob(f"*/{REGISTRY_FILE}")):
        registry = load_registry(file.parent.name)
        for key in registry.kernels:
            for arch in ARCHES:
                if arch in registry.program(key).arches:
                    yield registry, arch, key


def compiled_rows(known: Iterable[Body] = (), keys: Iterable[tuple[Registry, str, str]] | None = None) -> list[Body]:
    """A row for every key: the known one of the same program, or one from the compiler, run once a program."""
    bodies = {(row.arch, row.program): row.body for row in known}
    chosen = every_key() if keys is None else keys
    places = [(registry, arch, key, program_digest(registry, key)) for registry, arch, key in chosen]
    lacking = {(arch, digest): (registry, arch, key) for registry, arch, key, digest in places}
    lacking = {program: place for program, place in lacking.items() if program not in bodies}
    with ThreadPoolExecutor(2) as pool:
        bodies.update(zip(lacking, pool.map(_compiled_body, lacking.values()), strict=True))
    return [Body(registry.export, arch, key, digest, bodies[arch, digest]) for registry, arch, key, digest in places]


def _compiled_body(place: tuple[Registry, str, str]) -> str:
    registry, arch, key = place
    role, _, *kind = kind_of(registry, registry.program(key))
    return body_of(compile_ptx(request_for(registry, key, arch)), (role, *kind))


@functools.cache
def recorded() -> tuple[Body, ...]:
    """The rows of the table."""
    with TABLE.open(encoding="utf-8", newline="") as stream:
        return tuple(Body(**row) for row in csv.DictReader(stream, delimiter="\t"))


@functools.cache
def current_rows() -> tuple[Body, ...]:
    """A row for every key; a key whose program the table does not know has a body of its own."""
    bodies = {(row.arch, row.program): row.body for row in recorded()}
    places = ((registry.export, arch, key, program_digest(registry, key)) for registry, arch, key in every_key())
    return tuple(Body(*place, bodies.get((place[1], place[3]), f"unknown {place[2]}")) for place in places)


def quick_rows(rows: Iterable[Body]) -> list[Body]:
    """Of each body the keys with the narrowest and the widest token tile, of the small model where it has some.

    Of a body that only a larger model has, the narrowest alone: it takes the small model's time tenfold. Of several
    keys with one tile it is one of the highest TP degree, whose weights are the fewest.
    """
    of_body: dict[tuple[str, str], list[Body]] = {}
    for row in rows:
        of_body.setdefault((row.arch, row.body), []).append(row)
    taken = []
    for same in of_body.values():
        own = [row for row in same if row.export == SMALL]
        small = own or same
        ends = {choose(row.tile for row in small) for choose in ((min, max) if own else (min,))}
        taken += [max((row for row in small if row.tile == tile), key=_fewest_weights) for tile in sorted(ends)]
    return taken


def _fewest_weights(row: Body) -> tuple[int, int, str]:
    """A key says its TP degree, or the K chunks of its slice, of which there are fewer with more ranks."""
    degree, chunks = _DEGREE.search(row.key), _CHUNKS.search(row.key)
    return int(degree[1]) if degree else 0, -int(chunks[1]) if chunks else 0, row.key


def quick_keys(export: str, arch: str) -> Sequence[str]:
    """The keys of an export that a quick run takes."""
    return [row.key for row in quick_rows(current_rows()) if (row.export, row.arch) == (export, arch)]


def main() -> None:
    """Compile what the table does not hold yet, and write it."""
    rows = compiled_rows(recorded() if TABLE.exists() and "--all" not in sys.argv[1:] else ())
    with TABLE.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, delimiter="\t", lineterminator="\n")
        writer.writerow(field.name for field in fields(Body))
        writer.writerows(map(astuple, rows))
    sys.stdout.write(f"{len(rows)} keys, {len({(row.arch, row.body) for row in rows})} bodies\n")


if __name__ == "__main__":
    main()

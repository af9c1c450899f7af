"""What three generated programs claim, for a reader to hold against their bodies: `python tools/program_claims.py`.

The programs are drawn by a commit's hash (HEAD's, or the one that is given), so that nobody chooses them. Each sentence
of banner, description, diagram, barrier table and `struct Cfg` is printed with its line; with `--headers` also each
comment of the headers that the programs include, once.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cakegen import paths
from cakegen.registry import Program, Registry, load_registry
from cakegen.review.trees import resolve_revision

DRAWN = 3
BANNER, ABOUT, EDGE, BARRIER, CONSTANT, INITIALISED, COMMENT = (
    *("banner", "about", "edge", "barrier", "constant", "initialised", "comment"),
)
_EDGE = re.compile(r"// {3}(?P<source>\S.*?) +--(?: (?P<what>.+?) )?-+> (?P<target>.+?)(?: {2,}(?P<by>\S+))?$")
_BARRIER = re.compile(r"// {3}(?P<label>\w+(?:\[\d+\])?) +(?P<arrivals>\d+): (?P<arrives>.+)$")
_CONSTANT = re.compile(r" +static constexpr \w+ (k\w+) = (\S+);  // (.+)$")
_INITIALISED = re.compile(r" +\{(\d+), (\d+)\},  // (\w+)$")


@dataclass(frozen=True)
class Claim:
    """A sentence of a text, where it begins, and what it is a sentence of."""

    line: int
    kind: str
    text: str


def claims_of(text: str) -> list[Claim]:
    """Every comment of a program or a header; sentences that go on in the next line stand in one piece."""
    found: list[Claim] = []
    lines = text.splitlines()
    structure = next((number for number, line in enumerate(lines, 1) if line.startswith("struct Cfg")), 0)
    inside = False
    for number, line in enumerate(lines, 1):
        if "//" not in line:
            inside = False
            continue
        claim = _claim(number, line, structure)
        if inside and claim.kind in (ABOUT, COMMENT) and found[-1].kind == claim.kind and _goes_on(lines, number):
            found[-1] = Claim(found[-1].line, claim.kind, f"{found[-1].text} {claim.text}".strip())
        elif claim.text:
            found.append(claim)
        inside = line.lstrip().startswith("//") and line.strip() != "//"
    return found


@dataclass(frozen=True)
class DrawnEdge:
    """An arrow of a program's diagram; `by` is the label of a barrier or a counter, empty at the launch's end."""

    source: str
    what: str
    target: str
    by: str


def edges_of(text: str) -> list[DrawnEdge]:
    """The arrows that a program's text draws."""
    matches = map(_EDGE.match, text.partition("struct Cfg")[0].splitlines())
    return [DrawnEdge(**{name: value or "" for name, value in found.groupdict().items()}) for found in matches if found]


def barriers_of(text: str) -> list[tuple[str, int, int]]:
    """(name, how many, arrivals) of each row of a program's table of barriers."""
    found = map(_BARRIER.match, text.partition("struct Cfg")[0].splitlines())
    return [
        (name, int(count.rstrip("]") or 1), int(row["arrivals"]))
        for row in found
        if row
        for name, _, count in [row["label"].partition("[")]
    ]


def _goes_on(lines: Sequence[str], number: int) -> bool:
    """Whether a line of a comment belongs to the line above it, as one of prose does."""
    return lines[number - 1].lstrip().startswith("// ") and lines[number - 2].lstrip().startswith("// ")


def _claim(number: int, line: str, structure: int) -> Claim:
    if match := _CONSTANT.match(line):
        return Claim(number, CONSTANT, f"{match[1]} = {match[2]}: {match[3]}")
    if match := _INITIALISED.match(line):
        return Claim(number, INITIALISED, f"{match[3]}: {match[1]} of {match[2]} arrivals")
    if number < structure:
        if match := _EDGE.match(line):
            by = match["by"] or "the launch's end"
            return Claim(number, EDGE, f"{match['source']} hand {match['what']} to {match['target']}, by {by}")
        if match := _BARRIER.match(line):
            return Claim(number, BARRIER, f"{match['label']}: {match['arrivals']} arrivals: {match['arrives']}")
    words = line.partition("//")[2].strip()
    return Claim(number, BANNER if number <= 4 else ABOUT if number < structure else COMMENT, words)


def drawn(commit: str, programs: Sequence[str], count: int = DRAWN) -> list[str]:
    """Programs that a commit's hash draws, without repetition, whatever their order."""

    def lot(name: str) -> str:
        return hashlib.sha256(f"{commit} {name}".encode()).hexdigest()

    return sorted(sorted(programs, key=lot)[:count])


def all_programs() -> dict[str, tuple[Registry, Program]]:
    """Of every generated tree, by name."""
    trees = sorted(path.parent.name for path in paths.generated_root().glob("*/cake_jit.py"))
    return {
        name: (registry, program)
        for registry in map(load_registry, trees)
        for name, program in registry.programs.items()
    }


def report(commit: str, count: int, with_headers: bool) -> Iterator[str]:
    """The claims of the drawn programs, a line each."""
    programs = all_programs()
    headers: dict[str, Registry] = {}
    names = drawn(commit, list(programs), count)
    yield f"{len(names)} of {len(programs)} programs, drawn by {commit}"
    for name in names:
        registry, program = programs[name]
        yield f"\n{program.kernel_source}"
        yield from _lines(registry.read(program.kernel_source))
        headers |= dict.fromkeys(program.headers, registry)
    for name, registry in sorted(headers.items()) if with_headers else ():
        yield f"\n{name}"
        yield from _lines(registry.read(name))


def _lines(text: str) -> Iterator[str]:
    return (f"{claim.line:4}  {claim.kind:11}  {claim.text}" for claim in claims_of(text))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the claims."""
    parser = argparse.ArgumentParser(description="What three generated programs claim, with lines.")
    parser.add_argument("commit", nargs="?", default="HEAD", help="whose hash draws them")
    parser.add_argument("--count", type=int, default=DRAWN, help="how many programs (default: 3)")
    parser.add_argument("--headers", action="store_true", help="and every comment of the headers that they include")
    given = parser.parse_args(arguments)
    for line in report(resolve_revision(paths.generated_root(), given.commit).commit, given.count, given.headers):
        print(line)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Every format that comes from outside, mutated by number: what it becomes is a result or one of our errors.

A mutation is named by its format and number, so that one that failed can be made again: `mutation("ptx", 4711)`.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from support.compile.sources import PLAIN_REQUEST
from support.models import tiny_model
from support.review.trees import small_programs, write_small_tree

from cakegen import paths
from cakegen.cli.emulate_files import BAD_INPUT, FileRequest, run_files
from cakegen.compile import compile_cubin, load_nvrtc
from cakegen.compile.bundle import MANIFEST_FILE, open_bundle, write_bundle
from cakegen.compile.entry import program_of, write_entry
from cakegen.compile.program import compiler_version
from cakegen.emulator import Options
from cakegen.emulator.launches.arrays import read_array
from cakegen.errors import CakeError
from cakegen.model import to_literal
from cakegen.registry import REGISTRY_FILE, SHARED_FILE, SHARED_FOLDER, _load, load_registry
from cakegen.review.git_output import parse_listing, parse_objects
from cakegen.review.trees import read_trees, resolve_revision
from cakegen.spec import parse_export

TESTS = Path(__file__).parents[2]
CORPUS = TESTS / "fuzz" / "corpus"
EXAMPLES = TESTS.parent / "examples" / "emulate"
INSTRUCTIONS = 20_000
"""After so many a mutated kernel counts as one that never ends."""
TAKEN, REFUSED = "taken", "refused"
_MOST_REPEATED_BYTES = 1 << 16
_TOKEN = re.compile(rb"[\w.%$]+|\S")
_ODD = (b"0", b"-1", b"1", b"2", b"3", b"255", b"65536", b"4294967296", b"99999999999", b"9" * 25, b"9" * 5000)
_ODD += (b"", b"{", b"}", b"(", b")", b"[", b";", b",", b"\x00", b"\xff", b'"', b"_", b"%r9999", b"nan", b"1e999")


@dataclass(frozen=True)
class Format:
    """Whole texts of a format, and what reads one in a folder of its own; it returns `TAKEN` or `REFUSED`."""

    whole: Sequence[bytes]
    read: Callable[[bytes, Path], str]


def mutation(name: str, number: int) -> bytes:
    """One to four edits of one of a format's texts."""
    draw = random.Random(f"{name}:{number}")
    text = bytearray(draw.choice(FORMATS[name].whole))
    if text.startswith(b"{") and draw.random() < 0.7:
        return _edited_json(json.loads(text), draw)
    for _ in range(draw.randint(1, 4)):
        _edit(text, draw)
    return bytes(text)


def _edited_json(value: Any, draw: random.Random) -> bytes:
    """Values, keys or items of a JSON text replaced, removed or repeated; it stays JSON."""
    for _ in range(draw.randint(1, 2)):
        parents = [each for each in _parents(value) if each]
        parent = draw.choice(parents)
        key: Any = draw.choice(list(parent)) if isinstance(parent, dict) else draw.randrange(len(parent))
        kind = draw.randrange(4)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        elif kind == 2 and isinstance(parent, dict):
            parent[draw.choice(_ODD_KEYS)] = parent.pop(key)
        else:
            parent[key] = copy.deepcopy(draw.choice(_ODD_VALUES))
        if not isinstance(value, (dict, list)) or not value:
            break
    return json.dumps(value).encode()


def _parents(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)):
        yield value
        for part in value.values() if isinstance(value, dict) else value:
            yield from _parents(part)


_ODD_KEYS = ("", "x", "fill", "shape", "kind", "hex", "value", "file", "element", "offset_bytes", "cluster", "barriers")
_ODD_VALUES: tuple[Any, ...] = (None, True, 0, 1, -1, 2, 3, 64, 1 << 20, (1 << 31) - 1, 1 << 40, 10**400, 0.5, 1e308)
_ODD_VALUES += (float("nan"), float("inf"), "", "x", "normal", "index", "poison", "bytes", "buffer", "..", "tile.json")
_ODD_VALUES += ("f32", "bf16", "e4m3", "u64", "i8", "00ff", [], [1], [64, 8], [1 << 30] * 8, {}, {"x": 0}, [[[[]]]])


def _edit(text: bytearray, draw: random.Random) -> None:
    tokens = list(_TOKEN.finditer(text))
    if not tokens:
        text += draw.choice(_ODD)
        return
    kind = draw.randrange(9)
    token = draw.choice(tokens)
    start, end = token.span()
    if kind == 0:
        text[start:end] = draw.choice(_ODD)
    elif kind == 1:
        text[start:end] = draw.choice(tokens).group()
    elif kind == 2:
        del text[start:end]
    elif kind == 3:
        # a token that was repeated may be drawn again
        text[start:start] = (token.group() * draw.choice((1, 1, 3, 2000)))[:_MOST_REPEATED_BYTES]
    elif kind == 4:
        text[start] ^= 1 << draw.randrange(8)
    elif kind == 5:
        del text[start:]
    else:
        lines = text.split(b"\n")
        at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
        if kind == 6:
            del lines[at]
        elif kind == 7:
            lines.insert(at, lines[other])
        else:
            lines[at], lines[other] = lines[other], lines[at]
        text[:] = b"\n".join(lines)


def _emulate(ptx: Path, launch: Path, entry: str) -> str:
    options = Options("random", 0, "wide", instruction_limit=INSTRUCTIONS)
    request = FileRequest(ptx, None, launch, entry, None, "sm_90a", (), ())
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        status = run_files(request, [options])
    return REFUSED if status == BAD_INPUT else TAKEN


def _read_ptx(text: bytes, folder: Path) -> str:
    """The last entry, with a word for each of its parameters; the tile's example with its own launch."""
    (folder / "k.ptx").write_bytes(text)
    if b"copy_tile" in text:
        return _emulate(folder / "k.ptx", EXAMPLES / "tile.json", "copy_tile")
    found = re.findall(rb"\.entry\s+(\w+)\s*\(([^)]*)", text) or [(b"k", b"")]
    entry, parameters = found[-1]
    words = [f"word{number}" for number in range(parameters.count(b".param"))]
    buffers = {word: {"role": "update", "element": "u32", "shape": [64], "fill": 0} for word in words}
    arguments = [{"kind": "buffer", "name": word} for word in words]
    launch = {"grid": [2], "block": [32], "dynamic_smem_bytes": 1024, "arguments": arguments}
    (folder / "k.json").write_text(json.dumps({"version": 1, "buffers": buffers, "launches": [launch]}))
    return _emulate(folder / "k.ptx", folder / "k.json", entry.decode())


def _read_launch(text: bytes, folder: Path) -> str:
    for file in (*EXAMPLES.glob("tile*"), CORPUS / "many.ptx"):
        if not (folder / file.name).exists():
            shutil.copy(file, folder)
    (folder / "launch.json").write_bytes(text)
    ptx, entry = ("many.ptx", "many") if b'"source"' in text else ("tile.ptx", "copy_tile")
    return _emulate(folder / ptx, folder / "launch.json", entry)


def _ours(read: Callable[[], object]) -> str:
    try:
        return TAKEN if read() is not None else REFUSED
    except CakeError:
        return REFUSED


def _read_npy(text: bytes, folder: Path) -> str:
    (folder / "x.npy").write_bytes(text)
    return _ours(lambda: read_array("x", "f32", folder / "x.npy"))


def _read_toml(text: bytes, folder: Path, name: str) -> str:
    """One of the small model's three files; the others are whole."""
    for file in EXPORT.glob("*.toml"):
        (folder / file.name).write_bytes(text if file.name == name else _toml(file))
    return _ours(lambda: parse_export(folder / "export.toml"))


def _toml(file: Path) -> bytes:
    """A file of the small model, for one TP degree and one part: all plans are made at each reading."""
    text = re.sub(rb"tp_degrees = .*", b"tp_degrees = [8]", file.read_bytes())
    text = re.sub(rb"sm_counts = .*", b"sm_counts = [10]", text)
    return re.sub(rb"max_partials = .*", b"max_partials = 4", text)


def _read_registry(text: bytes, folder: Path, name: str) -> str:
    """A small tree's registry, or the table of its headers; the other is whole. `diff` reads it, too."""
    for file, whole in _tree_texts().items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(text if file == name else whole)
    _load.cache_clear()
    outcomes = {_ours(lambda: load_registry(folder / "small")), _ours(lambda: read_trees(folder) or None)}
    return TAKEN if TAKEN in outcomes else REFUSED


@functools.cache
def _tree_texts() -> dict[str, bytes]:
    """A tree of two programs by file, read once."""
    with tempfile.TemporaryDirectory() as folder:
        write_small_tree(Path(folder), small_programs()[:2], model=to_literal(tiny_model()))
        files = [file for file in Path(folder).rglob("*") if file.is_file()]
        return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@functools.cache
def _repository() -> Path:
    """A repository with one commit, for as long as the process lives."""
    folder = Path(_REPOSITORY.name)
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    identity = ("-c", "user.name=page", "-c", "user.email=page")
    for words in (("init", "-qb", "main"), (*identity, "commit", "-q", "--allow-empty", "-m", "x"), ("tag", "v1.0")):
        subprocess.run(["git", "-C", str(folder), *words], check=True, env=environment)
    return folder


def _read_git_name(text: bytes, folder: Path) -> str:
    return _ours(lambda: resolve_revision(_repository(), os.fsdecode(text)))


def _read_git_listing(text: bytes, folder: Path) -> str:
    return _ours(lambda: parse_listing(text, "x") or None)


def _read_git_objects(text: bytes, folder: Path) -> str:
    return _ours(lambda: parse_objects(text, ["a", "b", "c"]))


def _read_entry(text: bytes, folder: Path) -> str:
    (folder / "x.cubin").write_bytes(text)
    return _ours(lambda: program_of(folder / "x.cubin", PLAIN_REQUEST, compiler_version(load_nvrtc())))


def _read_manifest(text: bytes, folder: Path) -> str:
    (folder / MANIFEST_FILE).write_bytes(text)
    return _ours(lambda: open_bundle(folder))


def _whole_entry() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write_entry(Path(folder, "x.cubin"), compile_cubin(PLAIN_REQUEST), PLAIN_REQUEST)
        return Path(folder, "x.cubin").read_bytes()


def _whole_manifest() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write_bundle(Path(folder, "b"), "small", [(PLAIN_REQUEST, compile_cubin(PLAIN_REQUEST), ["a"])])
        return Path(folder, "b", MANIFEST_FILE).read_bytes()


EXPORT = paths.exports_root() / "tiny_latent_moe"
_REPOSITORY = tempfile.TemporaryDirectory()
_REGISTRY, _HEADERS = f"small/{REGISTRY_FILE}", f"{SHARED_FOLDER}/{SHARED_FILE}"
_OBJECT = b"ce013625030ba8dba906f756967f9e9ca394464a"
_LISTING = b"".join(
    b"100644 blob %b %7d\t%b\0" % (_OBJECT, size, path)
    for size, path in ((12, b"small/cake_jit.py"), (900, b"small/x_kernel.cu"), (0, b"shared/headers.json"))
)
_LISTING += b"160000 commit %b       -\tsmall/module\0" % _OBJECT
FORMATS: dict[str, Format] = {
    "ptx": Format(
        [(EXAMPLES / "tile.ptx").read_bytes(), *(file.read_bytes() for file in sorted(CORPUS.glob("*.ptx")))], _read_ptx
    ),
    "launch": Format([(EXAMPLES / "tile.json").read_bytes(), (CORPUS / "many.json").read_bytes()], _read_launch),
    "npy": Format([file.read_bytes() for file in sorted(EXAMPLES.glob("*.npy"))], _read_npy),
    "export": Format([_toml(EXPORT / "export.toml")], partial(_read_toml, name="export.toml")),
    "rules": Format([_toml(EXPORT / "hopper.toml")], partial(_read_toml, name="hopper.toml")),
    "cache entry": Format([_whole_entry()], _read_entry),
    "manifest": Format([_whole_manifest()], _read_manifest),
    "registry": Format([_tree_texts()[_REGISTRY]], partial(_read_registry, name=_REGISTRY)),
    "header table": Format([_tree_texts()[_HEADERS]], partial(_read_registry, name=_HEADERS)),
    "git name": Format([b"main", b"HEAD", b"v1.0", b"HEAD^{commit}", b"HEAD@{0}", b":/x"], _read_git_name),
    "git listing": Format([_LISTING], _read_git_listing),
    "git objects": Format([b"".join(b"%b blob 7\nint x;\n\n" % _OBJECT for _ in range(3))], _read_git_objects),
}


@dataclass
class Count:
    """What became of some mutations."""

    taken: int = 0
    refused: int = 0
    tracebacks: list[tuple[int, str]] = ()  # type: ignore[assignment]
    slowest_s: float = 0.0
    over_limit: int = 0


def run_mutations(name: str, numbers: Sequence[int], folder: Path, limit_s: float = 8.0) -> Count:
    """Read every one of them."""
    count = Count(tracebacks=[])
    for number in numbers:
        text, start = mutation(name, number), time.perf_counter()
        try:
            outcome = FORMATS[name].read(text, folder)
        except Exception as error:
            count.tracebacks.append((number, f"{type(error).__name__}: {error}"[:200]))
        else:
            count.taken += outcome == TAKEN
            count.refused += outcome == REFUSED
        seconds = time.perf_counter() - start
        count.slowest_s = max(count.slowest_s, seconds)
        count.over_limit += seconds > limit_s
    return count

"""Malformed cache entries, cubins and bundles: a miss or a refusal, never another program's code and never a crash."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.compile.sources import PLAIN_REQUEST
from support.fuzz.strategies import damaged, damaged_bytes, fuzzed, odd_values

from cakegen.compile import CompiledProgram, cached_cubin, load_nvrtc
from cakegen.compile import bundle as bundle_module
from cakegen.compile.bundle import MANIFEST_FILE, open_bundle, write_bundle
from cakegen.compile.cubin import CubinReader
from cakegen.compile.entry import program_of, read_entry, write_entry
from cakegen.compile.program import compiler_version
from cakegen.errors import CompileError


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompiledProgram]:
    """A compiled program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAKEGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield cached_cubin(PLAIN_REQUEST)


COMPILER = compiler_version(load_nvrtc())


def sealed(rest: bytes) -> bytes:
    """An entry whose digest is right, whatever it holds."""
    return b"cakegen-cubin " + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest


@fuzzed
@given(drawn=st.data())
def test_entry_with_damaged_bytes_is_a_miss(drawn: st.DataObject, whole: CompiledProgram, tmp_path: Path) -> None:
    file = tmp_path / "x.cubin"
    write_entry(file, whole, PLAIN_REQUEST)
    before = file.read_bytes()
    raw = drawn.draw(damaged_bytes(before))
    file.write_bytes(raw)
    found = program_of(file, PLAIN_REQUEST, COMPILER)
    assert (found is None) == (raw != before)


@fuzzed
@given(facts=odd_values, cubin=st.binary(max_size=64))
def test_entry_with_odd_facts_and_a_right_digest_is_a_miss(tmp_path: Path, facts: Any, cubin: bytes) -> None:
    file = tmp_path / "x.cubin"
    file.write_bytes(sealed(json.dumps(facts).encode() + b"\n" + cubin))
    assert program_of(file, PLAIN_REQUEST, COMPILER) is None


@fuzzed
@given(raw=st.binary(max_size=300))
def test_entry_of_any_bytes_and_a_right_digest_is_a_miss(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "x.cubin"
    file.write_bytes(sealed(raw))
    assert program_of(file, PLAIN_REQUEST, COMPILER) is None
    file.write_bytes(raw)
    assert read_entry(file) is None


@fuzzed
@given(drawn=st.data())
def test_damaged_cubin_is_read_or_refused(drawn: st.DataObject, whole: CompiledProgram) -> None:
    """The header and the section table are small; half of the examples are damaged there."""
    head = drawn.draw(st.booleans())
    cubin = whole.cubin
    raw = drawn.draw(damaged_bytes(cubin[:64])) + cubin[64:] if head else drawn.draw(damaged_bytes(cubin))
    with contextlib.suppress(CompileError):
        reader = CubinReader(raw, "fuzzed")
        assert all(len(code) <= len(raw) for code in reader.functions_code)
        resources = reader.resources(PLAIN_REQUEST.kernel_symbol)
        assert resources.parameter_bytes < 2**32


@fuzzed
@given(drawn=st.data())
def test_bundle_with_a_damaged_manifest_or_file_is_refused_or_gives_the_program(
    drawn: st.DataObject, whole: CompiledProgram, tmp_path: Path
) -> None:
    folder = tmp_path / "bundle"
    bundle_module._opened.cache_clear()
    write_bundle(folder, "small", [(PLAIN_REQUEST, whole, ["a"])])
    (file,) = folder.glob("program-*.cubin")
    manifest = folder / MANIFEST_FILE
    kind = drawn.draw(st.sampled_from(("values", "bytes", "file")))
    if kind == "values":
        values = drawn.draw(damaged(json.loads(manifest.read_text())))
        manifest.write_text(json.dumps(values))
    else:
        path = manifest if kind == "bytes" else file
        path.write_bytes(drawn.draw(damaged_bytes(path.read_bytes())))
    with contextlib.suppress(CompileError):
        assert open_bundle(folder).program(PLAIN_REQUEST).cubin == whole.cubin

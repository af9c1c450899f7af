"""Bundles: what is written is what is read, and everything else is refused with its reason."""

from __future__ import annotations

import json
import os
from dataclasses import fields, replace
from pathlib import Path

import pytest
from support.compile.sources import HEADER, PLAIN, PLAIN_REQUEST

from cakegen.compile import CompileRequest, cached_cubin
from cakegen.compile import bundle as bundle_module
from cakegen.compile.bundle import find_bundle, open_bundle, request_identity, write_bundle
from cakegen.errors import CompileError

OTHER_REQUEST = replace(PLAIN_REQUEST, constants=(("SCALE", 5),))
CHANGED = {
    "name": "other",
    "arch": "sm_100a",
    "source": PLAIN + " ",
    "headers": (("scaled.cuh", HEADER + " "),),
    "flags": ("-std=c++17", "-DCAKEGEN_CHAOS"),
    "constants": (("SCALE", 4),),
    "kernel_symbol": "kernel_other",
}


@pytest.fixture(autouse=True)
def nothing_opened() -> None:
    bundle_module._opened.cache_clear()


def file_of(request: CompileRequest, folder: Path) -> Path:
    return folder / open_bundle(folder).programs[request_identity(request)].file_name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle of two programs."""
    out = tmp_path / "bundle"
    requests = (PLAIN_REQUEST, OTHER_REQUEST)
    write_bundle(out, "small", [(request, cached_cubin(request), ["decode:a"]) for request in requests])
    return out


def test_bundle_gives_back_what_was_compiled_without_a_compiler(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = cached_cubin(OTHER_REQUEST)
    monkeypatch.setenv("CAKEGEN_NVRTC", str(tmp_path / "none.so"))
    assert open_bundle(folder).program(OTHER_REQUEST) == replace(wanted, cached=True)


@pytest.mark.parametrize("field", [f.name for f in fields(CompileRequest)])
def test_request_that_differs_in_any_field_is_refused(folder: Path, field: str) -> None:
    changed = replace(PLAIN_REQUEST, **{field: CHANGED[field]})
    assert request_identity(changed) != request_identity(PLAIN_REQUEST)
    with pytest.raises(CompileError, match="Make it again: `cakegen bundle --export small --arch"):
        open_bundle(folder).program(changed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "sm_103a"}, "is for sm_90a; plain is needed for sm_103a"),
        ({"name": "other"}, "holds 2 programs for sm_90a, and not other"),
        ({"flags": ("-DX",)}, "holds plain for sm_90a, but compiled from another text, .* than -DX -DSCALE=3 and"),
    ],
)
def test_refusal_says_what_the_bundle_holds_and_what_is_needed(
    folder: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(CompileError, match=message):
        open_bundle(folder).program(replace(PLAIN_REQUEST, **changes))


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", None])
def test_damaged_file_is_refused_with_both_digests(folder: Path, damage: bytes | None) -> None:
    file = file_of(PLAIN_REQUEST, folder)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if damage is None else damage)
    says = json.loads((folder / "bundle.json").read_text())["programs"][request_identity(PLAIN_REQUEST)]["sha256"]
    with pytest.raises(CompileError, match=rf"sha256 [0-9a-f]{{64}}; bundle\.json says {says} for plain \(sm_90a\)"):
        open_bundle(folder).program(PLAIN_REQUEST)
    assert open_bundle(folder).program(OTHER_REQUEST)


def test_file_of_another_program_in_its_place_is_refused(folder: Path) -> None:
    first, second = (file_of(request, folder) for request in (PLAIN_REQUEST, OTHER_REQUEST))
    first.write_bytes(second.read_bytes())
    with pytest.raises(CompileError, match="damaged or was exchanged"):
        open_bundle(folder).program(PLAIN_REQUEST)


def test_missing_file_is_named(folder: Path) -> None:
    file = file_of(PLAIN_REQUEST, folder)
    file.unlink()
    with pytest.raises(CompileError, match=f"{file}: No such file"):
        open_bundle(folder).program(PLAIN_REQUEST)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a bundle's manifest"),
        ("[]", "schema None; this cakegen reads 3"),
        ('{"schema": 1}', "schema 1; this cakegen reads 3"),
        ('{"schema": 3}', "damaged .KeyError: 'programs'"),
        ('{"schema": 3, "export": "a", "compiler": "b", "programs": []}', "damaged .AttributeError"),
        ('{"schema": 3, "export": "a", "compiler": "b", "programs": {"x": {}}}', "damaged .KeyError: 'keys'"),
        (
            '{"schema": 3, "export": "a", "compiler": "b", "programs": {"x": {"keys": [], "program": "p", "arch": "a", '
            '"compiler": "c", "sha256": "../notes"}}}',
            r"damaged .ValueError: sha256 must be 64 hex digits, not '\.\./notes'",
        ),
        ("[" * 100_000, "not a bundle's manifest"),
        *(
            (
                '{"schema": 3, "export": "a", "compiler": "b", "programs": {"x": {"keys": [], "program": "p",'
                f' "arch": "sm_90a", "compiler": "c", "sha256": "{"0" * 64}", "size_bytes": {size}}}}}}}',
                "damaged .ValueError: size_bytes must be a whole number, not",
            )
            for size in ("Infinity", "1e999", "NaN", "-1", "1.5", "true", '"7"')
        ),
    ],
)
def test_damaged_manifest_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / "bundle.json").write_text(text)
    with pytest.raises(CompileError, match=message):
        open_bundle(folder)


def test_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"bundle\.json: No such file"):
        open_bundle(tmp_path)


def test_bundle_is_written_in_place_of_an_older_one_and_of_nothing_else(folder: Path, tmp_path: Path) -> None:
    write_bundle(folder, "small", [(PLAIN_REQUEST, cached_cubin(PLAIN_REQUEST), ["decode:a"])])
    assert len(open_bundle(folder).programs) == 1
    assert sorted(path.name for path in tmp_path.iterdir() if "bundle" in path.name) == ["bundle"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    with pytest.raises(CompileError, match="mine: holds something that is no bundle"):
        write_bundle(tmp_path / "mine", "small", [])
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]


def test_bundle_is_written_to_the_folder_that_a_link_or_a_dot_stands_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, here = tmp_path / "link", tmp_path / "here"
    link.symlink_to(folder)
    here.mkdir()
    monkeypatch.chdir(here)
    for out, written in ((link, folder), (Path("."), here)):
        write_bundle(out, "small", [(PLAIN_REQUEST, cached_cubin(PLAIN_REQUEST), ["decode:a"])])
        assert len(open_bundle(written).programs) == 1
    assert link.is_symlink()


def test_bundle_that_can_not_be_written_leaves_the_old_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CompileError, match=r"can't write the bundle \(No space left on device"):
        write_bundle(folder, "small", [(PLAIN_REQUEST, cached_cubin(PLAIN_REQUEST), ["decode:a"])])
    assert len(open_bundle(folder).programs) == 2
    assert [path.name for path in folder.parent.iterdir() if "bundle" in path.name] == ["bundle"]


def test_process_that_opened_a_bundle_takes_what_a_later_one_holds(folder: Path) -> None:
    """A bundle is made again with more programs while a server runs, which then needs one of them."""
    opened, later = open_bundle(folder), replace(PLAIN_REQUEST, constants=(("SCALE", 7),))
    requests = (PLAIN_REQUEST, later)
    write_bundle(folder, "small", [(request, cached_cubin(request), ["decode:a"]) for request in requests])
    assert opened.program(later).cubin == cached_cubin(later).cubin
    with pytest.raises(CompileError, match="holds plain for sm_90a, but compiled from another text"):
        opened.program(OTHER_REQUEST)


def test_environment_names_bundles_of_several_exports(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = tmp_path / "second"
    write_bundle(second, "large", [(PLAIN_REQUEST, cached_cubin(PLAIN_REQUEST), ["decode:a"])])
    monkeypatch.delenv("CAKEGEN_BUNDLE", raising=False)
    assert find_bundle("large") is None
    monkeypatch.setenv("CAKEGEN_BUNDLE", f"{folder}{os.pathsep}{second}")
    for export, where in (("small", folder), ("large", second)):
        found = find_bundle(export)
        assert found is not None
        assert found.folder == where
    assert find_bundle("huge") is None


def test_bundle_that_is_named_must_be_of_the_export(folder: Path) -> None:
    with pytest.raises(CompileError, match="is of export small; large is needed"):
        find_bundle("large", folder)


def test_environment_that_names_no_bundle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAKEGEN_BUNDLE", str(tmp_path / "gone"))
    with pytest.raises(CompileError, match=r"gone/bundle\.json: No such file"):
        find_bundle("small")


def test_lines_of_two_specialisations_that_were_exchanged_are_refused(folder: Path) -> None:
    """Both files are whole and define the same kernel: the wrong K extent would run."""
    manifest = folder / "bundle.json"
    values = json.loads(manifest.read_text())
    one, two = (request_identity(request) for request in (PLAIN_REQUEST, OTHER_REQUEST))
    lines = values["programs"]
    lines[one], lines[two] = lines[two], lines[one]
    manifest.write_text(json.dumps(values))
    for request, found, wanted in ((PLAIN_REQUEST, 5, 3), (OTHER_REQUEST, 3, 5)):
        with pytest.raises(
            CompileError,
            match=rf"another request: constants \[\['SCALE', {found}\]\], not \[\['SCALE', {wanted}\]\].*exchanged",
        ):
            open_bundle(folder).program(request)


def test_line_of_another_compiler_is_refused(folder: Path) -> None:
    manifest = folder / "bundle.json"
    values = json.loads(manifest.read_text())
    values["programs"][request_identity(PLAIN_REQUEST)]["compiler"] = "nvrtc-1.0.0"
    manifest.write_text(json.dumps(values))
    with pytest.raises(CompileError, match=r"compiled by 'nvrtc-\d.*'; bundle\.json says 'nvrtc-1\.0\.0'"):
        open_bundle(folder).program(PLAIN_REQUEST)


@pytest.mark.parametrize("kind", ["link", "fifo", "terabyte"])
@pytest.mark.parametrize("which", ["manifest", "program"])
def test_item_that_is_no_plain_file_of_a_bounded_size_is_refused(
    folder: Path, tmp_path: Path, which: str, kind: str
) -> None:
    file = folder / "bundle.json" if which == "manifest" else file_of(PLAIN_REQUEST, folder)
    bundle = open_bundle(folder)
    file.rename(tmp_path / "moved")
    if kind == "link":
        file.symlink_to(tmp_path / "moved")
    elif kind == "fifo":
        os.mkfifo(file)
    else:
        with file.open("wb") as stream:
            stream.truncate(2**40)
    message = {"link": "is a symbolic link", "fifo": "is no regular file", "terabyte": "has 1099511627776 bytes"}[kind]
    with pytest.raises(CompileError, match=message):
        (open_bundle(folder) if which == "manifest" else bundle).program(PLAIN_REQUEST)

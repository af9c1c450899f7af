"""A signed bundle is taken from who signed it, whatever was changed since; by a key of the library cryptography."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.compile.sources import PLAIN_REQUEST

from cakegen.compile import bundle as bundle_module
from cakegen.compile import cached_cubin, signature
from cakegen.compile.bundle import KEY_VARIABLE, find_bundle, open_bundle, write_bundle
from cakegen.errors import CompileError

ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519", reason="signs bundles")
serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization", reason="reads keys")


@pytest.fixture(autouse=True)
def nothing_opened() -> None:
    bundle_module._opened.cache_clear()


def make_keys(folder: Path, name: str, kind: object = ed25519.Ed25519PrivateKey) -> tuple[Path, Path]:
    """PEM files of a private key and of its public one."""
    key = kind.generate()  # type: ignore[attr-defined]
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return make_keys(tmp_path, "ours")


@pytest.fixture
def folder(tmp_path: Path, keys: tuple[Path, Path]) -> Path:
    """A signed bundle of one program."""
    out = tmp_path / "bundle"
    write_bundle(out, "small", [(PLAIN_REQUEST, cached_cubin(PLAIN_REQUEST), ["decode:a"])], keys[0])
    return out


def test_signed_bundle_is_taken_with_its_key_and_without_one(folder: Path, keys: tuple[Path, Path]) -> None:
    assert open_bundle(folder, keys[1]).program(PLAIN_REQUEST).cubin
    assert open_bundle(folder).program(PLAIN_REQUEST).cubin


@pytest.mark.parametrize("place", ["export", "compiler", "sha256", "keys", "more"])
def test_whatever_is_changed_in_the_manifest_is_seen(folder: Path, keys: tuple[Path, Path], place: str) -> None:
    manifest = folder / "bundle.json"
    values = json.loads(manifest.read_text())
    (line,) = values["programs"].values()
    if place == "sha256":
        line[place] = "0" * 64
    elif place == "keys":
        line[place] = ["decode:b"]
    else:
        values[place] = "other"
    manifest.write_text(json.dumps(values))
    with pytest.raises(CompileError, match=r"the signature is not that of .*ours\.pub over what the manifest says"):
        open_bundle(folder, keys[1])


def test_layout_of_the_manifest_is_no_part_of_what_is_signed(folder: Path, keys: tuple[Path, Path]) -> None:
    values = json.loads((folder / "bundle.json").read_text())
    (folder / "bundle.json").write_text(json.dumps(dict(reversed(values.items()))))
    assert open_bundle(folder, keys[1])


def test_bundle_of_another_key_or_of_none_is_refused(folder: Path, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    _, other = make_keys(tmp_path, "theirs")
    with pytest.raises(CompileError, match=r"not that of .*theirs\.pub .*another key signed it"):
        open_bundle(folder, other)
    write_bundle(folder, "small", [(PLAIN_REQUEST, cached_cubin(PLAIN_REQUEST), ["decode:a"])])
    with pytest.raises(CompileError, match=r"not signed, and .*ours\.pub must have signed it; `cakegen bundle --sign"):
        open_bundle(folder, keys[1])


@pytest.mark.parametrize("odd", [None, 3, "", "xy", "00" * 64, "00" * 63])
def test_odd_signature_is_refused(folder: Path, keys: tuple[Path, Path], odd: object) -> None:
    values = json.loads((folder / "bundle.json").read_text())
    (folder / "bundle.json").write_text(json.dumps(values | {"signature": odd}))
    with pytest.raises(CompileError, match=r"not signed|the signature is not that"):
        open_bundle(folder, keys[1])


def test_runtime_asks_for_the_key_that_the_environment_names(
    folder: Path, tmp_path: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, str(keys[1]))
    assert find_bundle("small", folder) is not None
    bundle_module._opened.cache_clear()
    monkeypatch.setenv(KEY_VARIABLE, str(make_keys(tmp_path, "theirs")[1]))
    with pytest.raises(CompileError, match="another key signed it"):
        find_bundle("small", folder)


def test_bundle_that_is_made_again_while_it_is_open_is_asked_for_its_signature_too(
    folder: Path, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    opened = open_bundle(folder, keys[1])
    for file in folder.glob("program-*"):
        file.unlink()
    theirs, _ = make_keys(tmp_path, "theirs")
    write_bundle(folder, "small", [(PLAIN_REQUEST, cached_cubin(PLAIN_REQUEST), ["decode:b"])], theirs)
    for file in folder.glob("program-*"):
        file.unlink()
    with pytest.raises(CompileError, match="another key signed it"):
        opened.program(PLAIN_REQUEST)


def test_key_that_is_none_is_refused_before_anything_is_made(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    x25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.x25519")
    odd_private, odd_public = make_keys(tmp_path, "odd", x25519.X25519PrivateKey)
    program = [(PLAIN_REQUEST, cached_cubin(PLAIN_REQUEST), ["a"])]
    for key, message in (
        (keys[1], "no private key without a passphrase"),
        (odd_private, "a key of X25519PrivateKey; needs Ed25519"),
        (tmp_path / "none.pem", "No such file or directory; name a PEM file of an Ed25519 key"),
    ):
        with pytest.raises(CompileError, match=message):
            write_bundle(tmp_path / "out", "small", program, key)
    assert not (tmp_path / "out").exists()
    for key, message in ((keys[0], "no public key"), (odd_public, "a key of X25519PublicKey; needs Ed25519")):
        with pytest.raises(CompileError, match=message):
            signature.verify(b"", "", key)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, keys: tuple[Path, Path]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    with pytest.raises(CompileError, match=r"need the package cryptography .* install cakegen\[signing\]"):
        signature.sign(b"", keys[0])

"""Signs what a bundle says of itself, and verifies it: Ed25519, by the package cryptography. Imports errors only.

A key is a PEM file, as `openssl genpkey -algorithm ed25519` writes it; without a passphrase, since no terminal may be
there to ask.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cakegen.errors import CompileError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_SIGNATURE_BYTES = 64
_MOST_KEY_BYTES = 16_384


def sign(content: bytes, key_file: Path) -> str:
    """The signature of some bytes, as 128 hex digits.

    Raises
    ------
    CompileError
        The package is not installed, or the file holds no private key of Ed25519.
    """
    return _private_key(key_file).sign(content).hex()


def verify(content: bytes, signature: str, key_file: Path) -> bool:
    """Whether a signature is of these bytes and of this key.

    Raises
    ------
    CompileError
        The package is not installed, or the file holds no public key of Ed25519.
    """
    exceptions = _package("cryptography.exceptions")
    key = _public_key(key_file)
    try:
        raw = bytes.fromhex(signature)
        key.verify(raw, content)
    except (ValueError, exceptions.InvalidSignature):
        return False
    return len(raw) == _SIGNATURE_BYTES


def _private_key(file: Path) -> Ed25519PrivateKey:
    ed25519, serialization = _package("ed25519"), _package("serialization")
    try:
        key = serialization.load_pem_private_key(_content(file), password=None)
    except (ValueError, TypeError) as error:
        raise CompileError(f"{file}: no private key without a passphrase ({error}). {_how_to_make(file)}") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise CompileError(f"{file}: a key of {type(key).__name__}; needs Ed25519. {_how_to_make(file)}")
    found: Ed25519PrivateKey = key
    return found


def _public_key(file: Path) -> Ed25519PublicKey:
    ed25519, serialization = _package("ed25519"), _package("serialization")
    try:
        key = serialization.load_pem_public_key(_content(file))
    except ValueError as error:
        raise CompileError(f"{file}: no public key ({error}). {_how_to_make(file)}") from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise CompileError(f"{file}: a key of {type(key).__name__}; needs Ed25519. {_how_to_make(file)}")
    found: Ed25519PublicKey = key
    return found


def _content(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(_MOST_KEY_BYTES)
    except OSError as error:
        raise CompileError(f"{file}: {error.strerror}; name a PEM file of an Ed25519 key") from None


def _how_to_make(file: Path) -> str:
    return (
        f"Got {file.name}; `openssl genpkey -algorithm ed25519 -out KEY` makes a private key, `openssl pkey -in KEY "
        "-pubout -out PUBLIC` the public one of it."
    )


def _package(name: str) -> Any:
    from importlib import import_module

    places = {
        "ed25519": "cryptography.hazmat.primitives.asymmetric.ed25519",
        "serialization": "cryptography.hazmat.primitives.serialization",
    }
    try:
        return import_module(places.get(name, name))
    except ImportError as error:
        raise CompileError(
            f"signatures of bundles need the package cryptography ({error}); install cakegen[signing]"
        ) from None

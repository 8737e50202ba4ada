"""Sign bytes with a private key, and verify signatures with public keys.

Keys are Ed25519 or ECDSA P-256, in files of OpenSSH or PEM, as `ssh-keygen` and `openssl` write
them. The algorithm is that of the verifier's key, never what a signature states of itself.
The work is done by the package cryptography, the extra `sign`.
"""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Annotated, Any

from msgspec import Meta

from ckptctl.errors import MissingExtra, UsageError
from ckptctl.model import Hex

ED25519 = "ed25519"
ECDSA = "ecdsa-p256-sha256"

PASSWORD = "CKPTCTL_SIGN_PASSWORD"  # noqa: S105 - its name
"""The environment variable with the password of the private key."""

_EXPECTED = "expected is Ed25519 or ECDSA P-256"
_MAKES_ONE = "ssh-keygen -t ed25519"
_Stated = Annotated[str, Meta(pattern="^[!-~]{1,64}$")]


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature, and what it states of itself: only `verifies` shows whether that is true."""

    algorithm: _Stated
    """`ed25519`, or `ecdsa-p256-sha256`."""
    signer: _Stated
    """The fingerprint of the public key, as `ssh-keygen -l` prints it: `SHA256:...`."""
    value: Annotated[Hex, Meta(max_length=256)]
    """The signature: 64 bytes for Ed25519, else in DER."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key that was read from a file."""

    algorithm: str
    fingerprint: str
    line: bytes
    """The key as OpenSSH writes it."""
    key: Any
    """The key of the package cryptography."""

    def verifies(self, signature: Signature, data: bytes) -> bool:
        """Whether the signature is of these bytes, by the private key of this public key."""
        from cryptography.exceptions import InvalidSignature

        if (signature.algorithm, signature.signer) != (self.algorithm, self.fingerprint):
            return False
        try:
            self.key.verify(bytes.fromhex(signature.value), data, *_parameters(self.algorithm))
        except (InvalidSignature, ValueError):
            return False
        return True


@cache
def public_key(data: bytes, where: str = "the public key") -> PublicKey:
    """The public key that a file holds; `where` is its name in messages.

    Raises `UsageError` for anything but one public key of a known kind, and where the package is
    missing.
    """
    serialization, data = _serialization(), data.strip()
    is_pem = data.startswith(b"-----BEGIN")
    load = serialization.load_pem_public_key if is_pem else serialization.load_ssh_public_key

    def load_only() -> Any:
        # Either loader leaves out what comes behind the first key, and loads the key of a
        # certificate without verifying that.
        end = data.partition(b"-----END")[2] if is_pem else data
        if b"\n" in end or b"-cert-v01@" in data.partition(b" ")[0]:
            raise ValueError
        return load(data)

    return _public(_loaded(load_only, where, "public"), where)


def private_key(data: bytes, password: bytes | None, where: str = "the private key") -> bytes:
    """The private key that a file holds, in PEM without its password; see `public_key`."""
    serialization = _serialization()
    is_openssh = b"OPENSSH PRIVATE KEY" in data
    load = serialization.load_ssh_private_key if is_openssh else serialization.load_pem_private_key
    try:
        key = _loaded(lambda: load(data, password), where, "private")
    except TypeError as error:  # a password is missing, or there is one and the key has none
        if password is None:
            raise UsageError(f"{where} is encrypted, and {PASSWORD} is not set") from error
        key = _loaded(lambda: load(data, None), where, "private")
    _public(key.public_key(), where)
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem: bytes = key.private_bytes(serialization.Encoding.PEM, *form)
    return pem


def public_key_of(private: bytes) -> PublicKey:
    """The public key of a private key in PEM; see `private_key`."""
    key = _serialization().load_pem_private_key(private, None)
    return _public(key.public_key(), "the private key")


def sign(data: bytes, private: bytes) -> Signature:
    """Sign bytes with a private key in PEM; see `private_key`."""
    key, public = _serialization().load_pem_private_key(private, None), public_key_of(private)
    value: bytes = key.sign(data, *_parameters(public.algorithm))
    return Signature(public.algorithm, public.fingerprint, value.hex())


def _serialization() -> ModuleType:
    if find_spec("cryptography") is None:
        raise MissingExtra(
            "signatures need the package cryptography, which is not installed",
            next_command="pip install 'ckptctl[sign]'",
        )
    from cryptography.hazmat.primitives import serialization

    return serialization


def _loaded(load: Callable[[], Any], where: str, kind: str) -> Any:
    """What a loader returns. Its own messages are not shown: they may quote the file."""
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return load()
    except (ValueError, UnsupportedAlgorithm) as error:
        missing = "bcrypt" in str(error) and find_spec("bcrypt") is None
        or_why = ", or its password is another" * (kind == "private")
        raise UsageError(
            f"{where} is encrypted, and reading it needs the package bcrypt"
            if missing
            else f"{where} is not one {kind} key of OpenSSH or PEM{or_why}; {_EXPECTED}",
            next_command="pip install 'ckptctl[sign]'" if missing else _MAKES_ONE,
        ) from error


def _public(key: Any, where: str) -> PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if isinstance(key, Ed25519PublicKey):
        algorithm = ED25519
    elif isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1):
        algorithm = ECDSA
    else:
        raise UsageError(f"{where} is a key of another kind; {_EXPECTED}", next_command=_MAKES_ONE)
    serialization = _serialization()
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    line = key.public_bytes(*form)
    digest = hashlib.sha256(binascii.a2b_base64(line.split()[1])).digest()
    fingerprint = binascii.b2a_base64(digest, newline=False).decode().rstrip("=")
    return PublicKey(algorithm, f"SHA256:{fingerprint}", line, key)


def _parameters(algorithm: str) -> tuple[Any, ...]:
    """The arguments of `sign` and `verify` beside the bytes."""
    if algorithm == ED25519:
        return ()
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA as SIGNED_BY_ECDSA
    from cryptography.hazmat.primitives.hashes import SHA256

    return (SIGNED_BY_ECDSA(SHA256()),)

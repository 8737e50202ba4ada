"""Read and write seals.

A seal, `.ckptctl/seal.json` in a step, records what the step was when it was proven
whole: every file with its size and digests, and whose files they are: step
number, metadata, save ids, world size, train state. It is read strictly;
`inspection.seals` compares the step with it.

With a key the digests are SHA-256 and the seal bears an HMAC-SHA-256 over all of
it, so that nobody without the key can make one. A signature is over the same bytes: the
canonical JSON of all fields but `digest`, `hmac` and `signature`.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from ckptctl.errors import OwnFileUnreadable, OwnFileUnsupported
from ckptctl.formats.digests import BLOCK_BYTES, Algorithm, Digests, n_blocks
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.formats.own.files import Fields, canonical, check_digest, digest_of, document_of, typed
from ckptctl.model import Count, Hex, Positive, Sha256, StepNumber, Time
from ckptctl.signatures import Signature, public_key, sign

SEAL = f"{OWN_FOLDER}/seal.json"
"""Where the seal lies in its step."""

SCHEMA = "ckptctl.seal/1"

MAX_SEAL_BYTES = 32 << 20
"""Larger seals are not read: 200,000 files, or 30 TB, fit; half as many of an object store."""

_MAX_OBJECTS = 1_000_000

MAX_SEQUENCE = 2**53
"""The last place in the order of seals."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The step that was sealed."""

    number: StepNumber
    name: str
    """The name of the step's folder."""
    layout: str
    """The framework whose layout the step has."""
    level: str
    """The level at which the step was inspected before it was sealed."""
    metadata: Mapping[str, Sha256]
    """The metadata files by path, each with its SHA-256."""
    save_ids: tuple[str, ...] = ()
    """The ids that torch gave the save."""
    world_size: Count | None = None
    """How many ranks wrote the step, where that was known."""
    state: tuple[str, ...] = ()
    """The kinds of train state that it held."""
    tokens: Count | None = None
    """The tokens seen, where they were read."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What an object store kept of a file when it was sealed, to be asked for again later."""

    algorithm: str = ""
    """The algorithm of the checksum in small letters, such as `crc64nvme`; empty where the store
    kept none."""
    checksum: Hex = ""
    """The checksum of all bytes of the object; empty where the store kept none."""
    compared: bool = False
    """The checksum was computed of the sealed bytes as well; otherwise only the store reported
    it."""
    etag: str = ""
    """The ETag without quotes; empty where there is none."""
    version: str = ""
    """The object's version or generation; empty where the bucket keeps none."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The attempt that saved the step."""

    attempt: str
    """The name of the attempt."""
    resumed_from: Count | None = None
    """The step that it had resumed from; null where it began the run."""
    job: str = ""
    """The scheduler's job; empty where that is unknown."""
    node: str = ""
    """The machine of rank 0; empty where that is unknown."""


@dataclass(frozen=True, slots=True)
class EarlierSeal:
    """A seal that was in the root when another one was made."""

    name: str
    """The name of its step's folder."""
    number: StepNumber
    """The number of its step."""
    sequence: Positive
    """Its place in the order of the root's seals."""
    seal: Sha256
    """Its digest."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """The decision that a sealed step of another root is of this one."""

    run: Hex
    """The run that the step had been sealed for; empty where that is unknown."""
    seal: Sha256
    """The digest of the seal that it had there."""
    by: str
    """Who decided it."""
    at: Time
    """When."""
    reason: str
    """Why, in that person's words."""


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A sealed file."""

    path: str
    """The path relative to the step."""
    size: Count
    """Its size in bytes."""
    written_ms: int | None
    """When it was written by the storage's clock, in milliseconds since 1970, below 0 before that;
    null where the storage keeps no times. A copy may bear another time."""
    digests: Digests
    """The digests of its bytes."""
    stored: Stored | None = None
    """What an object store kept of the file; null where it keeps nothing."""


@dataclass(frozen=True, slots=True)
class Seal:
    """A seal; `run`, `sequence`, `earlier` bind it to a root, see `inspection.seals`."""

    algorithm: Algorithm
    """The algorithm of the digests."""
    step: Identity
    """The step that was sealed."""
    files: tuple[SealedFile, ...]
    """Every file of the step, sorted by path."""
    sealed_at: Time
    """When the seal was made."""
    tool: str
    """The program that made it, with its version."""
    hmac: Sha256 | None = None
    """HMAC-SHA-256 of the same bytes as the digest; null without a key."""
    origin: Origin | None = None
    """The attempt that saved the step; null where `ckptctl.train` did not."""
    run: Hex = ""
    """The id of the run, as the root's `.ckptctl/root.json` records it; empty where it is
    unknown."""
    sequence: Annotated[int, Meta(ge=1, le=MAX_SEQUENCE)] = 1
    """The place of the seal in the order of the root's seals; two may share one."""
    earlier: tuple[EarlierSeal, ...] = ()
    """The seals that were in the root when this one was made, sorted by name."""
    adopted: Adoption | None = None
    """The decision that the step is of this root; null where it was sealed for this one."""
    block_bytes: Annotated[int, Meta(ge=BLOCK_BYTES, le=BLOCK_BYTES)] = BLOCK_BYTES
    """The size of a block in bytes."""
    signature: Signature | None = None
    """The signature of the same bytes as the digest; null without one."""

    @property
    def n_bytes(self) -> int:
        """Size of all sealed files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def kind(self) -> str:
        """The algorithm, and what else: `xxh3-128`, `sha256 with a key and a signature`."""
        proofs = {"a key": self.hmac, "a signature": self.signature}
        held = " and ".join(name for name, proof in proofs.items() if proof is not None)
        return f"{self.algorithm.value} with {held}" if held else self.algorithm.value


def seal_bytes(seal: Seal, key: bytes | None, signing_key: bytes | None = None) -> bytes:
    """The seal as it is stored.

    It has an HMAC and a signature by these keys, and not those of `seal`.
    """
    fields = _signed_fields(seal)
    signature = None if signing_key is None else sign(canonical(fields), signing_key)
    mac = None if key is None else _mac(fields, key)
    own = {"digest": digest_of(fields), "hmac": mac, "signature": msgspec.to_builtins(signature)}
    return canonical({**fields, **own}) + b"\n"


def seal_digest(seal: Seal) -> str:
    """The SHA-256 by which other seals name this one."""
    return digest_of(_signed_fields(seal))


def is_authentic(seal: Seal, key: bytes) -> bool:
    """Whether the seal was made with this key."""
    return seal.hmac is not None and hmac.compare_digest(seal.hmac, _mac(_signed_fields(seal), key))


def is_signed(seal: Seal, public_keys: Collection[bytes]) -> bool:
    """Whether the seal has a signature that one of these keys verifies."""
    signature = seal.signature
    if signature is None:
        return False
    signed = canonical(_signed_fields(seal))
    return any(public_key(key).verifies(signature, signed) for key in public_keys)


def parse_seal(data: bytes) -> Seal:
    """The seal that a file holds.

    Raises `OwnFileUnreadable` for one that is damaged or makes no sense, and
    `OwnFileUnsupported` for one that a newer ckptctl made.
    """
    fields = document_of(data, SCHEMA, max_objects=_MAX_OBJECTS)
    _check_supported(fields)
    seal = typed(Seal, fields)
    check_digest(fields, _signed_fields(seal))
    paths = [file.path for file in seal.files]
    if paths != sorted({*paths}):
        raise OwnFileUnreadable("its files are not in order, or one is there twice")
    has_proof = seal.hmac is not None or seal.signature is not None
    if has_proof and seal.algorithm is not Algorithm.SHA256:
        raise OwnFileUnreadable(
            f"digests by {seal.algorithm.value} have neither HMAC nor signature: other bytes with "
            "an equal digest can be made"
        )
    for file in seal.files:
        _check_digests(file, seal.algorithm)
    return seal


def _check_supported(fields: Fields) -> None:
    """Raise `OwnFileUnsupported` for digests that this ckptctl cannot compare."""
    algorithm = fields.get("algorithm")
    if algorithm not in [known.value for known in Algorithm]:
        raise OwnFileUnsupported(
            f"its digests are by {str(algorithm)[:64]!r}; this ckptctl knows "
            f"{' and '.join(known.value for known in Algorithm)}"
        )
    if fields.get("block_bytes") != BLOCK_BYTES:
        raise OwnFileUnsupported(f"its blocks are not of {BLOCK_BYTES:,} bytes")


def _signed_fields(seal: Seal) -> Fields:
    """What digest, HMAC and signature are computed of."""
    fields: Fields = {**msgspec.to_builtins(seal), "schema": SCHEMA}
    del fields["hmac"], fields["signature"]
    return fields


def _mac(fields: Fields, key: bytes) -> str:
    return hmac.new(key, canonical(fields), "sha256").hexdigest()


def _check_digests(file: SealedFile, algorithm: Algorithm) -> None:
    blocks = file.digests.blocks
    if any(len(digest) != algorithm.n_digits for digest in (file.digests.whole, *blocks)):
        raise OwnFileUnreadable(
            f"a digest of {file.path} is not {algorithm.n_digits} hexadecimal digits"
        )
    expected = n_blocks(file.size) if file.size > BLOCK_BYTES else 0
    if len(blocks) != expected:
        raise OwnFileUnreadable(
            f"{file.path} has {file.size:,} bytes and {len(blocks):,} blocks, not {expected:,}"
        )

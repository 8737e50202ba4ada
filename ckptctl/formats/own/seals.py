"""Read and write seals.

A seal, `.ckptctl/seal.json` in a step, says what the step was when it was proven
whole: every file with its size and digests, and whose files they are: step
number, metadata, save ids, world size, train state. It is read strictly;
whether the step still is what the seal says is the question of `checks.seals`.

With a key the digests are SHA-256 and the seal bears an HMAC-SHA-256 over all of
it, so that nobody without the key can make one.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ckptctl.errors import OwnFileUnreadable, OwnFileUnsupported
from ckptctl.formats.digests import BLOCK_BYTES, Algorithm, Digests, n_blocks
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.formats.own.files import (
    Fields,
    canonical,
    count_in,
    digest_of,
    flag_in,
    hex_in,
    list_in,
    object_in,
    optional_count_in,
    read_back,
    same_names,
    text_in,
    texts_in,
)
from ckptctl.model import Time

SEAL = f"{OWN_FOLDER}/seal.json"
"""Where the seal lies in its step."""

SCHEMA = "ckptctl.seal/1"

MAX_SEAL_BYTES = 32 << 20
"""Larger seals are not read: 200,000 files, or 30 TB, fit; half as many of an object store."""

_MAX_OBJECTS = 1_000_000
_SHA256_DIGITS = 64


@dataclass(frozen=True, slots=True)
class Stored:
    """What an object store kept of a file when it was sealed, to be asked for again later."""

    algorithm: str = ""
    """Of the checksum, such as `crc64nvme`; empty where the store kept none."""
    checksum: str = ""
    """Of all bytes of the object; empty where the store kept none."""
    compared: bool = False
    """The bytes that were sealed come to it, too; otherwise it is the word of the store alone."""
    etag: str = ""
    """Without quotes; empty where there is none."""
    version: str = ""
    """The object's version or generation; empty where the bucket keeps none."""


@dataclass(frozen=True, slots=True)
class SealedFile:
    """One file as it was sealed: its path in the step, its size in bytes, its digests."""

    path: str
    """Relative to the step."""
    size: int
    """Bytes."""
    written_ms: int | None
    """When it was written by the storage's clock, in milliseconds since 1970."""
    digests: Digests
    stored: Stored | None = None
    """What an object store kept of it when it was sealed, where it keeps anything."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which step was sealed."""

    number: int | None
    """The training step; null where the folder's name gives none."""
    name: str
    """The step's folder."""
    layout: str
    """Whose layout the step has."""
    level: str
    """How deep the look was."""
    metadata: tuple[tuple[str, str], ...]
    """The metadata files by path, each with its SHA-256."""
    save_ids: tuple[str, ...] = ()
    """The ids that torch gave the save."""
    world_size: int | None = None
    """How many ranks wrote the step, where that was known."""
    state: tuple[str, ...] = ()
    """The kinds of train state that it held."""
    tokens: int | None = None
    """The tokens seen, where they were read."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a step comes from: the attempt that saved it, and the step it had resumed from."""

    attempt: str
    """The name of the attempt."""
    resumed_from: int | None = None
    """The step that it had resumed from; null where it began the run."""
    job: str = ""
    """The scheduler's job; empty where nothing says it."""
    node: str = ""
    """The machine of rank 0."""


@dataclass(frozen=True, slots=True)
class Seal:
    """A seal; `sealed_at` is RFC 3339, `files` are sorted by path."""

    algorithm: Algorithm
    """How bytes are digested."""
    step: Identity
    """Which step was sealed."""
    files: tuple[SealedFile, ...]
    """Every file of the step, sorted by path."""
    sealed_at: Time
    """When."""
    tool: str
    """What made it."""
    hmac: str | None = None
    """HMAC-SHA-256 of the same bytes, where there is a key."""
    origin: Origin | None = None
    """Which attempt saved the step, where ckptctl.train did."""

    @property
    def n_bytes(self) -> int:
        """Size of all sealed files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def kind(self) -> str:
        """The algorithm, and that there is a key: `xxh3-128`, `sha256 with a key`."""
        return self.algorithm.value + (" with a key" if self.hmac else "")


def seal_bytes(seal: Seal, key: bytes | None) -> bytes:
    """The seal as it is stored; with a key, it bears an HMAC whatever `seal.hmac` says."""
    fields = _fields_of(seal)
    document: Fields = {**fields, "digest": digest_of(fields)}
    if key is not None:
        document["hmac"] = _hmac(fields, key)
    return canonical(document) + b"\n"


def is_authentic(seal: Seal, key: bytes) -> bool:
    """Whether the seal was made with this key."""
    return seal.hmac is not None and hmac.compare_digest(seal.hmac, _hmac(_fields_of(seal), key))


def parse_seal(data: bytes) -> Seal:
    """The seal that a file holds.

    Raises `OwnFileUnreadable` for one that is damaged or makes no sense, and
    `OwnFileUnsupported` for one that a newer ckptctl made.
    """
    fields, beside = read_back(
        data,
        SCHEMA,
        _SEAL_FIELDS,
        optional=("origin",),
        beside=("hmac",),
        max_objects=_MAX_OBJECTS,
    )
    algorithm = _algorithm(fields["algorithm"])
    if fields["block_bytes"] != BLOCK_BYTES:
        raise OwnFileUnsupported(f"its blocks are not of {BLOCK_BYTES:,} bytes")
    files = tuple(_file(item, algorithm) for item in list_in(fields["files"], "files"))
    if [file.path for file in files] != sorted({file.path for file in files}):
        raise OwnFileUnreadable("its files are not in order, or one is there twice")
    has_hmac = "hmac" in beside
    if has_hmac != (algorithm is Algorithm.SHA256):
        raise OwnFileUnreadable(
            f"digests by {algorithm.value} go {'without' if has_hmac else 'with'} an HMAC"
        )
    return Seal(
        algorithm,
        _identity(object_in(fields["step"], "step")),
        files,
        text_in(fields["sealed_at"], "sealed_at"),
        text_in(fields["tool"], "tool"),
        hex_in(beside["hmac"], "hmac", _SHA256_DIGITS) if has_hmac else None,
        _origin(object_in(fields["origin"], "origin")) if "origin" in fields else None,
    )


_SEAL_FIELDS = ("schema", "tool", "sealed_at", "algorithm", "block_bytes", "step", "files")
_STEP_FIELDS = (
    "number",
    "name",
    "layout",
    "level",
    "metadata",
    "save_ids",
    "world_size",
    "state",
    "tokens",
)
_FILE_FIELDS = ("path", "size", "written_ms", "digest", "blocks")


def _fields_of(seal: Seal) -> Fields:
    step = seal.step
    origin: Fields = {} if seal.origin is None else {"origin": asdict(seal.origin)}
    return {
        **origin,
        "schema": SCHEMA,
        "tool": seal.tool,
        "sealed_at": seal.sealed_at,
        "algorithm": seal.algorithm.value,
        "block_bytes": BLOCK_BYTES,
        "step": {
            "number": step.number,
            "name": step.name,
            "layout": step.layout,
            "level": step.level,
            "metadata": dict(step.metadata),
            "save_ids": list(step.save_ids),
            "world_size": step.world_size,
            "state": list(step.state),
            "tokens": step.tokens,
        },
        "files": [_fields_of_file(file) for file in seal.files],
    }


def _fields_of_file(file: SealedFile) -> Fields:
    stored: Fields = {} if file.stored is None else {"stored": asdict(file.stored)}
    return {
        **stored,
        "path": file.path,
        "size": file.size,
        "written_ms": file.written_ms,
        "digest": file.digests.whole,
        "blocks": list(file.digests.blocks),
    }


def _hmac(fields: Mapping[str, object], key: bytes) -> str:
    return hmac.new(key, canonical(fields), hashlib.sha256).hexdigest()


def _algorithm(value: object) -> Algorithm:
    try:
        return Algorithm(value)
    except ValueError:
        raise OwnFileUnsupported(
            f"its digests are by {str(value)[:64]!r}; this ckptctl knows "
            f"{' and '.join(known.value for known in Algorithm)}"
        ) from None


def _identity(step: Fields) -> Identity:
    same_names(step, _STEP_FIELDS, "its step")
    metadata = object_in(step["metadata"], "step.metadata")
    return Identity(
        number=optional_count_in(step["number"], "step.number"),
        name=text_in(step["name"], "step.name"),
        layout=text_in(step["layout"], "step.layout"),
        level=text_in(step["level"], "step.level"),
        metadata=tuple(
            (path, hex_in(digest, "step.metadata", _SHA256_DIGITS))
            for path, digest in sorted(metadata.items())
        ),
        save_ids=texts_in(step["save_ids"], "step.save_ids"),
        world_size=optional_count_in(step["world_size"], "step.world_size"),
        state=texts_in(step["state"], "step.state"),
        tokens=optional_count_in(step["tokens"], "step.tokens"),
    )


_ORIGIN_FIELDS = ("attempt", "resumed_from", "job", "node")


def _origin(origin: Fields) -> Origin:
    same_names(origin, _ORIGIN_FIELDS, "its origin")
    return Origin(
        text_in(origin["attempt"], "origin.attempt"),
        optional_count_in(origin["resumed_from"], "origin.resumed_from"),
        text_in(origin["job"], "origin.job"),
        text_in(origin["node"], "origin.node"),
    )


def _file(item: object, algorithm: Algorithm) -> SealedFile:
    file = object_in(item, "a file")
    same_names(file, (*_FILE_FIELDS, *(["stored"] if "stored" in file else [])), "a file")
    path = text_in(file["path"], "a path")
    size = count_in(file["size"], f"the size of {path}")
    digests = Digests(
        hex_in(file["digest"], f"the digest of {path}", algorithm.n_digits),
        tuple(
            hex_in(block, f"a block of {path}", algorithm.n_digits)
            for block in list_in(file["blocks"], f"the blocks of {path}")
        ),
    )
    expected = n_blocks(size) if size > BLOCK_BYTES else 0
    if len(digests.blocks) != expected:
        raise OwnFileUnreadable(
            f"{path} has {size:,} bytes and {len(digests.blocks):,} blocks, not {expected:,}"
        )
    written = optional_count_in(file["written_ms"], f"the time of {path}")
    stored = None
    if "stored" in file:
        stored = _stored(object_in(file["stored"], f"what is stored of {path}"))
    return SealedFile(path, size, written, digests, stored)


_STORED_FIELDS = ("algorithm", "checksum", "compared", "etag", "version")


def _stored(stored: Fields) -> Stored:
    same_names(stored, _STORED_FIELDS, "what is stored of a file")
    checksum = text_in(stored["checksum"], "a stored checksum")
    return Stored(
        text_in(stored["algorithm"], "the algorithm of a stored checksum"),
        hex_in(checksum, "a stored checksum", len(checksum)),
        flag_in(stored["compared"], "whether a stored checksum was compared"),
        text_in(stored["etag"], "an ETag"),
        text_in(stored["version"], "a version"),
    )

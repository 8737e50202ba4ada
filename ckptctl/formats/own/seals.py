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

SEAL = f"{OWN_FOLDER}/seal.json"
"""Where the seal lies in its step."""

SCHEMA = "ckptctl.seal/1"

MAX_SEAL_BYTES = 32 << 20
"""Larger seals are not read: 200,000 files, or 30 TB, fit; half as many of an object store."""

_MAX_OBJECTS = 1_000_000
_SHA256_DIGITS = 64


@dataclass(frozen=True, slots=True)
class Stored:
    """What an object store kept of a file when it was sealed, to be asked for again later.

    `checksum` is of all bytes of the object, in hex, empty where the store kept none;
    `compared` that it is that of the bytes that were sealed, too, else it is the word of
    the store alone. `etag` and `version` tell one write of the object from another.
    """

    algorithm: str = ""
    checksum: str = ""
    compared: bool = False
    etag: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class SealedFile:
    """One file as it was sealed: its path in the step, its size in bytes, its digests.

    `written_ms` is when it was written by the storage's clock, in milliseconds since
    1970, None where the storage keeps no times. A copy may bear another time. `stored` is
    there where the storage keeps anything of its own.
    """

    path: str
    size: int
    written_ms: int | None
    digests: Digests
    stored: Stored | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """Which step was sealed.

    `metadata` are the metadata files by path, each with its SHA-256; `level` is how
    deep the step was looked at before it was sealed; `state` are the kinds of train
    state that it held, `tokens` how many it had seen.
    """

    number: int | None
    name: str
    layout: str
    level: str
    metadata: tuple[tuple[str, str], ...]
    save_ids: tuple[str, ...] = ()
    world_size: int | None = None
    state: tuple[str, ...] = ()
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a step comes from: the attempt that saved it, and the step it had resumed from.

    `resumed_from` is None for an attempt that began the run. `job` and `node` are the
    scheduler's job and the machine of rank 0, empty where nothing says them.
    """

    attempt: str
    resumed_from: int | None = None
    job: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class Seal:
    """A seal; `sealed_at` is RFC 3339, `files` are sorted by path.

    `hmac` is there where it was made with a key. `origin` says which attempt saved the
    step, where one of `ckptctl.train` did.
    """

    algorithm: Algorithm
    step: Identity
    files: tuple[SealedFile, ...]
    sealed_at: str
    tool: str
    hmac: str | None = None
    origin: Origin | None = None

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

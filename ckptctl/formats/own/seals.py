"""Read and write seals.

A seal, `.ckptctl/seal.json` in a step, records what the step was when it was proven
whole: every file with its size and digests, and whose files they are: step
number, metadata, save ids, world size, train state. It is read strictly;
`inspection.seals` compares the step with it.

With a key the digests are SHA-256 and the seal bears an HMAC-SHA-256 over all of
it, so that nobody without the key can make one.
"""

# Annotations stay objects, so that reading a document evaluates no string as code.
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypedDict

from ckptctl.errors import OwnFileUnreadable, OwnFileUnsupported
from ckptctl.formats.digests import BLOCK_BYTES, Algorithm, Digests, n_blocks
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.formats.own.files import Fields, as_fields, canonical, digest_of, opened, typed
from ckptctl.model import Hex, Positive, Sha256, StepNumber, Time

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
    world_size: int | None = None
    """How many ranks wrote the step, where that was known."""
    state: tuple[str, ...] = ()
    """The kinds of train state that it held."""
    tokens: int | None = None
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
    resumed_from: int | None = None
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


class _SealedObject(TypedDict, total=False):
    stored: Stored
    """What an object store kept of the file, where it keeps anything."""


class SealedFileEntry(_SealedObject):
    """A sealed file."""

    path: str
    """The path relative to the step."""
    size: int
    """Its size in bytes."""
    written_ms: int | None
    """When it was written by the storage's clock, in milliseconds since 1970; null where the
    storage keeps no times."""
    digest: Hex
    """The digest of the whole file."""
    blocks: list[Hex]
    """The digest of each block, where there are several."""


class _SealOptions(TypedDict, total=False):
    hmac: Sha256
    """HMAC-SHA-256 of the same bytes as the digest, where there is a key."""
    origin: Origin
    """The attempt that saved the step, where `ckptctl.train` did."""
    adopted: Adoption
    """The decision that the step is of this root, where it was sealed for another one."""


class SealDocument(_SealOptions):
    """A seal."""

    tool: str
    """The program that made it, with its version."""
    sealed_at: Time
    """When the seal was made."""
    algorithm: Annotated[str, ("enum", tuple(each.value for each in Algorithm))]
    """The algorithm of the digests."""
    block_bytes: Annotated[int, ("const", BLOCK_BYTES)]
    """The size of a block in bytes."""
    run: Hex
    """The id of the run, as the root's `.ckptctl/root.json` records it; empty where it is
    unknown."""
    sequence: Positive
    """The place of the seal in the order of the root's seals; two may share one."""
    earlier: list[EarlierSeal]
    """The seals that were in the root when this one was made, sorted by name."""
    step: Identity
    """The step that was sealed."""
    files: list[SealedFileEntry]
    """Every file of the step, sorted by path."""


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
class Seal:
    """A seal; `sealed_at` is RFC 3339, `files` are sorted by path.

    `hmac` is there where it was made with a key. `origin` states which attempt saved the
    step, where one of `ckptctl.train` did. `run`, `sequence` and `earlier` bind it to its root,
    see `inspection.seals`; `adopted` is there where a person bound it to another one.
    """

    algorithm: Algorithm
    step: Identity
    files: tuple[SealedFile, ...]
    sealed_at: str
    tool: str
    hmac: str | None = None
    origin: Origin | None = None
    run: str = ""
    sequence: int = 1
    earlier: tuple[EarlierSeal, ...] = ()
    adopted: Adoption | None = None

    @property
    def n_bytes(self) -> int:
        """Size of all sealed files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def kind(self) -> str:
        """The algorithm, and that there is a key: `xxh3-128`, `sha256 with a key`."""
        return self.algorithm.value + (" with a key" if self.hmac else "")


def seal_bytes(seal: Seal, key: bytes | None) -> bytes:
    """The seal as it is stored; with a key, it has an HMAC of its own instead of `seal.hmac`."""
    fields = _fields_of(seal)
    document: Fields = {**fields, "digest": digest_of(fields)}
    if key is not None:
        document["hmac"] = _hmac(fields, key)
    return canonical(document) + b"\n"


def seal_digest(seal: Seal) -> str:
    """The SHA-256 by which other seals name this one."""
    return digest_of(_fields_of(seal))


def is_authentic(seal: Seal, key: bytes) -> bool:
    """Whether the seal was made with this key."""
    from hmac import compare_digest

    return seal.hmac is not None and compare_digest(seal.hmac, _hmac(_fields_of(seal), key))


def parse_seal(data: bytes) -> Seal:
    """The seal that a file holds.

    Raises `OwnFileUnreadable` for one that is damaged or makes no sense, and
    `OwnFileUnsupported` for one that a newer ckptctl made.
    """
    unchecked, beside = opened(data, SCHEMA, beside=("hmac",), max_objects=_MAX_OBJECTS)
    _check_supported(unchecked)
    fields = typed(SealDocument, {**unchecked, **beside})
    algorithm = Algorithm(fields["algorithm"])
    files = tuple(_file(each, algorithm) for each in fields["files"])
    if [file.path for file in files] != sorted({file.path for file in files}):
        raise OwnFileUnreadable("its files are not in order, or one is there twice")
    if fields["sequence"] > MAX_SEQUENCE:
        raise OwnFileUnreadable(f"its place among the seals is above {MAX_SEQUENCE:,}")
    signature = fields.get("hmac")
    if (signature is not None) != (algorithm is Algorithm.SHA256):
        raise OwnFileUnreadable(
            f"digests by {algorithm.value} go {'with' if signature is None else 'without'} an HMAC"
        )
    return Seal(
        algorithm,
        fields["step"],
        files,
        fields["sealed_at"],
        fields["tool"],
        signature,
        fields.get("origin"),
        fields["run"],
        fields["sequence"],
        tuple(fields["earlier"]),
        fields.get("adopted"),
    )


def _check_supported(fields: Fields) -> None:
    """Raise `OwnFileUnsupported` for digests that this ckptctl cannot compare."""
    algorithm = fields.get("algorithm", Algorithm.XXH3)
    if algorithm not in [known.value for known in Algorithm]:
        raise OwnFileUnsupported(
            f"its digests are by {str(algorithm)[:64]!r}; this ckptctl knows "
            f"{' and '.join(known.value for known in Algorithm)}"
        )
    if fields.get("block_bytes", BLOCK_BYTES) != BLOCK_BYTES:
        raise OwnFileUnsupported(f"its blocks are not of {BLOCK_BYTES:,} bytes")


def _fields_of(seal: Seal) -> Fields:
    origin: Fields = {} if seal.origin is None else {"origin": as_fields(seal.origin)}
    adopted: Fields = {} if seal.adopted is None else {"adopted": as_fields(seal.adopted)}
    return {
        **origin,
        **adopted,
        "run": seal.run,
        "sequence": seal.sequence,
        "earlier": [as_fields(one) for one in seal.earlier],
        "schema": SCHEMA,
        "tool": seal.tool,
        "sealed_at": seal.sealed_at,
        "algorithm": seal.algorithm.value,
        "block_bytes": BLOCK_BYTES,
        "step": as_fields(seal.step),
        "files": [_fields_of_file(file) for file in seal.files],
    }


def _fields_of_file(file: SealedFile) -> Fields:
    stored: Fields = {} if file.stored is None else {"stored": as_fields(file.stored)}
    return {
        **stored,
        "path": file.path,
        "size": file.size,
        "written_ms": file.written_ms,
        "digest": file.digests.whole,
        "blocks": list(file.digests.blocks),
    }


def _hmac(fields: Mapping[str, object], key: bytes) -> str:
    import hmac

    return hmac.new(key, canonical(fields), "sha256").hexdigest()


def _file(file: SealedFileEntry, algorithm: Algorithm) -> SealedFile:
    path, size, blocks = file["path"], file["size"], tuple(file["blocks"])
    for digest in (file["digest"], *blocks):
        if len(digest) != algorithm.n_digits:
            raise OwnFileUnreadable(
                f"a digest of {path} is not {algorithm.n_digits} hexadecimal digits"
            )
    expected = n_blocks(size) if size > BLOCK_BYTES else 0
    if len(blocks) != expected:
        raise OwnFileUnreadable(
            f"{path} has {size:,} bytes and {len(blocks):,} blocks, not {expected:,}"
        )
    digests = Digests(file["digest"], blocks)
    return SealedFile(path, size, file["written_ms"], digests, file.get("stored"))

"""The JSON documents that ckptctl keeps in roots and steps, as typed dictionaries.

They are read strictly: `files.read_back` accepts these fields and no others, with these
types. `ckptctl explain ckptctl.seal/1` prints the JSON Schema of one. Each has a field `schema`
more, and all but the resume report a `digest`: the SHA-256 of the document without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypedDict

from ckptctl.formats.digests import BLOCK_BYTES, Algorithm
from ckptctl.model import Hex, Positive, Sha256, Time


class SealedStep(TypedDict):
    """The step that was sealed."""

    number: int | None
    """The training step; null where the folder's name gives none."""
    name: str
    """The name of the step's folder."""
    layout: str
    """The framework whose layout the step has."""
    level: str
    """The level at which the step was inspected before it was sealed."""
    metadata: dict[str, Sha256]
    """The metadata files by path, each with its SHA-256."""
    save_ids: list[str]
    """The ids that torch gave the save."""
    world_size: int | None
    """How many ranks wrote the step, where that was known."""
    state: list[str]
    """The kinds of train state that it held."""
    tokens: int | None
    """The tokens seen, where they were read."""


class StoredObject(TypedDict):
    """What an object store kept of a file when it was sealed."""

    algorithm: str
    """The algorithm of the checksum in small letters, such as `crc64nvme`; empty where the store
    kept none."""
    checksum: Hex
    """The checksum of all bytes of the object; empty where the store kept none."""
    compared: bool
    """The checksum was computed of the sealed bytes as well; otherwise only the store reported
    it."""
    etag: str
    """The ETag without quotes; empty where there is none."""
    version: str
    """The object's version or generation; empty where the bucket keeps none."""


class _SealedObject(TypedDict, total=False):
    stored: StoredObject
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


class SavedBy(TypedDict):
    """The attempt that saved the step."""

    attempt: str
    """The name of the attempt."""
    resumed_from: int | None
    """The step that it had resumed from; null where it began the run."""
    job: str
    """The scheduler's job; empty where that is unknown."""
    node: str
    """The machine of rank 0; empty where that is unknown."""


class _SealOptions(TypedDict, total=False):
    hmac: Sha256
    """HMAC-SHA-256 of the same bytes as the digest, where there is a key."""
    origin: SavedBy
    """The attempt that saved the step, where `ckptctl.train` did."""


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
    step: SealedStep
    """The step that was sealed."""
    files: list[SealedFileEntry]
    """Every file of the step, sorted by path."""


class MarkedStep(TypedDict):
    """The step that a mark is on."""

    url: str
    """The address of the step at that time."""
    number: int | None
    """The training step; null where the folder's name gives none."""
    metadata: Sha256 | None
    """A SHA-256 over the metadata of the save that is meant; null where it could not be read."""


class MarkDocument(TypedDict):
    """A mark: a file, or a line of a file of marks."""

    id: str
    """Its identifier, unique among marks."""
    word: str
    """The kind of mark: `rejected`, `superseded`, `accepted`, `pinned` or `unpinned`."""
    by: str
    """Who made it."""
    at: Time
    """When it was made."""
    reason: str
    """Why; may be empty."""
    evidence: list[str]
    """Where the reasons can be read."""
    lifts: list[str]
    """The ids of the marks that it lifts."""
    step: MarkedStep
    """The step that it is on."""


class ProofDocument(TypedDict):
    """A note that all bytes of a step have been compared."""

    tool: str
    """The program that made it, with its version."""
    at: Time
    """When the bytes had been compared."""
    number: int | None
    """The training step; null where the folder's name gives none."""
    metadata: Sha256 | None
    """A SHA-256 over the metadata files by path, each with its SHA-256."""
    files: Sha256
    """A SHA-256 over the files by path, each with its size and write time."""


class _RootOptions(TypedDict, total=False):
    began_empty: bool
    """The root held no step when ckptctl first wrote to it."""
    usable_step: int | None
    """The first step that ckptctl found usable there; absent before that."""


class RootDocument(_RootOptions):
    """The sentinel of a root."""

    tool: str
    """The program that made it, with its version."""
    created_at: Time
    """When ckptctl first wrote to the root."""


class FenceDocument(TypedDict):
    """A token: the highest number holds the root."""

    number: Positive
    """The position in the order of attempts; no two attempts have the same."""
    attempt: str
    """The name of the attempt."""
    at: Time
    """When it took the root over."""
    host: str
    """The machine of its rank 0."""
    pid: Positive
    """The process of its rank 0."""


class LeftBehind(TypedDict):
    """A newer save that a resume listed and did not choose."""

    url: str
    """Its address."""
    number: int
    """Its step number."""
    metadata: str | None
    """A digest of its metadata; null for a save that had none yet."""


class BranchDocument(TypedDict):
    """A resume of a run with several roots, in the root that the job saves to."""

    attempt: str
    """The name of the attempt that resumed."""
    step: int | None
    """The step that it resumed from; null for a run that began."""
    at: Time
    """When that was decided."""
    loaded: str | None
    """A digest of the metadata of the save that was loaded."""
    left: list[LeftBehind]
    """The newer saves in the other roots."""


class NotTaken(TypedDict):
    """A newer step that was not loaded."""

    step: int | None
    """The training step; null where the folder's name gives none."""
    path: str
    """Its address."""
    verdict: str
    """Its verdict."""
    reason: str
    """Why it was not loaded, in one line."""


class LoadAdvice(TypedDict):
    """What a load reads where the world size differs from that of the save."""

    world_size: Positive
    """Ranks that load, sharded as FSDP2 does."""
    needed_bytes: int
    """Bytes of tensors that they need, over all ranks."""
    stock_bytes: int
    """Bytes that stock `dcp.load` reads for that: whole records."""
    pays_from: Positive | None
    """The number of the load from which resharding first is cheaper; null where it never is."""
    message: str
    """The advice in one line."""


class RestoredState(TypedDict):
    """What became of the train state."""

    restored: list[str]
    """The kinds that were restored."""
    derived: list[str]
    """The kinds that were computed from others."""
    lost: list[str]
    """The kinds that were not restored."""


class _ResumeOptions(TypedDict, total=False):
    warnings: list[str]
    """Roots in which the steps that the resume abandons could not be marked, and why."""
    resharding: LoadAdvice | None
    """What a load reads where the world size differs from that of the save; null where it does
    not, or is unknown."""


class ResumeDocument(_ResumeOptions):
    """How a job resumed."""

    attempt: str
    """The name of the attempt that resumed."""
    at: Time
    """When it resumed."""
    root: str
    """The root, as the script named it."""
    step: int | None
    """The step that was loaded; null for a fresh run."""
    path: str | None
    """Its address."""
    tokens: int | None
    """Tokens that the run had consumed there, where the step states them."""
    fell_back: bool
    """A newer step exists and was not loaded."""
    rejected: list[NotTaken]
    """The newer steps that were not loaded."""
    superseded: list[int]
    """Newer steps that belong to an abandoned branch from now on."""
    world_size: Positive
    """Ranks of this job."""
    saved_world_size: int | None
    """Ranks that saved the step, where it states them."""
    previous_attempt: str | None
    """The attempt before, however it ended."""
    state: RestoredState
    """What became of the train state."""
    cluster: Mapping[str, object]
    """The job, the scheduler and the machine."""

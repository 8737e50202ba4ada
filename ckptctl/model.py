"""The model of a saved step.

Plain data shared by all higher layers: steps, parts, files, metadata, train
state. Nothing here reads, checks or prints.

Chunks are stored in columns. A step written by 256 ranks has half a million
of them, and one Python object each would take a gigabyte; `Chunks` takes about
40 bytes per chunk and creates `Chunk` objects on demand.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice, product
from math import prod
from typing import Annotated, NamedTuple, overload

import msgspec
from msgspec import Meta

# Types of fields of JSON documents. What is beside the type is part of the JSON Schema; a field
# has a description of its own where it means anything else. Integers are never negative unless
# they come from a log.
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Pid = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
ExitCode = Annotated[int, Meta(ge=0, le=255, description="The exit code of the command.")]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
"""RFC 3339 in UTC."""

Hex = Annotated[str, Meta(pattern="^[0-9a-f]*$")]
Id = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
FindingCode = Annotated[str, Meta(pattern=r"^[a-z-]+\.[a-z-]+$")]
Message = Annotated[str, Meta(description="The answer in one line.")]
NextCommand = Annotated[
    str | None, Meta(description="The command to run next; null where there is nothing to do.")
]
StepNumber = Annotated[
    Count | None, Meta(description="The training step; null where the folder's name gives none.")
]
StepUrl = Annotated[str, Meta(description="The address of the step.")]

NO_FILE = -1
"""In `Chunks.files`: the metadata names no byte range for this chunk."""

STATE_KINDS = ("model", "optimizer", "scheduler", "rng", "dataloader", "step", "tokens")
"""The kinds of train state, in the order in which they are shown."""

DTYPE_SIZES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "quint8": 1,
    "qint8": 1,
    "qint32": 4,
}
"""Bytes per element, by torch's dtype name without the `torch.` in front.

Source: torch 2.13 `c10/core/ScalarType.h`; sub-byte `uint1` to `uint7` and the
`bits` types are whole bytes in storage.
"""


class Ordered(StrEnum):
    """Words in an order."""

    @property
    def place(self) -> int:
        """Where the word comes among all, from 0: they compare by this."""
        return list(type(self)).index(self)


class Preference(StrEnum):
    """Which of the sound steps `pick` takes first."""

    NEWEST = "newest"
    CONFIRMED = "confirmed"
    """One that a replay, a canary, or the training after a resume has shown to be good."""


class Level(Ordered):
    """How deep an inspection goes, shallowest first."""

    LISTING = "listing"
    STRUCTURE = "structure"
    CONTENT = "content"

    @property
    def deeper(self) -> Level | None:
        """The next deeper level; None for the deepest."""
        return next((level for level in Level if level.place == self.place + 1), None)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Where a record lies: `length` bytes from `offset` on in a shard file.

    `file` is the path in the metadata, relative to its own folder; it has not been
    checked for leading outside. `transforms` names the transforms applied when the
    bytes were written (`stream.zstd/1`), outermost last.
    """

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()

    @property
    def end(self) -> int:
        """Offset of the first byte after the range."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Chunk:
    """A slice of one tensor; `offsets` and `sizes` are in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    byte_range: ByteRange | None


class RangeColumns(NamedTuple):
    """The byte ranges of the chunks of one tensor, in columns of one value a chunk.

    `files` indexes `file_names`, which all tensors of a metadata share, and is `NO_FILE` for
    a chunk without a byte range. `transforms` holds the few chunks that have any.
    """

    files: array[int]
    starts: array[int]
    lengths: array[int]
    file_names: Sequence[str]
    transforms: Mapping[int, tuple[str, ...]] = {}

    @classmethod
    def missing(cls, n_chunks: int) -> RangeColumns:
        """Columns of chunks without byte ranges."""
        none = array("q", [0]) * n_chunks
        return cls(array("i", [NO_FILE]) * n_chunks, none, none, ())


class Chunks(Sequence[Chunk]):
    """The chunks of one tensor, in columns.

    `offsets` and `sizes` hold `n_dims` values a chunk, one chunk after the other; the
    columns of `ranges` are attributes as well.
    """

    __slots__ = (
        "file_names",
        "files",
        "lengths",
        "n_chunks",
        "n_dims",
        "offsets",
        "sizes",
        "starts",
        "transforms",
    )

    def __init__(
        self, n_dims: int, offsets: array[int], sizes: array[int], ranges: RangeColumns
    ) -> None:
        self.n_dims = n_dims
        self.n_chunks = len(ranges.files)
        self.offsets = offsets
        self.sizes = sizes
        self.files, self.starts, self.lengths, self.file_names, self.transforms = ranges

    @classmethod
    def of(cls, n_dims: int, chunks: Sequence[Chunk]) -> Chunks:
        """Columns from `Chunk` objects: for small inputs and tests."""
        ranges = [c.byte_range for c in chunks]
        names = sorted({r.file for r in ranges if r})
        numbers = {name: number for number, name in enumerate(names)}
        return cls(
            n_dims,
            array("q", [x for c in chunks for x in c.offsets]),
            array("q", [x for c in chunks for x in c.sizes]),
            RangeColumns(
                array("i", [numbers[r.file] if r else NO_FILE for r in ranges]),
                array("q", [r.offset if r else 0 for r in ranges]),
                array("q", [r.length if r else 0 for r in ranges]),
                names,
                {i: r.transforms for i, r in enumerate(ranges) if r and r.transforms},
            ),
        )

    def __len__(self) -> int:
        return self.n_chunks

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Chunk]: ...
    def __getitem__(self, index: int | slice) -> Chunk | Sequence[Chunk]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.n_chunks))]
        if index < 0:
            index += self.n_chunks
        if not 0 <= index < self.n_chunks:
            raise IndexError(index)
        return Chunk(self.offsets_of(index), self.sizes_of(index), self.byte_range_of(index))

    def __iter__(self) -> Iterator[Chunk]:
        return (self[i] for i in range(self.n_chunks))

    def offsets_of(self, index: int) -> tuple[int, ...]:
        """The offsets of chunk `index` in elements, one per dimension."""
        at = index * self.n_dims
        return tuple(self.offsets[at : at + self.n_dims])

    def sizes_of(self, index: int) -> tuple[int, ...]:
        """The sizes of chunk `index` in elements, one per dimension."""
        at = index * self.n_dims
        return tuple(self.sizes[at : at + self.n_dims])

    def byte_range_of(self, index: int) -> ByteRange | None:
        """The byte range of chunk `index`, None if the metadata has none."""
        file = self.files[index]
        if file == NO_FILE:
            return None
        return ByteRange(
            self.file_names[file],
            self.starts[index],
            self.lengths[index],
            self.transforms.get(index, ()),
        )


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of the state dict, as the metadata describes it.

    `shape` is the global shape in elements, `()` for a 0-d tensor. `dtype` is
    torch's name without `torch.` (`bfloat16`). `path` is the key path before
    flattening if the metadata has it, else `(fqn,)`. `strides` is set from torch
    2.15 on. `memory_format` is torch's encoding: 0 contiguous, 1 channels last,
    2 preserve.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Chunks
    path: tuple[str | int, ...] = ()
    layout: str = "strided"
    requires_grad: bool = False
    memory_format: int = 0
    pin_memory: bool = False
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class BytesEntry:
    """An entry of the state dict that was pickled: a number, a list, an object."""

    fqn: str
    byte_range: ByteRange | None
    path: tuple[str | int, ...] = ()


@dataclass(frozen=True, slots=True)
class Metadata:
    """One decoded `.metadata` or `__{rank}.metadata` file.

    `strays` are byte ranges whose key matches no chunk and no bytes entry, as
    (FQN, offsets or None, range). `checkpoint_id` is the folder's name at the time
    of the save, if the writer recorded it. `version` is `Metadata.version`, from
    torch 2.9 on. `rank` is the rank of a rank-local file, None for the global
    one. `n_bytes` is the size of the file, `digest` its SHA-256 in hex.
    """

    tensors: Mapping[str, TensorEntry]
    bytes_entries: Mapping[str, BytesEntry]
    file_names: Sequence[str]
    strays: tuple[tuple[str, tuple[int, ...] | None, ByteRange], ...] = ()
    planner_paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    checkpoint_id: str | None = None
    save_id: str | None = None
    version: str | None = None
    rank: int | None = None
    n_bytes: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file in a listing.

    `path` is relative to the listed folder, with `/`. `size` is in bytes,
    `mtime_s` in seconds since 1970 by the storage's clock, None if the store has
    none. `identity` changes when the file is replaced (an ETag; device, inode and
    mtime in ns); it is empty if the store has no such value.
    `link` is the target of a symbolic link, None for anything else; `kind` is
    `file`, `dir`, `link` or `other` (a pipe, a socket, a device), of a link that was followed
    that of its target. `archived`: the listing shows
    an archive tier, from which a file can be read only once it is restored.
    """

    path: str
    size: int
    mtime_s: float | None = None
    identity: str = ""
    kind: str = "file"
    link: str | None = None
    archived: bool = False

    def at(self, path: str) -> FileInfo:
        """The same file under another path."""
        return FileInfo(
            path, self.size, self.mtime_s, self.identity, self.kind, self.link, self.archived
        )

    @property
    def what(self) -> str:
        """The kind in words, for messages."""
        names = {"file": "a file", "dir": "a folder", "link": f"a link to {self.link}"}
        return names.get(self.kind, "a pipe, a socket or a device")


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum that a storage keeps of an object: `crc64nvme` and the like, in hex.

    `whole`: of all bytes of the object. Otherwise of the checksums of the parts that it was
    written in, which proves nothing about its bytes unless the parts are known.
    """

    algorithm: str
    value: str
    whole: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """What a storage keeps of a file beside its bytes.

    `etag` differs where other bytes were written, and may differ where the same were;
    `version` names one write where the bucket keeps versions. Either is empty where there
    is none. `why_none` states why there are no checksums, and is empty where there are.
    """

    path: str
    checksums: tuple[Checksum, ...] = ()
    etag: str = ""
    version: str = ""
    why_none: str = ""


class PartFormat(StrEnum):
    """How the tensors of one folder are stored."""

    DCP = "dcp"
    DCP_RANK_LOCAL = "dcp-rank-local"
    SAFETENSORS = "safetensors"
    RANK_FILES = "rank-files"
    ZARR = "zarr"
    ORBAX = "orbax"
    TORCHSNAPSHOT = "torchsnapshot"
    UNKNOWN = "unknown"


SHARDED = frozenset({PartFormat.DCP, PartFormat.DCP_RANK_LOCAL})
"""The formats that are DCP's own: metadata, and shard files of records."""


MAX_NAMED = 8
"""So many missing files are named."""

FAMILY = "numbers in the name"
"""Instead of a framework, of files that none names."""


class Family(msgspec.Struct, frozen=True):
    """The files of one kind in one step, by the numbers in their names.

    Where a framework names them, it gives the axes, and all kinds of one folder share their
    lengths: they are a grid of ranks.
    """

    key: str
    """The path of each with every number as `N`, but for those that a framework sets apart."""
    members: frozenset[tuple[int, ...]]
    """The numbers of each file on the axes; of a family of one file without an axis, `()`."""
    lengths: tuple[int, ...]
    """How many members each axis has, stated or by the highest number."""
    base: int
    """The first number of the axes: 0, or 1."""
    stated: bool
    """The names state how many there are."""
    example: str
    """The path of one of them."""
    spans: tuple[tuple[tuple[int, int], ...], ...]
    """Where the numbers of each axis are in `example`."""
    is_numbered: bool
    """The numbers count from `base` without more holes than files; others are no ranks."""
    values: tuple[tuple[int, ...], ...] = ()
    """The numbers that exist on each axis."""
    n_bytes: int = 0
    """Size of all of them in bytes, where the caller gave sizes."""
    first: int = 0
    """What is added to the numbers in the names: of a window, the least of them."""
    framework: str = FAMILY
    """The framework that names files like this."""
    what: str = ""
    """What a framework says that each holds: `model`, `optimizer`, `layer 3`, …"""
    folder: str = ""
    """Where they are in the step, with a slash at the end; empty for the step itself."""
    counts_all: bool = False
    """A framework's axes count all ranks, and not the model-parallel ones alone."""
    sharded: bool = False
    """The files hold shards: only as many ranks can load them."""

    @property
    def n_present(self) -> int:
        """How many of the files exist."""
        return len(self.members)

    @property
    def n_files(self) -> int:
        """How many files there must be, by the names alone."""
        return prod(self.lengths) if self.is_numbered else len(self.members)

    @property
    def is_named(self) -> bool:
        """A framework names them."""
        return self.framework != FAMILY

    @property
    def holds(self) -> str:
        """What each file holds, for messages."""
        return self.what if self.is_named else f"state in {self.key}"

    @property
    def n_ranks(self) -> int | None:
        """How many ranks wrote them, where the names count all ranks."""
        is_counted = self.counts_all if self.is_named else self.is_line and self.names_rank
        return self.n_files if is_counted else None

    @property
    def is_line(self) -> bool:
        """It has one axis."""
        return self.is_numbered and len(self.lengths) == 1

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that have their file, counted from 0; none where the axes are not known."""
        if not (self.is_line or self.is_named):
            return frozenset()
        return frozenset(self._rank_at(place) for place in self.members)

    def _rank_at(self, place: Sequence[int]) -> int:
        """The rank at a place: the last axis varies fastest."""
        rank = 0
        for n, length in zip(place, self.lengths, strict=True):
            rank = rank * length + n - self.base
        return rank

    @property
    def has_zero(self) -> bool:
        """One of its numbers is 0, from which they count."""
        return any(held[:1] == (0,) for held in self.values)

    def from_base(self, base: int) -> Family:
        """The same family where its numbers are known to count from `base`, 0 or 1."""
        if self.base == base or self.has_zero or self.stated:
            return self
        lengths = tuple(n + self.base - base for n in self.lengths)
        return msgspec.structs.replace(self, base=base, lengths=lengths)

    @property
    def names_rank(self) -> bool:
        """The text before the number is the word rank: they count from 0."""
        start = self.spans[0][0][0] if self.spans else 0
        return re.search("rank[-_]?$", self.example[:start]) is not None

    def with_only(self, path: str) -> Family:
        """The family of one axis in a step that has only the file `path` of it."""
        then, now = ([*re.finditer("[0-9]+", name)] for name in (self.example, path))
        starts = [match.start() for match in then]
        places = [starts.index(start) for start, _ in self.spans[0]]
        number = int(now[places[0]][0])
        return msgspec.structs.replace(
            self,
            members=frozenset({(number,)}),
            lengths=(number - self.base + 1,),
            values=((number,),),
            example=path,
            spans=(tuple(now[place].span() for place in places),),
            n_bytes=0,
        )

    def as_window(self) -> Family:
        """The same family where its numbers may begin at any: they count from the least one."""
        (held,) = self.values
        moved = tuple(n - held[0] for n in held)
        return msgspec.structs.replace(
            self,
            members=frozenset((n,) for n in moved),
            lengths=(moved[-1] + 1,),
            base=0,
            is_numbered=moved[-1] < max(2 * len(moved), len(moved) + 2),
            values=(moved,),
            first=held[0],
        )

    def missing(self, n_files: int | None = None) -> tuple[str, ...]:
        """The paths of the first files that are missing; of one axis, of `n_files` in all."""
        if not self.is_numbered:
            return ()
        if n_files is not None and self.is_line:
            places: Iterable[tuple[int, ...]] = ((self.base + n,) for n in range(n_files))
        elif self.stated or self.is_line or self.is_named:
            places = product(*(range(self.base, self.base + n) for n in self.lengths))
        else:
            places = product(*self.values)
        absent = (place for place in places if place not in self.members)
        return tuple(self._path_at(place) for place in islice(absent, MAX_NAMED))

    @property
    def lost(self) -> tuple[str, ...]:
        """The paths of the first files that are missing by the axes of a framework."""
        return self.missing() if self.is_named else ()

    def _path_at(self, place: Sequence[int]) -> str:
        text = self.example
        replaced = [
            (start, end, number + self.first)
            for spans, number in zip(self.spans, place, strict=True)
            for start, end in spans
        ]
        for start, end, number in sorted(replaced, reverse=True):
            digits = text[start:end]
            width = len(digits) if digits.startswith("0") else 1
            text = text[:start] + str(number).zfill(width) + text[end:]
        return text


@dataclass(frozen=True, slots=True)
class Part:
    """One folder of tensors in a step: the step itself, or `pp0`, `model_and_optim`, ….

    `path` is relative to the step, empty for the step's own folder. `files`
    have paths relative to the part, and `grids` are the rank files among them.
    """

    path: str
    format: PartFormat
    files: tuple[FileInfo, ...]
    grids: tuple[Family, ...] = ()
    archives: frozenset[str] = frozenset()
    """The files of `torch.save` that their first bytes show, and not their names."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step directory and its listing.

    `name` is the folder's name (`step_1200`), `number` the training step in it, None
    if the name has none. `layout` is the name of the framework's layout, or `dcp`.
    `files` are all files below the folder, with paths relative to it.
    """

    url: str
    name: str
    number: int | None
    layout: str
    parts: tuple[Part, ...]
    files: tuple[FileInfo, ...]

    @property
    def n_bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(f.size for f in self.files)

    @property
    def has_rank_files(self) -> bool:
        """Whether files of `torch.save` hold it, one or several for each rank."""
        return any(part.format is PartFormat.RANK_FILES for part in self.parts)


@dataclass(frozen=True, slots=True)
class WorldSize:
    """The number of ranks that wrote a step, and its source."""

    size: int
    """Number of ranks."""
    source: str
    """The source of the number: `shard-files`, `train-state`, `seal`, `manifest`, or `asked` (the
    caller)."""
    at_least: bool = False
    """The number is a lower bound."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One kind of train state: whether it is present, where, and for how many ranks."""

    found: bool
    """The step holds it."""
    where: tuple[str, ...] = ()
    """Examples of entries or files that hold it."""
    n_ranks: int | None = None
    """For how many ranks, where it exists once per rank."""
    value: int | None = None
    """The value itself, for step and tokens, where it was read."""
    of_each_rank: int | None = None
    """The tokens that a rank has counted, where it saves its own count. `value` is then that
    times the data-parallel size, and null where that is not known."""
    of_adapter: bool = False
    """The weights are those of an adapter (LoRA) alone: no base model is recognized in the step."""


_NOT_FOUND = StatePart(found=False)


@dataclass(frozen=True, slots=True)
class UnrecognizedEntry:
    """An entry or a file that may hold train state, of which nothing shows what it is."""

    where: str
    """Its key path, behind the file that holds it and a colon; or a file."""
    may_be: tuple[str, ...]
    """The kinds of train state that it may be."""

    @property
    def key(self) -> str:
        """What `--state KIND=KEY` names."""
        return self.where.rpartition(": ")[2]


@dataclass(frozen=True, slots=True)
class TrainState:
    """The train state in a step, by kind."""

    model: StatePart = _NOT_FOUND
    """The weights."""
    optimizer: StatePart = _NOT_FOUND
    """The state of the optimizer."""
    scheduler: StatePart = _NOT_FOUND
    """The state of the learning-rate scheduler."""
    rng: StatePart = _NOT_FOUND
    """The states of the random number generators."""
    dataloader: StatePart = _NOT_FOUND
    """The position in the data."""
    step: StatePart = _NOT_FOUND
    """The number of the training step."""
    tokens: StatePart = _NOT_FOUND
    """The number of tokens seen."""
    unrecognized: tuple[UnrecognizedEntry, ...] = ()
    """What may hold state and is not recognized; `--state KIND=KEY` maps it."""
    tensor_keys: frozenset[str] = frozenset()
    """The outermost keys of tensors and of what may hold some, with `#` for the numbers in them."""

    def part(self, kind: str) -> StatePart:
        """The part named `kind`, one of `STATE_KINDS`."""
        found: StatePart = getattr(self, kind)
        return found

    @property
    def held(self) -> tuple[str, ...]:
        """The kinds that are present, in the order of `STATE_KINDS`."""
        return tuple(kind for kind in STATE_KINDS if self.part(kind).found)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The kinds that were not found and that an unrecognized entry may be."""
        may_be = {kind for entry in self.unrecognized for kind in entry.may_be}
        return tuple(kind for kind in STATE_KINDS if kind in may_be and not self.part(kind).found)

    @property
    def absent(self) -> tuple[str, ...]:
        """The kinds that the step does not hold, with certainty."""
        unknown = self.unknown
        return tuple(kind for kind in STATE_KINDS if kind not in (*self.held, *unknown))

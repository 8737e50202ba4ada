"""Read a `torch.save` file as the source of a step.

Its pickle is decoded without running it: tensors become entries whose elements lie in the
file, plain values become records of their own, and everything else is refused by its key.
Tensors may share a storage; each is an entry, and the storage is verified once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from zlib_ng.zlib_ng import crc32

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe, RecordUnreadable, UsageError
from ckptctl.findings import Finding
from ckptctl.formats.archive.directory import (
    LEGACY_MAGIC,
    Member,
    RecordDirectory,
    check_headers,
    check_texts,
    read_directory,
    read_member,
    wrong_crcs,
)
from ckptctl.formats.archive.state_file import Leaf, NotPlain, flattened, pickled_value
from ckptctl.formats.archive.writing import WRITABLE, value_record
from ckptctl.formats.digests import sha256_of
from ckptctl.formats.frameworks.state_keys import entry_kinds
from ckptctl.formats.pickles.values import TensorStub, decode_state
from ckptctl.formatting import command_line
from ckptctl.model import (
    DTYPE_SIZES,
    ByteRange,
    BytesEntry,
    FileInfo,
    Metadata,
    TensorEntry,
)
from ckptctl.records.slices import TensorSlice, aligned
from ckptctl.resharding.reading import Opened, SourceFiles, check_held, opened_at
from ckptctl.resharding.sources import (
    SourceChunk,
    SourceDamaged,
    SourcePart,
    SourceTensor,
    part_of,
    tensor_entry,
)
from ckptctl.resharding.unpublished import with_files
from ckptctl.storage.contract import Span, Store, read_range

MAX_PICKLE_BYTES = 64 << 20
"""The longest pickle of a state that is read; a million entries take about as much."""

_STORAGES = "data/"


@dataclass(frozen=True, slots=True)
class FlatFile:
    """A file whose directory and pickle are sound; its elements are not verified yet."""

    part: SourcePart
    files: SourceFiles
    has_crcs: bool


def read_flat(store: Store, file: FileInfo, url: str, *, only_model: bool = False) -> FlatFile:
    """Read everything but the elements of a `torch.save` file.

    With `only_model`, everything else in it is ignored. Raises `SourceDamaged` if the content does
    not match what was saved, `UsageError` if it holds anything that a step cannot. Cost:
    three small reads, and two per storage.
    """
    files = _FlatFiles(store, file.path, url)
    opened = open_flat(store, file, url)
    try:
        leaves = flattened(opened.state)
        part, held = _part(_of_model(leaves) if only_model else leaves, opened, files)
    except NotPlain as error:
        raise UsageError(f"{url}: {error}") from error
    return FlatFile(part, held, opened.has_crcs)


@dataclass(frozen=True, slots=True)
class OpenFlat:
    """A file of `torch.save` whose directory and pickle are sound, and the state in it."""

    path: str
    state: Any
    directory: RecordDirectory
    members: Mapping[str, Member]

    @property
    def has_crcs(self) -> bool:
        """The file has checksums of its storages."""
        return self.directory.has_crcs


def open_flat(
    store: Store, file: FileInfo, url: str, decode: Callable[[bytes], object] = decode_state
) -> OpenFlat:
    """Read everything but the elements of a `torch.save` file, and decode its pickle.

    Raises `SourceDamaged`, and `UsageError` for a format that is not read. Cost: three small reads,
    and two per storage.
    """
    whole = ByteRange(file.path, 0, file.size)
    files = _FlatFiles(store, file.path, url)
    try:
        directory, read = _sound(store, whole)
        state = decode(_pickle(directory, read))
    except RecordUnreadable as error:
        raise SourceDamaged(files.finding("record.framing", whole, error.message)) from error
    except MetadataUnreadable as error:
        raise SourceDamaged(files.finding("record.mismatch", whole, error.message)) from error
    except MetadataUnsafe as error:
        raise SourceDamaged(files.finding("record.unsafe", whole, error.message)) from error
    wrong = wrong_crcs(directory, read)
    if wrong:
        message = f"{', '.join(wrong)} does not match the checksum saved with it"
        raise SourceDamaged(files.finding("record.crc", whole, message))
    if read_member(directory, "byteorder", read) == b"big":
        raise UsageError(f"{url} was written on a big-endian machine, which is not supported")
    members = {member.name: member for member in directory.members}
    return OpenFlat(file.path, state, directory, members)


class _Read(dict[tuple[int, int], bytes]):
    """Bytes of the file that were read, by where they begin and end; see `Readable`."""

    def get(self, start: int, end: int) -> bytes | None:  # type: ignore[override]
        return super().get((start, end))


def _sound(store: Store, whole: ByteRange) -> tuple[RecordDirectory, _Read]:
    """The directory, and all members but the storages; headers agree with the directory."""
    path, length = whole.file, whole.length
    if read_range(store, path, 0, min(len(LEGACY_MAGIC), length)) == LEGACY_MAGIC:
        raise UsageError(
            f"{store.url}/{path} has the format from before torch 1.6, which has no checksums; "
            "torch.load and torch.save rewrite it"
        )
    directory, _ = read_directory(lambda n: read_range(store, path, length - n, n), length)
    wanted: list[tuple[int, int]] = []
    for member in directory.members:
        wanted += _around(member)
    read = _Read()
    for span, data in store.read_spans(Span(path, at, end - at) for at, end in wanted):
        read[span.offset, span.offset + span.length] = data
    check_headers(directory, read)
    check_texts(directory, read)
    return directory, read


def _around(member: Member) -> Iterator[tuple[int, int]]:
    """The ranges of a member's header, of its descriptor, and of its bytes if it is no storage."""
    yield member.header, member.header + 30 + len(member.path)
    if member.following > member.end:
        yield member.end, member.following
    if not member.name.startswith(_STORAGES) and 0 < member.size <= MAX_PICKLE_BYTES:
        yield member.start, member.end


def _pickle(directory: RecordDirectory, read: _Read) -> bytes:
    data = read_member(directory, "data.pkl", read)
    if data is None:
        raise RecordUnreadable(f"its pickle has more than {MAX_PICKLE_BYTES:,} bytes")
    return data


class _FlatFiles(SourceFiles):
    """The storages of the file, and the records made of its other values."""

    def __init__(self, store: Store, path: str, url: str) -> None:
        super().__init__(store, "", url, "")
        self.path = path
        self._views: Mapping[str, Opened] = {}

    @property
    def values(self) -> str:
        """The path under which the records of values appear in the store."""
        return f"{self.path}/values"

    def holding(self, views: Mapping[str, Opened], values: bytes) -> SourceFiles:
        """The same with the positions of tensors, by FQN, and the records of values."""
        files = _FlatFiles(with_files(self.store, {self.values: values}), self.path, self.url)
        files._views = views
        return files

    def in_store(self, name: str) -> str:
        return name

    def finding(self, code: str, record: ByteRange, message: str) -> Finding:  # noqa: ARG002
        return Finding(
            code,
            self.path,
            f"{self.path}: {message}",
            expected="the file as it was saved",
            found=message,
            next_command=command_line("explain", code),
        )

    def opened(self, tensor: SourceTensor, number: int, held_limit: int) -> Opened:
        """See `SourceFiles.opened`; a storage that is not row-major is held, and verified then."""
        opened = self._views[tensor.entry.fqn]
        if opened.is_row_major:
            return opened
        check_held(tensor, opened.n_bytes, held_limit)
        record = tensor.chunks[number].record
        data = read_range(self.store, self.path, opened.start, opened.n_bytes)
        if opened.crc is not None and crc32(data) != opened.crc:
            message = f"its elements have the CRC-32 {crc32(data):08x}, saved was {opened.crc:08x}"
            raise SourceDamaged(self.finding("record.crc", record, message))
        return opened._replace(start=0, held=aligned(data))


def flat_part(
    leaves: Sequence[Leaf], opened: OpenFlat, store: Store, url: str
) -> tuple[SourcePart, SourceFiles]:
    """The entries that some leaves of an open file make, and where their elements are.

    Raises `NotPlain` for one that is neither a tensor nor a plain value.
    """
    return _part(leaves, opened, _FlatFiles(store, opened.path, url))


def _of_model(leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
    tensors, others = {}, {}
    for leaf in leaves:
        if isinstance(leaf.value, TensorStub):
            tensors[leaf.fqn] = _entry(leaf, leaf.value)
        else:
            others[leaf.fqn] = BytesEntry(leaf.fqn, None, leaf.path)
    kinds = entry_kinds(Metadata(tensors, others, ()))
    return tuple(leaf for leaf in leaves if kinds[leaf.fqn].names[0] == "model")


def _entry(leaf: Leaf, stub: TensorStub) -> TensorEntry:
    return tensor_entry(leaf.fqn, stub.dtype, stub.shape, leaf.path)


def _part(
    leaves: Sequence[Leaf], opened_file: OpenFlat, files: _FlatFiles
) -> tuple[SourcePart, SourceFiles]:
    directory, members = opened_file.directory, opened_file.members
    views: dict[str, Opened] = {}
    tensors: list[tuple[TensorEntry, list[SourceChunk]]] = []
    others: list[tuple[BytesEntry, ByteRange]] = []
    values = bytearray()
    proven: set[str] = set()
    for leaf in leaves:
        stub = leaf.value
        if isinstance(stub, TensorStub):
            member = storage_of(leaf.fqn, stub, members)
            opened = opened_at(stub, member, member.crc)
            # What is held is verified when it is read; otherwise once for each storage.
            answers = not opened.is_row_major or member.name not in proven
            if opened.is_row_major:
                proven.add(member.name)
            has_crc = answers and directory.has_crcs and member.size
            views[leaf.fqn] = opened._replace(crc=member.crc if has_crc else None)
            # Two tensors of one storage share what is read of it, but not what is held.
            name = files.path if opened.is_row_major else f"{files.path}/{leaf.fqn}"
            place = ByteRange(name, member.start, member.size)
            chunk = SourceChunk(TensorSlice.whole(stub.shape), place)
            tensors.append((_entry(leaf, stub), [chunk]))
        else:
            record = value_record(pickled_value(leaf))
            place = ByteRange(files.values, len(values), len(record))
            others.append((BytesEntry(leaf.fqn, None, leaf.path), place))
            values += record
    content = repr([(m.name, m.crc, m.size) for m in directory.members])
    digest = sha256_of((files.url + content).encode("utf-8", "surrogateescape"))
    part = part_of("", tensors, digest, others)
    in_order = replace(part, paths={leaf.fqn: leaf.path for leaf in leaves})
    return in_order, files.holding(views, bytes(values))


def storage_of(fqn: str, stub: TensorStub, members: Mapping[str, Member]) -> Member:
    """The member that holds all elements of a tensor."""
    n_elements = prod(stub.shape)
    if stub.dtype not in WRITABLE:
        raise NotPlain(f"{fqn} is of dtype {stub.dtype}, which is not supported")
    member = members.get(_STORAGES + stub.storage_key)
    n_bytes = stub.n_elements_in_storage * DTYPE_SIZES[stub.dtype]
    if member is None or member.size != n_bytes:
        found = "does not exist" if member is None else f"has {member.size:,} bytes"
        raise NotPlain(f"the storage of {fqn}, of {n_bytes:,} bytes, {found}")
    if n_elements and stub.last >= stub.n_elements_in_storage:
        raise NotPlain(
            f"{fqn} extends past the end of its storage of {stub.n_elements_in_storage:,} elements"
        )
    repeats = any(n > 1 and s == 0 for n, s in zip(stub.shape, stub.strides, strict=True))
    if n_elements and (repeats or n_elements > stub.n_elements_in_storage):
        raise NotPlain(
            f"{fqn} is an expanded view: its storage holds fewer elements than its shape; save a "
            "copy"
        )
    return member

"""Read files of `torch.save` and of safetensors as parts of a step.

The pickle of a `torch.save` file is decoded without running it: tensors become entries whose
elements lie in the file, plain values become records of their own, and everything else is
refused by its key. Tensors may share a storage; each is an entry, and the storage is verified
once.

The files of a safetensors model hold whole tensors, or the slices that DCP's Hugging Face
writer puts into each shard. Headers give the position of the elements; no checksum verifies
them, so a file that is written to in the meantime is detected by its size and time. Whether
the files are complete is checked in `inspection.rank_files` and `inspection.safetensors`.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe, RecordUnreadable, UsageError
from ckptctl.findings import Finding
from ckptctl.formats.archive.directory import (
    LEGACY_HEAD,
    NOT_AN_ARCHIVE,
    KeptBytes,
    Member,
    RecordDirectory,
    check_headers,
    check_texts,
    is_before_archives,
    read_directory,
    read_member,
    wrong_crcs,
)
from ckptctl.formats.archive.safetensors import (
    INDEX_SUFFIX,
    MAX_HEADER,
    PREFIX,
    SUFFIX,
    TORCH_NAMES,
    StoredTensor,
    parse_header,
    parse_index,
    whole_tensor,
)
from ckptctl.formats.archive.state_file import FlatEntry, NotPlain, flattened, pickled_value
from ckptctl.formats.archive.writing import WRITABLE, value_record
from ckptctl.formats.digests import sha256_of
from ckptctl.formats.frameworks.state_keys import entry_kinds
from ckptctl.formats.pickles.values import TensorStub, decode_state
from ckptctl.formatting import command_line, inside
from ckptctl.model import (
    DTYPE_SIZES,
    ByteRange,
    BytesEntry,
    Chunk,
    Chunks,
    FileInfo,
    Metadata,
    Part,
    TensorEntry,
)
from ckptctl.records.loading import TensorRecord, is_row_major
from ckptctl.records.ranges import Ranges
from ckptctl.records.reads import read_headers
from ckptctl.resharding.sources import (
    SourceDamaged,
    SourceFiles,
    SourcePart,
    listed_metadata,
    part_of,
)
from ckptctl.storage.contract import Span, Store, read_range

MAX_PICKLE_BYTES = 64 << 20
"""The longest pickle of a state that is read; a million entries take about as much."""

_STORAGES = "data/"


@dataclass(frozen=True, slots=True)
class FlatFile:
    """A file of `torch.save` whose directory and pickle are sound, and the state in it.

    Its elements are not verified yet. `path` is that in the `store`, `url` names it in messages.
    """

    store: Store
    path: str
    url: str
    state: Any
    directory: RecordDirectory
    members: Mapping[str, Member]

    def part(self, path: str = "", under: str = "", *, only_model: bool = False) -> SourcePart:
        """The part at `path` of a step that its entries make, below the key `under`.

        With `only_model`, everything else in it is ignored. Raises `UsageError` if it holds
        anything that a step cannot.
        """
        try:
            leaves = flattened(self.state)
            if under:
                leaves = tuple(FlatEntry((under, *leaf.path), leaf.value) for leaf in leaves)
            return self.part_of_leaves(_of_model(leaves) if only_model else leaves, path)
        except NotPlain as error:
            raise UsageError(f"{self.url}: {error}") from error

    def part_of_leaves(self, leaves: Sequence[FlatEntry], path: str = "") -> SourcePart:
        """The part that some leaves make; raises `NotPlain` for one that cannot be an entry."""
        tensors: list[TensorEntry] = []
        values: list[BytesEntry] = []
        held: dict[str, bytes] = {}
        records: dict[int, TensorRecord] = {}
        proven: set[str] = set()
        for leaf in leaves:
            stub = leaf.value
            if not isinstance(stub, TensorStub):
                held[leaf.fqn] = value_record(pickled_value(leaf))
                place = ByteRange("", 0, len(held[leaf.fqn]))
                values.append(BytesEntry(leaf.fqn, place, leaf.path))
                continue
            member = storage_of(leaf.fqn, stub, self.members)
            number = len(tensors)
            crc, is_whole = member.crc if self.directory.has_crcs else None, not is_row_major(stub)
            # What is read whole is verified each time; otherwise once for each storage.
            if not is_whole and member.name in proven:
                crc = None
            proven |= set() if is_whole else {member.name}
            records[number] = TensorRecord(number, stub, 0, member.size, crc, None, is_whole)
            tensors.append(_entry(leaf, stub, ByteRange(self.path, member.start, member.size)))
        content = repr([(m.name, m.crc, m.size) for m in self.directory.members])
        digest = sha256_of((self.url + content).encode("utf-8", "surrogateescape"))
        metadata = listed_metadata(tensors, digest, values)
        files = SourceFiles(self.store, "", self.url, Ranges([metadata]), "", records)
        return part_of(path, [metadata], files, folder="", held=held)


def open_flat(
    store: Store, file: FileInfo, url: str, decode: Callable[[bytes], object] = decode_state
) -> FlatFile:
    """Read everything but the elements of a `torch.save` file, and decode its pickle.

    Raises `SourceDamaged`, and `UsageError` for a format that is not read. Cost: three small reads,
    and two per storage.
    """

    def damaged(code: str, message: str) -> SourceDamaged:
        return SourceDamaged(
            Finding(
                code,
                file.path,
                f"{file.path}: {message}",
                expected="the file as it was saved",
                found=message,
                next_command=command_line("explain", code),
            )
        )

    try:
        directory, read = _sound(store, file)
        pickle = read_member(directory, "data.pkl", read)
        if pickle is None:
            raise RecordUnreadable(f"its pickle has more than {MAX_PICKLE_BYTES:,} bytes")
        state = decode(pickle)
    except RecordUnreadable as error:
        raise damaged("record.framing", error.message) from error
    except MetadataUnreadable as error:
        raise damaged("record.mismatch", error.message) from error
    except MetadataUnsafe as error:
        raise damaged("record.unsafe", error.message) from error
    wrong = wrong_crcs(directory, read)
    if wrong:
        raise damaged("record.crc", f"{', '.join(wrong)} does not match the checksum saved with it")
    if read_member(directory, "byteorder", read) == b"big":
        raise UsageError(f"{url} was written on a big-endian machine, which is not supported")
    members = {member.name: member for member in directory.members}
    return FlatFile(store, file.path, url, state, directory, members)


def _sound(store: Store, file: FileInfo) -> tuple[RecordDirectory, KeptBytes]:
    """The directory, and all members but the storages; headers agree with the directory."""
    path, length = file.path, file.size
    if is_before_archives(read_range(store, path, 0, min(LEGACY_HEAD, length))):
        raise UsageError(f"{store.url}/{path} {NOT_AN_ARCHIVE}")
    directory, _ = read_directory(lambda n: read_range(store, path, length - n, n), length)
    wanted: list[tuple[int, int]] = []
    for member in directory.members:
        wanted += _around(member)
    spans = store.read_spans(Span(path, at, end - at) for at, end in sorted(wanted))
    read = KeptBytes((span.offset, data) for span, data in spans)
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


def _of_model(leaves: Sequence[FlatEntry]) -> tuple[FlatEntry, ...]:
    tensors, others = {}, {}
    for leaf in leaves:
        if isinstance(leaf.value, TensorStub):
            tensors[leaf.fqn] = _entry(leaf, leaf.value)
        else:
            others[leaf.fqn] = BytesEntry(leaf.fqn, None, leaf.path)
    kinds = entry_kinds(Metadata(tensors, others, ()))
    return tuple(leaf for leaf in leaves if kinds[leaf.fqn].names[0] == "model")


def _entry(leaf: FlatEntry, stub: TensorStub, place: ByteRange | None = None) -> TensorEntry:
    chunk = Chunk((0,) * len(stub.shape), stub.shape, place)
    chunks = Chunks.of(len(stub.shape), [chunk])
    return TensorEntry(leaf.fqn, stub.dtype, stub.shape, chunks, leaf.path)


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


# Safetensors


class SafetensorsPart(NamedTuple):
    """One folder of safetensors. `unnamed` are files that its index does not name."""

    part: SourcePart
    unnamed: tuple[str, ...]


def read_safetensors(
    store: Store, folder: str, url: str, part: Part, *, under: str
) -> SafetensorsPart:
    """The tensors in a folder's files, or in those that its index names.

    `folder` is where the part is in the store. Tensors are put below the key `under`,
    if it is not empty. Raises `UsageError` for dtypes that torch has no tensor of, and
    where several indexes compete. Cost: as for `inspect_safetensors`.
    """
    files = [file for file in part.files if file.path.endswith(SUFFIX)]
    named = _named(store, folder, url, part)
    held = [file for file in files if named is None or file.path in named]
    unnamed = tuple(file.path for file in files if file not in held)
    by_name: dict[str, list[tuple[StoredTensor, ByteRange]]] = defaultdict(list)
    digest = hashlib.sha256(os.fsencode(url))
    for file, header in read_headers(store, folder, held):
        digest.update(repr((file.path, file.size, file.mtime_s, file.identity)).encode() + header)
        for tensor in parse_header(header[PREFIX:]):
            place = ByteRange(file.path, len(header) + tensor.start, tensor.n_bytes)
            by_name[tensor.name].append((tensor, place))
    tensors = _tensors(by_name, under)
    metadata = listed_metadata(tensors, digest.hexdigest())
    # Elements are row-major, and have neither a frame nor a checksum.
    chunks = [(entry.dtype, chunk) for entry in tensors for chunk in entry.chunks]
    records = {
        number: TensorRecord(
            number, TensorStub.row_major(dtype, chunk.sizes), 0, chunk.byte_range.length, None
        )
        for number, (dtype, chunk) in enumerate(chunks)
        if chunk.byte_range is not None
    }
    source = SourceFiles(store, folder, url, Ranges([metadata]), part.path, records)
    return SafetensorsPart(part_of(part.path, [metadata], source), unnamed)


def _named(store: Store, folder: str, url: str, part: Part) -> frozenset[str] | None:
    """The files that the index of a folder names; None if there is no index."""
    indexes = [file.path for file in part.files if file.path.endswith(INDEX_SUFFIX)]
    if not indexes:
        return None
    if len(indexes) > 1:
        raise UsageError(
            f"{url} holds {len(indexes)} indexes, {' and '.join(sorted(indexes)[:2])}: each "
            "describes a separate model; give the path of one of them instead of the folder"
        )
    index = store.read(inside(folder, indexes[0]), limit=MAX_HEADER)
    return frozenset(parse_index(index).files.values())


def _tensors(
    by_name: Mapping[str, Sequence[tuple[StoredTensor, ByteRange]]], under: str
) -> list[TensorEntry]:
    tensors = []
    for name, held in by_name.items():
        places = [piece.offsets for piece, _ in held if 0 not in piece.shape]
        if len(places) > len({*places}):
            both = " and ".join(sorted({place.file for _, place in held})[:2])
            raise UsageError(
                f"{name} is in {both} with the same elements: these are several models; give the "
                "path of one file instead of the folder"
            )
        dtype = TORCH_NAMES.get(held[0][0].dtype)
        if dtype is None:
            stored = held[0][0].dtype
            raise UsageError(f"{name} is of dtype {stored}, which torch does not support")
        fqn, keys = (f"{under}.{name}", (under, name)) if under else (name, (name,))
        tensors.append(whole_tensor(fqn, dtype, held, keys))
    return tensors


def files_of_index(store: Store, index: FileInfo, url: str) -> tuple[FileInfo, ...]:
    """The existing files that an index names, and the index itself.

    Raises `RecordUnreadable` for an index that is damaged.
    """
    if index.size > MAX_HEADER:
        raise RecordUnreadable(f"{url} takes {index.size:,} bytes, which is too large for an index")
    named = {*parse_index(store.read(index.path, limit=MAX_HEADER)).files.values()}
    return tuple(file for file in store.list_dir() if file.path in named or file.path == index.path)

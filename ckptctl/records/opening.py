"""Open a record: decompress it, check its frame, and find the tensor or the pickle in it.

The first and the last bytes of a record are enough. `open_record` returns the result or
requests more bytes; `verification` checks whether the elements are those that were saved.

One version of torch writes the records of all chunks of one dtype and shape with the same bytes,
except the elements, their CRC-32 (behind them and in the directory), and the text
`.data/serialization_id` with its CRC-32. A record whose other bytes equal those of one that
`open_record` accepted, and whose checksums agree, is opened by `Templates` without parsing.

A few bytes of zstd can expand to gigabytes: output is passed on in pieces, and input is fed in
slices so short that none expands to more than about 32 MiB.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from zlib_ng.zlib_ng import crc32

from ckptctl.errors import (
    MetadataUnreadable,
    MetadataUnsafe,
    MissingExtra,
    OutOfMemory,
    RecordUnreadable,
)
from ckptctl.formats.archive.directory import (
    TAIL,
    Member,
    Readable,
    RecordDirectory,
    View,
    check_headers,
    check_texts,
    crc_offsets,
    is_before_archives,
    parse_directory,
    read_member,
    tail_needed,
    wrong_crcs,
)
from ckptctl.formats.pickles.values import TensorStub, decode_tensor_pickle
from ckptctl.model import DTYPE_SIZES, TensorEntry
from ckptctl.records.ranges import Owner

if TYPE_CHECKING:
    from typing_extensions import Buffer
    from zstandard import ZstdDecompressionObj

MAX_PICKLE_BYTES = 64 << 10
"""The longest pickle of a tensor or of a wanted bytes entry that is read.

The pickle of a tensor of 64 dimensions has less than 2 KiB.
"""

HEAD = 1024
"""Bytes that hold everything before the elements of a tensor's record."""

_MAX_HEAD = 1 << 20

# Names by which torch pickles tensors that have more than a storage, a shape and strides.
_OTHER_TENSORS = tuple(
    f"c{module}\n{name}\n".encode()
    for module, name in (
        ("torch._utils", "_rebuild_sparse_tensor"),
        ("torch._utils", "_rebuild_nested_tensor"),
        ("torch._utils", "_rebuild_wrapper_subclass"),
        ("torch._utils", "_rebuild_meta_tensor_no_storage"),
        ("torch._tensor", "_rebuild_from_type_v2"),
    )
)


class Unfit(Exception):
    """A sound archive has unexpected content; `code` is that of the finding."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class WrongChecksum(Unfit):
    """Members of a record, `names`, do not match the checksums saved with them."""

    def __init__(self, names: Sequence[str]) -> None:
        shown = ", ".join(names[:3])
        more = len(names) - 3
        self.names = f"{shown} and {more:,} more" if more > 0 else shown
        super().__init__("record.crc", f"{self.names} in it")


@dataclass(frozen=True, slots=True)
class Need:
    """How much of a record to read: bytes at its beginning and at its end."""

    head: int = HEAD
    tail: int = TAIL


class Expected(NamedTuple):
    """The tensor that the metadata places in a record: a chunk of `sizes` elements."""

    dtype: str
    sizes: tuple[int, ...]

    @classmethod
    def chunk(cls, tensor: TensorEntry, number: int) -> Expected:
        return cls(tensor.dtype, tensor.chunks.sizes_of(number))


@dataclass(frozen=True, slots=True)
class OpenRecord:
    """A record with a sound frame: its members, and the tensor that it describes.

    `stub` is None for a bytes entry; `byte_order` is `little` or `big` if the record states
    it.
    """

    directory: RecordDirectory
    stub: TensorStub | None
    byte_order: str | None

    @property
    def elements(self) -> Member | None:
        return None if self.stub is None else self.directory.find(f"data/{self.stub.storage_key}")

    @property
    def crc(self) -> int | None:
        """The checksum saved with the elements; None if there is none."""
        elements = self.elements if self.directory.has_crcs else None
        return None if elements is None else elements.crc


def open_record(
    view: View, expected: Expected | None, *, with_pickle: bool = False
) -> OpenRecord | Need:
    """The content of the record in `view`, or how much more of it must be read first.

    The record should hold the tensor `expected`, or a bytes entry if that is None, whose
    pickle is also read with `with_pickle`. Members that were read whole match their
    checksums; otherwise raises `RecordUnreadable` or `Unfit`.
    """
    if is_before_archives(view.head):
        raise Unfit(
            "format.unsupported",
            "it has the format of torch.save before torch 1.6, which is not read",
        )
    needed = tail_needed(view.tail, view.length)
    if needed > len(view.tail):
        return Need(len(view.head), needed)
    directory = parse_directory(view.tail, view.length)
    more = _more(directory, view, is_tensor=expected is not None, with_pickle=with_pickle)
    if more is not None:
        return more
    check_headers(directory, view)
    wrong = wrong_crcs(directory, view)
    if wrong:
        raise WrongChecksum(wrong)
    check_texts(directory, view)
    byte_order = read_member(directory, "byteorder", view)
    stub = None
    if expected is not None:
        stub = tensor_in(directory, view)
        check_tensor(stub, directory, expected)
    return OpenRecord(directory, stub, None if byte_order is None else byte_order.decode())


def open_whole(data: bytes, expected: Expected | None) -> tuple[View, OpenRecord]:
    """The content of a record whose bytes are all present; raises as `open_record`."""
    view = View(len(data), data, data)
    found = open_record(view, expected)
    assert not isinstance(found, Need)  # noqa: S101 - all of it is there
    return view, found


def _more(
    directory: RecordDirectory, view: View, *, is_tensor: bool, with_pickle: bool
) -> Need | None:
    """What else must be read: all but the elements of a tensor, or the pickle of an entry."""
    head, tail = len(view.head), len(view.tail)
    if len(view.head) == view.length:
        return None
    pickle = directory.find("data.pkl")
    if is_tensor:
        elements = next((m for m in directory.members if m.name.startswith("data/")), pickle)
        if elements is not None:
            head = max(head, min(elements.start, _MAX_HEAD))
            tail = max(tail, min(directory.length - elements.end, _MAX_HEAD))
    elif with_pickle and pickle is not None and pickle.size <= MAX_PICKLE_BYTES:
        head = max(head, pickle.end)
    if (head, tail) == (len(view.head), len(view.tail)):
        return None
    return Need(head, tail)


def is_plain_pickle(head: bytes, tail: bytes) -> bool:
    """Whether a record is a planner's own bytes, which torch does not frame."""
    return head[:1] == b"\x80" and head[1:2] <= b"\x05" and tail.endswith(b".")


def elements_crc(tail: bytes, length: int) -> int | None:
    """The checksum of a tensor's elements, from the last bytes of its record.

    None if the tail is too short or damaged, or if there is no checksum.
    """
    try:
        if tail_needed(tail, length) > len(tail):
            return None
        directory = parse_directory(tail, length)
    except RecordUnreadable:
        return None
    elements = [member for member in directory.members if member.name.startswith("data/")]
    return elements[0].crc if directory.has_crcs and len(elements) == 1 else None


def tensor_in(directory: RecordDirectory, view: Readable) -> TensorStub:
    """The tensor that a record describes; raises `Unfit` if it describes none."""
    pickle = read_member(directory, "data.pkl", view)
    if pickle is None or len(pickle) > MAX_PICKLE_BYTES:
        raise _mismatch("its pickle is too long for a tensor")
    try:
        return _decoded(pickle)
    except MetadataUnreadable as error:
        raise _mismatch(f"it holds no tensor: {error.message}") from error
    except MetadataUnsafe as error:
        if any(name in pickle for name in _OTHER_TENSORS):
            raise Unfit("format.unsupported", "it is a tensor subclass") from error
        raise Unfit("record.unsafe", error.message) from error


@lru_cache(maxsize=512)
def _decoded(pickle: bytes) -> TensorStub:
    # Equally sharded tensors have equal pickles in thousands of records.
    return decode_tensor_pickle(pickle)


def check_tensor(stub: TensorStub, directory: RecordDirectory, expected: Expected) -> None:
    """Raise `Unfit` if a record does not hold the tensor that the metadata places there."""
    sizes = expected.sizes
    n_elements = prod(stub.shape)
    if stub.dtype != expected.dtype:
        raise _mismatch(f"it holds {stub.dtype}, but its metadata has {expected.dtype}")
    if stub.shape != sizes and (n_elements or prod(sizes)):
        raise _mismatch(f"it holds a tensor of shape {stub.shape}, but its metadata has {sizes}")
    member = directory.find(f"data/{stub.storage_key}")
    if member is None:
        raise _mismatch(f"it holds no elements: data/{stub.storage_key} is missing")
    item_size = DTYPE_SIZES.get(stub.dtype)
    n_bytes = stub.n_elements_in_storage * (item_size or 0)
    if item_size is not None and member.size != n_bytes:
        raise _mismatch(f"it holds {member.size:,} bytes of elements instead of {n_bytes:,}")
    if n_elements and stub.last >= stub.n_elements_in_storage:
        raise _mismatch(
            f"its last element is number {stub.last:,} of {stub.n_elements_in_storage:,} in its "
            "storage"
        )


def _mismatch(message: str) -> Unfit:
    return Unfit("record.mismatch", message)


ZSTD = "stream.zstd/1"
"""The name under which DCP's own extension registers the transform."""

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

MAX_WINDOW = 128 << 20
"""The largest window that is accepted, in bytes: the default of the zstd tool."""

MAX_ENTRY_BYTES = 1 << 30
"""The size limit of a decompressed non-tensor entry."""

FRAME_BYTES = 1 << 20
"""The size limit of the archive around a tensor's elements."""

_WIDEST_ITEM = 16

# A block of 4 bytes can expand to 128 KiB.
_SLICE = 1 << 10


def require_zstd() -> None:
    """Raise `MissingExtra` if zstandard is not installed."""
    try:
        import zstandard  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            "reading compressed records needs zstandard, which is not installed",
            next_command="pip install 'ckptctl[zstd]'",
        ) from error


def unpacked_limit(owner: Owner) -> int:
    """How many bytes a compressed record may expand to: its elements and their frame."""
    tensor = owner.entry
    if not isinstance(tensor, TensorEntry):
        return MAX_ENTRY_BYTES
    item_bytes = DTYPE_SIZES.get(tensor.dtype, _WIDEST_ITEM)
    return item_bytes * prod(tensor.chunks.sizes_of(owner.chunk)) + FRAME_BYTES


def check_transforms(transforms: Sequence[str]) -> None:
    """Raise `Unfit` unless a record was written unchanged or compressed with zstd alone."""
    if transforms and tuple(transforms) != (ZSTD,):
        through = ", ".join(transforms)
        raise Unfit("format.unsupported", f"it was transformed by {through} when it was saved")


def unpack(packed: bytes, transforms: Sequence[str], limit: int) -> bytes:
    """The content of a compressed record, at most `limit` bytes.

    Raises `RecordUnreadable` for a damaged one, `Unfit` for a transform other than zstd,
    `MissingExtra`.
    """
    check_transforms(transforms)
    if not transforms:
        return packed
    require_zstd()
    unpacker = Unpacker(limit)
    data = b"".join(unpacker.feed(memoryview(packed)))
    unpacker.check_ended()
    return data


class Unpacker:
    """Decompresses one frame that arrives in pieces, to at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        import zstandard

        self._error = zstandard.ZstdError
        self._limit = limit
        self._stream: ZstdDecompressionObj = zstandard.ZstdDecompressor(
            max_window_size=MAX_WINDOW
        ).decompressobj()
        self.n_bytes = 0

    def feed(self, data: memoryview) -> Iterator[bytes]:
        """Decompress the next bytes; raises `RecordUnreadable` if they are damaged."""
        for at in range(0, len(data), _SLICE):
            if self._stream.eof:
                raise RecordUnreadable("bytes follow the end of the compressed ones")
            try:
                out = self._stream.decompress(data[at : at + _SLICE])
            except self._error as error:
                if "not enough memory" in str(error):
                    raise OutOfMemory(f"a record cannot be decompressed: {error}") from error
                raise RecordUnreadable(f"it cannot be decompressed: {error}") from error
            self.n_bytes += len(out)
            if self.n_bytes > self._limit:
                raise RecordUnreadable(
                    f"it decompresses to more than the {self._limit:,} allowed bytes"
                )
            if out:
                yield out
        if self._stream.eof and self._stream.unused_data:
            raise RecordUnreadable("bytes follow the end of the compressed ones")

    def check_ended(self) -> None:
        """Raise `RecordUnreadable` if the frame is not complete."""
        if not self._stream.eof:
            raise RecordUnreadable("its compressed bytes are truncated")


# Records that are like an earlier one

_MOST_TEMPLATES = 4096
"""Tensors have fewer dtypes, shapes and lengths; records of further ones are parsed."""

_IDENTITY = ".data/serialization_id"


@dataclass(frozen=True, slots=True)
class Template:
    """A record that was accepted, as a pattern for others of its length, dtype and shape.

    `head` is all before the elements, which lie from `start` to `end`. `fields` splits the
    `n_rest` bytes behind them into constant parts in turn with what differs: the CRC-32 of
    the elements, the serialization id, its CRC-32, and both checksums again in the directory.
    `differing` numbers the members of the elements and of the serialization id.
    """

    opened: OpenRecord
    head: bytes
    start: int
    end: int
    n_rest: int
    fields: Struct
    constant: tuple[bytes, ...]
    differing: tuple[int, int]

    @classmethod
    def of(cls, opened: OpenRecord, view: View) -> Template | None:
        """The template of a record; None for a record of another form."""
        directory, elements = opened.directory, opened.elements
        identity = directory.find(_IDENTITY)
        if elements is None or identity is None or not directory.has_crcs:
            return None
        head, rest = view.get(0, elements.start), view.get(elements.end, view.length)
        n_others = sum(member.name.startswith("data/") for member in directory.members) - 1
        if head is None or rest is None or n_others or not elements.size or not identity.size:
            return None
        differs = {identity.start: f"{identity.size}s"}
        for member in (elements, identity):
            differs.update(dict.fromkeys(crc_offsets(member), "I"))
        form, at = "<", elements.end
        for offset, each in sorted(differs.items()):
            if offset < at:
                return None
            form += f"{offset - at}s{each}"
            at = offset + Struct(each).size
        fields = Struct(f"{form}{view.length - at}s")
        constant = fields.unpack(rest)[::2]
        names = [member.name for member in directory.members]
        differing = (names.index(elements.name), names.index(identity.name))
        place = (elements.start, elements.end, len(rest))
        return cls(opened, head, *place, fields, constant, differing)

    def checksums(self, rest: Buffer, at: int) -> tuple[int, int] | None:
        """The CRC-32 of the elements and of the id of a record, from what follows the elements.

        That begins at byte `at` of `rest`. None if it is not like the template.
        """
        found = self.fields.unpack_from(rest, at)
        _, crc, _, identity, _, identity_crc, _, crc_again, _, identity_crc_again, _ = found
        if (
            found[::2] == self.constant
            and crc == crc_again
            and identity_crc == identity_crc_again
            and identity.isdigit()
            and crc32(identity) == identity_crc
        ):
            return crc, identity_crc
        return None


class Alike(NamedTuple):
    """A record like a template, and the two checksums in which its directory differs."""

    template: Template
    crc: int
    identity_crc: int

    def opened(self) -> OpenRecord:
        """The record as `open_record` returns it."""
        found = self.template.opened
        members = list(found.directory.members)
        for number, crc in zip(self.template.differing, (self.crc, self.identity_crc), strict=True):
            members[number] = members[number]._replace(crc=crc)
        return replace(found, directory=replace(found.directory, members=tuple(members)))


class Templates:
    """The templates of one reading, by length, dtype and shape."""

    def __init__(self) -> None:
        self._templates: dict[tuple[int, Expected], Template] = {}

    def get(self, length: int, expected: Expected) -> Template | None:
        return self._templates.get((length, expected))

    def open(
        self, view: View, expected: Expected | None, *, with_pickle: bool = False
    ) -> OpenRecord | Need:
        """As `open_record`, which parses the records that are like none before."""
        alike = None if expected is None else self.like(view, expected)
        if alike is not None:
            return alike.opened()
        found = open_record(view, expected, with_pickle=with_pickle)
        if expected is not None and isinstance(found, OpenRecord):
            key = (view.length, expected)
            if key not in self._templates and len(self._templates) < _MOST_TEMPLATES:
                template = Template.of(found, view)
                if template is not None:
                    self._templates[key] = template
        return found

    def open_stored(
        self, view: View, expected: Expected | None, transforms: Sequence[str], limit: int
    ) -> tuple[View, OpenRecord] | Need:
        """The record in `view` with its content, decompressed to at most `limit` bytes.

        Its elements are those of this machine. Raises `RecordUnreadable` and `Unfit`.
        """
        if transforms:
            check_transforms(transforms)
            if len(view.head) < view.length:
                return Need(head=view.length)
            data = unpack(view.head, transforms, limit)
            view = View(len(data), data, data)
        if expected is None and is_plain_pickle(view.head, view.tail):
            raise Unfit(
                "format.unsupported",
                "it is a planner's own pickle, which cannot be read without running it",
            )
        found = self.open(view, expected)
        if isinstance(found, Need):
            return found
        if found.stub is not None and found.byte_order not in (None, sys.byteorder):
            raise Unfit("format.unsupported", f"it is {found.byte_order}-endian")
        return view, found

    def like(self, view: View, expected: Expected) -> Alike | None:
        """The record with its template; None for a record that must be parsed.

        Members that were read whole match their checksums.
        """
        template = self._templates.get((view.length, expected))
        if template is None:
            return None
        head, tail = view.head, view.tail
        at = len(tail) - template.n_rest
        if at < 0 or not head.startswith(template.head):
            return None
        checksums = template.checksums(tail, at)
        if checksums is None:
            return None
        if len(head) >= template.end or len(tail) >= view.length - template.start:
            elements = view.get(template.start, template.end)
            if elements is None or crc32(elements) != checksums[0]:
                return None
        return Alike(template, *checksums)

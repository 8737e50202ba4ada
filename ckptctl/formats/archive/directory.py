"""Read the directory of an archive that `torch.save` wrote.

A record is a zip archive with every member stored. Its directory lies in the
last bytes, so that the tail of a record states where everything is, and its head
holds the pickle that describes the tensor: nobody has to read the elements.
What is accepted is what torch writes and nothing more. Zip readers differ in
which of two contradicting fields they believe (torch takes the first of two
members of one name, Python's `zipfile` the last), so that a record in which
two fields contradict each other has no one meaning.

`values` decodes the pickle; `records.opening` compares it with the metadata.

Source: records written by torch 2.1 to 2.15; torch 2.13
`caffe2/serialize/inline_container.cc`, `third_party/miniz-3.0.2/miniz.c`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import NamedTuple, Protocol

from zlib_ng.zlib_ng import crc32

from ckptctl.errors import RecordUnreadable

ZIP_MAGIC = b"PK\x03\x04"
"""The first bytes of an archive, and of a file of `torch.save` since torch 1.6."""

LEGACY_HEAD = 15
"""Bytes of the pickle of a number with which `torch.save` of before torch 1.6 began a file."""
_LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""That pickle behind its protocol."""

NOT_AN_ARCHIVE = (
    "has the format from before torch 1.6, which has no checksums; torch.load and torch.save "
    "rewrite it"
)
"""Why a file that `is_before_archives` is not read, behind its name."""

TAIL = 1024
"""Bytes from the end on that hold the whole directory of a tensor's record."""

MAX_DIRECTORY = 16 << 20
"""Bytes of directory that are read at most: some 200,000 tensors in one entry."""

_END = Struct("<4s4H2IH")
_LOCATOR = Struct("<4sIQI")
_END64 = Struct("<4sQ2H2I4Q")
_CENTRAL = Struct("<4s6H3I5H2I")
_LOCAL = Struct("<4s5H3I2H")
_DESCRIPTOR = Struct("<4s3I")
_DESCRIPTOR64 = Struct("<4sI2Q")
_TRAILER = _END64.size + _LOCATOR.size + _END.size

_STORED = 0
_HAS_DESCRIPTOR = 0x0008
_UTF8_NAMES = 0x0800
_DOS_FOLDER = 0x10
"""External attribute of a folder: torch's reader returns such a member unread."""

_IN_ZIP64 = 0xFFFFFFFF
_ZIP64_EXTRA = 1
_MAX_EXTRA = 0xFFFF


_TEXTS: Mapping[str, re.Pattern[bytes]] = {
    "version": re.compile(rb"[1-9][0-9]*\n?"),
    ".format_version": re.compile(rb"[0-9]+"),
    ".storage_alignment": re.compile(rb"[0-9]+"),
    "byteorder": re.compile(rb"little|big"),
    ".data/serialization_id": re.compile(rb"[ -~]*"),
}


def is_before_archives(head: bytes) -> bool:
    """Whether a file of `torch.save` is from before torch 1.6, by its first `LEGACY_HEAD` bytes."""
    return head.startswith(_LEGACY_MAGIC, 2)


class Member(NamedTuple):
    """One member of a record; offsets are in bytes from the record's beginning.

    `name` is without the archive's folder (`data/0`), `path` is the whole name as
    it stands in the file. `header` is where the local header begins, `start` where
    the `size` bytes of the member do, `following` where the next header does, and `entry`
    where its entry in the directory does.
    """

    name: str
    path: bytes
    flags: int
    crc: int
    size: int
    header: int
    start: int
    following: int
    entry: int

    @property
    def end(self) -> int:
        """Offset of the first byte after the member's bytes."""
        return self.start + self.size


@dataclass(frozen=True, slots=True)
class RecordDirectory:
    """What lies where in a record of `length` bytes; the directory itself begins at `at`.

    `has_crcs` is False for a record that was saved without checksums.
    """

    members: tuple[Member, ...]
    has_crcs: bool
    at: int
    length: int

    def find(self, name: str) -> Member | None:
        """The member called `name`, None where there is none."""
        for member in self.members:
            if member.name == name:
                return member
        return None


class Readable(Protocol):
    """Bytes of one record, as far as they were read."""

    def get(self, start: int, end: int) -> bytes | None:
        """The bytes from `start` to `end`, None where not all of them were read."""


class View(NamedTuple):
    """The bytes of one record that were read: some at its beginning, some at its end."""

    length: int
    head: bytes
    tail: bytes

    def get(self, start: int, end: int) -> bytes | None:
        """The bytes from `start` to `end`, None where not all of them were read."""
        if end <= len(self.head):
            return self.head[start:end]
        before_tail = self.length - len(self.tail)
        if start >= before_tail and end <= self.length:
            return self.tail[start - before_tail : end - before_tail]
        return None


class KeptBytes:
    """Ranges of one record that were read, each with where it begins, in the record's order."""

    def __init__(self, pieces: Iterable[tuple[int, bytes]]) -> None:
        self._starts: list[int] = []
        self._runs: list[bytearray] = []
        end = -1
        for start, data in pieces:
            if start != end:
                self._starts.append(start)
                self._runs.append(bytearray())
            self._runs[-1] += data
            end = start + len(data)

    def get(self, start: int, end: int) -> bytes | None:
        """The bytes from `start` to `end`, None where not all of them were read."""
        at = bisect_right(self._starts, start) - 1
        if at < 0 or end > self._starts[at] + len(self._runs[at]):
            return None
        begin = start - self._starts[at]
        return bytes(self._runs[at][begin : begin + end - start])


def tail_needed(tail: bytes, length: int) -> int:
    """How many bytes at the end of a record its directory takes up.

    `tail` is at least the last 98 bytes of the record, or all of it. Raises
    `RecordUnreadable` where those are not the end of an archive.
    """
    n_members, size = _read_trailer(tail, length)
    if size > MAX_DIRECTORY:
        raise RecordUnreadable(
            f"its directory of {n_members:,} members takes {size:,} bytes, "
            f"more than the {MAX_DIRECTORY:,} that are read"
        )
    return size + _TRAILER


def parse_directory(tail: bytes, length: int) -> RecordDirectory:
    """The directory of a record of `length` bytes, from at least `tail_needed` bytes of its end.

    The members fill the record from its first byte to the directory without a
    gap; all are stored, none is encrypted, their names differ and lie in one
    folder. Raises `RecordUnreadable` for everything else.
    """
    n_members, size = _read_trailer(tail, length)
    at = length - _TRAILER - size
    pos = len(tail) - _TRAILER - size
    if pos < 0:
        raise RecordUnreadable("its directory was not read")
    end, before = pos + size, at - pos
    entries: list[_PlacedEntry] = []
    for _ in range(n_members):
        if pos + _CENTRAL.size > end:
            raise RecordUnreadable("its directory ends within an entry")
        place = pos + before
        entry, pos = _read_entry(tail, pos, end)
        entries.append((*entry, place))
    if pos != end:
        raise RecordUnreadable(f"{end - pos:,} bytes of its directory belong to no member")
    members = _laid_out(entries, at)
    return RecordDirectory(members, _has_crcs(members), at, length)


def read_directory(
    read_tail: Callable[[int], bytes], length: int, tail: bytes = b""
) -> tuple[RecordDirectory, bytes]:
    """The directory of a record of `length` bytes, and the tail that it was found in.

    `read_tail` returns so many bytes from the end of the record. It is called once if
    `tail` was not read already, and again for a directory that is longer than the tail.
    Raises `RecordUnreadable`.
    """
    tail = tail or read_tail(min(TAIL, length))
    needed = tail_needed(tail, length)
    if needed > len(tail):
        tail = read_tail(needed)
    return parse_directory(tail, length), tail


def parse_record(data: bytes) -> tuple[RecordDirectory, View]:
    """The directory of a record that is in memory as a whole; raises `RecordUnreadable`."""
    return parse_directory(data, len(data)), View(len(data), data, data)


def check_headers(directory: RecordDirectory, view: Readable) -> None:
    """Raise `RecordUnreadable` where a member's own header contradicts its directory.

    Checks the local headers and data descriptors that were read.
    """
    for member in directory.members:
        header = view.get(member.header, member.header + _LOCAL.size + len(member.path))
        if header is not None:
            _check_header(header, member)
        descriptor = view.get(member.end, member.following)
        if descriptor:
            form = _DESCRIPTOR if len(descriptor) == _DESCRIPTOR.size else _DESCRIPTOR64
            if form.unpack(descriptor) != (b"PK\7\x08", member.crc, member.size, member.size):
                raise RecordUnreadable(
                    f"what follows its member {member.name!r} contradicts its directory"
                )


def check_texts(directory: RecordDirectory, view: Readable) -> None:
    """Raise `RecordUnreadable` where a member that torch reads as a text is not one.

    Finds what a checksum would, in records that were saved without.
    """
    for member in directory.members:
        form = _TEXTS.get(member.name)
        text = form and view.get(member.start, member.end)
        if form and text is not None and not form.fullmatch(text):
            raise RecordUnreadable(f"its {member.name} is {text[:40]!r}")


def wrong_crcs(directory: RecordDirectory, view: Readable) -> tuple[str, ...]:
    """The members that were read whole and do not match their CRC-32."""
    if not directory.has_crcs:
        return ()
    return tuple(
        member.name
        for member in directory.members
        if (data := view.get(member.start, member.end)) is not None and crc32(data) != member.crc
    )


def read_member(directory: RecordDirectory, name: str, view: Readable) -> bytes | None:
    """The bytes of a member; None where there is no such member or it was not read whole."""
    member = directory.find(name)
    return None if member is None else view.get(member.start, member.end)


def _read_trailer(tail: bytes, length: int) -> tuple[int, int]:
    """Number of members, and size of their directory in bytes."""
    if length < _TRAILER or len(tail) < _TRAILER:
        raise RecordUnreadable(f"it is {length:,} bytes, an archive has at least {_TRAILER}")
    at = len(tail) - _TRAILER
    end = _END.unpack_from(tail, at + _END64.size + _LOCATOR.size)
    if end[0] != b"PK\5\6":
        raise RecordUnreadable("it does not end as an archive does")
    locator = _LOCATOR.unpack_from(tail, at + _END64.size)
    end64 = _END64.unpack_from(tail, at)
    if locator[0] != b"PK\6\7" or end64[0] != b"PK\6\6":
        raise RecordUnreadable("it has no zip64 end, which torch always writes")
    n_members, size, offset = end64[7:]
    agreed = (
        locator[1:] == (0, length - _TRAILER, 1)
        and end64[1] == _END64.size - 12
        and end64[4:7] == (0, 0, n_members)
        and end[1:3] == (0, 0)
        and end[3] == end[4] == min(n_members, 0xFFFF)
        and end[5] == min(size, _IN_ZIP64)
        and end[6] == min(offset, _IN_ZIP64)
        and end[7] == 0
    )
    if not agreed or offset + size != length - _TRAILER:
        raise RecordUnreadable("the fields that end it contradict each other")
    if n_members * _CENTRAL.size > size:
        raise RecordUnreadable(f"{n_members:,} members do not fit its directory of {size:,} bytes")
    return n_members, size


def crc_offsets(of: Member) -> tuple[int, ...]:
    """Where the CRC-32 of a member is stored: in its descriptor and in the directory.

    A member without bytes has no descriptor.
    """
    in_directory = of.entry + _CENTRAL_CRC
    return (of.end + _DESCRIPTOR_CRC, in_directory) if of.size else (in_directory,)


_CENTRAL_CRC = 16
_DESCRIPTOR_CRC = 4
"""Offsets of the CRC-32 in an entry of the directory and in a descriptor."""

_Entry = tuple[str, str, bytes, int, int, int, int]
"""Folder, name, path, flags, CRC, size, offset of the local header."""
_PlacedEntry = tuple[str, str, bytes, int, int, int, int, int]
"""The same, and where the entry begins."""


def _read_entry(tail: bytes, pos: int, end: int) -> tuple[_Entry, int]:
    """One entry of the directory, and where the next one begins."""
    fields = _CENTRAL.unpack_from(tail, pos)
    signature, _, _, flags, method, _, _, crc, stored, size = fields[:10]
    n_path, n_extra, n_comment, disk, _, attributes, header = fields[10:]
    after_path = pos + _CENTRAL.size + n_path
    following = after_path + n_extra
    if signature != b"PK\1\2" or following > end:
        raise RecordUnreadable("its directory is damaged")
    path = tail[pos + _CENTRAL.size : after_path]
    folder, name = _split_path(path)
    if method != _STORED:
        raise RecordUnreadable(f"its member {name!r} is compressed (method {method})")
    if flags & ~(_HAS_DESCRIPTOR | _UTF8_NAMES) or not flags & _UTF8_NAMES:
        raise RecordUnreadable(f"its member {name!r} has flags 0x{flags:04x}")
    if n_comment or disk or attributes & _DOS_FOLDER:
        raise RecordUnreadable(f"its member {name!r} is not a plain file in one piece")
    if n_extra or _IN_ZIP64 in (size, stored, header):
        extra = tail[after_path:following]
        size, stored, header = _read_zip64(name, extra, size, stored, header)
    if size != stored:
        raise RecordUnreadable(f"its member {name!r} has two sizes, {size:,} and {stored:,}")
    return (folder, name, path, flags, crc, size, header), following


def _read_zip64(name: str, extra: bytes, *fields: int) -> list[int]:
    """The fields, each marked one replaced by its 64-bit value, in this order."""
    n_wide = fields.count(_IN_ZIP64)
    wide = Struct(f"<2H{n_wide}Q")
    if len(extra) != wide.size or wide.unpack(extra)[:2] != (_ZIP64_EXTRA, 8 * n_wide):
        raise RecordUnreadable(f"the zip64 field of its member {name!r} is damaged")
    values = iter(wide.unpack(extra)[2:])
    return [next(values) if field == _IN_ZIP64 else field for field in fields]


@lru_cache(maxsize=4096)
def _split_path(path: bytes) -> tuple[str, str]:
    """Folder and name of a member: `archive/data/0` is `data/0` in `archive`."""
    try:
        folder, *parts = path.decode().split("/")
    except UnicodeDecodeError as error:
        raise RecordUnreadable("the name of a member is not UTF-8") from error
    if not parts or any(part in ("", ".", "..") for part in (folder, *parts)):
        raise RecordUnreadable(f"a member is called {path.decode()!r}")
    return folder, "/".join(parts)


def _laid_out(entries: list[_PlacedEntry], directory_at: int) -> tuple[Member, ...]:
    """The members in their places: each begins where the one before it ends."""
    names = {entry[1] for entry in entries}
    if len({name.lower() for name in names}) != len(entries):  # torch's reader ignores case
        raise RecordUnreadable("two of its members have one name")
    if len({entry[0] for entry in entries}) > 1:
        raise RecordUnreadable("its members lie in more than one folder")
    if "version" not in names or "data.pkl" not in names:
        raise RecordUnreadable("it holds no `version` and `data.pkl`, as torch's archives do")
    members = []
    following = directory_at
    for _, name, path, flags, crc, size, header, entry in reversed(entries):
        start = following - _descriptor_size(flags, size, header) - size
        if bool(flags & _HAS_DESCRIPTOR) != bool(size):
            raise RecordUnreadable(f"its member {name!r} of {size:,} bytes has flags 0x{flags:04x}")
        if not 0 <= start - header - _LOCAL.size - len(path) <= _MAX_EXTRA:
            raise RecordUnreadable(f"its member {name!r} does not end where the next one begins")
        members.append(Member(name, path, flags, crc, size, header, start, following, entry))
        following = header
    if following != 0:
        raise RecordUnreadable(f"{following:,} bytes lie before its first member")
    return tuple(reversed(members))


def _descriptor_size(flags: int, size: int, header: int) -> int:
    """Bytes between a member and the next one: its sizes once more, wide where it needs zip64."""
    if not flags & _HAS_DESCRIPTOR:
        return 0
    return _DESCRIPTOR64.size if max(size, header) >= _IN_ZIP64 else _DESCRIPTOR.size


def _has_crcs(members: tuple[Member, ...]) -> bool:
    """The bytes of `version` are never such that their CRC-32 is 0."""
    if any(member.name == "version" and member.crc for member in members):
        return True
    if any(member.crc for member in members):
        raise RecordUnreadable("some of its members have a checksum, and `version` has none")
    return False


def _check_header(header: bytes, member: Member) -> None:
    signature, _, flags, method, _, _, *sizes, n_path, n_extra = _LOCAL.unpack_from(header)
    if signature != b"PK\3\4":
        raise RecordUnreadable(f"its member {member.name!r} does not begin with a header")
    if (
        (flags, method, n_path) != (member.flags, _STORED, len(member.path))
        or sizes != [0, 0, 0]  # they come after the member, in its descriptor
        or header[_LOCAL.size :] != member.path
        or member.header + _LOCAL.size + n_path + n_extra != member.start
    ):
        raise RecordUnreadable(
            f"the header of its member {member.name!r} contradicts its directory"
        )

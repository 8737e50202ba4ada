"""Write an archive as `torch.save` would write it, and check that one is so.

Everything around the elements is known before the first of them: how many bytes come
before and after, and so where each record of a file will lie. Only the checksums are
missing: local headers hold neither sizes nor checksums, which follow the elements and
stand in the directory. The output is byte for byte that of torch 2.13, including its
`serialization_id`.

`directory` reads what a record states and refuses contradictions. `check_frame` compares the
rest with what torch writes: padding, and fields that no reader uses. A difference there harms
no load, but shows that something changed the file. Members themselves have checksums.

Source: torch 2.13 `torch/serialization.py`, `torch/_tensor.py`,
`caffe2/serialize/inline_container.cc` (padding, `serialization_id`),
`third_party/miniz-3.0.2/miniz.c`; records written by torch 2.1 to 2.15.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from math import prod
from struct import pack

from zlib_ng.zlib_ng import crc32

from ckptctl.errors import RecordUnreadable
from ckptctl.formats.archive.directory import Member, Readable, RecordDirectory
from ckptctl.formats.pickles.values import STORAGE_DTYPES, strides_of
from ckptctl.model import DTYPE_SIZES

ALIGNMENT = 64
_FOLDER = b"archive/"
_IN_ZIP64 = 0xFFFFFFFF
_WORD = 1 << 64
_GOLDEN = 0x9E3779B9
_MOST_MEMBERS = 0xFFFF
_HAS_DESCRIPTOR = 0x0808
_EMPTY = 0x0800

SMALL_MEMBERS = (
    (b".format_version", b"1"),
    (b".storage_alignment", b"%d" % ALIGNMENT),
    (b"byteorder", b"little"),
)
"""What stands behind the pickle in every archive."""

VERSION = (b"version", b"3\n")
"""What stands behind the elements."""


@dataclass(frozen=True, slots=True)
class PlacedMember:
    """One member: where it begins, and what is written around its bytes."""

    path: bytes
    data: bytes
    size: int
    at: int
    header: bytes

    @property
    def following(self) -> int:
        """Where the next member begins."""
        return self.at + len(self.header) + self.size + len(self.descriptor(0))

    def descriptor(self, crc: int) -> bytes:
        """What follows the bytes."""
        if not self.size:
            return b""
        form = "<4sI2Q" if max(self.size, self.at) >= _IN_ZIP64 else "<4s3I"
        return pack(form, b"PK\7\x08", crc, self.size, self.size)

    def entry(self, crc: int) -> bytes:
        """The entry of the member in the directory."""
        wide = _wide(self.size, self.at)
        size, at = min(self.size, _IN_ZIP64), min(self.at, _IN_ZIP64)
        flags = _HAS_DESCRIPTOR if self.size else _EMPTY
        fields = (0, 0, flags, 0, 0, 0, crc, size, size, len(self.path), len(wide), 0, 0, 0, 0, at)
        return pack("<4s6H3I5H2I", b"PK\1\2", *fields) + self.path + wide

    def whole(self, crc: int) -> bytes:
        """A member whose bytes are known, with what is around them."""
        return self.header + self.data + self.descriptor(crc)


def place(at: int, name: bytes, data: bytes, size: int) -> PlacedMember:
    """The member that begins at byte `at`; its bytes are aligned."""
    path = _FOLDER + name
    # miniz gives the size that is stored as 0 here, and rightly in the directory.
    wide = _wide(size, at, stored=0)
    start = at + 30 + len(path) + len(wide) + 4
    n_pad = -start % ALIGNMENT
    extra = wide + b"FB" + pack("<H", n_pad) + b"Z" * n_pad
    flags = _HAS_DESCRIPTOR if size else _EMPTY
    fields = (0, flags, 0, 0, 0, 0, 0, 0, len(path), len(extra))
    return PlacedMember(path, data, size, at, pack("<4s5H3I2H", b"PK\3\4", *fields) + path + extra)


def _wide(size: int, at: int, stored: int | None = None) -> bytes:
    """The zip64 field of a member that is long, or lies far behind."""
    wide = [size, size if stored is None else stored] if size >= _IN_ZIP64 else []
    wide += [at] if at >= _IN_ZIP64 else []
    return pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""


def _fold(crcs: Iterable[int]) -> int:
    """The second half of `serialization_id`: what the checksums of the members come to."""
    fold = 0
    for one in crcs:
        fold ^= (one + _GOLDEN + (fold << 6) + (fold >> 2)) % _WORD
    return fold


def end(n_members: int, size: int, at: int) -> bytes:
    """What ends an archive whose directory of `size` bytes begins at byte `at`."""
    few = min(n_members, _MOST_MEMBERS)
    small, near = min(size, _IN_ZIP64), min(at, _IN_ZIP64)
    return (
        pack("<4sQ2H2I4Q", b"PK\6\6", 44, 798, 45, 0, 0, n_members, n_members, size, at)
        + pack("<4sIQI", b"PK\6\7", 0, at + size, 1)
        + pack("<4s4H2IH", b"PK\5\6", 0, 0, few, few, small, near, 0)
    )


ID = b".data/serialization_id"
_ID_DIGITS = 40
_OF_NAMES = b"15728199511854643026"
"""The first half of `serialization_id`: a hash of the names of a tensor's members."""

_OF_VALUE_NAMES = b"02908468677763122924"
"""The same of a record without elements."""

_STORAGES: Mapping[str, str] = {dtype: storage for storage, dtype in STORAGE_DTYPES.items()}
_QUANTIZED = frozenset({"quint8", "qint8", "qint32", "quint4x2", "quint2x4"})

WRITABLE = frozenset(DTYPE_SIZES) - _QUANTIZED
"""The dtypes of which a record can be made; quantized ones carry scales of their own."""


class Archive:
    """An archive but for the elements of its tensors: what is before, between and behind them.

    `sizes` are the bytes of each storage, in the order of their keys `0`, `1`, …; `n_bytes`
    those of the whole archive. `of_names` is the first half of `serialization_id`, where the
    one of torch is known.
    """

    def __init__(self, pickle: bytes, sizes: Sequence[int] = (), of_names: bytes = b"") -> None:
        small = ((b"data.pkl", pickle), *SMALL_MEMBERS)
        members = [(name, data, len(data)) for name, data in small]
        members += [(b"data/%d" % key, b"", size) for key, size in enumerate(sizes)]
        members += [(*VERSION, len(VERSION[1])), (ID, b"", _ID_DIGITS)]
        self._members: list[PlacedMember] = []
        at = 0
        for name, data, size in members:
            self._members.append(place(at, name, data, size))
            at = self._members[-1].following
        front = self._members[: len(small)]
        self._storages = self._members[len(small) : -2]
        self._crcs = [crc32(member.data) for member in front]
        self._front = b"".join(m.whole(crc) for m, crc in zip(front, self._crcs, strict=True))
        if not of_names:
            # torch, too, makes it of the members' names, by a hash of its own.
            names = hashlib.sha256(b"\0".join(member.path for member in self._members)).digest()
            of_names = b"%020d" % int.from_bytes(names[:8], "little")
        self._of_names = of_names
        n_directory = sum(len(member.entry(0)) for member in self._members)
        self.n_bytes = at + n_directory + len(end(0, 0, 0))

    def between(self, crcs: Sequence[int]) -> bytes:
        """What stands behind the first storages, whose checksums are `crcs`, up to the next."""
        n = len(crcs)
        before = self._storages[n - 1].descriptor(crcs[-1]) if n else self._front
        if n < len(self._storages):
            return before + self._storages[n].header
        version, last = self._members[-2:]
        every = [*self._crcs, *crcs, crc32(version.data)]
        identity = self._of_names + b"%020d" % _fold(every)
        parts = [before, version.whole(every[-1]), last.header, identity]
        every.append(crc32(identity))
        directory = [m.entry(crc) for m, crc in zip(self._members, every, strict=True)]
        parts += [last.descriptor(every[-1]), *directory]
        return b"".join((*parts, end(len(every), sum(map(len, directory)), last.following)))


@lru_cache(maxsize=4096)
def tensor_frame(
    dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None
) -> Archive:
    """The record of a tensor whose `prod(shape)` elements of `dtype` lie without gaps.

    They are in row-major order, or in that of `strides`, which are in elements. `dtype` is
    one of `WRITABLE`.
    """
    numbers = count()
    pickled = tensor_value(dtype, shape, "0", strides, lambda: b"q%c" % next(numbers))
    return Archive(b"\x80\2" + pickled + b".", (prod(shape) * DTYPE_SIZES[dtype],), _OF_NAMES)


def value_record(pickled: bytes) -> bytes:
    """The record of a value that is no tensor, from its pickle."""
    return Archive(pickled, of_names=_OF_VALUE_NAMES).between(())


def tensor_value(
    dtype: str,
    shape: Sequence[int],
    key: str,
    strides: Sequence[int] | None = None,
    memoized: Callable[[], bytes] = bytes,
) -> bytes:
    """The pickle of a tensor whose storage is called `key`, at protocol 2.

    It is row-major, or has `strides`. `memoized` returns what puts a value into the memo, as
    `pickle` does it; without it there is no memo.
    """

    def dims(values: Sequence[int]) -> bytes:
        items = b"".join(map(pickled_integer, values))
        if not values:
            return b")"
        if len(values) <= 3:
            return items + bytes((0x84 + len(values),)) + memoized()
        return b"(" + items + b"t" + memoized()

    def string(value: str) -> bytes:
        return b"X" + pack("<I", len(value)) + value.encode() + memoized()

    n_elements, storage = prod(shape), _STORAGES.get(dtype)
    kind = f"torch\n{storage}\n" if storage else "torch.storage\nUntypedStorage\n"
    n_stored = n_elements if storage else n_elements * DTYPE_SIZES[dtype]
    pickled = b"ctorch._utils\n_rebuild_tensor_v%d\n" % (2 if storage else 3) + memoized()
    pickled += b"((" + string("storage") + b"c" + kind.encode() + memoized()
    pickled += string(key) + string("cpu") + pickled_integer(n_stored) + b"t" + memoized()
    pickled += b"QK\0" + dims(shape)
    pickled += dims(strides_of(shape) if strides is None else strides) + b"\x89"
    pickled += b"ccollections\nOrderedDict\n" + memoized() + b")R" + memoized()
    if not storage:
        pickled += b"ctorch\n" + dtype.encode() + b"\n" + memoized()
    return pickled + b"t" + memoized() + b"R" + memoized()


def pickled_integer(value: int) -> bytes:
    """An integer as `pickle` writes it from protocol 2 on."""
    if 0 <= value < 1 << 8:
        return pack("<cB", b"K", value)
    if 0 <= value < 1 << 16:
        return pack("<cH", b"M", value)
    if -(1 << 31) <= value < 1 << 31:
        return pack("<ci", b"J", value)
    n_bytes = value.bit_length() // 8 + 1
    return pack("<cB", b"\x8a", n_bytes) + value.to_bytes(n_bytes, "little", signed=True)


_CENTRAL = 46
_LOCAL = 30
_PADDING = b"FB"
_ZIP64 = b"\1\0"
_PAD = b"Z"

# Versions, times and attributes: alike in all members of a record.
_ALIKE_CENTRAL = (slice(4, 8), slice(12, 16), slice(36, 42))
_ALIKE_LOCAL = (slice(4, 6), slice(10, 14))


def check_frame(directory: RecordDirectory, view: Readable) -> None:
    """Raise `RecordUnreadable` where the frame of a record is not as torch writes it.

    Checks what was read of it, after `check_headers`. The members must agree in the
    fields without a meaning, whatever their values: a later torch may write others.
    """
    usual: tuple[list[bytes], list[bytes]] | None = None
    for member in directory.members:
        entry = view.get(member.entry, member.entry + _CENTRAL)
        header = view.get(member.header, member.start)
        if entry is None or header is None:
            return
        _check_extra(member, header[_LOCAL + len(member.path) :])
        alike = ([entry[part] for part in _ALIKE_CENTRAL], [header[part] for part in _ALIKE_LOCAL])
        if usual is not None and alike != usual:
            raise RecordUnreadable(
                f"its member {member.name!r} has other versions, times or attributes than the "
                "members before it"
            )
        usual = alike


def _check_extra(member: Member, extra: bytes) -> None:
    """What fills the space between a member's name and its bytes."""
    wide = _wide(member.size, member.header, stored=0) if extra.startswith(_ZIP64) else b""
    rest = extra[len(wide) :]
    n_pad = int.from_bytes(rest[2:4], "little")
    sound = (
        extra.startswith(wide)
        and (rest[:2] == _PADDING or not rest)
        and len(rest) in (0, 4 + n_pad)
        and rest.count(_PAD, 4) == max(0, len(rest) - 4)
    )
    if not sound:
        raise RecordUnreadable(f"the padding before its member {member.name!r} is damaged")


def saved_fold(directory: RecordDirectory, view: Readable) -> int | None:
    """The combined checksum that `serialization_id` states; None where it states none.

    Not for a record with an empty member: torch then adds a value that cannot be computed again.
    """
    member = directory.find(ID.decode())
    if member is None or not directory.has_crcs or not all(m.size for m in directory.members):
        return None
    text = view.get(member.start, member.end)
    if text is None or len(text) != _ID_DIGITS or not text.isdigit():
        return None
    return int(text[_ID_DIGITS // 2 :])


def fold_of(directory: RecordDirectory) -> int:
    """What the checksums in a directory come to, as torch folds them into `serialization_id`."""
    name = ID.decode()
    return _fold(member.crc for member in directory.members if member.name != name)

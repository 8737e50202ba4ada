"""How is a record written, as `torch.save` would write it?

Everything around the elements is known before the first of them is: how many bytes
come before and after, and so where each record of a file will lie. Only checksums are
missing, and they stand behind the elements. The bytes are those that torch 2.13
writes, its `serialization_id` included. How records are read is `records`' question.

Source: torch 2.13 `torch/serialization.py`, `torch/_tensor.py`,
`caffe2/serialize/inline_container.cc`, `third_party/miniz-3.0.2/miniz.c`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import pack

from ckptctl.formats.record_frames import GOLDEN, WORD
from ckptctl.formats.values import STORAGE_DTYPES
from ckptctl.model import DTYPE_SIZES

_ALIGNMENT = 64
_FOLDER = b"archive/"
_IN_ZIP64 = 0xFFFFFFFF
_HAS_DESCRIPTOR = 0x0808
_EMPTY = 0x0800

_ID = b".data/serialization_id"
_OF_NAMES = b"15728199511854643026"
"""The first half of `serialization_id`: a hash of the names of a tensor's members."""

_OF_VALUE_NAMES = b"02908468677763122924"
"""The same of a record without elements."""

_STORAGES: Mapping[str, str] = {dtype: storage for storage, dtype in STORAGE_DTYPES.items()}
_QUANTIZED = frozenset({"quint8", "qint8", "qint32", "quint4x2", "quint2x4"})

WRITABLE = frozenset(DTYPE_SIZES) - _QUANTIZED
"""The dtypes of which a record can be made; quantized ones carry scales of their own."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What surrounds the elements of one tensor: `before` them, and `n_after` bytes behind.

    `n_data` are the bytes of the elements, `length` those of the whole record.
    """

    before: bytes
    n_data: int
    n_after: int
    _placed: tuple[_Placed, ...]
    _crcs: tuple[int, ...]

    @property
    def length(self) -> int:
        """The bytes of the whole record."""
        return len(self.before) + self.n_data + self.n_after

    def after(self, crc: int) -> bytes:
        """What follows the elements, whose CRC-32 is `crc`."""
        return b"".join(self._pieces(crc))

    def _pieces(self, crc: int) -> Iterator[bytes]:
        from zlib_ng.zlib_ng import crc32

        data, version, last = self._placed[-3:]
        crcs = [*self._crcs, crc, crc32(version.data)]
        identity = _OF_NAMES + _folded(crcs)
        crcs.append(crc32(identity))
        yield data.descriptor(crc)
        yield version.header + version.data + version.descriptor(crcs[-2])
        yield last.header + identity + last.descriptor(crcs[-1])
        at = last.following
        directory = [member.entry(one) for member, one in zip(self._placed, crcs, strict=True)]
        yield from directory
        yield _end(len(directory), sum(map(len, directory)), at)


@dataclass(frozen=True, slots=True)
class _Placed:
    """One member: where it begins, and what is written around its bytes."""

    path: bytes
    data: bytes
    size: int
    at: int
    header: bytes

    @property
    def following(self) -> int:
        return self.at + len(self.header) + self.size + len(self.descriptor(0))

    def descriptor(self, crc: int) -> bytes:
        if not self.size:
            return b""
        form = "<4sI2Q" if max(self.size, self.at) >= _IN_ZIP64 else "<4s3I"
        return pack(form, b"PK\7\x08", crc, self.size, self.size)

    def entry(self, crc: int) -> bytes:
        wide = _wide(self.size, self.at)
        size, at = min(self.size, _IN_ZIP64), min(self.at, _IN_ZIP64)
        flags = _HAS_DESCRIPTOR if self.size else _EMPTY
        fields = (0, 0, flags, 0, 0, 0, crc, size, size, len(self.path), len(wide), 0, 0, 0, 0, at)
        return pack("<4s6H3I5H2I", b"PK\1\2", *fields) + self.path + wide


@lru_cache(maxsize=4096)
def tensor_frame(dtype: str, shape: tuple[int, ...]) -> Frame:
    """The frame of a tensor in row-major order; its elements are `prod(shape)` of `dtype`.

    `dtype` is one of `WRITABLE`.
    """
    from zlib_ng.zlib_ng import crc32

    n_elements = 1
    for dim in shape:
        n_elements *= dim
    n_data = n_elements * DTYPE_SIZES[dtype]
    small = (
        (b"data.pkl", _tensor_pickle(dtype, shape, n_elements)),
        (b".format_version", b"1"),
        (b".storage_alignment", b"%d" % _ALIGNMENT),
        (b"byteorder", b"little"),
    )
    placed: list[_Placed] = []
    for name, data in small:
        placed.append(_place(placed, name, data, len(data)))
    before = b"".join(p.header + p.data + p.descriptor(crc32(p.data)) for p in placed)
    placed.append(_place(placed, b"data/0", b"", n_data))
    before += placed[-1].header
    placed.append(_place(placed, b"version", b"3\n", 2))
    placed.append(_place(placed, _ID, b"", 2 * len(_OF_NAMES)))
    crcs = tuple(crc32(p.data) for p in placed[:-3])
    directory = sum(len(p.entry(0)) for p in placed)
    length = placed[-1].following + directory + len(_end(0, 0, 0))
    return Frame(before, n_data, length - len(before) - n_data, tuple(placed), crcs)


def value_record(pickled: bytes) -> bytes:
    """The record of a value that is no tensor, from its pickle."""
    from zlib_ng.zlib_ng import crc32

    small = [
        (b"data.pkl", pickled),
        (b".format_version", b"1"),
        (b".storage_alignment", b"%d" % _ALIGNMENT),
        (b"byteorder", b"little"),
        (b"version", b"3\n"),
    ]
    small.append((_ID, _OF_VALUE_NAMES + _folded([crc32(data) for _, data in small])))
    placed: list[_Placed] = []
    for name, data in small:
        placed.append(_place(placed, name, data, len(data)))
    crcs = [crc32(member.data) for member in placed]
    members = zip(placed, crcs, strict=True)
    written = b"".join(m.header + m.data + m.descriptor(crc) for m, crc in members)
    directory = b"".join(m.entry(crc) for m, crc in zip(placed, crcs, strict=True))
    return written + directory + _end(len(placed), len(directory), len(written))


def _folded(crcs: Sequence[int]) -> bytes:
    """The second half of `serialization_id`: what the checksums of the members come to."""
    fold = 0
    for one in crcs:
        fold ^= (one + GOLDEN + (fold << 6) + (fold >> 2)) % WORD
    return b"%020d" % fold


def _place(before: Sequence[_Placed], name: bytes, data: bytes, size: int) -> _Placed:
    at = before[-1].following if before else 0
    path = _FOLDER + name
    # miniz gives the size that is stored as 0 here, and rightly in the directory.
    wide = _wide(size, at, stored=0)
    start = at + 30 + len(path) + len(wide) + 4
    n_pad = -start % _ALIGNMENT
    extra = wide + b"FB" + pack("<H", n_pad) + b"Z" * n_pad
    flags = _HAS_DESCRIPTOR if size else _EMPTY
    fields = (0, flags, 0, 0, 0, 0, 0, 0, len(path), len(extra))
    return _Placed(path, data, size, at, pack("<4s5H3I2H", b"PK\3\4", *fields) + path + extra)


def _wide(size: int, at: int, stored: int | None = None) -> bytes:
    """The zip64 field of a member that is long, or lies far behind."""
    wide = [size, size if stored is None else stored] if size >= _IN_ZIP64 else []
    wide += [at] if at >= _IN_ZIP64 else []
    return pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""


def _end(n_members: int, size: int, at: int) -> bytes:
    return (
        pack("<4sQ2H2I4Q", b"PK\6\6", 44, 798, 45, 0, 0, n_members, n_members, size, at)
        + pack("<4sIQI", b"PK\6\7", 0, at + size, 1)
        + pack("<4s4H2IH", b"PK\5\6", 0, 0, n_members, n_members, size, min(at, _IN_ZIP64), 0)
    )


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a row-major tensor, in elements, as torch counts them."""
    strides: list[int] = []
    step = 1
    for dim in reversed(shape):
        strides.append(step)
        step *= max(dim, 1)
    return tuple(reversed(strides))


def _tensor_pickle(dtype: str, shape: tuple[int, ...], n_elements: int) -> bytes:
    """What `pickle` writes of a tensor at protocol 2, memo and all."""
    storage = _STORAGES.get(dtype)
    n_stored = n_elements if storage else n_elements * DTYPE_SIZES[dtype]
    kind = f"torch\n{storage}\n" if storage else "torch.storage\nUntypedStorage\n"
    memo = 6

    def memoized() -> bytes:
        nonlocal memo
        memo += 1
        return b"q" + bytes((memo - 1,))

    def dims(values: Sequence[int]) -> bytes:
        items = b"".join(map(_integer, values))
        if not values:
            return b")"
        if len(values) <= 3:
            return items + bytes((0x84 + len(values),)) + memoized()
        return b"(" + items + b"t" + memoized()

    pickled = b"\x80\2ctorch._utils\n_rebuild_tensor_v%d\nq\0((X\7\0\0\0storageq\1c" % (
        2 if storage else 3
    )
    pickled += kind.encode() + b"q\2X\1\0\0\0000q\3X\3\0\0\0cpuq\4" + _integer(n_stored)
    pickled += b"tq\5QK\0" + dims(shape) + dims(strides_of(shape)) + b"\x89"
    pickled += b"ccollections\nOrderedDict\n" + memoized() + b")R" + memoized()
    if not storage:
        pickled += b"ctorch\n" + dtype.encode() + b"\n" + memoized()
    return pickled + b"t" + memoized() + b"R" + memoized() + b"."


def _integer(value: int) -> bytes:
    if value < 1 << 8:
        return pack("<cB", b"K", value)
    if value < 1 << 16:
        return pack("<cH", b"M", value)
    if value < 1 << 31:
        return pack("<ci", b"J", value)
    n_bytes = value.bit_length() // 8 + 1
    return pack("<cB", b"\x8a", n_bytes) + value.to_bytes(n_bytes, "little", signed=True)

"""Write the members of an archive as torch's own writer does.

The position of each member is known before its bytes are: local headers hold neither
sizes nor checksums, which follow after the bytes and in the directory. The output is
byte for byte that of torch 2.13.

Source: torch 2.13 `caffe2/serialize/inline_container.cc`, `third_party/miniz-3.0.2/miniz.c`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack

from ckptctl.formats.archive.frame import GOLDEN, WORD

ALIGNMENT = 64
_FOLDER = b"archive/"
_IN_ZIP64 = 0xFFFFFFFF
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
class Placed:
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
        """What the directory says of the member."""
        wide = _wide(self.size, self.at)
        size, at = min(self.size, _IN_ZIP64), min(self.at, _IN_ZIP64)
        flags = _HAS_DESCRIPTOR if self.size else _EMPTY
        fields = (0, 0, flags, 0, 0, 0, crc, size, size, len(self.path), len(wide), 0, 0, 0, 0, at)
        return pack("<4s6H3I5H2I", b"PK\1\2", *fields) + self.path + wide

    def whole(self, crc: int) -> bytes:
        """A member whose bytes are known, with what is around them."""
        return self.header + self.data + self.descriptor(crc)


def place(at: int, name: bytes, data: bytes, size: int) -> Placed:
    """The member that begins at byte `at`; its bytes are aligned."""
    path = _FOLDER + name
    # miniz gives the size that is stored as 0 here, and rightly in the directory.
    wide = _wide(size, at, stored=0)
    start = at + 30 + len(path) + len(wide) + 4
    n_pad = -start % ALIGNMENT
    extra = wide + b"FB" + pack("<H", n_pad) + b"Z" * n_pad
    flags = _HAS_DESCRIPTOR if size else _EMPTY
    fields = (0, flags, 0, 0, 0, 0, 0, 0, len(path), len(extra))
    return Placed(path, data, size, at, pack("<4s5H3I2H", b"PK\3\4", *fields) + path + extra)


def _wide(size: int, at: int, stored: int | None = None) -> bytes:
    """The zip64 field of a member that is long, or lies far behind."""
    wide = [size, size if stored is None else stored] if size >= _IN_ZIP64 else []
    wide += [at] if at >= _IN_ZIP64 else []
    return pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""


def folded(crcs: Sequence[int]) -> bytes:
    """The second half of `serialization_id`: what the checksums of the members come to."""
    fold = 0
    for one in crcs:
        fold ^= (one + GOLDEN + (fold << 6) + (fold >> 2)) % WORD
    return b"%020d" % fold


def end(n_members: int, size: int, at: int) -> bytes:
    """What ends an archive whose directory of `size` bytes begins at byte `at`."""
    few = min(n_members, _MOST_MEMBERS)
    small, near = min(size, _IN_ZIP64), min(at, _IN_ZIP64)
    return (
        pack("<4sQ2H2I4Q", b"PK\6\6", 44, 798, 45, 0, 0, n_members, n_members, size, at)
        + pack("<4sIQI", b"PK\6\7", 0, at + size, 1)
        + pack("<4s4H2IH", b"PK\5\6", 0, 0, few, few, small, near, 0)
    )

"""Records that a test builds byte by byte, with another value in one field.

`archive` writes what torch writes, which `test_records` proves on real ones; each
`Made` member may then have one wrong value. Real records are better wherever a
byte of them can simply be changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack
from zlib import crc32

FLAGS = 0x0808
EMPTY_FLAGS = 0x0800


@dataclass
class Made:
    """One member. What is None is as torch writes it."""

    name: str
    data: bytes
    flags: int | None = None
    method: int = 0
    crc: int | None = None
    size: int | None = None
    stored: int | None = None
    attributes: int = 0
    local_path: bytes | None = None
    folder: str = "archive"
    zip64: bool = False


def archive(members: Sequence[Made], *, prefix: bytes = b"") -> bytes:
    """An archive of the members; `prefix` lies in front of the first, and is accounted for."""
    body = bytearray(prefix)
    entries = bytearray()
    for member in members:
        path = f"{member.folder}/{member.name}".encode()
        flags = member.flags
        if flags is None:
            flags = FLAGS if member.data else EMPTY_FLAGS
        crc = crc32(member.data) if member.crc is None else member.crc
        size = len(member.data) if member.size is None else member.size
        stored = size if member.stored is None else member.stored
        header = len(body)
        n_padding = -(header + 30 + len(path) + 4) % 64
        extra = pack("<2sH", b"FB", n_padding) + b"Z" * n_padding
        local_path = path if member.local_path is None else member.local_path
        body += pack(
            "<4s5H3I2H", b"PK\3\4", 0, flags, member.method, 0, 0, 0, 0, 0, len(path), len(extra)
        )
        body += local_path + extra + member.data
        if flags & 8:
            body += pack("<4s3I", b"PK\7\x08", crc, stored & 0xFFFFFFFF, size & 0xFFFFFFFF)
        wide = pack("<2H2Q", 1, 16, size, stored) if member.zip64 else b""
        shown = (0xFFFFFFFF, 0xFFFFFFFF) if member.zip64 else (stored, size)
        entries += pack(
            "<4s6H3I5H2I",
            *(b"PK\1\2", 0, 0, flags, member.method, 0, 0, crc, *shown),
            *(len(path), len(wide), 0, 0, 0, member.attributes, header),
        )
        entries += path + wide
    at = len(body)
    n = len(members)
    end64 = pack("<4sQ2H2I4Q", b"PK\6\6", 44, 798, 45, 0, 0, n, n, len(entries), at)
    locator = pack("<4sIQI", b"PK\6\7", 0, at + len(entries), 1)
    end = pack("<4s4H2IH", b"PK\5\6", 0, 0, *[min(n, 0xFFFF)] * 2, len(entries), at, 0)
    return bytes(body + entries + end64 + locator + end)


def members_of(data: bytes) -> list[Made]:
    """The members of a real record, to build it again."""
    from ckptctl.formats.archive.directory import parse_directory

    return [
        Made(member.name, data[member.start : member.end])
        for member in parse_directory(data, len(data)).members
    ]

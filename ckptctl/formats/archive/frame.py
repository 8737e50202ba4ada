"""Check that the bytes between the members of a record are as torch writes them.

`directory` reads what a record states and refuses contradictions. This module compares
the rest with what torch writes: padding, and fields that no reader uses. A difference
there harms no load, but shows that something changed the file. Members themselves have
checksums.

Source: records written by torch 2.1 to 2.15; torch 2.13
`caffe2/serialize/inline_container.cc` (padding, `serialization_id`).
"""

from __future__ import annotations

from struct import pack

from ckptctl.errors import RecordUnreadable
from ckptctl.formats.archive.directory import Member, Readable, RecordDirectory

_CENTRAL = 46
_LOCAL = 30
_PADDING = b"FB"
_ZIP64 = b"\1\0"
_IN_ZIP64 = 0xFFFFFFFF
_PAD = b"Z"
WORD = 1 << 64
GOLDEN = 0x9E3779B9

# Versions, times and attributes: alike in all members of a record.
_ALIKE_CENTRAL = (slice(4, 8), slice(12, 16), slice(36, 42))
_ALIKE_LOCAL = (slice(4, 6), slice(10, 14))

_ID = ".data/serialization_id"
_ID_DIGITS = 40


def check_frame(directory: RecordDirectory, view: Readable) -> None:
    """Raise `RecordUnreadable` where the frame of a record is not as torch writes it.

    Checks what was read of it, after `check_headers`. The members must agree in the
    fields without a meaning, whatever their values: a later torch may write others.
    """
    pos = directory.at
    usual: tuple[list[bytes], list[bytes]] | None = None
    for member in directory.members:
        entry = view.get(pos, pos + _CENTRAL)
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
        n_extra = int.from_bytes(entry[30:32], "little")
        pos += _CENTRAL + len(member.path) + n_extra


def _check_extra(member: Member, extra: bytes) -> None:
    """What fills the space between a member's name and its bytes."""
    wide = _wide(member) if extra.startswith(_ZIP64) else b""
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


def _wide(member: Member) -> bytes:
    """The zip64 field in front of a member that is long, or lies far behind."""
    # miniz gives the size that is stored as 0 here.
    fields = [member.size, 0] if member.size >= _IN_ZIP64 else []
    fields += [member.header] if member.header >= _IN_ZIP64 else []
    return _ZIP64 + pack(f"<H{len(fields)}Q", 8 * len(fields), *fields)


def saved_fold(directory: RecordDirectory, view: Readable) -> int | None:
    """What `serialization_id` says that the checksums came to; None where it says nothing.

    Not for a record with an empty member: torch then folds in what nobody can know.
    """
    member = directory.find(_ID)
    if member is None or not directory.has_crcs or not all(m.size for m in directory.members):
        return None
    text = view.get(member.start, member.end)
    if text is None or len(text) != _ID_DIGITS or not text.isdigit():
        return None
    return int(text[_ID_DIGITS // 2 :])


def fold_of(directory: RecordDirectory) -> int:
    """What the checksums in a directory come to, as torch folds them into `serialization_id`."""
    seed = 0
    for member in directory.members:
        if member.name != _ID:
            seed ^= (member.crc + GOLDEN + (seed << 6) + (seed >> 2)) % WORD
    return seed

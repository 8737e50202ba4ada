"""Verify every byte of a record against its checksums and its frame.

Bytes of large members only pass through the checksum, and through the scan for non-finite
values if requested; everything around them is kept and compared. Parts of one record may
pass through several threads; their checksums are combined.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from zlib_ng.zlib_ng import crc32, crc32_combine

from ckptctl.errors import RecordUnreadable
from ckptctl.formats.archive.directory import (
    KeptBytes,
    Member,
    Readable,
    RecordDirectory,
    check_headers,
    check_texts,
    read_directory,
    read_member,
)
from ckptctl.formats.archive.writing import check_frame, fold_of, saved_fold
from ckptctl.model import TensorEntry
from ckptctl.records.not_finite import FiniteScan, Form, Values, joined
from ckptctl.records.opening import Expected, Unfit, check_tensor, tensor_in
from ckptctl.records.ranges import Owner

_KEPT = 4096
"""Members up to this size in bytes are kept, among them those that torch reads as text."""


NO_CRCS = "saved without checksums"
PLAIN = "saved as plain pickles, without frame and checksums"
NO_ZSTD = "compressed, which needs the extra `zstd`"
"""Why a record's bytes are not proven: the values of `Checked.unproven`."""


@dataclass(frozen=True, slots=True)
class WrongBytes:
    """Members of a record that do not match their checksums; both checksums of the first one."""

    names: tuple[str, ...]
    start: int
    end: int
    saved: int
    found: int


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of verifying every byte of a record; without fields, its bytes are proven.

    `unproven` is the reason why nothing proves them. `unreadable` is the reason why its
    frame differs from torch's, or with the code `unfit`, why its content differs from the
    metadata. `folds` are the combined checksum in `serialization_id` and the computed one;
    None if the record has none. `values` are set for a sound record that was scanned.
    """

    unproven: str | None = None
    unreadable: str | None = None
    unfit: str | None = None
    wrong: WrongBytes | None = None
    folds: tuple[int, int] | None = None
    values: Values | None = None


def check_whole(data: memoryview, form: Form | None = None) -> Checked:
    """Verify a record that is wholly in memory.

    With `form`, the values of its tensor are scanned.
    """
    try:
        directory, _ = read_directory(lambda n: bytes(data[len(data) - n :]), len(data))
    except RecordUnreadable as error:
        return Checked(unreadable=error.message)
    crcs = [crc32(data[member.start : member.end]) for member in directory.members]
    checked = _checked(directory, _WholeRecord(data), crcs)
    if form is None:
        return checked
    scans = {number: FiniteScan(form) for number in _element_members(directory)}
    for number, scan in scans.items():
        member = directory.members[number]
        scan.take(data[member.start : member.end])
    return _with_values(checked, directory, _WholeRecord(data), form, scans.values())


def _element_members(directory: RecordDirectory) -> list[int]:
    """The members that hold the elements of a tensor: one, as DCP writes them."""
    return [n for n, member in enumerate(directory.members) if member.name.startswith("data/")]


def _with_values(
    checked: Checked,
    directory: RecordDirectory,
    read: Readable,
    form: Form,
    scans: Iterable[FiniteScan],
) -> Checked:
    """The result, with the scans of all its bytes added.

    Nothing is added for a damaged record or one of a big-endian machine.
    """
    if checked.unreadable is not None or checked.wrong is not None:
        return checked
    if read_member(directory, "byteorder", read) not in (None, b"little"):
        return checked
    return replace(checked, values=joined(form, scans))


class _WholeRecord:
    """The bytes of a whole record."""

    __slots__ = ("_data",)

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def get(self, start: int, end: int) -> bytes | None:
        return bytes(self._data[start:end])


def _checked(directory: RecordDirectory, read: Readable, crcs: Sequence[int]) -> Checked:
    """Check in the order of `opening`, so that both report the same damage alike."""
    unproven = None if directory.has_crcs else NO_CRCS
    try:
        check_headers(directory, read)
        if unproven is None:
            wrong = [n for n, m in enumerate(directory.members) if crcs[n] != m.crc]
            if wrong:
                return Checked(wrong=_wrong(directory.members, wrong, crcs))
        check_texts(directory, read)
        check_frame(directory, read)
    except RecordUnreadable as error:
        return Checked(unproven, unreadable=error.message)
    saved = saved_fold(directory, read)
    return Checked(unproven, folds=None if saved is None else (saved, fold_of(directory)))


def _wrong(members: Sequence[Member], wrong: Sequence[int], crcs: Sequence[int]) -> WrongBytes:
    first = members[wrong[0]]
    names = tuple(members[n].name for n in wrong)
    return WrongBytes(names, first.start, first.end, first.crc, crcs[wrong[0]])


@dataclass(slots=True)
class RecordPart:
    """Bytes of a record that passed through one thread, from `start` to `end`.

    `kept` are the bytes around the large members; `crcs` those of the large members, as
    member, offset, length and CRC-32; `scans` those that were scanned, by member.
    """

    start: int
    end: int
    kept: list[tuple[int, bytes]] = field(default_factory=list)
    crcs: list[tuple[int, int, int, int]] = field(default_factory=list)
    scans: dict[int, FiniteScan] = field(default_factory=dict)


class RecordPass:
    """Takes the bytes of a record from `start` on, in order.

    With `form`, the values of its tensor are scanned.
    """

    def __init__(self, directory: RecordDirectory, start: int, form: Form | None = None) -> None:
        self.directory = directory
        self._form = form
        self._elements = frozenset(_element_members(directory))
        large = [(n, m) for n, m in enumerate(directory.members) if m.size > _KEPT]
        # Ranges of kept and of passing bytes alternate.
        self._edges = [0, *(edge for _, m in large for edge in (m.start, m.end)), directory.length]
        self._large = [n for n, _ in large]
        self._part = RecordPart(start, start)

    def take(self, data: memoryview) -> None:
        """Take the next bytes."""
        part = self._part
        while data:
            at = bisect_right(self._edges, part.end, hi=len(self._edges) - 1) - 1
            n = min(len(data), self._edges[at + 1] - part.end)
            piece, data = data[:n], data[n:]
            if at % 2 == 0:
                part.kept.append((part.end, bytes(piece)))
            else:
                number = self._large[at // 2]
                self._scan(number, piece)
                if part.crcs and part.crcs[-1][0] == number:
                    _, start, length, crc = part.crcs.pop()
                    part.crcs.append((number, start, length + n, crc32(piece, crc)))
                else:
                    part.crcs.append((number, part.end, n, crc32(piece)))
            part.end += n

    def _scan(self, number: int, piece: memoryview) -> None:
        if self._form is None or number not in self._elements:
            return
        part = self._part
        if number not in part.scans:
            at = part.end - self.directory.members[number].start
            part.scans[number] = FiniteScan(self._form, at)
        part.scans[number].take(piece)

    @property
    def part(self) -> RecordPart:
        """The bytes that have passed so far."""
        return self._part


def check_parts(
    directory: RecordDirectory,
    parts: Iterable[RecordPart],
    tail: bytes,
    form: Form | None = None,
    owner: Owner | None = None,
) -> Checked:
    """Verify a record whose bytes have all passed, in parts; scanned if there is a `form`.

    `tail` is the end of the record at the time its directory was read. With an `owner`, the
    tensor is compared with the metadata, for a record that `structure` cannot read.
    """
    in_order = sorted(parts, key=lambda part: part.start)
    kept = KeptBytes([piece for part in in_order for piece in part.kept])
    if kept.get(directory.length - len(tail), directory.length) not in (tail, None):
        return Checked(unreadable="its end changed while it was read")
    checked = _checked(directory, kept, _joined(directory, in_order, kept))
    if owner is not None and checked.unreadable is None and checked.wrong is None:
        checked = _fitting(checked, directory, kept, owner)
    if form is None:
        return checked
    scans = [scan for part in in_order for scan in part.scans.values()]
    for number in _element_members(directory):
        member = directory.members[number]
        if member.size <= _KEPT:
            scans.append(FiniteScan(form))
            scans[-1].take(kept.get(member.start, member.end) or b"")
    return _with_values(checked, directory, kept, form, scans)


def _fitting(checked: Checked, directory: RecordDirectory, kept: Readable, owner: Owner) -> Checked:
    if not isinstance(owner.entry, TensorEntry):
        return checked
    try:
        expected = Expected.chunk(owner.entry, owner.chunk)
        check_tensor(tensor_in(directory, kept), directory, expected)
    except Unfit as error:
        return replace(checked, unreadable=error.message, unfit=error.code)
    return checked


def _joined(directory: RecordDirectory, parts: Sequence[RecordPart], kept: KeptBytes) -> list[int]:
    """The CRC-32 of each member."""
    of_member: dict[int, list[CrcPart]] = {}
    for part in parts:
        for number, start, length, crc in part.crcs:
            at = start - directory.members[number].start
            of_member.setdefault(number, []).append(CrcPart(at, length, crc))
    crcs = []
    for number, member in enumerate(directory.members):
        if member.size <= _KEPT:
            crcs.append(crc32(kept.get(member.start, member.end) or b""))
        else:
            combined = combined_crc(of_member.get(number, ()), member.size)
            crcs.append(-1 if combined is None else combined)
    return crcs


class CrcPart(NamedTuple):
    """The CRC-32 of `n_bytes` bytes from byte `start` on."""

    start: int
    n_bytes: int
    crc: int


def combined_crc(parts: Iterable[CrcPart], n_bytes: int) -> int | None:
    """The CRC-32 of `n_bytes` bytes; None if the parts do not cover each of them once."""
    crc = at = 0
    for part in sorted(parts):
        if part.start != at:
            return None
        crc = crc32_combine(crc, part.crc, part.n_bytes)
        at += part.n_bytes
    return crc if at == n_bytes else None


class ElementChecksum:
    """The checksum of `n_bytes` of elements, of which several threads report parts.

    `mismatch` is called with the checksum of all parts if that is not `expected`.
    """

    def __init__(self, n_bytes: int, expected: int, mismatch: Callable[[int], None]) -> None:
        self._n_bytes = n_bytes
        self._left = n_bytes
        self._expected = expected
        self._mismatch = mismatch
        self._parts: list[CrcPart] = []
        self._lock = threading.Lock()

    def add(self, part: CrcPart) -> None:
        """Add the checksum of a part; the last one is compared."""
        with self._lock:
            self._parts.append(part)
            self._left -= part.n_bytes
            if self._left:
                return
        found = combined_crc(self._parts, self._n_bytes)
        # Parts with gaps or overlaps prove nothing and count as a mismatch.
        if found != self._expected:
            self._mismatch(-1 if found is None else found)

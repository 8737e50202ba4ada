"""Read records that are like a template: many with one call, each part to where it belongs.

A template states where the elements of a record lie before the record is read. One call reads
records that lie side by side: their elements into the memory of the caller, and what is around
the elements, a kilobyte a record, into a buffer where it is compared with the template. A record
that differs is reported to the caller, who reads it again and parses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zlib_ng.zlib_ng import crc32

from ckptctl.records.byte_pass import Piece
from ckptctl.records.elements import RUN_BYTES
from ckptctl.records.templates import Template
from ckptctl.storage.contract import MAX_BUFFERS

MAX_FRAME = 64 << 10
"""The longest head or end of a record, in bytes, that is read in this way."""

_PROVEN = 34 << 10
"""Of records up to this length in bytes all elements are read and compared, even for a slice."""


class Neighbour(NamedTuple):
    """A record: that of range `number`, from byte `start` of its file on.

    The bytes from its `first` one on, which are elements, go to `memory`.
    """

    number: int
    start: int
    template: Template
    first: int
    memory: memoryview

    @property
    def end(self) -> int:
        """The byte of the file after the record."""
        return self.start + self.template.end + self.template.n_rest

    @property
    def n_proven(self) -> int:
        """The bytes of elements that are compared with their checksum: all, or 0."""
        n_bytes = self.template.end - self.template.start
        whole = len(self.memory) == n_bytes or self.end - self.start <= _PROVEN
        return n_bytes if whole else 0


_Check = Callable[[Neighbour, memoryview], None]


class _Part(NamedTuple):
    """Bytes of a record from byte `start` of the file on; `memory` is None if they are not kept."""

    check: _Check
    start: int
    n_bytes: int
    memory: memoryview | None = None


@dataclass(frozen=True, slots=True)
class _Piece(Piece):
    """One call, with what is to be checked after it."""

    checks: Sequence[tuple[_Check, Neighbour, memoryview]] = ()


class _Call:
    """A call that is put together: bytes from `start` on, some of them into `buffer`.

    Memory that is longer than a call is alone in it: `Piece.reads` divides it.
    """

    def __init__(self, start: int, buffer: memoryview) -> None:
        self.checks: list[tuple[_Check, Neighbour, memoryview]] = []
        self._start = self._end = start
        self._buffer = buffer
        self._into: list[memoryview] = []
        self._n_used = self._n_given = 0  # of the buffer: in all, and in `_into`

    def room(self, start: int, skip: int) -> int:
        """How many bytes from `start` on can be added; a gap of up to `skip` is read."""
        near = 0 <= start - self._end <= skip and len(self._into) < MAX_BUFFERS - 2
        return len(self._buffer) - (start - self._start) if near else 0

    def add_aside(self, start: int, n_bytes: int) -> memoryview:
        """Read bytes into the buffer; returns their place."""
        at = self._n_used + start - self._end
        self._n_used = at + n_bytes
        self._end = start + n_bytes
        return self._buffer[at : at + n_bytes]

    def add(self, start: int, memory: memoryview) -> memoryview:
        """Read bytes into memory of the caller, which is returned."""
        self.add_aside(start, 0)
        self._give()
        self._into.append(memory)
        self._end += len(memory)
        return memory

    def pieces(self) -> Iterator[_Piece]:
        """The call, complete; none if nothing was added to it."""
        self._give()
        if self._into:
            yield _Piece(self._start, self._end - self._start, into=self._into, checks=self.checks)

    def _give(self) -> None:
        if self._n_used > self._n_given:
            self._into.append(self._buffer[self._n_given : self._n_used])
            self._n_given = self._n_used


class NeighbourRun:
    """Records of one file, in its order, that do not overlap; see `byte_pass.Run`.

    Gaps of up to `skip` bytes are read. `differs` is called, in the thread that reads, with the
    number of each record that is unlike its template or does not match its checksum.
    """

    def __init__(
        self, path: str, records: Sequence[Neighbour], skip: int, differs: Callable[[int], object]
    ) -> None:
        self.path = path
        self.n_bytes = records[-1].end - records[0].start
        self._records = records
        self._skip = skip
        self._differs = differs
        # Of the record that is being read, whose parts may be in several pieces:
        self._has_head = False
        self._crc = 0

    def pieces(self, limit: int) -> Iterator[Piece]:
        """See `byte_pass.Run`; `limit` is at least `MAX_FRAME`."""
        buffer = memoryview(bytearray(limit))
        call = _Call(self._records[0].start, buffer)
        for record in self._records:
            for check, at, n_bytes, memory in self._parts(record):
                if call.room(at, self._skip) < n_bytes:
                    yield from call.pieces()
                    call = _Call(at, buffer)
                part = call.add_aside(at, n_bytes) if memory is None else call.add(at, memory)
                call.checks.append((check, record, part))
        yield from call.pieces()

    def take(self, piece: Piece, data: memoryview) -> None:
        assert isinstance(piece, _Piece)  # noqa: S101 - it comes from `pieces`
        for check, record, part in piece.checks:
            # Elements that take several reads have a piece to themselves.
            check(record, part if len(piece.checks) > 1 else data)

    def _parts(self, record: Neighbour) -> Iterator[_Part]:
        _, start, template, first, memory = record
        n_before, n_wanted = first - template.start, len(memory)
        yield _Part(self._check_head, start, template.start)
        if not record.n_proven:
            yield _Part(_not_checked, start + first, n_wanted, memory)
        else:
            after = first + n_wanted
            if n_before:
                yield _Part(self._check_elements, start + template.start, n_before)
            yield _Part(self._check_elements, start + first, n_wanted, memory)
            if after < template.end:
                yield _Part(self._check_elements, start + after, template.end - after)
        yield _Part(self._check_rest, start + template.end, template.n_rest)

    def _check_head(self, record: Neighbour, part: memoryview) -> None:
        self._has_head = bytes(part) == record.template.head
        self._crc = 0

    def _check_elements(self, record: Neighbour, part: memoryview) -> None:  # noqa: ARG002
        self._crc = crc32(part, self._crc)

    def _check_rest(self, record: Neighbour, part: memoryview) -> None:
        checksums = record.template.checksums(part, 0)
        if (
            checksums is None
            or not self._has_head
            or (record.n_proven and self._crc != checksums[0])
        ):
            self._differs(record.number)


def _not_checked(record: Neighbour, part: memoryview) -> None:
    """A slice of a long record: its other elements are not read."""


def neighbour_runs(
    path: str, records: Iterable[Neighbour], skip: int, differs: Callable[[int], object]
) -> Iterator[NeighbourRun]:
    """The runs that read records of one file, which are given in its order; see `NeighbourRun`."""
    together: list[Neighbour] = []
    for record in records:
        if together and (
            record.start < together[-1].end or record.end - together[0].start > RUN_BYTES
        ):
            yield NeighbourRun(path, together, skip, differs)
            together = []
        together.append(record)
    if together:
        yield NeighbourRun(path, together, skip, differs)

"""What a fuzzer feeds bytes to, and what must hold whatever the bytes are.

Each target reads bytes as the tool would. It returns where they are read or refused by
the errors that are made for that, and lets everything else out: any other exception
is a bug, and so is an event that no reader has a reason to cause.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import zlib_ng.zlib_ng  # noqa: F401 - else the first record would import it
from loaded_modules import read_a_document_of_each_class

import ckptctl.formats.pickles.values  # noqa: F401 - likewise
from ckptctl.errors import (
    MetadataUnreadable,
    MetadataUnsafe,
    OwnFileUnreadable,
    RecordUnreadable,
)
from ckptctl.formats.archive.directory import (
    View,
    parse_directory,
    read_member,
    tail_needed,
    wrong_crcs,
)
from ckptctl.formats.archive.safetensors import PREFIX, header_length, parse_header, parse_index
from ckptctl.formats.dcp.metadata import decode_metadata
from ckptctl.formats.own.marks import mark_bytes, parse_mark
from ckptctl.formats.own.seals import parse_seal, seal_bytes
from ckptctl.formats.pickles.values import decode_tensor_pickle, decode_value
from ckptctl.inspection.coverage import check_part_coverage
from ckptctl.inspection.presence import check_presence, check_sizes
from ckptctl.inspection.sidecars import content_of, number_in
from ckptctl.model import FileInfo
from ckptctl.records.not_finite import FORMS
from ckptctl.records.ranges import Ranges
from ckptctl.records.verification import check_whole

REFUSED = (MetadataUnreadable, MetadataUnsafe, RecordUnreadable, OwnFileUnreadable)

_NEVER = (
    "import",
    "open",
    "exec",
    "compile",
    "pickle.find_class",
    "marshal",
    "ctypes",
    "subprocess",
    "socket",
    "os.",
)


def metadata(data: bytes) -> None:
    """A `.metadata`, and every question that is answered from it alone."""
    decoded = decode_metadata(data)
    ranges = Ranges([decoded])
    files = [FileInfo(name, 1 << 20) for name in ranges.file_names[:4]]
    for finding in (
        *check_presence(ranges, files, ""),
        *check_sizes(ranges, ""),
        *check_part_coverage([decoded], ""),
    ):
        assert finding.message
        assert finding.severity


def record(data: bytes) -> None:
    """The record of an entry: every byte of it, and what is read of small ones."""
    checked = check_whole(memoryview(data), FORMS["float16"])
    number_in(data)
    if checked.unreadable is None and checked.wrong is None:
        view = View(len(data), data, data)
        directory = parse_directory(data[-tail_needed(data, len(data)) :], len(data))
        assert not wrong_crcs(directory, view)
        for member in directory.members:
            held = read_member(directory, member.name, view)
            assert held is not None
            assert len(held) == member.size
    content_of(data, "train_state.pt")


def pickled(data: bytes) -> None:
    """The pickle in a record, without the checksum that a fuzzer would have to guess."""
    for decode in (decode_value, decode_tensor_pickle):
        try:
            decode(data)
        except REFUSED:
            continue


def seal(data: bytes) -> None:
    """A seal; one that is read is written again as the same one."""
    parsed = parse_seal(data)
    assert parse_seal(seal_bytes(parsed, None)).files == parsed.files


def mark(data: bytes) -> None:
    """A mark; one that is read is written again as the same one."""
    parsed = parse_mark(data)
    assert parse_mark(mark_bytes(parsed)) == parsed


def safetensors(data: bytes) -> None:
    """The header of a file of safetensors, and an index of several."""
    try:
        for tensor in parse_header(data[PREFIX : PREFIX + header_length(data)]):
            assert tensor.n_bytes >= 0
    except RecordUnreadable:
        parse_index(data)


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "metadata": metadata,
    "record": record,
    "pickled": pickled,
    "seal": seal,
    "mark": mark,
    "safetensors": safetensors,
}


class Watch:
    """Notes what Python itself reports while a target runs."""

    def __init__(self) -> None:
        self._on = False
        self._events: list[str] = []
        read_a_document_of_each_class()
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[object, ...]) -> None:
        if self._on and event.startswith(_NEVER):
            self._events.append(f"{event} {args[:1]!r}"[:200])

    def feed(self, name: str, data: bytes) -> bool:
        """Feed bytes to a target; whether they were read, and not refused."""
        self._events.clear()
        self._on = True
        try:
            TARGETS[name](data)
            read = True
        except REFUSED:
            read = False
        finally:
            self._on = False
        if self._events:
            raise AssertionError(f"{name} caused {', '.join(self._events)}")
        return read

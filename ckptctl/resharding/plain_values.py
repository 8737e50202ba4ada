"""What value does an entry that is no tensor hold, as far as it is plain?

Its record is read whole, proven against its checksums, and its pickle read inertly:
nothing in it runs. Numbers, texts, bytes, dtypes and containers of them can be written
again; of anything else only the name is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe, RecordUnreadable, UsageError
from ckptctl.formats.archive.directory import (
    View,
    check_headers,
    check_texts,
    parse_directory,
    read_member,
    wrong_crcs,
)
from ckptctl.formats.flat_state import Leaf, NotPlain, Written, written
from ckptctl.formats.values import decode_state
from ckptctl.records.zstd import Unpacker, require_zstd
from ckptctl.resharding.reading import ZSTD, Damage, SourceFiles
from ckptctl.resharding.sources import SourceBytes
from ckptctl.storage.contract import Span

MAX_VALUE_BYTES = 64 << 20
"""The longest record of a value that is read; it is held in memory."""


def read_values(
    files: SourceFiles, entries: Sequence[SourceBytes]
) -> Iterator[tuple[SourceBytes, Written | NotPlain]]:
    """Each entry with its value, to be written again, or with why it cannot be.

    Raises `Damage`. Cost: one read for each, several in flight where that is faster.
    """
    small = [entry for entry in entries if entry.record.length <= MAX_VALUE_BYTES]
    spans = [
        Span(files.in_store(entry.record.file), entry.record.offset, entry.record.length)
        for entry in small
    ]
    for entry, (_, data) in zip(small, files.store.read_spans(spans), strict=True):
        yield entry, _value(files, entry, data)
    for entry in entries:
        if (n_bytes := entry.record.length) > MAX_VALUE_BYTES:
            why = f"{entry.fqn} takes {n_bytes:,} bytes, of which {MAX_VALUE_BYTES:,} are read"
            yield entry, NotPlain(why)


def _value(files: SourceFiles, entry: SourceBytes, data: bytes) -> Written | NotPlain:
    record = entry.record
    try:
        return written(Leaf((entry.fqn,), decode_state(_pickle(files, entry, data))))
    except NotPlain as error:
        return error
    except RecordUnreadable as error:
        raise Damage(files.finding("record.framing", record, error.message)) from error
    except MetadataUnsafe as error:
        raise Damage(files.finding("record.unsafe", record, error.message)) from error
    except MetadataUnreadable as error:
        return NotPlain(f"{entry.fqn}: {error.message}")


def _pickle(files: SourceFiles, entry: SourceBytes, data: bytes) -> bytes:
    record = entry.record
    if record.transforms:
        data = _unpacked(entry, data)
    if not data.startswith(b"PK"):
        # A plain pickle, which has neither frame nor checksums: the look at the step says so.
        return data
    directory = parse_directory(data, len(data))
    view = View(len(data), data, data)
    check_headers(directory, view)
    check_texts(directory, view)
    if wrong := wrong_crcs(directory, view):
        message = f"{', '.join(wrong)} does not match the checksum saved with it"
        raise Damage(files.finding("record.crc", record, message))
    pickle = read_member(directory, "data.pkl", view)
    if pickle is None:
        raise RecordUnreadable("it holds no pickle")
    return pickle


def _unpacked(entry: SourceBytes, data: bytes) -> bytes:
    if entry.record.transforms != (ZSTD,):
        named = ", ".join(entry.record.transforms)
        raise UsageError(f"{entry.fqn} went through {named}, which cannot be undone here")
    require_zstd()
    return b"".join(Unpacker(MAX_VALUE_BYTES).feed(memoryview(data)))

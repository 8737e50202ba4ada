"""Read the values of entries that are no tensors, if they are plain.

A record is read whole and verified, and its pickle is decoded without running it.
Numbers, strings, bytes, dtypes and containers of them can be written again; of anything
else only the name is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe, RecordUnreadable
from ckptctl.formats.archive.directory import read_member
from ckptctl.formats.archive.state_file import Leaf, NotPlain, Written, written
from ckptctl.formats.pickles.values import decode_state
from ckptctl.records.opening import Unfit, open_whole
from ckptctl.records.zstd import unpack
from ckptctl.resharding.reading import Damage, SourceFiles
from ckptctl.resharding.sources import SourceBytes
from ckptctl.storage.contract import Span

MAX_VALUE_BYTES = 64 << 20
"""The longest record of a value that is read; it is held in memory."""


def read_values(
    files: SourceFiles, entries: Sequence[SourceBytes]
) -> Iterator[tuple[SourceBytes, Written | NotPlain]]:
    """Each entry with its value, ready to be written again, or with why it cannot be.

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
        return written(Leaf((entry.fqn,), decode_state(_pickle(entry, data))))
    except NotPlain as error:
        return error
    except (RecordUnreadable, Unfit) as error:
        raise files.damage(record, error) from error
    except MetadataUnsafe as error:
        raise Damage(files.finding("record.unsafe", record, error.message)) from error
    except MetadataUnreadable as error:
        return NotPlain(f"{entry.fqn}: {error.message}")


def _pickle(entry: SourceBytes, data: bytes) -> bytes:
    data = unpack(data, entry.record.transforms, MAX_VALUE_BYTES)
    if not data.startswith(b"PK"):
        # A plain pickle has neither frame nor checksums; inspection reports that.
        return data
    view, found = open_whole(data, None)
    pickle = read_member(found.directory, "data.pkl", view)
    if pickle is None:
        raise RecordUnreadable("it holds no pickle")
    return pickle

"""Verify each source record with the checksums of the runs that were copied from it.

The runs of a record, combined in order, must have the checksum that was saved with it.
Records whose parts were not copied in runs are read whole instead, once. The runs of each
written file are recorded in a journal: a later call with the same plan continues from
there, and another plan uses another work folder. Nothing else reads these files.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckptctl.errors import PathNotFound
from ckptctl.formats.bounded_json import read_json
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.records.byte_pass import Limits, read_runs
from ckptctl.records.digest_runs import CrcRun
from ckptctl.records.verification import CrcPart, combined_crc
from ckptctl.resharding.reading import Damage, Opened, Piece, SourceFiles
from ckptctl.resharding.sources import SourcePart, SourceTensor
from ckptctl.storage.contract import Store

SCHEMA = "ckptctl.reshard-journal/1"
MAX_BYTES = 64 << 20


class Record(NamedTuple):
    """The record of chunk `number` of a tensor."""

    tensor: SourceTensor
    number: int


def prove(
    part: SourcePart,
    files: SourceFiles,
    pieces: Iterable[Piece],
    held_limit: int,
    limits: Limits,
    *,
    only: Iterable[str] | None = None,
) -> int:
    """Verify the records of a part's tensors; returns how many bytes this read.

    `pieces` are those of all target files; `only` are the FQNs that were copied. Raises
    `Damage`. Records without a checksum are skipped; the caller has allowed that.
    """
    files.check_unchanged()
    by_record: dict[tuple[str, int], list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_record[piece.file, piece.start].append(piece)
    unproven = []
    for record in _records(part, only):
        place = record.tensor.chunks[record.number].record
        opened = files.opened(record.tensor, record.number, held_limit)
        if opened.crc is None or opened.held is not None:
            continue
        runs = by_record.get((place.file, place.offset), ())
        crc = combined_crc((CrcPart(r.at, r.length, r.crc) for r in runs), opened.n_bytes)
        if crc is None:
            run = CrcRun(files.in_store(place.file), opened.start, opened.n_bytes)
            unproven.append((record, opened, run))
        elif crc != opened.crc:
            raise damage(files, record, opened, crc)
    n_read = read_runs(files.store, [run for *_, run in unproven], limits)
    for record, opened, run in unproven:
        if run.crc != opened.crc:
            raise damage(files, record, opened, run.crc)
    return n_read


def _records(part: SourcePart, only: Iterable[str] | None) -> Iterator[Record]:
    wanted = None if only is None else set(only)
    for tensor in part.tensors:
        if wanted is None or tensor.entry.fqn in wanted:
            yield from (Record(tensor, number) for number in range(len(tensor.chunks)))


def damage(files: SourceFiles, record: Record, opened: Opened, crc: int) -> Damage:
    """The error for elements that do not match the checksum saved with them."""
    place = record.tensor.chunks[record.number].record
    name = record.tensor.entry.fqn
    if len(record.tensor.chunks) > 1:
        name += f" at {record.tensor.chunks[record.number].elements.offsets}"
    saved = opened.crc or 0
    message = f"{name} has the CRC-32 {crc:08x} in {opened.n_bytes:,} bytes, saved was {saved:08x}"
    return Damage(files.finding("record.crc", place, message))


# What an interrupted call has written: one JSON file for each complete shard file


def work_folder(identity: str) -> str:
    """The work folder of a plan, below the root that holds the new step."""
    return f"{OWN_FOLDER}/resharding/{identity}"


def note(
    store: Store, identity: str, name: str, path: str, size: int, proof: Sequence[Piece]
) -> None:
    """Record that a file of the new step `name` is written, and the runs that went into it."""
    document = {"schema": SCHEMA, "path": path, "size": size, "proof": [list(p) for p in proof]}
    data = json.dumps(document, separators=(",", ":")).encode()
    store.put(entry_path(identity, name, path), data, replace=True)


def noted(store: Store, identity: str, name: str, path: str, size: int) -> list[Piece] | None:
    """The runs in a written file; None if it is not recorded."""
    try:
        document = read_json(store, entry_path(identity, name, path), max_bytes=MAX_BYTES)
        if not isinstance(document, dict):
            return None
        if (document["schema"], document["path"], document["size"]) != (SCHEMA, path, size):
            return None
        return [
            Piece(str(f), int(s), int(a), int(n), int(c)) for f, s, a, n, c in document["proof"]
        ]
    except (PathNotFound, ValueError, TypeError, KeyError):
        return None


def entry_path(identity: str, name: str, path: str) -> str:
    """The path of the journal entry for a file of the new step `name`."""
    return f"{work_folder(identity)}/{name}.written/{path.replace('/', '+')}.json"

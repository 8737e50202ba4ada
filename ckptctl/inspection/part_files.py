"""Read the metadata files of a part.

The metadata is `.metadata` or the rank-local files of a DCP folder. A part of rank files has no
metadata: each file of `torch.save` is one archive, as a record of DCP is, so the listing serves as
metadata with one entry for each file, which fills that file. The checks, the record engine and the
seals then need nothing of their own for them. `presence` checks whether the shards behind the
metadata are whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe, PathNotFound
from ckptctl.findings import Finding, explained
from ckptctl.formats.archive.safetensors import INDEX_SUFFIX, MAX_HEADER, SUFFIX
from ckptctl.formats.dcp.metadata import decode_metadata
from ckptctl.formats.frameworks.layout_tables import TABLES
from ckptctl.formats.frameworks.layouts import METADATA, METADATA_TMP, rank_local_rank
from ckptctl.formats.frameworks.parts import archives_in, in_parts
from ckptctl.formatting import command_line, counted
from ckptctl.inspection.structure import (
    archive_digest,
)
from ckptctl.model import ByteRange, BytesEntry, FileInfo, Metadata, Part, PartFormat
from ckptctl.storage.contract import ShortRead, Store, read_range
from ckptctl.storage.opening import parent_url

if TYPE_CHECKING:
    from ckptctl.inspection.open_step import OpenPart

MAX_METADATA_BYTES = 2**32
"""Larger metadata is refused. 512,000 chunks take 89 MB: this is enough for 24 million."""


def read_metadata(at: OpenPart) -> Iterator[Metadata | Finding]:
    """Yield the metadata of a DCP part, one per rank where it is rank-local, and findings.

    Yields `metadata.missing`, `metadata.unreadable`, `metadata.unsafe`,
    `metadata.ambiguous`, `path.escape`, `step.changed`. Storage errors pass through.
    Cost: one read for each metadata file; one more where a save left a
    `.metadata.tmp` beside it.
    """
    files = {file.path: file for file in at.part.files}
    ranks = sorted(rank for name in files if (rank := rank_local_rank(name)) is not None)
    if METADATA in files:
        yield _decoded(at, files[METADATA], None)
        if ranks:
            yield _ambiguous(at, f"__{ranks[0]}.metadata", "the one of a save without collectives")
        if METADATA_TMP in files:
            yield from _unfinished(at, files)
    elif ranks:
        for rank in ranks:
            yield _decoded(at, files[f"__{rank}.metadata"], rank)
        yield from _missing_ranks(at, ranks)
    else:
        yield _missing(at, tmp=METADATA_TMP in files)


def _decoded(at: OpenPart, file: FileInfo, rank: int | None) -> Metadata | Finding:
    where = at.in_step(file.path)
    if file.kind != "file":
        return explained(
            "path.escape", where, f"{where} is {file.what}, not a file; it was not followed"
        )
    if file.size > MAX_METADATA_BYTES:
        return _unreadable(at, where, f"{file.size:,} bytes, more than any metadata takes")
    try:
        known = at.opened.metadata if where == METADATA and at.opened.has_metadata else None
        data = b"" if known else at.store.read(at.in_store(file.path), limit=MAX_METADATA_BYTES)
        n_bytes = known.n_bytes if known else len(data)
        if n_bytes != file.size:
            return _changed(where, f"{file.size:,} bytes", f"{n_bytes:,} bytes")
        return known or decode_metadata(data, rank=rank)
    except (PathNotFound, ShortRead):
        return _changed(where, f"{file.size:,} bytes", "missing or shorter")
    except MetadataUnreadable as error:
        return _unreadable(at, where, error.message)
    except MetadataUnsafe as error:
        return explained(
            "metadata.unsafe",
            where,
            f"{where} {error.message}; nothing of it was run. Do not load this step with any "
            "other tool, and find out who wrote it",
        )


def _unreadable(at: OpenPart, where: str, why: str) -> Finding:
    return Finding(
        "metadata.unreadable",
        where,
        f"{where} cannot be decoded: {why}",
        next_command=command_line("pick", parent_url(at.url)),
    )


def _changed(where: str, expected: str, found: str) -> Finding:
    return Finding(
        "step.changed",
        where,
        f"{where} changed between the listing and the read: another process writes or deletes "
        "files here",
        expected=expected,
        found=found,
    )


def _ambiguous(at: OpenPart, other: str, what: str) -> Finding:
    where = at.in_step(METADATA)
    return explained(
        "metadata.ambiguous",
        where,
        f"{where} and {other} ({what}) both exist: a load uses the first if it can be read, "
        "else the other, and they may belong to two saves",
    )


def _unfinished(at: OpenPart, files: Mapping[str, FileInfo]) -> Iterator[Finding]:
    # A store without rename copies the temporary file and then deletes it: what
    # is left of that is equal. Anything else is a save over this step.
    tmp, final = files[METADATA_TMP], files[METADATA]
    if tmp.size == final.size and tmp.kind == "file" and final.size <= MAX_METADATA_BYTES:
        try:
            left = at.store.read(at.in_store(METADATA_TMP), limit=MAX_METADATA_BYTES)
            if left == at.store.read(at.in_store(METADATA), limit=MAX_METADATA_BYTES):
                return
        except (PathNotFound, ShortRead):
            yield _changed(at.in_step(METADATA_TMP), f"{tmp.size:,} bytes", "missing or shorter")
            return
    yield _ambiguous(at, METADATA_TMP, "that of an interrupted save over this step")


def _missing_ranks(at: OpenPart, ranks: list[int]) -> Iterator[Finding]:
    missing = sorted(set(range(ranks[-1] + 1)) - set(ranks))
    if missing:
        shown = ", ".join(f"__{rank}.metadata" for rank in missing[:4])
        yield Finding(
            "metadata.missing",
            at.in_step(f"__{missing[0]}.metadata"),
            f"{len(missing)} of {ranks[-1] + 1} ranks wrote no metadata of their own ({shown})",
            next_command=command_line("pick", parent_url(at.url)),
        )


def _missing(at: OpenPart, *, tmp: bool) -> Finding:
    found = counted(len(at.part.files) - tmp, "shard file")
    found += f" and {METADATA_TMP}" if tmp else ""
    where = at.in_step(METADATA)
    return Finding(
        "metadata.missing",
        where,
        f"{where} is missing beside {found}: the save was interrupted",
        next_command=command_line("pick", parent_url(at.url)),
    )


def listed_archives(part: Part, layout: str) -> Metadata:
    """The files of `torch.save` in a part, each as one entry; those without a byte are left out."""
    found = archives_in(part, layout)
    entries = {
        file.path: BytesEntry(file.path, ByteRange(file.path, 0, file.size)) for file in found
    }
    return Metadata({}, entries, tuple(entries))


def read_digests(part: OpenPart) -> Mapping[str, str]:
    """The SHA-256 of the directory of each archive, by its path in the step.

    The directory holds the size and the CRC-32 of every member, so it identifies the save.
    Of a file that is no archive it is that of its last bytes. Cost: one short read for each
    file, and a second one where the directory is long; none for those whose structure was read.
    """
    known, digests = part.known_digests, {}
    for file in part.part.files:
        if file.path not in part.metadata[0].bytes_entries or file.kind != "file":
            continue
        read_tail = partial(_read_tail, part.store, part.in_store(file.path), file.size)
        digests[part.in_step(file.path)] = known.get(file.path) or archive_digest(
            read_tail, file.size
        )
    return digests


def _read_tail(store: Store, path: str, size: int, n_bytes: int) -> bytes:
    return read_range(store, path, size - n_bytes, n_bytes)


def read_named(part: OpenPart) -> Mapping[str, bytes]:
    """The small files of a rank-file part that name others; see `check_named`.

    Cost: one read each.
    """
    names = (TABLES.tag, TABLES.torch_index)
    wanted = {
        part.in_store(file.path): file.path
        for file in part.part.files
        if file.kind == "file" and file.size <= MAX_HEADER
        if any(re.fullmatch(name, file.path) for name in names)
    }
    return {path: part.store.read(place, limit=MAX_HEADER) for place, path in wanted.items()}


def safetensors_in(part: Part) -> Iterator[Part]:
    """The folders of safetensors in a rank-file part, each as a part of the step."""
    suffixes = (SUFFIX, INDEX_SUFFIX)
    files = [file for file in part.files if file.path.endswith(suffixes)]
    return in_parts(files, PartFormat.SAFETENSORS)

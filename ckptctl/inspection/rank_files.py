"""Read a rank-file part: its files of `torch.save`, taken as records.

Such a part has no metadata. Each file of `torch.save` is one archive, as a record of DCP
is, so the listing serves as metadata: one entry for each file, which fills that file. The
checks, the record engine and the seals then need nothing of their own for them.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ckptctl.data_classes import replace
from ckptctl.errors import RecordUnreadable
from ckptctl.formats.archive.directory import TAIL, read_directory
from ckptctl.formats.archive.safetensors import INDEX_SUFFIX, SUFFIX
from ckptctl.formats.frameworks.layouts import is_archive
from ckptctl.model import ByteRange, BytesEntry, FileInfo, Metadata, Part, PartFormat
from ckptctl.storage.contract import Span, Store

if TYPE_CHECKING:
    from ckptctl.inspection.open_step import OpenPart


def listed_archives(part: Part, layout: str) -> Metadata:
    """The files of `torch.save` in a part, each as one entry; those without a byte are left out."""
    found = [file for file in part.files if file.size and is_archive(file.path, layout)]
    entries = {
        file.path: BytesEntry(file.path, ByteRange(file.path, 0, file.size)) for file in found
    }
    return Metadata({}, entries, tuple(entries))


def read_digests(part: OpenPart) -> Mapping[str, str]:
    """The SHA-256 of the directory of each archive, by its path in the step.

    The directory holds the size and the CRC-32 of every member, so it identifies the save.
    Of a file that is no archive it is that of its last bytes. Cost: one short read for each
    file, and a second one where the directory is long.
    """
    store, digests = part.store, {}
    for file in part.part.files:
        if file.path not in part.metadata[0].bytes_entries or file.kind != "file":
            continue
        read_tail = partial(_read_tail, store, part.in_store(file.path), file.size)
        try:
            directory, tail = read_directory(read_tail, file.size)
            held = tail[len(tail) - (file.size - directory.at) :]
        except RecordUnreadable:
            held = read_tail(min(TAIL, file.size))
        digests[part.in_step(file.path)] = hashlib.sha256(held).hexdigest()
    return digests


def _read_tail(store: Store, path: str, size: int, n_bytes: int) -> bytes:
    ((_, data),) = store.read_spans([Span(path, size - n_bytes, n_bytes)])
    return data


def safetensors_in(part: Part) -> Iterator[Part]:
    """The folders of safetensors in a rank-file part, each as a part of the step."""
    folders: dict[str, list[FileInfo]] = defaultdict(list)
    for file in part.files:
        if file.path.endswith((SUFFIX, INDEX_SUFFIX)):
            folder, _, name = file.path.rpartition("/")
            folders[folder].append(replace(file, path=name))
    for folder, files in sorted(folders.items()):
        yield Part(folder, PartFormat.SAFETENSORS, tuple(files))

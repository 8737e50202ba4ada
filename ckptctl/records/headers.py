"""Read the headers and indexes of safetensors files: where their tensors lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptctl.formats.archive.safetensors import INDEX_SUFFIX, MAX_HEADER, PREFIX, SUFFIX
from ckptctl.model import FileInfo
from ckptctl.storage.contract import Span, Store

_FIRST_HEADER = 64 << 10
"""The bytes of a file that are read first, for its header."""


def read_headers(
    store: Store, folder: str, files: Sequence[FileInfo]
) -> Iterator[tuple[FileInfo, bytes]]:
    """Each safetensors file with its header, including the length in front of it.

    A truncated header is returned as far as it goes. Links and other non-regular files are
    left out. Storage errors are raised. Cost: one read per file; a second one for headers
    of more than 64 KiB.
    """
    regular = [file for file in files if file.kind == "file" and file.path.endswith(SUFFIX)]
    yield from ((file, b"") for file in regular if file.size == 0)
    others = [file for file in regular if file.size > 0]
    first = [Span(_below(folder, file), 0, min(file.size, _FIRST_HEADER)) for file in others]
    longer = []
    for file, (_, data) in zip(others, store.read_spans(first), strict=True):
        end = PREFIX + int.from_bytes(data[:PREFIX], "little")
        if len(data) < end <= min(file.size, PREFIX + MAX_HEADER):
            longer.append((file, end))
        else:
            yield file, data[:end]
    rest = [Span(_below(folder, file), 0, end) for file, end in longer]
    for (file, _), (_, data) in zip(longer, store.read_spans(rest), strict=True):
        yield file, data


def read_indexes(
    store: Store, folder: str, files: Sequence[FileInfo]
) -> Iterator[tuple[FileInfo, bytes]]:
    """Each index of safetensors files with its content. Cost: one read each.

    Indexes of more than `MAX_HEADER` bytes, and non-regular files, are left out.
    """
    for file in files:
        if file.path.endswith(INDEX_SUFFIX) and file.kind == "file" and file.size <= MAX_HEADER:
            yield file, store.read(_below(folder, file), limit=MAX_HEADER)


def _below(folder: str, file: FileInfo) -> str:
    return f"{folder}/{file.path}" if folder else file.path

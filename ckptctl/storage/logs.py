"""Open the logs of a job on any storage, and decompress them.

Logs are larger than memory: they are read once, in pieces. A log may also come from a pipe,
which stores refuse: `-` is standard input, and `<(dmesg)` of a shell is a path.
"""

from __future__ import annotations

import bz2
import lzma
import os
import re
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from ckptctl.errors import CkptctlError, MissingExtra, PathNotFound, UsageError
from ckptctl.model import FileInfo
from ckptctl.options import StorageOptions
from ckptctl.storage.contract import Span, Store
from ckptctl.storage.files import error_of
from ckptctl.storage.opening import base_name, join_url, local_path, open_store, parent_url
from ckptctl.storage.shared_places import FoundIn, found_in, open_found, open_log
from ckptctl.storage.waiting import busy

_Stream: TypeAlias = "zlib._Decompress | bz2.BZ2Decompressor | lzma.LZMADecompressor | _Zstd"

STDIN = "-"
MAX_LINE = 1 << 20
"""Bytes of a line that are kept; the rest of a longer one is skipped."""
MAX_MATCHED = 4000
"""Characters of a line that patterns are matched against; this bounds the time of the slowest."""

_PIECE = 128 << 10  # stays in the processor's cache while it is searched
_REMOTE_PIECE = 1 << 20
_MAX_FILES = 10_000
_HEAD = 1 << 16


def files_below(url: str, storage: StorageOptions) -> Sequence[FileInfo] | None:
    """The files of a folder of logs, at any depth, sorted by path; None for a log itself.

    Cost: for the address of an object, a listing of its folder.
    """
    path = local_path(url)
    if url == STDIN or (path is not None and not os.path.isdir(path)):
        return None
    if path is None:
        with open_store(parent_url(url), storage) as store:
            if _file_in(store, base_name(url)) is not None:
                return None
    with open_store(url, storage) as store:
        return store.list_tree()


def logs_below(name: str, storage: StorageOptions) -> Sequence[str]:
    """The log itself, or every file of a folder (torchrun's `--log-dir`), sorted by name."""
    found = files_below(name, storage)
    if found is None:
        return (name,)
    files = [info.path for info in found if info.kind == "file" and info.size]
    if not files:
        raise PathNotFound(f"{name}: this folder contains no log")
    if len(files) > _MAX_FILES:
        raise UsageError(f"{name} holds {len(files):,} files; the limit is {_MAX_FILES:,}")
    return tuple(join_url(name.rstrip("/"), path) for path in files)


def found_below(folder: str) -> FoundIn | None:
    """What the files in a folder that a person named are; None where it is not local."""
    path = local_path(folder)
    return None if path is None else found_in(path)


def read_pieces(
    url: str,
    storage: StorageOptions,
    damaged: type[CkptctlError] = UsageError,
    found: FoundIn | None = None,
) -> Iterator[bytes]:
    """Yield the bytes of a log in pieces of at most 1 MiB.

    gzip, bzip2, xz and zstd are recognized by their first bytes, whatever the name, and
    decompressed. Compressed data that only ends too early, as in a log that is still written,
    is yielded as far as it goes. `found` states where a local file was found; without it, a
    person has named it.

    Raises `PathUntrusted` for what another user could have put there, see `shared_places`;
    `damaged` for damaged compressed data, `PathNotFound`, `AccessDenied`, `StorageUnavailable`,
    `UsageError` for a folder, and `MissingExtra` for zstd without its package.
    """
    return _unpacked(url, _stored_pieces(url, storage, found), damaged)


def read_bytes(
    url: str,
    *,
    limit: int,
    storage: StorageOptions = StorageOptions(),
    found: FoundIn | None = None,
) -> bytes:
    """The content of a small file, as it is stored; raises as `read_pieces` does.

    Also raises `UsageError` if it is larger than `limit` bytes.
    """
    data = bytearray()
    for piece in _stored_pieces(url, storage, found):
        data += piece
        if len(data) > limit:
            raise UsageError(f"{url} is larger than {limit:,} bytes")
    return bytes(data)


def read_head(path: str, found: FoundIn) -> bytes:
    """The first bytes of a local file; raises as `read_pieces` does."""
    return next(_local_pieces(path, path, found), b"")


@contextmanager
def errors_of_storage(name: str) -> Iterator[None]:
    """Raise the errors of the file system as the stores raise theirs."""
    try:
        yield
    except IsADirectoryError as error:
        raise UsageError(f"{name} is a folder, not a log") from error
    except OSError as error:
        raise error_of(name, error) from error


def _stored_pieces(
    url: str, storage: StorageOptions, found: FoundIn | None = None
) -> Iterator[bytes]:
    if url == STDIN:
        return _descriptor_pieces(0, "standard input", watched=False)
    path = local_path(url)
    return _object_pieces(url, storage) if path is None else _local_pieces(path, url, found)


def _local_pieces(path: str, name: str, found: FoundIn | None = None) -> Iterator[bytes]:
    with errors_of_storage(name):
        fd, is_file = _opened(path, name, found)
    try:
        # The writer of a pipe may pause for any time; only files are watched.
        yield from _descriptor_pieces(fd, name, watched=is_file)
    finally:
        os.close(fd)


def _opened(path: str, name: str, found: FoundIn | None) -> tuple[int, bool]:
    """A descriptor, and whether it is of a file."""
    if found is not None:
        with busy(name):
            return open_found(path, found), True
    with busy(name):
        if os.path.isfile(path):
            return open_log(path)
    with busy(name, bounded=False):  # the writer of a pipe may open it at any time
        return open_log(path)


def _descriptor_pieces(fd: int, name: str, *, watched: bool) -> Iterator[bytes]:
    while True:
        with errors_of_storage(name), busy(name, bounded=watched):
            piece = os.read(fd, _PIECE)
        if not piece:
            return
        yield piece


def _object_pieces(url: str, storage: StorageOptions) -> Iterator[bytes]:
    with open_store(parent_url(url), storage) as store:
        found = _file_in(store, base_name(url))
        if found is None:
            raise PathNotFound(f"{url}: the object does not exist")
        spans = (
            Span(found.path, start, min(_REMOTE_PIECE, found.size - start))
            for start in range(0, found.size, _REMOTE_PIECE)
        )
        for _, data in store.read_spans(spans):
            yield data


def _file_in(store: Store, name: str) -> FileInfo | None:
    return next((i for i in store.list_dir() if i.path == name and i.kind == "file"), None)


# Decompressing

_GZIP, _BZIP2, _XZ, _ZSTD = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"
_MAX_WINDOW = 128 << 20
# 4 bytes of zstd can decompress to 128 KiB, so only this much is fed at once.
_SLICE = 1 << 10


def _unpacked(name: str, pieces: Iterator[bytes], damaged: type[CkptctlError]) -> Iterator[bytes]:
    """The pieces, decompressed where the first bytes are those of a compressed stream.

    Several streams may follow each other, as in rotated logs that were joined; zeros after one
    are padding. Raises `damaged` also for other bytes after a stream.
    """
    data = _with_next(b"", pieces)
    stream = _stream_for(data)
    if stream is None:
        if data:
            yield data
        yield from pieces
        return
    try:
        while data:
            if stream is None:
                stream = _stream_for(data)
                if stream is None:
                    raise damaged(f"{name}: bytes follow the end of the compressed data")
            data = yield from _decompressed(stream, data)
            if stream.eof:
                data, stream = data.lstrip(b"\0"), None
            data = _with_next(data, pieces, padded=stream is None)
    except (zlib.error, lzma.LZMAError, OSError) as error:
        raise damaged(
            f"{name}: the compressed data is damaged ({error}); the rest cannot be read"
        ) from error


def _with_next(data: bytes, pieces: Iterator[bytes], *, padded: bool = False) -> bytes:
    """The data, and the pieces that are needed to recognize a stream at its begin."""
    for piece in pieces:
        data += piece
        data = data.lstrip(b"\0") if padded else data
        if len(data) >= len(_XZ):
            break
    return data


def _decompressed(stream: _Stream, data: bytes) -> Generator[bytes, None, bytes]:
    """Yield what the next bytes of a stream decompress to; returns those behind its end."""
    n_each = _SLICE if isinstance(stream, _Zstd) else max(1, len(data))
    for at in range(0, len(data), n_each):
        piece = data[at : at + n_each]
        while out := stream.decompress(piece, _PIECE):
            yield out
            if stream.eof:
                break
            # zlib gives back the input that it has not decompressed; the others keep it.
            piece = getattr(stream, "unconsumed_tail", b"")
        if stream.eof:
            return stream.unused_data + data[at + n_each :]
    return b""


class _Zstd:
    """As the standard library's streams, but a slice of input bounds what comes of it."""

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise MissingExtra(
                "reading logs compressed with zstd needs the package zstandard",
                next_command="pip install 'ckptctl[zstd]'",
            ) from error
        self._error = zstandard.ZstdError
        self._stream = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()

    @property
    def eof(self) -> bool:
        return bool(self._stream.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._stream.unused_data)

    def decompress(self, data: bytes, max_length: int, /) -> bytes:  # noqa: ARG002
        try:
            return bytes(self._stream.decompress(data)) if data else b""
        except self._error as error:
            raise zlib.error(str(error)) from error


def _stream_for(head: bytes) -> _Stream | None:
    """A new stream for data that begins so, which ends with its `eof`; None for plain data."""
    if head.startswith(_GZIP):
        return zlib.decompressobj(wbits=31)
    if head.startswith(_BZIP2):
        return bz2.BZ2Decompressor()
    if head.startswith(_XZ):
        return lzma.LZMADecompressor(memlimit=_MAX_WINDOW)
    return _Zstd() if head.startswith(_ZSTD) else None


# Zero bytes alone prove nothing: a log that was rotated while written begins with them.
_CONTROL = bytes(code for code in range(32) if code not in b"\0\a\b\t\n\v\f\r\x1b")
_SAFETENSORS = re.compile(rb"[^\0]{1,5}\0{3,7}\{")


def is_binary(head: bytes) -> bool:
    """Whether the first bytes of a file are binary: more than 1 % are control codes."""
    head = head[:_HEAD]
    n_control = len(head) - len(head.translate(None, _CONTROL))
    return n_control * 100 > len(head) or _SAFETENSORS.match(head) is not None

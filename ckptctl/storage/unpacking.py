"""Decompress logs: gzip, bzip2, xz and zstd, in bounded memory."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Iterator
from typing import Protocol

from ckptctl.errors import CkptctlError, MissingExtra

PIECE_BYTES = 128 << 10  # stays in the processor's cache while it is searched

_GZIP, _BZIP2, _XZ, _ZSTD = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"
_MAX_WINDOW = 128 << 20
# 4 bytes of zstd can decompress to 128 KiB, so only this much is fed at once.
_ZSTD_SLICE = 1 << 10


def unpacked(name: str, pieces: Iterator[bytes], damaged: type[CkptctlError]) -> Iterator[bytes]:
    """The bytes of a log, decompressed where the first bytes are those of a compressed stream.

    Several streams may follow each other, as in rotated logs that were joined; zeros after one
    are padding. A stream that only ends too early, as in a log that is still written, is
    yielded as far as it goes. Raises `damaged` for damaged data and for other bytes after a
    stream, and `MissingExtra` for zstd without its package.
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
            yield from stream.decompress(data)
            data = b""
            if stream.eof:
                data, stream = stream.unused_data.lstrip(b"\0"), None
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


class _Stream(Protocol):
    """One compressed stream; `eof` once it has ended."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes) -> Iterator[bytes]: ...


class _Gzip:
    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, data: bytes) -> Iterator[bytes]:
        while out := self._stream.decompress(data, PIECE_BYTES):
            yield out
            data = self._stream.unconsumed_tail
            if self._stream.eof:
                return


class _Limited:
    """bz2 and xz; both keep the input that they have not decompressed yet."""

    def __init__(self, stream: bz2.BZ2Decompressor | lzma.LZMADecompressor) -> None:
        self._stream = stream

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, data: bytes) -> Iterator[bytes]:
        while out := self._stream.decompress(data, PIECE_BYTES):
            yield out
            data = b""
            if self._stream.eof or self._stream.needs_input:
                return


class _Zstd:
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
        self.unused_data = b""

    @property
    def eof(self) -> bool:
        return bool(self._stream.eof)

    def decompress(self, data: bytes) -> Iterator[bytes]:
        for at in range(0, len(data), _ZSTD_SLICE):
            piece = data[at : at + _ZSTD_SLICE]
            try:
                out = self._stream.decompress(piece)
            except self._error as error:
                raise zlib.error(str(error)) from error
            if out:
                yield out
            if self._stream.eof:
                self.unused_data = self._stream.unused_data + data[at + len(piece) :]
                return


def _stream_for(head: bytes) -> _Stream | None:
    if head.startswith(_GZIP):
        return _Gzip()
    if head.startswith(_BZIP2):
        return _Limited(bz2.BZ2Decompressor())
    if head.startswith(_XZ):
        return _Limited(lzma.LZMADecompressor(memlimit=_MAX_WINDOW))
    if head.startswith(_ZSTD):
        return _Zstd()
    return None

"""What do compressed bytes come to, without more memory than is allowed?

A few bytes of zstd can stand for gigabytes. What comes out is handed on in pieces
and never kept, what goes in is fed in slices so short that no slice can come to
more than some 32 MiB, and a stream that goes over its limit is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptctl.errors import MissingExtra, OutOfMemory, RecordUnreadable

if TYPE_CHECKING:
    from zstandard import ZstdDecompressionObj

MAX_WINDOW = 128 << 20
"""The largest window that is followed, in bytes: what the zstd tool allows by itself."""

# A block of 4 bytes can stand for 128 KiB.
_SLICE = 1 << 10


def require_zstd() -> None:
    """Raise `MissingExtra` where zstd cannot be read."""
    try:
        import zstandard  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            "zstandard is not installed, which reads compressed records",
            next_command="pip install 'ckptctl[zstd]'",
        ) from error


class Unpacker:
    """Unpacks one frame that comes in pieces, to at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        import zstandard

        self._error = zstandard.ZstdError
        self._limit = limit
        self._stream: ZstdDecompressionObj = zstandard.ZstdDecompressor(
            max_window_size=MAX_WINDOW
        ).decompressobj()
        self.n_bytes = 0

    def feed(self, data: memoryview) -> Iterator[bytes]:
        """What the next bytes come to; raises `RecordUnreadable` where they are damaged."""
        for at in range(0, len(data), _SLICE):
            if self._stream.eof:
                raise RecordUnreadable("bytes follow the end of the compressed ones")
            try:
                out = self._stream.decompress(data[at : at + _SLICE])
            except self._error as error:
                if "not enough memory" in str(error):
                    raise OutOfMemory(f"a record cannot be decompressed: {error}") from error
                raise RecordUnreadable(f"it cannot be decompressed: {error}") from error
            self.n_bytes += len(out)
            if self.n_bytes > self._limit:
                raise RecordUnreadable(
                    f"it decompresses to more than the {self._limit:,} bytes that it can hold"
                )
            if out:
                yield out
        if self._stream.eof and self._stream.unused_data:
            raise RecordUnreadable("bytes follow the end of the compressed ones")

    @property
    def ended(self) -> bool:
        """The frame has come to its end."""
        return bool(self._stream.eof)

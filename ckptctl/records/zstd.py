"""Decompress zstd records within a fixed memory limit.

A few bytes of zstd can expand to gigabytes. Output is passed on in pieces and never kept;
input is fed in slices so short that none expands to more than about 32 MiB; a stream that
exceeds its limit is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from ckptctl.errors import MissingExtra, OutOfMemory, RecordUnreadable
from ckptctl.model import DTYPE_SIZES, TensorEntry
from ckptctl.records.opening import Unfit
from ckptctl.records.ranges import Owner

if TYPE_CHECKING:
    from zstandard import ZstdDecompressionObj

ZSTD = "stream.zstd/1"
"""The name under which DCP's own extension registers the transform."""

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

MAX_WINDOW = 128 << 20
"""The largest window that is accepted, in bytes: the default of the zstd tool."""

MAX_ENTRY_BYTES = 1 << 30
"""The size limit of a decompressed non-tensor entry."""

FRAME_BYTES = 1 << 20
"""The size limit of the archive around a tensor's elements."""

_WIDEST_ITEM = 16

# A block of 4 bytes can expand to 128 KiB.
_SLICE = 1 << 10


def require_zstd() -> None:
    """Raise `MissingExtra` if zstandard is not installed."""
    try:
        import zstandard  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            "reading compressed records needs zstandard, which is not installed",
            next_command="pip install 'ckptctl[zstd]'",
        ) from error


def unpacked_limit(owner: Owner) -> int:
    """How many bytes a compressed record may expand to: its elements and their frame."""
    if not isinstance(owner.entry, TensorEntry):
        return MAX_ENTRY_BYTES
    return tensor_limit(owner.entry.dtype, owner.entry.chunks.sizes_of(owner.chunk))


def tensor_limit(dtype: str, sizes: Sequence[int]) -> int:
    """How many bytes the record of a chunk of `sizes` elements may expand to."""
    return DTYPE_SIZES.get(dtype, _WIDEST_ITEM) * prod(sizes) + FRAME_BYTES


def check_transforms(transforms: Sequence[str]) -> None:
    """Raise `Unfit` unless a record was written unchanged or compressed with zstd alone."""
    if transforms and tuple(transforms) != (ZSTD,):
        through = ", ".join(transforms)
        raise Unfit("format.unsupported", f"it was transformed by {through} when it was saved")


def unpack(packed: bytes, transforms: Sequence[str], limit: int) -> bytes:
    """The content of a compressed record, at most `limit` bytes.

    Raises `RecordUnreadable` for a damaged one, `Unfit` for a transform other than zstd,
    `MissingExtra`.
    """
    check_transforms(transforms)
    if not transforms:
        return packed
    require_zstd()
    unpacker = Unpacker(limit)
    data = b"".join(unpacker.feed(memoryview(packed)))
    unpacker.check_ended()
    return data


class Unpacker:
    """Decompresses one frame that arrives in pieces, to at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        import zstandard

        self._error = zstandard.ZstdError
        self._limit = limit
        self._stream: ZstdDecompressionObj = zstandard.ZstdDecompressor(
            max_window_size=MAX_WINDOW
        ).decompressobj()
        self.n_bytes = 0

    def feed(self, data: memoryview) -> Iterator[bytes]:
        """Decompress the next bytes; raises `RecordUnreadable` if they are damaged."""
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
                    f"it decompresses to more than the {self._limit:,} allowed bytes"
                )
            if out:
                yield out
        if self._stream.eof and self._stream.unused_data:
            raise RecordUnreadable("bytes follow the end of the compressed ones")

    def check_ended(self) -> None:
        """Raise `RecordUnreadable` if the frame is not complete."""
        if not self._stream.eof:
            raise RecordUnreadable("its compressed bytes are truncated")

"""Write records, block by block, without holding their elements in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckptctl.formats.archive.writing import tensor_frame

_JOINED_BYTES = 256 << 10
"""Short pieces are joined up to this length: what was joined is still in the cache."""


class Block(NamedTuple):
    """Consecutive elements of a tensor in the order of the record, and their CRC-32."""

    data: memoryview
    crc: int


def block_of(data: memoryview) -> Block:
    """A block of bytes whose checksum is not known yet."""
    from zlib_ng.zlib_ng import crc32

    return Block(data, crc32(data))


def record_of(
    dtype: str,
    shape: tuple[int, ...],
    blocks: Iterable[Block],
    strides: tuple[int, ...] | None = None,
) -> Iterator[memoryview]:
    """The bytes of a tensor's record, in order, as `torch.save` would write them.

    `blocks` are all elements of the tensor, in row-major order or in that of `strides`.
    Each piece is consumed before the next block is requested, so blocks may share one
    buffer. The size of the record is `tensor_frame(dtype, shape, strides).length`.
    """
    from zlib_ng.zlib_ng import crc32_combine

    frame = tensor_frame(dtype, shape, strides)
    yield memoryview(frame.before)
    crc = 0
    for block in blocks:
        crc = crc32_combine(crc, block.crc, len(block.data))
        yield block.data
    yield memoryview(frame.after(crc))


def joined(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes with short pieces put together, in one buffer that is used again."""
    buffer = memoryview(bytearray(_JOINED_BYTES))
    used = 0
    for piece in pieces:
        end = used + len(piece)
        if end <= _JOINED_BYTES:
            buffer[used:end] = piece
            used = end
            continue
        if used:
            yield buffer[:used]
        if len(piece) > _JOINED_BYTES:
            yield piece
            used = 0
        else:
            used = len(piece)
            buffer[:used] = piece
    if used:
        yield buffer[:used]

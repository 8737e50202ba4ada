"""Write one record, block by block, without holding its elements in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckptctl.formats.archive.writing import tensor_frame


class Block(NamedTuple):
    """Consecutive elements of a tensor in row-major order, and the CRC-32 of their bytes."""

    data: memoryview
    crc: int


def block_of(data: memoryview) -> Block:
    """A block of bytes whose checksum is not known yet."""
    from zlib_ng.zlib_ng import crc32

    return Block(data, crc32(data))


def record_of(dtype: str, shape: tuple[int, ...], blocks: Iterable[Block]) -> Iterator[memoryview]:
    """The bytes of a tensor's record, in order, as `torch.save` would write them.

    `blocks` are all elements of the tensor. Each piece is consumed before the next block is
    requested, so blocks may share one buffer. The size of the record is
    `tensor_frame(dtype, shape).length`.
    """
    from zlib_ng.zlib_ng import crc32_combine

    frame = tensor_frame(dtype, shape)
    yield memoryview(frame.before)
    crc = 0
    for block in blocks:
        crc = crc32_combine(crc, block.crc, len(block.data))
        yield block.data
    yield memoryview(frame.after(crc))

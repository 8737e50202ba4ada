"""Compute digests and checksums of bytes that come in pieces.

A *digest* is ckptctl's own, of a whole file and of each block. `xxh3-128` is as fast as
memory and shows damage, but two different files with one digest can be made on purpose.
`sha256` withstands that, at 1 to 2 GB a second where the processor has instructions for
it; BLAKE2 was measured slower.

A *checksum* is what an object store keeps of an object: CRC-32 and SHA; CRC-32C (Google)
and CRC-64/NVME (Amazon, where the writer sent nothing else) where the package awscrt is
installed, which is the extra `checksums`. Others are not computed.

Nothing is read here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from typing import Protocol

import xxhash
from zlib_ng.zlib_ng import crc32

from ckptctl.model import Hex

BLOCK_BYTES = 64 << 20
"""A file has a digest for each block of so many bytes, and one of the whole."""


def sha256_of(data: bytes) -> str:
    """The SHA-256 of bytes, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


class Algorithm(StrEnum):
    """How bytes are digested."""

    XXH3 = "xxh3-128"
    SHA256 = "sha256"

    @property
    def n_digits(self) -> int:
        """Hexadecimal digits of one digest."""
        return 32 if self is Algorithm.XXH3 else 64


class Checksumming(Protocol):
    """Bytes that come in pieces, in order, and what they come to."""

    def update(self, data: memoryview, /) -> object:
        """Take the next bytes."""

    def hexdigest(self) -> str:
        """What all bytes taken so far come to, in hex."""


@dataclass(frozen=True, slots=True)
class Digests:
    """The digest of a run of bytes, and of its blocks where it has more than one."""

    whole: Hex
    """The digest of all bytes."""
    blocks: tuple[Hex, ...] = ()
    """The digest of each block, where there are several."""

    @property
    def by_block(self) -> tuple[str, ...]:
        """A digest for each block, also where the only one is the whole."""
        return self.blocks or (self.whole,)


def n_blocks(size: int) -> int:
    """How many blocks a file of `size` bytes has; an empty file has one, too."""
    return max(1, -(-size // BLOCK_BYTES))


class Digester:
    """Digests bytes that come in pieces of any length, in order, however many they are.

    Bytes behind the first block are digested twice, which hardly slows xxh3.
    """

    __slots__ = ("_block", "_blocks", "_left", "_new", "_whole")

    def __init__(self, algorithm: Algorithm) -> None:
        self._new = _HASHES[algorithm]
        self._whole = self._block = self._new()  # as far as the first block goes, one is both
        self._blocks: list[str] = []
        self._left = BLOCK_BYTES

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        view = memoryview(data)
        while len(view) > self._left:
            self._take(view[: self._left])
            view = view[self._left :]
            self._blocks.append(self._block.hexdigest())
            self._block, self._left = self._new(), BLOCK_BYTES
        self._take(view)
        self._left -= len(view)

    def _take(self, view: memoryview) -> None:
        self._whole.update(view)
        if self._block is not self._whole:
            self._block.update(view)

    def digests(self) -> Digests:
        """What all bytes taken so far come to."""
        last = (self._block.hexdigest(),) if self._blocks else ()
        return Digests(self._whole.hexdigest(), (*self._blocks, *last))


_HASHES: Mapping[Algorithm, Callable[[], Checksumming]] = {
    Algorithm.XXH3: xxhash.xxh3_128,
    Algorithm.SHA256: hashlib.sha256,
}

_CRC_BYTES = {"crc32": 4, "crc32c": 4, "crc64nvme": 8}
_SHA = frozenset({"sha1", "sha256"})


def can_compute(algorithm: str) -> bool:
    """Whether a checksum can be computed here."""
    return checksumming(algorithm) is not None


def checksumming(algorithm: str) -> Checksumming | None:
    """A new computation of a checksum; None where it cannot be computed here."""
    if algorithm in _SHA:
        return hashlib.new(algorithm, usedforsecurity=False)
    if algorithm == "crc32":
        return _Crc(crc32, _CRC_BYTES[algorithm])
    if algorithm in _CRC_BYTES and find_spec("awscrt"):
        from awscrt import checksums

        of: Mapping[str, Callable[[memoryview, int], int]] = {
            "crc32c": checksums.crc32c,
            "crc64nvme": checksums.crc64nvme,
        }
        return _Crc(of[algorithm], _CRC_BYTES[algorithm])
    return None


class _Crc:
    __slots__ = ("_function", "_n_bytes", "_value")

    def __init__(self, function: Callable[[memoryview, int], int], n_bytes: int) -> None:
        self._function = function
        self._n_bytes = n_bytes
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        self._value = self._function(data, self._value)

    def hexdigest(self) -> str:
        return self._value.to_bytes(self._n_bytes, "big").hex()

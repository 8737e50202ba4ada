"""Digests of a file: of the whole and of each block.

Which algorithms there are, and how bytes that come in pieces are digested.
Nothing is read here; what a digest is compared with is the question of `seals`.

`xxh3-128` is as fast as memory and shows damage; two different files with one
digest can be made on purpose in a moment. `sha256` cannot be fooled, at 1 to 2 GB
a second where the processor has instructions for it; BLAKE2 was measured slower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

BLOCK_BYTES = 64 << 20
"""A file has a digest for each block of so many bytes, and one of the whole."""


class Algorithm(str, Enum):
    """How bytes are digested."""

    XXH3 = "xxh3-128"
    SHA256 = "sha256"

    @property
    def n_digits(self) -> int:
        """Hexadecimal digits of one digest."""
        return _DIGITS[self]


_DIGITS: Mapping[Algorithm, int] = {Algorithm.XXH3: 32, Algorithm.SHA256: 64}


class _Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> object: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Digests:
    """The digest of a run of bytes, and of its blocks where it has more than one."""

    whole: str
    blocks: tuple[str, ...] = ()

    @property
    def by_block(self) -> tuple[str, ...]:
        """A digest for each block, also where the only one is the whole."""
        return self.blocks or (self.whole,)


def n_blocks(size: int) -> int:
    """How many blocks a file of `size` bytes has; an empty file has one, too."""
    return max(1, -(-size // BLOCK_BYTES))


class Digester:
    """Digests bytes that come in pieces of any length, in order, however many they are.

    Bytes behind the first block are digested twice: xxh3 hardly notices.
    """

    __slots__ = ("_block", "_blocks", "_left", "_new", "_whole")

    def __init__(self, algorithm: Algorithm) -> None:
        self._new = _new_hash(algorithm)
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


def _new_hash(algorithm: Algorithm) -> Callable[[], _Hash]:
    if algorithm is Algorithm.SHA256:
        import hashlib

        return hashlib.sha256
    import xxhash

    return xxhash.xxh3_128

"""Combine the checksums of parts of a record that are read in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple


class CrcPart(NamedTuple):
    """The CRC-32 of `n_bytes` bytes from byte `start` on."""

    start: int
    n_bytes: int
    crc: int


def combined_crc(parts: Iterable[CrcPart], n_bytes: int) -> int | None:
    """The CRC-32 of `n_bytes` bytes; None if the parts do not cover each of them once."""
    from zlib_ng.zlib_ng import crc32_combine

    crc = at = 0
    for part in sorted(parts):
        if part.start != at:
            return None
        crc = crc32_combine(crc, part.crc, part.n_bytes)
        at += part.n_bytes
    return crc if at == n_bytes else None


class ElementChecksum:
    """The checksum of `n_bytes` of elements, of which several threads report parts.

    `mismatch` is called with the checksum of all parts if that is not `expected`.
    """

    def __init__(self, n_bytes: int, expected: int, mismatch: Callable[[int], None]) -> None:
        self._n_bytes = n_bytes
        self._left = n_bytes
        self._expected = expected
        self._mismatch = mismatch
        self._parts: list[CrcPart] = []
        self._lock = threading.Lock()

    def add(self, part: CrcPart) -> None:
        """Add the checksum of a part; the last one is compared."""
        with self._lock:
            self._parts.append(part)
            self._left -= part.n_bytes
            if self._left:
                return
        found = combined_crc(self._parts, self._n_bytes)
        # Parts with gaps or overlaps prove nothing and count as a mismatch.
        if found != self._expected:
            self._mismatch(-1 if found is None else found)

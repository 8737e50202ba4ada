"""Compute the checksums that object stores keep of their objects.

CRC-32 and SHA at all times. CRC-32C, which Google keeps of every object, and
CRC-64/NVME, which Amazon keeps where the writer sent nothing else, where the
package awscrt is installed: it is the extra `checksums`. Others are not computed.
What a store keeps is the question of `Store.kept`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Protocol

_CRC_BYTES = {"crc32": 4, "crc32c": 4, "crc64nvme": 8}
_SHA = frozenset({"sha1", "sha256"})


class Checksumming(Protocol):
    """Bytes that come in pieces, in order, and what they come to."""

    def update(self, data: memoryview, /) -> object:
        """Take the next bytes."""
        ...

    def hexdigest(self) -> str:
        """What all bytes taken so far come to, in hex."""
        ...


def can_compute(algorithm: str) -> bool:
    """Whether a checksum can be computed here."""
    return checksumming(algorithm) is not None


def checksumming(algorithm: str) -> Checksumming | None:
    """A new computation of a checksum; None where it cannot be computed here."""
    if algorithm in _SHA:
        return hashlib.new(algorithm, usedforsecurity=False)
    if algorithm == "crc32":
        from zlib_ng.zlib_ng import crc32

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

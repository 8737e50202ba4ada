"""Write a whole file of `torch.save`, a piece at a time.

One archive holds the pickle of a nested state dict, and the storage of each tensor as a
member. All but the elements and their checksums is known beforehand, and with it the
position of every byte. `torch.load(weights_only=True)` reads the file: the pickle calls
only what rebuilds tensors and ordered dicts. `flat_state` flattens and nests states.

Source: torch 2.13 `torch/serialization.py`, `torch/_utils.py`,
`torch/_weights_only_unpickler.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptctl.formats.archive.members import SMALL_MEMBERS, VERSION, Placed, end, folded, place
from ckptctl.formats.archive.writing import tensor_value
from ckptctl.formats.flat_state import Written, text
from ckptctl.formats.values import TensorStub

_ID = b".data/serialization_id"
_ID_DIGITS = 20


class _Member(NamedTuple):
    placed: Placed
    crc: int


def pickled_state(state: object) -> bytes:
    """The pickle of a nested state of dicts and lists, `TensorStub` and `Written`, at protocol 2.

    Anything else stands for an item of a list that nobody knows: it becomes None.
    """
    return b"\x80\x02" + b"".join(_state(state)) + b"."


def _state(value: object) -> Iterator[bytes]:
    if isinstance(value, Written):
        yield value.pickled
    elif isinstance(value, TensorStub):
        yield tensor_value(value.dtype, value.shape, value.storage_key)
    elif isinstance(value, dict):
        yield b"}("
        for key, item in value.items():
            yield text(key)
            yield from _state(item)
        yield b"u"
    elif isinstance(value, list):
        yield b"]("
        for item in value:
            yield from _state(item)
        yield b"e"
    else:
        yield b"N"


class FlatArchive:
    """A file of `torch.save` but for its elements: what comes before, between and behind them.

    `sizes` are the bytes of each storage, in the order of their keys `0`, `1`, …;
    `n_bytes` those of the whole file.
    """

    def __init__(self, pickle: bytes, sizes: Sequence[int]) -> None:
        from zlib_ng.zlib_ng import crc32

        self._front: list[_Member] = []
        at = 0
        for name, data in ((b"data.pkl", pickle), *SMALL_MEMBERS):
            placed = place(at, name, data, len(data))
            self._front.append(_Member(placed, crc32(data)))
            at = placed.following
        self._storages: list[Placed] = []
        for key, size in enumerate(sizes):
            self._storages.append(place(at, b"data/%d" % key, b"", size))
            at = self._storages[-1].following
        self._version = _Member(place(at, *VERSION, len(VERSION[1])), crc32(VERSION[1]))
        self._last = place(self._version.placed.following, _ID, b"", 2 * _ID_DIGITS)
        members = [member.placed for member in self._front]
        self._members = (*members, *self._storages, self._version.placed, self._last)
        n_directory = sum(len(member.entry(0)) for member in self._members)
        self.n_bytes = self._last.following + n_directory + len(end(0, 0, 0))

    def between(self, crcs: Sequence[int]) -> bytes:
        """What stands behind the first storages, whose checksums are `crcs`, up to the next."""
        n = len(crcs)
        if n:
            before = self._storages[n - 1].descriptor(crcs[-1])
        else:
            before = b"".join(member.placed.whole(member.crc) for member in self._front)
        if n < len(self._storages):
            return before + self._storages[n].header
        return before + self._end(crcs)

    def _end(self, crcs: Sequence[int]) -> bytes:
        from zlib_ng.zlib_ng import crc32

        version = self._version
        every = [*(member.crc for member in self._front), *crcs, version.crc]
        identity = self._of_names() + folded(every)
        every.append(crc32(identity))
        directory = b"".join(
            member.entry(crc) for member, crc in zip(self._members, every, strict=True)
        )
        return (
            version.placed.whole(version.crc)
            + self._last.header
            + identity
            + self._last.descriptor(every[-1])
            + directory
            + end(len(every), len(directory), self._last.following)
        )

    def _of_names(self) -> bytes:
        """The first half of `serialization_id`: torch, too, makes it of the members' names."""
        digest = hashlib.sha256(b"\0".join(member.path for member in self._members)).digest()
        return b"%020d" % int.from_bytes(digest[:8], "little")

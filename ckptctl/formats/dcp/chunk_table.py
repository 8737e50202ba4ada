"""The chunks of all tensors in columns, while byte ranges are given to them.

torch's loader looks a byte range up by (FQN, offset); the index in the key is a hint that it
may ignore. A `ChunkTable` has the chunks while that is being answered: their slices, and the
range that each was given so far.

Source: torch 2.13 `torch/distributed/checkpoint/planner_helpers.py`
(`create_read_items_for_chunk_list`).
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptctl.formats.pickles.stubs import Malformed
from ckptctl.model import NO_FILE, Chunks, RangeColumns

if TYPE_CHECKING:
    from ckptctl.formats.dcp.fast_path_storage import StorageRun

Dims = tuple[int, ...]

Span = tuple[int, int, tuple[str, ...]]
"""Where a record begins, its length, both in bytes, and its transforms."""


def packed(dims: Dims) -> bytes:
    """Integers as an array of 64-bit ones has them: those of many chunks are joined in one go."""
    return array("q", dims).tobytes()


def unpacked(dims: bytes) -> Dims:
    """The integers that were packed."""
    return tuple(array("q", dims))


class ChunkTable:
    """The chunks of all tensors in columns, those of one tensor behind each other.

    Offsets and sizes are in elements and `packed`; the other columns are those of `RangeColumns`.
    `numbers` are those of the files, in the order in which they are first named.
    """

    def __init__(self) -> None:
        self.numbers: defaultdict[str, int] = defaultdict()
        self.numbers.default_factory = self.numbers.__len__
        self._offsets: list[bytes] = []
        # One, where all chunks of a tensor have the same.
        self._sizes: dict[str, Sequence[bytes]] = {}
        self._files = array("i")
        self._starts = array("q")
        self._lengths = array("q")
        self._transforms: dict[str, dict[int, tuple[str, ...]]] = {}
        self._own: dict[str, range] = {}
        # Made when a hint is of no help, or where several chunks begin at one offset.
        self._by_offset: dict[str, dict[bytes, int]] = {}

    def add(self, fqn: str, offsets: list[bytes], sizes: list[bytes]) -> None:
        """Add the chunks of a tensor, still without byte ranges."""
        self._own[fqn] = range(len(self._offsets), len(self._offsets) + len(offsets))
        self._offsets += offsets
        self._sizes[fqn] = sizes[:1] if sizes[:1] * len(sizes) == sizes else sizes
        if len(set(offsets)) != len(offsets):
            self._index(fqn)
        self._files += array("i", [NO_FILE]) * len(offsets)
        self._starts += array("q", [0]) * len(offsets)
        self._lengths += array("q", [0]) * len(offsets)

    def _index(self, fqn: str) -> dict[bytes, int]:
        """The first chunk at each offset of a tensor."""
        positions = self._by_offset[fqn] = {}
        for position in self._own[fqn]:
            positions.setdefault(self._offsets[position], position)
        return positions

    def place_run(self, run: StorageRun) -> bool:
        """Give each chunk of a run its byte range; False, and none given, where a hint is wrong."""
        hints, offsets, _ = zip(*run.keys, strict=True)
        if self._by_offset and not self._by_offset.keys().isdisjoint(run.fqns):
            return False
        try:
            own = map(self._own.__getitem__, run.fqns)
            positions = [chunks[hint] for chunks, hint in zip(own, hints, strict=True)]
        except (KeyError, IndexError, TypeError):  # of another tensor, chunk, or without a hint
            return False
        if not (
            [*map(self._offsets.__getitem__, positions)] == [*offsets]
            and max(map(self._files.__getitem__, positions)) == NO_FILE
            and len(set(positions)) == len(positions)
        ):
            return False
        files, starts, lengths = self._files, self._starts, self._lengths
        numbers = map(self.numbers.__getitem__, run.files)
        for position, number, start, length in zip(
            positions, numbers, run.spans[::2], run.spans[1::2], strict=True
        ):
            files[position] = number
            starts[position] = start
            lengths[position] = length
        return True

    def place(self, fqn: str, hint: int | None, offset: bytes, file: int, span: Span) -> bool:
        """Give the chunk that begins at `offset` its byte range: the first, where several do.

        False where no chunk begins there. Raises `Malformed` where the chunk has a
        range already.
        """
        own = self._own.get(fqn)
        if own is None:
            return False
        if (
            fqn in self._by_offset
            or hint is None
            or not 0 <= hint < len(own)
            or self._offsets[position := own[hint]] != offset
        ):
            positions = self._by_offset.get(fqn) or self._index(fqn)
            if offset not in positions:
                return False
            position = positions[offset]
        if self._files[position] != NO_FILE:
            raise Malformed("two byte ranges for one chunk")
        self._files[position] = file
        self._starts[position], self._lengths[position], transforms = span
        if transforms:
            self._transforms.setdefault(fqn, {})[position - own.start] = transforms
        return True

    def chunks(self, fqn: str, n_dims: int, file_names: Sequence[str]) -> Chunks:
        """The chunks of a tensor, once every byte range is placed."""
        self._share_ranges(fqn)
        own, sizes = slice(self._own[fqn].start, self._own[fqn].stop), self._sizes[fqn]
        return Chunks(
            n_dims,
            array("q", b"".join(self._offsets[own])),
            array("q", b"".join(sizes)) * (len(self._own[fqn]) // max(1, len(sizes))),
            RangeColumns(
                self._files[own],
                self._starts[own],
                self._lengths[own],
                file_names,
                self._transforms.get(fqn, {}),
            ),
        )

    def _share_ranges(self, fqn: str) -> None:
        """Chunks at one offset have one key, and so one range: each load reads it for all."""
        own = self._own[fqn]
        positions = self._by_offset.get(fqn, {})
        if len(positions) in (0, len(own)):
            return
        transforms = self._transforms.setdefault(fqn, {})
        for position in own:
            first = positions[self._offsets[position]]
            self._files[position] = self._files[first]
            self._starts[position] = self._starts[first]
            self._lengths[position] = self._lengths[first]
            if first - own.start in transforms:
                transforms[position - own.start] = transforms[first - own.start]

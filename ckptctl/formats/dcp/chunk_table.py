"""A table of the chunks by their byte ranges, in columns.

torch's loader looks a byte range up by (FQN, offset); the index in the key is a
hint that it may ignore. A `ChunkTable` is one tensor while that is being
answered: its slices, and the range that each was given so far.

Source: torch 2.13 `torch/distributed/checkpoint/planner_helpers.py`
(`create_read_items_for_chunk_list`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain

from ckptctl.formats.pickles.stubs import Malformed
from ckptctl.model import NO_FILE, Chunks, RangeColumns

Dims = tuple[int, ...]


class ChunkTable:
    """The chunks of one tensor: `offsets` and `sizes` in elements, and their byte ranges."""

    __slots__ = ("_files", "_lengths", "_positions", "_starts", "_transforms", "offsets", "sizes")

    def __init__(self, offsets: Sequence[Dims], sizes: Sequence[Dims]) -> None:
        self.offsets = offsets
        self.sizes = sizes
        self._files = array("i", [NO_FILE]) * len(offsets)
        self._starts = array("q", [0]) * len(offsets)
        self._lengths = array("q", [0]) * len(offsets)
        self._transforms: dict[int, tuple[str, ...]] = {}
        # Made when a hint is of no help, or where several chunks begin at one offset.
        self._positions: dict[Dims, int] | None = None
        if len(set(offsets)) != len(offsets):
            self._positions = self._by_offset()

    def place(
        self,
        offset: Dims,
        hint: int | None,
        file: int,
        start: int,
        length: int,
        transforms: tuple[str, ...],
    ) -> bool:
        """Give the chunk that begins at `offset` its byte range: the first, where several do.

        False where no chunk begins there. Raises `Malformed` where the chunk has a
        range already.
        """
        if (
            self._positions is None
            and hint is not None
            and 0 <= hint < len(self.offsets)
            and self.offsets[hint] == offset
        ):
            position = hint
        else:
            self._positions = self._positions or self._by_offset()
            if offset not in self._positions:
                return False
            position = self._positions[offset]
        if self._files[position] != NO_FILE:
            raise Malformed("two byte ranges for one chunk")
        self._files[position] = file
        self._starts[position] = start
        self._lengths[position] = length
        if transforms:
            self._transforms[position] = transforms
        return True

    def _by_offset(self) -> dict[Dims, int]:
        positions: dict[Dims, int] = {}
        for position, offset in enumerate(self.offsets):
            positions.setdefault(offset, position)
        return positions

    def chunks(self, n_dims: int, file_names: Sequence[str]) -> Chunks:
        """The columns, once every byte range is placed."""
        self._share_ranges()
        return Chunks(
            n_dims,
            array("q", chain.from_iterable(self.offsets)),
            array("q", chain.from_iterable(self.sizes)),
            RangeColumns(self._files, self._starts, self._lengths, file_names, self._transforms),
        )

    def _share_ranges(self) -> None:
        """Chunks at one offset have one key, and so one range: each load reads it for all."""
        if self._positions is None or len(self._positions) == len(self.offsets):
            return
        for position, offset in enumerate(self.offsets):
            first = self._positions[offset]
            self._files[position] = self._files[first]
            self._starts[position] = self._starts[first]
            self._lengths[position] = self._lengths[first]
            if first in self._transforms:
                self._transforms[position] = self._transforms[first]

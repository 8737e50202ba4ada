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

NO_HINT = -1
"""The index of a key that has none."""


def packed(dims: Dims) -> bytes:
    """Integers as an array of 64-bit ones has them: those of many chunks are joined in one go."""
    return array("q", dims).tobytes()


def unpacked(dims: bytes) -> Dims:
    """The integers that were packed."""
    return tuple(array("q", dims))


class ChunkColumns:
    """The chunks of one tensor in columns, while byte ranges are given to them.

    Offsets and sizes are in elements and `packed`, `files` as in `RangeColumns`. A span of many
    chunks is one object.
    """

    __slots__ = ("by_offset", "files", "offsets", "sizes", "spans")

    def __init__(self, offsets: list[bytes], sizes: list[bytes]) -> None:
        n_chunks = len(offsets)
        self.offsets = offsets
        # One, where all chunks have the same.
        self.sizes = sizes[:1] if sizes[:1] * n_chunks == sizes else sizes
        self.files = [NO_FILE] * n_chunks
        self.spans: list[Span] = [(0, 0, ())] * n_chunks
        # Made when a hint is of no help, or where several chunks begin at one offset.
        self.by_offset: dict[bytes, int] = {}
        if len(set(offsets)) != n_chunks:
            self._index()

    def _index(self) -> None:
        """The first chunk at each offset."""
        for position, offset in enumerate(self.offsets):
            self.by_offset.setdefault(offset, position)

    def place(self, hint: int, offset: bytes, file: int, span: Span) -> bool:
        """Give the chunk that begins at `offset` its byte range: the first, where several do.

        False where no chunk begins there. Raises `Malformed` where the chunk has a
        range already.
        """
        position = NO_HINT if self.by_offset else hint
        if not 0 <= position < len(self.offsets) or self.offsets[position] != offset:
            if not self.by_offset:
                self._index()
            if offset not in self.by_offset:
                return False
            position = self.by_offset[offset]
        if self.files[position] != NO_FILE:
            raise Malformed("two byte ranges for one chunk")
        self.files[position], self.spans[position] = file, span
        return True

    def chunks(self, n_dims: int, file_names: Sequence[str]) -> Chunks:
        """The chunks, once every byte range is placed."""
        self._share_ranges()
        n_chunks = len(self.offsets)
        starts, lengths, transforms = zip(*self.spans, strict=True) if n_chunks else ((), (), ())
        return Chunks(
            n_dims,
            array("q", b"".join(self.offsets)),
            array("q", b"".join(self.sizes)) * (n_chunks // max(1, len(self.sizes))),
            RangeColumns(
                array("i", self.files),
                array("q", starts),
                array("q", lengths),
                file_names,
                {position: names for position, names in enumerate(transforms) if names},
            ),
        )

    def _share_ranges(self) -> None:
        """Chunks at one offset have one key, and so one range: each load reads it for all."""
        if len(self.by_offset) in (0, len(self.offsets)):
            return
        for position, offset in enumerate(self.offsets):
            first = self.by_offset[offset]
            self.files[position], self.spans[position] = self.files[first], self.spans[first]


class ChunkTable:
    """The chunks of all tensors by FQN.

    `numbers` are those of the files, in the order in which they are first named.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, ChunkColumns] = {}
        self.numbers: defaultdict[str, int] = defaultdict()
        self.numbers.default_factory = self.numbers.__len__

    def place_run(self, run: StorageRun) -> list[int]:
        """Give the chunks of a run their byte ranges; the rows whose hint does not lead to one."""
        tensors, others = self.tensors, []
        numbers = map(self.numbers.__getitem__, run.files)
        rows = zip(run.fqns, run.keys, numbers, run.spans, strict=True)
        for row, (fqn, (hint, offset, _), number, span) in enumerate(rows):
            try:
                columns = tensors[fqn]
                fits = columns.offsets[hint] == offset
            except (KeyError, IndexError):
                fits = False
            if not fits or columns.by_offset or columns.files[hint] != NO_FILE:
                others.append(row)
                continue
            columns.files[hint], columns.spans[hint] = number, span
        return others

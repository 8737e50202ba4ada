"""The byte ranges that the metadata of a part names, and their owners.

A range is a number in a table of columns: half a million ranges are common, and an object for
each would cost more than reading the metadata.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from ckptctl.model import NO_FILE, BytesEntry, Metadata, TensorEntry


class Owner(NamedTuple):
    """The owner of a range: chunk number `chunk` of a tensor, or a bytes entry."""

    entry: TensorEntry | BytesEntry
    chunk: int

    @property
    def name(self) -> str:
        """The FQN, with the offsets of the chunk if the tensor has several."""
        if isinstance(self.entry, TensorEntry) and len(self.entry.chunks) > 1:
            return f"{self.entry.fqn} at {self.entry.chunks.offsets_of(self.chunk)}"
        return self.entry.fqn

    @property
    def transforms(self) -> tuple[str, ...]:
        """The transforms that were applied to the bytes of the range when it was written."""
        if isinstance(self.entry, TensorEntry):
            return self.entry.chunks.transforms.get(self.chunk, ())
        return self.entry.byte_range.transforms if self.entry.byte_range else ()


class Ranges:
    """The byte ranges of all metadata of one part, in columns.

    Range `i` is the `lengths[i]` bytes from `starts[i]` on in the file
    `file_names[files[i]]`; `files[i]` is `NO_FILE` if the metadata names no range. The
    ranges of one entry follow each other, in the order of its chunks. A step that was saved
    without collectives has one metadata file per rank.
    """

    def __init__(self, metadatas: Sequence[Metadata]) -> None:
        self.metadatas = tuple(metadatas)
        self.entries: list[TensorEntry | BytesEntry] = []
        self.first_range = array("q")
        self.files = array("i")
        self.starts = array("q")
        self.lengths = array("q")
        self._numbers: dict[str, int] = {}
        for metadata in metadatas:
            known: dict[int, list[int]] = {}
            for tensor in metadata.tensors.values():
                self._add_tensor(tensor, known)
            for entry in metadata.bytes_entries.values():
                self._begin(entry)
                place = entry.byte_range
                self.files.append(self._number(place.file) if place else NO_FILE)
                self.starts.append(place.offset if place else 0)
                self.lengths.append(place.length if place else 0)
        self.file_names = tuple(self._numbers)

    def __len__(self) -> int:
        return len(self.starts)

    def _add_tensor(self, tensor: TensorEntry, known: dict[int, list[int]]) -> None:
        self._begin(tensor)
        chunks = tensor.chunks
        # All tensors of a metadata share one list of names: it is checked once.
        if id(chunks.file_names) not in known:
            numbers = [self._number(name) for name in chunks.file_names]
            changed = numbers != [*range(len(numbers))]
            known[id(chunks.file_names)] = [*numbers, NO_FILE] if changed else []
        if numbers := known[id(chunks.file_names)]:  # `NO_FILE`, -1, is the last
            self.files.extend(array("i", map(numbers.__getitem__, chunks.files)))
        else:
            self.files.extend(chunks.files)
        self.starts.extend(chunks.starts)
        self.lengths.extend(chunks.lengths)

    def _begin(self, entry: TensorEntry | BytesEntry) -> None:
        self.entries.append(entry)
        self.first_range.append(len(self.starts))

    def _number(self, file_name: str) -> int:
        return self._numbers.setdefault(file_name, len(self._numbers))

    def entry_number(self, number: int) -> int:
        # Entries without ranges share the next entry's first index: take the last one.
        return bisect_right(self.first_range, number) - 1

    def owner(self, number: int) -> Owner:
        at = self.entry_number(number)
        return Owner(self.entries[at], number - self.first_range[at])

    @cached_property
    def by_file(self) -> Sequence[Sequence[int]]:
        """The numbers of the ranges in each file, in order; those without a file are in none."""
        numbers = [array("q") for _ in (*self.file_names, NO_FILE)]  # `NO_FILE`, -1, is the last
        for number, file in enumerate(self.files):
            numbers[file].append(number)
        return numbers[:-1]

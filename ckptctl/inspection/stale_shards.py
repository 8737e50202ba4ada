"""Find shard files that are equal to those of the predecessor while others changed.

Between two steps training changes every chunk of a tensor or none of them, on whichever
rank. If all records of a shard file equal those of the step before, by their checksums,
while other chunks of the same tensors changed, the file belongs to that step, or that step
has this one's. This is a suspicion: no record states its step. This module selects what is
compared and evaluates it; `inspection.predecessor` reads.

Frozen tensors are unchanged in all files, and so are zeros. Rows without a gradient (of an
embedding, of an expert) may be unchanged in one file alone, but a file also has optimizer
moments that are not zero, which decay.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, zip_longest
from math import prod

from ckptctl.data_classes import dataclass
from ckptctl.findings import Finding
from ckptctl.formats.frameworks.state_keys import is_moment
from ckptctl.formatting import counted, inside, some_of
from ckptctl.inspection.structure import NO_CRC
from ckptctl.model import DTYPE_SIZES, NO_FILE, TensorEntry
from ckptctl.records.ranges import Ranges

FEW = 4
"""Records of each shard file that are compared first."""

MANY = 64
"""Records of an unchanged file that are compared then; at most `MAX_SUSPECTS` such files."""

MAX_SUSPECTS = 16

MIN_TENSORS = 3
"""The least number of tensors that are unchanged in a file but changed in others."""

MIN_ELEMENTS = 16
"""A chunk of fewer elements may keep its values by chance: in bfloat16 small changes are lost."""

Crcs = Mapping[int, int]
"""Checksums of elements, by the number of the record's range."""


@dataclass(frozen=True, slots=True)
class _Split:
    """A tensor whose chunks lie in several files: those that are large enough and not zero."""

    fqn: str
    numbers: tuple[int, ...]
    is_moment: bool


@dataclass(frozen=True, slots=True)
class StaleShard:
    """An unchanged file: how many of its records were compared, and what changed elsewhere.

    `numbers` are chunks, each of another tensor, that did not change while all others of
    their tensors that were compared changed. `has_moments`: moments of an optimizer are
    among them. `n_mixed` tensors were unchanged in other files too, and changed in some.
    """

    file: int
    n_records: int
    numbers: tuple[int, ...]
    has_moments: bool
    n_mixed: int


class StaleShardCheck:
    """Which records of a part to compare with the step before, and the result.

    `crcs` are the checksums of this step, as `structure` returns them. Cost: one comparison
    per chunk.
    """

    def __init__(self, ranges: Ranges, crcs: Sequence[int]) -> None:
        self._ranges = ranges
        self._crcs = crcs
        self._split = [*_split_tensors(ranges, crcs)] if len(ranges.file_names) > 1 else []
        self._of_number = {n: split for split in self._split for n in split.numbers}
        n_tensors = Counter(
            file for split in self._split for file in {ranges.files[n] for n in split.numbers}
        )
        self._decidable = {file for file, n in n_tensors.items() if n >= MIN_TENSORS}

    def first(self) -> tuple[int, ...]:
        """A few records of each file; none where no file could be assessed."""
        files = self._ranges.files
        n_left = dict.fromkeys(self._decidable, FEW)
        chosen: dict[int, None] = {}
        for split in _by_turns(self._split):
            wanted = [n for n in split.numbers if n_left.get(files[n], 0) > 0]
            if not wanted:
                continue
            within = {files[n] for n in wanted}
            if len(within) == 1:  # alone it proves nothing
                wanted += [n for n in split.numbers if files[n] not in within][:1]
            for number in wanted:
                chosen[number] = None
                n_left[files[number]] = n_left.get(files[number], 0) - 1
        return tuple(chosen)

    def suspects(self, before: Crcs) -> tuple[int, ...]:
        """Files whose first records are unchanged while a tensor in them changed elsewhere."""
        return tuple(one.file for one in self._unchanged(before, at_least=1))[:MAX_SUSPECTS]

    def closer(self, suspects: Sequence[int], before: Crcs) -> tuple[int, ...]:
        """Many more records of these files, and others of the same tensors."""
        files = self._ranges.files
        moved = self._moved(before)
        by_file = self._ranges.by_file
        chosen: dict[int, None] = {}
        for file in suspects:
            known = [n for n in by_file[file] if self._crcs[n] != NO_CRC]
            for number in known[:: max(1, -(-len(known) // MANY))]:
                chosen[number] = None
                split = self._of_number.get(number)
                others = [n for n in split.numbers if files[n] in moved] if split else []
                chosen.update(dict.fromkeys(others[:1]))
        return tuple(n for n in chosen if n not in before)

    def confirmed(self, suspects: Sequence[int], before: Crcs) -> tuple[StaleShard, ...]:
        """The suspects that are unchanged in all compared records."""
        found = self._unchanged(before, at_least=MIN_TENSORS)
        return tuple(one for one in found if one.file in suspects)

    def _moved(self, before: Crcs) -> set[int]:
        """The files in which a record moved on."""
        return {self._ranges.files[n] for n, crc in before.items() if crc != self._crcs[n]}

    def _unchanged(self, before: Crcs, *, at_least: int) -> Iterator[StaleShard]:
        files = self._ranges.files
        moved = self._moved(before)
        by_file: dict[int, list[int]] = defaultdict(list)
        for number in before:
            by_file[files[number]].append(number)
        for file in sorted(self._decidable & by_file.keys() - moved):
            alone: dict[str, int] = {}
            n_mixed = 0
            for number in by_file[file]:
                split = self._of_number.get(number)
                others = split.numbers if split else ()
                went_on = {
                    before[n] != self._crcs[n] for n in others if n in before and files[n] in moved
                }
                n_mixed += len(went_on) == 2
                if split is not None and went_on == {True}:
                    alone.setdefault(split.fqn, number)
            if len(alone) >= at_least:
                numbers = tuple(alone.values())
                has_moments = any(self._of_number[n].is_moment for n in numbers)
                yield StaleShard(file, len(by_file[file]), numbers, has_moments, n_mixed)


def has_moved(one: StaleShard, before: Crcs, still_before: Crcs) -> bool:
    """Whether what is unchanged now had changed in the step before: then it is not frozen."""
    known = [n for n in one.numbers if n in still_before]
    return len(known) >= MIN_TENSORS and all(before[n] != still_before[n] for n in known)


def stale(
    ranges: Ranges, one: StaleShard, n_files: int, part_path: str, older: str, next_command: str
) -> Finding:
    """The finding `shard.stale` for a file that is as it is in the step called `older`.

    `n_files` is how many other shard files moved on.
    """
    where = inside(part_path, ranges.file_names[one.file])
    names = some_of([ranges.owner(number).entry.fqn for number in one.numbers])
    return Finding(
        "shard.stale",
        where,
        f"{where} is equal to the same file in {older}: {counted(one.n_records, 'record')} "
        "were compared, and all have the same checksums, while other chunks of the same "
        f"tensors ({names}) changed; one of the two steps seems to have the other's shard",
        expected=f"other elements than in {older}, as in {counted(n_files, 'other shard file')}",
        found="the same elements",
        next_command=next_command,
    )


def _split_tensors(ranges: Ranges, crcs: Sequence[int]) -> Iterator[_Split]:
    for entry, first in zip(ranges.entries, ranges.first_range, strict=True):
        if not isinstance(entry, TensorEntry) or len(entry.chunks) < 2:
            continue
        numbers = tuple(
            first + chunk
            for chunk in range(len(entry.chunks))
            if _tells(entry, chunk, ranges.files[first + chunk], crcs[first + chunk])
        )
        if len({ranges.files[number] for number in numbers}) > 1:
            yield _Split(entry.fqn, numbers, is_moment(entry.path or (entry.fqn,)))


def _tells(entry: TensorEntry, chunk: int, file: int, crc: int) -> bool:
    if file == NO_FILE or crc == NO_CRC:
        return False
    n_elements = prod(entry.chunks.sizes_of(chunk))
    n_bytes = n_elements * DTYPE_SIZES.get(entry.dtype, 0)
    return n_elements >= MIN_ELEMENTS and n_bytes > 0 and crc != _crc_of_zeros(n_bytes)


@lru_cache(maxsize=4096)
def _crc_of_zeros(n_bytes: int) -> int:
    from zlib_ng.zlib_ng import crc32, crc32_combine

    crc, piece, length = crc32(b""), crc32(b"\0"), 1
    while n_bytes:
        if n_bytes % 2:
            crc = crc32_combine(crc, piece, length)
        piece, length, n_bytes = crc32_combine(piece, piece, length), 2 * length, n_bytes // 2
    return crc


def _by_turns(split: Collection[_Split]) -> Iterator[_Split]:
    """A moment, a weight, a moment, …: at the first step there are no moments yet."""
    widest = sorted(split, key=lambda one: -len(one.numbers))
    moments: Iterable[_Split] = [one for one in widest if one.is_moment]
    weights: Iterable[_Split] = [one for one in widest if not one.is_moment]
    both = chain.from_iterable(zip_longest(moments, weights))
    return (one for one in both if one is not None)

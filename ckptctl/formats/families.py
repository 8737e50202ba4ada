"""Families of files: the files of one step whose names are equal but for numbers.

A save by several ranks leaves one file of each kind for each rank, under names that teams choose
in hundreds of ways: `model_0.pt`, `0/model.pt`, `consolidated.00.pth`, `optim-3-of-4.pt`,
`tp1/pp0.bin`. No list of words decides which numbers are ranks. Files whose names differ by
numbers alone are one family; the numbers that vary are its axes. The numbers that exist show
which others must exist, and a count in the names states how many. Nothing is read here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from math import prod

import msgspec

from ckptctl.formats.frameworks.file_names import may_hold_state
from ckptctl.outside_numbers import clamped

MAX_NAMED = 8
"""So many missing files are named."""

MAX_FILES = 1_000_000
"""More files than this are no family: no job has so many ranks."""

_NUMBER = re.compile(r"(?<![0-9])[0-9]{1,9}(?![0-9])")

_COUNT = re.compile(
    r"(?:^|[^a-z])(?:of|out[-_]?of|world(?:[-_]?size)?|ws|n[-_]?ranks?|num[-_]?ranks?|nprocs?"
    r"|n[-_]?shards?|num[-_]?shards?|total)[-_.=]?$|(?<=[0-9])w$",
    re.IGNORECASE,
)
"""The text before a number that counts the members of an axis: `-of-4`, `world_size_8`, `r2w4`."""


class Family(msgspec.Struct, frozen=True):
    """The files of one kind in one step, by the numbers in their names."""

    key: str
    """The path of each with every number as `N`."""
    members: frozenset[tuple[int, ...]]
    """The numbers of each file on the axes; of a family of one file without an axis, `()`."""
    lengths: tuple[int, ...]
    """How many members each axis has, stated or by the highest number."""
    base: int
    """The first number of the axes: 0, or 1."""
    stated: bool
    """The names state how many there are."""
    example: str
    """The path of one of them."""
    spans: tuple[tuple[tuple[int, int], ...], ...]
    """Where the numbers of each axis are in `example`."""
    is_numbered: bool
    """The numbers count from `base` without more holes than files; others are no ranks."""
    values: tuple[tuple[int, ...], ...] = ()
    """The numbers that exist on each axis."""
    n_bytes: int = 0
    """Size of all of them in bytes, where the caller gave sizes."""
    first: int = 0
    """What is added to the numbers in the names: of a window, the least of them."""

    @property
    def n_present(self) -> int:
        """How many of the files exist."""
        return len(self.members)

    @property
    def n_files(self) -> int:
        """How many files there must be, by the names alone."""
        return prod(self.lengths) if self.is_numbered else len(self.members)

    @property
    def is_line(self) -> bool:
        """It has one axis."""
        return self.is_numbered and len(self.lengths) == 1

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that have their file, counted from 0; none where there are several axes."""
        return frozenset(n - self.base for (n,) in self.members) if self.is_line else frozenset()

    @property
    def has_zero(self) -> bool:
        """One of its numbers is 0, from which they count."""
        return any(held[:1] == (0,) for held in self.values)

    def from_base(self, base: int) -> Family:
        """The same family where its numbers are known to count from `base`, 0 or 1."""
        if self.base == base or self.has_zero or self.stated:
            return self
        lengths = tuple(n + self.base - base for n in self.lengths)
        return msgspec.structs.replace(self, base=base, lengths=lengths)

    @property
    def names_rank(self) -> bool:
        """The text before the number is the word rank: they count from 0."""
        start = self.spans[0][0][0] if self.spans else 0
        return re.search("rank[-_]?$", self.example[:start]) is not None

    def as_window(self) -> Family:
        """The same family where its numbers may begin at any: they count from the least one."""
        (held,) = self.values
        moved = tuple(n - held[0] for n in held)
        return msgspec.structs.replace(
            self,
            members=frozenset((n,) for n in moved),
            lengths=(moved[-1] + 1,),
            base=0,
            is_numbered=moved[-1] < max(2 * len(moved), len(moved) + 2),
            values=(moved,),
            first=held[0],
        )

    def missing(self, n_files: int | None = None) -> tuple[str, ...]:
        """The paths of the first files that are missing; of one axis, of `n_files` in all."""
        if not self.is_numbered:
            return ()
        if n_files is not None and self.is_line:
            places: Iterable[tuple[int, ...]] = ((self.base + n,) for n in range(n_files))
        elif self.stated or self.is_line:
            places = product(*(range(self.base, self.base + n) for n in self.lengths))
        else:
            places = product(*self.values)
        absent = (place for place in places if place not in self.members)
        return tuple(self._path_at(place) for place in islice(absent, MAX_NAMED))

    def _path_at(self, place: Sequence[int]) -> str:
        text = self.example
        replaced = [
            (start, end, number + self.first)
            for spans, number in zip(self.spans, place, strict=True)
            for start, end in spans
        ]
        for start, end, number in sorted(replaced, reverse=True):
            digits = text[start:end]
            width = len(digits) if digits.startswith("0") else 1
            text = text[:start] + str(number).zfill(width) + text[end:]
        return text


def families_of(
    paths: Iterable[str], number: int | None = None, sizes: Mapping[str, int] | None = None
) -> tuple[Family, ...]:
    """The families among the files of a step, by their key.

    A family of one file is among them where its number may be that of the first rank. `number`
    is that of the step, which names repeat; `sizes` are those of the files in bytes, by path.
    Cost: one match of each name.
    """
    alike: dict[tuple[str, tuple[int, ...]], list[_Named]] = defaultdict(list)
    for path in paths:
        if may_hold_state(path):
            places = [match.span() for match in _NUMBER.finditer(path)]
            numbers = tuple(clamped(path[start:end]) for start, end in places)
            is_count = [_COUNT.search(path[:start]) is not None for start, _ in places]
            # Files that state different counts are those of several saves.
            counts = tuple(n for n, counts in zip(numbers, is_count, strict=True) if counts)
            alike[_NUMBER.sub("N", path), counts].append(_Named(path, numbers, tuple(is_count)))
    found = (_family(key, files, number, sizes or {}) for (key, _), files in sorted(alike.items()))
    families = [family for family in found if family is not None]
    from_zero = {n for family in lines(families) if family.has_zero for (n,) in family.members}
    return tuple(
        family.from_base(0)
        if (family.is_line and family.names_rank)
        or (family.is_line and family.n_present > 1 and _numbers(family) < from_zero)
        else family
        for family in families
    )


def _numbers(family: Family) -> frozenset[int]:
    return frozenset(n for place in family.members for n in place)


def key_of(path: str) -> str:
    """The key of the family that a file belongs to: its path with every number as `N`."""
    return _NUMBER.sub("N", path)


class _Named(msgspec.Struct, frozen=True, order=True):
    """A file with the numbers in its path, and which of them are counts."""

    path: str
    numbers: tuple[int, ...]
    is_count: tuple[bool, ...]


class _Column(msgspec.Struct, frozen=True):
    """A number in the names of a family: where, what it is in each file, and its stated count."""

    places: tuple[int, ...]
    values: tuple[int, ...]
    count: int | None = None


def _family(
    key: str, files: Sequence[_Named], number: int | None, sizes: Mapping[str, int]
) -> Family | None:
    first = min(files)
    path = first.path
    columns = _axes(files, number) if first.numbers else []
    if not columns:
        return None
    is_counted = not _has_other_first(columns, first, number)
    columns = [column for column in columns if column.count != 1] or columns[:1]
    if len(columns) > 1 and (line := _identifying(columns, len(files))) is not None:
        columns = [line]
    members = frozenset(zip(*(column.values for column in columns), strict=True))
    values = tuple(tuple(sorted(set(column.values))) for column in columns)
    stated = is_counted and all(column.count is not None for column in columns)
    base = _base(columns, values)
    lengths = tuple(
        max(column.count or 0, held[-1] - base + 1)
        for column, held in zip(columns, values, strict=True)
    )
    is_numbered = stated or all(
        length <= max(2 * len(held), len(held) + 2)
        for length, held in zip(lengths, values, strict=True)
    )
    places = [match.span() for match in _NUMBER.finditer(path)]
    return Family(
        key,
        members,
        lengths,
        base,
        stated,
        path,
        tuple(tuple(places[n] for n in column.places) for column in columns),
        is_numbered and prod(lengths) <= MAX_FILES,
        values,
        sum(sizes.get(file.path, 0) for file in files),
    )


def _base(columns: Sequence[_Column], values: Sequence[Sequence[int]]) -> int:
    """The first number of the axes: 1 where none is 0, or where one equals a stated count."""
    reaches_count = any(
        column.count is not None and held[-1] >= column.count
        for column, held in zip(columns, values, strict=True)
    )
    has_zero = any(held[0] == 0 for held in values)
    return 1 if not has_zero and (reaches_count or all(held[0] == 1 for held in values)) else 0


def _axes(files: Sequence[_Named], number: int | None) -> list[_Column]:
    """The axes of a family: numbers that vary, and those whose count the names state."""
    first = min(files)
    columns = [tuple(file.numbers[n] for file in files) for n in range(len(first.numbers))]
    counts: dict[int, int] = {}
    ends = [match.start() for match in _NUMBER.finditer(first.path)]
    for n, counts_others in enumerate(first.is_count):
        # `3-of-4` counts the number before it, `world_size_4_rank_3` the one behind it.
        is_of = re.search("(?:of[-_.=]?|[0-9]w)$", first.path[: ends[n]], re.IGNORECASE)
        counted = n - 1 if is_of else n + 1
        in_range = counts_others and 0 <= counted < len(columns) and columns[n][0] <= MAX_FILES
        if in_range and not first.is_count[counted]:
            counts[counted] = columns[n][0]
    axes: dict[object, _Column] = {}
    for n, values in enumerate(columns):
        varies, count = len(set(values)) > 1, counts.get(n)
        known = axes.get(values) if varies else None
        if known is not None:  # `3/model_3.pt`
            count = known.count if count is None else count
            axes[values] = _Column((*known.places, n), values, count)
        elif not first.is_count[n] and (varies or count is not None):
            axes[values if varies else n] = _Column((n,), values, count)
    if len(files) == 1:
        axes.update(_first_of_several(columns, first.is_count, counts, number))
    return list(axes.values())


def _has_other_first(columns: Sequence[_Column], file: _Named, number: int | None) -> bool:
    """Whether each name has the number of a first rank too: `shard-1-model-2-of-3`.

    The files of all other ranks may be missing then, whatever the count beside it states.
    """
    known = {n for column in columns for n in column.places}
    return any(
        value in (0, 1) and value != number and n not in known and not file.is_count[n]
        for n, value in enumerate(file.numbers)
    )


def _first_of_several(
    columns: Sequence[tuple[int, ...]],
    is_count: Sequence[bool],
    counts: Mapping[int, int],
    number: int | None,
) -> Iterator[tuple[int, _Column]]:
    """The number in a single name by which it may be the file of the first rank: 0, or 1."""
    for first in (0, 1):
        places = [
            n
            for n, values in enumerate(columns)
            if values == (first,) and not is_count[n] and n not in counts and number != first
        ]
        if places:
            yield places[-1], _Column((places[-1],), columns[places[-1]])
            return


def _identifying(columns: Sequence[_Column], n_files: int) -> _Column | None:
    """The axis on which every file has a number of its own; the other numbers follow from it."""
    if any(column.count is not None for column in columns):
        return None
    alone = [column for column in columns if len(set(column.values)) == n_files]
    return min(alone, key=lambda column: max(column.values), default=None)


def lines(families: Iterable[Family]) -> Iterator[Family]:
    """The families with one axis, whose numbers are those of ranks or shards."""
    return (family for family in families if family.is_line)

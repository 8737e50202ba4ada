"""Families of files: the files of one step whose names are equal but for numbers.

A save by several ranks leaves one file of each kind for each rank, under names that teams choose
in hundreds of ways: `model_0.pt`, `0/model.pt`, `consolidated.00.pth`, `optim-3-of-4.pt`,
`tp1/pp0.bin`. No list of words decides which numbers are ranks. Files whose names differ by
numbers alone are one family; the numbers that vary are its axes. The numbers that exist show
which others must exist, and a count in the names states how many.

Where a framework names the files (`tables/files.toml`), the names state what the axes are, and all
kinds share their lengths: `grids_of`. Nothing is read here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import msgspec

from ckptctl.formats.frameworks.file_names import (
    AGAIN,
    axes_in,
    kind_of_file,
    may_hold_state,
    rank_file,
)
from ckptctl.formats.frameworks.layout_tables import TABLES, FileName
from ckptctl.formats.manifest import MANIFEST
from ckptctl.model import Family, FileInfo
from ckptctl.outside_numbers import clamped

MAX_FILES = 1_000_000
"""More files than this are no family: no job has so many ranks."""

_NUMBER = re.compile(r"(?<![0-9])[0-9]{1,9}(?![0-9])")

_COUNT = re.compile(
    r"(?:^|[^a-z])(?:of|out[-_]?of|world(?:[-_]?size)?|ws|n[-_]?ranks?|num[-_]?ranks?|nprocs?"
    r"|n[-_]?shards?|num[-_]?shards?|total)[-_.=]?$|(?<=[0-9])w$",
    re.IGNORECASE,
)
"""The text before a number that counts the members of an axis: `-of-4`, `world_size_8`, `r2w4`."""


INDEX_NAME = re.compile(r"(?P<folder>(?:.*/)?)[^/]*(?P<suffix>\.[a-z]+)\.index\.json").fullmatch
"""Matches the path of an index of the files of a model."""


def families_of(
    paths: Iterable[str], number: int | None = None, sizes: Mapping[str, int] | None = None
) -> tuple[Family, ...]:
    """The families among the files of a step, by their key.

    A family of one file is among them where its number may be that of the first rank. `number`
    is that of the step, which names repeat; `sizes` are those of the files in bytes, by path.
    Cost: one match of each name.
    """
    alike: dict[tuple[str, tuple[int, ...]], list[_NumberedFile]] = defaultdict(list)
    for path in paths:
        if may_hold_state(path):
            places = [match.span() for match in _NUMBER.finditer(path)]
            numbers = tuple(clamped(path[start:end]) for start, end in places)
            is_count = [_COUNT.search(path[:start]) is not None for start, _ in places]
            # Files that state different counts are those of several saves.
            counts = tuple(n for n, counts in zip(numbers, is_count, strict=True) if counts)
            alike[_NUMBER.sub("N", path), counts].append(
                _NumberedFile(path, numbers, tuple(is_count))
            )
    found = (_family(key, files, number, sizes or {}) for (key, _), files in sorted(alike.items()))
    families = [family for family in found if family is not None]
    of_line = [family for family in families if family.is_line]
    from_zero = {n for family in of_line if family.has_zero for (n,) in family.members}
    return tuple(
        family.from_base(0)
        if family.is_line
        and family.n_present > 1
        and (family.names_rank or {n for (n,) in family.members} < from_zero)
        else family
        for family in families
    )


def indexed_among(paths: Iterable[str]) -> frozenset[str]:
    """The files of models whose index is among them, which names their files: no rank's."""
    paths = [*paths]
    indexed = {(match["folder"], match["suffix"]) for path in paths if (match := INDEX_NAME(path))}
    return frozenset(path for path in paths if folder_and_suffix(path) in indexed)


def folder_and_suffix(path: str) -> tuple[str, str]:
    """The folder of a file and the end of its name from the last dot on."""
    return path[: path.rfind("/") + 1], path[path.rfind(".") :]


def key_of(path: str) -> str:
    """The key of the family that a file belongs to: its path with every number as `N`."""
    return _NUMBER.sub("N", path)


def key_in_step(path: str, number: int | None) -> str:
    """A path with the number of its step as `N`, where the other numbers tell files apart."""
    return _NUMBER.sub(lambda match: "N" if clamped(match[0]) == number else match[0], path)


class _NumberedFile(msgspec.Struct, frozen=True, order=True):
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
    key: str, files: Sequence[_NumberedFile], number: int | None, sizes: Mapping[str, int]
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


def _axes(files: Sequence[_NumberedFile], number: int | None) -> list[_Column]:
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


def _has_other_first(columns: Sequence[_Column], file: _NumberedFile, number: int | None) -> bool:
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


# Files that a framework names

_STATED = "of_"
_APART = "each_"

_LEAST: Mapping[str, int] = {"transformers": 2}
"""Ranks that a numbered name implies: alone, transformers writes `rng_state.pth`."""

_DATA_PARALLEL = ("rank", "dp", "sdp")
"""Axes that, with the others, count every rank; a grid without one counts model-parallel ranks."""

CONVERSIONS = TABLES.conversions

MAX_STATED = 1_000_000

STATED_INSIDE = {tuple(keys.split(".")): axis for keys, axis in TABLES.stated_inside.items()}

COMPOSERS_RANKS = "rng"
"""Composer's ranks write a list of the RNG states of all ranks."""


class _GridFile(NamedTuple):
    """A file whose name states its place in the grid of ranks of its framework."""

    row: FileName
    match: re.Match[str]
    axes: Mapping[str, int]

    @property
    def lengths(self) -> tuple[tuple[str, int], ...]:
        """The lengths of axes that the name states."""
        return tuple(pair for pair in sorted(self.axes.items()) if pair[0].startswith(_STATED))

    @property
    def what(self) -> str:
        """What the file holds, with its number on each axis that has grids of its own."""
        apart = [str(n) for axis, n in self.axes.items() if axis.startswith(_APART)]
        return " ".join((self.row.what, *apart))

    @property
    def key(self) -> str:
        """The path with each number as `N`, but for those on axes that have grids of their own."""
        apart = [self.match.span(axis) for axis in self.axes if axis.startswith(_APART)]
        path = self.match.string
        return _NUMBER.sub(lambda number: number[0] if number.span() in apart else "N", path)

    @property
    def grid_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.axes if not axis.startswith((_STATED, _APART)))

    @property
    def place(self) -> tuple[int, ...]:
        return tuple(self.axes[axis] for axis in self.grid_axes)

    @property
    def spans(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Where the number on each axis is in the path; some names repeat it."""
        groups = self.match.groupdict()
        return tuple(
            tuple(self.match.span(name) for name in (axis, f"{AGAIN}{axis}") if groups.get(name))
            for axis in self.grid_axes
        )


def grids_of(
    files: Iterable[FileInfo], layout: str = "", stated: Mapping[str, int] | None = None
) -> tuple[Family, ...]:
    """The families of rank files among the files of a step of `layout`.

    `stated` are the lengths of axes that the content of a file states. All kinds of one
    framework in one folder share the lengths of their axes. Files that state different
    world sizes were written by different attempts, and are apart. Cost: one match of each
    name; a grid that names claim to be huge is counted, not listed.
    """
    named, others = _by_framework(files, layout, stated or {})
    families = families_of(others)
    # A single file is one of several only beside others that are.
    if all(family.n_present == 1 for family in families):
        families = ()
    described = frozenset(others) if MANIFEST in others else indexed_among(others)
    return (
        *named,
        *(
            msgspec.structs.replace(family, sharded=True)
            if family.example not in described and _may_be_sharded(family, layout)
            else family
            for family in families
        ),
    )


def _may_be_sharded(family: Family, layout: str) -> bool:
    """Whether files of ranks may hold parts that only as many ranks can load."""
    kind = kind_of_file(layout, family.example)
    is_of_several = family.is_line and family.n_present > 1
    return is_of_several and (kind is None or not {"model", "optimizer"}.isdisjoint(kind.names))


def files_by_kind(files: Iterable[FileInfo], layout: str) -> Mapping[str, Sequence[str]]:
    """The paths of the files of each kind that several ranks write, by `kind_key`."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for file in files:
        if file.kind == "file":
            kinds[kind_key(file.path, layout)].append(file.path)
    return kinds


def kind_key(path: str, layout: str) -> str:
    """The key of the family that a file of a step of `layout` belongs to."""
    named = _placed(path, layout)
    return key_of(path) if named is None else named.key


def named_families(files: Iterable[FileInfo], layout: str) -> Mapping[str, Family]:
    """The families of the files that a framework names, by key."""
    return {family.key: family for family in _by_framework(files, layout, {})[0]}


def _by_framework(
    files: Iterable[FileInfo], layout: str, stated: Mapping[str, int]
) -> tuple[list[Family], list[str]]:
    """The families of the files that a framework names, and the paths of the others."""
    together: dict[tuple[str, str, object], list[_GridFile]] = defaultdict(list)
    others: list[str] = []
    for file in files:
        if file.kind != "file":
            continue
        named = _placed(file.path, layout)
        if named is None:
            others.append(file.path)
        else:
            together[named.row.grid, named.match["folder"], named.lengths].append(named)
    in_order = sorted(together.items(), key=lambda pair: str(pair[0]))
    families = (_grids(framework, members, stated) for (framework, _, _), members in in_order)
    return [family for of_framework in families for family in of_framework], others


def _placed(path: str, layout: str) -> _GridFile | None:
    decided = rank_file(path, layout)
    return _GridFile(*decided, axes_in(decided[1])) if decided is not None else None


def _grids(
    framework: str, members: Sequence[_GridFile], stated: Mapping[str, int]
) -> Iterator[Family]:
    lengths: dict[str, int] = defaultdict(lambda: _LEAST.get(framework, 1), stated)
    for member in members:
        for axis, n in member.axes.items():
            if axis.startswith(_STATED):
                lengths[axis.removeprefix(_STATED)] = max(n, lengths[axis.removeprefix(_STATED)])
            elif not axis.startswith(_APART):
                lengths[axis] = max(n + 1, lengths[axis])
    kinds: dict[tuple[str, Sequence[str]], list[_GridFile]] = defaultdict(list)
    for member in members:
        kinds[member.what, member.grid_axes].append(member)
    yield from (_grid(alike, lengths) for alike in kinds.values())


def _grid(alike: Sequence[_GridFile], lengths_of: Mapping[str, int]) -> Family:
    first = min(alike, key=lambda member: member.match.string)
    axes = first.grid_axes
    return Family(
        key=first.key,
        members=frozenset(member.place for member in alike),
        lengths=tuple(lengths_of[axis] for axis in axes),
        base=0,
        stated=bool(first.lengths),
        example=first.match.string,
        spans=first.spans,
        is_numbered=True,
        framework=first.row.grid,
        what=first.what,
        folder=first.match["folder"],
        counts_all=any(axis in _DATA_PARALLEL for axis in axes),
        sharded=first.row.grid in CONVERSIONS,
    )

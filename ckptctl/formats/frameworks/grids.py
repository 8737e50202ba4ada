"""The grids of ranks that the names of rank files state, each with the files that it lacks.

A rank-file checkpoint has no metadata. Each rank writes one `torch.save` file of each kind,
and the name of a file states its place in a grid of ranks. The files that exist therefore
state which others must exist. Nothing is read here.

Source: those of `tables/files.toml`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import prod

from ckptctl.formats.families import Family, families_of, key_of
from ckptctl.formats.frameworks.file_names import AGAIN, axes_in, kind_of_file, rank_file
from ckptctl.formats.frameworks.layout_tables import FileName
from ckptctl.formats.manifest import MANIFEST
from ckptctl.model import FileInfo, Grid

_STATED = "of_"
_APART = "each_"

FAMILY = "numbers in the name"
"""The grid of files that no framework names; see `formats.families`."""

_LEAST: Mapping[str, int] = {"transformers": 2}
"""Ranks that a numbered name implies: alone, transformers writes `rng_state.pth`."""

_DATA_PARALLEL = ("rank", "dp", "sdp")
"""Axes that, with the others, count every rank; a grid without one counts model-parallel ranks."""

CONVERSIONS: Mapping[str, str] = {
    "verl": "python -m verl.model_merger merge --backend fsdp --local_dir {step} --target_dir OUT",
    "deepspeed": "ds_to_universal --input_folder {step} --output_folder {step}-universal",
    "dlrover": "ckptctl show {step}",
    "nvrx": "ckptctl show {step}",
    "composer": "ckptctl show {step}",
    "verl-megatron": "python -m verl.model_merger merge --backend megatron --local_dir {step} "
    "--target_dir OUT",
    "accelerate-fsdp": "ckptctl show {step}",
    FAMILY: "ckptctl show {step}",
    "megatron-legacy": "python tools/checkpoint/convert.py --model-type GPT --loader mcore "
    "--saver mcore --load-dir {root} --save-dir OUT --target-tensor-parallel-size N",
}
"""The frameworks whose files hold shards, which only as many ranks can load, and each one's own
way to another number of ranks; NVRx, Composer and DLRover have none."""

MAX_NAMED = 8

MAX_STATED = 1_000_000

STATED_INSIDE: Mapping[tuple[str, ...], str] = {
    ("dp_world_size",): "dp",
    ("mp_world_size",): "mp",
    ("args", "tensor_model_parallel_size"): "tp",
    ("args", "pipeline_model_parallel_size"): "pp",
    ("args", "world_size"): "rank",
    ("distributed_state", "num_processes"): "rank",
}
"""Where files state the length of an axis: DeepSpeed's model states, Megatron's, and
`training_args.bin` of transformers."""

COMPOSERS_RANKS = "rng"
"""Composer's ranks write a list of the RNG states of all ranks."""


@dataclass(frozen=True, slots=True)
class _Named:
    """One file, by its place in the grid."""

    row: FileName
    match: re.Match[str]
    axes: Mapping[str, int]

    @property
    def lengths(self) -> tuple[tuple[str, int], ...]:
        """The lengths of axes that the name states."""
        return tuple(one for one in sorted(self.axes.items()) if one[0].startswith(_STATED))

    @property
    def what(self) -> str:
        """What the file holds, with its number on each axis that has grids of its own."""
        apart = [str(n) for axis, n in self.axes.items() if axis.startswith(_APART)]
        return " ".join((self.row.what, *apart))

    @property
    def grid_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.axes if not axis.startswith((_STATED, _APART)))

    @property
    def place(self) -> tuple[int, ...]:
        return tuple(self.axes[axis] for axis in self.grid_axes)


def grids_of(
    files: Iterable[FileInfo],
    layout: str = "",
    stated: Mapping[str, int] | None = None,
) -> tuple[Grid, ...]:
    """The grids of rank files among the files of a step of `layout`, each with what it lacks.

    `stated` are the lengths of axes that the content of a file states. All kinds of one
    framework in one folder share the lengths of their axes. Files that state different
    world sizes were written by different attempts, and are apart. Files that no framework
    names form a grid for each family. Cost: one match of each name; a grid that names claim
    to be huge is counted, not listed.
    """
    together: dict[tuple[str, str, object], list[_Named]] = defaultdict(list)
    others: list[str] = []
    for file in files:
        if file.kind != "file":
            continue
        named = _named(file.path, layout)
        if named is None:
            others.append(file.path)
        else:
            together[named.row.grid, named.match["folder"], named.lengths].append(named)
    of_frameworks = (
        grid
        for (framework, _, _), members in sorted(together.items(), key=lambda one: str(one[0]))
        for grid in _grids(framework, members, stated or {})
    )
    families = families_of(others)
    # A single file is one of several only beside others that are.
    if all(family.n_present == 1 for family in families):
        families = ()
    is_described = MANIFEST in others
    return (
        *of_frameworks,
        *(
            _family_grid(family, sharded=not is_described and _may_be_sharded(family, layout))
            for family in families
        ),
    )


def _may_be_sharded(family: Family, layout: str) -> bool:
    """Whether files of ranks may hold parts that only as many ranks can load."""
    kind = kind_of_file(layout, family.example)
    is_of_several = family.is_line and family.n_present > 1
    return is_of_several and (kind is None or not {"model", "optimizer"}.isdisjoint(kind.names))


def _family_grid(family: Family, *, sharded: bool) -> Grid:
    """A family of files as a grid. What it lacks is decided by `inspection.whole`."""
    names_rank = family.names_rank and family.is_line
    return Grid(
        FAMILY,
        f"state in {family.key}",
        "",
        family.n_files,
        family.n_present,
        (),
        family.n_files if names_rank else None,
        family.stated,
        sharded=sharded,
        ranks=family.ranks if names_rank else frozenset(),
    )


def files_by_kind(files: Iterable[FileInfo], layout: str) -> Mapping[str, Sequence[str]]:
    """The paths of the files of each kind that several ranks write."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for file in files:
        if file.kind == "file":
            named = _named(file.path, layout)
            of_framework = named and f"{named.match['folder']} {named.what}"
            kinds[of_framework or key_of(file.path)].append(file.path)
    return kinds


def _named(path: str, layout: str) -> _Named | None:
    found = rank_file(path, layout)
    return _Named(*found, axes_in(found[1])) if found is not None else None


def _grids(framework: str, members: Sequence[_Named], stated: Mapping[str, int]) -> Iterator[Grid]:
    lengths: dict[str, int] = defaultdict(lambda: _LEAST.get(framework, 1), stated)
    for member in members:
        for axis, n in member.axes.items():
            if axis.startswith(_STATED):
                lengths[axis.removeprefix(_STATED)] = max(n, lengths[axis.removeprefix(_STATED)])
            elif not axis.startswith(_APART):
                lengths[axis] = max(n + 1, lengths[axis])
    kinds: dict[tuple[str, Sequence[str]], list[_Named]] = defaultdict(list)
    for member in members:
        kinds[member.what, member.grid_axes].append(member)
    yield from (_grid(alike, lengths) for alike in kinds.values())


def _grid(alike: Sequence[_Named], lengths: Mapping[str, int]) -> Grid:
    first = min(alike, key=lambda member: member.match.string)
    axes = first.grid_axes
    there = {member.place for member in alike}
    numbers = {_number(place, [lengths[axis] for axis in axes]) for place in there}
    places = product(*(range(lengths[axis]) for axis in axes))
    missing = (place for place in places if place not in there)
    counts_all = any(axis in _DATA_PARALLEL for axis in axes)
    n_files = prod(lengths[axis] for axis in axes)
    return Grid(
        first.row.grid,
        first.what,
        first.match["folder"],
        n_files,
        len(there),
        tuple(_name_at(first, place) for place in islice(missing, MAX_NAMED)),
        n_files if counts_all else None,
        bool(first.lengths),
        first.row.grid in CONVERSIONS,
        frozenset(numbers) if counts_all else frozenset(),
    )


def _number(place: Sequence[int], lengths: Sequence[int]) -> int:
    """The rank at a place of the grid: the last axis varies fastest."""
    number = 0
    for n, length in zip(place, lengths, strict=True):
        number = number * length + n
    return number


def _name_at(member: _Named, place: Sequence[int]) -> str:
    """The path of the file at another place of the grid, from that of one that exists."""
    text, match = member.match.string, member.match
    numbers = dict(zip(member.grid_axes, place, strict=True))
    groups = [group for group in match.groupdict() if group.removeprefix(AGAIN) in numbers]
    for group in sorted(groups, key=match.start, reverse=True):
        start, end = match.span(group)
        number = str(numbers[group.removeprefix(AGAIN)])
        text = text[:start] + number.zfill(_width(match[group])) + text[end:]
    return text


def _width(digits: str) -> int:
    # Names are padded with zeros where a framework pads them: `mp_rank_00`, `rank_0`.
    return len(digits) if digits.startswith("0") else 1

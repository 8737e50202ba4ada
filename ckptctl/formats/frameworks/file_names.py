"""What the names of files state: the train state that they hold, and whose rank it is of.

`layout_tables` has the names, `formats.families` reads which ranks the names of a step state.
Nothing is read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from ckptctl.formats.frameworks.layout_tables import TABLES, FileName, full_match
from ckptctl.formats.frameworks.state_keys import StateKind
from ckptctl.model import FileInfo
from ckptctl.outside_numbers import clamped

_ALWAYS = "+"
AGAIN = "again_"
_SHARDED = frozenset({"model", "optimizer"})


@lru_cache(maxsize=1 << 14)
def matches(path: str, layout: str = "") -> tuple[tuple[FileName, re.Match[str]], ...]:
    """The rows that a path below a step of `layout` matches, the one that decides first."""
    # Every check of an inspection looks up the same names.
    names = ("", re.sub("-(?:epochs|samples|steps)$", "", layout))
    rows = ((row, full_match(row.name, path)) for row in TABLES.files if row.layout in names)
    return tuple((row, match) for row, match in rows if match)


def kind_of_file(layout: str, path: str) -> StateKind | None:
    """What a file beside the shards holds, by its name in a step of `layout`.

    None for a file that holds no train state, or whose name is not known.
    """
    for row, match in matches(path, layout):
        if row.holds:
            names = tuple(row.holds.replace(_ALWAYS, "").split())
            always = tuple(k[1:] for k in row.holds.split() if k.startswith(_ALWAYS))
            # The ranks of a model hold shards of it, and no copies.
            groups = match.groupdict() if _SHARDED.isdisjoint(names) else {}
            rank = groups.get("rank") or groups.get(f"{AGAIN}rank")
            of_framework = bool(row.layout or row.grid)
            return StateKind(names, rank, always, of_framework=of_framework)
    return None


def is_named_as_weights(name: str) -> bool:
    """Whether a file is named as saved weights or packed ones: a hint, which no answer needs."""
    kind = kind_of_file("", name)
    is_of_model = kind is not None and not {"model", "optimizer"}.isdisjoint(kind.names)
    return is_of_model or full_match(TABLES.weights, name) is not None


def is_adapter_file(path: str) -> bool:
    """Whether a file is named as the weights of an adapter, without those of its base model."""
    return full_match(TABLES.adapter, path) is not None


MAX_TEXT_BYTES = 64 << 10
"""A text of a known name is a configuration or a note up to this size, and unknown beyond."""


def is_known_as_no_save(file: FileInfo) -> bool:
    """Whether a file or link is known not to be a save: a log, source, a picture, a small text.

    By its name and size; anything else is unknown, whatever it is called.
    """
    name = file.path.rpartition("/")[2]
    if file.kind == "file" and not file.size:
        return True
    if full_match(TABLES.logs_and_source, name) is not None:
        return True
    return file.size <= MAX_TEXT_BYTES and full_match(TABLES.text, name) is not None


def may_hold_state(path: str) -> bool:
    """Whether a rank may save state under such a name; false for text, pictures and source.

    By the same names as `is_known_as_no_save`, but for two differences. Text counts as no state
    whatever its size: the step that it is in shows what a save consists of. JSON may hold state:
    some trainers keep the step or the place in the data of each rank in it.
    """
    name = path.rpartition("/")[2]
    if full_match(TABLES.logs_and_source, name) is not None:
        return False
    return name.endswith(".json") or full_match(TABLES.text, name) is None


def rank_file(path: str, layout: str = "") -> tuple[FileName, re.Match[str]] | None:
    """The row of a rank file, and where in its name the axes are; None for any other file."""
    without_axes = None
    for row, match in matches(path, layout):
        if row.grid and axes_in(match):
            return row, match
        if row.grid and not any(map(str.isdecimal, match["folder"])):
            # `rank_3/optim.pt` is in the folder of a rank, which this row does not know.
            without_axes = without_axes or (row, match)
        elif match.groupdict().get("rank"):
            # State beside the shards that not every rank writes, such as that of a data loader.
            break
    return without_axes


def axes_in(match: re.Match[str]) -> Mapping[str, int]:
    """The numbers that a name states, by axis."""
    axes = match.groupdict()
    no_axis = ("folder", AGAIN)
    return {axis: clamped(n) for axis, n in axes.items() if n and not axis.startswith(no_axis)}


_FURTHER = re.compile(
    r"(?P<kind>optimizer|scheduler|sampler|model|pytorch_model)_(?P<n>[1-9][0-9]{0,3})(?P<end>\.[a-z]+)"
).fullmatch
_PART_OF_SEVERAL = re.compile(r"-[0-9]+-of-[0-9]+(?=\.)|\.index\.json$")


def lost_before_others(paths: Iterable[str]) -> set[str]:
    """The files of accelerate that a further one of their kind implies, and that are not there.

    Source: accelerate 1.15 `checkpointing.py` (`save_accelerator_state`): of several objects of a
    kind the first has no number. A model may be in several files, with an index.
    """
    there = {_PART_OF_SEVERAL.sub("", path) for path in paths}
    implied = {
        f"{match['kind']}{f'_{n}' if n else ''}{match['end']}"
        for match in filter(None, map(_FURTHER, there))
        for n in range(clamped(match["n"]))
    }
    return implied - there


_RANK = re.compile(r"(?:^|[^a-z])rank[-_]?([0-9]{1,6})(?![0-9])")


def rank_in_name(path: str) -> int | None:
    """The rank in the name of a rank file; None for one that names several axes, or none."""
    found = rank_file(path)
    if found is not None:
        return axes_in(found[1]).get("rank")
    ranks = _RANK.findall(path)
    return clamped(ranks[0]) if len(ranks) == 1 else None

"""Names of state of which each rank has its own: `model.experts.0.weight@rank_3`.

A part that is one value has one more level: `scheduler.@rank_3`, which is still a scheduler.
What is named so is written by its rank, and loaded by the rank of that number. A job needs no
option to load it: the names are in the step.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from ckptctl.model import Metadata

Path = tuple[str | int, ...]

_OF_RANK = re.compile(r"\.?@rank_(\d+)(?=\.|$)")
_KINDS = {
    "model": 1,
    "extra": 1,
    "extra_tensors": 2,
    "dataloader": 1,
    "scheduler": 0,
    "grad_scaler": 0,
}
"""Where in a path the key stands that gets the number of the rank."""


def plain_name(name: str) -> str:
    """The name of an entry without the number of its rank."""
    return _OF_RANK.sub("", name)


def rank_in(name: str) -> int | None:
    """The number of the rank in the name of an entry; None where all ranks share it."""
    found = _OF_RANK.search(name)
    return None if found is None else int(found[1])


def unit_of(path: Path) -> Path | None:
    """The path of what gets the number of a rank together with an entry; None for a shared one.

    All state of one parameter in an optimizer has one number, and so has one extra state.
    """
    if path[:2] == ("optimizer", "state"):
        return path[:3]
    place = _KINDS.get(str(path[0]))
    return None if place is None else path[: place + 1]


def short_name(unit: Path) -> str:
    """The name by which `per_rank` gives a unit: that of the parameter or of the extra state."""
    rest = unit[2:] if unit[0] == "optimizer" else unit[1:] or unit
    return ".".join(map(str, rest))


def matches(unit: Path, pattern: str) -> bool:
    """Whether a pattern of `per_rank` names a unit, or what it is a part of."""
    kind = str(unit[0]).removesuffix("_tensors")
    names = short_name(unit), ".".join(map(str, (kind, *unit[1:])))
    return any(fnmatchcase(name, each) for name in names for each in (pattern, f"{pattern}.*"))


def name_by_rank(state: dict[str, Any], units: Collection[Path], rank: int) -> None:
    """Give the number of this rank to units of its state."""
    for unit in units:
        container: Any = state
        for key in unit[:-1]:
            container = container[key]
        value = container.pop(unit[-1])
        if len(unit) == 1:
            container[unit[0]] = {f"@rank_{rank}": value}
        else:
            container[f"{unit[-1]}@rank_{rank}"] = value


def seen_by(saved: Metadata, rank: int) -> tuple[Metadata, Mapping[str, str]]:
    """A step with the names of a rank's own entries as all ranks have them, and the names in it."""
    names = (*saved.tensors, *saved.bytes_entries)
    own = {plain_name(name): name for name in names if rank_in(name) == rank}
    if not own:
        return saved, own
    tensors: dict[str, Any] = dict(saved.tensors)
    values: dict[str, Any] = dict(saved.bytes_entries)
    for plain, name in own.items():
        entries = tensors if name in tensors else values
        entry = entries.pop(name)
        keys = (plain_name(key) if isinstance(key, str) else key for key in entry.path)
        path = tuple(key for key in keys if key != "")
        entries[plain] = replace(entry, fqn=plain, path=path)
    return replace(saved, tensors=tensors, bytes_entries=values), own

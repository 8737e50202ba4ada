"""The files of a step that nothing lists, by their names and sizes: families, kinds, words.

Metadata lists the shards of DCP, an index the files of a model, and the names of frameworks state
the ranks of theirs. Of all others the names are what tells which belong together.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise

from ckptctl.formats.families import Family, families_of, key_of
from ckptctl.formats.frameworks import layouts
from ckptctl.formats.frameworks.file_names import kind_of_file, may_hold_state, rank_file
from ckptctl.formats.frameworks.parts import is_empty_archive
from ckptctl.formats.manifest import MANIFEST
from ckptctl.model import Step

SIMILAR = 1.1
"""Files of one kind whose sizes differ by no more are of equally many ranks: those of three are a
third larger than those of four."""


def open_families(step: Step) -> tuple[Family, ...]:
    """The families among files whose number nothing else states.

    Metadata states the shards of DCP, an index the files of a model, the names of frameworks
    those of their ranks, and the content of some layouts the files of each parameter.
    """
    saved = _unlisted_files(step)
    return families_of(saved, step.number, saved)


def kinds_of_files(step: Step) -> Mapping[str, str]:
    """The kinds of files that may hold state and that nothing lists, each with one of its paths.

    A kind is a path with each number in it as `N`: that of a single file is no rank, but may be an
    epoch (`model-epoch1.pt`). Not among them are a manifest, which is written at the first save of
    a process only, and random states, which one rank names otherwise than several.
    """
    kinds: dict[str, str] = {}
    for path in sorted(_unlisted_files(step)):
        kind = kind_of_file(step.layout, path)
        is_random = kind is not None and "rng" in kind.names
        if may_hold_state(path) and path != MANIFEST and not is_random:
            kinds.setdefault(key_of(path), path)
    return kinds


def _unlisted_files(step: Step) -> Mapping[str, int]:
    """The sizes of the files that nothing lists, by path; an empty one holds no rank's state."""
    if step.layout in _FILES_OF_PARAMETERS:
        return {}
    saved = {
        file.path: file.size
        for file in step.files
        if (file.kind == "link" or (file.kind == "file" and not is_empty_archive(file)))
        and layouts.is_saved(file.path)
        and not layouts.belongs_to_shards(file.path)
        and rank_file(file.path, step.layout) is None
    }
    indexed = {(match["folder"], match["suffix"]) for path in saved if (match := INDEX_NAME(path))}
    return {
        path: size
        for path, size in saved.items()
        if (path[: path.rfind("/") + 1], suffix_of(path)) not in indexed
    }


def named_files(
    step: Step, families: Iterable[Family], as_in: Step
) -> Mapping[str, Mapping[str, int]]:
    """The sizes of the files that are in no numbered family, by shape of name and by path.

    Letters, hosts or numbers with holes tell them apart: `shard_a.pt`, `node17/model.pt`. The
    paths are those that they have in the step `as_in`.
    """
    numbered = {family.key for family in families if family.is_numbered}
    named: dict[str, dict[str, int]] = defaultdict(dict)
    for path, size in _unlisted_files(step).items():
        is_state = may_hold_state(path) and not path.endswith(".json")
        if is_state and key_of(path) not in numbered:
            there = layouts.path_in_step(path, step.number or 0, as_in.number or 0)
            named[shape_of_name(path)][there] = size
    return named


def shape_of_name(path: str) -> str:
    """A path with every word as `W`."""
    return re.sub("[A-Za-z0-9]+", "W", path.removesuffix(suffix_of(path))) + suffix_of(path)


_FILES_OF_PARAMETERS = frozenset({"nanotron", "deepspeed-universal"})
"""Layouts with files for each parameter, which `inspection.rank_files` counts."""

INDEX_NAME = re.compile(r"(?P<folder>(?:.*/)?)[^/]*(?P<suffix>\.[a-z]+)\.index\.json").fullmatch


def suffix_of(path: str) -> str:
    """The end of a path from its last dot on."""
    return path[path.rfind(".") :]


def are_alike(size: float, other: float) -> bool:
    """Whether two files are about as large."""
    return max(size, other) <= SIMILAR * min(size, other)


def has_alike(sizes: Mapping[str, int]) -> bool:
    """Whether two of the files are about as large."""
    return any(are_alike(small, large) for small, large in pairwise(sorted(sizes.values())))

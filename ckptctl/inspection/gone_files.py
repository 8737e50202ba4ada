"""Find files that the steps before hold and a step lacks, and whether state is lost with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from math import prod

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe, RecordUnreadable, StorageError
from ckptctl.findings import Finding
from ckptctl.formats.archive.safetensors import SUFFIX
from ckptctl.formats.families import key_of
from ckptctl.formats.frameworks.state_keys import Leaf, entries_of, leaves_of
from ckptctl.formatting import command_line, some_of
from ckptctl.inspection.beside import Neighbours, steps_before
from ckptctl.inspection.open_step import OpenStep
from ckptctl.inspection.sidecars import tensors_in_header, value_in_archive
from ckptctl.inspection.unlisted_files import (
    are_alike,
    has_alike,
    kinds_of_files,
    named_files,
    open_families,
    shape_of_name,
)
from ckptctl.model import Step
from ckptctl.records.reads import read_headers

N_BEFORE = 2
"""So many steps before must hold a file: one that a single step has is not of each save."""


def check_dropped(opened: OpenStep, neighbours: Neighbours | None) -> Iterator[Finding]:
    """Yield a finding for kinds of files that both steps before hold and this one lacks.

    It is `file.dropped` if such a file holds tensors that nothing in this step has, by their names
    and shapes: they would begin anew. Else it is `file.gone`: a copy of the best weights, an
    average, a marker or the output of an evaluation may come and go. A file that has another name
    here is neither.

    Cost: the listings of two steps, unless they are known; where a kind is gone, the pickle or the
    header of its file and of each file here.
    """
    if opened.is_file or neighbours is None:
        return
    older = steps_before(opened, neighbours, N_BEFORE)
    same = [other for other in older if other.step.layout == opened.step.layout]
    if len(same) < N_BEFORE:
        return
    kinds, held = kinds_of_files(opened.step), [kinds_of_files(other.step) for other in same]
    new = {shape_of_name(kind) for kind in kinds if not all(kind in one for one in held)}
    gone = sorted(
        kind
        for kind in held[0]
        if kind not in kinds and all(kind in one for one in held) and shape_of_name(kind) not in new
    )
    if _compares_names(opened):
        alike = _alike_kinds(same[0].step)
        gone = [kind for kind in gone if kind not in alike]
    if not gone:
        return
    here = _held_in_step(opened)
    dropped = [kind for kind in gone if not _is_held(_held_before(same[0], held[0][kind]), here)]
    named = some_of(dropped or gone)
    why = (
        "a resume from here would reset what is in it (--allow-missing-state accepts that)"
        if dropped
        else "nothing shows that it was not part of this save"
    )
    yield Finding(
        "file.dropped" if dropped else "file.gone",
        (dropped or gone)[0],
        f"lacks {named}, which {same[0].name} and {same[1].name} hold: {why}",
        next_command=command_line("show", same[0].url),
    )


def _compares_names(opened: OpenStep) -> bool:
    """Whether `_lost_names` has compared the files that have the size of another one."""
    families = open_families(opened.step)
    named = named_files(opened.step, families, opened.step)
    return bool(families) or any(map(has_alike, named.values()))


def _alike_kinds(step: Step) -> set[str]:
    """The kinds that are no family and have the size of another, under a name of one shape."""
    families = open_families(step)
    return {
        key_of(path)
        for sizes in named_files(step, families, step).values()
        for path, size in sizes.items()
        if any(are_alike(size, other) for one, other in sizes.items() if one != path)
    }


_Held = dict[tuple[str, tuple[int, ...]], set[str]]
"""Tensors by the last word of their name and their shape, with the words before it: an average has
others in front. Empty for a name of two words, of which the first is that of the whole."""


def _is_held(gone: _Held, here: _Held) -> bool:
    """Whether each tensor is here under a name that ends with the same words."""
    return all(
        key in here and (not word or not here[key].isdisjoint(("", word)))
        for key, words in gone.items()
        for word in words
    )


def _held_in_step(opened: OpenStep) -> _Held:
    """All tensors that were found in a step."""
    metadata = (one for part in opened.parts for one in part.metadata)
    held = _held(leaf for one in metadata for _, leaf in entries_of(one))
    for path in kinds_of_files(opened.step).values():
        for key, words in _held_in(opened, path).items():
            held[key] |= words
    return held


def _held(leaves: Iterable[Leaf]) -> _Held:
    held: _Held = defaultdict(set)
    for leaf in leaves:
        if leaf.shape and prod(leaf.shape) > 1:
            *before, word = ".".join(map(str, leaf.path)).split(".")
            held[word, leaf.shape].add(before[-1] if len(before) > 1 else "")
    return held


def _held_in(opened: OpenStep, path: str) -> _Held:
    """The tensors in a file of `torch.save` or safetensors; none in any other."""
    files = [file for file in opened.files if file.path == path]
    states: list[object] = []
    with suppress(MetadataUnreadable, MetadataUnsafe, RecordUnreadable):
        if path.endswith(SUFFIX):
            headers = read_headers(opened.store, opened.folder, files)
            states += [tensors_in_header(header) for _, header in headers]
        else:
            states.append(value_in_archive(opened.store, opened.in_store(path), files[0].size))
    return _held(leaf for state in states for leaf in leaves_of(state or {}))


def _held_before(other: OpenStep, path: str) -> _Held:
    """The tensors in a file of another step; none where its storage does not answer."""
    try:
        return _held_in(other, path)
    except StorageError:
        return {}

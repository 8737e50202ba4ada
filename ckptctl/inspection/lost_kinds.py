"""Compare the files of a step that have no number of a rank with those of the steps before.

A kind of file that steps before hold, and files of ranks that letters or hosts tell apart.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress

from ckptctl.errors import StorageError
from ckptctl.findings import Finding
from ckptctl.formats.families import Family
from ckptctl.formats.frameworks import layouts
from ckptctl.formats.frameworks.state_keys import entries_of
from ckptctl.formatting import command_line, counted, some_of, verb
from ckptctl.inspection.beside import MAX_BEFORE, Neighbours, steps_before, steps_beside
from ckptctl.inspection.file_kinds import (
    INDEX_NAME,
    Compared,
    WordsOfFiles,
    are_alike,
    by_words,
    folder_and_suffix,
    is_of_evaluation,
    kinds_of_files,
    shape_of_name,
)
from ckptctl.inspection.open_step import OpenStep
from ckptctl.inspection.stored_tensors import (
    TensorNames,
    are_held,
    leaves_at,
    split_tensors,
    tensor_names,
    tensor_sizes,
)
from ckptctl.outside_numbers import clamped

N_BEFORE = 2
"""So many steps before must hold a file: one that a single step has is not of each save."""


def check_gone(opened: OpenStep, neighbours: Neighbours | None) -> Iterator[Finding]:
    """Yield a finding for kinds of files that both steps before hold and this one lacks.

    It is `file.dropped` if such a file holds tensors that nothing in this step has, by their names
    and shapes: they would begin anew. If other files here have all of them, as a network and its
    twin, or weights and their average, it is `file.fewer`, unless another step before lacks the
    file too: the run writes it at some steps only. A file without tensors is `file.gone`: a marker
    may come and go. A file that has another name here is none, nor is the output of an evaluation.

    Cost: the listings of two steps, unless they are known; where a kind is gone, the pickle or the
    header of its file and of each file here, and the listings of two more steps.
    """
    if opened.is_file:
        return
    older = [*steps_before(opened, neighbours, N_BEFORE)]
    same = [other for other in older if other.step.layout == opened.step.layout]
    if len(same) < N_BEFORE:
        return
    kinds, held = kinds_of_files(opened.step), [kinds_of_files(other.step) for other in same]
    in_all = set(held[0]).intersection(*held)
    new = {shape_of_name(kind) for kind in kinds if kind not in in_all}
    gone = {
        kind: path
        for kind, path in sorted(held[0].items())
        if kind not in kinds and kind in in_all and shape_of_name(kind) not in new
    }
    # An evaluation may not have run yet.
    gone = {kind: path for kind, path in gone.items() if not is_of_evaluation(same[0], path)}
    if not gone:
        return
    shapes = {shape_of_name(path) for path in gone.values()}
    with suppress(StorageError):
        resized = _resized(opened, same[0], shapes & {*map(shape_of_name, kinds.values())})
        gone = {kind: path for kind, path in gone.items() if shape_of_name(path) not in resized}
    renamed = _held_in(opened, [path for kind, path in kinds.items() if kind not in held[0]])
    here = _held_in(opened, kinds.values(), with_metadata=True)
    before: dict[str, TensorNames] = {}
    for kind, path in gone.items():
        with suppress(StorageError):
            before[kind] = _held_in(same[0], [path])
    dropped = [kind for kind, tensors in before.items() if not are_held(tensors, here)]
    twins = [kind for kind, tensors in before.items() if not are_held(tensors, renamed)]
    twins = [kind for kind in twins if kind not in dropped]
    if twins and not dropped:
        further = [*steps_before(opened, neighbours, MAX_BEFORE)][N_BEFORE:]
        twins = [
            kind for kind in twins if all(kind in kinds_of_files(other.step) for other in further)
        ]
    if dropped:
        code, lost = "file.dropped", dropped
        why = "a resume from here would reset what is in it (--allow-missing-state accepts that)"
    elif twins:
        code, lost = "file.fewer", twins
        why = (
            "other files here have tensors of the same names and shapes, and nothing shows that "
            "none of its own is lost. A seal, or two steps without the file, prove that"
        )
    else:
        code, lost = "file.gone", [*gone]
        why = "nothing shows that it was not part of this save"
    if lost:
        yield Finding(
            code,
            lost[0],
            f"lacks {some_of(lost)}, which {same[0].name} and {same[1].name} hold: {why}",
            next_command=command_line("show", same[0].url),
        )


def _held_in(opened: OpenStep, paths: Iterable[str], *, with_metadata: bool = False) -> TensorNames:
    """The tensors in some files of a step, and those that its metadata describes."""
    described = (found for part in opened.parts for found in part.metadata if with_metadata)
    leaves = [leaf for metadata in described for _, leaf in entries_of(metadata)]
    for path in paths:
        leaves += leaves_at(opened, path)
    return tensor_names(leaves)


_FURTHER = re.compile(
    r"(?P<kind>optimizer|scheduler|sampler|model|pytorch_model)_(?P<n>[1-9][0-9]{0,3})(?P<end>\.[a-z]+)"
).fullmatch
"""Matches the file of a second or later object of its kind.

Source: accelerate 1.15 `checkpointing.py` (`save_accelerator_state`): the first has no number.
"""


def lost_first(opened: OpenStep) -> Finding | None:
    """The finding for an object of accelerate that is missing before a further one of its kind."""
    if not opened.step.layout.startswith("accelerate"):
        return None
    here = {file.path for file in opened.files if file.size}
    lost = set()
    for match in filter(None, map(_FURTHER, here)):
        number = clamped(match["n"]) - 1
        before = f"{match['kind']}_{number}" if number else match["kind"]
        # A model may be in several files, with an index.
        if not {f"{before}{match['end']}", f"{before}{match['end']}.index.json"} & here:
            lost.add(f"{before}{match['end']}")
    return _lost_files(opened, lost, "a further one of its kind implies") if lost else None


def lost_index(compared: Compared, families: Collection[Family]) -> Finding | None:
    """The finding for an index that the step beside has, of files that both have.

    Cost: none without a family; else the listing of the nearest step.
    """
    opened = compared.opened
    here = {file.path for file in opened.files}
    for other in compared.beside(1) if families else ():
        there = {file.path for file in other.files}
        # A model that is one file now, under another name, needs no index.
        shared = {folder_and_suffix(path) for path in here & there}
        for path in sorted(there - here):
            match = INDEX_NAME(path)
            if match and (match["folder"], match["suffix"]) in shared:
                return _lost_files(opened, {path})
    return None


def lost_words(opened: OpenStep, neighbours: Neighbours | None) -> Finding | None:
    """The finding for files of ranks that letters or hosts tell apart, not numbers.

    In the nearest step, three files or more of a kind are about as large. They are those of ranks,
    and no copies of one, if each holds an optimizer, or the file of another kind with the same word
    does (`a.pt` and `a.optim.pt`). This step has one of them, and lacks others; the tensors do not
    show that fewer ranks hold the same. Words also name the members of a league, which may be
    retired: what steps further back have leaves `whole` unknown.

    Cost: the listing of the nearest step, and where that has more files, the pickles of both.
    """
    here = by_words(opened.step, opened.step)
    for other in steps_beside(opened, neighbours, 1) if here else ():
        with suppress(StorageError):
            lost = {*_lost_of_ranks(other, by_words(other.step, opened.step), here)}
            resized = _resized(opened, other, {shape_of_name(path) for path in lost})
            lost = {path for path in lost if shape_of_name(path) not in resized}
            if not lost:
                return None
            numbers = (other.step.number or 0, opened.step.number or 0)
            return _lost_files(opened, {layouts.path_in_step(path, *numbers) for path in lost})
    return None


def _lost_of_ranks(
    other: OpenStep, then: Mapping[str, WordsOfFiles], here: Mapping[str, WordsOfFiles]
) -> Iterator[str]:
    """The files of ranks, by kind and word, that another step has and this one lacks."""
    for kind, files in then.items():
        there = here.get(kind, {}).keys() & files.keys()
        alike = {
            word: path
            for word, (path, size) in files.items()
            if any(are_alike(size, files[known][1]) for known in there)
        }
        if len(alike) < 3 or there >= alike.keys():
            continue
        tensors, _ = other.tensors_in_files
        optimizers = {tensor.file for tensor in tensors if tensor.kind == "optimizer"}
        with_optimizer = {
            word
            for words in then.values()
            if words.keys() == files.keys()
            for word, (path, _) in words.items()
            if path in optimizers
        }
        if with_optimizer >= alike.keys():
            yield from (path for word, path in alike.items() if word not in there)


def _lost_files(
    opened: OpenStep, paths: Collection[str], shown_by: str = "the step beside this one has"
) -> Finding:
    return Finding(
        "file.missing",
        min(paths),
        f"{counted(len(paths), 'file')} that {shown_by} "
        f"{verb(len(paths), 'is', 'are')} missing: {some_of(sorted(paths))}",
        next_command=command_line("show", opened.url),
    )


def _resized(opened: OpenStep, other: OpenStep, shapes: Collection[str]) -> set[str]:
    """Those of `shapes` of names whose files hold tensors in fewer, larger parts than in `other`.

    Raises `StorageError`. Cost: none without `shapes`; else the pickles of both steps.
    """
    if not shapes:
        return set()
    now, then = (tensor_sizes(step, shapes, shape_of_name) for step in (opened, other))
    split = split_tensors(now, then)
    smaller = {
        shape for fqn, shape in split if now[fqn, shape].n_elements < then[fqn, shape].n_elements
    }
    return {shape for _, shape in split} - smaller

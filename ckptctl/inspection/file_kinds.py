"""The files of a step that nothing lists: families by their numbers, kinds, and words.

Metadata states the shards of DCP, an index the files of a model, the names of frameworks those of
their ranks. What else a step holds is known by comparing its files with each other and with those
of the steps beside: a kind of file that steps before hold, files of ranks that letters or hosts
tell apart. Files that an evaluation wrote are none of the save, and the numbers of a window move on
from step to step: both are known by such a comparison only.

Where neither names nor counts decide (`whole`), the tensors in the files of a family show which
ranks wrote them: they add up to those of another step, are copies of each other, or those of
several numbers of ranks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from math import prod

import msgspec

from ckptctl.errors import StorageError
from ckptctl.findings import Finding
from ckptctl.formats.families import (
    INDEX_NAME,
    families_of,
    folder_and_suffix,
    indexed_among,
    key_in_step,
    key_of,
    kind_key,
)
from ckptctl.formats.frameworks import layouts
from ckptctl.formats.frameworks.file_names import (
    axes_in,
    kind_of_file,
    lost_before_others,
    may_hold_state,
    rank_file,
)
from ckptctl.formats.frameworks.layout_tables import TABLES, full_match
from ckptctl.formats.frameworks.parts import is_empty_archive
from ckptctl.formats.frameworks.state_keys import entries_of, holds_output
from ckptctl.formats.manifest import MANIFEST
from ckptctl.formatting import command_line, counted, inside, some_of, verb
from ckptctl.inspection.identity import path_then
from ckptctl.inspection.open_step import MAX_BEFORE, OpenStep, steps_before, steps_beside
from ckptctl.inspection.shape import missing_file
from ckptctl.inspection.sidecars import (
    HeldTensor,
    TensorNames,
    TensorSizes,
    are_held,
    checksums_in,
    leaves_at,
    split_tensors,
    tensor_names,
    tensor_sizes,
    tensors_by_kind,
)
from ckptctl.model import SHARDED, Family, Step

SIMILAR = 1.1
"""Files of one kind whose sizes differ by no more are of equally many ranks: those of three are a
third larger than those of four."""

_MAX_KEPT = 8
"""So many steps have their files and families kept: each is compared with several others."""


class ComparedStep(msgspec.Struct, frozen=True):
    """A step with those beside it, and what the comparison showed of its files."""

    opened: OpenStep
    windows: frozenset[str] = frozenset()
    """The keys of families whose numbers move on from step to step."""
    outputs: frozenset[str] = frozenset()
    """The keys of files that an evaluation wrote."""

    def families(self, step: Step) -> tuple[Family, ...]:
        """The families of this step, or of one beside it, without those of evaluations."""
        return tuple(
            family.as_window() if family.key in self.windows else family
            for family in open_families(step)
            if family.key not in self.outputs
        )

    def closer(self) -> ComparedStep:
        """The same with the windows and the files of evaluations that the steps beside show.

        Cost: the listings of two steps on each side, and the pickle of a file of each family.
        """
        own = {family.key: family for family in open_families(self.opened.step)}
        examples = {key: (self.opened, family.example) for key, family in own.items()}
        held: dict[str, list[tuple[int, Family]]] = defaultdict(list)
        for other in (self.opened, *steps_beside(self.opened, _LEAST_MOVES)):
            for family in open_families(other.step):
                examples.setdefault(family.key, (other, family.example))
                held[family.key].append((other.step.number or 0, family))
        windows = {key for key, families in held.items() if key in own and _is_window(families)}
        outputs = frozenset(
            key for key, (step, path) in examples.items() if is_of_evaluation(step, path)
        )
        return ComparedStep(self.opened, frozenset(windows), outputs)


_LEAST_MOVES = 2
"""A family that moved on as often between steps is a window."""


def _is_window(families: Sequence[tuple[int, Family]]) -> bool:
    """Whether a family, with the numbers of the steps that hold it, moves on with each step.

    One move is also what ranks leave whose number grew, and of which the first are lost.
    """
    in_order = [family for _, family in sorted(families, key=lambda pair: pair[0])]
    moves = [_is_shifted(older, newer) for older, newer in pairwise(in_order)]
    return len(moves) >= _LEAST_MOVES and all(moves)


def _is_shifted(older: Family, newer: Family) -> bool:
    """Whether the numbers of a family moved on as a whole, as those of a replay buffer do."""
    is_line = all(len(family.values) == 1 for family in (older, newer))
    is_of_several = min(older.n_present, newer.n_present) > 1
    is_open = is_line and is_of_several and not (older.stated or older.names_rank)
    if not is_open:
        return False
    (then,), (now,) = older.values, newer.values
    return now[0] > then[0] and now[-1] > then[-1]


def is_of_evaluation(opened: OpenStep, path: str) -> bool:
    """Whether a file holds what an evaluation wrote. Cost: its pickle; none of it where unread."""
    with suppress(StorageError):
        return holds_output(path, leaves_at(opened, path))
    return False


@lru_cache(maxsize=_MAX_KEPT)
def open_families(step: Step) -> tuple[Family, ...]:
    """The families among files whose number nothing else states.

    Metadata states the shards of DCP, an index the files of a model, the names of frameworks
    those of their ranks, and the content of some layouts the files of each parameter.
    """
    saved = unlisted_files(step)
    return families_of(saved, step.number, saved)


def kinds_of_files(step: Step) -> Mapping[str, str]:
    """The kinds of files that may hold state and that nothing lists, each with one of its paths.

    A kind is a path with each number in it as `N`: that of a single file is no rank, but may be an
    epoch (`model-epoch1.pt`). Files whose numbers have more holes than files, as those of hosts,
    are kinds of their own. Not among them are a manifest, which is written at the first save of a
    process only, and random states, which one rank names otherwise than several.
    """
    families = open_families(step)
    sparse = {family.key for family in families if family.n_present > 1 and not family.is_numbered}
    kinds: dict[str, str] = {}
    for path in sorted(unlisted_files(step)):
        kind = kind_of_file(step.layout, path)
        is_random = kind is not None and "rng" in kind.names
        if may_hold_state(path) and path != MANIFEST and not is_random:
            key = key_of(path)
            kinds.setdefault(key_in_step(path, step.number) if key in sparse else key, path)
    return kinds


@lru_cache(maxsize=_MAX_KEPT)
def unlisted_files(step: Step) -> Mapping[str, int]:
    """The sizes of the files that nothing lists, by path; an empty one holds no rank's state."""
    if step.layout in _FILES_OF_PARAMETERS:
        return {}
    saved = {
        file.path: file.size
        for file in step.files
        if (file.kind == "link" or (file.kind == "file" and not is_empty_archive(file)))
        and layouts.is_saved(file.path)
        and not layouts.belongs_to_shards(file.path)
        # Nor is a file whose name states a place in the grid of ranks of its framework.
        and not ((named := rank_file(file.path, step.layout)) and axes_in(named[1]))
    }
    indexed = indexed_among(saved)
    return {path: size for path, size in saved.items() if path not in indexed}


_FILES_OF_PARAMETERS = frozenset({"nanotron", "deepspeed-universal"})
"""Layouts with files for each parameter, which `inspection.rank_files` counts."""

WordsOfFiles = Mapping[str, tuple[str, int]]
"""The path and the size of a file of each word."""


def by_words(step: Step, as_in: Step) -> Mapping[str, WordsOfFiles]:
    """The files in no numbered family, by kind and by the word that tells those of a kind apart.

    A kind is a path with one word as `*`, as it is called in the step `as_in`: `shard_*.pt`,
    `*/model.pt`. Each word has the path of its file and the size.
    """
    numbered = {family.key for family in open_families(step) if family.is_numbered}
    kinds: dict[str, dict[str, tuple[str, int]]] = defaultdict(dict)
    for path, size in unlisted_files(step).items():
        if not may_hold_state(path) or path.endswith(".json") or key_of(path) in numbered:
            continue
        there = layouts.path_in_step(path, step.number or 0, as_in.number or 0)
        end = len(there) - len(folder_and_suffix(there)[1])
        for word in re.finditer("[A-Za-z0-9]+", there[:end]):
            kinds[f"{there[: word.start()]}*{there[word.end() :]}"][word[0]] = (path, size)
    return kinds


def shape_of_name(path: str) -> str:
    """A path with every word as `W`."""
    _, suffix = folder_and_suffix(path)
    return re.sub("[A-Za-z0-9]+", "W", path.removesuffix(suffix)) + suffix


def are_alike(size: float, other: float) -> bool:
    """Whether two files are about as large."""
    return max(size, other) <= SIMILAR * min(size, other)


N_BEFORE = 2
"""So many steps before must hold a file: one that a single step has is not of each save."""


def check_owners(opened: OpenStep, stated: Collection[str]) -> Iterator[Finding]:
    """Yield `file.missing` for each owner of the step that left nothing in it.

    An owner is a process that writes its own folder or file of each step, such as the critic or
    the orchestrator of a post-training run. `stated` names them. Else they are learned: folders
    directly in the step, with metadata, with files of ranks or with state that is no tensor, which
    all of the steps before have. Where this step has a folder that they lack, the owners may be
    others now, and where it has a seal, that names its files: then nothing is learned. A folder of
    tensors alone may be an export: see `check_gone`.

    Cost: the listings of two steps, unless they are known; where an owner is gone, those of two
    more, and the pickles of its files.
    """
    paths = {file.path for file in opened.files}
    for owner in stated:
        if owner not in paths and not any(path.startswith(f"{owner}/") for path in paths):
            message = f"nothing of {owner} is there, which the setting owners names"
            yield missing_file(opened.step, owner, message)
    if stated or opened.is_file or opened.has_seal:
        return
    older = [*steps_before(opened, N_BEFORE)]
    if len(older) < N_BEFORE:
        return
    here, before = _folders_with_state(opened.step), _folders_with_state(older[0].step)
    lost = before.keys() - here.keys()
    if not lost or here.keys() - before.keys():
        return
    further = [_folders_with_state(other.step) for other in steps_before(opened, MAX_BEFORE)]
    for folder in sorted(lost):
        if all(folder in held for held in further) and _is_owner(older[0], before[folder]):
            path = before[folder][0]
            n_steps = counted(len(further), "step")
            message = f"nothing of {folder} is there, and the {n_steps} before hold it: {path}"
            yield missing_file(opened.step, path, message)


def _folders_with_state(step: Step) -> Mapping[str, Sequence[str]]:
    """The files that may hold state in each folder directly in a step, with its numbers as `N`."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in step.files:
        folder, slash, _ = file.path.partition("/")
        is_saved = slash and file.kind == "file" and file.size and layouts.is_saved(file.path)
        if is_saved and (layouts.belongs_to_shards(file.path) or may_hold_state(file.path)):
            found[key_of(folder)].append(file.path)
    return found


def _is_owner(opened: OpenStep, paths: Sequence[str]) -> bool:
    """Whether files of one folder are of a process that writes each step, and no export.

    A number in the name is that of a rank or of an object; a folder of the optimizer is of one kind
    of state, which a job may leave out.
    """
    name = paths[0].partition("/")[0]
    if any(map(str.isdecimal, name)) or full_match(TABLES.words.optimizer_head, name):
        return False
    parts = opened.step.parts
    folders = {part.path for part in parts if part.format in SHARDED}
    folders |= {
        inside(part.path, grid.folder) for part in parts for grid in part.grids if grid.is_named
    }
    if any(folder.partition("/")[0] == name for folder in folders):
        return True
    sidecars = [path for path in paths if not path.endswith(".json")]
    with suppress(StorageError):
        return bool(sidecars) and not _held_in(opened, sidecars)
    return False


def check_gone(opened: OpenStep) -> Iterator[Finding]:
    """Yield a finding for kinds of files that both steps before hold and this one lacks.

    It is `file.dropped` if such a file holds tensors that nothing in this step has, by their names
    and shapes, or is the metadata of a part: they would begin anew. If other files here have all of
    them, as a network and its twin, or weights and their average, it is `file.fewer`, unless
    another step before lacks the file too: the run writes it at some steps only. So are files
    without tensors that several ranks wrote, such as the place of each in the data. A single file
    without tensors is `file.gone`: a marker may come and go. A file that has another name here is
    none, nor is the output of an evaluation. Files of ranks whose name without the number is new
    here are `file.gone`: one rank goes on with them.

    Cost: the listings of two steps, unless they are known; where a kind is gone, the pickle or the
    header of its file and of each file here, and the listings of two more steps.
    """
    if opened.is_file:
        return
    older = [*steps_before(opened, N_BEFORE)]
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
    lost_parts = _parts_gone(opened.step, [other.step for other in same])
    if not (gone or lost_parts):
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
    dropped = [*lost_parts, *dropped]
    of_ranks = {family.key for family in open_families(same[0].step) if family.n_present > 1}
    single = {_words_of(kind) for kind in kinds if kind not in held[0]}
    places = {
        kind
        for kind, tensors in before.items()
        if kind in of_ranks and not tensors and single.isdisjoint(_without_number(kind))
    }
    twins = [
        kind
        for kind, tensors in before.items()
        if kind not in dropped and (kind in places or not are_held(tensors, renamed))
    ]
    if twins and not dropped:
        further = [*steps_before(opened, MAX_BEFORE)][N_BEFORE:]
        twins = [
            kind for kind in twins if all(kind in kinds_of_files(other.step) for other in further)
        ]
    if dropped:
        code, lost = "file.dropped", dropped
        why = "a resume from here would reset what is in it (--allow-missing-state accepts that)"
    elif twins:
        code, lost = "file.fewer", twins
        why = "other files here have tensors of the same names and shapes"
        if lost[0] in places:
            why = "several ranks wrote them"
        why += (
            ", and nothing shows that none of its own is lost. A seal, or two steps without the "
            "file, prove that"
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


def _without_number(kind: str) -> Iterator[tuple[str, ...]]:
    """The words of a kind without one of its numbers, and without the word that is before that.

    `data_rankN.pt` becomes `data_rank.pt` and `data.pt`.
    """
    for match in re.finditer("([A-Za-z]*)N(?![A-Za-z])", kind):
        before, after = kind[: match.start()], kind[match.end() :]
        yield _words_of(before + match[1] + after)
        yield _words_of(before + after)


def _words_of(kind: str) -> tuple[str, ...]:
    return tuple(re.findall("[A-Za-z]+", kind))


def _parts_gone(step: Step, before: Sequence[Step]) -> list[str]:
    """The folders with metadata in all of the steps before, where this step has no other ones."""
    here, *held = (
        {key_of(part.path) for part in one.parts if part.format in SHARDED}
        for one in (step, *before)
    )
    return [] if here - held[0] else sorted(held[0].intersection(*held) - here)


def _held_in(opened: OpenStep, paths: Iterable[str], *, with_metadata: bool = False) -> TensorNames:
    """The tensors in some files of a step, and those that its metadata describes."""
    described = (found for part in opened.parts for found in part.metadata if with_metadata)
    leaves = [leaf for metadata in described for _, leaf in entries_of(metadata)]
    for path in paths:
        leaves += leaves_at(opened, path)
    return tensor_names(leaves)


def lost_first(opened: OpenStep) -> Finding | None:
    """The finding for an object of accelerate that is missing before a further one of its kind."""
    if not opened.step.layout.startswith("accelerate"):
        return None
    lost = lost_before_others(file.path for file in opened.files if file.size)
    return _lost_files(opened, lost, "a further one of its kind implies") if lost else None


def lost_index(compared: ComparedStep, families: Collection[Family]) -> Finding | None:
    """The finding for an index that the step beside has, of files that both have.

    Cost: none without a family; else the listing of the nearest step.
    """
    opened = compared.opened
    here = {file.path for file in opened.files}
    for other in steps_beside(opened, 1) if families else ():
        there = {file.path for file in other.files}
        # A model that is one file now, under another name, needs no index.
        shared = {folder_and_suffix(path) for path in here & there}
        for path in sorted(there - here):
            match = INDEX_NAME(path)
            if match and (match["folder"], match["suffix"]) in shared:
                return _lost_files(opened, {path})
    return None


def lost_words(opened: OpenStep) -> Finding | None:
    """The finding for files of ranks that letters or hosts tell apart, not numbers.

    In the nearest step, three files or more of a kind are about as large. They are those of ranks,
    and no copies of one, if each holds an optimizer, or the file of another kind with the same word
    does (`a.pt` and `a.optim.pt`). This step has one of them, and lacks others; the tensors do not
    show that fewer ranks hold the same. Words also name the members of a league, which may be
    retired: what steps further back have leaves `whole` unknown.

    Cost: the listing of the nearest step, and where that has more files, the pickles of both.
    """
    here = by_words(opened.step, opened.step)
    for other in steps_beside(opened, 1) if here else ():
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
    lost: list[tuple[WordsOfFiles, dict[str, str], set[str]]] = []
    for kind, files in then.items():
        there = here.get(kind, {}).keys() & files.keys()
        alike = {
            word: path
            for word, (path, size) in files.items()
            if any(are_alike(size, files[known][1]) for known in there)
        }
        if len(alike) >= 3 and not there >= alike.keys():
            lost.append((files, alike, there))
    with_optimizer = _with_optimizer(other, then) if lost else {}
    for files, alike, there in lost:
        if with_optimizer[frozenset(files)] >= alike.keys():
            yield from (path for word, path in alike.items() if word not in there)


def _with_optimizer(
    opened: OpenStep, by_kind: Mapping[str, WordsOfFiles]
) -> Mapping[frozenset[str], set[str]]:
    """The words of files that hold an optimizer, in any kind with the same words, by those."""
    tensors, _ = opened.tensors_in_files
    optimizers = {tensor.file for tensor in tensors if tensor.kind == "optimizer"}
    found: dict[frozenset[str], set[str]] = defaultdict(set)
    for files in by_kind.values():
        found[frozenset(files)] |= {w for w, (path, _) in files.items() if path in optimizers}
    return found


def _lost_files(
    opened: OpenStep, paths: Collection[str], shown_by: str = "the step beside this one has"
) -> Finding:
    return missing_file(
        opened.step,
        min(paths),
        f"{counted(len(paths), 'file')} that {shown_by} "
        f"{verb(len(paths), 'is', 'are')} missing: {some_of(sorted(paths))}",
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


_COUNTS_OF_RANKS = frozenset({"world_size", "num_ranks", "n_ranks", "num_processes", "nprocs"})
"""Keys of the number of ranks in a saved state."""

_WEIGHTS_AND_MOMENTS = ("model", "optimizer")
"""The kinds of tensors that ranks share out among them."""


def resized_in_part(compared: ComparedStep, families: Sequence[Family]) -> Finding | None:
    """The finding for a save by other ranks over a step of which files of the first are left.

    Two files of a kind were as large as each other in the nearest step. One still is, the other is
    not, and most of its tensors have another shape or are new. Together the files hold more of the
    optimizer than then: parts of it are there twice. In a save by other ranks alone all change.

    Cost: the listing of the nearest step; where sizes of files show this, the pickles of both.
    """
    opened, keys = compared.opened, {family.key for family in families if family.n_present > 1}
    for other in steps_beside(opened, 1) if keys else ():
        pairs = _resized_beside(opened, other, keys)
        if not pairs:
            continue
        held = [family for family in families if family.key in pairs]
        now, then = (_elements_by_key(step, held, ("optimizer",)) for step in (opened, other))
        weights = [
            sum(_elements_by_key(step, families, ("model",)).values()) for step in (opened, other)
        ]
        # Of a pipeline, a stage of other ranks holds other layers; a moment may come later.
        counts_new = weights[0] > SIMILAR * weights[1]
        for key in sorted(now.keys() & then.keys()):
            path, same = pairs[key]
            if now[key] > SIMILAR * then[key] and _is_of_other_parts(
                opened, path, other, counts_new=counts_new
            ):
                return Finding(
                    "state.mixed",
                    path,
                    f"{path} holds other parts of the tensors than in {other.name}, and {same} "
                    "those that it held there: files of two saves, by different numbers of ranks, "
                    "lie in one folder",
                    next_command=command_line("show", opened.url),
                )
    return None


def _resized_beside(
    opened: OpenStep, other: OpenStep, keys: Collection[str]
) -> Mapping[str, tuple[str, str]]:
    """By key a file of another size than in another step, and one of the same size as there."""
    sizes = {file.path: file.size for file in other.files}
    files: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for file in opened.files:
        key = key_of(file.path)
        if file.kind == "file" and key in keys:
            then = sizes.get(path_then(opened, other, file.path, other.step.number or 0))
            if then:
                files[key].append((file.path, file.size, then))
    pairs: dict[str, tuple[str, str]] = {}
    for key, of_key in files.items():
        resized = next((one for one in of_key if not are_alike(one[1], one[2])), None)
        if resized is not None:
            same = (p for p, now, then in of_key if are_alike(now, then))
            alike = {p for p, _, then in of_key if are_alike(then, resized[2])}
            path = next((p for p in same if p in alike), None)
            if path is not None:
                pairs[key] = (resized[0], path)
    return pairs


def _is_of_other_parts(opened: OpenStep, path: str, other: OpenStep, *, counts_new: bool) -> bool:
    """Whether most tensors of a file have another shape than in another step, or are new."""
    path_before = path_then(opened, other, path, other.step.number or 0)
    with suppress(StorageError):
        now, then = (
            {
                ".".join(map(str, leaf.path)): leaf.local or leaf.shape
                for leaf in leaves
                if leaf.shape
            }
            for leaves in (leaves_at(opened, path), leaves_at(other, path_before))
        )
        changed = [
            fqn
            for fqn, shape in now.items()
            if (counts_new if fqn not in then else then[fqn] != shape)
        ]
        return 2 * len(changed) >= len(now) > 0
    return False


def is_redistributed(
    opened: OpenStep, families: Sequence[Family], other: OpenStep, other_families: Iterable[Family]
) -> bool:
    """Whether the files of each kind together hold as many weights and moments as in another step.

    So do those of other ranks: of a pipeline, each holds other tensors then. In both steps each
    file of such a kind must hold some: one without would not be missed. Kinds without tensors must
    have as many files as one that has them.
    Cost: the pickle of each file, which are known by then.
    """
    before = [*other_families]
    now, then = _elements_by_key(opened, families), _elements_by_key(other, before)
    if not now or now != then:
        return False
    n_files = {family.n_files for family in families if family.key in now}
    return (
        all(family.n_files in n_files for family in families)
        and _each_file_holds_some(opened, [family for family in families if family.key in now])
        and _each_file_holds_some(other, [family for family in before if family.key in then])
    )


def _each_file_holds_some(opened: OpenStep, families: Sequence[Family]) -> bool:
    """Whether each file of the families holds weights or moments."""
    files: dict[str, set[str]] = defaultdict(set)
    for key, tensor in _tensors_of(opened, families, _WEIGHTS_AND_MOMENTS):
        files[key].add(tensor.file)
    return all(len(files[family.key]) == family.n_present for family in families)


def _elements_by_key(
    opened: OpenStep, families: Iterable[Family], kinds: Sequence[str] = _WEIGHTS_AND_MOMENTS
) -> Mapping[str, int]:
    """The elements of tensors of `kinds` in the files of each family; none where one is unread."""
    elements: dict[str, int] = defaultdict(int)
    for key, tensor in _tensors_of(opened, families, kinds):
        elements[key] += prod(tensor.shape)
    return elements


def _tensors_of(
    opened: OpenStep, families: Iterable[Family], kinds: Sequence[str]
) -> Iterator[tuple[str, HeldTensor]]:
    """The tensors of `kinds` in the files of each family; none where a file is unread."""
    keys, layout = {family.key for family in families}, opened.step.layout
    with suppress(StorageError):
        for key, tensor in tensors_by_kind(opened, keys, lambda path: kind_key(path, layout)):
            # Each rank has the counts and random states of its own.
            if prod(tensor.shape) > 1 and tensor.kind in kinds:
                yield key, tensor


def ranks_inside(opened: OpenStep, families: Sequence[Family]) -> int | None:
    """How many ranks wrote the step, by the counts in its files; None where none or several do.

    Cost: the pickle of each file, which are known by then.
    """
    files = [file for file in opened.files if file.kind == "file"]
    keys = {family.key for family in families}
    examples = {key_of(file.path): file.path for file in files if key_of(file.path) in keys}
    with suppress(StorageError):
        counts = {
            leaf.value
            for path in examples.values()
            for leaf in leaves_at(opened, path)
            if leaf.value and str(leaf.path[-1] if leaf.path else "").lower() in _COUNTS_OF_RANKS
        }
        return counts.pop() if len(counts) == 1 else None
    return None


def are_copies(opened: OpenStep, families: Iterable[Family]) -> bool:
    """Whether the files of each family are several, and copies of each other.

    Cost: two short reads of each file.
    """
    for family in families:
        paths = [file.path for file in opened.files if key_of(file.path) == family.key]
        with suppress(StorageError):
            checksums = {checksums_in(opened, path) for path in paths}
            if len(paths) > 1 and len(checksums) == 1 and None not in checksums:
                continue
        return False
    return True


def sizes_in_families(opened: OpenStep, families: Sequence[Family]) -> TensorSizes:
    """The size of each tensor over the files of each family; of files that cannot be read, none."""
    layout = opened.step.layout
    return tensor_sizes(opened, {f.key for f in families}, lambda path: kind_key(path, layout))


def shapes_by_key(
    opened: OpenStep, families: Iterable[Family]
) -> Mapping[str, set[tuple[int, ...]]]:
    """The shapes of the tensors of several elements in the files of each family."""
    shapes: dict[str, set[tuple[int, ...]]] = {family.key: set() for family in families}
    for key, tensor in tensors_by_kind(opened, shapes, key_of):
        if prod(tensor.shape) > 1:
            shapes[key].add(tensor.shape)
    return shapes

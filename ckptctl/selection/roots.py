"""List the steps and the pointer files of a checkpoint root.

One listing of one level. The steps are ordered by number, newest first; inspection reads
their content. The findings about a root as a whole are here too.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise

from ckptctl.errors import OptionError, PathNotFound, StorageError, StorageUnavailable
from ckptctl.findings import Finding, Severity, explained
from ckptctl.formats.frameworks import layouts, ray_train
from ckptctl.formats.frameworks.layouts import MAX_POINTER_BYTES, MAX_STEP, OWN_FOLDER, StepName
from ckptctl.formatting import command_line, counted, some_of, verb
from ckptctl.inspection.inspecting import Inspection
from ckptctl.inspection.open_step import Neighbours, OpenStep, RootSteps, list_scattered
from ckptctl.inspection.sidecars import counts_inside, steps_inside
from ckptctl.inspection.stages import count_of
from ckptctl.model import FileInfo, Level
from ckptctl.storage.contract import Store, StoreKind, list_if_there
from ckptctl.storage.opening import base_name, join_url

MAX_FILES_COUNTED = 8
"""Of so many numbered files the counts are read."""

Files = Mapping[StepName, Sequence[FileInfo]]
"""The files of each step."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """Files that are no steps unless they count the numbers in their names.

    `why` is the reason, empty where their names give no reason to take them for steps.
    `pattern` is the `--pattern` that selects the steps of one run, empty where none does.
    """

    files: Files
    why: str = ""
    pattern: str = ""


def doubt_about(steps: Files) -> Doubt | None:
    """What makes it doubtful that `steps` are those of one run; None if nothing does."""
    if not steps:
        return None
    newest = max(steps, key=lambda step: step.number)
    pattern = "" if layouts.is_scattered(newest.name) else pattern_of(newest)
    select = "select one by --pattern" if pattern else "give each a folder of its own"
    runs = {
        layouts.run_of(step): files[0].path
        for step, files in steps.items()
        if step.lone or step.run or layouts.is_scattered(step.name)
    }
    if len(runs) > 1:
        first, second, *_ = runs.values()
        why = f"{first} and {second} are of different runs, or count different things; {select}"
        return Doubt({}, why, pattern)
    files_of_all = [file for files in steps.values() for file in files]
    paths = [file.path for file in files_of_all]
    numbers = {step.number for step in steps}
    if all(map(layouts.is_flat_file, files_of_all)) and layouts.may_be_shards(paths, numbers):
        why = "nothing in them shows whether they are saves or the shards of one"
        return Doubt(steps, f"{why}; if they are saves, use --pattern", pattern)
    return None


def doubt_without_steps(files: Iterable[FileInfo]) -> Doubt | None:
    """The files that are steps if they count the number in their names, and nothing else does."""
    named = {
        step: (file,) for file in files if (step := layouts.counted_name(file.path)) is not None
    }
    return Doubt(named) if len({layouts.run_of(step) for step in named}) == 1 else None


def pattern_of(step: StepName) -> str:
    """The `--pattern` that selects a step, and those whose names differ behind its number."""
    at = [one for one in re.finditer("[0-9]+", step.name) if int(one[0]) == step.number][-1]
    return f"{re.escape(step.name[: at.start()])}(?P<step>[0-9]+).*"


def are_saves(store: Store, doubt: Doubt) -> bool:
    """Whether the files count, in the same places, different steps or epochs: they are saves.

    The shards of one save agree. One readable file must count the number in its name, or the
    next, and so must files whose names do not call it one. Cost: as `counts_inside`, for the
    files of the newest `MAX_FILES_COUNTED` steps.
    """
    newest = sorted(doubt.files, key=lambda step: step.number)[-MAX_FILES_COUNTED:]
    counts = {step: _counts_of(store, doubt.files[step]) for step in newest}
    counts = {step: found for step, found in counts.items() if found}
    names_them = any(
        {step.number, step.number + 1}.intersection(found.values())
        for step, found in counts.items()
    )
    differ = any(
        one[place] != other[place]
        for one, other in pairwise(counts.values())
        for place in one.keys() & other.keys()
    )
    return (differ or len(counts) == 1) and (names_them or bool(differ and doubt.why))


def _counts_of(store: Store, files: Iterable[FileInfo]) -> Mapping[str, int | float]:
    """What the files of one step count, by place: a key in a file, without the numbers there."""
    return {
        f"{re.sub('[0-9]+', '', file.path)} {key}": number
        for file in files
        for key, number in counts_inside(store, file.path, file.size).items()
    }


@dataclass(frozen=True, slots=True)
class RootListing:
    """The content of one level of a root.

    `steps` are newest first; of two folders with one number, the one of the last attempt
    comes first, and then the one that is named like the others. `pointers` are the pointer
    files, `folders` the names of the other folders, `links` the links that are not steps, and
    those that were followed, with their targets, `unnumbered` the names of saved weights without
    a step number. `exists` is false if the root does not exist, which on an object store is a
    prefix without objects. `known` is true if ckptctl has written there before, and `is_step` if
    the folder is a step itself. `doubt` is about files among the unnumbered that may be steps.
    `trees` are the files of each step, where the listing shows them too. `pattern` is how the
    caller names steps. `folder_times` are when the folders changed, where
    the storage shows it. `reported` are the steps that a snapshot of Ray Train names, whether
    they are there or not.
    """

    steps: tuple[StepName, ...]
    pointers: tuple[FileInfo, ...] = ()
    folders: tuple[str, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    unnumbered: tuple[str, ...] = ()
    exists: bool = True
    known: bool = False
    is_step: bool = False
    doubt: Doubt | None = None
    trees: Mapping[str, Sequence[FileInfo]] = field(default_factory=dict)
    pattern: re.Pattern[str] | None = None
    folder_times: Mapping[str, float] = field(default_factory=dict)
    reported: tuple[StepName, ...] = ()


def list_root(store: Store, pattern: re.Pattern[str] | None = None) -> RootListing:
    """List one level of a root. Cost: one listing, two of a prefix without objects.

    A missing folder is an empty root; a missing bucket is an error, and so is a storage
    that does not answer.
    """
    try:
        entries = _with_aliases(store, store.list_dir(""))
    except PathNotFound:
        if store.kind is StoreKind.OBJECT:
            raise
        return RootListing((), exists=False, pattern=pattern)
    listing = _with_ray(store, _without_doubt(store, read_listing(entries, pattern)), entries)
    is_decided = listing.doubt is None or not listing.doubt.why
    if pattern is None and is_decided and all(step.bare for step in listing.steps):
        scattered = tuple(list_scattered(store, entries))
        if scattered:  # what they lie in is neither a step nor a folder of something else
            listing = replace(listing, steps=_newest_first(scattered), folders=())
    if entries or store.kind is not StoreKind.OBJECT:
        return listing
    again = store.list_dir("")
    if all(entry.path == OWN_FOLDER for entry in again):
        # Another launcher may have begun the run between the two.
        return replace(listing, exists=bool(again), known=bool(again))
    raise _contradicted(store)


def _with_aliases(store: Store, entries: Sequence[FileInfo]) -> Sequence[FileInfo]:
    """The entries; a link to another folder of the root has the name of that folder as target."""
    if store.folders is None or all(entry.kind != "link" for entry in entries):
        return entries
    root = os.path.realpath(store.folders.path_of(""))
    names = {entry.path for entry in entries if entry.kind == "dir"}
    shown = []
    for entry in entries:
        above, name = os.path.split(os.path.normpath(os.path.join(root, entry.link or "")))
        is_alias = entry.kind == "link" and name in names and os.path.realpath(above) == root
        shown.append(replace(entry, link=name) if is_alias else entry)
    return shown


def list_all(
    store: Store, pattern: re.Pattern[str] | None = None, last: int | None = None
) -> RootListing:
    """The root's listing, with the files of each step if they come with it.

    On an object store all objects are listed at once if the files of all steps are needed:
    without `last`, or if there are no more steps than that. Cost there: one request per
    1,000 objects; elsewhere one listing of one level.
    """
    if store.kind is not StoreKind.OBJECT:
        return list_root(store, pattern)
    if last is not None:
        listing = list_root(store, pattern)
        if len(listing.steps) > last:
            return listing
    trees: dict[str, list[FileInfo]] = {}
    top: list[FileInfo] = []
    for file in store.list_tree(""):
        folder, slash, path = file.path.partition("/")
        if not slash:
            top.append(file)
            trees[folder] = [file]
            continue
        trees.setdefault(folder, []).append(file.at(path))
    for file in trees.get(OWN_FOLDER, ()):  # about steps that are one file
        steps, _, path = file.path.partition("/")
        name, slash, path = path.partition("/")
        if slash and steps == "steps" and name in trees:
            trees[name].append(file.at(f"{OWN_FOLDER}/{path}"))
    trees |= {named.name: list(files) for named, files in layouts.scattered_steps(top).items()}
    folders = [FileInfo(name, 0, kind="dir") for name in trees if name not in {f.path for f in top}]
    listing = _without_doubt(store, read_listing([*top, *folders], pattern))
    listing = _with_ray(store, listing, top, trees)
    return replace(listing, exists=bool(trees), trees=trees)


def _without_doubt(store: Store, listing: RootListing) -> RootListing:
    """The listing, with files as steps that are steps by what they count."""
    doubt = listing.doubt
    if doubt is None or not are_saves(store, doubt):
        return listing
    paths = {file.path for files in doubt.files.values() for file in files}
    return replace(
        listing,
        steps=_newest_first(layouts.by_epochs([*doubt.files])),
        unnumbered=tuple(name for name in listing.unnumbered if name not in paths),
        doubt=None,
    )


def _with_ray(
    store: Store,
    listing: RootListing,
    files: Iterable[FileInfo],
    trees: Mapping[str, Sequence[FileInfo]] | None = None,
) -> RootListing:
    """The listing of a Ray Train job, with the folders that its snapshot names as steps.

    Without a snapshot that states an order, the steps are those that count one. Raises
    `UsageError` for a pattern that takes digits of a time for the number. Cost: one read of the
    snapshot; without one a listing and the train state of `MAX_COUNTED` folders at most.
    """
    by_time = [step.name for step in listing.steps if ray_train.is_named_by_time(step.name)]
    if listing.pattern is not None and by_time:
        raise OptionError(
            "--pattern",
            f"takes digits of a time in {by_time[0]} for a step number; without it, "
            f"{ray_train.SNAPSHOT} or the counts in the files decide",
            next_command=command_line("scan", store.url),
        )
    if listing.steps or listing.pattern is not None or listing.doubt is not None:
        return listing
    has_snapshot = any(one.path == ray_train.SNAPSHOT and one.kind == "file" for one in files)
    reported: tuple[StepName, ...] = ()
    if has_snapshot:
        data = store.read(ray_train.SNAPSHOT, limit=ray_train.MAX_SNAPSHOT_BYTES)
        reported = ray_train.reported_steps(data)
    steps = [step for step in reported if step.name in listing.folders]
    if not reported:
        named = sorted(name for name in listing.folders if ray_train.is_named_by_time(name))
        for attempt, name in enumerate(named[-MAX_COUNTED:]):
            with suppress(PathNotFound):
                step = OpenStep(store, name, (trees or {}).get(name))
                number = count_of(step, Level.STRUCTURE)
                if number is not None and 0 <= number <= MAX_STEP:
                    steps.append(StepName(name, number, "dcp", attempt=attempt))
    names = {step.name for step in steps}
    return replace(
        listing,
        steps=_newest_first(steps),
        folders=tuple(name for name in listing.folders if name not in names),
        reported=reported,
    )


MAX_COUNTED = 64
"""Of so many folders that are named by a time the counts are read, the latest ones."""


def read_listing(
    entries: Iterable[FileInfo], pattern: re.Pattern[str] | None = None
) -> RootListing:
    """Distinguish steps, pointers and other folders. Cost: one comparison per name."""
    steps: list[StepName] = []
    pointers: list[FileInfo] = []
    folders: list[str] = []
    links: dict[str, str] = {}
    unnumbered: list[str] = []
    in_flight: set[str | None] = set()
    entries = list(entries)
    names = {entry.path for entry in entries if entry.kind == "dir"}
    beside_others = layouts.scattered_steps(entries) if pattern is None else {}
    of_others = {file.path for files in beside_others.values() for file in files}
    steps += beside_others
    known = False
    is_step = False
    for entry in entries:
        known = known or entry.path == OWN_FOLDER
        is_step = is_step or layouts.is_of_a_step(entry.path)
        in_flight.add(layouts.unfinished_beside(entry))
        if layouts.is_pointer(entry):
            pointers.append(entry)
            continue
        if entry.path in of_others:
            continue
        named = layouts.step_name(entry.path, pattern)
        if entry.kind == "dir" and entry.link is not None:
            links[entry.path] = entry.link
        if entry.kind == "link" and entry.link in names:
            links[entry.path] = entry.link  # another name of a folder, and no step of its own
            continue
        if named is not None and (entry.kind in ("dir", "link") or layouts.is_flat_file(entry)):
            steps.append(named)
        elif pattern is None and (
            layouts.has_too_large_a_number(entry.path)
            # As `torch.save(..., "checkpoint_100")` makes one.
            or (
                named is not None
                and not named.bare
                and entry.kind == "file"
                and "." not in entry.path
            )
        ):
            unnumbered.append(entry.path)
        elif entry.kind == "dir" and not entry.path.startswith("."):
            folders.append(entry.path)
        elif entry.kind == "link" and not entry.path.startswith("."):
            links[entry.path] = entry.link or ""
        elif layouts.is_saved_weights(entry):
            unnumbered.append(entry.path)
    steps = [replace(step, unfinished=True) if step.name in in_flight else step for step in steps]
    if not all(step.lone or step.bare for step in steps):
        unnumbered += [step.name for step in steps if step.lone]
        steps = [step for step in steps if not step.lone]
    doubt = None
    if pattern is None:
        by_path = {entry.path: entry for entry in entries}
        files = {step: beside_others.get(step) or (by_path[step.name],) for step in steps}
        doubt = doubt_about(files)
        if doubt is not None:
            unnumbered += [file.path for held in files.values() for file in held]
            steps = []
        elif not steps:
            doubt = doubt_without_steps(by_path[name] for name in unnumbered)
    steps = layouts.by_epochs(steps)
    return RootListing(
        _newest_first(steps),
        tuple(pointers),
        tuple(folders),
        links,
        tuple(unnumbered),
        known=known,
        is_step=is_step,
        doubt=doubt,
        pattern=pattern,
        folder_times={
            entry.path: entry.mtime_s
            for entry in entries
            if entry.kind == "dir" and entry.mtime_s is not None
        },
    )


def _newest_first(steps: Sequence[StepName]) -> tuple[StepName, ...]:
    usual = Counter(step.layout for step in steps)
    return tuple(
        sorted(
            steps,
            key=lambda s: (
                *(-s.number, s.unfinished, s.bare),
                *(-s.attempt, -usual[s.layout], s.name),
            ),
        )
    )


def neighbours_of(
    list_steps: Callable[[], Sequence[StepName]], number: int, of_root: RootSteps | None = None
) -> Neighbours:
    """The finished steps beside step `number`, among those that `list_steps` lists, newest first.

    `of_root` are the steps that inspections of several steps share. Cost: one call of `list_steps`,
    at the first use.
    """
    finished = cache(lambda: [step for step in list_steps() if not step.unfinished])
    return Neighbours(
        cache(lambda: tuple(one for one in finished() if one.number < number)),
        cache(lambda: tuple(one for one in reversed(finished()) if one.number > number)),
        RootSteps() if of_root is None else of_root,
    )


def check_listed_again(store: Store, listing: RootListing) -> None:
    """Raise `StorageUnavailable` if a second listing shows other steps than `listing`.

    For answers that something does not exist, which a stale listing must not cause. A local
    file system is not listed again. Cost: one listing.
    """
    if store.kind is StoreKind.LOCAL or list_root(store, listing.pattern).steps == listing.steps:
        return
    raise _contradicted(store)


def _contradicted(store: Store) -> StorageUnavailable:
    return StorageUnavailable(
        f"{store.url}: two listings in a row show different steps: another process writes or "
        "deletes files here, or a listing is stale; the content is unknown",
        next_command=command_line("scan", store.url),
    )


def duplicates(steps: Sequence[StepName]) -> Iterator[Finding]:
    """Yield a `step.duplicate` for every number that two complete folders of a root have.

    Folders of different attempts are ordered and are no duplicates.
    """
    names: dict[tuple[int, int], list[str]] = {}
    for step in steps:
        if not step.unfinished:
            names.setdefault((step.number, step.attempt), []).append(step.name)
    for (number, _), same in names.items():
        if len(same) > 1:
            yield Finding(
                "step.duplicate",
                ", ".join(same),
                f"{len(same)} folders have the step number {number}: {', '.join(same)}; "
                f"{same[0]} is inspected first",
                expected="one folder for each step",
                found=f"{len(same)} folders",
            )


def too_large_numbers(listing: RootListing) -> Iterator[Finding]:
    """Yield a `step.number` for names of steps with an impossible number."""
    names = [name for name in listing.unnumbered if layouts.has_too_large_a_number(name)]
    if names:
        yield Finding(
            "step.number",
            names[0],
            f"{len(names)} names have a step number that is too large, such as {names[0]}: they "
            "are never resumed from",
            expected=f"a step number up to {MAX_STEP}",
            found=names[0],
        )


MAX_FURTHER = 8
"""So many folders are listed to see whether they are checkpoints."""

_COUNTED = re.compile(
    r"(?:step|iter|iteration|checkpoint|ckpt)[-_.=]?0*(?P<step>[0-9]{1,15})(?![0-9]|-[0-9]{2}-)",
    re.IGNORECASE,
)
"""A number that a word calls that of a step, and no date."""


def check_further(store: Store, listing: RootListing, chosen: int) -> Iterator[Finding]:
    """Yield `root.further` for a checkpoint that is no step, and further by its name than `chosen`.

    A step that was renamed or packed has a name in which ckptctl finds no step, such as
    `gpt-step_200` beside `step_100`. None where a pattern states which are steps. Cost: a listing
    of each such folder, at most `MAX_FURTHER`.
    """
    if listing.pattern is not None:
        return
    counted = {name: [*_COUNTED.finditer(name)] for name in (*listing.unnumbered, *listing.folders)}
    numbers = {name: int(found[-1]["step"]) for name, found in counted.items() if found}
    further = [name for name in numbers if chosen < numbers[name] <= MAX_STEP]
    for name in sorted(further, key=numbers.__getitem__, reverse=True)[:MAX_FURTHER]:
        is_folder = name in listing.folders
        if is_folder and not is_checkpoint(store, name):
            continue
        pattern = f"{re.escape(name[: counted[name][-1].start('step')])}(?P<step>[0-9]+).*"
        yield Finding(
            "root.further",
            name,
            f"{name} looks like a checkpoint of step {numbers[name]}, and pick does not choose it: "
            f"step {chosen} may not be the newest one",
            expected="a name of a step, or --pattern",
            found=name,
            next_command=command_line("scan", store.url, "--pattern", pattern)
            if is_folder
            else "ckptctl explain root.further",
        )
        return


def check_reported(
    store: Store, listing: RootListing, chosen: StepName | None
) -> Iterator[Finding]:
    """Yield what a snapshot of Ray Train and the folders beside it contradict each other in.

    `root.further` for a folder that it names and that is missing, and for a checkpoint that was
    begun after `chosen` and is no step; `pointer.differs` for one that is missing and not further
    than `chosen`, or where no step is chosen. Cost: a listing of each such checkpoint.
    """
    there = {step.name for step in listing.steps}
    missing = next((step for step in reversed(listing.reported) if step.name not in there), None)
    if missing is not None:
        is_further = chosen is not None and missing.number > chosen.number
        yield Finding(
            "root.further" if is_further else "pointer.differs",
            ray_train.SNAPSHOT,
            f"{ray_train.SNAPSHOT} names {missing.name} (step {missing.number}), which does not "
            "exist: Ray refuses to resume from this folder",
            expected=missing.name,
            found=f"step {missing.number}",
            next_command=command_line("scan", store.url),
        )
    if chosen is None or not ray_train.is_named_by_time(chosen.name):
        return
    later = [n for n in listing.folders if ray_train.is_named_by_time(n) and n > chosen.name]
    for name in sorted(later, reverse=True)[:MAX_FURTHER]:
        if is_checkpoint(store, name):
            why = (
                f"{ray_train.SNAPSHOT} does not name it"
                if listing.reported
                else "it counts no step"
            )
            yield Finding(
                "root.further",
                name,
                f"{name} was begun after step {chosen.number}, and {why}: its save may have been "
                "interrupted, and pick does not choose it",
                expected=f"step {chosen.number} as the last checkpoint",
                found=name,
                next_command=command_line("verify", join_url(store.url, name)),
            )
            return


def check_counted_further(
    store: Store, listing: RootListing, chosen: OpenStep, trained_steps: int | None
) -> Iterator[Finding]:
    """Yield `root.further` for a save without a step number that counts more than `chosen` does.

    Trainers write the newest save as `last.ckpt` or `last.pth.tar` too, and may keep it alone.
    `trained_steps` are those that the train state of `chosen` counts. Cost: none where every save
    has a number; else a listing of the root, and short reads of `MAX_FURTHER` files at most; a
    listing and the train state of `MAX_FURTHER` folders at most.
    """
    if listing.pattern is not None or listing.doubt is not None:
        return
    for name in [name for name in listing.folders if _CALLED_NEWEST.search(name)][:MAX_FURTHER]:
        with suppress(StorageError):
            steps = count_of(OpenStep(store, name)) if is_checkpoint(store, name) else None
            if steps is not None and trained_steps is not None and steps > trained_steps:
                yield _counts_further(name, f"{steps:,} steps", trained_steps)
                return
    if not listing.unnumbered:
        return
    files = {file.path: file for file in store.list_dir("") if file.kind == "file" and file.size}
    own: Mapping[str, int | float] = {}
    if chosen.is_file:
        own = counts_inside(store, chosen.name, chosen.files[0].size)
    for name in [name for name in listing.unnumbered if name in files][:MAX_FURTHER]:
        with suppress(StorageError):
            more = _counts_more(store, files[name], own, trained_steps)
            if more is not None:
                yield _counts_further(name, *more)
                return


_CALLED_NEWEST = re.compile(r"last|latest|newest|recent|current|final|resume", re.IGNORECASE)


def _counts_further(name: str, more: str, chosen: int | float) -> Finding:
    return explained(
        "root.further",
        name,
        f"{name} counts {more}, and the chosen step {chosen:,}: it is further, and pick does not "
        "choose it, because its name has no number",
        expected="a name of a step",
        found=name,
    )


def _counts_more(
    store: Store, file: FileInfo, own: Mapping[str, int | float], trained_steps: int | None
) -> tuple[str, int | float] | None:
    """What a file counts that is more than a step counts, and how much that counts; else None.

    Counts at the top are compared by their keys; a file that counts less of anything is older.
    """
    counts = counts_inside(store, file.path, file.size)
    shared = sorted(key for key in counts.keys() & own.keys() if "." not in key)
    if shared:
        more = [key for key in shared if counts[key] > own[key]]
        if not more or any(counts[key] < own[key] for key in shared):
            return None
        return f"{more[0]} {counts[more[0]]:,}", own[more[0]]
    steps = steps_inside(store, file.path, file.size)
    if own or trained_steps is None or not steps or steps[-1] <= trained_steps:
        return None
    return f"{steps[-1]:,} steps", trained_steps


_MIN_STEPS = 2
"""So many steps that lack the same ranks are a pattern."""

_LACKING = frozenset({"shard.missing", "file.missing", "metadata.missing"})


def not_shared(inspections: Sequence[Inspection]) -> Finding | None:
    """The finding that storage is not shared, from steps that cannot be used, newest first.

    Where the root is on a disk of each node, or a mount is missing on one, each node sees the files
    of its own ranks. Every step then looks like an interrupted save or a damaged one, and all of
    them lack the same ranks; on a node without rank 0 they have no metadata either. None unless
    `_MIN_STEPS` lack the files of the same ranks, and none lacks those of others.
    """
    seen = []
    for inspection in inspections:
        faults = inspection.report.with_severity(Severity.FAULT)
        lacking, present = _ranks_of(inspection)
        if lacking and any(fault.code in _LACKING for fault in faults):
            seen.append((inspection.report.number, lacking, present))
    kinds = {(lacking, present) for _, lacking, present in seen}
    if len(seen) < _MIN_STEPS or len(kinds) != 1:
        return None
    ((lacking, present),) = kinds
    numbers = [number for number, _, _ in seen if number is not None]
    return explained(
        "root.not-shared",
        "",
        f"{counted(len(numbers), 'step')} ({some_of(numbers)}) lack the files of the same "
        f"{verb(len(lacking), 'rank', 'ranks')} ({some_of(sorted(lacking))}), and have those of "
        f"{some_of(sorted(present))}: the root may not be shared, and the other files lie on other "
        "nodes",
        expected="the files of all ranks on each node",
        found=f"those of {counted(len(present), 'rank')}",
    )


def _ranks_of(inspection: Inspection) -> tuple[frozenset[int], frozenset[int]]:
    """The ranks of which files are missing, and those of which files are there."""
    present = {rank for _, ranks in inspection.report.ranks for rank in ranks}
    named: set[int] = set()
    for part in inspection.parts:
        names = part.ranges.file_names if part.metadata else ()
        named.update(rank for name in names if (rank := layouts.shard_rank(name)) is not None)
        named.update(range(max((one.n_ranks or 0 for one in part.part.grids), default=0)))
    # Without metadata nothing states the number of ranks, but the first is always 0.
    named.update(range(min(present, default=0)))
    return frozenset(named - present), frozenset(present)


def is_checkpoint(store: Store, folder: str, pattern: re.Pattern[str] | None = None) -> bool:
    """Whether a folder is a step by its content, or holds saved weights. Cost: one listing."""
    with suppress(StorageError):
        found = read_listing(names_in(store, folder), pattern)
        return found.is_step or bool(found.unnumbered)
    return False


def names_in(store: Store, folder: str) -> list[FileInfo]:
    """The entries of a folder below a root, by their names; none where it is gone."""
    entries = list_if_there(store, folder)
    return [entry.at(entry.path.rsplit("/", 1)[-1]) for entry in entries]


def pointer_numbers(store: Store, listing: RootListing) -> Mapping[str, int]:
    """The step numbers that the pointers of a root name, by the path of the pointer.

    One that cannot be read or names no step is left out. Cost: one read of each pointer that
    is not a link.
    """
    contents = {pointer.path: _content(store, pointer) for pointer in listing.pointers}
    return _numbers_in(contents, listing)


def check_pointers(
    named: Mapping[str, int], listing: RootListing, chosen: int | None
) -> Iterator[Finding]:
    """Yield a `pointer.differs` for each pointer that does not name `chosen`.

    A pointer is a hint: no decision depends on it. `named` is what `pointer_numbers` returns.
    """
    numbers = [step.number for step in listing.steps]
    for path, number in named.items():
        if number == chosen:
            continue
        there = number in numbers
        what = "" if there else ", which does not exist"
        better = "none is taken" if chosen is None else f"step {chosen} is the newest usable one"
        yield Finding(
            "pointer.differs",
            path,
            f"{path} names step {number}{what}; {better}",
            expected="no usable step" if chosen is None else f"step {chosen}",
            found=f"step {number}",
        )


def pointed_steps(store: Store, listing: RootListing) -> Mapping[int, str]:
    """The numbers of the steps that pointers and links of a root name, each with that name.

    Cost: one read of each pointer that is not a link.
    """
    by_links = _numbers_in(listing.links, listing)
    by_pointers = pointer_numbers(store, listing)
    return {number: path for path, number in (*by_links.items(), *by_pointers.items())}


def _numbers_in(contents: Mapping[str, str | None], listing: RootListing) -> Mapping[str, int]:
    names = {step.name: step.number for step in listing.steps}
    numbers = {
        path: layouts.pointed_step(content, names, listing.pattern)
        for path, content in contents.items()
        if content
    }
    return {path: number for path, number in numbers.items() if number is not None}


def _content(store: Store, pointer: FileInfo) -> str | None:
    if pointer.link is not None:
        return pointer.link
    if pointer.kind != "file" or pointer.size > MAX_POINTER_BYTES:
        return None
    try:
        return store.read(pointer.path, limit=MAX_POINTER_BYTES).decode("utf-8", "replace")
    except StorageError:
        return None


ASIDE_FOLDER = f"{OWN_FOLDER}/aside"
"""The folder of steps that a later save of the same number replaced."""

_ASIDE = re.compile(r"(?P<name>.+)\.[0-9]{6,10}\.[0-9a-f]{4}")


def moved_aside(store: Store) -> tuple[StepName, ...]:
    """The steps in `.ckptctl/aside`, where a file system has any. Cost: one listing."""
    if store.folders is None:
        return ()
    found = []
    for entry in list_if_there(store, ASIDE_FOLDER):
        match = _ASIDE.fullmatch(base_name(entry.path))
        named = layouts.step_name(match["name"]) if match and entry.kind == "dir" else None
        if named is not None:
            found.append(replace(named, name=entry.path))
    return tuple(found)

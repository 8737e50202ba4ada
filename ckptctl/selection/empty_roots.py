"""Decide whether roots without a usable step are those of a new run.

`without_steps` is the one function that decides that a run is new. A job that starts fresh over a
good run loses all of it, so the answer needs evidence for it: the root and the folders below
it hold nothing but files that are known not to be saves, its own record proves that no step
was ever usable, and no scheduler or supervisor has started the job before. A file that is not
known, a link that was not followed and a folder that was not listed are no such evidence.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial

from ckptctl.errors import StorageUnavailable, UsageError
from ckptctl.findings import Finding, Report, Verdict
from ckptctl.formats.frameworks import layouts, ray_train
from ckptctl.formats.frameworks.file_names import is_known_as_no_save, is_named_as_weights
from ckptctl.formats.frameworks.layouts import NO_RUN_BELOW, OWN_FOLDER
from ckptctl.formatting import command_line, counted, some_of, verb
from ckptctl.inspection.open_step import list_scattered
from ckptctl.model import FileInfo
from ckptctl.selection.choosing import NoStep, NoStepReason
from ckptctl.selection.history import History, read_history
from ckptctl.selection.roots import (
    RootListing,
    check_listed_again,
    is_checkpoint,
    names_in,
    pointer_numbers,
    read_listing,
)
from ckptctl.selection.targets import OpenRoot, check_is_folder, check_root_there, parse_target
from ckptctl.storage.contract import Store, StoreKind, list_if_there
from ckptctl.storage.in_flight import in_flight
from ckptctl.storage.opening import base_name, join_url

MAX_FOLDERS = 2_000
"""So many folders below a root are listed; a root with more is no new run without a record."""
MAX_FILES = 200_000
"""So many entries of them are compared."""
MAX_FOLDERS_TRIED = 64
MAX_NAMED = 8


def without_steps(
    opened_roots: Sequence[OpenRoot],
    interrupted: Sequence[Report] = (),
    pointers: Sequence[Finding] = (),
    ignore: Collection[str] = (),
) -> NoStep:
    """Decide what roots mean that contain no step, or only `interrupted` saves.

    `pointers` are the findings about pointers that name a step, which is not usable then.
    `ignore` are the patterns of files and folders that a person knows not to be saves.

    Raises `UsageError` if a root is a wrong path or contains a file that is not known, and
    `StorageUnavailable` if the storage is probably not mounted or does not answer, or if a
    restarted job finds no trace of its earlier attempt.

    Cost: a second listing of each root, two on an object store or a network, one listing per
    folder below it, at most `MAX_FOLDERS`, and the reads of `read_history`. No file is read.
    """
    failed = next((root.error for root in opened_roots if root.error is not None), None)
    if failed is not None:  # it may hold the only step
        raise failed
    opened_roots = [root for root in opened_roots if root.listing.exists or not root.optional]
    urls = ", ".join(root.store.url for root in opened_roots)
    histories = [
        read_history(one.store) if one.listing.known else History() for one in opened_roots
    ]
    for root, history in zip(opened_roots, histories, strict=True):
        try:
            check_empty(root.store, root.listing, is_root=history.used, ignore=ignore)
        except UsageError as error:
            if not interrupted:
                raise
            return NoStep(NoStepReason.UNKNOWN_FILES, error.message, error.next_command)
        if history.held is not None or (history.used and history.doubt is not None):
            reason = NoStepReason.RECORD_DOUBT if history.held is None else NoStepReason.LOST_STEPS
            message = _lost(root.store.url, history, interrupted)
            return NoStep(reason, message)
    counter = restart_counter()
    unused = [
        root.store.url
        for root, history in zip(opened_roots, histories, strict=True)
        if not (root.optional or history.used)
    ]
    if counter is not None and unused:
        raise StorageUnavailable(
            f"{', '.join(unused)}: there is no usable step, but {counter} is "
            f"{os.environ[counter]}: this is a restarted job whose earlier attempt left nothing "
            "here; its storage is probably not mounted",
            next_command=command_line("scan", unused[0]),
        )
    if pointers:
        first = pointers[0]
        return NoStep(
            NoStepReason.LOST_STEPS,
            f"no {('usable ' if interrupted else '')}step is left in {urls}, but "
            f"{first.where} names {first.found}: the saved steps have disappeared; do not start "
            "fresh until the cause is known",
        )
    if interrupted:
        histories = [
            h for h, root in zip(histories, opened_roots, strict=True) if root.listing.steps
        ]
        return _after_interrupted(urls, histories, interrupted, counter)
    missing = [root.store for root in opened_roots if not root.listing.exists]
    if missing:
        names = tuple(store.url for store in missing)
        absent = f"{', '.join(names)} {verb(len(missing), 'does', 'do')} not exist"
        message = f"{absent}: check the path"
        return NoStep(NoStepReason.NO_ROOT, message, missing=names, created=f"{absent}: created")
    holds = verb(len(opened_roots), "holds", "hold")
    message = f"{urls} {holds} no step at all: this is a fresh run"
    return NoStep(NoStepReason.NEW_RUN, message)


def restart_counter() -> str | None:
    """The variable that counts earlier starts of this job; None if none is above 0."""
    from ckptctl.distributed.launcher import RESTART_COUNTERS

    counts = ((name, os.environ.get(name, "")) for name in RESTART_COUNTERS)
    return next((name for name, count in counts if count.isdecimal() and int(count) > 0), None)


def _lost(url: str, history: History, interrupted: Sequence[Report]) -> str:
    there = f"nothing but {_saves(interrupted)}" if interrupted else "no step"
    if history.held is not None:
        return (
            f"{url} holds {there}, but {history.held}: the saved steps have disappeared; do "
            "not start fresh before you know why"
        )
    return (
        f"{url} holds {there}, and its record does not prove that no step was ever usable "
        f"there: {history.doubt}; do not start fresh before you know why"
    )


def _after_interrupted(
    urls: str, histories: Sequence[History], interrupted: Sequence[Report], counter: str | None
) -> NoStep:
    saves = _saves(interrupted)
    if not all(history.never_held for history in histories):
        return NoStep(
            NoStepReason.RECORD_DOUBT,
            f"{urls}: {saves}, and no record proves that no step was ever usable: do not start "
            "fresh over them",
        )
    # A counter shows that the attempt which was saving has ended.
    if counter is None and any(one.verdict is Verdict.IN_PROGRESS for one in interrupted):
        return NoStep(
            NoStepReason.SAVE_RUNNING,
            f"{urls}: the first save of the run is still being written, or was interrupted a "
            f"moment ago ({saves}); ask again, or pass a shorter --grace",
        )
    return NoStep(
        NoStepReason.NEW_RUN,
        f"{urls}: {saves}, and by its record no step of this run was ever usable: this is a "
        "fresh run",
    )


def _saves(interrupted: Sequence[Report]) -> str:
    many = verb(len(interrupted), "", "s")
    return f"the unfinished save{many} of step{many} {some_of([one.number for one in interrupted])}"


def check_has_steps(store: Store, listing: RootListing) -> None:
    """Raise if the path given to a command that needs steps is wrong.

    An existing root without steps is wrong too (see `check_empty`), unless ckptctl has used it.
    """
    check_root_there(store, listing)
    if not (listing.steps or listing.known):
        check_empty(store, listing)


def check_empty(
    store: Store, listing: RootListing, *, is_root: bool = False, ignore: Collection[str] = ()
) -> None:
    """Raise if the content of a root is no evidence that it belongs to a new run.

    `UsageError` if it names or is a step, a file, or a folder above a root, and if it
    contains files that are not known to be none of a save; `StorageUnavailable` if it is a
    broken link, if a second listing shows other steps, and if a folder in it cannot be listed.
    `is_root`: ckptctl has used it as a root, so it may contain more folders than are
    inspected. `ignore`: see `without_steps`.
    """
    check_listed_again(store, listing)
    holds_other = listing.folders or listing.unnumbered or listing.pointers or listing.links
    if not (listing.exists and holds_other):
        # An address without content may be meant as something else.
        target = parse_target(store.url) if "@" in store.url else None
        if target is not None and target.which is not None:
            raise UsageError(
                f"{store.url} names a step, but a root is required: the folder that holds the "
                "steps",
                next_command=command_line("scan", target.root),
            )
        if not listing.exists:
            check_is_folder(store)
    if is_step_itself(store, listing):
        raise UsageError(
            f"{store.url} is a step itself, not a root that holds steps",
            next_command=command_line("verify", store.url),
        )
    if not listing.exists:
        return
    content = _content_of(store, listing, ignore)
    of_ranks = [path for path in content.roots if _FOLDER_OF_RANK.fullmatch(base_name(f"/{path}"))]
    if of_ranks:
        raise UsageError(
            f"{store.url} holds no steps itself, but {some_of(of_ranks)} in it, which "
            f"{verb(len(of_ranks), 'is the folder of a rank', 'are the folders of ranks')}: "
            "a step is in several folders, in a form that ckptctl does not read",
            next_command="ckptctl explain format.unsupported",
        )
    if content.roots:
        raise UsageError(
            f"{store.url} holds no steps itself, but {some_of(content.roots)} in it "
            f"{verb(len(content.roots), 'does', 'do')}",
            next_command=command_line("scan", join_url(store.url, content.roots[0])),
        )
    if content.unknown:
        raise _unknown(store, listing, content.unknown)
    if content.n_not_listed and not is_root:
        raise UsageError(
            f"{store.url} holds no steps and more than {MAX_FOLDERS:,} folders or {MAX_FILES:,} "
            f"files: {content.n_not_listed:,} were not listed, and one of them may hold a run. "
            "Give the run its own folder, or leave folders without saves out (--ignore PATTERN)",
            next_command=command_line("scan", join_url(store.url, "FOLDER")),
        )


def _unknown(store: Store, listing: RootListing, unknown: Sequence[str]) -> UsageError:
    """The error for a root without steps that holds files which may be saves."""
    why = "no name gives a step number: show by --pattern where it is, or give the step itself"
    pattern = ""
    if listing.doubt is not None and listing.doubt.why:
        why, pattern = listing.doubt.why, listing.doubt.pattern
    elif any(_is_step(base_name(f"/{name}")) for name in unknown):
        why = "a step in one file has a name with its number that ends in .pt, .ckpt or the like"
    return UsageError(
        f"{store.url} holds no steps, but {counted(len(unknown), 'entry', 'entries')} of unknown "
        f"content ({some_of(unknown, MAX_NAMED)}), which may be saves; {why}. What is no save is "
        "accepted by --ignore PATTERN",
        next_command=command_line("scan", store.url, "--pattern", pattern)
        if pattern
        else command_line("verify", join_url(store.url, unknown[0])),
    )


_FOLDER_OF_RANK = re.compile(r"(?:[mt]p_)?rank_?[0-9]+(?:_.*)?")
"""Folders of NeMo 1, `mp_rank_00`, `tp_rank_00_pp_rank_000`, and of loops of one's own."""


def check_unnumbered(store: Store, listing: RootListing) -> Iterator[Finding]:
    """Yield `root.unnumbered` for checkpoints without a step number, which `pick` never chooses.

    Cost: one listing per folder that is not a step, at most `MAX_FOLDERS_TRIED`.
    """
    folders = (
        folder for folder in listing.folders[:MAX_FOLDERS_TRIED] if not layouts.is_beside(folder)
    )
    found = (folder for folder in folders if is_checkpoint(store, folder, listing.pattern))
    names = [*listing.unnumbered, *found]
    if not names:
        return
    seem = verb(len(names), "looks like a checkpoint", "look like checkpoints")
    numbered = any(layouts.step_name(name) is not None for name in listing.unnumbered)
    which = "beside the steps" if numbered else "without a step number"
    yield Finding(
        "root.unnumbered",
        ", ".join(names[:MAX_NAMED]),
        f"{some_of(names)} {seem} {which}: not listed, and never chosen by pick",
        expected="a step number in the name, or --pattern",
        found=some_of(names),
        next_command=command_line("verify", join_url(store.url, names[0])),
    )


def is_step_itself(store: Store, listing: RootListing) -> bool:
    """Whether the address of a root without steps is that of a step, by its files or its name."""
    holds_other = listing.folders or listing.unnumbered or listing.pointers or listing.links
    is_named = listing.exists and bool(holds_other) and _is_step(base_name(store.url))
    return listing.is_step or is_named


def _is_step(name: str) -> bool:
    named = layouts.step_name(name)
    return named is not None and not named.bare


@dataclass(slots=True)
class _RootContent:
    """What lies in a root that has no usable step, and in the folders below it.

    `roots` are folders that hold steps, `unknown` the entries that may be saves: files, links
    that were not followed, and folders that are a step without a number. `n_not_listed` counts
    the folders and files that were left out.
    """

    roots: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    n_not_listed: int = 0


def _content_of(store: Store, listing: RootListing, ignore: Collection[str]) -> _RootContent:
    """List a root and all folders below it, from the nearest level to one that holds steps."""
    content, weights = _RootContent(), list[str]()
    ignore = (*ignore, *pointer_numbers(store, listing))  # what they name is compared elsewhere
    # The files of steps that have no folder of their own.
    scattered = {step.name for step in listing.steps if layouts.is_scattered(step.name)}
    files_of = list_scattered(store, list_if_there(store, "")) if scattered else {}
    saved = {file.path for step in files_of if step.name in scattered for file in files_of[step]}
    n_folders, n_files = -1, 0  # the root itself is listed first
    level = [""]
    while level and not content.roots:
        room = MAX_FOLDERS - n_folders
        content.n_not_listed += len(level[room:])
        n_folders += len(level[:room])
        below: list[str] = []
        for folder, entries in _listed(store, level[:room]):
            n_files += len(entries)
            inside = listing if folder == "" else read_listing(entries, listing.pattern)
            # The steps of the root itself are inspected one by one.
            steps = {step.name for step in inside.steps if not step.bare}
            if n_files > MAX_FILES:
                content.n_not_listed += len(entries)
            elif folder and (steps or any(map(ray_train.is_named_by_time, inside.folders))):
                content.roots.append(folder)
            elif folder and inside.is_step:
                content.unknown.append(folder)
                weights.append(folder)
            else:
                for entry in entries:
                    path = f"{folder}/{entry.path}" if folder else entry.path
                    is_compared = entry.path in steps or path in saved or path == OWN_FOLDER
                    if is_compared or _is_ignored(path, ignore):
                        continue
                    if entry.kind == "dir":
                        below += [] if entry.path in _NOT_LISTED else [path]
                    elif not _is_known(store, path, entry):
                        content.unknown.append(path)
                        if is_named_as_weights(entry.path) or layouts.is_of_a_step(entry.path):
                            weights.append(path)
        level = below
    # A folder of digits that holds weights is a step.
    above = (re.match(r"(.+?)/[0-9]+(?:/|$)", path) for path in weights)
    content.roots = content.roots or list(dict.fromkeys(match[1] for match in above if match))
    return content


def _is_known(store: Store, path: str, entry: FileInfo) -> bool:
    """Whether a file or a link is known to be no save.

    A link to something below the root is compared under its own name; no other is followed.
    """
    if is_known_as_no_save(entry) or entry.kind not in ("file", "link"):
        return True
    if entry.kind != "link" or store.folders is None:
        return False
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), entry.link or ".."))
    is_below = not target.startswith(("/", "..")) and target != "."
    return is_below and os.path.exists(store.folders.path_of(target))


_NOT_LISTED = NO_RUN_BELOW | {".git", ".hg", ".svn", "__pycache__", ".snapshot"}
"""Folders of version control, Python and the file system, which hold no saves."""


def _is_ignored(path: str, ignore: Collection[str]) -> bool:
    name = base_name(f"/{path}")
    return any(fnmatchcase(path, pattern) or fnmatchcase(name, pattern) for pattern in ignore)


def _listed(store: Store, folders: Sequence[str]) -> Iterable[tuple[str, list[FileInfo]]]:
    """The entries of each folder, without the paths of their folders."""
    listed = partial(names_in, store)
    if store.kind is StoreKind.LOCAL:
        return ((path, listed(path)) for path in folders)
    return in_flight(listed, folders)

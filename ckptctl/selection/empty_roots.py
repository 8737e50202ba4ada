"""Decide whether roots without a usable step are those of a new run.

`decide_beginning` is the one function that returns "fresh". A job that starts fresh over a
good run loses all of it, so the answer needs evidence: what lies in each root and in the
folders below it, what the root's own record states about earlier steps, whether the
scheduler or a supervisor has started the job before, and whether the root exists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from ckptctl.data_classes import dataclass, replace
from ckptctl.errors import StorageError, StorageUnavailable, UsageError
from ckptctl.findings import EXIT_FRESH, EXIT_NONE_USABLE, Finding, Report, Verdict
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.layouts import (
    NO_RUN_BELOW,
    STEP_SUFFIXES,
    is_beside,
    saved_weights,
    step_name,
)
from ckptctl.formatting import command_line, some_of, verb
from ckptctl.model import FileInfo
from ckptctl.selection.doubtful_names import Doubt
from ckptctl.selection.history import History, read_history
from ckptctl.selection.results import Answer
from ckptctl.selection.roots import RootListing, check_listed_again, read_listing
from ckptctl.selection.targets import OpenRoot, check_is_folder, check_root_there, parse_target
from ckptctl.storage.contract import Store, StoreKind, list_if_there
from ckptctl.storage.in_flight import in_flight
from ckptctl.storage.opening import base_name, join_url, parent_url

MAX_FOLDERS = 2_000
MAX_FOLDERS_TRIED = 64
MAX_NAMED = 8
_MAX_DEPTH = 3
_MAX_NEIGHBOURS = 3

OpenStore = Callable[[str], Store]


@dataclass(frozen=True, slots=True)
class Beginning:
    """What roots without a usable step mean, with the reason in `message`.

    `answer` is `FRESH`, `NONE_USABLE` (11: a step was usable once, or the record cannot
    prove otherwise) or `UNKNOWN` (75: the first save may still be running). `missing` are
    the roots that do not exist, and `similar` addresses beside them with similar names;
    `created` is the message where they are created.
    """

    answer: Answer
    message: str
    missing: tuple[str, ...] = ()
    similar: tuple[str, ...] = ()
    created: str = ""

    @property
    def exit_code(self) -> int:
        """The exit code of the answer."""
        codes = {Answer.FRESH: EXIT_FRESH, Answer.UNKNOWN: StorageError.exit_code}
        return codes.get(self.answer, EXIT_NONE_USABLE)


def decide_beginning(
    opened_roots: Sequence[OpenRoot],
    *,
    interrupted: Sequence[Report] = (),
    pointers: Sequence[Finding] = (),
    open_other: OpenStore | None = None,
) -> Beginning:
    """Decide what roots mean that contain no step, or only `interrupted` saves.

    `pointers` are the findings about pointers that name a step, which is not usable then.
    `open_other` opens the parent of a missing root, to list similar names, and folders that
    links in a root point to.

    Raises `UsageError` if a root is a wrong path or contains saved weights without a step
    number, and `StorageUnavailable` if the storage is probably not mounted or does not
    answer, or if a restarted job finds no trace of its earlier attempt.

    Cost: a second listing of a root on an object store or a network, one listing per folder
    down to three levels, at most `MAX_FOLDERS`, and the reads of `find_saves` and
    `read_history`.
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
            check_empty(root.store, root.listing, open_other=open_other, is_root=history.used)
        except UsageError as error:
            if not interrupted:
                raise
            return Beginning(Answer.NONE_USABLE, error.message)
        if history.held is not None or (history.used and history.doubt is not None):
            return Beginning(Answer.NONE_USABLE, _lost(root.store.url, history, interrupted))
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
        return Beginning(
            Answer.NONE_USABLE,
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
        return _not_there(missing, open_other)
    holds = verb(len(opened_roots), "holds", "hold")
    return Beginning(Answer.FRESH, f"{urls} {holds} no step at all: this is a fresh run")


def _not_there(missing: Sequence[Store], open_other: OpenStore | None) -> Beginning:
    """What roots mean that do not exist: a new run, or a wrong path."""
    similar = [name for store in missing for name in _neighbours(store, open_other)]
    beside = f" (beside it: {some_of([base_name(url) for url in similar])})" if similar else ""
    names = tuple(store.url for store in missing)
    absent = f"{', '.join(names)} {verb(len(missing), 'does', 'do')} not exist"
    return Beginning(
        Answer.FRESH,
        f"{absent}: check the path{beside}",
        names,
        tuple(similar),
        created=f"{absent}: created{beside}",
    )


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
) -> Beginning:
    saves = _saves(interrupted)
    if not all(history.never_held for history in histories):
        return Beginning(
            Answer.NONE_USABLE,
            f"{urls}: {saves}, and no record proves that no step was ever usable: do not start "
            "fresh over them",
        )
    # A counter shows that the attempt which was saving has ended.
    if counter is None and any(one.verdict is Verdict.IN_PROGRESS for one in interrupted):
        return Beginning(
            Answer.UNKNOWN,
            f"{urls}: the first save of the run is still being written, or was interrupted a "
            f"moment ago ({saves}); ask again, or pass a shorter --grace",
        )
    return Beginning(
        Answer.FRESH,
        f"{urls}: {saves}, and by its record no step of this run was ever usable: this is a "
        "fresh run",
    )


def _saves(interrupted: Sequence[Report]) -> str:
    many = verb(len(interrupted), "", "s")
    return f"the unfinished save{many} of step{many} {some_of([one.number for one in interrupted])}"


def _neighbours(store: Store, open_other: OpenStore | None) -> list[str]:
    """The folders beside a missing root whose names are similar to its own."""
    name, parent = base_name(store.url), parent_url(store.url)
    if open_other is None or not name:
        return []
    try:
        with open_other(parent) as above:
            entries = above.list_dir("")
    except (StorageError, UsageError):
        return []  # a help, and no condition: the folder above may be closed to us
    names = [one.path for one in entries if one.kind != "file" and one.path != name]
    longer = [other for other in names if other.startswith(name)]
    import difflib

    alike = [
        *longer,
        *(n for n in difflib.get_close_matches(name, names, n=_MAX_NEIGHBOURS) if n not in longer),
    ]
    return [join_url(parent, other) for other in alike]


def check_has_steps(store: Store, listing: RootListing) -> None:
    """Raise if the path given to a command that needs steps is wrong.

    An existing root without steps is wrong too: see `check_empty`.
    """
    check_root_there(store, listing)
    if not listing.steps:
        check_empty(store, listing)


def check_empty(
    store: Store,
    listing: RootListing,
    *,
    open_other: OpenStore | None = None,
    is_root: bool = False,
) -> None:
    """Raise if the content of a root shows that it does not belong to a new run.

    `UsageError` if it names or is a step, a file, or a folder above a root, and if it
    contains saved weights without a step number, by their names or by their first bytes;
    `StorageUnavailable` if it is a broken link, if a second listing shows other steps, and
    if a folder in it cannot be listed.
    `is_root`: ckptctl has used it as a root, so it may contain more folders than are
    inspected.
    """
    check_listed_again(store, listing)
    holds_other = listing.folders or listing.unnumbered or listing.pointers or listing.links
    if not (listing.exists and holds_other):
        _check_path(store, exists=listing.exists)
    elif _is_step(base_name(store.url)):
        listing = replace(listing, is_step=True)
    if listing.is_step:
        raise UsageError(
            f"{store.url} is a step itself, not a root that holds steps",
            next_command=command_line("verify", store.url),
        )
    below, n_left_out = _listed_below(store, listing, open_other)
    inside = [(path, one) for path, one in below if _holds(one)]
    roots = [path for path, one in inside if any(not step.bare for step in one.steps)]
    # A folder of digits that holds weights is a step.
    above = (re.match(r"(.+?)/[0-9]+(?:/|$)", path) for path, _ in inside)
    roots = roots or list(dict.fromkeys(match[1] for match in above if match))
    of_ranks = [path for path in roots if _FOLDER_OF_RANK.fullmatch(base_name(f"/{path}"))]
    if of_ranks:
        raise UsageError(
            f"{store.url} holds no steps itself, but {some_of(of_ranks)} in it, which "
            f"{verb(len(of_ranks), 'is the folder of a rank', 'are the folders of ranks')}: "
            "a step is in several folders, in a form that ckptctl does not read",
            next_command="ckptctl explain format.unsupported",
        )
    if roots:
        raise UsageError(
            f"{store.url} holds no steps itself, but {some_of(roots)} in it "
            f"{verb(len(roots), 'does', 'do')}",
            next_command=command_line("scan", join_url(store.url, roots[0])),
        )
    weights = list(listing.unnumbered)
    for path, one in inside:
        is_step = one.is_step or _is_one_save(one.unnumbered)
        weights += [path] if is_step else [f"{path}/{name}" for name in one.unnumbered]
    kinds: Mapping[str, str] = {}
    n_not_read = 0
    unknown = [*_of_any_name(listing, below)]
    if not weights and (unknown or listing.links):
        from ckptctl.selection.unknown_files import find_saves

        kinds, n_not_read = find_saves(store, unknown, listing.links, open_other)
        weights = [*kinds]
    if (n_left_out or n_not_read) and not weights and not is_root:
        too_many = (
            f"more than {MAX_FOLDERS:,} folders, of which {n_left_out:,} were not listed: one of "
            "them may hold a run"
            if n_left_out
            else "too many files whose names do not tell what they are: the "
            f"{n_not_read:,} smallest were not read, and one of them may be a save"
        )
        raise UsageError(
            f"{store.url} holds no steps and {too_many}. Give the run its own folder",
            next_command=command_line("scan", join_url(store.url, "FOLDER")),
        )
    if weights:
        weights.sort(key=_not_of_a_resume)
        seem = verb(len(weights), "looks like a checkpoint", "look like checkpoints")
        name = base_name(f"/{weights[0]}")
        kind = kinds.get(weights[0]) or saved_weights(FileInfo(name, 0))
        doubt = listing.doubt or Doubt({})
        if doubt.why:
            why = f"but {doubt.why}"
        elif _is_step(name) or "torch.save" in kinds.get(weights[0], ""):
            why = "but a step in one file has a name with its number that ends in "
            why += f"{', '.join(STEP_SUFFIXES)}; rename it"
        elif "." in name and not any(one.endswith(STEP_SUFFIXES) for one in weights):
            why = (
                "but not in a form that ckptctl reads; unpack it, or convert it with what wrote it"
            )
        elif not any(re.search("[0-9]", base_name(f"/{one}")) for one in weights):
            why = "but no name in it gives a step number"
        else:
            why = "but no name in it gives a step number; use --pattern to show where the number is"
        raise UsageError(
            f"{store.url} is not empty: {some_of(weights)} {seem}{f' ({kind})' if kind else ''}, "
            f"{why}, or give the step itself",
            next_command=command_line("scan", store.url, "--pattern", doubt.pattern)
            if doubt.pattern
            else command_line("verify", join_url(store.url, weights[0])),
        )


_FOLDER_OF_RANK = re.compile(r"(?:[mt]p_)?rank_?[0-9]+(?:_.*)?")
"""Folders of NeMo 1, `mp_rank_00`, `tp_rank_00_pp_rank_000`, and of loops of one's own."""

_SORTED = (
    r"(?:last|latest|checkpoint|ckpt)(?:\.[a-z]+)*",
    r"(?:.*[-_.])?(?:last|latest)(?![a-z0-9]).*",
    r"(?!.*best)(?:checkpoint|ckpt)(?![a-z0-9]).*",
    r"(?!.*best).*(?<!\.py)",
)


def _not_of_a_resume(name: str) -> int:
    """Sorts files that a job replaces with each save, and resumes from, before weights alone."""
    file = base_name(f"/{name}")
    matching = (at for at, form in enumerate(_SORTED) if re.fullmatch(form, file))
    return next(matching, len(_SORTED))


def _is_one_save(names: Collection[str]) -> bool:
    """Whether files of one folder are one save: the optimizer is in a file of its own."""
    kinds = (kind_of_file("", name) for name in names)
    return len(names) > 1 and any(kind and kind.names == ("optimizer",) for kind in kinds)


def check_unnumbered(store: Store, listing: RootListing) -> Iterator[Finding]:
    """Yield `root.unnumbered` for checkpoints without a step number, which `pick` never chooses.

    Cost: one listing per folder that is not a step, at most `MAX_FOLDERS_TRIED`.
    """
    inside = _listed_folders(store, listing)
    folders = [name for name, one in inside if one.is_step or one.unnumbered]
    names = [*listing.unnumbered, *(name for name in folders if not is_beside(name))]
    if not names:
        return
    seem = verb(len(names), "looks like a checkpoint", "look like checkpoints")
    numbered = any(step_name(name) is not None for name in listing.unnumbered)
    which = "beside the steps" if numbered else "without a step number"
    yield Finding(
        "root.unnumbered",
        ", ".join(names[:MAX_NAMED]),
        f"{some_of(names)} {seem} {which}: not listed, and never chosen by pick",
        expected="a step number in the name, or --pattern",
        found=some_of(names),
        next_command=command_line("verify", join_url(store.url, names[0])),
    )


def _check_path(store: Store, *, exists: bool) -> None:
    """Raise if an address without content was meant as something else."""
    target = parse_target(store.url) if "@" in store.url else None
    if target is not None and target.which is not None:
        raise UsageError(
            f"{store.url} names a step, but a root is required: the folder that holds the steps",
            next_command=command_line("scan", target.root),
        )
    if not exists:
        check_is_folder(store)


def _is_step(name: str) -> bool:
    named = step_name(name)
    return named is not None and not named.bare


Below = tuple[str, RootListing]


def _listed_below(
    store: Store, listing: RootListing, open_other: OpenStore | None
) -> tuple[list[Below], int]:
    """The folders below a root, and how many were left out.

    Down to the level nearest to the root that has steps or saved weights; at most three levels.
    """
    left = MAX_FOLDERS
    found = [
        (name, one)
        for name in listing.links
        if (one := _behind_link(store, name, listing.pattern, open_other)) is not None
    ]
    level = _folders_of(listing)
    for _ in range(_MAX_DEPTH):
        below: list[str] = []
        for path, one in _listed(store, level[:left], listing.pattern):
            found.append((path, one))
            below += [f"{path}/{name}" for name in _folders_of(one)]
        if len(level) > left or any(_holds(one) for _, one in found):
            return found, len(level) - min(left, len(level))
        left -= len(level)
        level = below
    return found, 0


def _of_any_name(listing: RootListing, below: Iterable[Below]) -> Iterator[FileInfo]:
    """The files of a root and of folders below it that may be saves."""
    yield from listing.others
    for path, one in below:
        yield from (file.at(f"{path}/{file.path}") for file in one.others)


def _folders_of(listing: RootListing) -> list[str]:
    # A name of digits alone is a step only if its content confirms it.
    bare = (step.name for step in listing.steps if step.bare)
    return [name for name in (*listing.folders, *bare) if name not in NO_RUN_BELOW]


def _holds(listing: RootListing) -> bool:
    whole = any(not step.bare for step in listing.steps)
    return whole or listing.is_step or bool(listing.unnumbered)


def _listed(
    store: Store, folders: Sequence[str], pattern: re.Pattern[str] | None
) -> Iterator[Below]:
    listed = partial(_names_in, store)
    if store.kind is StoreKind.LOCAL:
        both: Iterable[tuple[str, list[FileInfo]]] = ((path, listed(path)) for path in folders)
    else:
        both = in_flight(listed, folders)
    for path, names in both:
        yield path, read_listing(names, pattern)


def _names_in(store: Store, folder: str) -> list[FileInfo]:
    # It may have been removed after the root was listed.
    entries = list_if_there(store, folder)
    return [entry.at(entry.path.rsplit("/", 1)[-1]) for entry in entries]


def _listed_folders(store: Store, listing: RootListing) -> Iterator[Below]:
    for folder in listing.folders[:MAX_FOLDERS_TRIED]:
        with suppress(StorageError):
            yield folder, read_listing(_names_in(store, folder), listing.pattern)


def _behind_link(
    store: Store, name: str, pattern: re.Pattern[str] | None, open_other: OpenStore | None
) -> RootListing | None:
    """What lies in the folder that a link in a root leads to; None for any other link."""
    folders = store.folders
    if open_other is None or folders is None or not os.path.isdir(folders.path_of(name)):
        return None
    with open_other(join_url(store.url, name)) as other:
        return read_listing(other.list_dir(""), pattern)

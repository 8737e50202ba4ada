"""Resolve the arguments that name roots and steps, and open roots.

Roots: one, or several, such as local NVMe and shared storage, in order of preference. A
mandatory root that does not answer is an error, since a newer step may be in it. An optional
one, such as the local disk of a node that was replaced, may be absent; that is reported, and
the others decide. `SeenRoots` checks that a root is still the one that was read before.

A step: `PATH`, `ROOT@1200`, `ROOT@latest` (newest by number) or `ROOT@auto` (what `pick`
chooses). Only the text after the last `@` is parsed, and only if it has one of these forms
and no such folder exists: a path may contain an `@` itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ckptctl.errors import PathNotFound, StorageError, StorageUnavailable, UsageError
from ckptctl.findings import Finding
from ckptctl.formats.archive.directory import (
    LEGACY_HEAD,
    NOT_AN_ARCHIVE,
    ZIP_MAGIC,
    is_before_archives,
)
from ckptctl.formats.frameworks import layouts
from ckptctl.formats.frameworks.layouts import METADATA, WEIGHTS_ALONE, StepName
from ckptctl.formats.frameworks.parts import is_archive, parts_of
from ckptctl.formats.frameworks.ray_train import is_named_by_time
from ckptctl.formatting import command_line, counted, path_word
from ckptctl.model import SHARDED, FileInfo
from ckptctl.options import StorageOptions
from ckptctl.selection.branches import RecordedResume, read_resumes
from ckptctl.selection.history import has_sentinel
from ckptctl.selection.roots import RootListing, check_listed_again, list_root, read_listing
from ckptctl.storage.contract import Store, read_range
from ckptctl.storage.files import is_same_folder
from ckptctl.storage.opening import base_name, join_url, local_path, open_store, parent_url


@dataclass(frozen=True, slots=True)
class Roots:
    """The addresses of the roots in order of preference, and those that may be absent."""

    urls: tuple[str, ...]
    optional: frozenset[str] = frozenset()

    @property
    def words(self) -> tuple[str, ...]:
        """The roots as the words of a command line that takes several."""
        words = [*self.mandatory]
        for url in self.urls:
            words += ["--optional-root", url] if url in self.optional else []
        return tuple(words)

    @property
    def mandatory(self) -> tuple[str, ...]:
        """The roots that must be there; they bear the record of the run."""
        return tuple(url for url in self.urls if url not in self.optional)

    @property
    def first(self) -> str:
        """The root that steps are saved to: the first mandatory one."""
        return self.mandatory[0]


def roots_in(given: str | Sequence[str], optional: Collection[str] = ()) -> Roots:
    """The roots that a caller named; raises `UsageError` where none of them is mandatory.

    Optional roots come after the others, or keep their place where they are named
    among `given` as well.
    """
    named = (given,) if isinstance(given, str) else tuple(given)
    optional = frozenset(map(path_word, optional))
    urls = tuple(dict.fromkeys((*map(path_word, named), *optional)))
    if not urls:
        raise UsageError("no checkpoint root is given", next_command="ckptctl pick ROOT")
    if optional.issuperset(urls):
        raise UsageError(
            f"every root is optional ({', '.join(urls)}); at least one must be mandatory, "
            "or a storage that is not mounted would pass for a fresh run"
        )
    return Roots(urls, optional)


@dataclass(frozen=True, slots=True)
class OpenRoot:
    """One root, open and listed; `error` is why an optional one could not be.

    `resumes` are those that it records, for the steps of the other roots.
    """

    store: Store
    listing: RootListing
    optional: bool = False
    error: StorageError | None = None
    resumes: tuple[RecordedResume, ...] = ()

    @property
    def is_there(self) -> bool:
        """The root exists and has answered."""
        return self.listing.exists and self.error is None


def open_roots(
    stack: ExitStack,
    roots: Roots,
    list_all: Callable[[Store], RootListing],
    storage: StorageOptions,
) -> tuple[OpenRoot, ...]:
    """Open every root until `stack` ends, and list it.

    Raises `StorageError` where a mandatory root does not answer, and where one does
    not exist while another root holds steps or was written to before. Cost: one call
    of `list_all` for each root; where there are several, `read_resumes` of each besides.
    """
    opened_roots = []
    for url in roots.urls:
        store = stack.enter_context(open_store(url, storage))
        optional = url in roots.optional
        try:
            listing = list_all(store)
            several = len(roots.urls) > 1 and listing.known
            resumes = read_resumes(store) if several else ()
        except StorageError as error:
            if not optional:
                raise
            listing = RootListing((), exists=False)
            # A local disk without the folder above the root is absent, as one without the root.
            folders = store.folders
            absent = folders is not None and not os.path.lexists(folders.path_of(""))
            opened_roots.append(
                OpenRoot(store, listing, optional=True, error=None if absent else error)
            )
        else:
            opened_roots.append(OpenRoot(store, listing, optional, resumes=resumes))
    _check_mandatory(opened_roots, roots)
    return tuple(opened_roots)


def _check_mandatory(opened_roots: Sequence[OpenRoot], roots: Roots) -> None:
    used = next((one for one in opened_roots if one.listing.steps or one.listing.known), None)
    absent = next(
        (one for one in opened_roots if not one.optional and not one.listing.exists), None
    )
    if used is None or absent is None:
        return
    url = absent.store.url
    allowed = Roots(roots.urls, roots.optional | {url})
    may_be_absent = len(allowed.optional) < len(allowed.urls)
    holds = f"holds {len(used.listing.steps)} steps" if used.listing.steps else "was in use before"
    raise StorageUnavailable(
        f"{url} does not exist, and {used.store.url} {holds}: a newer step may be in the "
        "missing root. Mount it; if it may be missing, make it an optional root",
        next_command=command_line("pick", *allowed.words) if may_be_absent else "findmnt --real",
    )


def unavailable(opened_roots: Sequence[OpenRoot]) -> Iterator[Finding]:
    """Yield a `root.unavailable` for each optional root that is absent or did not answer."""
    for root in opened_roots:
        if root.is_there or not root.optional:
            continue
        url = root.store.url
        why = f"{url} does not exist" if root.error is None else root.error.message
        yield Finding(
            "root.unavailable",
            url,
            f"the optional root was left out: {why}",
            expected="a root that answers",
            found="no folder" if root.error is None else root.error.code,
            next_command=command_line("scan", url),
        )


_SELECTED = re.compile(r"(?P<root>.+)@(?P<which>[0-9]{1,19}|latest|auto)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class StepArgument:
    """The root that contains the step, and which of its steps is meant.

    `which` is a step number, `latest`, `auto`, or None if `name` is the folder.
    """

    root: str
    which: int | str | None
    name: str | None


def parse_target(target: str) -> StepArgument:
    """Parse a step argument, without accessing the storage.

    Raises `UsageError` for an empty argument, or one that is a root of a storage.
    """
    if not target.strip():
        raise UsageError("the step is empty; name it as PATH, ROOT@1200, ROOT@latest or ROOT@auto")
    match, local = _SELECTED.fullmatch(target), local_path(target)
    # A local folder with such a name takes precedence.
    if match and not (local is not None and os.path.lexists(local)):
        which = match["which"]
        return StepArgument(match["root"], int(which) if which.isdigit() else which, None)
    path = _plain(target)
    name = base_name(path)
    if not name:
        raise UsageError(f"{target} is not a step; name it as PATH, ROOT@1200, ROOT@latest")
    return StepArgument(parent_url(path), None, name)


def check_root_there(store: Store, listing: RootListing) -> None:
    """Raise if a question about a root cannot be answered because it does not exist.

    `UsageError` and `PathNotFound` for a wrong path, `StorageUnavailable` for a broken
    link. `empty_roots` decides whether a missing root means a fresh run.
    """
    if not listing.exists:
        check_is_folder(store)
        above = command_line("scan", parent_url(store.url))
        raise PathNotFound(f"{store.url} does not exist", next_command=above)


def check_is_folder(store: Store) -> None:
    """Raise if the address of a missing root is that of a file or a broken link."""
    if store.folders is None:
        return
    url, path = store.url, store.folders.path_of("")
    if not os.path.lexists(path) or os.path.isdir(path):  # another process may have made it
        return
    if os.path.islink(path):
        raise StorageUnavailable(
            f"{url} is a link to {os.readlink(path)}, which does not exist",
            next_command="findmnt --real",
        )
    raise UsageError(
        f"{url} is a file, not a folder that holds steps",
        next_command=command_line("scan", parent_url(url)),
    )


def check_is_step(url: str, files: Sequence[FileInfo]) -> None:
    """Raise `UsageError` if a folder without a step number contains steps: it is a root.

    One folder with a number may belong to a step, as that of DeepSpeed in one of transformers.
    """
    names = {file.path.partition("/")[0] for file in files}
    top = [file for file in files if file.path in names]
    folders = [FileInfo(name, 0, kind="dir") for name in names.difference(f.path for f in top)]
    steps = [step for step in read_listing([*top, *folders]).steps if not step.bare]
    saved = {part.path.partition("/")[0] for part in parts_of(files) if part.format in SHARDED}
    if len({step.number for step in steps}) > 1 or any(step.name in saved for step in steps):
        raise UsageError(
            f"{url} is a root that holds steps, such as {steps[0].name}; name one of them, "
            f"or the newest as {url}@latest",
            next_command=command_line("scan", url),
        )


def _plain(target: str) -> str:
    # `verify .` and `verify ROOT/latest` mean the folder that is really there.
    path = local_path(target)
    if path is None:
        return target
    if os.path.islink(path.rstrip("/")):
        return os.path.realpath(path)
    return os.path.abspath(path) if os.path.basename(path.rstrip("/")) in (".", "..", "") else path


def named_step(
    store: Store, target: StepArgument, pattern: re.Pattern[str] | None = None
) -> StepName | str:
    """The step that a target names under its root: a `StepName`, or the bare folder name.

    `auto` is not decided here. Raises `UsageError` where the root holds no such
    step. Cost: one listing for a number, `latest`, and a folder that is named by a time, nothing
    for another path; one more before the error states that there is none.
    """
    if target.name is not None:
        named = layouts.step_name(target.name, pattern)
        if named is None and is_named_by_time(target.name):
            steps = list_root(store, pattern).steps
            named = next((step for step in steps if step.name == target.name), None)
        return named or target.name
    listing = list_root(store, pattern)
    check_root_there(store, listing)
    steps = listing.steps
    wanted = [s for s in steps if target.which == "latest" or s.number == target.which]
    if wanted:
        return wanted[0]
    check_listed_again(store, listing)
    scan = command_line("scan", store.url)
    if not steps:
        raise UsageError(f"{store.url} holds no steps", next_command=scan)
    raise UsageError(
        f"{store.url} holds no step {target.which}; its newest is {steps[0].number}, "
        f"its oldest {steps[-1].number}",
        next_command=scan,
    )


def check_no_lone_file(store: Store, named: StepName | str, files: Sequence[FileInfo]) -> None:
    """Raise `UsageError` where `named` under the store is one file that is no step.

    A step is one by its suffix, and without a number one of `torch.save`, such as `last.ckpt`.
    `files` is the listing of `named`. Cost: nothing for a folder; for a file one listing and one
    small read.
    """
    name = named if isinstance(named, str) else named.name
    if [file.path for file in files] != [name]:
        return
    # A folder may hold one file of its own name.
    found = next((one for one in store.list_dir("") if one.path == name), None)
    if found is None or found.kind != "file":
        return
    if not layouts.is_flat_file(found) or (isinstance(named, str) and not is_archive(name)):
        raise _lone_file(store, found)


def _lone_file(store: Store, file: FileInfo) -> UsageError:
    url, name = join_url(store.url, file.path), file.path
    head = read_range(store, name, 0, min(LEGACY_HEAD, file.size))
    stem = name.rpartition(".")[0] or name
    convert = ("convert", url, join_url(parent_url(url), f"{stem}-dcp"))
    next_command = "ckptctl explain format.unsupported"
    if name == METADATA or layouts.shard_rank(name) is not None:
        step = parent_url(url)
        why, next_command = f": it is part of {step}", command_line("verify", step)
    elif is_before_archives(head):
        why = f": it {NOT_AN_ARCHIVE}"
    elif head.startswith(ZIP_MAGIC):
        why = ": if it is a file of torch.save, `ckptctl convert` can turn it into a step"
        next_command = command_line(*convert)
    elif name.endswith(WEIGHTS_ALONE):
        why = (
            ": it is named as a safetensors file, which holds only weights; `ckptctl convert` can "
            "turn it into a step"
        )
        next_command = command_line(*convert, "--accept-unverifiable")
    else:
        why = ", and not a known checkpoint format"
    return UsageError(f"{url} is a file, not a step{why}", next_command=next_command)


@dataclass(frozen=True, slots=True)
class _RootFingerprint:
    """The state of a root: its folder, where it has one; its sentinel; its steps."""

    folder: tuple[int, int] | None
    sentinel: bool
    steps: int


class SeenRoots:
    """The roots of a process as it saw them first, by address."""

    def __init__(self) -> None:
        self._seen: dict[str, _RootFingerprint] = {}

    def check(self, store: Store, listing: RootListing, *, steps_stay: bool = True) -> None:
        """Raise `StorageUnavailable` if a root is gone, or another one, since the last check.

        It is gone if its folder does not exist or is another folder, if it had a sentinel and
        has none, or with `steps_stay` if it had steps and has none. Cost: one listing of a
        small folder.
        """
        before = self._seen.get(store.url)
        if not listing.exists:
            if before is not None:
                raise _vanished(store, "it does not exist any more")
            return
        folder = None
        if store.folders is not None:
            try:
                folder = store.folders.root_id()
            except PathNotFound as error:
                raise _vanished(store, "it does not exist any more") from error
        now = _RootFingerprint(folder, has_sentinel(store), len(listing.steps))
        if before is not None:
            known, found = before.folder, now.folder
            if known and found and not is_same_folder(known, found, store.url):
                raise _vanished(store, "another folder is in its place")
            if before.sentinel and not now.sentinel:
                raise _vanished(store, "its record .ckptctl/root.json is gone")
            if steps_stay and before.steps and not now.steps:
                held = counted(before.steps, "step")
                raise _vanished(store, f"it held {held}, and now none")
        self._seen[store.url] = now


def _vanished(store: Store, what: str) -> StorageUnavailable:
    return StorageUnavailable(
        f"{store.url} changed since it was read before: {what}. Its storage was unmounted, or the "
        "root was moved, replaced or emptied; this is no new run, and what it holds is unknown",
        next_command="findmnt --real" if store.folders is not None else None,
    )

"""A root without steps: is this a fresh run?

The answer that does the most harm when it is wrong: a job that starts fresh over a
good run loses all of it. So a wrong path, a checkpoint that is not known as a step,
and a storage that is not there are told apart from a run that has saved nothing yet.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckptctl.errors import StorageError, StorageUnavailable, UsageError
from ckptctl.findings import Finding
from ckptctl.formats.layouts import step_name
from ckptctl.judge.roots import RootListing, check_listed_again, read_listing
from ckptctl.judge.targets import check_is_folder, check_root_there, parse_target
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import base_name, join_url

MAX_FOLDERS_TRIED = 64
MAX_NAMED = 8
_RESTART_COUNTERS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


def check_has_steps(
    store: Store, listing: RootListing, pattern: re.Pattern[str] | None = None
) -> None:
    """Raise where a command that works on what is there was given a wrong path.

    A root that is there and holds no step is none: see `check_empty`.
    """
    check_root_there(store.url, listing)
    if not listing.steps:
        check_empty(store, listing, pattern)


def check_empty(store: Store, listing: RootListing, pattern: re.Pattern[str] | None = None) -> None:
    """Raise where a root without steps is not the root of a run that has saved nothing yet.

    `UsageError` where it names or is a step, a file, or a folder above the root, and
    where it holds checkpoints whose names give no step number; `StorageUnavailable`
    where it is a link to nowhere, and where a second listing shows steps: nothing is
    concluded from a single one. Cost: that second listing where storage is not local, and
    one for each folder in it, at most `MAX_FOLDERS_TRIED`. What cannot be listed does not
    count.
    """
    check_listed_again(store, listing, pattern)
    if not (listing.exists and (listing.folders or listing.unnumbered or listing.pointers)):
        _check_path(store.url, exists=listing.exists)
    elif _is_step(base_name(store.url)):
        listing = replace(listing, is_step=True)
    if listing.is_step:
        raise UsageError(
            f"{store.url} is a step itself, not a root that holds steps",
            next_command=f"ckptctl verify {shlex.quote(store.url)}",
        )
    inside = dict(_listed_folders(store, listing, pattern))
    roots = [name for name, one in inside.items() if any(not step.bare for step in one.steps)]
    if roots:
        raise UsageError(
            f"{store.url} holds no steps itself, but {_some(roots)} in it "
            f"do{'es' if len(roots) == 1 else ''}",
            next_command=f"ckptctl scan {shlex.quote(join_url(store.url, roots[0]))}",
        )
    unnumbered = [*listing.unnumbered, *(name for name, one in inside.items() if one.is_step)]
    if unnumbered:
        looks = "looks like a checkpoint" if len(unnumbered) == 1 else "look like checkpoints"
        raise UsageError(
            f"{store.url} is not empty: {_some(unnumbered)} {looks}, but no name in it gives a "
            "step number; say with --pattern where the number is, or name the step itself",
            next_command=f"ckptctl verify {shlex.quote(join_url(store.url, unnumbered[0]))}",
        )


def check_unnumbered(
    store: Store, listing: RootListing, pattern: re.Pattern[str] | None = None
) -> Iterator[Finding]:
    """Yield `root.unnumbered` where checkpoints bear no step number, which `pick` never takes.

    Cost: one listing for each folder that is no step, at most `MAX_FOLDERS_TRIED`.
    """
    inside = _listed_folders(store, listing, pattern)
    names = [*listing.unnumbered, *(name for name, one in inside if one.is_step)]
    if not names:
        return
    looks = "looks like a checkpoint" if len(names) == 1 else "look like checkpoints"
    yield Finding(
        "root.unnumbered",
        ", ".join(names[:MAX_NAMED]),
        f"{_some(names)} {looks} and bear{'s' * (len(names) == 1)} no step number: "
        "not in the list, and never taken by pick",
        expected="a step number in the name, or --pattern",
        found=_some(names),
        next_command=f"ckptctl verify {shlex.quote(join_url(store.url, names[0]))}",
    )


def _check_path(url: str, *, exists: bool) -> None:
    """Raise where an address under which nothing was found was meant as something else."""
    target = parse_target(url) if "@" in url else None
    if target is not None and target.which is not None:
        raise UsageError(
            f"{url} names a step, and a root is wanted: the folder that holds the steps",
            next_command=f"ckptctl scan {shlex.quote(target.root)}",
        )
    if not exists:
        check_is_folder(url)


def _is_step(name: str) -> bool:
    named = step_name(name)
    return named is not None and not named.bare


def _listed_folders(
    store: Store, listing: RootListing, pattern: re.Pattern[str] | None
) -> Iterator[tuple[str, RootListing]]:
    for folder in listing.folders[:MAX_FOLDERS_TRIED]:
        try:
            entries = store.list_dir(folder)
        except StorageError:
            continue
        names = [replace(entry, path=entry.path.rsplit("/", 1)[-1]) for entry in entries]
        yield folder, read_listing(names, pattern)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def check_restart(url: str, listings: Sequence[RootListing]) -> None:
    """Raise `StorageUnavailable` for a restarted job that finds no trace of its earlier life.

    Its storage is probably not mounted. `listings` are those of all roots, `url` is
    the first of them.
    """
    counter = next((name for name in _RESTART_COUNTERS if _is_positive(os.environ.get(name))), None)
    if counter is not None and not any(listing.known for listing in listings):
        raise StorageUnavailable(
            f"{url} holds no steps, but {counter} is {os.environ[counter]}: a restarted "
            "job whose earlier life left nothing here; its storage is probably not mounted",
            next_command=f"ckptctl scan {shlex.quote(url)}",
        )


def _is_positive(value: str | None) -> bool:
    return value is not None and value.isdecimal() and int(value) > 0

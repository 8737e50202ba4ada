"""Which old steps may go, and how does one go so that nobody takes half of it?

Only steps that are whole and sealed count as kept; what is pinned, or named by the
caller (the step resumed from, the one in flight), stays whatever its number is. What is
damaged, unknown or no step at all is left to a person. A step loses its metadata first:
from then on it is an interrupted save to everyone, and is never taken.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass

from ckptctl.errors import StorageUnavailable, UsageError
from ckptctl.findings import Report, Verdict
from ckptctl.formats.layouts import METADATA, StepName
from ckptctl.formats.marks import Word
from ckptctl.judge.arguments import conditions
from ckptctl.judge.looking import Looked, list_step, look
from ckptctl.judge.roots import list_root
from ckptctl.model import Level
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import absolute_url, is_local, join_url

_MAY_GO = (Verdict.COMPLETE, Verdict.INCOMPLETE, Verdict.REJECTED, Verdict.SUPERSEDED)


@dataclass(frozen=True, slots=True)
class Surplus:
    """A step that retention does not keep, as it was found."""

    named: StepName
    report: Report


def surplus(store: Store, keep: int, protected: Collection[int] = ()) -> tuple[Surplus, ...]:
    """The steps older than the newest `keep` that are whole and sealed, oldest first.

    Empty where there are fewer than that: then nothing may go. Cost: one listing, and a look
    at level `listing` at every step.
    """
    n_kept = 0
    found: list[Surplus] = []
    asked = conditions((), None, None, 600.0)
    for named in list_root(store).steps:
        looked = look(store, named, asked, level=Level.LISTING)
        if n_kept < keep:
            n_kept += looked.report.verdict is Verdict.COMPLETE and looked.report.seal is not None
        elif _may_go(looked) and named.number not in protected:
            found.append(Surplus(named, looked.report))
    return tuple(reversed(found))


def _may_go(looked: Looked) -> bool:
    marks = looked.notes.marks if looked.notes else ()
    pinned = any(mark.word is Word.PINNED for mark in marks)
    return looked.report.verdict in _MAY_GO and bool(looked.step.parts) and not pinned


def remove_step(store: Store, name: str) -> None:
    """Remove a step of a file system, its metadata first. Links in it are not followed.

    Raises `UsageError` on an object store, `StorageUnavailable` where something cannot be
    removed; what is left then is an interrupted save.
    """
    if not is_local(store.url):
        raise UsageError(
            f"{join_url(store.url, name)}: steps are removed on file systems only; an object "
            "store has lifecycle rules for that"
        )
    folder = join_url(absolute_url(store.url), name)
    markers = [file.path for file in list_step(store, name) if _is_marker(file.path)]
    try:
        for path in markers:
            os.unlink(f"{folder}/{path}")
            _sync(os.path.dirname(f"{folder}/{path}"))
        shutil.rmtree(folder)
        _sync(os.path.dirname(folder))
    except OSError as error:
        raise StorageUnavailable(
            f"{folder} could not be removed whole: {error.strerror or type(error).__name__}"
        ) from error


def _is_marker(path: str) -> bool:
    return path.rsplit("/", 1)[-1].endswith(METADATA)


def _sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

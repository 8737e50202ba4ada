"""Read the marks on a step and files of marks, and turn them into findings.

A file of marks is for steps that cannot be written to: one mark per line, of any step of any root;
new marks are appended. A rejection or a superseded branch rules the step out; a pin and an
acceptance are notes. Marks on an earlier save of the step are reported and do not apply.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ckptctl.errors import OwnFileUnreadable, PathUntrusted, UsageError
from ckptctl.findings import Finding, explained
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.formats.own.marks import (
    MARKS_FOLDER,
    MAX_MARK_BYTES,
    Mark,
    MarkKind,
    in_force,
    mark_bytes,
    metadata_digest,
    named_word,
    parse_mark,
)
from ckptctl.model import Step
from ckptctl.storage.contract import Span
from ckptctl.storage.files import append_line
from ckptctl.storage.opening import absolute_url
from ckptctl.storage.shared_places import open_named

if TYPE_CHECKING:
    from ckptctl.inspection.open_step import OpenStep

MAX_MARKS = 256
"""So many marks of one step are read: those that rule it out first, then the newest."""


ReadMarks = tuple[tuple[Mark, ...], tuple[Finding, ...]]
"""The marks on a step, and a finding for each file that could not be read as one."""


def read_marks(opened: OpenStep) -> ReadMarks:
    """The marks in a step. Cost: one read for each.

    A mark that rules the step out, or lifts a confirmation, counts by the name of its file where
    it cannot be read: neither damage nor many later marks let a step be taken that was rejected.
    """
    step = opened.step
    files = [
        file
        for file in step.files
        if file.path in (OWN_FOLDER, MARKS_FOLDER)  # a link, say: what is behind it is not read
        or (file.path.startswith(f"{MARKS_FOLDER}/") and file.path.endswith(".json"))
    ]
    newest = sorted(files, key=lambda file: file.path, reverse=True)
    order = sorted(newest, key=lambda file: named_word(file.path) not in _RULES_OUT)
    read = [f for f in order[:MAX_MARKS] if f.kind == "file" and f.size <= MAX_MARK_BYTES]
    marks: list[Mark] = []
    unread = {
        file.path: f"{file.size:,} bytes, or one of too many marks; it was not read"
        if file.kind == "file"
        else f"it is {file.what}, not a file; it was not opened"
        for file in files
        if file not in read
    }
    spans = (Span(opened.in_store(file.path), 0, file.size) for file in read)
    for file, (_, data) in zip(read, opened.store.read_spans(spans), strict=True):
        try:
            marks.append(parse_mark(data))
        except OwnFileUnreadable as error:
            unread[file.path] = error.message
    current = metadata_digest(tuple(opened.digests.items()))
    confirmed = tuple(mark.id for mark in marks if mark.word is MarkKind.CONFIRMED)
    marks += [
        _by_name(path, word, why, step, current, () if word in _RULES_OUT else confirmed)
        for path, why in unread.items()
        if (word := named_word(path)) in _COUNT_BY_NAME
    ]
    damaged = [
        unusable("mark.damaged", path, "a mark", why) for path, why in sorted(unread.items())
    ]
    return tuple(marks), tuple(damaged)


_RULES_OUT = (MarkKind.REJECTED, MarkKind.SUPERSEDED)
_COUNT_BY_NAME = (*_RULES_OUT, MarkKind.UNCONFIRMED)


def _by_name(
    path: str, word: MarkKind, why: str, step: Step, current: str | None, lifts: tuple[str, ...]
) -> Mark:
    """The mark that a file was written for which cannot be read; `accept` lifts it as any other."""
    name = path.rpartition("/")[2].removesuffix(".json")
    return Mark(
        id=name,
        word=word,
        by="somebody",
        at=name.partition("-")[0],
        reason=f"the mark cannot be read and counts by its name: {why}",
        url=step.url,
        number=step.number,
        metadata=current,
        lifts=lifts,
    )


def unusable(code: str, where: str, what: str, why: str) -> Finding:
    """The finding for a file of ckptctl that cannot be read."""
    return explained(code, where, f"{what} cannot be used: {why}")


MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class MarksInFile:
    """The marks of a file."""

    path: str
    marks: tuple[Mark, ...] = ()

    def on_step(self, url: str, number: int | None, metadata: str | None) -> tuple[Mark, ...]:
        """The marks on a step, of whichever save: by its metadata, or by where it lies.

        A root may have been moved or mounted elsewhere; metadata is the same there.
        """
        lies_at = absolute_url(url)
        return tuple(
            mark
            for mark in self.marks
            if mark.url == lies_at or (metadata is not None and mark.applies_to(number, metadata))
        )


def read_marks_file(path: str) -> MarksInFile:
    """All marks in a file; none where there is no file yet.

    Raises `UsageError` where the file, or a line of it, cannot be read: that line may be a
    rejection of any step, and a rejection must not be passed over.

    Cost: one read of the file; it is parsed only where it has changed since the last call.
    """
    return _parsed(path, _content(path))


@lru_cache(maxsize=1)
def _parsed(path: str, content: bytes) -> MarksInFile:
    marks = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            if len(line) > MAX_MARK_BYTES:
                raise OwnFileUnreadable(f"it is {len(line):,} bytes long")
            marks.append(parse_mark(line))
        except OwnFileUnreadable as error:
            raise UsageError(
                f"the file of marks {path} cannot be read: line {number} is not a mark: "
                f"{error.message}. It may reject any step, so nothing is decided without it: "
                "correct the line, or delete it and reject the step again",
                next_command=f"sed -n {number}p {shlex.quote(path)}",
            ) from error
    return MarksInFile(path, tuple(marks))


def check_marks_file(path: str | None) -> None:
    """Raise as `read_marks_file` does, before anything else is asked of a storage."""
    if path is not None:
        read_marks_file(path)


def _content(path: str) -> bytes:
    try:
        fd = open_named(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise _bad_file(path, error.strerror or type(error).__name__) from error
    except PathUntrusted as error:
        raise _bad_file(path, error.message) from error
    size = os.fstat(fd).st_size
    if size > MAX_FILE_BYTES:
        os.close(fd)
        raise _bad_file(path, f"it is {size:,} bytes, more than {MAX_FILE_BYTES:,}")
    with os.fdopen(fd, "rb") as file:
        return file.read()


def _bad_file(path: str, why: str) -> UsageError:
    return UsageError(f"the file of marks {path} cannot be read: {why}")


def add_mark(path: str, mark: Mark) -> None:
    """Add one mark to a file, durably; raises `StorageError` where that cannot be."""
    append_line(path, mark_bytes(mark))


_CODES = {
    MarkKind.REJECTED: "step.rejected",
    MarkKind.SUPERSEDED: "step.superseded",
    MarkKind.PINNED: "step.pinned",
    MarkKind.CONFIRMED: "step.confirmed",
}


_FINISHED_LATE = "the metadata arrived after the step was superseded as an interrupted save"


def check_marks(marks: Sequence[Mark], step: Step, metadata: str | None) -> Iterator[Finding]:
    """Yield `step.rejected`, `superseded`, `pinned`, `confirmed`, `accepted`; `mark.outdated`.

    `step.finished-late` too, where the step was superseded before it had any metadata.

    `marks` are all that were found on the step, whichever save of it they apply to;
    `metadata` is the `metadata_digest` of the save that lies here.
    """
    own = [mark for mark in marks if mark.applies_to(step.number, metadata)]
    applying = in_force(own)
    for mark in applying:
        if mark.word in _CODES:
            yield _mark_finding(_CODES[mark.word], mark, f"{mark.word.value} {_who(mark)}")
    superseded = [mark for mark in applying if mark.word is MarkKind.SUPERSEDED]
    if superseded and metadata and all(mark.metadata is None for mark in superseded):
        yield _mark_finding("step.finished-late", superseded[-1], _FINISHED_LATE)
    accepted = [mark for mark in applying if mark.word is MarkKind.ACCEPTED]
    if accepted:
        newest = accepted[-1]
        yield _mark_finding(
            "step.accepted", newest, f"{_before(own, newest)}, and accepted {_who(newest)}"
        )
    for mark in in_force(mark for mark in marks if mark not in own):
        if mark.word in _CODES:
            what = f"an earlier save of this step was {mark.word.value} {_who(mark)}"
            yield _mark_finding("mark.outdated", mark, what)


def _mark_finding(code: str, mark: Mark, message: str) -> Finding:
    return Finding(code, "", message + mark.because, found=f"mark {mark.id}")


def _who(mark: Mark) -> str:
    return f"by {mark.by} at {mark.at}"


def _before(own: Sequence[Mark], accepted: Mark) -> str:
    words = sorted({mark.word.value for mark in own if mark.id in accepted.lifts})
    return " and ".join(words) or "ruled out"

"""Put marks on steps, and lift them.

A mark is added and never changed: under the step's own `.ckptctl/marks/`, under a unique
name, or at the end of a file of marks if the root is read-only. Concurrent writers lose
nothing. `inspection.seals` decides what marks mean for a step.
"""

from __future__ import annotations

import datetime
import getpass
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Unpack

from ckptctl.errors import AccessDenied, StorageUnavailable, UsageError
from ckptctl.findings import EXIT_DENIED, Report, Severity, Verdict
from ckptctl.formats.own.files import MAX_STRING
from ckptctl.formats.own.marks import (
    MARKS_FOLDER,
    Mark,
    MarkKind,
    in_force,
    mark_bytes,
    metadata_digest,
)
from ckptctl.formatting import command_line, rfc3339
from ckptctl.inspection.inspecting import inspect_step
from ckptctl.inspection.marks import add_mark
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import ExitCode, Level, Message, NextCommand, StepNumber, StepUrl
from ckptctl.options import Requirements, StorageKeywords, StorageOptions, options_from
from ckptctl.selection.verifying import OpenTarget, open_target
from ckptctl.storage.opening import absolute_url, join_url


@dataclass(frozen=True, slots=True)
class Marked:
    """The result of `mark`: the mark that was written, None if nothing changed."""

    url: StepUrl
    number: StepNumber
    mark: Mark | None
    """The mark that was written; null where there was nothing to lift."""
    path: str | None
    """The file that holds the mark."""
    lifted: tuple[Mark, ...]
    """The marks that it lifts."""
    standing: tuple[Mark, ...]
    """The marks in force on this save of the step from now on, oldest first."""
    message: Message
    exit_code: ExitCode
    next_command: NextCommand


MAX_EVIDENCE = 32


def mark(
    step: str,
    word: MarkKind | str,
    *,
    reason: str = "",
    evidence: Sequence[str] = (),
    by: str | None = None,
    marks: str | None = None,
    pattern: str | None = None,
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[StorageKeywords],
) -> Marked:
    """Mark a step as `rejected`, `accepted`, `superseded`, `pinned` or `confirmed`.

    `pick` skips rejected and superseded steps, and may prefer confirmed ones. `accepted` lifts
    both of the former, and accepts a renamed folder as the step that its name states; `unpinned`
    and `unconfirmed` lift a pin and a confirmation. Lifted marks stay on record. A mark applies to
    the present save, and becomes outdated when the step is saved again. A rejection and a
    confirmation require a `reason`; `evidence` is where to find more (a URL, a log); `by` is the
    author, the user and the host by default. `marks` is a file to write to instead of the step.

    Raises `UsageError`, also for the confirmation of a step that is not sound, and `StorageError`
    if the step cannot be inspected or written to: then nothing was written. Cost: an inspection at
    `listing` (of an acceptance at `structure`), one write.
    """
    kind = _known(word)
    by = by or f"{user_name()}@{socket.gethostname()}"
    _check_words(kind, reason, evidence, by)
    requirements = Requirements(marks=marks, pattern=pattern)
    (storage,) = options_from(keywords, storage)
    with open_target(step, requirements, storage) as found:
        # NaN in weights, which an acceptance lifts, is found at this level in an object store.
        level = Level.STRUCTURE if kind is MarkKind.ACCEPTED else Level.LISTING
        inspected = inspect_step(found, requirements, level=level)
        check_inspected(inspected.report)
        verdict = inspected.report.verdict
        if kind is MarkKind.CONFIRMED and verdict is not Verdict.COMPLETE:
            raise UsageError(
                f"{found.url} is {verdict.value}, and only a complete step can be confirmed; no "
                "mark was written",
                next_command=command_line("verify", found.url),
            )
        # A listing does not read what names the save of a rank-file step.
        report = replace(inspected.report, digests=tuple(found.digests.items()))
        applying = inspected.notes.marks
        if kind is MarkKind.UNPINNED:
            # A pin on an earlier save keeps the folder, so it can be lifted as well.
            applying += tuple(pin for pin in inspected.notes.pins if pin not in applying)
        lifted = tuple(one for one in applying if one.word in kind.lifts)
        made, path, standing = None, None, applying
        if kind.lifts and not lifted and not _takes_as_it_is(kind, report, applying):
            message = _nothing_to_lift(report, kind)
            next_command = command_line("verify", report.url)
        else:
            lifts = [mark.id for mark in lifted]
            made = new_mark(report, kind, reason=reason, by=by, evidence=evidence, lifts=lifts)
            path, standing = _write(found, made, marks), in_force((*applying, made))
            message = f"{report.url} is {kind.value}"
            next_command = _next_command(found, kind, marks)
        return Marked(
            url=report.url,
            number=report.number,
            mark=made,
            path=path,
            lifted=lifted,
            standing=standing,
            message=message,
            exit_code=0,
            next_command=next_command,
        )


class Save(Protocol):
    """One save of a step, by the digests of its metadata files; a `Report` describes one."""

    @property
    def url(self) -> str:
        """The address of the step."""
        ...

    @property
    def number(self) -> int | None:
        """The training step; None where the folder's name gives none."""
        ...

    @property
    def digests(self) -> Sequence[tuple[str, str]]:
        """The SHA-256 of each metadata file, by path; empty for an interrupted save."""
        ...


def new_mark(
    save: Save,
    word: MarkKind,
    *,
    reason: str,
    by: str,
    evidence: Sequence[str] = (),
    lifts: Sequence[str] = (),
) -> Mark:
    """A new mark on a save of a step."""
    now = datetime.datetime.now(datetime.UTC)
    return Mark(
        id=f"{now:%Y%m%dT%H%M%SZ}-{word.value}-{os.urandom(8).hex()}",
        word=word,
        by=by,
        at=rfc3339(now.timestamp(), "seconds"),
        reason=reason,
        url=absolute_url(save.url),
        number=save.number,
        metadata=metadata_digest(save.digests),
        evidence=tuple(evidence),
        lifts=tuple(lifts),
    )


def put_mark(opened: OpenStep, made: Mark) -> str:
    """Write a mark into a step; its path in the store of the root. Cost: one write."""
    path = opened.in_store(f"{MARKS_FOLDER}/{made.id}.json")
    opened.store.put(path, mark_bytes(made))
    return path


def _known(word: MarkKind | str) -> MarkKind:
    try:
        return MarkKind(word)
    except ValueError:
        words = ", ".join(known.value for known in MarkKind)
        raise UsageError(f"{word!r} is not a mark; marks are {words}") from None


def user_name() -> str:
    """The user who runs this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run as a number that has no name.
        return f"user {os.geteuid()}"


_REASONS = {
    MarkKind.REJECTED: ("loss spike after the resume", "a rejection"),
    MarkKind.CONFIRMED: ("a canary repeated the next 50 steps", "a confirmation"),
}
"""The marks that need a reason, with an example."""


def _check_words(word: MarkKind, reason: str, evidence: Sequence[str], by: str) -> None:
    if word in _REASONS and not reason.strip():
        example, what = _REASONS[word]
        raise UsageError(f"{what} needs a reason", instead=f"--reason '{example}'")
    if len(evidence) > MAX_EVIDENCE:
        raise UsageError(f"{len(evidence)} pieces of evidence; at most {MAX_EVIDENCE} are kept")
    for text in (reason, by, *evidence):
        if len(text) > MAX_STRING:
            raise UsageError(
                f"a text of a mark has {len(text):,} characters; at most {MAX_STRING:,} are kept"
            )


def check_inspected(report: Report) -> None:
    """Raise if it is unknown to which save the mark would apply."""
    if report.verdict is not Verdict.UNKNOWN:
        return
    why = report.with_severity(Severity.FAULT)[0]
    error = AccessDenied if report.exit_code == EXIT_DENIED else StorageUnavailable
    raise error(f"{why.message}; no mark was written", next_command=why.next_command)


def _write(found: OpenTarget, made: Mark, marks: str | None) -> str:
    """Write the mark; gives the address of the file that it lies in."""
    if marks is not None:
        add_mark(marks, made)
        return marks
    try:
        own_file = put_mark(found, made)
    except AccessDenied as error:
        raise AccessDenied(
            f"{error.message}; no mark was written. If the root is read-only, use --marks FILE",
            next_command=command_line("scan", found.store.url, "--marks", "marks.jsonl"),
        ) from error
    return join_url(found.store.url, own_file)


_ACCEPTABLE = frozenset({"step.wrong-step", "metadata.foreign", "state.not-finite"})
"""Findings that no mark is the cause of, and that an acceptance lifts."""


def _takes_as_it_is(word: MarkKind, report: Report, applying: Sequence[Mark]) -> bool:
    """Whether the mark accepts a renamed folder, or weights with NaN, for the first time."""
    found = _ACCEPTABLE.intersection(f.code for f in report.findings)
    is_accepted = any(one.word is MarkKind.ACCEPTED for one in applying)
    return word is MarkKind.ACCEPTED and bool(found) and not is_accepted


def _nothing_to_lift(report: Report, word: MarkKind) -> str:
    what, hint = "not confirmed" if word is MarkKind.UNCONFIRMED else "not pinned", ""
    if word is MarkKind.ACCEPTED:
        what = "neither rejected nor superseded, nor renamed, and no NaN was found in it"
        hint = (
            ". If only the record of another root supersedes it, there is no mark to lift: "
            f"`{command_line('reject', report.url, '--reason', 'WHY')}`, and this command after "
            "it, lift that too"
        )
    return f"{report.url} is {what}; nothing was written{hint}"


def _next_command(found: OpenTarget, word: MarkKind, marks: str | None) -> str:
    option = [] if marks is None else ["--marks", marks]
    if word in (MarkKind.REJECTED, MarkKind.SUPERSEDED, MarkKind.ACCEPTED):
        return command_line("pick", found.store.url, *option)
    return command_line("verify", found.url, *option)

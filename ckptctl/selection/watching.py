"""Verify and seal each step that a job finishes, from a process beside it.

The watch holds no token and writes nothing into a step but its seal. A step is read once it
has not changed between two listings, `grace_s` apart. What was seen of each step is kept in
`.ckptctl/watch.json` of the root, so that a later watch reads nothing again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from ckptctl import __version__
from ckptctl.errors import AccessDenied, OwnFileUnreadable, PathNotFound, StorageError
from ckptctl.findings import EXIT_FRESH, EXIT_STATE_MISSING, Report, Verdict
from ckptctl.formats.frameworks.layouts import OWN_FOLDER, compile_pattern
from ckptctl.formats.own.documents import WatchDocument, WatchedStep
from ckptctl.formats.own.files import as_stored, read_back
from ckptctl.formatting import command_line, rfc3339, seconds_of
from ckptctl.model import ExitCode, Level, NextCommand
from ckptctl.options import PickPolicy, Requirements, StorageOptions, options_from
from ckptctl.records.byte_pass import Limits, Pace
from ckptctl.selection.choosing import Candidate, refusal, why_not
from ckptctl.selection.overdue import (
    ALARM_AFTER,
    Overdue,
    overdue,
    pauses_s,
    save_interval_s,
    written_s,
)
from ckptctl.selection.removing import files_digest
from ckptctl.selection.roots import list_all
from ckptctl.selection.same_root import SeenRoots
from ckptctl.selection.sealing import seal_found
from ckptctl.selection.searching import CachingInspector, candidates_of
from ckptctl.selection.targets import OpenRoot, check_is_folder, open_roots, roots_in
from ckptctl.selection.verifying import OpenTarget
from ckptctl.storage.contract import Store, TooLarge, storage_time_s

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptctl.options import StepKeywords

STATE = f"{OWN_FOLDER}/watch.json"
_CLOCK = f"{OWN_FOLDER}/watch-clock"
SCHEMA = "ckptctl.watch/1"
_MAX_BYTES = 4 << 20
MAX_STEPS = 4_096
"""The newest steps that are watched; older ones are left out."""

INTERVAL_S = 60.0
BYTES_PER_S = 100 << 20
"""The default rate of the reads: a quarter or less of what one node reads from shared storage."""

EXIT_OVERDUE = 36
"""No newer step was proven for several save intervals."""

_PROVEN = ("sealed", "unverifiable")
"""What became of a step that was saved; of safetensors nothing else can be proven."""
_RUNNING = (Verdict.IN_PROGRESS, Verdict.CHANGED)
_EXCLUDED = (Verdict.REJECTED, Verdict.SUPERSEDED)
_OF_OPTIMIZER = (
    *("optimizer.zero", "optimizer.negative", "optimizer.shape", "optimizer.unchanged"),
    "optimizer.discontinuous",
)
"""What an event says besides: the step is sealed, and its optimizer is not that of the run."""


class Event(StrEnum):
    """What was found."""

    SEALED = "sealed"
    DAMAGED = "damaged"
    UNVERIFIABLE = "unverifiable"
    NO_ANSWER = "no-answer"
    NO_ROOT = "no-root"
    OVERDUE = "overdue"


@dataclass(frozen=True, slots=True)
class Watched:
    """One event of a watch."""

    event: Event
    """What was found."""
    root: str
    """The root as given."""
    url: str | None
    """The address of the step; null for an event of the root."""
    number: int | None
    """The number of the step."""
    message: str
    """What was found, in one line."""
    report: Report | None
    """The report of the step; null for an event of the root."""
    exit_code: ExitCode
    """0 for a step that was sealed, 10 for a root that does not exist, 36 where no newer step was
    proven in time; else that of the step or of the storage."""
    next_command: NextCommand


def watch(
    root: str,
    *,
    once: bool = False,
    interval_s: float = INTERVAL_S,
    bytes_per_s: int = BYTES_PER_S,
    accept_unverifiable: bool = False,
    alarm_after: float = ALARM_AFTER,
    jobs: int | None = None,
    on_listed: Callable[[], None] | None = None,
    requirements: Requirements = Requirements(),
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[StepKeywords],
) -> Iterator[Watched]:
    """Yield an event for each step that was sealed or found damaged, newest first.

    A step is read if two listings, `grace_s` apart, show the same files. It is sealed if
    `content` calls it complete and it holds the train state that its predecessors hold; with
    `accept_unverifiable` also if nothing in it can prove it, as safetensors. A step that is
    rejected, superseded, sealed or still being written is left alone. Each state of a step
    is reported once, also over several watches.

    The root is listed every `interval_s` seconds, forever, and `on_listed` is called each time
    that it answered and its steps were read; with `once` a single time, which
    finishes what an earlier watch saw. Reads are kept below `bytes_per_s`. A storage that
    does not answer is an event, once until it answers; with `once` it raises
    `StorageError`. A root that does not exist is an event, once until it exists. So is one in
    which no step newer than the last proven one was proven for `alarm_after` save intervals, once
    until there is one; 0 turns that off.
    `AccessDenied` is always raised, and `UsageError` where the root is a file.

    Cost: each new step twice, to verify and to digest it; one listing of each other step.
    """
    requirements, storage = options_from(keywords, requirements, storage)
    watcher = _Watcher(root, requirements, storage, bytes_per_s, jobs, accept_unverifiable)
    watcher.alarm_after = alarm_after
    answers = True
    while True:
        try:
            yield from watcher.events()
            answers = True
            if on_listed is not None and watcher.exists:
                on_listed()
        except AccessDenied:
            raise
        except StorageError as error:
            if once:
                raise
            if answers:
                yield _no_answer(root, error)
            answers = False
        if once:
            return
        time.sleep(interval_s)


class _Watcher:
    """A root, and how its steps are read; `exists` is false while the root does not exist."""

    def __init__(
        self,
        root: str,
        requirements: Requirements,
        storage: StorageOptions,
        bytes_per_s: int,
        jobs: int | None,
        accept_unverifiable: bool,
    ) -> None:
        self._root = root
        self._requirements = requirements
        self._storage = storage
        self._limits = Limits(jobs, pace=Pace(bytes_per_s))
        self._policy = PickPolicy(level=Level.STRUCTURE, accept_unverifiable=accept_unverifiable)
        self._pattern = compile_pattern(requirements.pattern)
        self._listed_s: float | None = None
        self._seen_roots = SeenRoots()
        self._alarmed: int | None = None
        self.alarm_after = ALARM_AFTER
        self.exists = True

    def events(self) -> Iterator[Watched]:
        """List the root once, and finish the steps that did not change."""
        with ExitStack() as stack:
            (root,) = open_roots(
                stack,
                roots_in(self._root),
                lambda store: list_all(store, self._pattern),
                self._storage,
            )
            self._seen_roots.check(root.store, root.listing)
            existed, self.exists = self.exists, root.listing.exists
            if not self.exists:
                check_is_folder(root.store)
                if existed:
                    yield _no_root(self._root)
                return
            before, self._listed_s = _read_state(root.store), None
            seen: dict[str, WatchedStep] = {}
            try:
                yield from self._finished(root, before, seen)
            except StorageError:
                # A step that cannot be listed must not make the watch forget the others.
                with suppress(StorageError):
                    _write_state(root.store, [*seen.values(), *_later(before, seen)])
                raise
            if seen != before:
                _write_state(root.store, seen.values())
            yield from self._overdue(root, seen)

    def _finished(
        self, root: OpenRoot, before: dict[str, WatchedStep], seen: dict[str, WatchedStep]
    ) -> Iterator[Watched]:
        """Finish each step that has not changed since `before`; `seen` receives every step."""
        inspector = CachingInspector((root,), self._requirements, self._policy.level)
        candidates = candidates_of((root,))[:MAX_STEPS]
        for place, candidate in enumerate(candidates):
            name = candidate.named.name
            with suppress(PathNotFound):  # removed since the root was listed
                step = self._seen(root, candidate, before.get(name))
                seen[name] = step
                # Listed before, with the same files, at least `grace_s` ago.
                unchanged = step is before.get(name) and step["verdict"] is None
                if unchanged and self._age_s(root, step) >= self._requirements.grace_s:
                    found = self._finish(root, candidate, candidates[place + 1 :], inspector)
                    # Kept before it is reported: an event is never repeated.
                    seen[name] = {**step, "verdict": found.verdict}
                    _write_state(root.store, [*seen.values(), *_later(before, seen)])
                    yield from found.events

    def _overdue(self, root: OpenRoot, seen: Mapping[str, WatchedStep]) -> Iterator[Watched]:
        """The alarm, once, where no newer step is proven for several save intervals."""
        proven = (
            step.number
            for step in root.listing.steps
            if step.name in seen and seen[step.name]["verdict"] in _PROVEN
        )
        newest = max(proven, default=None)
        if newest is None or newest == self._alarmed:
            return
        written = written_s(root.store, root.listing, root.trees)
        if newest not in written:
            return  # so many newer steps are not proven: each of them was reported
        interval_s, least_s = save_interval_s(pauses_s(written)), self._requirements.grace_s
        waited_s = time.time() - written[newest]
        if overdue(newest, waited_s, interval_s, self.alarm_after, least_s) is None:
            return  # asks for the time of the storage only where that decides
        waited_s = self._now_s(root) - written[newest]
        late = overdue(newest, waited_s, interval_s, self.alarm_after, least_s)
        if late is not None:
            self._alarmed = newest
            yield overdue_event(self._root, late)

    def _seen(
        self, root: OpenRoot, candidate: Candidate, before: WatchedStep | None
    ) -> WatchedStep:
        """A step as it is now: since when it has these files, and what became of it."""
        opened = OpenTarget(root.store, candidate.named, root.trees.get(candidate.named.name))
        files = files_digest(opened.files)
        if before is not None and before["files"] == files and self._age_s(root, before) >= 0:
            return before
        verdict = None
        if opened.has_seal:
            report = opened.inspect(self._requirements, Level.LISTING).report
            verdict = "sealed" if report.seal is not None and report.usable else None
        name = candidate.named.name
        seen = rfc3339(self._now_s(root), "microseconds")
        return {"name": name, "files": files, "seen": seen, "verdict": verdict}

    def _age_s(self, root: OpenRoot, step: WatchedStep) -> float:
        """How long ago a step was seen first with its files; asks only where that decides."""
        return 0.0 if step["verdict"] else self._now_s(root) - (seconds_of(step["seen"]) or 0.0)

    def _now_s(self, root: OpenRoot) -> float:
        """The time of this listing by the clock of the storage: another host may have listed it."""
        if self._listed_s is None:
            self._listed_s = storage_time_s(root.store, _CLOCK)
        return self._listed_s

    def _finish(
        self,
        root: OpenRoot,
        candidate: Candidate,
        older: Sequence[Candidate],
        inspector: CachingInspector,
    ) -> _Finished:
        """Verify and seal a step."""
        report = inspector(candidate, Level.STRUCTURE)
        if report.verdict in _RUNNING:
            return _Finished(None)
        if report.verdict in _EXCLUDED:
            return _Finished(report.verdict.value)
        if report.verdict is Verdict.UNKNOWN:
            return _Finished(None, self._event(Event.NO_ANSWER, report))
        over = why_not(report, older, inspector, self._policy)
        if over is not None:
            return self._refused(report, over.reason)
        found = OpenTarget(root.store, candidate.named, None, self._pattern)
        outdated = any(finding.code == "seal.outdated" for finding in report.findings)
        if found.has_seal and not outdated:
            return self._refused(report, "its seal does not prove it; a person decides")
        sealed = seal_found(
            found,
            self._requirements,
            self._limits,
            replace=outdated,
            accept_unverifiable=self._policy.accept_unverifiable,
            state_check=True,
        )
        if sealed.path is not None:
            warned = [one for one in sealed.report.findings if one.code in _OF_OPTIMIZER]
            message = "; ".join([sealed.message, *(one.message for one in warned)])
            return _Finished("sealed", self._event(Event.SEALED, sealed.report, message))
        return self._unsealed(sealed.report)

    def _unsealed(self, report: Report) -> _Finished:
        """What follows from the report of a step that was not sealed."""
        if report.verdict in _RUNNING:
            return _Finished(None)
        if report.verdict is Verdict.UNKNOWN:
            return _Finished(None, self._event(Event.NO_ANSWER, report))
        over = refusal(report, self._policy)
        return self._refused(report, over.reason if over is not None else report.verdict.value)

    def _refused(self, report: Report, reason: str) -> _Finished:
        unproven = report.verdict is Verdict.UNVERIFIABLE
        event = Event.UNVERIFIABLE if unproven else Event.DAMAGED
        return _Finished(event.value, self._event(event, report, reason))

    def _event(self, event: Event, report: Report, message: str | None = None) -> Watched:
        exit_code = 0 if event is Event.SEALED else report.exit_code or EXIT_STATE_MISSING
        next_command = {
            Event.DAMAGED: command_line("verify", report.url, "--level", "content"),
            Event.UNVERIFIABLE: command_line("seal", report.url, "--accept-unverifiable"),
            Event.NO_ANSWER: command_line("verify", report.url),
        }.get(event)
        if message is None:
            message = report.findings[0].message if report.findings else report.verdict.value
        return Watched(
            event, self._root, report.url, report.number, message, report, exit_code, next_command
        )


class _Finished:
    """What became of a step; a `verdict` of None means that it is read again later."""

    def __init__(self, verdict: str | None, *events: Watched) -> None:
        self.verdict = verdict
        self.events = events


def _no_answer(root: str, error: StorageError) -> Watched:
    message = f"{error.message}; its steps are unknown"
    next_command = error.next_command or command_line("scan", root)
    return Watched(Event.NO_ANSWER, root, None, None, message, None, error.exit_code, next_command)


def overdue_event(root: str, late: Overdue) -> Watched:
    """The event that no newer step is proven in time."""
    return Watched(
        Event.OVERDUE,
        root,
        None,
        late.step,
        late.message,
        None,
        EXIT_OVERDUE,
        command_line("scan", root),
    )


def _no_root(root: str) -> Watched:
    message = "it does not exist: the job has not saved yet, or the path is wrong"
    next_command = command_line("scan", root)
    return Watched(Event.NO_ROOT, root, None, None, message, None, EXIT_FRESH, next_command)


def _later(before: dict[str, WatchedStep], seen: dict[str, WatchedStep]) -> Iterator[WatchedStep]:
    return (step for name, step in before.items() if name not in seen)


def _read_state(store: Store) -> dict[str, WatchedStep]:
    """What earlier watches saw, by name; nothing if that is missing or damaged."""
    try:
        data = store.read(STATE, limit=_MAX_BYTES)
        found = read_back(data, SCHEMA, WatchDocument, max_objects=MAX_STEPS + 2)
        return {step["name"]: step for step in found["steps"]}
    except (OwnFileUnreadable, PathNotFound, TooLarge):
        return {}


def _write_state(store: Store, steps: Iterable[WatchedStep]) -> None:
    fields: WatchDocument = {"tool": f"ckptctl {__version__}", "steps": [*steps][:MAX_STEPS]}
    store.put(STATE, as_stored(SCHEMA, fields), replace=True)

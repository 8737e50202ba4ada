"""Verify and seal each step that a job finishes, from a process beside it.

The watch holds no token and writes nothing into a step but its seal. A step is read once it
has not changed between two listings, `grace_s` apart. What was seen of each step is kept in
`.ckptctl/watch.json` of the root, so that a later watch reads nothing again.

It also notices that a run saves no newer step that is proven, whatever its trainer reports: saves
that fail without a message, a pointer that stays and a full disk have this in common. How often
the run saves is learned from the write times of its steps; a copied root has those of the copy, so
`run` learns from the steps that it sees appear.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from statistics import median
from typing import NamedTuple, Unpack

from ckptctl import __version__
from ckptctl.errors import AccessDenied, OwnFileUnreadable, PathNotFound, StorageError
from ckptctl.findings import EXIT_FRESH, EXIT_STATE_MISSING, Report, Verdict
from ckptctl.formats.frameworks.layouts import OWN_FOLDER, compile_pattern, last_written_s
from ckptctl.formats.own.documents import WatchDocument, WatchedStep
from ckptctl.formats.own.files import as_stored, read_back
from ckptctl.formatting import command_line, duration, rfc3339, seconds_of
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import ExitCode, Level, NextCommand
from ckptctl.options import PickPolicy, Requirements, StepKeywords, StorageOptions, options_from
from ckptctl.records.byte_pass import Limits, ReadThrottle
from ckptctl.selection.candidates import CachingInspector, Candidate, candidates_of
from ckptctl.selection.choosing import refusal, why_not
from ckptctl.selection.retention import files_digest
from ckptctl.selection.roots import RootListing, list_all
from ckptctl.selection.sealing import seal_found
from ckptctl.selection.targets import OpenRoot, SeenRoots, check_is_folder, open_roots, roots_in
from ckptctl.selection.verifying import OpenTarget
from ckptctl.storage.contract import Store, TooLarge, storage_time_s

ALARM_AFTER = 3.0
"""After how many save intervals without a newer proven step the alarm is raised by default.

A save that is late by one interval is a slow storage or an evaluation."""
LEAST_S = 60.0
"""No alarm is raised earlier: a job that saves each second is not watched for each save."""
_N_NEWEST, _LEAST_PAUSES = 9, 3


class Overdue(NamedTuple):
    """`step` is the newest proven one; it was waited `waited_s` for a newer one."""

    step: int
    waited_s: float
    interval_s: float

    @property
    def message(self) -> str:
        """What did not happen, in one line."""
        return (
            f"no proven step newer than {self.step} for {duration(self.waited_s)}, and a step was "
            f"saved every {duration(self.interval_s)} before"
        )


def written_s(store: Store, listing: RootListing) -> dict[int, float]:
    """When each of the newest steps was written last, by its number; see `last_written_s`.

    Cost: a listing of each step whose files the listing does not show.
    """
    times: dict[int, float] = {}
    for named in listing.steps[:_N_NEWEST]:
        with suppress(PathNotFound):  # removed since the root was listed
            opened = OpenStep(store, named, listing.trees.get(named.name))
            last_s = last_written_s(opened.files)
            if last_s is not None:
                times[named.number] = last_s
    return times


def pauses_s(written: Mapping[int, float]) -> list[float]:
    """The times between the writes of steps, given by number."""
    in_order = [written[number] for number in sorted(written)]
    return [later - earlier for earlier, later in pairwise(in_order) if later > earlier]


def save_interval_s(pauses: Sequence[float]) -> float | None:
    """The usual time between two saves of a run; None where too few show it."""
    return median(pauses) if len(pauses) >= _LEAST_PAUSES else None


def overdue(
    step: int | None, waited_s: float, interval_s: float | None, after: float, least_s: float
) -> Overdue | None:
    """The alarm, where no newer step came for `after` intervals and for `least_s`; else None."""
    if step is None or interval_s is None or after <= 0:
        return None
    limit_s = max(after * interval_s, least_s, LEAST_S)
    return Overdue(step, waited_s, interval_s) if waited_s > limit_s else None


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
    watched = _WatchedRoot(root, requirements, storage, bytes_per_s, jobs, accept_unverifiable)
    watched.alarm_after = alarm_after
    answers = True
    while True:
        try:
            yield from watched.events()
            answers = True
            if on_listed is not None and watched.exists:
                on_listed()
        except AccessDenied:
            raise
        except StorageError as error:
            if once:
                raise
            if answers:
                message = f"{error.message}; its steps are unknown"
                yield _of_root(Event.NO_ANSWER, root, message, error.exit_code, error.next_command)
            answers = False
        if once:
            return
        time.sleep(interval_s)


class _WatchedRoot:
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
        self._limits = Limits(jobs, pace=ReadThrottle(bytes_per_s))
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
                    message = "it does not exist: the job has not saved yet, or the path is wrong"
                    yield _of_root(Event.NO_ROOT, self._root, message, EXIT_FRESH)
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
                    if found.event is not None:
                        yield found.event

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
        written = written_s(root.store, root.listing)
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
        opened = OpenTarget(
            root.store, candidate.named, root.listing.trees.get(candidate.named.name)
        )
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
    ) -> _StepResult:
        """Verify and seal a step."""
        report = inspector(candidate, Level.STRUCTURE)
        if report.is_excluded:
            return _StepResult(report.verdict.value)
        if report.verdict in (*_RUNNING, Verdict.UNKNOWN):
            return self._not_inspected(report)
        over = why_not(report, older, inspector, self._policy)
        if over is not None:
            return self._refused(report, over.reason)
        found = OpenTarget(root.store, candidate.named, None, self._pattern)
        outdated = report.has_finding("seal.outdated")
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
            return _StepResult("sealed", self._event(Event.SEALED, sealed.report, message))
        report = sealed.report
        if report.verdict in (*_RUNNING, Verdict.UNKNOWN):
            return self._not_inspected(report)
        over = refusal(report, self._policy)
        return self._refused(report, over.reason if over is not None else report.verdict.value)

    def _not_inspected(self, report: Report) -> _StepResult:
        is_unknown = report.verdict is Verdict.UNKNOWN
        return _StepResult(None, self._event(Event.NO_ANSWER, report) if is_unknown else None)

    def _refused(self, report: Report, reason: str) -> _StepResult:
        unproven = report.verdict is Verdict.UNVERIFIABLE
        event = Event.UNVERIFIABLE if unproven else Event.DAMAGED
        return _StepResult(event.value, self._event(event, report, reason))

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


class _StepResult(NamedTuple):
    """What became of a step; a `verdict` of None means that it is read again later."""

    verdict: str | None
    event: Watched | None = None


def _of_root(
    event: Event, root: str, message: str, exit_code: int, next_command: str | None = None
) -> Watched:
    scan = command_line("scan", root)
    return Watched(event, root, None, None, message, None, exit_code, next_command or scan)


def overdue_event(root: str, late: Overdue) -> Watched:
    """The event that no newer step is proven in time."""
    return replace(_of_root(Event.OVERDUE, root, late.message, EXIT_OVERDUE), number=late.step)


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

"""Decide whether a step is on the branch that the run is on now.

A run that goes back saves again under smaller numbers than those of the branch that it left. A
resume from step N supersedes every newer step by a mark in each root. A root may be absent at that
moment, or read-only: so the root that the job saves to records each resume,
`.ckptctl/branches/ATTEMPT.from-STEP.json`, and `pick` over several roots compares the steps of the
other roots with these records.

A stock writer leaves neither mark nor record. Then only the times of the writes show it: a step
with a lower number was written later. They are evidence as far as they are times of training, with
more time between two saves than a save takes; a copy has times of its own. See
docs/decisions/branches.md.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from ckptctl.errors import OwnFileUnreadable
from ckptctl.findings import Claim, ClaimName, ClaimState, Finding, Report, Verdict
from ckptctl.formats.frameworks.layouts import OWN_FOLDER, counted_by, is_of_one_attempt
from ckptctl.formats.own.documents import BranchDocument, LeftBehind
from ckptctl.formats.own.files import as_stored, read_back, utc_now
from ckptctl.formats.own.marks import metadata_digest
from ckptctl.formats.own.seals import Seal
from ckptctl.formatting import counted, rfc3339, seconds_of, some_of, verb
from ckptctl.inspection.inspecting import Inspection
from ckptctl.inspection.one_save import (
    LEAST_WINDOW_S,
    SaveTimes,
    are_apart,
    is_of_training,
    times_of,
)
from ckptctl.model import Level
from ckptctl.storage.contract import Store, StoreKind, list_if_there, read_if_there
from ckptctl.storage.in_flight import in_flight
from ckptctl.storage.opening import absolute_url, base_name

if TYPE_CHECKING:
    from ckptctl.selection.candidates import CachingInspector, Candidate
    from ckptctl.selection.targets import OpenRoot


class BranchState(Enum):
    """What the write times of the steps of a root show about one of them."""

    CURRENT = "current"
    """No step with a lower number was written after it."""
    WENT_BACK = "went back"
    """The run trained and saved steps with lower numbers afterwards."""
    DOUBTFUL = "doubtful"
    """Steps with lower numbers were written afterwards, by training or by a copy."""
    COPIED = "copied"
    """The times are those of a copy, which prove nothing."""


class WriteOrder(msgspec.Struct, frozen=True):
    """What the write times of the steps of a root show about one of them."""

    state: BranchState
    claim: Claim
    own: SaveTimes | None = None
    """When the step was written; None where the storage keeps no times."""
    later: tuple[SaveTimes, ...] = ()
    """Steps with lower numbers that were written after it, in the order of their writes."""

    @property
    def last(self) -> SaveTimes:
        """The step that was written last."""
        return self.later[-1]

    @property
    def why(self) -> str:
        """What was written after what, in one line."""
        if self.own is None or not self.later:
            return self.claim.by
        numbers = [times.number for times in self.later]
        return (
            f"{counted(len(numbers), 'step')} with lower numbers ({some_of(numbers)}) were written "
            f"after step {self.own.number}: step {self.last.number} at "
            f"{rfc3339(self.last.first_s, 'seconds')}, step {self.own.number} at "
            f"{rfc3339(self.own.weights_s, 'seconds')}"
        )


def write_order(
    own: SaveTimes | None, others: Iterable[SaveTimes], n_not_compared: int = 0
) -> WriteOrder:
    """Whether the step with the times `own` is on the branch that was written last.

    `others` are steps of the same root without those that a mark or a record excludes;
    `n_not_compared` is how many more there are with lower numbers. Cost: nothing is read.
    """
    if own is None:
        return WriteOrder(BranchState.COPIED, _unknown("its write times are not known"))
    lower = sorted((one for one in others if one.number < own.number), key=_written)
    later = tuple(one for one in lower if one.first_s > own.weights_s)
    if not later:
        return WriteOrder(BranchState.CURRENT, _in_order(own, lower, n_not_compared), own)
    order = WriteOrder(_state_of(own, lower, later), _unknown(""), own, later)
    claim = _unknown(f"{order.why}; a copy may have done so")
    if order.state is BranchState.WENT_BACK:
        claim = Claim(ClaimName.BRANCH, ClaimState.CONTRADICTED, order.why)
    return msgspec.structs.replace(order, claim=claim)


def _state_of(
    own: SaveTimes, lower: Sequence[SaveTimes], later: Sequence[SaveTimes]
) -> BranchState:
    if not are_apart(own, later[0]):
        return BranchState.COPIED
    # A copy that was interrupted and continued has one gap; a run has one before each save.
    earlier = [times for times in lower if times.first_s <= own.weights_s]
    in_order = [own, *later] if len(later) > 1 else [*earlier, own]
    if not is_of_training(in_order, by_number=False):
        return BranchState.DOUBTFUL
    numbers = [one.number for one in sorted([*lower, own], key=_written)]
    n_turns = sum(later < earlier for earlier, later in pairwise(numbers))
    if n_turns > max(1, len(lower) // 4):
        return BranchState.DOUBTFUL  # a copy in any order; a run seldom goes back so often
    is_soon = later[-1].first_s - own.weights_s <= LEAST_WINDOW_S
    return BranchState.DOUBTFUL if is_soon else BranchState.WENT_BACK


def _written(times: SaveTimes) -> tuple[float, float]:
    return times.first_s, times.last_s


def _in_order(own: SaveTimes, lower: Sequence[SaveTimes], n_not_compared: int) -> Claim:
    if n_not_compared:
        were = verb(n_not_compared, "was", "were")
        return _unknown(f"{counted(n_not_compared, 'older step')} {were} not compared")
    if not lower:
        return _proven("no older step was written later")
    before = max(lower, key=lambda one: one.weights_s)
    if are_apart(before, own):
        return _proven("steps written in the order of their numbers")
    return _unknown(f"written as soon after step {before.number} as by a copy")


def _proven(by: str) -> Claim:
    return Claim.proven(ClaimName.BRANCH, by)


def _unknown(why: str) -> Claim:
    return Claim.unknown(ClaimName.BRANCH, why, "the times of the next save")


MAX_NEAREST = 4
"""So many of the next older steps are compared where a listing is a round trip."""

MAX_LOCAL = 50
"""So many older steps at most are compared on a file system."""

MAX_LOCAL_FILES = 4000
"""Listing the steps that are compared on a file system takes the attributes of so many files."""

MAX_TOUCHED = 4
"""So many of the older steps whose folders changed last are compared."""


def to_compare(
    older: Sequence[str],
    folder_times: Mapping[str, float],
    written_s: float,
    *,
    known: Collection[str] = (),
    n_local_files: int | None = None,
) -> tuple[list[str], int]:
    """The older steps whose files are listed, of names nearest first; how many say nothing.

    `folder_times` are the times of the steps' folders, as far as the listing of the root shows
    them: a folder changes when a file is created in it, so one that did not change after
    `written_s` holds no step that was written later. `known` are steps that are listed already.
    `n_local_files` is how many files a step has on a file system; None in an object store, where
    a listing is a round trip. Without these times, steps far away are compared at distances of
    8, 16, 32, …: a branch of many steps is found.
    """
    n_nearest = MAX_NEAREST
    if n_local_files is not None:
        n_nearest = max(MAX_NEAREST, min(MAX_LOCAL, MAX_LOCAL_FILES // max(1, n_local_files)))
    chosen = {*older[:n_nearest], *known} & {*older}
    changed = [name for name in older if folder_times.get(name, 0.0) > written_s]
    changed.sort(key=lambda name: -folder_times[name])
    chosen.update(changed[:MAX_TOUCHED])
    place = 2 * MAX_NEAREST
    while place <= len(older) and not folder_times:
        chosen.add(older[place - 1])
        place *= 2
    silent = [
        name
        for name in older
        if name not in chosen and not folder_times.get(name, written_s + 1) <= written_s
    ]
    return [name for name in older if name in chosen], len(silent)


def branch_of(
    chosen: Candidate,
    candidates: Sequence[Candidate],
    root: OpenRoot,
    inspected: Mapping[Candidate, Inspection],
    inspector: CachingInspector,
) -> WriteOrder:
    """Whether a step is on the branch that was written last, among `candidates`.

    `root` is that of the step, which is among the `inspected`. Steps of other roots, those that
    count something else, those that a mark or a record excludes, and folders that are no steps, do
    not count. Cost: a listing of each step in `to_compare`, none of those that the `inspector` or
    the listing of the root listed before, and an inspection at `listing` of each older step that
    was written later.
    """
    own = inspected[chosen]
    if own.notes.accepted:
        # The step to go on from.
        return WriteOrder(BranchState.CURRENT, _proven("accepted by a person"))
    count = counted_by(chosen.named.layout)
    older = {
        one.named.name: one
        for one in candidates
        if one.root_index == chosen.root_index
        and one.named.number < chosen.named.number
        and counted_by(one.named.layout) == count
        and not (one in inspected and _is_left(one, inspected[one].report))
    }
    own_times = times_of(own.step)
    if own_times is None:
        return write_order(None, ())
    known = {name: times_of(inspected[one].step) for name, one in older.items() if one in inspected}
    is_local = root.store.kind is StoreKind.LOCAL
    names, n_silent = to_compare(
        [*older],
        root.listing.folder_times,
        own_times.weights_s,
        known={*known, *root.listing.trees},
        n_local_files=len(own.step.files) if is_local else None,
    )
    unlisted = [older[name] for name in names if name not in known]
    listed = [known[name] for name in names if name in known]
    listed += inspector.times_of(unlisted)
    times = [one for one in listed if one is not None]
    n_silent += len(listed) - len(times)  # what could not be listed was not compared
    order = write_order(own_times, times, n_silent)
    later = (older[one.name] for one in order.later if one.name not in known)
    left = {one.named.name for one in later if _is_left(one, inspector(one, Level.LISTING))}
    if left:
        order = write_order(own_times, [one for one in times if one.name not in left], n_silent)
    return order


def _is_left(candidate: Candidate, report: Report) -> bool:
    """Whether a mark or a record excludes a step, or it is none."""
    return report.is_excluded or candidate.is_no_step(report)


def written_after_all(times: SaveTimes | None, others: Sequence[SaveTimes | None]) -> bool:
    """Whether weights of a step were written after those of all others."""
    known = [one.weights_s for one in others if one is not None]
    return times is not None and len(known) == len(others) and times.weights_s > max(known)


BRANCHES_FOLDER = f"{OWN_FOLDER}/branches"

MAX_READ = 1_000
"""The number of newest records that are read; of older ones only the name counts."""

_SCHEMA = "ckptctl.branch/1"
_MAX_BYTES = 8 << 20
_MAX_OBJECTS = 50_000
_START = "start"
_TIME = r"[0-9]{8}T[0-9]{6}\.[0-9]{6}Z"
_NAME = re.compile(
    rf"(?P<attempt>(?P<at>{_TIME})-[0-9a-f]{{8}})\.from-(?P<step>start|[0-9]+)\.json"
)


@dataclass(frozen=True, slots=True)
class AbandonedSave:
    """A save that was listed but not chosen; `metadata` is None for one that had none yet."""

    url: str
    number: int
    metadata: str | None


@dataclass(frozen=True, slots=True)
class RecordedResume:
    """A resume of the run, as one of its roots records it.

    `step` is None for a fresh start, `loaded` the `metadata_digest` of the loaded save.
    `at_s` is the time of the decision, in seconds since 1970, `root` the recording root.
    """

    root: str
    attempt: str
    step: int | None
    at_s: float
    loaded: str | None = None
    left: frozenset[AbandonedSave] = frozenset()

    def leaves(self, report: Report, seal: Seal | None) -> bool:
        """Whether the step was saved on the branch that this resume abandoned.

        True if the resume listed that very save. A step that was not listed is assessed by
        its seal: the attempt that saved it and the time of sealing, by the clocks of the
        job's machines. Without a seal of `ckptctl.train`, the time of its newest file
        decides, by the clock of the storage.
        """
        number = report.number
        if number is None or (self.step is not None and number <= self.step):
            return False
        metadata = metadata_digest(report.digests)
        if AbandonedSave("", number, metadata) in self.left:
            return True
        name = base_name(report.url)
        if (
            is_of_one_attempt(name)
            and AbandonedSave(absolute_url(report.url), number, None) in self.left
        ):
            return True
        if seal is not None and seal.origin is not None:
            if seal.origin.attempt >= self.attempt:
                return False
            sealed_s = seconds_of(seal.sealed_at)
            # A seal is dated to the second; in the same second it may be of the abandoned branch.
            return sealed_s is None or sealed_s <= int(self.at_s)
        return report.written_s is not None and report.written_s < self.at_s


def put_resume(
    store: Store,
    attempt: str,
    step: int | None,
    digests: Sequence[tuple[str, str]],
    left: Sequence[Report],
) -> None:
    """Record a resume in the root that the job saves to. Cost: one write."""
    document: BranchDocument = {
        "attempt": attempt,
        "step": step,
        "at": utc_now(),
        "loaded": metadata_digest(digests),
        "left": [
            {
                "url": absolute_url(one.url),
                "number": one.number,
                "metadata": metadata_digest(one.digests),
            }
            for one in left
            if one.number is not None
        ],
    }
    name = f"{attempt}.from-{_START if step is None else step}.json"
    store.put(f"{BRANCHES_FOLDER}/{name}", as_stored(_SCHEMA, document), replace=True)


def read_resumes(store: Store) -> tuple[RecordedResume, ...]:
    """The resumes that a root records.

    The name of a record counts if its content cannot be read. Raises `StorageError` if the
    root does not answer. Cost: one listing, and one read per resume.
    """
    named: dict[str, RecordedResume] = {}
    for entry in list_if_there(store, BRANCHES_FOLDER):
        match = _NAME.fullmatch(entry.path.rpartition("/")[2])
        at_s = _named_at(match["at"]) if match else None
        if match is not None and at_s is not None:
            step = None if match["step"] == _START else int(match["step"])
            named[entry.path] = RecordedResume(store.url, match["attempt"], step, at_s)
    newest = sorted(named, reverse=True)[:MAX_READ]
    for path, data in in_flight(partial(read_if_there, store, limit=_MAX_BYTES), newest):
        if data is not None:
            named[path] = _parsed(named[path], data)
    return tuple(named.values())


def _parsed(named: RecordedResume, data: bytes) -> RecordedResume:
    try:
        fields = read_back(data, _SCHEMA, BranchDocument, max_objects=_MAX_OBJECTS)
    except OwnFileUnreadable:
        return named
    return replace(
        named,
        at_s=seconds_of(fields["at"]) or named.at_s,
        loaded=fields["loaded"],
        left=frozenset(_left(each) for each in fields["left"]),
    )


def _left(save: LeftBehind) -> AbandonedSave:
    # A copy of the same save counts in every root.
    url = save["url"] if save["metadata"] is None else ""
    return AbandonedSave(url, save["number"], save["metadata"])


def _named_at(time: str) -> float | None:
    """The time in the name of an attempt, in seconds since 1970; None for what is none."""
    import datetime

    try:
        return datetime.datetime.strptime(f"{time}+0000", "%Y%m%dT%H%M%S.%fZ%z").timestamp()
    except (ValueError, OverflowError):
        return None


def left_behind(inspected: Inspection, resumes: Sequence[RecordedResume]) -> RecordedResume | None:
    """The resume that abandoned a step; None for a step of the current branch.

    `resumes` are those that other roots record. A step that a resume loaded belongs to the
    current branch, and so does one that a person has accepted.
    """
    report, notes = inspected.report, inspected.notes
    if report.verdict is Verdict.UNKNOWN or notes.accepted:
        return None
    metadata = metadata_digest(report.digests)
    for one in sorted(resumes, key=lambda one: one.attempt, reverse=True):
        if metadata is not None and (one.step, one.loaded) == (report.number, metadata):
            return None
        if one.leaves(report, notes.seal):
            return one
    return None


def ruled_out(inspected: Inspection, resume: RecordedResume) -> Inspection:
    """The inspection of a step, with the finding that a resume has abandoned it."""
    report = inspected.report
    went_on = (
        "started again from step 0" if resume.step is None else f"continued from step {resume.step}"
    )
    finding = Finding(
        "step.superseded",
        "",
        f"superseded by attempt {resume.attempt}: the run {went_on}, by the record in "
        f"{resume.root}, and this step is of the branch before it",
        found=f"a save of the abandoned branch in {report.url}",
        next_command=None,
    )
    return replace(inspected, report=report.with_findings(finding))

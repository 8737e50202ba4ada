"""Record each resume of a run with several roots, and supersede the steps that it abandoned.

A resume from step N supersedes every newer step, and a mark in each root states that. An
optional root may be absent at that moment, or be the local disk of another machine, and a
root may be read-only. So the root that the job saves to records each resume,
`.ckptctl/branches/ATTEMPT.from-STEP.json`, and `pick` over several roots compares the steps
of the other roots with these records.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ckptctl.errors import OwnFileUnreadable
from ckptctl.findings import Finding, Report, Verdict
from ckptctl.formats.frameworks.layouts import OWN_FOLDER, is_of_one_attempt
from ckptctl.formats.own.documents import BranchDocument, LeftBehind
from ckptctl.formats.own.files import as_stored, read_back, utc_now
from ckptctl.formats.own.marks import metadata_digest
from ckptctl.formats.own.seals import Seal
from ckptctl.formatting import seconds_of
from ckptctl.inspection.inspecting import Inspection
from ckptctl.storage.contract import Store, list_if_there, read_if_there
from ckptctl.storage.opening import absolute_url, base_name

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
    from ckptctl.storage.in_flight import in_flight  # only for a run with several roots

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
    worse = report.with_findings(finding)
    if worse.verdict is not Verdict.SUPERSEDED:
        worse = replace(worse, exit_code=report.exit_code)
    return replace(inspected, report=worse)

"""Find the resumes in a log: the rows before, the rows trained again, the rows after.

A resume is compared with the segment that trained up to its checkpoint. A job that died
twice over the same steps is therefore not compared with the failed attempt in between.
Also counts the work that a resume makes the job do again.

The caller, a resume report or the log names the checkpoint. `ckptctl.train` writes one report
for each resume into the checkpoint root, under `.ckptctl/attempts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from ckptctl.errors import OwnFileUnreadable, PathNotFound, UsageError
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.formats.own import ledger as own
from ckptctl.formats.own.files import ATTEMPTS_FOLDER
from ckptctl.formatting import counted, seconds_of
from ckptctl.logs.rows import LogPosition, Marker, Number, Row
from ckptctl.loss.segments import Boundary, Segment, Split, log_interval
from ckptctl.model import NonNegative
from ckptctl.options import StorageOptions
from ckptctl.storage.opening import base_name, join_url, open_store, parent_url

N_BEFORE = 1_000
"""Rows before a resume that are compared."""
N_AFTER = 1_000
"""Rows after a resume that are compared."""
_N_SAMPLED = 500
"""Rows of the whole history that are sampled."""

_LOST_ROWS = 20


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The checkpoint that a job resumed from."""

    step: int
    """The last step that it holds."""
    source: str
    """Where it is from: report, log, or the caller (`asked`)."""
    tokens: int | None = None
    """Tokens consumed until then; null where unknown."""
    samples: int | None = None
    """Samples consumed until then; null where unknown."""
    at_s: float | None = None
    """When the job resumed, in seconds since 1970; null where unknown."""
    world_size: int | None = None
    """Ranks of the resumed job; null where unknown."""
    saved_world_size: int | None = None
    """Ranks that saved the checkpoint; null where unknown."""

    @property
    def growth(self) -> float:
        """By what factor the number of ranks has grown; 1 where it is not known."""
        if not self.world_size or not self.saved_world_size:
            return 1.0
        return self.world_size / self.saved_world_size


class LedgerAnswer(msgspec.Struct, frozen=True):
    """What the data ledger of a run shows: see `ckptctl.data_use`."""

    source: str
    """The step that holds it."""
    since: int
    """It holds the steps after this one."""
    step: int
    """The last step that it holds."""
    verdict: str
    """Repeated or skipped samples are `found`, `excluded` up to `step`, or `unknown`."""
    message: str
    after_step: int | None = None
    """The first step behind which samples were repeated or skipped; None where that is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedResume:
    """One resume, as rows."""

    number: int
    """Its number in the log, counted from 1."""
    before: tuple[Row, ...] = ()
    """The rows of the steps below the first step after the resume."""
    overwritten: tuple[Row, ...] = ()
    """The rows of the same segment whose steps the resumed job trained again."""
    after: tuple[Row, ...]
    """The rows of the resumed job."""
    boundary: Boundary
    """What separates the two segments."""
    resume_point: ResumePoint | None = None
    """The checkpoint that was resumed from; null where unknown."""
    marker: Marker | None = None
    """The line that marks the start; null where there is none."""
    restarted: bool = False
    """The job started from the beginning instead of resuming."""
    last_step: int | None = None
    """The last step of the resumed job, where `after` does not hold all of its rows."""
    history: tuple[Row, ...] = ()
    """A sample of all rows before the resume, from the first one on."""

    @property
    def first_step(self) -> int:
        """The first step that the resumed job logged."""
        return self.after[0].step

    @property
    def position(self) -> LogPosition:
        """The position of the first row of the resumed job."""
        return self.after[0].position

    @property
    def interval(self) -> int:
        """Steps from one row to the next before the resume; after it, where none are before."""
        return log_interval(self.before[-100:] if len(self.before) > 1 else self.after)

    @property
    def is_of_another_attempt(self) -> bool:
        """Whether something besides the rows shows that another attempt wrote them.

        That is a file of its own, a line that announces a start, or the caller, who names
        the checkpoint. A step that goes back does not show it: a logger or a log shipper
        can write rows again.
        """
        named = self.resume_point is not None and self.resume_point.source != "log"
        return named or self.boundary in (Boundary.FILE, Boundary.MARKER, Boundary.CANARY)

    def beyond(self, step: int) -> LoggedResume:
        """The same resume with its boundary moved to `step`: the rows up to it are those before.

        Where the rows up to `step` agree, a fault can still begin after them.
        """
        # Those of the resumed job: a counter of the process continues within it.
        trained = tuple(row for row in self.after if row.step <= step)
        return replace(
            self,
            before=(*self.before, *trained)[-N_BEFORE:],
            overwritten=tuple(row for row in self.overwritten if row.step > step),
            after=tuple(row for row in self.after if row.step > step),
            resume_point=None,
            marker=None,
        )


def resumes(split: Split) -> tuple[LoggedResume, ...]:
    """Every resume in the segments that were kept, oldest first."""
    segments = split.segments
    return tuple(_resume(segments, i, None) for i in range(1, len(segments)))


def resume_numbered(
    split: Split, number: int, resume_point: ResumePoint | None
) -> LoggedResume | None:
    """The resume with this number; None where it does not exist or was not kept.

    The resume point applies to it where the caller named its step, where it matches the
    segment, or where the resume is the last one. A report of another resume is ignored.
    """
    numbers = [segment.number - 1 for segment in split.segments]
    if number not in numbers[1:]:
        return None
    i = numbers.index(number)
    applies = resume_point is not None and (
        resume_point.source == "asked"
        or i == len(split.segments) - 1
        or _follows(split.segments[i], resume_point)
    )
    return _resume(split.segments, i, resume_point if applies else None)


def _follows(segment: Segment, resume_point: ResumePoint) -> bool:
    """Whether a segment begins directly after the checkpoint."""
    interval = log_interval(segment.rows[:100])
    return resume_point.step <= segment.first_step <= resume_point.step + max(1, interval)


def resume_at(
    split: Split, resume_point: ResumePoint, *, may_divide: bool = True
) -> LoggedResume | None:
    """The newest resume, with the resume point that is claimed for it; None where there is none.

    The claim is about the last segment, and it is tested against that segment's first step,
    whichever way they differ. Another segment that fits the claim better is another resume.

    If `may_divide`, a log of one file is divided at the step where no earlier segment came
    near it: one process after another may have appended to a log without a trace. The rows
    that the dead job logged after its checkpoint are indistinguishable, so a resume point from a
    report divides a log only where the times of the rows place the resume between them.
    """
    segments = split.segments
    last = len(segments) - 1
    if may_divide and not (last > 0 and _is_tested(segments, resume_point)):
        divided = _divided(segments, resume_point)
        if divided is not None:
            return divided
    return _resume(segments, last, resume_point) if last > 0 else None


def _is_tested(segments: Sequence[Segment], resume_point: ResumePoint) -> bool:
    """Whether the last of several segments is the resumed job, whatever its first step is.

    It is where it follows the checkpoint, where it has a file of its own, and where an
    earlier segment may have saved the checkpoint.
    """
    *earlier, last = segments
    if resume_point.source == "report" or _follows(last, resume_point):
        return True
    if last.rows[0].position.file != earlier[0].rows[0].position.file:
        return True
    # The last rows of a job that died are often lost in a buffer.
    lost = _LOST_ROWS * log_interval(last.rows[:100])
    return any(segment.last_step + lost >= resume_point.step for segment in earlier)


def resume_alone(split: Split, resume_point: ResumePoint | None) -> LoggedResume | None:
    """The resume of a log that holds only the rows of the resumed job; None for other logs."""
    if split.n_segments != 1:
        return None
    (segment,) = split.segments
    marker = segment.marker
    if resume_point is None and marker is not None and marker.step is not None:
        resume_point = ResumePoint(marker.step, "log")
    is_resumed = marker is not None and not marker.fresh
    if resume_point is not None:
        is_resumed = is_resumed or segment.first_step >= resume_point.step > 0
    if not is_resumed:
        return None
    return LoggedResume(
        number=1,
        after=segment.rows[:N_AFTER],
        boundary=segment.boundary,
        resume_point=resume_point,
        marker=marker,
    )


def canary_of(run: Split, canary: Split) -> LoggedResume | None:
    """The last segment of a canary as a resume, compared with the log of the run.

    None where the run has no row before or at the first step of the canary.
    """
    if not canary.segments or not run.segments:
        return None
    segment = canary.segments[-1]
    first = segment.first_step
    begun = [i for i, candidate in enumerate(run.segments) if candidate.first_step <= first]
    if not begun:
        return None
    # Where the run itself resumed later, an earlier segment holds these steps.
    holding = [i for i in begun if run.segments[i].last_step >= first] or begun
    i = holding[-1]
    return LoggedResume(
        number=1,
        before=_history(run.segments, i, first)[-N_BEFORE:],
        history=_sampled(_history(run.segments, i, first)),
        overwritten=tuple(row for row in run.segments[i].rows if row.step >= first),
        after=segment.rows[:N_AFTER],
        boundary=Boundary.CANARY,
        marker=segment.marker,
    )


def _resume(segments: Sequence[Segment], i: int, resume_point: ResumePoint | None) -> LoggedResume:
    segment = segments[i]
    first = segment.first_step
    earlier = [j for j in range(i) if segments[j].first_step < first]
    if resume_point is None and segment.marker is not None and segment.marker.step is not None:
        resume_point = ResumePoint(segment.marker.step, "log")
    compared = earlier[-1] if earlier else i - 1
    # The log begins after the checkpoint: every earlier segment is another attempt from the
    # same checkpoint, and may have failed in the same way.
    is_retry = not earlier and resume_point is not None and 0 < resume_point.step <= first
    rows = segments[compared].rows
    history = () if is_retry else _history(segments, compared, first)
    return LoggedResume(
        number=segment.number - 1,
        before=history[-N_BEFORE:],
        history=_sampled(history),
        overwritten=() if is_retry else tuple(row for row in rows if row.step >= first),
        after=segment.rows[:N_AFTER],
        boundary=segment.boundary,
        resume_point=resume_point,
        marker=segment.marker,
        last_step=segment.last_step,
        restarted=not earlier and not is_retry,
    )


def _history(segments: Sequence[Segment], i: int, below: int) -> tuple[Row, ...]:
    """The rows below a step: of segment `i`, and of the segments that it continued."""
    rows: tuple[Row, ...] = ()
    while True:
        rows = (*(row for row in segments[i].rows if row.step < below), *rows)
        below = segments[i].first_step
        earlier = [j for j in range(i) if segments[j].first_step < below]
        if not earlier:
            break
        i = earlier[-1]
    return rows


def _sampled(rows: Sequence[Row]) -> tuple[Row, ...]:
    return tuple(rows[:: -(-len(rows) // _N_SAMPLED) or 1])


def _divided(segments: Sequence[Segment], resume_point: ResumePoint) -> LoggedResume | None:
    """The last segment, divided at the step; None where it does not hold the step."""
    i = len(segments) - 1
    if i < 0 or not segments[i].first_step < resume_point.step < segments[i].last_step:
        return None
    segment = segments[i]
    if resume_point.source == "report" and not _is_between(segment, resume_point):
        return None
    after = tuple(row for row in segment.rows if row.step > resume_point.step)
    history = _history(segments, i, resume_point.step + 1)
    return LoggedResume(
        number=segment.number,
        before=history[-N_BEFORE:],
        history=_sampled(history),
        after=after[:N_AFTER],
        boundary=Boundary.ASKED,
        resume_point=resume_point,
    )


def _is_between(segment: Segment, resume_point: ResumePoint) -> bool:
    """Whether the job resumed between the rows on the two sides of the step, by their times."""
    before = [row.at for row in segment.rows if row.step <= resume_point.step][-1:]
    after = [row.at for row in segment.rows if row.step > resume_point.step][:1]
    if resume_point.at_s is None or not before or before[0] is None or after[0] is None:
        return False
    return before[0] <= resume_point.at_s <= after[0]


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The work between the step of the checkpoint and the last step logged before the resume."""

    from_step: int
    """The step of the checkpoint."""
    to_step: int
    """The last step that was logged before the resume."""
    steps: int
    """Steps between the two."""
    tokens: int | None
    """Tokens, where the log counts them."""
    samples: int | None
    """Samples, where the log counts them."""
    seconds: NonNegative | None
    """Seconds, from the times in the log or the step time."""

    @property
    def message(self) -> str:
        """The amounts in one line."""
        parts = [counted(self.steps, "step")]
        parts += [f"{self.tokens:,} tokens"] if self.tokens is not None else []
        parts += [f"{self.samples:,} samples"] if self.samples is not None else []
        parts += [f"{self.seconds:,.0f} s"] if self.seconds is not None else []
        return f"{', '.join(parts)} (from step {self.from_step:,} to step {self.to_step:,})"


def recomputed_by(resume: LoggedResume) -> Recomputed | None:
    """The work that a resume does again; None where the log does not show the end of a process."""
    if resume.boundary is Boundary.ASKED:
        return None
    known = resume.resume_point
    step = known.step if known is not None else resume.first_step - 1
    return recomputed_from(step, (*resume.before, *resume.overwritten))


def recomputed_from(step: int, rows: Sequence[Row]) -> Recomputed | None:
    """The work after `step` in the rows of the job that died; None where no row reaches it.

    Needs no resume in the log, so the work can be counted before the job resumes.
    """
    held = [row for row in rows if row.step <= step]
    lost = [row for row in rows if row.step > step]
    if not rows or rows[-1].step < step:
        return None
    if not lost:
        return Recomputed(step, rows[-1].step, 0, 0, 0, 0.0)
    last = lost[-1]
    return Recomputed(
        from_step=step,
        to_step=last.step,
        steps=last.step - step,
        tokens=_counted(held, step, last, "tokens"),
        samples=_counted(held, step, last, "samples"),
        seconds=_seconds(held, lost, step),
    )


def _counted(held: Sequence[Row], step: int, last: Row, name: str) -> int | None:
    """The difference of a counter between the row of the step itself and the last one."""
    start: Number | None = getattr(held[-1], name) if held and held[-1].step == step else None
    end: Number | None = getattr(last, name)
    return None if start is None or end is None else round(end.value - start.value)


def _seconds(held: Sequence[Row], lost: Sequence[Row], step: int) -> float | None:
    """The time of the lost steps: by the clock of the rows, else by the mean step time."""
    start, end = held[-1].at if held and held[-1].step == step else None, lost[-1].at
    if start is not None and end is not None:
        return end - start if end >= start else None
    times = [row.step_time_s.value for row in lost if row.step_time_s is not None]
    return sum(times) / len(times) * (lost[-1].step - step) if times else None


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """The content of a resume report: the root and the path of the step that was loaded."""

    url: str
    """Its path or URL."""
    root: str | None
    """The checkpoint root."""
    path: str | None
    """The step that was loaded."""
    resume_point: ResumePoint | None
    """The checkpoint that was resumed from."""


@dataclass(frozen=True, slots=True)
class NamedCheckpoint:
    """The checkpoint as the caller names it: by its step, by a resume report, or not at all.

    `tokens` and `samples` are the counts at `step`. `report` is a report, or the
    checkpoint root that holds it. `world_size` and `saved_world_size` are the ranks that
    resumed, and that saved it. Raises `UsageError` for counts without a step.
    """

    step: int | None = None
    tokens: int | None = None
    samples: int | None = None
    report: str | None = None
    world_size: int | None = None
    saved_world_size: int | None = None

    def __post_init__(self) -> None:
        if self.step is None and (self.tokens is not None or self.samples is not None):
            raise UsageError(
                "resume_tokens and resume_samples need resume_step: they are counts at that step"
            )

    def resolve(self, storage: StorageOptions) -> tuple[ResumePoint | None, ResumeReport | None]:
        """The checkpoint, and the report where one was named.

        `step` outweighs the report, whose counts and time apply to its own step only.
        Raises `UsageError` where the report does not exist or records a fresh start. Where
        `step` is given, a root may be without a report: not every job writes one.
        """
        report = None
        if self.report is not None:
            report = read_resume_report(self.report, storage, or_none=self.step is not None)
        reported = None if report is None else report.resume_point
        if self.step is None:
            if report is not None and reported is None:
                raise UsageError(
                    f"{report.url}: the report records a fresh start; there is no resume to check"
                )
            return reported, report
        if reported is None or reported.step != self.step:
            reported = ResumePoint(self.step, "asked")
        names = ("tokens", "samples", "world_size", "saved_world_size")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(reported, source="asked", **given), report


def read_resume_report(
    path: str, storage: StorageOptions, *, or_none: bool = False
) -> ResumeReport | None:
    """The report at `path`, which is its file or a checkpoint root: then the newest one.

    None, with `or_none`, for a root without reports, and for one whose newest report is
    damaged. Raises `UsageError` where there is none otherwise, and where the file is not a
    resume report.
    """
    if base_name(path).endswith(".json"):
        folder, attempts, files = parent_url(path), "", [base_name(path)]
    else:
        is_own = base_name(path) == OWN_FOLDER
        folder, files = path, []
        attempts = base_name(ATTEMPTS_FOLDER) if is_own else ATTEMPTS_FOLDER
    with open_store(folder, storage) as store:
        try:
            files = files or own.report_paths(store, attempts)
            if not files and or_none:
                store.list_dir()  # a root that does not exist is still an error
                return None
            if not files:
                raise PathNotFound(folder)
            url = join_url(folder, files[0])
            report = own.read_report(store, files[0])
        except OwnFileUnreadable as error:
            if or_none and attempts:
                return None
            raise UsageError(f"{url}: not a resume report: {error.message}") from error
        except PathNotFound as error:
            raise UsageError(
                f"{path}: no resume report found; name the step of the checkpoint with "
                "--resume-step"
            ) from error
    if report.schema != own.REPORT_SCHEMA:
        raise UsageError(f"{url}: not a resume report (schema {own.REPORT_SCHEMA})")
    resume_point = None
    if report.step is not None:
        resume_point = ResumePoint(
            report.step,
            "report",
            report.tokens,
            report.samples,
            seconds_of(report.at or ""),
            report.world_size,
            report.saved_world_size,
        )
    return ResumeReport(url, report.root, report.path, resume_point)

"""Check whether the loss continued across a resume.

`check_loss` reads the logs, finds the resume, assesses it, and adds the next commands.
`reading` reads logs; `verdict` assesses one resume.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from typing import Unpack

from ckptctl.errors import LogWithoutLoss, OptionError, UsageError
from ckptctl.findings import Finding, in_order
from ckptctl.formatting import command_line, counted, verb
from ckptctl.logs.reading import DamageLog, LogFormat, read_logs
from ckptctl.logs.rows import Marker, Row
from ckptctl.loss.evidence import Fault, Missing, missing
from ckptctl.loss.replay import MIN_ROWS
from ckptctl.loss.resumes import (
    LedgerAnswer,
    LoggedResume,
    NamedCheckpoint,
    Recomputed,
    ResumePoint,
    ResumeReport,
    canary_of,
    recomputed_by,
    resume_alone,
    resume_at,
    resume_numbered,
    resumes,
)
from ckptctl.loss.segments import Segment, Split, log_interval, split
from ckptctl.loss.verdict import FORCES, Assessment, LossVerdict, assess, decisive, worst_of
from ckptctl.model import ExitCode
from ckptctl.options import StorageKeywords, StorageOptions, options_from
from ckptctl.storage.logs import STDIN
from ckptctl.storage.opening import local_path


@dataclass(frozen=True, slots=True)
class LossReport:
    """Whether the loss continued, and the evidence for it."""

    verdict: LossVerdict
    """Whether the loss continued: the worst verdict of the assessments."""
    exit_code: ExitCode
    message: str
    """The verdict and its reason in one line."""
    logs: tuple[str, ...]
    """The logs as the caller named them."""
    n_rows: int
    """Rows that were read."""
    n_resumes: int
    """Resumes in the logs."""
    assessments: tuple[Assessment, ...]
    """The resumes that were checked, oldest first."""
    findings: tuple[Finding, ...]
    """Findings about the logs as a whole, worst first."""
    faults: tuple[Fault, ...]
    """The ways in which a resume goes wrong: found, excluded, then open ones."""
    missing: tuple[Missing, ...]
    """What the logs should also contain."""
    report: ResumeReport | None
    """The resume report that named the checkpoint; null without one."""
    next_commands: tuple[str, ...]
    """The commands to run next, in this order."""
    recomputed: Recomputed | None = None
    """The work that is repeated because of the resume; null where the log does not show it."""
    order: str = ""
    """What determined the order of several logs whose rows have no clock, and that order."""
    suspect: SuspectSteps | None = None
    """The steps whose weights may be lost, because no loss behind them is finite; null where the
    last loss of the logs is finite."""

    @property
    def next_command(self) -> str | None:
        """The command to run next; null where there is nothing to do."""
        return next(iter(self.next_commands), None)

    @property
    def worst(self) -> Assessment | None:
        """The assessment that `verdict` is from."""
        return min(self.assessments, key=lambda assessment: assessment.verdict.place, default=None)


@dataclass(frozen=True, slots=True)
class SuspectSteps:
    """A range of steps."""

    first: int
    """The oldest one."""
    last: int
    """The last one that can have been saved before the logs end."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Which resumes are checked, and how strictly.

    `which` is `last`, `all`, or the number of a resume, counted from 1. `resume_point` is
    the checkpoint that the job resumed from, where it is known, and `report` the resume
    report that named it. `strict` makes `no-jump` end with exit code 31. `ledger` reads what the
    data ledger of the run shows; it is called once the rows are read.
    """

    resume_point: ResumePoint | None = None
    report: ResumeReport | None = None
    which: int | str = "last"
    strict: bool = False
    ledger: Callable[[], LedgerAnswer | None] | None = None


def check_loss(
    logs: str | Sequence[str],
    *,
    resume_step: int | None = None,
    resume_tokens: int | None = None,
    resume_samples: int | None = None,
    world_size: int | None = None,
    saved_world_size: int | None = None,
    report: str | None = None,
    resume: int | str = "last",
    strict: bool = False,
    canary: str | None = None,
    format: str | None = None,  # noqa: A002 - the name of the option on the command line
    pattern: str | None = None,
    keys: Mapping[str, str] | None = None,
    ignore: Sequence[str] = (),
    ledger: Callable[[], LedgerAnswer | None] | None = None,
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[StorageKeywords],
) -> LossReport:
    """Check from the logs of the run whether the loss continued across a resume.

    `logs` are files or URLs in the order of time. The checkpoint is `resume_step`, the
    training step that its train state holds, with its counts `resume_tokens` and
    `resume_samples`, and the ranks that resumed and saved it (`world_size`,
    `saved_world_size`), to which the speed is scaled; or the one named in `report`, a
    resume report or the checkpoint root that holds it; or the one named in the logs.
    `resume` is `last`, `all`, or the number of a resume, counted from 1.
    `strict` makes `no-jump` end with exit code 31.

    `canary` is the log of a separate short resume over steps that `logs` hold too: only
    the steps that both logged are compared. `format`, `pattern` and `keys` replace the
    detection of the log format; the metrics named in `ignore` are not read. A log that is
    damaged in the middle is read up to the damage, which is a finding. `ledger` reads what the
    data ledger of the run shows of repeated and skipped samples.

    Raises nothing for the content of a log. Raises `UsageError` for a wrong argument or a
    missing file, `StorageError` where a storage could not be read. Memory is bounded by
    the steps between two saves, not by the size of the logs.
    """
    paths = each_once([logs] if isinstance(logs, str) else logs)
    if canary is not None and len(each_once([*paths, canary])) == len(paths):
        raise UsageError(f"{canary}: the log of the canary is one of the logs of the run")
    (storage,) = options_from(keywords, storage)
    checkpoint = NamedCheckpoint(
        resume_step, resume_tokens, resume_samples, report, world_size, saved_world_size
    )
    log_format = LogFormat(format, pattern, keys, tuple(ignore))
    resume_point, found = checkpoint.resolve(storage)
    options = CheckOptions(resume_point, found, resume, strict, ledger)
    damage = DamageLog()

    def read(names: Sequence[str]) -> Iterator[Row | Marker]:
        return read_logs(names, log_format, storage=storage, damage=damage)

    try:
        if canary is not None:
            return check_canary(read(paths), read([canary]), logs=(*paths, canary), damage=damage)
        return check_rows(read(paths), options, logs=paths, damage=damage)
    except LogWithoutLoss as error:
        return _without_loss(error, paths, damage)


def each_once(logs: Sequence[str]) -> list[str]:
    """The logs without those that are named again, which would repeat their rows."""
    seen: dict[str, str] = {}
    for log in reversed(logs):
        path = None if log == STDIN else local_path(log)
        seen[log if path is None else os.path.realpath(path)] = log
    return list(reversed(seen.values()))


def check_rows(
    items: Iterable[Row | Marker],
    options: CheckOptions | None = None,
    *,
    logs: Sequence[str] = (),
    damage: DamageLog | None = None,
) -> LossReport:
    """Check rows that were read already."""
    options = options or CheckOptions()
    around = None if options.resume_point is None else options.resume_point.step
    return check_split(split(items, around=around), options, logs=logs, damage=damage)


def check_split(
    parts: Split,
    options: CheckOptions,
    *,
    logs: Sequence[str] = (),
    may_divide: bool = True,
    damage: DamageLog | None = None,
) -> LossReport:
    """Check a log that was split already; `may_divide` as in `resume_at`."""
    damage = damage or DamageLog()
    # Of several logs the last one is that of the resumed job, if it has rows.
    waits_for = None if len(logs) < 2 or _has_rows(parts, logs[-1]) else logs[-1]
    may_divide = may_divide and len(logs) < 2
    chosen = []
    if not parts.interleaved and (waits_for is None or isinstance(options.which, int)):
        chosen = _chosen(parts, options, may_divide=may_divide)
    resume_point = options.resume_point
    if damage.at_end and resume_point is not None:
        # The rows before the damage belong to an earlier resume; those of the requested
        # resume come after the damage.
        chosen = [resume for resume in chosen if resume.after[-1].step > resume_point.step]
    if isinstance(options.which, int) and not chosen:
        n_resumes = max(0, parts.n_segments - 1)
        raise OptionError("--resume", f"{options.which}: the logs hold {n_resumes} resumes")
    ledger = options.ledger() if options.ledger is not None and chosen else None
    assessments = tuple(assess(resume, ledger, damage.other_ranks) for resume in chosen)
    if not assessments and waits_for is None and not parts.interleaved and parts.n_losses:
        assessments = _alone(parts, options.resume_point)
    without_rows = [log for log in logs if not _has_rows(parts, log)] if len(logs) > 1 else []
    log_findings = _log_findings(parts, assessments, resume_point, waits_for, without_rows)
    findings = in_order([*log_findings, *damage.findings()])
    first = None if parts.interleaved else suspect_from(parts.segments)
    return replace(
        _answer(parts, assessments, findings, logs, options),
        order=damage.order,
        recomputed=recomputed_by(assessments[-1].resume) if assessments else None,
        suspect=None if first is None else SuspectSteps(first, _last_step(parts)),
    )


def _alone(parts: Split, resume_point: ResumePoint | None) -> tuple[Assessment, ...]:
    """The assessment of a log without the rows before the resume, where it shows a fault."""
    resume = resume_alone(parts, resume_point)
    if resume is None:
        return ()
    assessment = assess(resume)
    is_wrong = assessment.verdict in (LossVerdict.DISCONTINUOUS, LossVerdict.SUSPECT)
    return (assessment,) if is_wrong else ()


_RECENT = 100


def _last_step(parts: Split) -> int:
    """The last step that can have been trained before the logs end, or before a row of them."""
    lasts = (
        segment.last_step + log_interval(segment.rows[-_RECENT:]) for segment in parts.segments
    )
    return max(lasts, default=0)


def suspect_from(segments: Sequence[Segment]) -> int | None:
    """The oldest step whose weights may be lost, from the losses at the end of the logs.

    The loss of a step is computed with the weights of the step before, so these are suspect;
    and where not every step is logged, those since the last row with a finite loss.
    """
    first = None
    for segment in reversed(segments):
        sampled = () if segment.finite is None else (segment.finite,)
        for row in merge(reversed(segment.rows), sampled, key=lambda row: -row.step):
            if row.loss is None:
                continue
            if math.isfinite(row.loss.value):
                return None if first is None else min(row.step, max(first - 1, 0))
            first = row.step if first is None else min(first, row.step)
    return None if first is None else max(first - 1, 0)


def _has_rows(parts: Split, log: str) -> bool:
    """Whether a log, or a file in it where it is a folder, has rows."""
    return any(file == log or file.startswith(log.rstrip("/") + "/") for file in parts.files)


def check_canary(
    run: Iterable[Row | Marker],
    canary: Iterable[Row | Marker],
    *,
    logs: Sequence[str] = (),
    damage: DamageLog | None = None,
) -> LossReport:
    """Check a short separate resume against the log of the run over the same steps.

    Only steps that both logged are compared; with fewer than three of them the verdict is
    `inconclusive`.
    """
    canary_split = split(canary)
    segments = canary_split.segments
    run_split = split(run, around=segments[-1].first_step if segments else None)
    # Damage at the end is no objection: the steps that both logged are evidence enough.
    findings = () if damage is None else damage.findings(end_matters=False)
    strict = CheckOptions(strict=True)
    resume = canary_of(run_split, canary_split)
    assessments = () if resume is None else (assess(resume),)
    if not assessments or len(assessments[0].replay.rows) < MIN_ROWS:
        findings = in_order([_no_canary(run_split, canary_split), *findings])
    return _answer(run_split, assessments, findings, logs, strict)


def _answer(
    parts: Split,
    assessments: tuple[Assessment, ...],
    findings: tuple[Finding, ...],
    logs: Sequence[str],
    options: CheckOptions,
) -> LossReport:
    verdicts = [assessment.verdict for assessment in assessments]
    forced = [FORCES[finding.code] for finding in findings if finding.code in FORCES]
    verdict = worst_of([*verdicts, *forced])
    worst = min(assessments, key=lambda assessment: assessment.verdict.place, default=None)
    deciding = decisive(findings, verdict)
    message = deciding.message if deciding is not None else ""
    if worst is not None and deciding is None:
        deciding, message = decisive(worst.findings, verdict), worst.message
    return LossReport(
        verdict=verdict,
        exit_code=verdict.exit_code(strict=options.strict),
        message=message,
        logs=tuple(logs),
        n_rows=parts.n_rows,
        n_resumes=max(0, parts.n_segments - 1),
        assessments=assessments,
        findings=findings,
        faults=() if worst is None else worst.faults,
        missing=() if worst is None else tuple(missing(worst.resume, worst.replay, worst.level)),
        report=options.report,
        next_commands=_next_commands(verdict, deciding, options.report),
    )


def _no_canary(run: Split, canary: Split) -> Finding:
    def steps(parts: Split) -> str:
        if not parts.segments:
            return "no steps"
        first = min(segment.first_step for segment in parts.segments)
        return f"steps {first:,} to {parts.segments[-1].last_step:,}"

    return Finding(
        "loss.no-resume",
        "",
        f"the canary logged {steps(canary)} and the run logged {steps(run)}; at least {MIN_ROWS} "
        "steps must be in both logs",
        expected=f"{MIN_ROWS} steps or more in both logs",
    )


def _without_loss(error: LogWithoutLoss, logs: Sequence[str], damage: DamageLog) -> LossReport:
    """The report where the reader found no loss; its error states why."""
    finding = Finding("loss.none", "", error.message, expected="rows with a step and a loss")
    findings = in_order([finding, *damage.findings()])
    answer = _answer(split(()), (), findings, logs, CheckOptions())
    next_command = error.next_command or "ckptctl explain loss.none"
    return replace(answer, message=error.message, next_commands=(next_command,))


def _chosen(parts: Split, options: CheckOptions, *, may_divide: bool) -> list[LoggedResume]:
    if not parts.n_losses:
        return []
    if options.which == "all":
        return list(resumes(parts))
    if isinstance(options.which, int):
        numbered = resume_numbered(parts, options.which, options.resume_point)
        return [numbered] if numbered is not None else []
    if options.resume_point is not None:
        found = resume_at(parts, options.resume_point, may_divide=may_divide)
        return [found] if found is not None else []
    return list(resumes(parts)[-1:])


def _log_findings(
    parts: Split,
    assessments: Sequence[Assessment],
    resume_point: ResumePoint | None,
    waits_for: str | None,
    without_rows: Sequence[str],
) -> Iterable[Finding]:
    """The findings about the logs as a whole."""
    if not parts.n_losses:
        yield _no_loss(parts)
    elif parts.interleaved:
        yield Finding(
            "loss.interleaved",
            "",
            "the steps go forward and back every few rows: several runs write to one log",
            expected="steps that rise, except at a restart",
            found=f"{parts.n_segments:,} segments in {counted(parts.n_rows, 'row')}",
        )
    elif not assessments:
        yield _no_resume(parts, resume_point, waits_for, without_rows)
    if parts.n_copies:
        copies = counted(parts.n_copies, "row")
        yield Finding(
            "loss.duplicates",
            "",
            f"{copies} {verb(parts.n_copies, 'repeats', 'repeat')} earlier rows together with "
            "their time; they are copies, and are left out",
            found=copies,
        )
    if parts.n_segments > 2 and len(assessments) == 1 and resume_point is None:
        n_resumes, number = parts.n_segments - 1, assessments[0].resume.number
        yield Finding(
            "loss.several",
            "",
            f"the logs hold {n_resumes} resumes; number {number} was checked (--resume N checks "
            "another one, --resume all checks all)",
            found=f"{n_resumes} resumes",
        )


def _no_loss(parts: Split) -> Finding:
    what = "no row was recognised" if not parts.n_rows else "no row has a loss"
    return Finding(
        "loss.none",
        "",
        f"{what} in the logs, so nothing can be compared",
        expected="rows with a step and a loss",
        found=f"{counted(parts.n_rows, 'row')}, none with a loss",
    )


def _no_resume(
    parts: Split,
    resume_point: ResumePoint | None,
    waits_for: str | None,
    without_rows: Sequence[str],
) -> Finding:
    first, last = parts.segments[0].first_step, parts.segments[-1].last_step
    if waits_for is not None:
        message = (
            f"{waits_for} holds no row of a step: the resumed job has logged nothing that can be "
            f"read; the other logs hold steps {first:,} to {last:,}"
        )
    elif resume_point is not None and first >= resume_point.step:
        which = f" ({', '.join(without_rows)} holds none)" if without_rows else ""
        message = (
            f"the logs hold no row from before the resume{which}: they hold steps {first:,} to "
            f"{last:,}, and the checkpoint holds step {resume_point.step:,}"
        )
    elif resume_point is not None:
        message = (
            f"the logs hold no resume after step {resume_point.step:,}: they hold steps "
            f"{first:,} to {last:,}, and nothing marks the start of another process"
        )
    else:
        message = (
            f"the logs hold steps {first:,} to {last:,} without a resume; add the log of the job "
            "before the resume, or name the step of the checkpoint (--resume-step)"
        )
    return Finding(
        "loss.no-resume",
        "",
        message,
        expected="rows before and after a resume",
        found=f"steps {first:,} to {last:,}",
    )


def _next_commands(
    verdict: LossVerdict, deciding: Finding | None, report: ResumeReport | None
) -> tuple[str, ...]:
    if verdict is LossVerdict.CONTINUOUS:
        return ()
    if verdict is LossVerdict.DISCONTINUOUS and report is not None and report.path and report.root:
        reason = "the loss does not continue after the resume"
        if deciding is not None:
            reason = f"{deciding.code}: {deciding.message}"
        return (
            command_line("reject", report.path, "--reason", reason),
            command_line("pick", report.root),
        )
    if verdict is LossVerdict.NO_JUMP:
        return ("ckptctl loss --canary",)  # a replay provides the proof that the log lacks
    return (command_line("explain", verdict.value if deciding is None else deciding.code),)

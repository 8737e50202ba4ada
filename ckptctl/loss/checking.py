"""Did the loss continue across a resume?

Reads the logs, finds the resume, judges it, and says what to do next. How logs are read
is the question of `reading`, what is compared that of `verdict`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptctl.errors import LogWithoutLoss, UsageError
from ckptctl.findings import Finding, in_order
from ckptctl.loss.evidence import Fault, Missing, faults, missing
from ckptctl.loss.level import check_cadence, check_clock
from ckptctl.loss.reading import Unread
from ckptctl.loss.replay import MIN_ROWS
from ckptctl.loss.resume_points import ResumeReport, read_resume_report
from ckptctl.loss.resumes import (
    Boundary,
    Recomputed,
    Resume,
    canary_of,
    recomputed_by,
    resume_at,
    resume_numbered,
    resumes,
)
from ckptctl.loss.rows import Marker, Row
from ckptctl.loss.segments import Split, split
from ckptctl.loss.verdict import FORCES, Judgement, LossVerdict, decisive, judge, worst_of


@dataclass(frozen=True, slots=True)
class LossReport:
    """Whether the loss continued, and what that rests on.

    `verdict` is the worst of the `judgements`, one for each resume that was judged;
    `n_resumes` counts all in the logs. `findings` are of the logs as a whole, worst
    first; those of a resume are in its judgement. `faults` and `missing` speak of the
    last resume that was judged. `recomputed` is the work that is done again because of the
    resume, None where nothing says so. `report` is the resume report that the boundary came
    from. `next_commands` are in the order in which to run them.
    """

    verdict: LossVerdict
    exit_code: int
    message: str
    logs: tuple[str, ...]
    n_rows: int
    n_resumes: int
    judgements: tuple[Judgement, ...]
    findings: tuple[Finding, ...]
    faults: tuple[Fault, ...]
    missing: tuple[Missing, ...]
    report: ResumeReport | None
    next_commands: tuple[str, ...]
    recomputed: Recomputed | None = None

    @property
    def judged(self) -> Judgement | None:
        """The worst judgement, the one that `verdict` is from."""
        return min(self.judgements, key=lambda each: each.verdict.rank, default=None)


def check_loss(
    logs: str | Sequence[str],
    *,
    resume_step: int | None = None,
    resume_tokens: int | None = None,
    resume_samples: int | None = None,
    report: str | None = None,
    resume: int | str = "last",
    strict: bool = False,
    canary: str | None = None,
    format: str | None = None,  # noqa: A002 - what it is called everywhere
    pattern: str | None = None,
    keys: Mapping[str, str] | None = None,
    storage_options: Mapping[str, object] | None = None,
    endpoint_url: str | None = None,
    timeout_s: float = 30.0,
) -> LossReport:
    """Say whether the loss continued across a resume, from the logs of the run.

    `logs` are files or URLs in the order of time. Where the resume was is taken from
    `resume_step`, the last step that the checkpoint holds, with `resume_tokens` and
    `resume_samples`, its counts at that step, where they are known; else from `report`, a
    resume report or the checkpoint root that holds it; else from the logs. `resume` is `last`,
    `all`, or the number of one, counted from 1. `strict` makes `no-jump` end with 31.
    `canary` is the log of a short resume of its own over steps that `logs` hold already:
    it is judged, and nothing but steps that both logged counts.
    A log that is damaged in the middle is read up to there, and that is a finding.
    `format`, `pattern` and `keys` say how the logs are read where that is not found out.

    Never raises for what a log holds. Raises `UsageError` for an argument or a file that
    is not there, `StorageError` where a storage could not be read. Memory is bounded by
    the steps between two saves, not by the logs.
    """
    from ckptctl.loss.reading import read_logs

    paths = [logs] if isinstance(logs, str) else list(logs)
    storage: dict[str, Any] = {
        "storage_options": storage_options,
        "endpoint_url": endpoint_url,
        "timeout_s": timeout_s,
    }
    asked = asked_boundary(resume_step, resume_tokens, resume_samples)
    boundary, found = boundary_of(asked, report, **storage)

    unread = Unread()

    def read(names: Sequence[str]) -> Iterator[Row | Marker]:
        found = read_logs(
            names, format=format, pattern=pattern, keys=keys, on_damage=unread.told, **storage
        )
        return unread.watch(found)

    try:
        if canary is not None:
            return check_canary(read(paths), read([canary]), logs=(*paths, canary), unread=unread)
        return check_rows(
            read(paths),
            logs=paths,
            resume=resume if isinstance(resume, int) else None,
            every=resume == "all",
            boundary=boundary,
            report=found,
            strict=strict,
            unread=unread,
        )
    except LogWithoutLoss as error:
        return _without_loss(error, paths, unread)


def asked_boundary(
    step: int | None, tokens: int | None = None, samples: int | None = None
) -> Boundary | None:
    """The checkpoint that the caller names; raises `UsageError` for counts without a step."""
    if step is not None:
        return Boundary(step, "asked", tokens, samples)
    if tokens is not None or samples is not None:
        raise UsageError(
            "--resume-tokens and --resume-samples are counts at a step: name it with --resume-step"
        )
    return None


def boundary_of(
    asked: Boundary | None, report: str | None, **storage: Any
) -> tuple[Boundary | None, ResumeReport | None]:
    """The checkpoint that is said to have been resumed from, and the report that says so.

    What the caller names comes first. The counts and the time of a report are those of its
    own step. Raises `UsageError` where there is no such report, or the job began fresh.
    """
    found = None if report is None else read_resume_report(report, **storage)
    reported = None if found is None else found.boundary
    if asked is not None:
        if reported is None or reported.step != asked.step:
            return asked, found
        known = {"tokens": asked.tokens, "samples": asked.samples}
        given = {name: count for name, count in known.items() if count is not None}
        return replace(reported, source="asked", **given), found
    if found is not None and reported is None:
        raise UsageError(f"{found.url}: the job began fresh, so there is no resume to judge")
    return reported, found


def check_rows(
    items: Iterable[Row | Marker],
    *,
    logs: Sequence[str] = (),
    resume: int | None = None,
    every: bool = False,
    boundary: Boundary | None = None,
    report: ResumeReport | None = None,
    strict: bool = False,
    unread: Unread | None = None,
) -> LossReport:
    """Judge rows that were read already; `check_loss` says what the arguments mean."""
    parts = split(items, around=boundary.step if boundary is not None else None)
    return report_on(
        parts,
        logs=logs,
        resume=resume,
        every=every,
        boundary=boundary,
        report=report,
        strict=strict,
        unread=unread,
    )


def check_canary(
    run: Iterable[Row | Marker],
    canary: Iterable[Row | Marker],
    *,
    logs: Sequence[str] = (),
    unread: Unread | None = None,
) -> LossReport:
    """Judge a short resume against the log of the run that went through the same steps before.

    Only steps that both logged count: without at least three of them the answer is
    `inconclusive`.
    """
    tried = split(canary)
    known = split(run, around=tried.legs[-1].first_step if tried.legs else None)
    damage = _damage(unread, end_matters=False)  # steps that both logged are proof enough
    resume = canary_of(known, tried)
    if resume is None:
        findings = in_order([_no_canary(known, tried), *damage])
        return _answer(known, (), findings, logs, None, strict=True)
    judgement = judge(resume)
    findings = damage
    if len(judgement.replay.rows) < MIN_ROWS:
        findings = in_order([_no_canary(known, tried), *findings])
    return _answer(known, (judgement,), findings, logs, None, strict=True)


def report_on(
    parts: Split,
    *,
    logs: Sequence[str] = (),
    resume: int | None = None,
    every: bool = False,
    boundary: Boundary | None = None,
    report: ResumeReport | None = None,
    strict: bool = False,
    part: bool = True,
    unread: Unread | None = None,
) -> LossReport:
    """Judge a log that was split already; `part` as in `resume_at`."""
    chosen = [] if parts.interleaved else _chosen(parts, resume, boundary, every=every, part=part)
    if unread is not None and unread.ends_so and boundary is not None:
        # Rows of an earlier resume are none of this one: its own are behind the damage.
        chosen = [each for each in chosen if each.after[-1].step > boundary.step]
    if resume is not None and not chosen:
        raise UsageError(f"the logs hold {parts.n_legs - 1} resumes, and none has number {resume}")
    judgements = tuple(judge(each) for each in chosen)
    findings = in_order([*_of_logs(parts, judgements, boundary), *_damage(unread)])
    answer = _answer(parts, judgements, findings, logs, report, strict=strict)
    again = recomputed_by(judgements[-1].resume) if judgements else None
    return replace(answer, recomputed=again)


def _answer(
    parts: Split,
    judgements: tuple[Judgement, ...],
    findings: tuple[Finding, ...],
    logs: Sequence[str],
    report: ResumeReport | None,
    *,
    strict: bool,
) -> LossReport:
    verdicts = [judgement.verdict for judgement in judgements]
    forced = [FORCES[finding.code] for finding in findings if finding.code in FORCES]
    verdict = worst_of([*verdicts, *forced])
    worst = min(judgements, key=lambda each: each.verdict.rank, default=None)
    decides = decisive(findings, verdict)
    message = decides.message if decides is not None else ""
    if worst is not None and decides is None:
        decides, message = decisive(worst.findings, verdict), worst.message
    return LossReport(
        verdict=verdict,
        exit_code=verdict.exit_code(strict=strict),
        message=message,
        logs=tuple(logs),
        n_rows=parts.n_rows,
        n_resumes=max(0, parts.n_legs - 1),
        judgements=judgements,
        findings=findings,
        faults=() if worst is None else faults(worst),
        missing=() if worst is None else missing(worst),
        report=report,
        next_commands=_next(verdict, decides, report),
    )


def _damage(unread: Unread | None, *, end_matters: bool = True) -> tuple[Finding, ...]:
    return () if unread is None else unread.findings(end_matters=end_matters)


def _no_canary(known: Split, tried: Split) -> Finding:
    def steps(parts: Split) -> str:
        if not parts.legs:
            return "no steps"
        first, last = min(leg.first_step for leg in parts.legs), parts.legs[-1].last_step
        return f"steps {first:,} to {last:,}"

    return Finding(
        "loss.no-resume",
        "",
        f"the canary logged {steps(tried)}, and the run's log holds {steps(known)}: "
        f"at least {MIN_ROWS} steps must be in both",
        expected=f"{MIN_ROWS} steps or more in both logs",
    )


def _without_loss(error: LogWithoutLoss, logs: Sequence[str], unread: Unread) -> LossReport:
    """The answer where the reader found no loss: it knows best why."""
    finding = Finding("loss.none", "", error.message, expected="rows with a step and a loss")
    next_command = error.next_command or "ckptctl explain loss.none"
    return LossReport(
        verdict=LossVerdict.INCONCLUSIVE,
        exit_code=LossVerdict.INCONCLUSIVE.exit_code(),
        message=error.message,
        logs=tuple(logs),
        n_rows=0,
        n_resumes=0,
        judgements=(),
        findings=in_order([finding, *unread.findings()]),
        faults=(),
        missing=(),
        report=None,
        next_commands=(next_command,),
    )


def _chosen(
    parts: Split, number: int | None, boundary: Boundary | None, *, every: bool, part: bool
) -> list[Resume]:
    if not parts.n_losses:
        return []
    if boundary is not None and number is None and not every:
        found = resume_at(parts, boundary, part=part)
        return [found] if found is not None else []
    there = resumes(parts)
    if every:
        return list(there)
    if number is None:
        return list(there[-1:])
    numbered = resume_numbered(parts, number, boundary)
    return [numbered] if numbered is not None else []


def _of_logs(
    parts: Split, judgements: Sequence[Judgement], boundary: Boundary | None
) -> Iterable[Finding]:
    """What there is to say of the logs as a whole."""
    if not parts.n_losses:
        yield _no_loss(parts)
    elif parts.interleaved:
        yield Finding(
            "loss.interleaved",
            "",
            "the steps jump to and fro, a few rows at a time: several runs write into one log",
            expected="steps that rise, but for restarts",
            found=f"{parts.n_legs:,} borders in {parts.n_rows:,} rows",
        )
    elif not judgements:
        yield _no_resume(parts, boundary)
    if parts.n_legs > 2 and len(judgements) == 1 and boundary is None:
        yield Finding(
            "loss.several",
            "",
            f"the logs hold {parts.n_legs - 1} resumes; number {judgements[0].resume.number} was "
            "judged (--resume N for another, --resume all for every one)",
            found=f"{parts.n_legs - 1} resumes",
        )
    yield from check_clock([leg.clock_jump for leg in parts.legs if leg.clock_jump is not None])
    if not parts.interleaved:
        yield from check_cadence(parts)


def _no_loss(parts: Split) -> Finding:
    what = "no row was recognised" if not parts.n_rows else "no row holds a loss"
    return Finding(
        "loss.none",
        "",
        f"{what} in the logs: nothing can be compared",
        expected="rows with a step and a loss",
        found=f"{parts.n_rows:,} rows, none with a loss",
    )


def _no_resume(parts: Split, boundary: Boundary | None) -> Finding:
    first, last = parts.legs[0].first_step, parts.legs[-1].last_step
    if boundary is not None:
        message = (
            f"the logs hold no resume after step {boundary.step:,}: they go from step {first:,} to "
            f"{last:,}, and nothing says that another process wrote the end"
        )
    else:
        message = (
            f"the logs go from step {first:,} to {last:,} without a resume; give the log of before "
            "it too, or say after which step it was (--resume-step)"
        )
    return Finding(
        "loss.no-resume",
        "",
        message,
        expected="rows before and after a resume",
        found=f"steps {first:,} to {last:,}",
    )


def _next(
    verdict: LossVerdict,
    deciding: Finding | None,
    report: ResumeReport | None,
) -> tuple[str, ...]:
    if verdict is LossVerdict.CONTINUOUS:
        return ()
    if verdict is LossVerdict.DISCONTINUOUS and report is not None and report.path and report.root:
        reason = "the loss does not continue after the resume"
        if deciding is not None:
            reason = f"{deciding.code}: {deciding.message}"
        return (
            shlex.join(["ckptctl", "reject", report.path, "--reason", reason]),
            shlex.join(["ckptctl", "pick", report.root]),
        )
    return (f"ckptctl explain {verdict.value if deciding is None else deciding.code}",)

"""Did the loss continue across a resume?

Reads the logs, finds the resume, judges it, and says what to do next. How logs are read
is the question of `reading`, what is compared that of `verdict`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptctl.findings import Finding, in_order
from ckptctl.loss.boundaries import ResumeReport
from ckptctl.loss.evidence import Fault, Missing, faults, missing
from ckptctl.loss.legs import Split, split
from ckptctl.loss.resumes import Boundary, Resume, resume_at, resumes
from ckptctl.loss.rows import Marker, Row
from ckptctl.loss.verdict import FORCES, Judgement, LossVerdict, decisive, judge, worst_of
from ckptctl.loss.vitals import check_cadence, check_clock


@dataclass(frozen=True, slots=True)
class LossReport:
    """Whether the loss continued, and what that rests on.

    `verdict` is the worst of the `judgements`, one for each resume that was judged;
    `n_resumes` counts all in the logs. `findings` are of the logs as a whole, worst
    first; those of a resume are in its judgement. `faults` and `missing` speak of the
    last resume that was judged. `report` is the resume report that the boundary came
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

    @property
    def judged(self) -> Judgement | None:
        """The worst judgement, the one that `verdict` is from."""
        return min(self.judgements, key=lambda each: each.verdict.rank, default=None)


def check_rows(
    items: Iterable[Row | Marker],
    *,
    logs: Sequence[str] = (),
    resume: int | None = None,
    every: bool = False,
    boundary: Boundary | None = None,
    report: ResumeReport | None = None,
    strict: bool = False,
) -> LossReport:
    """Judge rows that were read already; `check_loss` says what the arguments mean."""
    boundary = boundary or (report.boundary if report is not None else None)
    parts = split(items, around=boundary.step if boundary is not None else None)
    return report_on(
        parts,
        logs=logs,
        resume=resume,
        every=every,
        boundary=boundary,
        report=report,
        strict=strict,
    )


def report_on(
    parts: Split,
    *,
    logs: Sequence[str] = (),
    resume: int | None = None,
    every: bool = False,
    boundary: Boundary | None = None,
    report: ResumeReport | None = None,
    strict: bool = False,
) -> LossReport:
    """Judge a log that was split already."""
    chosen = [] if parts.interleaved else _chosen(parts, resume, boundary, every=every)
    judgements = tuple(judge(each) for each in chosen)
    findings = in_order(_of_logs(parts, judgements, boundary))
    verdicts = [judgement.verdict for judgement in judgements]
    forced = [FORCES[finding.code] for finding in findings if finding.code in FORCES]
    verdict = worst_of([*verdicts, *forced])
    worst = min(judgements, key=lambda each: each.verdict.rank, default=None)
    message = findings[0].message if worst is None else worst.message
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
        next_commands=_next(verdict, worst, report),
    )


def _chosen(
    parts: Split, number: int | None, boundary: Boundary | None, *, every: bool
) -> list[Resume]:
    if not parts.n_losses:
        return []
    if boundary is not None and number is None and not every:
        found = resume_at(parts, boundary)
        return [found] if found is not None else []
    there = resumes(parts)
    if every:
        return list(there)
    if number is None:
        return list(there[-1:])
    return [each for each in there if each.number == number]


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
        message = f"nothing was logged after step {boundary.step:,}: the logs end at {last:,}"
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
    worst: Judgement | None,
    report: ResumeReport | None,
) -> tuple[str, ...]:
    if verdict is LossVerdict.CONTINUOUS:
        return ()
    if verdict is LossVerdict.DISCONTINUOUS and report is not None and report.path and report.root:
        reason = "the loss does not continue after the resume"
        if worst is not None and (found := decisive(worst.findings, verdict)) is not None:
            reason = f"{found.code}: {found.message}"
        return (
            shlex.join(["ckptctl", "reject", report.path, "--reason", reason]),
            shlex.join(["ckptctl", "pick", report.root]),
        )
    if verdict is LossVerdict.NO_JUMP or worst is None:
        return ("ckptctl explain no-jump",) if worst else ("ckptctl explain loss.no-resume",)
    found = decisive(worst.findings, verdict)
    return (f"ckptctl explain {found.code}",) if found is not None else ()

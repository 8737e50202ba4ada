"""Define `ckptctl loss`: check whether the loss continued across a resume."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import ckptctl
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.rendering import (
    EMPTY,
    Line,
    Style,
    StyledText,
    finding_lines,
    line,
    next_line,
    padded,
    section,
)
from ckptctl.errors import CkptctlError, OptionError, UsageError
from ckptctl.findings import Finding
from ckptctl.formatting import command_line, counted, duration, listed, verb
from ckptctl.logs.reading import LogFormat
from ckptctl.logs.rows import Number
from ckptctl.loss.checking import LossReport
from ckptctl.loss.evidence import FaultState
from ckptctl.loss.following import FollowOptions, follow_loss
from ckptctl.loss.level import share, signed
from ckptctl.loss.plots import check_plot, write_plot
from ckptctl.loss.replay import Replayed
from ckptctl.loss.resumes import LedgerAnswer, NamedCheckpoint
from ckptctl.loss.speed import Pace
from ckptctl.loss.verdict import Assessment, LossVerdict
from ckptctl.options import Parameter, StorageOptions
from ckptctl.storage.logs import STDIN
from ckptctl.storage.opening import local_path, parent_url

EXAMPLES = (
    "ckptctl loss train.log",
    "ckptctl loss old.log new.log --resume-from /shared/ckpt/run-1234/step_1200",
    "ckptctl loss --follow train.log --resume-report /shared/ckpt/run-1234 --timeout 1800",
)
EXIT_CODES = (0, 2, 30, 31, 32, 75, 77)

Printed = Literal["verdict", "throughput", "suspect"]
"""The one value that `loss --print` puts on standard output."""


def loss(
    logs: Annotated[
        list[str] | None,
        Parameter(
            "LOG...",
            "Training logs in the order of time: files, folders, URLs, or - for standard input.",
        ),
    ] = None,
    resume_from: Annotated[
        str | None,
        Parameter(
            "--resume-from STEP",
            "The step that the job was told to resume from: its training step, its tokens and "
            "the ranks that saved it, and the resume report in its root, are read there.",
        ),
    ] = None,
    resume_step: Annotated[
        int | None,
        Parameter(
            "--resume-step N",
            "The training step that the checkpoint holds: that of its train state, which "
            "the number in a name need not be. The log must begin after it.",
            min=0,
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        Parameter(
            "--world-size N",
            "The ranks of the resumed job, where they differ from those that saved: "
            "--resume-from reads these, --saved-world-size states them.",
            min=1,
            common=False,
        ),
    ] = None,
    saved_world_size: Annotated[
        int | None,
        Parameter(
            "--saved-world-size N",
            "The ranks of the job that saved the checkpoint.",
            min=1,
            common=False,
        ),
    ] = None,
    resume_report: Annotated[
        str | None,
        Parameter(
            "--resume-report PATH",
            "The resume report that ckptctl.train wrote, or the checkpoint root that holds it.",
        ),
    ] = None,
    resume: Annotated[
        str,
        Parameter(
            "--resume last|all|N",
            "Which resume to check where the logs hold several.",
            common=False,
        ),
    ] = "last",
    strict: Annotated[
        bool, Parameter("--strict", "Require steps that were logged twice: no-jump exits with 31.")
    ] = False,
    format: Annotated[  # noqa: A002 - the option is called so
        str | None, Parameter("--format NAME", "The format of the logs; detected by default.")
    ] = None,
    pattern: Annotated[
        str | None,
        Parameter(
            "--pattern REGEX",
            "A regular expression that matches a line of the log; its groups have the names "
            "of fields: (?P<step>[0-9]+), (?P<loss>...).",
            common=False,
            variable="CKPTCTL_LOG_PATTERN",
        ),
    ] = None,
    key: Annotated[
        list[str] | None,
        Parameter(
            "--key FIELD=NAME", "The name of a field in JSON lines or in a table: loss=train/ce."
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        Parameter(
            "--ignore KEY",
            "The name of a metric that is not read, such as a counter that each process restarts.",
            common=False,
        ),
    ] = None,
    plot: Annotated[
        str | None,
        Parameter(
            "--plot FILE",
            "Also draw the loss around the resume, to a file: .svg. A file that is not a plot of "
            "ckptctl is not overwritten.",
        ),
    ] = None,
    canary: Annotated[
        bool,
        Parameter(
            "--canary",
            "Compare the last LOG, of a short resume, with the same steps in the other logs. "
            "Without a LOG, print how to make one.",
        ),
    ] = False,
    follow: Annotated[
        bool,
        Parameter(
            "--follow",
            "Watch the logs until more rows would not change the verdict; with --json, one "
            "document per line.",
        ),
    ] = False,
    max_steps: Annotated[
        int | None,
        Parameter(
            "--max-steps N",
            "With --follow: stop N steps after the resume, with the verdict of that moment.",
            min=1,
            common=False,
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        Parameter(
            "--timeout SECONDS",
            "With --follow: stop after this time, with the verdict of that moment. Otherwise: "
            "the time limit for one storage request, 30 s by default.",
            min=0.1,
            common=False,
        ),
    ] = None,
    printed: Annotated[
        Printed | None,
        Parameter(
            "--print",
            "Print only this on standard output, and the evidence on standard error. throughput: "
            "how the speed after the resume compares with the run before it (in-band, slower, "
            "faster, watching while there are too few rows, or unknown); --follow waits for it. "
            "suspect: the range of steps whose weights may be lost, because no loss behind the "
            "first of them is finite, and nothing where the last loss is; then the exit code is 0, "
            "or 31 where the logs count no training steps.",
            hidden=True,
            variable="CKPTCTL_PRINT_OF_LOSS",
        ),
    ] = None,
    *,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Check whether the loss is continuous across a resume.

    Compares the steps that were logged before the crash and again after the resume, then the
    counters, then the level of the loss. The verdict continuous requires steps that were
    logged twice. --quiet prints only the verdict.
    """
    paths = logs or []
    if canary and not paths:
        out.lines(line(text) for text in _CANARY)
        return 0
    _check(paths, resume, canary=canary, follow=follow)
    if plot is not None:
        check_plot(plot)
    keys = _keys(key or ())
    checkpoint = NamedCheckpoint(
        step=resume_step,
        report=resume_report,
        world_size=world_size,
        saved_world_size=saved_world_size,
    )
    if world_size is not None and (saved_world_size or resume_from or resume_report) is None:
        raise OptionError(
            "--world-size",
            "needs the ranks that saved: --resume-from, --resume-report or --saved-world-size",
        )
    if resume_from is not None:
        checkpoint = _read_from(resume_from, checkpoint, storage)
        if checkpoint.step is None:
            out.tell(
                f"{resume_from} holds no training step, so the first step of the new log is not "
                "compared with it; --resume-step N states one"
            )
    ledger = None
    if checkpoint.report is not None and not checkpoint.report.endswith(".json"):
        ledger = partial(_ledger_of, checkpoint.report, storage)
    if follow:
        reports = follow_loss(
            paths,
            checkpoint,
            follow=FollowOptions(timeout, max_steps, with_throughput=printed == "throughput"),
            log_format=LogFormat(format, pattern, keys, tuple(ignore or ())),
            storage=storage,
            strict=strict,
            ledger=ledger,
        )
        report = _last(reports, out, paths, timeout)
    else:
        report = ckptctl.check_loss(
            paths[:-1] if canary else paths,
            resume_step=checkpoint.step,
            resume_tokens=checkpoint.tokens,
            world_size=checkpoint.world_size,
            saved_world_size=checkpoint.saved_world_size,
            report=checkpoint.report,
            resume=_which(resume),
            strict=strict,
            canary=paths[-1] if canary else None,
            format=format,
            pattern=pattern,
            keys=keys,
            ignore=ignore or (),
            ledger=ledger,
            storage=storage,
        )
    if plot is not None and not write_plot(report, plot):
        out.say(line(f"{plot} was not written: there is no loss to draw"))
    if follow and out.as_json:
        out.save(document_of("loss", report))
        return report.exit_code
    out.answer(
        document_of("loss", report),
        lambda: loss_lines(report, unicode=out.out.unicode),
        bare=_values(report, printed),
        bare_only=printed is not None,
    )
    if printed == "suspect":
        # Otherwise the question has an answer, whatever the verdict about a resume is.
        unknown = any(finding.code in _WITHOUT_STEPS for finding in report.findings)
        return LossVerdict.INCONCLUSIVE.exit_code() if unknown else 0
    return report.exit_code


def _values(report: LossReport, printed: Printed | None) -> tuple[str, ...]:
    if printed == "suspect":
        found = report.suspect
        return () if found is None else (f"{found.first} {found.last}",)
    if printed == "throughput":
        worst = report.worst
        return (Pace.UNKNOWN.value if worst is None else worst.throughput.pace.value,)
    return (report.verdict.value,)


_WITHOUT_STEPS = ("loss.none", "loss.interleaved")
"""Findings about logs that have nothing to compare with the step of a checkpoint."""


def _read_from(step: str, given: NamedCheckpoint, storage: StorageOptions) -> NamedCheckpoint:
    """The checkpoint with what a step holds, as far as the caller does not state it.

    A step that counts no training steps, as a copy of weights, gives the report of its root.
    Raises as `show` does, and `UsageError` for a folder that is no step. Cost: that of `show`.
    """
    contents = ckptctl.show(step, storage=storage)
    listed = (contents.tensors, contents.bytes_entries, contents.shards, contents.unlisted)
    if contents.exit_code and contents.train_step is None and not any(listed):
        raise OptionError(
            "--resume-from",
            f"{step} is no step that can be read: it holds no tensor and no train state",
            next_command=command_line("verify", step),
        )
    if given.saved_world_size is None and (saved := contents.world_size) is not None:
        given = replace(given, saved_world_size=None if saved.at_least else saved.size)
    if given.step is not None or contents.train_step is None:
        return given
    return replace(
        given,
        step=contents.train_step,
        tokens=contents.state.tokens.value,
        report=given.report or parent_url(contents.url),
    )


def _ledger_of(root: str, storage: StorageOptions) -> LedgerAnswer | None:
    """What the data ledger of a run shows; None without one.

    No ledger, or a root that cannot be read now, leaves the question open. Cost: that of `pick`.
    """
    from ckptctl.goodput.data_use import EpochState

    try:
        use = ckptctl.data_use(root, storage=storage)
    except CkptctlError:
        return None
    if use.step is None:
        return None
    wrong = [one.after_step for one in use.epochs if one.state is EpochState.WRONG]
    known = [step for step in wrong if step is not None]
    after = min(known) if known and len(known) == len(wrong) else None
    return LedgerAnswer(use.source, use.since or 0, use.step, use.verdict, use.message, after)


def _check(paths: list[str], resume: str, *, canary: bool, follow: bool) -> None:
    if not paths:
        raise UsageError("no log was named", next_command="ckptctl loss --help")
    if canary and len(paths) < 2:
        raise OptionError(
            "--canary",
            "needs the log of the run and, after it, the log of the canary",
            next_command="ckptctl loss --canary",
        )
    if follow and (canary or resume != "last"):
        raise OptionError(
            "--follow",
            "checks the last resume; it cannot be combined with --canary or --resume",
            next_command="ckptctl loss --help",
        )


def _last(
    reports: Iterator[ckptctl.LossReport],
    out: Output,
    paths: Sequence[str],
    timeout_s: float | None,
) -> ckptctl.LossReport:
    """The last report; with `--json`, print each report that differs from the one before."""
    last: ckptctl.LossReport | None = None
    limit = "without a limit" if timeout_s is None else f"for up to {duration(timeout_s)}"
    awaited = f"waiting for steps after the resume in {paths[-1]}, {limit}{_absent(paths)}"
    out.say(line(awaited, hang=2))
    for report in reports:
        worst = report.worst
        so_far = f"read {counted(report.n_rows, 'row')}, none after a resume yet"
        if worst is not None:
            rows = counted(len(worst.resume.after), "row")
            twice = len(worst.replay.rows)
            so_far = (
                f"{rows} after the resume, {twice:,} logged twice, {report.verdict.value} so far"
            )
        is_new = last is None or (report.verdict, report.message) != (last.verdict, last.message)
        if out.as_json and is_new:
            out.document_line(document_of("loss", report))
        out.progress(f"watching: {so_far}{_absent(paths)}")
        last = report
    if last is None:
        raise UsageError("no log was named")
    if absent := _absent(paths):
        out.say(line(f"the wait has ended{absent}", hang=2))
    return last


def _absent(paths: Sequence[str]) -> str:
    local = [(path, local_path(path)) for path in paths if path != STDIN]
    absent = [path for path, file in local if file is not None and not os.path.exists(file)]
    return (
        f"; {', '.join(absent)} {verb(len(absent), 'does', 'do')} not exist yet" if absent else ""
    )


def _which(resume: str) -> int | str:
    if resume in ("last", "all"):
        return resume
    if resume.isascii() and resume.isdigit() and int(resume) > 0:
        return int(resume)
    raise OptionError(
        "--resume",
        f"{resume!r}: expected last, all, or a number from 1 on",
        instead="--resume last",
    )


def _keys(given: Sequence[str]) -> dict[str, str] | None:
    keys: dict[str, str] = {}
    for pair in given:
        field, equals, name = pair.partition("=")
        if not (field and equals and name):
            raise OptionError(
                "--key", f"{pair!r}: expected FIELD=NAME", instead="--key loss=train/ce"
            )
        keys[field] = name
    return keys or None


# What is printed


STYLES: Mapping[LossVerdict, Style] = {
    LossVerdict.DISCONTINUOUS: "bad",
    LossVerdict.SUSPECT: "warn",
    LossVerdict.INCONCLUSIVE: "warn",
    LossVerdict.NO_JUMP: "good",
    LossVerdict.CONTINUOUS: "good",
}
_SOURCES = {
    "report": "from the resume report",
    "log": "from the log",
    "asked": "as named here",
}
_MAX_ROWS = 10
_TITLES = ("step", "before", "after", "difference", "lr", "gradient norm", "tokens")


def loss_lines(report: LossReport, *, unicode: bool) -> list[Line]:
    """The verdict, the resume, the steps logged twice, the level, the faults."""
    arrow = "→" if unicode else "->"
    lines = [
        line(
            StyledText(report.verdict.value, STYLES[report.verdict]), f": {report.message}", hang=2
        ),
        EMPTY,
    ]
    for assessment in report.assessments:
        lines += _resume_lines(assessment, several=len(report.assessments) > 1)
    lines += section(_recomputed_lines(report, arrow))
    worst = report.worst
    if worst is not None:
        lines += section(_replay_lines(worst, arrow, several=len(report.assessments) > 1))
        lines += section(_level_lines(worst))
    lines += section(finding_lines(_every_finding(report)))
    lines += section(_fault_lines(report))
    if report.missing:
        gaps = (line(f"  {gap.what}: {gap.remedy}", hang=4) for gap in report.missing)
        lines += section([line(StyledText("the log lacks", "strong")), *gaps])
    for command in report.next_commands:
        lines += next_line(command)
    return lines


def _recomputed_lines(report: LossReport, arrow: str) -> Iterator[Line]:
    """The order of the logs, the work that is repeated, and the speed of the resumed job."""
    if report.order:
        yield line(f"  {report.order}", hang=4)
    if report.recomputed is not None:
        yield line(f"  recomputed: {report.recomputed.message}", hang=4)
    worst = report.worst
    if worst is not None and worst.throughput.pace is not Pace.UNKNOWN:
        pace = worst.throughput
        style: Style = "warn" if pace.pace is Pace.SLOWER else ""
        change = " (too few rows after the resume for a comparison)"
        if pace.is_known:
            change = f" ({pace.name} {pace.before:,.4g} {arrow} {pace.after:,.4g})"
        yield line("  speed after the resume: ", StyledText(pace.pace.value, style), change, hang=4)


def _every_finding(report: LossReport) -> tuple[Finding, ...]:
    """All findings, without the position of the first row: it is printed above already."""
    worst = report.worst
    if worst is None:
        return report.findings
    position = str(worst.resume.position)
    own = (
        replace(finding, where="") if finding.where == position else finding
        for finding in worst.findings
    )
    return (*own, *report.findings)


def _resume_lines(assessment: Assessment, *, several: bool) -> Iterator[Line]:
    resume = assessment.resume
    if several:
        word = StyledText(assessment.verdict.value, STYLES[assessment.verdict])
        yield line(f"resume {resume.number}: ", word, f": {assessment.message}", hang=2)
    first = f"step {resume.first_step:,} is the first after the resume"
    point = resume.resume_point
    if point is None:
        yield line(f"  {first}; the step of the checkpoint is unknown", hang=4)
    else:
        source = _SOURCES[point.source]
        yield line(f"  resumed after step {point.step:,} ({source}); {first}", hang=4)
    yield line(f"  first row after the resume: {resume.position}", solid=True)
    if resume.marker is not None and resume.marker.text:
        yield line(f"  line in the log: {resume.marker.text.strip()}", hang=4)
    yield EMPTY


def _replay_lines(assessment: Assessment, arrow: str, *, several: bool) -> Iterator[Line]:
    rows = assessment.replay.rows
    if not rows:
        return
    whose = f"resume {assessment.resume.number}: " if several else ""
    yield line(StyledText(f"{whose}{counted(len(rows), 'step')} logged twice", "strong"))
    cells = [_TITLES, *(_cells(row, arrow) for row in rows[:_MAX_ROWS])]
    shown = [i for i in range(len(cells[0])) if any(row[i] != "-" for row in cells[1:])]
    widths = {i: max(len(row[i]) for row in cells) for i in shown}
    for number, row in enumerate(cells):
        style: Style = "strong" if number == 0 else ""
        spans = [padded(f"  {row[i]}", widths[i] + 2, style, right=True) for i in shown]
        yield line(*spans, solid=True)
    if len(rows) > _MAX_ROWS:
        yield line(f"  and {len(rows) - _MAX_ROWS} more (all of them with --json)", hang=2)
    left_out = assessment.replay.not_compared
    if left_out:
        steps = listed([str(step) for step in left_out[:5]])
        yield line(
            f"  not compared: {counted(len(left_out), 'step')} whose rows are means over different "
            f"numbers of steps ({steps})",
            hang=4,
        )


def _cells(row: Replayed, arrow: str) -> tuple[str, ...]:
    before, after = row.before, row.after
    return (
        str(row.step),
        _printed(before.loss),
        _printed(after.loss),
        f"{100 * row.difference:+.4f} %",
        _both(before.lr, after.lr, arrow),
        _both(before.grad_norm, after.grad_norm, arrow),
        _both(before.tokens, after.tokens, arrow),
    )


def _both(a: Number | None, b: Number | None, arrow: str) -> str:
    if a is None or b is None:
        return "-"
    before, after = (
        f"{value:,.0f}" if abs(value) < 1e15 and value == int(value) else f"{value:.4g}"
        for value in (a.value, b.value)
    )
    same = a.value == b.value or abs(a.value - b.value) <= max(a.quantum, b.quantum)
    return after if same else f"{before} {arrow} {after}"


def _printed(number: Number | None) -> str:
    """A loss with as many decimals as the log prints, of a double the first seven digits."""
    if number is None:
        return "-"
    if 1e-12 <= number.quantum < 1:
        return f"{number.value:.{len(f'{number.quantum:.12f}'.rstrip('0')) - 2}f}"
    return f"{number.value:.7g}"


def _level_lines(assessment: Assessment) -> Iterator[Line]:
    level, replay = assessment.level, assessment.replay
    if replay.rows:
        yield line(
            f"  median difference {share(replay.median)}, largest {share(replay.most)}; printing "
            f"rounds by {share(replay.rounding)}, and batches differ by {share(replay.noise)}",
            hang=4,
        )
    if not level.shifts:
        return
    shifts = ", ".join(
        f"{signed(shift.found)} over {shift.n_rows} rows (limit {signed(shift.threshold)})"
        for shift in level.shifts
    )
    yield line(f"  median loss compared with the 20 rows before: {shifts}", hang=4)
    if level.smallest_jump is not None:
        yield line(f"  a jump below {share(level.smallest_jump)} would not be detected", hang=4)


def _fault_lines(report: LossReport) -> Iterator[Line]:
    """The faults that are excluded, and those that are not; one that was found is a finding."""
    for state, title in (
        (FaultState.EXCLUDED, "excluded faults"),
        (FaultState.OPEN, "faults not excluded"),
    ):
        chosen = [fault for fault in report.faults if fault.state is state]
        yield from [line(StyledText(title, "strong"))] if chosen else []
        yield from (line(f"  {fault.name}: {fault.why}", hang=4) for fault in chosen)


# What a canary is, and how to make one.
_CANARY = (
    "After a clean stop no step was logged twice, and the curve alone does not show a lost",
    "optimizer, lost random numbers, or data that is repeated or skipped. A canary does:",
    "",
    "1. Resume from the step before the newest one, in a separate job with its own log folder",
    "   and without saving. It needs 5 to 10 steps that the log of the run holds already.",
    '   With ckptctl.train: Checkpointer.resume("auto", replay=5), up to Start.last.',
    "2. Log every step, with five significant digits or more.",
    "3. Compare: the log of the run first, the log of the canary last.",
    "",
    "     ckptctl loss --canary train.log canary.log",
    "",
    "The verdict is continuous only where these steps agree. The job then resumes from the newest",
    "step, which the same code saves and reads; check it with ckptctl verify STEP --level content.",
)

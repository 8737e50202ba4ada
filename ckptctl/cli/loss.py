"""`ckptctl loss`: did the loss continue across a resume?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

import ckptctl
from ckptctl.cli.documents import loss_document
from ckptctl.cli.lines import line
from ckptctl.cli.options import Storage, option
from ckptctl.cli.output import Output
from ckptctl.cli.views.loss import canary_lines, loss_lines
from ckptctl.errors import UsageError
from ckptctl.loss.following import follow_loss
from ckptctl.loss.level import Pace
from ckptctl.loss.plots import check_plot, write_plot

EXAMPLES = (
    "ckptctl loss train.log",
    "ckptctl loss old.log new.log --resume-report /shared/ckpt/run-1234",
    "ckptctl loss --follow train.log --resume-report /shared/ckpt/run-1234 --timeout 1800",
)
EXIT_CODES = (0, 2, 30, 31, 32, 75, 77)


def loss(
    logs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LOG...",
            help="Training logs in the order of time: files, folders, URLs, or - for standard "
            "input.",
        ),
    ] = None,
    log: Annotated[
        list[str] | None,
        option("--log", metavar="FILE", help="One more log, behind those named as LOG."),
    ] = None,
    resume_step: Annotated[
        int | None,
        option(
            "--resume-step",
            metavar="N",
            min=0,
            help="The last step that the checkpoint holds; by default what the log says.",
        ),
    ] = None,
    resume_tokens: Annotated[
        int | None,
        option(
            "--resume-tokens",
            metavar="N",
            min=0,
            help="The tokens that the checkpoint had seen at that step.",
        ),
    ] = None,
    resume_samples: Annotated[
        int | None,
        option(
            "--resume-samples",
            metavar="N",
            min=0,
            help="The samples that the checkpoint had seen at that step.",
        ),
    ] = None,
    resume_report: Annotated[
        str | None,
        option(
            "--resume-report",
            metavar="PATH",
            help="The report that ckptctl.train left of the resume, or the checkpoint root: its "
            "newest report is taken.",
        ),
    ] = None,
    resume: Annotated[
        str,
        option(
            "--resume",
            metavar="last|all|N",
            help="Which resume to judge where the logs hold several.",
        ),
    ] = "last",
    strict: Annotated[
        bool,
        option(
            "--strict",
            help="Only steps that were logged twice will do: no-jump ends with 31.",
        ),
    ] = False,
    format: Annotated[  # noqa: A002 - the option is called so
        str | None,
        option(
            "--format",
            metavar="NAME",
            help="Whose format the logs have, where that is not found out.",
        ),
    ] = None,
    pattern: Annotated[
        str | None,
        option(
            "--pattern",
            metavar="REGEX",
            help="How a line of the log is read: a regular expression with groups of the names of "
            "fields, (?P<step>[0-9]+) and (?P<loss>...) among them.",
        ),
    ] = None,
    key: Annotated[
        list[str] | None,
        option(
            "--key",
            metavar="FIELD=NAME",
            help="What a field is called in JSON lines or in a table: loss=train/ce.",
        ),
    ] = None,
    plot: Annotated[
        str | None,
        option(
            "--plot",
            metavar="FILE",
            help="Also draw the picture into a file: .svg, .html or .png.",
        ),
    ] = None,
    canary: Annotated[
        bool,
        option(
            "--canary",
            help="The last LOG is that of a short resume over steps that the others hold: compare "
            "these. Without a LOG: how to make one.",
        ),
    ] = False,
    follow: Annotated[
        bool,
        option(
            "--follow",
            help="Watch the logs until there are enough rows, and end with the verdict; with "
            "--json one document a line.",
        ),
    ] = False,
    max_steps: Annotated[
        int | None,
        option(
            "--max-steps",
            metavar="N",
            min=1,
            help="With --follow: decide N steps after the resume, whatever is known then.",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        option(
            "--timeout",
            metavar="SECONDS",
            min=0.1,
            help="With --follow: decide after this time, whatever is known then. Otherwise how "
            "long to wait for one answer of the storage, 30 s where it is not said.",
        ),
    ] = None,
    print_throughput: Annotated[
        bool,
        option(
            "--print-throughput",
            help="Print only how the speed after the resume compares with the run before it "
            "(in-band, slower, faster or unknown), and the answer on standard error; --follow "
            "waits for it.",
        ),
    ] = False,
    *,
    storage: Storage,
    out: Output,
) -> int:
    """Did the loss continue across a resume?

    Compares the steps that were logged before the crash and again after the resume, then
    counters, then the level of the loss. Never a plain yes without steps that were logged twice.
    With --quiet the verdict alone is printed.
    """
    paths = [*(logs or ()), *(log or ())]
    if canary and not paths:
        out.lines(canary_lines())
        return 0
    _check(paths, resume, canary=canary, follow=follow)
    if plot is not None:
        check_plot(plot)
    reading: dict[str, Any] = {"format": format, "pattern": pattern, "keys": _keys(key or ())}
    if follow:
        reports = follow_loss(
            paths,
            resume_step=resume_step,
            resume_tokens=resume_tokens,
            resume_samples=resume_samples,
            report=resume_report,
            strict=strict,
            with_throughput=print_throughput,
            wait_s=timeout,
            max_steps=max_steps,
            **reading,
            **storage,
        )
        report = _last(reports, out)
    else:
        report = ckptctl.check_loss(
            paths[:-1] if canary else paths,
            resume_step=resume_step,
            resume_tokens=resume_tokens,
            resume_samples=resume_samples,
            report=resume_report,
            resume=_which(resume),
            strict=strict,
            canary=paths[-1] if canary else None,
            **reading,
            **storage,
        )
    if plot is not None and not write_plot(report, plot) and out.talks:
        out.lines([line(f"nothing to draw: {plot} was not written")], to=out.err)
    if follow and out.as_json:
        out.save(lambda: loss_document(report))
        return report.exit_code
    judged = report.judged
    pace = Pace.UNKNOWN if judged is None else judged.throughput.pace
    out.answer(
        lambda: loss_document(report),
        lambda: loss_lines(report, width=out.out.picture_width, unicode=out.out.unicode),
        bare=(pace.value if print_throughput else report.verdict.value,),
        bare_only=print_throughput,
    )
    return report.exit_code


def _check(paths: list[str], resume: str, *, canary: bool, follow: bool) -> None:
    """Refuse what cannot go together."""
    if not paths:
        raise UsageError("no log was named", next_command="ckptctl loss --help")
    if canary and len(paths) < 2:
        raise UsageError(
            "--canary takes the log of the run, and then that of the canary",
            next_command="ckptctl loss --canary",
        )
    if follow and (canary or resume != "last"):
        raise UsageError(
            "--follow waits for the last resume; it goes with neither --canary nor --resume",
            next_command="ckptctl loss --help",
        )


def _last(reports: Iterator[ckptctl.LossReport], out: Output) -> ckptctl.LossReport:
    """The last report; with `--json` each that says something new is a line."""
    told: ckptctl.LossReport | None = None
    for report in reports:
        told_now = told is None or (report.verdict, report.message) != (told.verdict, told.message)
        if out.as_json and told_now:
            out.document_line(loss_document(report))
        out.progress(f"watching: {_so_far(report)}")
        told = report
    if told is None:
        raise UsageError("no log was named")
    return told


def _so_far(report: ckptctl.LossReport) -> str:
    judged = report.judged
    if judged is None:
        return f"{report.n_rows:,} rows read, none after a resume yet"
    after, twice = len(judged.resume.after), len(judged.replay.rows)
    return f"{after:,} rows after the resume, {twice:,} logged twice, {report.verdict.value} so far"


def _which(resume: str) -> int | str:
    if resume in ("last", "all"):
        return resume
    if resume.isascii() and resume.isdigit() and int(resume) > 0:
        return int(resume)
    raise UsageError(
        f"--resume is last, all or a number from 1 on, not {resume!r}", instead="--resume last"
    )


def _keys(given: list[str] | tuple[str, ...]) -> dict[str, str] | None:
    keys: dict[str, str] = {}
    for pair in given:
        field, equals, name = pair.partition("=")
        if not (field and equals and name):
            raise UsageError(f"--key is FIELD=NAME, not {pair!r}", instead="--key loss=train/ce")
        keys[field] = name
    return keys or None

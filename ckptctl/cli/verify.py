"""`ckptctl verify`: inspect one step."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import ckptctl
from ckptctl.cli.options import LevelOpt, OfOneStep, StepArg
from ckptctl.cli.output import MakeDocument, Output, document_of, process_group
from ckptctl.cli.pictures import (
    CLAIMED_BY_VERIFIED,
    LACKING,
    STEP_MARKS,
    claim_lines,
    glyph,
    map_of_ranks,
    not_proven,
    step_state,
    warnings_of,
)
from ckptctl.cli.rendering import (
    EMPTY,
    Line,
    StyledText,
    finding_lines,
    line,
    next_line,
    ranks_in_words,
    section,
    state_lines,
)
from ckptctl.findings import Report, Severity, Verdict
from ckptctl.formatting import command_line, counted, exact_size, size, utc, when
from ckptctl.model import Level
from ckptctl.options import ContentOptions, StorageOptions
from ckptctl.records.byte_pass import Stop
from ckptctl.selection.targets import parse_target

EXAMPLES = (
    "ckptctl verify /shared/ckpt/run-1234/step_1200",
    "ckptctl verify /shared/ckpt/run-1234@latest --level content --deadline 5m",
    "ckptctl verify s3://bucket/run-1234@latest --remote-checksums",
)
EXIT_CODES = (0, 2, 10, 11, 20, 21, 22, 23, 24, 25, 26, 27, 75, 77, 130)


def verify(
    step: StepArg,
    level: LevelOpt = None,
    *,
    content: ContentOptions,
    requirements: OfOneStep,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Inspect one step and report every finding.

    Nothing is loaded, and no code of the step is run. With --quiet only the exit code is returned.
    If --subset, --deadline or Ctrl-C leave bytes out, the level that was reached is structure, and
    the report states how much is proven; a deadline ends with 22. Started by torchrun or srun, the
    processes share the bytes, and return one report and one exit code.
    """
    with ExitStack() as stack:
        group, stop = None, None
        if level is Level.CONTENT:
            group = process_group(stack, out)
            stop = stack.enter_context(ended_by_signals()) if group.size == 1 else None
        report = ckptctl.verify(
            step,
            level=level,
            content=content,
            requirements=requirements,
            storage=storage,
            stop=stop,
            group=group,
            on_progress=lambda done, total: out.progress("compared", done, total, unit="B"),
        )
        stopped = stop.exit_code if stop is not None else 0
        code = stopped or report.exit_code
        report = replace(report, exit_code=code if group is None else group.agree(code))
    out.answer(
        verify_document(report, next_command(report)),
        lambda: report_lines(report, time.time(), unicode=out.out.unicode),
    )
    return report.exit_code


def verify_document(report: Report, next_command: str | None) -> MakeDocument:
    """The document of `verify`: the report is in its field `report`."""
    return document_of(
        "verify", exit_code=report.exit_code, report=report, next_command=next_command
    )


_NOT_SEEN = {
    Level.LISTING: "the contents of the shard files were not read",
    Level.STRUCTURE: "the bytes of the tensors were not compared",
    Level.CONTENT: "no bytes were compared with a checksum",
}
"""What a level leaves out; at content, of a step that has neither readable records nor a seal."""


def report_lines(report: Report, now_s: float, *, unicode: bool) -> list[Line]:
    """The verdict, the facts, the findings, the map of ranks, what a resume restores."""
    state = step_state(report)
    word = STEP_MARKS[state].word
    if state == Verdict.COMPLETE:
        word = f"complete; not proven: {not_proven(report, CLAIMED_BY_VERIFIED)}"
    if _lacks_checksums(report):
        word = "unverifiable, as its files hold no checksums and no seal has any"
    if state == LACKING:
        word = "complete, but without an optimizer"
        word = word if report.usable else "complete, but not usable as requested"
    verdict = StyledText(f"{word}{warnings_of(report)}:", STEP_MARKS[state].style)
    mark, url = glyph(STEP_MARKS[state], unicode), StyledText(report.url, "name")
    return [
        line(mark, " ", verdict, " ", url, solid=True),
        *(line("  ", fact, hang=4) for fact in _facts(report, now_s)),
        EMPTY,
        *section(claim_lines(report.claims, unicode=unicode)),
        *section(finding_lines(report.findings)),
        *section(map_of_ranks(report, unicode=unicode)),
        *section(state_lines(report.state, usable=report.usable)),
        *next_line(next_command(report)),
    ]


def next_command(report: Report) -> str | None:
    """What to run after `verify`: never the same command again, nothing if all is proven.

    The comparison that a warning on a usable step asks for, or a deeper inspection of it; the
    page of the worst fault, or the choice of another step.
    """
    root = parse_target(report.url).root
    if report.usable:
        for warning in report.with_severity(Severity.WARNING):
            given = warning.next_command
            if given is not None and given.startswith("ckptctl diff "):
                return given
        deeper = report.level.deeper
        return command_line("verify", report.url, "--level", deeper.value) if deeper else None
    if report.verdict is Verdict.COMPLETE:
        fixed = (f.next_command for f in report.findings if f.code == "world-size.fixed")
        return next(fixed, None) or command_line("show", report.url)
    if _lacks_checksums(report):
        return command_line("seal", report.url, "--accept-unverifiable")
    fault = report.with_severity(Severity.FAULT)[0]
    if (given := fault.next_command) is not None:
        words = shlex.split(given)
        # Not the same inspection once more, and no `show` of what could not be read.
        is_blind = words[:2] == ["ckptctl", "show"] and not report.n_tensors
        if words != ["ckptctl", "verify", report.url] and not is_blind:
            return given
    if report.verdict is Verdict.UNKNOWN:
        return command_line("doctor", "storage", root)
    if report.verdict in (Verdict.CHANGED, Verdict.UNSAFE) or report.number is None:
        return command_line("explain", fault.code)
    return command_line("pick", root, "--before", str(report.number))


def _lacks_checksums(report: Report) -> bool:
    """Whether nothing is wrong but that no checksum of the bytes exists, as of safetensors."""
    faults = {finding.code for finding in report.with_severity(Severity.FAULT)}
    return faults == {"record.unverifiable"} and report.has_finding("seal.missing")


def _facts(report: Report, now_s: float) -> list[str]:
    number = "" if report.number is None else f"step {report.number}, "
    held = counted(report.n_records, "record")
    if report.n_tensors:  # of rank files, `show` alone reads the names
        held = f"{counted(report.n_tensors, 'tensor')} in {held}"
    read = f"{report.level.value} ({size(report.bytes_read)} read)"
    seen = f"checked: {read}; {_NOT_SEEN[report.level]}"
    if report.level is Level.CONTENT and report.seal is not None:
        seen = f"checked: {read}; every byte was compared"
    if report.verdict is Verdict.UNKNOWN:
        seen = "could not be inspected; nothing below is checked"
    facts = [
        f"{number}layout {report.layout}, {ranks_in_words(report.world_size)}",
        f"{exact_size(report.n_bytes)} in {counted(report.n_files, 'file')}, {held}",
        seen,
    ]
    if report.bytes_in_records:
        whole = report.bytes_proven == report.bytes_in_records
        proven = "all" if whole else f"{report.bytes_proven:,} of"
        records = counted(report.records_proven, "record")
        facts[-1] = (
            f"checked: {read}; {proven} {report.bytes_in_records:,} bytes in records match "
            f"their checksums ({records})"
        )
    if report.pickles_unread:
        facts.append(
            f"{counted(report.pickles_unread, 'pickle')} not read at this level: whether loading "
            "them runs code is unknown"
        )
    if report.allowed_globals:
        facts.append(f"allowed in pickles: {', '.join(report.allowed_globals)}")
    if report.values_scanned:
        bad = sum(finding.code == "values.not-finite" for finding in report.findings)
        says = "see below" if bad else "all of them finite"
        facts.append(f"{counted(report.values_scanned, 'floating-point value')} scanned: {says}")
    if report.seal is not None:
        what = "every byte" if report.level is Level.CONTENT else "sizes and metadata"
        facts.append(f"sealed by {report.seal}; {what} compared with the seal")
    if report.seal_signer is not None:
        how = "verified" if report.seal_signer_verified else "not checked: --require-signature does"
        facts.append(f"signed by {report.seal_signer}; {how}")
    by_store = report.by_store
    if by_store is not None and by_store.n_same:
        n_bytes = exact_size(by_store.n_bytes)
        same = f"{by_store.n_same:,} of {counted(by_store.n_files, 'file')}, {n_bytes},"
        match = f"the store's checksums of {same} match the seal"
        if by_store.n_reported:
            match += f"; {by_store.n_reported:,} of them sealed with the store's checksum alone"
        facts.append(f"{match}; their bytes were not read")
    if report.written_s is not None:
        written = f"written {when(report.written_s, now_s)}, {utc(report.written_s)}"
        facts.insert(1, written)
    return facts


class SignalStop(Stop):
    """A pass over bytes that the first signal ends: what was compared until then is reported.

    `exit_code` is 128 + the signal's number once one came.
    """

    exit_code = 0


@contextmanager
def ended_by_signals() -> Iterator[SignalStop]:
    """End a running pass at the first signal, and the process at the next, or if none runs."""
    ended = SignalStop()
    before: dict[signal.Signals, Any] = {}

    def end(number: int, frame: FrameType | None) -> None:
        if ended.listening and not ended.asked:
            ended.exit_code = 128 + number
            ended.ask()
        else:
            before[signal.Signals(number)](number, frame)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if callable(signal.getsignal(number)):
            before[number] = signal.signal(number, end)
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

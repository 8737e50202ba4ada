"""`ckptctl classify`: distinguish failures of the infrastructure from failures of the job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import ckptctl
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.rendering import EMPTY, Line, Style, StyledText, line, next_line, padded, section
from ckptctl.errors import OptionError
from ckptctl.failures.classifying import DEADLINE_S
from ckptctl.failures.rank_dumps import described, ranges_of
from ckptctl.failures.results import Classification, Domain, Evidence, Role, Suspect
from ckptctl.formatting import counted
from ckptctl.options import Parameter, StorageOptions

EXAMPLES = (
    "ckptctl classify --print-nodes slurm-4711.out dmesg-node017.log --exit-code 1",
    "sacct -j 4711 -P -o JobID,State,ExitCode | ckptctl classify slurm-4711.out -",
    "ckptctl classify rank*.log --flight-recorder /tmp/traces --state OOMKilled --exit-code 137",
)
EXIT_CODES = (0, 2, 75, 77)


Scheduler = Literal["slurm", "kubernetes", "torchrun", "ft_launcher", "shell"]
"""Who reports the exit code."""


def classify(
    logs: Annotated[
        list[str] | None,
        Parameter(
            "LOG...",
            "Files, folders of logs, URLs, or - for standard input; compressed or not, "
            "of the ranks, the launcher, the kernel, the scheduler; torchrun's error "
            "files too.",
        ),
    ] = None,
    exit_code: Annotated[
        str | None, Parameter("--exit-code N", "The exit code of the job: 137, -9, or SLURM's 0:9.")
    ] = None,
    state: Annotated[
        str | None,
        Parameter(
            "--state WORD",
            "The scheduler's state of the job: OUT_OF_MEMORY, NODE_FAIL, OOMKilled, Evicted.",
            variable="CKPTCTL_JOB_STATE",
        ),
    ] = None,
    scheduler: Annotated[
        Scheduler | None,
        Parameter(
            "--scheduler",
            "Which program reports the exit code; torchrun turns every failure into 1.",
        ),
    ] = None,
    flight_recorder: Annotated[
        str | None,
        Parameter(
            "--flight-recorder DIR",
            "Dumps of torch's flight recorder, one for each rank. Without it, dumps in a "
            "folder of logs or beside a log are read.",
        ),
    ] = None,
    deadline: Annotated[
        float, Parameter("--deadline TIME", "Read for at most this long: 30s, 5m.")
    ] = DEADLINE_S,
    print_nodes: Annotated[
        bool,
        Parameter(
            "--print-nodes",
            "Print only the suspected nodes on standard output, one per line, and the "
            "evidence on standard error; without nodes of low confidence.",
        ),
    ] = False,
    min_confidence: Annotated[
        Literal["low", "medium", "high"],
        Parameter(
            "--min-confidence", "With --print-nodes: how certain it has to be that a node failed."
        ),
    ] = "medium",
    print_word: Annotated[
        bool,
        Parameter(
            "--print-word",
            "Print only the word on standard output, and the evidence on standard error.",
            hidden=True,
        ),
    ] = False,
    *,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Classify a failure by the logs of a job, and print what to do.

    The first cause counts, not the last line; errors of other ranks after it are listed as its
    consequences. If nothing states a cause, the answer is unknown. Every answer ends with exit
    code 0; with --quiet or --print-word one word is printed for a script to branch on:
    infrastructure, job, stopped, none or unknown. Hardware errors that the kernel, the driver or
    the scheduler reports are listed even if they did not decide. Nothing is drained.
    """
    if print_word and print_nodes:
        raise OptionError("--print-word", "and --print-nodes exclude each other")
    answer = ckptctl.classify(
        logs or (),
        exit_code=exit_code,
        state=state,
        scheduler=scheduler,
        flight_recorder=flight_recorder,
        deadline_s=deadline,
        storage=storage,
    )
    out.answer(
        document_of("classify", answer),
        lambda: classification_lines(answer),
        bare=answer.nodes_from(min_confidence) if print_nodes else (answer.domain.value,),
        bare_only=print_nodes or print_word,
    )
    return answer.exit_code


_STYLES: dict[Domain, Style] = {
    Domain.INFRASTRUCTURE: "bad",
    Domain.JOB: "bad",
    Domain.STOPPED: "warn",
    Domain.UNKNOWN: "warn",
    Domain.NONE: "good",
}
_FEW = 4


def classification_lines(answer: Classification) -> list[Line]:
    """The class, what was decisive, what followed from it, and what to do."""
    head = [StyledText(answer.domain.value, _STYLES[answer.domain])]
    if answer.failure != answer.domain.value:
        head.append(StyledText(f"  {answer.failure}", "strong"))
    return [
        line(*head, f"  (confidence {answer.confidence})"),
        line(f"  {answer.message}", hang=4),
        EMPTY,
        *section(_listed("", answer.evidence)),
        *section(_listed("what followed", answer.consequences)),
        *section(_listed("other evidence", answer.others)),
        *section(_listed("training continued after", answer.survived)),
        *section(_stalled(answer)),
        *_suspected(answer.suspects),
        *_set_aside(answer),
        line("do: ", StyledText(answer.action.value, "strong"), f". {answer.advice}", hang=4),
        line(f"restart: {_RESTART[answer.restart.value]}", hang=4),
        line(_read(answer)),
        *(line(f"not read: {message}", hang=4) for message in answer.unread[:_FEW]),
        *next_line(answer.next_command),
    ]


def _read(answer: Classification) -> str:
    dumps = f" and {counted(answer.n_dumps, 'dump')}" if answer.n_dumps else ""
    if not answer.n_files:
        return f"no log was read{f', only {dumps[5:]}' if dumps else ''}"
    end = (
        "; the deadline was reached, and the rest was not read: the answer rests on what was read"
        if answer.deadline_reached
        else ""
    )
    return (
        f"read {counted(answer.n_lines, 'line')} from {counted(answer.n_files, 'log')}{dumps}{end}"
    )


def _stalled(answer: Classification) -> Iterator[Line]:
    if answer.collectives:
        yield line("collectives that did not complete:")
    for collective in answer.collectives[:_FEW]:
        yield line(f"  {described(collective)}", hang=4)
    if len(answer.collectives) > _FEW:
        yield line(f"  and {len(answer.collectives) - _FEW:,} more (--json has them)")
    if answer.ranks_without_dump:
        yield line(f"  ranks without a dump: {ranges_of(answer.ranks_without_dump)}", hang=4)
    for message in answer.not_dumps[:_FEW]:
        yield line(f"  {message}", hang=4)


def _set_aside(answer: Classification) -> Iterator[Line]:
    for reason in answer.set_aside[:_FEW]:
        yield line("set aside: ", StyledText(reason, "warn"), hang=4)
    if len(answer.set_aside) > _FEW:
        yield line(f"  and {len(answer.set_aside) - _FEW:,} more (--json has them)")


_RESTART = {
    "free": "yes, and not counted against a budget",
    "yes": "yes, within the budget",
    "once": "once; when the same comes again, stop",
    "no": "no, not before a person has looked",
}


def _suspected(suspects: Sequence[Suspect]) -> Iterator[Line]:
    for suspect in suspects:
        parts = [*suspect.devices, *(f"rank {rank}" for rank in suspect.ranks)]
        inside = f" ({', '.join(parts)})" if parts else ""
        node = suspect.node or "a node that the logs do not name"
        unsure = "" if suspect.confidence != "low" else "; confidence low: do not drain it for this"
        yield line("suspected: ", StyledText(node, "bad"), f"{inside}{unsure}", hang=4)


def _listed(title: str, evidence: Sequence[Evidence]) -> Iterator[Line]:
    if title and evidence:
        yield line(f"{title}:")
    for evidence_line in evidence[:_FEW]:
        yield from _shown(evidence_line)
    if len(evidence) > _FEW:
        yield line(f"  and {len(evidence) - _FEW:,} more (--json has them)")


def _shown(evidence_line: Evidence) -> Iterator[Line]:
    style: Style = (
        "bad"
        if evidence_line.role in (Role.CAUSE, Role.ROOT) and not evidence_line.survived
        else ""
    )
    times = f" ({evidence_line.count:,} times)" if evidence_line.count > 1 else ""
    place = (
        f"{evidence_line.file}:{evidence_line.line}"
        if evidence_line.line
        else f"{evidence_line.file} {evidence_line.text}"
    )
    yield line(
        "  ",
        padded(evidence_line.role.value, 7, style),
        f"  {evidence_line.description}{times}",
        hang=11,
    )
    yield line("           ", StyledText(place, "name"), solid=True)
    if evidence_line.line:
        yield line(f"           {evidence_line.text}", hang=13)

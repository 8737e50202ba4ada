"""`ckptctl classify`: distinguish failures of the infrastructure from failures of the job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Literal, TypeVar

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
Item = TypeVar("Item")


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
        *_first(answer.set_aside, _set_aside),
        line("do: ", StyledText(answer.action.value, "strong"), f". {answer.advice}", hang=4),
        line(f"restart: {_RESTART[answer.restart.value]}", hang=4),
        line(_read(answer)),
        *(line(f"not read: {message}", hang=4) for message in answer.unread[:_FEW]),
        *next_line(answer.next_command),
    ]


def _read(answer: Classification) -> str:
    dumps = counted(answer.n_dumps, "dump") if answer.n_dumps else ""
    if not answer.n_files:
        return f"no log was read{f', only {dumps}' if dumps else ''}"
    text = f"read {counted(answer.n_lines, 'line')} from {counted(answer.n_files, 'log')}"
    text += f" and {dumps}" if dumps else ""
    if answer.deadline_reached:
        text += "; the deadline was reached, and the rest was not read: the answer rests on what "
        text += "was read"
    return text


def _first(items: Sequence[Item], shown: Callable[[Item], Iterable[Line]]) -> Iterator[Line]:
    """The lines of the first few, and how many more there are."""
    for item in items[:_FEW]:
        yield from shown(item)
    if len(items) > _FEW:
        yield line(f"  and {len(items) - _FEW:,} more (--json has them)")


def _stalled(answer: Classification) -> Iterator[Line]:
    if answer.collectives:
        yield line("collectives that did not complete:")
    yield from _first(answer.collectives, lambda one: [line(f"  {described(one)}", hang=4)])
    if answer.ranks_without_dump:
        yield line(f"  ranks without a dump: {ranges_of(answer.ranks_without_dump)}", hang=4)
    for message in answer.not_dumps[:_FEW]:
        yield line(f"  {message}", hang=4)


def _set_aside(reason: str) -> list[Line]:
    return [line("set aside: ", StyledText(reason, "warn"), hang=4)]


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
    yield from _first(evidence, _shown)


def _shown(evidence: Evidence) -> Iterator[Line]:
    is_cause = evidence.role in (Role.CAUSE, Role.ROOT) and not evidence.survived
    role = padded(evidence.role.value, 7, "bad" if is_cause else "")
    times = f" ({evidence.count:,} times)" if evidence.count > 1 else ""
    yield line("  ", role, f"  {evidence.description}{times}", hang=11)
    at = f":{evidence.line}" if evidence.line else f" {evidence.text}"
    yield line("           ", StyledText(f"{evidence.file}{at}", "name"), solid=True)
    if evidence.line:
        yield line(f"           {evidence.text}", hang=13)

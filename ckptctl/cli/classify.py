"""`ckptctl classify`: tell failures of the infrastructure from failures of the job."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

import ckptctl
from ckptctl.cli.documents import document
from ckptctl.cli.options import option
from ckptctl.cli.output import Output
from ckptctl.cli.values import parse_duration
from ckptctl.cli.views.failures import classification_lines
from ckptctl.failures.classifying import DEADLINE_S
from ckptctl.options import StorageOptions

EXAMPLES = (
    "ckptctl classify --print-nodes slurm-4711.out dmesg-node017.log --exit-code 1",
    "sacct -j 4711 -P -o JobID,State,ExitCode | ckptctl classify slurm-4711.out -",
    "ckptctl classify rank*.log --flight-recorder /tmp/traces --state OOMKilled --exit-code 137",
)
EXIT_CODES = (0, 2, 75, 77)


class SchedulerChoice(str, Enum):
    """Who reports the exit code, for the command line."""

    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    TORCHRUN = "torchrun"
    FT_LAUNCHER = "ft_launcher"
    SHELL = "shell"


def classify(
    logs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LOG]...",
            help="Files, folders of logs, URLs, or - for standard input; compressed or not, "
            "of the ranks, the launcher, the kernel, the scheduler; torchrun's error "
            "files too.",
        ),
    ] = None,
    exit_code: Annotated[
        str | None,
        option(
            "--exit-code",
            metavar="N",
            help="The exit code of the job: 137, -9, or SLURM's 0:9.",
        ),
    ] = None,
    state: Annotated[
        str | None,
        option(
            "--state",
            metavar="WORD",
            help="The scheduler's state of the job: OUT_OF_MEMORY, NODE_FAIL, OOMKilled, Evicted.",
        ),
    ] = None,
    scheduler: Annotated[
        SchedulerChoice | None,
        option(
            "--scheduler",
            help="Which program reports the exit code; torchrun turns every failure into 1.",
        ),
    ] = None,
    flight_recorder: Annotated[
        str | None,
        option(
            "--flight-recorder",
            metavar="DIR",
            help="Dumps of torch's flight recorder, one for each rank. Without it, dumps in a "
            "folder of logs or beside a log are read.",
        ),
    ] = None,
    deadline: Annotated[
        str,
        option("--deadline", metavar="TIME", help="Read for at most this long: 30s, 5m."),
    ] = f"{DEADLINE_S / 60:.0f}m",
    print_nodes: Annotated[
        bool,
        option(
            "--print-nodes",
            help="Print only the suspected nodes on standard output, one per line, and the "
            "evidence on standard error.",
        ),
    ] = False,
    print_word: Annotated[
        bool,
        option(
            "--print-word",
            help="Print only the word on standard output, and the evidence on standard error.",
        ),
    ] = False,
    *,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Classify a failure by the logs of a job, and print what to do.

    The first cause counts, not the last line; errors of other ranks after it are listed as its
    consequences. If nothing states a cause, the answer is unknown. The exit code is always 0;
    with --quiet or --print-word one word is printed for a script to branch on: infrastructure,
    job, stopped, none or unknown. Hardware errors that the kernel, the driver or the scheduler
    reports are listed even if they did not decide. Nothing is drained.
    """
    answer = ckptctl.classify(
        logs or (),
        exit_code=exit_code,
        state=state,
        scheduler=scheduler.value if scheduler else None,
        flight_recorder=flight_recorder,
        deadline_s=parse_duration(deadline),
        storage=storage,
    )
    out.answer(
        lambda: document("classify", answer),
        lambda: classification_lines(answer),
        bare=answer.nodes if print_nodes else (answer.domain.value,),
        bare_only=print_nodes or print_word,
    )
    return answer.exit_code

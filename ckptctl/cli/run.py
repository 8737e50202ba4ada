"""`ckptctl run`: restart a job as long as it makes progress."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated, TypedDict

from ckptctl.cli.notifying import Notifier
from ckptctl.cli.options import (
    AlarmAfterOpt,
    NotifyOpt,
    OfNames,
    OptionalRootOpt,
    only,
    parse_duration,
)
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.rendering import Line, StyledText, line, next_line
from ckptctl.distributed.launcher import launched_together
from ckptctl.errors import OptionError, UsageError
from ckptctl.formats.own.heartbeats import SECTIONS, Section
from ckptctl.formats.own.supervision import Attempt, Decision
from ckptctl.options import Parameter, PickPolicy, StorageOptions
from ckptctl.selection.watching import ALARM_AFTER
from ckptctl.supervisor.agents import supervise_nodes
from ckptctl.supervisor.nodes import NodeOptions
from ckptctl.supervisor.options import WAIT_S, OutputOptions, RunOptions
from ckptctl.supervisor.policy import BudgetOptions
from ckptctl.supervisor.restarting import Supervised, supervise

EXAMPLES = (
    "ckptctl run --root /shared/ckpt/run-1234 -- torchrun train.py --resume-from auto",
    "ckptctl run --root ckpt --max-restarts 5 --backoff 1m -- ./train.sh",
    "ckptctl run --root ckpt --torchrun -- --nnodes 2 --rdzv-endpoint node001:29400 train.py",
)
EXIT_CODES = (0, 2, 10, 11, 22, 75, 77, 93, 94)

_STDERR = 2


def run(
    root: Annotated[
        list[str],
        Parameter(
            "--root ROOT",
            "Folder or URL with the steps of the run; progress is a newer usable step; "
            "may be given several times.",
        ),
    ],
    command: Annotated[
        list[str] | None, Parameter("CMD...", "The command and its arguments, after --.")
    ] = None,
    optional_root: OptionalRootOpt = None,
    create: Annotated[
        bool, Parameter("--create", "Create the root and its sentinel if it does not exist.")
    ] = False,
    wait_storage: Annotated[
        float,
        Parameter(
            "--wait-storage TIME",
            "How long to wait for a storage that does not answer, before the first attempt "
            "and after a failed one.",
            setting=True,
        ),
    ] = WAIT_S,
    section_timeouts: Annotated[
        str | None,
        Parameter(
            "--section-timeouts SECTION:TIME,...",
            "How long a rank may report nothing in setup, first-step, step, checkpoint, "
            "async-save or evaluation before the job counts as hung; by default learned from "
            "earlier attempts.",
            setting=True,
        ),
    ] = None,
    out_of_section_timeout: Annotated[
        float | None,
        Parameter(
            "--out-of-section-timeout TIME",
            "The same outside of sections, and for the growth of --log and of the output in "
            "--log-dir in a job without heartbeats.",
            setting=True,
        ),
    ] = None,
    state: Annotated[
        str | None,
        Parameter(
            "--state DIR",
            "Folder or URL for the state of the run, instead of .ckptctl/supervisor in the "
            "first root.",
            common=False,
        ),
    ] = None,
    torchrun: Annotated[
        bool,
        Parameter(
            "--torchrun",
            "CMD are the arguments of torchrun: one of these on each node supervises the job "
            "together with the others, without a scheduler.",
            common=False,
        ),
    ] = False,
    alarm_after: AlarmAfterOpt = ALARM_AFTER,
    notify: NotifyOpt = None,
    *,
    budget: BudgetOptions,
    output: OutputOptions,
    nodes: NodeOptions,
    policy: Annotated[PickPolicy, only("allow_missing_state", "ignore")],
    requirements: OfNames,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Run a job, and restart it after failures within a budget.

    Only a newer usable step refills the budget, which is kept in the root: a later invocation,
    also on another machine, continues it. Signals are passed on; after a signal that asks
    the job to end nothing is restarted. Ends with the exit code of the command, with 93 when
    the budget is spent, with 94 when too few nodes are left, with 11 when no step is usable,
    with 75 when the storage does not answer or the steps of the run have disappeared, with 10
    when the root does not exist. The command gets the number of restarts in
    CKPTCTL_RESTART_COUNT. A job that hangs is ended and restarted, and its rank at fault is
    named, if it uses ckptctl.train. With --json the command's output goes to standard error.
    """
    if not torchrun:
        _check_alone()
    notifier = Notifier(notify, out)

    def on_attempt(one: Attempt) -> None:
        out.say(line(f"ckptctl: {one.sentence}", hang=2))
        if one.decision is Decision.RESTART:
            notifier.send(document_of("attempt", exit_code=one.exit_code or 1, attempt=one))

    options = RunOptions(
        budget=budget,
        output=replace(output, stdout=_STDERR if out.as_json else None),
        nodes=nodes,
        policy=policy,
        requirements=requirements,
        storage=storage,
        optional_roots=optional_root or (),
        state=state,
        create=create,
        wait_s=wait_storage,
        section_timeouts=_timeouts(section_timeouts, out_of_section_timeout),
        alarm_after=alarm_after,
        on_attempt=on_attempt,
        on_alarm=lambda event: notifier.send(document_of("watched", event)),
        tell=out.tell,
    )
    with notifier:
        start = supervise_nodes if torchrun else supervise
        found = start(command or (), root, options)
        answer = document_of("supervised", found)
        if found.exit_code:
            notifier.send(answer)
        failed = bool(found.exit_code)
        out.answer(answer, lambda: supervised_lines(found), bare_only=True, has_failed=failed)
    return found.exit_code


class Attempted(TypedDict):
    """What `run --notify` sends of an attempt that is followed by another."""

    attempt: Attempt
    """The attempt that failed."""


_SECTION_NAMES: dict[str, Section] = {
    **{name: name for name in SECTIONS},
    "checkpointing": "checkpoint",  # of NVRx and Megatron Bridge
}


def _timeouts(sections: str | None, outside_s: float | None) -> dict[Section, float]:
    """The limits in seconds that the two options give."""
    limits: dict[Section, float] = {}
    for part in () if sections is None else sections.split(","):
        name, _, text = part.strip().partition(":")
        section = _SECTION_NAMES.get(name)
        if section is None or section in limits:
            what = "which is no section" if section is None else "twice"
            raise OptionError(
                "--section-timeouts",
                f"names {name!r}, {what}; the sections are {', '.join(SECTIONS)}",
                instead="--section-timeouts setup:600,step:180,checkpoint:420",
            )
        limits[section] = parse_duration(text, f"--section-timeouts {name}") or 0.0
    if outside_s is not None:
        limits["outside"] = outside_s
    return limits


def _check_alone() -> None:
    """Raise `UsageError` where a launcher has started several `ckptctl run` for one job."""
    launcher, count = launched_together(os.environ)
    if count < 2:
        return
    instead = {
        "srun": "one `ckptctl run` in the batch script starts the ranks of all nodes: "
        "ckptctl run ... -- srun ... COMMAND",
        "mpirun": "one `ckptctl run` starts the ranks of all nodes: "
        "ckptctl run ... -- mpirun ... COMMAND",
        "kubernetes": "a Job or JobSet restarts the pods of all nodes by their exit codes "
        "(podFailurePolicy), with `ckptctl pick` or `resume` in each",
    }[launcher]
    raise UsageError(
        f"{launcher} started {count} `ckptctl run`, and one supervises a job with all its nodes; "
        f"{instead}",
        next_command="ckptctl run --help",
    )


def supervised_lines(found: Supervised) -> list[Line]:
    """How it ended."""
    done = bool(found.attempts) and found.attempts[-1].decision is Decision.DONE
    style = StyledText(found.message, "good" if done else "bad")
    return [line("ckptctl: ", style, hang=2), *next_line(found.next_command)]

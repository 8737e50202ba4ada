"""`ckptctl run` and `watch`: supervise a job, and verify and seal the steps that it saves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, TypedDict

import ckptctl
from ckptctl.cli.monitoring import Notifier
from ckptctl.cli.options import (
    AcceptAsItIsOpt,
    AlarmAfterOpt,
    JobsOpt,
    MetricsOpt,
    NotifyOpt,
    OfNames,
    OptionalRootOpt,
    only,
    parse_duration,
)
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.rendering import StyledText, line, next_line
from ckptctl.distributed.launcher import launched_together
from ckptctl.errors import OptionError, UsageError
from ckptctl.formats.own.heartbeats import SECTIONS, Section
from ckptctl.formats.own.supervision import Attempt, Decision
from ckptctl.formatting import duration
from ckptctl.options import Parameter, PickPolicy, Requirements, StorageOptions
from ckptctl.selection.watching import ALARM_AFTER, BYTES_PER_S, INTERVAL_S, Event, Watched
from ckptctl.supervisor.agents import supervise_nodes
from ckptctl.supervisor.nodes import NodeOptions
from ckptctl.supervisor.options import WAIT_S, OutputOptions, RunOptions
from ckptctl.supervisor.policy import BudgetOptions
from ckptctl.supervisor.restarting import supervise

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "run": (
        "ckptctl run --root /shared/ckpt/run-1234 -- torchrun train.py --resume-from auto",
        "ckptctl run --root ckpt --max-restarts 5 --backoff 1m -- ./train.sh",
        "ckptctl run --root ckpt --torchrun -- --nnodes 2 --rdzv-endpoint node001:29400 train.py",
    ),
    "watch": (
        "ckptctl watch /shared/ckpt/run-1234 --notify 'curl -fsS --data-binary @- https://example.org'",
        "ckptctl watch s3://bucket/run-1234 --bandwidth 400M --accept-unverifiable",
        "ckptctl watch /shared/ckpt/run-1234 --once --grace 300 --notify /usr/local/bin/page",
    ),
}
EXIT_CODES: Mapping[str, tuple[int, ...]] = {
    "run": (0, 2, 10, 11, 22, 75, 77, 93, 94),
    "watch": (0, 2, 10, 20, 21, 22, 23, 25, 36, 75, 77),
}

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
        done = bool(found.attempts) and found.attempts[-1].decision is Decision.DONE
        message = line("ckptctl: ", StyledText(found.message, "good" if done else "bad"), hang=2)
        lines = [message, *next_line(found.next_command)]
        out.answer(answer, lambda: lines, bare_only=True, has_failed=failed)
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


def watch(
    root: Annotated[str, Parameter("ROOT", "Folder or URL that holds the steps of a run.")],
    once: Annotated[
        bool,
        Parameter("--once", "List the root once, and finish what an earlier watch saw; for cron."),
    ] = False,
    interval: Annotated[
        float, Parameter("--interval TIME", "The pause between two listings of the root.")
    ] = INTERVAL_S,
    bandwidth: Annotated[
        int, Parameter("--bandwidth SIZE", "How many bytes are read per second at most.")
    ] = BYTES_PER_S,
    alarm_after: AlarmAfterOpt = ALARM_AFTER,
    notify: NotifyOpt = None,
    metrics: MetricsOpt = None,
    accept_unverifiable: AcceptAsItIsOpt = False,
    jobs: JobsOpt = None,
    *,
    requirements: Annotated[
        Requirements, only("pattern", "state", "grace", "key_file", "sign", "marks")
    ],
    storage: StorageOptions,
    out: Output,
) -> int:
    """Verify and seal each step that a job finishes, from a process beside it.

    A step is read once two listings, --grace apart, show the same files, and sealed if every byte
    is proven and it holds what the step before it holds. Nothing else is written into a step. A
    damaged step is reported once, and so is that no newer step is proven for --alarm-after save
    intervals. Ends with 0 after SIGTERM; with --once with the exit code of the newest damaged or
    unverifiable step, with 36 where a newer step is overdue, or with 10 where the root does not
    exist. With --json
    each event is one line, with --quiet only the addresses of damaged steps are printed.
    """
    from ckptctl.cli.main import Stopped

    if bandwidth < 1:
        raise OptionError("--bandwidth", f"is {bandwidth}; it must be 1 or more")
    if not interval:
        raise OptionError("--interval", "is 0; the storage would be listed all the time")
    exit_code = 0
    counts = dict.fromkeys(Event, 0)
    newest: dict[Event, int] = {}

    def listed() -> None:
        if metrics is not None:
            from ckptctl.cli.monitoring import watch_samples, write_metrics

            write_metrics(metrics, watch_samples(root, counts, newest))

    events = ckptctl.watch(
        root,
        once=once,
        interval_s=interval,
        bytes_per_s=bandwidth,
        accept_unverifiable=accept_unverifiable,
        alarm_after=alarm_after,
        jobs=jobs,
        on_listed=listed,
        requirements=requirements,
        storage=storage,
    )
    if not once:
        grace = duration(requirements.grace_s)
        begun = f"watching {root}: a step is read once it has not changed for {grace}; Ctrl-C ends"
        out.say(line(begun, hang=2))
    with Notifier(notify, out) as notifier:
        try:
            for found in events:
                exit_code = exit_code or found.exit_code
                counts[found.event] += 1
                if found.number is not None:
                    newest[found.event] = max(found.number, newest.get(found.event, 0))
                # First the notification: whoever reads the line may end the watch.
                if found.event in (Event.DAMAGED, Event.OVERDUE):
                    notifier.send(document_of("watched", found))
                _print(found, out)
        except Stopped:
            if once:
                raise
            return 0
    if out.talks and not any(counts.values()):
        out.lines([line("nothing to report; a step is read once it has not changed for --grace")])
    return exit_code


def _print(found: Watched, out: Output) -> None:
    if out.as_json:
        out.document_line(document_of("watched", found))
    elif out.quiet:
        if found.event is Event.DAMAGED:
            out.lines([line(StyledText(found.url or "", "name"), solid=True)])
    else:
        word = StyledText(found.event.value, "good" if found.event is Event.SEALED else "bad")
        head = line(word, " ", StyledText(found.url or found.root, "name"), solid=True)
        out.lines([head, line(f"  {found.message}", hang=4), *next_line(found.next_command)])

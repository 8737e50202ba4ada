"""Lead replays of a suspicious step, on the same nodes and on others, and compare them.

The real root is read to copy one step, and never written: each replay runs on a copy of its
own, under `ckptctl run`, as in a drill.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from ckptctl.distributed.launcher import cluster_context, expand
from ckptctl.drill.job import (
    DrillJob,
    Ending,
    JobOptions,
    TrialFailed,
    copy_step,
    fingerprint,
    make_work_folder,
    new_work_folder,
    path_in,
    read_only_launcher,
    storage_errors,
)
from ckptctl.errors import NothingToResume, OptionError, PathNotFound, UsageError
from ckptctl.formatting import command_line
from ckptctl.inspection.inspecting import train_step
from ckptctl.model import ExitCode, NextCommand, NonNegative
from ckptctl.options import ROOT_ENV, Parameter, PickPolicy, StorageOptions
from ckptctl.rerun.deciding import (
    Comparison,
    Record,
    ReplayNodes,
    RerunDecision,
    ValueOrigin,
    compare,
    decide,
    ended_at,
    first_record,
    main_rows,
    read_record,
    with_failure,
)
from ckptctl.selection.picking import pick
from ckptctl.supervisor.nodes import SUSPECT, NodeOptions, run_exclusion

EXIT_CODES: Mapping[ValueOrigin, int] = {
    ValueOrigin.TRANSIENT: 0,
    ValueOrigin.PERSISTENT: 34,
    ValueOrigin.JOB: 93,
    ValueOrigin.UNDECIDED: 31,
}

_WRITTEN = "written"
"""The folder of a replay for the logs that the job writes itself, `{log_dir}`."""
_LISTED = 12
"""Losses before the suspicious one that a result lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunOptions:
    """What is replayed, and where.

    `step` is the training step with the suspicious value, which `logs` hold. `n_steps` steps
    are replayed, by default up to that one, from the step `from_step`, by default the newest
    usable one that leaves a step before it to compare. `nodes` are those that computed the
    value, and `other_nodes` others; the command gets them by placeholders or in a host file. At
    most one node is excluded. `root_env`, `work`, `keep` and `patience_s` are those of a drill.
    """

    step: Annotated[
        int, Parameter("--step N", "The training step whose loss is suspicious.", min=1)
    ]
    logs: Annotated[
        Sequence[str],
        Parameter(
            "--log FILE",
            "A log of the run that holds this step, or a folder of logs; may be given "
            "several times, as with one log for each rank.",
        ),
    ]
    n_steps: Annotated[
        int | None,
        Parameter(
            "--steps K",
            "How many steps to train again; by default up to the suspicious one.",
            min=1,
        ),
    ] = None
    from_step: Annotated[
        int | None,
        Parameter(
            "--from-step N",
            "The saved step to begin from; by default the newest usable one with a logged "
            "step between it and the suspicious one.",
            min=0,
        ),
    ] = None
    nodes: NodeOptions = NodeOptions()
    other_nodes: Annotated[
        Sequence[str],
        Parameter(
            "--other-nodes NODE,...",
            "As many other nodes. Without them a value that repeats stays undecided.",
        ),
    ] = ()
    root_env: Annotated[str | None, ROOT_ENV] = None
    work: Annotated[
        str, Parameter("--work DIR", "A new folder for copies and logs, which all nodes see.")
    ] = "rerun"
    keep: Annotated[
        bool,
        Parameter(
            "--keep", "Keep the copies of the root.", common=False, variable="CKPTCTL_KEEP_COPIES"
        ),
    ] = False
    dry_run: Annotated[
        bool, Parameter("--dry-run", "Show the step and the commands, and start nothing.")
    ] = False
    patience_s: Annotated[
        float, Parameter("--patience TIME", "How long to wait for a next step.", common=False)
    ] = 1800.0

    def __post_init__(self) -> None:
        replace(self.nodes, nodes=self.other_nodes)
        if self.other_nodes and set(self.other_nodes) <= set(self.nodes.nodes):
            raise OptionError("--other-nodes", "names no node that --nodes does not name")


def rerun(
    command: Sequence[str],
    root: str,
    options: RerunOptions,
    *,
    tell: Callable[[str], None] = lambda _message: None,
    storage: StorageOptions = StorageOptions(),
) -> Rerun:
    """Replay a suspicious step on copies of an older one, and decide where its value comes from.

    Replays run one after the other: on the same nodes, on others, and each a second time where
    that can still decide. Raises `UsageError` where the logs or the command do not fit,
    `NothingToResume` where no step before the suspicious one is usable, `StorageError` where
    the root does not answer.
    """
    work = new_work_folder("rerun", command, root, options.root_env, options.work)
    record = first_record(options.logs, options.step, storage)
    plan = _planned(command, root, options, record, work, storage)
    before = "" if options.dry_run else fingerprint(root, storage)
    ending = Ending(tell)
    replays: list[ReplayResult] = []
    decision = RerunDecision(ValueOrigin.UNDECIDED, "nothing was replayed", ReplayNodes.SAME)

    def lead() -> None:
        nonlocal decision
        records: dict[ReplayNodes, list[Record]] = {ReplayNodes.SAME: [], ReplayNodes.OTHER: []}
        while decision.more is not None:
            nodes = decision.more
            tell(f"replay {len(replays) + 1}: {plan.summary(nodes)}")
            job = plan.job(nodes, len(records[nodes]) + 1, ending.end)
            replay, found, problem = _replay(plan, job, nodes)
            replays.append(replay)
            if problem is not None:
                where = ", ".join(plan.names[nodes])
                decision = RerunDecision(ValueOrigin.UNDECIDED, f"the replay on {where} {problem}")
                return
            records[nodes].append(found)
            same, others = records.values()
            has_others = bool(options.other_nodes)
            decision = decide(record, same, others, options.step, has_others=has_others)
            if decision.more is not None:
                tell(decision.reason)

    if options.dry_run:
        kinds = (ReplayNodes.SAME, *((ReplayNodes.OTHER,) if options.other_nodes else ()))
        replays += [_result(plan, plan.job(each, 1, ending.end), each, None, {}) for each in kinds]
        return _concluded(plan, decision, replays, before, tell)
    with storage_errors(work):
        make_work_folder(work)
    ending.lead(lead, work, keep=options.keep)
    if ending.asked is not None:
        decision = RerunDecision(ValueOrigin.UNDECIDED, f"ended by {ending.asked.name}")
    found = _concluded(plan, decision, replays, before, tell)
    return found if ending.asked is None else replace(found, exit_code=128 + ending.asked)


@dataclass(frozen=True, slots=True)
class _ReplayPlan:
    command: Sequence[str]
    root: str
    options: RerunOptions
    record: Record
    work: Path
    storage: StorageOptions
    read_only: Sequence[str]
    names: Mapping[ReplayNodes, tuple[str, ...]]
    path: str
    from_step: int
    last: int

    def summary(self, nodes: ReplayNodes) -> str:
        """One replay in a few words."""
        steps = f"steps {self.from_step + 1} to {self.last}"
        return f"{steps} on the {nodes.value} nodes, {', '.join(self.names[nodes])}"

    def job(self, nodes: ReplayNodes, number: int, stop: Callable[[], None]) -> DrillJob:
        """The job of a replay; `stop` ends it."""
        folder = self.work / f"{nodes.value}-{number}"
        filling = {
            "{nodes}": str(len(self.names[nodes])),
            "{node_list}": ",".join(self.names[nodes]),
            "{steps}": str(self.last - self.from_step),
            "{last}": str(self.last),
            "{log_dir}": str(folder / _WRITTEN),
        }
        words = list(self.command)
        for placeholder, value in filling.items():
            words = [word.replace(placeholder, value) for word in words]
        about = JobOptions(
            command=words,
            read_only=self.read_only,
            root_env=self.options.root_env,
            nodes=replace(self.options.nodes, nodes=self.names[nodes]),
            patience_s=self.options.patience_s,
        )
        return DrillJob(about, folder / "root", folder, stop)


def _planned(
    command: Sequence[str],
    root: str,
    options: RerunOptions,
    record: Record,
    work: Path,
    storage: StorageOptions,
) -> _ReplayPlan:
    by_name = any("{node_list}" in word for word in command)
    if options.other_nodes and not by_name and options.nodes.hosts_file is None:
        raise UsageError(
            "the command does not say where its nodes belong, and would run on the same ones: "
            "write {node_list} in it, or give --hosts-file FILE",
            next_command="ckptctl rerun --help",
        )
    earlier = [number for number in main_rows(record) if number < options.step]
    if not earlier:
        raise UsageError(
            f"the log begins with step {options.step}, so nothing shows whether a replay repeats "
            "the run; name the logs before it, too"
        )
    wanted = options.from_step
    before = max(earlier) if wanted is None else wanted + 1
    found = pick(root, policy=PickPolicy(before=before), storage=storage)
    chosen = found.chosen
    if wanted is not None and (chosen is None or chosen.number != wanted):
        raise UsageError(
            f"step {wanted} of {root} is not usable",
            next_command=command_line("verify", f"{root}@{wanted}"),
        )
    if chosen is None:
        raise NothingToResume(
            f"{root}: no usable step lies before step {before}, the last one logged before step "
            f"{options.step}: {found.message}",
            exit_code=found.exit_code,
            next_command=found.next_command,
        )
    saved = train_step(chosen)
    from_step = found.step if saved is None else saved
    last = options.step if options.n_steps is None else from_step + options.n_steps
    if last < options.step or from_step >= max(earlier):
        raise UsageError(
            f"a replay must begin at least one logged step before step {options.step} and reach "
            f"it; it would train steps {from_step + 1} to {last}"
        )
    place = cluster_context()
    allocation = ",".join(options.nodes.nodes) or place.node_list or place.node
    return _ReplayPlan(
        command,
        root,
        options,
        record,
        work,
        storage,
        () if options.dry_run else read_only_launcher(root),
        {ReplayNodes.SAME: expand(allocation), ReplayNodes.OTHER: tuple(options.other_nodes)},
        path_in(root, chosen.url),
        from_step,
        last,
    )


def _replay(
    plan: _ReplayPlan, job: DrillJob, nodes: ReplayNodes
) -> tuple[ReplayResult, Record, str | None]:
    """Replay once: the result, what was logged, and why it cannot be used."""
    with storage_errors(job.folder):
        (job.folder / _WRITTEN).mkdir(parents=True)
    copied_by = copy_step(plan.root, plan.path, job.root, plan.storage)
    problem = None
    code = None
    try:
        job.start()
        code = _wait(plan, job)
    except TrialFailed as failed:
        problem = f"does not go on: {failed}"
    finally:
        job.stop()
        if not plan.options.keep:
            shutil.rmtree(job.root, ignore_errors=True)
    found = _logged(plan, job)
    problem = problem or _problem(plan, found, code)
    if problem is None:
        found = with_failure(found, plan.options.step)
    return _result(plan, job, nodes, code, found, copied_by), found, problem


def _wait(plan: _ReplayPlan, job: DrillJob) -> int | None:
    reached = -1

    def further() -> int | None:
        latest = max(map(max, _logged(plan, job).values()), default=-1)
        return latest if latest > reached or job.is_over() else None

    while not job.is_over() and reached <= plan.last:
        reached = job.await_(f"step after {reached}", further)
    attempts = job.attempts()
    return attempts[-1].exit_code if job.is_over() and attempts else None


def _logged(plan: _ReplayPlan, job: DrillJob) -> Record:
    """What a replay has logged so far: in the files it wrote, else in its output."""
    for path in (job.folder / _WRITTEN, job.log):
        with suppress(PathNotFound):
            if found := read_record([str(path)], plan.options.step, plan.storage):
                return found
    return {}


def _problem(plan: _ReplayPlan, found: Record, code: int | None) -> str | None:
    """Why a replay cannot be used; None where it reached the suspicious step."""
    step, first = plan.options.step, main_rows(plan.record)
    ended = "was ended" if code is None else f"ended with {code}"
    if not found:
        return f"{ended} before it logged a loss"
    rows = main_rows(found)
    if min(rows) <= plan.from_step:
        return f"logged step {min(rows)}: it did not resume from step {plan.from_step}"
    loss = first[step].loss
    may_fail = loss is None or not math.isfinite(loss.value)
    before = max(number for number in first if number < step)
    if step in rows or (code and may_fail and ended_at(rows, step, before)):
        return None
    return f"{ended} after step {max(rows)}, before it logged step {step}"


def _result(
    plan: _ReplayPlan,
    job: DrillJob,
    nodes: ReplayNodes,
    code: int | None,
    found: Record,
    copied_by: str = "",
) -> ReplayResult:
    return ReplayResult(
        nodes,
        plan.names[nodes],
        tuple(job.options.command),
        code,
        _listed(found, plan.options.step),
        compare(plan.record, found, plan.options.step) if found else None,
        copied_by,
        str(job.folder),
    )


def _listed(record: Record, step: int) -> tuple[LoggedLoss, ...]:
    rows = main_rows(record) if record else {}
    numbers = [number for number in sorted(rows) if number <= step][-_LISTED - 1 :]
    found = ((number, rows[number].loss) for number in numbers)
    return tuple(LoggedLoss(number, loss.value if loss else None) for number, loss in found)


def _concluded(
    plan: _ReplayPlan,
    decision: RerunDecision,
    replays: Sequence[ReplayResult],
    before: str,
    tell: Callable[[str], None],
) -> Rerun:
    """The result, after the node at fault was excluded where that is asked for."""
    options, names = plan.options, plan.names
    answer, reason = decision.answer, decision.reason
    both = [name for name in names[ReplayNodes.SAME] if name in names[ReplayNodes.OTHER]]
    if answer is ValueOrigin.JOB and both:
        answer = ValueOrigin.UNDECIDED
        reason = f"{', '.join(both)} computed it each time, and may be at fault"
    suspects = [name for name in names[ReplayNodes.SAME] if name not in both]
    suspects = suspects if answer is ValueOrigin.PERSISTENT else []
    exclude = options.nodes.exclude_command if len(suspects) == 1 else None
    if exclude is not None:
        tell(f"excluding {suspects[0]}")
        run_exclusion(exclude, suspects[0], SUSPECT, tell)
    elif suspects and options.nodes.exclude_command is not None:
        tell(f"warning: one of {', '.join(suspects)} is at fault, and none is excluded")
    message = f"step {options.step}: {answer.value}: {reason}"
    next_command: str | None = command_line("pick", plan.root, "--before", options.step)
    if options.dry_run:
        message = f"step {options.step} would be replayed from step {plan.from_step}"
        next_command = None
    elif answer is ValueOrigin.UNDECIDED:
        failed = [Path(each.folder) for each in replays[-1:] if each.exit_code]
        logs = [folder / "logs" / "1" / "output.log" for folder in failed]
        next_command = next((command_line("classify", str(each)) for each in logs), None)
    return Rerun(
        None if options.dry_run else answer,
        message,
        plan.root,
        options.step,
        plan.from_step,
        plan.last,
        _listed(plan.record, options.step),
        tuple(replays),
        decision.scatter,
        tuple(suspects),
        exclude is not None,
        bool(plan.read_only),
        options.dry_run or fingerprint(plan.root, plan.storage) == before,
        0 if options.dry_run else EXIT_CODES[answer],
        next_command,
    )


@dataclass(frozen=True, slots=True)
class LoggedLoss:
    """The loss of one step."""

    step: int
    """The training step."""
    loss: float | None
    """The loss; null where it is not finite, or the run failed at this step."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One replay, and how it compares with the first record."""

    nodes: ReplayNodes
    """Whether it ran on the nodes of the record or on others."""
    names: tuple[str, ...]
    """The names of these nodes."""
    command: tuple[str, ...]
    """The command, as it was started."""
    exit_code: int | None
    """How it ended; null where it was ended after its last step."""
    losses: tuple[LoggedLoss, ...]
    """The losses that it logged, around the suspicious step."""
    compared: Comparison | None
    """How its values compare with those of the first record; null where it logged none."""
    copied_by: str
    """`reflink`, `copy`, or `download` from an object store; empty in a dry run."""
    folder: str
    """Where its output is."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """Where a suspicious value comes from, and the evidence."""

    answer: ValueOrigin | None
    """Where it comes from; null in a dry run."""
    message: str
    """The answer and its reason in one line."""
    root: str
    """The checkpoint root, which no replay used."""
    step: int
    """The suspicious training step."""
    from_step: int
    """The training step from which it was replayed."""
    last_step: int
    """The last step of a replay."""
    losses: tuple[LoggedLoss, ...]
    """The losses of the first record, around the suspicious step."""
    replays: tuple[ReplayResult, ...]
    """The replays, in order; in a dry run those that would come first."""
    scatter: NonNegative | None
    """The largest relative difference between losses of replays on the same nodes: 0 for a
    deterministic job; null where they were replayed once."""
    suspects: tuple[str, ...]
    """The nodes at fault, if it is persistent."""
    excluded: bool
    """The node at fault was excluded."""
    root_read_only: bool
    """Whether the real root was read-only for the job."""
    root_unchanged: bool
    """Whether the real root is the same as before."""
    exit_code: ExitCode
    next_command: NextCommand

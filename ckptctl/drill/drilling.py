"""Drill a user's own job: inject faults into copies of it, let RB-7 resume it, and grade.

The real root is never written: its newest usable step is copied for each run. The job runs
under `ckptctl run`; after the fault RB-7 decides from which step it is resumed. Its loss is
compared with that of a run of the same copy without a fault.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

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
from ckptctl.drill.trial import FAULTS, SAVES_BEFORE, STALL_S, Drilled, FaultInjection, Trial
from ckptctl.errors import UsageError
from ckptctl.formatting import command_line, counted
from ckptctl.options import ROOT_ENV, Parameter, StorageOptions
from ckptctl.selection.picking import pick
from ckptctl.supervisor.nodes import NodeOptions

FAILED = 33
"""The exit code where the job does not survive a fault."""

_REFERENCE_SAVES = 4
"""How many steps the run without a fault saves: the resumed job saves again."""
_LEAST_STEP_S, _LEAST_SILENCE_S = 15.0, 60.0
_FACTOR = 5.0
"""A limit is so many times the longest time seen without a fault, as in `run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions:
    """How a job is drilled.

    The command names its root as `{root}`, or finds it in the variable `root_env`. `faults`
    are names of `FAULTS`. `seed` determines ranks, moments and bytes. `nodes` are those of the
    job, and its numbers of ranks; a drill excludes a node from the job alone and drains none.
    Copies, logs and reports go to the new folder `work`; with `keep` the copies stay.
    `hang_after_s` is how long a sound job may write no step; by default that is measured.
    Nothing is waited for longer than `patience_s`.
    """

    root_env: Annotated[str | None, ROOT_ENV] = None
    faults: Annotated[
        Collection[str],
        Parameter(
            "--fault NAME",
            f"A fault to inject; may be given several times. By default all: {', '.join(FAULTS)}.",
        ),
    ] = tuple(FAULTS)
    seed: Annotated[int, Parameter("--seed N", "Determines ranks, moments and bytes.")] = 0
    nodes: NodeOptions = NodeOptions()
    work: Annotated[
        str,
        Parameter(
            "--work DIR",
            "A new folder for copies, logs and reports; on the file system of the root the "
            "copies may share its blocks.",
        ),
    ] = "drill"
    keep: Annotated[
        bool,
        Parameter("--keep", "Keep the copies of the root.", variable="CKPTCTL_KEEP_COPIES"),
    ] = False
    hang_after_s: Annotated[
        float | None,
        Parameter(
            "--hang-after TIME",
            "How long a sound job may log no step before it counts as hung; by default five times "
            "the longest pause of a run without a fault, and 15 s at least.",
        ),
    ] = None
    patience_s: Annotated[
        float, Parameter("--patience TIME", "How long to wait for a save, a step, an end.")
    ] = 1800.0

    def __post_init__(self) -> None:
        for name in self.faults:
            if name not in FAULTS:
                raise UsageError(f"{name!r} is no fault; they are {', '.join(FAULTS)}")
        if self.nodes.exclude_command is not None:
            raise UsageError("a drill drains no node: it takes no exclude_command")


def drill(
    command: Sequence[str],
    root: str,
    options: DrillOptions,
    *,
    tell: Callable[[str], None] = lambda _message: None,
    storage: StorageOptions = StorageOptions(),
) -> Drilled:
    """Inject each fault into the job on a copy of its newest step, and grade what follows.

    A signal (SIGTERM, SIGINT, SIGHUP) ends all that was started and removes the copies; the
    result holds the faults so far, and 128 + its number as exit code. Must be called in the
    main thread. Raises `UsageError` where the command does not name its root or `work` exists,
    `NothingToResume` where no step is usable, `StorageError` where the root does not answer.
    """
    work = new_work_folder("drill", command, root, options.root_env, options.work)
    chosen = pick(root, storage=storage)
    path = path_in(root, chosen.path)
    before = fingerprint(root, storage)
    about = JobOptions(
        command=tuple(command),
        read_only=read_only_launcher(root),
        root_env=options.root_env,
        nodes=options.nodes,
        patience_s=options.patience_s,
    )
    ending = Ending(tell)
    jobs: list[DrillJob] = []
    trials: list[Trial] = []

    def job_on_copy(name: str, about: JobOptions) -> DrillJob:
        folder = work / name
        job = DrillJob(about, folder / "root", folder, ending.end)
        job.copied_by = copy_step(root, path, job.root, storage)
        jobs.append(job)
        return job

    def inject() -> None:
        tell(f"a run from step {chosen.step} without a fault, to compare with")
        reference = job_on_copy("no-fault", about)
        limited = _measured(reference, options)
        for name in options.faults:
            job = job_on_copy(name, limited)
            injection = FaultInjection(name, job, reference.log, options.seed, tell)
            trials.append(injection.run())
            if not options.keep:
                shutil.rmtree(job.root)

    with storage_errors(work):
        make_work_folder(work)
    ending.lead(inject, work, keep=options.keep)
    unchanged = fingerprint(root, storage) == before
    failed = [trial.fault for trial in trials if not trial.passed]
    grade = f"the job survives {len(trials) - len(failed)} of {len(trials)} faults"
    if failed:
        grade += f", not {', '.join(failed)}"
    if not unchanged:
        grade += f"; {root} was changed meanwhile"
    exit_code = FAILED if failed or not unchanged else 0
    if ending.asked is not None:
        grade = f"ended by {ending.asked.name}; of {len(options.faults)} faults, {grade}"
        exit_code = 128 + ending.asked
    return Drilled(
        tuple(command),
        root,
        chosen.step,
        options.seed,
        jobs[-1].copied_by if jobs else "",
        bool(about.read_only),
        unchanged,
        tuple(trials),
        grade,
        exit_code,
        f"less {shlex.quote(str(work / 'report.md'))}" if failed else None,
    )


def _measured(job: DrillJob, options: DrillOptions) -> JobOptions:
    """Run the job without a fault; its options with the limits that its pace suggests."""
    rows, saves = _GrowthTimes(), _GrowthTimes()
    job.newest()
    n_copied = len(job.names)
    job.start()

    def saved() -> bool | None:
        rows.take(job.logged.read().n)
        job.newest()
        saves.take(len(job.names) - n_copied)
        return True if saves.n >= _REFERENCE_SAVES or job.is_over() else None

    try:
        job.await_(f"{_REFERENCE_SAVES} saves by the job", saved)
    except TrialFailed as failed:
        waiting = None if job.refused else "--patience 2h waits longer"
        raise UsageError(f"{failed}; see {job.log}", instead=waiting) from failed
    exit_code = next((one.exit_code for one in job.attempts() if one.exit_code), None)
    if exit_code is not None and saves.n < SAVES_BEFORE:
        raise UsageError(
            f"without a fault the job ended with {exit_code} after {counted(saves.n, 'save')}; "
            f"a drill needs {SAVES_BEFORE}; see {job.log}",
            next_command=command_line("classify", str(job.log)),
        )
    if not job.logged.read(to_end=True).n:
        raise UsageError(
            f"the output of the job has no loss that ckptctl reads; see {job.log}",
            next_command=command_line("loss", str(job.log)),
        )
    if saves.n < SAVES_BEFORE:
        raise UsageError(f"the job ended before it saved {SAVES_BEFORE} steps; see {job.log}")
    job.stop()
    start_s = max(_LEAST_SILENCE_S, _FACTOR * rows.first_s) + STALL_S
    return replace(
        job.options,
        step_s=options.hang_after_s or max(_LEAST_STEP_S, _FACTOR * rows.longest_s),
        # Without `Checkpointer.note` a rank reports nothing from one save to the next.
        silence_s=options.hang_after_s or max(start_s, _FACTOR * saves.longest_s),
    )


class _GrowthTimes:
    """How long a count took to begin, and to grow, in seconds."""

    def __init__(self) -> None:
        self.n = 0
        self.first_s = self.longest_s = 0.0
        self._grew_s = time.monotonic()

    def take(self, n: int) -> None:
        """Take the count as it is now."""
        if n > self.n:
            took_s = time.monotonic() - self._grew_s
            if self.n:
                self.longest_s = max(self.longest_s, took_s)
            else:
                self.first_s = took_s
            self.n, self._grew_s = n, self._grew_s + took_s

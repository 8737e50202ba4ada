"""Drill a user's own job: inject faults into copies of it, let RB-7 resume it, and grade.

The real root is read once, to copy its newest usable step, and never written. Each fault gets
a copy of its own. The job runs under `ckptctl run`; after the fault RB-7 decides from which
step it is resumed. Its loss is compared with that of a run of the same copy without a fault.
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from ckptctl.data_classes import dataclass, replace
from ckptctl.drill.copying import copy_step, fingerprint, read_only_launcher
from ckptctl.drill.faults import FAULTS, STALL_S, STALLED, Injected, StalledStorage
from ckptctl.drill.job import CKPTCTL, ROOT_WORD, Job, JobOptions, TrialFailed
from ckptctl.drill.results import Drilled, Trial
from ckptctl.errors import UsageError
from ckptctl.loss.checking import check_loss
from ckptctl.options import StorageOptions
from ckptctl.runbook.record import newest as newest_record
from ckptctl.selection.picking import pick
from ckptctl.storage.opening import absolute_url, is_local, open_store

FAILED = 33
"""The exit code where the job does not survive a fault."""

_SAVES_BEFORE, _REFERENCE_SAVES = 2, 4
"""How many steps the job saves before a fault: one may be damaged, and `loss` needs rows before
the other. And how many the run without a fault saves: the resumed job saves again."""
_STEPS_BEFORE = 6
"""Steps between the newest save and a fault. They are trained twice; `loss` compares five."""
_LEAST_STEP_S, _LEAST_SILENCE_S = 15.0, 60.0
_FACTOR = 5.0
"""A limit is so many times the longest time seen without a fault, as in `run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions:
    """How a job is drilled.

    The command names its root as `{root}`, or finds it in the variable `root_env`. `faults`
    are names of `FAULTS`. `seed` determines ranks, moments and bytes. Copies, logs and
    reports go to the new folder `work`; with `keep` the copies stay. `hang_after_s` is how long
    a sound job may write no step; by default that is measured. Nothing is waited for longer
    than `patience_s`.
    """

    root_env: str | None = None
    faults: Collection[str] = tuple(FAULTS)
    seed: int = 0
    work: str = "drill"
    keep: bool = False
    hang_after_s: float | None = None
    patience_s: float = 1800.0

    def __post_init__(self) -> None:
        for name in self.faults:
            if name not in FAULTS:
                raise UsageError(f"{name!r} is no fault; they are {', '.join(FAULTS)}")


def drill(
    command: Sequence[str],
    root: str,
    options: DrillOptions,
    *,
    tell: Callable[[str], None] = lambda _message: None,
    storage: StorageOptions = StorageOptions(),
) -> Drilled:
    """Inject each fault into the job on a copy of its newest step, and grade what follows.

    Raises `UsageError` where the command does not name its root or `work` exists,
    `NothingToResume` where no step is usable, `StorageError` where the root does not answer.
    """
    work = _check(command, root, options)
    chosen = pick(root, storage=storage)
    step, url = chosen.step, chosen.path
    path = os.path.relpath(absolute_url(url), absolute_url(root)) if is_local(url) else ""
    path = path or url[len(root.rstrip("/")) + 1 :]
    before = fingerprint(root, storage)
    work.mkdir(parents=True)
    read_only = read_only_launcher(root)
    about = JobOptions(
        command=tuple(command),
        read_only=read_only,
        root_env=options.root_env,
        patience_s=options.patience_s,
    )
    means = ""

    def copied(name: str) -> Job:
        nonlocal means
        job = Job(about, work / name / "root", work / name)
        means = copy_step(root, path, job.root, storage)
        return job

    trials: list[Trial] = []
    reference = copied("no-fault")
    try:
        tell("a run without a fault, to compare with")
        about = _measured(reference, options)
        for name in options.faults:
            tell(name)
            trial = _Trial(name, copied(name), reference, options.seed).run()
            tell(f"{name}: {'; '.join(trial.problems) or 'survived'}")
            trials.append(trial)
            if not options.keep:
                shutil.rmtree(work / name / "root", ignore_errors=True)
    finally:
        reference.stop()
        if not options.keep:
            shutil.rmtree(reference.root, ignore_errors=True)
    unchanged = fingerprint(root, storage) == before
    failed = [trial.fault for trial in trials if not trial.passed]
    grade = f"the job survives {len(trials) - len(failed)} of {len(trials)} faults"
    if failed:
        grade += f", not {', '.join(failed)}"
    if not unchanged:
        grade += f"; {root} was changed meanwhile"
    return Drilled(
        tuple(command),
        root,
        step,
        options.seed,
        means,
        bool(read_only),
        unchanged,
        tuple(trials),
        grade,
        FAILED if failed or not unchanged else 0,
        f"less {shlex.quote(str(work / 'report.md'))}" if failed else None,
    )


def _check(command: Sequence[str], root: str, options: DrillOptions) -> Path:
    """The work folder, which does not exist yet."""
    if not command:
        raise UsageError("the command is missing", next_command="ckptctl drill --help")
    if options.root_env is None and not any(ROOT_WORD in word for word in command):
        raise UsageError(
            "the command does not say where its root belongs, and would train in the real one: "
            "write {root} in it, or give --root-env NAME",
            next_command="ckptctl drill --help",
        )
    work = Path(options.work).resolve()
    if work.exists():
        raise UsageError(f"{work} already exists; give another folder with --work")
    if is_local(root) and Path(absolute_url(root)) in (work, *work.parents):
        raise UsageError(f"{work} is in the root; give another folder with --work")
    return work


def _measured(job: Job, options: DrillOptions) -> JobOptions:
    """Run the job without a fault; its options with the limits that its pace suggests."""
    began_s = grew_s = time.monotonic()
    first_s = longest_s = 0.0
    n_logged = 0
    job.newest()
    job.start()

    def saved() -> bool | None:
        nonlocal first_s, longest_s, grew_s, n_logged
        now_s, n_now = time.monotonic(), len(job.steps_logged(1))
        if n_now > n_logged:
            if n_logged:
                longest_s = max(longest_s, now_s - grew_s)
            first_s = first_s or now_s - began_s
            grew_s, n_logged = now_s, n_now
        job.newest()
        return True if len(job.names) > _REFERENCE_SAVES or _over(job) else None

    job.await_(f"{_REFERENCE_SAVES} saves by the job", saved)
    if not job.steps_logged(1):
        raise UsageError(
            f"the output of the job has no loss that ckptctl reads; see {job.log(1)}",
            next_command=f"ckptctl loss {shlex.quote(str(job.log(1)))}",
        )
    if len(job.names) <= _SAVES_BEFORE:
        raise UsageError(f"the job ended before it saved {_SAVES_BEFORE} steps; see {job.log(1)}")
    job.stop()
    step_s = options.hang_after_s or max(_LEAST_STEP_S, _FACTOR * longest_s)
    silence_s = max(_LEAST_SILENCE_S, _FACTOR * first_s) + STALL_S
    return replace(job.options, step_s=step_s, silence_s=options.hang_after_s or silence_s)


def _over(job: Job) -> bool:
    """Whether an attempt of the job has ended."""
    attempts = job.attempts()
    return bool(attempts) and attempts[-1]["decision"] is not None


class _Trial:
    """One fault, from the start of the job to its grade."""

    def __init__(self, name: str, job: Job, reference: Job, seed: int) -> None:
        self._name = name
        self._job = job
        self._reference = reference
        self._draw = random.Random(f"{seed} {name}")  # noqa: S311  # a drill, no secret
        self._injected: Injected | None = None
        self._detected_s: float | None = None
        self._restarted_s: float | None = None
        self._runbook: int | None = None
        self._loss: str | None = None
        self._lost: int | None = None
        self._problems: list[str] = []

    def run(self) -> Trial:
        """Inject the fault, let RB-7 resume the job, and compare."""
        try:
            self._break()
            self._resume()
        except TrialFailed as failed:
            self._problems.append(str(failed))
        finally:
            self._job.stop()
        self._problems += self._differences()
        attempts = self._job.attempts()
        first = attempts[0] if attempts else None
        injected = self._injected
        return Trial(
            self._name,
            injected.description if injected else "the fault was not injected",
            self._detected_s,
            self._restarted_s,
            injected.expected_step if injected else None,
            self._resumed_from(),
            self._lost,
            self._loss,
            first["cause"] if first else None,
            tuple(first["ranks"]) if first else (),
            self._runbook,
            tuple(self._problems),
            str(self._job.folder),
        )

    def _break(self) -> None:
        """Start the job, inject the fault after its first save, and wait until it is detected."""
        job = self._job
        first = job.newest() or 0
        job.start()

        def trained() -> int | None:
            if _over(job):
                raise TrialFailed(f"the job ended before the fault; see {job.log(1)}")
            newest = job.newest() or 0
            logged = max(job.steps_logged(1), default=0)
            n_saved = sum(number > first for number in job.names.values())
            # A job that logs as rarely as it saves never logs more.
            enough = logged >= newest + _STEPS_BEFORE or n_saved > _SAVES_BEFORE
            return newest if n_saved >= _SAVES_BEFORE and enough else None

        newest = job.await_("newer step that is usable", trained)
        self._injected = FAULTS[self._name](job, newest, self._draw)
        job.await_("end of the attempt after the fault", lambda: _over(job) or None)
        self._detected_s = time.monotonic() - self._injected.at_s
        job.stop()

    def _resume(self) -> None:
        """Let RB-7 resume the job, and wait until it has saved a newer step than ever."""
        job, began_s = self._job, time.monotonic()
        best = max(job.names.values())
        log = job.log(2)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        inputs = {
            "LOG": str(job.log(1)),
            "NEW_LOG": str(log),
            "SEEN_BY": "the drill has this node only",
            "CADENCE": "the drill injects its failures",
            "RESUME": job.resume_command(),
            "WAIT": f"{job.options.patience_s:.0f}",
        }
        words = [*CKPTCTL, "runbook", "run", "rb-7", str(job.root), "--yes"]
        words += ["--transcript", str(job.folder / "transcript")]
        words += [word for name, text in inputs.items() for word in ("--set", f"{name}={text}")]
        stalled: StalledStorage | None = None
        with (job.folder / "runbook.log").open("wb") as out:
            led = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=job.environment(),
            )
            try:
                job.await_(
                    "restart of the job by RB-7",
                    lambda: len(job.attempts()) > 1 or led.poll() is not None or None,
                )
                if len(job.attempts()) > 1:
                    self._restarted_s = time.monotonic() - began_s
                    stalled = StalledStorage(job) if self._name == STALLED else None
                self._runbook = job.await_("end of RB-7", led.poll)
                if self._runbook:
                    raise TrialFailed(f"RB-7 ended with {self._runbook}")
                job.await_(
                    "save after the resume",
                    lambda: (job.newest() or 0) > best or job.has_ended() or None,
                )
            finally:
                if stalled is not None:
                    stalled.end()
                if led.poll() is None:
                    led.kill()
                    led.wait()

    def _resumed_from(self) -> int | None:
        """The step that RB-7 resumed from at last."""
        with open_store(str(self._job.root)) as store:
            record = newest_record(store, "rb-7")
        begun = (
            event["values"]
            for event in (record.events if record else ())
            if event["event"] == "began" and event["block"] == "resume"
        )
        chosen = [
            os.path.relpath(str(values["STEP"]), self._job.root)
            for values in begun
            if isinstance(values, dict)
        ]
        return self._job.names.get(chosen[-1]) if chosen else None

    def _differences(self) -> Iterator[str]:
        """What is not as it must be, after the job was resumed."""
        injected, resumed = self._injected, self._resumed_from()
        if injected is None or resumed is None:
            if not self._problems:
                yield "the job was not resumed"
            return
        self._lost = max(0, max(self._job.steps_logged(1), default=resumed) - resumed)
        if resumed != injected.expected_step:
            yield f"it resumed from {resumed}, and should from {injected.expected_step}"
        named = self._job.attempts()[0]["ranks"]
        if self._name == "rank-stopped" and named and named != [injected.rank]:
            yield f"rank {injected.rank} was stopped, and {named} named"
        if not self._job.steps_logged(2):
            yield "the resumed job logged no loss"
            return
        found = check_loss([str(self._reference.log(1))], canary=str(self._job.log(2)))
        self._loss = found.verdict.value
        if found.exit_code:
            yield f"compared with the run without a fault: {found.message}"

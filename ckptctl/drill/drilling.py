"""Drill a user's own job: inject faults into copies of it, let RB-7 resume it, and grade.

The real root is never written: its newest usable step is copied for each run. The job runs
under `ckptctl run`; after the fault RB-7 decides from which step it is resumed. Its loss is
compared with that of a run of the same copy without a fault.

A fault is done to a running job, from outside. It gets the ranks of the job, all of which are
stopped (SIGSTOP), and continues them.
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from ckptctl.drill.job import (
    DrillJob,
    Ending,
    JobOptions,
    LoggedSteps,
    RankProcess,
    TrialFailed,
    copy_step,
    fingerprint,
    make_work_folder,
    new_work_folder,
    path_in,
    read_only_launcher,
    storage_errors,
)
from ckptctl.errors import UsageError
from ckptctl.formats.own.run_events import BeganEvent
from ckptctl.formatting import command_line, counted, duration, markdown_code, markdown_row, safe
from ckptctl.loss.checking import check_loss
from ckptctl.model import ExitCode, NextCommand, NonNegative
from ckptctl.options import ROOT_ENV, Parameter, StorageOptions
from ckptctl.runbook.engine import EXIT_OVERRIDDEN
from ckptctl.runbook.record import newest as newest_record
from ckptctl.selection.picking import pick
from ckptctl.starting import child_environment, own_command, python_command
from ckptctl.storage.opening import open_store
from ckptctl.supervisor.nodes import NodeOptions
from ckptctl.supervisor.processes import signal_all

STALL_S = 60.0
"""How long the storage does not answer."""

_WATCH_S = 0.001
_MOST_INTERRUPTED = 20


@dataclass(frozen=True, slots=True)
class Injected:
    """What was done, to which rank, and which step is the newest good one after it.

    `rank` is -1 and `node` is empty where all ranks are meant, or where the node is unknown.
    `newest_step` is the newest step at that moment, damaged or not.
    """

    description: str
    rank: int
    node: str
    newest_step: int
    expected_step: int
    at_s: float


Ranks = Mapping[int, RankProcess]


def signal_ranks(ranks: Iterable[RankProcess], number: signal.Signals) -> None:
    """Send a signal to ranks."""
    signal_all([rank.process for rank in ranks], number)


def _injected(job: DrillJob, rank: int, ranks: Ranks, what: str) -> Injected:
    node, newest = ranks[rank].node, _newest(job)
    on_node = f" on {node}" if job.options.nodes.nodes else ""
    return Injected(
        f"rank {rank}{on_node} was {what}", rank, node, newest, newest, time.monotonic()
    )


def kill_rank(job: DrillJob, ranks: Ranks, draw: random.Random) -> Injected:
    """End one rank with SIGKILL."""
    rank = draw.choice(sorted(ranks))
    injected = _injected(job, rank, ranks, "killed")
    signal_ranks([ranks[rank]], signal.SIGKILL)
    signal_ranks(ranks.values(), signal.SIGCONT)
    return injected


def stop_rank(job: DrillJob, ranks: Ranks, draw: random.Random) -> Injected:
    """Leave one rank stopped: it neither ends nor continues."""
    rank = draw.choice(sorted(ranks))
    injected = _injected(job, rank, ranks, "stopped")
    signal_ranks((ranks[other] for other in ranks if other != rank), signal.SIGCONT)
    return injected


def kill_in_save(job: DrillJob, ranks: Ranks, draw: random.Random) -> Injected:
    """End all ranks with SIGKILL while they write a step.

    The ranks are stopped as soon as a new entry appears beside the steps. If the save was
    faster, they continue, and the next save is waited for.
    """
    newest = _newest(job)
    folders = {job.root, (job.root / job.path_of(newest)).parent}
    for _ in range(_MOST_INTERRUPTED):
        before = _entries(folders)
        signal_ranks(ranks.values(), signal.SIGCONT)
        until_s = time.monotonic() + job.options.patience_s
        while not _entries(folders) - before:
            if time.monotonic() > until_s or job.has_ended():
                raise TrialFailed("the job did not save again")
            time.sleep(_WATCH_S)
        time.sleep(draw.random() * 0.005)
        signal_ranks(ranks.values(), signal.SIGSTOP)
        at_s = time.monotonic()
        found = _newest(job)
        if found == newest:
            signal_ranks(ranks.values(), signal.SIGKILL)
            return Injected("all ranks were killed in a save", -1, "", newest, newest, at_s)
        newest = found
    raise TrialFailed(f"none of {_MOST_INTERRUPTED} saves could be interrupted: they are too short")


def _newest(job: DrillJob) -> int:
    newest = job.newest()
    if newest is None:
        raise TrialFailed("the job has no usable step")
    return newest


def _entries(folders: set[Path]) -> set[str]:
    return {entry.path for folder in folders for entry in os.scandir(folder)}


def damage_shard(job: DrillJob, ranks: Ranks, draw: random.Random) -> Injected:
    """Damage a shard file of the newest step, and kill one rank."""
    newest = _newest(job)
    files = job.files_of(job.path_of(newest))
    shards = [path for path in files if path.suffix == ".distcp"] or files
    shard = draw.choice([path for path in shards if path.stat().st_size])
    what = draw.choice(("a byte was changed", "half of it was removed", "it was removed"))
    # A record begins with its headers, so that its middle is data of a tensor.
    middle = shard.stat().st_size // 2
    if what == "it was removed":
        shard.unlink()
    elif what == "half of it was removed":
        os.truncate(shard, middle)
    else:
        with shard.open("r+b") as file:
            file.seek(middle)
            byte = file.read(1)[0]
            file.seek(middle)
            file.write(bytes([byte ^ 0xFF]))
    older = max(number for number in job.names.values() if number < newest)
    killed = replace(kill_rank(job, ranks, draw), newest_step=newest, expected_step=older)
    name = shard.relative_to(job.root)
    return replace(killed, description=f"{name}: {what}, and {killed.description}")


Inject = Callable[[DrillJob, Ranks, random.Random], Injected]

STALLED = "storage-stalled"
FAULTS: Mapping[str, Inject] = {
    "rank-killed": kill_rank,
    "rank-stopped": stop_rank,
    "killed-in-save": kill_in_save,
    "shard-damaged": damage_shard,
    STALLED: kill_rank,
}
"""The faults by name. After `storage-stalled` the storage does not answer the next attempt."""

_LEASES = """
import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
held = []
for path in open(sys.argv[2], "rb").read().split(b"\\0"):
    try:
        fd = os.open(path, os.O_RDWR)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        held.append(fd)
    except OSError:
        pass
print(len(held), flush=True)
time.sleep(float(sys.argv[1]) if held else 0)
"""


class StalledStorage:
    """The files of all usable steps of the copy, which no process can open for a minute.

    A process of the drill holds a write lease on each file: an open by the job waits in the
    kernel, as it does on a mount whose server is gone, until the minute is over or the kernel
    breaks the lease (`/proc/sys/fs/lease-break-time`, 45 s). That needs neither root nor FUSE;
    a network file system has no such leases. Source: fcntl(2), `F_SETLEASE`.
    """

    def __init__(self, job: DrillJob) -> None:
        files = [str(path) for name in job.names for path in job.files_of(name)]
        listed = job.folder / "leases"
        listed.write_text("\0".join(files), encoding="utf-8", errors="surrogateescape")
        reads, writes = os.pipe()
        self._process = subprocess.Popen(
            python_command("-c", _LEASES, str(STALL_S), str(listed)),
            env=child_environment(),
            stdout=writes,
            stderr=subprocess.DEVNULL,  # a signal to the drill closes the pipe before the answer
        )
        os.close(writes)
        with open(reads, "rb") as answer:
            n_leases = int(answer.readline() or b"0")
        if not n_leases:
            self.end()
            raise TrialFailed("the file system of the copies has no leases, by which it is stalled")

    def end(self) -> None:
        """Let every pending open continue."""
        self._process.kill()
        self._process.wait()


RESUME_VARIABLE = "DRILL_RESUME"
"""The variable with the command by which RB-7 resumes the job."""

SAVES_BEFORE = 2
"""How many steps the job saves before a fault: one may be damaged, and `loss` needs rows before
the other."""
_STEPS_BEFORE = 6
"""Steps between the newest save and a fault. They are trained twice; `loss` compares five."""
_MOST_SAVES = 10
"""After how many saves a fault comes in any case."""


class FaultInjection:
    """One fault, from the start of the job to its grade.

    `reference` is the log of the run without a fault.
    """

    def __init__(
        self, name: str, job: DrillJob, reference: Path, seed: int, tell: Callable[[str], None]
    ) -> None:
        self._name = name
        self._trial = Trial(name, folder=str(job.folder))
        self._job = job
        self._reference = reference
        self._report = tell
        self._draw = random.Random(f"{seed} {name}")  # noqa: S311  # a drill, no secret
        self._injected: Injected | None = None

    def _tell(self, message: str) -> None:
        self._report(f"{self._name}: {message}")

    def run(self) -> Trial:
        """Inject the fault, and grade what follows. No process of the job remains."""
        trial = self._trial
        try:
            self._break()
            self._resume()
        except TrialFailed as failed:
            trial.problems.append(str(failed))
        finally:
            self._job.stop()
        trial.resumed_from = self._resumed_from()
        trial.problems += self._differences()
        if self._injected is not None:
            trial.description = self._injected.description
            trial.expected_step = self._injected.expected_step
        attempts = self._job.attempts()
        if attempts:
            first = attempts[0]
            trial.cause, trial.section = first.cause, first.section
            trial.ranks, trial.nodes = first.ranks, first.nodes
        trial.excluded = self._left_out
        trial.world_size = attempts[-1].world_size if len(attempts) > 1 else None
        evidence = self._job.folder / "evidence" / "attempt-1"
        if evidence.is_dir():
            trial.evidence = tuple(sorted(map(str, evidence.iterdir())))
        self._tell("survived" if trial.passed else f"failed: {'; '.join(trial.problems)}")
        return trial

    def _break(self) -> None:
        """Start the job, inject the fault after its first saves, and wait until it is detected."""
        job = self._job
        first = job.newest() or 0
        job.start()

        def ready() -> Mapping[int, RankProcess] | None:
            if job.is_over():
                raise TrialFailed(f"the job ended before the fault; see {job.log}")
            if not self._is_ready(first):
                return None
            # The next save must not come between this test and the fault.
            ranks = job.ranks()
            signal_ranks(ranks.values(), signal.SIGSTOP)
            if ranks and self._is_ready(first):
                return ranks
            signal_ranks(ranks.values(), signal.SIGCONT)
            return None

        ranks = job.await_("moment for the fault, some steps after a save", ready)
        injected = self._injected = FAULTS[self._name](job, ranks, self._draw)
        self._tell(injected.description)
        job.await_("end of the attempt after the fault", lambda: job.is_over() or None)
        detected_s = self._trial.detected_s = time.monotonic() - injected.at_s
        job.stop()
        newest = job.newest() or 0
        if newest > injected.newest_step:  # a save in flight was completed
            self._injected = replace(injected, expected_step=newest)
        self._tell(f"detected after {duration(detected_s)}; RB-7 begins")

    def _is_ready(self, first: int) -> bool:
        """Whether the job has saved twice and trained on, so that steps are trained again."""
        newest = self._job.newest() or first
        saved = sorted(number for number in self._job.names.values() if number > first)
        if len(saved) < SAVES_BEFORE or self._job.saving:
            return False
        wanted = min(_STEPS_BEFORE, saved[-1] - saved[-2] - 1)
        logged = self._job.logged.read().last or 0
        # A job that logs as rarely as it saves never logs more.
        return logged >= newest + wanted or len(saved) >= _MOST_SAVES

    def _resume(self) -> None:
        """Let RB-7 resume the job, and wait until it has saved a newer step than ever."""
        job, began_s = self._job, time.monotonic()
        best = max(job.names.values())
        log = job.resumed_log
        log.touch()
        # The same command starts as many ranks as saved; where no step shows it, RB-7 compares
        # nothing.
        chosen = pick(str(job.root), allow_missing_state=True).chosen
        n_saved = 1 if chosen is None or chosen.world_size is None else chosen.world_size.size
        inputs = {
            "LOG": str(job.log),
            "NEW_LOG": str(log),
            "MENDED": "the drill itself injected the failure",
            "SEEN_BY": "the drill has this node only",
            "WITHOUT": "the drill resumes from what the job saves",
            "CADENCE": "the drill injects its failures",
            "WORLD_SIZE": str(n_saved),
            # Its words may be secrets, and stand in no argument and no record.
            "RESUME": f': "$STEP"; eval "${RESUME_VARIABLE}"',
            "WAIT": f"{job.options.patience_s:.0f}",
            **self._node_inputs(),
        }
        own = own_command(
            *("runbook", "run", "rb-7", str(job.root), "--yes", "--config", "none"),
            *("--transcript", str(job.folder / "transcript")),
            *(word for name, text in inputs.items() for word in ("--set", f"{name}={text}")),
            environment=job.environment(),
        )
        with (job.folder / "runbook.log").open("wb") as out:
            led = subprocess.Popen(
                own.words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**own.environment, RESUME_VARIABLE: job.resume_command(self._left_out)},
            )
        job.await_(
            "restart of the job by RB-7",
            lambda: len(job.attempts()) > 1 or led.poll() is not None or None,
        )
        stalled: StalledStorage | None = None
        if len(job.attempts()) > 1:
            restarted_s = self._trial.restarted_s = time.monotonic() - began_s
            size = job.attempts()[-1].world_size
            with_ranks = "" if size is None else f" with {size} ranks"
            without = f", without {', '.join(self._left_out)}" if self._left_out else ""
            self._tell(f"restarted after {duration(restarted_s)}{with_ranks}{without}")
            stalled = StalledStorage(job) if self._name == STALLED else None
        code = self._trial.runbook_exit_code = job.await_("end of RB-7", led.poll)
        # A job that saves no RNG or data position is resumed without.
        if code not in (0, EXIT_OVERRIDDEN):
            raise TrialFailed(f"RB-7 ended with {code}")
        job.await_(
            "save after the resume", lambda: (job.newest() or 0) > best or job.has_ended() or None
        )
        if stalled is not None:
            stalled.end()

    def _node_inputs(self) -> dict[str, str]:
        if not self._left_out:
            return {}
        nodes = self._job.options.nodes.without(self._left_out)
        inputs = {"NODE": ",".join(self._left_out), "DRAINED": "the drill leaves it out"}
        if nodes.world_sizes:
            inputs |= {"WORLD_SIZE": str(max(nodes.world_sizes)), "ELASTIC": "yes"}
        return inputs

    @property
    def _left_out(self) -> tuple[str, ...]:
        """The node of a hang, which `run` names and a person drains; none where none is left."""
        attempts, nodes = self._job.attempts(), self._job.options.nodes
        named = attempts[0].nodes if attempts and attempts[0].cause == "hang" else ()
        return named if len(named) == 1 and {*nodes.nodes} > {*named} else ()

    def _resumed_from(self) -> int | None:
        with open_store(str(self._job.root)) as store:
            record = newest_record(store, "rb-7")
        chosen = [
            os.path.relpath(str(event.values["STEP"]), self._job.root)
            for event in (record.events if record else ())
            if isinstance(event, BeganEvent) and event.block == "resume"
        ]
        return self._job.names.get(chosen[-1]) if chosen else None

    def _differences(self) -> Iterator[str]:
        injected, resumed = self._injected, self._trial.resumed_from
        if injected is None or resumed is None:
            if not self._trial.problems:
                yield "the job was not resumed"
            return
        last = self._job.logged.read(to_end=True).last
        self._trial.lost_steps = None if last is None else max(0, last - resumed)
        if resumed != injected.expected_step:
            yield f"it resumed from {resumed}, and should from {injected.expected_step}"
        if self._name == "rank-stopped":
            first = self._job.attempts()[0]
            if first.ranks and first.ranks != (injected.rank,):
                yield f"rank {injected.rank} was stopped, and {[*first.ranks]} named"
            if first.nodes and first.nodes != (injected.node,):
                yield f"a rank on {injected.node} was stopped, and {[*first.nodes]} named"
        if not LoggedSteps(self._job.resumed_log).read(to_end=True).n:
            yield "the resumed job logged no loss"
            return
        found = check_loss([str(self._reference)], canary=str(self._job.resumed_log))
        self._trial.loss, self._trial.loss_message = found.verdict.value, found.message
        if found.exit_code:
            yield f"compared with the run without a fault: {found.message}"


# The results, and the report as Markdown


@dataclass(slots=True)
class Trial:
    """One fault, and what followed it."""

    fault: str
    """Its name, such as `rank-killed`."""
    description: str = "the fault was not injected"
    """What was done to the job, in one line."""
    detected_s: NonNegative | None = None
    """Seconds from the fault to the end of the attempt; null where it was not detected."""
    restarted_s: NonNegative | None = None
    """Seconds from then to the start of the next attempt, with RB-7's checks."""
    expected_step: int | None = None
    """The newest step that is good after the fault."""
    resumed_from: int | None = None
    """The step that RB-7 resumed from."""
    lost_steps: int | None = None
    """Steps that were trained before the fault and had to be trained again; null where the log
    does not count training steps."""
    loss: str | None = None
    """Whether the loss continues as in the run without a fault; a verdict of `loss`."""
    loss_message: str | None = None
    """Why: how many steps agree, and how closely."""
    cause: str | None = None
    """What `run` called the cause."""
    section: str | None = None
    """The section in which the job hung, as `run` named it."""
    ranks: tuple[int, ...] = ()
    """The ranks that `run` named."""
    nodes: tuple[str, ...] = ()
    """The nodes that `run` named."""
    excluded: tuple[str, ...] = ()
    """The nodes that the job was resumed without."""
    world_size: int | None = None
    """With how many ranks it was resumed; null where the command decides that."""
    runbook_exit_code: int | None = None
    """How RB-7 ended."""
    problems: list[str] = field(default_factory=list)
    """What is not as it must be; none where the job survives the fault."""
    folder: str = ""
    """Where its logs and the transcript of RB-7 are."""
    evidence: tuple[str, ...] = ()
    """The files that show why the job hung: stacks, dumps of the flight recorder."""

    @property
    def passed(self) -> bool:
        """Whether the job survives the fault."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class Drilled:
    """A drill: the job, the faults, and whether the job survives them."""

    command: tuple[str, ...]
    """The command of the job."""
    root: str
    """The checkpoint root, which the job of the drill did not use."""
    step: int
    """The step that the drill began with."""
    seed: int
    """What determined ranks, moments and bytes."""
    copied_by: str
    """`reflink`, `copy`, or `download` from an object store."""
    root_read_only: bool
    """Whether the real root was read-only for the job."""
    root_unchanged: bool
    """Whether the real root is the same as before the drill."""
    trials: tuple[Trial, ...]
    """The faults, in order; fewer than were asked for where a signal ended the drill."""
    message: str
    """The grade in one line."""
    exit_code: ExitCode
    next_command: NextCommand


_HEADINGS = (
    *("fault", "grade", "detected in", "restarted in", "resumed from", "resumed with"),
    *("lost steps", "loss"),
)


def grade(trial: Trial) -> str:
    """The grade of a trial in one word."""
    return "survived" if trial.passed else "failed"


def rows(found: Drilled) -> Sequence[tuple[str, ...]]:
    """The headings and the cells of each trial, without columns that no trial fills."""
    columns = zip(_HEADINGS, *map(_row, found.trials), strict=True)
    return [*zip(*(column for column in columns if set(column[1:]) != {"-"}), strict=True)]


def _row(trial: Trial) -> tuple[str, ...]:
    seconds = (
        "-" if seconds is None else duration(seconds)
        for seconds in (trial.detected_s, trial.restarted_s)
    )
    step, lost = (
        "-" if number is None else str(number) for number in (trial.resumed_from, trial.lost_steps)
    )
    resumed_with = [] if trial.world_size is None else [f"{trial.world_size} ranks"]
    resumed_with += [f"without {', '.join(trial.excluded)}"] if trial.excluded else []
    words = ", ".join(resumed_with) or "-"
    return (trial.fault, grade(trial), *seconds, step, words, lost, trial.loss or "-")


def facts(found: Drilled) -> Iterator[tuple[str, str]]:
    """What else a reader must know, in pairs."""
    yield "command", shlex.join(found.command)
    yield "root", found.root
    yield "began with", f"step {found.step} ({found.copied_by})"
    yield "seed", str(found.seed)
    read_only = "read-only for the job" if found.root_read_only else "writable to the job"
    changed = "unchanged" if found.root_unchanged else "changed during the drill"
    yield "the real root", f"{read_only}; {changed}"


def details(trial: Trial) -> Iterator[str]:
    """One sentence each about a trial."""
    yield trial.description
    if trial.cause is not None:
        section = f" in section {trial.section}" if trial.section else ""
        ranks = f", ranks {', '.join(map(str, trial.ranks))}" if trial.ranks else ""
        nodes = f", nodes {', '.join(trial.nodes)}" if trial.nodes else ""
        yield f"`ckptctl run` named: {trial.cause}{section}{ranks}{nodes}"
    if trial.evidence:
        folder, names = Path(trial.evidence[0]).parent, map(os.path.basename, trial.evidence)
        yield f"evidence in {folder}: {', '.join(names)}"
    if trial.runbook_exit_code is not None:
        yield f"RB-7 ended with {trial.runbook_exit_code}"
    if trial.loss_message is not None:
        yield f"loss: {trial.loss_message}"
    yield from trial.problems
    yield f"logs and transcript: {trial.folder}"


def as_markdown(found: Drilled) -> str:
    """The report as Markdown."""
    lines = [f"# Drill: {found.message}", ""]
    lines += [f"- {name}: {markdown_code(text)}" for name, text in facts(found)]
    headings, *cells = rows(found)
    lines += ["", markdown_row(*headings), markdown_row(*["---"] * len(headings))]
    lines += [markdown_row(*row) for row in cells]
    for trial in found.trials:
        lines += [
            "",
            f"## {trial.fault}: {grade(trial)}",
            "",
            *(f"- {safe(detail)}" for detail in details(trial)),
        ]
    return "\n".join(lines) + "\n"


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

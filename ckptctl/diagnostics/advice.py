"""What `doctor` reports: its names, each with what is wrong and what to do, and its results.

`slurm_checks`, `diagnosing` and `storage_traits` decide what applies, and name the place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ckptctl.findings import Severity
from ckptctl.model import ExitCode, NextCommand


class Check(NamedTuple):
    """What one name of `doctor` means."""

    title: str
    """What is wrong."""
    effect: str
    """What follows from it."""
    fix: str
    """What to do, as a sentence."""


CHECKS: Mapping[str, Check] = {
    # doctor slurm
    "script.unread": Check(
        "the script was not checked to its end",
        "It is no script as people write them; what was not checked may hold any mistake.",
        "Shorten it, and run `ckptctl doctor slurm` again.",
    ),
    "script.shebang": Check(
        "the script names no shell",
        "sbatch rejects a script whose first line does not begin with `#!`.",
        "Begin the script with `#!/bin/bash`.",
    ),
    "script.line-ends": Check(
        "the script has Windows line ends",
        "The shell takes the carriage return for a part of each line, so commands fail.",
        "Remove them: `sed -i 's/\\r$//' FILE`.",
    ),
    "script.no-training": Check(
        "no command that trains was recognized",
        "Signals, resume and exit codes of the training were not judged: it is started by a "
        "script or a program that `doctor` does not know.",
        "Run `ckptctl doctor slurm` on the script that holds the training command.",
    ),
    "sbatch.ignored": Check(
        "an #SBATCH line behind a command",
        "SLURM ignores directives after the first command: the option has no effect.",
        "Move the line above the first command.",
    ),
    "sbatch.variable": Check(
        "a variable in an #SBATCH line",
        "Variables are not expanded there: the option gets the text with the dollar sign.",
        "Write the value, or pass the option to `sbatch` on its command line. In file names, `%j` "
        "is the job id.",
    ),
    "signal.none": Check(
        "no --signal",
        "At the time limit the job has only the 30 s of KillWait to save.",
        "Add `#SBATCH --signal=TERM@300` where srun starts the training, or "
        "`--signal=B:USR1@300` and a trap that passes it on.",
    ),
    "signal.no-trap": Check(
        "--signal=B: without a trap",
        "The signal reaches only the batch shell, which dies of it. The job ends at once: tasks of "
        "srun have `KillWait` (30 s) for a save, and all else is killed.",
        "Remove `B:`, replace the shell by Python (`exec`), or trap the signal and pass it on.",
    ),
    "signal.foreground": Check(
        "a trap, and the training in the foreground",
        "bash runs a trap only after the foreground command has ended, which is too late.",
        'Start the training in the background (`&`, `pid=$!`), then `wait "$pid"`.',
    ),
    "signal.pipeline": Check(
        "the trap signals the end of a pipe",
        "`$!` is the last command of a pipe, such as tee: the training gets no signal.",
        "Write to the log with `--output` or `> FILE 2>&1`, without a pipe.",
    ),
    "signal.not-passed": Check(
        "the trap does not pass the signal on",
        "The training gets no signal, and is killed at the time limit without a save.",
        'Write `scancel --signal=TERM "$SLURM_JOB_ID.0"` into the trap, with the number of the '
        "training's step.",
    ),
    "signal.no-wait": Check(
        "nothing waits for the training in the background",
        "The script ends at once, or when the signal ends its only `wait`, and the job with it, "
        "before the save is written.",
        'Add `wait "$pid"; code=$?` behind it, and another behind that for the save.',
    ),
    "signal.no-step": Check(
        "--signal goes to job steps, and there is none",
        "Without `B:` SLURM signals the tasks of srun. What the script starts without srun gets "
        "no signal.",
        "Start the training with srun, or use `--signal=B:` and `exec`.",
    ),
    "signal.not-run": Check(
        "--signal reaches the job step and not ckptctl run",
        "`ckptctl run` takes the end of the step for a failure, and restarts the job shortly "
        "before the time limit.",
        "Use `--signal=B:`, with `exec` or a trap that passes the signal on to `ckptctl run`.",
    ),
    "signal.not-handled": Check(
        "torchrun or ft_launcher does not handle the signal",
        "They pass SIGTERM, SIGINT, SIGHUP and SIGQUIT on. Any other ends them at once, and the "
        "step with them, whatever the ranks save.",
        "Send SIGTERM, or start `torchrun --signals-to-handle=SIGTERM,SIGUSR1` "
        "(`PET_SIGNALS_TO_HANDLE`). torchrun itself overwrites `TORCHELASTIC_SIGNALS_TO_HANDLE`.",
    ),
    "signal.srun-killed": Check(
        "SIGTERM for srun itself",
        "srun passes most signals on to its tasks, but kills them on SIGTERM (`srun: forcing job "
        "termination`).",
        'Use `--signal=TERM@300` without `B:`, or `scancel --signal=TERM "$SLURM_JOB_ID.0"` in the '
        "trap: both signal the tasks.",
    ),
    "signal.wrapped": Check(
        "a shell between srun and Python",
        "srun signals the shell of `bash -c`, which does not pass the signal on.",
        "Put `exec` before the last command in the quotes.",
    ),
    "signal.notice-short": Check(
        "the notice ends before the save",
        "The job is killed while it saves.",
        "Give a notice that is a minute longer than the save (`ckptctl cost` reports its time) and "
        "the time that the job waits for it: SLURM may signal up to a minute late.",
    ),
    "requeue.none": Check(
        "nothing restarts the job",
        "After a failure of a node or a preemption the job stays ended.",
        "Add `#SBATCH --requeue`, or requeue it in the script.",
    ),
    "requeue.preemptible": Check(
        "--no-requeue in a preemptible partition",
        "A preemption ends the job for good.",
        "Use `#SBATCH --requeue`.",
    ),
    "requeue.cancelled": Check(
        "the trap starts a cancelled job again",
        "`scancel` sends SIGTERM to the batch shell too, and the trap cannot tell it from the "
        "time limit: the script requeues a job that a person has cancelled.",
        "Use `--signal=B:USR1@300` and a trap for USR1, and none for TERM.",
    ),
    "sbatch.no-kill": Check(
        "the job ends with the first node that fails",
        "SLURM ends the whole job, and requeues it, before `ckptctl run` can restart the training "
        "on the nodes that are left.",
        "Add `#SBATCH --no-kill`, and what `sbatch.shell-lost` asks for.",
    ),
    "sbatch.shell-lost": Check(
        "the job outlives its batch shell",
        "With `--no-kill` SLURM keeps a job whose first node fails: it holds its other nodes until "
        "the time limit, and nothing runs there.",
        "Start a task on another node that requeues the job then, as "
        "`examples/jobs/slurm_run.sbatch` does.",
    ),
    "srun.ntasks": Check(
        "srun asks for the tasks of the whole job",
        "On fewer nodes than the job has it fails (`More processors requested than permitted`), "
        "until the budget of restarts is spent.",
        "Add `'--ntasks={nodes}'` to srun.",
    ),
    "requeue.log-lost": Check(
        "a requeue overwrites the log",
        "The error of the first attempt, and the losses before it, are lost.",
        "Add `#SBATCH --open-mode=append`.",
    ),
    "resume.absent": Check(
        "the training does not resume",
        "A job that is started again begins at step 0.",
        'Pass the step: `--resume-from "$(ckptctl pick "$ROOT")"`, or resume in the script.',
    ),
    "resume.unknown": Check(
        "the script does not show whether the training resumes",
        "A framework, its configuration file or a variable decides it. If it does not resume, a "
        "job that is started again begins at step 0.",
        "Check that setting, or start the job twice with few steps: the second log must continue.",
    ),
    "resume.by-mtime": Check(
        "the step is chosen by its mtime",
        "Copies, rsync and touch change the mtime, and the newest folder may be incomplete.",
        'Choose it with `step=$(ckptctl pick "$ROOT")`.',
    ),
    "exit-code.pipe": Check(
        "a pipe hides the exit code",
        "A crash ends with 0, the code of the last command of the pipe.",
        "Add `set -o pipefail`.",
    ),
    "exit-code.swallowed": Check(
        "the exit code of the training is lost",
        "A crash ends with 0, because of `|| true` or of a later command.",
        "End the script with the exit code of the training: `set -e` without `|| true`, or "
        "`exit $exit_code`.",
    ),
    "exit-code.pick": Check(
        "the exit code of ckptctl is ignored",
        "If the storage does not answer, the path is empty, and the job starts fresh.",
        'Stop there: `step=$(ckptctl pick "$ROOT") || exit $?`.',
    ),
    "exit-code.masked": Check(
        "export or local hides the exit code of ckptctl",
        "`export step=$(…)` ends with the exit code of `export`, even under `set -e`.",
        'Assign first: `step=$(ckptctl pick "$ROOT") || exit $?`, then `export step`.',
    ),
    "srun.no-kill": Check(
        "ranks wait for those that died",
        "When one rank dies, the others wait until their timeout, or forever.",
        "Use `srun --kill-on-bad-exit=1`.",
    ),
    "torchrun.ft-options": Check(
        "options of ft_launcher for torchrun",
        "torchrun does not have them: no hang is detected.",
        "Start the job with `ft_launcher`.",
    ),
    "nccl.watchdog-short": Check(
        "the NCCL watchdog is shorter than the hard timeout",
        "The watchdog ends the process before the in-process restart can act.",
        "Set a watchdog that is longer than the hard timeout.",
    ),
    "save.async-format": Check(
        "asynchronous saves in another format than torch_dist",
        "Megatron saves asynchronously in torch_dist only.",
        "Use `--ckpt-format torch_dist`.",
    ),
    # doctor env
    "package.old": Check(
        "a package is older than the oldest supported version",
        "What ckptctl does with it was not tested, and may fail.",
        "Install the version that the message names.",
    ),
    "package.pair": Check(
        "s3fs and fsspec are not of one version",
        "s3fs needs the fsspec of its own version: requests to S3 fail.",
        "Install s3fs in the version of fsspec.",
    ),
    "package.absent": Check(
        "a package is not installed",
        "Commands that need it fail with an error that names it.",
        "Install the extra that the message names, if you need it.",
    ),
    "variable.harmful": Check(
        "a variable of torch, NCCL or Python is harmful",
        "The message states what it does: ranks that wait forever, loads that run code, checks "
        "that are off, or a slow job.",
        "Unset it, or set the value that the message names.",
    ),
    "variable.half": Check(
        "RANK without WORLD_SIZE",
        "Each process acts as a job of its own.",
        "Unset RANK, or start the job with torchrun.",
    ),
    "variable.buffered": Check(
        "the output of Python is buffered",
        "The last lines before a kill are lost.",
        "`export PYTHONUNBUFFERED=1`",
    ),
    "variable.tmpdir": Check(
        "TMPDIR cannot be written to",
        "Whatever writes a temporary file fails.",
        "Set TMPDIR to a folder that this user can write to.",
    ),
    "variable.unknown": Check(
        "a variable CKPTCTL_… that does not exist",
        "It is misspelt, and has no effect.",
        "Correct it: the reference lists all variables.",
    ),
    "limit.files": Check(
        "few files may be open",
        "Data loaders and sharded saves fail with “Too many open files”.",
        "Raise the limit: `ulimit -n 65536`.",
    ),
    "limit.shm": Check(
        "little shared memory",
        "The workers of data loaders end with a bus error.",
        "Mount an emptyDir volume with `medium: Memory` at /dev/shm.",
    ),
    # doctor storage
    "storage.listing": Check(
        "a listing lacks new files",
        "A complete step looks incomplete, and a new one is not found.",
        "Disable the cache of listings (s3fs: `use_listings_cache=false`; NFS: "
        "`lookupcache=none`).",
    ),
    "storage.stale": Check(
        "a read after an overwrite returns the old bytes",
        "What another node has written is not seen.",
        "Disable the cache of the mount, or save every step under its own name.",
    ),
    "storage.ranges": Check(
        "a read of a range returns other bytes",
        "Records of a checkpoint are read wrongly.",
        "Use another client or mount, and report it to the maker of the storage.",
    ),
    "storage.exclusive": Check(
        "several writers create the same new file",
        "Fencing cannot separate two attempts: both can save.",
        "Let only one process write to the root.",
    ),
    "storage.atomic": Check(
        "a file is missing or partly written while it is replaced",
        "A reader of a pointer file or a step that is saved again fails now and then.",
        "Never overwrite a step, and do not read `latest` while it is replaced.",
    ),
    "storage.clock": Check(
        "the clock of the storage differs from that of this machine",
        "A save in progress may be taken for an interrupted one, and an old file for a new one.",
        "Synchronize the clocks (`chronyc tracking`), or use a longer `--grace`.",
    ),
    "storage.left": Check(
        "what doctor wrote could not be removed",
        "A folder `.ckptctl/doctor-…` remains under the root. No step is affected.",
        "Remove it by hand.",
    ),
}


EXIT_FAULTS = 29


@dataclass(frozen=True, slots=True)
class Advice:
    """One mistake or note, and what to do about it."""

    name: str
    """Its stable name, such as `signal.no-trap`."""
    severity: Severity
    """The severity."""
    where: str
    """A line of the script, a variable, a package, or a capability."""
    message: str
    """What is wrong, and its consequence."""
    fix: str
    """What to do."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was inspected, the mistakes, worst first, and the facts found."""

    what: str
    """What was examined: `slurm`, `env` or `storage`."""
    target: str
    """The script or the root as given."""
    advice: tuple[Advice, ...]
    """The advice, worst first."""
    facts: tuple[tuple[str, str], ...]
    """What was found, by name."""
    exit_code: ExitCode
    next_command: NextCommand


def fault(name: str, where: str, message: str, fix: str | None = None) -> Advice:
    """Advice against a fault; what to do is that of `CHECKS`, if no `fix` is given."""
    return Advice(name, Severity.FAULT, where, message, fix or CHECKS[name].fix)


def warning(name: str, where: str, message: str) -> Advice:
    """Advice against what may be a mistake."""
    return Advice(name, Severity.WARNING, where, message, CHECKS[name].fix)


def note(name: str, where: str, message: str) -> Advice:
    """What is unknown, or worth knowing."""
    return Advice(name, Severity.NOTE, where, message, CHECKS[name].fix)


def diagnosis(
    what: str,
    target: str,
    advice: tuple[Advice, ...],
    facts: tuple[tuple[str, str], ...] = (),
    next_command: str | None = None,
) -> Diagnosis:
    """The diagnosis; its exit code is 0 unless something is a fault."""
    severities = list(Severity)
    worst_first = sorted(advice, key=lambda each: severities.index(each.severity))
    is_fault = any(each.severity is Severity.FAULT for each in advice)
    return Diagnosis(
        what, target, tuple(worst_first), facts, EXIT_FAULTS if is_fault else 0, next_command
    )

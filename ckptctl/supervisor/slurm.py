"""Ask Slurm about the job around this process, and start and signal its steps as Slurm needs it.

Whether the job ends now, and which of its nodes are up, is what the controller answers
(`scontrol show job`, `show node`), never the text of a log: a step that Slurm force-terminates
ends with 137 or 0 whatever the reason was.

srun answers SIGTERM by killing all its tasks at once, so that nothing is saved. `scancel --signal`
sends a signal to the tasks, on all nodes.

Source: measured with Slurm 22.05. A preempted job is RUNNING with a PreemptTime, and its EndTime
is that and GraceTime. A node that does not answer for SlurmdTimeout is `DOWN+NOT_RESPONDING`; it
leaves the NodeList of a job with `--no-kill` at the moment its step ends. An `srun --nodes=1`
starts SLURM_NTASKS tasks, and fails. `scontrol show step` names the host and pid of each srun.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ckptctl.distributed.commands import run_bounded
from ckptctl.distributed.launcher import expand
from ckptctl.distributed.process_table import Process, entry_of, environment_of

_KILLS_TASKS = (signal.SIGTERM, signal.SIGINT)
"""srun passes other signals on; the first SIGINT it answers with a report alone."""
_ASK_S = 10.0
"""How long the controller of Slurm is waited for."""


_ENDS_S = 90.0
"""A job whose time ends within this time starts nothing more: a start takes longer."""
_DOWN = frozenset(
    {"DOWN", "NOT_RESPONDING", "FAIL", "ERROR", "POWERED_DOWN", "POWERING_DOWN", "INVALID_REG"}
)
"""States and flags of a node on which no step can be started. Source: scontrol(1)."""
_ENDED = {
    "PREEMPTED": "preemption",
    "TIMEOUT": "walltime",
    "DEADLINE": "walltime",
    "CANCELLED": "user",
}
_UNSET = ("", "None", "N/A", "Unknown", "(null)")
_WITH_VALUE = frozenset(f"-{letter}" for letter in "ABCDJGLMNOSTcdeimnopqrtuwx") | {
    *("--nodes", "--ntasks", "--ntasks-per-node", "--exclude", "--nodelist", "--partition"),
    *("--cpus-per-task", "--gpus-per-node", "--gpus", "--mem", "--time", "--output", "--error"),
}
"""Options of srun whose value can be the next word. Source: srun(1) of Slurm 22.05."""


class SlurmJob(NamedTuple):
    """What the controller knows of the job around this process.

    `ends` is the class of failure for which it ends the job: `preemption`, `walltime` or `user`,
    empty where it does not; `why` states it. `down` are those of the nodes asked about on which no
    step can be started, with their states.
    """

    ends: str
    why: str
    down: Mapping[str, str]


def job_id() -> str | None:
    """The SLURM job around this process; None outside of one."""
    return os.environ.get("SLURM_JOB_ID") or None


def ask(nodes: Sequence[str]) -> SlurmJob | None:
    """What Slurm knows of its job and of these nodes; None where it does not answer.

    Where it knows none of their names, nothing is known of them. Takes up to 20 seconds. Cost: two
    commands of Slurm.
    """
    job = job_id()
    shown = _slurm("scontrol", "show", "job", job, "-o") if job else None
    if job is None or not shown:
        return None
    about = _fields(shown)
    if "JobState" not in about:
        return None
    ends, why = _end_of(job, about)
    kept = expand(about.get("NodeList", ""))
    names = names_in(kept or nodes, nodes)
    left = [node for node in nodes if node not in names] if names else []
    down = dict.fromkeys(left, "no longer a node of the job")
    listed = _slurm("scontrol", "show", "node", ",".join(names.values()), "-o") if names else None
    states = {about.get("NodeName"): about for about in map(_fields, (listed or "").splitlines())}
    for node, name in names.items():
        state = states.get(name, {}).get("State", "")
        if _DOWN & {*re.split(r"[+*]", state)}:
            down[node] = state
    return SlurmJob(ends, why, down)


def names_in(known: Sequence[str], nodes: Sequence[str]) -> dict[str, str]:
    """The names under which Slurm knows nodes of its job, by those given, with or without domain.

    Without those that are none of the `known` ones.
    """
    short = {name.partition(".")[0]: name for name in known} | {name: name for name in known}
    names = {node: short.get(node) or short.get(node.partition(".")[0]) for node in nodes}
    return {node: name for node, name in names.items() if name is not None}


def _end_of(job: str, about: Mapping[str, str]) -> tuple[str, str]:
    """For which class of failure Slurm ends a job, and why; empty where it goes on."""
    preempted = about.get("PreemptTime", "")
    if preempted not in _UNSET:
        return "preemption", f"Slurm preempts job {job} (PreemptTime {preempted})"
    state = about.get("JobState", "")
    if state in _ENDED:
        return _ENDED[state], f"Slurm reports job {job} as {state}"
    with suppress(ValueError, OverflowError):
        ends = about.get("EndTime", "")
        # In local time, as Slurm prints it.
        left_s = time.mktime(time.strptime(ends, "%Y-%m-%dT%H:%M:%S")) - time.time()
        if left_s < _ENDS_S:
            return "walltime", f"the time limit of job {job} is reached (EndTime {ends})"
    return "", ""


def _fields(line: str) -> dict[str, str]:
    """The fields of a line of `scontrol show -o`, up to the first value with blanks."""
    pairs = (word.partition("=") for word in line.split())
    return {name: value for name, _, value in reversed([*pairs])}


def is_srun(words: Sequence[str]) -> bool:
    """Whether a command is an srun in a SLURM job."""
    return bool(words) and os.path.basename(words[0]) == "srun" and job_id() is not None


def srun_on(words: Sequence[str], n_nodes: int, excluded: Sequence[str]) -> list[str] | None:
    """The words of an srun with its nodes, tasks and excluded nodes, where they are not stated.

    In a batch script srun takes the tasks from SLURM_NTASKS, which is of all nodes of the job: with
    all of them nothing is added. None where it is not known how many tasks fewer nodes get, because
    the nodes have different numbers of them.
    """
    total = os.environ.get("SLURM_NNODES", "")
    if not excluded and n_nodes >= (int(total) if total.isdecimal() else n_nodes):
        return [*words]
    options = _options_of(words)
    stated = options.get("--nodes", options.get("-N", ""))
    nodes = int(stated) if stated.isdecimal() else n_nodes
    added = [] if stated else [f"--nodes={n_nodes}"]
    if not {"--ntasks", "-n"} & options.keys():
        per_node = options.get("--ntasks-per-node") or os.environ.get("SLURM_NTASKS_PER_NODE", "")
        if not per_node.isdecimal():
            per_node = _tasks_per_node()
        if not per_node:
            return None
        added.append(f"--ntasks={nodes * int(per_node)}")
    if excluded and not {"--exclude", "-x"} & options.keys():
        names = names_in(expand(os.environ.get("SLURM_JOB_NODELIST", "")), excluded)
        added.append(f"--exclude={','.join(names.get(node, node) for node in excluded)}")
    return [words[0], *added, *words[1:]]


def _tasks_per_node() -> str:
    """How many tasks each node of the job has; empty where that differs or is not stated."""
    total, nodes = os.environ.get("SLURM_NTASKS", ""), os.environ.get("SLURM_NNODES", "")
    if not total:
        return "1"  # as srun itself
    stated = os.environ.get("SLURM_TASKS_PER_NODE", "")
    if stated:
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x[0-9]{1,6}\))?", stated)
        return match[1] if match else ""
    is_even = total.isdecimal() and nodes.isdecimal() and int(nodes) and not int(total) % int(nodes)
    return str(int(total) // int(nodes)) if is_even else ""


def _options_of(words: Sequence[str]) -> dict[str, str]:
    """The options of an srun in front of its program, with their values as far as they show."""
    options = {}
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        name, is_long, value = words[at].partition("=")
        if not is_long and not name.startswith("--") and len(name) > 2:
            name, value = name[:2], name[2:]
        elif not is_long and name in _WITH_VALUE and at + 1 < len(words):
            at += 1
            value = words[at]
        options[name] = value
        at += 1
    return options


def signal_step(pid: int, number: int) -> bool:
    """Send the tasks of an srun a signal that would make it kill them; whether that was done.

    False for any other process and signal, and where the controller does not answer or knows no
    step of this srun. Cost: none but for an srun; else two calls of Slurm's commands.
    """
    return bool(number in _KILLS_TASKS and _signal([pid], number))


def without_signalled_steps(processes: Sequence[Process], number: int) -> list[Process]:
    """The processes that are still to be signalled, once the tasks of each srun were told.

    An srun that was not told (see `signal_step`) is among them. Its tasks on this node are not,
    nor its second process, which ends with it.
    """
    steps = _signal((one.pid for one in processes), number)
    ids = {os.fsencode(f"SLURM_STEP_ID={step.rpartition('.')[2]}") for step in steps.values()}
    left = []
    for process in processes:
        entry = entry_of(process.pid)
        parent = entry.parent if entry else 0
        is_signalled = not ids.isdisjoint(environment_of(process.pid))
        if not (is_signalled or process.pid in steps or parent in steps):
            left.append(process)
    return left


def _signal(pids: Iterable[int], number: int) -> dict[int, str]:
    """Signal the tasks of those processes that are an srun of this job; their steps, by pid."""
    sruns = set()
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "srun":
                sruns.add(pid)
    job = os.environ.get("SLURM_JOB_ID")
    steps = {pid: step for step, pid in _steps(job) if pid in sruns} if sruns and job else {}
    name = signal.Signals(number).name.removeprefix("SIG")
    done = steps and _slurm("scancel", f"--signal={name}", *steps.values()) is not None
    return steps if done else {}


def _steps(job: str) -> Iterable[tuple[str, int]]:
    shown = _slurm("scontrol", "show", "step", job, "-o") or ""
    for line in shown.splitlines():
        step = re.search(r"\bStepId=(\S+)", line)
        pid = re.search(r"\bSrunHost:Pid=\S*?:([0-9]{1,10})\b", line)
        if step and pid:
            yield step[1], int(pid[1])


def _slurm(*command: str) -> str | None:
    with suppress(OSError):
        code, shown, _ = run_bounded(command, _ASK_S)
        return shown if code == 0 else None
    return None

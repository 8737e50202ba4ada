"""The job and the rank of this process, by its launcher and scheduler.

Read from what SLURM, Kubernetes, torchrun, srun and mpirun put into the environment,
and from nothing else: no command is run, no server is asked, torch is not imported.
What is not said there is None, never a guess. Ranks that a script gives itself
(`mp.spawn`) are known to `torch.distributed` alone: `placed` takes them.
"""

from __future__ import annotations

import datetime
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

NO_SCHEDULER = "none"
NO_LAUNCHER = "none"
_NUMBER = re.compile("[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The place of this process in its job, its nodes and its scheduler.

    `scheduler` is `slurm`, `kubernetes` or `none`; `launcher` is `torchrun` (and all
    that use its agent), `srun`, `mpirun`, `environment` (something else set `RANK` and
    `WORLD_SIZE`) or `none`. `job` is the scheduler's id of the job, `run_id` the id
    that torchrun was given. `requeues` counts how often the scheduler started the job
    again, `restarts` how often the launcher (at most `max_restarts` times) or `ckptctl run`
    started the processes again, whichever is more. `rank`, `world_size`, `local_rank` and
    `local_world_size` count processes, `nodes` and `node_rank` count machines. `node` is
    this machine, `node_list` all of them in the scheduler's own short form
    (`gpu-[007-009]`), `pod` the pod in Kubernetes. `gpus_per_node` is what the scheduler
    granted on this node. `ends_s` is when the scheduler will end the job, in seconds since
    1970.
    """

    scheduler: str
    launcher: str
    node: str
    job: str | None = None
    job_name: str | None = None
    run_id: str | None = None
    requeues: int | None = None
    restarts: int | None = None
    max_restarts: int | None = None
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    nodes: int | None = None
    node_rank: int | None = None
    node_list: str | None = None
    pod: str | None = None
    gpus_per_node: int | None = None
    ends_s: int | None = None

    @property
    def restarted(self) -> bool:
        """The scheduler or the launcher says that this job has lived before."""
        return bool(self.requeues or self.restarts)

    @property
    def sentence(self) -> str:
        """The place in one line, for the log of a job that starts."""
        job = {"slurm": "SLURM job", "kubernetes": "Kubernetes job"}.get(self.scheduler)
        named = f"{job} {self.job or 'without a name'}" if job else "no scheduler"
        again = [
            f"{word} {count} {'time' if count == 1 else 'times'}"
            for word, count in (("requeued", self.requeues), ("restarted", self.restarts))
            if count
        ]
        place = f"{self.nodes} nodes" if self.nodes and self.nodes > 1 else "1 node"
        if self.rank is not None:
            place += f", rank {self.rank} of {self.world_size or 'an unknown number'}"
        by = f" by {self.launcher}" if self.launcher != NO_LAUNCHER else ""
        lives = f" ({', '.join(again)})" if again else ""
        return f"{named}{lives}: {place}{by}, on {self.node}"

    def placed(self, rank: int, world_size: int) -> Cluster:
        """The same with the rank and the world size of a process group that is there."""
        return replace(self, rank=rank, world_size=world_size)

    def document(self) -> dict[str, str | int | None]:
        """What ledgers, seals and reports keep: every field, None where nothing says it.

        `ends_s` becomes `ends_at`, RFC 3339 in UTC.
        """
        fields: dict[str, str | int | None] = asdict(self)
        del fields["ends_s"]
        return {**fields, "ends_at": _rfc3339(self.ends_s)}


def cluster_context(environment: Mapping[str, str] | None = None) -> Cluster:
    """What the environment says of the job, of this process and of its machine.

    A number that is none is taken for one that is not there: a stray variable must
    not end a training job. Costs nothing; every process reads its own.

    Source: `sbatch` and `srun` of SLURM 24.05; `torch/distributed/run.py` of torch 2.13;
    Kubernetes 1.31, whose restarts no variable tells.
    """
    told = _Told(os.environ if environment is None else environment)
    scheduler = _scheduler(told)
    launcher = _launcher(told)
    return Cluster(
        scheduler=scheduler,
        launcher=launcher,
        node=told.word("SLURMD_NODENAME", "NODE_NAME") or socket.gethostname(),
        job=_job(told, scheduler),
        job_name=told.word("SLURM_JOB_NAME", "JOBSET_NAME") if scheduler != NO_SCHEDULER else None,
        run_id=told.word("TORCHELASTIC_RUN_ID"),
        requeues=told.number("SLURM_RESTART_COUNT"),
        restarts=told.largest("TORCHELASTIC_RESTART_COUNT", "CKPTCTL_RESTART_COUNT"),
        max_restarts=told.number("TORCHELASTIC_MAX_RESTARTS"),
        rank=told.number(*_RANKS[launcher]),
        world_size=told.number(*_WORLD_SIZES[launcher]),
        local_rank=told.number(*_LOCAL_RANKS[launcher]),
        local_world_size=told.number(*_LOCAL_WORLD_SIZES[launcher]),
        nodes=told.number(
            "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "GROUP_WORLD_SIZE", "PET_NNODES"
        ),
        node_rank=told.number("GROUP_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX"),
        node_list=told.word("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        pod=_pod(told, scheduler),
        gpus_per_node=told.number("SLURM_GPUS_ON_NODE"),
        ends_s=told.number("SLURM_JOB_END_TIME"),
    )


# By launcher: a batch script has SLURM's variables of the whole job, and torchrun's
# processes have those of the one srun task that started their agent.
_RANKS = {
    "torchrun": ("RANK",),
    "srun": ("SLURM_PROCID",),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "environment": ("RANK",),
    NO_LAUNCHER: (),
}
_WORLD_SIZES = {
    "torchrun": ("WORLD_SIZE",),
    "srun": ("SLURM_STEP_NUM_TASKS",),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "environment": ("WORLD_SIZE",),
    NO_LAUNCHER: (),
}
_LOCAL_RANKS = {
    "torchrun": ("LOCAL_RANK",),
    "srun": ("SLURM_LOCALID",),
    "mpirun": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "environment": ("LOCAL_RANK",),
    NO_LAUNCHER: (),
}
_LOCAL_WORLD_SIZES = {
    "torchrun": ("LOCAL_WORLD_SIZE",),
    "srun": ("SLURM_NTASKS_PER_NODE",),
    "mpirun": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    "environment": ("LOCAL_WORLD_SIZE",),
    NO_LAUNCHER: (),
}


class _Told:
    """What an environment says, with nothing that is empty or no number."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def word(self, *names: str) -> str | None:
        """The first of these variables that is set to something."""
        return next((value for name in names if (value := self._environment.get(name))), None)

    def number(self, *names: str) -> int | None:
        """The first of these variables that is a whole number, 0 or more."""
        return next(self._numbers(names), None)

    def largest(self, *names: str) -> int | None:
        """The largest of these variables that are whole numbers, 0 or more."""
        return max(self._numbers(names), default=None)

    def _numbers(self, names: Sequence[str]) -> Iterator[int]:
        values = (self._environment.get(name, "") for name in names)
        return (int(value) for value in values if _NUMBER.fullmatch(value))


def _scheduler(told: _Told) -> str:
    # SLURM inside of pods (Slinky, SUNK) is SLURM: it holds the job's life in its hands.
    if told.word("SLURM_JOB_ID"):
        return "slurm"
    return "kubernetes" if told.word("KUBERNETES_SERVICE_HOST") else NO_SCHEDULER


def _launcher(told: _Told) -> str:
    if told.word("TORCHELASTIC_RUN_ID"):
        return "torchrun"
    if (told.number("SLURM_STEP_NUM_TASKS") or 0) > 1:
        return "srun"
    if told.word("OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        return "mpirun"
    if told.number("RANK") is not None and told.number("WORLD_SIZE") is not None:
        return "environment"
    # One task of srun is a job of one process, or an agent that starts others.
    return "srun" if told.number("SLURM_STEP_NUM_TASKS") == 1 else NO_LAUNCHER


def _job(told: _Told, scheduler: str) -> str | None:
    if scheduler == "slurm":
        array, task = told.word("SLURM_ARRAY_JOB_ID"), told.word("SLURM_ARRAY_TASK_ID")
        return f"{array}_{task}" if array and task else told.word("SLURM_JOB_ID")
    return told.word("JOB_NAME", "JOBSET_NAME") if scheduler == "kubernetes" else None


def _pod(told: _Told, scheduler: str) -> str | None:
    return told.word("POD_NAME", "HOSTNAME") if scheduler == "kubernetes" else None


def _rfc3339(seconds: int | None) -> str | None:
    if seconds is None:
        return None
    try:
        at = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    except (OverflowError, ValueError, OSError):
        return None
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")

"""Read the job and the rank of this process from its environment.

SLURM, Kubernetes, torchrun, srun and mpirun set the variables. No command is run, no server
is contacted, and torch is not imported. A value that no variable gives is None, never a
guess. Only `torch.distributed` knows ranks that a script assigns itself (`mp.spawn`);
`Cluster.placed` takes them.
"""

# Annotations stay objects, so that reading a ledger evaluates no string as code.
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from zlib import crc32

from ckptctl.formatting import counted, rfc3339
from ckptctl.model import Time

NO_SCHEDULER = "none"
NO_LAUNCHER = "none"


RESTART_COUNT = "CKPTCTL_RESTART_COUNT"
"""The variable in which `ckptctl run` gives the number of restarts to its command."""

ATTEMPT = "CKPTCTL_ATTEMPT"
"""The variable in which `ckptctl run` names the attempt to its command: `RUN/NUMBER`."""

RESTART_COUNTERS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", RESTART_COUNT)
"""Variables that count how often a job was started again."""

_NUMBER = re.compile("[0-9]{1,18}")
_FIRST_NODE = re.compile(r"([^,\[]+)(?:\[([0-9]+))?")
_MAX_NODES = 65_536
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_LISTED = re.compile(r"[^,\[\]]+(?:\[[^\[\]]*\][^,\[\]]*)*")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_RESERVED_PORT = re.compile(r"[0-9]{1,5}(?=[-,]|$)")
_FIRST_PORT = 20_000
_N_PORTS = 12_000
"""Below the ports that Linux chooses for connections."""


class NoRendezvous(Exception):
    """The rendezvous did not come about, ended, or does not answer; the text is why."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The job, the nodes and the rank of a process; null where no variable gives a value."""

    scheduler: str
    """`slurm`, `kubernetes` or `none`."""
    launcher: str
    """`torchrun` (and all that use its agent), `srun`, `mpirun`, `environment` (something else set
    `RANK` and `WORLD_SIZE`) or `none`."""
    node: str
    """This machine."""
    job: str | None = None
    """The scheduler's id of the job."""
    job_name: str | None = None
    """Its name."""
    run_id: str | None = None
    """The id that torchrun was given."""
    requeues: int | None = None
    """How often the scheduler started the job again."""
    restarts: int | None = None
    """How often the launcher or `ckptctl run` started the processes again, whichever is more."""
    max_restarts: int | None = None
    """How often the launcher does that at most."""
    rank: int | None = None
    """The rank of this process."""
    world_size: int | None = None
    """The processes of the job."""
    local_rank: int | None = None
    """The rank of this process among those on this machine."""
    local_world_size: int | None = None
    """The processes on this machine."""
    nodes: int | None = None
    """The machines of the job."""
    node_rank: int | None = None
    """The rank of this machine."""
    node_list: str | None = None
    """All machines, in the scheduler's own short form (`gpu-[007-009]`)."""
    pod: str | None = None
    """The pod in Kubernetes."""
    gpus_per_node: int | None = None
    """What the scheduler granted on this machine."""
    ends_at: Time | None = None
    """When the scheduler will end the job."""

    @property
    def restarted(self) -> bool:
        """Whether the scheduler or the launcher has started this job before."""
        return bool(self.requeues or self.restarts)

    @property
    def sentence(self) -> str:
        """A one-line summary for the log of a starting job."""
        job = {"slurm": "SLURM job", "kubernetes": "Kubernetes job"}.get(self.scheduler)
        named = f"{job} {self.job or 'without a name'}" if job else "no scheduler"
        again = [
            f"{word} {counted(count, 'time')}"
            for word, count in (("requeued", self.requeues), ("restarted", self.restarts))
            if count
        ]
        place = counted(self.nodes or 1, "node")
        if self.rank is not None:
            place += f", rank {self.rank} of {self.world_size or 'an unknown number'}"
        by = f" by {self.launcher}" if self.launcher != NO_LAUNCHER else ""
        attempts = f" ({', '.join(again)})" if again else ""
        return f"{named}{attempts}: {place}{by}, on {self.node}"

    def placed(self, rank: int, world_size: int) -> "Cluster":
        """The same with the rank and world size of an existing process group."""
        return replace(self, rank=rank, world_size=world_size)

    def document(self) -> dict[str, str | int | None]:
        """The fields for ledgers and reports."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def cluster_context(environment: Mapping[str, str] | None = None) -> Cluster:
    """The job, this process and its machine, as the environment describes them.

    A variable with an invalid number counts as unset: a stray variable must not end a
    training job. Reads no file; every process reads its own environment.

    Source: `sbatch` and `srun` of SLURM 24.05; `torch/distributed/run.py` of torch 2.13;
    Kubernetes 1.31, which sets no variable for restarts.
    """
    read = _Variables(os.environ if environment is None else environment)
    scheduler, job = NO_SCHEDULER, None
    if job_id := read.text("SLURM_JOB_ID"):
        # SLURM inside pods (Slinky, SUNK) counts as SLURM: it starts and ends the job.
        array, task = read.text("SLURM_ARRAY_JOB_ID"), read.text("SLURM_ARRAY_TASK_ID")
        scheduler, job = "slurm", f"{array}_{task}" if array and task else job_id
    elif read.text("KUBERNETES_SERVICE_HOST"):
        scheduler, job = "kubernetes", read.text("JOB_NAME", "JOBSET_NAME")
    launcher = _launcher(read)
    rank, world_size, local_rank, local_world_size = (
        read.number(*names) for names in _PLACES[launcher]
    )
    ends_s = read.number("SLURM_JOB_END_TIME")
    return Cluster(
        scheduler=scheduler,
        launcher=launcher,
        node=read.text("SLURMD_NODENAME", "NODE_NAME") or os.uname().nodename,
        job=job,
        job_name=read.text("SLURM_JOB_NAME", "JOBSET_NAME") if scheduler != NO_SCHEDULER else None,
        run_id=read.text("TORCHELASTIC_RUN_ID"),
        requeues=read.number("SLURM_RESTART_COUNT"),
        restarts=read.largest("TORCHELASTIC_RESTART_COUNT", RESTART_COUNT),
        max_restarts=read.number("TORCHELASTIC_MAX_RESTARTS"),
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        nodes=read.number(
            "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "GROUP_WORLD_SIZE", "PET_NNODES"
        ),
        node_rank=read.number("GROUP_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX"),
        node_list=read.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        pod=read.text("POD_NAME", "HOSTNAME") if scheduler == "kubernetes" else None,
        gpus_per_node=read.number("SLURM_GPUS_ON_NODE"),
        ends_at=None if ends_s is None else rfc3339(ends_s, "seconds"),
    )


@dataclass(frozen=True, slots=True)
class LaunchedRank:
    """The rank of this process among those that a launcher started for one command.

    `address` is the host and port where they meet; None if torch reads it from the
    environment. `step` names the job step of Slurm, which no other processes have.
    """

    rank: int
    size: int
    address: tuple[str, int] | None = None
    step: str = ""


def launched_rank(environment: Mapping[str, str]) -> LaunchedRank | None:
    """The rank that torchrun or srun gave this process; None if it is the only one.

    Under srun only the variables of the job step count: a batch script has those of the
    whole job, but is one process.
    """
    read = _Variables(environment)
    rank, size = read.number("RANK"), read.number("WORLD_SIZE")
    if rank is not None and size is not None and "MASTER_ADDR" in environment:
        # What a rank of a training job starts inherits the variables of torchrun, and must
        # not join the job's process group.
        alone = size < 2 or _is_set_in_parent("RANK")
        return None if alone else LaunchedRank(rank, size)
    rank, size = read.number("SLURM_PROCID"), read.number("SLURM_STEP_NUM_TASKS")
    if rank is None or size is None or size < 2:
        return None
    step = f"{environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '')}"
    # Without `srun --resv-ports` all tasks of one step derive the same port.
    reserved = _RESERVED_PORT.match(environment.get("SLURM_STEP_RESV_PORTS", ""))
    port = int(reserved[0]) if reserved else _FIRST_PORT + crc32(step.encode()) % _N_PORTS
    first = _FIRST_NODE.match(read.text("SLURM_STEP_NODELIST", "SLURM_NODELIST") or "")
    host = first[1] + (first[2] or "") if first else "127.0.0.1"
    return LaunchedRank(rank, size, (host, port), step)


def launched_size(environment: Mapping[str, str]) -> int:
    """How many processes a launcher started, this one among them; 1 if it is the only one.

    Lightning's own launcher gives the processes that it starts no `RANK`.
    """
    launched = launched_rank(environment)
    if launched is not None:
        return launched.size
    read = _Variables(environment)
    of_lightning = read.number("LOCAL_RANK") is not None and read.number("RANK") is None
    if not of_lightning or _is_set_in_parent("LOCAL_RANK"):
        return 1
    return read.number("WORLD_SIZE") or 1


def launched_together(environment: Mapping[str, str]) -> tuple[str, int]:
    """Which launcher started this process together with others, and how many; 1 where none did.

    `srun` and `mpirun` state the number for each process that they start; a batch script is one
    process, whatever its job has. The trainer of Kubeflow sets what torchrun reads (`PET_NNODES`,
    which can be `MIN:MAX`). The pods of an indexed Job may each have a job of their own.

    Source: `srun` of SLURM 24.05; `torch/distributed/run.py` of torch 2.13; Kubernetes 1.31.
    """
    read = _Variables(environment)
    mpi = read.number("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") or 1
    nodes = (read.text("PET_NNODES") or "").rpartition(":")[2]
    counts = {
        "srun": read.number("SLURM_STEP_NUM_TASKS") or 1,
        "mpirun": mpi,
        "kubernetes": int(nodes) if _NUMBER.fullmatch(nodes) else 1,
    }
    return max(counts.items(), key=lambda item: item[1] > 1)


def _is_set_in_parent(name: str) -> bool:
    """Whether the process that started this one was itself started with a variable."""
    from ckptctl.distributed.process_table import environment_of  # few processes are launched

    return any(each.startswith(f"{name}=".encode()) for each in environment_of(os.getppid()))


# Which variables count depends on the launcher: a batch script has SLURM's variables of the
# whole job, and the processes of torchrun have those of the srun task that started the agent.
_OF_TORCHRUN = (("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
_PLACES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "torchrun": _OF_TORCHRUN,
    "srun": (
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS",),
        ("SLURM_LOCALID",),
        ("SLURM_NTASKS_PER_NODE",),
    ),
    "mpirun": (
        ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
        ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    ),
    "environment": _OF_TORCHRUN,
    NO_LAUNCHER: ((), (), (), ()),
}
"""Of each launcher the variables of the rank, the world size, and of both on one machine."""


class _Variables:
    """The variables of an environment, without empty ones and malformed numbers."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def text(self, *names: str) -> str | None:
        """The first of these variables that is set and not empty."""
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


def _launcher(read: _Variables) -> str:
    if read.text("TORCHELASTIC_RUN_ID"):
        return "torchrun"
    if (read.number("SLURM_STEP_NUM_TASKS") or 0) > 1:
        return "srun"
    if read.text("OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        return "mpirun"
    if read.number("RANK") is not None and read.number("WORLD_SIZE") is not None:
        return "environment"
    # One task of srun is a job of one process, or an agent that starts others.
    return "srun" if read.number("SLURM_STEP_NUM_TASKS") == 1 else NO_LAUNCHER


def is_node(name: str) -> bool:
    """Whether a name can be that of one host, and nothing that a command reads otherwise."""
    return _NODE.fullmatch(name) is not None


def expand(short: str, most: int = _MAX_NODES) -> tuple[str, ...]:
    """The nodes of a list in SLURM's short form; none where it is malformed, or names more.

    Source: `hostlist` of SLURM: `gpu-[007-009,012],login1`, several brackets in one name.
    """
    found: list[str] = []
    entries = _LISTED.findall(short)
    if ",".join(entries) != short:
        return ()
    for entry in entries:
        pieces = re.split(r"\[([^\]]*)\]", entry)
        choices = [_numbers(each, most) if n % 2 else (each,) for n, each in enumerate(pieces)]
        for names in product(*choices):
            found.append("".join(names))
            if len(found) > most:
                return ()
    return tuple(found) if all(map(is_node, found)) else ()


def _numbers(ranges: str, most: int) -> tuple[str, ...]:
    """The numbers of `007-009,012`, as wide as they are written."""
    found: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            return ("[",)  # makes a name that is none
        first, last = match[1], match[2] or match[1]
        numbers = range(int(first), int(last) + 1)
        if len(found) + len(numbers) > most:
            return ("[",)
        found += [f"{n:0{len(first)}}" for n in numbers]
    return tuple(found)

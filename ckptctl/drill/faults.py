"""The faults of a drill: each is done to a running job, from outside.

A fault gets the ranks of the job, all of which are stopped (SIGSTOP), and lets them go on.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ckptctl.data_classes import dataclass, replace
from ckptctl.drill.job import Job, Rank, TrialFailed
from ckptctl.supervisor.processes import signal_all

STALL_S = 60.0
"""How long the storage does not answer."""

_WATCH_S = 0.001
_MOST_SAVES = 20


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


Ranks = Mapping[int, Rank]


def signal_ranks(ranks: Iterable[Rank], number: signal.Signals) -> None:
    """Send a signal to ranks."""
    signal_all([rank.process for rank in ranks], number)


def _injected(job: Job, rank: int, ranks: Ranks, what: str) -> Injected:
    """The record of what is done to one rank now."""
    node, newest = ranks[rank].node, _newest(job)
    on_node = f" on {node}" if job.options.nodes.nodes else ""
    return Injected(
        f"rank {rank}{on_node} was {what}", rank, node, newest, newest, time.monotonic()
    )


def kill_rank(job: Job, ranks: Ranks, draw: random.Random) -> Injected:
    """End one rank with SIGKILL."""
    rank = draw.choice(sorted(ranks))
    injected = _injected(job, rank, ranks, "killed")
    signal_ranks([ranks[rank]], signal.SIGKILL)
    signal_ranks(ranks.values(), signal.SIGCONT)
    return injected


def stop_rank(job: Job, ranks: Ranks, draw: random.Random) -> Injected:
    """Leave one rank stopped: it neither ends nor goes on."""
    rank = draw.choice(sorted(ranks))
    injected = _injected(job, rank, ranks, "stopped")
    signal_ranks((ranks[each] for each in ranks if each != rank), signal.SIGCONT)
    return injected


def kill_in_save(job: Job, ranks: Ranks, draw: random.Random) -> Injected:
    """End all ranks with SIGKILL while they write a step.

    The ranks are stopped as soon as a new entry appears beside the steps. If the save was
    faster, they go on, and the next save is waited for.
    """
    newest = _newest(job)
    step = next(name for name, number in job.names.items() if number == newest)
    folders = {job.root, (job.root / step).parent}
    for _ in range(_MOST_SAVES):
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
    raise TrialFailed(f"none of {_MOST_SAVES} saves could be interrupted: they are too short")


def _newest(job: Job) -> int:
    newest = job.newest()
    if newest is None:
        raise TrialFailed("the job has no usable step")
    return newest


def _entries(folders: set[Path]) -> set[str]:
    return {entry.path for folder in folders for entry in os.scandir(folder)}


def damage_shard(job: Job, ranks: Ranks, draw: random.Random) -> Injected:
    """Damage a shard file of the newest step, and kill one rank."""
    newest = _newest(job)
    step = next(name for name, number in job.names.items() if number == newest)
    files = (path for path in (job.root / step).rglob("*") if path.is_file())
    shards = sorted(path for path in files if ".ckptctl" not in path.parts)
    shards = [path for path in shards if path.suffix == ".distcp"] or shards
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


Inject = Callable[[Job, Ranks, random.Random], Injected]

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

    def __init__(self, job: Job) -> None:
        files = [
            str(path)
            for name in job.names
            for path in (job.root / name).rglob("*")
            if path.is_file() and ".ckptctl" not in path.parts
        ]
        listed = job.folder / "leases"
        listed.write_text("\0".join(files), encoding="utf-8", errors="surrogateescape")
        reads, writes = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LEASES, str(STALL_S), str(listed)], stdout=writes
        )
        os.close(writes)
        with open(reads, "rb") as answer:
            n_leases = int(answer.readline() or b"0")
        if not n_leases:
            self.end()
            raise TrialFailed("the file system of the copies has no leases, by which it is stalled")

    def end(self) -> None:
        """Let every open go on."""
        self._process.kill()
        self._process.wait()

"""The faults of a drill: each is done to a running job, from outside."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ckptctl.data_classes import dataclass
from ckptctl.drill.job import Job, TrialFailed
from ckptctl.supervisor.processes import signal_all

STALL_S = 60.0
"""How long the storage does not answer."""

_WATCH_S = 0.001
_MOST_SAVES = 20


@dataclass(frozen=True, slots=True)
class Injected:
    """What was done, to which rank, and which step is the newest good one after it."""

    description: str
    rank: int
    expected_step: int
    at_s: float


def _one_rank(job: Job, draw: random.Random) -> int:
    ranks = sorted(job.ranks())
    if not ranks:
        raise TrialFailed("the job has no process")
    return draw.choice(ranks)


def _signal_rank(job: Job, rank: int, number: signal.Signals) -> None:
    signal_all([job.ranks()[rank]], number)


def kill_rank(job: Job, newest: int, draw: random.Random) -> Injected:
    """End one rank with SIGKILL."""
    rank = _one_rank(job, draw)
    at_s = time.monotonic()
    _signal_rank(job, rank, signal.SIGKILL)
    return Injected(f"rank {rank} was killed", rank, newest, at_s)


def stop_rank(job: Job, newest: int, draw: random.Random) -> Injected:
    """Stop one rank with SIGSTOP: it neither ends nor goes on."""
    rank = _one_rank(job, draw)
    at_s = time.monotonic()
    _signal_rank(job, rank, signal.SIGSTOP)
    return Injected(f"rank {rank} was stopped", rank, newest, at_s)


def kill_in_save(job: Job, newest: int, draw: random.Random) -> Injected:
    """End all ranks with SIGKILL while they write a step.

    The ranks are stopped as soon as a new entry appears beside the steps. If the save was
    faster, they go on, and the next save is waited for.
    """
    step = next(name for name, number in job.names.items() if number == newest)
    folders = {job.root, (job.root / step).parent}
    for _ in range(_MOST_SAVES):
        before, ranks = _entries(folders), [*job.ranks().values()]
        until_s = time.monotonic() + job.options.patience_s
        while not _entries(folders) - before:
            if time.monotonic() > until_s or job.has_ended():
                raise TrialFailed("the job did not save again")
            time.sleep(_WATCH_S)
        time.sleep(draw.random() * 0.005)
        signal_all(ranks, signal.SIGSTOP)
        at_s = time.monotonic()
        found = job.newest()
        if found == newest:
            signal_all(ranks, signal.SIGKILL)
            return Injected("all ranks were killed in a save", -1, newest, at_s)
        signal_all(ranks, signal.SIGCONT)
        newest = found or newest
    raise TrialFailed(f"none of {_MOST_SAVES} saves could be interrupted: they are too short")


def _entries(folders: set[Path]) -> set[str]:
    return {entry.path for folder in folders for entry in os.scandir(folder)}


def damage_shard(job: Job, newest: int, draw: random.Random) -> Injected:
    """Damage a shard file of the newest step, and kill one rank."""
    ranks = [*job.ranks().values()]
    signal_all(ranks, signal.SIGSTOP)
    step = next(name for name, number in job.names.items() if number == newest)
    files = (path for path in (job.root / step).rglob("*") if path.is_file())
    shards = sorted(path for path in files if ".ckptctl" not in path.parts)
    shards = [path for path in shards if path.suffix == ".distcp"] or shards
    shard = draw.choice([path for path in shards if path.stat().st_size])
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        if draw.random() < 0.5:
            what = "half of it was removed"
            file.truncate(size // 2)
        else:
            # A record begins with its headers, so that its middle is data of a tensor.
            what, at = "a byte was changed", size // 2
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0xFF]))
    rank = _one_rank(job, draw)
    at_s = time.monotonic()
    signal_all(ranks, signal.SIGCONT)
    _signal_rank(job, rank, signal.SIGKILL)
    older = max(number for number in job.names.values() if number < newest)
    name = shard.relative_to(job.root)
    return Injected(f"{name}: {what}, and rank {rank} was killed", rank, older, at_s)


Inject = Callable[[Job, int, random.Random], Injected]

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

"""The folder of heartbeats that `ckptctl run` gives its job, and what is in it.

The folder is in memory of this node where the system has that, and only this user can enter
it. Ranks on other nodes have no such folder and write nothing.

Ranks count their steps and the time in them, and the supervisor divides, off the training path.
A window is a minute, as the reports of NVRx are; the present time of a rank is that of its last
window.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from ckptctl.distributed.launcher import cluster_context
from ckptctl.distributed.process_table import Process, environment_of, is_alive, own_process
from ckptctl.errors import OwnFileUnreadable
from ckptctl.failures.slow_ranks import SlowRank, slow_among
from ckptctl.formats.own.heartbeats import (
    FOLDER_VARIABLE,
    MAX_BYTES,
    Heartbeat,
    first_heartbeat,
    rank_in,
    read_heartbeat,
)
from ckptctl.formats.own.supervision import SlowRankDocument
from ckptctl.outside_numbers import clamped

MAX_RANKS = 4096
"""How many heartbeats are read; a node has a few hundred ranks at most."""

_LEFT_BEHIND_S = 3600.0
_OWN_FOLDER = re.compile(r"ckptctl-([0-9]{1,10})-([0-9]{1,20})-[a-z0-9_]{8}")
_IN_MEMORY = "/dev/shm"  # noqa: S108  # the folder in it is made by mkdtemp


class Folder:
    """The folder of the heartbeats of one job on this node.

    `path` is empty where no folder can be made: the job then writes no heartbeats.
    """

    def __init__(self) -> None:
        self.path = ""
        _remove_left_behind()
        own = own_process()
        prefix = f"ckptctl-{own.pid}-{own.started}-"
        for parent in (_IN_MEMORY, None):
            with suppress(OSError):
                self.path = self.path or tempfile.mkdtemp(prefix=prefix, dir=parent)

    @property
    def variables(self) -> Mapping[str, str]:
        """What the environment of the job must hold."""
        return {FOLDER_VARIABLE: self.path} if self.path else {}

    def clear(self) -> None:
        """Remove all that an earlier attempt left, also a section that it had begun."""
        self.mend()
        for path in self._paths():
            with suppress(OSError):
                os.unlink(path)

    def mend(self) -> bool:
        """Make the folder again if it is gone; whether it was.

        systemd removes what a user has in /dev/shm when the user logs out (`RemoveIPC`).
        """
        if not self.path or os.path.isdir(self.path):
            return False
        with suppress(OSError):
            os.mkdir(self.path, 0o700)
        return True

    def _paths(self) -> list[str]:
        try:
            return sorted(entry.path for entry in os.scandir(self.path))
        except OSError:
            return []

    def read(self) -> dict[int, Heartbeat]:
        """The heartbeats by rank, in their order; a file that is no heartbeat is passed over."""
        names = ((rank_in(os.path.basename(path)), path) for path in self._paths())
        paths = sorted((rank, path) for rank, path in names if rank is not None)
        found = {}
        for rank, path in paths[:MAX_RANKS]:
            with suppress(OSError, OwnFileUnreadable), open(path, "rb") as file:
                beat = read_heartbeat(file.read(MAX_BYTES + 1))
                if beat["rank"] == rank:
                    found[rank] = beat
        return found

    def remove(self) -> None:
        """Remove the folder, at the end of the run."""
        if self.path:
            shutil.rmtree(self.path, ignore_errors=True)


def _remove_left_behind() -> None:
    """Remove the folders of supervisors that were killed.

    A folder is named after the process that made it. Containers can share the memory and not the
    processes, so a folder is removed only an hour after anything was written into it.
    """
    for parent in (_IN_MEMORY, tempfile.gettempdir()):
        with suppress(OSError):
            for entry in os.scandir(parent):
                match = _OWN_FOLDER.fullmatch(entry.name)
                if match is None or not entry.is_dir(follow_symlinks=False):
                    continue
                about = entry.stat(follow_symlinks=False)
                is_old = time.time() - about.st_mtime > _LEFT_BEHIND_S
                maker = Process(clamped(match[1]), clamped(match[2]))
                if about.st_uid == os.geteuid() and is_old and not is_alive(maker):
                    shutil.rmtree(entry.path, ignore_errors=True)


def process_of(beat: Heartbeat) -> Process:
    """The process that wrote a heartbeat, as it names itself."""
    return Process(beat["pid"], beat["started"])


def beats_of_launched(processes: Iterable[Process]) -> dict[int, Heartbeat]:
    """What a job without heartbeats shows: the rank that its launcher gave to each process.

    Of a rank and what it has started the oldest process is the rank.
    """
    found: dict[int, Heartbeat] = {}
    for process in sorted(processes, key=lambda each: (each.started, each.pid)):
        pairs = (each.partition(b"=") for each in environment_of(process.pid))
        about = cluster_context({os.fsdecode(name): os.fsdecode(v) for name, _, v in pairs})
        if about.rank is not None and about.rank not in found:
            found[about.rank] = first_heartbeat(about.rank, process, about)
    return found


# Step times

WINDOW_S = 60.0
"""Source: `report_time_interval` of the straggler detector of NVRx."""

MIN_STEPS = 5
"""Fewer steps in a window show nothing."""

_MOST_NAMED = 8
"""Of one attempt in the state: it holds a thousand attempts."""


class StepTimes:
    """The step times of the ranks in one attempt after the other."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the attempt before."""
        self._counted: dict[int, tuple[int, int, int]] = {}
        self._present: dict[int, float] = {}
        self._best: dict[int, float] = {}
        self._nodes: dict[int, str] = {}
        self._next_s = float("-inf")

    def take(self, beats: Mapping[int, Heartbeat], now_s: float) -> None:
        """Take the counts of the ranks, and close the window where it is over."""
        if now_s >= self._next_s:
            self.close(beats)
            self._next_s = now_s + WINDOW_S

    def close(self, beats: Mapping[int, Heartbeat]) -> None:
        """Close the window; every rank in it is compared over the same time."""
        for rank, beat in beats.items():
            steps, work_ms = beat.get("steps", 0), beat.get("work_ms", 0)
            pid, steps_before, ms_before = self._counted.get(rank, (beat["pid"], 0, 0))
            if pid != beat["pid"]:
                steps_before = ms_before = 0
            n_steps, ms = steps - steps_before, work_ms - ms_before
            if n_steps >= MIN_STEPS and ms > 0:
                time_ms = ms / n_steps
                self._present[rank] = time_ms
                self._best[rank] = min(time_ms, self._best.get(rank, time_ms))
                self._nodes[rank] = beat["node"]
                self._counted[rank] = beat["pid"], steps, work_ms
            elif rank not in self._counted or pid != beat["pid"]:
                self._counted[rank] = beat["pid"], 0, 0

    def slow(self) -> tuple[SlowRank, ...]:
        """The ranks that were slow when the last windows were closed."""
        return slow_among(self._present, self._best, self._nodes, "heartbeats")

    def documents(self) -> list[SlowRankDocument]:
        """The slow ranks as the state keeps them."""
        return [
            {
                "rank": each.rank or 0,
                "node": each.node,
                "relative_percent": _percent(each.relative),
                "individual_percent": _percent(each.individual),
            }
            for each in self.slow()[:_MOST_NAMED]
        ]


def _percent(score: float | None) -> int | None:
    return None if score is None else int(100 * score)

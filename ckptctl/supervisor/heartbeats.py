"""The folder of heartbeats that `ckptctl run` gives an attempt of its job, and what is in it.

The folder is in memory of this node where the system has that, and only this user can enter
it. It is held by its descriptor: what takes its name is not read, and nothing in it is removed.
Ranks on other nodes of a SLURM job make the same folder there, for what collects their stacks.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from ckptctl.distributed.launcher import cluster_context
from ckptctl.distributed.process_table import Process, environment_of, is_alive, own_process
from ckptctl.errors import OwnFileUnreadable, StorageError
from ckptctl.formats.own.heartbeats import (
    FOLDER_VARIABLE,
    KEY_VARIABLE,
    MAX_BYTES,
    Heartbeat,
    first_heartbeat,
    new_key,
    rank_in,
    read_heartbeat,
)
from ckptctl.outside_numbers import clamped
from ckptctl.storage.shared_places import (
    HeldFolder,
    make_private_folder,
    new_private_folder,
    open_private_folder,
)

MAX_RANKS = 4096
"""How many heartbeats are read; a node has a few hundred ranks at most."""

_LEFT_BEHIND_S = 3600.0
_OWN_FOLDER = re.compile(r"ckptctl-([0-9]{1,10})-([0-9]{1,20})-[a-z0-9_]{8}")
_IN_MEMORY = "/dev/shm"  # noqa: S108  # the folder in it is made by mkdtemp


class Folder:
    """The folder of the heartbeats of one attempt after the other on this node.

    `held` is None where there is none: the job then writes no heartbeats. `set_aside` are the
    reasons why files were not read, by name.
    """

    def __init__(self) -> None:
        self.held: HeldFolder | None = None
        self.set_aside: dict[str, str] = {}
        self._path = ""
        self._key = ""
        _remove_left_behind()

    def begin(self) -> Mapping[str, str]:
        """Make a new folder and a new key for an attempt; what its environment must hold."""
        self.remove()
        self.set_aside.clear()
        own = own_process()
        with suppress(OSError, StorageError):
            prefix = f"ckptctl-{own.pid}-{own.started}-"
            self.held = new_private_folder(prefix, (_IN_MEMORY, None))
            self._path = self.held.path
        self._key = new_key() if self.held is not None else ""
        # Empty values also hide those of a job around this one.
        return {FOLDER_VARIABLE: self._path, KEY_VARIABLE: self._key}

    def mend(self) -> bool:
        """Make the folder again if it is gone; whether heartbeats may be missing for that.

        systemd removes what a user has in /dev/shm when the user logs out (`RemoveIPC`). Where
        another user has taken the name meanwhile, there are no heartbeats until the next attempt.
        """
        if not self._path or (self.held is not None and self.held.is_there()):
            return False
        if self.held is not None:
            self.held.close()
            self.held = None
        try:
            self.held = make_private_folder(self._path)
        except FileExistsError:
            with suppress(OSError):
                uid = os.lstat(self._path).st_uid
                self.set_aside[""] = (
                    f"{self._path} was removed, and uid {uid} put something else there; "
                    "heartbeats are not read until the next attempt"
                )
        except (OSError, StorageError):
            pass
        return True

    def read(self) -> dict[int, Heartbeat]:
        """The heartbeats by rank, in their order; what is none is named in `set_aside`."""
        return {} if self.held is None else read_beats(self.held, self._key, self.set_aside)

    def remove(self) -> None:
        """Remove the folder, at the end of an attempt and of the run."""
        if self.held is not None:
            self.held.remove()
        self.held, self._path = None, ""


def read_beats(folder: HeldFolder, key: str, set_aside: dict[str, str]) -> dict[int, Heartbeat]:
    """The heartbeats in a folder by rank, in their order; adds why others are none."""
    names: list[str] = []
    with suppress(OSError):
        names = folder.names()
    ranks = sorted((rank, name) for name in names if (rank := rank_in(name)) is not None)
    beats = {}
    for rank, name in ranks[:MAX_RANKS]:
        try:
            beat = read_heartbeat(folder.read(name, MAX_BYTES + 1), key)
        except FileNotFoundError:
            continue
        except OSError as error:
            set_aside[name] = f"{folder.path_of(name)}: {error.strerror}"
        except StorageError as error:
            set_aside[name] = error.message
        except OwnFileUnreadable as error:
            set_aside[name] = f"{folder.path_of(name)}: {error.message}"
        else:
            if beat["rank"] == rank:
                beats[rank] = beat
    return beats


def folder_on_other_node(path: str) -> HeldFolder:
    """Make the folder that `run` has made on its own node on that of a rank, which SLURM chose.

    Nobody removes it at the end of the attempt; what earlier attempts left is removed here.
    Raises `OSError` where the path is that of no such folder.
    """
    if os.path.dirname(path) != _IN_MEMORY or not _OWN_FOLDER.fullmatch(os.path.basename(path)):
        raise FileNotFoundError(path)
    _remove_left_behind()
    with suppress(FileExistsError):  # another rank came first
        return make_private_folder(path)
    return open_private_folder(path)


def _remove_left_behind() -> None:
    """Remove the folders of supervisors that were killed.

    A folder is named after the process that made it. Containers can share the memory and not the
    processes, so a folder is removed only an hour after anything was written into it.
    """
    for parent in (_IN_MEMORY, tempfile.gettempdir()):
        with suppress(OSError), os.scandir(parent) as entries:
            for entry in entries:
                match = _OWN_FOLDER.fullmatch(entry.name)
                if match is None or not entry.is_dir(follow_symlinks=False):
                    continue
                about = entry.stat(follow_symlinks=False)
                is_old = time.time() - about.st_mtime > _LEFT_BEHIND_S
                maker = Process(clamped(match[1]), clamped(match[2]))
                if about.st_uid == os.geteuid() and is_old and not is_alive(maker):
                    with suppress(OSError, StorageError):
                        open_private_folder(entry.path).remove()


def process_of(beat: Heartbeat) -> Process:
    """The process that wrote a heartbeat, as it names itself."""
    return Process(beat["pid"], beat["started"])


def beats_of_launched(processes: Iterable[Process]) -> dict[int, Heartbeat]:
    """What a job without heartbeats shows: the rank that its launcher gave to each process.

    Of a rank and what it has started the oldest process is the rank.
    """
    about_all = []
    for process in sorted(processes, key=lambda each: (each.started, each.pid)):
        pairs = (each.partition(b"=") for each in environment_of(process.pid))
        about = cluster_context({os.fsdecode(name): os.fsdecode(v) for name, _, v in pairs})
        about_all.append((process, about))
    # The task of srun that starts a torchrun has a number of its own, and is no rank.
    by_torchrun = any(about.launcher == "torchrun" for _, about in about_all)
    found: dict[int, Heartbeat] = {}
    for process, about in about_all:
        is_agent = by_torchrun and about.launcher != "torchrun"
        if about.rank is not None and about.rank not in found and not is_agent:
            found[about.rank] = first_heartbeat(about.rank, process, about)
    return found

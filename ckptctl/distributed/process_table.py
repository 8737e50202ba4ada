"""Read the process table of this machine.

A process is known by its pid and its start time together: the kernel gives a pid again.
Source: proc(5). Without /proc the table is empty.
"""

import os
from typing import NamedTuple

ENDED = "ZX"
"""The states of a process that has ended."""


class Process(NamedTuple):
    """A process: `started` is in clock ticks since the machine booted."""

    pid: int
    started: int


class ProcessEntry(NamedTuple):
    """One process of the process table."""

    process: Process
    state: str
    parent: int
    session: int


def table() -> dict[int, ProcessEntry]:
    """Every process that /proc shows, by its pid."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return {}
    entries = (entry_of(int(name)) for name in names if name.isdecimal())
    return {each.process.pid: each for each in entries if each is not None}


def entry_of(pid: int) -> ProcessEntry | None:
    """The process with a pid; None where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in brackets, can hold spaces and brackets.
            fields = file.read().rpartition(b")")[2].split()
        return ProcessEntry(
            Process(pid, int(fields[19])), fields[0].decode("ascii"), int(fields[1]), int(fields[3])
        )
    except (OSError, ValueError, IndexError):
        return None


def own_process() -> Process:
    """The process that calls; its start time is 0 without /proc."""
    entry = entry_of(os.getpid())
    return entry.process if entry else Process(os.getpid(), 0)


def is_alive(process: Process) -> bool:
    """Whether the process runs on this machine, and is not another with the same pid."""
    entry = entry_of(process.pid)
    return entry is not None and entry.process == process and entry.state not in ENDED


def state_of(process: Process) -> str:
    """The state of the main thread; empty where it cannot be read."""
    entry = entry_of(process.pid)
    return entry.state if entry else ""


def environment_of(pid: int) -> list[bytes]:
    """`NAME=VALUE` as the process was started with; empty where it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def signals_of(pid: int, *sets: str) -> int:
    """The signals in any of the sets `SigBlk`, `SigIgn`, `SigCgt`; bit n - 1 is signal n.

    Raises `OSError` where they cannot be read.
    """
    mask = 0
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            mask |= int(value, 16) if name in sets else 0
    return mask


def machine() -> str:
    """The name of this boot of this machine, and of the pid namespace; empty without /proc.

    Two processes with the same value see each other's pids. A host name would not do: a
    replaced pod has the name of the old one, on another machine.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""

"""Collect what shows why ranks of this node do not go on, before they are ended.

For each rank: the state of its process, and the stacks of its threads, twice, by py-spy where
it is installed and may read the process, else by the signal that `ckptctl.train` has set a
handler for. Of the processes that a rank has started (workers of a data loader): state, what they
wait in, and stacks. Besides, the dumps of torch's flight recorder. `naming` decides what they mean.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from ckptctl.borders import Unknown, guarded
from ckptctl.data_classes import dataclass
from ckptctl.distributed.commands import run_bounded
from ckptctl.distributed.process_table import Process, entry_of, is_alive, signals_of, state_of
from ckptctl.failures.rank_dumps import MAX_BYTES as MAX_DUMP_BYTES
from ckptctl.failures.rank_dumps import PREFIX_VARIABLES, Dump, NotADump, read_dump
from ckptctl.formats.own.heartbeats import Heartbeat, stacks_name
from ckptctl.outside_numbers import clamped

SAMPLES = 4
BETWEEN_S = 1.0
"""How many samples of a process are taken, and the time between: work changes its stack."""

_WORKING = 0.05
"""The share of a processor that shows work. Source: DLRover takes less for a hang."""

_KEPT = ("stacks-rank-", "processes-rank-", "flight-recorder-rank-")
_ANSWER_S = 5.0
"""How long stacks are waited for; faulthandler writes them in milliseconds."""
_STARVED_S = 30.0
"""How long they are waited for while the process waits for a processor: its silence shows that the
node is busy, and nothing about the rank."""
_PY_SPY_S = 15.0
_POLL_S = 0.1
_MAX_STACKS_BYTES = 1 << 20
_AT_ONCE = 16
_DEEPEST = 64
"""How many parents of a process are followed: the table changes while it is read."""
_MOST_STARTED = 16
"""Of how many processes that a rank has started the state is kept, and the stacks, one after the
other."""
_STARTED_S = 30.0
"""After this time no further one is asked for its stacks: the job still holds its nodes."""

STUCK = {
    "T": "was stopped (process state T)",
    "D": "waits in the kernel for a device or a storage (process state D)",
}
"""The states of a process that does not go on by itself, by proc(5), and what they mean."""

MAX_DUMPS_BYTES = 1 << 30
"""How many bytes of dumps are kept of one hang: a folder for temporary files may be small."""

_DUMP_PREFIX = "/tmp/nccl_trace_rank_"  # noqa: S108  # only read
"""Where torch writes the dumps without these variables. Source: torch 2.13,
`torch/csrc/distributed/c10d/FlightRecorderDetail.hpp`."""


class Frame(NamedTuple):
    """One call on a stack."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


Stack = tuple[Frame, ...]
"""The calls of the main thread, the innermost first."""


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """What was found about one rank of this node.

    `state` is the state of its main thread that all samples had, by proc(5): `T` for stopped, `D`
    for waiting in the kernel; empty where it changed, or where the process is gone. `stack` is
    that of the main thread, None where no sample has one. `asked` means that the process has a
    handler which was called. `moves` means that its stack changed between the samples. `stuck`
    names the processes that it has started and that do not go on, with their states.
    """

    rank: int
    node: str
    alive: bool = True
    state: str = ""
    stack: Stack | None = None
    asked: bool = False
    moves: bool = False
    stuck: tuple[str, ...] = ()


class HangEvidence(NamedTuple):
    """What was found on this node, and the files in which it was kept.

    `works` means that processes which ranks have started were busy meanwhile: an evaluation in a
    process of its own.
    """

    ranks: tuple[RankEvidence, ...]
    dumps: tuple[Dump, ...]
    files: tuple[str, ...]
    works: bool


class _Sample(NamedTuple):
    state: str
    stack: Stack | None
    asked: bool


def collect(
    beats: Mapping[int, Heartbeat],
    processes: Callable[[], Iterable[Process]],
    folder: str,
    out: str,
    since_s: float,
    *,
    of_save: bool = False,
) -> HangEvidence:
    """Collect evidence of all ranks; the files lie in the folder `out`.

    `processes` finds those of the job: others are neither signalled nor read, whatever a
    heartbeat names. `folder` holds the heartbeats and the stacks. Dumps of the flight recorder
    that are older than `since_s` (seconds since 1970) belong to earlier attempts. With `of_save`
    the stacks are those of the thread of an asynchronous save. Takes some seconds, and at most
    about a minute and a half; up to three minutes on a node without a free processor.
    """
    found = set(processes())
    own = {rank: Process(beat["pid"], beat["started"]) for rank, beat in beats.items()}
    alive = {rank: process for rank, process in own.items() if process in found}
    helpers = _started_by(found, alive)
    before = {each: (_wanted_s(each), state_of(each)) for each in helpers}
    began_s = time.monotonic()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        pending = {
            rank: pool.submit(_samples, beats[rank], process, folder, out, of_save)
            for rank, process in alive.items()
        }
        samples = {rank: each.result() for rank, each in pending.items()}
    took_s = time.monotonic() - began_s
    wanted_s, stuck = 0.0, defaultdict[int, list[str]](list)
    for each, rank in helpers.items():
        began, state = before[each]
        wanted_s += max(0.0, _wanted_s(each) - began)
        if state in STUCK and state_of(each) == state:
            stuck[rank].append(f"{_name_of(each)}, which it started, {STUCK[state]}")
    started = {rank: [each for each, of in helpers.items() if of == rank] for rank in alive}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        [*pool.map(lambda rank: _keep_started(beats[rank], started[rank], folder, out), alive)]
    dumps = _dumps(out, since_s)
    return HangEvidence(
        tuple(
            _evidence(rank, beat["node"], samples.get(rank, ()), stuck[rank])
            for rank, beat in beats.items()
        ),
        dumps,
        tuple(sorted(entry.path for entry in os.scandir(out) if entry.name.startswith(_KEPT))),
        wanted_s >= _WORKING * took_s,
    )


def _evidence(
    rank: int, node: str, samples: Sequence[_Sample], stuck: Sequence[str]
) -> RankEvidence:
    if not samples:
        return RankEvidence(rank, node, alive=False)
    states = {sample.state for sample in samples}
    stacks = [sample.stack for sample in samples if sample.stack is not None]
    return RankEvidence(
        rank,
        node,
        state=states.pop() if len(states) == 1 else "",
        stack=stacks[-1] if stacks else None,
        asked=any(sample.asked for sample in samples),
        moves=len({*stacks}) > 1,
        stuck=tuple(stuck),
    )


# Processes that ranks have started


def _started_by(found: Collection[Process], ranks: Mapping[int, Process]) -> dict[Process, int]:
    """The processes that a rank has started, itself or through others, each with that rank."""
    parents = {each.pid: entry.parent for each in found if (entry := entry_of(each.pid))}
    rank_of = {process.pid: rank for rank, process in ranks.items()}
    started = {}
    for process in found:
        pid = process.pid
        for _ in range(0 if pid in rank_of else _DEEPEST):
            pid = parents.get(pid, 0)
            if pid in rank_of:
                started[process] = rank_of[pid]
                break
    return started


def _wanted_s(process: Process) -> float:
    """The processor time, in seconds, that a process used or waited for; 0 where it is gone.

    With what it waited for, a process that works is seen on a busy machine, too.
    Source: `schedstat` of the Linux kernel's `Documentation/scheduler/sched-stats.rst`.
    """
    total_ns = 0
    folder = f"/proc/{process.pid}/task"
    threads: list[str] = []
    with suppress(OSError):
        threads = os.listdir(folder)
    for thread in threads:
        # One that has just ended must not hide the others: they would seem to work later.
        with suppress(OSError, ValueError), open(f"{folder}/{thread}/schedstat", "rb") as file:
            used_ns, waited_ns, *_ = file.read().split()
            total_ns += clamped(used_ns) + clamped(waited_ns)
    return total_ns / 1e9


def _name_of(process: Process) -> str:
    """A process by its number and the name that it gave itself, such as `pt_data_worker`."""
    name = _about(process, "comm")
    return f"process {process.pid} ({name})" if name else f"process {process.pid}"


def _about(process: Process, file: str) -> str:
    """A short file of a process in /proc as text; empty where it cannot be read."""
    try:
        with open(f"/proc/{process.pid}/{file}", encoding="utf-8", errors="replace") as about:
            return about.read(4096).strip()
    except OSError:
        return ""


def _keep_started(beat: Heartbeat, started: Sequence[Process], folder: str, out: str) -> None:
    """Write state, wait and stacks of what a rank has started into a file of the rank."""
    stacks = os.path.join(folder, stacks_name(beat["rank"]))
    lines, until_s = list[str](), time.monotonic() + _STARTED_S
    for process in started[:_MOST_STARTED]:
        state, wait = state_of(process), _about(process, "wchan")
        waits = f", waits in {wait}" if wait not in ("", "0") else ""
        lines.append(f"{_name_of(process)}, started by rank {beat['rank']}, state {state}{waits}")
        # One in such a state does not answer, and py-spy would wait for it.
        if state in STUCK or time.monotonic() > until_s:
            continue
        text = _by_py_spy(process)
        if not text and beat["stack_signal"] is not None and _has_open(process, stacks):
            text = _by_signal(beat["stack_signal"], process, stacks)
        lines.append(text)
    if lines:
        kept = os.path.join(out, f"processes-rank-{beat['rank']}.txt")
        with suppress(OSError), open(kept, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


def _has_open(process: Process, path: str) -> bool:
    """Whether a process has a file open: a fork of a rank has the file of its stacks."""
    folder = f"/proc/{process.pid}/fd"
    with suppress(OSError):
        return any(os.path.samefile(f"{folder}/{each}", path) for each in os.listdir(folder))
    return False


# Stacks


def _samples(
    beat: Heartbeat, process: Process, folder: str, out: str, of_save: bool
) -> list[_Sample]:
    """What several samples at one rank show; fewer where it does not answer."""
    found: list[_Sample] = []
    for n in range(SAMPLES):
        if n:
            time.sleep(BETWEEN_S)
        found.append(_sample(beat, process, folder, out, of_save))
        if found[-1].asked and found[-1].stack is None and not of_save:
            break  # it does not answer; each further sample would wait as long
    return found


def _sample(beat: Heartbeat, process: Process, folder: str, out: str, of_save: bool) -> _Sample:
    state = state_of(process)
    # A stopped process does not answer, and py-spy would wait for it.
    if state == "T":
        return _Sample(state, None, asked=False)
    kept = os.path.join(out, f"stacks-rank-{beat['rank']}.txt")
    text = _by_py_spy(process)
    stack = stack_in(text, of_save=of_save)
    asked = False
    if stack is None and beat["stack_signal"] is not None:
        asked = True
        text = _by_signal(
            beat["stack_signal"], process, os.path.join(folder, stacks_name(beat["rank"]))
        )
        stack = stack_in(text, of_save=of_save)
    if text:
        with suppress(OSError), open(kept, "a", encoding="utf-8") as file:
            file.write(f"rank {beat['rank']}, process {process.pid}, state {state}\n{text}\n")
    return _Sample(state, stack, asked)


def _by_py_spy(process: Process) -> str:
    """The stacks as py-spy prints them; empty where it is not installed or may not read them."""
    program = shutil.which("py-spy")
    if program is None or not is_alive(process):
        return ""
    try:
        done = run_bounded([program, "dump", "--pid", str(process.pid)], _PY_SPY_S)
    except OSError:
        return ""
    return done.stdout[:_MAX_STACKS_BYTES]


def _by_signal(number: int, process: Process, path: str) -> str:
    """What the process adds to the file when it gets the signal; empty without an answer."""
    try:
        begin = os.path.getsize(path)
        fd = os.pidfd_open(process.pid)
        try:
            # Without its handler the signal would end the process.
            if is_alive(process) and signals_of(process.pid, "SigCgt") >> (number - 1) & 1:
                signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)
        size, asked_s = begin, time.monotonic()
        while (waited_s := time.monotonic() - asked_s) < _STARVED_S:
            if waited_s >= _ANSWER_S and state_of(process) != "R":
                break
            time.sleep(_POLL_S)
            before, size = size, os.path.getsize(path)
            if size == before > begin:
                break
        with open(path, "rb") as file:
            file.seek(begin)
            return file.read(_MAX_STACKS_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


# A thread, and a call, as py-spy 0.4 and as faulthandler of Python 3.9 to 3.15 print them.
_THREADS = (
    re.compile(r'Thread \S{1,40} \([^)]{0,40}\)(?:: "(?P<main>MainThread)?.{0,200}")?'),
    re.compile(r"(?:(?P<main>Current thread)|Thread) 0x.{1,120}\(most recent call first\):"),
)
_FRAMES = (
    re.compile(r"\s+(?P<function>.{1,500}) \((?P<file>.{1,500}):(?P<line>\d{1,9})\)"),
    re.compile(r'  File "(?P<file>.{1,600})", line (?P<line>\d{1,9}) in (?P<function>.{1,600})'),
)
_OF_SAVE = "ckptctl/train/saving.py"


def stack_in(text: str, *, of_save: bool = False) -> Stack | None:
    """The stack of the main thread, or of the asynchronous save; None where it is not there.

    `text` is what py-spy or faulthandler wrote. The kernel gives a signal to the main thread of
    a process if that does not block it: the current thread of faulthandler is the main one.
    """
    threads: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        if thread := _match(_THREADS, line):
            threads.append((thread["main"] is not None, []))
        elif threads and (frame := _match(_FRAMES, line)):
            threads[-1][1].append(Frame(frame["function"], frame["file"], clamped(frame["line"])))
    for is_main, frames in threads:
        saves = any(frame.file.endswith(_OF_SAVE) for frame in frames)
        if frames and (saves and not is_main if of_save else is_main):
            return tuple(frames)
    return None


def _match(patterns: Iterable[re.Pattern[str]], line: str) -> re.Match[str] | None:
    return next(filter(None, (each.fullmatch(line) for each in patterns)), None)


# Dumps of the flight recorder


def _dumps(out: str, since_s: float) -> tuple[Dump, ...]:
    """Copy the dumps of this attempt, and read them."""
    given = (os.environ.get(name) for name in PREFIX_VARIABLES)
    prefix = next(filter(None, given), _DUMP_PREFIX)
    found, left = list[Dump](), MAX_DUMPS_BYTES
    with suppress(OSError):
        for entry in os.scandir(os.path.dirname(prefix) or "."):
            name = entry.name.removeprefix(os.path.basename(prefix))
            if name == entry.name or not name.isdecimal():
                continue
            with suppress(OSError, NotADump):
                data = _dump_bytes(entry.path, since_s, min(left, MAX_DUMP_BYTES))
                left -= len(data)
                kept = os.path.join(out, f"flight-recorder-rank-{name}")
                with open(kept, "wb") as file:
                    file.write(data)
                dump = guarded(f"reading {kept}", partial(read_dump, kept, data), raises=NotADump)
                found += [] if isinstance(dump, Unknown) else [dump]
    return tuple(found)


def _dump_bytes(path: str, since_s: float, limit: int) -> bytes:
    """The bytes of a dump of this attempt; raises `NotADump` for anything else.

    Everybody can create files in a folder for temporary files: a link may lead to a file that
    only this user can read, and a pipe or a device has no end.
    """
    with open(path, "rb", opener=_no_link) as file:
        about = os.fstat(file.fileno())
        if stat.S_ISREG(about.st_mode) and about.st_mtime >= since_s and about.st_size <= limit:
            return file.read(about.st_size)
    raise NotADump(path)


def _no_link(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a pipe waits for its writer.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

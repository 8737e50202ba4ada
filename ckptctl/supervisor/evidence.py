"""Collect what shows why ranks do not go on, before they are ended.

For each rank of this node: the state of its process, and the stacks of its threads, twice, by
py-spy where it is installed and may read the process, else by the signal that `ckptctl.train` has
set a handler for. Of the processes that a rank has started (workers of a data loader): state, what
they wait in, and stacks. Besides, the dumps of torch's flight recorder. `hangs` decides what they
mean. Dumps lie where others may write: those of a user who does not run the job are set aside.

`ckptctl run` in a batch script sees the processes of its own node. SLURM starts this module once
on each of the others (`srun --overlap`); it finds the processes of the job there by their marker,
collects the same, and prints it as one line. A node that does not answer leaves its ranks unseen:
then nobody is named for what they may have done.

Source: measured with Slurm 22.05: a step with `--overlap` starts beside one that has all
processors of the node, and `--nodelist` alone would still start SLURM_NTASKS tasks.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import BinaryIO, NamedTuple, TypedDict

import ckptctl
from ckptctl.distributed.commands import run_bounded
from ckptctl.distributed.launcher import cluster_context, expand
from ckptctl.distributed.process_table import Process, entry_of, is_alive, signals_of, state_of
from ckptctl.errors import OwnFileUnreadable, StorageError, Unknown, guarded
from ckptctl.failures.rank_dumps import (
    MAIN_THREAD,
    PREFIX_VARIABLES,
    Dump,
    Frame,
    NotADump,
    StackReader,
    read_dump,
)
from ckptctl.failures.rank_dumps import MAX_BYTES as MAX_DUMP_BYTES
from ckptctl.formats.own.files import as_fields, parsed, typed
from ckptctl.formats.own.heartbeats import FOLDER_VARIABLE, KEY_VARIABLE, Heartbeat, stacks_name
from ckptctl.outside_numbers import clamped
from ckptctl.redaction import redacted
from ckptctl.starting import find_program, python_command
from ckptctl.storage.shared_places import (
    HeldFolder,
    distrusted,
    new_private_folder,
    open_folder,
    open_private_folder,
    sole_writer,
    trusted_users,
)
from ckptctl.supervisor.heartbeats import beats_of_launched, read_beats
from ckptctl.supervisor.processes import MARKER, marked
from ckptctl.supervisor.slurm import ask

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


Stack = tuple[Frame, ...]
"""The calls of the main thread, the innermost first."""


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """What was found about one rank of this node.

    `state` is the state of its main thread that all samples had, by proc(5): `T` for stopped, `D`
    for waiting in the kernel; empty where it changed, or where the process is gone. `stack` is
    that of the main thread, None where no sample has one. `asked` means that the process has a
    handler which was called. `moves` means that its stack changed between the samples. `stuck`
    names the processes that it has started and that do not go on, with their states. `wait` is
    the function of the kernel in which it waits, where its state is `D`.
    """

    rank: int
    node: str
    alive: bool = True
    state: str = ""
    stack: Stack | None = None
    asked: bool = False
    moves: bool = False
    stuck: tuple[str, ...] = ()
    wait: str = ""


class HangEvidence(NamedTuple):
    """What was found, on this node or on all, and the files in which it was kept.

    `works` means that processes which ranks have started were busy meanwhile: an evaluation in a
    process of its own. `set_aside` are the reasons why something that was found is no evidence.
    """

    ranks: tuple[RankEvidence, ...]
    dumps: tuple[Dump, ...]
    files: tuple[str, ...]
    works: bool
    set_aside: tuple[str, ...] = ()
    seen: frozenset[int] = frozenset()
    """The ranks of which anything is known."""
    world_size: int | None = None
    """The ranks of the job; None where nothing states it."""

    @property
    def unseen(self) -> int | None:
        """Of how many ranks of the job nothing is known; None where their number is unknown."""
        return None if self.world_size is None else max(0, self.world_size - len(self.seen))

    @property
    def document(self) -> NodeDocument:
        """What another node gets of it."""
        return {"works": self.works, "ranks": [*self.ranks], "world_size": self.world_size}


class _ProcessSample(NamedTuple):
    state: str
    stack: Stack | None
    asked: bool
    wait: str = ""


def collect(
    beats: Mapping[int, Heartbeat],
    processes: Callable[[], Iterable[Process]],
    folder: HeldFolder | None,
    out: HeldFolder,
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
    dumps, set_aside = _dumps(out, since_s, _users_of(found))
    return HangEvidence(
        tuple(
            _evidence(rank, beat["node"], samples.get(rank, ()), stuck[rank])
            for rank, beat in beats.items()
        ),
        dumps,
        tuple(kept_in(out)),
        wanted_s >= _WORKING * took_s,
        set_aside,
    )


def world_size_of(beats: Mapping[int, Heartbeat]) -> int | None:
    """The ranks of the whole job, as its ranks state it; None where none does."""
    sizes = (beat["world_size"] for beat in beats.values())
    return max((size for size in sizes if size is not None), default=None)


def kept_in(out: HeldFolder) -> Iterator[str]:
    """The files of evidence that this user has written into a folder."""
    for name in out.names():
        with suppress(OSError):
            if name.startswith(_KEPT) and out.about_file(name).st_uid in trusted_users():
                yield out.path_of(name)


def keep(out: HeldFolder, name: str, text: str) -> None:
    """Add text to a file of evidence, as far as that is possible."""
    with suppress(OSError, StorageError), os.fdopen(out.append(name), "ab") as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def _users_of(processes: Iterable[Process]) -> frozenset[int]:
    """The users of the job: root may start it as another one.

    Only processes below this one count; anybody can copy the environment of the job.
    """
    users: set[int] = set()
    for process in processes if os.geteuid() == 0 else ():
        pid = process.pid
        for _ in range(_DEEPEST):
            entry = entry_of(pid)
            if entry is None or pid == os.getpid():
                break
            pid = entry.parent
        if pid == os.getpid():
            with suppress(OSError):
                users.add(os.stat(f"/proc/{process.pid}").st_uid)
    return frozenset(users)


def _evidence(
    rank: int, node: str, samples: Sequence[_ProcessSample], stuck: Sequence[str]
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
        wait=samples[-1].wait,
    )


# Processes that ranks have started


def _started_by(found: Collection[Process], ranks: Mapping[int, Process]) -> dict[Process, int]:
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
    name = _about(process, "comm")
    return f"process {process.pid} ({name})" if name else f"process {process.pid}"


def _about(process: Process, file: str) -> str:
    try:
        with open(f"/proc/{process.pid}/{file}", encoding="utf-8", errors="replace") as about:
            return about.read(4096).strip()
    except OSError:
        return ""


def _keep_started(
    beat: Heartbeat, started: Sequence[Process], folder: HeldFolder | None, out: HeldFolder
) -> None:
    stacks = stacks_name(beat["rank"])
    lines, until_s = list[str](), time.monotonic() + _STARTED_S
    for process in started[:_MOST_STARTED]:
        state, wait = state_of(process), _about(process, "wchan")
        waits = f", waits in {wait}" if wait not in ("", "0") else ""
        lines.append(f"{_name_of(process)}, started by rank {beat['rank']}, state {state}{waits}")
        # One in such a state does not answer, and py-spy would wait for it.
        if state in STUCK or time.monotonic() > until_s:
            continue
        text = _by_py_spy(process)
        number = beat["stack_signal"]
        if not text and number is not None and _has_open(process, folder, stacks):
            text = _by_signal(number, process, folder, stacks)
        lines.append(text)
    if lines:
        text = "\n".join(lines) + "\n"
        with suppress(OSError, StorageError):
            content = text.encode("utf-8", "backslashreplace")
            out.write(f"processes-rank-{beat['rank']}.txt", content, 0o644)


def _has_open(process: Process, folder: HeldFolder | None, name: str) -> bool:
    """Whether a process has a file open: a fork of a rank has the file of its stacks."""
    descriptors = f"/proc/{process.pid}/fd"
    with suppress(OSError):
        if folder is not None:
            about = folder.about_file(name)
            found = (os.stat(f"{descriptors}/{each}") for each in os.listdir(descriptors))
            return any(os.path.samestat(each, about) for each in found)
    return False


# Stacks


def _samples(
    beat: Heartbeat, process: Process, folder: HeldFolder | None, out: HeldFolder, of_save: bool
) -> list[_ProcessSample]:
    """What several samples at one rank show; fewer where it does not answer."""
    found: list[_ProcessSample] = []
    for n in range(SAMPLES):
        if n:
            time.sleep(BETWEEN_S)
        found.append(_sample(beat, process, folder, out, of_save))
        if found[-1].asked and found[-1].stack is None and not of_save:
            break  # it does not answer; each further sample would wait as long
    return found


def _sample(
    beat: Heartbeat, process: Process, folder: HeldFolder | None, out: HeldFolder, of_save: bool
) -> _ProcessSample:
    state = state_of(process)
    # A stopped process does not answer, and py-spy would wait for it.
    if state == "T":
        return _ProcessSample(state, None, asked=False)
    text = _by_py_spy(process)
    stack = stack_in(text, of_save=of_save)
    asked = False
    if stack is None and beat["stack_signal"] is not None:
        asked = True
        text = _by_signal(beat["stack_signal"], process, folder, stacks_name(beat["rank"]))
        stack = stack_in(text, of_save=of_save)
    if text:
        # py-spy prints the command line of the process.
        head = f"rank {beat['rank']}, process {process.pid}, state {state}"
        keep(out, f"stacks-rank-{beat['rank']}.txt", f"{head}\n{redacted(text)}\n")
    return _ProcessSample(state, stack, asked, _about(process, "wchan") if state == "D" else "")


def _by_py_spy(process: Process) -> str:
    """The stacks as py-spy prints them; empty where it is not installed or may not read them."""
    program = find_program("py-spy")
    if program is None or not is_alive(process):
        return ""
    try:
        done = run_bounded([program, "dump", "--pid", str(process.pid)], _PY_SPY_S)
    except OSError:
        return ""
    return done.stdout[:_MAX_STACKS_BYTES]


def _by_signal(number: int, process: Process, folder: HeldFolder | None, name: str) -> str:
    if folder is None:
        return ""
    try:
        with os.fdopen(folder.open(name), "rb") as file:
            return _answer(number, process, file)
    except (OSError, StorageError):
        return ""


def _answer(number: int, process: Process, file: BinaryIO) -> str:
    begin = os.fstat(file.fileno()).st_size
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
        before, size = size, os.fstat(file.fileno()).st_size
        if size == before > begin:
            break
    file.seek(begin)
    return file.read(_MAX_STACKS_BYTES).decode("utf-8", "replace")


_OF_SAVE = "ckptctl/train/saving.py"


def stack_in(text: str, *, of_save: bool = False) -> Stack | None:
    """The stack of the main thread, or of the asynchronous save; None where it is not there.

    `text` is what py-spy or faulthandler wrote.
    """
    reader = StackReader("")
    for number, line in enumerate(text.splitlines()):
        reader.take(number, line, None)
    for thread in reader.stacks:
        saves = any(frame.file.endswith(_OF_SAVE) for frame in thread.frames)
        is_main = thread.thread == MAIN_THREAD
        if thread.frames and (saves and not is_main if of_save else is_main):
            return tuple(thread.frames)
    return None


# Dumps of the flight recorder


def _dumps(
    out: HeldFolder, since_s: float, users: Collection[int]
) -> tuple[tuple[Dump, ...], tuple[str, ...]]:
    """Copy the dumps of this attempt, and read them; and why others are no evidence."""
    given = (os.environ.get(name) for name in PREFIX_VARIABLES)
    prefix = next(filter(None, given), _DUMP_PREFIX)
    found, set_aside, left = list[Dump](), list[str](), MAX_DUMPS_BYTES
    try:
        folder = open_folder(os.path.dirname(prefix) or ".")
    except OSError:
        return (), ()
    except StorageError as error:
        return (), (error.message,)
    with folder, suppress(OSError):
        users = {*users, *sole_writer(folder.about)}
        for entry in folder.names():
            name = entry.removeprefix(os.path.basename(prefix))
            if name == entry or not name.isdecimal():
                continue
            with suppress(OSError, NotADump, StorageError):
                about = folder.about_file(entry)
                if about.st_mtime < since_s:
                    continue
                why = distrusted(folder.path_of(entry), about, users)
                if why is not None:
                    set_aside.append(why)
                    continue
                limit = min(left, MAX_DUMP_BYTES)
                data = folder.read(entry, limit + 1, users)
                if len(data) > limit:
                    continue
                left -= len(data)
                kept = f"flight-recorder-rank-{name}"
                out.write(kept, data, 0o644)
                kept_path = out.path_of(kept)
                dump = guarded(
                    f"reading {kept_path}", partial(read_dump, kept_path, data), raises=NotADump
                )
                found += [] if isinstance(dump, Unknown) else [dump]
    return tuple(found), tuple(set_aside)


_MARKER_OF_JOB = "CKPTCTL_COLLECTS"
"""The marker of the job: under its own name the collector would be one of its processes."""
_BEGIN = "ckptctl-evidence "
ANSWER_S = 180.0
"""How long the nodes are waited for: what `collect` takes at most on a busy node."""
_MAX_LINE_BYTES = 16 << 20
_DEEPEST_KEPT = 48
"""How many calls of a stack are passed on, the innermost."""


class NodeDocument(TypedDict):
    """What one other node answered."""

    works: bool
    """Processes that its ranks have started are busy."""
    ranks: list[RankEvidence]
    world_size: int | None
    """The ranks of the whole job, as its ranks state it; null where none does."""


def over_slurm() -> Callable[[Mapping[str, str], NodeDocument], list[NodeDocument]] | None:
    """What collects on the other nodes of the SLURM job around this process; None without any."""
    about = cluster_context()
    nodes = expand(about.node_list or "") if about.scheduler == "slurm" else ()
    others = [node for node in nodes if node != about.node]

    def collect_on_others(variables: Mapping[str, str], _own: NodeDocument) -> list[NodeDocument]:
        slurm = ask(others)
        up = [node for node in others if slurm is None or node not in slurm.down]
        return collect_elsewhere(_by_srun(up), variables) if up else []

    return collect_on_others if others else None


def _by_srun(nodes: Sequence[str]) -> list[str]:
    n = len(nodes)
    return [
        *("srun", "--overlap", f"--nodes={n}", f"--ntasks={n}", "--ntasks-per-node=1"),
        *("--no-kill", "--kill-on-bad-exit=0", "--cpu-bind=none", f"--nodelist={','.join(nodes)}"),
    ]


def collect_elsewhere(start: Sequence[str], variables: Mapping[str, str]) -> list[NodeDocument]:
    """What the nodes answer on which `start` starts processes; less where some do not answer.

    `variables` are those that the job got from `run`: its marker, and the folder and the key of
    the heartbeats. Takes up to three minutes.
    """
    names = {FOLDER_VARIABLE: FOLDER_VARIABLE, KEY_VARIABLE: KEY_VARIABLE, MARKER: _MARKER_OF_JOB}
    environment = {
        **os.environ,
        **{names[name]: variables[name] for name in names if name in variables},
        "PYTHONPATH": os.path.dirname(next(iter(ckptctl.__path__))),
    }
    words = [*start, *python_command("-m", __name__)]
    try:
        done = run_bounded(words, ANSWER_S, environment=environment)
    except OSError:
        return []
    return documents_in(done.stdout)


def line_of(document: NodeDocument) -> str:
    """The line that a node prints, with the innermost calls of each stack."""
    ranks = [
        replace(rank, stack=None if rank.stack is None else rank.stack[:_DEEPEST_KEPT])
        for rank in document["ranks"]
    ]
    data = zlib.compress(json.dumps({**document, "ranks": ranks}, default=as_fields).encode())
    return f"{_BEGIN}{base64.b64encode(data).decode()}\n"


def documents_in(text: str) -> list[NodeDocument]:
    """The answers among the lines that nodes printed."""
    lines = (line.partition(_BEGIN)[2] for line in text.splitlines())
    return [*filter(None, map(_document_in, filter(None, lines)))]


def _document_in(line: str) -> NodeDocument | None:
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(line), _MAX_LINE_BYTES)
        return typed(NodeDocument, parsed(data, _MAX_LINE_BYTES))
    except (ValueError, zlib.error, OwnFileUnreadable):
        return None


def main() -> None:
    """Print what is found on this node of the job that the environment names."""
    find = partial(marked, os.environ.pop(_MARKER_OF_JOB, ""))
    path, key = os.environ.pop(FOLDER_VARIABLE, ""), os.environ.pop(KEY_VARIABLE, "")
    folder = None
    with suppress(OSError, StorageError):
        folder = open_private_folder(path) if path else None
    reported = {} if folder is None else read_beats(folder, key, {})
    beats = {**beats_of_launched(find()), **reported}
    out = new_private_folder("ckptctl-node-evidence-")
    try:
        found = collect(beats, find, folder, out, time.time())
    finally:
        out.remove()
    sys.stdout.write(line_of(found._replace(world_size=world_size_of(beats)).document))


if __name__ == "__main__":
    main()

"""Measure processes and calls in turns, and describe the figures as rows.

A busy machine changes the time by the clock more than the time of the processor, and both
less than it changes their ratio to a peer in the same run. Each figure is the least of
several rounds in which all peers take their turn.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

REPOSITORY = Path(__file__).resolve().parent.parent
MIB = 1 << 20
LIMIT_ALLOWANCE = 1.15
"""How many times the limit a row may take where the limit itself exceeds the goal."""


@dataclass(frozen=True)
class Size:
    """How much is measured: `scale` 1 is the default, a smaller one is for tests."""

    scale: float = 1.0
    rounds: int = 3

    def of(self, n: int, least: int = 1) -> int:
        """A number of things at this scale."""
        return max(least, round(n * self.scale))


@dataclass(frozen=True)
class Row:
    """One figure beside that of a peer, in the same unit, and beside what it cannot go below.

    `limit` is the cost of a bare loop that makes the same reads, checksums and writes, and
    of what the caller (torch's planning, the interpreter) costs without ckptctl. `goal` is
    the largest ratio to the peer; without a peer, the largest figure.
    """

    name: str
    ours: float
    unit: str
    peer: float | None = None
    peer_name: str = ""
    limit: float | None = None
    goal: float | None = None

    @property
    def ratio(self) -> float:
        """Ours, times the peer; without a peer, the figure itself."""
        return self.ours / self.peer if self.peer else self.ours

    @property
    def allowed(self) -> float | None:
        """The goal, or the limit with its allowance where that is more."""
        if self.goal is None or self.limit is None:
            return self.goal
        return max(self.goal, LIMIT_ALLOWANCE * self.limit / (self.peer or 1))

    @property
    def verdict(self) -> str:
        """Whether the goal is met."""
        if self.allowed is None:
            return ""
        return "met" if self.ratio <= self.allowed else "missed"


@dataclass(frozen=True)
class Spent:
    """What one run of something took."""

    cpu_s: float
    clock_s: float
    peak_mib: float = 0
    printed: str = field(default="", compare=False)


Measure = Literal["cpu_s", "clock_s", "peak_mib"]
Taken = Mapping[str, Sequence[Spent]]


def least(taken: Taken, what: str, measure: Measure = "cpu_s") -> float:
    """The smallest figure of all rounds; of memory the largest."""
    figures = [getattr(spent, measure) for spent in taken[what]]
    return max(figures) if measure == "peak_mib" else min(figures)


def in_turns(
    acts: Mapping[str, Callable[[], Spent]],
    rounds: int,
    between: Callable[[], object] = lambda: None,
) -> Taken:
    """What each act took in each round; `between` is called before each, and not measured.

    Every second round runs them in the opposite order. No round but the first begins after
    the time that `limit_rounds` allows.
    """
    taken: dict[str, list[Spent]] = {what: [] for what in acts}
    for turn in range(rounds):
        if turn and time_is_up():
            break
        order = list(acts.items())
        for what, act in reversed(order) if turn % 2 else order:
            between()
            taken[what].append(act())
    return taken


_TIMES = {"end_s": float("inf")}


def limit_rounds(seconds: float) -> None:
    """Begin no further round after so many seconds."""
    _TIMES["end_s"] = time.monotonic() + seconds


def time_is_up() -> bool:
    """Whether no further round may begin."""
    return time.monotonic() > _TIMES["end_s"]


def called(act: Callable[[], object]) -> Spent:
    """What a call in this process took."""
    began_s, busy_s = time.perf_counter(), time.process_time()
    act()
    return Spent(time.process_time() - busy_s, time.perf_counter() - began_s)


@cache
def _compiled() -> tempfile.TemporaryDirectory[str]:
    """Byte code of this tree, compiled once, as that of an installed package is."""
    return tempfile.TemporaryDirectory(prefix="ckptctl-bench-bytecode-")


_MEASURE = """
import json, os, subprocess, sys, time
out = open(sys.argv[1], "wb")
began_s = time.perf_counter()
started = subprocess.Popen(sys.argv[2:], stdout=out, stderr=subprocess.STDOUT)
_, status, used = os.wait4(started.pid, 0)
clock_s = time.perf_counter() - began_s
print(json.dumps([status, used.ru_utime + used.ru_stime, clock_s, used.ru_maxrss / 1024]))
"""
"""Linux counts the memory of the process that starts another as the other's: a small one does."""


def process(command: Sequence[object], environment: Mapping[str, str] | None = None) -> Spent:
    """What a fresh process took; raises if it fails."""
    words = [str(word) for word in command]
    given = {**os.environ, **(environment or {})}
    given.pop("PYTHONDONTWRITEBYTECODE", None)
    given |= {"PYTHONPATH": str(REPOSITORY), "PYTHONPYCACHEPREFIX": _compiled().name}
    with tempfile.NamedTemporaryFile("r") as out:
        measure = [sys.executable, "-S", "-c", _MEASURE, out.name, *words]
        done = subprocess.run(measure, env=given, stdout=subprocess.PIPE, check=True)
        printed = out.read()
    status, *figures = json.loads(done.stdout)
    if code := os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{' '.join(words)} ended with {code}\n{printed}")
    return Spent(*figures, printed)


def processes(
    commands: Mapping[str, Sequence[object]],
    rounds: int,
    environment: Mapping[str, str] | None = None,
    between: Callable[[], object] = lambda: None,
) -> Taken:
    """`in_turns` for commands, after one turn that compiles and fills the page cache."""
    acts: dict[str, Callable[[], Spent]] = {
        what: lambda command=command: process(command, environment)  # type: ignore[misc]
        for what, command in commands.items()
    }
    for act in acts.values():
        between()
        act()
    return in_turns(acts, rounds, between)


def ckptctl(*arguments: object) -> list[object]:
    """The command line of ckptctl, from this tree."""
    return [sys.executable, "-P", "-m", "ckptctl", *arguments]


def python(script: str, *arguments: object) -> list[object]:
    """A fresh interpreter that runs a script."""
    return [sys.executable, "-c", script, *arguments]


def folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed afterwards, below `BENCH_DIR` where that is set."""
    return tempfile.TemporaryDirectory(prefix="ckptctl-bench-", dir=os.environ.get("BENCH_DIR"))


_BARE_BYTES = 256 << 10
"""What stays in the cache from reading it to its checksum; the fastest of 128 KiB to 1 MiB."""


def _elements_at(file: int, record: int) -> int:
    """Where the elements of a record of one tensor begin, in bytes from its beginning."""
    head = os.pread(file, 2048, record)
    header = head.rindex(b"PK\3\4", 0, head.index(b"data/0"))
    return header + 30 + sum(struct.unpack_from("<2H", head, header + 26))


def bare_reader(step: Path | str) -> Any:
    """The limit of a load: torch plans, and a bare loop reads elements to where they belong.

    It computes the CRC-32 of what it reads, in pieces that stay in the cache, and checks
    nothing else. Only for contiguous tensors of the saved dtype, and slices along the first
    dimension.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan
    from torch.futures import Future
    from zlib_ng.zlib_ng import crc32

    class Bare(dcp.FileSystemReader):  # type: ignore[misc]
        def read_data(self, plan: Any, planner: Any) -> Future[None]:
            opened: dict[str, int] = {}
            elements_at: dict[int, int] = {}  # by the length of the record
            reads = []
            entries = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
            super().read_data(LoadPlan(entries), planner)
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    continue
                info = self.storage_data[item.storage_index]
                memory = memoryview(
                    planner.resolve_tensor(item).detach().view(-1).view(torch.uint8).numpy()
                )
                if info.relative_path not in opened:
                    opened[info.relative_path] = os.open(
                        Path(step, info.relative_path), os.O_RDONLY
                    )
                file = opened[info.relative_path]
                if info.length not in elements_at:
                    elements_at[info.length] = _elements_at(file, info.offset)
                first = info.offset + elements_at[info.length]
                if item.lengths:
                    first += item.storage_offsets[0] * len(memory) // item.lengths[0]
                reads.append((file, first, memory))
            for file, at, memory in sorted(reads, key=lambda read: read[:2]):
                for start in range(0, len(memory), _BARE_BYTES):
                    piece = memory[start : start + _BARE_BYTES]
                    os.preadv(file, [piece], at + start)
                    crc32(piece)
            for descriptor in opened.values():
                os.close(descriptor)
            done: Future[None] = Future()
            done.set_result(None)
            return done

    return Bare(step)


Area = Callable[[Size], Iterator[Row]]

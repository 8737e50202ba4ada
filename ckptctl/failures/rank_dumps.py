"""Read what the ranks of a hung job left: dumps of torch's flight recorder, and printed stacks.

A dump of the flight recorder has the calls of one rank to each process group. It is a pickle
of plain data, or JSON. It is read without torch; a pickle that holds anything but plain data
is refused. `compare_dumps` shows which collective stalled, and why. Three observations name a rank.
It *never joined* a collective in which other members of the group wait, and does not wait for any
rank itself. It is *behind*: a collective that its peers completed is still pending there, so its
device or its watchdog stopped. Its call *differs* from those of its peers under the same sequence
number. A rank that waits for another is a consequence.

py-spy and faulthandler print stacks; `matching` passes the lines of a log, in order. A job
that hangs has ranks that wait in a collective, and one or a few that are somewhere else:
those are the suspects.

Source: torch `torch/csrc/distributed/c10d/`: `TraceUtils.h` (version 2.0 of the dump, torch 2.4),
`FlightRecorder.cpp` (2.4), `FlightRecorderDetail.hpp` (2.10, torch 2.13 and main of 2026);
py-spy 0.4 `dump`;
CPython 3.12 `Python/traceback.c`, `Modules/faulthandler.c`.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from ckptctl.errors import CkptctlError
from ckptctl.failures.results import Evidence, Role, StalledCollective
from ckptctl.formats.bounded_json import NotJson, decode_json
from ckptctl.formats.pickles.reading import read_pickle
from ckptctl.formats.pickles.stubs import Grammar
from ckptctl.formatting import duration, verb
from ckptctl.outside_numbers import MOST, clamped, whole

PREFIX_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""The variables that name the recorder's files, without the rank at their end."""
MAX_BYTES = 256 << 20
_MAX_RANKS = 1 << 20
_PICKLE = b"\x80"
_RANK = re.compile(r"(\d{1,7})(?:\.(?:json|pkl|pickle|bin))?$")
_PLAIN_DATA = Grammar({})
_OWN_FRAMES = re.compile(r"(?:^|/)(?:torch|site-packages|dist-packages)/|^<frozen ")
_BATCH = "coalesced"
# gloo has no events to query: what it completed is retired, and remains scheduled. What NCCL
# retired without completing it has timed out.
_WITHOUT_EVENTS = "gloo:"
DEFAULT_GROUP = "default_pg"
_DEFAULT_GROUP_ID = "0"
_PAIR = re.compile(r"(?:send|recv) (\d{1,7})(->|<-)(\d{1,7})")


class NotADump(Exception):
    """The file is not a dump of the flight recorder."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operation that a rank called on a process group.

    `sequence` counts the collectives of the group, or for point-to-point operations those
    between the two ranks. `done` is true if the recorder saw it end. `frame` is the first
    line of the program below torch, None if the dump has no stacks. `pair` are the
    positions of sender and receiver in the group.
    """

    group: str
    description: str
    operation: str
    sequence: int
    done: bool
    inputs: str
    outputs: str
    types: str
    n_in: int
    n_out: int
    frame: str | None
    pair: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Dump:
    """The record of one rank; `members` are the ranks of each process group, by name.

    `uncounted` are the groups in which batches of point-to-point operations took numbers of
    collectives, each rank as many as it had batches: those numbers cannot be compared.
    `enqueued` are the last numbers that the recorder states beside its calls, by group: a dump
    of pending calls only may have no call of a group in which the rank is further than others.
    """

    rank: int
    file: str
    calls: tuple[Call, ...]
    members: Mapping[str, tuple[int, ...]]
    uncounted: frozenset[str] = frozenset()
    enqueued: Mapping[str, int] = field(default_factory=dict)
    newest_s: float | None = None
    """The time of the newest call, by the clock of the node."""


_STALE_S = 3600.0
"""Ranks of one attempt wait for each other: their newest calls are minutes apart at most."""


def without_stale(dumps: Sequence[Dump]) -> tuple[list[Dump], list[str]]:
    """The dumps of the last attempt, and why others are set aside.

    A restarted rank that dies before it writes a dump leaves that of an earlier attempt.
    """
    times = sorted(dump.newest_s for dump in dumps if dump.newest_s is not None)
    most_s = times[len(times) // 2] if times else 0.0
    kept, aside = list[Dump](), list[str]()
    for dump in dumps:
        older_s = 0.0 if dump.newest_s is None else most_s - dump.newest_s
        if older_s <= _STALE_S:
            kept.append(dump)
        else:
            aside.append(
                f"{dump.file}: the dump of rank {dump.rank} ends {duration(older_s)} before those "
                "of most other ranks; it is of an earlier attempt"
            )
    return kept, aside


_JSON_KEYS = (
    (b'"pg_config"', b'"version"'),
    # In JSON the keys are sorted, and the calls can be longer than the head of a file.
    (b'"entries"', b'"collective_seq_id"', b'"p2p_seq_id"'),
)


def may_be_dump(name: str, head: bytes) -> bool:
    """Whether a file may be a dump, by its name and first bytes."""
    return bool(_RANK.search(name)) and (
        (head.startswith(_PICKLE) and (b"pg_config" in head or b"entries" in head))
        or (head.lstrip()[:1] == b"{" and any(all(key in head for key in of) for of in _JSON_KEYS))
    )


def read_dump(name: str, data: bytes) -> Dump:
    """The dump in a file whose name ends with the rank.

    Raises `NotADump` if the data is something else, damaged or unsafe.
    """
    found = _RANK.search(name)
    document = _decoded(name, data)
    if found is None or not isinstance(document, dict):
        raise NotADump(f"{name}: not a dump of the flight recorder")
    entries = document.get("entries", [])
    config = document.get("pg_config", {})
    if not isinstance(entries, list) or not isinstance(config, dict):
        raise NotADump(f"{name}: not a dump of the flight recorder")
    calls, uncounted = _calls(entry for entry in entries if isinstance(entry, dict))
    enqueued = dict(_enqueued(config, document.get("pg_status"), {call.group for call in calls}))
    members = dict(_members(config))
    times = (entry.get("time_created_ns") for entry in entries if isinstance(entry, dict))
    newest_s = max(
        (at / 1e9 for at in times if isinstance(at, int) and 0 < at <= MOST), default=None
    )
    return Dump(clamped(found[1]), name, calls, members, uncounted, enqueued, newest_s)


def _decoded(name: str, data: bytes) -> object:
    try:
        if data.startswith(_PICKLE):
            return read_pickle(data, _PLAIN_DATA)
        return decode_json(data.decode("utf-8", "replace"), max_bytes=MAX_BYTES)
    except (CkptctlError, NotJson) as error:
        raise NotADump(f"{name}: not a readable dump of the flight recorder ({error})") from error


def _members(config: Mapping[object, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, group in config.items():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, str):
            ranks = [clamped(digits) for digits in re.findall(r"\d{1,7}", ranks[: 8 * _MAX_RANKS])]
        if isinstance(ranks, list) and ranks:
            known = (rank for rank in ranks[:_MAX_RANKS] if isinstance(rank, int))
            yield str(name), tuple(rank for rank in known if 0 <= rank < _MAX_RANKS)


def _enqueued(
    config: Mapping[object, object], status: object, recorded: Collection[str]
) -> Iterator[tuple[str, int]]:
    """The last number of the default group, where the dump has no call of it.

    The status of a group has the number of the group in this process, which only for the
    default group shows its name. It may be that of a point-to-point operation.
    """
    default = status.get(_DEFAULT_GROUP_ID) if isinstance(status, dict) else None
    last = default.get("last_enqueued_collective") if isinstance(default, dict) else None
    for name, group in config.items():
        is_default = isinstance(group, dict) and group.get("desc") == DEFAULT_GROUP
        number = whole(last) if isinstance(last, str) else last
        if not is_default or str(name) in recorded or not isinstance(number, int):
            continue
        if 0 <= number <= MOST:
            yield str(name), number


def _calls(entries: Iterator[Mapping[object, object]]) -> tuple[tuple[Call, ...], frozenset[str]]:
    """The calls in order, and the groups whose collectives cannot be compared by number.

    `batch_isend_irecv` records its parts, whose state never changes, and then one call
    named `coalesced` with the state of all. Before torch 2.6 such a batch takes the next number
    of a collective, and its parts take none of their own.
    """
    calls: list[Call] = []
    parts: dict[str, list[int]] = defaultdict(list)
    numbers: dict[str, tuple[object, object]] = {}
    last_batch: dict[str, object] = {}
    uncounted: set[str] = set()
    for entry in entries:
        call = _call(entry)
        if call is None:
            continue
        group = call.group
        batch_numbers = (entry.get("p2p_seq_id"), entry.get("collective_seq_id"))
        if call.pair is not None:
            if numbers.get(group) != batch_numbers:
                parts[group].clear()
            numbers[group] = batch_numbers
            parts[group].append(len(calls))
            calls.append(call)
            continue
        is_batch = call.operation == _BATCH and (
            bool(entry.get("is_p2p")) or (bool(parts[group]) and numbers[group] == batch_numbers)
        )
        if is_batch:
            for part in parts[group]:
                calls[part] = replace(calls[part], done=call.done)
            if batch_numbers[0] in (0, last_batch.get(group)):
                uncounted.add(group)
            last_batch[group] = batch_numbers[0]
        else:
            calls.append(call)
        parts[group].clear()
    return tuple(calls), frozenset(uncounted)


def _call(entry: Mapping[object, object]) -> Call | None:
    group = entry.get("process_group")
    name, description = group if isinstance(group, (list, tuple)) and len(group) == 2 else ("", "")
    profiled = str(entry.get("profiling_name", ""))
    operation = profiled.rpartition(":")[2]
    ends = None
    if (pair := _PAIR.search(operation)) is not None:
        first, second = clamped(pair[1]), clamped(pair[3])
        ends = (first, second) if pair[2] == "->" else (second, first)
    is_p2p = bool(entry.get("is_p2p")) and ends is not None
    sequence = entry.get("p2p_seq_id" if is_p2p else "collective_seq_id")
    if not isinstance(sequence, int) or not 0 <= sequence <= MOST:
        return None
    inputs, outputs = entry.get("input_sizes"), entry.get("output_sizes")
    types = [*_list(entry.get("input_dtypes")), *_list(entry.get("output_dtypes"))]
    return Call(
        group=str(name),
        description=str(description),
        operation=operation,
        sequence=sequence,
        done=entry.get("state") == "completed"
        or (entry.get("retired") is True and profiled.startswith(_WITHOUT_EVENTS)),
        inputs=_shapes(inputs),
        outputs=_shapes(outputs),
        types=", ".join(dict.fromkeys(map(str, types))),
        n_in=_n_elements(inputs),
        n_out=_n_elements(outputs),
        frame=_frame(entry.get("frames")),
        pair=ends if is_p2p else None,
    )


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _shapes(sizes: object) -> str:
    return ", ".join("x".join(map(str, _list(size))) or "scalar" for size in _list(sizes)[:8])


def _n_elements(sizes: object) -> int:
    return sum(
        prod(n if isinstance(n, int) and abs(n) <= MOST else 0 for n in _list(size)[:16])
        for size in _list(sizes)
    )


def _frame(frames: object) -> str | None:
    for frame in _list(frames):
        if not isinstance(frame, dict):
            continue
        file = str(frame.get("filename", ""))
        if file and not _OWN_FRAMES.search(file):
            return f"{file}:{frame.get('line')} in {frame.get('name')}"
    return None


MAIN_THREAD = "MainThread"
_MAX_FRAMES = 200
_MAX_STACKS = 100_000
_THREAD = re.compile(
    r"^\s*(?:Thread (?:0x)?[0-9A-Fa-f]+ \((?:active|idle)[^)]{0,40}\)"
    r"(?:: \"(?P<name>[^\"]{0,80})\")?"
    r"|(?:(?P<current>Current thread)|Thread) 0x[0-9A-Fa-f]+ (?:\[[^\]]{0,80}\] )?"
    r"\(most recent call first\):)"
)
_FRAME = re.compile(
    r"^\s{1,20}(?:(?P<name>\S{1,200}) \((?P<file>[^():]{1,400}):(?P<line>\d{1,9})\)"
    r"|File \"(?P<file_2>[^\"]{1,400})\", line (?P<line_2>\d{1,9}) in (?P<name_2>\S{1,200}))"
)
_CRASH = re.compile(r"\bFatal Python error\b")
_RANK_OF_LOG = re.compile(r"rank[_.-]?(\d{1,7})|(?:^|[_.-])(\d{1,7})(?:\.\w{1,8})?$", re.IGNORECASE)
# Where a rank waits for others: the file of a frame, the file of the innermost frame, or a
# function of torch. Under a DDP or FSDP job the backward pass waits in C++.
_COLLECTIVE = re.compile(
    r"(?:^|/)torch/distributed/(?:distributed_c10d|_functional_collectives)\.py$"
    r"|(?:^|/)deepspeed/comm/|(?:^|/)horovod/"
)
_WAITS_INSIDE = re.compile(r"(?:^|/)torch/distributed/(?!checkpoint/)")
# A save runs its writes inside methods that are named as collectives.
_TORCH = re.compile(r"(?:^|/)torch/(?!distributed/checkpoint/)")
_WAITING = re.compile(
    r"(?:.*\.)?(?:synchronize|wait|barrier|all_reduce|all_gather\w*|reduce_scatter\w*|"
    r"all_to_all\w*|broadcast|recv|irecv|item|_engine_run_backward)$"
)
_DECORATOR = re.compile(r"wrapper|decorate_context|inner_func|_wrapped|_fn$")
# Frames that are no place of the program: the interpreter's library, torch, installed packages.
_LIBRARY = re.compile(r"(?:^|/)(?:torch|site-packages|dist-packages|lib/python3\.\d+)/|^<")
_TOP = 12


class Frame(NamedTuple):
    """One call on a stack."""

    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.name}"


def waits_for_others(frames: Sequence[Frame]) -> bool:
    """Whether a thread waits for other ranks, as far as its frames show, the innermost first."""
    return _WAITS_INSIDE.search(frames[0].file) is not None or any(
        _COLLECTIVE.search(frame.file) or (_WAITING.match(frame.name) and _TORCH.search(frame.file))
        for frame in frames[:_TOP]
    )


def innermost_of_program(frames: Sequence[Frame]) -> int:
    """The number of the innermost frame outside of libraries; 0 where none is."""
    return next((n for n, frame in enumerate(frames) if not in_library(frame.file)), 0)


@dataclass(slots=True)
class Stack:
    """The stack of one thread, the innermost frame first."""

    rank: int | None
    file: str
    line: int
    thread: str
    frames: list[Frame] = field(default_factory=list)

    @property
    def is_main(self) -> bool:
        """Whether it is that of the main thread."""
        named = self.thread in (MAIN_THREAD, "")
        return named and bool(self.frames) and self.frames[-1].name == "<module>"

    @property
    def waits(self) -> bool:
        """Whether the thread waits for other ranks, as far as its frames show."""
        return waits_for_others(self.frames)

    @property
    def place(self) -> str:
        """The innermost function of the program, as `name (file:line)`."""
        frame = self.frames[innermost_of_program(self.frames)]
        return f"{frame.name} ({frame.file}:{frame.line})"

    def described(self, *, innermost: bool) -> str:
        """The place, and the function of a library that it called, or the innermost one."""
        inner = self.frames[: innermost_of_program(self.frames)]
        frames = inner if innermost else inner[::-1]
        called = next((frame.name for frame in frames if not _DECORATOR.search(frame.name)), None)
        return self.place if called is None else f"{self.place}, in {called}"


def in_library(file: str) -> bool:
    """Whether a file is of the interpreter, of torch or of an installed package."""
    # py-spy prints files of the interpreter's library without their folder.
    module = file.partition("/")[0].removesuffix(".py")
    return module in sys.stdlib_module_names or _LIBRARY.search(file) is not None


class StackReader:
    """Collects the stacks in the lines of one log."""

    def __init__(self, name: str) -> None:
        self.stacks: list[Stack] = []
        self._name = name
        self._open: Stack | None = None
        self._crashed = False

    @property
    def reading(self) -> bool:
        """Whether the next line may be a frame."""
        return self._open is not None

    def take(self, number: int, text: str, rank: int | None) -> None:
        """Take a line that begins a stack, or that follows one."""
        if (match := _FRAME.match(text)) is not None and self._open is not None:
            if len(self._open.frames) < _MAX_FRAMES:
                name = match["name"] or match["name_2"]
                line = clamped(match["line"] or match["line_2"])
                self._open.frames.append(Frame(name, match["file"] or match["file_2"], line))
            return
        self._open = None
        self._crashed = self._crashed or _CRASH.search(text) is not None
        match = _THREAD.match(text)
        # faulthandler prints the stacks of a process that crashed in the same form.
        if match is not None and not self._crashed and len(self.stacks) < _MAX_STACKS:
            # A folder may be named after another rank, or after the attempt.
            in_name = (
                None if rank is not None else _RANK_OF_LOG.search(os.path.basename(self._name))
            )
            rank = clamped(in_name[1] or in_name[2]) if in_name else rank
            # The kernel gives a signal to the main thread of a process if that does not block it.
            thread = match["name"] or (MAIN_THREAD if match["current"] else "")
            self._open = Stack(rank, self._name, number, thread)
            self.stacks.append(self._open)


def compared(stacks: Sequence[Stack]) -> Iterator[Evidence]:
    """The ranks whose main thread is elsewhere while at least half of all wait for others.

    Where no frame shows a wait (`loss.item()` has none), most ranks that are at one place
    count as waiting. Of several stacks of one rank the last counts. Nothing where fewer
    than three ranks have a stack.
    """
    of_rank = {stack.rank: stack for stack in stacks if stack.rank is not None and stack.is_main}
    waiting = {rank: stack for rank, stack in of_rank.items() if stack.waits} or of_rank
    if len(of_rank) < 3 or len(waiting) * 2 < len(of_rank):
        return
    others = {rank: stack for rank, stack in of_rank.items() if rank not in waiting}
    if not others:
        others, waiting = _elsewhere(waiting)
    if not others:
        return
    first = others[min(others)]
    # Inside one call of the program, only the innermost functions differ.
    same = {stack.place for stack in others.values()} & {stack.place for stack in waiting.values()}
    here, there = (
        Counter(stack.described(innermost=bool(same)) for stack in of.values()).most_common(1)[0][0]
        for of in (others, waiting)
    )
    yield Evidence(
        rule="collective.stacks-differ",
        failure="hang",
        role=Role.SUSPECT,
        description=(
            f"the main thread is at {here}, and {len(waiting):,} other ranks wait at {there}"
        ),
        file=first.file,
        line=first.line,
        text=first.place,
        ranks=tuple(sorted(others)),
    )


def _elsewhere(waiting: Mapping[int, Stack]) -> tuple[dict[int, Stack], dict[int, Stack]]:
    """The few that wait at another place of the program than most, and the rest."""
    (most, n_most), *_ = Counter(stack.place for stack in waiting.values()).most_common()
    few = {rank: stack for rank, stack in waiting.items() if stack.place != most}
    if n_most * 2 <= len(waiting):
        few = {}
    return few, {rank: stack for rank, stack in waiting.items() if rank not in few}


# Operations that no member can complete before every member has started them.
_SYMMETRIC = ("all_reduce", "all_gather", "allgather", "reduce_scatter", "all_to_all", "barrier")
_SAME_SHAPE = ("all_reduce", "_all_gather_base", "_reduce_scatter_base", "broadcast", "reduce")
_MAX_REPORTED = 50


@dataclass(frozen=True, slots=True)
class Stall:
    """What the dumps show together.

    `never_joined`, `behind` and `differing` are ranks. `in_cycle`: ranks that wait for each
    other. `without_dump`: members of the groups without a dump.
    """

    collectives: tuple[StalledCollective, ...]
    never_joined: tuple[int, ...]
    behind: tuple[int, ...]
    differing: tuple[int, ...]
    in_cycle: tuple[int, ...]
    without_dump: tuple[int, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The suspected ranks, in order."""
        return tuple(sorted({*self.never_joined, *self.behind}))


def evidence_of(stall: Stall, file: str) -> Iterator[Evidence]:
    """The evidence from the dumps; `file` is their location."""
    if not stall.collectives and not stall.ranks:
        return
    absent = f"{ranks_listed(stall.never_joined)} never joined" if stall.never_joined else ""
    behind = (
        f"{ranks_listed(stall.behind)} did not complete collectives that others did"
        if stall.behind
        else ""
    )
    rule, ranks = "hang", stall.ranks
    description = "; ".join(filter(None, (absent, behind))) or "collectives did not complete"
    if stall.differing:
        rule, ranks = "mismatch", stall.differing
        description = "ranks called different collectives"
    elif stall.in_cycle:
        rule, ranks, description = "cycle", stall.in_cycle, "ranks wait for each other"
    yield Evidence(
        rule=f"recorder.{rule}",
        failure="hang" if rule == "hang" else "job-code",
        role=Role.ROOT if stall.differing else Role.SUSPECT,
        description=description,
        file=file,
        line=0,
        text=described(stall.collectives[0]) if stall.collectives else "",
        ranks=ranks,
    )


def ranks_listed(ranks: Collection[int]) -> str:
    """`rank 3`, `ranks 0-3, 7`."""
    return f"{verb(len(ranks), 'rank', 'ranks')} {ranges_of(ranks)}"


def described(stalled: StalledCollective) -> str:
    """A stalled collective in one line: group, operation, number, shape, ranks."""
    parts = {
        "joined": stalled.joined,
        "missing": stalled.missing,
        "different": stalled.differing,
        "behind": stalled.behind,
        "no dump": stalled.without_dump,
    }
    ranks = "; ".join(f"{name}: {ranges_of(ranks)}" for name, ranks in parts.items() if ranks)
    shape = f" {stalled.shape}" if stalled.shape else ""
    types = f" {stalled.types}" if stalled.types else ""
    frame = f"; called at {stalled.frame}" if stalled.frame else ""
    return (
        f"{stalled.description or 'process group'} ({stalled.group}) {stalled.operation} "
        f"#{stalled.sequence:,}{shape}{types}; {ranks}{frame}"
    )


def ranges_of(ranks: Collection[int]) -> str:
    """Ranks as a list with ranges: `0-3, 7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, run)) for run in runs)


@dataclass(frozen=True, slots=True)
class _Group:
    """A process group: its members, and the calls of each member with a dump.

    `enqueued` are the last numbers that members without a call here state.
    """

    name: str
    description: str
    members: tuple[int, ...]
    calls: Mapping[int, Mapping[int, Call]]
    enqueued: Mapping[int, int]

    def last(self, rank: int) -> int:
        """The last sequence number that the rank reached, -1 for none."""
        return max(self.calls[rank], default=-1)

    def pending(self, rank: int, sequence: int) -> bool:
        call = self.calls[rank].get(sequence)
        return call is not None and not call.done

    def completed(self, rank: int, sequence: int) -> bool:
        """Whether the rank reached the collective, and it is no longer pending there.

        Dumps of pending calls only omit completed ones.
        """
        return self.last(rank) >= sequence and not self.pending(rank, sequence)


def compare_dumps(dumps: Sequence[Dump]) -> Stall:
    """Compare the dumps, one per rank; of several for one rank the last counts.

    Cost: linear in the recorded calls.
    """
    by_rank = {dump.rank: dump for dump in dumps}
    groups = [*_groups(by_rank)]
    stalled = [found for group in groups if (found := _stalled(group)) is not None]
    waits = _waits(stalled, groups, by_rank)
    differing = {rank for collective in stalled for rank in collective.differing}
    awaited = {rank for others in waits.values() for rank in others}
    never_joined = {rank for rank in awaited if rank in by_rank and not waits.get(rank)}
    in_cycle = _cycle(waits) if not (never_joined or differing) else set()
    behind = {rank for collective in stalled for rank in collective.behind} - differing - in_cycle
    members = {rank for group in groups for rank in group.members}
    members |= {*range(max(by_rank, default=-1) + 1)}
    return Stall(
        collectives=tuple(sorted(stalled, key=_explains_little)[:_MAX_REPORTED]),
        never_joined=tuple(sorted(never_joined)),
        behind=tuple(sorted(behind)),
        differing=tuple(sorted(differing)),
        in_cycle=tuple(sorted(in_cycle)),
        without_dump=tuple(sorted(members - by_rank.keys())),
    )


def _explains_little(stalled: StalledCollective) -> tuple[int, int]:
    """A sort key: collectives that name ranks first, then the largest groups."""
    kind = 0 if stalled.differing else 1 if stalled.missing else 2 if stalled.behind else 3
    return kind, -len(stalled.joined)


def _groups(dumps: Mapping[int, Dump]) -> Iterator[_Group]:
    members: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    calls: dict[str, dict[int, dict[int, Call]]] = defaultdict(lambda: defaultdict(dict))
    described: dict[str, str] = {}
    for rank, dump in dumps.items():
        for name, ranks in dump.members.items():
            members[name].add(ranks)
        for call in dump.calls:
            described[call.group] = call.description
            # Parts of a coalesced operation share a number: the last one is the whole.
            collectives = calls[call.group][rank]
            if call.pair is None:
                collectives[call.sequence] = call
    uncounted = {name for dump in dumps.values() for name in dump.uncounted}
    for name, by_rank in calls.items():
        if name in uncounted:
            by_rank = {rank: {} for rank in by_rank}
        # `split_group` gives the same name to groups of different ranks. Gloo's recorder of
        # torch 2.13 lists no members.
        is_default = described[name] == DEFAULT_GROUP
        recorded = range(max(dumps) + 1) if is_default else sorted(by_rank)
        listed = members[name] or {tuple(recorded)}
        for ranks in sorted(listed):
            inside = {rank: by_rank.get(rank, {}) for rank in ranks if rank in dumps}
            enqueued = {
                rank: dumps[rank].enqueued[name] for rank in inside if name in dumps[rank].enqueued
            }
            yield _Group(name, described[name], ranks, inside, enqueued)


def _stalled(group: _Group) -> StalledCollective | None:
    """The first pending collective of the group that not all members joined alike.

    If all joined alike, the last one that is pending on every member.
    """
    sequences = sorted(
        {
            sequence
            for rank, calls in group.calls.items()
            for sequence in calls
            if group.pending(rank, sequence)
        }
    )
    found = None
    for sequence in sequences:
        found = _collective(group, sequence)
        if found.missing or found.differing:
            return found
    return found


def _collective(group: _Group, sequence: int) -> StalledCollective:
    calls = {
        rank: recorded[sequence] for rank, recorded in group.calls.items() if sequence in recorded
    }
    differing = _differing(calls, len(group.members))
    first = next((call for rank, call in calls.items() if rank not in differing), None)
    first = first or next(iter(calls.values()))
    return StalledCollective(
        group=group.name,
        description=group.description,
        operation=first.operation,
        sequence=sequence,
        shape=f"{first.inputs} -> {first.outputs}".strip(" ->"),
        types=first.types,
        frame=first.frame,
        joined=tuple(rank for rank in sorted(group.calls) if group.last(rank) >= sequence),
        missing=tuple(
            rank
            for rank in sorted(group.calls)
            if max(group.last(rank), group.enqueued.get(rank, -1)) < sequence
        ),
        differing=differing,
        behind=tuple(_behind(group)),
        without_dump=tuple(sorted({*group.members} - group.calls.keys())),
    )


def _differing(calls: Mapping[int, Call], n_members: int) -> tuple[int, ...]:
    """The ranks whose call differs from the majority; all ranks if there is no majority."""
    kinds: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, call in calls.items():
        same_shape = call.operation in _SAME_SHAPE
        shape = (call.inputs, call.outputs, call.types) if same_shape else ()
        kind = (call.operation, *shape)
        kinds[kind].append(rank)
    if len(kinds) > 1:
        most = max(map(len, kinds.values()))
        fewer = [ranks for ranks in kinds.values() if len(ranks) < most]
        lists = fewer if len(fewer) == len(kinds) - 1 else [*kinds.values()]
        return tuple(sorted(rank for ranks in lists for rank in ranks))
    uneven = sum(call.n_in for call in calls.values()) != sum(c.n_out for c in calls.values())
    exchanges = all(call.operation.startswith("all_to_all") for call in calls.values())
    return tuple(sorted(calls)) if exchanges and len(calls) == n_members and uneven else ()


def _behind(group: _Group) -> Iterator[int]:
    for rank, calls in group.calls.items():
        for sequence, call in calls.items():
            if call.done or not call.operation.lstrip("_").startswith(_SYMMETRIC):
                continue
            peers = (peer for peer in group.calls if peer != rank)
            if any(group.completed(peer, sequence) for peer in peers):
                yield rank
                break


def _waits(
    stalled: Sequence[StalledCollective], groups: Sequence[_Group], dumps: Mapping[int, Dump]
) -> Mapping[int, set[int]]:
    """For each waiting rank, the ranks that it waits for."""
    waits: dict[int, set[int]] = defaultdict(set)
    for collective in stalled:
        for rank in collective.joined:
            waits[rank] |= {*collective.missing, *collective.without_dump} - {rank}
    members = {(group.name, rank): group.members for group in groups for rank in group.calls}
    # Each rank counts its own point-to-point operations, so the numbers of two ranks
    # cannot be compared; how many are pending can.
    pending = Counter(
        (rank, group_ranks[call.pair[0]], group_ranks[call.pair[1]])
        for rank, dump in dumps.items()
        for call in dump.calls
        if not call.done and call.pair is not None
        for group_ranks in [members.get((call.group, rank), ())]
        if max(call.pair) < len(group_ranks)
    )
    for (rank, sender, receiver), n_pending in pending.items():
        peer = receiver if rank == sender else sender
        if n_pending > pending[(peer, sender, receiver)]:
            waits[rank].add(peer)
    return waits


def _cycle(waits: Mapping[int, set[int]]) -> set[int]:
    """The ranks that wait for each other, directly or through others."""
    left = {rank: {*others} for rank, others in waits.items() if others}
    while True:
        ended = [rank for rank, others in left.items() if not others & left.keys()]
        if not ended:
            return {*left}
        for rank in ended:
            del left[rank]

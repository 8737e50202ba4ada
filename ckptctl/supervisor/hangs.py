"""Watch the ranks of a job, and report a hang: a rank that does not come further.

A hang is a rank that has not reported within the limit of its section. A limit that nobody
gave is extended while the job shows that it works: while stacks change, or processes that a
rank started use the processor. A job without heartbeats is watched by its logs alone, and
ended for their silence only with a limit that a person gave.

When one rank stops, its peers block in the next collective, and all heartbeats end at the same
time: the oldest heartbeat names nobody, and a rank that waits in a collective is never named.
The kinds of evidence are tried in the order of how much they prove; the first that sets some
ranks apart from the others decides. Where ranks of the job were not seen, only what a process
shows by itself counts: any of the unseen ones may be at fault.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ckptctl.distributed.process_table import Process, state_of
from ckptctl.errors import StorageError, Unknown, guarded
from ckptctl.failures.rank_dumps import (
    Dump,
    compare_dumps,
    innermost_of_program,
    ranks_listed,
    waits_for_others,
)
from ckptctl.formats.own.heartbeats import Heartbeat, Section
from ckptctl.formatting import counted, duration, some_of
from ckptctl.storage.shared_places import HeldFolder, new_private_folder, open_folder
from ckptctl.storage.waiting import start_daemon
from ckptctl.supervisor.evidence import (
    STUCK,
    HangEvidence,
    NodeDocument,
    RankEvidence,
    Stack,
    collect,
    keep,
    kept_in,
    world_size_of,
)
from ckptctl.supervisor.heartbeats import Folder, beats_of_launched, process_of
from ckptctl.supervisor.options import Limit, SectionLimits
from ckptctl.supervisor.processes import MARKER, Hang, JobLog, Running, Watcher

T = TypeVar("T")
Elsewhere = Callable[[Mapping[str, str], NodeDocument], Sequence[NodeDocument]]

GAP_S = 5.0
"""A supervisor that was not called for so long was suspended, or the machine was: what passed
meanwhile is held against nobody. It is called about once a second."""

_SAMPLE_AGAIN_S = 30.0
"""How long after samples that showed work the next are taken, at least."""

_MOST_SET_ASIDE = 100
"""Of how many things that are no evidence a message is printed in one run."""

_QUIET_S = 1800.0
"""After how long without a line in the logs a message is printed, where no limit is given."""


@dataclass(slots=True)
class _RankActivity:
    """The last heartbeat of a rank, and since when it and its save in flight are the same."""

    beat: Heartbeat
    since_s: float
    saving_since_s: float
    ended: bool = False
    """Its process is gone: it is waited for no longer."""


class _Late(NamedTuple):
    section: Section
    limit: Limit
    waited_s: float


class HangWatcher(Watcher):
    """Finds hangs in one attempt after the other.

    `limits` are extended by what the ranks needed. The logs of an attempt are watched where it
    writes no heartbeats. Evidence is kept in `folder`, by default a new one for temporary
    files: the storage of the root may be what hangs. Where ranks of the job are not on this node,
    `elsewhere` collects that of the other nodes, by the variables that the job got and the evidence
    of this node.
    """

    def __init__(
        self,
        limits: SectionLimits,
        tell: Callable[[str], None],
        folder: str | None = None,
        *,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._limits = limits
        self._folder = Folder()
        self._logs = LogGrowth()
        self._kept_in = folder
        self._evidence: HeldFolder | None = None
        self._reported: set[str] = set()
        self._tell = tell
        self._elsewhere = elsewhere
        self._variables: Mapping[str, str] = {}
        self._explained = False
        self._warned: set[str] = set()
        self._reset(0)

    def close(self) -> None:
        """Remove the folder of the heartbeats, and measure logs no longer."""
        self._folder.remove()
        self._logs.close()
        if self._evidence is not None:
            self._evidence.close()

    def prepare(self, attempt: int, logs: Sequence[JobLog]) -> Mapping[str, str]:
        """Forget the attempt before; what the environment of the job must hold."""
        self._logs.follow(logs)
        self._reset(attempt)
        self._variables = self._folder.begin()
        return self._variables

    def _guarded(self, work: Callable[[], T]) -> T | None:
        """The result of `work`; a fault of ckptctl in it must not end the job, and is a warning."""
        result = guarded("watching for hangs", work)
        if not isinstance(result, Unknown):
            return result
        if result.message not in self._warned:
            self._warned.add(result.message)
            self._tell(f"warning: {result.message}; whether the job hangs is unknown")
        return None

    def _reset(self, attempt: int) -> None:
        self._attempt = attempt
        self._began_at_s = time.time()
        self._began_s = float("nan")
        self._polled_s = float("nan")
        self._next_sample_s = float("-inf")
        self._ranks: dict[int, _RankActivity] = {}
        self._logs.reset()

    def poll(self, running: Running, now_s: float) -> Hang | None:
        """A hang with its evidence, or None."""
        return self._guarded(lambda: self._polled(running, now_s))

    def _polled(self, running: Running, now_s: float) -> Hang | None:
        if math.isnan(self._polled_s):
            self._began_s = now_s
            self._explain()
        elif now_s - self._polled_s > GAP_S or self._folder.mend():
            self._restart_timers(now_s)
        self._polled_s = now_s
        beats = self._folder.read()
        self._report_set_aside(self._folder.set_aside.values())
        self._take_in(beats, now_s)
        if not self._ranks:
            return self._check_logs(running, now_s)
        if self._late(now_s) is not None:
            found = set(running.processes())
            for rank in self._ranks.values():
                rank.ended = process_of(rank.beat) not in found
        late = self._late(now_s)
        if late is None:
            self._next_sample_s = float("-inf")
            return None
        return self._check_late(late, running, now_s)

    def _report_set_aside(self, reasons: Iterable[str]) -> None:
        for reason in reasons:
            if reason not in self._reported and len(self._reported) < _MOST_SET_ASIDE:
                self._reported.add(reason)
                self._tell(f"set aside: {reason}")

    def _explain(self) -> None:
        """Say what it takes to detect a hang, where nothing shows that the job has it."""
        by_logs = self._logs.paths and "outside" in self._limits.given
        if self._explained or self._limits.seen or by_logs:
            return
        self._explained = True
        self._tell(
            "a hang is detected only if the job writes heartbeats (ckptctl.train does); for "
            "other jobs give --log or --log-dir, and --out-of-section-timeout"
        )

    def _restart_timers(self, now_s: float) -> None:
        self._began_s = now_s
        self._logs.reset()
        for rank in self._ranks.values():
            rank.since_s = rank.saving_since_s = now_s

    # Heartbeats

    def _take_in(self, beats: Mapping[int, Heartbeat], now_s: float) -> None:
        """Start the timer of each rank that has reported, and record how long it took."""
        first = min(beats, default=0)
        for number in self._ranks.keys() - beats.keys():
            self._ranks[number].since_s = now_s  # somebody has removed its heartbeat
        for number, beat in beats.items():
            one = int(number == first)  # the reports of one rank are counted
            rank = self._ranks.get(number)
            if rank is None or rank.beat["pid"] != beat["pid"]:
                if rank is None:
                    self._limits.learn("outside", now_s - self._began_s, one)
                self._ranks[number] = _RankActivity(beat, now_s, now_s)
                continue
            before = rank.beat
            if beat["saving"] != before["saving"]:
                if before["saving"] is not None:
                    self._limits.learn("async-save", now_s - rank.saving_since_s, one)
                rank.saving_since_s = now_s
            if beat["count"] != before["count"]:
                is_step = before["section"] == beat["section"] == "step"
                n = one * max(1, beat["count"] - before["count"]) if is_step else one
                self._limits.learn(before["section"], now_s - rank.since_s, n)
                rank.since_s = now_s
            rank.beat = beat

    def _late(self, now_s: float) -> _Late | None:
        ranks = [rank for rank in self._ranks.values() if not rank.ended]
        waits: list[tuple[Section, float]] = [
            (rank.beat["section"], now_s - rank.since_s)
            for rank in ranks
            # A rank that waits for its own save in flight has the time of that.
            if rank.beat["saving"] is None or rank.beat["section"] != "checkpoint"
        ]
        waits += [
            ("async-save", now_s - rank.saving_since_s)
            for rank in ranks
            if rank.beat["saving"] is not None
        ]
        times = (_Late(section, self._limits.of(section), waited_s) for section, waited_s in waits)
        late = (each for each in times if each.waited_s > each.limit.seconds)
        return max(late, key=lambda each: each.waited_s - each.limit.seconds, default=None)

    def _missing(self) -> list[int]:
        """Ranks of this node that have not reported yet, if their numbers are known.

        torchrun numbers the ranks of a node one after the other. Where most have not reported,
        the script reports from one rank alone.
        """
        size = max((rank.beat["local_world_size"] or 0 for rank in self._ranks.values()), default=0)
        if not size or len(self._ranks) >= size:
            return []
        first = min(self._ranks) // size * size
        missing = [n for n in range(first, first + size) if n not in self._ranks]
        is_block = max(self._ranks) < first + size
        return missing if is_block and len(missing) < len(self._ranks) else []

    def _check_late(self, late: _Late, running: Running, now_s: float) -> Hang | None:
        """A hang, unless the whole job is stopped or shows that it works."""
        section, limit, waited_s = late
        is_last = waited_s >= limit.longest_s
        if now_s < self._next_sample_s and not is_last:
            return None
        beats = {number: rank.beat for number, rank in self._ranks.items()}
        alive = {process_of(rank.beat) for rank in self._ranks.values() if not rank.ended}
        if self._is_stopped({*alive, running.leader}, now_s):
            return None
        of_save = section == "async-save"
        evidence = self._collect(beats, running, of_save=of_save)
        if not is_last and _works(evidence):
            if self._next_sample_s < now_s - limit.seconds:
                self._tell(
                    f"no report for {duration(waited_s)} in section {section}, but the job works: "
                    f"it is ended after {duration(limit.longest_s)} at the latest"
                    f"{_place_of(evidence)}"
                )
            self._next_sample_s = now_s + max(_SAMPLE_AGAIN_S, limit.seconds / 4)
            return None
        missing = [] if of_save else self._missing()
        hang = _hang(
            section,
            f"no report for {duration(waited_s)} in section {section} (limit "
            f"{duration(limit.seconds)})",
            evidence,
            missing,
        )
        is_at_one_place = len({rank.stack for rank in evidence.ranks}) == 1  # as in an evaluation
        if not hang.ranks and not limit.given and is_at_one_place:
            # Should it have been no hang but slow work, the next attempt waits longer.
            self._limits.learn(section, waited_s, 0)
        return hang

    def _is_stopped(self, processes: Collection[Process], now_s: float) -> bool:
        """Whether the whole job is stopped, as `scontrol suspend` does; its time is not counted."""
        if not processes or any(state_of(process) != "T" for process in processes):
            return False
        self._tell("the whole job is stopped (process state T); the time is not counted")
        self._restart_timers(now_s)
        return True

    def collect_here(self, running: Running) -> NodeDocument:
        """What is found about the ranks of this node, for another one that sees a hang."""
        beats = {**beats_of_launched(running.processes()), **self._folder.read()}
        return self._collect(beats, running, here_alone=True).document

    def _collect(
        self,
        beats: Mapping[int, Heartbeat],
        running: Running,
        *,
        of_save: bool = False,
        here_alone: bool = False,
    ) -> HangEvidence:
        """What is found about these ranks, or those of them that save, and about all others."""
        out, why = self._new_folder()
        if out is None:
            return HangEvidence((), (), (), works=False, set_aside=why)
        held = self._folder.held
        saving = {number: beat for number, beat in beats.items() if beat["saving"] is not None}
        asked = saving if of_save else beats
        try:
            evidence = self._guarded(
                lambda: collect(
                    asked, running.processes, held, out, self._began_at_s, of_save=of_save
                )
            ) or HangEvidence((), (), (), works=False)
            evidence = evidence._replace(seen=frozenset(beats), world_size=world_size_of(beats))
            if not (of_save or here_alone) and evidence.unseen != 0:
                evidence = self._guarded(lambda: self._seen_elsewhere(evidence, running, out)) or (
                    evidence
                )
        finally:
            if out is not held:
                out.close()
        set_aside = (*why, *self._folder.set_aside.values(), *evidence.set_aside)
        self._report_set_aside(set_aside)
        return evidence._replace(set_aside=set_aside)

    def _seen_elsewhere(
        self, evidence: HangEvidence, running: Running, out: HeldFolder
    ) -> HangEvidence:
        """The evidence with that of the other nodes, as far as they answer."""
        if self._elsewhere is None:
            return evidence
        variables = {**self._variables, MARKER: running.marker}
        for answer in self._elsewhere(variables, evidence.document):
            ranks = [rank for rank in answer["ranks"] if rank.rank not in evidence.seen]
            for rank in ranks:
                frames = "\n".join(f"    {frame}" for frame in rank.stack or ())
                head = f"rank {rank.rank} on {rank.node}, state {rank.state}"
                keep(out, f"stacks-rank-{rank.rank}.txt", f"{head}\n{frames}\n")
            sizes = (evidence.world_size, answer["world_size"])
            evidence = evidence._replace(
                ranks=(*evidence.ranks, *ranks),
                works=evidence.works or answer["works"],
                seen=evidence.seen | {rank.rank for rank in ranks},
                world_size=max((size for size in sizes if size is not None), default=None),
                files=tuple(kept_in(out)),
            )
        return evidence

    def _new_folder(self) -> tuple[HeldFolder | None, tuple[str, ...]]:
        """A folder for the evidence of this attempt, and why it is not the one that was asked for.

        It is that of the heartbeats where no other can be used, as on a full disk.
        """
        try:
            if self._evidence is None or not self._evidence.is_there():
                if self._evidence is not None:
                    self._evidence.close()
                if self._kept_in is not None:
                    self._evidence = open_folder(self._kept_in, make=True)
                else:
                    self._evidence = new_private_folder("ckptctl-evidence-")
            return self._evidence.folder(f"attempt-{self._attempt}", make=True), ()
        except OSError:
            return self._folder.held, ()
        except StorageError as error:
            return self._folder.held, (error.message,)

    # Without heartbeats

    def _check_logs(self, running: Running, now_s: float) -> Hang | None:
        """A hang of an attempt that has not written a heartbeat, or None.

        A job that never wrote one is ended for the silence of its logs, by a limit that a person
        gave; one that did in an earlier attempt is still in its imports.
        """
        limit = self._limits.of("outside")
        quiet_s = self._logs.quiet_s(now_s)
        if self._limits.seen:
            waited_s, what = now_s - self._began_s, "no heartbeat in"
        elif quiet_s is not None:
            waited_s, what = quiet_s, "no log grew for"
        else:
            return None
        if not self._limits.seen and not limit.given:
            if waited_s > _QUIET_S:
                self._logs.reset()
                self._tell(
                    f"no log grew for {duration(waited_s)}; only --out-of-section-timeout ends a "
                    "job without heartbeats for that"
                )
            return None
        if waited_s <= limit.seconds or self._is_stopped(running.processes(), now_s):
            return None
        evidence = self._collect(beats_of_launched(running.processes()), running)
        message = f"{what} {duration(waited_s)} (limit {duration(limit.seconds)})"
        return _hang("outside", message, evidence, ())


def _hang(section: Section, message: str, evidence: HangEvidence, missing: Collection[int]) -> Hang:
    """The report of a hang, with the ranks at fault as far as the evidence decides."""
    evidence = evidence._replace(seen=evidence.seen | {*missing})
    named = name_ranks(evidence.ranks, evidence.dumps, missing, evidence.unseen)
    nodes = {rank.node for rank in evidence.ranks if rank.rank in named.ranks}
    if {*named.ranks} & {*missing}:
        nodes = {rank.node for rank in evidence.ranks}  # `missing` are ranks of a single node
    set_aside = f"; set aside: {some_of(evidence.set_aside)}" if evidence.set_aside else ""
    return Hang(
        f"{message}; {named.why}{_place_of(evidence)}{set_aside}",
        section,
        tuple(named.ranks),
        tuple(sorted(nodes)),
        tuple(sorted(nodes)) if named.hardware else (),
        evidence.files,
    )


def _place_of(evidence: HangEvidence) -> str:
    return f"; evidence in {os.path.dirname(evidence.files[0])}" if evidence.files else ""


def _works(evidence: HangEvidence) -> bool:
    """Whether ranks come further although they do not report; a stopped one proves a hang."""
    if any(not each.alive or each.state == "T" for each in evidence.ranks):
        return False
    return evidence.works or any(each.moves for each in evidence.ranks)


class LogGrowth:
    """When the logs of a job grew last.

    A thread reads the sizes: a log on a storage that does not answer must not delay the
    supervisor, and its silence is no evidence against the job.
    """

    EVERY_S = 1.0

    def __init__(self) -> None:
        self.paths: tuple[JobLog, ...] = ()
        self._sizes: tuple[int, ...] = ()
        self._grew_s = self._measured_s = time.monotonic()
        self._measures = False
        self._closed = threading.Event()

    def follow(self, paths: Sequence[JobLog]) -> None:
        """Measure these files from now on."""
        self.paths = tuple(paths)
        if paths and not self._measures:
            self._measures = True
            start_daemon("ckptctl-logs", self._measure)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def reset(self) -> None:
        """Count from now on."""
        self._grew_s = time.monotonic()

    def quiet_s(self, now_s: float) -> float | None:
        """For how long no log has grown; None where there is no log, or no answer."""
        if not self.paths or now_s - self._measured_s > GAP_S + self.EVERY_S:
            return None
        return now_s - self._grew_s

    def _measure(self) -> None:
        while not self._closed.is_set():
            sizes = tuple(log.size() for log in self.paths)
            self._measured_s = time.monotonic()
            if sizes != self._sizes:
                self._sizes, self._grew_s = sizes, self._measured_s
            self._closed.wait(self.EVERY_S)


_OF_STORAGE = re.compile(r"nfs|rpc_|fuse|lustre|ptlrpc|cl_sync|ll_|ceph|gpfs|cifs|smb")
"""Functions of the kernel in which a process waits for a storage of the network."""


class Suspects(NamedTuple):
    """The ranks that evidence sets apart, none where it does not decide, and why.

    With `alone` it needs no other rank: what unseen ranks do cannot explain it.
    """

    ranks: Collection[int]
    why: str
    alone: bool = False
    hardware: bool = False
    """The evidence speaks against their nodes, and not against the program."""


def name_ranks(
    ranks: Sequence[RankEvidence],
    dumps: Sequence[Dump] = (),
    missing: Collection[int] = (),
    unseen: int | None = 0,
) -> Suspects:
    """The ranks at fault. `missing` are ranks of a node that never reported.

    `unseen` is how many ranks of the job nothing is known of; None where the number of its ranks
    is unknown. A rank that is in question alone is the one, unless it waits in a collective.
    """
    n_all = len(ranks) + len(missing)
    is_all = unseen == 0
    for kind in _kinds(ranks, dumps, missing):
        if kind.ranks and (kind.alone or is_all) and (len(kind.ranks) < n_all or not is_all):
            return _named(ranks, kind)
    if n_all == 1 and is_all and not _in_collective(ranks[0].stack):
        (only,) = ranks
        why = f"no other rank than {only.rank} is in question{_place(only.stack)}"
        return Suspects((only.rank,), "; ".join([why, *only.stuck]), hardware=_by_hardware(only))
    return Suspects((), f"the rank at fault is undecided: {_undecided(ranks, n_all, unseen)}")


def _named(ranks: Sequence[RankEvidence], kind: Suspects) -> Suspects:
    named = [evidence for evidence in ranks if evidence.rank in kind.ranks]
    stuck = [process for evidence in named for process in evidence.stuck]
    why = "; ".join([f"{ranks_listed(kind.ranks)} {kind.why}", *stuck])
    hardware = kind.hardware and all(_by_hardware(evidence) for evidence in named)
    return Suspects(tuple(sorted(kind.ranks)), why, kind.alone, hardware)


def _kinds(
    ranks: Sequence[RankEvidence], dumps: Sequence[Dump], missing: Collection[int]
) -> Iterator[Suspects]:
    """The ranks that each kind of evidence sets apart, the most conclusive kind first."""
    yield Suspects([rank.rank for rank in ranks if not rank.alive], "ended, and others wait", True)
    yield Suspects([rank.rank for rank in ranks if rank.state == "T"], STUCK["T"], True)
    yield Suspects(missing, "has not reported at all")
    in_kernel = [rank.rank for rank in ranks if rank.state == "D"]
    yield Suspects(in_kernel, STUCK["D"], hardware=True)
    if len(dumps) > 1:
        stall = compare_dumps(dumps)
        if not stall.without_dump:
            yield Suspects(stall.differing, "called another collective (flight recorder)")
            yield Suspects(stall.ranks, "did not join a collective (flight recorder)")
    stacks = {rank.rank: rank.stack for rank in ranks if rank.stack is not None}
    silent = [rank.rank for rank in ranks if rank.asked and rank.stack is None]
    if stacks:
        yield Suspects(silent, "does not write its stacks when asked")
    outside = [rank for rank, stack in stacks.items() if not _in_collective(stack)]
    places = {_place(stacks[rank]) for rank in outside}
    # Where most are outside of it, they may all be slow, and the others only first. Of those at
    # several places one can wait for the other, by its device or by a file.
    if len(stacks) == len(ranks) and 0 < len(outside) <= len(stacks) / 2 and len(places) == 1:
        yield Suspects(outside, f"is not in the collective that the others wait in{places.pop()}")
    with_stuck = [rank.rank for rank in ranks if rank.stuck and not _in_collective(rank.stack)]
    yield Suspects(with_stuck, "waits for a process")


def _by_hardware(evidence: RankEvidence) -> bool:
    """Whether a rank waits in the kernel for what belongs to its node."""
    return evidence.state == "D" and not _OF_STORAGE.search(evidence.wait)


def _in_collective(stack: Stack | None) -> bool:
    return stack is not None and bool(stack) and waits_for_others(stack)


def _place(stack: Stack | None) -> str:
    return f": {stack[innermost_of_program(stack)]}" if stack else ""


def _undecided(ranks: Sequence[RankEvidence], n_all: int, unseen: int | None) -> str:
    if unseen is None:
        return "how many ranks the job has is unknown, and others may be at fault"
    if unseen:
        return (
            f"{counted(n_all, 'rank')} of {n_all + unseen} could be seen from here, and one of the "
            "others may be at fault"
        )
    if {rank.state for rank in ranks} == {"D"}:
        return "all ranks wait in the kernel for a device or a storage"
    stacks = {rank.stack for rank in ranks if rank.stack is not None}
    if not stacks:
        return "no rank showed its stacks; install py-spy"
    if any(rank.stack is None for rank in ranks):
        return "not all ranks showed their stacks; install py-spy"
    if all(_in_collective(stack) for stack in stacks):
        return f"all ranks wait in collectives{_place(ranks[0].stack)}"
    if len(stacks) == 1:
        return f"all ranks are at the same place{_place(*stacks)}"
    return f"the ranks are at {len(stacks)} different places"

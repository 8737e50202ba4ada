"""Supervise one job from one `ckptctl run --torchrun` on each of its nodes.

The agents meet in torch's rendezvous. In each meeting agent 0 leads: it holds the state of the
run, starts the attempt, gets from each agent how its node ended and why, decides with `policy`,
and publishes the outcome; all others obey it. An agent sees the ranks of its own node alone: the
report of a hang is made of the evidence of all nodes, and where one does not answer, its ranks
count as unseen.

What the agents exchange is typed, so that agents of another version or job are refused. That is
no protection: the store of torch authenticates nobody and unpickles torch's own state.
"""

# Annotations stay objects, so that reading a document evaluates no string as code.
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ckptctl.distributed.launcher import ATTEMPT, RESTART_COUNT, NoRendezvous, cluster_context
from ckptctl.errors import CkptctlError, MissingExtra, OptionError, UsageError
from ckptctl.failures.classifying import most_decisive
from ckptctl.failures.results import Classification, Evidence
from ckptctl.formats.own.supervision import Attempt, Decision, SectionTimes
from ckptctl.formatting import counted
from ckptctl.model import Count, ExitCode, Id, Positive
from ckptctl.storage.opening import absolute_url
from ckptctl.supervisor.evidence import ANSWER_S, NodeDocument, documents_in, line_of
from ckptctl.supervisor.hangs import HangWatcher
from ckptctl.supervisor.holding import HeldState, end_left_behind, marker_of
from ckptctl.supervisor.nodes import AttemptPlan, Nodes
from ckptctl.supervisor.options import RunOptions
from ckptctl.supervisor.policy import WAIT_FOR_CAPACITY, AttemptEnd, Conclusion
from ckptctl.supervisor.processes import MARKER, Hang, Running, Watcher
from ckptctl.supervisor.restarting import (
    NotStarted,
    StepAlarm,
    Supervised,
    SupervisedJob,
    WatchedRoots,
    hold,
    supervise,
)

if TYPE_CHECKING:
    from ckptctl.distributed.elastic import Launch, Round

T = TypeVar("T")

_VERSION = 2
_POLL_S = 0.2
_END_S = 300.0
"""How long the other nodes may take to end their ranks and to read their logs after a failure."""
_PART_S = 10.0
"""How long the agent with the store waits at the end until the others have read the outcome.

An agent that a signal asked waits for the outcome so long after the time that ranks have to end.
"""
_TORCH_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_FAILED_FIRST, _ASKED = "failed-first", b"asked"
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Node:
    """What an agent is about to do; agents with another `job` do not start together."""

    node: str
    n_ranks: Count
    n_attempts: Count
    """The attempts that it has taken part in."""
    job: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _AttemptStart:
    run: Id
    number: Positive
    restarts: Count
    about: str
    address: str
    nodes: tuple[str, ...]
    sections: dict[str, SectionTimes]


@dataclass(frozen=True, slots=True)
class _NodeEnd:
    """How an attempt ended on one node.

    `place` is its place among those that failed, 0 where it did not. `stopped` is why its agent
    ended it for what happened elsewhere; its code and its last lines then state nothing.
    """

    code: ExitCode
    seconds: float
    place: Count
    cause: Classification | None
    hang: Hang | None
    asked: bool
    stopped: str
    n_not_finite: int


@dataclass(frozen=True, slots=True)
class _LeaderOutcome:
    """What follows; without a decision nothing was started, on the `refused` nodes or on all."""

    reason: str
    exit_code: ExitCode
    decision: Decision | None = None
    attempt: Attempt | None = None
    next_command: str | None = None
    refused: tuple[Count, ...] = ()


class _NodesChanged(Exception):
    """The nodes of a meeting are no longer all there, and meet again."""


class _Ends(Exception):
    """One agent ends, with this conclusion."""

    def __init__(self, conclusion: Conclusion) -> None:
        super().__init__(conclusion.reason)
        self.conclusion = conclusion


def supervise_nodes(
    command: Sequence[str], root: str | Sequence[str], options: RunOptions
) -> Supervised:
    """Do what `keep_running` does, for the ranks of this node, together with the other nodes.

    `command` are the arguments of torchrun. Raises `UsageError` where they are none.
    """
    nodes = options.nodes
    if nodes.nodes or nodes.world_sizes or nodes.hosts_file or nodes.min_world_size > 1:
        raise OptionError(
            "--torchrun",
            "is not used with --nodes, --world-sizes, --min-world-size or --hosts-file: the nodes "
            "are those that meet, within --nnodes MIN:MAX after the --",
        )
    if not command:
        return supervise(command, root, options)  # raises
    try:
        with _quiet_torch():
            from ckptctl.distributed.elastic import read_launch
    except ImportError as error:
        raise MissingExtra(
            f"--torchrun needs torch (tried with 2.13) in the Python of ckptctl: {error}",
            next_command="pip install 'ckptctl[torch]'",
        ) from error
    log_dir = options.output.log_dir
    if log_dir is not None:  # one folder that all nodes see, in the same command for all
        log_dir = os.path.join(log_dir, cluster_context().node)
        options = replace(options, output=replace(options.output, log_dir=log_dir))
    return supervise(command, root, options, partial(_run, read_launch(command)))


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Without the stacks that torch's store prints where another agent is not there.

    The variable is read when torch is imported; the ranks get it as it was.
    """
    before = os.environ.get(_TORCH_LOG_LEVEL)
    os.environ.setdefault(_TORCH_LOG_LEVEL, "FATAL")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_TORCH_LOG_LEVEL]


def _run(launch: "Launch", job: SupervisedJob) -> Supervised:
    with job.signals.listening(), ExitStack() as stack:
        agent = _Agent(launch, job)
        stack.callback(agent.close)
        try:
            conclusion = agent.run()
        except NotStarted as stop:
            return job.not_started(stop)
        except _Ends as end:
            conclusion = end.conclusion
        except NoRendezvous as error:
            where = launch.rendezvous.endpoint
            why = f"the rendezvous at {where} did not come about, or ended: {error}"
            conclusion = Conclusion(Decision.WAIT, why, WAIT_FOR_CAPACITY)
    return job.summary(conclusion)


class _Agent(Watcher):
    """One agent; a watcher of the attempt on its node, which shows it what happens elsewhere."""

    def __init__(self, launch: "Launch", job: SupervisedJob) -> None:
        from ckptctl.distributed.elastic import Members

        self._launch = launch
        self._job = job
        self._members = Members(launch)
        self._node = cluster_context().node
        evidence_dir = job.options.output.evidence_dir
        self._hangs = HangWatcher(job.sections, job.tell, evidence_dir, elsewhere=self._collect)
        self._held: HeldState | None = None
        self._step: int | None = None
        self._names: Sequence[str] = ()
        self._recalled = False
        self._starts_by_s: float | None = None

    def close(self) -> None:
        """Give up the state, where this agent holds it."""
        self._hangs.close()
        self._release()

    def _release(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None

    def run(self) -> Conclusion:
        """Meet and run attempts until none follows."""
        while True:
            self._round = self._meet()
            try:
                outcome = self._lead() if self._round.rank == 0 else self._follow()
            except _NodesChanged as change:
                self._check_starts(change)
                continue
            if outcome.refused and self._round.rank not in outcome.refused:
                self._job.tell(f"{outcome.reason}: the nodes meet again without it")
                continue
            if outcome.decision is Decision.RESTART:
                self._leave_if_asked()
                continue
            if not outcome.refused:
                self._part()
            if outcome.decision is None:
                raise NotStarted(outcome.exit_code, outcome.reason, outcome.next_command)
            return Conclusion(outcome.decision, outcome.reason, outcome.exit_code)

    def _check_starts(self, change: _NodesChanged) -> None:
        """Raise `NoRendezvous` where the nodes meet again and again, and start no attempt."""
        limit_s, now_s = self._launch.time_s("join_timeout"), time.monotonic()
        if self._starts_by_s is None:
            self._starts_by_s = now_s + limit_s
            self._job.tell(f"{change}: the nodes meet again")
        if now_s > self._starts_by_s:
            raise NoRendezvous(
                f"the nodes do not stay together until an attempt starts, for {limit_s} s; their "
                "clocks must agree within the keep-alive"
            )

    # The meeting

    def _meet(self) -> "Round":
        met = self._members.meeting()
        while not met.done():
            self._leave_if_asked()
            time.sleep(_POLL_S)
        meeting = met.result()
        if meeting.rank != 0:
            self._release()  # before the one that leads now takes it
        self._stop: Hang | None = None
        self._let_end_s: float | None = None
        self._n_collected = 0
        meeting.put(f"node/{meeting.rank}", msgspec.json.encode(self._about()))
        return meeting

    def _about(self) -> _Node:
        roots, options = self._job.all_roots, self._job.options
        budget = options.budget
        places = (*roots.urls, *roots.optional, *filter(None, [options.state]))
        limits = (budget.max_restarts, budget.max_free_restarts, *sorted(budget.no_restart))
        job = (_VERSION, self._launch.script, *limits, *map(absolute_url, places))
        n_attempts = len(self._job.attempts)
        return _Node(self._node, self._launch.n_ranks, n_attempts, tuple(map(str, job)))

    def _leave_if_asked(self) -> None:
        asked = self._job.signals.asked
        if asked is not None:
            raise _Ends(Conclusion(Decision.RESTART, "a signal asked for it", 128 + asked))

    def _await(self, rank: int, *keys: str, leaves_after_s: float | None = None) -> str:
        """The first of these keys that agent `rank` publishes; `_NodesChanged` where it is gone.

        A signal ends the agent, so long after it was seen here; without a time it does not.
        """
        leaves_at_s = None
        while True:
            for key in keys:
                if self._round.get(key) is not None:
                    return key
            if leaves_after_s is not None and self._job.signals.asked is not None:
                now_s = time.monotonic()
                leaves_at_s = leaves_at_s or now_s + leaves_after_s
                if now_s >= leaves_at_s:
                    self._round.count("asked")
                    self._leave_if_asked()
            if rank not in self._members.present():
                raise _NodesChanged(f"{self._names_of([rank])} is gone")
            time.sleep(_POLL_S)

    def _read(self, key: str, kind: type[T]) -> T:
        data = self._round.get(key) or b""
        try:
            if len(data) > _MAX_BYTES:
                raise msgspec.DecodeError("it is too large")
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as error:
            raise UsageError(
                f"{self._launch.rendezvous.endpoint}: the agents do not understand each other "
                f"({key}: {error}): another version of ckptctl, or another job with the same "
                "--rdzv-id",
                next_command="ckptctl --version",
            ) from error

    def _names_of(self, ranks: Iterable[int]) -> str:
        names = dict(enumerate(self._names))
        return ", ".join(names.get(rank, f"node {rank}") for rank in ranks)

    def _part(self) -> None:
        """Wait until all have read the outcome: one of the agents serves the store."""
        until_s = time.monotonic() + _PART_S
        with suppress(NoRendezvous):
            n_parted = self._round.count("parted")
            while n_parted < self._round.size and time.monotonic() < until_s:
                time.sleep(_POLL_S)
                n_parted = int(self._round.get("parted") or b"0")
            self._members.close()

    # One attempt

    def _lead(self) -> _LeaderOutcome:
        self._check_size()
        try:
            outcome = self._led()
        except NotStarted as stop:
            outcome = _LeaderOutcome(stop.why, stop.code, next_command=stop.next_command)
        except CkptctlError as error:
            self._publish(
                _LeaderOutcome(error.message, error.exit_code, next_command=error.next_command)
            )
            self._part()
            raise
        self._publish(outcome)
        return outcome

    def _publish(self, outcome: _LeaderOutcome) -> None:
        if self._job.signals.asked is not None:
            self._release()  # before the one that leads next takes it
        with suppress(NoRendezvous):  # what the root holds is true on this node all the same
            self._round.put("outcome", msgspec.json.encode(outcome))

    def _led(self) -> _LeaderOutcome:
        job, others = self._job, range(1, self._round.size)
        for rank in others:
            self._await(rank, f"node/{rank}")
        nodes = [self._read(f"node/{rank}", _Node) for rank in range(self._round.size)]
        differing = _differing(nodes)
        if differing is not None:
            return differing
        names = self._names = [node.node for node in nodes]
        if self._held is None:
            if any(node.n_attempts for node in nodes):
                self._reset_no_budget()  # this one came later: it was reset before
            seen = job.prepare()
            self._held, self._step = hold(job, seen), seen.step
        held = self._held
        if job.attempts:
            job.signals.pause(job.pause_s(held))
        asked = job.signals.asked
        n_asked = (asked is not None) + int(self._round.get("asked") or b"0")
        if n_asked:
            goes_on = self._goes_on_with(len(nodes) - n_asked)
            decision = Decision.RESTART if goes_on else Decision.STOPPED
            return _LeaderOutcome(
                "a signal asked for it", 128 + (asked or signal.SIGTERM), decision
            )
        job.nodes = Nodes(replace(job.options.nodes, nodes=names), job.command, job.tell)
        world_size = sum(node.n_ranks for node in nodes)
        plan = AttemptPlan([], {}, ",".join(names), world_size, tuple(names))
        state, restarts = job.begun(held.state, plan)
        about = job.about(state, plan, self._step)
        number, sections = state["attempts"][-1].number, dict(state["sections"])
        address = self._launch.free_address()
        start = _AttemptStart(
            state["run"], number, restarts, about, address, tuple(names), sections
        )
        held.save(state)
        self._round.put("start", msgspec.json.encode(start))
        inspect = WatchedRoots(job.all_roots, job.options).inspect
        alarm = StepAlarm(job.roots.url, job.options, inspect, lambda: held.state["best"])
        try:
            own = self._attempt(start, plan, held, alarm)
            ended = self._merged([own, *map(self._end_of, others)])
        except NoRendezvous as error:  # the state holds why, though no other agent hears of it
            job.conclude(held, self._without_others(error), plan)
            raise
        conclusion = job.conclude(held, ended, plan)
        last = job.attempts[-1]
        self._step = last.step
        return _LeaderOutcome(conclusion.reason, conclusion.exit_code, conclusion.decision, last)

    def _check_size(self) -> None:
        # Torch takes a node whose keep-alive is late out of a meeting that is complete.
        if not self._goes_on_with(self._round.size):
            raise _NodesChanged(f"{counted(self._round.size, 'node')} of --nnodes came")

    def _goes_on_with(self, n_nodes: int) -> bool:
        return n_nodes >= max(1, self._launch.rendezvous.min_nodes)

    def _follow(self) -> _LeaderOutcome:
        self._check_size()
        if self._await(0, "start", "outcome", leaves_after_s=0.0) == "start":
            start = self._read("start", _AttemptStart)
            self._names = start.nodes
            self._attempt(start, AttemptPlan([], {}, "", None, ()))
            self._await(0, "outcome", leaves_after_s=self._launch.shutdown_s + _PART_S)
        outcome = self._read("outcome", _LeaderOutcome)
        if outcome.attempt is not None:
            self._job.record(outcome.attempt)
        return outcome

    def _attempt(self, start: _AttemptStart, plan: AttemptPlan, *watchers: Watcher) -> _NodeEnd:
        job, meeting = self._job, self._round
        if not self._recalled:
            self._recalled = True
            job.sections.recall(start.sections)
        name = f"{start.run}/{start.number}"
        marker = f"{marker_of(start.run, job.roots.url)}@{self._node}"
        end_left_behind(marker, job.tell)
        self._reset_no_budget()
        command = self._launch.command(start.address, meeting.rank, meeting.size)
        plan = plan._replace(command=command)
        variables = {RESTART_COUNT: str(start.restarts), ATTEMPT: name, MARKER: marker}
        self._starts_by_s = None
        runner = job.runner(*watchers, self._hangs, self)
        self._own_end = runner.run(start.number, plan, variables, start.about)
        end = self._node_end(self._own_end)
        meeting.put(f"end/{meeting.rank}", msgspec.json.encode(end))
        return end

    def _reset_no_budget(self) -> None:
        """The budget is reset once, whichever agent leads later."""
        budget = replace(self._job.options.budget, reset_budget=None)
        self._job.options = replace(self._job.options, budget=budget)

    def _node_end(self, ended: AttemptEnd) -> _NodeEnd:
        asked = self._job.signals.asked is not None
        by_other = self._stop_of(ended)
        place = 0
        if ended.code or ended.hang is not None:
            place = self._round.count("failed")
            if place == 1:
                # Ranks that stop together with those that a signal asked may still save.
                self._round.put(_FAILED_FIRST, _ASKED if asked else b"failed")
        return _NodeEnd(
            ended.code,
            ended.seconds,
            place,
            None if ended.cause is None else _placed(ended.cause, self._node),
            None if by_other else ended.hang,
            asked,
            by_other.message if by_other else "",
            ended.n_not_finite,
        )

    def _stop_of(self, ended: AttemptEnd) -> Hang | None:
        """What happened elsewhere for which this agent ended its ranks; None where they ended."""
        return self._stop if ended.hang is self._stop else None

    def _without_others(self, error: NoRendezvous) -> AttemptEnd:
        """How the attempt ended on this node, where the others can no longer be asked."""
        ended = self._own_end
        if self._stop_of(ended) is None and (ended.code or ended.hang is not None):
            return ended  # the ranks of this node failed or hung
        why = f"the rendezvous of the nodes does not answer: {error}"
        cause = Classification.stated("infra-node", why, "medium", ())
        code = ended.code or 128 + signal.SIGTERM
        return ended._replace(code=code, cause=cause, hang=None, lost_node=True)

    def _end_of(self, rank: int) -> _NodeEnd | None:
        """How the attempt ended on another node; None where that is gone or does not answer."""
        until_s = None
        while self._round.get(f"end/{rank}") is None:
            now_s = time.monotonic()
            if until_s is None and self._round.get(_FAILED_FIRST) is not None:
                until_s = now_s + self._launch.shutdown_s + _END_S
            is_late = until_s is not None and now_s > until_s
            if is_late or rank not in self._members.present():
                return None
            time.sleep(_POLL_S)
        return self._read(f"end/{rank}", _NodeEnd)

    def _merged(self, ends: Sequence[_NodeEnd | None]) -> AttemptEnd:
        """How the attempt ended on all nodes; None is a node that is gone."""
        from ckptctl.distributed.elastic import most_telling

        there = [end for end in ends if end is not None]
        failed = sorted((end for end in there if end.place), key=lambda end: end.place)
        codes = [end.code for end in failed if end.code and not end.stopped]
        codes = codes or [end.code for end in failed if end.code]
        n_not_finite = max(end.n_not_finite for end in there)
        seconds = max(end.seconds for end in there)
        ended = AttemptEnd(
            most_telling(codes), seconds, None, None, False, n_not_finite=n_not_finite
        )
        asked = [name for name, end in zip(self._names, ends, strict=True) if end and end.asked]
        gone = [name for name, end in zip(self._names, ends, strict=True) if end is None]
        if asked and not self._goes_on_with(len(there) - len(asked)):
            return ended._replace(asked=True)
        if asked:
            return ended._replace(nodes_change=f"a signal asked {', '.join(asked)} to end")
        if gone:
            why = f"the agent on {', '.join(gone)} is gone"
            cause = Classification.stated("infra-node", why, "high", gone)
            return ended._replace(cause=cause, lost_node=True)
        hangs = [end.hang for end in failed if end.hang is not None]
        if hangs:
            # An agent that was late to collect saw fewer of the ranks.
            return ended._replace(hang=min(hangs, key=lambda hang: not hang.ranks))
        if any(end.stopped == _JOINS.message for end in there):
            return ended._replace(nodes_change=_JOINS.message)
        causes = [end.cause for end in failed if end.cause is not None and _states(end)]
        return ended._replace(cause=most_decisive(causes) if causes else None)

    # What happens elsewhere, while the ranks run

    def poll(self, running: Running, now_s: float) -> Hang | None:
        """Why the ranks of this node must end for what happened elsewhere; None where nothing did.

        Evidence of them is collected where an agent that sees a hang asks for it.
        """
        try:
            self._stop = self._stopped_by(running, now_s)
        except NoRendezvous as error:
            self._stop = Hang(f"the rendezvous of the nodes does not answer: {error}")
        return self._stop

    def _stopped_by(self, running: Running, now_s: float) -> Hang | None:
        meeting = self._round
        if meeting.get(f"collect/{self._n_collected}") is not None:
            self._contribute(self._hangs.collect_here(running))
        if meeting.get("outcome") is not None:
            return Hang("the agent that leads ended")
        failed = meeting.get(_FAILED_FIRST)
        if failed is not None:
            if self._let_end_s is None:
                self._let_end_s = now_s + (self._launch.shutdown_s if failed == _ASKED else 0.0)
            is_over = now_s >= self._let_end_s
            return Hang("the attempt ended on another node") if is_over else None
        gone = {*range(meeting.size)} - self._members.present()
        if gone:
            return Hang(f"{self._names_of(sorted(gone))} is gone")
        return _JOINS if meeting.rank == 0 and self._members.n_waiting() else None

    def _contribute(self, own: NodeDocument) -> None:
        key = f"evidence/{self._n_collected}/{self._round.rank}"
        self._n_collected += 1
        self._round.put(key, line_of(own).encode())

    def _collect(self, _variables: Mapping[str, str], own: NodeDocument) -> list[NodeDocument]:
        meeting, number = self._round, self._n_collected
        missing = {*range(meeting.size)} - {meeting.rank}
        answers: list[NodeDocument] = []
        until_s = time.monotonic() + ANSWER_S
        with suppress(NoRendezvous):
            self._contribute(own)
            meeting.put(f"collect/{number}", b"1")
            while missing and time.monotonic() < until_s and meeting.get(_FAILED_FIRST) is None:
                missing &= self._members.present()
                for rank in sorted(missing):
                    data = meeting.get(f"evidence/{number}/{rank}")
                    if data is not None:
                        missing.discard(rank)
                        answers += documents_in(data[:_MAX_BYTES].decode("ascii", "replace"))
                time.sleep(_POLL_S)
        return answers


def _differing(nodes: Sequence[_Node]) -> _LeaderOutcome | None:
    """Why these agents do not start a job together; None where they are those of one job.

    Where agents have run the job before, only those are refused that are not of it: one that was
    started by mistake must not end a job that runs.
    """
    by_age = sorted(enumerate(nodes), key=lambda item: -item[1].n_attempts)
    _, oldest = by_age[0]
    names: set[str] = set()
    refused: list[int] = []
    reason = ""
    for rank, node in by_age:
        if node.job != oldest.job:
            reason = (
                f"{node.node} and {oldest.node} start different jobs: the roots, the budget, the "
                "script and the version of ckptctl must be the same on all nodes"
            )
        elif node.node in names:
            reason = (
                f"two agents of this job run on {node.node}, and each node has one; NODE_NAME "
                "names a node otherwise"
            )
        else:
            names.add(node.node)
            continue
        refused.append(rank)
    if not refused:
        return None
    return _LeaderOutcome(
        reason, UsageError.exit_code, refused=tuple(refused) if oldest.n_attempts else ()
    )


_JOINS = Hang("another node joins")


def _placed(cause: Classification, node: str) -> Classification:
    """The classification with the node in the name of each log: all nodes call theirs the same."""

    def placed(evidence: Sequence[Evidence]) -> tuple[Evidence, ...]:
        return tuple(replace(each, file=f"{node}:{each.file}") for each in evidence)

    return replace(
        cause,
        evidence=placed(cause.evidence),
        consequences=placed(cause.consequences),
        others=placed(cause.others),
    )


def _states(end: _NodeEnd) -> bool:
    """Whether the cause on a node states more than that its agent ended the ranks."""
    rule = "" if end.cause is None else end.cause.rule
    return not (end.stopped and rule.startswith(("stop.", "exit.")))

"""Agree with the launchers of the other nodes on each attempt: when it begins, and how it ended.

One launcher leads. It begins an attempt when all are there and none has processes of an earlier
one, ends it on all nodes when it has ended on one, and decides when the last share has ended. The
others follow the revisions of the state. A leader that is gone is replaced by a
follower, and the attempt that it led ends everywhere.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, cast

from ckptctl.errors import Fenced, StorageUnavailable
from ckptctl.formats.own.files import MAX_STRING
from ckptctl.formats.own.supervision import (
    LaunchDocument,
    LauncherDocument,
    MemberDocument,
    OwnerDocument,
    ShareDocument,
    SupervisorDocument,
)
from ckptctl.formatting import duration
from ckptctl.supervisor.attempts import ended_together, share_document
from ckptctl.supervisor.child import EndedElsewhere, Running, Signals, Watcher
from ckptctl.supervisor.holding import LEASE_S, HeldState, end_left_behind, marker_of
from ckptctl.supervisor.launchers import POLL_S, Launchers
from ckptctl.supervisor.nodes import Place
from ckptctl.supervisor.policy import Conclusion, Ended
from ckptctl.supervisor.results import Decision

_LEAVING_S = 60.0
"""How long the leader waits for the others to read how the job ended."""


class Assignment(NamedTuple):
    """What a follower has to run: its share of the attempt that the state holds."""

    number: int
    place: Place
    n_nodes: int
    state: SupervisorDocument
    launch: LaunchDocument


class JobEnd(NamedTuple):
    """The end of the job for all launchers."""

    decision: Decision
    exit_code: int
    reason: str


class Turn(NamedTuple):
    """Nobody leads.

    `gone` is the leader that is gone, None where there was none; `alone` a `ckptctl run` that
    supervises the root as the only one, and may live.
    """

    gone: str | None
    alone: OwnerDocument | None


class Coordination(Watcher):
    """The agreement of this launcher with the others; a watcher of its shares.

    `held` is the state while this launcher leads, else None.
    """

    def __init__(
        self,
        launchers: Launchers,
        signals: Signals,
        tell: Callable[[str], None],
        wait_s: float,
        root: str,
    ) -> None:
        self.held: HeldState | None = None
        self._running = 0
        self.followed: list[int] = []
        """The attempts that this launcher had a share of."""
        self._launchers = launchers
        self._signals = signals
        self._tell = tell
        self._wait_s = wait_s
        self._root = root
        self._cleaned = False
        self.is_new = True
        """It has neither led nor followed."""

    @property
    def id(self) -> str:
        """The name of this launcher."""
        return self._launchers.id

    @property
    def count(self) -> int:
        """How many launchers there are in all."""
        return self._launchers.options.count

    # Who leads

    def next(self, *, reset: bool) -> Assignment | JobEnd | Turn:
        """Wait for a share to run, for the end of the job, or for the turn to lead.

        A damaged state is replaced at a `reset`. Raises `StorageUnavailable` where the storage
        does not answer in time, and `OwnFileUnreadable` for a damaged state.
        """
        launchers = self._launchers
        answers, answered_s = launchers.answers, time.monotonic()
        while True:
            launchers.check()
            self._report_signal()
            if launchers.unreadable is not None:
                if reset and self.is_new:
                    return Turn(None, None)
                raise launchers.unreadable
            if launchers.answers > answers:
                answers, answered_s = launchers.answers, time.monotonic()
            if launchers.answers and (found := self._next()) is not None:
                return found
            waited_s = time.monotonic() - answered_s
            if waited_s > self._wait_s and (launchers.failure or waited_s > LEASE_S):
                raise StorageUnavailable(launchers.failure or f"{self._root} does not answer")
            time.sleep(POLL_S / 2)

    def _next(self) -> Assignment | JobEnd | Turn | None:
        state, asked = self._launchers.state, self._signals.asked
        self._clean_up(state)
        launch = None if state is None else state.get("launch")
        if state is not None and launch is not None and self.id in launch["ids"]:
            if launch["exit_code"] is not None:
                return JobEnd(_decision(launch), launch["exit_code"], launch["reason"])
            share = self.share(state)
            if share is not None:
                return share
        owner = None if state is None else state["owner"]
        if owner is None or launch is None or self._is_gone(owner, launch):
            if asked is not None:
                return JobEnd(Decision.STOPPED, 128 + asked, "a signal asked for it")
            alone = owner if launch is None else None
            return Turn(None if owner is None else owner["id"], alone)
        return None

    def _is_gone(self, owner: OwnerDocument, launch: LaunchDocument) -> bool:
        return self._launchers.is_gone(owner["id"], launch["leader"])

    def share(self, state: SupervisorDocument) -> Assignment | None:
        """The share of this launcher in an attempt that begins."""
        launch = state.get("launch")
        last = state["attempts"][-1] if state["attempts"] else None
        if launch is None or last is None or last["decision"] is not None:
            return None
        ids = [member["id"] for member in launch["members"]]
        if self.id not in ids or last["number"] in self.followed:
            return None
        if launch["ending"]:  # it has ended on another node before it began on this one
            never = Ended(0, 0.0, None, None, asked=False, ordered=True)
            self.run_share(last["number"], lambda: never)
            return None
        node_rank, head = ids.index(self.id), launch["members"][0]["node"]
        place = Place(node_rank, head, launch["step"])
        return Assignment(last["number"], place, len(ids), state, launch)

    def _clean_up(self, state: SupervisorDocument | None) -> None:
        """End once what a killed launcher left at this place."""
        if not self._cleaned and state is not None:
            self._cleaned = True
            marker = marker_of(state, self._root, self._launchers.options.place)
            end_left_behind(marker, self._tell)

    def _report_signal(self) -> None:
        if self._signals.asked is not None:
            self._launchers.report_signal(self._signals.asked)

    def launch(self) -> LaunchDocument:
        """What a leader writes when it begins to lead."""
        return {
            "leader": self._launchers.options.place,
            "ids": self._ids(),
            "members": [],
            "restarts": 0,
            "step": None,
            "ending": True,
            "signal": None,
            "exit_code": None,
            "decision": None,
            "reason": "",
        }

    def _ids(self) -> list[str]:
        return [each["id"] for each in self._launchers.living().values()]

    # The leader

    def begin_to_lead(self, held: HeldState) -> None:
        """Hold the state, and read the reports of all launchers."""
        self.held, self.is_new = held, False
        self._launchers.watch_all(True)

    def end_to_lead(self) -> None:
        """Give the state up, or detect that another holds it."""
        held, self.held = self.held, None
        self._launchers.watch_all(False)
        if held is not None:
            held.release()

    def write(self, state: SupervisorDocument, **changes: object) -> bool:
        """Write a state with a decision, and wait until it is in the store.

        False where that takes too long. Raises `Fenced` where another one leads by now.
        """
        held = self.leading
        self._save(state, **changes)
        until_s = time.monotonic() + self._wait_s
        while not held.is_written and time.monotonic() < until_s:
            self._check_lead()
            self._launchers.check()
            time.sleep(POLL_S / 2)
        return held.is_written

    def _save(self, state: SupervisorDocument, **changes: object) -> None:
        launch = cast(LaunchDocument, {**self._decided(), "ids": self._ids(), **changes})
        self.leading.save({**state, "launch": launch})

    @property
    def leading(self) -> HeldState:
        """The state that this launcher holds as the leader."""
        if self.held is None:
            raise RuntimeError("this launcher does not lead")
        return self.held

    def _check_lead(self) -> None:
        """Raise `Fenced` where another one leads; a read detects it before a write does."""
        held, state = self.leading, self._launchers.state
        held.poll()
        owner = None if state is None else state["owner"]
        if owner is not None and owner["id"] != self.id and self._launchers.number > held.number:
            raise Fenced(f"{self._root}: another `ckptctl run` leads this job by now")

    def pause(self, seconds: float) -> None:
        """Wait before a restart; a signal to any launcher ends the wait."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and self.signal() is None:
            self._check_lead()
            time.sleep(POLL_S / 2)

    def _decided(self) -> LaunchDocument:
        return self.leading.state.get("launch") or self.launch()

    def gather(self, excluded: Sequence[str]) -> Mapping[int, LauncherDocument]:
        """The launchers that can begin an attempt, when all are there or the time is over.

        Those of excluded nodes are not waited for. Returns at once after a signal.
        """
        launchers = self._launchers
        until_s = time.monotonic() + launchers.options.wait_s
        is_reported, cleaned = False, {launchers.options.place}
        while True:
            self._check_lead()
            launchers.check()
            for place in {*launchers.died_here()} - cleaned:
                cleaned.add(place)
                self._end_left_behind(place)
            living = launchers.living()
            idle = {place: each for place, each in living.items() if each["running"] is None}
            missing = [
                str(place)
                for place in range(launchers.options.count)
                if place not in idle and launchers.last_node(place) not in excluded
            ]
            if not missing or self.signal() is not None:
                return idle
            if time.monotonic() >= until_s:
                waited = duration(launchers.options.wait_s)
                self._tell(f"warning: node rank {', '.join(missing)} did not come in {waited}")
                return idle
            if not is_reported:
                is_reported = True
                self._tell(
                    f"waiting for the `ckptctl run` of node rank {', '.join(missing)}, at most "
                    f"{duration(launchers.options.wait_s)}"
                )
            time.sleep(POLL_S / 2)

    def signal(self) -> int | None:
        """The signal that asked one of the launchers to end."""
        self._report_signal()
        signals = (each["signal"] for each in self._launchers.living().values())
        return next((each for each in signals if each is not None), None)

    def end_together(self, number: int, own: Ended | None, began_s: float) -> Ended:
        """Wait until all shares of an attempt have ended, and return how it did.

        `own` is the end of the leader's share, None where it has none.
        """
        is_over = False
        while True:
            stop = self._of_others(number)
            if own is not None and (own.code or own.hang):
                stop = stop or EndedElsewhere("the share of the leader ended")
            if stop is not None and not is_over:
                is_over = True
                if own is None:
                    self._tell(f"ended the job: {stop.message}")
                self._save(self.leading.state, ending=True)
            shares, gone, waits = self._shares(number)
            if not waits:
                break
            time.sleep(POLL_S / 2)
        if own is not None:
            shares.append(share_document(number, own))
        for member in gone:
            self._tell(f"warning: the `ckptctl run` of {member['node']} is gone")
        signal = self.signal()
        return ended_together(shares, gone, signal, time.monotonic() - began_s)

    def _shares(self, number: int) -> tuple[list[ShareDocument], list[MemberDocument], bool]:
        """The shares of the others that have ended, the members that are gone, and if any runs."""
        shares, gone, waits = [], [], False
        living = self._launchers.living()
        for member in self._decided()["members"]:
            there = living.get(member["launcher"])
            if member["id"] == self.id:
                continue
            if there is None or there["id"] != member["id"]:
                gone.append(member)
                self._end_left_behind(member["launcher"])
            elif there["share"] is not None and there["share"]["attempt"] == number:
                shares.append(there["share"])
            else:
                waits = True
        return shares, gone, waits

    def _end_left_behind(self, place: int) -> None:
        """End what a launcher that is gone left on this machine."""
        end_left_behind(marker_of(self.leading.state, self._root, place), self._tell)

    def conclude(self, conclusion: Conclusion) -> None:
        """Write how the job ends for all, and wait until the others have read it."""
        self.write(
            self.leading.state,
            ending=True,
            exit_code=conclusion.exit_code,
            decision=conclusion.decision.value,
            reason=conclusion.reason[:MAX_STRING],
        )
        until_s = time.monotonic() + _LEAVING_S
        while len(self._launchers.living()) > 1 and time.monotonic() < until_s:
            self._check_lead()
            time.sleep(POLL_S / 2)

    # A share of an attempt

    def run_share(self, number: int, run: Callable[[], Ended]) -> Ended:
        """Run a share, and report its begin and its end."""
        if number not in self.followed:
            self.followed.append(number)
        self.is_new = False
        self._running = number
        self._launchers.report(running=number)
        try:
            if self.held is not None:
                self._check_lead()
            ended = run()
        except BaseException:
            self._launchers.report(running=None)
            raise
        self._launchers.report(running=None, share=share_document(number, ended))
        return ended

    def poll(self, _running: Running, _now_s: float) -> EndedElsewhere | None:
        """Whether the attempt has ended on another node; passes on signals of others."""
        self._launchers.check()
        self._report_signal()
        if self.held is not None:
            return self._of_others(self._running)
        state = self._launchers.state
        if state is None:
            return None
        launch = state.get("launch")
        last = state["attempts"][-1] if state["attempts"] else None
        if launch is None or last is None or last["number"] != self._running:
            return EndedElsewhere("its attempt was ended by another `ckptctl run`")
        if launch["signal"] is not None:
            self._signals.pass_on(launch["signal"])
        elif launch["ending"] or last["decision"] is not None:
            return EndedElsewhere("the attempt has ended on another node")
        if state["owner"] is None or self._is_gone(state["owner"], launch):
            return EndedElsewhere("the `ckptctl run` that leads is gone")
        return None

    def _of_others(self, number: int) -> EndedElsewhere | None:
        """Why the attempt must end on all nodes; a signal is passed on instead."""
        self._check_lead()
        signal = self.signal()
        if signal is not None and self._decided()["signal"] is None:
            self._signals.pass_on(signal)
            self._save(self.leading.state, signal=signal)
        shares, gone, _ = self._shares(number)
        for member in gone:
            return EndedElsewhere(f"the `ckptctl run` of {member['node']} is gone")
        if signal is not None:
            return None
        for share in shares:
            if share["hang"] is not None:
                return EndedElsewhere(f"a hang on another node: {share['hang']['message']}")
            if share["exit_code"]:
                return EndedElsewhere(f"its share on another node ended with {share['exit_code']}")
        return None


def _decision(launch: LaunchDocument) -> Decision:
    """The decision at the end of a job; the leader may be of another version."""
    with suppress(ValueError):
        return Decision(launch["decision"] or "")
    return Decision.STOPPED


def members_of(nodes: Sequence[str], idle: Mapping[int, LauncherDocument]) -> list[MemberDocument]:
    """Those launchers that run an attempt on these nodes, in the order of their numbers."""
    left = Counter(nodes)
    members: list[MemberDocument] = []
    for place, each in idle.items():
        if left[each["node"]] > 0:
            left[each["node"]] -= 1
            members.append({"id": each["id"], "launcher": place, "node": each["node"]})
    return members

"""Show the `ckptctl run` of one node to those of the others, and detect which of them run.

Each launcher of a job keeps a report beside the state, under its number, which it alone writes
and renews. The one that holds the state leads: its decisions are revisions of the state, so two
never decide at once.

A launcher is gone when its report has not changed for a lease. Only time in which the storage
answered this process counts, by its own monotonic clock: clocks of nodes differ, processes are
suspended, and a storage that does not answer shows nothing about the others. A launcher on this
machine is gone when its process is.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from ckptctl.distributed.launcher import cluster_context, is_node
from ckptctl.distributed.process_table import Process, is_alive, machine, own_process
from ckptctl.errors import CkptctlError, Fenced, OwnFileUnreadable, StorageUnavailable, UsageError
from ckptctl.formats.own.supervision import (
    MAX_LAUNCHERS,
    LauncherDocument,
    ShareDocument,
    SupervisorDocument,
)
from ckptctl.options import not_negative
from ckptctl.storage.waiting import leave_unwatched, start_daemon
from ckptctl.supervisor import holding
from ckptctl.supervisor.state import Revisions

POLL_S = 1.0
RENEW_S = 5.0
_MOST_COUNTED = 0.25
"""The share of a lease that counts for the time between two answers of the storage, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherOptions:
    """How many `ckptctl run` start the job together, and which of them this is.

    `count` is how many there are, one for each node; `place` is the number of this one, from 0.
    `wait_s` is how long those that are missing are waited for.
    """

    count: int = 1
    place: int = 0
    wait_s: float = 600.0
    """Source: `join_timeout` of torch's rendezvous, 600 s (torch 2.13)."""

    def __post_init__(self) -> None:
        not_negative("wait-nodes", self.wait_s)
        if not 1 <= self.count <= MAX_LAUNCHERS:
            raise UsageError(f"--nnodes is {self.count}, and must be from 1 to {MAX_LAUNCHERS:,}")
        if not 0 <= self.place < self.count:
            raise UsageError(
                f"--node-rank is {self.place}, and must be from 0 to {self.count - 1} with "
                f"--nnodes {self.count}"
            )


class LastReport(NamedTuple):
    """A report of a launcher; `changed_s` is the counted time of its last change.

    `changes` is that it was seen to change: a report can be left from an earlier job.
    """

    report: LauncherDocument
    changed_s: float
    changes: bool


class Launchers:
    """The launchers of one job, this one among them.

    A thread renews the report of this one, and reads the state and the reports of the others.
    All else is called in the main thread.
    """

    def __init__(self, revisions: Revisions, options: LauncherOptions) -> None:
        node = cluster_context().node
        if not is_node(node):
            raise UsageError(f"the name of this node is {node!r}, which is no name of a host")
        own = own_process()
        self.options = options
        self.own: LauncherDocument = {
            "id": os.urandom(16).hex(),
            "successor": 0,
            "node": node,
            "machine": machine(),
            "pid": own.pid,
            "started": own.started,
            "beat": 0,
            "running": None,
            "signal": None,
            "share": None,
        }
        self.leads = False
        self.state: SupervisorDocument | None = None
        """The newest revision; None where there is none."""
        self.number = -1
        """Its number."""
        self.answers = 0
        """How often the storage has answered."""
        self.failure: str | None = None
        """Why it does not answer now."""
        self.unreadable: OwnFileUnreadable | None = None
        """The state is damaged, or of another version."""
        self._revisions = revisions
        self._seen: dict[int, LastReport | None] = {}
        self._counted_s = 0.0
        self._replaced = False
        self._written_beat = -1
        self._changed = threading.Condition()
        self._closed = False
        self._thread = start_daemon("ckptctl-launchers", self._run)

    @property
    def id(self) -> str:
        """The name of this launcher."""
        return self.own["id"]

    def report(self, *, running: int | None, share: ShareDocument | None = None) -> None:
        """Report which attempt this launcher runs, and how its share of the last ended."""
        with self._changed:
            self.own = {**self.own, "running": running, "share": share or self.own["share"]}
            self._renew()

    def report_signal(self, number: int) -> None:
        """Report the signal that asked this launcher to end; the first one counts."""
        with self._changed:
            if self.own["signal"] is None:
                self.own = {**self.own, "signal": number}
                self._renew()

    def _renew(self) -> None:
        self.own = {**self.own, "beat": self.own["beat"] + 1}
        self._changed.notify_all()

    def watch_all(self, leads: bool) -> None:
        """Read the reports of all launchers from now on, or only that of the leader."""
        with self._changed:
            if self.leads != leads:
                self.leads = leads
                self._seen.clear()

    def living(self) -> dict[int, LauncherDocument]:
        """The reports of the launchers that live, by their numbers; of this one, too."""
        with self._changed:
            found = {
                place: seen.report
                for place, seen in self._seen.items()
                if seen is not None and self._lives(seen)
            }
            return dict(sorted({**found, self.options.place: self.own}.items()))

    def last_node(self, place: int) -> str | None:
        """The node of the launcher that was at a place last."""
        seen = self._seen.get(place)
        return None if seen is None else seen.report["node"]

    def died_here(self) -> list[int]:
        """The places of launchers of this machine whose process is gone."""
        with self._changed:
            return [
                place
                for place, seen in self._seen.items()
                if seen is not None
                and seen.report["machine"] == self.own["machine"] != ""
                and not self._lives(seen)
            ]

    def is_gone(self, name: str, place: int) -> bool:
        """Whether the launcher of this name no longer lives, or is no longer at its place."""
        with self._changed:
            if place not in self._seen:
                return False  # not read yet
            seen = self._seen[place]
            same = seen is not None and seen.report["id"] == name
            return not (seen is not None and same and self._lives(seen, proven=True))

    def _lives(self, seen: LastReport, *, proven: bool = False) -> bool:
        """Whether a launcher lives; one that was not seen to change does if that is `proven`."""
        report = seen.report
        if report["machine"] and report["machine"] == self.own["machine"]:
            return is_alive(Process(report["pid"], report["started"]))
        return (proven or seen.changes) and self._counted_s - seen.changed_s <= holding.LEASE_S

    def check(self) -> None:
        """Raise `Fenced` where another process has taken the place of this one."""
        if self._replaced:
            raise Fenced(
                f"{self._revisions.url}: another `ckptctl run` with --node-rank "
                f"{self.options.place} took the place of this one, which ends its processes",
                next_command="ckptctl run --help",
            )

    def close(self) -> None:
        """Remove the report, so that nobody waits for this launcher."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(RENEW_S)

    # The thread

    def _run(self) -> None:
        leave_unwatched()
        answered_s: float | None = None
        renewed_s = float("-inf")
        while not (self._closed or self._replaced):
            now_s = time.monotonic()
            try:
                if now_s - renewed_s >= RENEW_S or self.own["beat"] != self._written_beat:
                    self._write_own()
                    renewed_s = now_s
                self._read()
            except OwnFileUnreadable as error:
                self.unreadable = error
            except CkptctlError as error:
                self.failure = error.message
            else:
                with self._changed:
                    if answered_s is not None:
                        most_s = _MOST_COUNTED * holding.LEASE_S
                        self._counted_s += min(now_s - answered_s, most_s)
                    self.answers += 1
                    self.failure = self.unreadable = None
                answered_s = now_s
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self.own["beat"] != self._written_beat, POLL_S
                )
        if not self._replaced:
            with suppress(CkptctlError):
                self._revisions.leave(self.options.place)

    def _write_own(self) -> None:
        """Renew the own report, unless a later process has the place."""
        there = self._revisions.launcher(self.options.place)
        successor = self.own["successor"]
        if there is not None and there["id"] != self.id:
            if self._written_beat >= 0 and there["successor"] > successor:
                self._replaced = True
                return
            successor = max(successor, there["successor"] + 1)
        with self._changed:
            self.own = {**self.own, "beat": self.own["beat"] + 1, "successor": successor}
            report = self.own
        self._revisions.report(self.options.place, report)
        self._written_beat = report["beat"]

    def _read(self) -> None:
        """Read the state, and the reports: all of them where this one leads."""
        number = max(self._revisions.numbers(), default=0)
        if number < self.number:
            raise StorageUnavailable(f"{self._revisions.url} has disappeared")
        state = self.state if number == self.number else self._revisions.newest()
        launch = None if state is None else state.get("launch")
        places: Iterable[int] = () if launch is None else (launch["leader"],)
        if self.leads:
            places = range(self.options.count)
        found = {place: self._revisions.launcher(place) for place in places}
        with self._changed:
            self.state, self.number = state, number
            for place, report in found.items():
                before = self._seen.get(place)
                if report is None:
                    # One that leads removes its report after it gave the state up, not before.
                    self._seen[place] = None if self.leads else before
                elif before is None or before.report != report:
                    self._seen[place] = LastReport(report, self._counted_s, place in self._seen)

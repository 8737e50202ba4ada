"""Hold the state of a run: take it over, renew the lease, write it in the background.

One process holds the state. Another one that starts finds out whether the holder lives: on the
same machine by its process, elsewhere by its lease, which it renews. A holder that was killed
left its job behind; on the same machine that job is found by its marker and ended. Whether a
lease is renewed is measured by the clock of the process that waits: clocks of machines differ.

A thread writes the state and the lease. A store that hangs or is full delays a write and
never the job; the write is made later.

Each revision of the state is a numbered file. The last few remain, so that a damaged one does not
lose the budget. A root that disappears takes its state along. The local copy shows that; it is
the newer one, too, where the store could not be written to before the supervisor was killed.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ckptctl.distributed.process_table import Process, is_alive, machine, own_process
from ckptctl.errors import (
    AlreadyExists,
    AlreadySupervised,
    CkptctlError,
    Fenced,
    OwnFileUnreadable,
    OwnFileUnsupported,
    PathNotFound,
    PathUntrusted,
    StorageError,
    UsageError,
)
from ckptctl.formats.digests import sha256_of
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.formats.own.files import MAX_STRING, as_stored, time_now
from ckptctl.formats.own.supervision import (
    LEASE_SCHEMA,
    MAX_ATTEMPTS,
    MAX_LEASE_BYTES,
    MAX_STATE_BYTES,
    STATE_SCHEMA,
    Decision,
    LeaseDocument,
    OwnerDocument,
    ResetDocument,
    SupervisorDocument,
    read_state,
)
from ckptctl.formatting import command_line
from ckptctl.redaction import redacted_values
from ckptctl.selection.history import check_sentinel
from ckptctl.selection.marking import user_name
from ckptctl.storage.contract import NumberedFiles, Store, TooLarge, read_if_there
from ckptctl.storage.files import PRIVATE, replace_file
from ckptctl.storage.opening import absolute_url, join_url, local_path, open_store
from ckptctl.storage.shared_places import open_folder
from ckptctl.storage.waiting import leave_unwatched, start_daemon
from ckptctl.supervisor.processes import (
    GRACE_S,
    Hang,
    Running,
    Signals,
    Watcher,
    end_processes,
    marked,
)

if TYPE_CHECKING:
    from ckptctl.supervisor.options import RunOptions


STATE_FOLDER = f"{OWN_FOLDER}/supervisor"
"""The path of the state in a root."""

_KEPT = 4
_LEASE = "lease.json"


class Revisions:
    """The revisions of one state in a store, below `folder`; and the lease beside them.

    With `of_root` nothing is written where the sentinel of the root is missing: what is there
    then is not the root, but for example the folder on which it is not mounted.
    """

    def __init__(self, store: Store, folder: str = "", *, of_root: bool) -> None:
        self.url = join_url(store.url, folder)
        self.files = NumberedFiles(store, folder)
        self._store = store
        self._lease = f"{folder}/{_LEASE}" if folder else _LEASE
        self._of_root = of_root

    def newest(self) -> SupervisorDocument | None:
        """The newest revision that can be read; None where there is none.

        Raises `OwnFileUnsupported` where the newest is of another major version, and
        `OwnFileUnreadable` where all are damaged.
        """
        first: OwnFileUnreadable | None = None
        for number in self.files.numbers()[: -_KEPT - 1 : -1]:
            try:
                return self.read(number)
            except OwnFileUnsupported:
                raise
            except OwnFileUnreadable as error:
                first = first or error
        if first is not None:
            raise first
        return None

    def read(self, number: int) -> SupervisorDocument:
        """One revision; raises `OwnFileUnreadable` where it is damaged or gone."""
        name = join_url(self._store.url, self.files.path(number))
        try:
            return read_state(self.files.read(number, MAX_STATE_BYTES))
        except OwnFileUnreadable as error:
            raise type(error)(f"{name}: {error.message}") from error
        except (TooLarge, PathNotFound) as error:
            raise OwnFileUnreadable(f"{name} cannot be read") from error

    def write(self, number: int, state: SupervisorDocument) -> None:
        """Write a revision; raises `AlreadyExists` where another has the number.

        Raises `StorageError` where the store does not take it.
        """
        self._check_root()
        self.files.add(number, _as_stored(state))
        with suppress(StorageError):  # an old one that stays is harmless
            self._store.remove(self.files.path(number - _KEPT))

    def renew(self, lease: LeaseDocument) -> None:
        """Show that the holder of the state is alive."""
        self._check_root()
        self._store.put(self._lease, as_stored(LEASE_SCHEMA, lease), replace=True)

    def sign_of_life(self) -> object:
        """What changes as long as the holder of the state is alive."""
        lease = read_if_there(self._store, self._lease, limit=MAX_LEASE_BYTES)
        return self.files.newest(), lease

    def _check_root(self) -> None:
        if self._of_root:
            check_sentinel(self._store)


@contextmanager
def stored_state(root: str, options: RunOptions) -> Iterator[Revisions]:
    """The state of a run whose first root is `root`.

    A folder that was given for it is created where its parent exists; the root never is.
    """
    with open_store(options.state or root, options.storage) as store:
        if options.state and store.folders is not None:
            store.folders.create_root()
        folder = "" if options.state else STATE_FOLDER
        yield Revisions(store, folder, of_root=options.state is None)


def _as_stored(state: SupervisorDocument) -> bytes:
    return as_stored(STATE_SCHEMA, redacted_values(msgspec.to_builtins(state)))


class LocalCopy:
    """The state as this user last wrote it on this machine; nothing where that is impossible.

    `set_aside` is why a file with its name was not read; empty where it was.
    """

    set_aside = ""

    def __init__(self, root: str) -> None:
        given = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        name = sha256_of(os.fsencode(absolute_url(root).rstrip("/")))[:32]
        self.path = os.path.join(given, "ckptctl", "supervisor", f"{name}.json")

    def read(self) -> SupervisorDocument | None:
        """The copy; None where there is none that can be read."""
        try:
            with open_folder(os.path.dirname(self.path)) as folder:
                return read_state(folder.read(os.path.basename(self.path), MAX_STATE_BYTES))
        except PathUntrusted as error:
            self.set_aside = error.message
        except (OSError, StorageError, OwnFileUnreadable):
            pass
        return None

    def write(self, state: SupervisorDocument) -> None:
        """Replace the copy, as far as the file system allows it."""
        with suppress(OSError, StorageError, UsageError):
            open_folder(os.path.dirname(self.path), make=True).close()
            replace_file(self.path, _as_stored(state), "the copy of the state", mode=PRIVATE)


def new_state(root: str) -> SupervisorDocument:
    """The state of a run that has had no attempt."""
    return {
        "run": secrets.token_hex(16),
        "root": absolute_url(root),
        "best": None,
        "not_finite": [],
        "owner": None,
        "attempts": [],
        "excluded": [],
        "resets": [],
        "sections": {},
    }


def newer(stored: SupervisorDocument | None, copy: SupervisorDocument | None) -> bool:
    """Whether the local copy holds more of this run than the store."""
    if copy is None or not copy["attempts"]:
        return False
    if stored is None:
        return True
    return stored["run"] == copy["run"] and _extent(copy) > _extent(stored)


def _extent(state: SupervisorDocument) -> tuple[int, int, int]:
    attempts = state["attempts"]
    last = attempts[-1] if attempts else None
    ended = last is not None and last.decision is not None
    return (last.number if last else 0, int(ended), len(state["resets"]))


def bounded(state: SupervisorDocument) -> SupervisorDocument:
    """The state with no more attempts and resets than a reader accepts, the newest."""
    return {
        **state,
        "not_finite": state["not_finite"][-MAX_ATTEMPTS:],
        "attempts": state["attempts"][-MAX_ATTEMPTS:],
        "excluded": state["excluded"][-MAX_ATTEMPTS:],
        "resets": state["resets"][-MAX_ATTEMPTS:],
    }


RENEW_S = 15.0
LEASE_S = 60.0
"""A holder on another machine that has not renewed its lease for so long is gone.

Four renewals: one that is late, or a slow storage, is no lost holder. torchelastic counts a
node as lost after 3 keep-alives of 5 s (`rdzv_configs`), on a server that answers at once."""

_WRITTEN_S = 10.0
"""How long the start of an attempt waits for the state to be written."""
_POLL_S = 1.0

_held: set[str] = set()
"""The names of the holders in this process."""


class StatePlace(NamedTuple):
    """Where the state of a run is kept, and where its warnings go."""

    revisions: Revisions
    copy: LocalCopy
    root: str
    tell: Callable[[str], None]


class HeldState(Watcher):
    """The state of a run that this process holds; a watcher of its attempts.

    `state` is the newest; `save` replaces it. Everything is called in the main thread, only
    `_run` is not.
    """

    def __init__(
        self,
        place: StatePlace,
        state: SupervisorDocument,
        number: int,
        signals: Signals,
    ) -> None:
        self.state = state
        self._signals = signals
        self._revisions, self._copy, _, self._tell = place
        self._owner = state["owner"]["id"] if state["owner"] else ""
        self._number = number
        self._written = state
        self._overtaken = False
        self._failure: str | None = None
        self._warned = False
        self._closed = False
        self._beat = 0
        self._changed = threading.Condition()
        _held.add(self._owner)
        self._thread = start_daemon("ckptctl-state", self._run)

    def marker(self) -> str:
        """The value that marks the processes of this job."""
        return marker_of(self.state["run"], self.state["root"])

    def save(self, state: SupervisorDocument) -> None:
        """Make this the state, and wait a moment until it is written; a warning where it is not."""
        with self._changed:
            self.state = bounded(state)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._written is self.state or self._failure or self._overtaken, _WRITTEN_S
            )
        self._report()

    def release(self) -> None:
        """Give the state up, so that the next holder need not wait."""
        with suppress(CkptctlError):  # who overtook it holds it
            self.save({**self.state, "owner": None})
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_WRITTEN_S)
        _held.discard(self._owner)

    def poll(self, _running: Running | None = None, _now_s: float = 0.0) -> Hang | None:
        """Raise `Fenced` where another process has taken the state over."""
        self._report()
        if self._signals.asked is None:
            return None
        *earlier, last = self.state["attempts"]
        if not last.free:
            # A scheduler kills this process next if the job does not end in time. What it asked
            # for costs nothing, and the record of that must not wait for the end of the job.
            with self._changed:
                self.state = {**self.state, "attempts": [*earlier, replace(last, free=True)]}
                self._changed.notify_all()
        return None

    def _report(self) -> None:
        if self._overtaken:
            raise Fenced(
                f"{self._revisions.url}: another `ckptctl run` took the job over from this one, "
                "which ends its processes",
                next_command=command_line("scan", self.state["root"]),
            )
        failure = self._failure
        if failure is not None and not self._warned:
            self._warned = True
            self._tell(
                f"warning: the state cannot be written now and is written later: {failure}; "
                f"until then it is in {self._copy.path}"
            )
        elif failure is None and self._warned:
            self._warned = False
            self._tell(f"the state is written again to {self._revisions.url}")

    def _run(self) -> None:
        leave_unwatched()
        while True:
            with self._changed:
                self._changed.wait_for(self._is_waited_for, RENEW_S)
                state, closed = self.state, self._closed
            try:
                failure = self._write(state)
            except CkptctlError as error:
                failure = error.message
            with self._changed:
                self._failure = failure
                self._changed.notify_all()
            if self._overtaken or closed:
                return

    def _is_waited_for(self) -> bool:
        # A write that failed is tried again at the next renewal.
        return self._closed or (self.state is not self._written and self._failure is None)

    def _write(self, state: SupervisorDocument) -> str | None:
        """Write the state and the lease; why that failed, None where it did not."""
        if state is not self._written:
            self._copy.write(state)
        try:
            newest = self._revisions.files.newest()
            if newest > self._number:
                self._overtaken = not self._is_own(newest)
                self._number = newest
            if state is not self._written and not self._overtaken:
                self._revisions.write(self._number + 1, state)
                self._number += 1
                self._written = state
            if state["owner"] is not None and not self._overtaken:
                self._beat += 1
                self._revisions.renew({"owner": self._owner, "beat": self._beat})
        except AlreadyExists:
            self._overtaken = True
        except StorageError as error:
            return error.message
        return None

    def _is_own(self, number: int) -> bool:
        try:
            owner = self._revisions.read(number)["owner"]
        except OwnFileUnreadable:
            return False
        return owner is not None and owner["id"] == self._owner


def marker_of(run: str, root: str) -> str:
    """The value that marks the processes of a job: its run, and the root that it trains in."""
    return f"{run}@{absolute_url(root)}"


def take_over(place: StatePlace, signals: Signals, reset: str | None = None) -> HeldState | None:
    """Hold the state of a run; None where a signal asked to end meanwhile.

    Ends the job that a killed holder left behind on this machine. `reset` is the reason why
    the budget is reset. Raises `AlreadySupervised` where another process holds it and is alive,
    `OwnFileUnreadable` where the state is damaged and no reset was asked for,
    `OwnFileUnsupported` for one of another major version, `StorageError` where the store does
    not answer.
    """
    revisions, copy, root, tell = place
    while True:
        number, state = _read(place, reset)
        owner = state["owner"]
        if owner is not None and not _is_over(owner, place, signals):
            return None
        # The holder may have called the root by another name.
        left_in = state["root"] if _is_same_root(state["root"], root) else root
        n_ended = end_left_behind(marker_of(state["run"], left_in), tell)
        state = _owned(_closed(state, n_ended), os.urandom(16).hex(), root, reset)
        try:
            revisions.write(number + 1, state)
        except AlreadyExists:
            continue  # another one came first
        except StorageError:
            # The thread writes it later; until then no other process finds this one.
            held = HeldState(place, state, number, signals)
            held.save({**state})
            return held
        copy.write(state)
        return HeldState(place, state, number + 1, signals)


def _owned(
    state: SupervisorDocument, name: str, root: str, reset: str | None
) -> SupervisorDocument:
    owner: OwnerDocument = {
        "id": name,
        "host": socket.gethostname(),
        "machine": machine(),
        "pid": os.getpid(),
        "started": own_process().started,
        "root": absolute_url(root),
    }
    state = {**state, "owner": owner, "root": absolute_url(root)}
    if reset is None:
        return state
    entry: ResetDocument = {
        "at": time_now(),
        "by": f"{user_name()}@{socket.gethostname()}",
        "reason": reset[:MAX_STRING],
        "after": state["attempts"][-1].number if state["attempts"] else 0,
    }
    # A full budget; the next usable step is progress, whatever its number.
    return {**state, "best": None, "not_finite": [], "resets": [*state["resets"], entry]}


def _read(place: StatePlace, reset: str | None) -> tuple[int, SupervisorDocument]:
    """The number of the newest revision, 0 without one, and the state to go on with."""
    revisions, copy, root, tell = place
    number = revisions.files.newest()
    try:
        stored = revisions.newest()
    except OwnFileUnsupported:
        raise
    except OwnFileUnreadable as error:
        stored = None
        if reset is None and copy.read() is None:
            error.next_command = command_line("run", "--root", root, "--reset-budget", "REASON")
            raise
        tell(f"warning: {error.message}; the state is replaced")
    local = copy.read()
    if local is not None and newer(stored, local):
        if reset is None:
            tell(
                f"warning: {revisions.url} lacks what {copy.path} holds of this run, up to attempt "
                f"{local['attempts'][-1].number}; the run goes on from there "
                "(--reset-budget begins anew)"
            )
        return number, local
    return number, stored or new_state(root)


def _is_over(owner: OwnerDocument, place: StatePlace, signals: Signals) -> bool:
    """Wait until the holder of the state is known to be gone; False after a signal.

    Raises `AlreadySupervised` where it is alive.
    """
    revisions, _, root, tell = place
    if owner["machine"] and owner["machine"] == machine():
        process = Process(owner["pid"], owner["started"])
        of_copy = not _is_same_root(owner["root"], root)  # it was copied with its state
        own = process == own_process() and owner["id"] not in _held
        if of_copy or own or not is_alive(process):
            return True
        raise AlreadySupervised(
            f"{root}: another `ckptctl run` (process {owner['pid']} of this machine) supervises "
            "this job",
            next_command=f"ps -p {owner['pid']}",
        )
    tell(
        f"waiting {LEASE_S:.0f} s: `ckptctl run` on {owner['host']} held this job, and may be alive"
    )
    sign = revisions.sign_of_life()
    until_s = time.monotonic() + LEASE_S
    while time.monotonic() < until_s:
        signals.pause(_POLL_S)
        if signals.asked is not None:
            return False
        if revisions.sign_of_life() != sign:
            raise AlreadySupervised(
                f"{root}: another `ckptctl run` (process {owner['pid']} on {owner['host']}) "
                "supervises this job: it renewed its lease"
            )
    return True


def _is_same_root(before: str, root: str) -> bool:
    """Whether an address of this machine still leads to the root, by a link or mount as well."""
    if before == absolute_url(root):
        return True
    paths = local_path(before), local_path(root)
    if paths[0] is None or paths[1] is None:
        return False
    try:
        return os.path.samefile(paths[0], paths[1])
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # nothing shows that it is a copy


def end_left_behind(marker: str, tell: Callable[[str], None]) -> int:
    """End what a killed holder left on this machine; how many processes that were."""
    left = marked(marker)
    if left:
        tell(f"ending {len(left)} processes of this job that a killed `ckptctl run` left behind")
        end_processes(lambda: marked(marker), GRACE_S)
    return len(left)


def _closed(state: SupervisorDocument, n_ended: int) -> SupervisorDocument:
    """The state with the attempt closed that was running when its holder was killed."""
    attempts = state["attempts"]
    if not attempts or attempts[-1].decision is not None:
        return state
    left = f", and {n_ended} processes that it left were ended" if n_ended else ""
    last = attempts[-1]
    after = " after a signal had asked it to end" if last.free else ""
    reason = f"its supervisor was killed{after}{left}"
    last = replace(last, decision=Decision.RESTART, reason=reason)
    return {**state, "attempts": [*attempts[:-1], last]}

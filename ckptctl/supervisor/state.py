"""Read and write the state of a supervised run: its revisions in a store, and a local copy.

Each revision is a file of its own under the next number (`0000000012.json`), created only
where none is there. So a revision is whole or absent, and of two writers one fails because the
other was first, on every storage that keeps conditional writes. The last few revisions
remain, so that a damaged one does not lose the budget.

A root that disappears takes its state along. The local copy shows that; it is the newer one,
too, where the store could not be written to before the supervisor was killed.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ckptctl.errors import (
    AlreadyExists,
    OwnFileUnreadable,
    OwnFileUnsupported,
    PathNotFound,
    PathUntrusted,
    StorageError,
    UsageError,
)
from ckptctl.formats.digests import sha256_of
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.formats.own.files import as_stored
from ckptctl.formats.own.supervision import (
    LEASE_SCHEMA,
    MAX_ATTEMPTS,
    MAX_LEASE_BYTES,
    MAX_STATE_BYTES,
    STATE_SCHEMA,
    LeaseDocument,
    SupervisorDocument,
    read_state,
)
from ckptctl.redaction import redacted_values
from ckptctl.selection.history import check_sentinel
from ckptctl.storage.contract import Store, TooLarge, read_if_there
from ckptctl.storage.files import PRIVATE, replace_file
from ckptctl.storage.opening import absolute_url, join_url, open_store
from ckptctl.storage.shared_places import open_folder

if TYPE_CHECKING:
    from ckptctl.supervisor.options import RunOptions

STATE_FOLDER = f"{OWN_FOLDER}/supervisor"
"""The path of the state in a root."""

_NUMBERED = re.compile(r"([0-9]{10})\.json")
_KEPT = 4
_LEASE = "lease.json"


class Revisions:
    """The revisions of one state in a store, below `folder`; and the lease beside them.

    With `of_root` nothing is written where the sentinel of the root is missing: what is there
    then is not the root, but for example the folder on which it is not mounted.
    """

    def __init__(self, store: Store, folder: str = "", *, of_root: bool) -> None:
        self.url = join_url(store.url, folder)
        self._store = store
        self._start = f"{folder}/" if folder else ""
        self._folder = folder
        self._of_root = of_root

    def numbers(self) -> list[int]:
        """The numbers of the revisions, the highest first."""
        try:
            entries = self._store.list_dir(self._folder)
        except PathNotFound:
            return []
        names = (_NUMBERED.fullmatch(entry.path.rpartition("/")[2]) for entry in entries)
        return sorted((int(match[1]) for match in names if match), reverse=True)

    def newest(self) -> SupervisorDocument | None:
        """The newest revision that can be read; None where there is none.

        Raises `OwnFileUnsupported` where the newest is of another major version, and
        `OwnFileUnreadable` where all are damaged.
        """
        first: OwnFileUnreadable | None = None
        for number in self.numbers()[:_KEPT]:
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
        name = f"{self.url}/{number:010}.json"
        try:
            return read_state(self._store.read(self._path(number), limit=MAX_STATE_BYTES))
        except OwnFileUnreadable as error:
            raise type(error)(f"{name}: {error.message}") from error
        except (TooLarge, PathNotFound) as error:
            raise OwnFileUnreadable(f"{name} cannot be read") from error

    def write(self, number: int, state: SupervisorDocument) -> None:
        """Write a revision; raises `AlreadyExists` where another has the number.

        Raises `StorageError` where the store does not take it.
        """
        self._check_root()
        data = as_stored(STATE_SCHEMA, redacted_values(state))
        try:
            self._store.put(self._path(number), data)
        except AlreadyExists:
            # A put that was repeated after a lost answer finds its own file.
            if self._store.read(self._path(number), limit=MAX_STATE_BYTES) != data:
                raise
        with suppress(StorageError):  # an old one that stays is in nobody's way
            self._store.remove(self._path(number - _KEPT))

    def renew(self, lease: LeaseDocument) -> None:
        """Show that the holder of the state is alive."""
        self._check_root()
        self._store.put(self._start + _LEASE, as_stored(LEASE_SCHEMA, lease), replace=True)

    def sign_of_life(self) -> object:
        """What changes as long as the holder of the state is alive."""
        lease = read_if_there(self._store, self._start + _LEASE, limit=MAX_LEASE_BYTES)
        return self.numbers()[:1], lease

    def _path(self, number: int) -> str:
        return f"{self._start}{number:010}.json"

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
            data = as_stored(STATE_SCHEMA, redacted_values(state))
            replace_file(self.path, data, "the copy of the state", mode=PRIVATE)


def new_state(root: str) -> SupervisorDocument:
    """The state of a run that has had no attempt."""
    return {
        "run": secrets.token_hex(16),
        "root": absolute_url(root),
        "best": None,
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
    ended = last is not None and last["decision"] is not None
    return (last["number"] if last else 0, int(ended), len(state["resets"]))


def bounded(state: SupervisorDocument) -> SupervisorDocument:
    """The state with no more attempts and resets than a reader accepts, the newest."""
    rejected = state.get("not_finite")
    if rejected is not None:
        state = {**state, "not_finite": rejected[-MAX_ATTEMPTS:]}
    return {
        **state,
        "attempts": state["attempts"][-MAX_ATTEMPTS:],
        "excluded": state["excluded"][-MAX_ATTEMPTS:],
        "resets": state["resets"][-MAX_ATTEMPTS:],
    }

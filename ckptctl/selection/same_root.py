"""Check that a root is still the one that was read before.

A file system that is unmounted while a process works leaves an empty folder under its name,
or none: that is no new run, and whatever is written there is lost when the file system comes
back. A store keeps the identity of its own root; `SeenRoots` keeps it for processes that open
the root again and again, and what an object store shows of a root that was emptied.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptctl.errors import PathNotFound, StorageUnavailable
from ckptctl.formatting import counted
from ckptctl.selection.history import has_sentinel
from ckptctl.selection.roots import RootListing
from ckptctl.storage.contract import Store
from ckptctl.storage.files import is_same_folder


@dataclass(frozen=True, slots=True)
class _Seen:
    """The state of a root: its folder, where it has one; its sentinel; its steps."""

    folder: tuple[int, int] | None
    sentinel: bool
    steps: int


class SeenRoots:
    """The roots of a process as it saw them first, by address."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def check(self, store: Store, listing: RootListing, *, steps_stay: bool = True) -> None:
        """Raise `StorageUnavailable` if a root is gone, or another one, since the last check.

        It is gone if its folder does not exist or is another folder, if it had a sentinel and
        has none, or with `steps_stay` if it had steps and has none. Cost: one listing of a
        small folder.
        """
        before = self._seen.get(store.url)
        if not listing.exists:
            if before is not None:
                raise _vanished(store, "it does not exist any more")
            return
        folder = None
        if store.folders is not None:
            try:
                folder = store.folders.root_id()
            except PathNotFound as error:
                raise _vanished(store, "it does not exist any more") from error
        now = _Seen(folder, has_sentinel(store), len(listing.steps))
        if before is not None:
            known, found = before.folder, now.folder
            if known and found and not is_same_folder(known, found, store.url):
                raise _vanished(store, "another folder is in its place")
            if before.sentinel and not now.sentinel:
                raise _vanished(store, "its record .ckptctl/root.json is gone")
            if steps_stay and before.steps and not now.steps:
                held = counted(before.steps, "step")
                raise _vanished(store, f"it held {held}, and now none")
        self._seen[store.url] = now


def _vanished(store: Store, what: str) -> StorageUnavailable:
    return StorageUnavailable(
        f"{store.url} changed since it was read before: {what}. Its storage was unmounted, or the "
        "root was moved, replaced or emptied; this is no new run, and what it holds is unknown",
        next_command="findmnt --real" if store.folders is not None else None,
    )

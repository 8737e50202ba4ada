"""Remove a step so that no reader takes a partly removed one.

Its metadata first: from then on it is an interrupted save to everyone, is never taken, and
goes for good at the next retention. A format without DCP metadata gets a note instead, which
goes last: without it, what is left would pass for a step of weights alone. Then what ckptctl
wrote about the step, then the rest. Which steps may go is decided in `pruning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ckptctl.errors import AccessDenied, StorageError, StorageUnavailable
from ckptctl.formats.frameworks.layouts import METADATA, REMOVING, is_flat_file, is_own
from ckptctl.inspection.open_step import list_step
from ckptctl.model import FileInfo
from ckptctl.storage.contract import Store
from ckptctl.storage.in_flight import act_in_flight
from ckptctl.storage.opening import join_url


def remove_step(store: Store, name: str, *, seen: Sequence[FileInfo] | None = None) -> bool:
    """Remove a step; False, and nothing is removed, where its files are not those of `seen`.

    No link is followed, neither in the step nor in the place of a folder of it. Raises
    `AccessDenied` or `StorageUnavailable` where something of it cannot be removed; what is
    left then is an interrupted save, or the whole step. Cost: one listing; on an object
    store a request for each object, several at once.
    """
    listed = list_step(store, name)
    if seen is not None and tuple(seen) != listed:
        return False
    files = [file.path for file in listed]
    markers = [path for path in files if _is_marker(path)]
    # A seal that outlived shards would make damage of what is only half removed.
    own = [path for path in files if is_own(path) and path not in (*markers, REMOVING)]
    rest = sorted(set(files).difference(markers, own, [REMOVING]))
    try:
        if [file.path for file in listed if is_flat_file(file)] == [name]:
            store.remove(name)
            return True
        noted = [] if markers else _note(store, name)
        if store.folders is not None:
            store.folders.remove_folder(name, first=(markers, own, rest if noted else ()))
        else:
            for paths in (markers, own, rest, noted):
                act_in_flight(store.remove, [f"{name}/{path}" for path in paths])
    except StorageError as error:
        kind = AccessDenied if isinstance(error, AccessDenied) else StorageUnavailable
        url = join_url(store.url, name)
        why = error.message.removeprefix(f"{url}: ")
        raise kind(f"{url} could not be removed whole: {why}") from error
    return True


def _note(store: Store, name: str) -> list[str]:
    """Note in a step that it is being removed; the path of the note, if there is room for it."""
    with suppress(StorageUnavailable):
        store.put(f"{name}/{REMOVING}", b"being removed\n", replace=True)
        return [REMOVING]
    return []


def _is_marker(path: str) -> bool:
    return path.rsplit("/", 1)[-1].endswith(METADATA)

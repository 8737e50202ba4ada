"""How does a step go so that nobody takes half of it?

Its metadata first: from then on it is an interrupted save to everyone, is never taken, and
goes for good at the next retention. Then what ckptctl wrote about it, then the rest: as
long as anything is left of it, that is recognised for what it is. Which steps may go is the
question of `pruning`.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence

from ckptctl.errors import AccessDenied, StorageError, StorageUnavailable
from ckptctl.formats.layouts import METADATA, is_own
from ckptctl.judge.step_files import list_step
from ckptctl.storage.contract import Store
from ckptctl.storage.in_flight import act_in_flight
from ckptctl.storage.opening import absolute_url, is_local, join_url
from ckptctl.storage.publishing import sync_folder

_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


def remove_step(store: Store, name: str) -> None:
    """Remove a step. Links in it are not followed.

    Raises `AccessDenied` or `StorageUnavailable` where something of it cannot be removed;
    what is left then is an interrupted save, or the whole step. Cost: one listing; on an
    object store a request for each object, several at once.
    """
    files = [file.path for file in list_step(store, name)]
    markers = [path for path in files if _is_marker(path)]
    # A seal that outlived shards would make damage of what is only half removed.
    own = [path for path in files if is_own(path) and path not in markers]
    try:
        if is_local(store.url):
            _remove_folder(join_url(absolute_url(store.url), name), [*markers, *own])
        else:
            rest = set(files).difference(markers, own)
            for paths in (markers, own, sorted(rest)):
                act_in_flight(store.remove, [f"{name}/{path}" for path in paths])
    except (OSError, StorageError) as error:
        denied = isinstance(error, AccessDenied) or getattr(error, "errno", None) in _DENIED
        why = getattr(error, "message", None) or getattr(error, "strerror", None)
        raise (AccessDenied if denied else StorageUnavailable)(
            f"{join_url(store.url, name)} could not be removed whole: {why or type(error).__name__}"
        ) from error


def _remove_folder(folder: str, first: Sequence[str]) -> None:
    for path in first:
        os.unlink(f"{folder}/{path}")
        sync_folder(os.path.dirname(f"{folder}/{path}"))
    shutil.rmtree(folder)
    sync_folder(os.path.dirname(folder))


def _is_marker(path: str) -> bool:
    return path.rsplit("/", 1)[-1].endswith(METADATA)

"""List the files of steps that have no folder of their own.

NVRx writes the file of each rank into a folder of that rank, with those of other steps, and
Composer's ranks write theirs side by side. Such a step is named `ROOT@1200`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from ckptctl.errors import PathNotFound
from ckptctl.formats.frameworks.layouts import (
    NO_RUN_BELOW,
    StepName,
    may_hold_scattered,
    scattered_steps,
)
from ckptctl.model import FileInfo
from ckptctl.storage.contract import Store

MAX_FOLDERS = 2_000
"""So many folders are listed; a node has a folder for each of its ranks."""


def list_scattered(
    store: Store, entries: Sequence[FileInfo]
) -> Mapping[StepName, tuple[FileInfo, ...]]:
    """The steps of a root without folders of their own, and the files of each.

    `entries` is the listing of the root. Cost: one listing for each folder in it, and for
    each folder of a rank in those.
    """
    return scattered_steps(_below(store, entries))


def _below(store: Store, entries: Sequence[FileInfo]) -> Iterator[FileInfo]:
    yield from entries
    folders = (
        entry.path
        for entry in entries
        if entry.kind == "dir" and entry.path[0] != "." and entry.path not in NO_RUN_BELOW
    )
    for folder in islice(folders, MAX_FOLDERS):
        inside = _listed(store, folder)
        yield from inside
        ranks = (one.path for one in inside if one.kind == "dir")
        of_ranks = (path for path in ranks if may_hold_scattered(path.rpartition("/")[2]))
        for rank in islice(of_ranks, MAX_FOLDERS):
            yield from _listed(store, rank)


def _listed(store: Store, folder: str) -> Sequence[FileInfo]:
    try:
        return store.list_dir(folder)
    except PathNotFound:
        return ()

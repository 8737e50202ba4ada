"""Find saves among files whose names do not show what they are, by their first bytes.

Only before a run is called fresh: a job that starts at step 0 writes over saves that nobody
recognized.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from ckptctl.errors import PathNotFound, StorageUnavailable
from ckptctl.formats.archive.first_bytes import HEAD_BYTES, SAFETENSORS, TORCH, saved_format
from ckptctl.formats.frameworks.file_names import is_named_as_data, may_be_a_save
from ckptctl.formats.frameworks.layouts import is_saved, saved_weights
from ckptctl.formatting import command_line
from ckptctl.model import FileInfo
from ckptctl.storage.contract import ShortRead, Store, StoreKind, read_range
from ckptctl.storage.in_flight import READ_WIDTH, in_flight
from ckptctl.storage.opening import base_name, parent_url

MAX_READ = 1_000
"""Of so many files the first bytes are read, from the largest down."""


def find_saves(
    store: Store,
    files: Iterable[FileInfo],
    links: Iterable[str],
    open_other: Callable[[str], Store] | None,
) -> tuple[Mapping[str, str], int]:
    """What the saves among `files` and behind `links` are called, by path.

    Also returns how many files were not read. Raises `StorageUnavailable` if a file changes
    meanwhile, and the storage's error if one cannot be read: it may be the only save.

    Cost: one read of at most `HEAD_BYTES` for each of `MAX_READ` files, `READ_WIDTH` at once
    where a read waits.
    """
    found, n_not_read = _saves_among(store, files)
    return {**found, **_saves_behind(store, links, open_other)}, n_not_read


def _saves_among(store: Store, files: Iterable[FileInfo]) -> tuple[Mapping[str, str], int]:
    possible = [f for f in files if is_saved(f.path) and may_be_a_save(base_name(f"/{f.path}"))]
    possible.sort(key=lambda file: -file.size)
    kind_of = partial(_kind_of, store)
    read = possible[:MAX_READ]
    if store.kind is StoreKind.LOCAL:
        kinds: Iterable[tuple[FileInfo, str | None]] = ((file, kind_of(file)) for file in read)
    else:
        kinds = in_flight(kind_of, read, width=READ_WIDTH)
    found = {file.path: kind for file, kind in kinds if kind and not _is_data(file.path, kind)}
    return found, len(possible) - len(read)


def _is_data(path: str, kind: str) -> bool:
    """Whether a file of a format that data has as well lies in a folder of data."""
    folders = path.split("/")[:-1]
    names = (*folders, *(folder.removesuffix("s") for folder in folders))
    return kind not in (TORCH, SAFETENSORS) and any(map(is_named_as_data, names))


def _saves_behind(
    store: Store, links: Iterable[str], open_other: Callable[[str], Store] | None
) -> Mapping[str, str]:
    """What links to files lead to, by their names; folders behind links are not listed here.

    A link whose file is gone is a save by its name alone.
    """
    found: dict[str, str] = {}
    if store.folders is None:
        return found
    for name in links:
        path = os.path.realpath(store.folders.path_of(name))
        by_name = saved_weights(FileInfo(name, 0)) or saved_weights(FileInfo(base_name(path), 0))
        if os.path.isdir(path):
            continue
        if by_name is not None:
            found[name] = by_name
        elif open_other is not None and os.path.isfile(path):
            with open_other(parent_url(path)) as other:
                file = FileInfo(base_name(path), os.path.getsize(path))
                kinds, _ = _saves_among(other, [file])
            if kinds:
                found[name] = kinds[file.path]
    return found


def _kind_of(store: Store, file: FileInfo) -> str | None:
    try:
        head = read_range(store, file.path, 0, min(file.size, HEAD_BYTES))
    except PathNotFound:
        return None
    except ShortRead as error:
        raise StorageUnavailable(
            f"{store.url}: {file.path} became shorter while it was read; another process writes "
            "it, and whether it is a save is unknown",
            next_command=command_line("scan", store.url),
        ) from error
    return saved_format(head, file.size)

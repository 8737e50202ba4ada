"""List the files of a step."""

from __future__ import annotations

from ckptctl.errors import PathNotFound
from ckptctl.model import FileInfo
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import join_url


def list_step(store: Store, name: str) -> tuple[FileInfo, ...]:
    """The files of a step, paths relative to it. Cost: one listing.

    A step that is one file is listed as that file. Raises `PathNotFound` where
    there is neither a folder nor a file of that name.
    """
    prefix = f"{name}/"
    found = True
    try:
        files = tuple(_below(file, prefix) for file in store.list_tree(name))
    except PathNotFound:
        files, found = (), False
    if files:
        return files
    for entry in store.list_dir(""):
        if entry.path == name and entry.kind != "dir":
            return (entry,)
        if entry.path == name:
            # Not there a moment ago, and there now: no empty folder before it is asked again.
            return () if found else tuple(_below(file, prefix) for file in store.list_tree(name))
    url = join_url(store.url, name)
    raise PathNotFound(f"{url} does not exist", next_command=f"ckptctl scan {store.url}")


def _below(file: FileInfo, prefix: str) -> FileInfo:
    path = file.path.removeprefix(prefix)
    return FileInfo(path, file.size, file.mtime_s, file.identity, file.kind, file.link)

"""List a folder through its descriptor, and read links.

Asked of a descriptor and not of a path: whatever is renamed meanwhile, the answer
is about one folder. How a descriptor comes to be is the store's question.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence

from ckptctl.model import FileInfo
from ckptctl.storage.retrying import Transient
from ckptctl.storage.watchdog import beat


class Descriptor:
    """An open file or folder; closed once, and never by the garbage collector."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        """Let go of it, if that was not done before."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def scan(folder: Descriptor, parts: Sequence[str]) -> Iterator[FileInfo]:
    """What is in the folder, in no order; `parts` are the names that lead to it.

    Raises `Transient` when a name vanishes meanwhile, so that the whole listing is
    made again: the file may have been renamed to a name that was already passed.
    """
    prefix = "".join(f"{part}/" for part in parts)
    with os.scandir(folder.fd) as entries:
        for entry in entries:
            beat()
            # What NFS keeps of a file that was removed while somebody had it open.
            if entry.name.startswith(".nfs"):
                continue
            try:
                yield _info(entry, folder, prefix)
            except FileNotFoundError as exc:
                raise Transient("names in it vanished while it was listed") from exc


def link_target(folder: Descriptor, name: str) -> str | None:
    """Where the link `name` in the folder points to, None if it is no link."""
    try:
        return os.readlink(name, dir_fd=folder.fd)
    except OSError:
        return None


def _info(entry: os.DirEntry[str], folder: Descriptor, prefix: str) -> FileInfo:
    about = entry.stat(follow_symlinks=False)
    path = prefix + entry.name
    mtime_s = about.st_mtime_ns / 1e9
    if stat.S_ISDIR(about.st_mode):
        return FileInfo(path, 0, mtime_s, kind="dir")
    identity = f"{about.st_dev}:{about.st_ino}:{about.st_mtime_ns}"
    if stat.S_ISREG(about.st_mode):
        return FileInfo(path, about.st_size, mtime_s, identity)
    if stat.S_ISLNK(about.st_mode):
        target = os.readlink(entry.name, dir_fd=folder.fd)
        return FileInfo(path, 0, mtime_s, identity, "link", target)
    return FileInfo(path, 0, mtime_s, identity, "other")

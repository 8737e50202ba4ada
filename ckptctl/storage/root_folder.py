"""Open and list folders by descriptors, name by name, without following links.

Every path is opened from a descriptor of the root, and no name on the way may be a link: the
file that was checked is the file that is read, even if names change meanwhile. Only the root
itself, which the user named, may be a link or lie behind one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence

from ckptctl.errors import PathEscape, PathNotFound, StorageUnavailable
from ckptctl.model import FileInfo
from ckptctl.storage.contract import parts_of
from ckptctl.storage.files import Descriptor, make_folder
from ckptctl.storage.waiting import Transient, beat

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK, opening a pipe waits for its writer.
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class RootFolder:
    """The root at `path`, and what is below it, opened; `url` is what the user typed.

    Errors of the system pass through, except for links and missing roots.
    """

    def __init__(self, path: str, url: str) -> None:
        self.path = path
        self.url = url

    def open(self) -> Descriptor:
        """Open the root itself; raises `PathNotFound`, and see `to_be`."""
        try:
            return Descriptor(os.open(self.path, _FOLDER))
        except FileNotFoundError as exc:
            self.to_be()
            raise PathNotFound(f"{self.url} does not exist") from exc

    def to_be(self) -> str:
        """Where the root is or will be; raises `StorageUnavailable` where its parent is missing."""
        # If the root is a link, the parent of its target counts.
        root = os.path.realpath(self.path)
        parent = os.path.dirname(root)
        if not os.path.isdir(parent):
            raise StorageUnavailable(
                f"{self.url} does not exist, nor does its parent {parent}; check that its file "
                "system is mounted",
                next_command="findmnt --real",
            )
        return root

    def existing(self) -> str:
        """The root, or the folder in which it will be created."""
        return self.path if os.path.isdir(self.path) else os.path.dirname(self.to_be())

    def make(self) -> None:
        """Make the root where it is missing and its parent exists."""
        if not os.path.isdir(self.path):
            parent, name = os.path.split(self.to_be())
            with Descriptor(os.open(parent, _FOLDER)) as above:
                make_folder(name, within=above.fd)

    def file(self, path: str) -> Descriptor:
        """Open a regular file to read it."""
        *folders, name = parts_of(path) or ("",)
        if not name:
            raise PathNotFound(f"{self.url} is a folder, not a file")
        with self.folder(folders) as folder:
            file = self._below(folder, name, _FILE)
        if not stat.S_ISREG(os.fstat(file.fd).st_mode):
            file.close()
            where = f"{self.url.rstrip('/')}/{path}"
            raise PathNotFound(f"{where} is not a regular file; it was not read")
        return file

    def folder(
        self, parts: Sequence[str], *, make: bool = False, within: Descriptor | None = None
    ) -> Descriptor:
        """Open the folder to which `parts` lead from the root, or from an open folder below it.

        With `make`, missing folders are created.
        """
        here = self.open() if within is None else Descriptor(os.dup(within.fd))
        for name in parts:
            with here:
                if make:
                    make_folder(name, within=here.fd)
                here = self._below(here, name, _FOLDER)
        return here

    def _below(self, folder: Descriptor, name: str, flags: int) -> Descriptor:
        try:
            return Descriptor(os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder.fd))
        except OSError as exc:
            target = _link_target(folder, name)
            if target is None:
                raise
            raise PathEscape(
                f"{self.url}: {name} is a link to {target}; links are not followed"
            ) from exc


def scan(folder: Descriptor, parts: Sequence[str]) -> Iterator[FileInfo]:
    """The entries of the folder, unordered; `parts` are the names that lead to it.

    Raises `Transient` if a name vanishes meanwhile, so that the whole listing is repeated:
    the file may have been renamed to a name that the scan had already passed.
    """
    prefix = "".join(f"{part}/" for part in parts)
    with os.scandir(folder.fd) as entries:
        for entry in entries:
            beat()
            # NFS keeps a file under this name if it was removed while open.
            if entry.name.startswith(".nfs"):
                continue
            try:
                yield _info(entry, folder, prefix)
            except FileNotFoundError as exc:
                raise Transient("entries vanished during the listing") from exc


def _link_target(folder: Descriptor, name: str) -> str | None:
    """The target of the link `name` in the folder; None if `name` is not a link."""
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

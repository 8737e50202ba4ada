"""Publish a file atomically and durably.

Written aside, flushed, then linked or renamed into place, and the folder
flushed: rename alone is atomic but may not survive a power loss. Folders are
given as descriptors; what they are and whether links lead there is the store's
question.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress

from ckptctl.storage.watchdog import beat

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def publish(name: str, data: Iterable[bytes | memoryview], *, within: int, replace: bool) -> None:
    """Create `name` in the folder `within` (a descriptor) with `data` in it, durably.

    Raises `FileExistsError` where it is there and `replace` is not set, any other
    `OSError` where the storage refuses. Nothing is left behind then.

    Without `replace` an existing file survives any race, except on a file system
    without hard links (some FUSE mounts): there two writers of one name in the
    same instant are not told apart.
    """
    aside = f".ckptctl-{os.urandom(8).hex()}.tmp"
    try:
        _write(aside, data, within)
        if replace:
            os.rename(aside, name, src_dir_fd=within, dst_dir_fd=within)
        else:
            _link(aside, name, within)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(aside, dir_fd=within)
    os.fsync(within)


def move(name: str, target: str, *, within: int, into: int) -> None:
    """Rename what is `name` in one folder to `target` in another, durably.

    Raises `FileExistsError` where there is something of that name. Two who move to one
    name in the same instant are not told apart where the target is an empty folder.
    """
    with suppress(FileNotFoundError):
        os.stat(target, dir_fd=into, follow_symlinks=False)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    os.rename(name, target, src_dir_fd=within, dst_dir_fd=into)
    os.fsync(into)
    os.fsync(within)


def make_folder(name: str, *, within: int) -> None:
    """Make the folder `name`, durably, where it is not there yet."""
    try:
        os.mkdir(name, dir_fd=within)
    except FileExistsError:
        return
    os.fsync(within)


def sync_folder(path: str) -> None:
    """Make the names in the folder at `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write(aside: str, data: Iterable[bytes | memoryview], within: int) -> None:
    fd = os.open(aside, _NEW, 0o666, dir_fd=within)
    try:
        for piece in data:
            left = memoryview(piece)
            while left:
                left = left[os.write(fd, left[: 64 << 20]) :]
                beat()
        os.fsync(fd)
    finally:
        # A network file system reports a failed write as late as here.
        os.close(fd)


def _link(aside: str, name: str, within: int) -> None:
    try:
        os.link(aside, name, src_dir_fd=within, dst_dir_fd=within)
    except FileExistsError:
        # Over NFS an answer may be lost: asked again, the server finds our own link.
        if os.stat(aside, dir_fd=within).st_nlink < 2:
            raise
    except OSError as exc:
        if exc.errno not in _NO_HARD_LINKS:
            raise
        with suppress(FileNotFoundError):
            os.stat(name, dir_fd=within, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from exc
        os.rename(aside, name, src_dir_fd=within, dst_dir_fd=within)

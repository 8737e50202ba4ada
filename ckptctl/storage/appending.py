"""Append a line to a file that several processes write.

One lock, one write, flushed to disk: every line is there whole or not at all, and
none is lost. A line that a crash cut short is closed off, never joined with the
next. The file is on this machine or on a mounted file system; an object store
cannot append.
"""

from __future__ import annotations

import errno
import fcntl
import os

from ckptctl.errors import AccessDenied, PathNotFound, StorageError, StorageUnavailable
from ckptctl.storage.publishing import sync_folder
from ckptctl.storage.room import FULL, full
from ckptctl.storage.watchdog import busy

_FILE = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


def append_line(path: str, line: bytes) -> None:
    """Add `line`, which ends in a line end, to the file, and make it durable.

    The file is created where it is not there, its folder is not. Raises
    `PathNotFound`, `AccessDenied`, `StorageUnavailable`.
    """
    try:
        with busy(path):
            is_new = not os.path.exists(path)
            fd = os.open(path, _FILE, 0o666)
            try:
                # Over NFS two appends may land on each other; the lock keeps them apart.
                fcntl.flock(fd, fcntl.LOCK_EX)
                _append(fd, line)
            finally:
                os.close(fd)
            if is_new:
                sync_folder(os.path.dirname(path) or ".")
    except OSError as exc:
        if exc.errno in FULL:
            raise full(path, exc, os.path.dirname(path) or ".", len(line)) from exc
        raise _error(path, exc) from exc


def _append(fd: int, line: bytes) -> None:
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        line = b"\n" + line
    if os.write(fd, line) != len(line):
        # A part of a line would be damage to whoever reads it.
        os.ftruncate(fd, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(fd)


def _error(path: str, exc: OSError) -> StorageError:
    what = f"{path}: {exc.strerror or type(exc).__name__}"
    if exc.errno in (errno.ENOENT, errno.ENOTDIR):
        return PathNotFound(f"{what}; the folder of the file must be there")
    if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR):
        return AccessDenied(what)
    return StorageUnavailable(what)

"""Messages for a full file system.

How many bytes were to be written and how many are left, and the command that shows
it. Whether there is room for something is asked beforehand, where its size is known.
"""

from __future__ import annotations

import errno
import os
import shlex

from ckptctl.errors import StorageUnavailable

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The numbers of errors that mean it; the second one is a quota."""


def full(what: str, exc: OSError, folder: str, n_bytes: int | None) -> StorageUnavailable:
    """The error that says it of `what`. `folder` lies on the file system that is full."""
    wanted = f"{n_bytes:,} bytes were to be written, " if n_bytes is not None else ""
    if exc.errno == errno.EDQUOT:
        return StorageUnavailable(
            f"{what}: {wanted}and the quota is used up ({exc.strerror})",
            next_command="quota -s",
        )
    return StorageUnavailable(
        f"{what}: {exc.strerror}: {wanted}{free_bytes(folder):,} are free",
        next_command=f"df -h {shlex.quote(folder)}",
    )


def free_bytes(folder: str) -> int:
    """How many bytes this user can still write there; raises `OSError`."""
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize

"""Read the file with the key of seals, and refuse one that others can read or replace.

A key that others know proves nothing. Accepted is a file of the caller or of root that only its
owner can read; a file of root may also be readable by one of the caller's own groups, as the
secrets are that Kubernetes mounts with an `fsGroup` (0440, behind the links of `..data`).
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator

from ckptctl.errors import UsageError

MAX_BYTES = 4096


def read_key_file(path: str) -> bytes:
    """The first bytes of a key file, one more than a key may have.

    The file is opened once, and what is read is what was checked. Raises `UsageError` where it
    cannot be read, or others can read it, write it, or put another one in its place.
    """
    try:
        about = os.stat(path)
        if not (stat.S_ISREG(about.st_mode) or stat.S_ISFIFO(about.st_mode)):
            raise UsageError(f"the key file {path} is no regular file")
        _check(path, about)  # before it is opened: the pipe of another user would never end
        with open(path, "rb") as file:
            _check(path, os.fstat(file.fileno()))
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"the key file {path}: {error.strerror}") from error


def _check(path: str, about: os.stat_result) -> None:
    why = next(_weaknesses(path, about), None)
    if why is not None:
        raise UsageError(
            f"the key file {path} {why}; a key that others know, or can replace, proves nothing",
            next_command=f"chmod 600 {shlex.quote(path)}",
        )


def _weaknesses(path: str, about: os.stat_result) -> Iterator[str]:
    own, mode = (os.geteuid(), 0), stat.S_IMODE(about.st_mode)
    if about.st_uid not in own:
        yield f"belongs to the user {about.st_uid}, and neither to you nor to root"
    if mode & 0o022:
        yield f"can be written by others (mode {mode:04o})"
    if mode & 0o007:
        yield f"can be read by others (mode {mode:04o})"
    own_group = about.st_gid in (os.getegid(), *os.getgroups())
    if mode & 0o070 and not (about.st_uid == 0 and own_group):
        yield f"can be read by its group (mode {mode:04o})"
    if stat.S_ISFIFO(about.st_mode):
        return  # such as `<(command)`: it has no name that others could take
    link = os.lstat(path)
    if link.st_uid not in own:
        yield f"is a link of the user {link.st_uid}"
    for folder in {os.path.dirname(os.path.abspath(path)), os.path.dirname(os.path.realpath(path))}:
        above = os.stat(folder)
        if above.st_uid not in own:
            yield f"is in a folder of the user {above.st_uid} ({folder})"
        by_others = above.st_mode & 0o002
        by_group = above.st_mode & 0o020 and not _is_private(above.st_gid)
        # With the sticky bit, only the owner of a file can replace it.
        if (by_others or by_group) and not above.st_mode & stat.S_ISVTX:
            mode = stat.S_IMODE(above.st_mode)
            yield f"is in a folder that others can write ({folder}, mode {mode:04o})"


def _is_private(group: int) -> bool:
    """Whether a group has only this user, as distributions create one for each."""
    import grp
    import pwd

    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    is_own = found.gr_name == user.pw_name and user.pw_gid == group
    return is_own and not {*found.gr_mem} - {user.pw_name}

"""Open files and folders in places where other users may write.

In `/tmp`, in `/dev/shm` or in a folder of a project, another user can create a link, a pipe or a
file before this process does, or put something else in the place of a folder. Every path in such
a place is opened here, name by name from a descriptor:

- a link is followed only if root or this user owns it;
- only regular files are opened, without waiting for the other end of a pipe;
- a file that exists already is used only if a trusted user owns it, and is written to only if it
  has no second name;
- a folder is held by its descriptor. Something else at its path is noticed by its device and
  inode.

Trusted are root and this user; callers add the owner of what a person named, or the users of a
job. `docs/decisions/shared-places.md` states why.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from typing import NamedTuple

from ckptctl.errors import PathUntrusted
from ckptctl.storage.contract import Closing

_SEARCHED = getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC
"""How folders on the way are opened: it takes the right to search them, not the one to list."""
_UNBLOCKED = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_FOLDER = frozenset({errno.ENOTDIR, errno.ELOOP})
_NO_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EOPNOTSUPP})
"""What opening a link, a pipe without a reader, a device or a socket fails with."""
_PROBE = ".ckptctl-owner"
_MOST_LINKS = 40
"""As the kernel has it, by path_resolution(7)."""
_MOST_TRIES = 8
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def trusted_users() -> frozenset[int]:
    """The user ids that are trusted everywhere: root and this user."""
    return frozenset({0, os.geteuid()})


def distrusted(
    path: str, about: os.stat_result, users: Collection[int] | None = None
) -> str | None:
    """Why a file is no evidence by its owner and mode, in a sentence; None where it is.

    `users` are trusted besides root and this user.
    """
    if not stat.S_ISREG(about.st_mode):
        return f"{path} is {_kind_of(about)}"
    if about.st_uid not in trusted_users() and about.st_uid not in (users or ()):
        return f"{path} belongs to uid {about.st_uid}"
    if about.st_mode & stat.S_IWOTH:
        return f"{path} can be written by every user"
    return None


def sole_writer(folder: os.stat_result) -> frozenset[int]:
    """The owner of a folder that nobody else can write: what lies in it is theirs.

    An NFS server may give what root writes to another owner.
    """
    return frozenset() if folder.st_mode & _OTHERS else frozenset({folder.st_uid})


def _kind_of(about: os.stat_result) -> str:
    kinds = (
        (stat.S_ISLNK, "a link"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
    )
    kind = next((name for test, name in kinds if test(about.st_mode)), "a device")
    return f"{kind} of uid {about.st_uid}, not a regular file"


def _refusal(path: str, why: str) -> PathUntrusted:
    return PathUntrusted(f"{path} {why}; it was not used", next_command=_status_command(path))


def _status_command(path: str) -> str:
    return f"ls -ld {shlex.quote(path)}"


class Descriptor(Closing):
    """An open file or folder; closed once, and never by the garbage collector.

    `linked`: a link that leads out of the root was followed to it.
    """

    __slots__ = ("fd", "linked")

    def __init__(self, fd: int, *, linked: bool = False) -> None:
        self.fd = fd
        self.linked = linked

    def close(self) -> None:
        """Close it; closing twice is no error."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


class HeldFolder(Descriptor):
    """A folder, held by its descriptor; `path` is how it was reached.

    What is done in it is done in this folder, whatever its path leads to by then.
    """

    __slots__ = ("path",)

    def __init__(self, path: str, fd: int) -> None:
        super().__init__(fd)
        self.path = path

    @property
    def about(self) -> os.stat_result:
        return os.fstat(self.fd)

    def is_there(self) -> bool:
        """Whether its path still leads to this folder."""
        with suppress(OSError):
            return os.path.samestat(os.stat(self.path), self.about)
        return False

    def path_of(self, name: str) -> str:
        return os.path.join(self.path, name)

    def names(self) -> list[str]:
        """What is in it, sorted."""
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)

    def about_file(self, name: str) -> os.stat_result:
        """The status of what has this name, also of a link."""
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def folder(self, name: str, *, make: bool = False) -> HeldFolder:
        """The folder `name` in it; with `make` it is created where it is missing."""
        return HeldFolder(self.path_of(name), _walked(name, make=make, within=self)[0])

    def open(
        self, name: str, flags: int = os.O_RDONLY, mode: int = 0o600, *, single: bool = False
    ) -> int:
        """The descriptor of a regular file.

        Raises `PathUntrusted` for anything else, with `single` also for a file that has a second
        name; `OSError` as the system does. The owner is not compared.
        """
        path = self.path_of(name)
        try:
            fd = os.open(name, flags | _UNBLOCKED, mode, dir_fd=self.fd)
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            with suppress(OSError):
                raise _refusal(path, f"is {_kind_of(self.about_file(name))}") from error
            raise
        about = os.fstat(fd)
        why = None
        if not stat.S_ISREG(about.st_mode):
            why = f"is {_kind_of(about)}"
        elif single and about.st_nlink > 1:
            why = "has a second name (a hard link)"
        if why is not None:
            os.close(fd)
            raise _refusal(path, why)
        os.set_blocking(fd, True)
        return fd

    def read(self, name: str, limit: int, users: Collection[int] | None = None) -> bytes:
        """At most `limit` bytes of a file of a trusted user; raises as `open` does."""
        fd = self.open(name)
        with os.fdopen(fd, "rb") as file:
            why = distrusted(self.path_of(name), os.fstat(fd), users)
            if why is not None:
                raise PathUntrusted(why, next_command=_status_command(self.path_of(name)))
            return file.read(limit)

    def append(self, name: str, mode: int = 0o644, *, private: bool = True) -> int:
        """The descriptor of a file that is read and appended to; created where it is missing.

        With `private` a file that exists must be of a trusted user, and one that everybody can
        write is refused; without, that holds in a folder that everybody can write.
        """
        flags = os.O_RDWR | os.O_APPEND
        for _ in range(_MOST_TRIES):
            with suppress(FileExistsError):
                return self.open(name, flags | os.O_CREAT | os.O_EXCL, mode)
            with suppress(FileNotFoundError):
                fd = self.open(name, flags, single=True)
                why = distrusted(self.path_of(name), os.fstat(fd))
                if why is not None and (private or self.about.st_mode & stat.S_IWOTH):
                    os.close(fd)
                    command = _status_command(self.path_of(name))
                    raise PathUntrusted(f"{why}; it was not used", next_command=command)
                return fd
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path_of(name))

    def write(self, name: str, data: bytes, mode: int = 0o600) -> None:
        """Put a file with this content in the place of what has the name; not durably."""
        aside = f"{name}.new"
        with suppress(FileNotFoundError):
            os.unlink(aside, dir_fd=self.fd)
        fd = self.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(fd, left) :]
        finally:
            os.close(fd)
        os.rename(aside, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self) -> None:
        """Remove the files in this folder, and the folder if its path still leads to it.

        Folders in it stay, and with them the folder itself. Never raises.
        """
        with suppress(OSError):
            for name in self.names():
                with suppress(OSError):
                    os.unlink(name, dir_fd=self.fd)
        with suppress(OSError):
            # `rmdir` follows no link, and removes no folder that holds something.
            if self.is_there():
                os.rmdir(self.path)
        self.close()

    @property
    def held_path(self) -> str:
        """A path that leads to this folder whatever is at `path`; for this process only."""
        through = f"/proc/self/fd/{self.fd}"
        with suppress(OSError):
            if os.path.samestat(os.stat(through), self.about):
                return through
        return self.path


def open_folder(path: str, *, make: bool = False) -> HeldFolder:
    """The folder at a path that a person or a variable names; with `make` missing ones are created.

    Raises `PathUntrusted` where another user's link is on the way, and `OSError`.
    """
    return HeldFolder(path, _walked(path, make=make)[0])


def open_private_folder(path: str) -> HeldFolder:
    """The folder at a path, which this user owns and nobody else can write.

    Raises `PathUntrusted` for another, and `OSError`.
    """
    folder = open_folder(path)
    about = folder.about
    if about.st_uid == os.geteuid() and not about.st_mode & _OTHERS:
        return folder
    folder.close()
    others = "" if about.st_uid != os.geteuid() else ", and others can write it"
    raise _refusal(path, f"belongs to uid {about.st_uid}{others}")


def new_private_folder(prefix: str, parents: Iterable[str | None] = (None,)) -> HeldFolder:
    """A new folder for this user alone in the first of `parents` where that is possible.

    None is the folder for temporary files. Raises `OSError`, and `PathUntrusted` where another
    user has put something else in its place meanwhile.
    """
    import tempfile  # its imports would delay every command

    failed: OSError | None = None
    for parent in parents:
        try:
            folder = open_folder(tempfile.mkdtemp(prefix=prefix, dir=parent))
            about = folder.about
            if not about.st_mode & _OTHERS and about.st_uid in (os.geteuid(), _creates_as(folder)):
                return folder
        except OSError as error:
            failed = error
        else:
            folder.close()
            raise _refusal(folder.path, f"was replaced by one of uid {about.st_uid}")
    raise failed or FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), prefix)


def _creates_as(folder: HeldFolder) -> int:
    """The owner of what this user creates in a folder: an NFS server may give it to another."""
    fd = folder.open(_PROBE, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)
        os.unlink(_PROBE, dir_fd=folder.fd)


def make_private_folder(path: str) -> HeldFolder:
    """A folder that is created now, for this user alone; raises `FileExistsError` for any other."""
    parent, name = os.path.split(path)
    with open_folder(parent or ".") as within:
        os.mkdir(name, 0o700, dir_fd=within.fd)
    return open_private_folder(path)


def open_place(path: str) -> tuple[HeldFolder, str]:
    """The folder in which a file lies or will lie, and its name there.

    Links of trusted users are followed, also by the name itself. Raises as `open_folder` does.
    """
    fd, name = _walked(path, leaf=True)
    return HeldFolder(os.path.dirname(path) or ".", fd), name


def open_named(path: str) -> int:
    """The descriptor of a regular file that a person named, to read it, whoever owns it.

    Raises `PathUntrusted` for anything else and for another user's link, and `OSError`.
    """
    place, name = open_place(path)
    with place:
        if not is_in_proc(place.fd):
            return place.open(name)
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place.fd)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        raise _refusal(path, "is not a regular file")


def found_in(folder: str) -> FoundIn:
    """What the files in a folder that a person named are; its owner is trusted."""
    owner = owner_of(folder)
    return FoundIn(folder, frozenset([] if owner is None else [owner]))


def open_appended(path: str) -> int:
    """The descriptor of a file that a person named, to append to it; folders are created too.

    In a folder that everybody can write, it must be of a trusted user. Raises as `open_named`.
    """
    open_folder(os.path.dirname(path) or ".", make=True).close()
    place, name = open_place(path)
    with place:
        return place.append(name, 0o666, private=False)


class FoundIn(NamedTuple):
    """Where a file was found: in the folder that was named, or below it.

    `users` are trusted besides root and this user, such as the owner of what was named.
    """

    folder: str
    users: frozenset[int] = frozenset()


def open_stream(place: HeldFolder, name: str) -> int | None:
    """The descriptor of a pipe or device that a person named, to write to it; None for a file.

    Opening a pipe waits for its reader. Raises `PathUntrusted` for those of other users.
    """
    if is_in_proc(place.fd):
        return os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=place.fd)
    try:
        about = place.about_file(name)
    except FileNotFoundError:
        return None
    if stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode):
        return None
    return _open_special(place, name, os.O_WRONLY, about, place.path_of(name))


def _open_special(
    place: HeldFolder, name: str, flags: int, about: os.stat_result, path: str
) -> int:
    """The descriptor of a pipe or device of a trusted user; `path` names it in an error."""
    if about.st_uid not in trusted_users() or stat.S_ISLNK(about.st_mode):
        raise _refusal(path, f"is {_kind_of(about)}")
    return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place.fd)


def open_found(path: str, found: FoundIn) -> int:
    """The descriptor of a regular file that was found in a folder, to read it.

    A link of a trusted user is followed. If everybody can write the folder that was named, or one
    on the way, the file must be of a trusted user. Raises `PathUntrusted`, and `OSError`.
    """
    *folders, name = os.path.relpath(path, found.folder).split(os.sep)
    with ExitStack() as stack:
        here = stack.enter_context(open_folder(found.folder))
        is_open = bool(here.about.st_mode & stat.S_IWOTH)
        for folder in folders:
            here = stack.enter_context(here.folder(folder))
            is_open = is_open or bool(here.about.st_mode & stat.S_IWOTH)
        last, name = _walked(name, leaf=True, within=here)
        fd = stack.enter_context(HeldFolder(here.path, last)).open(name)
        why = distrusted(path, os.fstat(fd), found.users) if is_open else None
        if why is None:
            return fd
        os.close(fd)
        raise PathUntrusted(why, next_command=_status_command(path))


def open_log(path: str) -> tuple[int, bool]:
    """The descriptor of a log that a person named, and whether it is a regular file.

    A pipe or a device may be named too, if a trusted user owns it; opening a pipe waits for its
    writer. Raises `PathUntrusted` for those of others and for another user's link, and `OSError`.
    """
    place, name = open_place(path)
    with place:
        if is_in_proc(place.fd):
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=place.fd)
            return fd, stat.S_ISREG(os.fstat(fd).st_mode)
        about = place.about_file(name)
        if stat.S_ISREG(about.st_mode):
            return place.open(name), True
        if stat.S_ISDIR(about.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return _open_special(place, name, os.O_RDONLY, about, path), False


def owner_of(path: str) -> int | None:
    """The user who owns what a person named, behind links; None where it is not there."""
    with suppress(OSError):
        return os.stat(path).st_uid
    return None


def is_in_proc(fd: int) -> bool:
    """Whether a folder is one of `/proc`, as for `/dev/stdout`: no user can put a link there."""
    with suppress(OSError):
        return os.fstat(fd).st_dev == os.stat("/proc/self").st_dev
    return False


def _walked(
    path: str, *, make: bool = False, leaf: bool = False, within: HeldFolder | None = None
) -> tuple[int, str]:
    """Open the folder to which a path leads, or with `leaf` the one that holds its last name.

    `within` is the folder that a relative path begins in, by default the current one. The name is
    empty without `leaf`.
    """
    if not path:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    names = _names(path)
    if leaf and not names:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    at = "/" if path.startswith("/") else "" if within is None else within.path
    if within is None or at == "/":
        here = os.open(at or ".", _SEARCHED | os.O_DIRECTORY)
    else:
        here = os.dup(within.fd)
    n_links = n_tries = 0
    try:
        while names:
            name = names.pop()
            is_leaf = leaf and not names
            target = None
            if is_leaf:
                if name == "..":
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
                target = _link_to_follow(here, name, os.path.join(at, name))
                if target is None:
                    return here, name
            else:
                try:
                    flags = _SEARCHED | os.O_DIRECTORY | os.O_NOFOLLOW
                    below = os.open(name, flags, dir_fd=here)
                except FileNotFoundError:
                    n_tries += 1
                    if not make or n_tries > _MOST_TRIES * 32:
                        raise
                    with suppress(FileExistsError):
                        os.mkdir(name, dir_fd=here)
                    names.append(name)
                    continue
                except OSError as error:
                    if error.errno not in _NO_FOLDER:
                        raise
                    if is_in_proc(here):
                        below = os.open(name, _SEARCHED | os.O_DIRECTORY, dir_fd=here)
                    else:
                        target = _link_to_follow(here, name, os.path.join(at, name))
                        if target is None:
                            raise
                if target is None:
                    os.close(here)
                    here, at = below, os.path.join(at, name)
                    continue
            n_links += 1
            if n_links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            names += _names(target)
            if leaf and not names:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            if target.startswith("/"):
                os.close(here)
                here, at = -1, "/"
                here = os.open("/", _SEARCHED | os.O_DIRECTORY)
        return here, ""
    except BaseException:
        if here >= 0:
            os.close(here)
        raise


def _names(path: str) -> list[str]:
    """The names of a path, the last first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _link_to_follow(within: int, name: str, path: str) -> str | None:
    """The target of a link that is followed; None where `name` is no link, or is in `/proc`.

    `path` names it in an error.

    Raises `PathUntrusted` for a link that another user could have created.
    """
    if is_in_proc(within):
        return None
    try:
        about = os.stat(name, dir_fd=within, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISLNK(about.st_mode):
        return None
    if about.st_uid not in trusted_users() and not _is_of_system(about, os.fstat(within)):
        raise _refusal(path, f"is a link that uid {about.st_uid} created")
    target = os.readlink(name, dir_fd=within)
    again = os.stat(name, dir_fd=within, follow_symlinks=False)
    if not os.path.samestat(about, again):
        raise _refusal(path, "was replaced while it was opened")
    return target


def _is_of_system(about: os.stat_result, within: os.stat_result) -> bool:
    """Whether a link is the system's although its owner is not root here.

    In a user namespace everything of users that are not in it, also of root, has one owner. A
    link counts where its folder is theirs too, and nobody else can write there.
    """
    system = os.stat("/").st_uid
    return system == about.st_uid == within.st_uid and not within.st_mode & _OTHERS

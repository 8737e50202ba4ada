"""Operations on the files of a mounted file system: list, publish, append, and what mounts it.

Listing and publishing work on descriptors, not on paths: whatever is renamed meanwhile, they
concern one folder. A file is written aside, flushed, linked or renamed into place, and its
folder is flushed, because a rename alone is atomic but may not survive a power loss.

A line is appended under a lock with one write, so that it is in the file whole or not at all. A
line that a crash truncated is closed off, never joined with the next.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from ckptctl.errors import AccessDenied, PathNotFound, StorageError, StorageUnavailable
from ckptctl.model import FileInfo
from ckptctl.storage.contract import Kind
from ckptctl.storage.retrying import Transient
from ckptctl.storage.watchdog import beat, busy

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


_APPENDED = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


def append_line(path: str, line: bytes) -> None:
    """Add `line`, which ends in a line end, to the file, and make it durable.

    The file is created where it is not there, its folder is not. Raises
    `PathNotFound`, `AccessDenied`, `StorageUnavailable`.
    """
    try:
        with busy(path):
            is_new = not os.path.exists(path)
            fd = os.open(path, _APPENDED, 0o666)
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
        raise _append_error(path, exc) from exc


def _append(fd: int, line: bytes) -> None:
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        line = b"\n" + line
    if os.write(fd, line) != len(line):
        # A part of a line would be damage to whoever reads it.
        os.ftruncate(fd, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(fd)


def _append_error(path: str, exc: OSError) -> StorageError:
    what = f"{path}: {exc.strerror or type(exc).__name__}"
    if exc.errno in (errno.ENOENT, errno.ENOTDIR):
        return PathNotFound(f"{what}; the folder of the file must be there")
    if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR):
        return AccessDenied(what)
    return StorageUnavailable(what)


_NETWORK_TYPES = frozenset(
    """
    9p afs beegfs ceph cifs gfs2 glusterfs gpfs lustre mmfs ncpfs nfs nfs4 ocfs2 orangefs panfs
    pvfs2 smb3 smbfs virtiofs wekafs
    """.split()  # noqa: SIM905
)
_MOUNT_TABLE = "/proc/self/mounts"


class Mount(NamedTuple):
    """What is mounted where: `nfs:/export`, `/shared`, `nfs4`."""

    source: str
    at: str
    type: str


def mount_of(folder: str) -> Mount | None:
    """The mount that `folder` lies on, None where there is no mount table to read (macOS)."""
    try:
        with open(_MOUNT_TABLE, encoding="utf-8", errors="surrogateescape") as table:
            lines = table.read().splitlines()
    except OSError:
        return None
    folder = os.path.realpath(folder)
    best: Mount | None = None
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        at = _unescaped(fields[1])
        inside = folder == at or folder.startswith(at.rstrip("/") + "/")
        # Of mounts on one place, the last in the table lies on top.
        if inside and (best is None or len(at) >= len(best.at)):
            best = Mount(_unescaped(fields[0]), at, fields[2])
    return best


def kind_of(folder: str) -> Kind:
    """`NETWORK` where a server or a FUSE process answers for `folder`, else `LOCAL`.

    `LOCAL` too where there is no mount table to read.
    """
    mount = mount_of(folder)
    if mount is None:
        return Kind.LOCAL
    # `fuseblk` is a disk of this machine behind a driver in user space.
    fuse = mount.type == "fuse" or mount.type.startswith("fuse.")
    return Kind.NETWORK if fuse or mount.type in _NETWORK_TYPES else Kind.LOCAL


def _unescaped(field: str) -> str:
    # Blank, tab, newline and backslash are octal in the table.
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, char)
    return field

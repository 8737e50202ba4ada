"""Operations on the files of a mounted file system: open, list, publish, append, mounts.

Listing and publishing use descriptors: a descriptor keeps referring to the same folder when
names are changed, a path does not. A file is written under a temporary name, flushed,
linked or renamed into place, and its folder is flushed, because a rename alone is atomic
but may not survive a power loss. Every path is opened from a descriptor of the root, name by
name, and no name on the way may be a link, unless it leads into a folder that the user named for
that. The root itself, which the user named too, may be a link or lie behind one.

A line is appended under a lock with one write, so that it is written whole or not at all. A
partial line that a crash left is ended first, so that the next line does not join it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from ckptctl.errors import (
    AccessDenied,
    LinkNotFollowed,
    PathNotFound,
    PathUntrusted,
    StorageError,
    StorageFull,
    StorageUnavailable,
    UsageError,
)
from ckptctl.formatting import command_line
from ckptctl.model import FileInfo
from ckptctl.storage.contract import StoreKind, parts_of
from ckptctl.storage.shared_places import (
    Descriptor,
    HeldFolder,
    is_in_proc,
    open_place,
    open_stream,
)
from ckptctl.storage.waiting import Transient, beat, busy

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK, opening a pipe waits for its writer.
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


PRIVATE, SHARED = 0o600, 0o666
"""The modes of new files: for their owner alone, or as the umask allows."""


def publish(
    name: str, data: Iterable[bytes | memoryview], *, within: int, replace: bool, mode: int = SHARED
) -> None:
    """Create `name` with `data` in the folder `within` (a descriptor), durably.

    Raises `FileExistsError` if it exists and `replace` is not set, or another `OSError` of
    the storage. Leaves nothing behind then.

    Without `replace`, an existing file is never overwritten, except on a file system
    without hard links (some FUSE mounts): there, two concurrent writers of one name may
    both succeed.
    """
    aside = f".ckptctl-{os.urandom(8).hex()}.tmp"
    try:
        _write(aside, data, within, _NEW, mode)
        if replace:
            os.rename(aside, name, src_dir_fd=within, dst_dir_fd=within)
        else:
            _link(aside, name, within)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(aside, dir_fd=within)
    os.fsync(within)


def replace_file(path: str, data: bytes, what: str, *, mode: int = SHARED) -> None:
    """Replace the file at `path` durably, or leave it as it was; `what` names it in an error.

    A pipe or a device of a trusted user is written to: a rename would put a file in its place,
    and root may do so even to `/dev/null`. A link of a trusted user stays; the file that it
    leads to is replaced. Raises `UsageError`, also for another user's link or pipe.
    """
    folder = os.path.dirname(path) or "."
    try:
        place, name = open_place(path)
        with place:
            target = _kernel_link(place, name)
            if target is not None:
                replace_file(target, data, what, mode=mode)
            elif (stream := open_stream(place, name)) is not None:
                with os.fdopen(stream, "wb") as file:
                    file.write(data)
            else:
                with Descriptor(os.open(".", _FOLDER, dir_fd=place.fd)) as within:
                    publish(name, [data], within=within.fd, replace=True, mode=mode)
    except OSError as error:
        raise UsageError(
            f"{what} cannot be written to {path}: {error.strerror}",
            next_command=_room(error, folder) if error.errno in FULL else None,
        ) from error
    except PathUntrusted as error:
        raise UsageError(
            f"{what} cannot be written: {error.message}", next_command=error.next_command
        ) from error


def _kernel_link(place: HeldFolder, name: str) -> str | None:
    """The regular file to which a descriptor in `/proc` leads, as `/dev/stdout` may do."""
    if not is_in_proc(place.fd) or not stat.S_ISREG(os.stat(name, dir_fd=place.fd).st_mode):
        return None
    target = os.readlink(name, dir_fd=place.fd)
    return target if os.path.isfile(target) else None


def write_in_place(name: str, data: Iterable[bytes | memoryview], *, within: int) -> None:
    """Write the file `name` in the folder `within` (a descriptor), and flush its bytes.

    It has that name from the first byte on. If an error ends the write, it is removed. The
    folder is not flushed.
    """
    try:
        _write(name, data, within, _NEW & ~os.O_EXCL | os.O_TRUNC)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=within)
        raise


def make_folder(name: str, *, within: int) -> None:
    """Create the folder `name` durably if it does not exist."""
    try:
        os.mkdir(name, dir_fd=within)
    except FileExistsError:
        return
    os.fsync(within)


def _write(
    name: str, data: Iterable[bytes | memoryview], within: int, flags: int, mode: int = SHARED
) -> None:
    fd = os.open(name, flags, mode, dir_fd=within)
    try:
        for piece in data:
            left = memoryview(piece)
            while left:
                left = left[os.write(fd, left[: 64 << 20]) :]
                beat()
        os.fsync(fd)
    finally:
        # A network file system may report a failed write only here.
        os.close(fd)


def _link(aside: str, name: str, within: int) -> None:
    try:
        os.link(aside, name, src_dir_fd=within, dst_dir_fd=within)
    except FileExistsError:
        # Over NFS an answer may be lost: when the request is repeated, our own link exists.
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
"""The error numbers of a full file system and of an exceeded quota."""


def full(what: str, exc: OSError, folder: str, n_bytes: int | None) -> StorageFull:
    """The error for `what`; `folder` is on the full file system."""
    wanted = f"{n_bytes:,} bytes to write, " if n_bytes is not None else ""
    about = os.statvfs(folder)
    if exc.errno == errno.EDQUOT:
        why = f"{wanted}the quota is exceeded ({exc.strerror})"
    elif _lacks_inodes(about):
        why = f"{exc.strerror}: all {about.f_files:,} inodes are in use, so no file can be created"
    else:
        why = f"{exc.strerror}: {wanted}{about.f_bavail * about.f_frsize:,} are free"
    return StorageFull(f"{what}: {why}", next_command=_room(exc, folder))


def _room(exc: OSError, folder: str) -> str:
    """The command that shows what is used up."""
    if exc.errno == errno.EDQUOT:
        return "quota -s"
    return f"df {'-i' if _lacks_inodes(os.statvfs(folder)) else '-h'} {shlex.quote(folder)}"


def _lacks_inodes(about: os.statvfs_result) -> bool:
    """Whether no file can be created although there is space; some file systems count none."""
    return about.f_files > 0 and about.f_favail == 0 and about.f_bavail > 0


class RootFolder:
    """The root at `path`, and what is below it, opened; `url` is what the user typed.

    `open` is the only way to the root, for reading and for writing. It keeps the identity of
    the folder that it opened first (device and inode number): a file system that was
    unmounted leaves the empty folder below its mount point, where the run would look new and
    every write would go to another disk. A link whose target lies in a folder of `follow` is
    followed, as if the target lay in its place. Errors of the system pass through, except for
    links and missing or replaced roots.
    """

    def __init__(self, path: str, url: str, follow: Sequence[str] = ()) -> None:
        self.path = path
        self.url = url
        self._identity: tuple[int, int] | None = None
        self.follow = tuple(follow)

    def open(self) -> Descriptor:
        """Open the root itself.

        Raises `PathNotFound`, see `to_be`; and `StorageUnavailable` if the folder that was
        opened before is gone or another one has its name.
        """
        try:
            folder = Descriptor(os.open(self.path, _FOLDER))
        except FileNotFoundError as exc:
            if self._identity is not None:
                raise self._vanished("it does not exist any more") from exc
            self.to_be()
            raise PathNotFound(f"{self.url} does not exist") from exc
        about = os.fstat(folder.fd)
        identity = about.st_dev, about.st_ino
        if self._identity is None:
            self._identity = identity
        elif not is_same_folder(self._identity, identity, self.path):
            folder.close()
            raise self._vanished("another folder is in its place")
        return folder

    def _vanished(self, what: str) -> StorageUnavailable:
        return StorageUnavailable(
            f"{self.url} is not the folder that was opened before: {what}. Its file system was "
            "unmounted, or the folder was moved or replaced; nothing was written, and what it "
            "holds is unknown",
            next_command="findmnt --real",
        )

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode number of the root."""
        with self.open() as folder:
            about = os.fstat(folder.fd)
        return about.st_dev, about.st_ino

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

    def create(self) -> None:
        """Create the root where it is missing and its parent exists."""
        if self._identity is None and not os.path.isdir(self.path):
            parent, name = os.path.split(self.to_be())
            with Descriptor(os.open(parent, _FOLDER)) as above:
                make_folder(name, within=above.fd)
        self.open().close()

    def file(self, path: str) -> Descriptor:
        """Open a regular file to read it."""
        *folders, name = parts_of(path) or ("",)
        if not name:
            raise PathNotFound(f"{self.url} is a folder, not a file")
        with self.folder(folders) as folder:
            file = self._below(folder, name, _FILE, path)
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
        here = (
            self.open() if within is None else Descriptor(os.dup(within.fd), linked=within.linked)
        )
        for n, name in enumerate(parts, 1):
            with here:
                if make:
                    make_folder(name, within=here.fd)
                path = "/".join(parts[:n]) if within is None else None
                here = self._below(here, name, _FOLDER, path)
        return here

    def _below(self, folder: Descriptor, name: str, flags: int, path: str | None) -> Descriptor:
        try:
            fd = os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder.fd)
            return Descriptor(fd, linked=folder.linked)
        except OSError as exc:
            target = _link_target(folder, name)
            if target is None:
                raise
            # What is removed is opened without its path from the root, and never through a link.
            followed = None if path is None else self.followed(folder, name, flags)
            if followed is not None:
                return followed
            raise LinkNotFollowed(
                f"{self.url}: {path or name} is a link to {target}; links are not followed",
                next_command=path and self._shown(path, target),
            ) from exc

    def _shown(self, path: str, target: str) -> str:
        """The command that follows a link, or that shows it where it leads to nothing."""
        link = os.path.join(self.path, path)
        tier = os.path.realpath(os.path.dirname(os.path.join(os.path.dirname(link), target)))
        target, root = os.path.realpath(link), os.path.realpath(self.path)
        # A folder that is the root, or holds it, is no step, whatever is followed.
        leads_back = os.path.commonpath([target, root]) == target
        is_below = target != tier and os.path.commonpath([target, tier]) == tier
        is_followed = tier in map(os.path.realpath, self.follow)
        may_follow = is_below and not (leads_back or is_followed) and tier != os.sep
        if os.path.exists(link) and may_follow:
            return command_line("scan", self.url, "--follow-links", tier)
        return shlex.join(["ls", "-ld", f"{self.url.rstrip('/')}/{path}"])

    def followed(self, folder: Descriptor, name: str, flags: int) -> Descriptor | None:
        """Open the target of the link `name` if it lies in a folder of `follow`; else None.

        The target is opened from that folder on without following any further link, so one that
        is changed meanwhile leads nowhere. Links behind a link are not followed.
        """
        if not self.follow or folder.linked:
            return None
        above = os.path.realpath(f"/proc/self/fd/{folder.fd}")
        target = os.path.realpath(os.path.join(above, name))
        for top in map(os.path.realpath, self.follow):
            inside = os.path.relpath(target, top)
            if inside == os.curdir or inside.split(os.sep)[0] == os.pardir:
                continue
            try:
                return _opened_below(top, inside.split(os.sep), flags)
            except OSError as exc:
                if exc.errno not in _LEADS_NOWHERE:
                    raise
        return None


_LEADS_NOWHERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


def _opened_below(top: str, names: Sequence[str], flags: int) -> Descriptor:
    """Open what the names lead to from the folder `top`, without following a link."""
    *folders, last = names
    with ExitStack() as stack:
        fd = os.open(top, _FOLDER)
        stack.callback(os.close, fd)
        for name in folders:
            fd = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
            stack.callback(os.close, fd)
        return Descriptor(os.open(last, flags | os.O_NOFOLLOW, dir_fd=fd), linked=True)


def is_same_folder(before: tuple[int, int], now: tuple[int, int], path: str) -> bool:
    """Whether two device and inode numbers, both found at `path`, are those of one folder.

    The export of a server that is mounted again, as autofs does, has another device number.
    """
    if before == now:
        return True
    return before[1] == now[1] and kind_of(path) is StoreKind.NETWORK


def scan(
    folder: Descriptor, parts: Sequence[str], root: RootFolder | None = None
) -> Iterator[FileInfo]:
    """The entries of the folder, unordered; `parts` are the names that lead to it.

    A link that `root` follows is shown as what it leads to.

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
                yield _info(entry, folder, prefix, root)
            except FileNotFoundError as exc:
                raise Transient("entries vanished during the listing") from exc


def _link_target(folder: Descriptor, name: str) -> str | None:
    """The target of the link `name` in the folder; None if `name` is not a link."""
    try:
        return os.readlink(name, dir_fd=folder.fd)
    except OSError:
        return None


def _info(
    entry: os.DirEntry[str], folder: Descriptor, prefix: str, root: RootFolder | None
) -> FileInfo:
    about = entry.stat(follow_symlinks=False)
    path = prefix + entry.name
    target = None
    if stat.S_ISLNK(about.st_mode):
        target = os.readlink(entry.name, dir_fd=folder.fd)
        followed = None if root is None else root.followed(folder, entry.name, _FILE)
        if followed is not None:
            with followed:
                about = os.fstat(followed.fd)
    mtime_s = about.st_mtime_ns / 1e9
    if stat.S_ISDIR(about.st_mode):
        return FileInfo(path, 0, mtime_s, kind="dir", link=target)
    identity = f"{about.st_dev}:{about.st_ino}:{about.st_mtime_ns}"
    if stat.S_ISREG(about.st_mode):
        return FileInfo(path, about.st_size, mtime_s, identity, link=target)
    if stat.S_ISLNK(about.st_mode):
        return FileInfo(path, 0, mtime_s, identity, "link", target)
    return FileInfo(path, 0, mtime_s, identity, "other")


def append_line(path: str, line: bytes) -> None:
    """Append `line`, which must end with a line end, durably.

    Creates the file with the line in it, so that a power cut leaves no empty file, but not its
    folder. Raises `PathNotFound`, `AccessDenied`, `StorageUnavailable`; `PathUntrusted` for another
    user's link, and for anything but a regular file.
    """
    folder = os.path.dirname(path) or "."
    try:
        with busy(path):
            place, name = open_place(path)
            with place:
                append_line_within(place, name, line)
    except OSError as exc:
        if exc.errno in FULL:
            raise full(path, exc, folder, len(line)) from exc
        error = error_of(path, exc)
        if isinstance(error, PathNotFound):
            raise PathNotFound(f"{error.message}; the folder of the file must exist") from exc
        raise error from exc


def append_line_within(place: HeldFolder, name: str, line: bytes) -> None:
    """The same in a folder that is open; errors of the system pass through."""
    try:
        place.about_file(name)
    except FileNotFoundError:
        with (
            Descriptor(os.open(".", _FOLDER, dir_fd=place.fd)) as within,
            suppress(FileExistsError),
        ):
            publish(name, (line,), within=within.fd, replace=False)
            return
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    is_open = bool(place.about.st_mode & stat.S_IWOTH)
    with Descriptor(place.open(name, flags, 0o666, single=is_open)) as file:
        # Over NFS, two concurrent appends may overwrite each other; the lock prevents this.
        fcntl.flock(file.fd, fcntl.LOCK_EX)
        size = os.fstat(file.fd).st_size
        if size and os.pread(file.fd, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(file.fd, line) != len(line):
            # Readers would take a partial line for damage.
            os.ftruncate(file.fd, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file.fd)


_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ENXIO})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR})


def error_of(path: str, exc: OSError) -> StorageError:
    """The error for a failed system call on `path`."""
    what = f"{path or repr(path)}: {exc.strerror or type(exc).__name__}"
    if exc.errno in _MISSING:
        return PathNotFound(what)
    if exc.errno in _DENIED:
        return AccessDenied(f"{what} (as user {os.geteuid()})")
    looped = f"ls -ld {shlex.quote(path)}" if exc.errno == errno.ELOOP else None
    return StorageUnavailable(what, next_command=looped)


_NETWORK_TYPES = frozenset(
    """
    9p afs beegfs ceph cifs gfs2 glusterfs gpfs lustre mmfs ncpfs nfs nfs4 ocfs2 orangefs panfs
    pvfs2 smb3 smbfs virtiofs wekafs
    """.split()  # noqa: SIM905
)
_MOUNT_TABLE = "/proc/self/mounts"


class Mount(NamedTuple):
    """One mount: source, mount point and type (`nfs:/export`, `/shared`, `nfs4`)."""

    source: str
    at: str
    type: str


def mount_of(folder: str) -> Mount | None:
    """The mount on which `folder` lies; None without a mount table."""
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
        # Of several mounts on one path, the last in the table is on top.
        if inside and (best is None or len(at) >= len(best.at)):
            best = Mount(_unescaped(fields[0]), at, fields[2])
    return best


def kind_of(folder: str) -> StoreKind:
    """`NETWORK` if a server or a FUSE process serves `folder`, else `LOCAL`.

    Also `LOCAL` without a mount table.
    """
    mount = mount_of(folder)
    if mount is None:
        return StoreKind.LOCAL
    # `fuseblk` is a local disk behind a driver in user space.
    fuse = mount.type == "fuse" or mount.type.startswith("fuse.")
    return StoreKind.NETWORK if fuse or mount.type in _NETWORK_TYPES else StoreKind.LOCAL


def _unescaped(field: str) -> str:
    # Blank, tab, newline and backslash are octal in the table.
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, char)
    return field

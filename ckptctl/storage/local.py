"""The store of a local or mounted file system.

`files` opens what is below the root, and writes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from operator import attrgetter
from typing import NamedTuple, TypeVar

from ckptctl.errors import AlreadyExists, PathEscape, StorageError
from ckptctl.model import FileInfo, Kept
from ckptctl.storage.contract import (
    Closing,
    OpenFile,
    ShortRead,
    Span,
    StoreKind,
    TooLarge,
    Upload,
    parts_of,
)
from ckptctl.storage.files import (
    FULL,
    PRIVATE,
    SHARED,
    RootFolder,
    append_line_within,
    error_of,
    full,
    kind_of,
    mount_of,
    publish,
    scan,
    write_in_place,
)
from ckptctl.storage.in_flight import WIDTH, read_in_flight
from ckptctl.storage.shared_places import Descriptor, HeldFolder
from ckptctl.storage.waiting import Retries, Transient, beat, busy, retried

T = TypeVar("T")

_HEALS = frozenset({errno.ESTALE, errno.EAGAIN})
_RETRIES = Retries(3)

_RECORDS = ".ckptctl/runbooks/"
"""Records of runbooks, which hold what commands printed: their owner alone reads them."""

_MAX_DEPTH = 100
_PIECE = 0x7FFFF000  # Linux reads no more a call; several pieces are copied together


class FileSystem(NamedTuple):
    """What a file system states about itself.

    `mount` is its type, source and place (`nfs4 server:/export on /shared`), None where there
    is no mount table to read. `free_bytes` is how much this user can still write.
    """

    mount: str | None
    read_only: bool
    free_bytes: int


class LocalStore(Closing):
    """A folder on a local or mounted file system.

    Keeps no descriptor open between calls, except in `open_file`. `root` is the path that
    is opened, `url` what the user typed. If a name vanishes during a listing, the listing
    is repeated: the file may have been renamed to a name that the scan had already passed.
    New files in a `private` folder, and in records of runbooks, can be read by their owner alone.
    Links into the folders `follow` are listed and read as what they lead to.

    `Store.folders` returns it for what an object store does not have. Writes are durable when a
    method returns, except for the names that `make_folder` and `write_in_place` create: the caller
    calls `sync_folder` on the parent once everything is in place.
    """

    upload_checksum = None

    def __init__(
        self,
        root: str,
        *,
        url: str | None = None,
        private: bool = False,
        follow: Sequence[str] = (),
    ) -> None:
        self.url = url or root
        self._is_private = private
        self._root = RootFolder(root, self.url, follow)
        self._kind: StoreKind | None = None

    @property
    def kind(self) -> StoreKind:
        """Whether the folder is on a network file system, by the mount table."""
        if self._kind is None:
            with busy(self.url):
                self._kind = kind_of(self._root.path)
        return self._kind

    @property
    def folders(self) -> LocalStore:
        return self

    def list_dir(self, path: str = "") -> Sequence[FileInfo]:
        """See `Store.list_dir`; folders carry their mtime."""
        return self._tried(path, lambda: sorted(self._names(path), key=attrgetter("path")))

    def list_tree(self, path: str = "") -> Sequence[FileInfo]:
        return self._tried(path, lambda: sorted(self._tree(path), key=attrgetter("path")))

    def read(self, path: str, *, limit: int) -> bytes:
        return self._tried(path, partial(self._whole, path, limit))

    def read_spans(self, spans: Iterable[Span]) -> Iterator[tuple[Span, bytes]]:
        """See `Store.read_spans`: concurrent on a network file system, sequential on a disk."""
        if self.kind is StoreKind.NETWORK:
            return read_in_flight(self._span, spans, width=WIDTH)
        return self._spans_in_turn(spans)

    view_spans = read_spans

    def open_file(self, path: str) -> OpenFile:
        """See `Store.open_file`: keeps one descriptor, so that a piece costs one system call."""
        return _LocalFile(self, path)

    def kept(self, paths: Iterable[str]) -> Iterator[Kept]:
        """See `Store.kept`: a file system keeps no checksums."""
        for path in paths:
            yield Kept(path, why_none="a file system keeps no checksums")

    def put(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """See `Store.put`; creates missing folders below the root.

        Not retried: after a failed write it is unknown what reached the disk.
        """
        self._publish(path, (data,), len(data), replace=replace)

    def put_pieces(self, path: str, pieces: Callable[[], Iterator[memoryview]], size: int) -> None:
        """See `Store.put_pieces`; not retried, like `put`."""
        self._publish(path, pieces(), size, replace=True)

    def path_of(self, path: str) -> str:
        """The absolute local path of a file or folder of the root."""
        root = os.path.abspath(self._root.path)
        return os.path.join(root, *parts_of(path))

    def file_id(self, path: str) -> tuple[int, int]:
        """Device and inode number of a regular file: its name on this running system.

        Opens the file, so that a network file system asks its server whether it changed.
        """
        return self._tried(path, partial(self._id, path))

    def create_root(self) -> None:
        """Create the root, durably, if its parent exists; an existing root is no error.

        No other method creates it: a write below a root that is missing raises `PathNotFound`.
        """
        with self._writing(""):
            self._root.create()

    def root_id(self) -> tuple[int, int]:
        """Device and inode number of the root.

        Raises `StorageUnavailable` if it is not the folder that this store opened first.
        """
        return self._tried("", lambda: self._root.identity)

    def make_folder(self, path: str) -> None:
        """Create a folder in the root or in an existing one; raises `AlreadyExists`."""
        *folders, name = parts_of(path)
        with self._writing(path), self._root.folder(folders) as above:
            os.mkdir(name, dir_fd=above.fd)

    def write_in_place(
        self, path: str, pieces: Callable[[], Iterator[memoryview]], size: int
    ) -> None:
        """As `Store.put_pieces`, for a file that counts only once another file names it.

        The file has its name from the first byte on, so that an interrupted save is visible.
        Its folder must exist, and the caller flushes it. If an error ends the write, the file
        is removed.
        """
        *folders, name = parts_of(path)
        with self._writing(path, size), self._root.folder(folders) as folder:
            write_in_place(name, pieces(), within=folder.fd)

    def sync_folder(self, path: str) -> None:
        """Make the entries of a folder durable."""
        with self._writing(path), self._root.folder(parts_of(path)) as folder:
            os.fsync(folder.fd)

    def append_line(self, path: str, line: bytes) -> None:
        """Append `line`, which must end with a line end, to a file that several processes write.

        The line is written whole or not at all. Creates the file in a folder that exists.
        """
        *folders, name = parts_of(path)
        with self._writing(path, len(line)), self._root.folder(folders) as folder:
            above = HeldFolder(os.path.dirname(self.path_of(path)), os.dup(folder.fd))
            with above:
                append_line_within(above, name, line)

    def move(self, path: str, target: str) -> None:
        """Rename a file or folder, creating missing parents. Raises `AlreadyExists`.

        If the target is an empty folder, two concurrent moves to it may both succeed.
        """
        old, new = parts_of(path), parts_of(target)
        with (
            self._writing(target),
            self._root.folder(old[:-1]) as within,
            self._root.folder(new[:-1], make=True) as into,
        ):
            with suppress(FileNotFoundError):
                os.stat(new[-1], dir_fd=into.fd, follow_symlinks=False)
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new[-1])
            os.rename(old[-1], new[-1], src_dir_fd=within.fd, dst_dir_fd=into.fd)
            os.fsync(into.fd)
            os.fsync(within.fd)

    def remove(self, path: str) -> None:
        """Remove a file or an empty folder; a missing one is no error."""
        parts = parts_of(path)
        with (
            self._writing(path),
            suppress(FileNotFoundError),
            self._root.folder(parts[:-1]) as folder,
        ):
            try:
                os.unlink(parts[-1], dir_fd=folder.fd)
            except IsADirectoryError:
                os.rmdir(parts[-1], dir_fd=folder.fd)

    def remove_folder(self, path: str, *, first: Sequence[Sequence[str]] = ()) -> None:
        """Remove a folder and its content; links are removed, never followed.

        `first` holds groups of files, as paths below the folder: each group is removed durably
        before anything of the next group or of the rest. Opens every folder on the way without
        following links, and empties it through its descriptor: a folder that was replaced by a
        link raises `PathEscape`, and the target of the link is not changed.
        """
        parts = parts_of(path)
        with self._writing(path), self._root.folder(parts[:-1]) as above:
            with self._root.folder(parts[-1:], within=above) as folder:
                for file in (file for group in first for file in group):
                    *names, name = parts_of(file)
                    with self._root.folder(names, within=folder) as inner:
                        with suppress(FileNotFoundError):
                            os.unlink(name, dir_fd=inner.fd)
                        os.fsync(inner.fd)
                self._empty(folder, depth=0)
            os.rmdir(parts[-1], dir_fd=above.fd)
            os.fsync(above.fd)

    def file_system(self) -> FileSystem:
        """The file system of the root, or of the folder that will hold it."""
        with busy(self.url):
            folder = self._root.existing()
            try:
                about = os.statvfs(folder)
            except OSError as exc:
                raise error_of(self.url, exc) from exc
            mount = mount_of(folder)
        words = None if mount is None else f"{mount.type} {mount.source} on {mount.at}"
        free_bytes = about.f_bavail * about.f_frsize
        return FileSystem(words, bool(about.f_flag & os.ST_RDONLY), free_bytes)

    def list_uploads(self, path: str = "") -> Sequence[Upload]:
        """See `Store.list_uploads`: a file system has none."""
        parts_of(path)
        return ()

    def abort_upload(self, upload: Upload) -> None:
        """See `Store.abort_upload`."""

    def retrying(self, retries: Retries) -> LocalStore:  # noqa: ARG002
        return self

    # Writing

    def _publish(
        self, path: str, data: Iterable[bytes | memoryview], size: int, *, replace: bool
    ) -> None:
        parts = parts_of(path)
        if not parts:
            raise PathEscape(f"{self.url} is the folder itself; it cannot be written as a file")
        mode = PRIVATE if self._is_private or path.startswith(_RECORDS) else SHARED
        with self._writing(path, size), self._root.folder(parts[:-1], make=True) as folder:
            publish(parts[-1], data, within=folder.fd, replace=replace, mode=mode)

    def _empty(self, folder: Descriptor, *, depth: int) -> None:
        """Remove everything in an open folder; links are removed, not followed."""
        if depth > _MAX_DEPTH:
            raise OSError(errno.ELOOP, f"folders nested more than {_MAX_DEPTH} deep")
        with os.scandir(folder.fd) as entries:
            names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_folder in names:
            beat()
            if is_folder:
                with self._root.folder([name], within=folder) as inner:
                    self._empty(inner, depth=depth + 1)
                os.rmdir(name, dir_fd=folder.fd)
            else:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder.fd)

    @contextmanager
    def _writing(self, path: str, size: int | None = None) -> Iterator[None]:
        with busy(self._named(path)):
            try:
                yield
            except FileExistsError as exc:
                raise AlreadyExists(
                    f"{self._named(path)} already exists; it was not changed"
                ) from exc
            except OSError as exc:
                if exc.errno in FULL:
                    raise full(self._named(path), exc, self._root.existing(), size) from exc
                raise error_of(self._named(path), exc) from exc

    # Listing

    def _names(self, path: str) -> Iterator[FileInfo]:
        with self._root.folder(parts_of(path)) as folder:
            yield from scan(folder, parts_of(path), self._root)

    def _tree(self, path: str) -> Iterator[FileInfo]:
        top = parts_of(path)
        folders = [top]
        while folders:
            parts = folders.pop()
            if len(parts) - len(top) > _MAX_DEPTH:
                raise TooLarge(f"{self._named(path)}: folders nested more than {_MAX_DEPTH} deep")
            try:
                folder = self._root.folder(parts)
            except (FileNotFoundError, NotADirectoryError, PathEscape) as exc:
                if parts == top:
                    raise
                raise Transient("folders vanished during the listing") from exc
            with folder:
                for info in scan(folder, parts, self._root):
                    if info.kind == "dir":
                        folders.append((*parts, info.path.rpartition("/")[2]))
                    else:
                        yield info

    # Reading

    def _whole(self, path: str, limit: int) -> bytes:
        with self._root.file(path) as file:
            data = b""
            size = os.fstat(file.fd).st_size
            # One byte more than expected, to detect that the file grew.
            while len(data) <= limit:
                more = os.pread(file.fd, min(limit, size, _PIECE) + 1, len(data))
                if not more:
                    return data
                data = data + more if data else more
        size = max(size, len(data))
        raise TooLarge(f"{self._named(path)} is {size:,} bytes; the limit is {limit:,}")

    def _id(self, path: str) -> tuple[int, int]:
        with self._root.file(path) as file:
            found = os.fstat(file.fd)
        return found.st_dev, found.st_ino

    def _spans_in_turn(self, spans: Iterable[Span]) -> Iterator[tuple[Span, bytes]]:
        with ExitStack() as stack:
            path, file = None, None
            for span in spans:
                if file is None or span.path != path:
                    stack.close()
                    path, file = span.path, stack.enter_context(_LocalFile(self, span.path))
                yield span, file.read(span)

    def _span(self, span: Span) -> bytes:
        with _LocalFile(self, span.path) as file:
            return file.read(span)

    def _exactly(self, file: Descriptor, span: Span) -> bytes:
        # The size bounds the allocation: the length comes from metadata, which may be wrong.
        # One byte is read whatever the size: a cache of attributes may show one that is too small.
        size = os.fstat(file.fd).st_size
        end = span.offset + span.length
        if span.offset < 0 or span.length < 0 or (end > size and span.length > 1):
            raise self._short(span, size)
        data = os.pread(file.fd, min(span.length, _PIECE), span.offset)
        while len(data) < span.length:
            more = os.pread(file.fd, min(span.length - len(data), _PIECE), span.offset + len(data))
            if not more:
                raise self._short(span, min(size, span.offset + len(data)))
            data += more
        return data

    def _short(self, span: Span, size: int) -> ShortRead:
        return ShortRead(
            f"{self._named(span.path)} is {size:,} bytes; "
            f"bytes {span.offset:,} to {span.offset + span.length:,} were requested",
            size=size,
        )

    # Errors

    def _tried(self, path: str, once: Callable[[], T]) -> T:
        meaning = partial(self._meaning, path)
        return retried(once, what=self._named(path), retries=_RETRIES, meaning=meaning)

    def _meaning(self, path: str, exc: OSError, before: Transient | None) -> StorageError:
        """The error for a failed call; a `Transient` if another try may succeed."""
        earlier = before.__cause__ if before is not None else None
        # A disk's read error may pass once; further tries only take time.
        is_first = not isinstance(earlier, OSError) or earlier.errno != errno.EIO
        if exc.errno in _HEALS or (exc.errno == errno.EIO and is_first):
            return Transient(exc.strerror or type(exc).__name__)
        return error_of(self._named(path), exc)

    def _named(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/{path}" if path else self.url


class _LocalFile(OpenFile):
    """An open file of a `LocalStore`."""

    def __init__(self, store: LocalStore, path: str) -> None:
        self._store = store
        self._path = path
        self._name = store._named(path)
        self._file = store._tried(path, partial(store._root.file, path))

    def read(self, span: Span) -> bytes:
        """The bytes of a span."""
        return self._again_if_stale(lambda: self._store._exactly(self._file, span))

    def read_into(self, offset: int, *buffers: memoryview) -> None:
        self._again_if_stale(lambda: self._fill(offset, buffers))

    def _again_if_stale(self, once: Callable[[], T]) -> T:
        try:
            with busy(self._name):
                return once()
        except OSError:
            # A stale descriptor stays stale; opening the path again may succeed.
            return self._store._tried(self._path, partial(self._anew, once))

    def _anew(self, once: Callable[[], T]) -> T:
        self._file.close()
        self._file = self._store._root.file(self._path)
        return once()

    def _fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        n_bytes = sum(map(len, buffers))
        n_read = os.preadv(self._file.fd, buffers, offset)
        while n_read < n_bytes:
            n_more = os.preadv(self._file.fd, _after(buffers, n_read), offset + n_read)
            if not n_more:
                span = Span(self._path, offset, n_bytes)
                raise self._store._short(span, os.fstat(self._file.fd).st_size)
            n_read += n_more

    def close(self) -> None:
        self._file.close()


def _after(buffers: Sequence[memoryview], n_bytes: int) -> list[memoryview]:
    """What is left of the buffers after their first `n_bytes` bytes."""
    left = []
    for buffer in buffers:
        if n_bytes < len(buffer):
            left.append(buffer[n_bytes:])
        n_bytes = max(0, n_bytes - len(buffer))
    return left

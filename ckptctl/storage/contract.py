"""The contract of a store.

A store has few operations, each bounded: list one level, list a tree, read byte ranges, get
the checksums that the storage keeps, write one object. It is opened on a root; every path
is relative to the root, with `/`, without empty parts and without `..`.

Every store guarantees the following; `tests/storage` checks each:

- A listing is complete and consistent, or an error. It is never cached. It costs one
  request per 1,000 names on an object store, one `scandir` per folder on a file system.
- Storage failures raise `StorageUnavailable` (after bounded retries), `AccessDenied` or
  `PathNotFound`, and nothing else. `PathNotFound` is raised only if the storage answered
  that the path does not exist.
- A read returns exactly the requested bytes or raises; a range beyond the end of the file
  raises `ShortRead`.
- Links are listed, not followed, unless they lead into a folder of `follow_links`. Directory
  markers and `.nfs*` files are not listed.
- `put` publishes a whole file or nothing.
- Nothing but `LocalStore.create_root` creates the root. A root of a file system that vanished or
  was replaced since the store opened it raises `StorageUnavailable`, for reads and writes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from ckptctl.errors import AlreadyExists, PathEscape, PathNotFound, StorageError
from ckptctl.model import FileInfo, Kept
from ckptctl.storage.waiting import Retries

if TYPE_CHECKING:
    from typing import Self

    from ckptctl.storage.local import LocalStore


class ShortRead(StorageError, code="step.changed", exit_code=26):
    """The file ends before the requested range; `size` is its current size, if known."""

    def __init__(
        self, message: str, *, size: int | None = None, next_command: str | None = None
    ) -> None:
        super().__init__(message, next_command=next_command)
        self.size = size


class Replaced(ShortRead):
    """The file was replaced by another one while parts of it were read."""


class TooLarge(StorageError, code="storage.too-large"):
    """A limit of ckptctl is exceeded: the size of a file or the depth of nested folders."""


class NotSupported(StorageError, code="storage.not-supported", exit_code=2):
    """The storage or its client does not support the operation."""


Data = bytes | memoryview
"""What was read: bytes, or a view of those that a client holds, which are not copied."""


class StoreKind(StrEnum):
    """How much a read costs: almost nothing, a round trip, or a request."""

    LOCAL = "local"
    NETWORK = "network"
    OBJECT = "object"


@dataclass(frozen=True, slots=True)
class Span:
    """`length` bytes of the file at `path`, from `offset` on."""

    path: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload to `path` that was neither completed nor aborted.

    Listings do not show it, and its parts are billed until it is completed or aborted.
    `begun_s` is Unix time by the storage's clock, if known.
    """

    path: str
    id: str
    begun_s: float | None = None


MAX_BUFFERS = 1024
"""How many buffers Linux fills in one call (`IOV_MAX`)."""


class Closing:
    """What the end of a `with` block closes."""

    __slots__ = ()

    def close(self) -> None:
        """Release what is held; nothing by default."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class OpenFile(Closing):
    """One open file that one thread reads in pieces; `close` closes it."""

    __slots__ = ()

    def read_into(self, offset: int, *buffers: memoryview) -> None:
        """Fill the buffers, one after the other, with the bytes from `offset` on.

        There are at most `MAX_BUFFERS`. Raises `ShortRead` if the file ends before they are
        full. After an error, their content is undefined.
        """
        raise NotImplementedError


class Store(Protocol):
    """One checkpoint root, or one step, on some storage."""

    @property
    def url(self) -> str:
        """The root as the user typed it, without a trailing `/`."""

    @property
    def kind(self) -> StoreKind:
        """How much a read costs on this store."""

    @property
    def folders(self) -> LocalStore | None:
        """The operations of a file system; None for an object store."""

    @property
    def upload_checksum(self) -> str | None:
        """The checksum algorithm of uploads that the storage keeps, if any."""

    def list_dir(self, path: str = "") -> Sequence[FileInfo]:
        """The entries directly below `path`, sorted by path; paths are relative to the root.

        Folders have kind `dir`. Raises `PathNotFound` if `path` is not a folder. An object
        store has no empty folders: there the list is empty instead, if the bucket exists.
        """

    def list_tree(self, path: str = "") -> Sequence[FileInfo]:
        """All files below `path`, at any depth, sorted; no entries of kind `dir`."""

    def read(self, path: str, *, limit: int) -> bytes:
        """The content of a file; raises `TooLarge` if it exceeds `limit` bytes.

        Never blocks on anything but a regular file.
        """

    def read_spans(self, spans: Iterable[Span]) -> Iterator[tuple[Span, bytes]]:
        """Each span with its bytes, in the requested order.

        Several reads are in flight at once where that is faster; at most 64 MiB of results
        are buffered. On an object store, all spans of one path are read from one object: if
        it is replaced in between, `Replaced` is raised. Adjacent spans are not merged; the
        caller does that.
        """

    def view_spans(self, spans: Iterable[Span]) -> Iterator[tuple[Span, Data]]:
        """As `read_spans`, without a copy of what a client holds: for long reads."""

    def open_file(self, path: str) -> OpenFile:
        """Open a file to read many pieces into buffers of the caller, who closes it.

        All pieces come from the same file; an object store raises `Replaced` if the object
        was replaced.
        """

    def kept(self, paths: Iterable[str]) -> Iterator[Kept]:
        """The checksums that the storage keeps of each file, in the requested order; reads no data.

        Costs one HEAD request per file on an object store, several in flight, and none if
        the storage is known to keep no checksums. Raises `PathNotFound` for a missing file,
        if a request was made.
        """

    def put(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """Create the file whole and durable, or change nothing.

        Raises `AlreadyExists` if it exists and `replace` is not set.
        """

    def put_pieces(self, path: str, pieces: Callable[[], Iterator[memoryview]], size: int) -> None:
        """Like `put`, for `size` bytes that do not fit in memory at once; replaces the file.

        `pieces` is called again when the write is retried. A piece may be overwritten once
        the next one is requested. What `pieces` raises is passed on, and nothing is
        written. At most 64 MiB are buffered.
        """

    def remove(self, path: str) -> None:
        """Remove a file; a missing file is no error."""

    def list_uploads(self, path: str = "") -> Sequence[Upload]:
        """The unfinished multipart uploads of objects below `path`, sorted by path.

        Interrupted saves leave them behind. Running uploads are included: before aborting
        one, make sure that its writer has ended. Empty for a storage without multipart
        uploads. Raises `NotSupported` if the client cannot list them. Costs one request per
        1,000.
        """

    def abort_upload(self, upload: Upload) -> None:
        """Remove the parts of an upload; an upload that has ended is no error.

        If its writer is still running, its next part fails and it starts a new upload.
        """

    def retrying(self, retries: Retries) -> Store:
        """The same store over the same connections, with other retries of a failed request.

        `close` of either closes them. A file system has retries of its own, and is returned
        as it is.
        """

    def close(self) -> None:
        """Close connections and end threads. A store is also a context manager."""

    def __enter__(self) -> Store: ...

    def __exit__(self, *exc: object) -> None: ...


class Wrapped(Closing):
    """A store over another one, which answers what a subclass does not; `close` leaves it open."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def read_range(store: Store, path: str, offset: int, length: int) -> bytes:
    """The `length` bytes of a file from `offset` on. Cost: one read."""
    ((_, data),) = store.read_spans([Span(path, offset, length)])
    return data


def spread(data: Data, buffers: Iterable[memoryview]) -> None:
    """Copy the bytes into the buffers, one after the other."""
    at, taken = 0, memoryview(data)
    for buffer in buffers:
        buffer[:] = taken[at : at + len(buffer)]
        at += len(buffer)


def storage_time_s(store: Store, path: str) -> float:
    """The time by the storage's own clock, seconds since 1970; that of this host without one.

    Clocks of hosts may differ: times of files are compared with this one. Writes a small file
    at `path`, and removes it as far as that is allowed. Cost: one write, one listing, one removal.
    """
    store.put(path, b"now", replace=True)
    listed = store.list_dir(path.rpartition("/")[0])
    with suppress(StorageError):
        store.remove(path)
    found = next((info.mtime_s for info in listed if info.path == path), None)
    return time.time() if found is None else found


def list_if_there(store: Store, folder: str) -> Sequence[FileInfo]:
    """The listing of a folder; empty where there is none. Cost: one listing."""
    try:
        return store.list_dir(folder)
    except PathNotFound:
        return ()


def read_if_there(store: Store, path: str, *, limit: int) -> bytes | None:
    """The content of a file; None where there is none, or a larger one. Cost: one read."""
    try:
        return store.read(path, limit=limit)
    except (PathNotFound, TooLarge):
        return None


class NumberedFiles:
    """The files of one folder, named by numbers of `n_digits` digits: `0000000012.json`.

    They are created only if absent, and never changed. Of two writers that add the same number one
    fails because the other was first, on every storage that keeps conditional writes. So a file is
    whole or absent, and the highest number is the newest. The tokens of a root, the state of a
    supervised run and the record of a runbook are such files.
    """

    def __init__(self, store: Store, folder: str, n_digits: int = 10) -> None:
        self.store = store
        self.folder = folder
        self._n_digits = n_digits
        self._name = re.compile(rf"([0-9]{{{n_digits}}})\.json")

    def path(self, number: int) -> str:
        """The path of a file in the store."""
        name = f"{number:0{self._n_digits}}.json"
        return f"{self.folder}/{name}" if self.folder else name

    def numbers(self) -> list[int]:
        """The numbers that were taken, rising; none where there is no folder. Cost: a listing."""
        names = (entry.path.rpartition("/")[2] for entry in list_if_there(self.store, self.folder))
        matches = (self._name.fullmatch(name) for name in names)
        return sorted(int(match[1]) for match in matches if match)

    def newest(self) -> int:
        """The highest number that was taken; 0 for none. Cost: a listing."""
        return max(self.numbers(), default=0)

    def read(self, number: int, limit: int) -> bytes:
        """The bytes of a file; raises `PathNotFound`, and `TooLarge` above `limit`."""
        return self.store.read(self.path(number), limit=limit)

    def add(self, number: int, data: bytes) -> None:
        """Create a file; raises `AlreadyExists` where another writer has the number.

        A write that was repeated after a lost answer finds its own file: no two writers may
        write equal bytes.
        """
        try:
            self.store.put(self.path(number), data)
        except AlreadyExists as taken:
            try:
                others = self.store.read(self.path(number), limit=len(data) + 1)
            except TooLarge:
                raise taken from None  # longer than ours: another writer's
            if others != data:
                raise


def parts_of(path: str) -> tuple[str, ...]:
    """The names along `path`; empty for the root, which is the empty path.

    Raises `PathEscape` for a path that is absolute or contains `.`, `..`, an empty name or
    a NUL; `PathNotFound` for a text that no storage can have as a name (a lone surrogate).
    """
    if not path:
        return ()
    parts = tuple(path.split("/"))
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise PathEscape(f"{path!r} is not a relative path below the folder; it was not opened")
    _check_encodable(path)
    return parts


def key_of(path: str) -> str:
    """The same check for a key below a prefix; keys may have empty names between slashes.

    Object stores give `.` and `..` no meaning, but the HTTP client and proxies on the way
    may.
    """
    parts = path.split("/")
    around = parts[0] == "" or parts[-1] == ""
    if around or "\0" in path or "." in parts or ".." in parts:
        raise PathEscape(f"{path!r} is not a relative path below the prefix; it was not requested")
    _check_encodable(path)
    return path


def _check_encodable(path: str) -> None:
    try:
        path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as exc:
        raise PathNotFound(f"{path!r} cannot be a name on any storage") from exc

"""The contract of a storage.

Few verbs, all of them bounded: list one level, list a tree, read byte ranges, ask
for the checksums that the storage keeps, put one object. A store is opened on a
root; every path is relative to it, with `/`, never empty parts, never `..`.

What every store promises, and `tests/storage` proves for each:

- A listing is one consistent answer or an error, never a part of one; it is
  never served from a cache. It costs one request per 1,000 names on an object
  store and one `scandir` per folder on a file system.
- `StorageUnavailable` after bounded retries, `AccessDenied`, `PathNotFound` are
  told apart, and nothing else is raised for what a storage does. Only a storage
  that answered "there is no such thing" gives `PathNotFound`.
- A read returns exactly the bytes that were asked for, or raises; a range that
  goes over the end of the file raises `ShortRead`.
- Links are shown, not followed. Directory markers and `.nfs*` files are not shown.
- `put` publishes whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ckptctl.errors import PathEscape, PathNotFound, StorageError
from ckptctl.model import FileInfo, Kept


class ShortRead(StorageError):
    """The file ends before the range that was asked for; `size` is its size now, if known."""

    exit_code = 26
    code = "step.changed"

    def __init__(
        self, message: str, *, size: int | None = None, next_command: str | None = None
    ) -> None:
        super().__init__(message, next_command=next_command)
        self.size = size


class Replaced(ShortRead):
    """The file was replaced by another while its pieces were read."""


class TooLarge(StorageError):
    """More than ckptctl takes in: a file over the limit, folders nested without end."""

    code = "storage.too-large"


class NotSupported(StorageError):
    """The storage, or the client that talks to it, has no such operation."""

    exit_code = 2
    code = "storage.not-supported"


class Kind(str, Enum):
    """What a read costs: nearly nothing, a round trip, or a request."""

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
    """A multipart upload of the object at `path` that was begun and not ended.

    It is in no listing, and its parts are billed until it is completed or aborted.
    `begun_s` is Unix time by the storage's clock, if known.
    """

    path: str
    id: str
    begun_s: float | None = None


class OpenFile(Protocol):
    """One file that is read in pieces, by one thread."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on; raises `ShortRead` where they end before.

        After an error nobody knows what is in the buffer.
        """
        ...

    def close(self) -> None:
        """Let go of it. An open file is also a context manager."""
        ...

    def __enter__(self) -> OpenFile: ...

    def __exit__(self, *exc: object) -> None: ...


class Folders(Protocol):
    """What a file system can do and an object store cannot; see `Store.folders`.

    What is written is durable when a method returns, but for `make_folder`: the caller
    flushes the folder above it with `sync_folder`, once everything is in place.
    """

    def path_of(self, path: str) -> str:
        """The absolute path by which this machine opens a file or a folder of the root."""
        ...

    def make_folder(self, path: str) -> None:
        """Create a folder in one that exists; raises `AlreadyExists`."""
        ...

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        ...

    def move(self, path: str, target: str) -> None:
        """Rename a file or a folder; missing folders are made. Raises `AlreadyExists`."""
        ...

    def append_line(self, path: str, line: bytes) -> None:
        """Add `line`, which ends in a line end, to a file that several processes write.

        The line is added whole or not at all. The file and its folders are created where
        they are missing.
        """
        ...

    def remove_folder(self, path: str, *, first: Sequence[Sequence[str]] = ()) -> None:
        """Remove a folder and all that is in it; links are removed and never followed.

        `first` are groups of files by their paths below the folder: each group is gone,
        durably, before anything of the next group or of the rest.
        """
        ...

    def free_bytes(self) -> int:
        """How many bytes can still be written."""
        ...


class Store(Protocol):
    """One checkpoint root, or one step, on some storage."""

    @property
    def url(self) -> str:
        """The root as the user wrote it, without a trailing `/`."""
        ...

    @property
    def kind(self) -> Kind:
        """What a read costs here."""
        ...

    @property
    def folders(self) -> Folders | None:
        """The operations of a file system; None for an object store."""
        ...

    @property
    def upload_checksum(self) -> str | None:
        """The checksum that is sent with a file and kept by the storage, if there is one."""
        ...

    def list_dir(self, path: str = "") -> Sequence[FileInfo]:
        """The names directly below `path`, sorted by path; paths relative to the root.

        Folders are there with kind `dir`. Raises `PathNotFound` where `path` is
        not a folder; an object store has no empty folders, so there the list is
        empty instead, if the bucket exists.
        """
        ...

    def list_tree(self, path: str = "") -> Sequence[FileInfo]:
        """All files below `path`, at any depth, sorted; no entries of kind `dir`."""
        ...

    def read(self, path: str, *, limit: int) -> bytes:
        """The whole file; raises `TooLarge` when it is larger than `limit` bytes.

        Never blocks on what is not a regular file.
        """
        ...

    def read_spans(self, spans: Iterable[Span]) -> Iterator[tuple[Span, bytes]]:
        """Each span with its bytes, in the order asked for.

        Several are in flight at once where that is faster; at most 64 MiB wait
        to be taken. On an object store all spans of one path are of one object:
        where it is replaced meanwhile, `Replaced` is raised. Adjacent spans are not
        merged here: the caller knows better.
        """
        ...

    def open_file(self, path: str) -> OpenFile:
        """A file to read many pieces of, into a buffer of the caller's; closed by the caller.

        What was opened is what is read to the end; an object store raises `Replaced`
        where it is another now.
        """
        ...

    def kept(self, paths: Iterable[str]) -> Iterator[Kept]:
        """What the storage keeps of each file, in the order asked for; no byte is read.

        One HEAD request each on an object store, several in flight; none where it is known
        that there are no checksums. Raises `PathNotFound` at a file that is not there, if
        the storage was asked.
        """
        ...

    def put(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """Create the file whole and durable, or leave things as they were.

        Raises `AlreadyExists` when it is there and `replace` is not set.
        """
        ...

    def put_pieces(self, path: str, pieces: Callable[[], Iterator[memoryview]], size: int) -> None:
        """As `put`, for `size` bytes that are too many to be held at once; replaces.

        `pieces` is called again where a storage has to be asked again. A piece may be
        overwritten once the next one is asked for. What `pieces` raises passes through,
        and nothing is written then. At most 64 MiB wait to be written.
        """
        ...

    def remove(self, path: str) -> None:
        """Remove a file; nothing where it is not there."""
        ...

    def list_uploads(self, path: str = "") -> Sequence[Upload]:
        """The multipart uploads of objects below `path` that nobody ended, sorted by path.

        A killed save leaves them. Uploads that are running are among them: who aborts one
        must know that its writer is gone. Empty for a storage that has no such thing.
        Raises `NotSupported` where the client cannot list them. One request per 1,000.
        """
        ...

    def abort_upload(self, upload: Upload) -> None:
        """Remove the parts of an upload; nothing where it has ended meanwhile.

        A writer that is still alive fails at its next part, and begins a new upload.
        """
        ...

    def close(self) -> None:
        """Let go of connections and threads. A store is also a context manager."""
        ...

    def __enter__(self) -> Store: ...

    def __exit__(self, *exc: object) -> None: ...


def parts_of(path: str) -> tuple[str, ...]:
    """The names along `path`; empty for the root, which is the empty path.

    Raises `PathEscape` for a path that is absolute, or has `.`, `..`, an empty
    name or a NUL in it; `PathNotFound` for a text that no storage can hold as a
    name (a lone surrogate).
    """
    if not path:
        return ()
    parts = tuple(path.split("/"))
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise PathEscape(f"{path!r} is not a plain path below the folder; it was not opened")
    _check_encodable(path)
    return parts


def key_of(path: str) -> str:
    """The same check for a key below a prefix; keys may have empty names between slashes.

    `.` and `..` mean nothing to an object store, but something to the HTTP
    client and the proxies on the way to it.
    """
    parts = path.split("/")
    around = parts[0] == "" or parts[-1] == ""
    if around or "\0" in path or "." in parts or ".." in parts:
        raise PathEscape(f"{path!r} is not a plain path below the prefix; it was not asked for")
    _check_encodable(path)
    return path


def _check_encodable(path: str) -> None:
    try:
        path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as exc:
        raise PathNotFound(f"{path!r} is not a text that a storage can have as a name") from exc

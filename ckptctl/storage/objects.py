"""The store of an object storage: keys as folders and files.

Paths, pages, markers, retries and whole writes are the same for every object store and are
implemented here. A `Client` makes single requests and maps errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace as with_fields
from functools import partial
from operator import attrgetter
from typing import Protocol, TypeVar

from ckptctl.errors import AlreadyExists, PathNotFound, StorageUnavailable
from ckptctl.model import FileInfo, Kept
from ckptctl.storage.contract import (
    Closing,
    Data,
    OpenFile,
    Replaced,
    ShortRead,
    Span,
    StoreKind,
    TooLarge,
    Upload,
    key_of,
    spread,
)
from ckptctl.storage.in_flight import in_flight, read_in_flight
from ckptctl.storage.waiting import Retries, Transient, retried

T = TypeVar("T")


PART_BYTES = 8 << 20
"""A large object is written in parts of so many bytes."""

_MAX_PARTS = 9_000
"""S3 takes 10,000; Source: Amazon S3 user guide, multipart upload limits."""


class CannotCreate(StorageUnavailable):
    """The storage does not support a write that fails if the key exists."""


class Client(Protocol):
    """One request per call, without retries; raises `Transient` for failures that may pass.

    Keys are complete, not relative to `prefix`.
    """

    @property
    def prefix(self) -> str:
        """The key of the root, without slashes around it; empty for a whole bucket."""

    def list_page(
        self, prefix: str, *, deep: bool, token: str | None
    ) -> tuple[list[FileInfo], str | None]:
        """Keys that start with `prefix`, and the token of the next page.

        Paths are complete keys. Unless `deep`, keys with a `/` after the prefix are grouped
        into one entry of kind `dir`, named up to that `/`.
        """

    def get(self, key: str, start: int, end: int) -> tuple[Data, str]:
        """Bytes `start` to `end` and the ETag of the object (empty if the storage has none).

        Returns fewer bytes if the object ends before `end`; raises `ShortRead` if it ends
        before `start`.
        """

    def put(self, key: str, data: bytes, *, create: bool) -> None:
        """Write the object; with `create`, raises `AlreadyExists` or `CannotCreate`."""

    def put_parts(self, key: str, parts: Iterator[bytes], *, retries: Retries, what: str) -> None:
        """Write the object from parts of at least 5 MiB, except for the last; whole or not at all.

        The one method that retries: a failed part is sent again by itself, within
        `retries`. `Transient` means that the whole object must be sent again.
        """

    def list_uploads(self, prefix: str, *, token: object) -> tuple[Sequence[Upload], object]:
        """A page of the multipart uploads of keys that start with `prefix`, and the next token.

        Paths are complete keys; the token is None for the first page and after the last.
        """

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Remove the parts of an upload; a missing upload is no error."""

    def delete(self, key: str) -> None:
        """Remove the object; a missing object is no error."""

    def exists(self, key: str) -> bool:
        """Whether the object exists."""

    def kept(self, key: str) -> Kept:
        """The checksums that the storage keeps of the object; no request if it keeps none."""

    def close(self) -> None:
        """Close connections."""


class ObjectStore(Closing):
    """A prefix of an object store, through a client.

    A prefix is no folder: one without keys lists as empty, and only a missing bucket raises
    `PathNotFound`. Keys with empty names between slashes are listed and read unchanged.
    """

    kind = StoreKind.OBJECT
    folders = None
    upload_checksum = "crc32"  # the checksum that botocore sends

    def __init__(self, client: Client, *, url: str, retries: Retries) -> None:
        self.url = url
        self._client = client
        self._retries = retries

    def list_dir(self, path: str = "") -> Sequence[FileInfo]:
        return self._listing(path, deep=False)

    def list_tree(self, path: str = "") -> Sequence[FileInfo]:
        return self._listing(path, deep=True)

    def read(self, path: str, *, limit: int) -> bytes:
        """See `Store.read`: one request, for one byte more than the limit."""
        key = self._key(path)
        try:
            data, _ = self._tried(path, partial(self._client.get, key, 0, limit + 1))
        except ShortRead:
            return b""  # a range of an empty object cannot be satisfied
        if len(data) > limit:
            raise TooLarge(f"{self._named(path)} is larger than {limit:,} bytes and was not read")
        return bytes(data)

    def read_spans(self, spans: Iterable[Span]) -> Iterator[tuple[Span, bytes]]:
        return ((span, bytes(data)) for span, data in self.view_spans(spans))

    def view_spans(self, spans: Iterable[Span]) -> Iterator[tuple[Span, Data]]:
        """See `Store.view_spans`: always in flight, one request a span."""
        return read_in_flight(partial(self._span, etags={}), spans)

    def open_file(self, path: str) -> OpenFile:
        """See `Store.open_file`: a request for each piece."""
        return _OpenObject(partial(self._span, etags={}), path)

    def kept(self, paths: Iterable[str]) -> Iterator[Kept]:
        for path, kept in in_flight(self._kept, paths):
            yield with_fields(kept, path=path)

    def put(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """See `Store.put`; an object store writes an object whole or not at all.

        Two concurrent writers of the same bytes both succeed, because an answer may be
        lost: a name that must be exclusive contains the name of its writer.
        """
        key = self._key(path)
        if replace:
            self._tried(path, partial(self._client.put, key, data, create=False))
            return
        # Some stores take a conditional write and ignore the condition.
        if self._tried(path, partial(self._client.exists, key)):
            raise AlreadyExists(f"{self._named(path)} already exists; it was not changed")
        self._tried(path, partial(self._create, key, data))

    def put_pieces(self, path: str, pieces: Callable[[], Iterator[memoryview]], size: int) -> None:
        """See `Store.put_pieces`: one request, or one for each part of the object."""
        key = self._key(path)
        n_part = max(PART_BYTES, -(-size // _MAX_PARTS))

        def once() -> None:
            if size <= n_part:
                self._client.put(key, b"".join(map(bytes, pieces())), create=False)
            else:
                self._client.put_parts(
                    key, _in_parts(pieces(), n_part), retries=self._retries, what=self._named(path)
                )

        self._tried(path, once)

    def remove(self, path: str) -> None:
        """See `Store.remove`; a bucket with versioning keeps the removed version."""
        key = self._key(path)
        self._tried(path, partial(self._client.delete, key))

    def list_uploads(self, path: str = "") -> Sequence[Upload]:
        uploads = self._pages(path, partial(self._client.list_uploads, self._prefix(path)))
        root = self._n_root
        return sorted(
            (with_fields(upload, path=upload.path[root:]) for upload in uploads),
            key=attrgetter("path", "id"),
        )

    def abort_upload(self, upload: Upload) -> None:
        key = self._key(upload.path)
        self._tried(upload.path, partial(self._client.abort_upload, key, upload.id))

    def retrying(self, retries: Retries) -> ObjectStore:
        return ObjectStore(self._client, url=self.url, retries=retries)

    def close(self) -> None:
        self._client.close()

    def _listing(self, path: str, *, deep: bool) -> list[FileInfo]:
        prefix = self._prefix(path)
        infos = self._pages(path, partial(self._client.list_page, prefix, deep=deep))
        # Web consoles create an empty object `step_5/` to display a folder.
        markers = (prefix, prefix[:-1])
        found = (
            info.at(info.path[self._n_root :])
            for info in infos
            if info.path not in markers and (info.size or not info.path.endswith("/"))
        )
        return sorted(found, key=attrgetter("path"))

    def _pages(self, path: str, ask: Callable[..., tuple[Iterable[T], object]]) -> Iterator[T]:
        """What all pages hold; `ask` returns a page, given its token, and the next token."""
        token: object = None
        while True:
            page, following = self._tried(path, partial(ask, token=token))
            yield from page
            if following is None:
                return
            if following == token:
                raise StorageUnavailable(
                    f"{self._named(path)}: the listing repeats a page and does not end"
                )
            token = following

    def _span(self, span: Span, etags: dict[str, str]) -> Data:
        """The bytes of a span; `etags` maps paths to the ETags of earlier reads."""
        if span.length == 0:
            return b""
        key, end = self._key(span.path), span.offset + span.length
        wanted = f"{self._named(span.path)}: bytes {span.offset:,} to {end:,} were requested"
        if span.offset < 0 or span.length < 0:
            raise ShortRead(f"{wanted}; the range is invalid")
        data, etag = self._tried(span.path, partial(self._client.get, key, span.offset, end))
        if etags.setdefault(span.path, etag) != etag:
            raise Replaced(f"{self._named(span.path)} was replaced while it was read")
        if len(data) < span.length:
            size = span.offset + len(data)
            raise ShortRead(f"{wanted}, it ends at {size:,}", size=size)
        if len(data) > span.length:
            raise StorageUnavailable(f"{wanted}, the storage sent {len(data):,} bytes instead")
        return data

    def _kept(self, path: str) -> Kept:
        key = self._key(path)
        return self._tried(path, partial(self._client.kept, key))

    def _create(self, key: str, data: bytes) -> None:
        try:
            self._client.put(key, data, create=True)
        except AlreadyExists:
            # An earlier request may have succeeded although its answer was lost; the
            # HTTP client also repeats a request when a connection was closed.
            if self._holds(key, data):
                return
            if not self._client.exists(key):
                raise Transient("the storage reports that it exists, but it does not") from None
            raise
        except CannotCreate:
            self._client.put(key, data, create=False)
            if not self._holds(key, data):
                raise AlreadyExists(
                    f"{self._client.prefix}: another process wrote {key} at the same time"
                ) from None

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            return bytes(self._client.get(key, 0, len(data) + 1)[0]) == data
        except ShortRead:
            return not data
        except PathNotFound:
            return False

    @property
    def _n_root(self) -> int:
        """The length of the root's part of a key, in characters."""
        return len(self._client.prefix) + 1 if self._client.prefix else 0

    def _prefix(self, path: str) -> str:
        key = self._client.prefix if not path else self._key(path)
        return f"{key}/" if key else ""

    def _key(self, path: str) -> str:
        if not path:
            raise PathNotFound(f"{self.url} is a prefix, not an object")
        prefix = self._client.prefix
        return f"{prefix}/{key_of(path)}" if prefix else key_of(path)

    def _tried(self, path: str, once: Callable[[], T]) -> T:
        return retried(once, what=self._named(path), retries=self._retries)

    def _named(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url


class _OpenObject(OpenFile):
    """An object that is read in pieces."""

    def __init__(self, get: Callable[[Span], Data], path: str) -> None:
        self._get = get
        self._path = path

    def read_into(self, offset: int, *buffers: memoryview) -> None:
        spread(self._get(Span(self._path, offset, sum(map(len, buffers)))), buffers)


def _in_parts(pieces: Iterator[memoryview], n_part: int) -> Iterator[bytes]:
    part = bytearray()
    for piece in pieces:
        left = piece
        while left:
            taken = left[: n_part - len(part)]
            part += taken
            left = left[len(taken) :]
            if len(part) == n_part:
                yield bytes(part)
                part.clear()
    if part:
        yield bytes(part)

"""A store that shows a step with metadata that is not written yet.

Object stores have no rename: the metadata completes a step and is written last. To inspect
the step before that, its store is shown with the metadata in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TypeVar

from ckptctl.model import FileInfo, Kept
from ckptctl.storage.contract import Data, OpenFile, Span, Store, StoreKind, Upload, spread
from ckptctl.storage.waiting import Retries

D = TypeVar("D", bytes, Data)
_Read = Callable[[Iterable[Span]], Iterator[tuple[Span, D]]]


class WithFiles:
    """A store with a few small files in memory that are not written yet; see `Store`."""

    def __init__(self, store: Store, files: Mapping[str, bytes]) -> None:
        self._store = store
        self._files = files

    @property
    def url(self) -> str:
        """See `Store.url`."""
        return self._store.url

    @property
    def kind(self) -> StoreKind:
        """See `Store.kind`."""
        return self._store.kind

    @property
    def folders(self) -> None:
        """See `Store.folders`: none, since the files in memory are in no folder."""
        return

    @property
    def upload_checksum(self) -> str | None:
        """See `Store.upload_checksum`."""
        return self._store.upload_checksum

    def list_dir(self, path: str = "") -> Sequence[FileInfo]:
        """See `Store.list_dir`."""
        return self._with(self._store.list_dir(path), f"{path}/" if path else "", deep=False)

    def list_tree(self, path: str = "") -> Sequence[FileInfo]:
        """See `Store.list_tree`."""
        return self._with(self._store.list_tree(path), f"{path}/" if path else "", deep=True)

    def read(self, path: str, *, limit: int) -> bytes:
        """See `Store.read`."""
        data = self._files.get(path)
        return self._store.read(path, limit=limit) if data is None else data

    def read_spans(self, spans: Iterable[Span]) -> Iterator[tuple[Span, bytes]]:
        """See `Store.read_spans`."""
        return self._with_own(self._store.read_spans, spans)

    def view_spans(self, spans: Iterable[Span]) -> Iterator[tuple[Span, Data]]:
        """See `Store.view_spans`."""
        return self._with_own(self._store.view_spans, spans)

    def _with_own(self, read: _Read[D], spans: Iterable[Span]) -> Iterator[tuple[Span, bytes | D]]:
        """Each span with its bytes: those of the store by `read`."""
        asked: deque[Span] = deque()

        def others() -> Iterator[Span]:
            for span in spans:
                asked.append(span)
                if span.path not in self._files:
                    yield span

        for _, data in read(others()):
            while asked[0].path in self._files:
                yield self._from_memory(asked.popleft())
            yield asked.popleft(), data
        while asked:
            yield self._from_memory(asked.popleft())

    def open_file(self, path: str) -> OpenFile:
        """See `Store.open_file`."""
        data = self._files.get(path)
        return self._store.open_file(path) if data is None else _InMemory(data)

    def kept(self, paths: Iterable[str]) -> Iterator[Kept]:
        """See `Store.kept`."""
        asked = [*paths]
        there = self._store.kept(path for path in asked if path not in self._files)
        known = {kept.path: kept for kept in there}
        for path in asked:
            yield known.get(path) or Kept(path, why_none="it is not written yet")

    def put(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """See `Store.put`."""
        self._store.put(path, data, replace=replace)

    def put_pieces(self, path: str, pieces: Callable[[], Iterator[memoryview]], size: int) -> None:
        """See `Store.put_pieces`."""
        self._store.put_pieces(path, pieces, size)

    def remove(self, path: str) -> None:
        """See `Store.remove`."""
        self._store.remove(path)

    def list_uploads(self, path: str = "") -> Sequence[Upload]:
        """See `Store.list_uploads`."""
        return self._store.list_uploads(path)

    def abort_upload(self, upload: Upload) -> None:
        """See `Store.abort_upload`."""
        self._store.abort_upload(upload)

    def retrying(self, retries: Retries) -> WithFiles:
        """See `Store.retrying`."""
        return WithFiles(self._store.retrying(retries), self._files)

    def close(self) -> None:
        """See `Store.close`."""
        self._store.close()

    def __enter__(self) -> WithFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _from_memory(self, span: Span) -> tuple[Span, bytes]:
        return span, self._files[span.path][span.offset : span.offset + span.length]

    def _with(self, found: Sequence[FileInfo], prefix: str, *, deep: bool) -> Sequence[FileInfo]:
        there = {info.path for info in found}
        more = [
            FileInfo(path, len(data))
            for path, data in self._files.items()
            if path.startswith(prefix) and path not in there
            if deep or "/" not in path[len(prefix) :]
        ]
        return sorted([*found, *more], key=attrgetter("path"))


class _InMemory:
    """See `OpenFile`."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read_into(self, offset: int, *buffers: memoryview) -> None:
        spread(self._data[offset : offset + sum(map(len, buffers))], buffers)

    def close(self) -> None:
        """Nothing to release."""

    def __enter__(self) -> _InMemory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

"""A store that shows a step with metadata that is not written yet.

Object stores have no rename: the metadata completes a step and is written last. To inspect
the step before that, its store is shown with the metadata in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TypeVar, cast

from ckptctl.model import FileInfo, Kept
from ckptctl.storage.contract import Closing, Data, OpenFile, Span, Store, Wrapped, spread
from ckptctl.storage.waiting import Retries

D = TypeVar("D", bytes, Data)
_Read = Callable[[Iterable[Span]], Iterator[tuple[Span, D]]]


def with_files(store: Store, files: Mapping[str, bytes]) -> Store:
    """The store with a few small files in memory, by path, that are not written yet."""
    return cast("Store", _WithFiles(store, files))


class _WithFiles(Wrapped):
    """See `Store`."""

    def __init__(self, store: Store, files: Mapping[str, bytes]) -> None:
        super().__init__(store)
        self._files = files

    @property
    def folders(self) -> None:
        """See `Store.folders`: none, since the files in memory are in no folder."""
        return

    def list_dir(self, path: str = "") -> Sequence[FileInfo]:
        return self._with(self._store.list_dir(path), f"{path}/" if path else "", deep=False)

    def list_tree(self, path: str = "") -> Sequence[FileInfo]:
        return self._with(self._store.list_tree(path), f"{path}/" if path else "", deep=True)

    def read(self, path: str, *, limit: int) -> bytes:
        data = self._files.get(path)
        return self._store.read(path, limit=limit) if data is None else data

    def read_spans(self, spans: Iterable[Span]) -> Iterator[tuple[Span, bytes]]:
        return self._with_own(self._store.read_spans, spans)

    def view_spans(self, spans: Iterable[Span]) -> Iterator[tuple[Span, Data]]:
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
        data = self._files.get(path)
        return self._store.open_file(path) if data is None else _InMemory(data)

    def kept(self, paths: Iterable[str]) -> Iterator[Kept]:
        asked = [*paths]
        there = self._store.kept(path for path in asked if path not in self._files)
        known = {kept.path: kept for kept in there}
        for path in asked:
            yield known.get(path) or Kept(path, why_none="it is not written yet")

    def retrying(self, retries: Retries) -> Store:
        return with_files(self._store.retrying(retries), self._files)

    def close(self) -> None:
        self._store.close()

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


class _InMemory(Closing):
    """See `OpenFile`."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read_into(self, offset: int, *buffers: memoryview) -> None:
        spread(self._data[offset : offset + sum(map(len, buffers))], buffers)

"""A store that fails on demand, and otherwise does what the store below it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptctl.model import FileInfo, Kept
from ckptctl.storage.contract import OpenFile, Span, Store, StoreKind, Upload, Wrapped
from ckptctl.storage.waiting import Retries

VERBS = (
    *("list_dir", "list_tree", "read", "read_spans", "open_file", "kept"),
    *("put", "remove", "list_uploads", "abort_upload"),
)


@dataclass(frozen=True)
class _Order:
    verb: str
    nth: int
    error: Exception
    lasts: bool
    path: str | None


class FaultyStore(Wrapped):
    """Wraps a store; `calls` counts its verbs, and spans as `span`.

    `kind` may be given, to have a folder be treated like a network's or an
    object store's.
    """

    def __init__(self, store: Store, *, kind: StoreKind | None = None) -> None:
        super().__init__(store)
        self._orders: list[_Order] = []
        self._listing: Callable[[Sequence[FileInfo]], Sequence[FileInfo]] | None = None
        self.kind = kind or store.kind
        self.calls: Counter[str] = Counter()

    @property
    def folders(self) -> None:
        """See `Store.folders`: none, so that everything goes through the verbs."""
        return

    def fail(
        self,
        verb: str,
        error: Exception,
        *,
        nth: int = 1,
        lasts: bool = False,
        path: str | None = None,
    ) -> None:
        """Raise `error` at the `nth` call of `verb` from now on, and later ones if it `lasts`.

        `verb` is one of `VERBS` or `span`, a single span of `read_spans`. With
        `path`, only calls for that path are broken, whatever their number.
        """
        self._orders.append(_Order(verb, self.calls[verb] + nth, error, lasts, path))

    def show(self, change: Callable[[Sequence[FileInfo]], Sequence[FileInfo]]) -> None:
        """Pass every listing from now on through `change`."""
        self._listing = change

    def list_dir(self, path: str = "") -> Sequence[FileInfo]:
        """See `Store.list_dir`."""
        self._count("list_dir", path)
        return self._shown(self._store.list_dir(path))

    def list_tree(self, path: str = "") -> Sequence[FileInfo]:
        """See `Store.list_tree`."""
        self._count("list_tree", path)
        return self._shown(self._store.list_tree(path))

    def read(self, path: str, *, limit: int) -> bytes:
        """See `Store.read`."""
        self._count("read", path)
        return self._store.read(path, limit=limit)

    def read_spans(self, spans: Iterable[Span]) -> Iterator[tuple[Span, bytes]]:
        """See `Store.read_spans`."""
        self._count("read_spans", None)
        for span, data in self._store.read_spans(spans):
            self._count("span", span.path)
            yield span, data

    view_spans = read_spans

    def open_file(self, path: str) -> OpenFile:
        """See `Store.open_file`."""
        self._count("open_file", path)
        return self._store.open_file(path)

    def kept(self, paths: Iterable[str]) -> Iterator[Kept]:
        """See `Store.kept`."""
        for kept in self._store.kept(paths):
            self._count("kept", kept.path)
            yield kept

    def put(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """See `Store.put`."""
        self._count("put", path)
        self._store.put(path, data, replace=replace)

    def put_pieces(self, path: str, pieces: Callable[[], Iterator[memoryview]], size: int) -> None:
        """See `Store.put_pieces`."""
        self._count("put", path)
        self._store.put_pieces(path, pieces, size)

    def remove(self, path: str) -> None:
        """See `Store.remove`."""
        self._count("remove", path)
        self._store.remove(path)

    def list_uploads(self, path: str = "") -> Sequence[Upload]:
        """See `Store.list_uploads`."""
        self._count("list_uploads", path)
        return self._store.list_uploads(path)

    def abort_upload(self, upload: Upload) -> None:
        """See `Store.abort_upload`."""
        self._count("abort_upload", upload.path)
        self._store.abort_upload(upload)

    def retrying(self, retries: Retries) -> FaultyStore:
        """See `Store.retrying`: itself, so that the orders and counts stay with it."""
        return self

    def close(self) -> None:
        """See `Store.close`."""
        self._store.close()

    def _count(self, verb: str, path: str | None) -> None:
        self.calls[verb] += 1
        n = self.calls[verb]
        for order in self._orders:
            if order.verb != verb or (order.path is not None and order.path != path):
                continue
            if order.path is not None or n == order.nth or (order.lasts and n > order.nth):
                raise order.error

    def _shown(self, listing: Sequence[FileInfo]) -> Sequence[FileInfo]:
        return self._listing(listing) if self._listing else listing

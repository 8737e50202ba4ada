"""Upload the files of a step to an object store.

As torch's writer writes files: this is what it takes for its file system. Every file is
put together in an unnamed file of this machine, so that memory does not grow with the
model and a try that failed can be repeated, and uploaded when it is whole: an object is
there whole or not at all. What is uploaded when is torch's and `saving`'s question.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from ckptctl.errors import StorageUnavailable
from ckptctl.storage.contract import Store

PIECE_BYTES = 1 << 20


class Uploads:
    """Files below a root in an object store; see torch's `FileSystemBase`.

    A file with a name for the time being (`.tmp`) is held until it is renamed: an object
    store has no rename. torch writes its metadata so, and a shard never.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: dict[str, bytes] = {}

    @contextmanager
    def create_stream(self, path: str, mode: str) -> Iterator[BinaryIO]:
        """A file to write, uploaded when the block ends without an error."""
        assert mode == "wb", mode  # noqa: S101 - it is made for writing alone
        try:
            with tempfile.TemporaryFile() as spool:
                # torch closes what it is given, and an unnamed file goes when it is closed.
                with os.fdopen(os.dup(spool.fileno()), "wb") as stream:
                    yield stream
                self._upload(path, spool)
        except OSError as error:
            raise StorageUnavailable(
                f"{path} could not be put together in {tempfile.gettempdir()} before its upload: "
                f"{error.strerror}; TMPDIR names another folder for that"
            ) from error

    def _upload(self, path: str, spool: BinaryIO) -> None:
        size = os.fstat(spool.fileno()).st_size
        if path.endswith(".tmp"):
            spool.seek(0)
            self._held[path] = spool.read()
            return

        def pieces() -> Iterator[memoryview]:
            spool.seek(0)
            while piece := spool.read(PIECE_BYTES):
                yield memoryview(piece)

        self._store.put_pieces(path, pieces, size)

    def rename(self, path: str, new_path: str) -> None:
        """Upload what was held; raises `AlreadyExists` where something has that name."""
        self._store.put(new_path, self._held.pop(path))

    def concat_path(self, path: str, suffix: str) -> str:
        """The path of a file in a folder."""
        return f"{path}/{suffix}"

    def mkdir(self, path: str) -> None:
        """Nothing: an object store has no folders."""

    def exists(self, path: str) -> bool:  # noqa: ARG002 - asked by torch, for all file systems
        """False, always: nothing is asked for and nothing replaced; `rename` finds out."""
        return False

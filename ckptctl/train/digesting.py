"""Compute the digests of files while they are written.

Digested as torch hands it over, so that the seal speaks of what the training held and
nothing has to be read back. A stream on which somebody goes back, or writes past it, is
not vouched for: its file is read back instead. What the storage made of the bytes is
the question of `saving` (sizes) and of a look at level `content`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckptctl.formats.digests import Algorithm, Checksumming, Digester, Digests, checksumming


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """Size in bytes and digests of a file; `beside` is its checksum of another kind, in hex."""

    size: int
    digests: Digests
    beside: str | None = None


class DigestedFiles:
    """A file system of torch's writer (see its `FileSystemBase`) whose new files are digested.

    `written` are those that were written from front to end, by name. `beside` names a
    checksum that is computed beside the digests.
    """

    def __init__(self, files: Any, algorithm: Algorithm, beside: str | None = None) -> None:
        self._files = files
        self._algorithm = algorithm
        self._beside = beside
        self.written: dict[str, WrittenFile] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.BufferedIOBase]:
        """A file to write, digested on the way."""
        with self._files.create_stream(path, mode) as file:
            beside = None if self._beside is None else checksumming(self._beside)
            stream = DigestingStream(file, self._algorithm, beside)
            yield stream
            stream.close()
        if stream.in_order:
            summed = None if beside is None else beside.hexdigest()
            self.written[os.path.basename(path)] = WrittenFile(
                stream.n_bytes, stream.digests(), summed
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


class DigestingStream(io.BufferedIOBase):
    """A file that is written in order. Closing it closes `file`; `beside` takes all bytes, too."""

    def __init__(self, file: Any, algorithm: Algorithm, beside: Checksumming | None = None) -> None:
        self._file = file
        self._beside = beside
        self._digester = Digester(algorithm)
        self._moved = False
        self.n_bytes = 0
        self.in_order = False

    def write(self, data: Any) -> int:
        """Write all of it, and digest it."""
        with memoryview(data).cast("B") as view:
            self._file.write(view)
            # Behind the write: what it brought into the processor's cache is there still.
            self._digester.update(view)
            if self._beside is not None:
                self._beside.update(view)
            self.n_bytes += len(view)
            return len(view)

    def tell(self) -> int:
        """Where the next byte goes."""
        return int(self._file.tell())

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go elsewhere, after which the digests say nothing."""
        before = self.tell()
        here = int(self._file.seek(offset, whence))
        self._moved |= here != before
        return here

    def truncate(self, size: int | None = None) -> int:
        """Cut the file off, after which the digests say nothing."""
        self._moved = True
        return int(self._file.truncate(size))

    def writable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """As the file is."""
        return bool(self._file.seekable())

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        """The descriptor, which torch flushes to the disk."""
        return int(self._file.fileno())

    def close(self) -> None:
        """Close the file; `in_order` says from then on whether the digests are those of it."""
        if not self._file.closed:
            self._file.flush()
            # Who wrote through the descriptor made the file longer than what came by here.
            size = os.fstat(self._file.fileno()).st_size
            self.in_order = not self._moved and size == self.n_bytes
            self._file.close()
        super().close()

    def digests(self) -> Digests:
        """What was written comes to."""
        return self._digester.digests()

"""Write a state with `dcp.save`, and compute the digests of its files on the way.

torch's `FileSystemWriter` takes a file system object (`FileSystemBase`). The classes here
implement it: `DigestedFiles` digests what torch writes, so that a seal covers what the
training held and nothing is read back; `Uploads` writes to an object store. `saving`
decides what is written when.
"""

from __future__ import annotations

import io
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.errors import StorageUnavailable
from ckptctl.formats.digests import Algorithm, Checksumming, Digester, Digests, checksumming
from ckptctl.storage.contract import Store

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """Size in bytes and digests of a file; `checksum` is of the store's kind, in hex."""

    size: int
    digests: Digests
    checksum: str | None = None


def write_state(
    state: dict[str, Any],
    store: Store,
    name: str,
    group: ProcessGroup,
    *,
    algorithm: Algorithm | None,
    before_metadata: Callable[[], None],
) -> Mapping[str, WrittenFile]:
    """Write shard files and metadata of a state into the folder `name`; every rank calls it.

    Rank 0 publishes the metadata when every rank has written and flushed its shards, after
    `before_metadata`. Returns the files that this rank wrote, by path; none without an
    `algorithm` to digest them with. Raises what `dcp.save` raises.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class Writer(FileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            """Runs on rank 0 only."""
            before_metadata()
            super().finish(metadata, results)

    if store.folders is not None:
        writer = Writer(store.folders.path_of(name))
    else:
        writer = Writer(name, sync_files=False)
        writer.fs, writer.path = cast("Any", Uploads(store)), cast("Any", name)
    files = DigestedFiles(writer.fs, algorithm, store.upload_checksum) if algorithm else None
    if files is not None:
        writer.fs = cast("Any", files)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about a save without a process group
        save(state, storage_writer=writer, **group.dcp_arguments(save))
    return files.written if files is not None else {}


def describe_failures(error: BaseException) -> str:
    """The failures in a `CheckpointException` with their ranks, in one line."""
    failures: Mapping[int, Any] = getattr(error, "failures", {})
    described = [
        f"rank {rank}: {type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"
        for rank, (cause, _) in sorted(failures.items())
    ]
    more = f" (and {len(described) - 2} more ranks)" if len(described) > 2 else ""
    return ("; ".join(described[:2]) + more)[:600] or type(error).__name__


class DigestedFiles:
    """A file system of torch's writer (see its `FileSystemBase`) that digests new files.

    `written` are those that were written sequentially, by name. `checksum` names a checksum
    that is computed in addition.
    """

    def __init__(self, files: Any, algorithm: Algorithm, checksum: str | None = None) -> None:
        self._files = files
        self._algorithm = algorithm
        self._checksum = checksum
        self.written: dict[str, WrittenFile] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.BufferedIOBase]:
        """A file to write, digested on the way."""
        with self._files.create_stream(path, mode) as file:
            checksum = None if self._checksum is None else checksumming(self._checksum)
            stream = DigestingStream(file, self._algorithm, checksum)
            yield stream
            stream.close()
        if stream.in_order:
            self.written[os.path.basename(path)] = WrittenFile(
                stream.n_bytes,
                stream.digests(),
                None if checksum is None else checksum.hexdigest(),
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


class DigestingStream(io.BufferedIOBase):
    """A file that is digested while it is written; closing it closes `file`.

    The digests are valid only for a file that was written sequentially, which `in_order`
    reports after closing. Any other file has to be read back. `checksum` also takes all
    bytes.
    """

    def __init__(
        self, file: Any, algorithm: Algorithm, checksum: Checksumming | None = None
    ) -> None:
        self._file = file
        self._checksum = checksum
        self._digester = Digester(algorithm)
        self._moved = False
        self.n_bytes = 0
        self.in_order = False

    def write(self, data: Any) -> int:
        """Write all of it, and digest it."""
        with memoryview(data).cast("B") as view:
            self._file.write(view)
            # After the write, which has just brought the bytes into the processor's cache.
            self._digester.update(view)
            if self._checksum is not None:
                self._checksum.update(view)
            self.n_bytes += len(view)
            return len(view)

    def tell(self) -> int:
        """The position of the next byte."""
        return int(self._file.tell())

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to another position, which invalidates the digests."""
        before = self.tell()
        here = int(self._file.seek(offset, whence))
        self._moved |= here != before
        return here

    def truncate(self, size: int | None = None) -> int:
        """Truncate the file, which invalidates the digests."""
        self._moved = True
        return int(self._file.truncate(size))

    def writable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """Whether the file is."""
        return bool(self._file.seekable())

    def flush(self) -> None:
        """Pass what is buffered to the operating system."""
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        """The descriptor, which torch flushes to the disk."""
        return int(self._file.fileno())

    def close(self) -> None:
        """Close the file, and determine whether it was written sequentially."""
        if not self._file.closed:
            self._file.flush()
            # A write through the descriptor makes the file longer than what passed here.
            size = os.fstat(self._file.fileno()).st_size
            self.in_order = not self._moved and size == self.n_bytes
            self._file.close()
        super().close()

    def digests(self) -> Digests:
        """The digests of what was written."""
        return self._digester.digests()


class Uploads:
    """Files below a root in an object store; see torch's `FileSystemBase`.

    Each file is first written to an unnamed local file: memory does not grow with the
    model, a failed upload can be repeated, and an object is published whole or not at all.
    A temporary name (`.tmp`) is held until it is renamed, because an object store has no
    rename. torch writes its metadata that way, but never shards.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: dict[str, bytes] = {}

    @contextmanager
    def create_stream(self, path: str, mode: str) -> Iterator[BinaryIO]:
        """A file to write, uploaded when the block ends without an error."""
        assert mode == "wb", mode  # noqa: S101 - torch's writer opens files for writing only
        try:
            with tempfile.TemporaryFile() as spool:
                # torch closes its stream, but an unnamed file disappears when closed.
                with os.fdopen(os.dup(spool.fileno()), "wb") as stream:
                    yield stream
                self._upload(path, spool)
        except OSError as error:
            raise StorageUnavailable(
                f"{path} could not be written to {tempfile.gettempdir()} before its upload: "
                f"{error.strerror}; set TMPDIR to another folder"
            ) from error

    def _upload(self, path: str, spool: BinaryIO) -> None:
        size = os.fstat(spool.fileno()).st_size
        if path.endswith(".tmp"):
            spool.seek(0)
            self._held[path] = spool.read()
            return

        def pieces() -> Iterator[memoryview]:
            spool.seek(0)
            while piece := spool.read(_PIECE_BYTES):
                yield memoryview(piece)

        self._store.put_pieces(path, pieces, size)

    def rename(self, path: str, new_path: str) -> None:
        """Upload what was held; raises `AlreadyExists` if the name exists."""
        self._store.put(new_path, self._held.pop(path))

    def concat_path(self, path: str, suffix: str) -> str:
        """The path of a file in a folder."""
        return f"{path}/{suffix}"

    def mkdir(self, path: str) -> None:
        """Do nothing: an object store has no folders."""

    def exists(self, path: str) -> bool:  # noqa: ARG002 - torch asks every file system
        """False, so that torch removes nothing; `rename` detects existing objects."""
        return False

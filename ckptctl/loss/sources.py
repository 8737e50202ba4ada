"""Open logs and yield their bytes.

A log is a path, `-` for standard input, the address of an object, or the metrics folder
of an MLflow run; compressed or not. Each file is read once, in order. A folder stands for
the files in it whose names are those of logs.
"""

from __future__ import annotations

import bz2
import heapq
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from ckptctl.errors import (
    AccessDenied,
    LogUnreadable,
    MissingExtra,
    PathNotFound,
    StorageUnavailable,
)
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import base_name, is_local, join_url, open_store, parent_url

STDIN = "-"
PIECE_BYTES = 1 << 20

_GZIP, _BZIP2, _XZ, _ZSTD = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"
_MAX_WINDOW = 128 << 20
# A block of zstd of 4 bytes can stand for 128 KiB: so much is fed at once.
_ZSTD_SLICE = 1 << 10

# Logs that are known by their names, in a folder of others; the kind that stands first
# is taken, for one run is often logged in several. The whole floats come first.
_PACKED = r"(?:\.\d+)?(?:\.(?:gz|bz2|xz|zst))?"
_LOG_NAMES = tuple(
    re.compile(name)
    for name in (
        r"events\.out\.tfevents\..*",
        r"metrics\.csv" + _PACKED,
        r"run-[^/]*\.wandb",
        r"trainer_state\.json",
        r"[^/]*\.jsonl" + _PACKED,
        r"[^/]*\.(?:log|out|txt)" + _PACKED,
    )
)
_TRAINER_STATE = "trainer_state.json"
_MAX_FOUND = 10_000


@dataclass(frozen=True, slots=True)
class Access:
    """How the storages are reached, where logs are not on this machine."""

    storage_options: Mapping[str, object] = field(default_factory=dict)
    endpoint_url: str | None = None
    timeout_s: float = 30.0
    retries: int = 4

    def store(self, url: str) -> Store:
        """The store of a folder."""
        return open_store(
            url,
            storage_options=self.storage_options,
            endpoint_url=self.endpoint_url,
            timeout_s=self.timeout_s,
            retries=self.retries,
        )


def read_pieces(path: str, access: Access) -> Iterator[bytes]:
    """The bytes of a log, unpacked where they are packed, in pieces of about 1 MiB.

    Raises `LogUnreadable` where compressed bytes are damaged; one that only ends too
    early, as a log that is still written does, gives what it holds.
    """
    if is_metric_store(path):
        with _told(path):
            yield from metric_store_pieces(_local(path))
    else:
        yield from _unpacked(path, _raw_pieces(path, access))


def expanded(paths: Sequence[str], access: Access) -> tuple[str, ...]:
    """The logs that the paths stand for: of a folder, those in it that are known by name."""
    found: list[str] = []
    for path in paths:
        is_one = is_local(path) and not os.path.isdir(_local(path))
        if path == STDIN or is_one or is_metric_store(path):
            found.append(path)
        elif is_local(path):
            found += _in_folder(path, access)
        else:
            with access.store(parent_url(path)) as store:
                names = {info.path for info in store.list_dir() if info.kind == "file"}
            found += [path] if base_name(path) in names else _in_folder(path, access)
    return tuple(found)


def _in_folder(path: str, access: Access) -> list[str]:
    with access.store(path) as store:
        names = sorted((info.path for info in store.list_tree()), key=natural)
    for kind in _LOG_NAMES:
        found = [name for name in names if kind.fullmatch(name.rpartition("/")[2])]
        if found and base_name(found[0]) == _TRAINER_STATE:
            # Each holds the history from the start: the newest has all of it.
            found = found[-1:]
        if found:
            return [join_url(path, name) for name in found[:_MAX_FOUND]]
    raise PathNotFound(
        f"{path} is a folder, and nothing in it is known as a log by its name; "
        "name the log files themselves"
    )


def is_metric_store(path: str) -> bool:
    """Whether it is the folder of an MLflow run, or the one of its metrics."""
    if path == STDIN or not is_local(path):
        return False
    return metrics_folder(_local(path)) is not None


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts `version_10` behind `version_2`."""
    return tuple(
        (1, int(part), "") if part.isdigit() else (0, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    )


def _raw_pieces(path: str, access: Access) -> Iterator[bytes]:
    if path == STDIN:
        # Without a buffer, what a pipe holds comes as soon as it is there.
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as file:
            while data := file.read(PIECE_BYTES):
                yield data
    elif is_local(path):
        yield from _local_pieces(path)
    else:
        yield from _remote_pieces(path, access)


def _local_pieces(path: str) -> Iterator[bytes]:
    with _told(path), open(_local(path), "rb", buffering=0) as file:
        while data := file.read(PIECE_BYTES):
            yield data


@contextmanager
def _told(path: str) -> Iterator[None]:
    """Say what the file system answers as the stores say it."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise PathNotFound(f"{path or repr(path)}: {error.strerror}") from error
    except IsADirectoryError as error:
        raise PathNotFound(f"{path} is a folder, not a log") from error
    except PermissionError as error:
        raise AccessDenied(f"{path}: {error.strerror} (as user {os.geteuid()})") from error
    except OSError as error:
        raise StorageUnavailable(f"{path}: {error.strerror or error}") from error


def _remote_pieces(path: str, access: Access) -> Iterator[bytes]:
    name = base_name(path)
    with access.store(parent_url(path)) as store:
        sizes = {info.path: info.size for info in store.list_dir() if info.kind == "file"}
        if name not in sizes:
            raise PathNotFound(f"{path}: there is no such object")
        size = sizes[name] or 0
        with store.open_file(name) as file:
            for at in range(0, size, PIECE_BYTES):
                piece = bytearray(min(PIECE_BYTES, size - at))
                file.read_into(at, memoryview(piece))
                yield bytes(piece)


def _local(path: str) -> str:
    return os.path.expanduser(path.removeprefix("file://"))


# Compression


class _Stream(Protocol):
    """One compressed stream; `eof` once it has ended."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def unpack(self, data: bytes) -> Iterator[bytes]: ...


class _Gzip:
    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def unpack(self, data: bytes) -> Iterator[bytes]:
        while out := self._stream.decompress(data, PIECE_BYTES):
            yield out
            data = self._stream.unconsumed_tail
            if self._stream.eof:
                return


class _Limited:
    """bz2 and xz: both keep what they have not unpacked yet."""

    def __init__(self, stream: bz2.BZ2Decompressor | lzma.LZMADecompressor) -> None:
        self._stream = stream

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def unpack(self, data: bytes) -> Iterator[bytes]:
        while out := self._stream.decompress(data, PIECE_BYTES):
            yield out
            data = b""
            if self._stream.eof or self._stream.needs_input:
                return


class _Zstd:
    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise MissingExtra(
                "zstandard is not installed, which reads logs packed with zstd",
                next_command="pip install 'ckptctl[zstd]'",
            ) from error
        self._error = zstandard.ZstdError
        self._stream = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()
        self.unused_data = b""

    @property
    def eof(self) -> bool:
        return bool(self._stream.eof)

    def unpack(self, data: bytes) -> Iterator[bytes]:
        for at in range(0, len(data), _ZSTD_SLICE):
            piece = data[at : at + _ZSTD_SLICE]
            try:
                out = self._stream.decompress(piece)
            except self._error as error:
                raise zlib.error(str(error)) from error
            if out:
                yield out
            if self._stream.eof:
                self.unused_data = self._stream.unused_data + data[at + len(piece) :]
                return


def _stream_for(head: bytes) -> _Stream | None:
    if head.startswith(_GZIP):
        return _Gzip()
    if head.startswith(_BZIP2):
        return _Limited(bz2.BZ2Decompressor())
    if head.startswith(_XZ):
        return _Limited(lzma.LZMADecompressor(memlimit=_MAX_WINDOW))
    if head.startswith(_ZSTD):
        return _Zstd()
    return None


def _unpacked(path: str, pieces: Iterator[bytes]) -> Iterator[bytes]:
    stream: _Stream | None = None
    head = b""
    for piece in pieces:
        head += piece
        if len(head) >= len(_XZ):
            break
    stream = _stream_for(head)
    if stream is None:
        if head:
            yield head
        yield from pieces
        return
    data = head
    try:
        while True:
            if stream is None:
                stream = _stream_for(data)
                if stream is None:
                    # Zeros behind the end are padding; anything else is no log.
                    if data.strip(b"\0"):
                        raise LogUnreadable(f"{path}: bytes follow the end of the compressed ones")
                    return
            yield from stream.unpack(data)
            data = b""
            if stream.eof:
                data, stream = stream.unused_data, None
            more = next(pieces, b"") if len(data) < len(_XZ) else b""
            if not more and not data:
                return
            data += more
    except (zlib.error, lzma.LZMAError, OSError) as error:
        raise LogUnreadable(
            f"{path}: its compressed bytes are damaged ({error}); what follows cannot be read"
        ) from error


_LINE = re.compile(r"(?P<at>\d{1,16}) (?P<value>\S+) (?P<step>-?\d+)\s*")
_MAX_METRICS = 500
_PIECE_LINES = 4_000


def metrics_folder(path: str) -> str | None:
    """The folder of metrics of the run at `path`, which may be that folder itself."""
    inside = os.path.join(path, "metrics")
    if os.path.isfile(os.path.join(path, "meta.yaml")) and os.path.isdir(inside):
        return inside
    above = os.path.join(os.path.dirname(os.path.abspath(path)), "meta.yaml")
    named = os.path.basename(os.path.abspath(path)) == "metrics"
    return path if named and os.path.isdir(path) and os.path.isfile(above) else None


def metric_store_pieces(path: str) -> Iterator[bytes]:
    """JSON lines of all metrics, oldest first, in pieces."""
    folder = metrics_folder(path) or path
    names = [
        os.path.relpath(os.path.join(at, name), folder)
        for at, _, files in os.walk(folder)
        for name in files
        # The machine's own figures are no rows of the training.
        if not os.path.relpath(at, folder).startswith("system")
    ]
    lines: list[bytes] = []
    merged = heapq.merge(*(_values(folder, name) for name in sorted(names)[:_MAX_METRICS]))
    for at, step, name, value in merged:
        record = {"timestamp": str(at), "step": str(step), name: value}
        lines.append(json.dumps(record).encode() + b"\n")
        if len(lines) >= _PIECE_LINES:
            yield b"".join(lines)
            lines = []
    yield b"".join(lines)


def _values(folder: str, name: str) -> Iterator[tuple[int, int, str, str]]:
    with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
        for line in file:
            match = _LINE.fullmatch(line)
            if match is not None:
                yield int(match["at"]), int(match["step"]), name, match["value"]

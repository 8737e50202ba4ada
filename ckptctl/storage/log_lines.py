"""Read the lines of a log from any storage, compressed or not.

Only one block of lines is held at a time: logs are larger than memory. A log may also come
from a pipe, which stores refuse: `-` is standard input, and `<(dmesg)` of a shell is a
path.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence

from ckptctl.errors import (
    AccessDenied,
    BinaryData,
    PathNotFound,
    StorageUnavailable,
    UsageError,
)
from ckptctl.options import StorageOptions
from ckptctl.storage.contract import Span
from ckptctl.storage.opening import base_name, is_local, join_url, open_store, parent_url
from ckptctl.storage.unpacking import unpacked
from ckptctl.storage.waiting import busy

_PIECE = 1 << 20
_REMOTE_PIECE = 8 << 20
MAX_LINE = 1 << 20
"""Bytes of a line that are kept; the rest of a longer one is skipped."""
MAX_MATCHED = 4000
"""Characters of a line that patterns are matched against; this bounds the time of the slowest
on a line is bounded by this."""
_MAX_FILES = 10_000
_HEAD = 1 << 16

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


Line = tuple[int, str]
"""The number of a line, counted from 1, and its text."""


def read_blocks(url: str, storage: StorageOptions = StorageOptions()) -> Iterator[Sequence[Line]]:
    r"""The lines of a log in order, some thousands at once, without line ends and colours.

    Texts that a progress bar overwrote (`\r`) share one line number. gzip, bzip2, xz and
    zstd are recognized by their first bytes, whatever the name. A truncated compressed log
    is read as far as it goes.

    Raises `UsageError` for binary data and for damaged compressed data, `PathNotFound`,
    `AccessDenied`, `StorageUnavailable`, and `MissingExtra` for zstd without its package.
    """
    yield from _blocks(_text_only(_gathered(unpacked(url, _pieces(url, storage), UsageError)), url))


def read_text(url: str, *, limit: int) -> str:
    """The content of a small local text file, line ends included; raises as `read_bytes` does."""
    return read_bytes(url, limit=limit).decode("utf-8", "backslashreplace")


def read_bytes(url: str, *, limit: int, storage: StorageOptions = StorageOptions()) -> bytes:
    """The content of a small file; raises as `read_blocks` does.

    Also raises `UsageError` if it is larger than `limit` bytes.
    """
    data = bytearray()
    for piece in _pieces(url, storage):
        data += piece
        if len(data) > limit:
            raise UsageError(f"{url} is larger than {limit:,} bytes")
    return bytes(data)


def read_head(path: str) -> bytes:
    """The first bytes of a local file; raises as `read_blocks` does."""
    return next(_from_path(path), b"")[:_HEAD]


def _pieces(url: str, storage: StorageOptions) -> Iterator[bytes]:
    if url == "-":
        return _from_descriptor(0, "standard input", watched=False)
    if is_local(url):
        return _from_path(url)
    return _from_store(url, storage)


def logs_below(url: str, storage: StorageOptions = StorageOptions()) -> tuple[str, ...]:
    """The log itself, or every file of a folder (torchrun's `--log-dir`), sorted by name.

    A folder on an object store is named with a trailing `/`.
    """
    if url == "-" or not (url.endswith("/") or (is_local(url) and os.path.isdir(_path(url)))):
        return (url,)
    with open_store(url, storage) as store:
        files = [info for info in store.list_tree() if info.kind == "file" and info.size]
    if not files:
        raise PathNotFound(f"{url}: this folder contains no log")
    if len(files) > _MAX_FILES:
        raise UsageError(f"{url} holds {len(files):,} files; the limit is {_MAX_FILES:,}")
    return tuple(join_url(url.rstrip("/"), info.path) for info in files)


def _path(url: str) -> str:
    return os.path.expanduser(re.sub(r"^[Ff][Ii][Ll][Ee]://", "", url))


def _from_path(url: str) -> Iterator[bytes]:
    path = _path(url)
    try:
        with busy(url):
            regular = stat.S_ISREG(os.stat(path).st_mode)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _in_words(url, error) from error
    try:
        # The writer of a pipe may pause for any time; only files are watched.
        yield from _from_descriptor(fd, url, watched=regular)
    finally:
        os.close(fd)


def _from_descriptor(fd: int, name: str, *, watched: bool) -> Iterator[bytes]:
    while True:
        try:
            if watched:
                with busy(name):
                    piece = os.read(fd, _PIECE)
            else:
                piece = os.read(fd, _PIECE)
        except OSError as error:
            raise _in_words(name, error) from error
        if not piece:
            return
        yield piece


def _in_words(name: str, error: OSError) -> Exception:
    what = f"{name or repr(name)}: {error.strerror or type(error).__name__}"
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return PathNotFound(what)
    if isinstance(error, PermissionError):
        return AccessDenied(what)
    if isinstance(error, IsADirectoryError):
        return UsageError(f"{name} is a folder, not a log")
    return StorageUnavailable(what)


def _from_store(url: str, storage: StorageOptions) -> Iterator[bytes]:
    name = base_name(url)
    with open_store(parent_url(url), storage) as store:
        size = next((i.size for i in store.list_dir() if i.path == name and i.kind == "file"), None)
        if size is None:
            raise PathNotFound(f"{url}: the object does not exist")
        spans = (
            Span(name, start, min(_REMOTE_PIECE, size - start))
            for start in range(0, size, _REMOTE_PIECE)
        )
        for _, data in store.read_spans(spans):
            yield data


def _gathered(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The pieces joined to larger ones: pipes and decompressors yield few bytes at a time."""
    held: list[bytes] = []
    n_bytes = 0
    for piece in pieces:
        held.append(piece)
        n_bytes += len(piece)
        if n_bytes >= _PIECE:
            yield b"".join(held)
            held, n_bytes = [], 0
    if held:
        yield b"".join(held)


def _text_only(pieces: Iterator[bytes], name: str) -> Iterator[bytes]:
    for n, piece in enumerate(pieces):
        if n == 0 and is_binary(piece):
            raise BinaryData(f"{name} is binary data, not a log")
        yield piece


# Zero bytes alone prove nothing: a log that was rotated while written begins with them.
_CONTROL = bytes(code for code in range(32) if code not in b"\0\a\b\t\n\v\f\r\x1b")
_SAFETENSORS = re.compile(rb"[^\0]{1,5}\0{3,7}\{")


def is_binary(head: bytes) -> bool:
    """Whether the first bytes of a file are binary: more than 1 % are control codes."""
    head = head[:_HEAD]
    n_control = len(head) - len(head.translate(None, _CONTROL))
    return n_control * 100 > len(head) or _SAFETENSORS.match(head) is not None


def _blocks(pieces: Iterator[bytes]) -> Iterator[Sequence[Line]]:
    number, rest = 1, b""
    for piece in pieces:
        whole, end, begun = piece.rpartition(b"\n")
        if not end:
            # Nothing is kept beyond the limit: a file without line ends must not fill memory.
            rest = (rest + piece[:MAX_LINE])[:MAX_LINE]
            continue
        first, end, more = whole.partition(b"\n")
        raw = ((rest + first)[:MAX_LINE] + end + more).split(b"\n")
        rest = begun
        yield [line for at, each in enumerate(raw, number) for line in _texts(at, each)]
        number += len(raw)
    if rest:
        yield [*_texts(number, rest)]


def _texts(number: int, raw: bytes) -> Iterator[tuple[int, str]]:
    text = raw[:MAX_LINE].decode("utf-8", "backslashreplace")
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    if "\r" not in text:
        yield number, text
        return
    for written_over in text.split("\r"):
        if written_over:
            yield number, written_over

"""Open logs and yield their bytes.

A log is a path, `-` for standard input, the address of an object, or the metrics folder
of an MLflow run; compressed or not. Each file is read once, in order. A folder stands for
the files in it whose names are those of logs.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ckptctl.errors import (
    AccessDenied,
    LogUnreadable,
    PathNotFound,
    StorageUnavailable,
)
from ckptctl.options import StorageOptions
from ckptctl.storage.opening import base_name, is_local, join_url, open_store, parent_url
from ckptctl.storage.unpacking import PIECE_BYTES, unpacked

STDIN = "-"
_REMOTE_PIECE_BYTES = 1 << 20

# The names of logs in a folder. The first kind that occurs is read, since one run is often
# logged in several formats; formats that keep whole floats come first.
_SUFFIXES = r"(?:\.\d+)?(?:\.(?:gz|bz2|xz|zst))?"
_LOG_NAMES = tuple(
    re.compile(name)
    for name in (
        r"events\.out\.tfevents\..*",
        r"metrics\.csv" + _SUFFIXES,
        r"run-[^/]*\.wandb",
        r"trainer_state\.json",
        r"[^/]*\.jsonl" + _SUFFIXES,
        r"[^/]*\.(?:log|out|txt)" + _SUFFIXES,
    )
)
_TRAINER_STATE = "trainer_state.json"
_MAX_FOUND = 10_000

# The files of an MLflow run.
_METRIC_LINE = re.compile(r"(?P<at>\d{1,16}) (?P<value>\S+) (?P<step>-?\d+)\s*")
_MAX_METRICS = 500
_LINES_PER_PIECE = 4_000


def read_pieces(path: str, storage: StorageOptions) -> Iterator[bytes]:
    """Yield the bytes of a log, decompressed, in pieces of at most 1 MiB.

    Raises `LogUnreadable` where compressed data is damaged. Compressed data that only ends
    too early, as in a log that is still written, is yielded as far as it goes.
    """
    if is_metric_store(path):
        with _storage_errors(path):
            yield from metric_store_pieces(_local(path))
    else:
        yield from unpacked(path, _raw_pieces(path, storage), LogUnreadable)


def expanded(paths: Sequence[str], storage: StorageOptions) -> tuple[str, ...]:
    """The logs that the paths stand for; a folder stands for its files with the name of a log."""
    found: list[str] = []
    for path in paths:
        is_one = is_local(path) and not os.path.isdir(_local(path))
        if path == STDIN or is_one or is_metric_store(path):
            found.append(path)
        elif is_local(path):
            found += _in_folder(path, storage)
        else:
            with open_store(parent_url(path), storage) as store:
                names = {info.path for info in store.list_dir() if info.kind == "file"}
            found += [path] if base_name(path) in names else _in_folder(path, storage)
    return tuple(found)


def _in_folder(path: str, storage: StorageOptions) -> list[str]:
    with open_store(path, storage) as store:
        names = sorted((info.path for info in store.list_tree()), key=natural)
    for kind in _LOG_NAMES:
        found = [name for name in names if kind.fullmatch(name.rpartition("/")[2])]
        if found and base_name(found[0]) == _TRAINER_STATE:
            # Each holds the history from the start, so the newest one has all of it.
            found = found[-1:]
        if found:
            return [join_url(path, name) for name in found[:_MAX_FOUND]]
    raise PathNotFound(f"{path}: no file in this folder has the name of a log; name the log files")


def is_metric_store(path: str) -> bool:
    """Whether `path` is the folder of an MLflow run, or its metrics folder."""
    if path == STDIN or not is_local(path):
        return False
    return metrics_folder(_local(path)) is not None


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that puts `version_2` before `version_10`."""
    return tuple(
        (1, int(part), "") if part.isdigit() else (0, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    )


def _raw_pieces(path: str, storage: StorageOptions) -> Iterator[bytes]:
    if path == STDIN:
        # Unbuffered, so that the bytes of a pipe are read as soon as they arrive.
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as file:
            while data := file.read(PIECE_BYTES):
                yield data
    elif is_local(path):
        yield from _local_pieces(path)
    else:
        yield from _remote_pieces(path, storage)


def _local_pieces(path: str) -> Iterator[bytes]:
    with _storage_errors(path), open(_local(path), "rb", buffering=0) as file:
        while data := file.read(PIECE_BYTES):
            yield data


@contextmanager
def _storage_errors(path: str) -> Iterator[None]:
    """Raise the errors of the file system as the stores raise theirs."""
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


def _remote_pieces(path: str, storage: StorageOptions) -> Iterator[bytes]:
    name = base_name(path)
    with open_store(parent_url(path), storage) as store:
        sizes = {info.path: info.size for info in store.list_dir() if info.kind == "file"}
        if name not in sizes:
            raise PathNotFound(f"{path}: the object does not exist")
        size = sizes[name] or 0
        with store.open_file(name) as file:
            for at in range(0, size, _REMOTE_PIECE_BYTES):
                piece = bytearray(min(_REMOTE_PIECE_BYTES, size - at))
                file.read_into(at, memoryview(piece))
                yield bytes(piece)


def _local(path: str) -> str:
    return os.path.expanduser(path.removeprefix("file://"))


def metrics_folder(path: str) -> str | None:
    """The metrics folder of the MLflow run at `path`, which may be that folder itself."""
    inside = os.path.join(path, "metrics")
    if os.path.isfile(os.path.join(path, "meta.yaml")) and os.path.isdir(inside):
        return inside
    above = os.path.join(os.path.dirname(os.path.abspath(path)), "meta.yaml")
    named = os.path.basename(os.path.abspath(path)) == "metrics"
    return path if named and os.path.isdir(path) and os.path.isfile(above) else None


def metric_store_pieces(path: str) -> Iterator[bytes]:
    """Yield the metrics of an MLflow run as JSON lines, oldest first, in pieces.

    MLflow keeps one file for each metric, `metrics/NAME`, with a line for each value: time
    in milliseconds, value, step. They are merged by time. A resumed run appends, so a step
    that was logged twice is there twice.

    Source: MLflow 2 `store/tracking/file_store.py`.
    """
    folder = metrics_folder(path) or path
    names = [
        os.path.relpath(os.path.join(at, name), folder)
        for at, _, files in os.walk(folder)
        for name in files
        # System metrics of the machine are not rows of the training.
        if not os.path.relpath(at, folder).startswith("system")
    ]
    lines: list[bytes] = []
    merged = heapq.merge(*(_values(folder, name) for name in sorted(names)[:_MAX_METRICS]))
    for at, step, name, value in merged:
        record = {"timestamp": str(at), "step": str(step), name: value}
        lines.append(json.dumps(record).encode() + b"\n")
        if len(lines) >= _LINES_PER_PIECE:
            yield b"".join(lines)
            lines = []
    yield b"".join(lines)


def _values(folder: str, name: str) -> Iterator[tuple[int, int, str, str]]:
    with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
        for line in file:
            match = _METRIC_LINE.fullmatch(line)
            if match is not None:
                yield int(match["at"]), int(match["step"]), name, match["value"]

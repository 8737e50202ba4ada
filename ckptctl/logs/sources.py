"""Find the logs that a path stands for, and yield their bytes.

A log is a path, `-` for standard input, or the address of an object; compressed or not. Each
file is read once, in order. A folder stands for the files in it whose names are those of logs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ckptctl.errors import BinaryData, PathNotFound
from ckptctl.logs.collectors import unwrapped
from ckptctl.logs.log_lines import Line, LineSplitter
from ckptctl.options import StorageOptions
from ckptctl.outside_numbers import whole
from ckptctl.storage.logs import errors_of_storage, files_below, found_below, is_binary, read_pieces
from ckptctl.storage.opening import base_name, join_url, local_path
from ckptctl.storage.shared_places import FoundIn, open_found

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

_BLOCK = 1 << 20


def log_blocks(
    file: str, storage: StorageOptions = StorageOptions(), found: FoundIn | None = None
) -> Iterator[Sequence[Line]]:
    """The lines of the program in a log, some thousands at once.

    Raises `BinaryData` where the log is not text, and as `read_pieces`.
    """
    splitter = LineSplitter()
    pieces = _gathered(unwrapped(read_pieces(file, storage, found=found)))
    for n, piece in enumerate(pieces):
        if n == 0 and is_binary(piece):
            raise BinaryData(f"{file} is binary data, not a log")
        if lines := splitter.lines(splitter.take(piece)):
            yield lines
    if lines := splitter.lines(splitter.end()):
        yield lines


def _gathered(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The pieces joined to larger ones: pipes and decompressors yield few bytes at a time."""
    held: list[bytes] = []
    for piece in pieces:
        held.append(piece)
        if sum(map(len, held)) >= _BLOCK:
            yield b"".join(held)
            held.clear()
    if held:
        yield b"".join(held)


def expanded(paths: Sequence[str], storage: StorageOptions) -> tuple[str, ...]:
    """The logs that the paths stand for; a folder stands for its files with the name of a log.

    Raises `PathUntrusted` for the file of another user in a folder that everybody can write.
    """
    found: list[str] = []
    for path in paths:
        files = files_below(path, storage)
        if files is None:
            found.append(path)
        else:
            # Files of ckptctl itself, such as the record of a resume, are no logs.
            names = [
                info.path
                for info in files
                if info.kind == "file" and ".ckptctl" not in info.path.split("/")[:-1]
            ]
            names.sort(key=natural)
            logs = _logs_among(path, names)
            _check_found(path, logs)
            found += logs
    return tuple(found)


def _check_found(folder: str, logs: Sequence[str]) -> None:
    """Raise `PathUntrusted` where a log in a folder may be that of another user."""
    found = found_below(folder)
    for log in logs if found is not None else ():
        path = local_path(log)
        if path is not None and found is not None:
            with errors_of_storage(log):
                os.close(open_found(path, found))


def _logs_among(path: str, names: Sequence[str]) -> list[str]:
    for kind in _LOG_NAMES:
        found = [name for name in names if kind.fullmatch(name.rpartition("/")[2])]
        if found and base_name(found[0]) == _TRAINER_STATE:
            # Each holds the history from the start, so the newest one has all of it.
            found = found[-1:]
        if found:
            return [join_url(path, name) for name in found[:_MAX_FOUND]]
    raise PathNotFound(f"{path}: no file in this folder has the name of a log; name the log files")


_ROTATED = re.compile(r"(?:\.\d{1,8}|-\d{6,8})?(?:\.(?:gz|bz2|xz|zst))?$")


def rotated_base(name: str) -> str:
    """The name of a log before it was rotated: `train.log.1`, `train.log-20260102.gz`."""
    return _ROTATED.sub("", name)


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that puts `version_2` before `version_10`."""
    return tuple(
        (0, 0, part) if (number := whole(part)) is None else (1, number, "")
        for part in re.split(r"(\d+)", name)
        if part
    )


def changed_s(path: str) -> float | None:
    """When a local file was changed last, in seconds since 1970; None for anything else."""
    file = local_path(path)
    if file is not None:
        with suppress(OSError):
            return os.path.getmtime(file)
    return None

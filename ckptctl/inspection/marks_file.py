"""Read and write a file of marks, for steps that cannot be written to.

One mark a line, of any step of any root; new ones are only ever added at the end.
"""

from __future__ import annotations

import os
import shlex
import stat
from dataclasses import dataclass
from functools import lru_cache

from ckptctl.errors import OwnFileUnreadable, UsageError
from ckptctl.formats.own.marks import MAX_MARK_BYTES, Mark, mark_bytes, parse_mark
from ckptctl.storage.files import append_line
from ckptctl.storage.opening import absolute_url

MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class MarksInFile:
    """The marks of a file."""

    path: str
    marks: tuple[Mark, ...] = ()

    def on_step(self, url: str, number: int | None, metadata: str | None) -> tuple[Mark, ...]:
        """The marks on a step, of whichever save: by its metadata, or by where it lies.

        A root may have been moved or mounted elsewhere; metadata is the same there.
        """
        lies_at = absolute_url(url)
        return tuple(
            mark
            for mark in self.marks
            if mark.url == lies_at or (metadata is not None and mark.speaks_of(number, metadata))
        )


def read_marks_file(path: str) -> MarksInFile:
    """All marks in a file; none where there is no file yet.

    Raises `UsageError` where the file, or a line of it, cannot be read: that line may be a
    rejection of any step, and a rejection must not be passed over.

    Cost: one read of the file; it is parsed only where it has changed since the last call.
    """
    return _parsed(path, _content(path))


@lru_cache(maxsize=1)
def _parsed(path: str, content: bytes) -> MarksInFile:
    marks = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            if len(line) > MAX_MARK_BYTES:
                raise OwnFileUnreadable(f"it is {len(line):,} bytes long")
            marks.append(parse_mark(line))
        except OwnFileUnreadable as error:
            raise UsageError(
                f"the file of marks {path} cannot be read: line {number} is not a mark: "
                f"{error.message}. It may reject any step, so nothing is decided without it: "
                "correct the line, or delete it and reject the step again",
                next_command=f"sed -n {number}p {shlex.quote(path)}",
            ) from error
    return MarksInFile(path, tuple(marks))


def check_marks_file(path: str | None) -> None:
    """Raise as `read_marks_file` does, before anything else is asked of a storage."""
    if path is not None:
        read_marks_file(path)


def _content(path: str) -> bytes:
    try:
        # Without O_NONBLOCK, opening a pipe waits for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise _unreadable(path, error.strerror or type(error).__name__) from error
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_FILE_BYTES:
        os.close(fd)
        what = f"it is {about.st_size:,} bytes, more than {MAX_FILE_BYTES:,}"
        raise _unreadable(path, what if stat.S_ISREG(about.st_mode) else "it is not a regular file")
    with os.fdopen(fd, "rb") as file:
        return file.read()


def _unreadable(path: str, why: str) -> UsageError:
    return UsageError(f"the file of marks {path} cannot be read: {why}")


def add_mark(path: str, mark: Mark) -> None:
    """Add one mark to a file, durably; raises `StorageError` where that cannot be."""
    append_line(path, mark_bytes(mark))

"""Watch the calls of this process that change files below a folder, and what is not flushed.

Based on Python's audit events, and on wrappers of the few calls of `os` that have none. A
write is made in two halves, so that a stop between them can be observed. What torch writes
into an open file is not observed; the opening and the flush of it are.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_EVENTS = {
    "os.rename": (0, 2, 1, 3),
    "os.link": (0, 2, 1, 3),
    "os.mkdir": (0, 2),
    "os.remove": (0, 1),
    "os.rmdir": (0, 1),
}
"""Where an event bears its path and the folder that it is relative to, and so for a target."""


@dataclass(frozen=True)
class Call:
    """A call that is about to be made; `target` is where a rename or a link leads."""

    name: str
    path: str
    target: str = ""


def watch(folder: Path, before: Callable[[Call], None]) -> None:
    """Have `before` called before each call that changes files below; to the end of the process."""
    lock = threading.RLock()
    top = os.path.realpath(folder)

    def seen(call: Call) -> None:
        if call.path == top or call.path.startswith(f"{top}/"):
            with lock:
                before(call)

    def hook(event: str, args: tuple) -> None:
        if event == "open" and isinstance(args[0], str) and args[1] and set(args[1]) & set("wax+"):
            seen(Call("open", os.path.realpath(args[0])))
        elif event in _EVENTS:
            paths = [_path(args[at], args[at_fd]) for at, at_fd in _pairs(_EVENTS[event])]
            seen(Call(event[3:], *paths))

    _wrap(seen)
    sys.addaudithook(hook)


def _pairs(places: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(places[::2], places[1::2], strict=True))


def _path(name: object, within: int) -> str:
    text = os.fsdecode(name)
    if within is None or within < 0 or text.startswith("/"):
        folder, _, last = text.rpartition("/")
        return f"{os.path.realpath(folder or '.')}/{last}"
    return f"{_of(within)}/{text}"


def _of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def _wrap(seen: Callable[[Call], None]) -> None:
    """Report the calls of `os` for which there is no event, or an incomplete one."""
    real_open, real_write, real_fsync = os.open, os.write, os.fsync

    def opened(path, flags, mode=0o777, *, dir_fd=None):
        if flags & _CHANGES:
            seen(Call("open", _path(path, -1 if dir_fd is None else dir_fd)))
        return real_open(path, flags, mode, dir_fd=dir_fd)

    def written(fd, data):
        n_written = 0
        for half in (data[: len(data) // 2], data[len(data) // 2 :]):
            seen(Call("write", _of(fd)))
            n_written += real_write(fd, half)
        return n_written

    def flushed(fd):
        seen(Call("fsync", _of(fd if isinstance(fd, int) else fd.fileno())))
        return real_fsync(fd)

    os.open, os.write, os.fsync = opened, written, flushed


def stop_before(number: int) -> Callable[[Call], None]:
    """Stop this process, with all its threads, before its call of that number, from 1 on."""
    n_seen = 0

    def before(call: Call) -> None:
        nonlocal n_seen
        n_seen += 1
        if n_seen == number:
            os.kill(os.getpid(), signal.SIGSTOP)

    return before


class Unflushed:
    """What a power cut might take, by what POSIX promises: names and bytes without an fsync.

    Stricter than any one file system, whose journal flushes more than it was asked for.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.too_early: list[str] = []
        self._names: dict[str, str] = {}
        self._bytes: set[str] = set()

    def __call__(self, call: Call) -> None:
        self.calls.append(call)
        getattr(self, f"_{call.name}")(call.path, call.target)

    def left(self) -> list[str]:
        """What is not flushed now."""
        names = [f"{why}: {path}" for path, why in self._names.items()]
        return sorted([*names, *(f"bytes written: {path}" for path in self._bytes)])

    def _open(self, path: str, _: str) -> None:
        if not os.path.lexists(path):
            self._names[path] = "name made"
            self._bytes.add(path)

    def _write(self, path: str, _: str) -> None:
        self._bytes.add(path)

    def _fsync(self, path: str, _: str) -> None:
        self._bytes.discard(path)
        for name in [name for name in self._names if os.path.dirname(name) == path]:
            del self._names[name]

    def _mkdir(self, path: str, _: str) -> None:
        if not os.path.lexists(path):
            self._names[path] = "folder made"

    def _rename(self, path: str, target: str) -> None:
        self._link(path, target)
        for name in [name for name in self._names if name.startswith(f"{path}/")]:
            self._names[target + name[len(path) :]] = self._names.pop(name)
        if self._names.pop(path, None) is None:
            self._names[path] = "name left"

    def _link(self, path: str, target: str) -> None:
        for early in sorted({*self._bytes, *self._names}):
            if early == path and early not in self._bytes:
                continue  # a name may well be new: it is the bytes and names below that count
            if early == path or early.startswith(f"{path}/"):
                self.too_early.append(f"{early} was not flushed when it became {target}")
        self._names[target] = "name made"

    def _remove(self, path: str, _: str) -> None:
        self._bytes.discard(path)
        if self._names.pop(path, None) is None:
            self._names[path] = "name removed"

    def _rmdir(self, path: str, _: str) -> None:
        # What was removed in it went with it.
        for name in [name for name in self._names if name.startswith(f"{path}/")]:
            del self._names[name]
        self._remove(path, _)

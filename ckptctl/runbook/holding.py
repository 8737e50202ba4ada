"""Tell two people who work on the same run of each other.

Whoever works on a run keeps a small file beside its events up to date. It names the
person to talk to. That nothing is done twice is ensured by the numbers of the events
(`record`), also where this file is wrong or missing.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone

from ckptctl.errors import CkptctlError, PathNotFound, StorageError
from ckptctl.formats.bounded_json import read_json
from ckptctl.formats.own.files import time_now
from ckptctl.runbook.record import Record
from ckptctl.selection.marking import user_name

BEAT_S = 10.0
SILENT_S = 60.0
"""After so long without a beat the other one is gone; clocks may differ by some of it."""

_MAX_BYTES = 4096


class RunHeld(CkptctlError):
    """Another person is at the run."""

    exit_code = 26
    code = "runbook.held"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who works on a run: `at` is the last sign of life; `gone` says that they left."""

    by: str
    host: str
    pid: int
    at: str
    gone: bool = False

    @property
    def is_here(self) -> bool:
        """Whether there is reason to believe that they are still at it."""
        if self.gone:
            return False
        if self.host == socket.gethostname() and not _is_alive(self.pid):
            return False
        # A time far in the future is no sign of life either.
        return abs(_age_s(self.at)) < SILENT_S


def myself(*, gone: bool = False) -> Holder:
    """Who this process is, and who runs it."""
    return Holder(user_name(), socket.gethostname(), os.getpid(), time_now(), gone)


@contextmanager
def held(record: Record, *, take_over: bool) -> Iterator[None]:
    """Be known as the one who works on a run; raises `RunHeld` where somebody else is."""
    other = holder_of(record)
    if other is not None and other.is_here and not take_over:
        raise RunHeld(
            f"{other.by} on {other.host} (process {other.pid}) is at the run {record.name} of "
            f"this runbook, last seen {other.at}; talk to them, or add --take-over"
        )
    _put(record, myself())
    over = threading.Event()
    beating = threading.Thread(target=_beat, args=(record, over), daemon=True)
    beating.start()
    try:
        yield
    finally:
        over.set()
        beating.join(timeout=1.0)
        with suppress(StorageError):
            _put(record, myself(gone=True))


def holder_of(record: Record) -> Holder | None:
    """Who was last seen at a run; None where nobody was, or it cannot be told."""
    try:
        document = read_json(record.store, _path(record), max_bytes=_MAX_BYTES)
        found = Holder(**document)  # type: ignore[arg-type]
        is_valid = (
            isinstance(found.by, str)
            and isinstance(found.host, str)
            and type(found.pid) is int
            and 0 < found.pid < 1 << 31
            and isinstance(found.gone, bool)
            and math.isfinite(_age_s(found.at))
        )
    except (PathNotFound, ValueError, TypeError, AttributeError):
        return None
    return found if is_valid else None


def _age_s(at: str) -> float:
    """Seconds since a time; raises `ValueError` for what is no time in UTC."""
    then = datetime.strptime(at, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    return (datetime.now(timezone.utc) - then).total_seconds()


def _beat(record: Record, over: threading.Event) -> None:
    while not over.wait(BEAT_S):
        # The next event says so where the storage is gone.
        with suppress(StorageError):
            _put(record, myself())


def _put(record: Record, holder: Holder) -> None:
    record.store.put(_path(record), json.dumps(asdict(holder)).encode(), replace=True)


def _path(record: Record) -> str:
    return f"{record.folder}/holder.json"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

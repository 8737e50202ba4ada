"""Detect that two people work on the same run.

Whoever works on a run keeps a small file beside its events up to date, which names the
person to contact. The event numbers (`record`), not this file, prevent anything from being
done twice.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime, timezone

from ckptctl.data_classes import dataclass
from ckptctl.errors import CkptctlError, PathNotFound, StorageError
from ckptctl.formats.bounded_json import read_json
from ckptctl.formats.own.files import time_now
from ckptctl.runbook.record import Record
from ckptctl.selection.marking import user_name

BEAT_S = 10.0
SILENT_S = 60.0
"""Without a heartbeat for this long, the other process is gone; includes clock differences."""

_MAX_BYTES = 4096


class RunHeld(CkptctlError):
    """Another person is working on the run."""

    exit_code = 26
    code = "runbook.held"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who works on a run: `at` is the last heartbeat; `gone` means that they left."""

    by: str
    host: str
    pid: int
    at: str
    gone: bool = False

    @property
    def is_here(self) -> bool:
        """Whether they are probably still working on it."""
        if self.gone:
            return False
        if self.host == socket.gethostname() and not _is_alive(self.pid):
            return False
        # A time far in the future is no heartbeat either.
        return abs(_age_s(self.at)) < SILENT_S


def myself(*, gone: bool = False) -> Holder:
    """The user and process that run this."""
    return Holder(user_name(), socket.gethostname(), os.getpid(), time_now(), gone)


@contextmanager
def held(record: Record, *, take_over: bool) -> Iterator[None]:
    """Hold a run while working on it; raises `RunHeld` if somebody else does."""
    other = holder_of(record)
    if other is not None and other.is_here and not take_over:
        raise RunHeld(
            f"{other.by} on {other.host} (process {other.pid}) is working on the run "
            f"{record.name} of "
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
    """The last holder of a run; None if there was none or it cannot be determined."""
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
    """Seconds since a time; raises `ValueError` if it is not a time in UTC."""
    then = datetime.strptime(at, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    return (datetime.now(timezone.utc) - then).total_seconds()


def _beat(record: Record, over: threading.Event) -> None:
    while not over.wait(BEAT_S):
        # If the storage is gone, the next event reports it.
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

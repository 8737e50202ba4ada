"""Is there enough in a growing log to say whether the loss continued?

Reads what is added to the logs, judges after each piece, and ends as soon as more rows
would not change the answer. What the answer rests on is the question of `verdict`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

from ckptctl.errors import UsageError
from ckptctl.loss.checking import LossReport, asked_boundary, boundary_of, report_on
from ckptctl.loss.level import WINDOWS, Pace, may_tell_throughput
from ckptctl.loss.reading import LogReader
from ckptctl.loss.replay import GOOD_ROWS, MIN_ROWS, Agreement
from ckptctl.loss.resumes import Boundary
from ckptctl.loss.rows import Marker, Row
from ckptctl.loss.segments import Split, Splitter
from ckptctl.loss.verdict import Judgement, LossVerdict, decisive
from ckptctl.storage.opening import is_local

POLL_S = 1.0
_PIECE = 1 << 20
_FIRM = 10  # rows
_EXACT = frozenset(
    {
        "loss.restarted",
        "loss.not-finite",
        "loss.step",
        "loss.tokens",
        "loss.lr",
        "loss.data",
        "loss.batch",
    }
)


def is_settled(judgement: Judgement) -> bool:
    """Whether more rows would leave the verdict as it is.

    A wrong counter settles it at once, five steps that agree do, and so do five that
    drift; what only the level says needs all the rows that it looks at.
    """
    replay, level = judgement.replay, judgement.level
    n = len(replay.rows)
    found = decisive(judgement.findings, judgement.verdict)
    if found is not None and found.code in _EXACT:
        return True
    to_come = _steps_to_come(judgement)
    if to_come and n < GOOD_ROWS:
        return False
    if replay.agrees and replay.fine_enough:
        return n >= (GOOD_ROWS if to_come else MIN_ROWS)
    if replay.agreement in (Agreement.DRIFT, Agreement.HIGHER):
        return True
    if judgement.verdict is LossVerdict.DISCONTINUOUS:
        return level.n_after >= _FIRM
    return level.n_after >= WINDOWS[-1]


def _steps_to_come(judgement: Judgement) -> bool:
    """Whether steps that were logged before are still to be trained again."""
    resume = judgement.resume
    return bool(resume.overwritten) and resume.overwritten[-1].step > resume.after[-1].step


class _Tail(Protocol):
    """A log that grows."""

    def new_items(self) -> Iterator[Row | Marker]:
        """What was logged since the last time."""

    def end(self) -> Iterator[Row | Marker]:
        """What was held back until it was whole, when nothing more is waited for."""

    @property
    def ended(self) -> bool:
        """Nothing more can come."""


class _FileTail:
    """A file that grows, is rotated, or is not there yet."""

    ended = False

    def __init__(self, path: str, reader: Callable[[], LogReader]) -> None:
        self._path = path
        self._new_reader = reader
        self._reader = reader()
        self._inode: int | None = None
        self._offset = 0

    def new_items(self) -> Iterator[Row | Marker]:
        try:
            file = open(self._path, "rb")  # noqa: SIM115 - closed below
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(f"{self._path}: {error.strerror}") from error
        with file:
            status = os.fstat(file.fileno())
            if self._inode not in (None, status.st_ino) or status.st_size < self._offset:
                yield from self._reader.end()
                self._reader, self._offset = self._new_reader(), 0
            self._inode = status.st_ino
            file.seek(self._offset)
            while piece := file.read(_PIECE):
                self._offset += len(piece)
                yield from self._reader.feed(piece)

    def end(self) -> Iterator[Row | Marker]:
        return self._reader.end()


class _InputTail:
    """Standard input."""

    def __init__(self, reader: Callable[[], LogReader]) -> None:
        self._reader = reader()
        self.ended = False

    def new_items(self) -> Iterator[Row | Marker]:
        import select

        fd = sys.stdin.fileno()
        while not self.ended and select.select([fd], [], [], 0)[0]:
            piece = os.read(fd, _PIECE)
            if not piece:
                self.ended = True
                return
            yield from self._reader.feed(piece)

    def end(self) -> Iterator[Row | Marker]:
        return self._reader.end()


def follow_loss(
    logs: Sequence[str],
    *,
    resume_step: int | None = None,
    resume_tokens: int | None = None,
    resume_samples: int | None = None,
    with_throughput: bool = False,
    report: str | None = None,
    strict: bool = False,
    format: str | None = None,  # noqa: A002 - what it is called everywhere
    pattern: str | None = None,
    keys: Mapping[str, str] | None = None,
    wait_s: float | None = None,
    max_steps: int | None = None,
    poll_s: float = POLL_S,
    **storage: Any,
) -> Iterator[LossReport]:
    """Yield a report each time that was looked, the last of them when it is settled.

    Ends early after `wait_s` seconds, or `max_steps` steps after the resume, with the
    verdict of then. `with_throughput` also waits until the rows say whether the speed is back.
    `logs` are files, read to their end one after the other and then
    watched, or `-` for standard input; a file may be missing until it is there. The other
    arguments are those of `check_loss`.

    Raises `UsageError` for what cannot be watched.
    """
    asked = asked_boundary(resume_step, resume_tokens, resume_samples)
    boundary, found = boundary_of(asked, report, **storage)

    def reader_of(path: str) -> Callable[[], LogReader]:
        return lambda: LogReader(path, format=format, pattern=pattern, keys=keys)

    tails = [_tail(path, reader_of(path)) for path in logs]
    splitter = Splitter(around=boundary.step if boundary is not None else None)
    ends_at = None if wait_s is None else time.monotonic() + wait_s
    part: bool | None = None
    now: LossReport | None = None
    while True:
        n_new = 0
        for tail in tails:
            for item in tail.new_items():
                splitter.feed(item)
                n_new += 1
        ended = all(tail.ended for tail in tails)
        over = ended or (ends_at is not None and time.monotonic() >= ends_at)
        for item in chain.from_iterable(tail.end() for tail in tails if over):
            splitter.feed(item)
            n_new += 1
        if n_new or now is None:
            parts = splitter.split()
            part = _may_part(parts, boundary) if part is None else part
            now = report_on(
                parts, logs=logs, boundary=boundary, report=found, strict=strict, part=part
            )
        yield now
        judged = now.judged
        if judged is not None and _enough(judged, max_steps):
            return
        if judged is not None and is_settled(judged):
            wrong = judged.verdict is LossVerdict.DISCONTINUOUS
            if not with_throughput or wrong or _pace_is_known(judged):
                return
        if over:
            return
        left_s = poll_s if ends_at is None else ends_at - time.monotonic()
        time.sleep(max(0.0, min(poll_s, left_s)))


def _pace_is_known(judged: Judgement) -> bool:
    """Whether rows to come cannot say more about the throughput than those that are there."""
    known = judged.throughput.pace is not Pace.UNKNOWN
    return known or not may_tell_throughput(judged.resume)


def _may_part(parts: Split, boundary: Boundary | None) -> bool:
    """Rows behind the checkpoint that are there already are those of the job that died."""
    if boundary is None or not parts.legs:
        return True
    return parts.legs[-1].last_step <= boundary.step


def _tail(path: str, reader: Callable[[], LogReader]) -> _Tail:
    if path == "-":
        return _InputTail(reader)
    if not is_local(path):
        raise UsageError(f"{path}: --follow watches files and standard input, not object stores")
    return _FileTail(path.removeprefix("file://"), reader)


def _enough(judged: Judgement, max_steps: int | None) -> bool:
    resume = judged.resume
    last = resume.after[-1].step
    return max_steps is not None and last - resume.first_step + 1 >= max_steps

"""Follow growing logs until more rows would not change the verdict.

Reads what is added to the logs and checks the resume again after each piece. `checking`
checks logs that are complete.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from ckptctl.errors import UsageError
from ckptctl.logs.reading import DamageLog, LogFormat, LogReader
from ckptctl.logs.rows import Marker, Row
from ckptctl.loss.checking import CheckOptions, LossReport, check_split, each_once
from ckptctl.loss.level import MIN_BEFORE, WINDOWS
from ckptctl.loss.replay import GOOD_ROWS, Agreement, RowOrigin
from ckptctl.loss.resumes import LedgerAnswer, NamedCheckpoint
from ckptctl.loss.segments import Splitter
from ckptctl.loss.speed import Pace
from ckptctl.loss.verdict import Assessment, LossVerdict, decisive
from ckptctl.options import StorageOptions
from ckptctl.storage.logs import STDIN
from ckptctl.storage.opening import local_path
from ckptctl.storage.shared_places import open_named

POLL_S = 1.0
_PIECE_BYTES = 1 << 20
_ROWS_FOR_DISCONTINUOUS = 10
# Findings from exact comparisons, which later rows cannot change.
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


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """How long logs are followed.

    `max_wait_s` and `max_steps`, the steps after the resume, end the wait with the verdict
    of that moment. `with_throughput` also waits until the rows show whether the speed is
    back. `poll_s` is the time between two reads.
    """

    max_wait_s: float | None = None
    max_steps: int | None = None
    with_throughput: bool = False
    poll_s: float = POLL_S


def is_settled(assessment: Assessment) -> bool:
    """Whether more rows would leave the verdict as it is.

    A wrong counter settles it at once; so do five steps that agree and five that drift.
    Where so few equal steps do not exclude every fault, twenty may. A verdict that rests on
    the level needs all the rows that are compared.
    """
    replay, level = assessment.replay, assessment.level
    n = len(replay.rows)
    found = decisive(assessment.findings, assessment.verdict)
    if found is not None and found.code in _EXACT:
        # A second row shows how far apart the rows of the new log are.
        return found.code != "loss.step" or len(assessment.resume.after) > 1
    last = assessment.resume.after[-1].step
    lasts_before = [row.step for row in assessment.resume.overwritten[-1:]]
    more_to_replay = any(last < step for step in lasts_before)
    if more_to_replay and n < GOOD_ROWS:
        return False
    if replay.is_proof and more_to_replay and assessment.verdict is LossVerdict.NO_JUMP:
        return n >= WINDOWS[-1]
    if replay.is_proof:
        return n >= GOOD_ROWS or not more_to_replay
    if replay.origin is RowOrigin.COPIED and any(last <= step for step in lasts_before):
        # A row that was not logged before shows that another attempt is training.
        return False
    if replay.agreement in (Agreement.DRIFT, Agreement.HIGHER):
        return True
    if assessment.verdict is LossVerdict.DISCONTINUOUS:
        return level.n_after >= _ROWS_FOR_DISCONTINUOUS
    if level.n_before < MIN_BEFORE and not more_to_replay:
        # No row is added before the resume, so later ones have nothing to be compared with.
        return level.n_after >= WINDOWS[0]
    return level.n_after >= WINDOWS[-1]


class _Tail:
    """A log that grows. `ended`: nothing more can be added."""

    ended = False

    def __init__(self, name: str, log_format: LogFormat | None, earlier: LogReader | None) -> None:
        self._name, self._format = name, log_format
        self._used: frozenset[str] = frozenset()
        self.reader = LogReader(name, log_format, earlier)

    @property
    def used(self) -> frozenset[str]:
        """The plain names of the key map that the log has had so far, before a rotation too."""
        return self._used | self.reader.log.used

    def new_items(self) -> Iterator[Row | Marker]:
        """The rows and markers that were added since the last call."""
        raise NotImplementedError

    def end(self) -> Iterator[Row | Marker]:
        """The rows and markers that waited for more bytes."""
        yield from self.reader.end()
        self._used = self.used
        self.reader = LogReader(self._name, self._format, self.reader)


class FileTail(_Tail):
    """A file that grows, is rotated, or does not exist yet; `name` is that of its rows."""

    def __init__(
        self,
        path: str,
        name: str,
        log_format: LogFormat | None = None,
        earlier: LogReader | None = None,
    ) -> None:
        super().__init__(name, log_format, earlier)
        self._path = path
        self._inode: int | None = None
        self._offset = 0

    def new_items(self) -> Iterator[Row | Marker]:
        """See `_Tail.new_items`."""
        try:
            file = os.fdopen(open_named(self._path), "rb")
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(f"{self._path}: {error.strerror}") from error
        with file:
            status = os.fstat(file.fileno())
            if self._inode not in (None, status.st_ino) or status.st_size < self._offset:
                yield from self.end()
                self._offset = 0
            self._inode = status.st_ino
            file.seek(self._offset)
            while piece := file.read(_PIECE_BYTES):
                self._offset += len(piece)
                yield from self.reader.feed(piece)


class _InputTail(_Tail):
    """Standard input."""

    def new_items(self) -> Iterator[Row | Marker]:
        import select

        fd = sys.stdin.fileno()
        while not self.ended and select.select([fd], [], [], 0)[0]:
            piece = os.read(fd, _PIECE_BYTES)
            if not piece:
                self.ended = True
                return
            yield from self.reader.feed(piece)


def follow_loss(
    logs: Sequence[str],
    checkpoint: NamedCheckpoint | None = None,
    *,
    follow: FollowOptions | None = None,
    log_format: LogFormat | None = None,
    storage: StorageOptions = StorageOptions(),
    strict: bool = False,
    ledger: Callable[[], LedgerAnswer | None] | None = None,
) -> Iterator[LossReport]:
    """Yield a report after each read; the last one is settled, or `follow` ended the wait.

    `logs` are files, or `-` for standard input. Each file is read to its end, one after the
    other, and then watched; it may be created later. `storage` is where the resume report
    of `checkpoint` lies. `strict` makes `no-jump` end with exit code 31. `ledger` is read for the
    last report: see `check_loss`.

    Raises `UsageError` for a log that cannot be watched, and as `NamedCheckpoint.resolve`.
    """
    checkpoint, follow = checkpoint or NamedCheckpoint(), follow or FollowOptions()
    resume_point, found = checkpoint.resolve(storage)
    options = CheckOptions(resume_point, found, strict=strict)
    logs = each_once(logs)
    tails: list[_Tail] = []
    for path in logs:
        tails.append(_tail(path, log_format, tails[-1].reader if tails else None))
    splitter = Splitter(around=resume_point.step if resume_point is not None else None)
    deadline = None if follow.max_wait_s is None else time.monotonic() + follow.max_wait_s
    may_divide: bool | None = None
    n_at_start = n_ended = 0
    report: LossReport | None = None
    notes = DamageLog()
    while True:
        n_new = 0
        for number, tail in enumerate(tails):
            for item in tail.new_items():
                # Rows of a log before it that wait for more bytes come first.
                earlier, n_ended = tails[n_ended:number], max(n_ended, number)
                for waiting in chain(
                    chain.from_iterable(before.end() for before in earlier), [item]
                ):
                    splitter.feed(waiting)
                    n_new += 1
        ended = all(tail.ended for tail in tails)
        over = ended or (deadline is not None and time.monotonic() >= deadline)
        for item in chain.from_iterable(tail.end() for tail in tails if over):
            splitter.feed(item)
            n_new += 1
        if n_new or report is None:
            parts = splitter.split()
            if may_divide is None:
                # Rows after the checkpoint in the first read are those of the job that died.
                may_divide = resume_point is None or all(
                    segment.last_step <= resume_point.step for segment in parts.segments[-1:]
                )
                n_at_start = parts.n_rows
            unused: list[str] = []
            if parts.n_rows and log_format is not None:
                unused = log_format.unused_keys(tail.used for tail in tails)
            notes = DamageLog(unused_keys=unused, other_ranks=tails[-1].reader.log.other_ranks)
            report = check_split(parts, options, logs=logs, may_divide=may_divide, damage=notes)
        yield report
        # Rows that one log for all attempts held at the start can be those of an attempt before
        # the claimed one, whose first step is another.
        worst = report.worst
        codes = [] if worst is None else [finding.code for finding in worst.findings]
        is_live = len(logs) > 1 or report.n_rows > n_at_start or "loss.step" not in codes
        enough = worst is not None and is_live and _is_enough(worst, follow)
        if (over or enough) and ledger is not None and worst is not None:
            with_ledger = replace(options, ledger=ledger)
            yield check_split(
                parts, with_ledger, logs=logs, may_divide=bool(may_divide), damage=notes
            )
        if over or enough:
            return
        left_s = follow.poll_s if deadline is None else deadline - time.monotonic()
        time.sleep(max(0.0, min(follow.poll_s, left_s)))


def _is_enough(assessment: Assessment, follow: FollowOptions) -> bool:
    resume = assessment.resume
    n_steps = resume.after[-1].step - resume.first_step + 1
    if follow.max_steps is not None and n_steps >= follow.max_steps:
        return True
    if not is_settled(assessment):
        return False
    is_wrong = assessment.verdict is LossVerdict.DISCONTINUOUS
    watches = follow.with_throughput and assessment.throughput.pace is Pace.WATCHING
    return is_wrong or not watches


def _tail(path: str, log_format: LogFormat | None, earlier: LogReader | None) -> _Tail:
    if path == STDIN:
        return _InputTail(path, log_format, earlier)
    file = local_path(path)
    if file is None:
        raise UsageError(f"{path}: --follow supports files and standard input, not object stores")
    return FileTail(file, path, log_format, earlier)

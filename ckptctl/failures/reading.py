"""Read the logs of a job, and the flight-recorder dumps beside them.

Each log is read once, with bounded memory and up to a deadline. A folder stands for the
files in it: logs and dumps; binary files are skipped.

What a person names is read, whoever owns it. What is found in a folder that everybody can
write is read only if it is of root, of this user or of the owner of something that was named.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ckptctl.errors import (
    BinaryData,
    CkptctlError,
    PathNotFound,
    PathUntrusted,
    StorageError,
    Unknown,
    guarded,
)
from ckptctl.failures.matching import FailureLogReader, folded
from ckptctl.failures.rank_dumps import (
    MAX_BYTES,
    PREFIX_VARIABLES,
    Dump,
    NotADump,
    Stack,
    may_be_dump,
    read_dump,
    without_stale,
)
from ckptctl.failures.results import Evidence
from ckptctl.failures.scope import bearing, scope_of
from ckptctl.logs.log_lines import Deadline
from ckptctl.logs.sources import changed_s, log_blocks
from ckptctl.options import StorageOptions
from ckptctl.storage.logs import STDIN, logs_below, read_bytes, read_head
from ckptctl.storage.opening import local_path
from ckptctl.storage.shared_places import FoundIn, owner_of

_SAME_JOB_S = 3600.0
"""A log and a dump beside it belong to one job if written within this time."""
_DUMP_NAME = re.compile(r".*(?:trace|dump)\w*\d")
_LOG_NAME = re.compile(
    r".*(?:\.(?:log|out|err|txt)(?:\.\w{1,8}){0,2}|dmesg|messages|syslog|journal)"
)


@dataclass(frozen=True, slots=True)
class LogEvidence:
    """What was read; `first_failed` is the host and rank that a launcher names as the first.

    `not_dumps` are messages about files that were given as dumps but are not.
    `set_aside` are the reasons why something that was found is no evidence. `unread` names what
    could not be read for a fault of ckptctl itself. `deadline_reached`: the deadline passed before
    the end of the logs.
    """

    evidence: tuple[Evidence, ...]
    first_failed: tuple[str | None, int | None] | None
    hosts: Mapping[int, str]
    stacks: tuple[Stack, ...]
    dumps: tuple[Dump, ...]
    not_dumps: tuple[str, ...]
    set_aside: tuple[str, ...]
    unread: tuple[str, ...]
    n_files: int
    n_lines: int
    deadline_reached: bool


class _Reading:
    """The state of one reading of all logs."""

    def __init__(
        self, named: Iterable[str], storage: StorageOptions, deadline_s: float | None
    ) -> None:
        self.storage = storage
        paths = (local_path(name) for name in named if name != STDIN)
        owners = (owner_of(path) for path in paths if path is not None)
        self.users = frozenset(owner for owner in owners if owner is not None)
        self.set_aside: dict[str, str] = {}
        self.deadline = Deadline(deadline_s)
        self.unread: list[str] = []
        self.readers: list[FailureLogReader] = []
        self.dumps: dict[str, Dump] = {}
        self.beside_binary: set[str] = set()
        self.n_binary = 0

    def evidence_in(self, name: str) -> Iterator[tuple[FailureLogReader, Evidence]]:
        """The evidence in a log, or in the files of a folder."""
        files = logs_below(name, self.storage)
        found = self.found_in(name)
        for file in files:
            if self.deadline.passed():
                return
            if file == name:
                yield from self._in_log(file)
                continue
            try:
                if not self._is_dump(file, found):
                    yield from self._in_log(file, found)
            except BinaryData:
                self.n_binary += 1
                self.beside_binary.add(os.path.dirname(file))
                self.readers.pop()
            except PathUntrusted as error:
                self.set_aside[file] = error.message
                self.readers = [reader for reader in self.readers if reader.name != file]

    def found_in(self, folder: str) -> FoundIn:
        """What the files in a folder are."""
        return FoundIn(local_path(folder) or "", self.users)

    def _in_log(
        self, file: str, found: FoundIn | None = None
    ) -> Iterator[tuple[FailureLogReader, Evidence]]:
        reader = FailureLogReader(file, self.deadline)
        self.readers.append(reader)
        blocks = log_blocks(file, self.storage, found)
        while True:
            what = f"reading {file} behind line {reader.n_lines:,}"
            block = guarded(what, partial(next, blocks, None), raises=CkptctlError)
            if isinstance(block, Unknown):
                self.unread.append(block.message)
                return
            if block is None:
                return
            self.deadline.extend(sum(len(text) for _, text in block))
            for evidence in reader.take(block):
                yield reader, evidence
            if self.deadline.passed():
                return

    def _is_dump(self, file: str, found: FoundIn) -> bool:
        """Whether a file of a folder is a dump; if so, it is read."""
        path = local_path(file)
        if path is None or not re.search(r"\d(?:\.\w+)?$", file):
            return False
        if may_be_dump(file, read_head(path, found)):
            with suppress(NotADump):
                self.take_dump(file, read_bytes(file, limit=MAX_BYTES, found=found))
                return True
        return False

    def take_dump(self, file: str, data: bytes) -> None:
        """Read a dump; raises `NotADump` for anything else."""
        self.deadline.extend(len(data))
        dump = guarded(f"reading {file}", partial(read_dump, file, data), raises=NotADump)
        if isinstance(dump, Unknown):
            self.unread.append(dump.message)
        else:
            self.dumps[file] = dump

    def take_dumps_beside(self, logs: Iterable[str]) -> None:
        """Read the dumps in the folders of the logs, and those that the variables name."""
        paths = [local_path(log) for log in logs if log != STDIN]
        folders = {os.path.dirname(path) or "." for path in paths if path is not None}
        files = [*_files_in(folders, _DUMP_NAME)]
        for variable in PREFIX_VARIABLES:
            if prefix := os.environ.get(variable):
                pattern = re.compile(re.escape(os.path.basename(prefix)) + r"\d{1,7}")
                files += _files_in((os.path.dirname(prefix) or ".",), pattern)
        times = [at for log in logs if (at := changed_s(log)) is not None]
        for file in files:
            # A folder such as /tmp also holds the dumps of other jobs.
            at_s = changed_s(file)
            if at_s is not None and any(
                abs(at_s - written_s) <= _SAME_JOB_S for written_s in times
            ):
                try:
                    self._is_dump(file, self.found_in(os.path.dirname(file) or "."))
                except PathUntrusted as error:
                    self.set_aside[file] = error.message
                except StorageError:
                    continue

    def is_log(self, file: str) -> bool:
        """False for a text file among the binary files of a checkpoint."""
        return os.path.dirname(file) not in self.beside_binary or bool(
            _LOG_NAME.fullmatch(os.path.basename(file))
        )


def read_logs(
    names: Sequence[str], recorder: str | None, storage: StorageOptions, deadline_s: float | None
) -> LogEvidence:
    """Read logs, folders of logs, and a folder (or one file) of flight-recorder dumps.

    Raises `BinaryData` if a given file is binary, or a folder contains binary files and no
    log.
    """
    named = names if recorder is None else [*names, recorder]
    reading = _Reading(named, storage, deadline_s)
    not_dumps = tuple(_named_dumps(reading, recorder)) if recorder is not None else ()
    evidence = folded(pair for name in names for pair in reading.evidence_in(name))
    logs = [reader for reader in reading.readers if reading.is_log(reader.name)]
    if reading.n_binary and not logs and not reading.dumps:
        raise BinaryData(
            f"{', '.join(names)}: {reading.n_binary:,} binary files and no log; a checkpoint "
            "cannot be classified",
            next_command="ckptctl scan ROOT",
        )
    if recorder is None:
        reading.take_dumps_beside([reader.name for reader in logs if reader.name in names])
    read = {reader.name for reader in logs}
    dumps, stale = without_stale([*reading.dumps.values()])
    spans = (span for reader in logs if (span := reader.span()) is not None)
    scope = scope_of(spans, {reader.name: reader.has_zone for reader in logs})
    found = [bearing(item, scope) for item in evidence if item.file in read]
    aside = {(item.file, item.rule, item.host): reason for item, reason in found if reason}
    return LogEvidence(
        evidence=tuple(item for item, reason in found if not reason),
        first_failed=_first_failed(logs),
        hosts=dict(pair for log in logs for pair in log.hosts.items()),
        stacks=tuple(stack for log in logs for stack in log.stacks.stacks),
        dumps=tuple(dumps),
        not_dumps=not_dumps,
        set_aside=(
            *reading.set_aside.values(),
            *(reason for log in logs for reason in log.earlier),
            *aside.values(),
            *stale,
        ),
        unread=(*reading.unread, *(message for log in logs for message in log.unread)),
        n_files=len(logs),
        n_lines=sum(log.n_lines for log in logs),
        deadline_reached=reading.deadline.reached,
    )


def _first_failed(logs: Sequence[FailureLogReader]) -> tuple[str | None, int | None] | None:
    """The rank that failed first, if the launchers show it: each knows only its own ranks."""
    reports = {log.first_failed: log.first_failed_s for log in logs if log.first_failed}
    times = [at for at in reports.values() if at is not None]
    if len(reports) > 1 and len(times) < len(reports):
        return None
    return min(reports, key=lambda first: reports[first] or 0.0, default=None)


def _named_dumps(reading: _Reading, recorder: str) -> Iterator[str]:
    for file in logs_below(recorder, reading.storage):
        if not re.search(r"\d(?:\.\w+)?$", file):
            continue
        found = None if file == recorder else reading.found_in(recorder)
        try:
            data = read_bytes(file, limit=MAX_BYTES, storage=reading.storage, found=found)
            reading.take_dump(file, data)
        except NotADump as error:
            yield str(error)
        except PathUntrusted as error:
            if found is None:
                raise
            reading.set_aside[file] = error.message
    if not reading.dumps and not reading.set_aside and not reading.unread:
        raise PathNotFound(
            f"{recorder}: no readable dump of the flight recorder; the name of a dump must end "
            "with its rank"
        )


def _files_in(folders: Collection[str], name: re.Pattern[str]) -> Iterator[str]:
    for folder in sorted(folders):
        with suppress(OSError):
            for found in sorted(os.scandir(folder), key=lambda entry: entry.name):
                if name.fullmatch(found.name) and found.is_file():
                    yield os.path.join(folder, found.name)

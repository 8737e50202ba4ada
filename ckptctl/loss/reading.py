"""Read the rows and markers of training logs.

Files are put in the order of time and read once, in pieces. The format is detected from
the first bytes. `LogReader` reads one log whose bytes are fed to it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ckptctl.errors import LogUnreadable, LogWithoutLoss, UsageError
from ckptctl.findings import Finding
from ckptctl.loss.formats.console import pattern_format
from ckptctl.loss.formats.fields import check_keys
from ckptctl.loss.formats.records import TrainerState, is_document
from ckptctl.loss.formats.tensorboard import EventFile, is_event_file
from ckptctl.loss.formats.wandb_offline import MAGIC, WandbFile
from ckptctl.loss.rows import Marker, Row
from ckptctl.loss.sources import STDIN, Access, expanded, natural, read_pieces
from ckptctl.loss.text_logs import TEXT_FORMATS, TextLog

FORMATS: tuple[str, ...] = (
    *dict.fromkeys(form.name for form in TEXT_FORMATS),
    EventFile.format,
    WandbFile.format,
    TrainerState.format,
)
"""The names that `format` can have."""

_BINARY = (EventFile, WandbFile, TrainerState)

# So many bytes tell what a file is; fewer only where it has no more.
_HEAD_BYTES = 64


class Log(Protocol):
    """One log in one format, fed in pieces."""

    @property
    def format(self) -> str | None:
        """Its name; None as long as it is not known."""
        ...

    @property
    def n_without_step(self) -> int:
        """Losses that were left out for want of a step."""
        ...

    @property
    def damage(self) -> str | None:
        """Why nothing more is read."""
        ...

    def feed(self, data: bytes) -> Iterator[Row | Marker]:
        """What is whole with these bytes."""
        ...

    def end(self) -> Iterator[Row | Marker]:
        """What waited for more."""
        ...


class LogReader:
    """Reads one log that is fed in pieces of any length, as a growing file gives them.

    `name` is the file as the caller named it: it stands in each row's place. What
    `feed` gives must be taken before more is fed. `end` gives what waited for more;
    a log that is rotated is ended, and a new reader takes over.
    """

    def __init__(
        self,
        name: str,
        *,
        format: str | None = None,  # noqa: A002
        pattern: str | None = None,
        keys: Mapping[str, str] | None = None,
    ) -> None:
        check_options(format=format, pattern=pattern, keys=keys)
        self.name = name
        self.n_bytes = 0
        self._format, self._pattern, self._keys = format, pattern, keys
        self._head = b""
        self._log: Log | None = None

    @property
    def format(self) -> str | None:
        """The format of the log; None as long as it is not known."""
        return None if self._log is None else self._log.format

    @property
    def n_without_step(self) -> int:
        """Losses that were left out because nothing says of which step they are."""
        return 0 if self._log is None else self._log.n_without_step

    @property
    def damage(self) -> str | None:
        """Why reading stopped before the end; None where it did not."""
        return None if self._log is None else self._log.damage

    def feed(self, data: bytes) -> Iterator[Row | Marker]:
        """The rows and markers that are whole with these bytes."""
        self.n_bytes += len(data)
        if self._log is None:
            self._head += data
            if len(self._head) < _HEAD_BYTES:
                return
            data = self._begin()
        if self._log is not None:
            yield from self._log.feed(data)

    def end(self) -> Iterator[Row | Marker]:
        """The rows that waited for more."""
        if self._log is None:
            data = self._begin()
            if self._log is not None:
                yield from self._log.feed(data)
        if self._log is not None:
            yield from self._log.end()

    def _begin(self) -> bytes:
        head, self._head = self._head, b""
        self._log = self._made(head)
        return head

    def _made(self, head: bytes) -> Log:
        for kind in _BINARY:
            if self._format == kind.format:
                return kind(self.name, self._keys)
        if self._format is None and self._pattern is None:
            if is_event_file(head):
                return EventFile(self.name, self._keys)
            if head.startswith(MAGIC):
                return WandbFile(self.name, self._keys)
            if is_document(self.name, head):
                return TrainerState(self.name, self._keys)
        return TextLog(self.name, form=self._format, pattern=self._pattern, keys=self._keys)


def read_logs(
    paths: Sequence[str],
    *,
    format: str | None = None,  # noqa: A002
    pattern: str | None = None,
    keys: Mapping[str, str] | None = None,
    storage_options: Mapping[str, object] | None = None,
    endpoint_url: str | None = None,
    timeout_s: float = 30.0,
    retries: int = 4,
    on_damage: Callable[[str], None] | None = None,
) -> Iterator[Row | Marker]:
    """Yield what the logs say, row by row, the oldest log first.

    `paths` are files, folders of logs, addresses of objects, or `-` for standard
    input; gzip, bzip2, xz and zstd are unpacked. Where every log keeps a clock, the
    first time in each decides the order; where none does, that of the caller, with
    `version_10` behind `version_2`. `format` is a name of `FORMATS`; `pattern` is a
    regular expression with groups named as the fields of `Row`; `keys` maps a
    field to the name that the log has for it.

    Memory does not grow with the logs. Where a log is damaged in the middle, its rows
    up to there are yielded; then `on_damage` is told, or else `LogUnreadable` raised.
    Raises `LogWithoutLoss` at the end where no row had a loss, `UsageError` for an option
    that means nothing, and what a storage raises.
    """
    check_options(format=format, pattern=pattern, keys=keys)
    if not paths:
        raise UsageError("no log was named")
    access = Access(storage_options or {}, endpoint_url, timeout_s, retries)
    new = partial(LogReader, format=format, pattern=pattern, keys=keys)
    readers: list[LogReader] = []
    n_losses = 0
    for path in _in_order(expanded(paths, access), access, new):
        reader = new(path)
        readers.append(reader)
        for item in _read(reader, access, on_damage):
            n_losses += isinstance(item, Row) and item.loss is not None
            yield item
    if not n_losses:
        raise LogWithoutLoss(_why_nothing(readers), next_command=_with_pattern(readers))


def check_options(
    *,
    format: str | None = None,  # noqa: A002
    pattern: str | None = None,
    keys: Mapping[str, str] | None = None,
) -> None:
    """Raise `UsageError` for a format that is not there, and for what cannot go together."""
    if format is not None and format not in FORMATS:
        raise UsageError(
            f"--format {format}: there is no such format; there are {', '.join(FORMATS)}"
        )
    if format is not None and pattern is not None:
        raise UsageError("--format and --pattern exclude each other: a pattern is a format")
    if pattern is not None:
        pattern_format(pattern)
    check_keys(keys or {})


def _read(
    reader: LogReader, access: Access, on_damage: Callable[[str], None] | None
) -> Iterator[Row | Marker]:
    damage: LogUnreadable | None = None
    try:
        for piece in read_pieces(reader.name, access):
            yield from reader.feed(piece)
            if reader.damage is not None:
                damage = LogUnreadable(f"{reader.name}: {reader.damage}; the rest is not read")
                break
    except LogUnreadable as error:
        damage = error
    yield from reader.end()
    if damage is None:
        return
    if on_damage is None:
        raise damage
    on_damage(damage.message)


def _in_order(
    paths: Sequence[str], access: Access, new: Callable[[str], LogReader]
) -> Sequence[str]:
    if len(paths) < 2 or STDIN in paths:
        return paths
    first = {path: _first_clock(new(path), access) for path in paths}
    clocks = {path: at for path, at in first.items() if at is not None}
    if len(clocks) == len(first):
        # A sort is stable: logs that began together stay as the caller named them.
        return sorted(paths, key=lambda path: clocks[path])
    shapes = {re.sub(r"\d+", "0", path) for path in paths}
    return sorted(paths, key=natural) if len(shapes) == 1 else paths


def _first_clock(reader: LogReader, access: Access) -> float | None:
    for item in _read(reader, access, lambda _: None):
        if isinstance(item, Row):
            return item.at
    return None


def _why_nothing(readers: Sequence[LogReader]) -> str:
    names = readers[0].name if len(readers) == 1 else f"{len(readers)} logs"
    n_bytes = sum(reader.n_bytes for reader in readers)
    lost = sum(reader.n_without_step for reader in readers)
    found = sorted({reader.format for reader in readers if reader.format is not None})
    if not n_bytes:
        return f"{names}: empty; there is no loss to look at"
    if lost:
        return (
            f"{names}: {lost:,} losses and no step to any of them: the progress bar that shows "
            "the step is not in the log; trainer_state.json has both"
        )
    if found:
        return f"{names}: steps as {found[0]} prints them, and none with a loss ({n_bytes:,} bytes)"
    return f"{names}: no step with a loss in {n_bytes:,} bytes, in none of {len(FORMATS)} formats"


def _with_pattern(readers: Sequence[LogReader]) -> str | None:
    """The command that reads a format nobody knows; None where that is not what is missing."""
    if not any(reader.n_bytes for reader in readers) or any(r.n_without_step for r in readers):
        return None
    names = " ".join(shlex.quote(reader.name) for reader in readers[:3])
    return rf"ckptctl loss {names} --pattern 'step (?P<step>\d+).* loss (?P<loss>\S+)'"


@dataclass(slots=True)
class Unread:
    """The damage that a reader tells of, in order, and whether any row came after the last."""

    messages: list[str] = field(default_factory=list)
    ends_so: bool = False

    def told(self, message: str) -> None:
        """Take what the reader says of one log: its name, and why nothing more is read."""
        self.messages.append(message)
        self.ends_so = True

    def watch(self, items: Iterable[Row | Marker]) -> Iterator[Row | Marker]:
        """The same rows and markers; to be read while `told` is called."""
        for item in items:
            if isinstance(item, Row):
                self.ends_so = False
            yield item

    def findings(self, *, end_matters: bool = True) -> tuple[Finding, ...]:
        """`loss.damaged` for each damage, `loss.unread` for one at the end, if that matters."""
        last = len(self.messages) - 1 if self.ends_so and end_matters else None
        return tuple(
            Finding(
                "loss.unread" if i == last else "loss.damaged",
                "",
                f"{message}, and no row follows: the resume may lie behind it"
                if i == last
                else message,
                expected="a log that can be read to its end",
            )
            for i, message in enumerate(self.messages)
        )

"""Read the rows and markers of training logs.

Files are put in the order of time and read once, in pieces. The format is detected from
the content of a log. `LogReader` reads one log whose bytes are fed to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptctl.errors import LogUnreadable, LogWithoutLoss, OptionError, UsageError
from ckptctl.findings import Finding
from ckptctl.formatting import command_line
from ckptctl.logs.binary_logs import WANDB_MAGIC, EventFile, WandbFile, is_event_file
from ckptctl.logs.collectors import Unwrapper
from ckptctl.logs.console import pattern_format
from ckptctl.logs.fields import FIELDS, plain_name
from ckptctl.logs.log_lines import Deadline
from ckptctl.logs.records import TrainerState, is_document
from ckptctl.logs.rows import Log, Marker, Row
from ckptctl.logs.sources import changed_s, expanded, natural, rotated_base
from ckptctl.logs.text_logs import TEXT_FORMATS, OtherRanks, TextLog
from ckptctl.options import StorageOptions
from ckptctl.outside_numbers import clamped
from ckptctl.storage.logs import STDIN, read_pieces

FORMATS: tuple[str, ...] = (
    *dict.fromkeys(form.name for form in TEXT_FORMATS),
    EventFile.format,
    WandbFile.format,
    TrainerState.format,
)
"""The names that `LogFormat.name` can have."""

# The format of a file is detected from this many bytes, or from the whole file.
_HEAD_BYTES = 64


@dataclass(frozen=True, slots=True)
class LogFormat:
    """How rows are found in a log, as far as the caller replaces the detection.

    `name` is one of `FORMATS`. `pattern` is a regular expression whose groups are named as
    the fields of `Row`. `keys` maps a field to the name that the log has for it; the names in
    `ignored` are those of no field. Raises
    `UsageError` for an unknown format or field, and for `name` together with `pattern`.
    """

    name: str | None = None
    pattern: str | None = None
    keys: Mapping[str, str] | None = None
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.name is not None and self.name not in FORMATS:
            raise OptionError(
                "--format", f"{self.name}: unknown format; the formats are {', '.join(FORMATS)}"
            )
        if self.name is not None and self.pattern is not None:
            raise OptionError(
                "--format", "and --pattern cannot be combined: a pattern is a format of its own"
            )
        if self.pattern is not None:
            pattern_format(self.pattern)
        for field_name, name in (self.keys or {}).items():
            if field_name not in FIELDS:
                raise OptionError(
                    "--key",
                    f"{field_name}={name}: unknown field {field_name}; the fields are "
                    f"{', '.join(FIELDS)}",
                )

    @property
    def detected(self) -> bool:
        """Whether the content of a log determines its format."""
        return self.name is None and self.pattern is None

    @property
    def names(self) -> Mapping[str, str]:
        """The names that replace those of the table, by their fields.

        Names that are ignored are those of fields that no row has.
        """
        return {**(self.keys or {}), **{f"ignored {name}": name for name in self.ignored}}

    def unused_keys(self, used: Iterable[frozenset[str]]) -> list[str]:
        """Each `FIELD=NAME` of the keys whose name no log has; `used` are the names of each log."""
        found = frozenset[str]().union(*used)
        keys = (self.keys or {}).items()
        return [f"{name}={text}" for name, text in keys if plain_name(text) not in found]


class LogReader:
    """Reads one log that is fed in pieces of any length, as a growing file gives them.

    `name` is the file as the caller named it; it is part of the position of each row.
    The iterator that `feed` returns must be exhausted before the next call. Where a log
    is rotated, call `end` and continue with a new reader, to which this one is `earlier`.
    After the `deadline` no further line is read, and `log.damage` states it.
    """

    def __init__(
        self,
        name: str,
        log_format: LogFormat | None = None,
        earlier: LogReader | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        self.name = name
        self._deadline = deadline
        self._earlier = earlier
        self.n_bytes = 0
        self._options = log_format or LogFormat()
        self._head = b""
        self._unwrapper: Unwrapper | None = None
        self._is_begun = False
        self.log = Log()
        """The log; without a format until its first bytes are known."""

    def feed(self, data: bytes) -> Iterator[Row | Marker]:
        """The rows and markers that these bytes complete."""
        self.n_bytes += len(data)
        if self._deadline is not None:
            self._deadline.extend(len(data))
        yield from self._fed(data)

    def end(self) -> Iterator[Row | Marker]:
        """The rows and markers that waited for more bytes."""
        yield from self._fed(b"", is_last=True)
        yield from self.log.end()

    def _fed(self, data: bytes, *, is_last: bool = False) -> Iterator[Row | Marker]:
        """The first bytes show whether the log is text, and the first of text which kind."""
        if self._unwrapper is not None:
            data = self._unwrapper.feed(data) + (self._unwrapper.end() if is_last else b"")
        if not self._is_begun:
            data, self._head = self._head + data, b""
            if len(data) < _HEAD_BYTES and not is_last:
                self._head = data
                return
            log = self._binary_log(data) if self._unwrapper is None else self._text_log(data)
            if log is None:
                self._unwrapper = Unwrapper()
                yield from self._fed(data, is_last=is_last)
                return
            self.log, self._is_begun = log, True
        if data:
            yield from self.log.feed(data)

    def _binary_log(self, head: bytes) -> Log | None:
        name, keys = self._options.name, self._options.names
        if name == EventFile.format or (self._options.detected and is_event_file(head)):
            return EventFile(self.name, keys)
        if name == WandbFile.format or (self._options.detected and head.startswith(WANDB_MAGIC)):
            return WandbFile(self.name, keys)
        return None

    def _text_log(self, head: bytes) -> Log:
        name, keys = self._options.name, self._options.names
        is_state = self._options.detected and is_document(self.name, head)
        if name == TrainerState.format or is_state:
            return TrainerState(self.name, keys)
        before = None if self._earlier is None else self._earlier.log
        self._earlier = None
        earlier = before if isinstance(before, TextLog) else None
        return TextLog(
            self.name,
            form=name,
            pattern=self._options.pattern,
            keys=keys,
            earlier=earlier,
            deadline=self._deadline,
        )


@dataclass(slots=True)
class DamageLog:
    """The damage that was found while logs were read, in order, and the keys that no log has.

    `at_end`: no row was read after the last damage. `order`: what determined the order of logs
    whose rows have no clock. `other_ranks`: what the ranks logged whose rows are dropped.
    """

    messages: list[str] = field(default_factory=list)
    unused_keys: list[str] = field(default_factory=list)
    at_end: bool = False
    order: str = ""
    other_ranks: OtherRanks | None = None

    def findings(self, *, end_matters: bool = True) -> tuple[Finding, ...]:
        """`loss.damaged` for each damage; `loss.unread` for one at the end, if that matters.

        `loss.unused-key` for each key.

        Where a later log continues, the resume is likely in what was read. Where nothing
        follows the damage, the resume may be in what was not read.
        """
        last = len(self.messages) - 1 if self.at_end and end_matters else None
        unused = [
            Finding(
                "loss.unused-key",
                "",
                f"--key {key}: no row of the logs has this name",
                expected="a name that is in the logs",
            )
            for key in self.unused_keys
        ]
        damaged = [
            Finding(
                "loss.unread" if i == last else "loss.damaged",
                "",
                f"{message}; no row follows, so a later resume may be missing"
                if i == last
                else message,
                expected="a log that is readable to its end",
            )
            for i, message in enumerate(self.messages)
        ]
        return (*unused, *damaged)


def read_logs(
    paths: Sequence[str],
    log_format: LogFormat | None = None,
    *,
    storage: StorageOptions = StorageOptions(),
    damage: DamageLog | None = None,
) -> Iterator[Row | Marker]:
    """Yield the rows and markers of the logs, the oldest log first.

    `paths` are files, folders of logs, addresses of objects, or `-` for standard input;
    gzip, bzip2, xz and zstd are decompressed. Where every log has a clock, the first time
    in each determines the order; otherwise the order is that of the caller, and names that
    differ in numbers only are sorted by these (`version_2` before `version_10`). Other files of
    a folder are sorted by the time of their last change.

    Memory does not grow with the logs. Where a log is damaged in the middle, the rows
    before the damage are yielded; then it is noted in `damage`, or `LogUnreadable` raised
    where that is None. So it is where reading takes longer than the bytes explain (`Deadline`).
    Raises `LogWithoutLoss` at the end where no row had a loss,
    `UsageError` where no log is named, and the errors of the storage.
    """
    if not paths:
        raise UsageError("no log was named")
    log_format = log_format or LogFormat()
    notes = damage or DamageLog()
    readers: list[LogReader] = []
    has_loss = False
    deadline = Deadline()
    ordered, order = _ordered_logs(paths, storage, log_format)
    if order:
        more = ", …" if len(ordered) > _MOST_NAMED else ""
        notes.order = f"{order}: {', '.join(ordered[:_MOST_NAMED])}{more}"
    for path in ordered:
        reader = LogReader(path, log_format, readers[-1] if readers else None, deadline)
        readers.append(reader)
        for item in _read(reader, storage, damage):
            if isinstance(item, Row):
                has_loss = has_loss or item.has_loss
                notes.at_end = False
            yield item
    notes.other_ranks = readers[-1].log.other_ranks
    notes.unused_keys += log_format.unused_keys(reader.log.used for reader in readers)
    if not has_loss:
        raise LogWithoutLoss(_why_nothing(readers), next_command=_pattern_command(readers))


def _read(
    reader: LogReader, storage: StorageOptions, damage: DamageLog | None
) -> Iterator[Row | Marker]:
    stopped: LogUnreadable | None = None
    try:
        for piece in read_pieces(reader.name, storage, LogUnreadable):
            yield from reader.feed(piece)
            if (damaged := reader.log.damage) is not None:
                stopped = LogUnreadable(f"{reader.name}: {damaged}; the rest was not read")
                break
    except LogUnreadable as error:
        stopped = error
    yield from reader.end()
    if stopped is None:
        return
    if damage is None:
        raise stopped
    damage.messages.append(stopped.message)
    damage.at_end = True


_MOST_NAMED = 8


def _ordered_logs(
    named: Sequence[str], storage: StorageOptions, log_format: LogFormat
) -> tuple[Sequence[str], str]:
    """The logs, the oldest first, and what determined this where their rows have no clocks."""
    paths = expanded(named, storage)
    if len(paths) < 2 or STDIN in paths:
        return paths, ""
    deadline = Deadline()
    first: dict[str, float | None] = {}
    for path in paths:
        items = _read(LogReader(path, log_format, deadline=deadline), storage, DamageLog())
        first[path] = next((item.at for item in items if isinstance(item, Row)), None)
    # A time of the day without a date orders nothing.
    clocks = {path: at for path, at in first.items() if at is not None and at > _A_DAY_S}
    if len(clocks) == len(first):
        # The sort is stable: logs with the same first time keep the order of the caller.
        return sorted(paths, key=lambda path: clocks[path]), ""
    if len({rotated_base(path) for path in paths}) == 1:
        return sorted(paths, key=_rotated), "rotated logs, the oldest first"
    if len({re.sub(r"\d+", "0", path) for path in paths}) == 1:
        return sorted(paths, key=natural), "logs in the order of the numbers in their names"
    changed = {path: changed_s(path) for path in paths if path not in named}
    times = {at for at in changed.values() if at is not None}
    if len(times) == len(paths):
        by_time = sorted(paths, key=lambda path: changed[path] or 0.0)
        return by_time, "logs in the order of their last change"
    return paths, "logs in the order in which they are named"


_A_DAY_S = 86_400


def _rotated(path: str) -> tuple[bool, int, str]:
    """Orders the files of a rotated log: `.2`, `.1`, then the log; dates rise."""
    suffix = path[len(rotated_base(path)) :]
    digits = "".join(filter(str.isdigit, suffix.partition(".gz")[0]))
    number = clamped(digits) if digits else 0
    return not digits, number if len(digits) >= 6 else -number, path


def _why_nothing(readers: Sequence[LogReader]) -> str:
    names = readers[0].name if len(readers) == 1 else f"{len(readers)} logs"
    n_bytes = sum(reader.n_bytes for reader in readers)
    logs = [reader.log for reader in readers]
    lost = sum(log.n_without_step for log in logs)
    found = sorted({log.format for log in logs if log.format is not None})
    if not n_bytes:
        return f"{names}: empty; there is no loss to check"
    if lost:
        return (
            f"{names}: {lost:,} losses without a step; the progress bar that shows the step is not "
            "in the log, or in another order: set PYTHONUNBUFFERED=1 (trainer_state.json has both)"
        )
    if found:
        return f"{names}: the rows in {found[0]} format have no loss ({n_bytes:,} bytes)"
    mention = next((log.mention for log in logs if log.mention is not None), None)
    words = f"the first mention of a loss is {mention}" if mention else "no line mentions a loss"
    return (
        f"{names}: no step with a loss in {n_bytes:,} bytes; none of {len(FORMATS)} formats fits; "
        f"{words}"
    )


def _pattern_command(readers: Sequence[LogReader]) -> str | None:
    """The command that reads an unknown format; None where the format is not the problem."""
    logs = [reader.log for reader in readers]
    if not any(reader.n_bytes for reader in readers) or any(log.n_without_step for log in logs):
        return None
    if any(log.format == "pattern" for log in logs):
        return "ckptctl loss --help"  # a pattern was given; suggesting another would not help
    names = (reader.name for reader in readers[:3])
    found = (log.pattern for log in logs if log.pattern is not None)
    return command_line("loss", *names, "--pattern", next(found, _ANY_PATTERN))


_ANY_PATTERN = r"step (?P<step>\d+).* loss (?P<loss>\S+)"

"""Which rows and markers are in the logs?

Files are put in the order of time and read once, in pieces; the format is found out
from what they hold. `LogReader` reads one log that is fed to it, however it comes.
What the rows mean is the judgement's question.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from ckptctl.errors import LogWithoutLoss, UsageError
from ckptctl.loss.formats.console import pattern_format
from ckptctl.loss.formats.keys import check_keys
from ckptctl.loss.rows import Marker, Row
from ckptctl.loss.sources import STDIN, Access, expanded, natural, read_pieces
from ckptctl.loss.text_logs import TEXT_FORMATS, TextLog

FORMATS: tuple[str, ...] = tuple(dict.fromkeys(form.name for form in TEXT_FORMATS))
"""The names that `format` can have."""


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
        self._log = TextLog(name, form=format, pattern=pattern, keys=keys)
        self.n_bytes = 0

    @property
    def format(self) -> str | None:
        """The format of the log; None as long as it is not known."""
        return self._log.format

    @property
    def n_without_step(self) -> int:
        """Losses that were left out because nothing says of which step they are."""
        return self._log.n_without_step

    def feed(self, data: bytes) -> Iterator[Row | Marker]:
        """The rows and markers that are whole with these bytes."""
        self.n_bytes += len(data)
        return self._log.feed(data)

    def end(self) -> Iterator[Row | Marker]:
        """The rows that waited for more."""
        return self._log.end()


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
) -> Iterator[Row | Marker]:
    """Yield what the logs say, row by row, the oldest log first.

    `paths` are files, folders of logs, addresses of objects, or `-` for standard
    input; gzip, bzip2, xz and zstd are unpacked. Where every log keeps a clock, the
    first time in each decides the order; where none does, that of the caller, with
    `version_10` behind `version_2`. `format` is a name of `FORMATS`; `pattern` is a
    regular expression with groups named as the fields of `Row`; `keys` maps a log's
    own names to these fields.

    Memory does not grow with the logs. Raises `LogWithoutLoss` at the end where no row
    had a loss, `LogUnreadable` for damaged compressed bytes, `UsageError` for an option
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
        for item in _read(reader, access):
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


def _read(reader: LogReader, access: Access) -> Iterator[Row | Marker]:
    for piece in read_pieces(reader.name, access):
        yield from reader.feed(piece)
    yield from reader.end()


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
    for item in _read(reader, access):
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


def _with_pattern(readers: Sequence[LogReader]) -> str:
    names = " ".join(shlex.quote(reader.name) for reader in readers[:3])
    return rf"ckptctl loss {names} --pattern 'step (?P<step>\d+).* loss (?P<loss>\S+)'"

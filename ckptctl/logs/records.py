"""Read JSON lines, tables with a header, and `trainer_state.json`.

One record is one line, or one element of a JSON list. Neighbouring records of one step
that do not contradict each other become one row, since some loggers write each metric
separately.
"""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ckptctl.formats.bounded_json import NotJson, decode_first_json, decode_json
from ckptctl.logs.fields import FIELDS, RowMaker, plain_name
from ckptctl.logs.rows import Log, LogPosition, Marker, RankReader, Row

_NOT_TRAINING = frozenset(
    {"val", "valid", "validation", "eval", "evaluation", "test", "dev", "heldout", "held-out"}
)
_SPLIT_KEYS = frozenset(
    {
        *("mode", "split", "phase", "stage", "type", "event"),
        *("prefix", "dataset", "subset", "kind", "name", "tag"),
    }
)
_MAX_DEPTH = 3
_METRIC_KEYS = ("name", "key", "tag", "metric")
"""The keys with the name of the metric, in a record that holds one metric as `value`."""


# Every record of a step has these; they are no metrics that could contradict each other.
_RECORD_FIELDS = ("step", "at", "attempt")


class RecordRows:
    """Makes rows of records; neighbouring ones of one step that agree become one row."""

    def __init__(self, keys: Mapping[str, str] | None, *, trimmed: bool = False) -> None:
        self.maker = RowMaker(keys, trimmed=trimmed)
        self._held: Row | None = None
        self._with_loss: Sequence[tuple[str, str]] = ()

    def add(
        self,
        named: Sequence[tuple[str, str | None]],
        position: LogPosition,
        *,
        step: int | None = None,
        at: float | None = None,
    ) -> Sequence[Row]:
        """Add a record, None for what has no value; the row before it, if it is of another one."""
        pairs = [(name, text) for name, text in named if text is not None]
        row = self.maker.row(pairs, position, step=step, at=at)
        if row is not None and row.has_loss:
            self._with_loss = pairs
        elif row is not None and self._lacks_loss(named):
            row = replace(row, lacks_loss=True)
        if row is None or not has_values(row):
            return ()
        held = self._held
        both = _merged(held, row) if held is not None and held.step == row.step else None
        self._held = both or row
        return () if held is None or both is not None else (held,)

    def _lacks_loss(self, named: Sequence[tuple[str, str | None]]) -> bool:
        """Whether a record of the training has no value as its loss.

        One with metrics that records with a loss lack, such as those of an evaluation, is
        another kind of record.
        """
        if not any(text is None and self.maker.field(name) == "loss" for name, text in named):
            return False
        known = {name for name, _ in self._with_loss}
        return not known or all(name in known for name, text in named if text is not None)

    def end(self) -> Sequence[Row]:
        """The last row."""
        held, self._held = self._held, None
        return () if held is None else (held,)


class RecordReader(RankReader):
    """Reads the lines of one rank in a format that is one record a line."""

    def __init__(self, keys: Mapping[str, str] | None = None) -> None:
        self.rows = RecordRows(keys, trimmed=True)
        self.maker = self.rows.maker

    def end(self) -> Sequence[Row]:
        """The last row."""
        return self.rows.end()


class RecordFile(Log):
    """A log that is one file of records."""

    def __init__(self, name: str, rows: RecordRows) -> None:
        self._name = name
        self._rows = rows
        self._n_records = 0

    @property
    def used(self) -> frozenset[str]:
        """See `Log.used`."""
        return frozenset(self._rows.maker.used)

    def end(self) -> Iterable[Row | Marker]:
        """The last row."""
        return self._rows.end()


def has_values(row: Row) -> bool:
    """Whether a row has a value of the training, or lacks its loss: not only a step and a time."""
    fields = (name for name in FIELDS if name not in (*_RECORD_FIELDS, "interval"))
    return row.lacks_loss or any(getattr(row, name) is not None for name in fields)


def _merged(first: Row, second: Row) -> Row | None:
    if first.attempt != second.attempt:
        return None
    added: dict[str, Any] = {}
    for name in FIELDS:
        if name in _RECORD_FIELDS:
            continue
        value = getattr(second, name)
        if value is None:
            continue
        if getattr(first, name) is not None:
            return None
        added[name] = value
    return replace(first, **added)


def flat_pairs(
    record: Mapping[str, Any], depth: int = _MAX_DEPTH
) -> Iterator[tuple[str, str | None]]:
    """The names and texts of a record, None for null; nested names are joined with `/`."""
    for name, value in record.items():
        if value is None or isinstance(value, str):
            yield name, value
        elif isinstance(value, dict) and depth > 1:
            yield from ((f"{name}/{below}", text) for below, text in flat_pairs(value, depth - 1))


def _one_metric(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    value = record.get("value")
    if isinstance(value, str):
        names = (record.get(key) for key in _METRIC_KEYS)
        yield from ((name, value) for name in names if isinstance(name, str))


def decode_record(text: str) -> dict[str, Any] | None:
    """A JSON object whose numbers are kept as text; None where `text` is not one."""
    try:
        value = decode_json(text, max_bytes=_MAX_RECORD, numbers="text")
    except NotJson:
        return None
    return value if isinstance(value, dict) else None


_MAX_RECORD = 16 << 20

_BEFORE = ("train_inner", ":::MLLOG")
"""What metaseq's logger and MLPerf's write before an object."""


def is_training(record: Mapping[str, Any]) -> bool:
    """Whether a record is of training and not of validation, with a step of the whole run."""
    for name in _SPLIT_KEYS & record.keys():
        if str(record[name]).lower() in _NOT_TRAINING:
            return False
    # mmcv restarts `iter` in every epoch.
    return not ("mode" in record and "iter" in record and "step" not in record)


class JsonLinesReader(RecordReader):
    """Reads lines that are or end with one JSON object."""

    def read(self, text: str, position: LogPosition) -> Sequence[Row]:
        """The rows that this line completes."""
        at = text.find("{")
        if at < 0 or (text[:at].strip() and not any(name in text[:at] for name in _BEFORE)):
            return ()
        record = decode_record(text[at:].strip())
        if record is None:
            return ()
        history = record.get("log_history")
        records = history if isinstance(history, list) else [record]
        return [
            row
            for element in records
            if isinstance(element, dict)
            for row in self.add(element, position)
        ]

    def add(self, record: Mapping[str, Any], position: LogPosition) -> Sequence[Row]:
        """The rows that this record completes."""
        if not is_training(record):
            return ()
        return self.rows.add([*flat_pairs(record), *_one_metric(record)], position)


class TableReader(RecordReader):
    """Reads the lines of a table with a header, such as Lightning's `metrics.csv`."""

    def __init__(self, keys: Mapping[str, str] | None = None) -> None:
        super().__init__(keys)
        self._names: tuple[str, ...] = ()
        self._delimiter: str | None = None

    def read(self, text: str, position: LogPosition) -> Sequence[Row]:
        """The rows that this line completes."""
        if self._header(text) or not self._names:
            return ()
        cells = _cells(text, self._delimiter)
        named = [(name, cell or None) for name, cell in zip(self._names, cells, strict=False)]
        return self.rows.add(named, position) if cells else ()

    def _header(self, text: str) -> bool:
        # A job that resumes into the same file writes the header again.
        if not _STEP_WORD.search(text) and not self.maker.has_own_names:
            return False
        for delimiter in _DELIMITERS:
            # W&B's export of a chart puts the name of the run before that of the metric.
            cells = [name.rpartition(" - ")[2] for name in _cells(text, delimiter)]
            fields = [self.maker.field(name) for name in cells]
            if not {"step", "loss"} <= {*fields}:
                continue
            # A sentence is not a header: between blanks, every cell must be a known name.
            if all(fields) if delimiter is None else all(map(plain_name, cells[1:])):
                self._names, self._delimiter = tuple(cells), delimiter
                return True
        return False


_DELIMITERS = (",", "\t", ";", "|", None)
"""None is any white space."""

_STEP_WORD = re.compile(r"(?i)step|iter|\bit\b")


def _cells(text: str, delimiter: str | None) -> list[str]:
    if delimiter is None:
        return text.lstrip("#").split()
    if delimiter not in text:
        return []
    try:
        (cells,) = csv.reader([text], delimiter=delimiter)
    except (csv.Error, ValueError):
        return []
    return [cell.strip() for cell in cells]


_LIST = re.compile(r'"log_history"\s*:\s*\[')
_MAX_STATE_RECORD = 1 << 20

# One value over several lines: a list of objects, or an object that starts with a newline.
_DOCUMENT = re.compile(rb"\s*(?:\{\s*\n|\[\s*\{)")


def is_document(name: str, head: bytes) -> bool:
    """Whether a file is `trainer_state.json`, or a JSON document over several lines."""
    return name.endswith("trainer_state.json") or _DOCUMENT.match(head) is not None


class TrainerState(RecordFile):
    """One `trainer_state.json` or list of records.

    The records are in the list `log_history`. A resumed trainer continues the history of
    its checkpoint, so the steps that it repeats occur once: compare with the file of the
    older checkpoint, or with the console log.
    """

    format = "trainer-state"

    def __init__(self, name: str, keys: Mapping[str, str] | None = None) -> None:
        self._reader = JsonLinesReader(keys)
        super().__init__(name, self._reader.rows)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._began = False
        self._in_list = False

    def feed(self, data: bytes) -> Iterator[Row | Marker]:
        """The rows and markers that these bytes complete."""
        self._rest += self._utf8.decode(data)
        if not self._began:
            self._rest = self._rest.lstrip("\ufeff \t\r\n")
            if not self._rest:
                return
            self._began = True
            if self._rest[0] == "[":
                self._rest, self._in_list = self._rest[1:], True
        if not self._in_list:
            start = _LIST.search(self._rest)
            if start is None:
                # The key may be split between two pieces, with spaces after it.
                self._rest = self._rest[-100:]
                return
            self._rest, self._in_list = self._rest[start.end() :], True
        while self.damage is None:
            record = self._record()
            if record is None:
                return
            if isinstance(record, dict):
                position = LogPosition(self._name, self._n_records)
                yield from self._reader.add(record, position)

    def _record(self) -> object | None:
        rest = self._rest.lstrip(" \t\r\n,")
        self._rest = rest
        if not rest or rest[0] == "]":
            return None
        try:
            record, end = decode_first_json(rest, numbers="text")
        except NotJson as error:
            if not error.malformed or len(rest) > _MAX_STATE_RECORD:
                self.damage = f"the data after record {self._n_records:,} is not JSON: {error}"
            return None
        self._rest = rest[end:]
        self._n_records += 1
        return object() if record is None else record

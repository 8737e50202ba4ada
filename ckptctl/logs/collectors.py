r"""Take the lines of a program out of the records in which log collectors keep them.

A record is a line, or an element of a document with many: an object that holds the text of
the line, often with the time and the source, or a line behind the prefix of a container
runtime. The records that a program writes itself, such as its metrics, are none.

`Unwrapper` turns the bytes of a log into the lines that the program printed. A line whose
record states a time and a source becomes what `kubectl logs --timestamps --prefix` prints:

    [pod/train-0] 2026-11-20T03:12:44.123000Z step 12 loss 2.31

A log that no collector wrote passes through, as UTF-8. Line numbers stay those of the file:
the lines of one record are separated by `\r`, and a line in several records follows empty ones.

Source: Kubernetes 1.34 CRI logs (`stdout F`, parts `P`); Docker 28 `jsonfilelog` (parts of
16 KiB without a line end); Google Cloud Logging `LogEntry`; CloudWatch Logs `GetLogEvents` and
Insights; systemd 257 `journalctl -o json`; Loki 3 `logcli -o jsonl`; Datadog's log search;
fluent-bit, Vector, OpenTelemetry, Elasticsearch and Splunk.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from ckptctl.formats.bounded_json import NotJson, decode_json
from ckptctl.logs.clocks import time_of
from ckptctl.logs.log_lines import KEYS, split_launcher
from ckptctl.outside_numbers import moment, whole

MAX_RECORD = 4 << 20
_MAX_DEPTH = 4
_FULL_PART = 16_000
"""Docker divides a line after 16 KiB; a shorter record without a line end is a whole line."""

_LEVELS = ("DEBUG", "INFO", "NOTICE", "WARNING", "WARN", "ERROR", "CRITICAL", "FATAL")

_CRI = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT\S{8,40}) std(?:out|err) (?P<part>[FP])(?::\S*)?(?: |$)(?P<text>.*)",
    re.DOTALL,
)
_KUBECTL = re.compile(
    r"(?:\[pod/(?P<source>[\w./-]{1,300})\] )?"
    r"(?:(?P<time>\d{4}-\d\d-\d\dT\S{8,40}) )?(?P<text>.*)",
    re.DOTALL,
)
_CLOCK = re.compile(r"\W{0,3}\d{2,4}[-/]\d\d\b.{0,20}?\d\d:\d\d:\d\d")
MAX_DOCUMENT = 64 << 20


class LogRecord(NamedTuple):
    """One record: its text, and its time, source and level where it states them.

    `in_order` is false for a record that may belong to a log with the newest line first.
    """

    text: str
    time: float | None = None
    source: str = ""
    level: str = ""
    whole: bool = True
    in_order: bool = True


def printed(record: LogRecord) -> str:
    """The line as `kubectl logs --timestamps --prefix` prints one."""
    text = record.text.rstrip("\r\n").replace("\r\n", "\n").replace("\n", "\r")
    if not (text.startswith("{") or _CLOCK.match(text)):
        begin = split_launcher(text).begin  # the rank stays in front of the time
        time = None if record.time is None else moment(record.time)
        stamp = "" if time is None else f"{time:%Y-%m-%dT%H:%M:%S.%f}Z"
        about = "".join(f"{part} " for part in (stamp, record.level) if part)
        text = f"{text[:begin]}{about}{text[begin:]}"
    return f"[pod/{record.source}] {text}" if record.source else text


def record_in(line: str, depth: int = _MAX_DEPTH) -> LogRecord | None:
    """The record that a line is; None for the line of a program."""
    found: LogRecord | None = None
    text = line.strip().rstrip(",")
    if text.startswith("{") and text.endswith("}"):
        try:
            document = decode_json(text, max_bytes=MAX_RECORD, numbers="text")
        except NotJson:
            return None
        if isinstance(document, dict):
            found = _record_of(document)
    elif match := _CRI.match(line):
        found = LogRecord(match["text"], time_of(match["time"]), whole=match["part"] == "F")
    elif match := _KUBECTL.match(line):
        is_ranked = match["time"] and split_launcher(match["text"]).begin
        if match["source"] or is_ranked:
            source = (match["source"] or "").replace("/", "-")
            found = LogRecord(match["text"], time_of(match["time"]), source)
    if found is None or depth == 0:
        return found
    # Collectors read the files of others: docker's record in one of fluent-bit.
    inner = record_in(found.text.rstrip("\r\n"), depth - 1)
    if inner is None:
        return found
    return inner._replace(
        time=inner.time or found.time,
        source=inner.source or found.source,
        level=inner.level or found.level,
        in_order=found.in_order,
    )


def _record_of(
    document: Mapping[str, object], *, inside: bool = False, depth: int = _MAX_DEPTH
) -> LogRecord | None:
    """The record in an object; `inside` another one, where any key of a line is believed."""
    text = _text_of(document, inside=inside)
    if text is None and depth:
        for key in KEYS["envelopes"]:
            below = document.get(key)
            if not isinstance(below, dict):
                continue
            record = _record_of(below, inside=True, depth=depth - 1)
            if record is None and key == "jsonPayload":
                record = LogRecord(json.dumps(below), in_order=False)
            if record is not None:
                time = _first_time(document) or record.time
                source = record.source or _source_of(document)
                return record._replace(time=time, source=source)
    if text is None:
        return None
    if document.get("SYSLOG_IDENTIFIER") == "kernel":
        text = f"kernel: {text}"
    return LogRecord(
        text,
        _first_time(document),
        _source_of(document),
        _level_of(document),
        whole="log" not in document or len(text) < _FULL_PART or text.endswith("\n"),
        in_order=False,
    )


def _text_of(document: Mapping[str, object], *, inside: bool) -> str | None:
    for key in KEYS["line"]:
        text = document.get(key)
        if key == "MESSAGE" and isinstance(text, list):  # journald: it is not UTF-8
            codes = (whole(code, 255) for code in text if isinstance(code, str))
            text = bytes(code for code in codes if code is not None).decode("utf-8", "replace")
        if isinstance(text, str):
            return text
    if document.keys() & KEYS["program"]:
        return None
    others = document.keys() - {*KEYS["text"], *KEYS["time"], *KEYS["level"]}
    if not (inside or document.keys() & KEYS["collector"] or not others):
        return None
    return next((t for key in KEYS["text"] if isinstance(t := document.get(key), str)), None)


def _level_of(document: Mapping[str, object]) -> str:
    if document.keys() & {*KEYS["collector"], *KEYS["line"]}:
        return ""  # what a collector derives from the stream
    levels = (str(document.get(key, "")).upper() for key in KEYS["level"])
    return next((level for level in levels if level in _LEVELS), "")


def _source_of(document: Mapping[str, object], depth: int = 2) -> str:
    for key in KEYS["source"]:
        name = document.get(key)
        if isinstance(name, str) and re.fullmatch(r"[\w./-]{1,200}", name):
            return name.replace("/", "-")
    inside = (document.get(key) for key in KEYS["holds_source"] if depth)
    found = (_source_of(value, depth - 1) for value in inside if isinstance(value, dict))
    return next(filter(None, found), "")


def _first_time(document: Mapping[str, object]) -> float | None:
    times = (time_of(document.get(key)) for key in KEYS["time"])
    return next(filter(None, times), None)


def _records_in(value: object, depth: int = _MAX_DEPTH) -> Iterator[LogRecord]:
    if isinstance(value, list):
        for element in value:
            if isinstance(element, list) and len(element) > 1 and isinstance(element[1], str):
                yield LogRecord(element[1], time_of(element[0]))
            elif depth:
                yield from _records_in(element, depth - 1)
    elif isinstance(value, dict):
        record = _record_of(value)
        if record is not None:
            yield record
        elif depth:
            for key in KEYS["lists"]:
                yield from _records_in(value.get(key), depth - 1)


def records_of(document: bytes) -> list[LogRecord]:
    """The records in a document, or in documents of one line each, the oldest first."""
    records: list[LogRecord] = []
    try:
        records += _records_in(decode_json(document, max_bytes=MAX_DOCUMENT, numbers="text"))
    except NotJson:
        for line in document.splitlines():
            with suppress(NotJson):
                records += _records_in(decode_json(line, max_bytes=MAX_RECORD, numbers="text"))
    if records and (records[0].time or 0.0) > (records[-1].time or 0.0):
        records.reverse()
    return records


_TRIED_BYTES = 4096
_TRIED_LINES = 50
"""A log whose first lines are no records of a collector is read as it is."""
_HEAD_BYTES = 64
_DOCUMENT = re.compile(r"\A\s*(?:\[\s*\{|\[\s*$|\{\s*\n|\{\s*\"\w+\"\s*:\s*[\[{])")
_DOCUMENT_KEYS = re.compile(
    r'"(?:textPayload|jsonPayload|insertId|ingestionTime|eventId|@message|__CURSOR|logEvents'
    r'|_source|tsNs|_raw|streams|labels|attributes)"\s*:'
)


class Unwrapper:
    """Turns the bytes of one log, fed in pieces of any length, into those of its lines."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_tried = False
        self._n_tried = 0
        self._is_plain = False
        self._document: bytearray | None = None
        self._part = ""
        self._order = _OrderDetector()

    def feed(self, data: bytes, *, is_last: bool = False) -> bytes:
        """The lines that these bytes complete."""
        data, self._rest = self._rest + data, b""
        if self._is_plain:
            return data
        if not self._is_tried:
            data = data.removeprefix(codecs.BOM_UTF8)
            self._try(data, is_last=is_last)
            if not self._is_tried:
                self._rest = data
                return b""
        if self._document is not None:
            self._document += data
            if len(self._document) <= MAX_DOCUMENT:
                return b""
            data, self._document, self._is_plain = bytes(self._document), None, True
            return data
        whole, end, self._rest = data.rpartition(b"\n")
        if len(self._rest) > MAX_RECORD:
            whole, end, self._rest = whole + end + self._rest, b"", b""
        return self._lines(whole.split(b"\n"), end) if whole or end else b""

    def end(self) -> bytes:
        """The lines that waited for more bytes."""
        out = b"" if self._is_tried else self.feed(b"", is_last=True)
        if self._document is not None:
            document = bytes(self._document)
            lines = (_utf8(printed(record)) + b"\n" for record in records_of(document))
            return out + (b"".join(lines) or document)
        rest, self._rest = self._rest, b""
        if rest:
            out += rest if self._is_plain else self._unwrapped(rest)
        return out + self._order.end() + _utf8(self._part)

    def _try(self, data: bytes, *, is_last: bool) -> None:
        """Find out, once there are enough bytes, whether the log is a document of records."""
        if len(data) < _HEAD_BYTES and not is_last:
            return
        head = data[:MAX_RECORD].decode("utf-8", "replace")
        may_be_document = _DOCUMENT.match(head) is not None
        self._is_tried = not may_be_document or len(data) >= _TRIED_BYTES or is_last
        if may_be_document and _DOCUMENT_KEYS.search(head):
            self._is_tried = True
            first, line_end, _ = head.partition("\n")
            if not line_end or record_in(first) is None:
                self._document = bytearray()

    def _lines(self, lines: list[bytes], end: bytes) -> bytes:
        out = bytearray()
        for at, line in enumerate(lines):
            out += self._unwrapped(line + (b"\n" if at + 1 < len(lines) else end))
            if self._is_plain:
                out += b"\n".join(lines[at + 1 :]) + (end if at + 1 < len(lines) else b"")
                break
        return bytes(out)

    def _unwrapped(self, line: bytes) -> bytes:
        body = line.rstrip(b"\r\n")
        if not body.strip():
            return self._order.add(line, None)
        record = record_in(body.decode("utf-8", "replace"))
        if record is None:
            self._n_tried += self._n_tried < _TRIED_LINES
            # A log with one record of a collector has others.
            self._is_plain = self._n_tried == _TRIED_LINES
            return self._order.add(line, None) + (self._order.end() if self._is_plain else b"")
        self._n_tried = _TRIED_LINES + 1
        end = line[len(body) :]
        if not record.whole:
            self._part += record.text
            if len(self._part) < MAX_RECORD:
                return self._order.add(end, None)
            record, self._part = record._replace(text=""), self._part
        record, self._part = record._replace(text=self._part + record.text), ""
        time = None if record.in_order else record.time
        return self._order.add(_utf8(printed(record)) + end, time)


class _OrderDetector:
    """Holds back lines until their times show whether the log has its newest line first."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._n_bytes = 0
        self._first: float | None = None
        self._descends: bool | None = None

    def add(self, line: bytes, time: float | None) -> bytes:
        """The lines whose place is known now that `line` follows."""
        if self._descends is None and self._first and time and time != self._first:
            self._descends = time < self._first
        self._first = self._first or time
        if self._descends is False or not self._first:
            return self.end() + line
        self._held.append(line)
        self._n_bytes += len(line)
        if self._n_bytes > MAX_DOCUMENT:
            self._descends = False
        return self.end() if self._descends is False else b""

    def end(self) -> bytes:
        """The lines that were held back, in the order of time."""
        held, self._held, self._n_bytes = self._held, [], 0
        if self._descends and held:
            if not held[-1].endswith(b"\n"):
                held[-1] += b"\n"
            held.reverse()
        return b"".join(held)


def unwrapped(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The pieces of a log, with the lines of the program instead of a collector's records."""
    unwrapper = Unwrapper()
    for piece in pieces:
        if data := unwrapper.feed(piece):
            yield data
    if data := unwrapper.end():
        yield data


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")

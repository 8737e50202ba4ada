"""Recognize the records in which log collectors keep the lines of a program.

A record is a line, or an element of a document with many: an object that holds the text of
the line, often with the time and the source, or a line behind the prefix of a container
runtime. The records that a program writes itself, such as its metrics, are none.

Source: Kubernetes 1.34 CRI logs (`stdout F`, parts `P`); Docker 28 `jsonfilelog` (parts of
16 KiB without a line end); Google Cloud Logging `LogEntry`; CloudWatch Logs `GetLogEvents` and
Insights; systemd 257 `journalctl -o json`; Loki 3 `logcli -o jsonl`; Datadog's log search;
fluent-bit, Vector, OpenTelemetry, Elasticsearch and Splunk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from ckptctl.formats.bounded_json import NotJson, decode_json
from ckptctl.outside_numbers import finite, moment, whole

MAX_RECORD = 4 << 20
_MAX_DEPTH = 4
_FULL_PART = 16_000
"""Docker divides a line after 16 KiB; a shorter record without a line end is a whole line."""

_OF_ONE = ("textPayload", "MESSAGE", "@message", "_raw", "LogEntry", "LogMessage")
_OF_MANY = ("log", "line", "message", "msg", "text", "body")
"""Keys of the line. Programs that log in JSON use those of `_OF_MANY`, too."""
_COLLECTORS = frozenset(
    (
        *(
            "stream",
            "kubernetes",
            "docker",
            "container_name",
            "container_id",
            "source_type",
            "tags",
        ),
        *(
            "insertId",
            "logName",
            "ingestionTime",
            "eventId",
            "logStreamName",
            "logStream",
            "labels",
        ),
        *("ddsource", "ddtags", "service", "fields", "resource", "_index", "@version", "attrs"),
    )
)
"""Keys that a collector adds to the line."""
_PROGRAMS = frozenset(
    (
        *("exc_info", "stack_trace", "traceback", "error", "exception", "extraInfo", "event"),
        *("loss", "step", "iteration", "iter", "global_step", "epoch", "rank"),
    )
)
"""Keys that a program adds to its message: its record is kept whole."""
_ENVELOPES = ("jsonPayload", "_source", "result", "attributes", "content", "json")
_LISTS = (
    *("events", "logEvents", "entries", "data", "result", "results", "hits", "logs"),
    "streams",
)
_LEVELS = ("level", "severity", "lvl", "severityText")
_LOUDNESS = frozenset(("DEBUG", "INFO", "NOTICE", "WARNING", "WARN", "ERROR", "CRITICAL", "FATAL"))
_TIMES = (
    *("timestamp", "@timestamp", "time", "_time", "ts", "date", "__REALTIME_TIMESTAMP", "asctime"),
    *("TimeGenerated", "receiveTimestamp", "tsNs"),
)
_SOURCES = (
    *("pod_name", "pod", "PodName", "logStreamName", "logStream", "@logStream", "_HOSTNAME"),
    *("hostname", "host", "container_name"),
)
_HOLD_SOURCES = ("kubernetes", "resource", "labels", "fields", "stream")

_CRI = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT\S{8,40}) std(?:out|err) (?P<part>[FP])(?::\S*)?(?: |$)(?P<text>.*)",
    re.DOTALL,
)
RANK = r"\s?(?:\[(?:rank|default|Rank |rank )\d{1,5}\](?::|\s) ?|\[[\w.\-]+:\d{1,5}\]:? )"
"""What a launcher writes before a line; it stays in front of the time. The form of `srun --label`
(`12: `) is not among them, because a step can look like it."""
_KUBECTL = re.compile(
    r"(?:\[pod/(?P<source>[\w./-]{1,300})\] )?"
    rf"(?:(?P<time>\d{{4}}-\d\d-\d\dT\S{{8,40}}) (?P<rank>{RANK})?)?(?P<text>.*)",
    re.DOTALL,
)
_ISO = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,9})\d*)?(?: ?(?:UTC|Z)|([+-]\d\d:?\d\d))?"
)
_CLOCK = re.compile(r"\W{0,3}\d{2,4}[-/]\d\d\b.{0,20}?\d\d:\d\d:\d\d")
MAX_DOCUMENT = 64 << 20


class LogRecord(NamedTuple):
    """One record: its text, and as text its time, source and level where it states them.

    `in_order` is false for a record that may belong to a log with the newest line first.
    """

    text: str
    time: str = ""
    source: str = ""
    level: str = ""
    whole: bool = True
    in_order: bool = True


def printed(record: LogRecord) -> str:
    """The line as `kubectl logs --timestamps --prefix` prints one."""
    text = record.text.rstrip("\r\n").replace("\r\n", "\n").replace("\n", "\r")
    if not (text.startswith("{") or _CLOCK.match(text)):
        rank = re.match(RANK, text)
        prefix = "" if rank is None else rank[0]
        about = "".join(f"{each} " for each in (record.time, record.level) if each)
        text = f"{prefix}{about}{text[len(prefix) :]}"
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
        found = LogRecord(match["text"], _time_of(match["time"]), whole=match["part"] == "F")
    elif (match := _KUBECTL.match(line)) and (match["source"] or match["rank"]):
        text = (match["rank"] or "") + match["text"]
        source = (match["source"] or "").replace("/", "-")
        found = LogRecord(text, _time_of(match["time"] or ""), source)
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
        for key in _ENVELOPES:
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
    for key in _OF_ONE:
        text = document.get(key)
        if key == "MESSAGE" and isinstance(text, list):  # journald: it is not UTF-8
            codes = (whole(code, 255) for code in text if isinstance(code, str))
            text = bytes(code for code in codes if code is not None).decode("utf-8", "replace")
        if isinstance(text, str):
            return text
    if _PROGRAMS & document.keys():
        return None
    others = document.keys() - {*_OF_MANY, *_TIMES, *_LEVELS}
    if not (inside or _COLLECTORS & document.keys() or not others):
        return None
    return next((t for key in _OF_MANY if isinstance(t := document.get(key), str)), None)


def _level_of(document: Mapping[str, object]) -> str:
    if _COLLECTORS & document.keys() or not document.keys().isdisjoint(_OF_ONE):
        return ""  # what a collector derives from the stream
    levels = (str(document.get(key, "")).upper() for key in _LEVELS)
    return next((level for level in levels if level in _LOUDNESS), "")


def _source_of(document: Mapping[str, object], depth: int = 2) -> str:
    for key in _SOURCES:
        name = document.get(key)
        if isinstance(name, str) and re.fullmatch(r"[\w./-]{1,200}", name):
            return name.replace("/", "-")
    inside = (document.get(key) for key in _HOLD_SOURCES if depth)
    found = (_source_of(each, depth - 1) for each in inside if isinstance(each, dict))
    return next(filter(None, found), "")


def _first_time(document: Mapping[str, object]) -> str:
    values = (document.get(key) for key in _TIMES)
    times = (_time_of(value) for value in values if isinstance(value, str))
    return next(filter(None, times), "")


def _time_of(value: str) -> str:
    """A time as RFC 3339; empty for what is none."""
    if re.fullmatch(r"\d{9,20}(?:\.\d{1,9})?", value):
        seconds = finite(value) or 0.0
        while seconds >= 1e11:  # milliseconds, microseconds or nanoseconds
            seconds /= 1e3
        time = moment(seconds)
        return "" if time is None else f"{time:%Y-%m-%dT%H:%M:%S.%f}Z"
    match = _ISO.fullmatch(value)
    if match is None:
        return ""
    day, clock, fraction, offset = match.groups()
    return f"{day}T{clock}.{fraction or '0'}{offset or 'Z'}"


def _records_in(value: object, depth: int = _MAX_DEPTH) -> Iterator[LogRecord]:
    if isinstance(value, list):
        for each in value:
            if isinstance(each, list) and len(each) > 1 and isinstance(each[1], str):
                yield LogRecord(each[1], _time_of(str(each[0])))
            elif depth:
                yield from _records_in(each, depth - 1)
    elif isinstance(value, dict):
        record = _record_of(value)
        if record is not None:
            yield record
        elif depth:
            below = (value.get(key) for key in (*_LISTS, "values"))
            for each in below:
                if isinstance(each, (list, dict)):
                    yield from _records_in(each, depth - 1)


def records_of(document: bytes) -> list[LogRecord]:
    """The records in a document, or in documents of one line each, the oldest first."""
    records: list[LogRecord] = []
    try:
        records += _records_in(decode_json(document, max_bytes=MAX_DOCUMENT, numbers="text"))
    except NotJson:
        for line in document.splitlines():
            with suppress(NotJson):
                records += _records_in(decode_json(line, max_bytes=MAX_RECORD, numbers="text"))
    if records and records[0].time > records[-1].time:
        records.reverse()
    return records

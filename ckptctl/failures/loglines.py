"""Split a log line into host, rank, time, level and message.

Removes timestamps, rank prefixes, host names, logger names and levels from the front, in
any order. `matching` interprets the message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from ckptctl.formats.bounded_json import NotJson, decode_json
from ckptctl.outside_numbers import clamped, finite, moment_of, whole
from ckptctl.storage.logs import MAX_MATCHED

if TYPE_CHECKING:
    from typing import TypeGuard

DEBUG, INFO, WARNING, ERROR = 10, 20, 30, 40
_MAX_PREFIXES = 10
_MAX_PREFIX = 1000
MAX_RANK = (1 << 20) - 1
"""A larger number is no rank."""
_YEARLESS_AHEAD = timedelta(days=2)


@dataclass(frozen=True, slots=True)
class LogLine:
    """The parts of a line. `level` is None if the line has none.

    `at_s` is seconds since 1970 by the clock of the line; a time without a zone is taken as
    UTC, one without a year as the latest such day. `kernel`: the line comes from a kernel
    log. `error_file`: from a file that torch's `@record` wrote, or the end of a traceback within
    one line; `frame` is then the file of its innermost frame and the source of it.
    """

    message: str
    at_s: float | None = None
    host: str | None = None
    rank: int | None = None
    device: str | None = None
    level: int | None = None
    kernel: bool = False
    error_file: bool = False
    frame: tuple[str, str] = ("", "")


_LEVELS: Mapping[str, int] = {
    **dict.fromkeys(("TRACE", "DEBUG", "D"), DEBUG),
    **dict.fromkeys(("INFO", "NOTICE", "I"), INFO),
    **dict.fromkeys(("WARN", "WARNING", "W"), WARNING),
    **dict.fromkeys(
        ("ERROR", "ERR", "CRITICAL", "FATAL", "EXCEPTION", "E", "F", "C", "CRIT"), ERROR
    ),
}
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = "(?P<month>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_DAYS = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_CLOCK = r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)(?:[.,](?P<f>\d{1,9}))?"
_LEVEL_WORDS = "DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|CRITICAL|FATAL|EXCEPTION"
_LOUD = "WARN|ERROR|INFO|TRACE|CALL|VERSION"
_PROGRAMS = (
    "kernel|slurm\\w*|systemd(?:-\\w+)?|nvidia-\\w+|nv-\\w+|dcgm\\w*|kubelet|containerd|dockerd|"
    "mcelog|rasdaemon|smartd|multipathd|lustre\\w*|fabricmanager"
)
_OF_A_TRACEBACK = r"(?=Traceback |\s+\S|(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)\b)"
# Each pattern removes one prefix; its groups name the parts.
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        # 2026-11-20T03:12:44.123Z, [2026-11-20 03:12:44,123], 2026/11/20 03:12:44
        rf"\s{{0,4}}(?:{_DAYS},? )?"
        r"[\[(]?(?P<y>\d{4})[-/](?P<mo>\d\d)[-/](?P<d>\d\d)[T _-]" + _CLOCK + r"(?P<z>Z| ?UTC|"
        r"[+-]\d\d:?\d\d)?[\])]?(?:\s*[|,:-]+\s+|:|\s+|$)",
        # 11/20/2026 03:12:44 of transformers' examples
        r"[\[(]?(?P<mo>\d\d)/(?P<d>\d\d)/(?P<y>\d{4}),? " + _CLOCK + r"[\])]?(?:\s*[|,:-]+\s+|\s+)",
        # 2026-Nov-20 03:12:44.123456 900:901 [3] of Neuron
        r"(?P<y>\d{4})-" + _MONTH + r"-(?P<d>\d\d) " + _CLOCK + r" \d+:\d+ +"
        r"(?:\[(?P<nccl>\d+)\] )?",
        # [2026-11-20 03:12:44,123 E 900 901] of Ray's processes
        r"\[(?P<y>\d{4})-(?P<mo>\d\d)-(?P<d>\d\d) " + _CLOCK + r" (?P<level>[DIWEC]) \d+ \d+\] ",
        # Nov 20 03:12:44 node017 kernel: and dmesg -T: [Fri Nov 20 03:12:44 2026]
        r"\[[A-Z][a-z]{2} " + _MONTH + r" +(?P<d>\d+) " + _CLOCK + r" (?P<y>\d{4})\] (?P<kernel>)",
        _MONTH + r" +(?P<d>\d+) " + _CLOCK + r" (?P<host>[\w.-]+) (?=[\w./-]+(?:\[\d+\])?:)",
        # Fri Nov 20 03:12:44 2026 of `date` and ctime, Nov 20 03:12:44
        rf"{_DAYS} " + _MONTH + r" +(?P<d>\d+) " + _CLOCK + r"(?: [A-Z]{3,4})? (?P<y>\d{4})[ :,-]+",
        rf"(?:{_DAYS} )?" + _MONTH + r" +(?P<d>\d+) " + _CLOCK + r"[ :,|-]+",
        # torchtitan names itself between the rank and the time.
        r"\[titan\] ",
        rf"(?P<host>[A-Za-z0-9][\w.-]*) (?=(?:{_PROGRAMS})(?:\[\d+\])?:)",
        r"(?P<kernel>kernel): ",
        r"(?:kern|daemon|user)\s*:(?P<syslog>\w+)\s*: ",
        r"<\d+>",
        r"\[\s*\d+\.\d{1,9}\](?:\[\s*[TC]?\d+\])? (?P<kernel>)",
        # [rank3]:[E1120 03:12:44.123456 ProcessGroupNCCL.cpp:632] and absl's E1120 ... file:1]
        r"\[?(?P<level>[IWEF])(?P<mo>\d\d)(?P<d>\d\d) " + _CLOCK + r" +(?:\d+ +)?"
        r"[\w./<>-]+:\d+\]\s*",
        # Ranks: torchrun, srun -l, MPI, Horovod, Ray
        r"\[(?:rank|default|worker|local_rank|global_rank)[ _:=]?(?P<rank>\d+)\]:? ?",
        r"\[(?P<host>[A-Za-z][\w.-]*):(?P<rank>\d+)\]:?\s+",
        r"\[\d+,(?P<rank>\d+)\]<std(?:err|out)>: ?",
        r"\[(?P<rank>\d+)\](?:<std(?:err|out)>)?: ?",
        r"\s{0,4}(?P<rank>\d{1,6}): (?=\D)",
        r"[Rr]ank (?P<rank>\d+)\s*[:|-]\s+",
        r"\((?:raylet|(?:\w+ )?pid=\d+)(?:, ip=(?P<host>[\d.]+))?\) ?",
        # kubectl logs --prefix, docker compose
        r"\[?pod/(?P<pod>[\w.-]+)(?:/[\w.-]+)?\]?:? +",
        # node017:1234:1300 [3] NCCL WARN, with or without file:line
        r"(?P<host>[\w.-]+):\d+:\d+ \[(?P<nccl>-?\d+)\] (?=.{0,80}\bNCCL )",
        # CCOM is Neuron's.
        r"(?:[\w./-]+\.(?:cc|cpp|cu|h):\d+ )?(?:NCCL|CCOM) (?P<loud>" + _LOUD + r")\b ?",
        # pdsh and clush: node017: text
        r"(?=[a-z.-]{1,200}\d)(?P<host>[a-z][a-z0-9.-]{1,252}): (?=\S)",
        # levels and loggers; the name of a logger before a traceback, on each line of it
        rf"[\[(<]?(?P<level>{_LEVEL_WORDS})[\])>]?[ :|-]{{1,4}}[a-z_][\w.]*: " + _OF_A_TRACEBACK,
        rf"(?:\| )?[\[(<]?(?P<level>{_LEVEL_WORDS})[\])>]?(?=[\s:|\-\]])(?:\s*[|:\]-]+)*\s*",
        r"(?P<logger>[A-Za-z_][\w.]*):(?=[A-Za-z_][\w. ]*: ?|\S)(?<=root:)",
        r"[\w.]+ (?:- |\| )(?=[\[(]?(?:" + _LEVEL_WORDS + r")\b)",
        r"\[?[\w./<>-]+\.(?:py|cc|cpp|cu|go|rs|c):\d+(?::[\w<>]+)?\]?(?::\d+)?(?:\s*[:|-])?\s+",
        r"\[(?:[a-z_]\w*\.)+\w+\]\s*",
        r"(?:- )+",
    )
)
# A line of an object that is printed over several lines, as torch's error handler prints one.
_MEMBER = re.compile(
    r'\s{0,40}"(?:message|msg|error|exception|exc_info|py_callstack|traceback|log|textPayload)"'
    r'\s{0,4}:\s{0,4}"(?P<text>[^{"].*?)"?,?'
)
_LOGFMT = re.compile(
    r"(?:^|\s)(?P<key>level|lvl|msg|message|ts|time|host|error|err)="
    r'(?P<value>"(?:[^"\\]|\\.)*(?:"|$)|\S+)'
)


def take_apart(raw: str) -> LogLine:
    """The line without its prefixes, and the values in them."""
    text = raw.rstrip()
    stripped = text.lstrip()
    if stripped.startswith("{"):
        found = _from_json(stripped)
        if found is not None:
            return found
    elif member := _MEMBER.fullmatch(text, 0, MAX_MATCHED) if stripped.startswith('"') else None:
        text = member["text"].replace('\\"', '"')
    found = LogLine(text)
    for _ in range(_MAX_PREFIXES):
        for prefix in _PREFIXES:
            match = prefix.match(text, 0, _MAX_PREFIX)
            if match and match.end() > 0:
                found = _learned(found, match)
                text = text[match.end() :]
                break
        else:
            break
    text = _indented(raw.rstrip(), text)
    # The kernel writes `msg=14` and means a number.
    if ' msg="' in f" {text}" or " level=" in f" {text}" or " lvl=" in f" {text}":
        return _from_logfmt(replace(found, message=text), text)
    return replace(found, message=text)


def _indented(raw: str, text: str) -> str:
    """The text with its indentation, which tells the lines of a traceback apart from its end."""
    before = raw[: len(raw) - len(text)] if raw.endswith(text) else ""
    n_spaces = len(before) - len(before.rstrip())
    is_source = n_spaces >= 5 and _EXCEPTION.match(text) is None
    if before.strip() and (is_source or (n_spaces >= 3 and text.startswith('File "'))):
        return " " * (n_spaces - 1) + text
    return text


_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt|Warning)\b")
FRAME = re.compile(r'\s{1,40}File "([^"]{1,400})", line \d{1,9}, in ')
_HEAD = "Traceback (most recent call last):"
_LINE_END = re.compile(r"\r?\n|\\{1,8}n")


def split_traceback(line: LogLine) -> tuple[LogLine, ...]:
    """The first line of a message that contains a traceback, and each exception below it.

    Structured logs, services and `repr` put a traceback into one line; its line ends may be
    escaped, also more than once. Returns only the line itself if it contains none.
    """
    _, _, after = line.message.partition(_HEAD)
    line_end = _LINE_END.match(after)
    if line_end is None or not after[line_end.end() :].strip():
        return (line,)
    first, *texts = line.message.split(line_end[0])
    exceptions, frame = list[LogLine](), ("", "")
    for text in texts:
        if opened := FRAME.match(text):
            frame = (opened[1], "")
        elif text[:1].isspace():
            frame = (frame[0], frame[1] or text.strip())
        elif text.strip() and not text.startswith(_HEAD):
            exceptions.append(replace(line, message=text, error_file=True, frame=frame))
    return (replace(line, message=first.removesuffix(_HEAD)), *exceptions)


def clock_of(raw: str) -> float | None:
    """The time of the line, if it has one."""
    return take_apart(raw).at_s


def _learned(found: LogLine, match: re.Match[str]) -> LogLine:
    given = match.groupdict()
    level = found.level
    if given.get("level"):
        level = _LEVELS[given["level"]]
    if given.get("loud"):
        # NCCL logs errors as WARN.
        level = ERROR if given["loud"] in ("WARN", "ERROR") else INFO
    rank = given.get("rank")
    nccl = given.get("nccl")
    at_s = found.at_s
    if at_s is None and given.get("h"):
        at_s = _seconds(given)
    return replace(
        found,
        at_s=at_s,
        # In a kernel log, the text before a colon is a driver: `nvidia-nvswitch3: SXid`.
        host=(None if found.kernel else given.get("host")) or found.host or given.get("pod"),
        rank=found.rank if (number := whole(rank, MAX_RANK)) is None else number,
        device=f"GPU {nccl}" if whole(nccl, MAX_RANK) is not None else found.device,
        level=level,
        kernel=found.kernel or given.get("kernel") is not None,
    )


def _seconds(given: Mapping[str, str | None]) -> float | None:
    month = given.get("mo") or str(_MONTHS.index((given.get("month") or "jan").lower()) + 1)
    fraction = finite(f"0.{given.get('f') or 0}") or 0.0
    year = whole(given.get("y"))
    now = datetime.now(UTC)
    month_day = clamped(month), clamped(given.get("d") or "1")
    h, m, s = (clamped(given.get(part) or "0") for part in "hms")
    moment = moment_of(year or now.year, *month_day, (h, m, s), _offset_s(given.get("z")))
    if year is None and (moment is None or moment > now + _YEARLESS_AHEAD):
        moment = moment_of(now.year - 1, *month_day, (h, m, s))
    return None if moment is None else moment.timestamp() + fraction


def _offset_s(zone: str | None) -> int:
    if not zone or zone.strip() in ("Z", "UTC"):
        return 0
    digits = zone[1:].replace(":", "")
    seconds = clamped(digits[:2]) * 3600 + clamped(digits[2:]) * 60
    return -seconds if zone[0] == "-" else seconds


_MAX_JSON = 16 << 20
_TEXT_KEYS = (
    *("message", "msg", "MESSAGE", "log", "text", "error", "exception", "event"),
    *("exc_info", "stack_trace", "traceback"),
)
_LEVEL_KEYS = ("level", "severity", "levelname", "lvl", "log_level")
_TIME_KEYS = (
    "__REALTIME_TIMESTAMP",
    "time",
    "timestamp",
    "ts",
    "@timestamp",
    "asctime",
    "datetime",
    "created",
)
_HOST_KEYS = ("host", "hostname", "node", "_HOSTNAME", "node_name", "nodeName")


def _from_json(text: str) -> LogLine | None:
    """A structured log line, or a whole error file; None for anything else."""
    try:
        document = decode_json(text, max_bytes=_MAX_JSON)
    except NotJson:
        return None
    if not isinstance(document, dict):
        return None
    inner = document.get("message")
    if isinstance(inner, dict) and ("message" in inner or "extraInfo" in inner):
        return _from_error_file(inner)
    texts = [str(document[key]) for key in _TEXT_KEYS if isinstance(document.get(key), str)]
    if not texts:
        return None
    # docker and containerd wrap the program's line, which has its own prefixes.
    wrapped = take_apart(texts[0]) if not texts[0].lstrip().startswith("{") else LogLine(texts[0])
    extra = " ".join(each for each in texts[1:] if each not in texts[0])
    level = _LEVELS.get(str(_first(document, _LEVEL_KEYS)).upper())
    rank = document.get("rank")
    host = _first(document, _HOST_KEYS)
    return replace(
        wrapped,
        message=f"{wrapped.message} {extra}".strip(),
        level=level if level is not None else wrapped.level,
        at_s=_time_of(_first(document, _TIME_KEYS)) or wrapped.at_s,
        host=str(host) if host else wrapped.host,
        rank=rank if _is_rank(rank) else wrapped.rank,
        kernel=document.get("SYSLOG_IDENTIFIER") == "kernel" or wrapped.kernel,
        error_file="exc_info" in document or wrapped.error_file,
    )


def _from_error_file(inner: Mapping[str, object]) -> LogLine:
    """Source: torch 2.13 `torch/distributed/elastic/multiprocessing/errors/error_handler.py`."""
    extra = inner.get("extraInfo")
    info = extra if isinstance(extra, dict) else {}
    rank = info.get("rank")
    return LogLine(
        str(inner.get("message", "")),
        at_s=_time_of(info.get("timestamp")),
        rank=rank if _is_rank(rank) else None,
        level=ERROR,
        error_file=True,
    )


def _is_rank(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_RANK


def _first(document: Mapping[str, object], keys: tuple[str, ...]) -> object:
    return next((document[key] for key in keys if key in document), None)


def _time_of(value: object) -> float | None:
    if isinstance(value, str) and value.replace(".", "", 1).isdecimal():
        value = finite(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # Some logs use milliseconds, microseconds or nanoseconds.
        for scale in (1, 1e3, 1e6, 1e9):
            if 1e9 * scale < value < 1e10 * scale:  # an integer may be too large to divide
                return value / scale
        return None
    return clock_of(value) if isinstance(value, str) and not value.startswith("{") else None


def _from_logfmt(found: LogLine, text: str) -> LogLine:
    given = {m["key"]: m["value"].strip('"') for m in _LOGFMT.finditer(text[:MAX_MATCHED])}
    message = given.get("msg") or given.get("message")
    if message is None:
        return found
    more = given.get("error") or given.get("err") or ""
    level = given.get("level") or given.get("lvl") or ""
    clock = given.get("ts") or given.get("time")
    return replace(
        found,
        message=f"{message} {more}".strip().replace('\\"', '"'),
        level=_LEVELS.get(level.upper(), found.level),
        at_s=(_time_of(clock) if clock else None) or found.at_s,
        host=given.get("host") or found.host,
    )

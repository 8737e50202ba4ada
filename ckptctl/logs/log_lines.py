r"""Split logs into lines, and lines into host, rank, time, level and message.

The one place for what surrounds the text of a program: line ends, terminal codes, the prefixes
of launchers, timestamps, levels and the names of loggers. Patterns take linear time and lines have
a bounded length, so a reader never reaches its `Deadline`, the net below them.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckptctl.formats.bounded_json import NotJson, decode_json
from ckptctl.logs.clocks import seconds_of, time_of
from ckptctl.logs.formats import TABLE
from ckptctl.outside_numbers import whole
from ckptctl.storage.logs import MAX_LINE, MAX_MATCHED

DEBUG, INFO, WARNING, ERROR = 10, 20, 30, 40
_MAX_PREFIXES = 10
_MAX_PREFIX = 1000
MAX_RANK = (1 << 20) - 1
"""A larger number is no rank."""

Line = tuple[int, str]
"""The number of a line, counted from 1, and its text."""

_CODES = re.compile(
    rb"\x00|\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\r\n]*(?:\x07|\x1b\\)?"
    rb"|[()][0-9A-Za-z]|[@-Z\\-_])"
)


class LineSplitter:
    r"""Splits a stream of bytes into numbered lines without terminal codes and NUL bytes.

    Texts that a progress bar overwrote (`\r`) share one line number, and the prefix that a
    launcher wrote before the first of them. A line is cut at `MAX_LINE`.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.number = 1
        """That of the next line, or of the one that has begun."""
        self._prefix: str | None = None
        """That of the line that has begun; None where none has."""

    def take(self, data: bytes) -> bytes:
        """The bytes of the lines that are complete now; pass them to `lines`, once."""
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not cut:
            self._rest = (self._rest + data)[:MAX_LINE]
            return b""
        complete = self._rest + data[:cut]
        self._rest = data[cut:][:MAX_LINE]
        return _clean(complete)

    def end(self) -> bytes:
        """The bytes of the last line, if no line end follows it."""
        rest, self._rest = self._rest, b""
        return _clean(rest)

    def lines(self, data: bytes) -> list[Line]:
        """The lines in the bytes that `take` or `end` returned."""
        first, self.number = self.number, self.number + data.count(b"\n")
        if b"\r" not in data and not self._prefix:
            self._prefix = None if first < self.number else self._prefix
            return _numbered(data, first)
        found: list[Line] = []
        for number, text in _numbered(data, first):
            parts = text.split("\r")
            for part in parts:
                if not part and (len(parts) > 1 or self._prefix is not None):
                    continue
                if self._prefix is None:
                    self._prefix = part[: split_launcher(part).begin]
                text = part if part.startswith(self._prefix) else self._prefix + part
                found.append((number, text[:MAX_LINE]))
            if number < self.number:
                self._prefix = None
        return found


def _numbered(data: bytes, first: int) -> list[Line]:
    """The lines of some bytes, of which the first one has this number."""
    texts = data.decode("utf-8", "replace").split("\n")
    if not texts[-1]:
        texts.pop()
    if len(data) > MAX_LINE and b"\r" not in data:
        texts = [text[:MAX_LINE] for text in texts]
    return [*enumerate(texts, first)]


def _clean(data: bytes) -> bytes:
    return _CODES.sub(b"", data) if b"\x1b" in data or b"\x00" in data else data


# kubectl logs --prefix; then torchrun, srun --label, MPI, Horovod, NeMo; then Ray.
_LAUNCHER = re.compile(
    r"(?:\[?pod/(?P<pod>[\w.-]{1,300})(?:/[\w.-]{1,300})?\]?:? )?"
    r"(?:\s?\[(?:rank|default|worker|local_rank|global_rank|Rank)[ _:=]?(?P<named>\d{1,7})\]:? ?"
    r"|\s?\[(?P<host>[A-Za-z][\w.-]{0,252}):(?P<hosted>\d{1,7})\]:? "
    r"|\[\d{1,7},(?P<tagged>\d{1,7})\]<std(?:err|out)>: ?"
    r"|\[(?P<bare>\d{1,7})\](?:<std(?:err|out)>)?: ?"
    r"|\s{0,4}(?P<label>\d{1,6}): "
    r"|[Rr]ank (?P<word>\d{1,7})\s?[:|-]\s{1,9}"
    r"|\((?:\w{1,100} )?pid=(?P<pid>\d{1,9})(?:, ip=(?P<ip>[\w.:-]{1,64}))?\) ?)?"
)
# pdsh, clush and DeepSpeed: `node017: text`; docker compose: `trainer-1  | text`. What counts
# steps or names a metric is neither.
_HOSTED = re.compile(
    r"(?!(?:steps?|iter\w*|it|epochs?|ep|batch|updates?|rounds?|episode|loss|acc\w*|top|val\w*|test"
    r"|eval|lr|stage|phase|fold|layer|task|trial|line|[a-z])[_-]?\d)"
    r"(?:(?P<address>\d{1,3}(?:\.\d{1,3}){3}|(?=[a-z.-]{1,200}\d)[a-z][a-z0-9.-]{1,252}): (?=\S)"
    r"|(?P<service>[a-z][\w.-]{0,100}[_-]\d{1,5})\s{1,60}\| )"
)
_RECORD_RANK = re.compile(
    r'"(?:global_rank|rank|process_index|local_rank)"\s{0,4}:\s{0,4}"?(\d{1,7})(?=["\s,}])'
)
_RECORD_HOST = re.compile(
    r'"(?:host|hostname|node|_HOSTNAME|node_name|nodeName)"\s{0,4}:\s{0,4}"([\w.-]{1,253})"'
)
_MAX_PREFIX_PARTS = 3


class Launched(NamedTuple):
    """Where the text behind the prefixes of launchers begins, and who wrote it as far as known.

    `process` is the number of a process where its rank is not named.
    """

    begin: int
    pod: str | None = None
    host: str | None = None
    rank: int | None = None
    process: int | None = None

    @property
    def source(self) -> tuple[str | None, int | None]:
        """The pod or the host, and the rank or the process."""
        return self.pod or self.host, self.process if self.rank is None else self.rank


_UNKNOWN = Launched(0)
_FIRSTS = frozenset(" \t[pRr(")
_MAX_LABEL = 7
"""The digits of a label of srun, and the colon behind them."""
_MAX_HOST = 256


def split_launcher(text: str) -> Launched:
    """The prefixes that launchers wrote before a line; of a record, its fields of that kind.

    `pdsh` and `srun --label` may each add one: the outer names the host, the inner the rank.
    """
    if text[:1] == "{":
        return _record_source(text)
    found = _UNKNOWN
    for _ in range(_MAX_PREFIX_PARTS):
        part = _prefix_at(text, found.begin)
        if part is None:
            break
        found = Launched(
            part.begin,
            found.pod or part.pod,
            found.host or part.host,
            part.rank if found.rank is None else found.rank,
            found.process or part.process,
        )
    return found


def _prefix_at(text: str, begin: int) -> Launched | None:
    # Most lines begin with a letter, or with a date in which no colon is near.
    first = text[begin : begin + 1]
    is_digit = first.isdigit()
    if first in _FIRSTS or (is_digit and text.find(":", begin, begin + _MAX_LABEL) >= 0):
        match = _LAUNCHER.match(text, begin)
        if match is not None and match.end() > begin:
            pod, named, host, *others, pid, address = match.groups()
            digits = named or next(filter(None, others), None)
            rank = whole(digits, MAX_RANK)
            return Launched(match.end(), pod, host or address, rank, whole(pid))
    if is_digit or "a" <= first <= "z":
        match = _HOSTED.match(text, begin, begin + _MAX_HOST)
        if match is not None:
            return Launched(match.end(), host=match["address"] or match["service"])
    return None


def _record_source(text: str) -> Launched:
    rank, host = _RECORD_RANK.search(text), _RECORD_HOST.search(text)
    if rank is None and host is None:
        return _UNKNOWN
    return Launched(
        0, host=host[1] if host else None, rank=whole(rank[1], MAX_RANK) if rank else None
    )


_STAMP = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:?\d\d) "
    r"(?:(?:DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR|CRITICAL|FATAL) )?"
)


def stamp_end(text: str) -> int:
    """Where the text behind the time of a log collector begins; 0 without one."""
    match = _STAMP.match(text)
    return 0 if match is None else match.end()


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
_PREFIXES = tuple(map(re.compile, TABLE.prefixes))
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
        # torch's watchdog writes `[Rank 3]` itself, and the rules read the rank from it.
        launched = _UNKNOWN if text.startswith("[Rank ") else split_launcher(text)
        if launched.begin:
            found = _placed(found, launched)
            text = text[launched.begin :]
        for prefix in _PREFIXES:
            match = prefix.match(text, 0, _MAX_PREFIX)
            if match and match.end() > 0:
                found = _learned(found, match)
                text = text[match.end() :]
                break
        else:
            if not launched.begin:
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


def _placed(found: LogLine, launched: Launched) -> LogLine:
    # In a kernel log, the text before a colon is a driver: `nvidia-nvswitch3: SXid`.
    host = None if found.kernel else launched.host
    rank = found.rank if launched.rank is None else launched.rank
    return replace(found, host=host or found.host or launched.pod, rank=rank)


def _learned(found: LogLine, match: re.Match[str]) -> LogLine:
    given = match.groupdict()
    level = found.level
    if given.get("level"):
        level = _LEVELS[given["level"]]
    if given.get("loud"):
        # NCCL logs errors as WARN.
        level = ERROR if given["loud"] in ("WARN", "ERROR") else INFO
    nccl = given.get("nccl")
    at_s = found.at_s
    if at_s is None and given.get("h"):
        at_s = seconds_of(given)
    return replace(
        found,
        at_s=at_s,
        host=(None if found.kernel else given.get("host")) or found.host,
        device=f"GPU {nccl}" if whole(nccl, MAX_RANK) is not None else found.device,
        level=level,
        kernel=found.kernel or given.get("kernel") is not None,
    )


_MAX_JSON = 16 << 20


KEYS = {name: keys.split() for name, keys in TABLE.record_keys.items()}
"""Keys in the records of programs and of log collectors, by what they hold."""


def _time_of(value: object) -> float | None:
    at_s = time_of(value)
    if at_s is None and isinstance(value, str) and not value.startswith("{"):
        return clock_of(value)
    return at_s


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
    texts = [str(document[key]) for key in KEYS["message"] if isinstance(document.get(key), str)]
    if not texts:
        return None
    # docker and containerd wrap the program's line, which has its own prefixes.
    wrapped = take_apart(texts[0]) if not texts[0].lstrip().startswith("{") else LogLine(texts[0])
    extra = " ".join(more for more in texts[1:] if more not in texts[0])
    level = _LEVELS.get(str(_first(document, KEYS["level"])).upper())
    source = _record_source(text)
    return replace(
        wrapped,
        message=f"{wrapped.message} {extra}".strip(),
        level=level if level is not None else wrapped.level,
        at_s=_time_of(_first(document, KEYS["time"])) or wrapped.at_s,
        host=source.host or wrapped.host,
        rank=wrapped.rank if source.rank is None else source.rank,
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
        rank=whole(str(rank), MAX_RANK),
        level=ERROR,
        error_file=True,
    )


def _first(document: Mapping[str, object], keys: Sequence[str]) -> object:
    return next((document[key] for key in keys if key in document), None)


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


BASE_S = 20.0
"""Seconds of the processor that any input may take."""
BYTES_PER_S = 100_000
"""More bytes add time at this rate; the shortest rows are read ten times as fast."""


class Deadline:
    """When a reader of outside data has to stop; its result states what was not read.

    The budget is processor time of this thread, `base_s` and a second for each `bytes_per_s`
    bytes that were read: a slow storage, a pipe that pauses and a busy machine use up none of it.
    `limit_s` are seconds of the clock on the wall after which it passes in any case.
    """

    def __init__(
        self,
        limit_s: float | None = None,
        *,
        base_s: float = BASE_S,
        bytes_per_s: float = BYTES_PER_S,
    ) -> None:
        self._until_s = math.inf if limit_s is None else time.monotonic() + limit_s
        self._began_s = time.thread_time()
        self._budget_s = base_s
        self._bytes_per_s = bytes_per_s
        self.reached = False
        """Whether a reader found that it has passed, and stopped."""

    def extend(self, n_bytes: int) -> None:
        """Add the time for bytes that were read."""
        self._budget_s += n_bytes / self._bytes_per_s

    def passed(self) -> bool:
        """Whether the reader has to stop now; true from then on."""
        if not self.reached:
            used_s = time.thread_time() - self._began_s
            self.reached = used_s > self._budget_s or time.monotonic() >= self._until_s
        return self.reached

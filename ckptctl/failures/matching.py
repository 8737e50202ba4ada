"""Find the lines of one log that are evidence, and the training progress after them.

Keeps the few facts that a line itself lacks: whether its rank is inside a traceback,
whether the launcher is naming the first failed rank, the last clock. Quotes, advice, source
code and retries resemble errors and are dropped here. `classifying` weighs the evidence.

The time per line is bounded: a rule is matched against at most `MAX_MATCHED` characters
around its literal, and every pattern takes linear time
(`tests/failures/test_pattern_growth.py`).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from ckptctl.errors import Unknown, guarded
from ckptctl.failures.rank_dumps import StackReader, in_library
from ckptctl.failures.results import Evidence, Role
from ckptctl.failures.rules import ENDING, RULES, Rule, find_literals
from ckptctl.failures.scope import (
    AttemptScope,
    JobEnd,
    is_after,
    is_of_next_attempt,
    job_end_in,
    job_of_log,
    jobs_in,
    short_host,
    shows_start,
)
from ckptctl.logs.log_lines import (
    ERROR,
    FRAME,
    MAX_RANK,
    WARNING,
    Deadline,
    LogLine,
    clock_of,
    split_traceback,
    take_apart,
)
from ckptctl.outside_numbers import clamped, finite, whole
from ckptctl.storage.logs import MAX_MATCHED

T = TypeVar("T")

_MAX_TEXT = 400
_MAX_TRACEBACK = 100
"""Lines after the newest frame of a traceback in which it is expected to end."""
_MAX_RANKS = 4096
_MAX_JOBS = 100
_MAX_UNREAD = 20
_MAX_ASKED = 200
_AROUND_QUESTION = " \t\"'`*>-[](){},"
_MAX_CONTEXT = 300
"""The characters around a match that decide whether it is a quote or advice."""

# A clause that mentions an error without reporting one, up to the name of the error.
_SPOKEN_OF = re.compile(
    r"\b(?:if|when(?:ever)?|unless|in case of|may|might|could|would|can|should|avoid\w*|"
    r"prevent\w*|e\.g\.|such as|handl(?:e|es|ing)|catch(?:es|ing)?|ignor(?:e|es|ing)|simulat\w+|"
    r"inject\w*|test(?:s|ing)?|without|never|not|no|mask\w*|watch(?:es|ing)?|monitor(?:s|ing)?|"
    r"detect(?:or|ion)|retr(?:y|ies) on|check(?:s|ing)? for|expect(?:s|ed|ing)?|examples?|"
    r"recover(?:s|ed|ing)? from|surviv\w+|fix(?:es|ed)|how to|possibl[ey]|usually|typically|"
    r"often|until|protect\w*|known|previous(?:ly)?|earlier|last (?:run|attempt|time)|cause[sd]? by"
    r"|resembles?|looks like|similar to|search(?:ing)?|grep|mentions?|documented|counts?|"
    r"number of|total|restart(?:s|ed|ing)? (?:on|after)|on_?)\b[^.;:!?]*$",
    re.IGNORECASE,
)
_ADVICE = re.compile(
    r"^\W*(?:tip|hint|note|help|example|docs?|see(?: also)?|advice|faq|reminder|"
    r"try|consider|compile with|set|pass|use|please (?:see|refer|check)|"
    r"for (?:debugging|more)|for more information)\b"
    r"|\b(?:\w*Warning: )|might be asynchronously reported|\bdocumentation\b|\bhttps?://\S+#"
    r"|\b(?:previous|last|earlier|prior) (?:failure|error|attempt|run|exit|crash|job|incarnation)\b"
    r"|^\W*\[?(?:expected|simulated|injected|dry[- ]run|self[- ]?test)\b",
    re.IGNORECASE,
)
_QUESTION = re.compile(
    r"\b(?:how (?:do|can|should)|why (?:do|does|did|is|am)|what (?:is|does|causes?)) [^?]*$",
    re.IGNORECASE,
)
_CODE = re.compile(
    r"^(?:#|//|/\*|\+{1,3} |\$ |>>> |(?:raise|if|elif|except|return|assert|print|log|logger|"
    r"logging|warnings|def|self|with|for|while|try|echo|printf|grep|trap|case|then|sed|awk|export|import|from)"
    r"\b(?=[ .(\"'])(?!: ))|^File \"|^\s*\^+\s*$|^\w+ = |^\w+\((?!\): ).*\)$"
)
_IS_ZERO = re.compile(
    r"^[^\w\n]*(?:(?:errors?|events?|count(?:er|s)?|total|kills?|failures?)\b\W*)*[=:]?\s*"
    r"(?:0\b(?![.:x]\d)|none\b|false\b|off\b|disabled\b)",
    re.IGNORECASE,
)
_RETRIED = re.compile(
    r"\b(?:retry(?:ing)?(?! (?:counter|count))|retried|will retry|re-try|attempt \d+|recovered|"
    r"succeeded|reconnect\w*|ignor(?:ed|ing)|handled|falling back|fallback|"
    r"skipp(?:ed|ing)(?! iterations: {1,9}0\b)|"
    r"continuing|will continue|(?:now )?restored|back "
    r"?off|backing off|resum(?:ed|ing) (?:normal|after)|"
    r"non-?fatal|no action (?:is )?(?:needed|required)|harmless)\b",
    re.IGNORECASE,
)
_GAVE_UP = re.compile(
    r"retries exceeded|after \d+ (?:re)?(?:tries|attempts)|g[ai]v(?:e|ing) up|exhausted|no more re|"
    r"max(?:imum)?(?: number of)? (?:re)?(?:tries|attempts)|retry (?:limit|budget)|last attempt|"
    r"reached max retries|failed after",
    re.IGNORECASE,
)
_QUOTE_OPEN = re.compile(r"(?:^|[\s(=,\[{:])['‘“][^'’”]*$")
_REPR = re.compile(
    r"(?:Error|Exception|Exit)\([^()]*$|failure(?: [\w.]+(?::\d+)?)? '$", re.IGNORECASE
)
_STEP = re.compile(
    r"\b(?:global[_ ]?)?(?:step|iter(?:ation)?|it)\b[\"']?\s{0,9}[:=#]?\s{0,9}\[?(\d{1,18})",
    re.IGNORECASE,
)
# The Hugging Face trainer prints no step beside the loss.
_EPOCH = re.compile(r"\{'loss': .{0,2000}'epoch': '?(\d{1,9})(?:\.(\d{1,30}))?'?[,}]")
_FINITE = re.compile(r"\bloss\b(?! scale)[\"']?[^\d\n]{0,12}[-+]?\d", re.IGNORECASE)

# What precedes the traceback of an exception that Python prints and ignores: in `__del__`, in a
# function for the exit, in a handler of logging. Healthy jobs end with them.
_IGNORED = re.compile(
    r"Exception ignored (?:in|on|while)\b|--- Logging error ---$|Error in atexit\._run_exitfuncs:$"
)
_FINALIZER = re.compile(r'File ".{1,400}", line \d{1,9}, in _run_finalizers$')


# Where a program meets an error of a device that happened before.
_WAITS_FOR_A_DEVICE = re.compile(
    r"\b(?:torch|jax)\.(?:cuda|xpu|npu|hpu|mlu|musa|distributed|accelerator)\b|\b(?:dist|htcore)\."
    r"|\.(?:backward|item|cpu|to|cuda|npu|hpu|xpu|synchronize|tolist|numpy|block_until_ready)\("
)


# Source: NCCL 2.18 to 2.28 `init.cc`.
_COMMUNICATOR = re.compile(
    r"(?<![\w.-])(?P<host>[\w.-]{1,253}):(?P<pid>\d{1,9}):\d{1,9} \[\d{1,4}\] NCCL INFO .{0,200}"
    r"\brank (?P<rank>\d{1,6}) nranks (?P<n>\d{1,6})\b"
)
# A date and a time of day, as every prefix with a clock has them; `[5:15:39<6:53:09]` is a progress
# bar.
_CLOCK_LIKE = re.compile(
    r"\d[T _-]\d\d:\d\d:\d\d|^\{.{0,400}\"(?:ts|time|timestamp|created|__REALTIME_TIMESTAMP)\""
)
_MAX_CLOCK = 80
_ZONED = re.compile(
    r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z| ?UTC\b|[+-]\d\d:?\d\d\b)|"
    r"\"(?:ts|time|timestamp|created|__REALTIME_TIMESTAMP)\": ?\"?\d{10}"
)


def _has_clock(raw: str) -> bool:
    if raw[:1] == "{":
        return _CLOCK_LIKE.search(raw, 0, MAX_MATCHED) is not None
    return raw.count(":", 0, _MAX_CLOCK) > 1 and _CLOCK_LIKE.search(raw, 0, _MAX_CLOCK) is not None


class FailureLogReader:
    """Reads one log, block by block.

    `n_lines` counts the lines that were classified, `n_progress` those of training progress, and
    `n_back` how often the step went back.
    `hosts` are the nodes of ranks, as far as the log shows them. `n_ended` counts the attempts
    that the scheduler ended before another one wrote to the log; `earlier` states what is set
    aside of them. After the deadline no further line is matched. `unread` names the lines and rules
    in which ckptctl itself failed: the others count all the same.
    """

    def __init__(self, name: str, deadline: Deadline | None = None) -> None:
        self.name = name
        self.unread: list[str] = []
        self._deadline = deadline or Deadline()
        self.n_lines = 0
        self.n_progress = 0
        self.n_back = 0
        self.first_failed: tuple[str | None, int | None] | None = None
        self.first_failed_s: float | None = None
        self.hosts: dict[int, str] = {}
        self.n_ended = 0
        self.earlier: list[str] = []
        self._job_end: JobEnd | None = None
        self._restarted = False
        self._n_ranks = 0
        self._step = -1
        self._clocked = ""
        self._scanned_to = -1
        self._first_clocked = ""
        self._before_clock = 0
        self._until_clock = 0
        self._progressed: deque[str] = deque(maxlen=SURVIVED_AFTER)
        self._newest: deque[int] = deque(maxlen=SURVIVED_AFTER)
        self._shows_program = False
        self._pids: set[str] = set()
        self._jobs: set[str] = {*job_of_log(name)}
        self._named_hosts: set[str] = set()
        self._tracebacks: set[int | None] = set()
        self._framed_at = 0
        self._own_frames: dict[int | None, str] = {}
        self._ignored: set[int | None] = set()
        self._ignored_from: tuple[int, int | None] = (-2, None)
        self._report: dict[str, str] | None = None
        self.stacks = StackReader(name)

    def take(self, block: Sequence[tuple[int, str]]) -> Iterator[Evidence]:
        """The evidence in the next lines, each with its number, in order.

        When one is yielded, no later line has been consumed. The result does not depend on
        block boundaries.
        """
        hits = find_literals([raw for _, raw in block])
        self._scanned_to = -1
        for index, (number, raw) in enumerate(block):
            if index in hits.inits:
                self._guarded(number, "", partial(self._place, raw))
            if not self._first_clocked and _has_clock(raw):
                self._first_clocked, self._before_clock = raw, self.n_progress
            if index in hits.losses:
                self._find_clock(block, index)
                self._guarded(number, "", partial(self._progress, raw))
            if self._job_end is not None and not self._restarted:
                self._guarded(number, "", partial(self._seek_start, raw, self._job_end))
            asked = hits.rules.get(index)
            # Nearly every line ends here, so the code below may be slow.
            if asked or index in hits.frames or self._within(number, asked):
                if self._deadline.passed():
                    self.n_lines += index
                    return
                self._find_clock(block, index)
                work = partial(self._evidence_in, number, raw, asked)
                yield from self._guarded(number, "", work) or ()
        self._find_clock(block, len(block) - 1)
        self.n_lines += len(block)

    def _find_clock(self, block: Sequence[tuple[int, str]], index: int) -> None:
        """Find the last line with a time, up to that of the index.

        Cost: no line is scanned twice, and none before the one that is found.
        """
        for at in range(index, self._scanned_to, -1):
            if _has_clock(block[at][1]):
                self._clocked, self._until_clock = block[at][1], self.n_progress
                break
        self._scanned_to = max(self._scanned_to, index)

    def _guarded(self, number: int, rule: str, work: Callable[[], T]) -> T | None:
        """The result of `work` on a line; None where ckptctl fails in it, which is noted."""
        what = f"{self.name}:{number}: {f'the rule {rule}' if rule else 'reading the line'}"
        result = guarded(what, work)
        if not isinstance(result, Unknown):
            return result
        if len(self.unread) < _MAX_UNREAD:
            self.unread.append(result.message)
        return None

    def _within(self, number: int, asked: Collection[int] | None) -> bool:
        """Whether a line may continue or end a traceback, a report or a stack."""
        if self._report is not None or self.stacks.reading:
            return True
        recent = asked is not None or number - self._framed_at <= _MAX_TRACEBACK
        return recent and bool(self._tracebacks)

    def _place(self, raw: str) -> None:
        """Learn the node of a rank from the line that NCCL prints for each communicator."""
        match = _COMMUNICATOR.search(raw, 0, MAX_MATCHED)
        n_ranks = 0 if match is None else clamped(match["n"])
        if match is None or n_ranks < self._n_ranks:
            return
        # Ranks of smaller communicators are counted within these.
        if n_ranks > self._n_ranks:
            self.hosts.clear()
        self._n_ranks = n_ranks
        self._shows_program = True
        if len(self.hosts) < _MAX_RANKS:
            self.hosts[clamped(match["rank"])] = match["host"]
            self._pids.add(match["pid"])

    @property
    def has_zone(self) -> bool:
        """Whether the times of the log have a zone."""
        return _ZONED.search(self._clocked, 0, MAX_MATCHED) is not None

    @property
    def is_of_program(self) -> bool:
        """Whether the program wrote the log, or its launcher: it has steps, tracebacks or ranks."""
        return self._shows_program or self.n_progress > 0

    def span(self) -> AttemptScope | None:
        """When and where the program ran that wrote the log; None if no program did."""
        if not self.is_of_program:
            return None
        settled = len(self._progressed) == SURVIVED_AFTER and self._progressed[0]
        return AttemptScope(
            files=frozenset({self.name}),
            first_s=clock_of(self._first_clocked) if self._first_clocked else None,
            last_s=clock_of(self._clocked) if self._clocked else None,
            starts=self.n_progress > 0 and self._before_clock == 0,
            # The step of the line with the last time is counted behind it.
            ends=self.n_progress - self._until_clock <= 1,
            progress_s=clock_of(settled) if settled else None,
            hosts=frozenset(map(short_host, {*self.hosts.values(), *self._named_hosts})),
            has_all_hosts=0 < self._n_ranks == len(self.hosts),
            pids=frozenset(self._pids),
            jobs=frozenset(self._jobs),
        )

    def _evidence_in(
        self, number: int, raw: str, asked: Collection[int] | None
    ) -> Sequence[Evidence]:
        line = take_apart(raw)
        self.stacks.take(number, line.message[:MAX_MATCHED], line.rank)
        first, *exceptions = split_traceback(line)
        if self._framed(number, first):
            return ()
        if asked is None and not exceptions and line.rank not in self._tracebacks:
            return ()
        noted = exceptions and _is_noted(first)
        evidence = []
        for part in (first, *exceptions):
            found = self._weighed(number, part, sorted(asked or ()))
            if found is not None:
                leads = found.role in (Role.ROOT, Role.SUSPECT)
                found = replace(found, role=Role.NOTE) if noted and leads else found
                self._count_attempt(found)
                evidence.append(found)
        return evidence

    def _count_attempt(self, evidence: Evidence) -> None:
        """Notice that an attempt ended, and that another one in the same log has evidence."""
        end = self._job_end
        if end is not None and is_of_next_attempt(evidence, end, restarted=self._restarted):
            self.n_ended += 1
            self._job_end = None
            self.first_failed = self.first_failed_s = None
        line_s = clock_of(self._clocked) if self._clocked else None
        if (own_end := job_end_in(evidence.text, line_s)) is not None:
            self._job_end, self._restarted = own_end, False

    def _seek_start(self, raw: str, end: JobEnd) -> None:
        """Notice a line that another attempt writes when it starts."""
        self._restarted = shows_start(take_apart(raw[:MAX_MATCHED]).message, end)

    def _progress(self, raw: str) -> None:
        raw = raw[:MAX_MATCHED]
        if (match := _STEP.search(raw)) is not None:
            step = clamped(match[1])
        elif (match := _EPOCH.search(raw)) is not None:
            step = clamped(match[1] + (match[2] or "")[:9].ljust(9, "0"))
        else:
            return
        if step > self._step and _FINITE.search(raw):
            self.n_progress += 1
            self._step = step
            self._progressed.append(self._clocked)
            self._newest.append(step)
        elif step < self._step:
            # Another attempt starts from an older step in the same log. Ranks that write to one
            # log are some rows apart.
            self._restarted |= self._job_end is not None and step < min(self._newest)
            self._step = step
            self.n_back += 1

    def trained_after(self, end: JobEnd, n_back: int) -> bool:
        """Whether the last steps are of an attempt that began after the end of a job.

        `n_back` is how often the step had gone back until then.
        """
        at_s = clock_of(self._progressed[0]) if self._progressed[0] else None
        return self.n_back > n_back if at_s is None else is_after(at_s, end)

    def _framed(self, number: int, line: LogLine) -> bool:
        """Whether the line only frames others, as the head of a traceback or report does."""
        message = line.message.strip()
        if _IGNORED.match(message):
            self._ignored_from = (number, line.rank)
            return True
        if message.startswith("Traceback (most recent call last)"):
            self._opened(number, line.rank)
            if self._ignored_from == (number - 1, line.rank):
                self._ignored.add(line.rank)
            else:
                self._ignored.discard(line.rank)
            return True
        if frame := FRAME.match(line.message):
            # A log that was cut may lack the head.
            self._opened(number, line.rank)
            if in_library(frame[1]) or len(self._own_frames) >= _MAX_RANKS:
                self._own_frames.pop(line.rank, None)
            else:
                self._own_frames[line.rank] = ""
            if _FINALIZER.match(message):
                self._ignored.add(line.rank)
            return True
        if message.startswith("Root Cause (first observed failure)"):
            self._report = {}
            return True
        if self._report is None:
            return False
        if message.startswith("====="):
            self._report = None
            return True
        key, colon, value = (part.strip() for part in message.partition(":"))
        if colon and key == "time":
            self.first_failed_s = clock_of(value)
        if colon and key in ("host", "rank"):
            self._report[key] = value.split()[0] if value else ""
            rank = whole(self._report.get("rank"), MAX_RANK)
            self.first_failed = (self._report.get("host"), rank)
            return True
        return False

    def _opened(self, number: int, rank: int | None) -> None:
        self._framed_at = number
        self._shows_program = True
        if len(self._tracebacks) < _MAX_RANKS:
            self._tracebacks.add(rank)

    def _weighed(self, number: int, line: LogLine, asked: list[int]) -> Evidence | None:
        in_traceback = line.error_file or line.rank in self._tracebacks
        message = line.message.strip()
        if in_traceback and not line.error_file:
            if line.message[:1].isspace():
                if self._own_frames.get(line.rank) == "":
                    self._own_frames[line.rank] = message
                return None
            self._tracebacks.discard(line.rank)
        if not message:
            return None
        ignored = in_traceback and line.rank in self._ignored
        for which in (*asked, *(ENDING if in_traceback else ())):
            rule = RULES[which]
            work = partial(self._by_rule, number, line, rule, message, in_traceback=in_traceback)
            found = self._guarded(number, rule.name, work)
            if found is not None and ignored and found.role in (Role.ROOT, Role.SUSPECT):
                return replace(found, role=Role.SUSPECT if rule.lasting else Role.NOTE)
            if found is not None:
                return found
        return None

    def _by_rule(
        self, number: int, line: LogLine, rule: Rule, message: str, *, in_traceback: bool
    ) -> Evidence | None:
        part = _OLD_STATE.sub(
            lambda old: f"{old['verb']} to " if old["verb"] else f"{old['what']} ",
            _around_literal(message, rule),
        )
        match = rule.pattern.search(part)
        if match is None or not _may_speak(rule, line, part, match, ended=in_traceback):
            return None
        if rule.frames and not (in_traceback and self._is_of_own_frame(rule, line)):
            return None
        if rule.check and not _CHECKS[rule.check](part):
            return None
        return self._evidence(number, line, rule, match, part, in_traceback=in_traceback)

    def _is_of_own_frame(self, rule: Rule, line: LogLine) -> bool:
        """Whether the innermost frame of the traceback is of the program, as the rule requires."""
        source = self._own_frames.get(line.rank)
        if line.error_file:
            file, inner = line.frame
            source = inner if file and not in_library(file) else None
        if source is None:
            return False
        if rule.frames == "raise":
            return source.startswith(("raise ", "assert "))
        return _WAITS_FOR_A_DEVICE.search(source) is None

    def _evidence(
        self,
        number: int,
        line: LogLine,
        rule: Rule,
        match: re.Match[str],
        message: str,
        *,
        in_traceback: bool,
    ) -> Evidence:
        role = _role(rule, line, message, in_traceback=in_traceback)
        at_s = line.at_s
        if at_s is None and self._clocked:
            at_s = clock_of(self._clocked)
        host, rank = line.host, line.rank
        if self._report is not None and self.first_failed is not None:
            host, rank = host or self.first_failed[0], self.first_failed[1]
        rank_named = _group(match, "rank")
        host = _group(match, "host") or (None if rule.reporter else host)
        if not line.kernel and not rule.kernel:
            self._shows_program |= line.rank is not None or in_traceback
            if len(self._jobs) < _MAX_JOBS:
                self._jobs |= jobs_in(message)
            if host and len(self._named_hosts) < _MAX_RANKS:
                self._named_hosts.add(host)
        return Evidence(
            rule=rule.name,
            failure=rule.failure,
            role=role,
            description=rule.message,
            file=self.name,
            line=number,
            text=message[:_MAX_TEXT],
            at_s=at_s,
            host=host,
            device=_group(match, "device") or (None if rule.reporter else line.device),
            rank=whole(rank_named, MAX_RANK) if rank_named or rule.reporter else rank,
            ranks=_ranks_in(_group(match, "ranks") or ""),
            action=rule.action,
            restart=rule.restart,
        )


_SIZE = r"([\d.]{1,12}) ?([KMGT]i?B|bytes)"
_CAPACITY = re.compile(rf"total capacity of {_SIZE}|{_SIZE} total capacity")
_FREE = re.compile(rf"{_SIZE} (?:is )?free")
_OWN_SIZE = re.compile(
    rf"this process has {_SIZE}|{_SIZE} (?:reserved in total|is allocated by PyTorch|already alloc)"
)
_CONTEXT_BYTES = 1 << 30
"""What the context of CUDA and its libraries take at most; older messages leave it out."""
_UNITS = {"b": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _held_by_others(message: str) -> bool:
    """Whether the reporting process holds less than half of a full device."""
    capacity, free = _largest(_CAPACITY, message), _largest(_FREE, message)
    own = _largest(_OWN_SIZE, message)
    return bool(capacity and own and own + free + _CONTEXT_BYTES < capacity / 2)


def _largest(pattern: re.Pattern[str], message: str) -> float:
    """The largest size in bytes."""
    found = ([part for part in match.groups() if part] for match in pattern.finditer(message))
    sizes = ((finite(number) or 0.0) * _UNITS[unit[0]] for number, unit in found)
    return max(sizes, default=0.0)


_CHECKS = {"held-by-others": _held_by_others}


def _around_literal(message: str, rule: Rule) -> str:
    """The message; if it is too long, the part around the first literal of the rule."""
    if len(message) <= MAX_MATCHED:
        return message
    lower = message.lower()
    found = (lower.find(literal) for literal in rule.literals)
    at = min((at for at in found if at >= 0), default=0)
    if at < MAX_MATCHED // 2:
        return message[:MAX_MATCHED]
    # The ellipsis keeps patterns for the start of a message from matching in its middle.
    return "…" + message[at - MAX_MATCHED // 2 : at + MAX_MATCHED // 2]


# The state that a device, a port or a node has left: `from A to B` reports B.
_OLD_STATE = re.compile(
    r"\b(?P<verb>chang\w{1,3}|transition\w{0,5}|switch\w{1,3}|mov\w{1,3}|went|goes|state|status)"
    r" from .{1,60}? to (?=\S)|(?P<what>\b(?:state|status|health|condition)\b[\w .-]{0,40}[:=]) ?"
    r"[\w ]{1,40}? ?(?:->|=>|\u2192) ?",
    re.IGNORECASE,
)


def _may_speak(
    rule: Rule, line: LogLine, message: str, match: re.Match[str], *, ended: bool
) -> bool:
    """Whether a match is a factual report from a source that can know it.

    `ended`: the line ends a traceback.
    """
    if line.level is not None and line.level < rule.level:
        return False
    # A monitor reports with a level; a line of a rank or a verbose program is no report.
    chatty = line.rank is not None or (line.level is not None and line.level < WARNING)
    if rule.kernel and not line.kernel and chatty:
        return False
    if _CODE.search(message):
        return False
    if ended and match.start() == 0:
        return True  # What looks like advice or a counter is the name of an exception.
    if _is_asked(line, message, match):
        return False
    if rule.quotable:
        return _ADVICE.search(message) is None
    before = message[max(0, match.start() - _MAX_CONTEXT) : match.start()]
    after = message[match.end() : match.end() + _MAX_CONTEXT]
    if _ADVICE.search(message[: min(200, match.start())]) or (
        rule.role is not Role.CASCADE and _ADVICE.match(message)
    ):
        return False
    if _SPOKEN_OF.search(before) or _IS_ZERO.match(after):
        return False
    # Monitors wrap the whole line of a driver in quotes; a text about it leaves the process out.
    return (rule.kernel and ", pid=" in after) or not _is_quoted(before, after)


def _is_asked(line: LogLine, message: str, match: re.Match[str]) -> bool:
    """Whether a question asks about the error, as a printed sample does."""
    question = _QUESTION.search(message[: min(_MAX_ASKED, match.start())])
    if question is None:
        return False
    is_error = line.level is not None and line.level >= ERROR
    begins = not message[: question.start()].strip(_AROUND_QUESTION)
    return message.rstrip(_AROUND_QUESTION).endswith("?") or (begins and not is_error)


def _is_quoted(before: str, after: str) -> bool:
    if _REPR.search(before):
        return False
    if before.count('"') % 2 and '"' in after:
        return True
    if before.count("`") % 2 and "`" in after:
        return True
    return bool(_QUOTE_OPEN.search(before)) and bool(re.match(r"[^'’”]*['’”]", after))


def _role(rule: Rule, line: LogLine, message: str, *, in_traceback: bool) -> Role:
    if rule.role in (Role.CAUSE, Role.CASCADE, Role.NOTE):
        return rule.role
    if not rule.quotable and _is_retried(message):
        return Role.NOTE
    if rule.name == "python.exception" and not in_traceback and line.level is None:
        return Role.SUSPECT
    return rule.role


def _is_retried(message: str) -> bool:
    return _RETRIED.search(message) is not None and _GAVE_UP.search(message) is None


def _is_noted(line: LogLine) -> bool:
    """Whether the program goes on after the traceback that it logs behind this text."""
    if line.level is not None and line.level < ERROR:
        return True
    return _is_retried(line.message) or _ADVICE.search(line.message) is not None


def _ranks_in(text: str) -> tuple[int, ...]:
    """The ranks in a list such as `0-3, 7`."""
    ranks: set[int] = set()
    for first, last in re.findall(r"(\d{1,6})(?:\s?-\s?(\d{1,6}))?", text):
        begin = clamped(first)
        ranks |= {*range(begin, min(clamped(last or first), begin + _MAX_RANKS) + 1)}
        if len(ranks) > MAX_RANK:
            break
    return tuple(sorted(ranks))


def _group(match: re.Match[str], name: str) -> str | None:
    """The group `name`, or one of `name_2`, `name_3`, …: alternatives need names of their own."""
    for key, value in match.groupdict().items():
        if value and (key == name or key.startswith(f"{name}_")):
            return value.strip()
    return None


def folded(readings: Iterator[tuple[FailureLogReader, Evidence]]) -> tuple[Evidence, ...]:
    """The findings with identical ones merged and counted, and those that training survived.

    What is hours apart is not merged: only one of two may be of the attempt.
    """
    kept: dict[tuple[object, ...], _HeldEvidence] = {}
    for reader, found in readings:
        key: tuple[object, ...] = (
            reader.name,
            reader.n_ended,
            found.rule,
            found.role,
            found.host,
            found.device,
            found.rank,
            None if found.at_s is None or reader.is_of_program else found.at_s // _APART_S,
        )
        if len(kept) >= _MAX_KEPT and key not in kept:
            key = (reader.name, reader.n_ended, found.rule, found.role)
        if found.rule == _RECOVERED:
            _weaken(kept, reader, found)
        before = kept.get(key)
        if before is None or reader.n_progress - before.n_progress >= SURVIVED_AFTER:
            count = 1 if before is None else before.evidence.count + 1
            kept[key] = _HeldEvidence(
                *(reader, reader.n_progress, reader.n_ended, reader.n_back),
                replace(found, count=count),
            )
        else:
            count = before.evidence.count + 1
            again = replace(before.evidence, role=found.role, count=count)
            kept[key] = replace(before, evidence=again)
    return tuple(_last_attempts([*kept.values()]))


@dataclass(frozen=True, slots=True)
class _HeldEvidence:
    """A finding, and how far its log was read at that line."""

    reader: FailureLogReader
    n_progress: int
    n_ended: int
    n_back: int
    evidence: Evidence

    @property
    def survived(self) -> bool:
        if self.reader.n_progress - self.n_progress < SURVIVED_AFTER:
            return False
        # A job trains on for seconds while it is being ended.
        end = job_end_in(self.evidence.text, self.evidence.at_s)
        return end is None or self.reader.trained_after(end, self.n_back)


def _last_attempts(kept: Sequence[_HeldEvidence]) -> Iterator[Evidence]:
    """The findings of the last attempt in each log that has any that may decide."""
    leading = (Role.CAUSE, Role.ROOT, Role.SUSPECT)
    last: dict[FailureLogReader, int] = {}
    for held in kept:
        if held.evidence.role in leading and not held.survived:
            last[held.reader] = max(last.get(held.reader, 0), held.n_ended)
    for held in kept:
        if held.n_ended >= last.get(held.reader, 0):
            yield replace(held.evidence, survived=held.survived)
        elif len(held.reader.earlier) < _MAX_EARLIER:
            where = f"{held.evidence.file}:{held.evidence.line}: {held.evidence.description}"
            held.reader.earlier.append(
                f"{where}: the scheduler ended that attempt before a later one in the same log"
            )


_MAX_EARLIER = 50
_APART_S = 600.0
_RECOVERED = "storage.recovered"


def _weaken(
    kept: dict[tuple[object, ...], _HeldEvidence], reader: FailureLogReader, recovered: Evidence
) -> None:
    """Make suspicions of what the kernel reported of a file system that answers again.

    The job may have failed while it waited, or may not have noticed.
    """
    for key, held in kept.items():
        found = held.evidence
        same = recovered.device is None or found.device in (None, recovered.device)
        if held.reader is reader and found.rule == "storage.kernel" and same:
            kept[key] = replace(held, evidence=replace(found, role=Role.SUSPECT))


_MAX_KEPT = 2000
SURVIVED_AFTER = 3
"""Lines of progress after an error that prove that training continued."""

"""Decide whether a line is evidence for the attempt that ended.

Evidence has a place and a time. The attempt runs from the first to the last time of its own logs,
on the nodes, in the processes and in the job that these logs name. A log belongs to the attempt if
the program wrote it: it has steps, tracebacks or ranks. All else, such as a kernel log or the log
of a scheduler, covers days and other jobs.

`bearing` is the only place that decides. What it cannot place remains evidence, with less
confidence; what happened elsewhere or at another time is set aside with the reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ckptctl.failures.results import Evidence, Role
from ckptctl.failures.rules import RULES
from ckptctl.formatting import counted, duration
from ckptctl.logs.clocks import clock_in

BEFORE_S = 300.0
"""A program logs its first line minutes after its start: imports, a container, a model."""
AFTER_S = 600.0
"""SLURM reports a node that does not answer after 300 s (`SlurmdTimeout`), Kubernetes evicts its
pods after 300 s."""
_UNSEEN_START_S = 35 * 60.0
"""How long before its first time a log without a beginning counts: the longest usual timeout of a
collective, 30 minutes, is then the first line with a time."""
_HALF_HOUR_S = 1800.0
_MOST_ZONES_S = 14 * 3600 + AFTER_S
_SETTLED_S = 60.0
"""Training that reports steps this long after a message has survived it."""


@dataclass(frozen=True, slots=True)
class AttemptScope:
    """When and where a program ran, as far as one log shows it, or all logs of the attempt.

    `files` are these logs. `starts` and `ends`: the first or last time is that of the begin or end
    of a log, not of a line between others without a time. `progress_s` is the time of the third
    newest step. `earlier` are logs of programs that ended before the attempt began. `other_zone`
    are logs whose times have a zone where those of the attempt have none, or the reverse.
    """

    files: frozenset[str]
    first_s: float | None
    last_s: float | None
    starts: bool
    ends: bool
    progress_s: float | None
    hosts: frozenset[str]
    has_all_hosts: bool
    pids: frozenset[str]
    jobs: frozenset[str]
    earlier: frozenset[str] = frozenset()
    other_zone: frozenset[str] = frozenset()


def scope_of(logs: Iterable[AttemptScope], has_zone: Mapping[str, bool]) -> AttemptScope:
    """The attempt that ended last: its logs overlap or follow each other within minutes.

    `has_zone` states for each log, also of others, whether its times have a zone.
    """
    logs = [*logs]
    timed = sorted(
        (log for log in logs if log.last_s is not None),
        key=lambda log: log.last_s or 0.0,
        reverse=True,
    )
    attempt_logs, earlier = [log for log in logs if log.last_s is None], list[AttemptScope]()
    begin = None if not timed else timed[0].first_s
    for log in timed:
        if begin is None or log.last_s is None or not log.ends or log.last_s >= begin - AFTER_S:
            attempt_logs.append(log)
            begin = min((at for at in (begin, log.first_s) if at is not None), default=None)
        else:
            earlier.append(log)
    newest = next((file for log in timed[:1] for file in log.files), None)

    def every(field: str) -> frozenset[str]:
        return frozenset().union(*(getattr(log, field) for log in attempt_logs))

    def times(field: str) -> list[float]:
        return [at for log in attempt_logs if (at := getattr(log, field)) is not None]

    return AttemptScope(
        files=every("files"),
        earlier=frozenset().union(*(log.files for log in earlier)),
        other_zone=frozenset(
            file
            for file, zoned in has_zone.items()
            if newest is not None and zoned is not has_zone.get(newest, zoned)
        ),
        first_s=min(times("first_s"), default=None),
        last_s=max(times("last_s"), default=None),
        starts=any(log.starts for log in attempt_logs),
        ends=any(log.ends for log in attempt_logs),
        progress_s=max(times("progress_s"), default=None),
        hosts=every("hosts"),
        has_all_hosts=any(log.has_all_hosts for log in attempt_logs),
        pids=every("pids"),
        jobs=every("jobs"),
    )


def bearing(evidence: Evidence, scope: AttemptScope) -> tuple[Evidence, str]:
    """The evidence as it counts for the attempt, and why it is set aside; empty if it is not.

    Its time, its place and what came after decide.
    """
    if aside := _aside(evidence, scope):
        return evidence, f"{evidence.file}:{evidence.line}: {evidence.description}: {aside}"
    if not scope.files or evidence.file in scope.files:
        return evidence, ""
    leads = evidence.role in (Role.CAUSE, Role.ROOT)
    suspicion = replace(evidence, role=Role.SUSPECT) if leads else evidence
    if _disproved(evidence, scope):
        # A file system is not used between two saves: progress does not show that it answers.
        waits = evidence.rule.startswith("storage.")
        return (suspicion if waits else replace(evidence, survived=True)), ""
    if evidence.rule not in _MACHINE_RULES:
        # A log of the scheduler names the nodes of all jobs.
        names_node = evidence.host is not None and evidence.failure == "infra-node"
        doubt = _place_doubt(evidence, scope) if names_node else ""
        return replace(evidence, doubt=_zone_doubt(evidence, scope) or doubt), ""
    process = _PROCESS.search(evidence.text) if evidence.rule in _PROCESS_RULES else None
    foreign = next((name.strip() for name in process.groups() if name), "") if process else ""
    if foreign and not _IN_TRAINING.match(foreign) and not _is_ours(evidence, scope):
        return replace(suspicion, doubt=f"{foreign!r} is not known as a process of the job"), ""
    doubts = (_time_doubt(evidence, scope), _place_doubt(evidence, scope))
    return replace(evidence, doubt="; ".join(filter(None, doubts))), ""


def _aside(evidence: Evidence, scope: AttemptScope) -> str:
    if evidence.file in scope.earlier:
        return "its log ended before the logs of this attempt begin"
    if not scope.files or evidence.file in scope.files:
        return ""
    return _elsewhere(evidence, scope) or _apart(evidence, scope)


_JOB_ENDED = re.compile(
    r"\*\*\* (?:JOB|STEP) (?P<job>\d{0,12})\S{0,100} (?:ON \S{1,300} )?"
    r"CANCELLED AT (?P<at>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)"
)
# What a program writes when it starts, and not while it is being ended.
_STARTS = re.compile(
    r"^\W*(?:(?:re)?load(?:ing|ed)|resum(?:ing|ed)|restor(?:ing|ed))\b.{0,80}"
    r"\b(?:checkpoint|ckpt|snapshot|state|model|weights|tokenizer|dataset|step|iteration)"
    r"|^\W*(?:starting|beginning) (?:the )?training\b|^\W*training starts\b"
    r"|\bSetting OMP_NUM_THREADS\b|\bStarting elastic_operator\b"
    r"|\binitializ(?:ing|ed) (?:the )?(?:torch\.?distributed|distributed|process group)\b",
    re.IGNORECASE,
)
_SLURM_JOB = re.compile(r"\bSLURM_JOB_?ID\W{1,4}(\d{1,12})")
# Errors of a start. A handler that saves while a job is being ended may import late, too.
_START_RULES = ("config.", "hub.", "checkpoint.")


@dataclass(frozen=True, slots=True)
class JobEnd:
    """When the scheduler ended a job, by its clock and by that of the lines before; its number."""

    at_s: float
    line_s: float | None
    job: str = ""


def job_end_in(text: str, line_s: float | None) -> JobEnd | None:
    """The end of a job or a step that SLURM reports in this line; `line_s` is the clock before."""
    match = _JOB_ENDED.search(text)
    at_s = None if match is None else clock_in(match["at"])
    return None if match is None or at_s is None else JobEnd(at_s, line_s, match["job"])


def shows_start(text: str, end: JobEnd) -> bool:
    """Whether a line behind the end of a job shows that another attempt began."""
    job = _SLURM_JOB.search(text)
    return _STARTS.search(text) is not None or (job is not None and job[1] != end.job != "")


def is_of_next_attempt(evidence: Evidence, end: JobEnd, *, restarted: bool) -> bool:
    """Whether evidence behind the end of a job in the same log is of a later attempt.

    A requeued job and jobs with one name append to one log. `restarted`: a line between shows
    that another attempt began.
    """
    own_end = job_end_in(evidence.text, None)
    if own_end is not None:
        return own_end.at_s - end.at_s > AFTER_S
    if restarted and evidence.role is Role.ROOT and evidence.rule.startswith(_START_RULES):
        return True
    return evidence.at_s is not None and is_after(evidence.at_s, end)


def is_after(at_s: float, end: JobEnd) -> bool:
    """Whether a line of the program is too late for a job that was ended: of a later attempt."""
    if at_s - end.at_s <= AFTER_S or (end.line_s is not None and at_s - end.line_s <= AFTER_S):
        return False
    return not _may_be_zones(at_s - end.at_s)


_PROCESS_RULES = frozenset(rule.name for rule in RULES if rule.process)
_MACHINE_RULES = _PROCESS_RULES | frozenset(
    rule.name for rule in RULES if rule.kernel or rule.name.startswith("kernel.")
)
"""Rules for lines that a machine writes about itself, whoever uses it."""
_IN_TRAINING = re.compile(
    r"python|pt_|ray|torch|accelerate|deepspeed|train|srun|slurm|bash|sh$|mpirun|orted|prted|vllm",
    re.IGNORECASE,
)
_PROCESS = re.compile(
    r"\bname=(?P<name>[^,<]{1,40})|Kill(?:ed)? process \d{1,9} \((?P<name_2>[^)]{1,40})\)"
    r"|\btask=(?P<name_3>[^,]{1,40}),|^(?P<name_4>[\w./-]{1,40})\[\d{1,9}\]: segfault"
    r"|\btask (?P<name_5>\S{1,40}):\d{1,9} blocked|^(?P<name_6>[\w./-]{1,40}) invoked oom"
)
_PID = re.compile(
    r"\bpid[=: ]{1,2}(\d{1,9})|[Kk]ill(?:ed)? process (\d{1,9})|^[\w./-]{1,40}\[(\d{1,9})\]"
    r"|\btask \S{1,40}:(\d{1,9}) blocked"
)
_JOB = re.compile(
    r"(?:\bJobId=|\bStepId=|\bJOB |\bjob[_=]?|\bslurm-)(\d{3,12})\b"
    r"|^(\d{3,12})(?:[._+]\w{1,20})?\|",
    re.IGNORECASE,
)


def jobs_in(text: str) -> frozenset[str]:
    """The numbers of batch jobs that a line or the name of a log has."""
    return frozenset(match[1] or match[2] for match in _JOB.finditer(text))


def _is_ours(evidence: Evidence, scope: AttemptScope) -> bool:
    if scope.jobs & jobs_in(evidence.text):
        return True
    pids = {pid for found in _PID.findall(evidence.text) for pid in found if pid}
    return bool(pids & scope.pids)


def _elsewhere(evidence: Evidence, scope: AttemptScope) -> str:
    jobs = jobs_in(evidence.text)
    if jobs and scope.jobs and not jobs & scope.jobs:
        other, own = ", ".join(sorted(jobs)), ", ".join(sorted(scope.jobs))
        return f"it is about job {other}, and this is {own}"
    host = short_host(evidence.host)
    # A pod has another name than its node: only names of one form can be compared.
    comparable = scope.has_all_hosts and _form(host) in {_form(known) for known in scope.hosts}
    if host and comparable and host not in scope.hosts:
        return f"{host} is none of the {counted(len(scope.hosts), 'node')} of the job"
    return ""


def _apart(evidence: Evidence, scope: AttemptScope) -> str:
    at_s, first_s, last_s = evidence.at_s, scope.first_s, scope.last_s
    if at_s is None or first_s is None or last_s is None:
        return ""
    if _may_be_the_end(evidence, scope):
        return ""
    if scope.starts and at_s < first_s - BEFORE_S:
        return f"it is {duration(first_s - at_s)} before the first line of the job's logs"
    if scope.ends and at_s > last_s + AFTER_S:
        return f"it is {duration(at_s - last_s)} after the last line of the job's logs"
    return ""


def _may_be_the_end(evidence: Evidence, scope: AttemptScope) -> bool:
    """Whether a line is at the end of the attempt if the two clocks have different zones."""
    if evidence.file not in scope.other_zone or evidence.at_s is None or scope.last_s is None:
        return False
    return _may_be_zones(abs(evidence.at_s - scope.last_s))


def _may_be_zones(apart_s: float) -> bool:
    """Whether clocks that are this far apart may show one moment in different zones."""
    off_s = (apart_s + _HALF_HOUR_S / 2) % _HALF_HOUR_S - _HALF_HOUR_S / 2
    return 1.5 * _HALF_HOUR_S < apart_s <= _MOST_ZONES_S and abs(off_s) <= 2 * _SETTLED_S


def _disproved(evidence: Evidence, scope: AttemptScope) -> bool:
    if evidence.at_s is None or scope.progress_s is None or _may_be_the_end(evidence, scope):
        return False
    return scope.progress_s > evidence.at_s + _SETTLED_S


def _time_doubt(evidence: Evidence, scope: AttemptScope) -> str:
    if evidence.at_s is None:
        return "its time is unknown"
    if scope.first_s is None or scope.last_s is None:
        return "the job's logs have no times"
    if zone := _zone_doubt(evidence, scope):
        return zone
    if evidence.at_s < scope.first_s - _UNSEEN_START_S:
        return "the job's logs do not show when it began"
    if evidence.at_s > scope.last_s + AFTER_S:
        return "the job's logs do not show when it ended"
    return ""


def _zone_doubt(evidence: Evidence, scope: AttemptScope) -> str:
    if _may_be_the_end(evidence, scope):
        return "only one of the two logs has times with a zone"
    return ""


def _place_doubt(evidence: Evidence, scope: AttemptScope) -> str:
    if _is_ours(evidence, scope) or short_host(evidence.host) in scope.hosts:
        return ""
    return "the job's logs do not show that it ran there"


def short_host(host: str | None) -> str:
    """The name of a host without its domain."""
    return (host or "").partition(".")[0].lower()


def _form(host: str) -> str:
    return re.sub(r"\d+", "#", host)


def job_of_log(name: str) -> frozenset[str]:
    """The job in the name of a log, such as `slurm-8032.out`."""
    return jobs_in(os.path.basename(name)) if "slurm-" in name else frozenset()

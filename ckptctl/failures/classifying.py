"""Classify the end of a job by its logs, exit code and scheduler state.

Reads the logs in one pass with bounded memory, and combines the evidence. The same exit code
has different meanings: torchrun turns every exit code into 1, SLURM writes `code:signal`,
Kubernetes and shells add 128 to a signal.

A root error outranks the consequences on other ranks; reports of the kernel and the
scheduler outrank those of a program, which sees only effects. `matching` finds the evidence.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Unpack

from ckptctl.distributed.launcher import expand
from ckptctl.errors import Unknown, UsageError, guarded
from ckptctl.failures.matching import FailureLogReader
from ckptctl.failures.rank_dumps import Stall, compare_dumps, compared, evidence_of, ranks_listed
from ckptctl.failures.reading import LogEvidence, read_logs
from ckptctl.failures.results import (
    CLASSES,
    CONFIDENCES,
    EXITS,
    Action,
    Classification,
    Domain,
    Evidence,
    FailureClass,
    Restart,
    Role,
    Suspect,
)
from ckptctl.failures.rules import FOLLOWING
from ckptctl.options import StorageKeywords, StorageOptions, options_from
from ckptctl.outside_numbers import MOST, clamped, whole

SAME_MOMENT_S = 60.0
"""Times of two machines that differ by less do not show which event was first."""

# Symptoms that a program reports, whose cause another source may show.
_YIELDING = (
    *("python.", "cuda.", "nccl.", "collective.", "compile."),
    *("stop.", "exit.", "divergence.loss"),
)
# Of these, a failing device also explains the symptom if its time or its node is uncertain.
_DEVICE_RULES = ("cuda.", "nccl.", "collective.", "stop.", "exit.")
_FIRM = ("infra-node", "infra-fabric", "infra-storage", "job-oom")
# Suspicions that any other one explains: ranks wait or lose a peer for many reasons.
_WEAK = (
    *("nccl.", "collective.", "stop.sigkill", "slurm.task-killed"),
    *("exit.", "divergence.loss", "xid.other", "stop.bus-error"),
)

_UNNAMED = ("python.", "accelerator.unknown")

# Any failure cancels a step or ends native code; these decide only without other evidence.
_LAST = ("slurm.step-cancelled", "program.abort")


@dataclass(frozen=True, slots=True)
class WeighedEvidence:
    """The decisive evidence, or None; and the rest, grouped by role."""

    decisive: Evidence | None
    agreeing: tuple[Evidence, ...]
    consequences: tuple[Evidence, ...]
    others: tuple[Evidence, ...]
    confidence: str


def decide(
    evidence: Sequence[Evidence], first_failed: tuple[str | None, int | None] | None = None
) -> WeighedEvidence:
    """Weigh evidence in the order of the logs and their lines.

    `first_failed` is the host and rank that a launcher names as the first to fail.
    """
    alive = _with_consequences([item for item in evidence if not item.survived])
    decisive = _decisive(alive, first_failed)
    if decisive is None:
        cascades = tuple(item for item in alive if item.role is Role.CASCADE)
        others = tuple(item for item in alive if item.role is Role.NOTE)
        return WeighedEvidence(None, (), cascades, others, "low")
    rest = [item for item in alive if item is not decisive]
    agreeing = tuple(e for e in rest if e.failure == decisive.failure and _leads(e))
    consequences = tuple(e for e in rest if e not in agreeing and _follows(e, decisive))
    others = tuple(e for e in rest if e not in agreeing and e not in consequences)
    return WeighedEvidence(
        decisive, agreeing, consequences, others, _confidence(decisive, agreeing, others)
    )


def _with_consequences(evidence: Sequence[Evidence]) -> list[Evidence]:
    """The evidence, in which an error of a device that the program broke is a consequence."""
    faults = [
        fault
        for fault in evidence
        if fault.rule.startswith("xid.") and fault.failure.startswith(_JOB_CLASSES)
    ]
    return [
        replace(item, role=Role.CASCADE)
        if item.rule in FOLLOWING
        and any(
            (item.device, item.host) == (fault.device, fault.host)
            and _may_be_the_same_moment(fault, item)
            and _earlier(fault, item) is fault
            for fault in faults
        )
        else item
        for item in evidence
    ]


_HARDWARE = ("infra-node", "infra-fabric")


def hardware(decision: WeighedEvidence) -> Iterator[tuple[Evidence, str]]:
    """The evidence against hardware with its confidence, the decisive first.

    If hardware did not decide, only reports of the kernel, the driver or the scheduler
    count: programs blame the fabric for every lost peer. Errors that training survived do
    not count.
    """
    first = decision.decisive
    if first is None:
        return
    for item in (first, *decision.agreeing):
        if first.failure in _HARDWARE or (first.failure == "hang" and item.ranks):
            certain = item.role is Role.CAUSE and decision.confidence == "low"
            # What a program may have caused names no node to drain.
            weak = item.action == Action.INVESTIGATE
            yield item, "low" if weak else "medium" if certain else decision.confidence
    for item in (*decision.others, *decision.consequences):
        if item.failure in _HARDWARE and item.role is Role.CAUSE:
            yield item, "low" if item.doubt else "medium" if item.action else "high"


def _leads(evidence: Evidence) -> bool:
    return evidence.role in (Role.CAUSE, Role.ROOT, Role.SUSPECT)


def _decisive(
    alive: Sequence[Evidence], first_failed: tuple[str | None, int | None] | None
) -> Evidence | None:
    roots = [root for root in alive if root.role in (Role.CAUSE, Role.ROOT)]
    if roots:
        return _first_root(roots, first_failed)
    suspects = [suspect for suspect in alive if suspect.role is Role.SUSPECT]
    suspects = [suspect for suspect in suspects if not suspect.rule.startswith(_LAST)] or suspects
    # srun cancels a step because a task failed.
    task_exits = [exited for exited in alive if exited.rule == "slurm.task-exit"]
    suspects = [
        suspect
        for suspect in suspects
        if suspect.rule != "slurm.step-cancelled"
        or not any(
            exited.file == suspect.file and exited.line < suspect.line for exited in task_exits
        )
    ]
    # A rank that SIGKILL ended ends the others with SIGTERM; a preemption begins with SIGTERM.
    killed = _first(suspect for suspect in suspects if suspect.rule in _SIGKILL)
    if killed is not None:
        suspects = [
            suspect
            for suspect in suspects
            if suspect.rule != "stop.sigterm" or _earlier(suspect, killed) is not killed
        ]
    strong = [suspect for suspect in suspects if not suspect.rule.startswith(_WEAK)]
    # An exception that no rule knows only names what the lines about it explain.
    strong = [suspect for suspect in strong if not suspect.rule.startswith(_UNNAMED)] or strong
    hangs = [e for e in suspects if e.rule.startswith(("collective.", "nccl."))]
    # A killed process explains the peers that waited for it, never the reverse.
    return _first(
        strong or [e for e in suspects if e not in hangs] or [e for e in hangs if e.ranks] or hangs
    )


_SIGKILL = ("stop.sigkill", "slurm.task-killed")


def _first_root(
    roots: Sequence[Evidence], first_failed: tuple[str | None, int | None] | None
) -> Evidence:
    # What may be of another time or place does not explain what is of the attempt.
    first = _first([root for root in roots if not root.doubt]) or _first(roots) or roots[0]
    if first.role is Role.ROOT and first_failed is not None and first_failed[1] is not None:
        named = [root for root in roots if root.rank == first_failed[1]]
        first = _first(named) or first
    better = [root for root in roots if _knows_better(root, first)]
    first = _first(better) or first
    worse = [root for root in roots if _outranks(root, first)]
    return _first(worse) or first


_JOB_CLASSES = ("job-", "bad-checkpoint")
_GENERIC = ("python.", "compile.")


def _outranks(other: Evidence, first: Evidence) -> bool:
    """Whether `other` requires draining a node on which `first` would resume.

    A failure of the job keeps its place, because it also prevents a resume.
    """
    if other.role is not Role.CAUSE or other.failure != "infra-node" or other.action:
        return False
    if other.doubt and not first.doubt:
        return False
    if first.failure == "infra-node":
        return bool(first.action)
    return first.failure != "infra-fabric" and not first.failure.startswith(_JOB_CLASSES)


def _knows_better(other: Evidence, first: Evidence) -> bool:
    if first.role is not Role.ROOT or other is first:
        return False
    # An access to memory of a failing device also faults in a correct program.
    by_device = first.rule.startswith("xid.") and first.device == other.device
    if not by_device and not first.rule.startswith(_YIELDING):
        return False
    if other.doubt and not first.doubt and not first.rule.startswith(_DEVICE_RULES):
        return False
    if not _may_be_the_same_moment(first, other):
        return False
    if other.role is Role.CAUSE:
        return other.failure in _FIRM
    # An exception raised while another was handled is more specific than that one; what a
    # compiler met is printed behind its own name.
    generic = first.rule.startswith(_GENERIC) and not other.rule.startswith(_GENERIC)
    return generic and other.file == first.file and other.rank == first.rank


def _may_be_the_same_moment(first: Evidence, second: Evidence) -> bool:
    if first.at_s is None or second.at_s is None:
        return True
    return abs(first.at_s - second.at_s) <= SAME_MOMENT_S


def _first(evidence: Iterable[Evidence]) -> Evidence | None:
    taken = list(evidence)
    return reduce(_earlier, taken) if taken else None


def _earlier(first: Evidence, second: Evidence) -> Evidence:
    """The earlier of the two by clock, or by line of the same log; else the stronger."""
    if first.file == second.file:
        return second if second.line < first.line else first
    if first.at_s is not None and second.at_s is not None:
        apart = second.at_s - first.at_s
        if abs(apart) > SAME_MOMENT_S:
            return second if apart < 0 else first
    if first.role is not second.role:
        return min(first, second, key=lambda item: item.role.place)
    if first.at_s is not None and second.at_s is not None:
        return second if second.at_s < first.at_s else first
    return first


def _follows(evidence: Evidence, decisive: Evidence) -> bool:
    if evidence.role is Role.CASCADE:
        return True
    if evidence.role is Role.NOTE:
        return False
    return evidence.role.place > decisive.role.place or _earlier(decisive, evidence) is decisive


def _confidence(
    decisive: Evidence, agreeing: Sequence[Evidence], others: Sequence[Evidence]
) -> str:
    # A program reports effects, not causes: only the kernel, driver or scheduler is conclusive.
    level = {Role.CAUSE: 2, Role.ROOT: 1}.get(decisive.role, 0)
    if decisive.failure == "unknown":
        return "low"
    if decisive.rule.startswith(("recorder.", "gpu.ecc")):
        level = 1
    if any(item.role is Role.CAUSE for item in agreeing):
        level += 1
    if any(_leads(item) for item in others):
        level -= 1
    if decisive.doubt and all(item.doubt for item in agreeing):
        level = min(level, 1)
    return CONFIDENCES[max(0, min(level, 2))]


_FINISHED = ("COMPLETED", "Completed", "Succeeded", "SUCCEEDED")
_SHOWN = 50
DEADLINE_S = 300.0
"""Reading stops after this long: enough for 6 GB of a typical log."""


def classify(
    logs: Iterable[str] | str = (),
    *,
    exit_code: int | str | None = None,
    state: str | None = None,
    scheduler: str | None = None,
    flight_recorder: str | None = None,
    deadline_s: float | None = DEADLINE_S,
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[StorageKeywords],
) -> Classification:
    """Classify a failure as one of infrastructure or job, with the evidence.

    `logs` are files, folders of logs, URLs, or `-` for standard input: of all ranks, of the
    launcher, of the kernel (`dmesg -T`), of the scheduler, in any order, compressed or not;
    also files of torchrun's `TORCHELASTIC_ERROR_FILE`. `exit_code` is the job's, as `137`,
    `-9` or SLURM's `0:9`; `state` is the scheduler's name for the end (`OUT_OF_MEMORY`,
    `OOMKilled`); `scheduler` is their source: slurm, kubernetes, torchrun, ft_launcher or
    shell. `flight_recorder` is a folder of dumps of torch's flight recorder, one per rank;
    without it, dumps in a folder of logs or beside a log are read.

    Reads each log once, with bounded memory, for at most `deadline_s` seconds, and for no more time
    of the processor than its bytes explain; the result states whether the deadline was reached.
    A fault of ckptctl itself in one file, line or rule leaves the evidence in the others; `unread`
    names it. Raises `UsageError` if there is no input or a
    log is binary data, and the errors of reading a log.
    """
    names = [logs] if isinstance(logs, str) else [*logs]
    if not names and exit_code is None and state is None and flight_recorder is None:
        raise UsageError(
            "neither a log nor an exit code was given", next_command="ckptctl classify --help"
        )
    if scheduler is not None and scheduler not in SCHEDULERS:
        raise UsageError(
            f"the scheduler is one of {', '.join(SCHEDULERS)}, not {scheduler!r}",
            instead="--scheduler slurm",
        )
    by_state = evidence_of_state(state) if state else None
    by_exit = None if exit_code is None else evidence_of_exit(exit_code, scheduler)
    given = [evidence for evidence in (by_state, by_exit) if evidence is not None]
    (storage,) = options_from(keywords, storage)
    read = read_logs(names, flight_recorder, storage, deadline_s)
    stall = guarded("comparing the dumps", partial(compare_dumps, read.dumps))
    stacks = guarded("comparing the stacks", lambda: [*compared(read.stacks)])
    failed = [result.message for result in (stall, stacks) if isinstance(result, Unknown)]
    stall = compare_dumps(()) if isinstance(stall, Unknown) else stall
    read = replace(read, unread=(*read.unread, *failed))
    place = flight_recorder or next((dump.file for dump in read.dumps), "")
    stack_evidence = () if isinstance(stacks, Unknown) else stacks
    found = (*read.evidence, *stack_evidence, *evidence_of(stall, place), *given)
    decision = decide(found, read.first_failed)
    # What was not read may hold a failure.
    is_whole = not (read.deadline_reached or read.unread)
    finished = is_whole and (str(exit_code).strip() in ("0", "0:0") or state in _FINISHED)
    return _answer(decision, found, scheduler, read, stall, finished=finished)


def most_decisive(classifications: Sequence[Classification]) -> Classification:
    """Of the classifications of several nodes the one whose evidence decides among that of all.

    Logs of two nodes must not have the same name in it.
    """
    every = [
        evidence
        for found in classifications
        for evidence in (*found.evidence, *found.consequences, *found.others)
    ]
    decisive = decide(every).decisive
    same = (found for found in classifications if decisive in found.evidence[:1])
    return next(same, classifications[0])


def _answer(
    decision: WeighedEvidence,
    found: Sequence[Evidence],
    scheduler: str | None,
    read: LogEvidence,
    stall: Stall,
    *,
    finished: bool,
) -> Classification:
    decisive = decision.decisive
    name = decisive.failure if decisive else "none" if finished else "unknown"
    about = CLASSES[name]
    same = () if decisive is None else (decisive, *decision.agreeing)
    node = next((item.host for item in same if item.host and item.rank == same[0].rank), None)
    action = Action(decisive.action) if decisive and decisive.action else about.action
    suspected = decisive is not None and decisive.role is Role.SUSPECT
    accuses = action is Action.DRAIN or (suspected and about.name == "job-code")
    if accuses and decision.confidence == "low":
        action = Action.INVESTIGATE  # A suspicion alone drains no node and changes no program.
    is_weak = action is Action.INVESTIGATE is not about.action
    return Classification(
        failure=name,
        domain=about.domain,
        action=action,
        restart=Restart(decisive.restart) if decisive and decisive.restart else about.restart,
        confidence="medium" if name == "none" else decision.confidence,
        message=_message(about, decision, stall, node),
        advice=_WEAK_EVIDENCE if is_weak else about.advice,
        node=node,
        device=decisive.device if decisive else None,
        rank=decisive.rank if decisive else None,
        suspects=suspects_in(hardware(decision), read.hosts),
        evidence=((decisive, *decision.agreeing) if decisive else ())[:_SHOWN],
        consequences=decision.consequences[:_SHOWN],
        others=decision.others[:_SHOWN],
        survived=tuple(item for item in found if item.survived)[:_SHOWN],
        collectives=stall.collectives,
        ranks_without_dump=stall.without_dump,
        n_files=read.n_files,
        n_dumps=len(read.dumps),
        n_lines=read.n_lines,
        not_dumps=read.not_dumps[:_SHOWN],
        set_aside=read.set_aside[:_SHOWN],
        unread=read.unread[:_SHOWN],
        deadline_reached=read.deadline_reached,
        next_command=_next(about, decisive, node, scheduler, found),
    )


_WEAK_EVIDENCE = (
    "Read the lines of the evidence, and the logs of that node or rank at that time, before a node "
    "is drained or the program is changed."
)


def _message(about: FailureClass, decision: WeighedEvidence, stall: Stall, node: str | None) -> str:
    decisive = decision.decisive
    if decisive is None:
        if decision.consequences:
            return (
                "these logs show only consequences; the cause may be in the log of another "
                "rank or of the kernel"
            )
        return about.means
    ranks = decisive.ranks or (() if decisive.rank is None else (decisive.rank,))
    recorded = decisive.rule.startswith("recorder.")
    rank = ranks_listed(ranks) if ranks else None
    named = None if recorded and decisive.failure == "hang" else rank
    where = ", ".join(part for part in (node, decisive.device, named) if part)
    others = recorded and stall.without_dump
    return (
        f"{decisive.description}{f' ({where})' if where else ''}"
        f"{'; possibly also ranks without a dump' if others else ''}"
        f"{f' (uncertain: {decisive.doubt})' if decisive.doubt else ''}"
    )


def _next(
    about: FailureClass,
    decisive: Evidence | None,
    node: str | None,
    scheduler: str | None,
    found: Sequence[Evidence],
) -> str | None:
    if decisive is None or about.domain is Domain.NONE:
        return None
    if about.name == "infra-node" and node:
        reason = shlex.quote(decisive.description)
        if scheduler == "kubernetes" or any(e.rule.startswith("kubernetes.") for e in found):
            return f"kubectl cordon {shlex.quote(node)}"
        if scheduler == "slurm" or any(e.rule.startswith("slurm.") for e in found):
            return f"scontrol update nodename={shlex.quote(node)} state=drain reason={reason}"
    if about.action is Action.FALL_BACK or about.domain in (Domain.INFRASTRUCTURE, Domain.STOPPED):
        return "ckptctl scan ROOT" if about.action is Action.FALL_BACK else "ckptctl pick ROOT"
    return None


# A log is untrusted, and a node's name may end up in a command that drains the node.
_MAX_TEXT = 1000
_MOST_NODES = 64


def suspects_in(
    evidence: Iterable[tuple[Evidence, str]], hosts: Mapping[int, str]
) -> tuple[Suspect, ...]:
    """One suspect per node, in the order of the evidence; one more without a node.

    Each evidence has its confidence. `hosts` are the nodes of ranks that the logs show.
    """
    suspects: dict[str | None, Suspect] = {}
    for item, confidence in evidence:
        ranks = item.ranks if item.rank is None else (*item.ranks, item.rank)
        for node, of_node in _places(item, ranks, hosts):
            known = suspects.get(node, Suspect(node, (), (), CONFIDENCES[0]))
            suspects[node] = Suspect(
                node,
                tuple(dict.fromkeys((*known.devices, *([item.device] if item.device else [])))),
                tuple(dict.fromkeys((*known.ranks, *of_node))),
                max(known.confidence, confidence, key=CONFIDENCES.index),
            )
    # The same device may be named with and without its node.
    named = {device for node, suspect in suspects.items() if node for device in suspect.devices}
    nowhere = suspects.get(None)
    is_alone = len(suspects) == 1
    if nowhere and not (is_alone or nowhere.ranks or {*nowhere.devices} - named):
        del suspects[None]
    return tuple(suspects.values())


def _places(
    evidence: Evidence, ranks: Sequence[int], hosts: Mapping[int, str]
) -> Iterator[tuple[str | None, Sequence[int]]]:
    """The nodes that evidence names, by name or by rank, each with its ranks."""
    if names := host_names(evidence.host or ""):
        yield from ((name, ranks) for name in names)
        return
    by_node: dict[str | None, list[int]] = defaultdict(list)
    for rank in ranks:
        by_node[next(iter(host_names(hosts.get(rank, ""))), None)].append(rank)
    yield from by_node.items() if by_node else [(None, ranks)]


def host_names(text: str) -> tuple[str, ...]:
    """The host names in a SLURM host list (`node[017-018,020],gpu1`); () for anything else."""
    parts = re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", text[:_MAX_TEXT])
    names = [name for part in parts for name in expand(part, _MOST_NODES)]
    return tuple(dict.fromkeys(names)) if len(names) <= _MOST_NODES else ()


SCHEDULERS = ("slurm", "kubernetes", "torchrun", "ft_launcher", "shell")


_OOM_BY_SLURM = 125
_FORM = re.compile(r"(-?\d{1,4})(?::(\d{1,3}))?")


def evidence_of_exit(exit_code: int | str, scheduler: str | None) -> Evidence | None:
    """The evidence from an exit code; None for 0 and 1, which show nothing.

    Raises `UsageError` for anything but `137`, `-9`, or SLURM's `0:9`.
    """
    form = _FORM.fullmatch(str(exit_code).strip())
    if form is None:
        raise UsageError(
            f"an exit code is a number like 137, -9 or 0:9, not {exit_code!r}",
            instead="--exit-code 137",
        )
    code, number = whole(form[1], least=-MOST) or 0, clamped(form[2] or "0")
    if number == 0 and code < 0:
        code, number = 0, -code
    elif number == 0 and 128 < code < 128 + signal.NSIG:
        number = code - 128
    if number == _OOM_BY_SLURM and scheduler in (None, "slurm"):
        source, name = "SLURM", "oom"
    elif number:
        source = name = signal.Signals(number).name if number in {*signal.Signals} else ""
    elif code == 1 and scheduler in ("torchrun", "ft_launcher"):
        return None
    else:
        source, name = f"exit code {code}", str(code)
    meaning = EXITS.get(name)
    if meaning is None:
        return None
    return Evidence(
        rule=f"exit.{name}",
        failure=meaning.failure,
        role=meaning.role,
        description=f"{source}: {meaning.means}",
        file="--exit-code",
        line=0,
        text=str(exit_code),
        action=meaning.action,
        restart=meaning.restart,
    )


def evidence_of_state(state: str) -> Evidence | None:
    """The evidence from a SLURM state (`OUT_OF_MEMORY`) or a Kubernetes reason."""
    lines = [(0, f"State={state}"), (0, f"Reason: {state}")]
    return next(FailureLogReader("--state").take(lines), None)

"""Weigh the evidence: which piece explains the end, and with which confidence.

A root error outranks the consequences on other ranks; reports of the kernel and the
scheduler outrank those of a program, which sees only effects. `matching` finds the
evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from ckptctl.failures.results import CONFIDENCES, Action, Evidence, Role
from ckptctl.failures.rules import FOLLOWING

SAME_MOMENT_S = 60.0
"""Times of two machines that differ by less do not show which event was first."""

# Symptoms that a program reports, whose cause another source may show.
_YIELDING = (
    *("python.", "cuda.", "nccl.", "collective.", "compile."),
    *("stop.", "exit.", "divergence.loss"),
)
# Of these, a failing device also explains the symptom if its time or its node is uncertain.
_OF_A_DEVICE = ("cuda.", "nccl.", "collective.", "stop.", "exit.")
_FIRM = ("infra-node", "infra-fabric", "infra-storage", "job-oom")
# Suspicions that any other one explains: ranks wait or lose a peer for many reasons.
_WEAK = (
    *("nccl.", "collective.", "stop.sigkill", "slurm.task-killed"),
    *("exit.", "divergence.loss", "xid.other"),
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
        cascades = tuple(each for each in alive if each.role is Role.CASCADE)
        others = tuple(each for each in alive if each.role is Role.NOTE)
        return WeighedEvidence(None, (), cascades, others, "low")
    rest = [each for each in alive if each is not decisive]
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
        if fault.rule.startswith("xid.") and fault.failure.startswith(_OF_THE_JOB)
    ]
    return [
        replace(item, role=Role.CASCADE)
        if item.rule in FOLLOWING and any(_may_follow(item, fault) for fault in faults)
        else item
        for item in evidence
    ]


def _may_follow(item: Evidence, fault: Evidence) -> bool:
    same_device = item.device == fault.device and item.host == fault.host
    return same_device and _may_be_the_same_moment(fault, item) and _earlier(fault, item) is fault


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
    for each in (first, *decision.agreeing):
        if first.failure in _HARDWARE or (first.failure == "hang" and each.ranks):
            certain = each.role is Role.CAUSE and decision.confidence == "low"
            # What a program may have caused names no node to drain.
            weak = each.action == Action.INVESTIGATE
            yield each, "low" if weak else "medium" if certain else decision.confidence
    for each in (*decision.others, *decision.consequences):
        if each.failure in _HARDWARE and each.role is Role.CAUSE:
            yield each, "low" if each.doubt else "medium" if each.action else "high"


def _leads(evidence: Evidence) -> bool:
    return evidence.role in (Role.CAUSE, Role.ROOT, Role.SUSPECT)


def _decisive(
    alive: Sequence[Evidence], first_failed: tuple[str | None, int | None] | None
) -> Evidence | None:
    roots = [each for each in alive if each.role in (Role.CAUSE, Role.ROOT)]
    if roots:
        return _first_root(roots, first_failed)
    suspects = [each for each in alive if each.role is Role.SUSPECT]
    suspects = [each for each in suspects if not each.rule.startswith(_LAST)] or suspects
    # A rank that SIGKILL ended ends the others with SIGTERM; a preemption begins with SIGTERM.
    killed = _first(each for each in suspects if each.rule in _SIGKILL)
    suspects = [e for e in suspects if e.rule != "stop.sigterm" or not _was_first(killed, e)]
    strong = [each for each in suspects if not each.rule.startswith(_WEAK)]
    # An exception that no rule knows only names what the lines about it explain.
    strong = [each for each in strong if not each.rule.startswith(_UNNAMED)] or strong
    hangs = [e for e in suspects if e.rule.startswith(("collective.", "nccl."))]
    # A killed process explains the peers that waited for it, never the reverse.
    return _first(
        strong or [e for e in suspects if e not in hangs] or [e for e in hangs if e.ranks] or hangs
    )


_SIGKILL = ("stop.sigkill", "slurm.task-killed")


def _was_first(first: Evidence | None, second: Evidence) -> bool:
    return first is not None and _earlier(second, first) is first


def _first_root(
    roots: Sequence[Evidence], first_failed: tuple[str | None, int | None] | None
) -> Evidence:
    # What may be of another time or place does not explain what is of the attempt.
    first = _first([each for each in roots if not each.doubt]) or _first(roots) or roots[0]
    if first.role is Role.ROOT and first_failed is not None and first_failed[1] is not None:
        named = [each for each in roots if each.rank == first_failed[1]]
        first = _first(named) or first
    better = [each for each in roots if _knows_better(each, first)]
    first = _first(better) or first
    worse = [each for each in roots if _outranks(each, first)]
    return _first(worse) or first


_OF_THE_JOB = ("job-", "bad-checkpoint")


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
    return first.failure != "infra-fabric" and not first.failure.startswith(_OF_THE_JOB)


def _knows_better(other: Evidence, first: Evidence) -> bool:
    if first.role is not Role.ROOT or other is first:
        return False
    # An access to memory of a failing device also faults in a correct program.
    by_device = first.rule.startswith("xid.") and first.device == other.device
    if not by_device and not first.rule.startswith(_YIELDING):
        return False
    if other.doubt and not first.doubt and not first.rule.startswith(_OF_A_DEVICE):
        return False
    if not _may_be_the_same_moment(first, other):
        return False
    if other.role is Role.CAUSE:
        return other.failure in _FIRM
    # An exception raised while another was handled is more specific than that one.
    generic = first.rule.startswith("python.") and not other.rule.startswith("python.")
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
        return min(first, second, key=lambda each: each.role.place)
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
    if decisive.rule.startswith("recorder."):
        level = 1
    if any(each.role is Role.CAUSE for each in agreeing):
        level += 1
    if any(_leads(each) for each in others):
        level -= 1
    if decisive.doubt and all(each.doubt for each in agreeing):
        level = min(level, 1)
    return CONFIDENCES[max(0, min(level, 2))]

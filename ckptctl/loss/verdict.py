"""What do the counters, the replayed steps and the level add up to?

Whoever asks gets one word, and never a plain yes from a curve alone: `continuous` needs
steps that were logged twice. A wrong counter outweighs everything, steps that agree
outweigh the level after them, and what the log cannot show is never taken as good.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from ckptctl.findings import Finding, in_order
from ckptctl.loss.counters import check_counters
from ckptctl.loss.level import Level, measure_level
from ckptctl.loss.observed import later, of_level, of_other_data, of_replay, share, too_little
from ckptctl.loss.replay import GOOD_ROWS, MIN_ROWS, Agreement, Replay, compare_replay
from ckptctl.loss.resumes import Resume
from ckptctl.loss.vitals import Throughput, check_grad_norm, check_throughput, measure_throughput


class LossVerdict(str, Enum):
    """Whether the loss continued across a resume, worst first."""

    DISCONTINUOUS = "discontinuous"
    SUSPECT = "suspect"
    INCONCLUSIVE = "inconclusive"
    NO_JUMP = "no-jump"
    CONTINUOUS = "continuous"

    @property
    def rank(self) -> int:
        """0 for the worst: verdicts compare by this."""
        return list(LossVerdict).index(self)

    def exit_code(self, *, strict: bool = False) -> int:
        """The exit code of `ckptctl loss`; `strict` wants steps that were logged twice."""
        if self is LossVerdict.NO_JUMP:
            return 31 if strict else 0
        return _EXIT_CODES[self]


_EXIT_CODES = {
    LossVerdict.DISCONTINUOUS: 30,
    LossVerdict.SUSPECT: 32,
    LossVerdict.INCONCLUSIVE: 31,
    LossVerdict.CONTINUOUS: 0,
}

_WRONG, _DOUBTFUL, _OPEN = (
    LossVerdict.DISCONTINUOUS,
    LossVerdict.SUSPECT,
    LossVerdict.INCONCLUSIVE,
)
FORCES: Mapping[str, LossVerdict] = {
    "loss.restarted": _WRONG,
    "loss.not-finite": _WRONG,
    "loss.step": _WRONG,
    "loss.tokens": _WRONG,
    "loss.batch": _WRONG,
    "loss.lr": _WRONG,
    "loss.data": _WRONG,
    "loss.higher": _WRONG,
    "loss.jump": _WRONG,
    "loss.spike": _WRONG,
    "loss.gap": _DOUBTFUL,
    "loss.lr-lower": _DOUBTFUL,
    "loss.other-samples": _DOUBTFUL,
    "loss.drift": _DOUBTFUL,
    "loss.differs": _DOUBTFUL,
    "loss.lower": _DOUBTFUL,
    "loss.raised": _DOUBTFUL,
    "loss.grad-norm": _DOUBTFUL,
    "loss.other-data": _OPEN,
    "loss.too-little": _OPEN,
    "loss.noisy": _OPEN,
    "loss.no-resume": _OPEN,
    "loss.none": _OPEN,
    "loss.interleaved": _OPEN,
    "loss.unread": _OPEN,
}
"""The verdict that each finding forces; those that are not here force none."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What was found about one resume, findings worst first."""

    verdict: LossVerdict
    message: str
    resume: Resume
    replay: Replay
    level: Level
    findings: tuple[Finding, ...]
    throughput: Throughput


def judge(resume: Resume) -> Judgement:
    """Judge one resume."""
    if resume.restarted:
        replay, level = Replay(Agreement.NONE, ()), measure_level((), resume.after)
        findings = in_order(check_counters(resume))
    else:
        replay = compare_replay(
            resume.before, resume.overwritten, resume.after, interval=resume.interval
        )
        level = measure_level(resume.before, resume.after)
        findings = in_order(_findings(resume, replay, level))
    verdict = _verdict(findings, replay)
    return Judgement(
        verdict,
        _message(verdict, findings, replay, level),
        resume,
        replay,
        level,
        findings,
        measure_throughput(resume),
    )


def worst_of(verdicts: Iterable[LossVerdict]) -> LossVerdict:
    """The worst of several verdicts."""
    return min(verdicts, key=lambda verdict: verdict.rank)


def decisive(findings: Iterable[Finding], verdict: LossVerdict) -> Finding | None:
    """The finding that says most about why the verdict is what it is; None for a good one."""
    order = list(FORCES)
    forcing = [finding for finding in findings if FORCES.get(finding.code) is verdict]
    return min(forcing, key=lambda finding: order.index(finding.code), default=None)


def _verdict(findings: Iterable[Finding], replay: Replay) -> LossVerdict:
    forced = [FORCES[finding.code] for finding in findings if finding.code in FORCES]
    if forced:
        return worst_of(forced)
    proven = replay.agrees and replay.fine_enough
    return LossVerdict.CONTINUOUS if proven else LossVerdict.NO_JUMP


def _findings(resume: Resume, replay: Replay, level: Level) -> Iterator[Finding]:
    yield from check_counters(resume)
    yield from of_replay(resume, replay)
    yield from of_other_data(resume, replay)
    rises = list(of_level(resume, level))
    if replay.agrees:
        # The resume is proven by then: what comes later has another cause.
        yield from (later(finding) for finding in rises)
    else:
        yield from rises
        yield from check_grad_norm(resume)
        if replay.agreement in (Agreement.NONE, Agreement.FEW):
            yield from too_little(resume, level)
    yield from check_throughput(resume)


def _message(
    verdict: LossVerdict, findings: tuple[Finding, ...], replay: Replay, level: Level
) -> str:
    """The answer in one line."""
    deciding = decisive(findings, verdict)
    if deciding is not None:
        return deciding.message
    n = len(replay.rows)
    if verdict is LossVerdict.CONTINUOUS:
        exact = replay.agreement is Agreement.IDENTICAL
        how = "to the last digit printed" if exact else f"to {share(replay.most)}"
        few = "" if n >= GOOD_ROWS else f"; {GOOD_ROWS} or more would show a lost optimizer surely"
        return f"{n} steps were logged twice and agree {how}{few}"
    if replay.agrees:
        return f"{n} steps were logged twice and agree to {share(5 * replay.hidden)}, no finer"
    jump = level.smallest_jump
    seen = f"a jump below {share(jump)} would not be seen" if jump is not None else ""
    again = (
        "no step was logged twice" if n < 1 else f"only {n} of {MIN_ROWS} steps were logged twice"
    )
    return f"the loss does not jump, but {again}: {seen}"

"""Turn the measurements of one resume into findings and a verdict.

The verdict `continuous` requires steps that were logged twice, by two attempts, and that
they exclude the faults of `REQUIRED`. A wrong counter outweighs all other evidence. Behind
steps that agree the counters and the level are checked again. What the log does not hold
never counts as good.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

from ckptctl.findings import Finding, in_order
from ckptctl.formatting import counted
from ckptctl.logs.text_logs import OtherRanks
from ckptctl.loss.counters import (
    check_later_counters,
    counter_checks,
    lacks_first_row,
    ledger_check,
    not_logged,
    rank_checks,
    rank_findings,
    without_loss,
)
from ckptctl.loss.evidence import REQUIRED, SMALLEST_JUMP, Fault, decide, loss_checks
from ckptctl.loss.level import (
    LEAST_RISE,
    MIN_BEFORE,
    WINDOWS,
    LossLevel,
    check_collapse,
    check_grad_norm,
    finite,
    is_above,
    measure_level,
    share,
    signed,
)
from ckptctl.loss.replay import (
    EXACT,
    FINE,
    FINE_DIGITS,
    GOOD_ROWS,
    MIN_ROWS,
    Agreement,
    Replay,
    RowOrigin,
    compare_replay,
)
from ckptctl.loss.resumes import LedgerAnswer, LoggedResume
from ckptctl.loss.speed import Throughput, check_throughput, measure_throughput
from ckptctl.model import Ordered


class LossVerdict(Ordered):
    """Whether the loss continued across a resume, worst first."""

    DISCONTINUOUS = "discontinuous"
    SUSPECT = "suspect"
    INCONCLUSIVE = "inconclusive"
    NO_JUMP = "no-jump"
    CONTINUOUS = "continuous"

    def exit_code(self, *, strict: bool = False) -> int:
        """The exit code of `ckptctl loss`; with `strict`, `no-jump` is 31."""
        if strict and self is LossVerdict.NO_JUMP:
            return 31
        return _EXIT_CODES.get(self, 0)


_EXIT_CODES = {LossVerdict.DISCONTINUOUS: 30, LossVerdict.SUSPECT: 32, LossVerdict.INCONCLUSIVE: 31}

FORCES: Mapping[str, LossVerdict] = {
    code: verdict
    for verdict, codes in (
        (
            LossVerdict.DISCONTINUOUS,
            """loss.restarted loss.not-finite loss.step loss.tokens loss.batch loss.lr loss.data
            loss.higher loss.jump loss.spike""",
        ),
        (
            LossVerdict.SUSPECT,
            """loss.gap loss.lr-lower loss.other-samples loss.drift loss.differs loss.lower
            loss.level-shift loss.collapse loss.rank-not-finite loss.grad-norm loss.ema
            loss.later""",
        ),
        (
            LossVerdict.INCONCLUSIVE,
            """loss.no-value loss.rank-differs loss.copied loss.constant loss.other-data
            loss.other-ranks
            loss.too-little loss.noisy loss.no-resume loss.none loss.interleaved loss.unread""",
        ),
    )
    for code in codes.split()
}
"""The verdict that each finding forces, most specific first; other findings force none."""


@dataclass(frozen=True, slots=True)
class Assessment:
    """The verdict of one resume and its evidence; findings are worst first."""

    verdict: LossVerdict
    """Whether the loss continued."""
    message: str
    """The verdict and its reason in one line."""
    resume: LoggedResume
    """The resume, without its rows."""
    replay: Replay
    """The steps that were logged twice."""
    level: LossLevel
    """The level of the loss before and after."""
    findings: tuple[Finding, ...]
    """The findings, worst first."""
    faults: tuple[Fault, ...]
    """The ways in which a resume goes wrong: found, excluded, then open ones."""
    throughput: Throughput
    """The speed after the resume, compared with the band before it."""


def assess(
    resume: LoggedResume, ledger: LedgerAnswer | None = None, other_ranks: OtherRanks | None = None
) -> Assessment:
    """Assess one resume, with what the data ledger of the run and the dropped ranks show."""
    if resume.restarted:
        replay, level = Replay(Agreement.NONE, ()), measure_level((), resume.after)
    else:
        replay, level = compare_replay(resume), measure_level(resume.before, resume.after)
    lacking = list(without_loss(resume))
    counters = list(counter_checks(resume, replay, lacking))
    counters += [] if ledger is None else [ledger_check(resume, ledger)]
    findings = [finding for check in counters for finding in check.findings]
    if not resume.restarted:
        findings += lacking
        if other_ranks is not None:
            of_dropped_ranks = list(rank_findings(resume, replay, other_ranks))
            findings += of_dropped_ranks
            counters += rank_checks(of_dropped_ranks)
        findings += _loss_findings(resume, replay, level, {finding.code for finding in findings})
    losses = list(loss_checks(resume, replay, level, findings))
    findings += [
        finding for check in losses for finding in check.findings if finding not in findings
    ]
    if not resume.restarted:
        findings += check_throughput(resume)
    ordered = in_order(findings)
    faults = decide([*counters, *losses])
    forced = [FORCES[finding.code] for finding in ordered if finding.code in FORCES]
    is_proof = replay.is_proof and not _not_excluded(faults)
    verdict = LossVerdict.CONTINUOUS if is_proof else LossVerdict.NO_JUMP
    verdict = worst_of(forced or [verdict])
    return Assessment(
        verdict,
        _message(verdict, ordered, replay, level, faults),
        resume,
        replay,
        level,
        ordered,
        faults,
        measure_throughput(resume),
    )


def worst_of(verdicts: Iterable[LossVerdict]) -> LossVerdict:
    """The worst of several verdicts."""
    return min(verdicts, key=lambda verdict: verdict.place)


def decisive(findings: Iterable[Finding], verdict: LossVerdict) -> Finding | None:
    """The finding that best explains the verdict; None where no finding forces it."""
    order = list(FORCES)
    forcing = [finding for finding in findings if FORCES.get(finding.code) is verdict]
    return min(forcing, key=lambda finding: order.index(finding.code), default=None)


def _not_excluded(faults: Iterable[Fault]) -> list[Fault]:
    """The faults that keep the verdict from `continuous`."""
    return [fault for fault in faults if fault.name in REQUIRED and not fault.excluded]


def _loss_findings(
    resume: LoggedResume, replay: Replay, level: LossLevel, counters: Container[str]
) -> Iterator[Finding]:
    """Yield what the losses show; `counters` are the codes of what the counters show."""
    if lacks_first_row(resume, replay):
        yield Finding(
            "loss.row-missing",
            str(resume.position),
            f"the first row after the resume is step {resume.first_step:,}; the one before it is "
            f"missing in the log, and the {len(replay.rows)} steps behind it agree",
            found=f"step {resume.first_step:,}",
        )
    yield from not_logged(resume)
    yield from replay_findings(resume, replay)
    yield from other_data_findings(resume, replay)
    if replay.agrees:
        later = later_findings(resume.beyond(replay.rows[-1].step), replay)
        yield from (finding for finding in later if finding.code not in counters)
    else:
        yield from level_findings(resume, level)
        yield from check_grad_norm(resume)
        yield from check_collapse(resume)
        if replay.agreement in (Agreement.NONE, Agreement.FEW):
            yield from too_little(resume, level)


def _message(
    verdict: LossVerdict,
    findings: tuple[Finding, ...],
    replay: Replay,
    level: LossLevel,
    faults: Iterable[Fault],
) -> str:
    """The verdict and its reason in one line."""
    deciding = decisive(findings, verdict)
    if deciding is not None:
        return deciding.message
    n = len(replay.rows)
    if verdict is LossVerdict.CONTINUOUS:
        exact = replay.agreement is Agreement.IDENTICAL
        how = "to the last printed digit" if exact else f"within {share(replay.most)}"
        return f"{n} steps were logged twice and agree {how}"
    if replay.is_proof:
        fault = _not_excluded(faults)[0]
        return (
            f"{n} steps were logged twice and agree, which does not exclude {fault.name}: "
            f"{fault.why}"
        )
    if replay.agrees and replay.fine_enough:
        return (
            f"{n} steps were logged twice and are equal, and nothing shows that another attempt "
            "trained them"
        )
    if replay.agrees:
        return (
            f"{n} steps were logged twice and agree, but the log rounds the loss by "
            f"{share(replay.rounding)}"
        )
    jump = level.smallest_jump
    unseen = f"; a jump below {share(jump)} would not be detected" if jump is not None else ""
    twice = (
        "no step was logged twice"
        if n < 1
        else f"only {n} of at least {MIN_ROWS} steps were logged twice"
    )
    return f"the loss does not jump, but {twice}{unseen}"


# A rise is a jump where it exceeds the threshold by the first factor, or in two windows by
# the second.
_JUMP_EXCESS, _JUMP_EXCESS_TWICE = 1.6, 1.25
_SPIKES = 2
# Standard errors. Another order of the same data gave at most 2.1, no loaded state 2.4 to 19.
_Z_SHIFT, _Z_JUMP = 4.0, 6.0
# On another number of ranks, where random numbers change every loss.
_EQUAL_BY_CHANCE = 0.005
_FOR_HIGHER = 8  # rows


def replay_findings(resume: LoggedResume, replay: Replay) -> Iterator[Finding]:
    """Yield a finding for the steps that were logged twice, unless they prove the resume."""
    n = len(replay.rows)
    if replay.agrees and replay.origin is RowOrigin.COPIED:
        yield Finding(
            "loss.copied",
            str(resume.position),
            f"{n} rows repeat rows of the log, and {replay.copied_because}: a logger or a log "
            "shipper may have written them twice",
            expected="rows of another attempt, with their own times",
            found=f"{n} equal rows",
        )
    elif replay.agrees and not replay.varies:
        yield Finding(
            "loss.constant",
            str(resume.position),
            f"the loss hardly varies over the {n} steps logged twice, so equal rows prove nothing",
            expected="a loss that differs from step to step",
            found=f"{replay.rows[0].before.loss.value:.7g}" if replay.rows[0].before.loss else "",
        )
    elif replay.agrees and replay.origin is RowOrigin.UNKNOWN:
        yield Finding(
            "loss.unmarked",
            str(resume.position),
            f"{n} rows repeat earlier rows, without a time in them and without a line or a file "
            "that shows the start of another process",
            expected="rows with a time, or the step of the checkpoint (--resume-step)",
        )
    if replay.agrees and not replay.fine_enough:
        yield Finding(
            "loss.low-precision",
            str(resume.position),
            f"{len(replay.rows)} steps logged twice agree, but the log rounds the loss by "
            f"{share(replay.rounding)}: a lost optimizer state would not be detected",
            expected=f"rounded by at most {share(FINE)}: {FINE_DIGITS}",
            found=f"rounded by {share(replay.rounding)}",
        )
    if replay.agreement not in _MEANINGS:
        return
    code, meaning = _MEANINGS[replay.agreement]
    if replay.same_first_norm is False or (replay.same_first_norm and replay.first_is_exact):
        meaning = _BY_NORM.get((code, replay.same_first_norm), meaning)
    if _is_of_ranks(resume, replay):
        code, meaning = "loss.other-ranks", _OTHER_RANKS
    if replay.agreement in (Agreement.HIGHER, Agreement.LOWER):
        how = f"differ by {signed(replay.middle)} in the median"
    elif replay.agreement is Agreement.DRIFT:
        first = replay.rows[0].difference
        how = f"begin equal ({signed(first)}) and then differ by up to {share(replay.most)}"
    else:
        how = f"differ by up to {share(replay.most)}"
    yield Finding(
        code,
        str(resume.position),
        f"{n} steps logged twice {how}: {meaning}",
        expected="the same losses within 0.03 %",
        found=f"median difference {share(replay.median)}, largest {share(replay.most)}",
    )


_OTHER_RANKS = (
    "the same batches on another number of ranks; dropout and batch normalization may explain it"
)


def _is_of_ranks(resume: LoggedResume, replay: Replay) -> bool:
    """Whether another number of ranks can be the cause: other random numbers and statistics.

    These change single losses more than their median, and the first loss as much as the others.
    """
    if resume.resume_point is None or resume.resume_point.growth == 1:
        return False
    if replay.agreement is Agreement.DRIFT:
        return _equal_by_chance(resume, replay) > _EQUAL_BY_CHANCE
    if replay.agreement is Agreement.HIGHER:
        is_small = replay.middle <= LEAST_RISE or replay.z_score <= _Z_JUMP
        # A loss around zero is no worse where it is higher.
        losses = [row.before.loss.value for row in replay.rows if row.before.loss]
        return is_small or len(losses) < _FOR_HIGHER or min(losses) <= 0
    return replay.agreement in (Agreement.DIFFERENT, Agreement.LOWER)


def _equal_by_chance(resume: LoggedResume, replay: Replay) -> float:
    """How probable it is that the first loss is as equal as it is, if it changed as later ones."""
    first, *rest = replay.rows
    changes = math.sqrt(fmean(row.difference**2 for row in rest))
    near = max(abs(first.difference), 2 * replay.rounding, EXACT)
    if changes <= near:
        return 1.0
    # A loss that is exactly 0 where no action is rewarded is equal to many others.
    losses = [number.value for _, number in finite(resume.before)]
    value = first.before.loss.value if first.before.loss else 0.0
    n_equal = sum(abs(loss - value) <= EXACT * abs(value) for loss in losses)
    return max(near / changes, n_equal / max(1, len(losses)))


_MEANINGS = {
    Agreement.DRIFT: (
        "loss.drift",
        "the same weights and data, but another update (optimizer, learning rate)",
    ),
    Agreement.HIGHER: ("loss.higher", "the same batches at a higher loss"),
    Agreement.LOWER: ("loss.lower", "the same batches at a lower loss"),
    Agreement.DIFFERENT: (
        "loss.differs",
        "the same batches, but other results (random numbers, or a small change of weights)",
    ),
    Agreement.OTHER_DATA: (
        "loss.other-data",
        "as much as different batches, so the order or position of the data has changed",
    ),
}


# The first gradient norm is computed before any update, so it differs only where the
# weights, the data or the random numbers do.
_BY_NORM = {
    ("loss.drift", True): "the first gradient norm agrees as well, so weights, data and random "
    "numbers are the same, and the update is not (optimizer, learning rate)",
    ("loss.differs", False): "the first gradient norm differs before any update, so the random "
    "numbers or the data are not the same",
}


def later_findings(later: LoggedResume, replay: Replay) -> Iterator[Finding]:
    """Yield findings for what stops continuing behind the steps that agree."""
    if not later.after:
        return
    yield from check_later_counters(later)
    level = measure_level(later.before, later.after)
    # A rise that the steps logged twice hold as well belongs to the run.
    is_new = is_above(later.after, [row.before for row in replay.rows], level.noise)
    # The resume has worked so far, so a rise at the limit of what is usual is no evidence.
    rises = level_findings(later, level) if is_new else ()
    jumps = [finding for finding in rises if finding.code != "loss.level-shift"]
    for finding in (*jumps, *check_grad_norm(later), *check_collapse(later)):
        yield Finding(
            "loss.later",
            finding.where,
            f"{finding.message}; the earlier steps agree, so the cause began there",
            finding.expected,
            finding.found,
        )


def other_data_findings(resume: LoggedResume, replay: Replay) -> Iterator[Finding]:
    """Yield a finding where steps over other batches are nearly all higher than before."""
    if replay.agreement is not Agreement.OTHER_DATA or len(replay.rows) < GOOD_ROWS:
        return
    if replay.z_score <= _Z_SHIFT or replay.middle <= LEAST_RISE:
        return
    yield Finding(
        "loss.jump" if replay.z_score > _Z_JUMP else "loss.level-shift",
        str(resume.position),
        f"over other batches, the {len(replay.rows)} steps logged twice differ by "
        f"{signed(replay.middle)} in the median, which is {replay.z_score:.0f} standard errors",
        expected="as many steps above as below",
        found=signed(replay.middle),
    )


def level_findings(resume: LoggedResume, level: LossLevel) -> Iterator[Finding]:
    """Yield findings where the loss is higher after the resume."""
    if level.n_spikes >= _SPIKES:
        yield Finding(
            "loss.spike",
            str(resume.position),
            f"{level.n_spikes} of the first rows after the resume are far above all rows before it",
            found=f"{level.n_spikes} rows",
        )
    if not level.shifts:
        return
    worst = max(level.shifts, key=lambda shift: shift.excess)
    if worst.excess <= 1:
        return
    n_over = sum(shift.excess > _JUMP_EXCESS_TWICE for shift in level.shifts)
    code = "loss.jump" if worst.excess > _JUMP_EXCESS or n_over >= 2 else "loss.level-shift"
    yield Finding(
        code,
        str(resume.position),
        f"the median loss of the first {worst.n_rows} rows is {signed(worst.found)} from the one "
        f"before; without a resume it rises by at most {share(worst.threshold)}",
        expected=f"at most {signed(worst.threshold)}",
        found=signed(worst.found),
    )


def too_little(resume: LoggedResume, level: LossLevel) -> Iterator[Finding]:
    """Yield a finding for too few rows to compare levels, or too much noise to detect a jump."""
    smallest = level.smallest_jump
    if smallest is None:
        needs = [
            f"{counted(least - there, 'more row')} {what}"
            for least, there, what in (
                (MIN_BEFORE, level.n_before, "before the resume"),
                (WINDOWS[0], level.n_after, "after it"),
            )
            if there < least
        ]
        yield Finding(
            "loss.too-little",
            str(resume.position),
            f"{counted(level.n_before, 'row')} with a loss before the resume and {level.n_after} "
            f"after it are too few to compare; {' and '.join(needs)} are needed",
            expected=f"{MIN_BEFORE} rows before, {WINDOWS[0]} after",
            found=f"{level.n_before} before, {level.n_after} after",
        )
    elif smallest > SMALLEST_JUMP:
        yield Finding(
            "loss.noisy",
            str(resume.position),
            f"the loss varies by {share(level.noise)} from row to row, so only a jump above "
            f"{share(smallest)} would be detected",
            expected=f"a jump of {share(SMALLEST_JUMP)} can be detected",
            found=f"a jump of {share(smallest)}",
        )

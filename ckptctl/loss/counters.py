"""Check the exact numbers of a resume: steps, tokens or samples, learning rate, digests.

A wrong one proves a fault whatever the loss does. Fields that the log does not hold are
not checked. `replay` and `level` compare the loss itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from operator import attrgetter
from statistics import median

from ckptctl.findings import Finding
from ckptctl.formatting import command_line, counted, verb
from ckptctl.logs.rows import Number, Row
from ckptctl.logs.text_logs import OtherRanks
from ckptctl.loss.evidence import BATCH, COUNTER, DATA, NOT_FINITE, RATE, WEIGHTS, FaultCheck
from ckptctl.loss.replay import Agreement, Replay
from ckptctl.loss.resumes import LedgerAnswer, LoggedResume
from ckptctl.loss.segments import Boundary, log_interval

_N_RECENT = 20
_LR_SAME = 1e-3  # relative
_LR_EXPECTED = 0.02  # relative, without a step logged twice to compare with
_BATCH = 0.02  # relative
_RISING = 4  # rows
_LR_ROWS = 50
_N_LOST = 5  # rows
_N_LOST_ROW = 10  # rows that agree behind one that is missing


def counter_checks(
    resume: LoggedResume, replay: Replay, lacking: Sequence[Finding]
) -> Iterator[FaultCheck]:
    """Yield a check for each number that has to continue across the resume.

    `lacking` are the findings of `without_loss`.
    The findings are `loss.restarted`, `loss.not-finite`, `loss.step`, `loss.gap`,
    `loss.tokens`, `loss.batch`, `loss.lr`, `loss.lr-lower`, `loss.data`, `loss.other-samples`.
    """
    is_named = resume.resume_point is not None and resume.boundary is not Boundary.ASKED
    follows = "the first step follows the step of the checkpoint"
    if lacks_first_row(resume, replay):
        yield FaultCheck(
            COUNTER, "every other step after the checkpoint was logged twice, and agrees"
        )
    else:
        yield FaultCheck(COUNTER, follows if is_named else "", findings=tuple(_step(resume)))
    if resume.restarted:
        yield FaultCheck(COUNTER, findings=(_restarted(resume),))
        return
    n_losses = sum(row.loss is not None for row in resume.after)
    finite = f"{counted(n_losses, 'loss', 'losses')} after the resume are finite"
    yield FaultCheck(
        NOT_FINITE,
        finite if n_losses else "",
        "no loss after the resume",
        doubt="".join(finding.message for finding in lacking),
        findings=tuple(_not_finite(resume)),
    )
    counts = tuple(_tokens(resume))
    yield FaultCheck(BATCH, _counts_compared(resume), "log tokens or samples", findings=counts)
    rates = tuple(_learning_rate(resume))
    yield FaultCheck(RATE, _rates_compared(resume), "log the learning rate", findings=rates)
    yield FaultCheck(DATA, _digests_compared(resume), findings=tuple(_samples_seen(resume)))


def ledger_check(resume: LoggedResume, ledger: LedgerAnswer) -> FaultCheck:
    """Whether the data ledger of the run shows repeated or skipped samples at this resume."""
    first = resume.first_step
    if ledger.step < first or ledger.since >= first:
        end = f"holds the steps after {ledger.since:,}, up to {ledger.step:,}"
        return FaultCheck(
            DATA, lacks=f"the data ledger {end}: it is compared once a later step is saved"
        )
    if ledger.verdict == "excluded":
        return FaultCheck(DATA, f"the data ledger up to step {ledger.step:,}: {ledger.message}")
    earlier = ledger.after_step is not None and ledger.after_step < first - 1
    if ledger.verdict != "found" or earlier:
        return FaultCheck(DATA, lacks=f"the data ledger: {ledger.message}")
    finding = Finding(
        "loss.data",
        ledger.source,
        f"the data ledger up to step {ledger.step:,} shows it: {ledger.message}",
        expected="each sample of an epoch trained once",
        next_command=command_line("data", ledger.source),
    )
    return FaultCheck(DATA, findings=(finding,))


def _counts_compared(resume: LoggedResume) -> str:
    """Which counts were compared; empty where none were."""
    for what, count in _COUNTS:
        n = len(list(_twice(resume, count)))
        if n:
            return f"the {what} of {counted(n, 'step')} logged twice agree"
        if _batches(resume, count) is not None:
            return f"a step has as many {what} as before"
    return ""


def _rates_compared(resume: LoggedResume) -> str:
    """Which learning rates were compared; empty where none were."""
    n = len(list(_twice(resume, _lr_of)))
    if n:
        return f"the learning rates of {counted(n, 'step')} logged twice agree"
    before = [row for row in resume.before if row.lr is not None]
    first = next((row for row in resume.after if row.lr is not None), None)
    if first is None or len(before) < _RISING or _lr_trend(before[-_N_RECENT:], first) is None:
        return ""
    return f"the learning rate of step {first.step:,} continues that of the steps before"


def _digests_compared(resume: LoggedResume) -> str:
    old = {row.step for row in resume.overwritten if row.samples_digest}
    is_compared = any(row.samples_digest and row.step in old for row in resume.after)
    return "the digests of the samples agree" if is_compared else ""


def check_later_counters(later: LoggedResume) -> Iterator[Finding]:
    """Yield findings for counts and a learning rate that stop continuing after equal steps.

    `later` is the resume with its boundary behind the steps that agree.
    """
    yield from _tokens(later)
    # A schedule that restarted before may do so right behind the steps that agree.
    if not _has_cycles([row for row in later.before if row.lr is not None]):
        yield from _learning_rate_by_trend(later)


def _restarted(resume: LoggedResume) -> Finding:
    row = resume.after[0]
    before = resume.overwritten
    begins = min((earlier.step for earlier in (*resume.before, *before)), default=row.step)
    # The later log may lead up to the first step of the earlier one.
    joins = row.step < begins <= resume.after[-1].step + max(1, resume.interval)
    order = ", or the logs were not given oldest first" if joins else ""
    message = (
        f"the job began at step {row.step:,}, no later than the log before it; it did not resume"
        f"{order}"
    )
    # The first step of a fresh start is that of any log.
    if before and before[0].step == row.step > log_interval(before[:100]):
        message = (
            f"the job began at step {row.step:,} again, where the log before it begins: it did not "
            f"resume from what that log saved up to step {resume.overwritten[-1].step:,}, or that "
            "log saved nothing and both resumed from one checkpoint (then name it: --resume-step)"
        )
    return Finding(
        "loss.restarted",
        str(row.position),
        message,
        expected="the step after a checkpoint",
        found=f"step {row.step:,}",
    )


def _not_finite(resume: LoggedResume) -> Iterator[Finding]:
    """Yield a finding for a loss that is NaN or infinite.

    Single values are none where there were some before: a loss scale that is adapted leaves
    them. A job of which no value is finite has resumed from weights that were lost before.
    """
    after = [row for row in resume.after if row.loss]
    bad = _bad(after)
    was_bad = _bad(resume.before[-50:])
    lost = len(bad) == len(after) >= _N_LOST
    if not bad or (was_bad and not lost):
        return
    row = bad[0]
    found = str(row.loss.value) if row.loss else ""
    message = (
        f"the loss of step {row.step:,} is {found}, {row.step - resume.first_step:,} steps "
        "after the first step of the resumed job"
    )
    if was_bad:
        steps = [earlier.step for earlier in resume.before if earlier.loss and not _bad([earlier])]
        last = f"the last finite one is that of step {steps[-1]:,}" if steps else "nor before it"
        message = (
            f"no loss after the resume is finite ({len(bad):,} rows), {last}: the checkpoint was "
            "saved after that, and an older one is needed"
        )
    yield Finding(
        "loss.not-finite", str(row.position), message, expected="a finite number", found=found
    )


def rank_findings(
    resume: LoggedResume, replay: Replay, other_ranks: OtherRanks
) -> Iterator[Finding]:
    """Yield what the ranks show whose rows are dropped.

    That is `loss.rank-not-finite`, `loss.rank-differs` for steps logged twice that differ though
    those of the kept rank agree, and `loss.one-rank` where nothing else was compared.
    """
    others = other_ranks.others()
    is_after = _place_after(resume)
    for rank, other in others.items():
        bad = [row for row in other.not_finite if is_after(row)]
        if bad and bad[0].loss is not None:
            yield Finding(
                "loss.rank-not-finite",
                str(bad[0].position),
                f"the loss of {_rank_name(rank)} at step {bad[0].step:,} is {bad[0].loss.value}; "
                f"the losses of {_rank_name(other_ranks.kept)} were compared",
                expected="a finite number",
                found=str(bad[0].loss.value),
            )
            break
    for rank, other in others.items():
        differing = [pair for pair in other.twice if is_after(pair[1]) and _differ(*pair)]
        if differing and replay.agrees:
            before, after = differing[0]
            values = [row.loss.value for row in (before, after) if row.loss is not None]
            yield Finding(
                "loss.rank-differs",
                str(after.position),
                f"{counted(len(differing), 'step')} that {_rank_name(rank)} logged twice "
                f"{verb(len(differing), 'differs', 'differ')} (step {after.step:,}: {values[0]:.6g}"
                f" and {values[1]:.6g}), though those of {_rank_name(other_ranks.kept)} agree",
                expected=f"{values[0]:.6g}",
                found=f"{values[1]:.6g}",
            )
            break
    n_differing = sum(other.differs for other in others.values())
    if n_differing:
        yield Finding(
            "loss.one-rank",
            "",
            f"the losses of {_rank_name(other_ranks.kept)} were compared; "
            f"{counted(n_differing, 'other rank')} logged other losses, of which no level was "
            "compared",
            found=counted(n_differing, "other rank"),
        )


def rank_checks(findings: Sequence[Finding]) -> Iterator[FaultCheck]:
    """Yield a check that leaves open what other ranks cast doubt on."""
    for finding in findings:
        if finding.code == "loss.rank-not-finite":
            yield FaultCheck(NOT_FINITE, findings=(finding,))
        elif finding.code == "loss.rank-differs":
            yield FaultCheck(WEIGHTS, doubt=finding.message)
            yield FaultCheck(DATA, doubt=finding.message)


def _place_after(resume: LoggedResume) -> Callable[[Row], bool]:
    """A function that tells whether a row of any rank is of the resumed job."""
    files = {row.position.file for row in resume.after}
    before = (*resume.before, *resume.overwritten)
    last = before[-1].position if before else None

    def is_after(row: Row) -> bool:
        if last is not None and row.position.file == last.file and row.position.line < last.line:
            return False
        return row.position.file in files and row.step >= resume.first_step

    return is_after


_RANKS_SAME = 1.5e-3  # relative


def _differ(before: Row, after: Row) -> bool:
    if before.loss is None or after.loss is None or not math.isfinite(before.loss.value):
        return False
    a, b = before.loss, after.loss
    allowed = max(_RANKS_SAME * abs(a.value), 2 * a.quantum, 2 * b.quantum)
    return math.isfinite(b.value) and abs(a.value - b.value) > allowed


def _rank_name(rank: tuple[str | None, int | None] | None) -> str:
    host, number = rank or (None, None)
    if number is not None and number < 0:
        return "a further rank"
    named = [*([f"rank {number}"] if number is not None else []), *([host] if host else [])]
    return " of ".join(named) or "a rank without a name"


def not_logged(resume: LoggedResume) -> Iterator[Finding]:
    """Yield `loss.not-logged` for steps between the two jobs that neither of them logged."""
    if not resume.before or resume.overwritten:
        return
    last, first = resume.before[-1].step, resume.first_step
    if first - last <= 2 * _spacing(resume):
        return
    yield Finding(
        "loss.not-logged",
        str(resume.position),
        f"the logs hold no row between step {last:,} and step {first:,}: what these "
        f"{first - last - 1:,} steps did to the loss was not seen",
        expected=f"rows of the steps after {last:,}",
        found=f"step {first:,}",
    )


def without_loss(resume: LoggedResume) -> Iterator[Finding]:
    """Yield `loss.no-value` where rows have no loss that would have had one before the resume.

    Such rows are usual where as many of them followed one another before. In the middle of
    the rows, a row counts only where the log has a loss without a value.
    """

    def lack_loss(rows: Sequence[Row]) -> bool:
        return any(row.lacks_loss for row in rows)

    runs = _runs_without(resume.after)
    usual = max(map(len, _runs_without((*resume.before, *resume.overwritten))), default=0)
    is_end = bool(runs) and runs[-1][-1] is resume.after[-1]
    inner = runs[:-1] if is_end else runs
    usual_at_end = max([usual, *(len(run) for run in inner if not lack_loss(run))])
    chosen = [run for run in inner if lack_loss(run) and len(run) > usual]
    chosen += [run for run in runs[len(inner) :] if len(run) > usual_at_end]
    if not chosen:
        return
    n_rows, first = sum(map(len, chosen)), chosen[0][0]
    rows = (*resume.before, *resume.after)
    with_loss = [row.step for row in rows if row.has_loss and row.step < first.step]
    since = f"after step {with_loss[-1]:,} " if with_loss else "after the resume "
    yield Finding(
        "loss.no-value",
        str(first.position),
        f"{counted(n_rows, 'row')} {since}{'has' if n_rows == 1 else 'have'} no loss "
        "(`null` is how orjson and others write NaN), so nothing shows what it was",
        expected="a loss in each row, as before",
        found=f"{counted(n_rows, 'row')} without one",
    )


def _runs_without(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows without a loss, as runs of neighbours."""
    runs = groupby(rows, attrgetter("has_loss"))
    return [list(run) for has_loss, run in runs if not has_loss]


def _bad(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.loss and not math.isfinite(row.loss.value)]


def lacks_first_row(resume: LoggedResume, replay: Replay) -> bool:
    """Whether only the first row after the resume is missing, and all others repeat exactly."""
    if resume.resume_point is None or replay.agreement is not Agreement.IDENTICAL:
        return False
    spacing = _spacing(resume)
    latest = resume.resume_point.step + spacing + (spacing > 1)
    is_close = latest < resume.first_step <= latest + spacing
    return is_close and replay.is_proof and len(replay.rows) >= _N_LOST_ROW


def _spacing(resume: LoggedResume) -> int:
    return max(1, resume.interval, log_interval(resume.after[:_N_RECENT]))


def _step(resume: LoggedResume) -> Iterator[Finding]:
    """Compare the first step with the step of the checkpoint, where that is known.

    The range is the spacing of the rows, and the step of the checkpoint itself: a trainer
    that counts steps from zero logs it again.
    """
    resume_point, first = resume.resume_point, resume.first_step
    if resume_point is None:
        return
    spacing = _spacing(resume)
    # fairseq logs its first row an interval and one step after the checkpoint.
    last = resume_point.step + spacing + (spacing > 1)
    if resume_point.step <= first <= last:
        return
    knows_spacing = max(len(resume.before), len(resume.after)) > 2
    if first < resume_point.step:
        code, how = "loss.step", "starts before"
    elif resume_point.source == "asked" and knows_spacing:
        # The caller names the checkpoint, so the first step is that of another one.
        code, how = "loss.step", "leaves a gap after"
    elif not knows_spacing or _tokens_explain_gap(resume):
        return
    else:
        code, how = "loss.gap", "leaves a gap after"
    yield Finding(
        code,
        str(resume.after[0].position),
        f"the log {how} the checkpoint: the checkpoint holds step {resume_point.step:,}, and the "
        f"first step logged after the resume is {first:,}",
        expected=f"step {resume_point.step:,} to {last:,}",
        found=f"step {first:,}",
    )


def _tokens_explain_gap(resume: LoggedResume) -> bool:
    """Whether the count of tokens or samples covers the steps between: only rows are missing."""
    for _, count in _COUNTS:
        found = _counted_from(resume, count)
        if found is not None:
            expected, counted, per_step = found
            return abs(counted - expected) <= 1.5 * per_step
    return False


def _tokens(resume: LoggedResume) -> Iterator[Finding]:
    """Yield a finding for the count of tokens or samples, or for their number per step."""
    for what, count in _COUNTS:
        finding = (
            _count(resume, what, count)
            or _batch(resume, what, count)
            or _count_jump(resume, what, count)
        )
        if finding is not None:
            yield finding
            return


Count = Callable[[Row], "Number | None"]


_tokens_of: Count = attrgetter("tokens")
_samples_of: Count = attrgetter("samples")
_lr_of: Count = attrgetter("lr")
_COUNTS = (("tokens", _tokens_of), ("samples", _samples_of))


def _count(resume: LoggedResume, what: str, count: Count) -> Finding | None:
    twice = list(_twice(resume, count))
    rates = _per_step(resume.after[:_N_RECENT], count)
    if _counts_in_process(resume, twice):
        return None
    for row, a, b in twice:
        if abs(a.value - b.value) > max(a.quantum, b.quantum):
            if rates and _follows_ranks(resume, row, a.value, b.value, median(rates)):
                return None
            return _count_finding(row, what, a.value, b.value, "before the resume it had")
    if twice:
        return None
    counted = _counted_from(resume, count)
    if counted is None:
        return None
    expected, found, per_step = counted
    if abs(found - expected) <= 1.5 * per_step:
        return None
    row = next(row for row in resume.after if count(row) is not None)
    if _follows_ranks(resume, row, expected, found, per_step):
        return None
    return _count_finding(resume.after[0], what, expected, found, "the steps before lead to")


def _counts_in_process(resume: LoggedResume, twice: Sequence[tuple[Row, Number, Number]]) -> bool:
    """Whether a count begins anew with each process, and its increments repeat.

    TRL's counts of tokens do. Increments that vary show that the data is the same; equal
    ones would repeat with any data.
    """
    if not twice or twice[0][0] is not resume.after[0]:
        return False
    gaps = [(later[1].value - row[1].value, later[2].value - row[2].value)
            for row, later in pairwise(twice)]  # fmt: skip
    allowed = max(max(a.quantum, b.quantum) for _, a, b in twice)
    if len({was for was, _ in gaps}) < _RISING or any(abs(a - b) > allowed for a, b in gaps):
        return False
    return 0 < twice[0][2].value <= 2 * max(now for _, now in gaps)


def _follows_ranks(
    resume: LoggedResume, row: Row, expected: float, found: float, per_step: float
) -> bool:
    """Whether the count is off by the number of ranks, or by its change, and by nothing else.

    torchtitan saves the tokens of one rank and logs their sum over the ranks of now, so
    the logged count changes with their number, and a checkpoint holds a part of it
    (`torchtitan/train.py`, `ntokens_seen`).
    """
    point = resume.resume_point
    if point is None or expected <= 0:
        return False
    since = per_step * (row.step - point.step)
    held, shown = expected - since, found - since
    if held <= 0:
        return False
    if point.growth != 1:
        return abs(shown - held * point.growth) <= 1.5 * per_step
    if any(row.tokens for row in (*resume.before, *resume.overwritten)):
        return False  # the log before has the same sum
    n_ranks = round(shown / held)
    # Batches are powers of two, so that a wrong count is often a multiple as well.
    fits = point.world_size is not None and n_ranks > 0 and point.world_size % n_ranks == 0
    return n_ranks > 1 and fits and abs(shown - held * n_ranks) <= 1.5 * per_step


def _count_jump(resume: LoggedResume, what: str, count: Count) -> Finding | None:
    """A finding for a count that jumps between two rows after the resume."""
    if _counts_in_process(resume, list(_twice(resume, count))):
        return None  # its increments vary with the data
    after = [row for row in resume.after if count(row) is not None]
    rates = _per_step(after, count)
    if len(rates) < 2 or median(rates) <= 0:
        return None
    per_step = median(rates)
    # Batches that vary do so before the resume, too.
    usual = max(
        (abs(excess) for _, _, excess in _excesses(resume.before, count, per_step)), default=0
    )
    for row, expected, excess in _excesses(after, count, per_step):
        if abs(excess) > 1.5 * per_step + 2 * usual:
            return _count_finding(row, what, expected, expected + excess, "the row before leads to")
    return None


def _excesses(
    rows: Sequence[Row], count: Count, per_step: float
) -> Iterator[tuple[Row, float, float]]:
    """Yield each row with its expected count, and how far its count is off beyond rounding."""
    for earlier, row in pairwise(rows):
        a, b = count(earlier), count(row)
        if a is None or b is None:
            continue
        expected = a.value + per_step * (row.step - earlier.step)
        off = b.value - expected
        yield row, expected, math.copysign(max(0.0, abs(off) - a.quantum - b.quantum), off)


def _count_finding(row: Row, what: str, expected: float, found: float, why: str) -> Finding:
    return Finding(
        "loss.tokens",
        str(row.position),
        f"step {row.step:,} has {found:,.0f} {what}; {why} {expected:,.0f}",
        expected=f"{expected:,.0f} {what}",
        found=f"{found:,.0f} {what}",
    )


def _counted_from(resume: LoggedResume, count: Count) -> tuple[float, float, float] | None:
    """The expected count of the first row after, its actual count, and the count per step."""
    rows = [row for row in resume.before if count(row) is not None]
    first = next((row for row in resume.after if count(row) is not None), None)
    rates = _per_step(rows[-_N_RECENT:], count)
    if first is None:
        return None
    if not rates:
        return _counted_from_report(resume, first, count)
    per_step = median(rates)
    last = rows[-1]
    start, counted = count(last), count(first)
    if start is None or counted is None or per_step <= 0:
        return None
    expected = start.value + per_step * (first.step - last.step)
    return expected, counted.value, max(per_step, start.quantum, counted.quantum)


def _counted_from_report(
    resume: LoggedResume, first: Row, count: Count
) -> tuple[float, float, float] | None:
    """The same from the counts of the checkpoint, where the log of before is missing."""
    rates = _per_step(resume.after[:_N_RECENT], count)
    counted, resume_point = count(first), resume.resume_point
    if counted is None or resume_point is None or not rates or median(rates) <= 0:
        return None
    held = resume_point.tokens if count is _tokens_of else resume_point.samples
    if held is None:
        return None
    per_step = median(rates)
    expected = held + per_step * (first.step - resume_point.step)
    return expected, counted.value, max(per_step, counted.quantum)


def _batch(resume: LoggedResume, what: str, count: Count) -> Finding | None:
    """A finding for another count per step, which means another global batch."""
    batches = _batches(resume, count)
    if batches is None:
        return None
    after, now, then = batches
    # Batches may vary without a resume; only a value outside all of them is a finding.
    low, high = min(then) * (1 - _BATCH), max(then) * (1 + _BATCH)
    if low <= median(now) <= high or list(_twice(resume, count)):
        return None
    return Finding(
        "loss.batch",
        str(after[0].position),
        f"a step has {median(now):,.0f} {what} after the resume and had {median(then):,.0f} before",
        expected=f"{median(then):,.0f} {what} per step",
        found=f"{median(now):,.0f} {what} per step",
    )


def _batches(
    resume: LoggedResume, count: Count
) -> tuple[list[Row], list[float], list[float]] | None:
    """The first rows after, and the counts per step after and before; None where too few."""
    after = [row for row in resume.after[:_N_RECENT] if count(row) is not None]
    now = _per_step(after, count)
    then = _per_step([row for row in resume.before if count(row)][-_N_RECENT:], count)
    if len(now) < 2 or len(then) < 2:
        return None
    # The rounding of the printed counter may be large against the count of one step. A whole number
    # is exact, however few digits it has.
    quanta = [number.quantum for row in after if (number := count(row)) is not None]
    return None if max(quanta) > max(1.0, 0.01 * abs(median(now))) else (after, now, then)


def _per_step(rows: Sequence[Row], count: Count) -> list[float]:
    rates = []
    for earlier, later in pairwise(rows):
        a, b = count(earlier), count(later)
        if a is not None and b is not None and later.step > earlier.step:
            rates.append((b.value - a.value) / (later.step - earlier.step))
    return rates


def _twice(resume: LoggedResume, count: Count) -> Iterator[tuple[Row, Number, Number]]:
    """Yield each row of a step trained again, with its values before and after."""
    old = {row.step: row for row in resume.overwritten}
    for row in resume.after:
        earlier = old.get(row.step)
        if earlier is not None:
            a, b = count(earlier), count(row)
            if a is not None and b is not None:
                yield row, a, b


def _learning_rate(resume: LoggedResume) -> Iterator[Finding]:
    twice = list(_twice(resume, _lr_of))
    for row, a, b in twice:
        allowed = max(_LR_SAME * abs(a.value), 1.01 * max(a.quantum, b.quantum))
        if abs(a.value - b.value) > allowed:
            yield _lr_finding(
                "loss.lr", row, a.value, b.value, f"before the resume it was {a.value:.4g}"
            )
            return
    yield from _learning_rate_by_trend(resume, at_once=not twice)


def _learning_rate_by_trend(resume: LoggedResume, *, at_once: bool = True) -> Iterator[Finding]:
    """Compare each of the first learning rates with the trend of the rows before it.

    With `at_once`, a first one that is too low is a finding. Later only a rise and a new
    warm-up are, since many schedules go down in stages.
    """
    before = [row for row in resume.before if row.lr is not None]
    after = [row for row in resume.after if row.lr is not None][:_LR_ROWS]
    rows = [*before[-_N_RECENT:], *after]
    first = len(rows) - len(after)
    for i in range(first, len(rows)):
        is_first = at_once and i == first
        earlier = rows[max(0, i - _N_RECENT) : i]
        trend = _lr_trend(earlier, rows[i])
        if trend is None or (not is_first and len(earlier) < _RISING):
            continue
        expected, off = trend
        if off > 0 or (off < 0 and _warms_up(rows[i:]) and not _warms_up(earlier)):
            code = "loss.lr"
        elif off < 0 and is_first:
            code = "loss.lr-lower"
        else:
            continue
        if is_first or not _has_cycles(before):
            found = _lr_value(rows[i])
            yield _lr_finding(
                code, rows[i], expected, found, f"the steps before lead to {expected:.4g}"
            )
        return


def _lr_value(row: Row) -> float:
    return row.lr.value if row.lr is not None else math.nan


def _lr_trend(earlier: Sequence[Row], row: Row) -> tuple[float, float] | None:
    """The learning rate that earlier rows lead to, and how far `row` is outside what is allowed."""
    slopes = _per_step(earlier, _lr_of)
    if not slopes or row.lr is None:
        return None
    gap = row.step - earlier[-1].step
    slope, last, found = median(slopes), _lr_value(earlier[-1]), row.lr.value
    expected = last + slope * gap
    spread = max(abs(other - slope) for other in slopes) * gap
    allowed = max(_LR_EXPECTED * abs(expected), 5 * spread, 2 * row.lr.quantum)
    # A schedule may become constant at this very step.
    low, high = min(last, expected) - allowed, max(last, expected) + allowed
    return max(0.0, expected), max(0.0, found - high) + min(0.0, found - low)


def _warms_up(rows: Sequence[Row]) -> bool:
    rates = [_lr_value(row) for row in rows[: _RISING + 1]]
    return len(rates) > _RISING and all(b > a for a, b in pairwise(rates))


def _has_cycles(rows: Sequence[Row]) -> bool:
    """Whether the learning rate rose against its trend without a resume, too."""
    trends = (
        _lr_trend(rows[max(0, i - _N_RECENT) : i], rows[i]) for i in range(_RISING, len(rows))
    )
    return any(trend is not None and trend[1] > 0 for trend in trends)


def _lr_finding(code: str, row: Row, expected: float, found: float, why: str) -> Finding:
    return Finding(
        code,
        str(row.position),
        f"the learning rate of step {row.step:,} is {found:.4g}; {why}",
        expected=f"{expected:.6g}",
        found=f"{found:.6g}",
    )


def _samples_seen(resume: LoggedResume) -> Iterator[Finding]:
    """Compare the digests of the samples that each step consumed, where they are logged."""
    digests = [(row, row.samples_digest) for row in resume.after if row.samples_digest]
    if not digests:
        return
    old = {row.step: row.samples_digest for row in resume.overwritten if row.samples_digest}
    at = {row.samples_digest: row.step for row in (*resume.before, *resume.overwritten)}
    at.pop(None, None)
    for row, digest in digests:
        if old.get(row.step, digest) == digest and at.get(digest, row.step) == row.step:
            continue
        earlier = at.get(digest)
        if earlier is None:
            yield Finding(
                "loss.other-samples",
                str(row.position),
                f"step {row.step:,} consumed other samples than before, and no step in the log "
                "consumed these: data was skipped, or comes in another order",
                expected=f"samples {old[row.step]}",
                found=f"samples {digest}",
            )
        else:
            how = "repeats" if earlier < row.step else "skips"
            yield Finding(
                "loss.data",
                str(row.position),
                f"the data {how} {abs(row.step - earlier):,} steps: step {row.step:,} consumed "
                f"the samples of step {earlier:,}",
                expected=f"samples of step {row.step:,}",
                found=f"samples of step {earlier:,}",
            )
        return

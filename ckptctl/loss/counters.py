"""Check the exact numbers of a resume: steps, tokens or samples, learning rate, digests.

A wrong one proves a fault whatever the loss does. Fields that the log does not hold are
not checked. `replay` and `level` compare the loss itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import median

from ckptctl.findings import Finding
from ckptctl.loss.resumes import Resume
from ckptctl.loss.rows import Number, Row

_N_RECENT = 20
_LR_SAME = 1e-3  # relative
_LR_EXPECTED = 0.02  # relative, without a step logged twice to compare with
_BATCH = 0.02  # relative
_RISING = 4  # rows


def check_counters(resume: Resume) -> Iterator[Finding]:
    """Yield a finding for each number that does not continue across the resume.

    `loss.restarted`, `loss.not-finite`, `loss.step`, `loss.tokens`, `loss.batch`,
    `loss.lr`, `loss.lr-lower`, `loss.data`, `loss.other-samples`.
    """
    if resume.restarted:
        yield _restarted(resume)
        return
    yield from _not_finite(resume)
    yield from _step(resume)
    yield from _tokens(resume)
    yield from _learning_rate(resume)
    yield from _samples_seen(resume)


def _where(row: Row) -> str:
    return f"{row.position.file}:{row.position.line}"


def _restarted(resume: Resume) -> Finding:
    row = resume.after[0]
    order = ", or the logs were not named oldest first" if _joins(resume) else ""
    return Finding(
        "loss.restarted",
        _where(row),
        f"the job began at step {row.step:,}, no later than the log before it; it did not resume"
        f"{order}",
        expected="the step after a checkpoint",
        found=f"step {row.step:,}",
    )


def _joins(resume: Resume) -> bool:
    """Whether the later log leads up to the first step of the earlier one."""
    earlier = (*resume.before, *resume.overwritten)
    begins = min((row.step for row in earlier), default=resume.first_step)
    return resume.first_step < begins <= resume.after[-1].step + max(1, resume.interval)


def _not_finite(resume: Resume) -> Iterator[Finding]:
    """Yield a finding for a loss that is NaN or infinite, unless there was one before."""
    bad = [row for row in resume.after if row.loss and not math.isfinite(row.loss.value)]
    was_bad = [row for row in resume.before[-50:] if row.loss and not math.isfinite(row.loss.value)]
    if bad and not was_bad:
        row = bad[0]
        found = str(row.loss.value) if row.loss else ""
        yield Finding(
            "loss.not-finite",
            _where(row),
            f"the loss of step {row.step:,} is {found}, {row.step - resume.first_step:,} steps "
            "after the first step of the resumed job",
            expected="a finite number",
            found=found,
        )


def _step(resume: Resume) -> Iterator[Finding]:
    """Compare the first step with the step of the checkpoint, where that is known."""
    resume_point = resume.resume_point
    if resume_point is None:
        return
    # A trainer that counts steps from zero logs the step of the checkpoint again.
    last = resume_point.step + max(1, resume.interval)
    first = resume.first_step
    if resume_point.step <= first <= last:
        return
    # Where the caller named the step and the dead job logged the steps in between, token
    # counts that continue do not explain the gap: a newer checkpoint was loaded.
    is_newer = resume_point.source == "asked" and any(
        resume_point.step < row.step < first for row in resume.before
    )
    if first > last and not is_newer and _tokens_explain_gap(resume):
        return
    how = "starts before" if first < resume_point.step else "leaves a gap after"
    yield Finding(
        "loss.step" if first < resume_point.step or resume_point.source == "asked" else "loss.gap",
        _where(resume.after[0]),
        f"the log {how} the checkpoint: the checkpoint holds step {resume_point.step:,}, and the "
        f"first step logged after the resume is {first:,}",
        expected=f"step {resume_point.step + 1:,} to {last:,}",
        found=f"step {first:,}",
    )


def _tokens_explain_gap(resume: Resume) -> bool:
    """Whether the count of tokens or samples covers the steps between: only rows are missing."""
    for count in (_tokens_of, _samples_of):
        found = _counted_from(resume, count)
        if found is not None:
            expected, counted, per_step = found
            return abs(counted - expected) <= 1.5 * per_step
    return False


def _tokens(resume: Resume) -> Iterator[Finding]:
    """Yield a finding for the count of tokens or samples, or for their number per step."""
    for what, count in (("tokens", _tokens_of), ("samples", _samples_of)):
        finding = _count(resume, what, count) or _batch(resume, what, count)
        if finding is not None:
            yield finding
            return


Count = Callable[[Row], "Number | None"]


def _tokens_of(row: Row) -> Number | None:
    return row.tokens


def _samples_of(row: Row) -> Number | None:
    return row.samples


def _count(resume: Resume, what: str, count: Count) -> Finding | None:
    twice = list(_twice(resume, count))
    for row, a, b in twice:
        if abs(a.value - b.value) > max(a.quantum, b.quantum):
            return _count_finding(row, what, a.value, b.value, "before the resume it had")
    if twice:
        return None
    counted = _counted_from(resume, count)
    if counted is None:
        return None
    expected, found, per_step = counted
    if abs(found - expected) <= 1.5 * per_step:
        return None
    return _count_finding(resume.after[0], what, expected, found, "the steps before lead to")


def _count_finding(row: Row, what: str, expected: float, found: float, why: str) -> Finding:
    return Finding(
        "loss.tokens",
        _where(row),
        f"step {row.step:,} has {found:,.0f} {what}; {why} {expected:,.0f}",
        expected=f"{expected:,.0f} {what}",
        found=f"{found:,.0f} {what}",
    )


def _counted_from(resume: Resume, count: Count) -> tuple[float, float, float] | None:
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
    resume: Resume, first: Row, count: Count
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


def _batch(resume: Resume, what: str, count: Count) -> Finding | None:
    """A finding for another count per step, which means another global batch."""
    after = [row for row in resume.after[:_N_RECENT] if count(row) is not None]
    now = _per_step(after, count)
    then = _per_step([row for row in resume.before if count(row)][-_N_RECENT:], count)
    if len(now) < 2 or len(then) < 2 or _is_coarse(after, count):
        return None
    # Batches may vary without a resume; only a value outside all of them is a finding.
    low, high = min(then) * (1 - _BATCH), max(then) * (1 + _BATCH)
    if low <= median(now) <= high or list(_twice(resume, count)):
        return None
    return Finding(
        "loss.batch",
        _where(after[0]),
        f"a step has {median(now):,.0f} {what} after the resume and had {median(then):,.0f} before",
        expected=f"{median(then):,.0f} {what} per step",
        found=f"{median(now):,.0f} {what} per step",
    )


def _is_coarse(rows: Sequence[Row], count: Count) -> bool:
    """Whether rounding of the printed counter is large against the count of one step."""
    quanta = [number.quantum for row in rows if (number := count(row)) is not None]
    # A whole number is exact, however few digits it has.
    return max(quanta) > max(1.0, 0.01 * abs(median(_per_step(rows, count))))


def _per_step(rows: Sequence[Row], count: Count) -> list[float]:
    rates = []
    for earlier, later in pairwise(rows):
        a, b = count(earlier), count(later)
        if a is not None and b is not None and later.step > earlier.step:
            rates.append((b.value - a.value) / (later.step - earlier.step))
    return rates


def _twice(resume: Resume, count: Count) -> Iterator[tuple[Row, Number, Number]]:
    """Yield each row of a step trained again, with its values before and after."""
    old = {row.step: row for row in resume.overwritten}
    for row in resume.after:
        earlier = old.get(row.step)
        if earlier is not None:
            a, b = count(earlier), count(row)
            if a is not None and b is not None:
                yield row, a, b


def _lr_of(row: Row) -> Number | None:
    return row.lr


def _learning_rate(resume: Resume) -> Iterator[Finding]:
    twice = list(_twice(resume, _lr_of))
    for row, a, b in twice:
        allowed = max(_LR_SAME * abs(a.value), 1.01 * max(a.quantum, b.quantum))
        if abs(a.value - b.value) > allowed:
            yield _lr_finding(
                "loss.lr", row, a.value, b.value, f"before the resume it was {a.value:.4g}"
            )
            return
    if not twice:
        yield from _learning_rate_by_trend(resume)


def _learning_rate_by_trend(resume: Resume) -> Iterator[Finding]:
    """Compare the learning rate with the trend of the last rows."""
    rows = [row for row in resume.before if row.lr is not None][-_N_RECENT:]
    after = [row for row in resume.after if row.lr is not None]
    slopes = _per_step(rows, _lr_of)
    if not slopes or not after or rows[-1].lr is None or after[0].lr is None:
        return
    gap = after[0].step - rows[-1].step
    slope, last, found = median(slopes), rows[-1].lr.value, after[0].lr.value
    expected = last + slope * gap
    spread = max(abs(each - slope) for each in slopes) * gap
    allowed = max(_LR_EXPECTED * abs(expected), 5 * spread, 2 * after[0].lr.quantum)
    # A schedule may become constant at this very step.
    low, high = min(last, expected) - allowed, max(last, expected) + allowed
    if low <= found <= high:
        return
    why = f"the steps before lead to {expected:.4g}"
    rising = [row.lr.value for row in after[: _RISING + 1] if row.lr is not None]
    warms_up = len(rising) > _RISING and all(b > a for a, b in pairwise(rising)) and slope <= 0
    code = "loss.lr" if found > high or warms_up else "loss.lr-lower"
    yield _lr_finding(code, after[0], expected, found, why)


def _lr_finding(code: str, row: Row, expected: float, found: float, why: str) -> Finding:
    return Finding(
        code,
        _where(row),
        f"the learning rate of step {row.step:,} is {found:.4g}; {why}",
        expected=f"{expected:.6g}",
        found=f"{found:.6g}",
    )


def _samples_seen(resume: Resume) -> Iterator[Finding]:
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
                _where(row),
                f"step {row.step:,} consumed other samples than before, and no step in the log "
                "consumed these: data was skipped, or comes in another order",
                expected=f"samples {old[row.step]}",
                found=f"samples {digest}",
            )
        else:
            how = "repeats" if earlier < row.step else "skips"
            yield Finding(
                "loss.data",
                _where(row),
                f"the data {how} {abs(row.step - earlier):,} steps: step {row.step:,} consumed "
                f"the samples of step {earlier:,}",
                expected=f"samples of step {row.step:,}",
                found=f"samples of step {earlier:,}",
            )
        return

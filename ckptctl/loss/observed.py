"""What do the steps logged twice, and the level of the loss, say as findings?

Here differences become sentences: what was seen, against what, and what it means. How
they were measured is the question of `replay` and `level`, what they add up to that of
`verdict`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptctl.findings import Finding
from ckptctl.loss.level import LEAST_RISE, MIN_BEFORE, WINDOWS, Level
from ckptctl.loss.replay import FINE, GOOD_ROWS, Agreement, Replay
from ckptctl.loss.resumes import Resume

SMALLEST_JUMP = 0.05
"""A level that would hide a larger jump than this says too little to be an answer."""

_SURELY = 1.6  # times the threshold
_TWICE = 1.25
_SPIKES = 2
# Standard errors. Other orders of the same data gave 2.1 at most, nothing loaded 2.4 to 19.
_STANDS_OUT, _STANDS_OUT_FAR = 4.0, 6.0


def of_replay(resume: Resume, replay: Replay) -> Iterator[Finding]:
    """What the steps that were logged twice say; nothing where they agree."""
    for step in (row.step for row in replay.rows if row.averaged):
        yield Finding(
            "loss.averaged",
            _where(resume),
            f"the row of step {step:,} is the mean of the first two steps of the process; "
            "the step's own loss was worked out",
        )
    if replay.agrees and not replay.fine_enough:
        yield Finding(
            "loss.coarse",
            _where(resume),
            f"{len(replay.rows)} steps logged twice agree, but the log hides "
            f"{share(replay.hidden)} of the loss: a lost optimizer state can hide there too",
            expected=f"at most {share(FINE)} hidden: four decimals",
            found=f"{share(replay.hidden)} hidden",
        )
    said = _SAID.get(replay.agreement)
    if said is None:
        return
    code, meaning = said
    if code == "loss.higher" and resume.interval > 1:
        meaning = "the same batches at a higher loss: the weights are wrong, or their updates"
    n, d = len(replay.rows), [row.difference for row in replay.rows]
    middle = sorted(d)[len(d) // 2]
    if replay.agreement in (Agreement.HIGHER, Agreement.LOWER):
        how = f"differ by {signed(middle)}"
    elif replay.agreement is Agreement.DRIFT:
        how = f"begin equal ({signed(d[0])}) and differ by up to {share(replay.most)} then"
    else:
        how = f"differ by up to {share(replay.most)}"
    yield Finding(
        code,
        _where(resume),
        f"{n} steps logged twice {how}: {meaning}",
        expected="the same losses, but for 0.03 %",
        found=f"{share(replay.median)} in the median, at most {share(replay.most)}",
    )


_SAID = {
    Agreement.DRIFT: (
        "loss.drift",
        "weights and data are those of before, the update is not (optimizer, learning rate)",
    ),
    Agreement.HIGHER: ("loss.higher", "the same batches at a higher loss: the weights are wrong"),
    Agreement.LOWER: ("loss.lower", "the same batches at a lower loss: the weights are others"),
    Agreement.DIFFERENT: (
        "loss.differs",
        "the same batches, but not the same result: random numbers, or a small change of weights",
    ),
    Agreement.OTHER_DATA: (
        "loss.other-data",
        "as much as one batch from another; order or place in the data is not that of before",
    ),
}


def of_other_data(resume: Resume, replay: Replay) -> Iterator[Finding]:
    """Steps over other batches that nearly all stand higher than before."""
    if replay.agreement is not Agreement.OTHER_DATA or len(replay.rows) < GOOD_ROWS:
        return
    if replay.sureness <= _STANDS_OUT or replay.middle <= LEAST_RISE:
        return
    yield Finding(
        "loss.jump" if replay.sureness > _STANDS_OUT_FAR else "loss.raised",
        _where(resume),
        f"over other batches, the {len(replay.rows)} steps logged twice stand "
        f"{signed(replay.middle)} from those before, {replay.sureness:.0f} standard errors",
        expected="as many above as below",
        found=signed(replay.middle),
    )


def of_level(resume: Resume, level: Level) -> Iterator[Finding]:
    """A loss that stands higher after the resume."""
    if level.n_spikes >= _SPIKES:
        yield Finding(
            "loss.spike",
            _where(resume),
            f"{level.n_spikes} of the first rows after the resume stand far above all rows before",
            found=f"{level.n_spikes} rows",
        )
    if not level.shifts:
        return
    worst = max(level.shifts, key=lambda shift: shift.excess)
    if worst.excess <= 1:
        return
    n_over = sum(shift.excess > _TWICE for shift in level.shifts)
    code = "loss.jump" if worst.excess > _SURELY or n_over >= 2 else "loss.raised"
    yield Finding(
        code,
        _where(resume),
        f"the loss of the first {worst.n_rows} rows stands {signed(worst.found)} from that "
        f"before; by itself it rises by {share(worst.threshold)} at most",
        expected=f"at most {signed(worst.threshold)}",
        found=signed(worst.found),
    )


def later(finding: Finding) -> Finding:
    """A rise that comes after steps that agree: the resume is proven by then."""
    return Finding(
        "loss.later",
        finding.where,
        f"{finding.message}; the steps logged twice agree, so the resume is not the cause",
        finding.expected,
        finding.found,
    )


def too_little(resume: Resume, level: Level) -> Iterator[Finding]:
    """Too few rows to compare levels, or too much noise to see a jump that matters."""
    smallest = level.smallest_jump
    if smallest is None:
        needs = [
            f"{least - there} more {what}"
            for least, there, what in (
                (MIN_BEFORE, level.n_before, "rows before the resume"),
                (WINDOWS[0], level.n_after, "rows after it"),
            )
            if there < least
        ]
        yield Finding(
            "loss.too-little",
            _where(resume),
            f"{level.n_before} rows with a loss before the resume and {level.n_after} after it are "
            f"too few to compare: {' and '.join(needs)} are needed",
            expected=f"{MIN_BEFORE} rows before, {WINDOWS[0]} after",
            found=f"{level.n_before} before, {level.n_after} after",
        )
    elif smallest > SMALLEST_JUMP:
        yield Finding(
            "loss.noisy",
            _where(resume),
            f"the loss wobbles by {share(level.noise)} from row to row: only a jump above "
            f"{share(smallest)} would be seen",
            expected=f"a jump of {share(SMALLEST_JUMP)} can be seen",
            found=share(smallest),
        )


def _where(resume: Resume) -> str:
    return f"{resume.place.file}:{resume.place.line}"


def share(value: float) -> str:
    """A relative number in percent, short."""
    return f"{100 * value:.2g} %"


def signed(value: float) -> str:
    """A relative difference in percent, with its sign."""
    return f"{100 * value:+.2g} %"

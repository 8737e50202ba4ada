"""Count which faults of a resume each loss rule detects, and its false alarms.

The resumes are those of a real training job (`fixtures/loss_resumes.py`), as its log
would show them: with the steps that were logged twice and without, every step or the
mean of ten, with so many decimals. The rules:

    megatron    a loss above ten times the largest of the first hundred
    first row   the first row is 5 % above the mean of the twenty before
    ema z       one of the five first rows is three deviations above the moving average
    ckptctl     this project: `x` discontinuous, `?` suspect

Each column counts resumes that the rule calls wrong. False alarms at places where
nothing happened are counted on the same runs, cut at every fifth step.

    python bench/loss_rules.py [--decimals 4] [--all]
    python bench/loss_rules.py --late FILE

`--late` measures the answers of this project alone, on the resumes of
`fixtures/loss_late_resumes.py`: with 4, 5 and 6 decimals and the whole float, 5 to 40
steps logged twice, with the learning rate and the gradient norm, with the rate alone, and
with neither. It prints how many resumes with a
fault are `continuous` or exclude that fault, how many right ones are `continuous` or
accused, by the digits of the loss, and which share of the faults is found and of the right
resumes is `continuous`, by the learning rate and the digits.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

from ckptctl.logs.rows import LogPosition, Number, Row
from ckptctl.loss import evidence
from ckptctl.loss.checking import CheckOptions, check_rows
from ckptctl.loss.resumes import ResumePoint

FIXTURE = Path(__file__).resolve().parent.parent / "fixtures" / "loss-resumes.json.xz"
LATE_FIXTURE = FIXTURE.with_name("loss-late-resumes.json.xz")
HARMLESS = ("correct", "correct, other additions")
OPTIMIZER = ("weights only", "moments zeroed")
COUNTERS = ("learning rate reset", "half the batch")


@dataclass(frozen=True)
class Case:
    """One resume, as rows of a log."""

    fault: str
    saved: int
    before: list[Row]
    after: list[Row]


def cases(
    document: dict, *, replay: bool = True, interval: int = 1, decimals: int = 4
) -> Iterator[Case]:
    """Every resume of the fixture, as a log with these habits shows it."""
    for run in document["runs"]:
        for resume in run["resumes"]:
            saved = resume["saved"]
            died = saved + document["again"] if replay else saved
            yield Case(
                resume["fault"],
                saved,
                as_logged([row for row in run["before"] if row[0] <= died], interval, decimals),
                as_logged(resume["rows"], interval, decimals),
            )


def as_logged(rows: Sequence[Sequence[float]], interval: int, decimals: int) -> list[Row]:
    """Rows as a trainer logs them that prints the mean of `interval` steps."""
    logged = []
    for i in range(0, len(rows) - interval + 1, interval):
        part = rows[i : i + interval]
        step, _, rate, norm, tokens = part[-1]
        loss = round(fmean(row[1] for row in part), decimals)
        logged.append(
            Row(
                int(step),
                LogPosition("log", len(logged) + 1),
                loss=Number(loss, 10.0**-decimals),
                lr=Number(rate, abs(rate) * 1e-7),
                grad_norm=Number(norm, 0),
                tokens=Number(tokens, 1),
                interval=interval,
            )
        )
    return logged


def verdict(before: Sequence[Row], after: Sequence[Row], saved: int) -> str:
    """The verdict of this project."""
    report = check_rows([*before, *after], CheckOptions(ResumePoint(saved, "asked")))
    return report.verdict.value


def losses(rows: Sequence[Row]) -> list[float]:
    return [row.loss.value for row in rows if row.loss is not None]


def megatron(before: list[float], after: list[float]) -> bool:
    """The factor of Megatron-LM's rerun state machine."""
    return max(after[:20]) >= 10 * max(before[:100])


def first_row(before: list[float], after: list[float]) -> bool:
    """A jump of the first row."""
    return after[0] > 1.05 * fmean(before[-20:])


def ema_z(before: list[float], after: list[float]) -> bool:
    """Deviations from an exponential moving average."""
    mean, variance = before[0], 0.0
    for loss in before[1:]:
        away = loss - mean
        mean += 0.1 * away
        variance = 0.9 * (variance + 0.1 * away * away)
    return any(loss - mean > 3 * math.sqrt(variance) for loss in after[:5])


RULES: dict[str, Callable[[list[float], list[float]], bool]] = {
    "megatron": megatron,
    "first row": first_row,
    "ema z": ema_z,
}


# The name of a fault of the fixture, and that under which the report lists it.
LISTED = {
    "optimizer lost": evidence.OPTIMIZER,
    "half the optimizer lost": evidence.OPTIMIZER,
    "moments zeroed": evidence.OPTIMIZER,
    "learning rate doubled": evidence.RATE,
    "learning rate times 0.3": evidence.RATE,
    "stale tensor": evidence.WEIGHTS,
    "older weights": evidence.WEIGHTS,
    "older step": evidence.WEIGHTS,
    "weights of another run": evidence.WEIGHTS,
    "rounded weights": evidence.ROUNDED,
    "averaged weights": evidence.WEIGHTS,
    "random numbers lost": evidence.RANDOM,
    "data skipped": evidence.DATA,
}
_NO_FAULT_OF_TRAINING = ("rounded weights", "random numbers lost")


def late(document: dict, *, trace: bool = False) -> int:
    """Print the answers on resumes late in the schedule; 1 where they miss their targets."""
    counts: Counter[tuple[str, str]] = Counter()
    by_rate: Counter[tuple[bool, float, int, bool]] = Counter()
    for run in document["runs"]:
        phase = "late" if run["ratio"] <= LATE else "peak"
        for resume in run["resumes"]:
            fault = resume["fault"]
            if fault == "random numbers lost" and not run["random"]:
                continue
            kind = phase if fault in LISTED else "right"
            kind = fault if fault in _NO_FAULT_OF_TRAINING else kind
            if fault == "correct, other ranks" and run["depends_on_ranks"]:
                kind = "other ranks, other losses"
            for n_twice, decimals, (with_rate, with_norm) in product(
                (5, 8, 12, 20, 40), (4, 5, 6, 16), _LOGGED
            ):
                if with_rate and LISTED.get(fault) == evidence.RATE:
                    continue  # the fixture records the rate of the schedule, not the wrong one
                report = late_report(
                    run, resume, n_twice, decimals, with_rate=with_rate, with_norm=with_norm
                )
                digits = min(_digits(row) for row in report.worst.resume.overwritten)
                if kind == "right" and (n_twice < 8 or digits < 5):
                    kind_here = "right, few rows or digits"
                elif kind == "right":
                    kind_here = "right, 5 digits" if digits == 5 else "right, 6 digits or more"
                    kind_here += ", with norms" * with_norm
                else:
                    kind_here = kind
                counts[kind_here, report.verdict.value] += 1
                answers = {"right": ("continuous",), "late": _ACCUSED, "peak": _ACCUSED}
                if kind in answers and n_twice >= 8 and not with_norm:
                    is_good = report.verdict.value in answers[kind]
                    by_rate[kind == "right", run["ratio"], min(digits, _MOST_DIGITS), is_good] += 1
                counts[kind_here, "all"] += 1
                excluded = {each.name for each in report.faults if each.excluded}
                wrong = LISTED.get(fault) in excluded
                counts[kind_here, "excluded"] += wrong
                is_missed = fault.startswith("correct") and report.exit_code in (30, 32)
                is_missed |= kind in ("late", "peak") and report.verdict.value == "continuous"
                if trace and (wrong or is_missed):
                    print(run["name"], fault, n_twice, decimals, with_rate, report.message)
    words = ("discontinuous", "suspect", "inconclusive", "no-jump", "continuous", "excluded")
    print(f"{'':36}{'of':>7}" + "".join(f"{word:>15}" for word in words))
    for kind in sorted({kind for kind, _ in counts}):
        total = counts[kind, "all"]
        shares = "".join(f"{100 * counts[kind, word] / total:>13.2f} %" for word in words)
        print(f"{kind:36}{total:>7}{shares}")
    _print_by_rate(by_rate)
    fine = "right, 6 digits or more"
    right = [kind for kind, _ in counts if kind.startswith(("right", "other ranks"))]
    accused = sum(counts[kind, word] for kind in {*right} for word in words[:2])
    missed = counts["late", "continuous"] + counts["late", "excluded"]
    return int(counts[fine, "continuous"] < 0.97 * counts[fine, "all"] or accused + missed > 0)


_ACCUSED = ("discontinuous", "suspect")
_LOGGED = ((True, True), (True, False), (False, False))
"""Whether the learning rate and the gradient norm are logged."""
_MOST_DIGITS = 8


def _print_by_rate(answers: Counter[tuple[bool, float, int, bool]]) -> None:
    """How often 8 rows or more give the right answer, by learning rate and digits."""
    digits = range(4, _MOST_DIGITS + 1)
    for is_right, what in ((False, "faults found"), (True, "right resumes continuous")):
        print(f"\n{what + ', by share of the peak':40}" + "".join(f"{n:>6} d" for n in digits))
        for ratio in sorted({ratio for _, ratio, _, _ in answers}):
            cells = []
            for n in digits:
                good, bad = (answers[is_right, ratio, n, each] for each in (True, False))
                cells.append(f"{100 * good / (good + bad):>6.0f} %" if good + bad else f"{'-':>8}")
            print(f"{ratio:40.0%}" + "".join(cells))


LATE = 0.1
"""Shares of the peak learning rate up to this are late in a schedule."""


def _digits(row: Row) -> int:
    if row.loss is None or not row.loss.quantum or not row.loss.value:
        return 16
    return math.floor(math.log10(abs(row.loss.value) / row.loss.quantum)) + 1


def late_report(
    run: dict,
    resume: dict,
    n_twice: int,
    decimals: int,
    *,
    with_rate: bool,
    with_norm: bool = False,
):
    saved = resume["saved"]

    def logged(rows: Sequence[Sequence[float]]) -> list[Row]:
        return [
            Row(
                int(step),
                LogPosition("log", i + 1),
                loss=Number(round(loss, decimals), 0 if decimals > 15 else 10.0**-decimals),
                lr=Number(rate, abs(rate) * 1e-3) if with_rate else None,
                grad_norm=Number(round(norm, decimals), 10.0**-decimals) if with_norm else None,
                samples=Number(samples, 1) if with_rate else None,
            )
            for i, (step, loss, rate, norm, samples) in enumerate(rows)
        ]

    before = [row for row in run["before"] if row[0] <= saved + n_twice]
    items = [*logged(before), *logged(resume["rows"])]
    n_ranks = run["n_ranks"]
    grown = 2 * n_ranks if resume["fault"] == "correct, other ranks" else n_ranks
    point = ResumePoint(saved, "asked", world_size=grown, saved_world_size=n_ranks)
    return check_rows(items, CheckOptions(point))


def main() -> int:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decimals", type=int, default=4)
    parser.add_argument("--late", metavar="FILE", help="the output of loss_late_resumes.py")
    parser.add_argument("--trace", action="store_true", help="with --late: print each miss")
    parser.add_argument("--all", action="store_true", help="every interval and number of digits")
    options = parser.parse_args()
    if options.late is not None:
        return late(
            json.loads(lzma.decompress(Path(options.late).read_bytes())), trace=options.trace
        )
    document = json.loads(lzma.decompress(FIXTURE.read_bytes()))
    for replay in (True, False):
        _table(document, replay=replay, interval=1, decimals=options.decimals)
    if options.all:
        for interval in (1, 10):
            for decimals in (2, 3, 4, 6):
                _table(document, replay=True, interval=interval, decimals=decimals)
        _table(document, replay=False, interval=10, decimals=4)
    _false_alarms(document, options.decimals)
    return _targets(document)


def _table(document: dict, *, replay: bool, interval: int, decimals: int) -> None:
    found: dict[str, Counter[str]] = {}
    for case in cases(document, replay=replay, interval=interval, decimals=decimals):
        counts = found.setdefault(case.fault, Counter())
        counts["resumes"] += 1
        earlier = losses([row for row in case.before if row.step <= case.saved])
        for name, rule in RULES.items():
            counts[name] += rule(earlier, losses(case.after))
        counts[verdict(case.before, case.after, case.saved)] += 1
    how = "steps logged twice" if replay else "nothing logged twice"
    rows = "every step" if interval == 1 else f"means of {interval} steps"
    print(f"\n{how}, {rows}, {decimals} decimals")
    ours = ("discontinuous", "suspect", "inconclusive", "no-jump", "continuous")
    print(f"{'fault':26}{'of':>4}" + "".join(f"{name:>11}" for name in RULES), end="")
    print("".join(f"{name:>15}" for name in ours))
    for fault, counts in found.items():
        print(f"{fault:26}{counts['resumes']:>4}", end="")
        print("".join(f"{counts[name] or '-':>11}" for name in RULES), end="")
        print("".join(f"{counts[name] or '-':>15}" for name in ours))


def _false_alarms(document: dict, decimals: int) -> None:
    """The same rules at places where nothing happened."""
    counts: Counter[str] = Counter()
    for run in document["runs"]:
        rows = as_logged(run["before"], 1, decimals)
        for cut in range(60, len(rows) - 30, 5):
            counts["cuts"] += 1
            before, after = rows[:cut], rows[cut : cut + 60]
            for name, rule in RULES.items():
                counts[name] += rule(losses(before), losses(after))
            counts[verdict(before, after, rows[cut - 1].step)] += 1
    print(f"\nfalse alarms at {counts['cuts']:,} places where nothing happened")
    for name in (*RULES, "discontinuous", "suspect"):
        print(f"  {name:14}{100 * counts[name] / counts['cuts']:6.2f} %")


def _targets(document: dict) -> int:
    """Whether the promise for four decimals holds."""
    found: dict[str, Counter[str]] = {}
    for case in cases(document):
        said = verdict(case.before, case.after, case.saved)
        found.setdefault(case.fault, Counter())[said] += 1
    missed = 0
    print()
    for what, faults, good, least in (
        ("correct resumes continuous", HARMLESS[:1], ("continuous",), 1.0),
        ("correct resumes not accused", HARMLESS, ("continuous", "no-jump"), 1.0),
        ("optimizer faults seen", OPTIMIZER, ("discontinuous", "suspect"), 0.97),
        ("counter faults seen", COUNTERS, ("discontinuous",), 1.0),
    ):
        total = sum(sum(found[fault].values()) for fault in faults)
        share = sum(found[fault][word] for fault in faults for word in good) / total
        missed += share < least
        print(f"{what}: {100 * share:.0f} % of {total} (target {100 * least:.0f} %)")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

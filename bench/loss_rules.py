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
from pathlib import Path
from statistics import fmean

from ckptctl.loss.checking import CheckOptions, check_rows
from ckptctl.loss.resumes import ResumePoint
from ckptctl.loss.rows import LogPosition, Number, Row

FIXTURE = Path(__file__).resolve().parent.parent / "fixtures" / "loss-resumes.json.xz"
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


def main() -> int:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decimals", type=int, default=4)
    parser.add_argument("--all", action="store_true", help="every interval and number of digits")
    options = parser.parse_args()
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
        ("correct resumes continuous", HARMLESS, ("continuous",), 1.0),
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

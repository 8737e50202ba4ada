"""Break sound checkpoints in thousands of ways, and count the faults that are missed.

    python tests/campaign/campaign.py [--share 0.05] [--seed 1] [--jobs 2] [--only A B]
                                      [--minutes 25] [--table tests/campaign/results.md]

A case is determined by its category, its number and the seed. `--share` runs a random
part of the cases; an interrupted run continues where it stopped. Outcomes are lines of
JSON in `.cache/campaign/SEED/`. Ends with 1 if a bad step was accepted, a good one was
refused, or anything else was wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
for folder in (REPOSITORY, REPOSITORY / "tests", HERE, REPOSITORY / "tests" / "formats"):
    sys.path.insert(0, str(folder))

from made_checkpoints import checkpoints  # noqa: E402
from outcome_table import published, summary  # noqa: E402

CATEGORIES = ("A", "B", "C", "D", "F", "G", "I", "J", "K", "L", "M", "N", "O", "P", "Q", "R", "S")


def planned(category: str, seed: int, share: float) -> list[int]:
    """The numbers of the cases that are run: all, or a random share of them."""
    from cases import N_CASES

    n = N_CASES[category]
    if share >= 1:
        return list(range(n))
    chance = Random(f"{seed}-{category}-share")
    return sorted(chance.sample(range(n), max(1, round(n * share))))


def done_before(file: Path) -> set[tuple[str, int]]:
    """The cases of an earlier run, without a truncated last line."""
    found = set()
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            outcome = json.loads(line)
        except ValueError:
            continue
        found.add((outcome["category"], outcome["number"]))
    return found


def work(job: int, asked: argparse.Namespace, out: Path) -> None:
    """Run every n-th case that is not done yet, until the time limit."""
    from cases import Bench

    until_s = time.monotonic() + 60 * asked.minutes
    file = out / f"{job}.jsonl"
    done = {case for path in out.glob("*.jsonl") for case in done_before(path)}
    work_in = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="campaign-", dir=work_in) as folder:
        bench = Bench(Path(folder), asked.seed, peers=asked.peers)
        with closing(bench), file.open("a") as lines:
            for category, number in _in_turn(asked):
                if number % asked.jobs != job or (category, number) in done:
                    continue
                if time.monotonic() > until_s:
                    return
                outcome = bench.run(category, number)
                lines.write(json.dumps(outcome.as_dict()) + "\n")
                lines.flush()


def _in_turn(asked: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """All categories side by side, so that a run that is cut short has some of each."""
    cases = [
        (place / max(1, len(numbers)), category, number)
        for category in asked.only
        for numbers in (planned(category, asked.seed, asked.share),)
        for place, number in enumerate(numbers)
    ]
    for _, category, number in sorted(cases):
        yield category, number


def _planned_in_all() -> int:
    from cases import N_CASES

    return sum(N_CASES.values())


def outcomes(out: Path) -> list[dict[str, object]]:
    """All recorded outcomes, each case once."""
    found = {}
    for path in sorted(out.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                outcome = json.loads(line)
            except ValueError:
                continue
            found[outcome["category"], outcome["number"]] = outcome
    return [found[key] for key in sorted(found)]


def main() -> int:
    """Run the campaign, and print its results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--only", nargs="+", choices=CATEGORIES, default=list(CATEGORIES))
    parser.add_argument("--minutes", type=float, default=25.0, help="then stop; run again")
    parser.add_argument("--peers", type=float, default=0.1, help="share that dcp.load loads too")
    parser.add_argument("--out", type=Path, help="where outcomes are kept")
    parser.add_argument("--again", action="store_true", help="forget earlier outcomes")
    parser.add_argument("--table", type=Path, help="publish the table in this page")
    asked = parser.parse_args()
    out = asked.out or REPOSITORY / ".cache" / "campaign" / str(asked.seed)
    if asked.again:
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    checkpoints()  # once, and not by each job
    if "D" in asked.only:
        from interrupted import recorded

        recorded(REPOSITORY / ".cache" / "campaign")  # once, and not by each job
    context = multiprocessing.get_context("spawn")
    jobs = [context.Process(target=work, args=(n, asked, out)) for n in range(asked.jobs)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    found = outcomes(out)
    print(summary(found))
    if asked.table:
        published(asked.table, found, _planned_in_all(), asked.seed)
    problems = [outcome for outcome in found if outcome["problem"]]
    for outcome in problems[:40]:
        print("PROBLEM", json.dumps(outcome))
    done = {(outcome["category"], outcome["number"]) for outcome in found}
    left = sum(case not in done for case in _in_turn(asked))
    if left:
        print(f"{left:,} cases are left: run the same again")
    return 1 if problems or any(job.exitcode for job in jobs) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Kill a training run 50 times at random; its losses must equal those of an unbroken run.

    python tests/campaign/kills.py [--kills 50] [--seed 0] [--lazy]

Four ranks on gloo train a small transformer with dropout, AdamW, a schedule and
shuffled data. All of them are killed with SIGKILL, at a random time or at a moment of a
save, and restarted with `auto`, ten times in each run; then the run may end. Its losses
must equal those of an unbroken run in every digit, its samples those of one epoch, and
its root must hold nothing but the newest three steps, complete and sealed, and the one
that was resumed from last. Ends with a code other than 0 otherwise; `--seed` repeats a
campaign.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "train"), str(HERE.parent.parent)]

from running import (  # noqa: E402
    N_SAMPLES,
    codes_of,
    losses,
    report_of,
    rows_of,
    run_job,
    samples,
)

import ckptctl  # noqa: E402

KILLS_A_RUN = 10
KEEP = 3
JOB = ("--ranks", 4, "--batch", 4, "--steps", 24, "--save-every", 2, "--keep", KEEP)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a training job at random.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lazy", action="store_true", help="save beside the training")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    lazy = ("--lazy",) if options.lazy else ()
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        done = run_job(Path(folder), *JOB, name="unbroken")
        if codes_of(done) != [0]:
            sys.exit(done.stderr)
        unbroken = rows_of(Path(folder), "unbroken")
        n_kills = 0
        while n_kills < options.kills:
            n_more = min(KILLS_A_RUN, options.kills - n_kills)
            moments = [moment(draw) for _ in range(n_more)]
            name = f"run-{n_kills}"
            done = run_job(Path(folder), *JOB, *lazy, "--kill", *moments, name=name)
            check(done, rows_of(Path(folder), name), unbroken, moments)
            check_left(Path(folder) / name, moments)
            n_kills += sum(code == -9 for code in codes_of(done))
            print(f"{n_kills:3} kills, {time.monotonic() - began_s:.0f} s: {' '.join(moments)}")
    print(f"{n_kills} kills, and every loss and every sample as if there had been none")


def moment(draw: random.Random) -> str:
    """Two times out of three any time, else right before something is published."""
    if draw.random() < 2 / 3:
        return f"{draw.uniform(0, 0.9):.3f}"
    return f"{draw.choice(('claim', 'metadata', 'seal'))}:{draw.choice((1, 1, 2))}"


def check(done, rows: dict[int, dict], unbroken: dict[int, dict], moments: list[str]) -> None:
    said = f"kills at {' '.join(moments)}\n{done.stderr}"
    if codes_of(done)[-1] != 0:
        sys.exit(f"the run did not come to its end: {codes_of(done)}, {said}")
    if losses(rows) != losses(unbroken):
        sys.exit(f"the losses differ: {losses(rows)}\nand not {losses(unbroken)}, {said}")
    if sorted(samples(rows)) != list(range(N_SAMPLES)):
        sys.exit(f"not every sample once: {samples(rows)}, {said}")


def check_left(root: Path, moments: list[str]) -> None:
    reports = ckptctl.scan(str(root), require_seal=True, grace_s=0.0).reports
    resumed_from = report_of(root.parent, root.name)["step"]
    kept = [report for report in reports if report.number != resumed_from]
    if len(kept) > KEEP or not all(report.usable for report in kept):
        left = ", ".join(f"{report.number}: {report.verdict.value}" for report in reports)
        sys.exit(f"{left} are left, kills at {' '.join(moments)}")
    aside = [int(path.name.split(".")[0][5:]) for path in (root / ".ckptctl/aside").glob("*")]
    # If the last attempt had nothing left to save, it removed nothing either.
    saved = resumed_from != reports[0].number
    if saved and any(number < reports[-1].number for number in aside):
        sys.exit(f"steps {aside} lie aside, kills at {' '.join(moments)}")


if __name__ == "__main__":
    main()

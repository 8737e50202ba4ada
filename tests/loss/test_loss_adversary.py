"""Logs that look like a resume that worked, and prove nothing: none of them is a plain yes.

The rows are those of a real training job (`fixtures/loss_resumes.py`). Each kind of log is
made from every resume of every run, so a rule that fits one run only does not pass.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptctl.errors import UsageError
from ckptctl.loss.checking import check_loss

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "loss-resumes.json.xz"

Record = dict[str, float]
Log = list[Record]

AGAIN = 12
"""Steps that the job logged after its checkpoint before it died."""
N_BEFORE = 100
"""Steps before the checkpoint that the logs hold."""
DAY = 86_400


def logged(rows: Sequence[Sequence[float]], attempt: int = 1) -> Log:
    """Rows as a trainer logs them that prints four decimals and a clock."""
    return [
        {
            "step": int(step),
            "loss": round(loss, 4),
            "lr": rate,
            "grad_norm": round(norm, 4),
            "tokens": int(tokens),
            "timestamp": 1.7e9 + DAY * attempt + 3 * i,
            # Not a clock, and not the same twice.
            "step_time_s": round(3 + (7919 * (step + 31 * attempt) % 997) / 1e4, 4),
        }
        for i, (step, loss, rate, norm, tokens) in enumerate(rows)
    ]


@dataclass(frozen=True)
class Job:
    """A run that died some steps after a checkpoint, and its resumes."""

    saved: int
    rows: Sequence[Sequence[float]]
    resumes: dict[str, Sequence[Sequence[float]]]

    @property
    def died(self) -> int:
        return self.saved + AGAIN

    def before(self, last: int | None = None, attempt: int = 1) -> Log:
        """What the job logged up to a step, the last one by default."""
        last = self.died if last is None else last
        return logged([row for row in self.rows if row[0] <= last], attempt)

    def after(self, fault: str = "correct", attempt: int = 2) -> Log:
        """What the resumed job logged."""
        return logged(self.resumes[fault], attempt)

    def since(self, first: int, attempt: int = 2) -> Log:
        """What a job logs that resumed before step `first`."""
        return logged([row for row in self.rows if row[0] >= first], attempt)


def jobs() -> Iterator[Job]:
    document = json.loads(lzma.decompress(FIXTURE.read_bytes()))
    for run in document["runs"]:
        for saved in sorted({resume["saved"] for resume in run["resumes"]}):
            resumes = {
                resume["fault"]: resume["rows"]
                for resume in run["resumes"]
                if resume["saved"] == saved
            }
            recent = [row for row in run["before"] if row[0] > saved - N_BEFORE]
            yield Job(saved, recent, resumes)


JOBS = list(jobs())


@dataclass(frozen=True)
class Case:
    """Logs in order, and the options of the caller."""

    logs: Sequence[Log]
    claim: int | None = None
    canary: Log | None = None


Maker = Callable[[Job], Case]


def untimed(*logs: Log) -> list[Log]:
    times = ("timestamp", "step_time_s")
    return [[{k: v for k, v in row.items() if k not in times} for row in log] for log in logs]


def changed(log: Log, since: int, **change: Callable[[Record], float]) -> Log:
    """The log with other values from its row number `since` on."""
    return [
        {**row, **{name: make(row) for name, make in change.items()}} if i >= since else row
        for i, row in enumerate(log)
    ]


def stamped(log: Log) -> Log:
    """The log with the clock of a log shipper, which sends a row each second."""
    rows = untimed(log)[0]
    return [{**row, "timestamp": 1.7e9 + i} for i, row in enumerate(rows)]


def every(log: Log, **values: float) -> Log:
    return [{**row, **values} for row in log]


CORRECT: dict[str, Maker] = {
    "appended, with a clock": lambda job: Case([job.before() + job.after()]),
    "a log of its own": lambda job: Case([job.before(), job.after()]),
    "a log of its own, without times": lambda job: Case(untimed(job.before(), job.after())),
    "appended, the step named": lambda job: Case(
        untimed(job.before() + job.after()), claim=job.saved
    ),
    "a log of its own, the step named": lambda job: Case(
        [job.before(), job.after()], claim=job.saved
    ),
    "copies of the tail before it": lambda job: Case(
        [job.before() + job.before()[-5:] + job.after()]
    ),
    "copies of older rows in it": lambda job: Case(
        [job.before() + job.after()[:30] + job.before()[-9:] + job.after()[30:]]
    ),
    "the log of before named twice": lambda job: Case([job.before(), job.after()], claim=job.saved),
    "a canary": lambda job: Case([job.before()], canary=job.after()[:8]),
}

WRONG: dict[str, Maker] = {
    # Copies.
    "the tail twice": lambda job: Case([job.before() + job.before()[-AGAIN:]]),
    "the tail twice, the step named": lambda job: Case(
        [job.before() + job.before()[-AGAIN:]], claim=job.saved
    ),
    "the tail twice, and on": lambda job: Case(
        [job.before() + job.before()[-AGAIN:] + job.since(job.died + 1, attempt=1)]
    ),
    "the tail twice, in another log": lambda job: Case([job.before(), job.before()[-AGAIN:]]),
    "the tail twice, in another log, and on": lambda job: Case(
        [job.before(), job.before()[-AGAIN:] + job.since(job.died + 1)], claim=job.saved
    ),
    "the tail twice, without times": lambda job: Case(
        untimed(job.before() + job.before()[-AGAIN:])
    ),
    "the tail twice, without times, the step named": lambda job: Case(
        untimed(job.before() + job.before()[-AGAIN:]), claim=job.saved
    ),
    "the tail twice, without times, in another log": lambda job: Case(
        untimed(job.before(), job.before()[-AGAIN:]), claim=job.saved
    ),
    "the tail twice, without times, and on": lambda job: Case(
        untimed(job.before() + job.before()[-AGAIN:] + job.since(job.died + 1))
    ),
    "the tail twice, with the clock of the shipper": lambda job: Case(
        [
            job.before()
            + changed(job.before(), 0, timestamp=lambda row: row["timestamp"] + DAY)[-AGAIN:]
            + job.since(job.died + 1)
        ],
        claim=job.saved,
    ),
    "the tail twice, stamped by the shipper as it sends it": lambda job: Case(
        [stamped(job.before() + job.before()[-AGAIN:])]
    ),
    "the tail twice, stamped by the shipper, the step named": lambda job: Case(
        [stamped(job.before() + job.before()[-AGAIN:] + job.since(job.died + 1))], claim=job.saved
    ),
    "each row twice": lambda job: Case([[row for row in job.before() for _ in "12"]]),
    "a copy of the whole log": lambda job: Case([job.before(), job.before()]),
    "a canary of copies": lambda job: Case([job.before()], canary=job.before()[-8:]),
    # What does not vary.
    "no loss at all": lambda job: Case(
        [every(job.before(), loss=0.0), every(job.after(), loss=0.0)], claim=job.saved
    ),
    "a constant loss": lambda job: Case(
        [every(job.before(), loss=0.6931), every(job.after(), loss=0.6931)], claim=job.saved
    ),
    "a loss that goes to and fro": lambda job: Case(
        [
            changed(log, 0, loss=lambda row: 0.6931 + 1e-3 * (row["step"] % 2))
            for log in (job.before(), job.after())
        ],
        claim=job.saved,
    ),
    "a loss that varies less than it may differ": lambda job: Case(
        [
            changed(log, 0, loss=lambda row: 2.0 + 1e-7 * (row["step"] % 7))
            for log in (job.before(), job.after())
        ],
        claim=job.saved,
    ),
    # The wrong step.
    "an older step": lambda job: Case([job.before(), job.since(job.saved - 50)], claim=job.saved),
    "an older step, few rows": lambda job: Case(
        [job.before(), job.since(job.saved - 50)[:AGAIN]], claim=job.saved
    ),
    "an older step, appended": lambda job: Case(
        [job.before() + job.since(job.saved - 50)], claim=job.saved
    ),
    "a little older step": lambda job: Case(
        [job.before(), job.since(job.saved - 2)], claim=job.saved
    ),
    "an older step, the last rows lost": lambda job: Case(
        [job.before(job.saved - 4) + job.since(job.saved - 50)], claim=job.saved
    ),
    "an older step after a resume that was right": lambda job: Case(
        [job.before() + job.after() + job.since(job.saved - 50, attempt=3)], claim=job.saved
    ),
    "a newer step": lambda job: Case([job.before(), job.since(job.saved + 6)], claim=job.saved),
    "a newer step, appended": lambda job: Case(
        [job.before() + job.since(job.saved + 6)], claim=job.saved
    ),
    "a newer step than any logged": lambda job: Case(
        [job.before(), job.after()], claim=job.saved + 40
    ),
    "no step": lambda job: Case([job.before(), job.before(attempt=2)], claim=job.saved),
    "no step, few rows": lambda job: Case(
        [job.before(), job.before(attempt=2)[:AGAIN]], claim=job.saved
    ),
    "no row yet": lambda job: Case([job.before(), []], claim=job.saved),
    "no row yet after a resume that was right": lambda job: Case(
        [job.before() + job.after(), []], claim=job.saved
    ),
    "no row yet, and no claim": lambda job: Case([job.before() + job.after(), []]),
    # Faults behind steps that agree.
    "a loss that doubles": lambda job: Case(
        [job.before(), changed(job.after(), AGAIN, loss=lambda row: 2 * row["loss"])],
        claim=job.saved,
    ),
    "a loss that doubles later": lambda job: Case(
        [job.before(), changed(job.after(), AGAIN + 6, loss=lambda row: 2 * row["loss"])],
        claim=job.saved,
    ),
    "tokens that jump": lambda job: Case(
        [job.before(), changed(job.after(), AGAIN, tokens=lambda row: row["tokens"] + 1e6)],
        claim=job.saved,
    ),
    "tokens that jump later": lambda job: Case(
        [job.before(), changed(job.after(), AGAIN + 9, tokens=lambda row: row["tokens"] + 1e6)]
    ),
    "tokens that begin again": lambda job: Case(
        [
            job.before(),
            changed(job.after(), AGAIN, tokens=lambda row: row["tokens"] / row["step"] * AGAIN),
        ]
    ),
    "a learning rate that is reset": lambda job: Case(
        [job.before(), changed(job.after(), AGAIN, lr=lambda row: 1e-6 * (row["step"] - job.died))]
    ),
    "a learning rate that is too high": lambda job: Case(
        [job.before(), changed(job.after(), AGAIN, lr=lambda row: 10 * row["lr"])]
    ),
    "a learning rate that is too high later": lambda job: Case(
        [job.before(), changed(job.after(), AGAIN + 5, lr=lambda row: 10 * row["lr"])]
    ),
    "a loss that is no number": lambda job: Case(
        [job.before(), changed(job.after(), AGAIN + 3, loss=lambda _: float("nan"))]
    ),
    "a gradient norm far higher": lambda job: Case(
        [job.before(), changed(job.after(), AGAIN, grad_norm=lambda row: 30 * row["grad_norm"])]
    ),
    "steps that differ from the sixth on": lambda job: Case(
        [job.before(), changed(job.after(), 5, loss=lambda row: 1.05 * row["loss"])]
    ),
    # Too little.
    "nothing logged twice": lambda job: Case([job.before(job.saved), job.after()]),
    "two steps logged twice": lambda job: Case([job.before(job.saved + 2), job.after()]),
    "two decimals": lambda job: Case(
        [
            changed(log, 0, loss=lambda row: round(row["loss"], 2), grad_norm=lambda _: 1.0)
            for log in (job.before(), job.after())
        ]
    ),
    "another optimizer": lambda job: Case([job.before(), job.after("weights only")]),
    "zeroed moments": lambda job: Case([job.before(), job.after("moments zeroed")]),
    "zeroed moments, without gradient norms": lambda job: Case(
        [every(log, grad_norm=1.0) for log in (job.before(), job.after("moments zeroed"))]
    ),
    "older weights": lambda job: Case([job.before(), job.after("older weights")]),
    "nothing loaded": lambda job: Case([job.before(), job.after("nothing loaded")]),
}


def checked(case: Case, folder: Path):
    names = [folder / f"{i}.jsonl" for i in range(len(case.logs))]
    for name, log in zip(names, case.logs, strict=True):
        name.write_text("".join(json.dumps(row) + "\n" for row in log))
    canary = None
    if case.canary is not None:
        canary = folder / "canary.jsonl"
        canary.write_text("".join(json.dumps(row) + "\n" for row in case.canary))
    return check_loss(
        [str(name) for name in names],
        resume_step=case.claim,
        strict=True,
        canary=None if canary is None else str(canary),
    )


def test_there_are_enough_cases():
    assert len(WRONG) * len(JOBS) >= 200


@pytest.mark.parametrize("kind", CORRECT)
def test_a_resume_that_worked_is_continuous(kind, tmp_path):
    for number, job in enumerate(JOBS):
        folder = tmp_path / str(number)
        folder.mkdir()
        report = checked(CORRECT[kind](job), folder)
        assert (report.verdict.value, report.exit_code) == ("continuous", 0), report.message


@pytest.mark.parametrize("kind", WRONG)
def test_a_log_that_proves_nothing_is_never_a_plain_yes(kind, tmp_path):
    for number, job in enumerate(JOBS):
        folder = tmp_path / str(number)
        folder.mkdir()
        report = checked(WRONG[kind](job), folder)
        assert report.verdict.value != "continuous", report.message
        assert report.exit_code in (30, 31, 32)


ANOTHER_STEP = [
    kind
    for kind, make in WRONG.items()
    if " step" in kind and "named" not in kind and make(JOBS[0]).claim is not None
]


@pytest.mark.parametrize("kind", ANOTHER_STEP)
def test_another_step_than_was_named_is_discontinuous(kind, tmp_path):
    case = WRONG[kind](JOBS[0])
    report = checked(case, tmp_path)
    codes = {finding.code for each in report.assessments for finding in each.findings}
    assert (report.exit_code, "loss.step" in codes) == (30, True), report.message
    assert report.assessments[0].resume.position.file.endswith(f"{len(case.logs) - 1}.jsonl")


@pytest.mark.parametrize(
    ("kind", "because"),
    [
        ("a canary of copies", "their times repeat"),
        ("the tail twice, stamped by the shipper as it sends it", "sooner than a process can"),
        ("the tail twice, without times", "no step follows {died}"),
    ],
)
def test_a_copy_is_reported_with_what_shows_it(kind, because, tmp_path):
    job = JOBS[0]
    report = checked(WRONG[kind](job), tmp_path)
    found = [each for one in report.assessments for each in one.findings]
    (copied,) = [finding for finding in found if finding.code == "loss.copied"]
    assert because.format(died=f"{job.died:,}") in copied.message


def test_a_log_that_is_named_twice_is_read_once(tmp_path):
    job, log = JOBS[0], tmp_path / "train.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in job.before() + job.after()))
    link = tmp_path / "link.jsonl"
    link.symlink_to(log)
    once = check_loss([str(log)])
    for names in ([str(log)] * 2, [str(log), str(link)]):
        report = check_loss(names)
        assert (report.verdict, report.n_rows) == (once.verdict, once.n_rows)
    with pytest.raises(UsageError, match="one of the logs of the run"):
        check_loss([str(log)], canary=str(log))

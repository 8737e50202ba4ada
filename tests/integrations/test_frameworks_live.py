"""Each integration with its real framework, on two ranks: saved, killed, resumed, checked."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import REPOSITORY, run_ckptctl, validated
from live_frameworks import Run, record, seal_by_watch, version_of

import ckptctl
from ckptctl.loss.verdict import LossVerdict

pytestmark = [pytest.mark.torch, pytest.mark.slow]

RECORDED = ("transformers", "accelerate", "lightning", "olmo_core", "trl")
"""Those whose integration logs the losses and checks the resume."""
SEALED = (*RECORDED, "torchtitan", "megatron.core", "verl")
"""Those whose integration seals; `ckptctl watch` seals what the others save."""
FRAMEWORKS = (*SEALED, "deepspeed", "composer")
ROUNDED = ("lightning", "composer")
"""Those whose console prints too few digits to prove a resume, and no gradient norms."""
IN_CI = ("transformers", "accelerate", "lightning", "torchtitan")
PAGES = REPOSITORY / "docs" / "frameworks" / "README.md"
SAVED = (12, 24, 36)
KILLED_AT = 44


@dataclass(frozen=True)
class Case:
    """A framework, and what it saves besides its usual steps."""

    framework: str
    variant: str = ""
    options: tuple[str, ...] = ()
    n_ranks: int = 2

    def run(self, run_job: Run, root: Path, *options: object) -> subprocess.CompletedProcess[str]:
        """Run the job of the framework, until each step that it saved is sealed."""
        done = run_job(self.framework, root, *self.options, *options, n_ranks=self.n_ranks)
        if self.framework not in SEALED:
            seal_by_watch(root)
        return done

    def record(self, **facts: object) -> None:
        record(self.framework, self.variant, **facts)


CASES = [
    *map(Case, FRAMEWORKS),
    Case("lightning", "sharded, 2 ranks", ("--sharded",)),
    Case("lightning", "sharded, 4 ranks", ("--sharded",), n_ranks=4),
    Case("transformers", "FSDP 2, 2 ranks", ("--sharded",)),
    Case("transformers", "FSDP 2, 4 ranks", ("--sharded",), n_ranks=4),
    Case("trl", "DPO", ("--dpo",)),
]


@dataclass(frozen=True)
class Interrupted:
    """A run that was killed on all ranks after its third save: never resume in `root` itself."""

    case: Case
    root: Path
    console: str


def marked(case: Case) -> object:
    in_ci = case.framework in IN_CI and not case.variant
    name = f"{case.framework} {case.variant}".strip()
    return pytest.param(case, id=name, marks=[] if in_ci else [pytest.mark.long])


@pytest.fixture(scope="module", params=map(marked, CASES))
def interrupted(request, tmp_path_factory, run_job: Run) -> Interrupted:
    case = request.param
    assert version_of(case.framework) in PAGES.read_text()
    root = tmp_path_factory.mktemp(case.framework) / "run"
    done = case.run(run_job, root, "--kill-at", KILLED_AT)
    assert "exitcode: -9" in done.stdout or "exitcode  : -9" in done.stdout, done.stdout
    return Interrupted(case, root, done.stdout)


@pytest.fixture
def copied(interrupted, tmp_path) -> Path:
    """A copy of the interrupted run, to resume in."""
    root = tmp_path / "run"
    shutil.copytree(interrupted.root, root, symlinks=True)
    return root


def consoles(tmp_path: Path, *texts: str) -> list[str]:
    """Files with the output of the framework, as a job script would redirect it."""
    paths = [tmp_path / f"console-{number}.log" for number, _ in enumerate(texts)]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return list(map(str, paths))


def test_every_save_is_sealed_and_the_newest_is_picked(interrupted):
    root = interrupted.root
    scanned = ckptctl.scan(str(root))
    steps = [report.number for report in scanned.reports if report.number]
    assert steps == sorted(SAVED, reverse=True)
    chosen = ckptctl.pick(str(root), require_seal=True)
    assert chosen.step == SAVED[-1]
    for number in SAVED:
        done = run_ckptctl("verify", f"{root}@{number}", "--level", "content", "--require-seal")
        assert done.returncode == 0, done.stdout
    shown = run_ckptctl("show", chosen.path, "--json")
    assert shown.returncode == 0
    assert validated(shown.stdout)["state"]["optimizer"]["found"]
    case = interrupted.case
    case.record(sealed=case.framework in SEALED or "by watch")
    if Path(chosen.path).is_file():
        case.record(ranks="–")
    elif any(Path(chosen.path).rglob(".metadata")):
        case.record(stopped="DCP", damaged="DCP", ranks="DCP")


def test_a_right_resume_is_proven(interrupted, copied, run_job, tmp_path):
    case = interrupted.case
    done = case.run(run_job, copied, "--stop")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("ckptctl: resuming from") == 1
    if case.framework in RECORDED:
        assert re.search(r"\d+ steps were logged twice and agree", done.stdout)
        log = ckptctl.check_loss(str(copied / "train.jsonl"), report=str(copied))
        assert log.verdict is LossVerdict.CONTINUOUS, log.message
    report = ckptctl.check_loss(consoles(tmp_path, interrupted.console, done.stdout))
    assert report.assessments[0].resume.resume_point.step == SAVED[-1]
    is_rounded = case.framework in ROUNDED
    wanted = LossVerdict.NO_JUMP if is_rounded else LossVerdict.CONTINUOUS
    assert report.verdict is wanted, report.message
    last = ckptctl.verify(f"{copied}@48", level="content", require_seal=True)
    assert last.exit_code == 0, last.findings
    of_log = LossVerdict.CONTINUOUS.value if case.framework in RECORDED else "–"
    case.record(right=report.verdict.value, log=of_log)


def test_a_resume_with_other_weights_is_wrong_by_the_console(
    interrupted, copied, run_job, tmp_path
):
    case = interrupted.case
    done = case.run(run_job, copied, "--stop", "--wrong")
    if case.framework in RECORDED:
        assert "exitcode  : 30" in done.stdout, done.stdout
        # The ranks write to one console, now and then into one line.
        errors = re.findall("error: .*? (?:differ|rises) by", done.stdout)
        assert len(errors) == case.n_ranks, done.stdout
    report = ckptctl.check_loss(consoles(tmp_path, interrupted.console, done.stdout))
    assert report.verdict is LossVerdict.DISCONTINUOUS, report.message
    case.record(wrong=report.verdict.value)


def test_a_damaged_step_is_passed_over_and_the_reason_is_in_the_log(interrupted, copied, run_job):
    case = interrupted.case
    newest = ckptctl.pick(str(copied)).path
    damaged = max(
        (path for path in [Path(newest), *Path(newest).rglob("*")] if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    damaged.write_bytes(damaged.read_bytes()[:-100])
    done = case.run(run_job, copied, "--steps", SAVED[-1] + 1)
    assert done.returncode == 0, done.stdout
    (line,) = (line for line in done.stdout.splitlines() if "ckptctl: resuming from" in line)
    assert f"not from step {SAVED[-1]}: " in line
    # torchtitan saves the weights alone in the last step, which is passed over.
    wanted = (SAVED[-1],) if case.framework == "torchtitan" else (SAVED[-1], SAVED[-1] + 1)
    assert ckptctl.pick(str(copied), require_seal=True).step in wanted
    case.record(passed_over=True)

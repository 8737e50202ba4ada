"""The contract of a resume: what a job states of itself, in each step, and what differs later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import validated
from next_commands import run_and_follow as run_ckptctl

torch = pytest.importorskip("torch")

from one_process import Job, run  # noqa: E402

import ckptctl  # noqa: E402
from ckptctl.errors import UsageError  # noqa: E402
from ckptctl.formats.own.contract import CONTRACT_FILE, drift, terms_of  # noqa: E402
from ckptctl.preflight_checks.results import CheckOutcome  # noqa: E402

pytestmark = pytest.mark.torch

TERMS = {"global_batch": 8, "tokenizer": {"name": "bpe", "vocabulary": 32_000}, "lr": [0.1, 0.2]}


@pytest.fixture(scope="module")
def stated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root whose steps keep what their job states."""
    root = tmp_path_factory.mktemp("stated") / "run"
    run(root, 6, contract=TERMS)
    return root


def differing(**terms: object) -> dict[str, object]:
    return {**TERMS, **terms}


def test_a_resume_of_the_same_job_names_nothing(stated: Path):
    job = Job(stated, contract=TERMS)
    assert job.ckpt.resume("auto", replay=1).drift == ()
    assert not [line for line in job.said if "contract" in line or "was" in line]


def test_a_resume_names_each_term_that_differs(stated: Path):
    now = differing(global_batch=16, tokenizer={"name": "bpe"}, code="a1b2")
    job = Job(stated, contract=now)
    found = job.ckpt.resume("auto", replay=1).drift
    assert [str(each) for each in found] == [
        'code: not stated in the step, "a1b2" now',
        "global_batch: 8 in the step, 16 now",
        "tokenizer.vocabulary: 32000 in the step, not stated now",
    ]
    assert [line for line in job.said if line.startswith("warning: ")] == [
        f"warning: the job differs from the step in {each}" for each in found
    ]


def test_a_step_that_states_none_is_named(tmp_path: Path):
    run(tmp_path / "run", 6)
    job = Job(tmp_path / "run", contract=TERMS)
    assert job.ckpt.resume("auto", replay=1).drift == ()
    assert "note: step_3 has no contract, so the job is compared with none" in job.said


def test_the_report_of_a_resume_holds_the_drift(stated: Path, tmp_path: Path):
    root = tmp_path / "run"
    run(root, 3, contract=TERMS)
    job = Job(root, contract=differing(global_batch=16))
    start = job.resume()
    assert start.report["drift"] == [{"term": "global_batch", "saved": "8", "now": "16"}]
    job.die()


def test_a_contract_of_another_save_is_compared_with_nothing(stated: Path, tmp_path: Path):
    run(tmp_path / "run", 3, contract=TERMS)
    other = (stated / "step_6" / CONTRACT_FILE).read_bytes()
    (tmp_path / "run" / "step_3" / CONTRACT_FILE).write_bytes(other)
    found = ckptctl.preflight(str(tmp_path / "run"), contract=differing(global_batch=16))
    check = next(each for each in found.checks if each.name == "contract")
    assert (check.outcome, found.exit_code) == (CheckOutcome.WARNING, 0)
    assert check.message == "the contract of step_3 is that of another save, so nothing is compared"


def test_preflight_stops_a_job_that_differs_unless_each_term_is_accepted(
    stated: Path, tmp_path: Path
):
    file = tmp_path / "job.toml"
    file.write_text(
        'global_batch = 16\nlr = [0.1, 0.2]\n[tokenizer]\nname = "other"\nvocabulary = 32000\n'
    )
    done = run_ckptctl("preflight", stated, "--contract", file, "--json")
    found = validated(done.stdout)
    check = next(each for each in found["checks"] if each["name"] == "contract")
    assert (done.returncode, check["outcome"]) == (11, "failed")
    assert check["message"] == (
        'the job differs: global_batch: 8 in the step, 16 now; tokenizer.name: "bpe" in the step, '
        '"other" now; to resume all the same, state --accept-drift global_batch --accept-drift '
        "tokenizer.name"
    )
    accepted = ("--accept-drift", "global_batch", "--accept-drift", "tokenizer.name")
    done = run_ckptctl("preflight", stated, "--contract", file, *accepted)
    assert (done.returncode, done.stdout) == (0, f"{stated}/step_6\n")
    assert "as the step: 2 terms; accepted: global_batch: 8 in the step, 16 now" in done.stderr


def test_preflight_reads_the_same_terms_from_json(stated: Path, tmp_path: Path):
    (tmp_path / "job.json").write_text(json.dumps(TERMS))
    done = run_ckptctl("preflight", stated, "--contract", tmp_path / "job.json")
    assert done.returncode == 0
    assert "as the step: 4 terms" in done.stderr


@pytest.mark.parametrize("text", ["global_batch = ", "[[", "\x00"])
def test_a_file_that_states_nothing_readable_is_a_usage_error(
    stated: Path, tmp_path: Path, text: str
):
    (tmp_path / "job.toml").write_text(text)
    done = run_ckptctl("preflight", stated, "--contract", tmp_path / "job.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--contract" in done.stderr


def test_what_cannot_be_compared_is_refused_before_the_first_step(tmp_path: Path):
    with pytest.raises(UsageError, match="the term seed of the contract is nan"):
        Job(tmp_path / "run", contract={"seed": float("nan")})
    with pytest.raises(UsageError, match=r"the term data\.set of the contract is <object"):
        terms_of({"data": {"set": object()}})


def test_equal_numbers_agree_and_truth_is_no_number():
    assert drift({"a": 1, "b": None}, {"a": 1.0, "b": None}) == ()
    assert [each.term for each in drift({"a": 1}, {"a": True})] == ["a"]


def test_a_resharded_step_keeps_the_contract(stated: Path, tmp_path: Path):
    new = tmp_path / "new" / "step_6"
    new.parent.mkdir()
    ckptctl.reshard(str(stated / "step_6"), str(new), world_size=2)
    found = ckptctl.preflight(str(new.parent), contract=differing(global_batch=16))
    assert found.exit_code == 11
    assert "global_batch: 8 in the step, 16 now" in found.message

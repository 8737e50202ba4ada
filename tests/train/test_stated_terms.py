"""The contract of a resume: what a job states of itself, in each step, and what differs later."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import validated
from hypothesis import given
from hypothesis import strategies as st
from next_commands import run_and_follow as run_ckptctl
from services.plugin import S3Server

torch = pytest.importorskip("torch")

from one_process import Job, run  # noqa: E402

import ckptctl  # noqa: E402
from ckptctl.errors import UsageError  # noqa: E402
from ckptctl.formats.own.contract import (  # noqa: E402
    CONTRACT_FILE,
    contract_bytes,
    drift,
    parse_contract,
    terms_of,
)
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
    now = differing(global_batch=16, tokenizer={"name": "other"}, code="a1b2")
    job = Job(stated, contract=now)
    found = job.ckpt.resume("auto", replay=1).drift
    assert [str(each) for each in found] == [
        "global_batch: 8 in the step, 16 now",
        'tokenizer.name: "bpe" in the step, "other" now',
    ]
    alone = "the step alone states tokenizer.vocabulary; the job alone states code"
    assert f"note: of the contract {alone}" in job.said
    assert [line for line in job.said if line.startswith("warning: ")] == [
        f"warning: the job differs from the step in {each}" for each in found
    ]


def test_a_step_that_states_none_is_named(tmp_path: Path):
    run(tmp_path / "run", 6)
    job = Job(tmp_path / "run", contract=TERMS)
    assert job.ckpt.resume("auto", replay=1).drift == ()
    assert "note: step_3 has no contract; the job is compared with none" in job.said


def test_the_report_of_a_resume_holds_the_drift(stated: Path, tmp_path: Path):
    root = tmp_path / "run"
    run(root, 3, contract=TERMS)
    job = Job(root, contract=differing(global_batch=16))
    start = job.resume()
    assert start.report["drift"] == [{"term": "global_batch", "saved": "8", "now": "16"}]
    job.die()


@pytest.mark.parametrize("what", ["another save", "changed", "cut short"])
def test_a_contract_that_is_not_that_of_the_step_stops_the_job(
    stated: Path, tmp_path: Path, what: str
):
    root = Path(shutil.copytree(stated, tmp_path / "run"))
    file = root / "step_6" / CONTRACT_FILE
    own = file.read_bytes()
    other = {
        "another save": (stated / "step_3" / CONTRACT_FILE).read_bytes(),
        "changed": own.replace(b"32000", b"32001"),
        "cut short": own[:40],
    }
    assert own != other[what]
    file.write_bytes(other[what])
    found = ckptctl.preflight(str(root), contract=TERMS)
    check = next(each for each in found.checks if each.name == "contract")
    assert (check.outcome, found.exit_code, found.path) == (CheckOutcome.FAILED, 11, None)
    assert check.message.startswith("the contract of step_6 ")
    job = Job(root, contract=TERMS)
    assert job.resume().drift == ()
    assert any("the contract of step_6" in line for line in job.said)
    job.die()


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
        "the job differs from the step: global_batch: 8 in the step, 16 now; "
        'tokenizer.name: "bpe" in the step, "other" now'
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


def test_terms_of_one_side_stop_nothing_and_are_named(stated: Path):
    found = ckptctl.preflight(str(stated), contract={"code": "a1b2"}, accept_drift=["other"])
    check = next(each for each in found.checks if each.name == "contract")
    assert (found.exit_code, check.outcome) == (0, CheckOutcome.WARNING)
    assert "the job alone states code" in check.message
    assert check.message.endswith("no such term: other")
    with pytest.raises(UsageError, match="needs --contract"):
        ckptctl.preflight(str(stated), accept_drift=["code"])


@pytest.mark.parametrize(
    "stated",
    [
        {"seed": float("nan")},
        {"a": [float("inf")]},
        {"data": {"set": object()}},
        {"n": 10**5_000},
        {"text": "x" * (1 << 20)},
        [1],
        "text",
    ],
)
def test_what_is_no_json_is_refused_before_the_first_step(tmp_path: Path, stated: object):
    with pytest.raises(UsageError, match="contract"):
        Job(tmp_path / "run", contract=stated)


def test_a_contract_of_many_tables_is_refused():
    deep: dict = {}
    for _ in range(3_000):
        deep = {"a": deep}
    with pytest.raises(UsageError, match="32 tables deep"):
        terms_of(deep)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(), each, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), VALUES, max_size=5))
def test_what_is_accepted_is_read_back_as_it_was(stated: dict):
    terms = terms_of(stated)
    assert parse_contract(contract_bytes(terms, "0" * 64))["terms"] == terms
    assert drift(terms, terms_of(stated)) == ()


def test_equal_numbers_agree_and_truth_is_no_number():
    assert drift(terms_of({"a": 1, "b": None}), terms_of({"a": 1.0, "b": None})) == ()
    assert [each.term for each in drift(terms_of({"a": 1}), terms_of({"a": True}))] == ["a"]


def test_no_password_of_an_address_is_kept(tmp_path: Path):
    run(tmp_path / "run", 3, contract={"data": "https://user:passw0rd@host/x?token=s3cr3t"})
    texts = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [text for text in texts if b"passw0rd" in text or b"s3cr3t" in text]


@pytest.mark.server
def test_the_contract_of_a_step_in_an_object_store_is_compared(s3_moto: S3Server):
    root = f"s3://{s3_moto.bucket}/stated"
    run(root, 3, contract=TERMS, storage_options=s3_moto.options)
    now = differing(global_batch=16)
    found = ckptctl.preflight(root, contract=now, storage_options=s3_moto.options)
    assert found.exit_code == 11
    assert "global_batch: 8 in the step, 16 now" in found.message


def test_a_resharded_step_keeps_the_contract(stated: Path, tmp_path: Path):
    new = tmp_path / "new" / "step_6"
    new.parent.mkdir()
    ckptctl.reshard(str(stated / "step_6"), str(new), world_size=2)
    found = ckptctl.preflight(str(new.parent), contract=differing(global_batch=16))
    assert found.exit_code == 11
    assert "global_batch: 8 in the step, 16 now" in found.message

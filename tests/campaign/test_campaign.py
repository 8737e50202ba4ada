"""A random share of the campaign misses nothing, and the campaign detects sabotage."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import campaign
import pytest
import soak
from cases import N_CASES, Bench
from outcome_table import bound, rows

pytestmark = pytest.mark.torch

SEED = 7
"""Which cases the share is made of. Any other finds as little; change it now and then."""

SHARE = 0.05
PARTS = (
    ("A", "B"),
    ("C", "L", "O"),
    ("D", "G", "J"),
    ("F", "K", "M", "N", "P", "Q", "R", "S"),
    pytest.param(("I",), marks=pytest.mark.server),
)


@pytest.fixture(scope="session", autouse=True)
def made(checkpoints: Path, dcp_versions: Path, rank_files: Path) -> None:
    """The sound steps are there before the campaign looks for them."""


@pytest.mark.slow
@pytest.mark.parametrize("only", PARTS, ids="".join)
def test_nothing_is_missed_and_nothing_sound_refused(only: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, campaign.__file__, "--share", str(SHARE), "--seed", str(SEED)),
            *("--jobs", "1", "--peers", "0.01", "--out", str(tmp_path), "--only", *only),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = campaign.outcomes(tmp_path)
    assert len(found) == sum(max(1, round(N_CASES[category] * SHARE)) for category in only)
    if "A" in only:
        assert {one["caught"] for one in found} >= {"listing", "structure", "content"}


def test_a_whole_campaign_is_as_large_as_it_says() -> None:
    assert set(N_CASES) == set(campaign.CATEGORIES)
    assert N_CASES["M"] >= 20_000
    assert sum(N_CASES.values()) - N_CASES["M"] >= 10_000


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path, SEED, peers=0.0)
    made.run("O", 0)  # the sound steps are read and sealed before anything is sabotaged
    return made


def test_a_case_is_the_same_whenever_it_is_run(bench: Bench) -> None:
    for category in "ABCL":
        first = bench.run(category, 3).as_dict()
        assert bench.run(category, 3).as_dict() == first


def test_a_tool_that_compares_no_checksums_would_be_caught(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptctl.records.verification._wrong", lambda *args: None)
    monkeypatch.setattr("ckptctl.records.opening.wrong_crcs", lambda *args: [])
    problems = {bench.run("A", number).problem for number in range(40)}
    assert "missed" in problems


def test_a_tool_that_refuses_everything_would_be_caught(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptctl.findings import Finding

    refused = [Finding("coverage.gap", "w", "a gap")]
    monkeypatch.setattr("ckptctl.inspection.stages.check_part_coverage", lambda *args: refused)
    outcome = bench.run("O", 1)
    assert outcome.problem == "false alarm"
    assert "asked again, pick refuses it" in outcome.said
    kept = Path(outcome.said.rpartition(" kept in ")[2].rstrip(")"))
    assert any(kept.rglob(".metadata"))
    shutil.rmtree(kept)


def test_a_tool_that_calls_a_failing_storage_damaged_would_be_caught(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ckptctl.inspection.inspecting.inspection_failed",
        lambda *args: __import__("ckptctl").findings.Finding("shard.missing", "x", "gone"),
    )
    assert any(bench.run("F", number).problem for number in range(12))


@pytest.mark.slow
def test_all_that_happens_at_one_root_at_once_leaves_every_answer_true(tmp_path: Path) -> None:
    root = soak.soak(tmp_path, 0.03, SEED)
    assert root.problems == []
    assert {command for command, _ in root.codes} >= {"pick", "verify", "seal", "prune"}


def test_a_pick_of_a_damaged_step_would_be_caught_by_the_soak(tmp_path: Path) -> None:
    root = soak.Root(tmp_path, 0.0, SEED)
    soak.save(root, random.Random(SEED), 10)
    root.truth[10].sound = False  # what was saved is whole; the recorded truth about it is not
    (me,) = [soak.Caller(root, "picker")]
    soak.picker(root, me)
    me.close()
    assert any("which is not whole" in problem for problem in root.problems)


def test_a_run_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    line = json.dumps({"category": "A", "number": 5, "problem": None})
    (tmp_path / "0.jsonl").write_text(f'{line}\n{{"category": "A", "nu')
    assert campaign.done_before(tmp_path / "0.jsonl") == {("A", 5)}
    assert len(campaign.outcomes(tmp_path)) == 1


def test_zero_misses_bound_the_rate_of_misses() -> None:
    assert bound(3000, 0) == "0.10%"
    assert bound(0, 0) == "-"
    assert bound(200, 1) == "0.50% seen"


def test_the_table_counts_each_case_once() -> None:
    one = {"category": "A", "harm": "values", "problem": None, "caught": "content"}
    table = rows([one, {**one, "caught": None, "problem": "missed"}])
    assert table[-1] == "| all | 2 | 2 | 0 | 0 | 1 | 0 | 1 | 0 | 0 | 0 | 50.00% seen |"

"""Killed at any moment, and restarted with `auto`: the run is the one that was never killed."""

from __future__ import annotations

import json

import pytest
from command_line import validated
from running import N_SAMPLES, codes_of, losses, report_of, rows_of, run_job, samples

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> dict[int, dict]:
    """What four ranks come to that nobody kills."""
    folder = tmp_path_factory.mktemp("unbroken")
    done = run_job(folder, "--ranks", 4)
    assert codes_of(done) == [0], done.stderr
    return rows_of(folder)


def test_four_ranks_killed_three_times_end_as_if_they_had_not_been(unbroken, tmp_path):
    done = run_job(tmp_path, "--ranks", 4, "--kill", "0.1", "metadata:1", "seal:2")
    assert codes_of(done) == [-9, -9, -9, 0], done.stderr
    rows = rows_of(tmp_path)
    assert losses(rows) == losses(unbroken)
    assert samples(rows) == samples(unbroken)
    assert sorted(samples(rows)) == list(range(N_SAMPLES))
    check_report(report_of(tmp_path))


def check_report(report: dict) -> None:
    validated(json.dumps(report))
    assert report["previous_attempt"] < report["attempt"]
    assert report["state"] == {
        "restored": [
            *("model", "optimizer", "scheduler", "dataloader", "rng", "step", "tokens", "samples")
        ],
        "derived": [],
        "lost": [],
    }
    assert (report["world_size"], report["saved_world_size"]) == (4, 4)

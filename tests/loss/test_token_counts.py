"""Counts of tokens that depend on the number of ranks, as torchtitan logs and saves them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import ckptctl

PER_STEP = 4096


def write(path: Path, steps: range, tokens: int | None) -> str:
    """Write a log of JSON lines; `tokens` were seen before the first step, None for no count."""
    noise = random.Random(steps.start)
    rows = (
        {
            "step": step,
            "loss": round(9 - step / 400 + noise.uniform(-0.05, 0.05), 5),
            **({} if tokens is None else {"n_tokens_seen": tokens + n * PER_STEP}),
        }
        for n, step in enumerate(steps, 1)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def codes(*logs: str, **keywords: int) -> set[str]:
    answer = ckptctl.check_loss([*logs], resume_step=200, **keywords)
    return {finding.code for each in answer.assessments for finding in each.findings}


def test_a_checkpoint_that_counts_the_tokens_of_one_rank_is_no_fault(tmp_path):
    # 8 ranks: the checkpoint holds an eighth of what the log shows.
    old = write(tmp_path / "0.jsonl", range(1, 211), None)
    new = write(tmp_path / "1.jsonl", range(201, 260), 200 * PER_STEP)
    ranks = {"world_size": 8, "saved_world_size": 8}
    assert "loss.tokens" not in codes(old, new, resume_tokens=25 * PER_STEP, **ranks)
    assert "loss.tokens" in codes(old, new, resume_tokens=25 * PER_STEP)
    assert "loss.tokens" not in codes(old, new, resume_tokens=200 * PER_STEP)


@pytest.mark.parametrize("held", [27, 400, 230])
def test_a_count_that_no_number_of_ranks_explains_is_reported(tmp_path, held):
    old = write(tmp_path / "0.jsonl", range(1, 211), None)
    new = write(tmp_path / "1.jsonl", range(201, 260), 200 * PER_STEP)
    assert "loss.tokens" in codes(old, new, resume_tokens=held * PER_STEP)


def test_a_count_that_changed_with_the_ranks_is_no_fault_if_they_are_known(tmp_path):
    old = write(tmp_path / "0.jsonl", range(1, 211), 0)
    new = write(tmp_path / "1.jsonl", range(201, 260), 100 * PER_STEP)
    assert "loss.tokens" not in codes(old, new, world_size=4, saved_world_size=8)
    assert "loss.tokens" in codes(old, new)
    assert "loss.tokens" in codes(old, new, world_size=2, saved_world_size=8)


def test_a_doubled_count_is_a_fault_if_the_log_before_shows_the_sum(tmp_path):
    old = write(tmp_path / "0.jsonl", range(1, 211), 0)
    new = write(tmp_path / "1.jsonl", range(201, 260), 400 * PER_STEP)
    assert "loss.tokens" in codes(old, new, resume_tokens=200 * PER_STEP)

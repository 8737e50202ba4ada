"""Lightning starts its own processes, which get `LOCAL_RANK` and no `RANK`."""

from __future__ import annotations

import pytest

from ckptctl.distributed.launcher import launched_rank, launched_size
from ckptctl.distributed.process_group import make_group
from ckptctl.errors import UsageError

CHILD = {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "NODE_RANK": "0"}


@pytest.mark.torch
@pytest.mark.slow
def test_processes_that_lightning_starts_agree_on_the_step(run_job, tmp_path):
    root = tmp_path / "run"
    for steps in (12, 24):
        done = run_job("lightning", root, "--steps", steps, launcher=())
        assert done.returncode == 0, done.stdout
    assert done.stdout.count("ckptctl: resuming from step 12: ") == 1


def test_a_process_of_lightning_is_one_of_several():
    assert launched_size(CHILD) == 2
    assert launched_rank(CHILD) is None  # a command must not join the job
    assert launched_size({**CHILD, "WORLD_SIZE": "1"}) == 1
    assert launched_size({}) == 1


def test_a_process_of_lightning_without_a_process_group_does_not_decide_alone(monkeypatch):
    for name, value in CHILD.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="2 processes were launched"):
        make_group()

"""transformers removes old steps while the newest one is sealed: neither disturbs the other."""

from __future__ import annotations

import pytest

import ckptctl

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_a_step_is_removed_only_after_its_seal_is_written(run_job, tmp_path):
    root = tmp_path / "run"
    done = run_job("transformers", root, "--steps", 12, "--save-every", 1, "--keep", 1)
    assert done.returncode == 0, done.stdout
    assert "not sealed" not in done.stdout
    assert [path.name for path in root.glob("checkpoint-*")] == ["checkpoint-12"]
    assert ckptctl.verify(f"{root}@12", level="content", require_seal=True).exit_code == 0

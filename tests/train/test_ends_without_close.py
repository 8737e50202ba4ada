"""A script that ends without `close` while a save is in flight: the step is complete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import clean_environment

import ckptctl

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SCRIPT = """
import multiprocessing, sys, torch
from ckptctl.train import Checkpointer

def train():
    model = torch.nn.Linear(64, 64)
    ckpt = Checkpointer(sys.argv[1], model=model)
    start = ckpt.resume()
    worker = multiprocessing.get_context("fork").Process(target=print, args=("worker",))
    worker.start()
    ckpt.save_async(start.step + 1)
    worker.join()
    if "fork" in sys.argv:
        multiprocessing.get_context("fork").Process(target=print, args=("late worker",)).start()

if "process" in sys.argv:
    rank = multiprocessing.get_context("spawn").Process(target=train)
    if __name__ == "__main__":
        rank.start()
        rank.join()
        sys.exit(rank.exitcode)
else:
    train()
"""


@pytest.mark.parametrize("how", ["script", "fork", "process"])
def test_a_save_in_flight_is_completed_when_the_process_ends(how: str, tmp_path: Path):
    (tmp_path / "job.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, tmp_path / "job.py", tmp_path / "run", how],
        env=clean_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "is lost" not in done.stderr
    report = ckptctl.verify(str(tmp_path / "run" / "step_1"))
    assert report.verdict.value == "complete"
    assert '"how":"exit"' in "".join(
        path.read_text().replace(" ", "") for path in (tmp_path / "run").rglob("*.jsonl")
    )

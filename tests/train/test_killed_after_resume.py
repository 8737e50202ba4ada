"""A job that is killed right after its resume leaves what the next one needs."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from train_ranks import ends, ranks

torch = pytest.importorskip("torch")

from ckptctl.formats.own.files import ATTEMPTS_FOLDER  # noqa: E402
from ckptctl.selection.history import resumed_from  # noqa: E402
from ckptctl.storage.local import LocalStore  # noqa: E402
from ckptctl.train import Checkpointer  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]

KILLED = """
import signal, threading
import torch
from ckptctl.train import Checkpointer
from ckptctl.train.ledger import Ledger
def on(frame, event, _):
    # The thread has begun, and has not written the line of the resume.
    if event == "call" and frame.f_code is Ledger._write_queued.__code__:
        os.kill(os.getpid(), signal.SIGKILL)
threading.setprofile(on)
Checkpointer("ROOT", model=torch.nn.Linear(4, 4)).resume()
time.sleep(600)
"""


@pytest.mark.parametrize("is_fresh", [True, False])
def test_the_next_resume_decides_as_if_the_line_of_the_resume_were_there(tmp_path: Path, is_fresh):
    root = tmp_path / "run"
    if not is_fresh:
        with Checkpointer(str(root), model=torch.nn.Linear(4, 4)) as first:
            first.resume()
            first.save(1)
    with ranks(KILLED.replace("ROOT", str(root)), 1, tmp_path) as started:
        ((code, _, _),) = ends(started)
    assert code == -signal.SIGKILL
    attempts = root / ATTEMPTS_FOLDER
    killed = max(attempts.glob("*.resume.json"))
    name = killed.name.removesuffix(".resume.json")
    lines = (attempts / f"{name}.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["started"]
    expected = frozenset() if is_fresh else frozenset({1})
    assert resumed_from(LocalStore(str(root)), name) == expected
    with Checkpointer(str(root), model=torch.nn.Linear(4, 4)) as after:
        start = after.resume()
    assert (start.step, start.fresh) == (0 if is_fresh else 1, is_fresh)
    assert start.report["previous_attempt"] == name

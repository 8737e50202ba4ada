"""An error in the job's own code on one rank is an error on all ranks, and none waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from train_ranks import ends, ranks

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SCRIPT = """
import torch
from ckptctl.train import Checkpointer

class Cursor:
    fails = False
    def state_dict(self):
        if self.fails:
            raise ValueError("the cursor is lost")
        return {"at": 3}
    def load_state_dict(self, state):
        self.state_dict()

def attempt(act):
    try:
        say(act())
    except Exception as error:
        say(type(error).__name__, error)

def checkpointer(cursor):
    return Checkpointer(
        os.environ["ROOT"], model=torch.nn.Linear(2, 2), extra={"cursor": cursor}, patience_s=30,
        tell=lambda _: None,
    )

cursor = Cursor()
ckpt = checkpointer(cursor)
ckpt.resume()
for first, save in ((1, ckpt.save), (3, ckpt.save_async)):
    cursor.fails = rank == 1
    attempt(lambda: save(first))
    cursor.fails = False
    attempt(lambda: os.path.basename(save(first + 1)))
ckpt.close()
again = Cursor()
again.fails = rank == 1
ckpt = checkpointer(again)
attempt(lambda: ckpt.resume().step)
"""


def test_all_ranks_raise_what_one_raises_and_can_save_again(tmp_path: Path):
    with ranks(SCRIPT, 2, tmp_path, ROOT=str(tmp_path / "run")) as started:
        said = [lines for _, lines, _ in ends(started)]
    for rank, lines in enumerate(said):
        own = "ValueError the cursor is lost"
        assert [lines[i] for i in (1, 3)] == ["step_2", "step_4"], lines
        for i in (0, 2, 4):
            if rank == 1:
                assert lines[i] == own
            else:
                assert lines[i].startswith("CkptctlError rank 1 on "), lines
                assert lines[i].endswith("ValueError: the cursor is lost"), lines


NUMBERS = """
import torch
from ckptctl.train import Checkpointer

ckpt = Checkpointer(os.environ["ROOT"], model=torch.nn.Linear(2, 2), tell=lambda _: None)
ckpt.resume()
for given in (2.0, 2**63):
    try:
        ckpt.save(given if rank else 5)
    except Exception as error:
        say(type(error).__name__, error)
say(os.path.basename(ckpt.save(6)))
ckpt.close()
"""


def test_a_step_that_one_rank_states_wrongly_is_refused_on_all(tmp_path: Path):
    with ranks(NUMBERS, 2, tmp_path, ROOT=str(tmp_path / "run")) as started:
        said = [lines for _, lines, _ in ends(started)]
    for whole, named, saved in said:
        assert whole.startswith("UsageError rank 1 on ")
        assert "expected a whole number" in whole
        assert "no resume would recognize" in named
        assert saved == "step_6"

"""The ranks of a machine read the metadata of the step once, and each decodes it once.

Ranks that see different files, as those of different machines do, are made by working folders:
each of them holds a copy of the root.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from train_ranks import ends, ranks

torch = pytest.importorskip("torch")

from ckptctl.train import Checkpointer  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]

RESUME = """
import signal, threading
import torch
from ckptctl import CkptctlError
from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.formats.dcp.metadata import decode_metadata
from ckptctl.storage.local import LocalStore
from ckptctl.train import Checkpointer
os.chdir(FOLDERS[rank])
counts = {"read": 0, "decoded": 0}
def on(frame, event, _):
    if event != "call":
        return
    if frame.f_code is LocalStore.read.__code__:
        counts["read"] += frame.f_locals["path"] == "step_1/.metadata"
    elif frame.f_code is decode_metadata.__code__:
        counts["decoded"] += 1
    elif frame.f_code is ProcessGroup.bytes_from.__code__ and rank == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
model = torch.nn.Linear(4, 4)
ckpt = Checkpointer(
    "run",
    model=model,
    optimizer=torch.optim.AdamW(model.parameters()),
    settle_s=0.5,
    accept_lost=["rng"],
    level=LEVEL,
    tell=lambda _: None,
)
threading.setprofile(on)
sys.setprofile(on)
try:
    step = ckpt.resume().step
    sys.setprofile(None)
    say(step, *counts.values(), model.weight.sum().item())
except CkptctlError as error:
    say(type(error).__name__, error.exit_code, error.message)
    os._exit(0)
"""


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two folders with equal roots `run`, of a step that one rank saved."""
    first, second = tmp_path / "first", tmp_path / "second"
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(str(first / "run"), model=model, optimizer=optimizer) as ckpt:
        first.mkdir()
        ckpt.resume()
        ckpt.save(1)
    shutil.copytree(first, second)
    return [first, first, second, second]


def resumed(
    folders: list[Path], tmp_path: Path, *, dies: int | None = None, level: str | None = None
) -> list[tuple[int, list[str]]]:
    """How each rank ended, and what it said."""
    code = f"FOLDERS = {list(map(str, folders))}\nDIES, LEVEL = {dies}, {level!r}\n{RESUME}"
    with ranks(code, len(folders), tmp_path) as started:
        return [(code, lines) for code, lines, _ in ends(started)]


def test_one_rank_of_those_that_see_a_file_reads_it_and_each_decodes_it_once(folders, tmp_path):
    ended = resumed(folders, tmp_path, level="content")
    said = [lines[0].split() for _, lines in ended]
    assert [(code, *words[:1]) for (code, _), words in zip(ended, said, strict=True)] == [
        (0, "1") for _ in folders
    ]
    # Rank 0 reads to decide, for rank 1, and twice after the load: did the step change?
    assert [int(words[1]) for words in said] == [4, 0, 1, 0]
    assert [int(words[2]) for words in said] == [1, 1, 1, 1]
    assert len({words[3] for words in said}) == 1


def test_a_machine_that_sees_another_save_ends_all_ranks_with_one_error(folders, tmp_path):
    metadata = folders[2] / "run" / "step_1" / ".metadata"
    metadata.write_bytes(metadata.read_bytes() + b".")
    said = {" ".join(lines) for _, lines in resumed(folders[1:], tmp_path)}
    assert len(said) == 1
    assert said.pop().startswith("StorageUnavailable 75 rank 1 on ")


def test_a_rank_that_dies_before_it_gives_the_metadata_ends_the_others(folders, tmp_path):
    ended = resumed(folders[1:], tmp_path, dies=1)
    assert ended[1][0] == -signal.SIGKILL
    for rank in (0, 2):
        assert ended[rank][1][0].startswith("RanksLost 75 "), ended

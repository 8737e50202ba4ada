"""Each metadata file is decoded once, and each root opened once, in whatever works on a step."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import FrameType

import pytest

torch = pytest.importorskip("torch")

import ckptctl  # noqa: E402
from ckptctl.formats.dcp.metadata import decode_metadata  # noqa: E402
from ckptctl.storage.local import LocalStore  # noqa: E402
from ckptctl.storage.opening import SharedStores  # noqa: E402
from ckptctl.train import Checkpointer, Reader  # noqa: E402

pytestmark = pytest.mark.torch


@dataclass
class Counts:
    """How often metadata was decoded, by its digest, and stores were opened, by their root."""

    decoded: Counter[str] = field(default_factory=Counter)
    opened: Counter[str] = field(default_factory=Counter)


@contextmanager
def counted() -> Iterator[Counts]:
    """Count the calls in all threads that begin meanwhile, and in this one."""
    counts = Counts()

    def on(frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        if frame.f_code is decode_metadata.__code__:
            counts.decoded[sha256(frame.f_locals["data"]).hexdigest()] += 1
        elif frame.f_code is LocalStore.__init__.__code__:
            counts.opened[frame.f_locals["root"]] += 1

    threading.setprofile(on)
    sys.setprofile(on)
    try:
        yield counts
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def checkpointer(root: Path, level: str | None = None) -> Checkpointer:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    return Checkpointer(str(root), model=model, optimizer=optimizer, level=level)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with steps 1 and 2 of a small model."""
    root = tmp_path / "run"
    ours = checkpointer(root)
    ours.resume("auto")
    for step in (1, 2):
        ours.save(step, tokens=step)
    ours.close()
    return root


def digest(step: Path) -> str:
    return sha256((step / ".metadata").read_bytes()).hexdigest()


@pytest.mark.parametrize("level", [None, "content"])
def test_a_resume_decodes_each_metadata_once_and_opens_no_store_anew(root: Path, level: str | None):
    resumed = checkpointer(root, level)
    with counted() as counts:
        assert resumed.resume("auto").step == 2
    # The proof of content, in which all ranks take part, compares the step before once more.
    n_before = 2 if level == "content" else 1
    assert counts.decoded == {digest(root / "step_2"): 1, digest(root / "step_1"): n_before}
    assert not counts.opened
    resumed.close()


def test_a_resume_from_an_older_step_looks_twice_at_the_steps_that_it_abandons(root: Path):
    resumed = checkpointer(root)
    with counted() as counts:
        assert resumed.resume(1).step == 1
    # On purpose: the attempt before may have saved on until this one took the root over.
    assert counts.decoded == {digest(root / "step_1"): 1, digest(root / "step_2"): 2}
    assert not counts.opened
    resumed.close()


def test_a_checkpointer_opens_its_root_once_for_resume_records_and_saves(root: Path):
    with counted() as counts:
        resumed = checkpointer(root)
        resumed.resume("auto")
        resumed.save(3, tokens=3)
        resumed.close()
    assert counts.opened == {str(root): 1}


def test_pick_and_verify_decode_each_metadata_once_and_open_the_root_once(root: Path):
    for work in (
        lambda: ckptctl.pick(str(root), level=ckptctl.Level.STRUCTURE),
        lambda: ckptctl.verify(str(root / "step_2"), level=ckptctl.Level.CONTENT),
        lambda: ckptctl.show(str(root / "step_2")),
    ):
        with counted() as counts:
            work()
        assert counts.decoded[digest(root / "step_2")] == 1
        assert set(counts.decoded.values()) == {1}
        assert counts.opened == {str(root): 1}


def test_reshard_decodes_the_metadata_of_its_source_once(root: Path, tmp_path: Path):
    target = tmp_path / "resharded" / "step_2"
    target.parent.mkdir()
    with counted() as counts:
        done = ckptctl.reshard(str(root / "step_2"), str(target), world_size=2)
    assert done.written
    assert counts.decoded[digest(root / "step_2")] == 1
    assert counts.opened[str(root)] == 1
    assert set(counts.opened.values()) == {1}


def test_a_reader_of_an_open_step_reads_its_metadata_no_second_time(root: Path):
    from torch.distributed.checkpoint import load

    from ckptctl.inspection.inspecting import inspect_step
    from ckptctl.inspection.open_step import OpenStep
    from ckptctl.options import Requirements

    opened = OpenStep(LocalStore(str(root)), "step_2")
    state = {"model": torch.nn.Linear(4, 4).state_dict()}
    with counted() as counts:
        assert inspect_step(opened, Requirements()).report.usable
        reader = Reader.of(opened)
        load(state, storage_reader=reader, no_dist=True)
        reader.close()
        load(state, storage_reader=reader, no_dist=True)
    assert counts.decoded == {digest(root / "step_2"): 1}
    assert not counts.opened
    plain = {"model": torch.nn.Linear(4, 4).state_dict()}
    load(plain, storage_reader=Reader(str(root / "step_2")), no_dist=True)
    assert all(torch.equal(state["model"][name], plain["model"][name]) for name in plain["model"])


def test_shared_stores_are_opened_once_and_closed_together(root: Path):
    with counted() as counts:
        shared = SharedStores()
        for _ in range(2):
            assert ckptctl.pick(str(root), storage=shared).step == 2
        assert ckptctl.verify(str(root / "step_1"), storage=shared).usable
        shared.close()
    assert counts.opened == {str(root): 1}
    assert not shared.stores

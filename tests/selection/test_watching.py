"""`watch`: which steps it seals, which it leaves alone, and what it remembers."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from itertools import islice
from pathlib import Path

import pytest
from damage import flip_tensor

import ckptctl
from ckptctl.errors import StorageError, StorageUnavailable
from ckptctl.formats.own.seals import SEAL
from ckptctl.model import Level
from ckptctl.records.byte_pass import ReadThrottle
from ckptctl.selection.watching import STATE, Event


@pytest.fixture
def root(framework_roots, copy_of) -> Path:
    """Three sound steps without seals."""
    return copy_of(framework_roots / "kempnerforge" / "checkpoints")


def inspected(root: Path | str, **options: object) -> list[tuple[Event, int | None]]:
    """The events of one listing of the root."""
    found = ckptctl.watch(str(root), once=True, **{"grace_s": 0, **options})
    return [(event.event, event.number) for event in found]


SEALED = [(Event.SEALED, 30), (Event.SEALED, 20), (Event.SEALED, 10)]


def test_a_step_is_sealed_after_two_equal_listings_and_reported_once(root):
    assert inspected(root) == []
    assert inspected(root) == SEALED
    for number in (10, 20, 30):
        report = ckptctl.verify(f"{root}@{number}", level=Level.CONTENT, require_seal=True)
        assert report.exit_code == 0
    assert inspected(root) == []


def test_a_step_that_cannot_be_listed_keeps_no_newer_one_from_its_seal(root):
    (root / "step_5").symlink_to("step_5")
    for _ in range(2):
        with pytest.raises(StorageError):
            inspected(root)
    assert [(root / f"step_{n}" / SEAL).exists() for n in (30, 20, 10)] == [True] * 3


def test_a_step_that_changed_between_two_listings_waits_for_a_third(root):
    inspected(root)
    written_s = (root / "step_30" / ".metadata").stat().st_mtime
    os.utime(root / "step_30" / ".metadata", (written_s, written_s + 1))
    assert inspected(root) == SEALED[1:]
    assert inspected(root) == SEALED[:1]


def test_a_root_that_does_not_exist_is_reported_once_and_watched_when_it_does(root, tmp_path):
    later = tmp_path / "later"
    listed = []
    events = ckptctl.watch(
        str(later), interval_s=0, grace_s=0, on_listed=lambda: listed.append(len(listed))
    )
    first = next(events)
    assert (first.event, first.exit_code) == (Event.NO_ROOT, 10)
    assert (listed, later.exists()) == ([], False)
    root.rename(later)
    assert [(event.event, event.number) for event in islice(events, 3)] == SEALED


def test_two_listings_that_are_closer_than_grace_seal_nothing(root):
    inspected(root)
    assert inspected(root, grace_s=3600) == []


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_a_watch_on_a_host_with_another_clock_waits_for_grace_all_the_same(
    root, monkeypatch, ahead_s
):
    (root / "step_30" / ".metadata").unlink()  # a save that is running
    assert inspected(root, grace_s=600) == []
    there = time.time
    monkeypatch.setattr(time, "time", lambda: there() + ahead_s)
    assert inspected(root, grace_s=600) == []
    assert [path.name for path in (root / ".ckptctl").iterdir()] == ["watch.json"]


def test_a_new_watch_without_its_notes_takes_the_seals_as_they_are(root):
    inspected(root)
    inspected(root)
    (root / STATE).write_text("no JSON")
    assert inspected(root) == []
    assert inspected(root) == []


def test_a_damaged_shard_is_reported_once_and_not_sealed(root):
    flip_tensor(root / "step_20")
    inspected(root)
    events = [*ckptctl.watch(str(root), once=True, grace_s=0)]
    assert [(one.event, one.number) for one in events][1] == (Event.DAMAGED, 20)
    assert events[1].exit_code == 21
    assert events[1].next_command == f"ckptctl verify {root}/step_20 --level content"
    assert not (root / "step_20" / ".ckptctl").exists()
    assert inspected(root) == []


def test_a_step_that_lost_what_its_predecessor_holds_is_not_sealed(framework_roots, copy_of):
    root = copy_of(framework_roots / "torchtitan" / "sync" / "checkpoint")
    inspected(root)
    events = [*ckptctl.watch(str(root), once=True, grace_s=0)]
    assert (events[0].event, events[0].number, events[0].exit_code) == (Event.DAMAGED, 30, 23)
    assert "which step 20 holds" in events[0].message
    assert not (root / "step-30" / ".ckptctl").exists()
    assert [(one.event, one.number) for one in events[1:]] == SEALED[1:]


def test_a_rejection_is_not_taken_back(root):
    ckptctl.mark(f"{root}@30", "rejected", reason="loss spike")
    inspected(root)
    assert inspected(root) == SEALED[1:]
    assert ckptctl.verify(f"{root}@30").verdict is ckptctl.Verdict.REJECTED


def test_an_interrupted_save_is_damaged_once_its_grace_is_over(root):
    (root / "step_30" / ".metadata").unlink()
    inspected(root)
    assert inspected(root) == [(Event.DAMAGED, 30), *SEALED[1:]]


def test_a_step_that_nothing_proves_is_sealed_only_if_asked(rank_files, copy_of):
    root = copy_of(rank_files / "transformers")
    inspected(root)
    assert inspected(root) == [(Event.UNVERIFIABLE, 6), (Event.UNVERIFIABLE, 4)]
    assert not (root / "checkpoint-6" / ".ckptctl").exists()
    (root / STATE).unlink()
    inspected(root, accept_unverifiable=True)
    assert inspected(root, accept_unverifiable=True) == [(Event.SEALED, 6), (Event.SEALED, 4)]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_seal_of_an_earlier_save_is_replaced(tmp_path):
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    for value in (1.0, 2.0):
        state = {"model": {"weight": torch.full((4,), value)}}
        dcp.save(state, checkpoint_id=str(tmp_path / "step_1"), no_dist=True)
        for shard in (tmp_path / "step_1").glob("__*"):
            os.utime(shard, (1.7e9 + value, 1.7e9 + value))  # not within a millisecond
        assert inspected(tmp_path) == []
        assert inspected(tmp_path) == [(Event.SEALED, 1)]
        assert ckptctl.verify(f"{tmp_path}/step_1", require_seal=True).exit_code == 0


@pytest.mark.server
def test_steps_in_a_bucket_are_sealed(s3, root):
    for path in root.iterdir():
        if path.is_symlink():
            path.unlink()
    url = s3.upload(root, uuid.uuid4().hex)
    assert inspected(url, storage_options=s3.options) == []
    assert inspected(url, storage_options=s3.options) == SEALED
    assert inspected(url, storage_options=s3.options) == []


@pytest.mark.server
def test_a_store_that_does_not_answer_is_reported_once_and_watched_on(s3_moto, monkeypatch):
    url = f"s3://{s3_moto.bucket}/run"
    away = {**s3_moto.options, "endpoint_url": "http://127.0.0.1:9"}
    with pytest.raises(StorageUnavailable):
        inspected(url, storage_options=away, retries=0)
    pauses: list[float] = []
    monkeypatch.setattr("ckptctl.selection.watching.time.sleep", pauses.append)
    watching = ckptctl.watch(url, storage_options=away, retries=0)
    first = next(watching)
    assert (first.event, first.exit_code, first.report) == (Event.NO_ANSWER, 75, None)


def test_a_pace_makes_each_read_take_its_time(monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr("ckptctl.records.byte_pass.time.sleep", pauses.append)
    pace = ReadThrottle(1_000)
    for _ in range(3):
        pace.wait(500)
    assert sum(pauses) >= 0.5  # of reads that took no time themselves


def saved_every(root: Path, seconds: float, last_s: float) -> None:
    """Give the steps of a root write times; the newest was written `last_s` seconds ago."""
    steps = sorted(root.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    for n, step in enumerate(reversed(steps)):
        at_s = time.time() - last_s - n * seconds
        for file in step.rglob("*"):
            os.utime(file, (at_s, at_s))


def test_that_no_newer_step_is_proven_is_an_alarm_although_newer_ones_are_saved(root: Path):
    for number in (40, 50):  # what they hold is step 30
        shutil.copytree(root / "step_30", root / f"step_{number}")
    saved_every(root, 100, last_s=150)
    events = [*islice(ckptctl.watch(str(root), grace_s=0, interval_s=0.01), 6)]
    assert [(event.event, event.number) for event in events] == [
        *((Event.DAMAGED, 50), (Event.DAMAGED, 40), *SEALED, (Event.OVERDUE, 30))
    ]
    assert events[-1].exit_code == 36
    assert "and a step was saved every" in events[-1].message
    assert inspected(root) == [(Event.OVERDUE, 30)]
    assert inspected(root, alarm_after=5) == inspected(root, alarm_after=0) == []

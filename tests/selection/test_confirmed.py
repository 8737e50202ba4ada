"""A step that training has shown to be good is preferred where that is asked for, and kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command_line import run_ckptctl
from damage import flip
from storage.faulty import FaultyStore

import ckptctl
from ckptctl import UsageError
from ckptctl.errors import AccessDenied
from ckptctl.selection import candidates, choosing, targets

pytestmark = pytest.mark.torch

REPLAYED = "a replay repeated the next 50 steps"


def confirm(root: Path, number: int, **where: str) -> None:
    ckptctl.mark(f"{root}@{number}", "confirmed", reason=REPLAYED, **where)


def preferred(root: Path, **options: object) -> ckptctl.Pick:
    return ckptctl.pick(str(root), prefer="confirmed", **options)


def test_the_newest_confirmed_step_is_chosen_only_where_that_is_asked_for(root):
    confirm(root, 200)
    confirm(root, 300)
    assert ckptctl.pick(str(root)).step == 500
    chosen = preferred(root)
    assert (chosen.step, chosen.answer.value, chosen.exit_code) == (300, "fell-back", 0)
    assert [(one.step, one.word.value) for one in chosen.passed_over] == [
        (500, "unconfirmed"),
        (400, "unconfirmed"),
    ]
    assert "root.unconfirmed" not in {one.code for one in chosen.findings}
    (note,) = chosen.chosen.findings
    assert (note.code, REPLAYED in note.message) == ("step.confirmed", True)


def test_without_a_confirmed_step_the_newest_sound_one_is_chosen_and_that_is_reported(root):
    ckptctl.mark(f"{root}@500", "rejected", reason="spike")
    chosen = preferred(root)
    assert [one.step for one in chosen.passed_over] == [500]
    assert chosen.step == 400
    (found,) = chosen.findings
    assert (found.code, found.found) == ("root.unconfirmed", "4 sound steps that nothing confirms")


def test_so_many_unconfirmed_steps_are_inspected_and_no_more(root, monkeypatch):
    monkeypatch.setattr(choosing, "MAX_UNCONFIRMED", 2)
    confirm(root, 300)
    assert preferred(root).step == 500
    monkeypatch.setattr(choosing, "MAX_UNCONFIRMED", 3)
    assert preferred(root).step == 300


def test_damaged_steps_before_it_do_not_stop_the_search_for_a_confirmed_one(root):
    confirm(root, 200)
    flip(root / "step_400" / ".metadata", 0)
    chosen = preferred(root)
    assert (chosen.step, [one.step for one in chosen.passed_over]) == (200, [500, 400, 300])
    for number in (300, 200):
        flip(root / f"step_{number}" / ".metadata", 0)
    assert preferred(root).step == 500  # more are damaged than may be passed over


def test_a_confirmed_step_that_is_damaged_now_is_not_chosen(root):
    confirm(root, 400)
    confirm(root, 200)
    flip(root / "step_400" / ".metadata", 0)
    assert preferred(root).step == 200


def test_a_rejection_outweighs_a_confirmation(root):
    confirm(root, 400)
    ckptctl.mark(f"{root}@400", "rejected", reason="spike")
    assert preferred(root).step == 500
    ckptctl.mark(f"{root}@400", "accepted", reason="the data")
    assert preferred(root).step == 400


def test_a_confirmation_is_of_one_save_and_can_be_lifted(root):
    confirm(root, 400)
    confirm(root, 200)
    assert ckptctl.mark(f"{root}@400", "unconfirmed").lifted
    assert preferred(root).step == 200
    assert not ckptctl.mark(f"{root}@400", "unconfirmed").lifted
    metadata = root / "step_200" / ".metadata"
    metadata.write_bytes((root / "step_100" / ".metadata").read_bytes())
    assert preferred(root).step == 500


def test_a_copy_in_another_root_may_hold_the_confirmation(root, tmp_path):
    other = Path(shutil.copytree(root, tmp_path / "other"))
    confirm(other, 300)
    chosen = ckptctl.pick(str(root), str(other), prefer="confirmed")
    assert chosen.path == str(root / "step_300")


def test_marks_in_a_file_confirm_a_step_of_a_root_that_cannot_be_written(root, tmp_path):
    marks = str(tmp_path / "marks.jsonl")
    confirm(root, 300, marks=marks)
    assert preferred(root, marks=marks).step == 300
    assert preferred(root).step == 500


def test_only_a_sound_step_can_be_confirmed_and_only_with_a_reason(root):
    with pytest.raises(UsageError, match="a confirmation needs a reason"):
        ckptctl.mark(f"{root}@500", "confirmed")
    (root / "step_500" / ".metadata").unlink()
    with pytest.raises(UsageError, match="only a complete step can be confirmed") as refused:
        confirm(root, 500)
    assert refused.value.next_command == f"ckptctl verify {root / 'step_500'}"
    assert not (root / "step_500" / ".ckptctl" / "marks").exists()


def test_retention_keeps_the_newest_confirmed_step(root):
    for number in (100, 200, 500):
        ckptctl.seal(f"{root}@{number}")
    confirm(root, 100)
    confirm(root, 200)
    plan = ckptctl.prune(str(root), 1, unsealed=True)
    reasons = {one.number: one.reason for one in plan.decisions}
    assert reasons[200] == "the newest confirmed step"
    assert [one.number for one in plan.decisions if one.removed] == [400, 300, 100]


def test_the_command_line_confirms_and_prefers(root):
    done = run_ckptctl("confirm", f"{root}@300", "--reason", REPLAYED)
    assert (done.returncode, "is confirmed" in done.stdout) == (0, True)
    picked = run_ckptctl("pick", str(root), "--prefer", "confirmed", "--detailed-exitcode")
    assert (picked.returncode, picked.stdout) == (3, f"{root / 'step_300'}\n")
    assert "nothing confirms it" in picked.stderr
    wrong = run_ckptctl("pick", str(root), "--prefer", "oldest")
    assert wrong.returncode == 2
    assert "newest" in wrong.stderr
    assert run_ckptctl("confirm", f"{root}@300", "--off").returncode == 0


@pytest.mark.parametrize("options", [{"level": "content"}, {"require_seal": True}])
def test_the_bytes_of_steps_that_nothing_confirms_are_not_read(root, monkeypatch, options):
    for number in (100, 200, 300, 400, 500):
        ckptctl.seal(f"{root}@{number}")
    confirm(root, 200)
    levels: list[tuple[str, str]] = []
    real = candidates.inspect_step

    def seen(opened, *args, **options):
        inspected = real(opened, *args, **options)
        levels.append((opened.name, inspected.report.level.value))
        return inspected

    monkeypatch.setattr(candidates, "inspect_step", seen)
    assert preferred(root, **options).step == 200
    assert [name for name, level in levels if level == "content"] == ["step_200"]


def test_a_confirmed_step_whose_damage_the_listing_does_not_show_is_not_chosen(root):
    confirm(root, 400)
    confirm(root, 200)
    flip(root / "step_400" / "__1_0.distcp", 0)
    chosen = preferred(root)
    assert chosen.step == 200
    assert [(one.step, one.word.value) for one in chosen.passed_over] == [
        (500, "unconfirmed"),
        (400, "damaged"),
        (300, "unconfirmed"),
    ]


def test_retention_keeps_the_confirmed_step_that_is_sound_and_not_a_newer_damaged_one(root):
    for number in (100, 200, 500):
        ckptctl.seal(f"{root}@{number}")
    confirm(root, 100)
    confirm(root, 200)
    flip(root / "step_200" / "__1_0.distcp", 0)
    assert preferred(root).step == 100
    plan = ckptctl.prune(str(root), 1, unsealed=True)
    reasons = {one.number: one.reason for one in plan.decisions}
    assert reasons[100] == "the newest confirmed step"
    assert not any(one.removed for one in plan.decisions if one.number == 100)


def test_retention_keeps_a_newer_confirmed_step_that_cannot_be_inspected_in_full(root, monkeypatch):
    real = targets.open_store

    def opened(*args, **options) -> FaultyStore:
        store = FaultyStore(real(*args, **options))
        for method in ("span", "open_file"):
            store.fail(method, AccessDenied("not allowed"), path="step_200/__1_0.distcp")
        return store

    for number in (100, 200, 500):
        ckptctl.seal(f"{root}@{number}")
    confirm(root, 100)
    confirm(root, 200)
    monkeypatch.setattr(targets, "open_store", opened)
    plan = ckptctl.prune(str(root), 1, unsealed=True)
    reasons = {one.number: one.reason for one in plan.decisions}
    assert reasons[100] == "the newest confirmed step"
    assert reasons[200] == "confirmed, and could not be inspected"


def test_a_confirmation_that_a_damaged_mark_lifted_does_not_count(root):
    confirm(root, 300)
    ckptctl.mark(f"{root}@300", "unconfirmed")
    (lift,) = (root / "step_300" / ".ckptctl" / "marks").glob("*-unconfirmed-*")
    lift.write_bytes(lift.read_bytes()[:50])
    chosen = preferred(root)
    assert chosen.step == 500
    report = ckptctl.verify(f"{root}@300")
    assert {one.code for one in report.findings} == {"mark.damaged"}

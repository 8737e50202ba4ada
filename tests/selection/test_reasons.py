"""Why no step is chosen is one word, with its own sentence and next command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import validated
from damage import flip
from next_commands import run_and_follow as run_ckptctl

import ckptctl
from ckptctl import NothingToResume
from ckptctl.distributed.launcher import RESTART_COUNTERS
from ckptctl.selection.choosing import NoStepReason
from ckptctl.selection.history import record_usable
from ckptctl.storage.opening import open_store

ALL = (500, 400, 300, 200, 100)


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RESTART_COUNTERS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def root(checkpoints: Path, tmp_path: Path) -> Path:
    """A run with the steps 100 to 500, all whole, saved by 4 ranks."""
    return Path(shutil.copytree(checkpoints / "run_fsdp4", tmp_path / "run"))


def damage(root: Path, *numbers: int) -> None:
    for number in numbers:
        flip(root / f"step_{number}" / ".metadata")


def asked(root: Path, **keywords: object) -> ckptctl.Pick:
    """The answer of `pick`; those of `scan` and `preflight` state the same reason."""
    found = ckptctl.pick(str(root), **keywords)
    assert ckptctl.scan(str(root), **keywords).reason is found.reason
    assert ckptctl.preflight(str(root), **keywords).reason is found.reason
    return found


def test_a_chosen_step_has_no_reason(root):
    damage(root, 500)
    found = asked(root)
    assert (found.step, found.reason) == (400, None)
    assert [one.word for one in found.passed_over] == [NoStepReason.DAMAGED]
    done = run_ckptctl("pick", root, "--print", "reason")
    assert (done.returncode, done.stdout) == (0, "")


def test_more_damaged_steps_than_may_be_passed_over_are_not_called_all(root):
    damage(root, 500, 400, 300)
    found = asked(root)
    assert (found.exit_code, found.reason) == (11, NoStepReason.TOO_MANY_DAMAGED)
    assert found.newest_sound == str(root / "step_200")
    assert "the newest step that is sound at structure is 200" in found.message
    assert found.next_command == f"ckptctl runbook run rb-7 {root}"


def test_a_next_command_to_a_runbook_names_every_root(root, tmp_path):
    damage(root, *ALL)
    other, absent = tmp_path / "other", tmp_path / "nvme"
    shutil.copytree(root, other)
    found = ckptctl.pick(str(root), str(other), optional_roots=[str(absent)], max_fallback=10)
    words = f"{root} {other} --optional-root {absent}"
    assert found.next_command == f"ckptctl runbook run storage-corruption {words}"


def test_every_step_is_damaged(root):
    damage(root, *ALL)
    found = asked(root, max_fallback=10)
    assert (found.exit_code, found.reason) == (11, NoStepReason.ALL_DAMAGED)
    assert "every step is damaged or unfinished" in found.message
    assert found.next_command == f"ckptctl runbook run storage-corruption {root}"


def test_sound_steps_without_required_state_lead_to_show_and_not_to_the_storage(
    checkpoints, tmp_path
):
    root = Path(shutil.copytree(checkpoints / "run_bare4", tmp_path / "run"))
    found = asked(root, require=["dataloader"])
    assert (found.exit_code, found.reason) == (11, NoStepReason.STATE_MISSING)
    assert "no step has the train state that is required" in found.message
    newest = ckptctl.pick(str(root)).path
    assert found.next_command == f"ckptctl show {newest}"


def test_sound_steps_without_a_seal_are_no_matter_of_the_storage(root):
    found = asked(root, require_seal=True)
    assert found.exit_code == 11
    assert found.reason in (NoStepReason.UNVERIFIABLE, NoStepReason.REQUIREMENT)
    assert found.next_command == f"ckptctl verify {root / 'step_500'}"


def test_steps_that_a_person_rejected_are_named_as_rejected(root):
    for number in ALL:
        ckptctl.mark(f"{root}@{number}", "rejected", reason="bad data")
    found = asked(root)
    assert (found.exit_code, found.reason) == (11, NoStepReason.REJECTED)
    assert "every step was rejected or superseded" in found.message
    assert found.next_command == f"ckptctl verify {root / 'step_500'}"


def test_a_sentence_is_true_of_every_step(root):
    damage(root, *ALL[1:])
    ckptctl.mark(f"{root}@{ALL[0]}", "rejected", reason="bad data")
    message = asked(root, max_fallback=10).message
    assert "every step is damaged, unfinished or rejected" in message
    assert "no step is sound" not in message
    message = asked(root, max_fallback=10, before=ALL[0]).message
    assert f"every step is damaged or unfinished, of those that --before {ALL[0]} leaves" in message


def test_a_sound_step_that_lacks_state_behind_many_damaged_ones_is_not_called_unsound(
    checkpoints, tmp_path
):
    root = Path(shutil.copytree(checkpoints / "run_bare4", tmp_path / "run"))
    newest = ckptctl.pick(str(root)).step
    damage(root, newest)
    message = asked(root, require=["dataloader"], max_fallback=0).message
    assert "is complete, but a resume from here does not restore" in message


@pytest.mark.parametrize("n_rejected", [1, 3])
def test_damaged_steps_that_a_person_rejected_do_not_count(root, n_rejected):
    damage(root, 500, 400, 300)
    assert asked(root).exit_code == 11
    lines = run_ckptctl("pick", root, "--print", "damaged").stdout.splitlines()
    printed = [line.split()[0] for line in lines]
    assert printed == [str(root / f"step_{number}") for number in (500, 400, 300)]
    for step in printed[:n_rejected]:
        ckptctl.mark(step, "rejected", reason="damaged")
    found = asked(root)
    assert (found.step, found.exit_code) == (200, 0)
    # The others count as before.
    assert ckptctl.pick(str(root), max_fallback=3 - n_rejected).step == 200
    if n_rejected < 3:
        assert ckptctl.pick(str(root), max_fallback=2 - n_rejected).exit_code == 11


def test_options_that_exclude_every_step(root):
    found = asked(root, before=100)
    assert (found.exit_code, found.reason) == (11, NoStepReason.EXCLUDED)


def test_the_reasons_of_roots_without_a_step(tmp_path):
    run = tmp_path / "run"
    assert asked(run).reason is NoStepReason.NO_ROOT
    run.mkdir()
    assert asked(run).reason is NoStepReason.NEW_RUN
    (run / "latest").write_text("step_300")
    assert asked(run).reason is NoStepReason.LOST_STEPS
    (run / "latest").unlink()
    with open_store(str(run)) as store:
        record_usable(store, 300)
    found = asked(run)
    assert (found.exit_code, found.reason) == (11, NoStepReason.LOST_STEPS)
    assert found.next_command == f"ckptctl scan {tmp_path}"
    (run / ".ckptctl" / "root.json").write_text("")
    assert asked(run).reason is NoStepReason.RECORD_DOUBT


def test_the_word_is_in_json_on_standard_output_and_in_the_error(root):
    damage(root, 500, 400, 300)
    done = run_ckptctl("pick", root, "--print", "reason")
    assert (done.returncode, done.stdout) == (11, "too-many-damaged\n")
    for command in ("pick", "scan", "preflight"):
        document = validated(run_ckptctl(command, root, "--json").stdout)
        assert document["reason"] == "too-many-damaged"
    report = root.parent / "report.json"
    run_ckptctl("pick", root, "--report", report)
    assert json.loads(report.read_text())["reason"] == "too-many-damaged"
    with pytest.raises(NothingToResume) as caught:
        assert ckptctl.pick(str(root)).path
    assert caught.value.reason == "too-many-damaged"

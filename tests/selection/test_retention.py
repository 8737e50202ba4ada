"""Retention and `pick` agree on what is good: the step that would be taken is still there."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from command_line import validated
from damage import flip_tensor
from made_roots import (
    damage_a_mark,
    make_templates,
    put_step,
    taken,
    unseal,
)
from storage.faulty import FaultyStore

import ckptctl
from ckptctl import Level
from ckptctl.errors import AccessDenied, PathEscape, StorageUnavailable, UsageError
from ckptctl.inspection.inspecting import Inspection
from ckptctl.inspection.open_step import OpenStep
from ckptctl.selection import pruning, targets
from ckptctl.selection.branches import put_resume
from ckptctl.selection.retention import write_proof
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import open_store

pytestmark = pytest.mark.torch


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_templates(tmp_path_factory.mktemp("templates"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def put(templates: Path, root: Path) -> Callable[..., list[Path]]:
    """A function that copies steps into the root, or into another one."""
    return lambda *numbers, variant="whole", into=root: [
        put_step(templates, into, number, variant) for number in numbers
    ]


def there(root: Path) -> set[str]:
    return {path.name for path in root.glob("step_*")}


def prune(root: Path, keep: int = 1, **options: object) -> ckptctl.Pruned:
    return ckptctl.prune(str(root), keep, apply=True, **options)


# What counts is what `pick` would take


@pytest.mark.parametrize("unsealed", [False, True])
def test_a_step_that_lacks_the_scheduler_does_not_push_out_the_one_that_pick_takes(
    put, root, unsealed
):
    for number, variant in ((100, "whole"), (200, "whole"), (300, "no-scheduler")):
        (step,) = put(number, variant=variant)
        if unsealed:
            unseal(step)
    assert taken(root) == 200
    found = prune(root, unsealed=unsealed)
    assert there(root) == {"step_200", "step_300"}
    assert taken(root) == 200
    assert "lacks scheduler, which step 200 holds" in found.decisions[0].reason


@pytest.mark.parametrize("sealed", [False, True])
def test_a_copy_under_a_further_number_does_not_count(templates, root, sealed):
    for number in (100, 200):
        step = put_step(templates, root, number)
        if not sealed:
            unseal(step)
    shutil.copytree(root / "step_100", root / "step_300", copy_function=shutil.copy)
    assert taken(root) == 200
    prune(root, unsealed=True)
    assert there(root) == {"step_200", "step_300"}
    assert taken(root) == 200


def test_without_a_seal_a_step_counts_only_when_all_of_its_bytes_are_proven(put, root):
    for step in put(100, 200, 300, 400):
        unseal(step)
    flip_tensor(root / "step_400")
    assert taken(root, level=Level.CONTENT) == 300
    plan = ckptctl.prune(str(root), 1, unsealed=True)
    assert plan.n_bytes_to_prove > 0
    assert f"--apply first reads {plan.n_bytes_to_prove:,} bytes" in plan.message
    prune(root, unsealed=True)
    assert there(root) == {"step_300", "step_400"}
    assert taken(root, level=Level.CONTENT) == 300


def test_a_proof_is_made_once_and_lapses_when_the_step_is_written_to(put, root, monkeypatch):
    for step in put(100, 200):
        unseal(step)
    first = prune(root, unsealed=True)
    assert first.n_bytes_to_prove > 0
    validated((root / "step_200" / ".ckptctl" / "proof.json").read_text())
    assert ckptctl.verify(str(root / "step_200"), level=Level.CONTENT).usable
    unseal(*put(100))
    assert prune(root, unsealed=True).n_bytes_to_prove == 0
    assert there(root) == {"step_200"}
    unseal(*put(100))
    flip_tensor(root / "step_200")
    prune(root, unsealed=True)
    assert there(root) == {"step_100", "step_200"}


def test_a_sealed_step_that_was_written_to_since_has_to_be_proven_again(put, root):
    put(100, 200, 300)
    flip_tensor(root / "step_300")
    prune(root)
    assert there(root) == {"step_200", "step_300"}
    assert taken(root, level=Level.CONTENT) == 200


def test_a_sealed_step_that_was_copied_without_its_times_counts_once_it_is_read(put, root):
    for step in put(100, 200):
        for file in step.rglob("*"):
            os.utime(file)
    plan = ckptctl.prune(str(root), 1)
    assert plan.n_bytes_to_prove > 0
    assert [one.number for one in plan.decisions if one.removed] == [100]
    prune(root)
    assert there(root) == {"step_200"}


def test_a_step_stays_without_which_pick_would_refuse_one_that_counts(put, root):
    for number, variant in (
        *((100, "whole"), (200, "no-scheduler")),
        *((300, "no-scheduler"), (400, "no-scheduler")),
    ):
        put(number, variant=variant)
    ckptctl.mark(f"{root}@100", "pinned")
    assert taken(root) == 400
    found = prune(root)
    assert taken(root) == 400
    assert there(root) == {"step_100", "step_300", "step_400"}
    (reason,) = [one.reason for one in found.decisions if one.number == 300]
    assert reason == "step 400 would be refused without it"


@pytest.mark.parametrize("attempt", ["step_300", "step_300.attempt-2"])
def test_of_two_copies_of_a_step_the_one_that_pick_takes_counts(put, templates, root, attempt):
    put(100, 200)
    put_step(templates, root, 300, name="step_300" if attempt != "step_300" else "step-300")
    put_step(templates, root, 300, name=attempt)
    os.truncate(root / attempt / "__0_0.distcp", 10)
    assert taken(root) == 300
    prune(root)
    assert taken(root) == 300
    assert not (root / "step_200").exists()


# Pins


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_steps_that_count_epochs_are_not_older_than_steps_that_count_steps(
    put, templates, root, keep
):
    put(100, 200)
    put_step(templates, root, 300, name="epoch_1")  # the newest save of all
    put_step(templates, root, 100, name="epoch_0")
    found = ckptctl.prune(str(root), keep, apply=True)
    gone = {"step_100"} if keep == 1 else set()
    left = {path.name for path in root.iterdir()}
    assert left == {"step_100", "step_200", "epoch_0", "epoch_1"} - gone
    reasons = {one.url.rpartition("/")[2]: one.reason for one in found.decisions}
    assert "its name counts epochs, and step_200 counts steps" in reasons["epoch_1"]
    assert (found.message == "nothing is removed: 2 of 3 good steps exist") is (keep == 3)


@pytest.mark.parametrize("pointer", ["latest", "latest_checkpointed_iteration.txt", "best"])
def test_a_step_that_a_pointer_or_a_link_names_stays(put, root, pointer):
    put(100, 200, 300)
    if pointer == "best":
        (root / pointer).symlink_to("step_100")
    else:
        (root / pointer).write_text("100\n")
    found = ckptctl.prune(str(root), 1, apply=True)
    assert there(root) == {"step_100", "step_300"}
    assert found.decisions[-1].reason == f"{pointer} names it"


def test_a_pointer_to_an_older_step_that_was_written_later_is_named_with_the_branches(put, root):
    put(100, 200, 300)
    (root / "latest").write_text("step_200\n")
    assert [one.code for one in ckptctl.pick(str(root)).findings] == ["pointer.differs"]
    for number, hours in ((100, 9), (200, 1), (300, 8)):
        for file in (one for one in (root / f"step_{number}").rglob("*") if one.is_file()):
            os.utime(file, (time.time() - hours * 3600,) * 2)
    found = ckptctl.pick(str(root))
    assert (found.chosen, found.exit_code) == (None, 2)
    assert found.next_command == f"ckptctl pick {root} --before 201"
    assert [one.code for one in found.findings] == ["pointer.differs", "root.two-branches"]
    assert ckptctl.pick(str(root), before=201).step == 200


def test_a_step_that_was_saved_after_the_run_went_back_stays(put, root):
    put(100, 200, 300, 400)
    for file in (root / "step_200").iterdir():
        os.utime(file)
    found = ckptctl.prune(str(root), 1, unsealed=True, apply=True)
    assert there(root) == {"step_200", "step_400"}
    why = "written after step 400: the run may have gone back to an earlier step"
    assert found.decisions[2].reason == why
    ckptctl.mark(f"{root}@200", "rejected", reason="of the branch that was left")
    ckptctl.prune(str(root), 1, apply=True)
    assert there(root) == {"step_400"}


@pytest.mark.parametrize(("hours", "stays"), [(1, True), (5, False)])
def test_an_unfinished_save_that_was_written_after_those_that_count_stays(put, root, hours, stays):
    """A slow save of a run that went back is older than `--grace`, by a fast clock any save is."""
    now_s = time.time()
    for number, ago in ((200, hours), (400, 3)):
        (step,) = put(number)
        for file in (one for one in step.rglob("*") if one.is_file()):
            os.utime(file, (now_s - ago * 3600, now_s - ago * 3600))
    shutil.rmtree(root / "step_200" / ".ckptctl")
    (root / "step_200" / ".metadata").unlink()
    found = prune(root, unsealed=True)
    assert there(root) == ({"step_200", "step_400"} if stays else {"step_400"})
    why = "written after step 400: the run may have gone back to an earlier step"
    assert (found.decisions[1].reason == why) is stays


def test_a_pin_that_cannot_be_read_protects(put, root):
    put(100, 200, 300)
    ckptctl.mark(f"{root}@100", "pinned")
    damage_a_mark(root / "step_100")
    found = prune(root)
    assert there(root) == {"step_100", "step_300"}
    assert "a mark on it cannot be read" in found.decisions[-1].reason


@pytest.mark.parametrize("folder", [".ckptctl", ".ckptctl/marks"])
def test_a_pin_behind_a_link_protects(put, root, tmp_path, folder):
    put(100, 200, 300)
    ckptctl.mark(f"{root}@100", "pinned")
    moved = root / "step_100" / folder
    moved.rename(tmp_path / "moved")
    moved.symlink_to(tmp_path / "moved")
    found = prune(root)
    assert there(root) == {"step_100", "step_300"}
    assert "a mark on it cannot be read" in found.decisions[-1].reason
    report = ckptctl.verify(f"{root}@100")
    (finding,) = (one for one in report.findings if one.code == "mark.damaged")
    assert (finding.where, report.exit_code) == (folder, 0)


@pytest.mark.parametrize("lost", ["lost", "changed"])
def test_a_pin_protects_a_step_whose_metadata_is_lost_or_changed(put, root, lost):
    put(100, 200, 300)
    ckptctl.mark(f"{root}@100", "pinned")
    metadata = root / "step_100" / ".metadata"
    if lost == "lost":
        metadata.unlink()
    else:
        shutil.copy(root / "step_200" / ".metadata", metadata)
    for file in (root / "step_100").rglob("*"):
        os.utime(file, (1_600_000_000, 1_600_000_000))
    prune(root)
    assert there(root) == {"step_100", "step_300"}


def test_a_pin_on_an_earlier_save_can_be_taken_off(put, root):
    put(100, 200)
    ckptctl.mark(f"{root}@100", "pinned")
    shutil.copy(root / "step_200" / ".metadata", root / "step_100" / ".metadata")
    assert ckptctl.mark(f"{root}@100", "unpinned").lifted
    ckptctl.mark(f"{root}@100", "rejected", reason="metadata of another step")
    found = ckptctl.prune(str(root), 1)
    assert "pinned" not in found.decisions[-1].reason


def test_a_pin_in_a_file_of_marks_protects(put, root, tmp_path):
    put(100, 200, 300)
    marks = str(tmp_path / "marks.jsonl")
    ckptctl.mark(f"{root}@100", "pinned", marks=marks)
    plan = ckptctl.prune(str(root), 1, marks=marks)
    assert [one.number for one in plan.decisions if one.removed] == [200]
    assert plan.next_command == f"ckptctl prune {root} --keep 1 --marks {marks} --apply"
    with open(marks, "a") as file:
        file.write('{"a line": "that is no mark"}\n')
    with pytest.raises(UsageError, match="line 2 is not a mark"):
        ckptctl.prune(str(root), 1, marks=marks, apply=True)
    assert {path.name for path in root.iterdir()} >= {"step_100", "step_200", "step_300"}


@pytest.mark.parametrize("word", ["pinned", "damaged", "none"])
def test_what_was_moved_aside_goes_unless_it_is_pinned(put, root, word):
    put(200, 300)
    (aside,) = put(100)
    if word != "none":
        ckptctl.mark(str(aside), "pinned")
    if word == "damaged":
        damage_a_mark(aside)
    (root / ".ckptctl" / "aside").mkdir(parents=True)
    aside = aside.rename(root / ".ckptctl" / "aside" / "step_100.000002.ab12")
    prune(root)
    assert aside.exists() is (word != "none")
    assert there(root) == {"step_300"}


# What goes wrong


def deny(monkeypatch: pytest.MonkeyPatch, method: str, *paths: str) -> None:
    """Have the storage deny a call for some paths."""
    real = targets.open_store

    def opened(*args: object, **options: object) -> FaultyStore:
        store = FaultyStore(real(*args, **options))
        for path in paths:
            store.fail(method, AccessDenied("not allowed"), path=path)
        return store

    monkeypatch.setattr(targets, "open_store", opened)


def test_one_step_that_cannot_be_removed_does_not_keep_the_others(put, root, monkeypatch):
    put(100, 200, 300, 400)
    deny(monkeypatch, "remove", "step_100/.metadata")
    found = prune(root)
    assert [one.number for one in found.decisions if one.removed] == [300, 200]
    assert found.exit_code == AccessDenied.exit_code
    assert found.message.endswith("; 1 step could not be removed")
    assert "could not be removed completely: not allowed" in found.decisions[-1].reason
    assert ckptctl.verify(str(root / "step_100")).usable
    assert taken(root) == 400


@pytest.mark.parametrize(
    ("unknown", "left"),
    [
        (("step_400",), {"step_300", "step_400"}),
        # Step 300 has no data position: beside a step that may hold one, `pick` refuses it.
        (("step_400", "step_100"), {"step_100", "step_200", "step_300", "step_400"}),
    ],
    ids=len,
)
def test_steps_that_nobody_could_be_asked_about_stay_and_do_not_count(
    put, root, monkeypatch, unknown, left
):
    put(100, 200, 300, 400)
    deny(monkeypatch, "list_tree", *unknown)
    found = prune(root)
    assert found.exit_code == AccessDenied.exit_code
    assert "could not be inspected, and stay" in found.message
    assert found.next_command == f"ckptctl verify {root / 'step_400'}"
    whole = {path.parent.name for path in root.glob("step_*/.metadata")}
    assert whole == left


def test_the_steps_that_attempts_resumed_from_stay_also_where_a_clock_is_behind(put, root):
    from ckptctl.selection.history import take_token

    put(100, 200, 300)
    attempts = root / ".ckptctl" / "attempts"
    attempts.mkdir(parents=True)
    with open_store(str(root)) as store:
        take_token(store, lambda _: "20260102T000000-ahead")
        take_token(store, lambda _: "20260101T000000-behind")
    (attempts / "20260102T000000-ahead.resume.json").write_text('{"step": 200}')
    (attempts / "20260101T000000-behind.resume.json").write_text('{"step": 100}')
    prune(root)
    assert there(root) == {"step_100", "step_200", "step_300"}


def test_a_record_of_an_attempt_that_is_nested_without_end_names_no_step(put, root):
    put(100)
    attempts = root / ".ckptctl" / "attempts"
    attempts.mkdir(parents=True)
    (attempts / "1.resume.json").write_text("[" * 100_000)
    assert ckptctl.prune(str(root), 1).exit_code == 0


def test_a_step_whose_copy_in_another_root_is_rejected_does_not_count(put, root, tmp_path):
    other = tmp_path / "other"
    put(100, 200, 300)
    put(300, into=other)
    ckptctl.mark(f"{other}@300", "rejected", reason="the loss diverges")
    assert ckptctl.pick(str(root), str(other)).step == 200
    plan = ckptctl.prune(str(root), 1, other_roots=[str(other)])
    assert plan.next_command == f"ckptctl prune {root} --keep 1 --other-root {other} --apply"
    found = prune(root, other_roots=[str(other)])
    assert there(root) == {"step_200", "step_300"}
    assert "rejected in" in found.decisions[0].reason
    assert ckptctl.pick(str(root), str(other)).step == 200
    assert there(other) == {"step_300"}


def test_a_step_that_another_root_has_gone_on_without_does_not_count(put, root, tmp_path):
    """The other root recorded a resume from step 100; this root was not there to be marked."""
    other = tmp_path / "other"
    put(100, 200, 300)
    put(100, into=other)
    with open_store(str(other)) as store:
        left = ckptctl.scan(str(root)).reports[:2]
        put_resume(store, "20991122T031011.000000Z-0123abcd", 100, (), left)
    assert ckptctl.pick(str(root), str(other)).step == 100
    found = prune(root, other_roots=[str(other)])
    assert "step_100" in there(root)
    assert [one.counts for one in found.decisions] == [False, False, True]


def test_a_step_that_only_the_record_of_another_root_rules_out_is_accepted_by_two_commands(
    put, root, tmp_path
):
    other = tmp_path / "other"
    put(100, 200)
    put(100, into=other)
    with open_store(str(other)) as store:
        put_resume(
            store, "20991122T031011.000000Z-0123abcd", 100, (), ckptctl.scan(str(root)).reports
        )
    assert ckptctl.pick(str(root), str(other)).step == 100
    told = ckptctl.mark(f"{root}@200", "accepted")
    assert told.mark is None
    assert (
        f"`ckptctl reject {root}/step_200 --reason WHY`, and this command after it" in told.message
    )
    for word in ("rejected", "accepted"):
        ckptctl.mark(f"{root}@200", word, reason="back to the first branch")
    assert ckptctl.pick(str(root), str(other)).step == 200


def test_another_root_that_does_not_exist_stops_before_anything_goes(put, root):
    put(100, 200)
    with pytest.raises(StorageUnavailable, match="does not exist"):
        prune(root, other_roots=[str(root.parent / "gone")])
    assert there(root) == {"step_100", "step_200"}


def test_a_step_that_lacks_what_is_required_does_not_count(put, root):
    put(100)
    put(200, 300, variant="no-scheduler")
    assert taken(root) == 300
    assert taken(root, require=["scheduler"]) == 100
    plan = ckptctl.prune(str(root), 1, require=["scheduler"])
    assert not any(one.removed for one in plan.decisions)
    assert taken(root, require=["scheduler"]) == 100
    assert [one.number for one in ckptctl.prune(str(root), 1).decisions if one.removed] == [
        200,
        100,
    ]


def resumed(root: Path, attempt: str, step: int, *, ledger: bool = True) -> Path:
    """What an attempt leaves that resumed from a step: its report and its ledger."""
    attempts = root / ".ckptctl" / "attempts"
    attempts.mkdir(parents=True, exist_ok=True)
    rows = [{"event": "started"}, {"event": "resumed", "step": step}]
    lines = [json.dumps({**row, "attempt": attempt}) + "\n" for row in rows]
    (attempts / f"{attempt}.jsonl").write_text("".join(lines) if ledger else "")
    report = attempts / f"{attempt}.resume.json"
    report.write_text(json.dumps({"step": step}))
    return report


@pytest.mark.parametrize("content", ["", "{", '{"step": "100"}', "[" * 100_000, None])
def test_a_damaged_report_of_the_newest_resume_still_protects_the_step(put, root, content):
    put(100, 200, 300)
    resumed(root, "20260101T000000.000000Z-00000001", 200)
    report = resumed(root, "20260102T000000.000000Z-00000002", 100)
    report.unlink()
    if content is not None:
        report.write_text(content)
    found = prune(root)
    assert there(root) == {"step_100", "step_300"}
    assert found.decisions[-1].reason == "the newest attempt resumed from it"


def test_where_no_record_says_what_the_newest_attempt_resumed_from_nothing_goes(put, root):
    put(100, 200, 300)
    resumed(root, "20260101T000000.000000Z-00000001", 200)
    report = resumed(root, "20260102T000000.000000Z-00000002", 100, ledger=False)
    report.write_text("{")
    found = prune(root)
    assert there(root) == {"step_100", "step_200", "step_300"}
    assert "the newest attempt may have resumed from it" in found.decisions[-1].reason
    report.unlink()
    (root / ".ckptctl" / "attempts" / "20260102T000000.000000Z-00000002.jsonl").unlink()
    prune(root)
    assert there(root) == {"step_200", "step_300"}


# What is printed


def test_the_next_command_bears_every_option_of_the_plan(templates, root):
    for number in (100, 200):
        shutil.copytree(templates / "whole" / f"step_{number}", root / f"save-{number}")
    options = {"unsealed": True, "level": Level.LISTING, "pattern": "save-(?P<step>[0-9]+)"}
    found = ckptctl.prune(str(root), 1, **options)
    assert found.next_command == (
        f"ckptctl prune {root} --keep 1 --unsealed --level listing "
        "--pattern 'save-(?P<step>[0-9]+)' --apply"
    )


def test_how_many_steps_have_been_looked_at_is_told(put, root):
    put(100, 200, 300)
    told: list[tuple[int, int]] = []
    ckptctl.prune(str(root), 1, on_inspected=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_only_the_steps_that_decide_are_looked_at_deeply(templates, root, monkeypatch):
    from ckptctl.selection import candidates

    for number in range(100, 900, 100):
        put_step(templates, root, number)
    deep: list[str] = []
    real = candidates.inspect_step

    def seen(opened: OpenStep, *args: object, **options: object) -> object:
        deep.append(opened.name)
        return real(opened, *args, **options)

    monkeypatch.setattr(candidates, "inspect_step", seen)
    ckptctl.prune(str(root), 2)
    assert set(deep) <= {"step_800", "step_700", "step_600"}  # the last is compared with 700


# Uploads of killed saves


@pytest.mark.server
def test_uploads_of_attempts_that_are_over_are_aborted_and_those_of_the_holder_are_not(s3_ceph):
    from ckptctl.selection.history import take_token
    from ckptctl.selection.retention import abandoned_uploads
    from ckptctl.storage.opening import open_store

    url = f"s3://{s3_ceph.bucket}/uploads"
    options = {**s3_ceph.options, "client": "s3fs"}
    for step in ("step_1.attempt-1", "step_2.attempt-1", "step_2.attempt-2", "step_3", "other"):
        key = f"uploads/{step}/__0_0.distcp"
        s3_ceph.client.create_multipart_upload(Bucket=s3_ceph.bucket, Key=key)
    with open_store(url, storage_options=options) as store:
        for attempt in ("one", "two"):
            take_token(store, lambda _, attempt=attempt: attempt)
        (two,) = abandoned_uploads(store, number=2)
        assert two.path == "step_2.attempt-1/__0_0.distcp"
        plan = ckptctl.prune(url, 1, storage_options=options)
        assert plan.n_uploads == 2
        assert plan.message.endswith("; 2 unfinished uploads of killed saves to be aborted")
        ckptctl.prune(url, 1, apply=True, storage_options=options)
        left = {upload.path.partition("/")[0] for upload in store.list_uploads()}
    assert left == {"step_2.attempt-2", "step_3", "other"}


# What changes while a step is removed


@pytest.mark.parametrize("change", ["rejected", "superseded", "removed", "rejected in a file"])
def test_a_step_that_stops_counting_before_the_removal_keeps_the_older_ones(
    put, root, monkeypatch, change
):
    steps = put(100, 200, 300)
    for step in steps:
        unseal(step)
    marks = str(root.parent / "marks.jsonl")

    def then(store: Store, inspected: Inspection) -> None:
        """Reading the bytes takes hours; meanwhile the newest step turns out to be bad."""
        write_proof(store, inspected)
        if change == "removed":
            shutil.rmtree(steps[2])
        else:
            word, _, in_file = change.partition(" in a ")
            where = marks if in_file else None
            ckptctl.mark(str(steps[2]), word, reason="the loss diverges", marks=where)

    monkeypatch.setattr(pruning, "write_proof", then)
    ckptctl.mark(str(steps[1]), "rejected", reason="the loss diverges")
    found = prune(root, unsealed=True, marks=marks)
    assert steps[0].is_dir()
    assert taken(root, marks=marks) == 100
    assert "changed meanwhile" in found.decisions[-1].reason


# What cannot be removed


def test_a_link_in_place_of_what_was_moved_aside_stops_before_anything_goes(put, root):
    put(100, 200, 300)
    (root.parent / "elsewhere").mkdir()
    (root / ".ckptctl").mkdir()
    (root / ".ckptctl" / "aside").symlink_to(root.parent / "elsewhere")
    with pytest.raises(PathEscape, match="aside"):
        prune(root)
    assert there(root) == {"step_100", "step_200", "step_300"}
    (root / ".ckptctl" / "aside").unlink()
    (root / ".ckptctl" / "aside").write_text("a file")
    assert prune(root).exit_code == 0
    assert there(root) == {"step_300"}


def test_an_error_between_two_removals_stops_there_and_what_went_is_told(put, root):
    """The file of marks is damaged while steps are removed."""
    put(100, 200, 300, 400)
    marks = root.parent / "marks.jsonl"
    ckptctl.mark(f"{root}@400", "pinned", marks=str(marks))
    real = pruning.remove_step

    def removed(store: Store, name: str, **options: object) -> bool:
        done = real(store, name, **options)
        marks.write_text("{")
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pruning, "remove_step", removed)
        found = prune(root, marks=str(marks))
    assert there(root) == {"step_200", "step_300", "step_400"}
    assert [one.number for one in found.decisions if one.removed] == [100]
    assert found.exit_code == 2
    assert found.message.endswith("; 2 steps could not be removed")
    assert "cannot be read" in next(one.reason for one in found.decisions if one.number == 200)

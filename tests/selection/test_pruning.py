"""Retention: whatever is broken, the good steps that were asked for are left."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import COMMAND, clean_environment, validated
from made_roots import make_templates, put_step, written_hours_apart
from next_commands import run_and_follow as run_ckptctl
from services.counting_proxy import Fault
from services.processes import started, wait_until
from storage.faulty import FaultyStore

import ckptctl
from ckptctl.errors import AccessDenied, StorageError, UsageError
from ckptctl.findings import Verdict
from ckptctl.inspection.open_step import list_step
from ckptctl.model import FileInfo
from ckptctl.selection import retention
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import open_store


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_templates(tmp_path_factory.mktemp("templates"))


@pytest.fixture(scope="module")
def sealed(templates: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 100 to 500, all sealed; to be copied."""
    root = tmp_path_factory.mktemp("sealed")
    for number in range(100, 600, 100):
        put_step(templates, root, number)
    (root / "notes").mkdir()
    (root / "notes" / "why.txt").write_text("mine")
    return root


@pytest.fixture
def root(sealed: Path, tmp_path: Path) -> Path:
    """Steps 100 to 500, all sealed, and a folder that is none."""
    return shutil.copytree(sealed, tmp_path / "ckpt")


def there(root: Path) -> set[int]:
    return {int(path.name.removeprefix("step_")) for path in root.glob("step_*")}


def gone(found: ckptctl.Pruned) -> set[int]:
    return {one.number for one in found.decisions if one.removed}


def unseal(root: Path, number: int) -> None:
    (root / f"step_{number}" / ".ckptctl" / "seal.json").unlink()


def unfinished(root: Path, number: int) -> None:
    """A save that was killed long ago, before its metadata."""
    step = root / f"step_{number}"
    shutil.rmtree(step / ".ckptctl")
    (step / ".metadata").unlink()
    for file in step.rglob("*"):
        os.utime(file, (1_600_000_000, 1_600_000_000))


def test_a_plan_removes_nothing_and_names_the_command_that_does(root):
    found = ckptctl.prune(str(root), 2)
    assert gone(found) == {100, 200, 300}
    assert there(root) == {100, 200, 300, 400, 500}
    assert found.next_command == f"ckptctl prune {root} --keep 2 --apply"
    assert found.n_bytes == sum(one.n_bytes for one in found.decisions if one.removed) > 0


def test_applied_the_old_steps_are_gone_and_what_is_no_step_is_not(root):
    found = ckptctl.prune(str(root), 2, apply=True)
    assert gone(found) == {100, 200, 300}
    assert there(root) == {400, 500}
    assert (root / "notes" / "why.txt").read_text() == "mine"
    assert ckptctl.pick(str(root)).step == 500
    assert gone(ckptctl.prune(str(root), 2, apply=True)) == set()


def test_steps_without_a_seal_count_only_when_asked_for(root):
    for number in (300, 400, 500):
        unseal(root, number)
    written_hours_apart(root)
    assert gone(ckptctl.prune(str(root), 1)) == {100}
    assert gone(ckptctl.prune(str(root), 1, unsealed=True)) == {100, 200, 300, 400}
    found = ckptctl.prune(str(root), 3)
    assert gone(found) == set()
    assert found.message == "nothing is removed: 2 of 3 good steps exist"
    assert found.next_command == f"ckptctl prune {root} --keep 3 --unsealed"


def test_pinned_steps_and_the_one_resumed_from_stay(root):
    ckptctl.mark(f"{root}@100", "pinned", reason="published")
    attempts = root / ".ckptctl" / "attempts"
    attempts.mkdir(parents=True)
    (attempts / "20260101T000000.resume.json").write_text('{"step": 300}')
    (attempts / "20260102T000000.resume.json").write_text('{"step": 200}')
    found = ckptctl.prune(str(root), 1, apply=True)
    assert there(root) == {100, 200, 500}
    reasons = {one.number: one.reason for one in found.decisions}
    assert reasons[100] == "pinned"
    assert reasons[200] == "the newest attempt resumed from it"


def test_rejected_steps_and_interrupted_saves_do_not_count_and_go_when_they_are_old(root):
    ckptctl.mark(f"{root}@500", "rejected", reason="loss spike")
    ckptctl.mark(f"{root}@100", "rejected", reason="loss spike")
    unfinished(root, 200)
    ckptctl.prune(str(root), 2, apply=True)
    assert there(root) == {300, 400, 500}


def test_what_a_removal_that_was_cut_short_left_goes_with_the_next(root):
    for number in (100, 200):
        shutil.rmtree(root / f"step_{number}")
        (root / f"step_{number}").mkdir()
    (root / "step_100" / ".ckptctl" / "marks").mkdir(parents=True)
    (root / "step_100" / ".ckptctl" / "marks" / "1.json").write_text("{}")
    ckptctl.prune(str(root), 2, apply=True)
    assert there(root) == {400, 500}


def test_a_damaged_step_is_left_to_a_person(root):
    os.truncate(root / "step_100" / "__0_0.distcp", 100)
    found = ckptctl.prune(str(root), 2, apply=True)
    assert there(root) == {100, 400, 500}
    (decision,) = [one for one in found.decisions if one.number == 100]
    assert decision.reason.endswith(": left to a person")


def test_a_step_of_weights_alone_does_not_push_out_the_last_that_can_be_resumed_from(
    templates, tmp_path
):
    root = tmp_path / "ckpt"
    root.mkdir()
    put_step(templates, root, 100)
    put_step(templates, root, 200, "weights")
    found = ckptctl.prune(str(root), 1, unsealed=True, apply=True)
    assert there(root) == {100, 200}
    assert "lacks optimizer" in found.decisions[0].reason


@pytest.mark.parametrize("broken", list(itertools.combinations((100, 200, 300, 400, 500), 3)))
def test_whatever_three_are_damaged_the_newest_good_one_is_left_and_picked(root, broken):
    for number in broken:
        os.truncate(root / f"step_{number}" / "__0_0.distcp", 50)
    ckptctl.prune(str(root), 1, apply=True)
    best = max({100, 200, 300, 400, 500} - set(broken))
    assert best in there(root)
    assert ckptctl.pick(str(root), max_fallback=5).step == best


def test_what_is_interrupted_while_it_goes_is_never_taken(root):
    # The step is large enough for the signal to fall into its removal, or before or after it.
    written_s = (root / "step_100" / ".metadata").stat().st_mtime
    for number in range(2000):
        (root / "step_100" / f"extra_{number}").write_bytes(b"x")
        os.utime(root / "step_100" / f"extra_{number}", (written_s, written_s))
    command = (*COMMAND, "prune", root, "--keep", "4", "--apply")
    with started(command, env=clean_environment()) as process:
        while (root / "step_100" / ".metadata").exists() and process.poll() is None:
            time.sleep(0.0005)
    report = ckptctl.scan(str(root)).reports[-1]
    assert report.number == 200 or not report.usable


def trainer_step(root: Path, number: int) -> Path:
    """A step of the Hugging Face Trainer, without DCP metadata."""
    torch = pytest.importorskip("torch")
    numpy = pytest.importorskip("safetensors.numpy")
    step = root / f"checkpoint-{number}"
    step.mkdir(parents=True)
    weight = torch.ones(8).numpy()
    numpy.save_file({"weight": weight}, step / "model-00001-of-00002.safetensors")
    numpy.save_file({"bias": weight}, step / "model-00002-of-00002.safetensors")
    index = {"weight_map": {"weight": "model-00001-of-00002.safetensors"}}
    index["weight_map"]["bias"] = "model-00002-of-00002.safetensors"
    (step / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch.save({"state": {}, "last_epoch": 1}, step / name)
    (step / "trainer_state.json").write_text(json.dumps({"global_step": number}))
    for file in step.iterdir():
        os.utime(file, (1_600_000_000, 1_600_000_000))
    return step


def test_steps_without_checksums_count_and_go_once_they_are_sealed(tmp_path):
    root = tmp_path / "run"
    for number in (10, 20, 30):
        trainer_step(root, number)
    document = validated(run_ckptctl("prune", root, "--keep", 1, "--apply", "--json").stdout)
    assert document["next_command"] == f"ckptctl prune {root} --keep 1 --unsealed"
    reason = "no good step is sealed, and only sealed steps count"
    assert document["message"] == f"nothing is removed: {reason}"
    written_hours_apart(root)
    for options in (
        ("--unsealed",),
        ("--unsealed", "--apply"),
        ("--accept-unverifiable", "--unsealed", "--apply"),
    ):
        document = validated(run_ckptctl("prune", root, "--keep", 1, *options, "--json").stdout)
        assert document["message"].startswith("nothing is removed: 0 of 1 good steps exist; a step")
        seal = f"ckptctl seal {root}/checkpoint-30 --accept-unverifiable"
        assert document["next_command"] == seal
    assert ckptctl.seal(str(root / "checkpoint-20"), accept_unverifiable=True).path
    shutil.rmtree(root / "checkpoint-30")
    document = validated(run_ckptctl("prune", root, "--keep", 1, "--json").stdout)
    assert document["next_command"] == f"ckptctl prune {root} --keep 1 --apply"
    trainer_step(root, 30)
    found = ckptctl.prune(str(root), 1, apply=True)
    assert gone(found) == {10}
    assert found.decisions[0].reason == "complete, but not sealed: does not count"
    # A sealed step that was written to since proves nothing any more.
    (root / "checkpoint-20" / "optimizer.pt").write_bytes(b"x")
    trainer_step(root, 10)
    assert gone(ckptctl.prune(str(root), 1, apply=True)) == set()


def test_a_copy_of_a_root_counts_once_it_is_sealed(root):
    """Times of a copy do not show whether a step is of one save."""
    for number in (400, 500):
        unseal(root, number)
        for file in (root / f"step_{number}").rglob("*"):
            os.utime(file, (1_600_000_000, 1_600_000_000))
    for apply in (False, True):
        found = ckptctl.prune(str(root), 4, unsealed=True, apply=apply)
        assert gone(found) == set()
        assert found.decisions[0].reason.startswith("one save is not proven")
        assert found.next_command == f"ckptctl seal {root}/step_500"
    assert ckptctl.seal(f"{root}@500").path is not None
    assert ckptctl.prune(str(root), 4, unsealed=True).decisions[0].counts


@pytest.mark.parametrize("has_seal", [False, True])
@pytest.mark.parametrize("n_removed", range(1, 8))
def test_a_step_without_dcp_metadata_that_is_half_removed_is_never_taken_and_goes(
    tmp_path, sealed, n_removed, has_seal
):
    """The process dies after some of the files, in the order in which an object store lists."""
    root = tmp_path / "run"
    for number in (10, 20):
        step = trainer_step(root, number)
        if has_seal:
            assert ckptctl.seal(str(step), accept_unverifiable=True).path
    assert ckptctl.pick(str(root), accept_unverifiable=True).step == 20

    class Killed(BaseException):
        pass

    class DiesSoon(FaultyStore):
        n_left = n_removed

        def remove(self, path: str) -> None:
            if not path.startswith("checkpoint-10/.ckptctl/"):
                if not self.n_left:
                    raise Killed
                self.n_left -= 1
            super().remove(path)

    with open_store(str(root)) as store, pytest.raises(Killed):
        retention.remove_step(DiesSoon(store), "checkpoint-10")
    shutil.move(root / "checkpoint-20", tmp_path / "checkpoint-20")
    asked = {"accept_unverifiable": True, "allow_missing_state": True}
    left = ckptctl.pick(str(root), **asked)
    assert (left.chosen, left.exit_code) == (None, 11)
    assert left.passed_over[0].report.verdict is Verdict.INCOMPLETE
    shutil.copytree(sealed / "step_500", root / "step_500")
    ckptctl.prune(str(root), 1, apply=True)
    assert not (root / "checkpoint-10").exists()


def test_a_step_that_was_saved_again_into_what_a_removal_left_is_whole(tmp_path):
    root = tmp_path / "run"
    step = trainer_step(root, 10)
    (step / ".ckptctl").mkdir()
    note = step / ".ckptctl" / "removing"
    note.write_text("being removed\n")
    asked = {"accept_unverifiable": True, "grace_s": 0.0}
    assert ckptctl.pick(str(root), **asked).chosen is None
    os.utime(note, (1_500_000_000, 1_500_000_000))
    assert ckptctl.pick(str(root), **asked).step == 10


@pytest.mark.parametrize("keep", [0, -1])
def test_to_keep_nothing_is_refused(root, keep):
    with pytest.raises(UsageError, match="at least 1 good step"):
        ckptctl.prune(str(root), keep)


def test_on_a_root_that_is_read_only_access_is_denied(root):
    mounts = (["mount", "--bind", root, root], ["mount", "-o", "remount,ro,bind", root])
    if os.geteuid() != 0 or subprocess.run(mounts[0], capture_output=True).returncode:
        pytest.skip("this machine mounts nothing")
    try:
        subprocess.run(mounts[1], check=True)
        with pytest.raises(AccessDenied, match="could not be removed completely: Read-only"):
            ckptctl.prune(str(root), 2, apply=True)
    finally:
        subprocess.run(["umount", root], check=True)
    assert there(root) == {100, 200, 300, 400, 500}


@pytest.mark.server
def test_on_an_object_store_what_a_killed_removal_leaves_is_no_step_and_goes_at_the_next(
    root, s3_moto, counting_proxy
):
    url, proxy = s3_moto.upload(root, "prune"), counting_proxy(s3_moto.endpoint)
    proxy.break_request("DELETE", Fault.SILENT, nth=2, lasts=True)
    command = ("prune", url, "--keep", "4", "--apply")
    variables = {**s3_moto.environment, "AWS_ENDPOINT_URL": proxy.url}
    with started([*COMMAND, *command], env=clean_environment(**variables)):
        wait_until(lambda: proxy.counts["DELETE"] > 1, what="the removal")
    left = ckptctl.scan(url, grace_s=0.0, storage_options=s3_moto.options).reports[-1]
    assert (left.number, left.interrupted, left.usable) == (100, True, False)
    # A save that is so young may still be written.
    assert gone(ckptctl.prune(url, 4, apply=True, storage_options=s3_moto.options)) == set()
    done = ckptctl.prune(url, 3, apply=True, grace_s=0.0, storage_options=s3_moto.options)
    assert gone(done) == {100, 200}
    with open_store(url, storage_options=s3_moto.options) as store:
        names = {info.path for info in store.list_dir()}
    assert names == {"notes", "step_300", "step_400", "step_500"}


# The command


def test_the_command_plans_then_does_what_it_said(root):
    plan = run_ckptctl("prune", root, "--keep", 4)
    assert plan.returncode == 0
    assert plan.stdout.startswith("1 step, ")
    assert plan.stdout.endswith(f"next: ckptctl prune {root} --keep 4 --apply\n")
    quiet = run_ckptctl("prune", root, "--keep", 4, "-q")
    assert quiet.stdout == f"{root}/step_100\n"
    done = run_ckptctl("prune", root, "--keep", 4, "--apply")
    assert done.stdout.startswith("removed 1 step, ")
    assert there(root) == {200, 300, 400, 500}


def test_the_document_holds_to_its_schema(root):
    document = validated(run_ckptctl("prune", root, "--keep", 3, "--json").stdout)
    assert [one["number"] for one in document["decisions"] if one["removed"]] == [200, 100]
    assert document["applied"] is False


def test_without_a_number_nothing_is_planned(root):
    assert run_ckptctl("prune", root).returncode == 2


# What changes between the listing and the removal


def another_run(root: Path) -> Path:
    """A sound step of another run, beside the root."""
    return Path(shutil.copytree(root / "step_500", root.parent / "another" / "step_7"))


def in_its_place(monkeypatch: pytest.MonkeyPatch, step: Path, act: Callable[[], object]) -> None:
    """Have `act` take place right after `step` has been listed for the last time."""
    listed = retention.list_step

    def then_act(store: Store, name: str) -> tuple[FileInfo, ...]:
        files = listed(store, name)
        if name == step.name:
            act()
        return files

    monkeypatch.setattr(retention, "list_step", then_act)


def test_a_step_replaced_by_a_link_loses_nothing_behind_the_link(root, monkeypatch):
    other = another_run(root)
    before = sorted(path.name for path in other.rglob("*"))
    step = root / "step_100"

    def replaced() -> None:
        step.rename(root / "moved")
        step.symlink_to(other)

    in_its_place(monkeypatch, step, replaced)
    with open_store(str(root)) as store, pytest.raises(StorageError, match="is a link to"):
        retention.remove_step(store, "step_100")
    assert sorted(path.name for path in other.rglob("*")) == before
    assert ckptctl.verify(str(root / "moved")).usable
    assert step.is_symlink()


def test_a_folder_of_a_step_replaced_by_a_link_loses_nothing_behind_the_link(root, monkeypatch):
    other = another_run(root)
    before = sorted(path.name for path in other.rglob("*"))
    notes = root / "step_100" / ".ckptctl"

    def replaced() -> None:
        shutil.rmtree(notes)
        notes.symlink_to(other / ".ckptctl")

    in_its_place(monkeypatch, root / "step_100", replaced)
    with open_store(str(root)) as store, pytest.raises(StorageError, match="is a link to"):
        retention.remove_step(store, "step_100")
    assert sorted(path.name for path in other.rglob("*")) == before


def test_links_in_a_step_are_removed_and_not_followed(root):
    other = another_run(root)
    before = sorted(path.name for path in other.rglob("*"))
    (root / "step_100" / "elsewhere").symlink_to(other)
    (root / "step_100" / "shard").symlink_to(other / "__0_0.distcp")
    with open_store(str(root)) as store:
        assert retention.remove_step(store, "step_100")
    assert there(root) == {200, 300, 400, 500}
    assert sorted(path.name for path in other.rglob("*")) == before


def test_a_step_that_is_not_as_it_was_seen_stays(root):
    with open_store(str(root)) as store:
        seen = list_step(store, "step_100")
        ckptctl.mark(f"{root}@100", "pinned")
        assert not retention.remove_step(store, "step_100", seen=seen)
    assert ckptctl.verify(f"{root}@100").usable

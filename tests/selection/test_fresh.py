"""A run is called fresh only on evidence: by the root, what lies in it, and its own record."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from pathlib import Path

import pytest
from command_line import validated
from next_commands import run_and_follow as run_ckptctl
from services.plugin import S3Server
from storage.faulty import FaultyStore

import ckptctl
from ckptctl import Answer, StorageUnavailable, UsageError
from ckptctl.distributed.launcher import RESTART_COUNTERS
from ckptctl.findings import Verdict
from ckptctl.formats.frameworks.file_names import MAX_TEXT_BYTES
from ckptctl.selection import empty_roots, targets
from ckptctl.selection.choosing import NoStepReason
from ckptctl.selection.history import put_sentinel, read_history, record_usable, take_token
from ckptctl.storage.contract import StoreKind
from ckptctl.storage.opening import open_store

ATTEMPT = "20261122T031011.000000Z-0123abcd"


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RESTART_COUNTERS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def step(framework_roots: Path) -> Path:
    return framework_roots / "torchtitan" / "sync" / "checkpoint" / "step-20"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def used(root: Path) -> None:
    """Let ckptctl use a root that holds no step."""
    with open_store(str(root)) as store:
        put_sentinel(store)


def interrupted(root: Path, number: int = 3, *, age_s: float = 3600) -> Path:
    """A save that its job left after the first shard file."""
    shard = root / f"step_{number}" / "__0_0.distcp"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(bytes(1000))
    at = time.time() - age_s
    os.utime(shard, (at, at))
    os.utime(shard.parent, (at, at))
    return shard.parent


def ledger(root: Path, *events: dict | str) -> Path:
    """The ledger of one attempt; a string is a line as it is."""
    path = root / ".ckptctl" / "attempts" / f"{ATTEMPT}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [one if isinstance(one, str) else json.dumps(one) for one in events]
    path.write_text("".join(line + "\n" for line in lines))
    return path


STARTED = {"event": "started", "attempt": ATTEMPT}
FRESH = {"event": "resumed", "attempt": ATTEMPT, "step": None}
RESUMED = {"event": "resumed", "attempt": ATTEMPT, "step": 40}
SAVED = {"event": "saved", "attempt": ATTEMPT, "step": 50}


# What lies in the root


@pytest.mark.parametrize("place", ["run", "2026/run", "user/project"])
def test_a_run_in_the_last_of_many_folders_makes_the_path_wrong(root, step, place):
    for n in range(100):
        (root / f"logs-{n:03}").mkdir()
    shutil.copytree(step, root / "zz" / place / "step_20")
    for ask in (ckptctl.pick, ckptctl.scan, ckptctl.preflight):
        with pytest.raises(UsageError, match=f"but zz/{place} in it does"):
            ask(str(root))


def test_more_folders_than_are_looked_at_are_no_proof(root, monkeypatch):
    monkeypatch.setattr(empty_roots, "MAX_FOLDERS", 10)
    for n in range(11):
        (root / f"logs-{n}").mkdir()
    with pytest.raises(UsageError, match="1 were not listed"):
        ckptctl.pick(str(root))
    used(root)  # it is a root by its own record
    assert ckptctl.pick(str(root)).answer is Answer.FRESH


@pytest.mark.parametrize("kind", list(StoreKind))
def test_a_folder_that_does_not_answer_is_unknown_and_no_fresh_run(root, monkeypatch, kind):
    (root / "logs").mkdir()
    (root / "shared").mkdir()

    def opened(url: str, *args: object, **about: object) -> FaultyStore:
        store = FaultyStore(open_store(url, *args, **about), kind=kind)
        store.fail("list_dir", StorageUnavailable("Input/output error"), path="shared", lasts=True)
        return store

    monkeypatch.setattr(targets, "open_store", opened)
    with pytest.raises(StorageUnavailable, match="Input/output error"):
        ckptctl.pick(str(root))


def test_the_folder_of_the_file_system_itself_may_be_closed(root, monkeypatch):
    (root / "lost+found").mkdir()

    def opened(url: str, *args: object, **about: object) -> FaultyStore:
        store = FaultyStore(open_store(url, *args, **about))
        store.fail("list_dir", ckptctl.AccessDenied("denied"), path="lost+found", lasts=True)
        return store

    monkeypatch.setattr(targets, "open_store", opened)
    assert ckptctl.pick(str(root)).answer is Answer.FRESH


ALL = (ckptctl.pick, ckptctl.scan, ckptctl.preflight)


@pytest.mark.parametrize(
    "name",
    [
        *("model.safetensors", "final/model.safetensors", "pytorch_model.bin", "checkpoint.tar"),
        *("last/mp_rank_00_model_states.pt", "model.ckpt-100.index", "params.npz", "run/0042.eqx"),
        *("semi_best", "e3", "model_last.mdl", "scores.checkpoint_1000", "last", "Epoch 3"),
        *("runs/7/semi_best", "a/b/c/d/e/e3", ".hidden/e3", "run12/weights", "last.pt.tmp", "x"),
        *("data/train.bin", "tokens.npz", "core.1234", "checkpoint_100", "step_100.tar.gz"),
    ],
)
@pytest.mark.parametrize("size", [1, 100_000])
def test_unknown_files_of_any_name_are_no_fresh_run_and_are_named(root, name, size):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(b"x" * size)
    (root / "train.log").write_text("step 1 loss 2.5\n")
    for ask in ALL:
        with pytest.raises(UsageError) as caught:
            ask(str(root), ignore=["*.other"])
        assert "1 entry of unknown content" in caught.value.message
        assert f"({name}), which may be saves;" in caught.value.message
        assert "--ignore PATTERN" in caught.value.message
    found = ckptctl.pick(str(root), allow_fresh=True, ignore=[name])
    assert (found.answer, found.exit_code) == (Answer.FRESH, 0)


def test_a_folder_of_digits_with_an_unknown_file_is_a_step_of_unknown_format(root):
    (root / "12").mkdir(parents=True)
    (root / "12" / "weights").write_bytes(b"x" * 100)
    found = ckptctl.pick(str(root), allow_fresh=True)
    assert (found.answer, found.exit_code) == (Answer.NONE_USABLE, 11)
    assert found.reason == "unverifiable"


@pytest.mark.parametrize(
    "name", ["large.json", "boosting/model_100.json", "config.yaml", "notes.txt", "job.o12345"]
)
def test_text_is_known_while_it_is_small(root, name):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(b"x" * MAX_TEXT_BYTES)
    assert ckptctl.pick(str(root)).answer is Answer.FRESH
    (root / name).write_bytes(b"x" * (MAX_TEXT_BYTES + 1))
    with pytest.raises(UsageError, match="unknown content"):
        ckptctl.pick(str(root))


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "args.yaml", "tokenizer.json", "README.md", "README", "LICENSE"),
        *("train.log", "train.log.2", "slurm-123.out", "nohup.out", "job.o123456", "metrics.jsonl"),
        *("tb/events.out.tfevents.1700000000.node1.7.0", "code/train.py", ".hydra/config.yaml"),
        *("wandb/run-1/run-1.wandb", "wandb/run-1/files/requirements.txt", ".git/objects/4b/a1c2"),
        *("__pycache__/train.cpython-311.pyc", "plots/loss.png", ".gitignore", "src/Makefile"),
    ],
)
def test_logs_configurations_and_source_leave_a_run_fresh(root, name):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("x")
    (root / "empty").touch()
    for ask in ALL:
        assert ask(str(root)).exit_code == 10
    assert ckptctl.pick(str(root), allow_fresh=True).exit_code == 0


def test_patterns_accept_files_and_whole_folders_and_nothing_else(root):
    for name in ("cache/a/b.bin", "cache/c.bin", "trace.bin", "e3"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    with pytest.raises(UsageError, match=r"4 entries of unknown content \("):
        ckptctl.pick(str(root))
    with pytest.raises(UsageError, match=r"1 entry of unknown content \(e3\)"):
        ckptctl.pick(str(root), ignore=["cache", "trace.*"])
    assert ckptctl.pick(str(root), ignore=["cache", "trace.*", "e?"]).answer is Answer.FRESH
    done = run_ckptctl("pick", root, "--allow-fresh", "--ignore", "cache,trace.*", "--ignore", "e3")
    assert (done.returncode, done.stdout) == (0, "")


def test_a_link_is_known_by_what_it_leads_to_in_the_root(root, tmp_path):
    (root / "wandb" / "run-1" / "logs").mkdir(parents=True)
    (root / "wandb" / "latest-run").symlink_to("run-1")
    (root / "wandb" / "debug.log").symlink_to("run-1/logs/debug.log")
    assert ckptctl.pick(str(root)).answer is Answer.FRESH
    for target in (tmp_path / "gone.pt", tmp_path, "../run", "nowhere"):
        (root / "newest").symlink_to(target)
        with pytest.raises(UsageError, match=r"unknown content \(newest\)"):
            ckptctl.pick(str(root))
        (root / "newest").unlink()


def test_more_files_than_are_compared_are_no_proof(root, monkeypatch):
    monkeypatch.setattr(empty_roots, "MAX_FILES", 10)
    for n in range(11):
        (root / f"{n}.log").write_text("x")
    with pytest.raises(UsageError, match="11 were not listed"):
        ckptctl.pick(str(root))


def test_a_step_without_a_number_is_named_once(root, step):
    shutil.copytree(step, root / "final")
    with pytest.raises(UsageError, match=r"1 entry of unknown content \(final\)") as caught:
        ckptctl.pick(str(root))
    assert caught.value.next_command == f"ckptctl verify {root / 'final'}"


def test_a_link_that_leads_out_of_the_root_may_be_a_save(root, step, tmp_path):
    shutil.copytree(step, tmp_path / "elsewhere" / "step_20")
    (root / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"1 entry of unknown content \(checkpoints\)"):
        ckptctl.pick(str(root))


# A root that does not exist


def test_a_root_that_does_not_exist_is_0_only_with_create_which_makes_it(tmp_path):
    run = tmp_path / "run"
    (tmp_path / "other").mkdir()
    for found in (ckptctl.pick(str(run)), ckptctl.pick(str(run), allow_fresh=True)):
        assert (found.answer, found.exit_code) == (Answer.FRESH, 10)
        assert f"{run} does not exist: check the path" in found.message
        assert found.next_command == f"ckptctl scan {tmp_path}"
    assert not run.exists()
    made = ckptctl.pick(str(run), allow_fresh=True, create=True)
    assert (made.answer, made.exit_code, made.next_command) == (Answer.FRESH, 0, None)
    assert made.message == f"{run} does not exist: created"
    assert validated((run / ".ckptctl" / "root.json").read_text())["began_empty"] is True
    assert ckptctl.pick(str(run), allow_fresh=True).exit_code == 0


def test_preflight_answers_as_pick_does(tmp_path):
    run = tmp_path / "run"
    found = ckptctl.preflight(str(run), allow_fresh=True)
    assert (found.exit_code, found.path) == (10, None)
    assert found.next_command == f"ckptctl scan {tmp_path}"
    assert ckptctl.preflight(str(run), allow_fresh=True, create=True).exit_code == 0
    assert (run / ".ckptctl" / "root.json").exists()


def test_create_is_read_from_the_command_line_and_from_no_variable(tmp_path):
    run = tmp_path / "run"
    done = run_ckptctl("pick", "--allow-fresh", run, env={"CKPTCTL_CREATE": "1"})
    assert (done.returncode, run.exists()) == (10, False)
    alone = run_ckptctl("pick", "--create", run)
    assert (alone.returncode, run.exists()) == (2, False)
    assert "requires --allow-fresh" in alone.stderr
    made = run_ckptctl("pick", "--create", run, env={"CKPTCTL_ALLOW_FRESH": "1"})
    assert (made.returncode, made.stdout, run.exists()) == (0, "", True)


@pytest.mark.parametrize("counter", RESTART_COUNTERS)
def test_nothing_is_made_for_a_restarted_job_or_where_nothing_is_mounted(
    tmp_path, monkeypatch, counter
):
    with pytest.raises(StorageUnavailable, match="mounted"):
        ckptctl.pick(str(tmp_path / "mount" / "run"), allow_fresh=True, create=True)
    monkeypatch.setenv(counter, "1")
    with pytest.raises(StorageUnavailable, match=counter):
        ckptctl.pick(str(tmp_path / "run"), allow_fresh=True, create=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.server
@pytest.mark.parametrize("server", ["s3_moto", "s3_ceph"])
def test_on_an_object_store_the_sentinel_decides(request, server, monkeypatch):
    s3: S3Server = request.getfixturevalue(server)
    above = f"s3://{s3.bucket}/{uuid.uuid4().hex}"
    key = above.split("/", 3)[3]
    s3.client.put_object(Bucket=s3.bucket, Key=f"{key}/run-1/train.log", Body=b"x")
    about = {"storage_options": s3.options, "allow_fresh": True}
    found = ckptctl.pick(f"{above}/run", **about)
    assert (found.answer, found.exit_code) == (Answer.FRESH, 10)
    assert "does not exist: check the path; a new run also needs --create" in found.message
    assert ckptctl.pick(f"{above}/run-1", **about).exit_code == 0
    assert ckptctl.pick(f"{above}/run", **about, create=True).exit_code == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert ckptctl.pick(f"{above}/run", **about).exit_code == 0
    with pytest.raises(StorageUnavailable):
        ckptctl.pick(f"{above}/run-1", **about)


# The record


def test_steps_that_were_usable_once_and_are_gone_are_never_a_fresh_run(root, step):
    shutil.copytree(step, root / "step-20")
    assert ckptctl.pick(str(root), allow_fresh=True, create=True).step == 20
    shutil.rmtree(root / "step-20")
    found = ckptctl.pick(str(root), allow_fresh=True, create=True)
    assert (found.answer, found.exit_code) == (Answer.NONE_USABLE, 11)
    assert "records that step 20 was usable" in found.message
    scanned = ckptctl.scan(str(root))
    assert (scanned.exit_code, scanned.message) == (11, found.message)


@pytest.mark.parametrize("has_sentinel", [False, True])
def test_what_ckptctl_keeps_about_a_step_that_is_gone_is_no_fresh_run(root, has_sentinel):
    if has_sentinel:
        used(root)
    name = "step_20.pt"
    mark = root / ".ckptctl" / "steps" / name / "marks" / "20260101T000000Z-rejected-0.json"
    mark.parent.mkdir(parents=True)
    mark.write_text("{}")
    found = ckptctl.pick(str(root), allow_fresh=True)
    assert (found.exit_code, found.reason) == (11, NoStepReason.RECORD_DOUBT)
    assert f".ckptctl/steps/{name} is of a step that is gone" in found.message


def test_a_root_that_held_steps_when_it_was_first_used_is_no_fresh_run(root, step):
    shutil.copytree(step, root / "step-20")
    used(root)
    shutil.rmtree(root / "step-20")
    assert "not empty when ckptctl first used it" in ckptctl.pick(str(root)).message
    assert ckptctl.pick(str(root), allow_fresh=True).exit_code == 11


@pytest.mark.parametrize("save", [False, True], ids=["no step", "interrupted save"])
@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([STARTED, RESUMED], "records step 40"),
        ([STARTED, FRESH, SAVED], "records step 50"),
        ([{"event": "failed", "phase": "loading", "step": 40}], "records step 40"),
        ([], "it is empty"),
        ([STARTED, '{"event": "resu'], "truncated"),
        (["[" * 100_000], "truncated"),
        (["1"], "no object"),
        (["\x00" * 300], "truncated"),
    ],
)
def test_a_ledger_that_tells_of_a_step_or_cannot_be_read_is_no_fresh_run(root, lines, says, save):
    used(root)
    if save:
        interrupted(root)
    ledger(root, *lines)
    found = ckptctl.pick(str(root), allow_fresh=True)
    assert (found.answer, found.exit_code) == (Answer.NONE_USABLE, 11)
    assert says in found.message


def test_a_ledger_that_does_not_answer_is_unknown(root, monkeypatch):
    used(root)
    path = ledger(root, STARTED, FRESH)
    assert ckptctl.pick(str(root)).answer is Answer.FRESH

    def opened(url: str, *args: object, **about: object) -> FaultyStore:
        store = FaultyStore(open_store(url, *args, **about))
        error = StorageUnavailable("Input/output error")
        store.fail("read", error, path=str(path.relative_to(root)), lasts=True)
        return store

    monkeypatch.setattr(targets, "open_store", opened)
    with pytest.raises(StorageUnavailable):
        ckptctl.pick(str(root))


def test_a_report_without_its_ledger_proves_nothing(root):
    used(root)
    ledger(root, STARTED, FRESH).rename(root / f".ckptctl/attempts/{ATTEMPT}.resume.json")
    assert "is missing" in ckptctl.pick(str(root)).message
    assert ckptctl.pick(str(root)).exit_code == 11


@pytest.mark.parametrize("content", ["", "{}", "x", "[" * 50_000])
def test_a_sentinel_that_cannot_be_read_proves_nothing(root, content):
    (root / ".ckptctl").mkdir()
    (root / ".ckptctl" / "root.json").write_text(content)
    found = ckptctl.pick(str(root), allow_fresh=True)
    assert (found.exit_code, "cannot be read" in found.message) == (11, True)


@pytest.mark.parametrize("what", ["folder", "pipe", "link"])
@pytest.mark.parametrize("path", ["root.json", "attempts", f"attempts/{ATTEMPT}.jsonl", ""])
def test_what_lies_in_the_place_of_a_record_proves_nothing(root, path, what):
    used(root)
    place = root / ".ckptctl" / path
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.parent.mkdir(exist_ok=True)
    if what == "pipe":
        os.mkfifo(place)
    elif what == "link":
        place.symlink_to("nowhere")
    elif path == "root.json":
        place.mkdir()
    else:
        place.write_text("x")
    found = ckptctl.pick(str(root), allow_fresh=True, create=True)
    assert (found.answer, found.exit_code) == (Answer.NONE_USABLE, 11)
    assert "cannot be read" in found.message


@pytest.mark.parametrize("left", ["attempts", "fence"])
def test_a_record_that_has_lost_its_sentinel_proves_nothing(root, left):
    used(root)
    ledger(root, STARTED, FRESH)
    with open_store(str(root)) as store:
        take_token(store, lambda _: ATTEMPT)
    assert ckptctl.pick(str(root)).answer is Answer.FRESH
    (root / ".ckptctl" / "root.json").unlink()
    shutil.rmtree(root / ".ckptctl" / ("fence" if left == "attempts" else "attempts"))
    found = ckptctl.pick(str(root), allow_fresh=True)
    assert (found.answer, found.exit_code) == (Answer.NONE_USABLE, 11)
    assert "there is no .ckptctl/root.json" in found.message


@pytest.mark.parametrize("save", [False, True], ids=["no step", "interrupted save"])
@pytest.mark.parametrize("optional", [False, True], ids=["mandatory", "optional"])
def test_a_restarted_job_finds_its_sentinel_in_every_mandatory_root(
    root, tmp_path, monkeypatch, save, optional
):
    """The other root is the empty folder over which nothing is mounted now."""
    used(root)
    if save:
        interrupted(root)
    (tmp_path / "other").mkdir()
    roots = [str(tmp_path / "other")] if optional else [str(root), str(tmp_path / "other")]
    tiers = {"optional_roots": [str(root)] if optional else []}
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.raises(StorageUnavailable, match=f"^{tmp_path / 'other'}: there is no usable"):
        ckptctl.pick(*roots, **tiers, allow_fresh=True)
    used(tmp_path / "other")
    assert ckptctl.pick(*roots, **tiers, allow_fresh=True).exit_code == 0


def test_a_step_of_an_optional_root_is_recorded_in_the_mandatory_ones(root, tmp_path, step):
    local = tmp_path / "local"
    shutil.copytree(step, local / "step-20")
    about = {"optional_roots": [str(local)], "allow_fresh": True, "create": True}
    assert ckptctl.pick(str(root), **about).step == 20
    shutil.rmtree(local)
    found = ckptctl.pick(str(root), **about)
    assert (found.answer, found.exit_code) == (Answer.NONE_USABLE, 11)
    assert not local.exists()


def test_the_record_keeps_the_first_usable_step_and_heals_a_damaged_sentinel(root):
    with open_store(str(root)) as store:
        put_sentinel(store)
        assert read_history(store).never_held
        record_usable(store, 10)
        record_usable(store, 20)
        assert "step 10" in str(read_history(store).held)
        (root / ".ckptctl" / "root.json").write_text("")
        record_usable(store, 20)
        assert "step 20" in str(read_history(store).held)


# Interrupted saves


def test_a_first_save_that_was_interrupted_is_fresh_by_the_record_alone(root):
    interrupted(root)
    for _ in range(2):
        assert ckptctl.pick(str(root), allow_fresh=True).exit_code == 11
    shutil.rmtree(root / "step_3")
    used(root)
    interrupted(root)
    found = ckptctl.pick(str(root), allow_fresh=True)
    assert (found.answer, found.exit_code) == (Answer.FRESH, 0)
    assert [one.report.number for one in found.passed_over] == [3]
    assert ckptctl.scan(str(root)).exit_code == 10
    assert ckptctl.preflight(str(root), allow_fresh=True).exit_code == 0


@pytest.mark.parametrize(
    "name", ["s0/r{}/iter_0000030_{}_local.pt", "r{}/iter_0000030_{}_local.pt"]
)
def test_a_running_first_save_without_a_folder_of_its_own_is_waited_for(root, name):
    used(root)
    for rank in range(2):
        path = root / name.format(rank, rank)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"PK")
    found = ckptctl.pick(str(root), allow_fresh=True)
    assert (found.exit_code, found.reason) == (75, NoStepReason.SAVE_RUNNING)


def test_interrupted_saves_beside_weights_or_below_a_pointer_are_no_fresh_run(root):
    used(root)
    interrupted(root)
    (root / "latest").write_text("step_3")  # written when a save has ended
    assert ckptctl.pick(str(root), allow_fresh=True).exit_code == 11
    (root / "latest").unlink()
    (root / "model.safetensors").write_bytes(b"x")
    assert ckptctl.pick(str(root), allow_fresh=True).exit_code == 11


def test_a_first_save_that_may_still_run_is_waited_for_unless_its_job_has_ended(root, monkeypatch):
    used(root)
    interrupted(root, age_s=5)
    found = ckptctl.pick(str(root), allow_fresh=True)
    assert (found.answer, found.exit_code) == (Answer.UNKNOWN, 75)
    assert "still being written" in found.message
    monkeypatch.setenv("CKPTCTL_RESTART_COUNT", "1")
    assert ckptctl.pick(str(root), allow_fresh=True).exit_code == 0


# Whole steps that are ruled out


def test_whole_steps_that_a_person_superseded_are_no_fresh_run(root, step):
    used(root)
    for number in (10, 20):
        shutil.copytree(step, root / f"step-{number}")
        ckptctl.mark(f"{root}@{number}", "superseded", reason="another branch was better")
    found = ckptctl.pick(str(root), allow_fresh=True)
    assert (found.answer, found.exit_code) == (Answer.NONE_USABLE, 11)
    assert ckptctl.scan(str(root)).exit_code == 11


def test_a_whole_step_that_was_superseded_unfinished_is_no_trace_of_a_usable_step(root, step):
    """Its metadata was on the way to the object store when the run began again."""
    used(root)
    name = root / "step_20.attempt-1"
    shutil.copytree(step, name)
    (name / ".metadata").rename(root.parent / "late")
    ckptctl.mark(str(name), "superseded", reason="the run begins again")
    assert ckptctl.pick(str(root), allow_fresh=True, grace_s=0.0).exit_code == 0
    (root.parent / "late").rename(name / ".metadata")
    found = ckptctl.pick(str(root), allow_fresh=True)
    assert (found.answer, found.exit_code) == (Answer.FRESH, 0)
    assert found.passed_over[0].report.verdict is Verdict.SUPERSEDED
    ckptctl.mark(str(name), "accepted")
    ckptctl.mark(str(name), "superseded", reason="a person has seen it whole")
    assert ckptctl.pick(str(root), allow_fresh=True).exit_code == 11

"""Preflight checks: one path when everything is well, one reason when it is not."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import COMMAND, clean_environment, validated
from next_commands import run_and_follow as run_ckptctl
from services.processes import free_port

import ckptctl
from ckptctl.distributed.launcher import cluster_context
from ckptctl.errors import NothingToResume, UsageError
from ckptctl.model import WorldSize
from ckptctl.preflight_checks.nodes import StorageProbe, check_nodes, check_probe
from ckptctl.preflight_checks.results import CheckOutcome, NodeFacts
from ckptctl.preflight_checks.running import check_capacity, ranks_in
from ckptctl.storage.local import LocalStore


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that the tests run on may be part of a job."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_", "PET_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.fixture
def root(framework_roots: Path, tmp_path: Path) -> Path:
    """Steps 100, 200 and 300, saved by two ranks, an hour apart and a minute long."""
    source = framework_roots / "kempnerforge" / "checkpoints" / "step_30"
    for hours, number in enumerate((100, 200, 300)):
        step = tmp_path / "ckpt" / f"step_{number}"
        shutil.copytree(source, step)
        for place, file in enumerate(sorted(one for one in step.rglob("*") if one.is_file())):
            at = 1_700_000_000 + 3600 * hours + (60 if place else 0)
            os.utime(file, (at, at))
    return tmp_path / "ckpt"


def cut(root: Path, number: int, rank: int = 1) -> None:
    """Cut the shard file of one rank short, without a trace in its times."""
    file = root / f"step_{number}" / f"__{rank}_0.distcp"
    before = file.stat()
    file.write_bytes(file.read_bytes()[:1000])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def outcomes(found: ckptctl.Preflight) -> dict[str, CheckOutcome]:
    return {check.name: check.outcome for check in found.checks}


def message(found: ckptctl.Preflight, name: str) -> str:
    (check,) = [one for one in found.checks if one.name == name]
    return check.message


# One process


def test_a_sound_root_gives_its_newest_step_and_every_check_is_ok(root):
    found = ckptctl.preflight(str(root))
    assert (found.chosen, found.step, found.exit_code) == (f"{root}/step_300", 300, 0)
    assert outcomes(found) == dict.fromkeys(
        ("step", "state", "storage", "capacity"), CheckOutcome.OK
    )
    (node,) = found.nodes
    assert (node.host, node.n_names, node.error) == (socket.gethostname(), 3, None)
    assert node.read_bytes > 0


def test_a_damaged_newest_step_is_a_warning_and_the_older_one_is_taken(root):
    cut(root, 300)
    found = ckptctl.preflight(str(root))
    assert found.step == 200
    assert outcomes(found)["step"] is CheckOutcome.WARNING
    assert "damage" not in outcomes(found)


def test_damaged_steps_that_one_rank_wrote_in_one_hour_say_so(root):
    cut(root, 200)
    cut(root, 300)
    found = ckptctl.preflight(str(root))
    assert found.step == 100
    assert message(found, "damage") == (
        "steps 300, 200 are damaged: all have damage in files of rank 1; all were written "
        "between 2023-11-14 23:14 UTC and 2023-11-15 00:14 UTC, and no good one then"
    )


def test_damaged_steps_of_two_ranks_of_one_node_name_the_node(root):
    cut(root, 200, rank=0)
    cut(root, 300, rank=1)
    found = ckptctl.preflight(str(root))
    assert "rank" not in message(found, "damage")
    attempts = root / ".ckptctl" / "attempts"
    attempts.mkdir(parents=True)
    (attempts / "20260101T000000.resume.json").write_text(
        '{"world_size": 8, "cluster": {"local_world_size": 8}}'
    )
    found = ckptctl.preflight(str(root))
    assert "all have damage in files of node 0 (ranks 0 to 7)" in message(found, "damage")


def test_none_usable_is_a_failure_with_no_path(root):
    for number in (100, 200, 300):
        cut(root, number)
    found = ckptctl.preflight(str(root))
    assert (found.exit_code, found.path) == (11, None)
    with pytest.raises(NothingToResume):
        _ = found.chosen


def without(root: Path, kind: str, *numbers: int) -> None:
    """Write the train state of some steps anew, without one kind."""
    torch = pytest.importorskip("torch")
    for number in numbers:
        file = root / f"step_{number}" / "train_state.pt"
        about = file.stat()
        state = torch.load(file, weights_only=False)
        del state[kind]
        torch.save(state, file)
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))


@pytest.mark.parametrize("kind", ["rng", "dataloader"])
def test_a_step_that_lost_a_kind_is_passed_over_unasked(root, kind):
    without(root, kind, 300)
    found = ckptctl.preflight(str(root))
    assert (found.step, found.exit_code) == (200, 0)
    assert f"lacks {kind}, which step 200 holds" in found.pick.passed_over[0].reason
    assert kind in found.pick.required
    assert outcomes(found)["state"] is CheckOutcome.OK


def test_a_kind_that_no_step_holds_is_a_remark_and_the_options_are_named(root):
    without(root, "rng", 100, 200, 300)
    found = ckptctl.preflight(str(root))
    assert (found.step, found.exit_code, found.pick.absent) == (300, 0, ("rng",))
    assert outcomes(found)["state"] is CheckOutcome.WARNING
    assert message(found, "state") == (
        "requires model, optimizer, scheduler, dataloader, step; does not restore rng "
        "(--require KIND,... demands more, --allow-missing-state less)"
    )
    demanding = ckptctl.preflight(str(root), require=["rng"])
    assert (demanding.path, demanding.exit_code) == (None, 11)


def test_a_fresh_run_is_10_or_0_where_it_is_allowed(tmp_path):
    assert ckptctl.preflight(str(tmp_path / "new")).exit_code == 10
    found = ckptctl.preflight(str(tmp_path / "new"), allow_fresh=True, create=True)
    assert (found.exit_code, found.path) == (0, None)
    assert set(outcomes(found)) == {"step", "storage"}


def test_a_full_disk_stops_the_job_before_it_trains_to_its_first_save(root):
    found = ckptctl.preflight(str(root), room_for=10**9)
    assert (found.exit_code, found.path) == (75, None)
    assert "nothing can be saved" in found.message
    assert found.next_command == f"ckptctl prune {root} --keep 3"


def test_what_makes_no_sense_is_refused(root):
    with pytest.raises(UsageError):
        ckptctl.preflight(str(root), room_for=-1)


# Nodes


HERE = NodeFacts("node1", "nfs4 s:/x on /x", free=10**12, n_names=3, listing="a", metadata="m")


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            {"listing": "b", "n_names": 0, "mount": "ext4 /dev/a on /"},
            "other names under the root than node1 (0 names there, 3 here): ext4 /dev/a on / there",
        ),
        ({"metadata": "n"}, "node2 sees other metadata of the step than node1: a stale mount"),
        ({"error": "no answer", "error_code": 75}, "node2 cannot read the root: no answer"),
        ({"read_only": True}, "read-only on node2"),
        ({"free": 5}, "5 bytes are free on node2, and the next saves need 100"),
    ],
)
def test_a_node_that_differs_is_named(other, says):
    about = {"mount": HERE.mount, "free": 10**12, "n_names": 3, "listing": "a", "metadata": "m"}
    checks = list(check_nodes("ckpt", [HERE, NodeFacts("node2", **{**about, **other})], 100))
    (failed,) = [one for one in checks if one.outcome is CheckOutcome.FAILED]
    assert says in failed.message
    assert failed.exit_code == 75


def test_a_job_that_saves_nothing_may_read_from_a_full_storage_that_is_read_only():
    full = replace(HERE, read_only=True, free=0)
    assert [one.outcome for one in check_nodes("ckpt", [full], None)] == [CheckOutcome.OK]


def test_nodes_that_see_the_same_are_counted():
    there = NodeFacts("node2", "nfs4 s:/x on /x", free=10**12, n_names=3, listing="a", metadata="m")
    (check,) = check_nodes("ckpt", [HERE, there, there], 100)
    assert check.outcome is CheckOutcome.OK
    assert check.message.startswith("2 nodes see the same: 3 names under the root")


def started(folder: Path, rank: int, port: int, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "preflight", "ckpt", *args],
        cwd=folder,
        env=clean_environment(
            RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.mark.torch
@pytest.mark.slow
def test_two_processes_give_one_path_and_one_answer(root, port):
    both = [started(root.parent, rank, port, "--probe-storage") for rank in range(2)]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert [out for out, _ in said] == ["ckpt/step_300\n", ""]
    assert "268 MB written, read back and compared" in said[0][1]
    assert not (root / ".ckptctl").exists()


@pytest.mark.torch
@pytest.mark.slow
def test_a_process_whose_storage_is_another_one_stops_all(root, tmp_path, port):
    (tmp_path / "elsewhere" / "ckpt").mkdir(parents=True)
    both = [started(root.parent, 0, port), started(tmp_path / "elsewhere", 1, port)]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [75, 75], said
    assert [out for out, _ in said] == ["", ""]
    assert "cannot read the root" in said[0][1]


# Through a launcher: the command below starts a process as srun would, in another folder


def launcher(*words: str) -> list[str]:
    return ["--launcher", shlex.join(words)]


def test_a_launcher_compares_what_the_nodes_of_the_job_see(root):
    twice = "for i in 0 1; do printf '%s: ' $i; \"$@\"; done"  # as srun --label prints it
    ran = run_ckptctl("preflight", root, "--json", *launcher("bash", "-c", twice, "srun"))
    document = validated(ran.stdout)
    assert (ran.returncode, document["path"]) == (0, f"{root}/step_300")
    assert len(document["nodes"]) == 3
    assert len({node["metadata"] for node in document["nodes"]}) == 1


def test_a_storage_that_only_this_node_sees_is_75(root, tmp_path):
    # The other node has a folder of the same name, on another disk.
    (tmp_path / "other").mkdir()
    swap = f'here={root} there={tmp_path}/other; exec "${{@//$here/$there}}"'
    ran = run_ckptctl("preflight", root, *launcher("bash", "-c", swap, "srun"))
    assert (ran.returncode, ran.stdout) == (75, "")
    assert f"{socket.gethostname()} cannot read the root" in ran.stderr
    assert ran.stderr.startswith("waiting for the processes that bash starts, at most ")
    (tmp_path / "other" / "step_300").mkdir()
    shutil.copy(root / "step_300" / ".metadata", tmp_path / "other" / "step_300")
    ran = run_ckptctl("preflight", root, *launcher("bash", "-c", swap, "srun"))
    assert (ran.returncode, ran.stdout) == (75, "")
    assert "sees other names under the root" in ran.stderr


def test_the_probe_of_a_launcher_is_compared_in_both_directions_and_removed(root, tmp_path):
    ran = run_ckptctl("preflight", root, "--probe-storage", *launcher("env"))
    assert ran.returncode == 0, ran.stderr
    # Each of the two wrote 67 MB; each read its own or the other's, and this one both.
    assert "201 MB written, read back and compared" in ran.stderr
    assert not (root / ".ckptctl").exists()
    # A node that reads other bytes than were written here.
    spoil = f"f=$(ls {root}/.ckptctl/probe-*/3.bin); printf x >> /dev/null; "
    spoil += 'dd if=/dev/zero of=$f bs=4096 count=1 seek=9 conv=notrunc status=none; exec "$@"'
    ran = run_ckptctl("preflight", root, "--probe-storage", *launcher("bash", "-c", spoil, "srun"))
    assert (ran.returncode, ran.stdout) == (11, "")
    assert "the storage does not return what was written" in ran.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["no-such-launcher"], 2, "there is no command"),
        (["false"], 75, "ended with 1"),
        (["bash", "-c", "echo no nodes left >&2; exit 3"], 75, "no nodes left"),
        (["true"], 75, "printed no report"),
        (["bash", "-c", """echo '{"schema": "ckptctl.node/1"'"""], 75, "cannot be read"),
        (
            ["bash", "-c", """echo '{"schema": "ckptctl.node/1", "roots": [{"host": "a"}]}'"""],
            75,
            "sees other names",
        ),
        (["bash", "-c", """echo '{"schema": "ckptctl.node/1", "roots": []}'"""], 75, "cannot"),
        (
            ["bash", "-c", """echo '{"schema": "ckptctl.node/1", "roots": [{"host": 1}]}'"""],
            75,
            "cannot be read",
        ),
    ],
)
def test_a_launcher_that_fails_says_so(root, words, code, says):
    ran = run_ckptctl("preflight", root, *launcher(*words))
    assert (ran.returncode, ran.stdout) == (code, ""), ran.stderr
    assert says in ran.stderr


def test_a_launcher_that_never_ends_is_ended(root):
    ran = run_ckptctl("preflight", root, "--timeout", "0.3", *launcher("bash", "-c", "sleep 600"))
    assert (ran.returncode, ran.stdout) == (75, "")
    assert "did not end within 3 s" in ran.stderr


def test_the_report_of_a_node_holds_to_its_schema(root):
    ran = run_ckptctl("preflight", root, "--node-report", f"{root}/step_300")
    assert ran.returncode == 0
    assert len(ran.stdout.splitlines()) == 1
    assert validated(ran.stdout)["roots"][0]["n_names"] == 3


# Ranks and saves


def recorded(root: Path, name: str, step: int | None, world_size: int) -> None:
    """The record of a resume, as ckptctl.train leaves it."""
    attempts = root / ".ckptctl" / "attempts"
    attempts.mkdir(parents=True, exist_ok=True)
    record = {"schema": "ckptctl.resume/1", "step": step, "world_size": world_size}
    (attempts / f"{name}.resume.json").write_text(json.dumps(record))


def test_a_shard_file_of_every_rank_that_wrote_is_demanded_where_a_record_counts_them(root):
    recorded(root, "20261120T000000.000000Z-00000001", None, 2)
    found = ckptctl.preflight(str(root))
    assert (found.exit_code, outcomes(found)["writers"]) == (0, CheckOutcome.OK)
    # A later resume from the chosen step itself says nothing of who wrote it.
    recorded(root, "20261122T000000.000000Z-00000003", 300, 8)
    assert ckptctl.preflight(str(root)).exit_code == 0
    recorded(root, "20261121T000000.000000Z-00000002", 200, 4)
    found = ckptctl.preflight(str(root))
    assert (found.path, found.exit_code) == (None, 11)
    assert "4 ranks wrote it" in found.message
    assert "no shard file of rank 2, 3; --saved-world-size 2 states" in found.message
    assert ckptctl.preflight(str(root), saved_world_size=2).exit_code == 0
    assert ckptctl.preflight(str(root), saved_world_size=4).step is None


@pytest.mark.parametrize(
    "content", ["", "{", "[" * 5000, "[]", '{"world_size": true}', '{"step": 200}', None]
)
def test_a_resume_report_that_cannot_be_read_is_a_warning_and_no_older_one_is_believed(
    root, content
):
    recorded(root, "20261120T000000.000000Z-00000001", None, 8)
    newest = root / ".ckptctl" / "attempts" / "20261121T000000.000000Z-00000002.resume.json"
    if content is None:
        newest.mkdir()
    else:
        newest.write_text(content)
    done = run_ckptctl("preflight", root, "--json")
    document = validated(done.stdout)
    assert (document["exit_code"], document["step"]) == (0, 300)
    (check,) = [one for one in document["checks"] if one["name"] == "writers"]
    assert check["outcome"] == "warning"
    assert check["message"].startswith(f".ckptctl/attempts/{newest.name} cannot be read, so how")
    shutil.rmtree(newest) if content is None else newest.unlink()
    assert ckptctl.preflight(str(root)).exit_code == 11


def test_the_environment_says_how_many_ranks_there_will_be():
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "4", "SLURM_GPUS_ON_NODE": "8"}
    assert ranks_in(cluster_context(slurm)) == (32, "4 nodes of 8 GPUs")
    per_node = {**slurm, "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}
    assert ranks_in(cluster_context(per_node)) == (32, "4 nodes of 8 GPUs")
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "16"}
    assert ranks_in(cluster_context(torchrun)) == (16, "torchrun")
    assert ranks_in(cluster_context({"SLURM_JOB_ID": "1"})) is None


@pytest.mark.parametrize(
    ("world_size", "outcome", "says"),
    [
        (2, CheckOutcome.OK, "2 ranks, as saved"),
        (None, CheckOutcome.OK, "saved by 2 ranks; compare with --world-size N"),
        (1, CheckOutcome.WARNING, "1 rank, saved by 2: reshard on load"),
        (4, CheckOutcome.WARNING, "4 ranks, saved by 2: reshard on load"),
    ],
)
def test_capacity_compares_ranks_with_those_that_saved(root, world_size, outcome, says):
    found = ckptctl.preflight(str(root), world_size=world_size)
    assert outcomes(found)["capacity"] is outcome
    assert message(found, "capacity").startswith(says)


def test_fewer_ranks_come_with_the_numbers_for_going_on_and_for_waiting(root):
    chosen = ckptctl.verify(f"{root}@300")
    check = check_capacity(1, "", chosen)
    assert check.message.endswith("50 % of the ranks; or wait for 1 more")


@pytest.mark.parametrize(
    ("world_size", "says"),
    [
        (2, "2 ranks, saved by 2 or more"),
        (4, "4 ranks, saved by 2 or more"),
        (None, "saved by at least 2 ranks; compare with --world-size N"),
        (1, "1 rank, saved by 2 or more: reshard on load"),
    ],
)
def test_a_lower_bound_of_the_ranks_that_saved_is_not_taken_for_their_number(
    root, world_size, says
):
    chosen = replace(
        ckptctl.verify(f"{root}@300"), world_size=WorldSize(2, "shard-files", at_least=True)
    )
    assert check_capacity(world_size, "", chosen).message.startswith(says)


@pytest.mark.parametrize(
    ("world_size", "capacity"),
    [(1, "smaller"), (2, "as-saved"), (4, "larger"), (None, "unknown")],
)
def test_the_ranks_are_compared_with_those_that_saved(root, world_size, capacity):
    found = ckptctl.preflight(str(root), world_size=world_size)
    assert (found.exit_code, found.capacity.value) == (0, capacity)


def test_the_comparison_of_the_ranks_is_printed_for_a_script(root):
    ran = run_ckptctl("preflight", root, "--world-size", "1", "--print-capacity")
    assert (ran.stdout, ran.returncode) == ("smaller\n", 0)
    assert "1 rank, saved by 2" in ran.stderr


def test_the_work_behind_the_chosen_step_is_counted_from_the_log(root, tmp_path):
    log = tmp_path / "train.jsonl"
    rows = [
        {"step": n, "loss": 3 - n / 1000, "tokens": n * 4096, "time": 1e9 + 2 * n}
        for n in range(350)
    ]
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = ckptctl.preflight(str(root), logs=[str(log)])
    assert message(found, "recompute").startswith("computed again: 319 steps, 1,306,624 tokens")
    assert message(found, "recompute").endswith("(from step 30 to step 349)")
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:20]))
    found = ckptctl.preflight(str(root), logs=[str(log)])
    assert outcomes(found)["recompute"] is CheckOutcome.WARNING
    log.write_text("nothing to see\n")
    assert ckptctl.preflight(str(root), logs=[str(log)]).exit_code == 0
    assert run_ckptctl("preflight", root, "--log", tmp_path / "gone.log").returncode == 2


# The probe


class Forgetful(LocalStore):
    """A file system that loses a block of the third file that is written to it."""

    def put_pieces(self, path, pieces, size):
        super().put_pieces(path, pieces, size)
        if path.endswith("/2.bin"):
            with open(f"{self.url}/{path}", "r+b") as file:
                file.seek(5 << 20)
                file.write(bytes(4096))


def probed(store: LocalStore) -> ckptctl.Check:
    with StorageProbe(store) as probe:
        written = probe.write()
        return check_probe([written], [probe.compare(written)])


def test_a_storage_that_gives_back_what_was_written_is_ok_and_left_as_it_was(root):
    before = sorted(root.rglob("*"))
    check = probed(LocalStore(str(root)))
    assert check.outcome is CheckOutcome.OK
    assert check.message.startswith("67 MB written, read back and compared")
    assert sorted(root.rglob("*")) == before


def test_a_lost_block_is_a_failure_that_pages_someone_and_the_folder_is_gone(root):
    check = probed(Forgetful(str(root)))
    assert (check.outcome, check.exit_code) == (CheckOutcome.FAILED, 11)
    assert (
        "file 2: 4,096 bytes of zeros from 5,242,880 to 5,246,975 are not what was written"
        in check.message
    )
    assert not (root / ".ckptctl").exists()


def test_what_others_keep_below_ckptctl_stays(root):
    (root / ".ckptctl").mkdir()
    (root / ".ckptctl" / "root.json").write_text("{}")
    assert probed(LocalStore(str(root))).outcome is CheckOutcome.OK
    assert [one.name for one in (root / ".ckptctl").iterdir()] == ["root.json"]


def test_an_object_store_is_not_probed():
    with pytest.raises(UsageError, match="for file systems"):
        ckptctl.preflight("memory://nothing/here", allow_fresh=True, probe_storage=True)


# The command


def test_the_path_stands_alone_on_standard_output_and_the_checks_beside_it(root):
    done = run_ckptctl("preflight", root)
    assert (done.returncode, done.stdout) == (0, f"{root}/step_300\n")
    assert done.stderr.startswith("ready: resume from step 300\n")
    assert "  ok       storage   " in done.stderr
    done = run_ckptctl("preflight", root, "-q")
    assert (done.stdout, done.stderr) == (f"{root}/step_300\n", "")


def test_a_failure_is_an_error_with_nothing_on_standard_output(root):
    done = run_ckptctl("preflight", root, "--room-for", 10**9)
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.endswith(f"next: ckptctl prune {root} --keep 3\n")


@pytest.mark.parametrize("broken", [(), (300,), (200, 300), (100, 200, 300)])
def test_the_document_holds_to_its_schema(root, broken):
    for number in broken:
        cut(root, number)
    done = run_ckptctl("preflight", root, "--json", "--world-size", 1)
    document = validated(done.stdout)
    assert document["exit_code"] == done.returncode == (11 if len(broken) == 3 else 0)
    assert document["step"] == {0: 300, 1: 200, 2: 100, 3: None}[len(broken)]
    assert document["pick"]["passed_over"] or not broken


def test_a_storage_that_is_not_mounted_is_75(tmp_path):
    assert run_ckptctl("preflight", tmp_path / "not" / "there").returncode == 75

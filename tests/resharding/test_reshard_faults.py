"""Nothing is published unless it is complete, whatever fails in source, target or process."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import COMMAND, clean_environment, run_on_full_disk, validated
from damage import flip
from made_steps import grid, write_step
from next_commands import run_and_follow as run_ckptctl

import ckptctl
from ckptctl.formats.dcp.metadata import decode_metadata
from ckptctl.model import Level

pytestmark = pytest.mark.torch


@pytest.fixture
def source(checkpoints: Path, copy_of: Callable[[Path], Path]) -> Path:
    return copy_of(checkpoints / "run_fsdp4" / "step_300")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "new").mkdir()
    return tmp_path / "new" / "step_300"


def place_of(step: Path, fqn: str) -> tuple[Path, int, int]:
    """The shard file of the first record of an entry, and where its bytes begin and end."""
    read = decode_metadata((step / ".metadata").read_bytes())
    if fqn in read.tensors:
        found = read.tensors[fqn].chunks[0].byte_range
    else:
        found = read.bytes_entries[fqn].byte_range
    assert found is not None
    return step / found.file, found.offset, found.end


def check_refused(answer: ckptctl.Reshard, target: Path, code: str, exit_code: int) -> None:
    assert not answer.written
    assert answer.exit_code == exit_code
    assert code in [finding.code for finding in answer.report.findings]
    assert not target.exists()
    picked = ckptctl.pick(str(target.parent), allow_fresh=True)
    assert picked.chosen is None


def test_a_bit_that_flipped_in_elements_ends_it_with_the_finding(source, target):
    path, start, _ = place_of(source, "model.up.weight")
    flip(path, start + 800)
    answer = ckptctl.reshard(str(source), str(target), world_size=3)
    check_refused(answer, target, "record.crc", 21)
    (finding,) = [f for f in answer.report.findings if f.code == "record.crc"]
    assert finding.where == path.name
    assert "model.up.weight" in finding.message


def test_a_bit_that_flipped_in_an_entry_that_is_no_tensor_is_seen(source, target):
    fqn = "optimizer.param_groups.0.lr"
    path, start, end = place_of(source, fqn)
    data = path.read_bytes()[start:end]
    flip(path, start + data.index(b"G?"))  # the value of a float in its pickle
    answer = ckptctl.reshard(str(source), str(target), world_size=3)
    check_refused(answer, target, "record.crc", 21)


def test_a_lost_shard_file_is_refused(source, target):
    (source / "__2_0.distcp").unlink()
    answer = ckptctl.reshard(str(source), str(target), world_size=3)
    check_refused(answer, target, "shard.missing", 20)


def test_a_shard_file_that_is_cut_short_is_refused(source, target):
    path = source / "__2_0.distcp"
    os.truncate(path, path.stat().st_size - 1)
    answer = ckptctl.reshard(str(source), str(target), world_size=3)
    check_refused(answer, target, "shard.truncated", 20)


def test_metadata_that_does_not_decode_is_refused(source, target):
    os.truncate(source / ".metadata", 1000)
    answer = ckptctl.reshard(str(source), str(target), world_size=3)
    check_refused(answer, target, "metadata.unreadable", 21)


def test_a_rejected_step_is_refused(source, target):
    ckptctl.mark(str(source), ckptctl.MarkKind.REJECTED, reason="loss spike")
    answer = ckptctl.reshard(str(source), str(target), world_size=3)
    check_refused(answer, target, "step.rejected", 27)


def test_what_is_there_is_never_replaced(source, target):
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ckptctl.UsageError, match="it already exists"):
        ckptctl.reshard(str(source), str(target), world_size=3)
    assert [path.name for path in target.iterdir()] == ["notes.txt"]


def test_a_name_that_makes_it_another_step_is_refused(source, target):
    newer = target.with_name("step_9999")
    with pytest.raises(ckptctl.UsageError, match="pick would treat it as step 9999"):
        ckptctl.reshard(str(source), str(newer), world_size=3, apply=False)
    assert not newer.exists()


def test_the_source_is_not_touched(source, target):
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in source.rglob("*")}
    assert ckptctl.reshard(str(source), str(target), world_size=3).written
    assert before == {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in source.rglob("*")
    }


def test_killed_at_any_moment_nothing_is_published_and_the_same_call_goes_on(source, target):
    words = ["reshard", source, target, "--world-size", 5, "--apply", "--jobs", 1]
    began_s = time.monotonic()
    assert run_ckptctl(*words).returncode == 0
    took_s = time.monotonic() - began_s
    shutil.rmtree(target.parent)
    target.parent.mkdir()
    chance = random.Random(7)
    n_killed = 0
    for _ in range(12):
        process = subprocess.Popen(
            [*COMMAND, *map(str, words)],
            env=clean_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(chance.uniform(0.1, 0.9) * took_s)
        process.send_signal(signal.SIGKILL)
        n_killed += process.wait() == -signal.SIGKILL
        if target.exists():
            report = ckptctl.verify(str(target), level=Level.CONTENT, require_seal=True)
            assert report.usable, report.findings
            if n_killed:
                break
            # The call that was measured was slower than the one that ended here.
            shutil.rmtree(target)
            took_s /= 2
        assert ckptctl.pick(str(target.parent), allow_fresh=True).chosen is None
    assert n_killed
    if not target.exists():
        assert run_ckptctl(*words).returncode == 0
    report = ckptctl.verify(str(target), level=Level.CONTENT, require_seal=True)
    assert report.usable, report.findings


def test_what_an_interrupted_call_left_is_removed_by_the_one_that_goes_on(source, target):
    def interrupt(*_: int) -> None:
        # However long the first file takes; while the step is sealed, all of them are written.
        if [*target.parent.rglob("step_300.written")]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ckptctl.reshard(str(source), str(target), world_size=5, jobs=1, on_progress=interrupt)
    (journal,) = target.parent.rglob("step_300.written")
    (journal / ".ckptctl-0123456789abcdef.tmp").touch()
    assert ckptctl.reshard(str(source), str(target), world_size=5).written
    assert {path.name for path in target.parent.iterdir()} == {target.name, ".ckptctl"}


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A step with a tensor whose records are longer than what is read to open one."""
    import torch

    step = tmp_path / "large" / "step_300"
    weight = torch.arange(64 * 256, dtype=torch.float32).reshape(64, 256)
    write_step(step, {"model.w": (weight, grid((64, 256), [[16, 32, 48], []]))}, {"step": 300})
    return step


def test_files_that_are_written_and_proven_are_not_written_again(target, tmp_path):
    import torch

    step = tmp_path / "run" / "step_300"
    whole = (torch.ones(2048), [((0,), (2048,))])  # in the last file, which is then the longest
    rows = (torch.zeros(64, 256), grid((64, 256), [[16, 32, 48], []]))
    write_step(step, {"model.w": rows, "model.v": whole}, {"step": 300})
    done = run_on_full_disk(
        27_000, "reshard", step, target, "--world-size", 3, "--apply", "--jobs", 1
    )
    assert done.returncode == 75
    answer = ckptctl.reshard(str(step), str(target), world_size=3)
    assert (answer.written, answer.continued) == (True, 2)
    assert ckptctl.verify(str(target), level=Level.CONTENT, require_seal=True).usable
    assert {path.name for path in target.parent.iterdir()} == {"step_300", ".ckptctl"}


def test_what_was_made_of_damaged_bytes_is_made_again(large, target):
    path, start, _ = place_of(large, "model.w")
    flip(path, start + 9000)
    check_refused(ckptctl.reshard(str(large), str(target), world_size=3), target, "record.crc", 21)
    flip(path, start + 9000)
    answer = ckptctl.reshard(str(large), str(target), world_size=3)
    assert (answer.written, answer.continued) == (True, 0)
    assert ckptctl.verify(str(target), level=Level.CONTENT, require_seal=True).usable


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte, where this machine may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine mounts nothing")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_said_before_anything_is_written(source, small_disk):
    with pytest.raises(ckptctl.StorageUnavailable, match="are free; nothing was written"):
        ckptctl.reshard(str(source), str(small_disk / "step_300"), world_size=3)
    assert [*small_disk.iterdir()] == []


def test_a_target_that_cannot_be_written_to_is_said_so(source, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    target = small_disk / "step_300"
    done = run_ckptctl("reshard", source, target, "--world-size", 3, "--apply", "--json")
    assert done.returncode in (75, 77), done.stderr
    assert validated(done.stdout)["code"] in ("storage.denied", "storage.unavailable")
    assert [*small_disk.iterdir()] == []


def test_a_disk_that_fills_up_meanwhile_leaves_nothing_half_written(source, target):
    done = run_on_full_disk(20_000, "reshard", source, target, "--world-size", 3, "--apply")
    assert done.returncode == 75, done.stderr
    assert "File too large" in done.stderr
    assert not target.exists()
    assert not [*target.parent.rglob("*.tmp")]

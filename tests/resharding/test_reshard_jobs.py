"""Real ranks load a step that was resharded for them, and several processes can write one."""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from command_line import COMMAND, REPOSITORY, clean_environment, torch_server
from damage import flip
from services.processes import free_port

import ckptctl
from ckptctl.formats.dcp.metadata import decode_metadata
from ckptctl.model import Level

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def job(*words: object) -> str:
    """Run `fsdp2_job`; all its ranks are forked from one process that has imported torch."""
    paths = f"{Path(__file__).parent}:{REPOSITORY}"
    words = ("-m", "fsdp2_job", *map(str, words))
    done = torch_server().run(words, env=clean_environment(PYTHONPATH=paths))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of a job of four FSDP2 ranks, with its optimizer."""
    step: Path = tmp_path_factory.mktemp("job") / "step_7"
    job("save", step, "--ranks", 4)
    return step


def test_three_fsdp2_ranks_load_the_same_values_each_from_a_file_of_its_own(saved, tmp_path):
    target = tmp_path / "step_7"
    assert ckptctl.reshard(str(saved), str(target), world_size=3).written
    said = job("compare", saved, target, "--ranks", 3)
    assert said.count("values are the same") == 3
    read = decode_metadata((target / ".metadata").read_bytes())
    for chunk in read.tensors["model.up.weight"].chunks:
        assert chunk.byte_range is not None
        rank = int(chunk.byte_range.file.split("_")[2])
        assert chunk.offsets[0] == rank * 22


def test_ranks_with_tensor_parallelism_load_the_same_values(saved, tmp_path):
    target = tmp_path / "step_7"
    assert ckptctl.reshard(str(saved), str(target), world_size=4).written
    said = job("compare", saved, target, "--ranks", 4, "--tp", 2)
    assert said.count("values are the same") == 4


def torchrun(source: object, target: object, n: int, **environment: str) -> subprocess.Popen[str]:
    python = torch_server().python
    words = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(n), "--no-python"]
    words += [
        python,
        "-m",
        "ckptctl",
        "reshard",
        str(source),
        str(target),
        "--world-size",
        "5",
        "--apply",
    ]
    return subprocess.Popen(
        words,
        env=clean_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_processes_of_torchrun_write_one_step(checkpoints, tmp_path):
    target = tmp_path / "step_300"
    process = torchrun(checkpoints / "run_fsdp4" / "step_300", target, 3)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.count(f"resharded {target}") == 1
    assert out.count(str(target)) == 2  # the answer and its next command, of one process
    report = ckptctl.verify(str(target), level=Level.CONTENT, require_seal=True)
    assert report.usable, report.findings
    assert {*tmp_path.iterdir()} == {target, tmp_path / ".ckptctl"}


KILLED = """
import os, signal
from ckptctl.resharding import executing
real = executing._Work.write_shards
def killed(work, own):
    {}
    os.kill(os.getpid(), signal.SIGKILL)
executing._Work.write_shards = killed
from ckptctl.cli.main import main
main()
"""


@pytest.mark.parametrize("before", ["pass", "real(work, own)"], ids=["before", "after"])
def test_a_process_that_is_lost_means_that_nothing_is_published(checkpoints, tmp_path, before):
    """Killed before it has written its share, and after."""
    source, target = checkpoints / "run_fsdp4" / "step_300", tmp_path / "step_300"
    words = ["reshard", source, target, "--world-size", 5, "--apply"]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    first, lost = (
        subprocess.Popen(
            [*command, *map(str, words)],
            env=clean_environment(RANK=str(rank), **place),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, command in enumerate((COMMAND, (sys.executable, "-c", KILLED.format(before))))
    )
    try:
        _, err = first.communicate()
        lost.communicate()
    finally:
        first.kill()
    assert (first.returncode, lost.returncode) == (75, -signal.SIGKILL), err
    assert not target.exists()
    assert ckptctl.pick(str(tmp_path), allow_fresh=True).chosen is None


@pytest.mark.parametrize("damaged", [0, -1])
def test_damage_that_one_process_finds_ends_all_with_its_exit_code(
    checkpoints, copy_of, tmp_path, damaged
):
    source, target = copy_of(checkpoints / "run_fsdp4" / "step_300"), tmp_path / "step_300"
    tensor = decode_metadata((source / ".metadata").read_bytes()).tensors["model.up.weight"]
    place = tensor.chunks[damaged].byte_range  # which one of the two processes copies
    assert place is not None
    flip(source / place.file, place.offset + 800)
    words = ["reshard", source, target, "--world-size", 4, "--apply"]
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [*COMMAND, *map(str, words)],
            env=clean_environment(RANK=str(rank), **environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [21, 21], said
    assert "does not match" in said[0][0] + said[0][1] or "CRC-32" in said[0][0] + said[0][1]
    assert not target.exists()


@pytest.mark.server
@pytest.mark.parametrize("client", ["obstore", "s3fs"])
def test_a_step_goes_to_an_object_store_and_back(s3, client, checkpoints, tmp_path):
    source = checkpoints / "run_fsdp4" / "step_300"
    there = f"s3://{s3.bucket}/{uuid.uuid4().hex}/step_300"
    options = {**s3.options, "client": client}
    answer = ckptctl.reshard(str(source), there, world_size=3, storage_options=options)
    assert answer.written, answer.report.findings
    report = ckptctl.verify(there, level=Level.CONTENT, require_seal=True, storage_options=options)
    assert report.usable, report.findings
    back = tmp_path / "step_300"
    again = ckptctl.reshard(there, str(back), world_size=4, storage_options=options)
    assert again.written, again.report.findings
    for fqn, tensor in decode_metadata((source / ".metadata").read_bytes()).tensors.items():
        ours = decode_metadata((back / ".metadata").read_bytes()).tensors[fqn]
        assert {c.offsets for c in ours.chunks} == {
            c.offsets for c in tensor.chunks if 0 not in c.sizes
        }
    with pytest.raises(ckptctl.UsageError, match="already exists"):
        ckptctl.reshard(str(source), there, world_size=3, storage_options=options)


@pytest.mark.server
@pytest.mark.long
def test_on_an_object_store_too_a_step_becomes_a_file_and_the_file_a_step(s3, checkpoints):
    source = checkpoints / "run_fsdp4" / "step_300"
    root = f"s3://{s3.bucket}/{uuid.uuid4().hex}"
    options = s3.options
    for number, name in enumerate(("flat.pt", "model.safetensors", "served")):
        there, back = f"{root}/{name}", f"{root}/back/step_{number}"
        answer = ckptctl.convert(
            str(source), there, file_bytes=2000 if name == "served" else None,
            storage_options=options,
        )  # fmt: skip
        assert answer.written, answer.report.findings
        again = ckptctl.convert(
            there, back, world_size=2, accept_unverifiable=True, storage_options=options
        )
        assert again.written, again.report.findings
        compared = ckptctl.diff(str(source), back, values=True, storage_options=options)
        assert compared.n_by_checksum + compared.n_by_bytes == answer.n_tensors
        assert {one.what for one in compared.differences} <= {"layout", "only-in-a"}


@pytest.mark.server
def test_on_an_object_store_the_metadata_comes_last(s3, checkpoints, copy_of):
    source = copy_of(checkpoints / "run_fsdp4" / "step_300")
    read = decode_metadata((source / ".metadata").read_bytes())
    place = read.tensors["model.up.weight"].chunks[0].byte_range
    assert place is not None
    flip(source / place.file, place.offset + 800)
    root = f"s3://{s3.bucket}/{uuid.uuid4().hex}"
    answer = ckptctl.reshard(
        str(source), f"{root}/step_300", world_size=3, storage_options=s3.options
    )
    assert (answer.written, answer.exit_code) == (False, 21)
    picked = ckptctl.pick(root, allow_fresh=True, storage_options=s3.options)
    assert picked.chosen is None

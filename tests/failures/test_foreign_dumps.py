"""Logs and dumps of other users: what is named is read, what is found beside it is set aside."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
from command_line import run_ckptctl, validated
from second_user import UID, give, needs_root, open_to_all

CAUSE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
DUMP = pickle.dumps({"version": "2.4", "entries": [], "pg_config": {}}, 2)


@pytest.fixture
def place(place: Path) -> Path:
    """A folder that everybody can write, as `/tmp`."""
    return open_to_all(place)


def classified(*words: object, **variables: str) -> dict:
    done = run_ckptctl("classify", *words, "--json", env=variables)
    assert done.returncode == 0, done.stderr
    return validated(done.stdout)


@needs_root
def test_a_log_of_another_user_is_read_where_it_is_named(place: Path):
    (place / "job.log").write_text(CAUSE)
    give(place / "job.log")
    answer = classified(place / "job.log")
    assert (answer["failure"], answer["set_aside"]) == ("job-oom", [])


@needs_root
@pytest.mark.parametrize("below", ["", "deep"])
def test_a_log_of_another_user_is_set_aside_where_everybody_can_write(place: Path, below: str):
    (place / "mine.log").write_text("step 1 loss 2.0\n")
    planted = place / below / "rank1.log"
    planted.parent.mkdir(exist_ok=True)
    planted.write_text(CAUSE)
    give(planted, *([planted.parent] if below else []))
    answer = classified(place)
    assert (answer["failure"], answer["n_files"]) == ("unknown", 1)
    assert answer["set_aside"] == [f"{planted} belongs to uid {UID}"]
    shown = run_ckptctl("classify", place)
    assert f"set aside: {planted} belongs to uid {UID}" in " ".join(shown.stdout.split())
    place.chmod(0o755)
    assert (classified(place)["failure"], classified(place)["set_aside"]) == ("job-oom", [])


@needs_root
def test_a_dump_of_another_user_beside_a_log_is_set_aside(place: Path):
    (place / "job.log").write_text("step 1 loss 2.0\n")
    for rank in (0, 3):
        (place / f"nccl_trace_rank_{rank}").write_bytes(DUMP)
    give(place / "nccl_trace_rank_3")
    prefix = {"TORCH_FR_DUMP_TEMP_FILE": str(place / "nccl_trace_rank_")}
    for words, variables in (((place / "job.log",), {}), ((place / "job.log",), prefix)):
        answer = classified(*words, **variables)
        assert answer["n_dumps"] == 1
        assert answer["set_aside"] == [f"{place}/nccl_trace_rank_3 belongs to uid {UID}"]
    answer = classified(place / "job.log", "--flight-recorder", place)
    assert answer["n_dumps"] == 1
    assert answer["set_aside"] == [f"{place}/nccl_trace_rank_3 belongs to uid {UID}"]
    assert classified("--flight-recorder", place / "nccl_trace_rank_3")["n_dumps"] == 1


@needs_root
def test_dumps_of_the_user_whose_log_was_named_are_read(place: Path):
    (place / "job.log").write_text("step 1 loss 2.0\n")
    (place / "nccl_trace_rank_3").write_bytes(DUMP)
    give(place / "job.log", place / "nccl_trace_rank_3")
    answer = classified(place / "job.log")
    assert (answer["n_dumps"], answer["set_aside"]) == (1, [])


@needs_root
@pytest.mark.parametrize("what", ["link", "pipe"])
def test_a_link_or_pipe_of_another_user_is_refused_and_waits_for_nobody(place: Path, what: str):
    (place / "secret").write_text(CAUSE)
    log = place / "job.log"
    log.symlink_to(place / "secret") if what == "link" else os.mkfifo(log)
    give(log)
    done = run_ckptctl("classify", log)
    assert done.returncode == 2
    assert f"uid {UID}" in done.stderr
    assert "next: " in done.stderr
    os.lchown(log, 0, 0)
    if what == "link":
        assert classified(log)["failure"] == "job-oom"


@needs_root
def test_a_loss_log_of_another_user_is_refused_where_everybody_can_write(place: Path):
    rows = [json.dumps({"step": step, "loss": 2.0}) for step in range(1, 40)]
    (place / "train.jsonl").write_text("\n".join(rows) + "\n")
    give(place / "train.jsonl")
    done = run_ckptctl("loss", place)
    assert done.returncode == 2
    assert f"train.jsonl belongs to uid {UID}" in done.stderr
    assert run_ckptctl("loss", place / "train.jsonl").returncode != 2
    place.chmod(0o755)
    assert run_ckptctl("loss", place).returncode != 2

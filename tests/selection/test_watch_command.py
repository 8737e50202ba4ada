"""`ckptctl watch` beside a real training: a slow writer, one that is killed, a damaged shard."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import COMMAND, clean_environment, run_ckptctl, validated
from damage import flip_tensor

import ckptctl

TRAINING = Path(__file__).with_name("watched_training.py")


@pytest.mark.torch
@pytest.mark.slow
def test_a_training_is_watched_until_sigterm(tmp_path):
    root, notified = tmp_path / "run", tmp_path / "notified.jsonl"
    root.mkdir()
    watching = subprocess.Popen(
        [
            *(*COMMAND, "watch", str(root), "--grace", "4", "--interval", "0.2s", "--json"),
            *("--notify", f"tee -a {notified}"),
        ],
        stdout=subprocess.PIPE,
        env=clean_environment(),
        text=True,
    )
    try:
        trained = subprocess.run(
            [sys.executable, str(TRAINING), str(root)], env=clean_environment()
        )
        assert trained.returncode == -signal.SIGKILL
        shutil.copytree(root / "step_2", root / "step_6", ignore=shutil.ignore_patterns(".ckptctl"))
        flip_tensor(root / "step_6")
        found = {}
        while len(found) < 5:
            event = validated(watching.stdout.readline())
            assert event["number"] not in found, event
            found[event["number"]] = (event["event"], event["exit_code"])
        watching.send_signal(signal.SIGTERM)
        assert watching.wait() == 0
    finally:
        watching.kill()
        watching.communicate()
    assert found == {
        **dict.fromkeys((1, 2, 3), ("sealed", 0)),
        4: ("damaged", 20),
        6: ("damaged", 21),
    }
    assert notified.read_text().count('"schema": "ckptctl.watched/1"') == 2
    for number in (1, 2, 3):
        assert ckptctl.verify(f"{root}@{number}", require_seal=True).exit_code == 0
    again = run_ckptctl("watch", root, "--once", "--grace", 0, "--json")
    assert (again.returncode, again.stdout) == (0, "")


def test_once_ends_with_the_code_of_the_newest_damaged_step(framework_roots, copy_of):
    root = copy_of(framework_roots / "kempnerforge" / "checkpoints")
    flip_tensor(root / "step_20")
    (root / "step_10" / ".metadata").unlink()
    first = run_ckptctl("watch", root, "--once", "--grace", 0)
    assert (first.returncode, first.stdout.split(";")[0]) == (0, "nothing to report")
    done = run_ckptctl("watch", root, "--once", "--grace", 0, "--notify", "false")
    assert done.returncode == 21, done.stderr
    assert [text.split()[0] for text in done.stdout.splitlines() if not text.startswith(" ")] == [
        *("sealed", "damaged", "next:", "damaged", "next:")
    ]
    assert done.stderr.count("warning: --notify false ended with 1") == 2


@pytest.mark.parametrize(
    "mistake",
    [
        ("--bandwidth", "0"),
        ("--bandwidth", "9" * 400),
        ("--interval", "0"),
        ("--interval", "9" * 400),
        ("--notify", ""),
        ("--notify", "'"),
        ("--interval", "soon"),
    ],
)
def test_a_mistake_on_the_command_line_ends_with_2(tmp_path, mistake):
    done = run_ckptctl("watch", tmp_path, "--once", *mistake)
    assert done.returncode == 2, done.stderr
    assert mistake[0] in done.stderr


def test_a_command_that_cannot_be_started_is_a_warning(framework_roots, copy_of, tmp_path):
    root = copy_of(framework_roots / "kempnerforge" / "checkpoints")
    flip_tensor(root / "step_30")
    run_ckptctl("watch", root, "--once", "--grace", 0)
    done = run_ckptctl(
        "watch", root, "--once", "--grace", 0, "--quiet", "--notify", f"{tmp_path}/missing"
    )
    assert done.stdout == f"{root}/step_30\n"
    assert "could not be started: No such file" in done.stderr

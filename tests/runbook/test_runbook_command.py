"""`ckptctl runbook` on real checkpoint roots, in processes of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shlex
import shutil
import signal
import struct
import subprocess
import termios
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
from command_line import COMMAND, clean_environment, validated
from damage import flip
from next_commands import next_command
from next_commands import run_and_follow as run_ckptctl
from rb_7_inputs import RB_7, settings

from ckptctl.options import StorageOptions
from ckptctl.runbook.engine import _handed_on

AT = "2026-01-02T03:04:05Z"


def run(root: Path, *options: str):
    return run_ckptctl("runbook", "run", "rb-7", root, *SEEN, *options)


SEEN = settings(**RB_7)
RESUME = ("--set", 'RESUME=echo "$STEP" > "$ROOT/../resumed"')


def resumed(root: Path) -> str:
    return (root.parent / "resumed").read_text().strip()


def test_a_whole_step_is_resumed_from(root):
    done = run(root, "--yes", *RESUME)
    assert done.returncode == 31, done.stderr
    assert resumed(root) == str(root / "step_500")
    assert "the loss was not checked" in done.stdout


def test_a_damaged_step_is_rejected_and_the_next_older_one_taken(root):
    flip(root / "step_500" / "__1_0.distcp")
    done = run(root, "--yes", *RESUME)
    assert resumed(root) == str(root / "step_400")
    assert "expected: exit code 0: the step is whole" in done.stderr
    rejected = run_ckptctl("verify", root / "step_500", "--json")
    assert rejected.returncode == 27
    assert f"{root}/.ckptctl/runbooks/rb-7/" in rejected.stdout


def test_three_damaged_steps_are_a_matter_of_the_storage(root):
    for number in (500, 400, 300):
        flip(root / f"step_{number}" / "__1_0.distcp")
    done = run(root, "--yes", *RESUME)
    assert done.returncode == 11
    assert "nobody stated how far back is acceptable (OLDEST)" in done.stdout
    assert not (root.parent / "resumed").exists()


def test_an_interrupted_save_is_passed_over(root):
    (root / "step_500" / ".metadata").unlink()
    old = time.time() - 3600
    for path in (root / "step_500").iterdir():
        os.utime(path, (old, old))
    run(root, "--yes", *RESUME)
    assert resumed(root) == str(root / "step_400")


def test_an_empty_root_is_no_resume(tmp_path):
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty", "--yes", *RESUME).returncode == 10


def test_without_a_terminal_nothing_is_changed_unless_it_is_agreed_to(root):
    flip(root / "step_500" / "__1_0.distcp")
    done = run(root, *RESUME)
    assert done.returncode == 2
    assert "there is no terminal to ask at" in done.stderr
    assert "--yes" in done.stderr
    assert run_ckptctl("verify", root / "step_500").returncode != 27


def test_the_document_says_all_that_was_done(root):
    document = validated(run(root, "--yes", "--json", *RESUME).stdout)
    assert document["step"] == str(root / "step_500")
    assert document["events"][0]["event"] == "opened"
    assert document["events"][-1]["event"] == "finished"


@pytest.mark.parametrize("arguments", [("list",), ("show", "rb-7")])
def test_the_documents_of_the_other_actions_are_as_their_schema_says(arguments):
    document = validated(run_ckptctl("runbook", *arguments, "--json").stdout)
    assert "rb-7" in [book["name"] for book in document["runbooks"]]


def test_the_transcript_tells_every_step(root, tmp_path):
    flip(root / "step_500" / "__1_0.distcp")
    run(root, "--yes", "--transcript", str(tmp_path / "t"), *RESUME)
    markdown = (tmp_path / "t" / "transcript.md").read_text()
    for name in ("Locate: preflight", "Verify: verify", "Fallback: reject", "Resume: resume"):
        assert f"## {name}" in markdown


def test_ctrl_c_ends_the_command_and_the_run_goes_on_later(root):
    waiting = ("--set", "RESUME=touch $ROOT/../started; sleep 30")
    process = subprocess.Popen(
        [*COMMAND, "runbook", "run", "rb-7", str(root), "--yes", *SEEN, *waiting],
        env=clean_environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    while not (root.parent / "started").exists() and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130, said
    (following,) = [each for each in said.splitlines() if each.startswith("next:  ")]
    assert following.startswith(f"next:  ckptctl runbook run rb-7 {root} ")
    assert following.endswith(" --yes --continue")
    again = run(root, "--yes", "--continue", *RESUME)
    assert again.returncode == 2
    assert "its result is unknown" in again.stderr


def test_a_terminal_that_is_closed_ends_the_command_with_all_that_it_started(root):
    started = root.parent / "started"
    waiting = ("--set", "RESUME=echo $$ > $ROOT/../pid; mv $ROOT/../pid $ROOT/../started; sleep 30")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [
            "setsid",
            "--ctty",
            *COMMAND,
            "runbook",
            "run",
            "rb-7",
            str(root),
            "--yes",
            *SEEN,
            *waiting,
        ],
        env=clean_environment(TERM="dumb"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    # What is printed must be taken, or the command waits for room.
    while not started.exists() and process.poll() is None:
        if select.select([ours], [], [], 0.1)[0]:
            os.read(ours, 65536)
    child = int(started.read_text())
    os.close(ours)
    assert process.wait() == 129
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert "its result is unknown" in run(root, "--yes", "--continue", *RESUME).stderr


def read_until(ours: int, question: bytes) -> bytes:
    """What a run prints up to a question or its end; inputs that were not given are not typed."""
    seen, n_answered = b"", 0
    while question not in seen:
        try:
            seen += os.read(ours, 4096)
        except OSError:
            break
        if b"[l]eave here: " in seen[n_answered:] and b"was not given" in seen[n_answered:]:
            n_answered = len(seen)
            os.write(ours, b"n\n")
    return seen


def test_a_person_at_a_terminal_is_asked(root):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "runbook", "run", "rb-7", str(root), *SEEN, *RESUME],
        env=clean_environment(TERM="dumb"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        close_fds=True,
    )
    os.close(theirs)
    assert b"LOG was not given" in read_until(ours, b"Run it? ")
    os.write(ours, b"maybe\n")
    read_until(ours, b"Run it? ")
    os.write(ours, b"y\n")
    assert b"NEW_LOG was not given" in read_until(ours, b"record: ")
    assert process.wait() == 31
    os.close(ours)
    assert resumed(root) == str(root / "step_500")


def test_a_log_that_does_not_exist_is_asked_for_again(root):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "runbook", "run", "rb-7", str(root), *SEEN, *RESUME],
        env=clean_environment(TERM="dumb"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        close_fds=True,
    )
    os.close(theirs)
    seen, answers = b"", [b"gone.log\n", b"l\n"]
    while True:
        try:
            seen += os.read(ours, 4096)
        except OSError:
            break
        if seen.endswith(b"[l]eave here: ") and answers:
            os.write(ours, answers.pop(0))
    assert process.wait() == 93
    os.close(ours)
    _, _, behind = seen.partition(b"LOG was not given")
    assert b"gone.log does not exist." in behind
    assert behind.count(b"[l]eave here: ") == 2


def test_ctrl_c_at_a_narrow_terminal_leaves_an_error_that_begins_a_line(root):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 40, 0, 0))
    process = subprocess.Popen(
        ["setsid", "--ctty", *COMMAND, "runbook", "run", "rb-7", str(root), *SEEN, *RESUME],
        env=clean_environment(TERM="dumb"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen = read_until(ours, b"[n]o, [l]eave here: ")
    os.write(ours, b"\x03")
    with suppress(OSError):
        while data := os.read(ours, 4096):
            seen += data
    os.close(ours)
    assert process.wait() == 130
    lines = seen.decode().splitlines()
    asked = lines.index("  This changes something. Run it? [y]es,")
    assert lines[asked + 1] == "  [n]o, [l]eave here: ^C"
    assert lines[asked + 2].startswith("error: ended by SIGINT")
    assert lines[-1] == f"next:  ckptctl runbook run rb-7 {root} --continue"


def test_the_storage_runbook_finds_the_last_proven_step_however_old(root):
    for number in (500, 400, 300):
        flip(root / f"step_{number}" / "__1_0.distcp")
    done = run_ckptctl("runbook", "run", "storage-corruption", root, "--yes", "--json")
    document = validated(done.stdout)
    assert done.returncode == 0, done.stderr
    assert document["step"] == str(root / "step_200")
    ended = {each["block"]: each for each in document["events"] if each["event"] == "ended"}
    assert ended["probe"]["exit_code"] == 0
    assert any("all have damage in files of rank 1" in text for text in ended["probe"]["lines"])


@pytest.mark.server
@pytest.mark.slow
def test_a_run_on_an_object_store_is_continued_from_another_machine(s3, root):
    prefix = uuid.uuid4().hex
    for path in (root / "step_500").iterdir():
        key = f"{prefix}/step_500/{path.name}"
        s3.client.put_object(Bucket=s3.bucket, Key=key, Body=path.read_bytes())
    url = f"s3://{s3.bucket}/{prefix}"
    resume = ("--set", f'RESUME=echo "$STEP" > {root.parent}/resumed')
    here = {**s3.environment, "HOSTNAME": "here"}
    stopped = run_ckptctl("runbook", "run", "rb-7", url, *SEEN, *resume, env=here)
    assert stopped.returncode == 2
    assert "no terminal to ask at" in stopped.stderr
    options = ("--yes", "--continue", "--json", *SEEN)
    refused = run_ckptctl("runbook", "run", "rb-7", url, *options, env=here)
    assert refused.returncode == 2
    assert "RESUME from the record" in refused.stdout
    there = run_ckptctl("runbook", "run", "rb-7", url, *options, *resume, env=here)
    document = validated(there.stdout)
    assert document["continued"] is True
    assert document["exit_code"] == 31
    assert document["step"] == f"{url}/step_500"
    assert resumed(root) == f"{url}/step_500"


def test_the_storage_runbook_probes_where_only_the_newest_step_is_damaged(root):
    flip(root / "step_500" / "__1_0.distcp")
    done = run_ckptctl("runbook", "run", "storage-corruption", root, "--yes")
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "== Probe" in said
    assert "newer steps are damaged or unfinished" in said


def next_of(*arguments: object) -> tuple[int, list[str]]:
    done = run_ckptctl("runbook", "run", *arguments)
    command = next_command(done.stdout + done.stderr)
    return done.returncode, shlex.split(command)[3:] if command is not None else []


def test_several_damaged_steps_lead_to_the_runbook_for_the_storage(root):
    for step in root.glob("step_*"):
        flip(step / "__1_0.distcp")
    other = root.parent / "nvme"
    code, leads = next_of("rb-7", root, "--yes", *SEEN, "--optional-root", other)
    assert (code, leads) == (11, ["storage-corruption", str(root), "--optional-root", str(other)])
    done = run_ckptctl("runbook", "run", *leads, "--dry-run")
    assert done.returncode == 11
    assert next_command(done.stdout) == "ckptctl explain 11"


def test_a_decision_that_is_missing_leads_to_a_person_and_not_in_a_circle(root):
    log = root.parent / "job.log"
    log.write_text('Traceback (most recent call last):\n  File "a.py", line 3\nValueError: x\n')
    given = ("--set", f"LOG={log}", *RESUME)
    code, leads = next_of("rb-7", root, "--yes", *given)
    assert (code, leads) == (93, ["rb-7", str(root), "--continue"])
    assert next_of("rb-7", root, "--yes", "--continue")[1] == ["rb-7", str(root), "--continue"]


def test_an_input_behind_the_root_is_as_one_of_set(root):
    code, leads = next_of("rb-7", root, "--yes", *SEEN)
    words = [word for word in SEEN if word != "--set"]
    assert next_of("rb-7", root, "--yes", "--new", *words) == (code, leads)
    done = run_ckptctl("runbook", "run", "rb-7", "LEVEL=content")
    assert done.returncode == 2
    assert "next:  ckptctl runbook run rb-7 ROOT LEVEL=content" in done.stderr


def test_a_log_that_is_missing_is_named_in_the_next_command(root):
    code, leads = next_of("rb-7", root, "--yes", *SEEN)
    assert code == 31
    assert leads == ["rb-7", str(root), *SEEN, "--set", "NEW_LOG=LOG", "--yes", "--continue"]
    assert next_of("rb-7", root, "--new", "--set", "LEVEL=bogus") == (2, ["rb-7"])
    code, leads = next_of("rb-7", root, "--dry-run", *SEEN)
    assert (code, leads) == (31, ["rb-7", str(root), *SEEN])


def test_the_options_of_the_call_reach_the_commands_of_the_blocks(root):
    storage = StorageOptions(storage_options={"secret": "a b"}, timeout_s=120.0)
    page = _handed_on(storage, None)
    assert page == {"CKPTCTL_TIMEOUT": "120.0", "CKPTCTL_STORAGE_OPTION": r'secret="a\u0020b"'}


def test_three_damaged_steps_are_resumed_past_once_they_are_rejected(root):
    """The runbook for the storage leads past them as well, and neither leads to the other."""
    for number in (500, 400, 300):
        flip(root / f"step_{number}" / ".metadata")
    given = (*SEEN, *RESUME)
    code, leads = next_of("rb-7", root, "--yes", *given)
    assert (code, leads) == (11, ["rb-7", str(root), "--continue"])
    done = run_ckptctl("runbook", "run", "storage-corruption", root, "--yes")
    assert done.returncode == 0, done.stderr
    assert "it asks how far back is acceptable" in done.stdout
    for row in run_ckptctl("pick", root, "--print", "damaged").stdout.splitlines():
        step, why = row.split("\t")
        assert run_ckptctl("reject", step, "--reason", why).returncode == 0
    again = run(root, "--yes", "--new", *RESUME)
    assert again.returncode == 31, again.stderr
    assert resumed(root) == str(root / "step_200")


def test_train_state_that_no_step_has_is_no_matter_of_the_storage(checkpoints, tmp_path):
    root = Path(shutil.copytree(checkpoints / "run_bare4", tmp_path / "run"))
    done = run(root, "--yes", *RESUME)
    assert done.returncode == 11
    assert "lacks train state" in done.stdout
    assert "storage-corruption" not in (next_command(done.stdout + done.stderr) or "")

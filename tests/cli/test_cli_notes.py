"""Seal, reject, accept and pin, each in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import validated

KEY = "a key of thirty-two bytes or so."


def test_a_seal_is_written_and_then_required(ckptctl, sound_root):
    done = ckptctl("seal", f"{sound_root}@30")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"sealed {sound_root}/step_30\n")
    assert "seal.missing" not in done.stdout
    assert done.stdout.endswith(f"next: ckptctl verify {sound_root}/step_30 --require-seal\n")
    done = ckptctl("verify", f"{sound_root}@30", "--require-seal")
    assert done.returncode == 0
    assert done.stdout.startswith("✓ complete, every byte verified: ")
    assert ckptctl("pick", sound_root, "--before", "30", "--require-seal").returncode == 11


def test_quiet_seal_prints_where_it_is(ckptctl, sound_root):
    done = ckptctl("seal", f"{sound_root}@30", "-q")
    assert done.stdout == f"{sound_root}/step_30/.ckptctl/seal.json\n"
    assert json.loads(Path(done.stdout.strip()).read_text())["schema"] == "ckptctl.seal/1"


def test_a_step_that_is_not_whole_is_refused_with_the_reason(ckptctl, broken_root):
    done = ckptctl("seal", f"{broken_root}@30")
    assert done.returncode == 20
    assert "not sealed: the step is incomplete" in done.stdout
    assert "shard.missing" in done.stdout
    document = validated(ckptctl("seal", f"{broken_root}@30", "--json").stdout)
    assert (document["schema"], document["path"]) == ("ckptctl.sealed/1", None)
    assert ckptctl("seal", f"{broken_root}@30", "-q").stdout == ""


def test_a_second_seal_is_an_error_that_says_how(ckptctl, sound_root):
    assert validated(ckptctl("seal", f"{sound_root}@30", "--json").stdout)["replaced"] is False
    again = ckptctl("seal", f"{sound_root}@30", "--json")
    assert (again.returncode, validated(again.stdout)["code"]) == (2, "usage")
    assert "--replace" in again.stderr
    replaced = ckptctl("seal", f"{sound_root}@30", "--json", "--replace", "--jobs", "3")
    assert validated(replaced.stdout)["replaced"] is True


@pytest.fixture
def how_to_key(tmp_path):
    (tmp_path / "seal.key").write_text(KEY + "\n")
    (tmp_path / "seal.key").chmod(0o600)
    return {
        "file": (["--key-file", "seal.key"], {}),
        "environment": ([], {"CKPTCTL_SEAL_KEY": KEY}),
    }


@pytest.mark.parametrize("one", ["file", "environment"])
@pytest.mark.parametrize("other", ["file", "environment"])
def test_the_key_comes_from_a_file_or_from_the_environment(
    ckptctl, sound_root, how_to_key, one, other
):
    options, env = how_to_key[one]
    sealed = ckptctl("seal", f"{sound_root}@30", "--json", *options, env=env)
    assert validated(sealed.stdout)["kind"] == "sha256 with a key"
    options, env = how_to_key[other]
    verify = ("verify", f"{sound_root}@30", "--require-seal")
    assert ckptctl(*verify, *options, env=env).returncode == 0
    assert ckptctl(*verify, env={"CKPTCTL_SEAL_KEY": KEY[::-1]}).returncode == 22
    assert ckptctl(*verify).returncode == 22
    assert ckptctl("verify", f"{sound_root}@30").returncode == 0


def test_the_next_command_after_a_seal_has_its_key_file(ckptctl, sound_root, how_to_key):
    options, _ = how_to_key["file"]
    sealed = validated(ckptctl("seal", f"{sound_root}@30", "--json", *options).stdout)
    assert ckptctl(*sealed["next_command"].split()[1:]).returncode == 0


def test_nothing_is_written_through_a_link(ckptctl, sound_root, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (sound_root / "step_30" / ".ckptctl").symlink_to(tmp_path / "elsewhere")
    for command in (("reject", "--reason", "x"), ("seal",)):
        done = ckptctl(command[0], f"{sound_root}@30", *command[1:])
        assert (done.returncode, list((tmp_path / "elsewhere").iterdir())) == (2, [])


@pytest.mark.parametrize("content", [None, "", "\n", "short", "x" * 5000])
def test_a_key_file_that_holds_no_key_is_an_error(ckptctl, sound_root, tmp_path, content):
    if content is not None:
        (tmp_path / "seal.key").write_text(content)
        (tmp_path / "seal.key").chmod(0o600)
    done = ckptctl("seal", f"{sound_root}@30", "--key-file", "seal.key")
    assert (done.returncode, done.stdout) == (2, "")
    assert not (sound_root / "step_30" / ".ckptctl").exists()


def test_the_key_is_printed_nowhere(ckptctl, sound_root, how_to_key):
    options, env = how_to_key["environment"]
    for arguments in (["--json"], ["--debug"], ["--replace", "--debug"], []):
        done = ckptctl("seal", f"{sound_root}@30", *arguments, *options, env=env)
        assert KEY not in done.stdout + done.stderr


def test_reject_then_pick_is_the_way_back_and_accept_undoes_it(ckptctl, sound_root):
    rejected = ckptctl(
        "reject", f"{sound_root}@30", "--reason", "loss spike", "--evidence", "run 7", "--by", "ann"
    )
    assert (rejected.returncode, rejected.stderr) == (0, "")
    assert "by ann at " in rejected.stdout
    assert ": loss spike; see run 7" in rejected.stdout
    assert rejected.stdout.endswith(f"next: ckptctl pick {sound_root}\n")
    picked = ckptctl("pick", sound_root)
    assert picked.stdout == f"{sound_root}/step_20\n"
    assert "not step 30: rejected: rejected by ann" in picked.stderr
    shown = ckptctl("scan", sound_root)
    assert "step.rejected: rejected by ann" in shown.stdout
    assert ckptctl("verify", f"{sound_root}@30").returncode == 27
    accepted = ckptctl("accept", f"{sound_root}@30", "--reason", "the data", "--by", "bob")
    assert "lifted: rejected by ann at " in accepted.stdout
    assert ckptctl("pick", sound_root).stdout == f"{sound_root}/step_30\n"


def test_marks_in_a_file_leave_the_root_alone(ckptctl, sound_root, tmp_path):
    marks = ("--marks", "marks.jsonl")
    done = ckptctl("reject", f"{sound_root}@30", "--reason", "NaN", *marks)
    assert done.stdout.endswith(f"next: ckptctl pick {sound_root} --marks marks.jsonl\n")
    assert not (sound_root / "step_30" / ".ckptctl").exists()
    assert ckptctl("pick", sound_root, *marks).stdout == f"{sound_root}/step_20\n"
    by_variable = ckptctl("pick", sound_root, env={"CKPTCTL_MARKS": "marks.jsonl"})
    assert by_variable.stdout == f"{sound_root}/step_20\n"
    assert ckptctl("pick", sound_root).stdout == f"{sound_root}/step_30\n"


def test_a_pin_is_shown_and_taken_off(ckptctl, sound_root):
    assert (
        ckptctl("pin", f"{sound_root}@20", "--reason", "published", "--by", "ann").returncode == 0
    )
    assert "pinned by ann" in ckptctl("scan", sound_root).stdout
    assert "step.pinned" in ckptctl("verify", f"{sound_root}@20").stdout
    assert ckptctl("pin", f"{sound_root}@20", "--off").returncode == 0
    assert "pinned" not in ckptctl("scan", sound_root).stdout
    again = ckptctl("pin", f"{sound_root}@20", "--off")
    assert (again.returncode, "nothing was written" in again.stdout) == (0, True)


@pytest.mark.parametrize("command", ["reject", "accept", "confirm", "pin"])
def test_the_document_of_a_mark_is_as_its_schema_says(ckptctl, sound_root, command):
    words = ("--reason", "spike", "--json")
    if command == "accept":
        ckptctl("reject", f"{sound_root}@30", *words)
    document = validated(ckptctl(command, f"{sound_root}@30", *words).stdout)
    assert document["schema"] == "ckptctl.marked/1"
    words_of = {"reject": "rejected", "accept": "accepted", "confirm": "confirmed", "pin": "pinned"}
    assert document["mark"]["word"] == words_of[command]
    assert len(document["lifted"]) == (command == "accept")
    quiet = ckptctl(command, f"{sound_root}@30", "--reason", "again", "-q").stdout
    assert quiet == "" if command == "accept" else quiet.endswith(".json\n")


def test_a_rejection_without_a_reason_is_refused(ckptctl, sound_root):
    assert ckptctl("reject", f"{sound_root}@30").returncode == 2
    assert ckptctl("reject", f"{sound_root}@30", "--reason", " ").returncode == 2


def test_words_of_a_mark_are_printed_safely(ckptctl, sound_root):
    evil = "\x1b]0;evil\x07 \x1b[2J\nnext: rm -rf /"
    ckptctl("reject", f"{sound_root}@30", "--reason", evil)
    for command in (("verify", f"{sound_root}@30"), ("scan", sound_root), ("pick", sound_root)):
        done = ckptctl(*command)
        assert "\x1b" not in done.stdout + done.stderr
        assert "\nnext: rm" not in done.stdout + done.stderr


def test_a_train_state_of_another_step_is_found_by_its_count_and_by_the_seal(ckptctl, sound_root):
    ckptctl("seal", f"{sound_root}@30")
    other = (sound_root / "step_20" / "train_state.pt").read_bytes()
    (sound_root / "step_30" / "train_state.pt").write_bytes(other)
    faults = {}
    for level in ("structure", "content"):
        done = ckptctl("verify", f"{sound_root}@30", "--level", level, "--json")
        assert done.returncode == 21
        found = validated(done.stdout)["report"]["findings"]
        faults[level] = {(f["code"], f["where"]) for f in found if f["severity"] == "fault"}
    where = "train_state.pt"
    assert faults["structure"] == {("state.mixed", where), ("step.two-saves", where)}
    assert faults["content"] == {("state.mixed", where), ("seal.digest", where)}
    part = ckptctl("verify", f"{sound_root}@30", "--level", "content", "--subset", "1/2", "--json")
    assert validated(part.stdout)["report"]["level"] == "structure"

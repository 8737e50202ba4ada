"""Wrong calls: the message, the exit code and the next command of each.

Run in this process: a mistake is found before anything takes long.
"""

from __future__ import annotations

import os
import re
import shlex
import struct
import subprocess
from pathlib import Path

import pytest
from command_line import clean_environment, validated
from next_commands import follow

from ckptctl.cli.app import run
from ckptctl.cli.commands import load

_PLACEHOLDER = re.compile(
    r"\b(ROOT|STEP|SRC|DST|LOG|FILE|CMD|NAME|CODE|DIR|TIME|SIZE|TARGET)\b(?!=)"
)


@pytest.fixture
def folder(sound_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the root `run`, files of several kinds, and an empty folder; we are in it."""
    at = sound_root.parent
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (at / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    (at / "model.pt").write_bytes(b"PK\x03\x04" + bytes(100))
    for name in ("old.pt", "old"):
        (at / name).write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
    (at / "notes").write_text("hello\n")
    (at / "nothing").mkdir()
    (at / "nowhere").symlink_to("gone")
    monkeypatch.chdir(at)
    for name in [*os.environ]:
        if name.startswith("CKPTCTL_"):
            monkeypatch.delenv(name)
    return at


def called(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command line."""
    words = shlex.split(command)
    exit_code = run(words)
    said = capsys.readouterr()
    follow(words, exit_code, said.out + said.err, cwd=Path.cwd(), env=clean_environment())
    return exit_code, said.out, said.err


def next_of(said: str) -> str | None:
    lines = [line for line in said.splitlines() if line.startswith("next:")]
    return lines[-1].removeprefix("next:").strip() if lines else None


OPTIONS = [
    ("pick run --skip x", "ckptctl pick run --skip 1400,1600"),
    ("pick run --skip=x -q", "ckptctl pick run -q --skip 1400,1600"),
    ("preflight run --require brains", "ckptctl preflight run --require model,optimizer"),
    ("verify run@10 --require x", "ckptctl verify run@10 --require model,optimizer"),
    ("scan run --storage-option x", "ckptctl scan run --storage-option anon=true"),
    ("cost run --interval x", "ckptctl cost run --interval 5m"),
    (
        "verify run@10 --level content --deadline x",
        "ckptctl verify run@10 --level content --deadline 5m",
    ),
    (
        "verify run@10 --level content --subset 9/7",
        "ckptctl verify run@10 --level content --subset 1/7",
    ),
    ("verify run@10 --subset 1/7", "ckptctl verify run@10 --level content --subset 1/7"),
    ("reject run@10 --reason ''", "ckptctl reject run@10 --reason 'loss spike after the resume'"),
    ("reshard run@10 out", "ckptctl reshard run@10 out --world-size 8"),
    (
        "reshard run@10 out --world-size 2 --memory 1K",
        "ckptctl reshard run@10 out --world-size 2 --memory 256M",
    ),
    ("convert run@10 out --file-size x", "ckptctl convert run@10 out --file-size 1G"),
    ("convert run@10 out --world-size 2", "ckptctl reshard run@10 out --world-size 2"),
    ("classify notes --exit-code x", "ckptctl classify notes --exit-code 137"),
    ("runbook run rb-7 run --set x", "ckptctl runbook run rb-7 run --set LOG=train.log"),
    ("run --root run --backoff x -- true a", "ckptctl run --root run --backoff 5m -- true a"),
    (
        "run --root run --no-restart-on x -- true",
        "ckptctl run --root run --no-restart-on 1,137 -- true",
    ),
]


@pytest.mark.parametrize(("command", "better"), OPTIONS, ids=[given for given, _ in OPTIONS])
def test_a_wrong_option_is_put_right_in_the_words_of_the_caller(folder, capsys, command, better):
    exit_code, out, err = called(capsys, command)
    assert (exit_code, out) == (2, "")
    assert next_of(err) == better


@pytest.mark.parametrize(
    "command", ["run --root run", "run --root 'a b' --root run --max-restarts 5"]
)
def test_where_the_command_is_missing_all_other_words_are_kept(folder, capsys, command):
    exit_code, out, err = called(capsys, command)
    assert (exit_code, out) == (2, "")
    assert next_of(err) == f"ckptctl {command} -- CMD"


PLACES = [
    # What is asked of a root that is not there.
    ("scan gone", 10, "ckptctl scan .", "gone does not exist: check the path"),
    ("pick gone", 10, "ckptctl scan .", "check the path; for a new run, `pick` and"),
    ("pick --allow-fresh gone", 10, "ckptctl scan .", "a new run also needs --create"),
    ("verify gone@auto", 10, "ckptctl scan .", "for a new run, `pick` and `preflight` take"),
    ("preflight gone", 10, "ckptctl scan .", "`preflight` take --allow-fresh --create"),
    ("watch gone --once", 10, "ckptctl scan gone", "the job has not saved yet, or the path is"),
    ("prune gone --keep 1", 2, "ckptctl scan .", "gone does not exist"),
    ("cost gone --interval 1h", 2, "ckptctl scan .", "gone does not exist"),
    ("runbook run rb-7 gone --dry-run", 2, "ckptctl scan .", "gone does not exist"),
    ("doctor storage gone", 2, "ckptctl scan .", "gone does not exist"),
    ("loss notes --resume-report gone", 2, "ckptctl loss --help", "no resume report found"),
    ("show gone@10", 2, "ckptctl scan .", "gone does not exist"),
    ("verify gone", 2, "ckptctl scan .", "gone does not exist"),
    ("diff run@10 gone@10", 2, "ckptctl scan .", "gone does not exist"),
    # Nothing is mounted there.
    ("scan gone/deep", 75, "findmnt --real", "check that its file system is mounted"),
    ("prune gone/deep --keep 1", 75, "findmnt --real", "check that its file system is mounted"),
    ("cost gone/deep --interval 1h", 75, "findmnt --real", "check that its file system is mounted"),
    ("verify gone/deep@10", 75, "findmnt --real", "check that its file system is mounted"),
    ("scan nowhere", 75, "findmnt --real", "nowhere is a link to gone, which does not exist"),
    # A folder above, a step, a file, where a root is required.
    ("scan .", 2, "ckptctl scan run", "holds no steps itself, but run in it does"),
    ("prune run/step_10 --keep 1", 2, "ckptctl verify run/step_10", "is a step itself"),
    ("cost run/step_10 --mtbf 1h", 2, "ckptctl verify run/step_10", "is a step itself"),
    ("pick notes", 2, "ckptctl scan .", "notes is a file, not a folder that holds steps"),
    ("watch notes", 2, "ckptctl scan .", "notes is a file"),
    ("prune notes --keep 1", 2, "ckptctl scan .", "notes is a file"),
    ("cost notes --interval 1h", 2, "ckptctl scan .", "notes is a file"),
    ("show notes@10", 2, "ckptctl scan .", "notes is a file"),
    # A root, a file, a part of a step, where a step is wanted.
    ("verify run", 2, "ckptctl scan run", "or the newest as run@latest"),
    ("seal run@99", 2, "ckptctl scan run", "run holds no step 99"),
    ("verify nothing@latest", 2, "ckptctl scan nothing", "nothing holds no steps"),
    ("diff run@10 old.pt", 2, "ckptctl diff --help", "old.pt has the format from before torch 1.6"),
    (
        "show model.safetensors",
        2,
        "ckptctl convert model.safetensors model-dcp --accept-unverifiable",
        "it is named as a safetensors file",
    ),
    ("verify old", 2, "ckptctl explain format.unsupported", "has the format from before torch 1.6"),
    ("verify notes", 2, "ckptctl explain format.unsupported", "not a known checkpoint format"),
    ("verify run/step_10/.metadata", 2, "ckptctl verify run/step_10", "part of run/step_10"),
    ("pin run/step_10/__0_0.distcp", 2, "ckptctl verify run/step_10", "part of run/step_10"),
    ("accept run@10", 0, "ckptctl verify run/step_10", "nothing was written"),
    ("pin run@10 --off", 0, "ckptctl verify run/step_10", "nothing was written"),
    # What is behind a word that nobody knows.
    ("explain shard", 2, "ckptctl explain shard.empty", "the codes below it are shard.empty, "),
    (
        "explain shard.truncted",
        2,
        "ckptctl explain shard.truncated",
        "did you mean shard.truncated",
    ),
    ("explain job-om", 2, "ckptctl explain job-oom", "did you mean job-oom"),
    ("scn run", 2, "ckptctl scan run", "did you mean 'scan'"),
    # Several commands are close to this word; the first is meant.
    ("runbok list", 2, "ckptctl runbook list", "did you mean 'runbook', 'run'?"),
    ("scan run --lst 3", 2, "ckptctl scan --help", "--last"),
    ("runbook show rb-8", 2, "ckptctl runbook list", "there are gpu-fault, mfu-regression"),
    ("runbook list", 0, "ckptctl runbook show rb-7", "storage-corruption"),
    ("runbook run rb-7", 2, "ckptctl runbook run rb-7 ROOT", "on which checkpoint root"),
    ("runbook run rb-7 run --set NODES=1", 2, "ckptctl runbook show rb-7", "has no input 'NODES'"),
    # Names that are none, and options in the wrong place.
    ("scan ''", 2, "ckptctl scan --help", "the checkpoint root is empty"),
    ("loss ''", 2, "ckptctl loss --help", "'': No such file or directory"),
    ("classify ''", 2, "ckptctl classify --help", "'': No such file or directory"),
    ("scan s3://", 2, "ckptctl scan --help", "s3:// names no bucket"),
    ("verify @10", 2, "ckptctl scan .", "and before it the root: .@10"),
    ("verify run@newest", 2, "ckptctl scan run", "a step number, latest or auto"),
    ("convert run@10 .", 2, "ckptctl convert --help", ". already exists"),
    ("reshard run@10 .. --world-size 2", 2, "ckptctl reshard --help", ".. already exists"),
    ("scan run --last -1", 2, "ckptctl scan --help", "'--last': -1 is less than 0"),
    ("scan run --before x", 2, "ckptctl scan --help", "'x' is not a whole number"),
    (
        "pick run --before 5",
        11,
        "ckptctl verify run/step_10 --level content",
        "--before 5 excludes all of the 3 steps, 10 to 30",
    ),
    (
        "pick run --before 10",
        11,
        "ckptctl runbook run storage-corruption run",
        "--before 10 excludes all of the 3 steps, 10 to 30",
    ),
    ("--quiet pick run", 2, "ckptctl pick run --quiet", "options stand behind the command"),
    ("scan run --timeout nan", 2, "ckptctl scan run --timeout 120", "--timeout is nan s"),
]


@pytest.mark.parametrize(
    ("command", "code", "better", "says"), PLACES, ids=[given for given, *_ in PLACES]
)
def test_a_wrong_place_is_told_for_what_it_is(folder, capsys, command, code, better, says):
    exit_code, out, err = called(capsys, command)
    assert exit_code == code
    assert says in out + err
    assert next_of(out + err) == better


def test_a_placeholder_stands_only_where_the_caller_gave_no_word():
    given = [better for _, better in OPTIONS] + [better for _, _, better, _ in PLACES]
    with_one = [better for better in given if _PLACEHOLDER.search(better)]
    assert with_one == ["ckptctl runbook run rb-7 ROOT"]


@pytest.mark.parametrize("command", ["pick run --skip x", "scan gone/deep", "verify notes"])
def test_with_json_a_failure_is_one_document_with_the_same_next_command(folder, capsys, command):
    exit_code, out, err = called(capsys, f"{command} --json")
    document = validated(out)
    assert (document["schema"], document["exit_code"]) == ("ckptctl.error/1", exit_code)
    assert document["next_command"] == next_of(err)


def test_a_next_command_can_be_run_whatever_the_name_of_the_root(folder, capsys):
    strange = os.fsdecode(b'it\'s\xff "new\n"')
    os.rename("run", strange)
    assert run(["scan", strange]) == 0
    better = next_of(capsys.readouterr().out)
    expanded = subprocess.run(["bash", "-c", f"printf '%s\\0' {better}"], capture_output=True)
    words = [os.fsdecode(word) for word in expanded.stdout.split(b"\0")]
    assert words[:3] == ["ckptctl", "verify", f"{strange}/step_30"]


@pytest.mark.parametrize("command", ["verify", "show", "seal", "pin", "reject --reason x"])
def test_a_step_that_pick_is_to_find_ends_with_what_pick_says_of_the_root(folder, capsys, command):
    name, *more = command.split()
    exit_code, _, err = called(capsys, f"{name} nothing@auto {' '.join(more)}")
    assert (exit_code, next_of(err)) == (10, "ckptctl pick nothing --allow-fresh")
    assert exit_code in load(name).exit_codes


WRITTEN = [
    ("scan run --metrics notes", "--metrics", "not metrics of ckptctl"),
    ("verify run@10 --report run/step_10/.metadata", "--report", "not a document of ckptctl"),
    ("loss notes --report notes", "--report", "not a document of ckptctl"),
    ("scan run --report config.json", "--report", "not a document of ckptctl"),
    ("scan run --report ''", "--report", "an empty name"),
    ("loss notes --plot drawn.svg", "--plot", "not a plot of ckptctl"),
    (
        "run --root run --hosts-file notes.txt -- true",
        "--hosts-file",
        "not a list of nodes of ckptctl",
    ),
]


@pytest.mark.parametrize(("command", "option", "reason"), WRITTEN, ids=[row[0] for row in WRITTEN])
def test_a_file_that_ckptctl_did_not_write_is_not_overwritten(
    folder, capsys, command, option, reason
):
    (folder / "config.json").write_text('{"hidden_size": 8}\n')
    (folder / "drawn.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg" class="own"/>\n')
    (folder / "notes.txt").write_text("node-1 slots=8\n")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    exit_code, out, err = called(capsys, command)
    assert (exit_code, out) == (2, "")
    assert err.startswith(f"error: {option} ")
    assert reason in err
    assert {path: path.read_bytes() for path in before} == before


def test_what_ckptctl_wrote_and_an_empty_file_are_overwritten(folder, capsys):
    for option, name in (("--report", "a.out"), ("--metrics", "b.out")):
        (folder / name).touch()
        for _ in range(2):
            assert called(capsys, f"scan run {option} {name}")[0] == 0
        assert (folder / name).stat().st_size > 0
    assert called(capsys, "loss notes --report a.out")[0] == 31
    (folder / "hosts").write_text("node-1\nnode-2.cluster\n")
    assert called(capsys, "run --root run --hosts-file hosts -- true")[0] == 0


def test_a_plot_is_overwritten_by_the_next_one(folder, capsys):
    rows = [(step, 3.0 - step / 100) for step in [*range(1, 41), *range(31, 60)]]
    log = "".join(f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in rows)
    (folder / "train.jsonl").write_text(log)
    for _ in range(2):
        assert called(capsys, "loss train.jsonl --plot a.svg")[0] == 0


VARIABLES = [
    ("scan run", "LAST", "x", "invalid value for CKPTCTL_LAST: 'x' is not a whole number"),
    ("scan run", "QUIET", "x", "invalid value for CKPTCTL_QUIET: 'x' is not a valid boolean"),
    ("pick run", "LEVEL", "x", "invalid value for CKPTCTL_LEVEL: 'x' is not one of"),
    ("classify notes", "DEADLINE", "x", "CKPTCTL_DEADLINE is a time like"),
    ("pick run", "REQUIRE", "x", "CKPTCTL_REQUIRE: 'x' is no kind of train state"),
    ("scan run", "REPORT", "notes", "CKPTCTL_REPORT notes: the file exists and is not"),
]


@pytest.mark.parametrize(
    ("command", "variable", "value", "message"), VARIABLES, ids=[row[1] for row in VARIABLES]
)
def test_a_wrong_value_of_a_variable_names_the_variable(
    folder, capsys, monkeypatch, command, variable, value, message
):
    monkeypatch.setenv(f"CKPTCTL_{variable}", value)
    exit_code = run(command.split())
    err = capsys.readouterr().err
    assert exit_code == 2
    assert err.startswith(f"error: {message}")
    assert (folder / "notes").read_text() == "hello\n"


def test_the_command_line_is_named_where_it_overrides_a_variable(folder, capsys, monkeypatch):
    monkeypatch.setenv("CKPTCTL_DEADLINE", "5m")
    _, _, err = called(capsys, "classify notes --deadline x")
    assert err.startswith("error: --deadline is a time like")


def test_two_bare_answers_at_once_are_refused(folder, capsys):
    exit_code, out, err = called(capsys, "classify notes --print-word --print-nodes")
    assert (exit_code, out) == (2, "")
    assert "exclude each other" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("NEWLOG=x", "has no input 'NEWLOG'"),
        ("LOG=notes X_2=y", "has no input 'X_2'"),
        ("notes", "notes is a file, and no checkpoint root"),
    ],
)
def test_a_word_that_is_no_input_and_no_root_starts_no_run(folder, capsys, words, message):
    exit_code, out, err = called(capsys, f"runbook run rb-7 run {words} --yes")
    assert (exit_code, out) == (2, "")
    assert message in err
    assert not (folder / "run" / ".ckptctl").exists()


@pytest.mark.parametrize("name", ["nothing", "unrelated"])
def test_a_resume_from_a_folder_that_is_no_step_is_refused(folder, capsys, name):
    (folder / "unrelated").mkdir()
    (folder / "unrelated" / "notes").write_text("hello\n")
    exit_code, out, err = called(capsys, f"loss notes --resume-from {name}")
    assert (exit_code, out) == (2, "")
    assert err.startswith(f"error: --resume-from {name} is no step that can be read")


def test_a_resume_from_weights_alone_leaves_the_first_step_uncompared(folder, capsys):
    (folder / "weights").mkdir()
    (folder / "model.safetensors").rename(folder / "weights" / "model.safetensors")
    message = "weights holds no training step, so the first step of the new log is not compared"
    assert message in called(capsys, "loss notes --resume-from weights")[2]
    assert message not in called(capsys, "loss notes --resume-from weights --quiet")[2]
    assert message not in called(capsys, "loss notes --resume-from weights --resume-step 5")[2]

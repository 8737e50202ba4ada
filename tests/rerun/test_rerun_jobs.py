"""`ckptctl rerun` replays real jobs on copies, and never touches the real root."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import COMMAND, clean_environment, run_ckptctl, validated
from next_commands import run_and_follow
from supervisor.supervised_root import processes_with

from ckptctl.drill.job import copy_step, fingerprint
from ckptctl.options import StorageOptions

JOB = Path(__file__).with_name("faulty_job.py")
STEP = 33

# Prints the losses of steps 31 to 33, the last as `$BAD_NODES` and `$BAD` say.
SHELL_JOB = """
echo "nodes {node_list}, {nodes} of them, {steps} steps to {last}"
test -f {step}/.metadata || exit 3
case " $BREAKS " in *" {node_list} "*) exit 7;; esac
for n in 31 32; do echo "step $n loss 2.40625$n"; done
last=2.31250033
case " $BAD_NODES " in *" {node_list} "*) last=$BAD;; esac
test $last = dies && exit 9
test ! -e once && touch once && test -n "$ONCE" && last=$ONCE
echo "step 33 loss $last"
test -z "$GOES_ON" || { for n in 34 35 36; do echo "step $n loss 2.3"; done; exec sleep 1000; }
"""


@pytest.fixture
def root(framework_roots: Path, tmp_path: Path) -> Path:
    """A root with step 30."""
    source = framework_roots / "kempnerforge" / "checkpoints" / "step_30"
    copy_step(str(source.parent), source.name, tmp_path / "ckpt", StorageOptions())
    return tmp_path / "ckpt"


def replayed(root: Path, value: str, *words: object, exit_code: int, **variables: str) -> dict:
    """The document of `rerun` of the shell job, whose step 33 was logged with this loss."""
    log = root.parent / "train.log"
    rows = {n: 2.4 + n / 1e4 for n in range(1, 31)} | {31: 2.4062531, 32: 2.4062532}
    lines = [f"step {n} loss {loss}" for n, loss in rows.items()]
    log.write_text("\n".join([*lines, *([f"step 33 loss {value}"] if value else [])]) + "\n")
    before = fingerprint(str(root), StorageOptions())
    done = run_and_follow(
        *("rerun", "--root", root, "--step", STEP, "--log", log, "--nodes", "a", "--json"),
        *("--work", root.parent / "rerun", *words, "--", "sh", "-c", SHELL_JOB, "{root}"),
        env=variables,
        cwd=root.parent,
    )
    assert done.returncode == exit_code, done.stdout + done.stderr
    found = validated(done.stdout)
    assert found["root_unchanged"]
    assert fingerprint(str(root), StorageOptions()) == before
    assert not list((root.parent / "rerun").glob("*/root")), "the copies are removed"
    assert processes_with(str(root.parent)) == []
    assert found["from_step"] == 30
    return found


OTHERS = ("--other-nodes", "b")


@pytest.mark.parametrize(
    ("value", "variables", "answer", "exit_code", "nodes"),
    [
        ("9.5", {}, "transient", 0, "same other"),
        ("9.5", {"BAD_NODES": "a", "BAD": "9.5"}, "persistent", 34, "same other other"),
        ("nan", {"BAD_NODES": "a", "BAD": "nan"}, "persistent", 34, "same other other"),
        # The job fails at the suspicious step instead of logging it.
        ("", {"BAD_NODES": "a", "BAD": "dies"}, "persistent", 34, "same other other"),
        ("nan", {"BAD_NODES": "a b", "BAD": "dies"}, "job", 93, "same other"),
        ("nan", {"BAD_NODES": "a b", "BAD": "nan"}, "job", 93, "same other"),
        ("9.5", {"ONCE": "8.5"}, "persistent", 34, "same other other same"),
        ("9.5", {"GOES_ON": "yes"}, "transient", 0, "same other"),
    ],
)
def test_replays_show_whether_the_hardware_or_the_job_computes_a_value(
    root: Path, value, variables, answer, exit_code, nodes
):
    found = replayed(root, value, *OTHERS, exit_code=exit_code, **variables)
    assert found["answer"] == answer
    assert [each["nodes"] for each in found["replays"]] == nodes.split()
    assert found["suspects"] == (["a"] if answer == "persistent" else [])
    output = Path(found["replays"][0]["folder"]) / "logs" / "1" / "output.log"
    assert "nodes a, 1 of them, 3 steps to 33" in output.read_text()


def test_without_other_nodes_a_value_that_repeats_is_undecided_and_says_why(root: Path):
    found = replayed(root, "9.5", exit_code=31, BAD_NODES="a", BAD="9.5")
    assert found["answer"] == "undecided"
    assert "--other-nodes" in found["message"]
    assert len(found["replays"]) == 1


def test_a_replay_that_fails_elsewhere_proves_nothing_and_leads_to_its_log(root: Path):
    found = replayed(root, "9.5", *OTHERS, exit_code=31, BREAKS="b")
    assert found["message"].endswith("the replay on b ended with 7 before it logged a loss")
    log = root.parent / "rerun" / "other-1" / "logs" / "1" / "output.log"
    assert found["next_command"] == f"ckptctl classify {log}"


def test_a_node_that_is_in_both_groups_stays_suspected(root: Path):
    words = ("--nodes", "b", "--other-nodes", "b,c", "--hosts-file", root.parent / "hosts")
    found = replayed(root, "9.5", *words, exit_code=31, BAD_NODES="a a,b b,c", BAD="9.5")
    assert "b computed it each time, and may be at fault" in found["message"]
    assert (root.parent / "hosts").read_text() == "b\nc\n"


def test_the_node_at_fault_is_excluded_by_the_command_that_is_given(root: Path):
    asked = root.parent / "excluded"
    words = (*OTHERS, "--exclude-command", f"sh -c 'echo {{node}} {{cause}} >> {asked}'")
    found = replayed(root, "9.5", *words, exit_code=34, BAD_NODES="a", BAD="9.5")
    assert found["excluded"]
    assert asked.read_text() == "a suspect\n"


def test_a_dry_run_shows_the_commands_and_starts_nothing(root: Path):
    found = replayed(root, "9.5", *OTHERS, "--dry-run", exit_code=0)
    assert found["answer"] is None
    assert [each["names"] for each in found["replays"]] == [["a"], ["b"]]
    assert not (root.parent / "rerun").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--", "true"), "names no place for its root"),
        (("--other-nodes", "b", "--", "true", "{root}"), "does not say where its nodes belong"),
        (("--other-nodes", "a", "--nodes", "a", "--", "true", "{root}"), "names no node that"),
        (("--nodes", "-x", "--", "true", "{root}"), "which is no name of a host"),
        (("--step", 40, "--", "true", "{root}"), "step 40 has no row; the nearest step logged is"),
        (("--from-step", 20, "--", "true", "{root}"), "step 20 of ckpt is not usable"),
        (("--step", 25, "--", "true", "{root}"), "no usable step lies before step 24"),
        (("--steps", 2, "--", "true", "{root}"), "must begin at least one logged step before"),
        (("--log", "empty", "--", "true", "{root}"), "no loss was found"),
        (("--log", "absent", "--", "true", "{root}"), "absent"),
    ],
)
def test_what_cannot_be_replayed_is_refused(root: Path, words: tuple[str, ...], message: str):
    (root.parent / "empty").touch()
    (root.parent / "log").write_text("".join(f"step {n} loss 2.{n}5\n" for n in range(1, 34)))
    given = () if "--log" in words else ("--log", "log")
    given += () if "--step" in words else ("--step", 33)
    done = run_ckptctl("rerun", "--root", "ckpt", *given, *words, cwd=root.parent)
    assert done.returncode in (2, 10, 11), done.stderr
    assert message in done.stderr
    assert not (root.parent / "rerun").exists()


def test_a_signal_ends_the_replay_and_all_that_it_started(root: Path):
    log = root.parent / "train.log"
    log.write_text("".join(f"step {n} loss 2.{n}5\n" for n in range(1, 34)))
    words = ("rerun", "--root", root, "--step", STEP, "--log", log, "--work", root.parent / "rerun")
    job = ("--", "sh", "-c", "touch started; exec sleep 1000", "{root}")
    running = subprocess.Popen(
        [*COMMAND, *map(str, (*words, *job))], env=clean_environment(), cwd=root.parent
    )
    while not (root.parent / "started").exists():
        assert running.poll() is None
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    assert running.wait() == 128 + signal.SIGTERM
    assert processes_with(str(root.parent)) == []
    assert not list((root.parent / "rerun").glob("*/root"))


# Two ranks of torch


def trained(folder: Path, *faults: str) -> None:
    """Run the job to its end, on nodes `a` and `b`, whatever that end is."""
    words = ["--root", "ckpt", "--logs", "logs", "--state", "state", "--nodes", "a,b"]
    with (folder / "train.log").open("wb") as out:
        subprocess.run(
            [sys.executable, str(JOB), *words, "--fault", *faults],
            env=clean_environment(OMP_NUM_THREADS="1"),
            cwd=folder,
            stdout=out,
        )


def rerun_of_trained(folder: Path, log: str, *faults: str) -> dict:
    done = run_ckptctl(
        *("rerun", "--root", "ckpt", "--step", 12, "--log", log, "--json"),
        *("--nodes", "a,b", "--other-nodes", "c,d", "--"),
        *(sys.executable, JOB, "--root", "{root}", "--nodes", "{node_list}", "--state", "state"),
        *("--logs", "{log_dir}" if log == "logs" else "own", "--replay", "{step}:{steps}"),
        *("--fault", *faults),
        env={"OMP_NUM_THREADS": "1"},
        cwd=folder,
    )
    found = validated(done.stdout)
    assert found["root_unchanged"]
    assert processes_with(str(folder)) == []
    return found


@pytest.mark.torch
@pytest.mark.slow
def test_a_rank_whose_unit_breaks_on_some_operands_is_found_by_its_own_log(tmp_path: Path):
    faults = ("data", "nan", "raises")
    trained(tmp_path, *faults)
    found = rerun_of_trained(tmp_path, "logs", *faults)
    assert (found["answer"], found["exit_code"]) == ("persistent", 34)
    assert found["suspects"] == ["a", "b"]
    first = found["replays"][1]["compared"]["first"]
    assert (first["step"], first["log"]) == (12, "rank_1.jsonl")


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.parametrize(
    ("faults", "answer"),
    [
        (("once",), "transient"),
        (("once", "nan", "raises"), "transient"),
        (("broken",), "persistent"),
        (("varying",), "persistent"),
        (("batch",), "job"),
        (("batch", "nan", "raises"), "job"),
        (("noise",), "undecided"),
        (("noise", "batch"), "job"),
        (("data", "tiny", "coarse"), "undecided"),
        (("dies",), "undecided"),
    ],
)
def test_the_corpus_of_faults_is_answered_as_it_was_made(tmp_path: Path, faults, answer):
    trained(tmp_path, *faults)
    found = rerun_of_trained(tmp_path, "train.log", *faults)
    assert found["answer"] == answer, found["message"]
    if faults[0] == "noise":
        assert 0 < found["scatter"] < 1e-2
        assert "the job is not deterministic" in found["message"]

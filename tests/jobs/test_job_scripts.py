"""The job scripts of `examples/jobs`: run by a real bash as far as there is no cluster needed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from command_line import clean_environment

from ckptctl.cli.commands import command_of

JOBS = Path(__file__).resolve().parents[2] / "examples" / "jobs"
# It is installed beside the Python that runs the tests, which need not be on the path.
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.defpath}")
MANIFESTS = sorted(path.name for path in JOBS.glob("*.yaml"))
SHELL = sorted([*JOBS.glob("*.sbatch"), *JOBS.glob("*.sh")])

# What `srun`, `scontrol` and the launchers are given is written down; a launcher that is there
# runs its train.py as they all do.
RECORD = '#!/bin/bash\nprintf "%s\\n" "$(basename "$0") $*" >> "$CALLS"\n'
# As srun does, the stand-in starts one task on each node, with its number and the nodes of the
# step, answers SIGTERM by killing them ("forcing job termination"), and ends with the highest code.
SRUN = (
    RECORD
    + """\
while [[ $1 == -* ]]; do shift; done
export SLURM_STEP_NODELIST=node001 SLURM_STEP_NUM_NODES=${TASKS:-1} SLURM_STEP_NUM_TASKS=${TASKS:-1}
for ((n = 0; n < SLURM_STEP_NUM_TASKS; n++)); do
    SLURM_STEP_ID=0 SLURM_PROCID=$n SLURM_NODEID=$n SLURMD_NODENAME=node00$((n + 1)) "$@" &
    tasks+=($!)
done
trap 'kill -KILL "${tasks[@]}"' TERM
echo "${tasks[@]}" > "$CALLS.tasks"
echo $$ > "$CALLS.srun"
highest=0
for task in "${tasks[@]}"; do
    while wait "$task"; code=$?; kill -0 "$task" 2> /dev/null; do :; done
    ((code > highest)) && highest=$code
done
exit "$highest"
"""
)
SCANCEL = RECORD + 'kill -TERM $(< "$CALLS.tasks")\n'
SCONTROL = (
    RECORD
    + """\
if [[ "$1 $2" == "show step" ]]; then
    echo "StepId=$3.0 UserId=0 State=RUNNING SrunHost:Pid=node001:$(< "$CALLS.srun")"
else
    echo node001
fi
"""
)
"""The form is that of Slurm 22.05."""
TRAIN = """\
import pathlib, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
pathlib.Path("started").write_text(" ".join(sys.argv[1:]))
for _ in range(3000):
    time.sleep(0.01)
    if told:
        pathlib.Path("saved").write_text("yes")
        sys.exit(143)
"""


@pytest.fixture
def folder(framework_roots: Path, tmp_path: Path) -> Path:
    """A root with whole steps, a train.py, and commands on the path."""
    saved = framework_roots / "kempnerforge" / "checkpoints"
    for name in ("step_10", "step_20"):
        shutil.copytree(saved / name, tmp_path / "ckpt" / name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "bin").mkdir()
    command(tmp_path, "ckptctl", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ckptctl "$@"\n')
    command(tmp_path, "scontrol", SCONTROL)
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    return tmp_path


def command(folder: Path, name: str, text: str) -> None:
    path = folder / "bin" / name
    path.write_text(text)
    path.chmod(0o755)


def start(folder: Path, script: str, **environment: str) -> subprocess.Popen[bytes]:
    given = {
        "ROOT": str(folder / "ckpt"),
        "CALLS": str(folder / "calls"),
        "SLURM_JOB_ID": "88123",
        "SLURM_JOB_NAME": "train",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_NODELIST": "node001",
        "SLURM_NNODES": "4",
        "CKPTCTL_WAIT_STORAGE": "0",
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
    }
    return subprocess.Popen(
        ["bash", JOBS / script],
        cwd=folder,
        env=clean_environment(**{**given, **environment}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def calls(folder: Path) -> str:
    path = folder / "calls"
    return path.read_text() if path.exists() else ""


def trainings(folder: Path) -> list[str]:
    """What started a training; `ckptctl run` inspects the root before it does."""
    lines = calls(folder).splitlines()
    return [line for line in lines if "train.py" in line and "ckptctl run" not in line]


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def test_python_gets_sigterm_where_it_took_the_place_of_the_shell(folder):
    job = start(folder, "slurm_exec.sbatch")
    wait_for(folder / "started")
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 143
    assert (folder / "saved").exists()
    assert "--resume-from" in (folder / "started").read_text()
    assert "step_20" in (folder / "started").read_text()


def test_a_trap_passes_sigterm_on_waits_for_the_save_and_requeues(folder):
    command(folder, "torchrun", '#!/bin/bash\nshift 2\nexec python "$@"\n')
    job = start(folder, "slurm_trap.sbatch")
    wait_for(folder / "started")
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 143
    assert (folder / "saved").exists()
    assert calls(folder) == "scontrol requeue 88123\n"


def test_srun_is_given_the_newest_whole_step(folder):
    command(folder, "srun", RECORD)
    job = start(folder, "slurm_torchrun.sbatch")
    assert job.wait() == 0
    (line,) = [each for each in calls(folder).splitlines() if each.startswith("srun ")]
    assert line.startswith("srun --kill-on-bad-exit=1 torchrun --nnodes=4")
    assert line.endswith(f"--resume-from {folder}/ckpt/step_20")


def test_a_restart_is_a_new_run_only_where_the_first_start_left_its_sentinel(folder):
    command(folder, "srun", RECORD)
    for name in ("empty", "new"):
        root = folder / name
        lost = start(folder, "slurm_torchrun.sbatch", ROOT=str(root), SLURM_RESTART_COUNT="1")
        assert lost.wait() == 75
        assert "srun" not in calls(folder)
        for count in ("0", "1"):
            job = start(folder, "slurm_torchrun.sbatch", ROOT=str(root), SLURM_RESTART_COUNT=count)
            assert job.wait() == 0
            assert calls(folder).splitlines()[-1].endswith(f"train.py --root {root}")
        (folder / "calls").unlink()


@pytest.mark.parametrize("script", [path.name for path in SHELL])
def test_no_training_starts_over_steps_that_are_gone(script, folder):
    command(folder, "srun", SRUN)
    for name in ("torchrun", "ft_launcher"):
        command(folder, name, RECORD)
    picked = ["ckptctl", "pick", "--allow-fresh", "--create", str(folder / "ckpt")]
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    subprocess.run(picked, env=clean_environment(PATH=path), check=True, capture_output=True)
    for name in ("step_10", "step_20"):
        shutil.rmtree(folder / "ckpt" / name)
    job = start(folder, script, HEAD="node001:29400")
    # `run` does not start: the storage may have been replaced.
    assert job.wait() == (75 if "_run." in script else 11)
    assert not trainings(folder)
    assert not (folder / "started").exists()


@pytest.mark.parametrize("script", [path.name for path in SHELL])
def test_no_training_starts_without_a_root_that_answers(script, folder):
    command(folder, "srun", SRUN)
    for name in ("torchrun", "ft_launcher"):
        command(folder, name, RECORD)
    root = str(folder / "gone" / "ckpt")
    job = start(folder, script, ROOT=root, HEAD="node001:29400")
    assert job.wait() != 0
    assert not trainings(folder)
    assert not (folder / "started").exists()


@pytest.mark.parametrize(
    ("said", "requeued"),
    [
        ("slurmstepd: error: *** STEP 1.0 CANCELLED AT 2026-11-20 DUE TO TIME LIMIT ***", True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", False),
        ("", False),
    ],
)
def test_a_job_that_was_stopped_is_requeued_and_one_that_failed_is_not(said, requeued, folder):
    command(folder, "srun", RECORD + "exit 1\n")
    (folder / "train-88123.out").write_text(said + "\n")
    job = start(folder, "slurm_torchrun.sbatch")
    assert job.wait() == 1
    assert ("scontrol requeue 88123" in calls(folder)) is requeued


XID = "node002 kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."


def step_of_run(folder: Path, ends: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start the script with `ckptctl run`, whose torchrun does what `ends` says."""
    command(folder, "srun", SRUN)
    command(folder, "torchrun", RECORD + ends + "\n")
    given = {"SLURM_JOB_NODELIST": "node[001-004]", "ROOT": str(folder / "new")}
    return start(folder, "slurm_run.sbatch", **{**given, **environment})


def lines_of(folder: Path, word: str) -> list[str]:
    return [line for line in calls(folder).splitlines() if line.startswith(word)]


def test_run_excludes_a_node_and_restarts_with_fewer_ranks_in_the_allocation(folder):
    ends = f'[[ $CKPTCTL_RESTART_COUNT == 1 ]] && exit 0; echo "{XID}"; exit 1'
    assert step_of_run(folder, ends).wait() == 0
    first, second = lines_of(folder, "srun ")
    assert "--nodes=4" in first
    assert "--exclude" not in first
    assert "--nodes=3 --exclude=node002 " in second
    assert lines_of(folder, "scontrol update") == [
        "scontrol update NodeName=node002 State=DRAIN Reason=infra-node"
    ]
    assert not lines_of(folder, "scontrol requeue")
    assert lines_of(folder, "torchrun ")[0].endswith(
        f"--rdzv-endpoint=node001:29400 --rdzv-id=88123 train.py --root {folder}/new "
        "--resume-from auto"
    )


@pytest.mark.parametrize(("code", "requeued"), [(94, True), (17, False), (75, True)])
def test_run_is_requeued_only_where_waiting_helps(code, requeued, folder):
    # After 75 `run` waits for the storage itself, and ends with 75 where that is in vain.
    ends = f'[[ {code} == 75 ]] && rm -r "$ROOT"; exit {code}'
    assert step_of_run(folder, ends).wait() == code
    assert bool(lines_of(folder, "scontrol requeue 88123")) is requeued


@pytest.mark.slow
def test_run_passes_the_end_of_the_time_on_and_is_requeued_with_its_budget(folder):
    command(folder, "scancel", SCANCEL)
    job = step_of_run(folder, 'shift 5; exec python train.py "$@"')
    wait_for(folder / "started")
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 143
    assert (folder / "saved").exists()
    assert lines_of(folder, "scancel") == ["scancel --signal=TERM 88123.0"]
    assert lines_of(folder, "scontrol requeue 88123")
    again = step_of_run(folder, "exit 0", SLURM_RESTART_COUNT="1")
    assert again.wait() == 0
    logs = folder / "logs-88123"
    assert sorted(path.name for path in logs.iterdir()) == ["1", "2", "run.log"]


needs_shellcheck = pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")


@needs_shellcheck
@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path):
    ran = subprocess.run([SHELLCHECK, "-S", "style", path], capture_output=True, text=True)
    assert ran.stdout == ""


def ft_launchers(folder: Path, ends: str) -> subprocess.Popen[bytes]:
    """Start the script with `ckptctl run` around ft_launcher, which does what `ends` says."""
    command(folder, "srun", SRUN)
    command(folder, "scancel", SCANCEL)
    command(folder, "ft_launcher", RECORD + ends + "\n")
    return start(folder, "ft_launcher_run.sbatch", TASKS="2", ROOT=str(folder / "new"))


@pytest.mark.parametrize(("code", "requeued"), [(94, True), (17, False), (93, False)])
def test_ft_launcher_is_started_on_all_nodes_and_its_code_decides(code, requeued, folder):
    assert ft_launchers(folder, f"exit {code}").wait() == code
    assert len(lines_of(folder, "ft_launcher --nnodes=4 ")) == 2
    assert "--rdzv_endpoint=node001:29400" in calls(folder)
    assert bool(lines_of(folder, "scontrol requeue 88123")) is requeued


def test_the_end_of_the_time_reaches_every_ft_launcher_and_the_job_is_requeued(folder):
    job = ft_launchers(folder, "exec python train.py")
    wait_for(folder / "started")
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 143
    assert (folder / "saved").exists()
    assert lines_of(folder, "scancel --signal=TERM 88123.0")
    assert lines_of(folder, "scontrol requeue 88123")


RUNS = [path.name for path in sorted(JOBS.iterdir()) if "_run." in path.name]


def words_of_run(name: str) -> list[str]:
    """The words of `ckptctl run` in a script or manifest, up to the command that it starts."""
    text = (JOBS / name).read_text().replace("\\\n", " ")
    (line,) = [each for each in text.splitlines() if re.match(r"[^#]*ckptctl run --root", each)]
    words = shlex.split(line.partition("ckptctl run ")[2])
    return words[: words.index("--")]


@pytest.mark.parametrize("name", RUNS)
def test_the_options_of_run_are_those_of_the_command(name):
    words = [*words_of_run(name), "--", "true"]
    found = command_of("run").make_context("run", words).params
    assert found["root"] == ("$ROOT",)
    assert found["create"] is True


def rules(name: str) -> tuple[dict, dict]:
    *_, document = yaml.safe_load_all((JOBS / name).read_text())
    job = document
    if document["kind"] == "JobSet":
        (replicated,) = document["spec"]["replicatedJobs"]
        job = replicated["template"]
    return document, job["spec"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_job_is_as_the_batch_api_asks(name):
    _, spec = rules(name)
    pod = spec["template"]["spec"]
    # podFailurePolicy is refused without it.
    assert pod["restartPolicy"] == "Never"
    named = {each["name"] for each in (*pod.get("initContainers", ()), *pod["containers"])}
    volumes = {each["name"] for each in pod["volumes"]}
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        assert {each["name"] for each in container["volumeMounts"]} <= volumes
    for rule in spec["podFailurePolicy"]["rules"]:
        assert rule["action"] in ("Ignore", "FailJob", "Count", "FailIndex")
        assert ("onExitCodes" in rule) != ("onPodConditions" in rule)
        codes = rule.get("onExitCodes")
        if codes:
            assert codes["operator"] in ("In", "NotIn")
            assert codes["containerName"] in named
            assert 0 not in codes["values"]
            assert 75 not in codes["values"]
            assert codes["values"] == sorted(set(codes["values"]))
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]


@needs_shellcheck
@pytest.mark.parametrize("name", MANIFESTS)
def test_the_shell_of_a_container_is_sound_and_ends_in_exec(name, folder):
    _, spec = rules(name)
    pod = spec["template"]["spec"]
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        shell, flags, text = container["command"]
        assert (shell, flags) == ("/bin/sh", "-ec")
        checked = subprocess.run(
            [SHELLCHECK, "-S", "style", "-s", "sh", "-"],
            input=text,
            capture_output=True,
            text=True,
        )
        assert checked.stdout == ""
    (train,) = pod["containers"]
    assert re.search(r"^exec torchrun ", train["command"][2], re.MULTILINE)


def test_the_init_container_writes_the_step_and_an_empty_file_for_a_fresh_run(folder):
    _, spec = rules("kubernetes_job.yaml")
    text = spec["template"]["spec"]["initContainers"][0]["command"][2]
    text = text.replace("/gate/step", str(folder / "step"))
    for root, wanted in (("ckpt", f"{folder}/ckpt/step_20"), ("empty", "")):
        subprocess.run(
            ["/bin/sh", "-ec", text],
            env=clean_environment(ROOT=str(folder / root), PATH=f"{folder}/bin:/usr/bin:/bin"),
            check=True,
            capture_output=True,
        )
        assert (folder / "step").read_text().strip() == wanted


@pytest.mark.parametrize("name", [name for name in MANIFESTS if "jobset" in name])
def test_a_jobset_ends_for_what_is_final_and_restarts_for_all_else(name):
    document, _ = rules(name)
    assert document["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    policy = document["spec"]["failurePolicy"]
    assert policy["maxRestarts"] > 0
    for rule in policy["rules"]:
        assert rule["action"] in (
            *("FailJobSet", "RestartJobSet"),
            "RestartJobSetAndIgnoreMaxRestarts",
        )
        assert set(rule["onJobFailureReasons"]) <= {
            *("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes"),
            *("MaxFailedIndexesExceeded", "PodFailurePolicy"),
        }

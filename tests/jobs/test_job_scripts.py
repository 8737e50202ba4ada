"""The job scripts of `examples/jobs`: run by a real bash as far as there is no cluster needed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_line import clean_environment
from services.processes import free_port, wait_until

JOBS = Path(__file__).resolve().parents[2] / "examples" / "jobs"
# It is installed beside the Python that runs the tests, which need not be on the path.
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.defpath}")
MANIFESTS = sorted(path.name for path in JOBS.glob("*.yaml"))
SHELL = sorted([*JOBS.glob("*.sbatch"), *JOBS.glob("*.sh")])

# What `srun`, `scontrol` and the launchers are given is written down. How Slurm treats jobs and
# signals is the subject of `test_on_slurm.py`.
RECORD = '#!/bin/bash\nprintf "%s\\n" "$(basename "$0") $*" >> "$CALLS"\n'
SRUN = (
    RECORD
    + """\
while [[ $1 == -* ]]; do shift; done
export SLURM_STEP_NODELIST=node001 SLURM_STEP_NUM_NODES=1 SLURM_STEP_ID=0 SLURMD_NODENAME=node001
exec "$@"
"""
)
SCONTROL = RECORD + "echo node001\n"


@pytest.fixture
def folder(framework_roots: Path, tmp_path: Path) -> Path:
    """A root with whole steps, a train.py, and commands on the path."""
    saved = framework_roots / "kempnerforge" / "checkpoints"
    for name in ("step_10", "step_20"):
        shutil.copytree(saved / name, tmp_path / "ckpt" / name)
    (tmp_path / "empty").mkdir()
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


RUN = [
    # The agents of torchrun_elastic.sh meet, by torch, before one of them inspects the root.
    pytest.param(path.name, marks=[pytest.mark.torch, pytest.mark.slow] * (path.suffix == ".sh"))
    for path in SHELL
]


@pytest.mark.parametrize("script", RUN)
def test_no_training_starts_over_steps_that_are_gone(script, folder):
    command(folder, "srun", SRUN)
    for name in ("torchrun", "ft_launcher"):
        command(folder, name, RECORD)
    picked = ["ckptctl", "pick", "--allow-fresh", "--create", str(folder / "ckpt")]
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    subprocess.run(picked, env=clean_environment(PATH=path), check=True, capture_output=True)
    for name in ("step_10", "step_20"):
        shutil.rmtree(folder / "ckpt" / name)
    job = start(folder, script, HEAD=f"127.0.0.1:{free_port()}", MAX_NODES="1")
    # `run` does not start: the storage may have been replaced.
    assert job.wait() == (75 if "ckptctl run" in (JOBS / script).read_text() else 11)
    assert not trainings(folder)


@pytest.mark.parametrize("script", RUN)
def test_no_training_starts_without_a_root_that_answers(script, folder):
    command(folder, "srun", SRUN)
    for name in ("torchrun", "ft_launcher"):
        command(folder, name, RECORD)
    root = str(folder / "gone" / "ckpt")
    job = start(folder, script, ROOT=root, HEAD=f"127.0.0.1:{free_port()}", MAX_NODES="1")
    assert job.wait() != 0
    assert not trainings(folder)


@pytest.mark.torch
@pytest.mark.slow
def test_the_agents_of_two_nodes_save_when_they_are_told_to_end_and_resume(folder):
    shutil.copy(Path(__file__).with_name("train.py"), folder)
    given = {"HEAD": f"127.0.0.1:{free_port()}", "ROOT": str(folder / "new"), "GPUS": "1"}
    given |= {"MIN_NODES": "2", "MAX_NODES": "2", "OMP_NUM_THREADS": "1"}
    saved = 0
    for attempt in (1, 2):
        jobs = [
            start(folder, "torchrun_elastic.sh", NODE_NAME=node, LOGS=f"{folder}/{node}", **given)
            for node in ("node-1", "node-2")
        ]

        def text(attempt=attempt):
            logs = folder.glob(f"node-*/*/{attempt}/output.log")
            return "".join(path.read_text() for path in logs)

        wait_until(lambda text=text: text().count("resumed step") == 2, what="the ranks")
        assert text().count(f"resumed step {saved} rank") == 2
        for job in jobs:
            job.terminate()
        assert [job.wait() for job in jobs] == [143, 143]
        (step,) = set(re.findall(r"saved step (\d+)", text()))
        saved = int(step)
    assert sorted(path.name for path in (folder / "new").glob("step_*"))[-1] == f"step_{saved}"


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
    assert "--nodes=3 --ntasks=3 --exclude=node002 " in second
    assert lines_of(folder, "scontrol update") == [
        "scontrol update NodeName=node002 State=DRAIN Reason=infra-node"
    ]
    assert not lines_of(folder, "scontrol requeue")
    assert lines_of(folder, "torchrun ")[0].endswith(
        f"--rdzv-endpoint=node001:29400 --rdzv-id=88123.0 train.py --root {folder}/new "
        "--resume-from auto"
    )


@pytest.mark.parametrize(("code", "requeued"), [(94, True), (17, False), (75, True)])
def test_run_is_requeued_only_where_waiting_helps(code, requeued, folder):
    # After 75 `run` waits for the storage itself, and ends with 75 where that is in vain.
    ends = f'[[ {code} == 75 ]] && rm -r "$ROOT"; exit {code}'
    assert step_of_run(folder, ends).wait() == code
    assert bool(lines_of(folder, "scontrol requeue 88123")) is requeued


needs_shellcheck = pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")


@needs_shellcheck
@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path):
    ran = subprocess.run([SHELLCHECK, "-S", "style", path], capture_output=True, text=True)
    assert ran.stdout == ""


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


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_published_schemas_of_kubernetes_accept_the_manifests(name):
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is missing")
    for document in yaml.safe_load_all((JOBS / name).read_text()):
        resource = document
        if document["kind"] == "JobSet":  # its schema is not among them; that of its job is
            (replicated,) = document["spec"]["replicatedJobs"]
            resource = {"apiVersion": "batch/v1", "kind": "Job", **replicated["template"]}
        for version in ("1.31", schemas.latest_version()):
            schemas.validate(resource, version, strict=True)


@pytest.mark.parametrize("name", MANIFESTS)
@pytest.mark.parametrize(("root", "step"), [("ckpt", "step_20"), ("empty", None)])
def test_the_containers_choose_a_step_and_start_torchrun_with_it(name, root, step, folder):
    _, spec = rules(name)
    pod = spec["template"]["spec"]
    command(folder, "torchrun", RECORD + 'echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" >> "$CALLS"\n')
    given = {
        "ROOT": str(folder / root),
        "CALLS": str(folder / "calls"),
        "JOB_COMPLETION_INDEX": "2",
        "PATH": f"{folder}/bin:/usr/bin:/bin",
    }
    for container in (*pod["initContainers"], *pod["containers"]):
        *shell, text = container["command"]
        text = text.replace("/gate/step", str(folder / "step"))
        subprocess.run(
            [*shell, text], env=clean_environment(**given), check=True, capture_output=True
        )
    started, shutdown_s = calls(folder).splitlines()
    assert started.startswith("torchrun --nnodes=4 --nproc-per-node=8 --node-rank=2 ")
    resumed = f" --resume-from {folder / root / step}" if step else ""
    assert started.endswith(f" train.py --root {folder / root}{resumed}")
    assert int(shutdown_s) < pod["terminationGracePeriodSeconds"]


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

"""Which mistakes in a batch script are found: a good script, one thing broken, that finding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import validated
from next_commands import run_and_follow as run_ckptctl

import ckptctl
from ckptctl.errors import UsageError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "jobs"

GOOD = """\
#!/bin/bash
#SBATCH --nodes=4
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300
set -euo pipefail
step=$(ckptctl pick "$ROOT")
srun --kill-on-bad-exit=1 python train.py --resume-from "$step"
"""
TRAP = """\
#!/bin/bash
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300
step=$(ckptctl pick "$ROOT") || exit $?
srun --kill-on-bad-exit=1 python train.py --resume-from "$step" &
pid=$!
trap 'kill -USR1 "$pid"' TERM
wait "$pid"
wait "$pid"
exit $?
"""
SRUN = 'srun --kill-on-bad-exit=1 python train.py --resume-from "$step"'


def names(tmp_path: Path, text: str) -> set[str]:
    script = tmp_path / "job.sh"
    script.write_bytes(text.encode())
    return {each.name for each in ckptctl.doctor("slurm", str(script)).advice}


@pytest.mark.parametrize("text", [GOOD, TRAP], ids=["step", "trap"])
def test_nothing_is_wrong_with_a_good_script(text, tmp_path):
    assert names(tmp_path, text) == set()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.sbatch")), ids=lambda path: path.name)
def test_nothing_is_wrong_with_the_examples(path):
    found = ckptctl.doctor("slurm", str(path))
    assert (found.advice, found.exit_code) == ((), 0)
    assert found.facts == (("commands that train", "1"),)


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("#!/bin/bash\n", "", "script.shebang"),
        ("\n", "\r\n", "script.line-ends"),
        ("set -euo pipefail\n", "set -euo pipefail\n#SBATCH --time=1\n", "sbatch.ignored"),
        ("--nodes=4", "--nodes=$N", "sbatch.variable"),
        ("#SBATCH --signal=TERM@300\n", "", "signal.none"),
        ("TERM@300", "TERM@30", "signal.notice-short"),
        ("TERM@300", "B:TERM@300", "signal.no-trap"),
        ("TERM@300", "B:SIGUSR1@300", "signal.no-trap"),
        (SRUN, SRUN + " --shutdown-timeout 600", "signal.notice-short"),
        (SRUN, SRUN + " train.shutdown_timeout_sec=600", "signal.notice-short"),
        (SRUN, 'torchrun train.py --resume-from "$step"', "signal.no-step"),
        (
            SRUN,
            "srun --kill-on-bad-exit=1 bash -c 'module load cuda; python train.py --resume auto'",
            "signal.wrapped",
        ),
        (
            SRUN,
            "srun --kill-on-bad-exit=1 bash -c 'module load cuda; exec python train.py --resume a'",
            None,
        ),
        ("#SBATCH --requeue\n", "", "requeue.none"),
        ("--requeue\n", "--no-requeue\n#SBATCH -p preempt\n", "requeue.none"),
        ("--requeue\n", "--requeue\n#SBATCH -p preempt\n", None),
        ("#SBATCH --open-mode=append\n", "", "requeue.log-lost"),
        ("$(ckptctl pick", "$(ls -1dt", "resume.by-mtime"),
        ("$(ckptctl pick", "$(ls -t", "resume.by-mtime"),
        (SRUN, SRUN + " 2>&1 | tee log", None),
        ("--kill-on-bad-exit=1 ", "", "srun.no-kill"),
        ("--kill-on-bad-exit=1 ", "-K ", None),
        ("--nodes=4", "--nodes=4 --no-kill", "sbatch.shell-lost"),
        (SRUN, "srun -K ckptctl run --root r -- torchrun train.py | tee log", None),
        (SRUN, 'srun python train.py --resume-from "$(ckptctl pick r)"', "srun.no-kill"),
        ("step=$(", "export step=$(", "exit-code.masked"),
        (SRUN, SRUN + " || true", "exit-code.swallowed"),
        ("set -euo pipefail", "true", "exit-code.pick"),
        ("set -euo pipefail", "# ls -1dt step_*", "exit-code.pick"),
        ("set -euo pipefail\n", 'cat > x <<END\nls -1dt "$ROOT"\nEND\nset -e\n', None),
    ],
)
def test_one_mistake_is_found_and_no_other(old, new, name, tmp_path):
    assert old in GOOD
    assert names(tmp_path, GOOD.replace(old, new)) == ({name} if name else set())


def test_a_signal_to_the_step_does_not_reach_ckptctl_run(tmp_path):
    text = GOOD.replace("--nodes=4", "--nodes=1").replace(SRUN, f"ckptctl run --root r -- {SRUN}")
    assert names(tmp_path, text) == {"signal.not-run"}


@pytest.mark.parametrize(
    ("option", "name"), [(" --kill-on-bad-exit=1", None), ("", "srun.no-kill")]
)
def test_a_signal_to_the_shell_reaches_ckptctl_run_through_the_trap(option, name, tmp_path):
    text = TRAP.replace("srun --kill-on-bad-exit=1", f"ckptctl run --root r -- srun{option}")
    assert names(tmp_path, text) == ({name} if name else set())


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        (" &\npid=$!\n", "\npid=$!\n", "signal.foreground"),
        (" &\npid", " 2>&1 | tee log &\npid", "signal.pipeline"),
        ("trap 'kill -USR1 \"$pid\"' TERM\n", "", "signal.no-trap"),
        ("kill -USR1", "kill -TERM", "signal.srun-killed"),
        ("kill -USR1", "kill", "signal.srun-killed"),
        ("srun --kill-on-bad-exit=1 python", "torchrun", "signal.not-handled"),
        ('wait "$pid"\nwait "$pid"\nexit $?', "sleep 1", "signal.no-wait"),
        ('wait "$pid"\nwait', "wait", "signal.no-wait"),
        ("step=", "set -e\nstep=", "signal.no-wait"),
        ('kill -USR1 "$pid"', 'scancel --full --signal=TERM "$SLURM_JOB_ID"', "signal.srun-killed"),
        ("exit $?", 'scontrol requeue "$SLURM_JOB_ID"\nexit $?', "requeue.cancelled"),
    ],
)
def test_a_signal_to_the_shell_must_reach_python(old, new, name, tmp_path):
    assert old in TRAP
    assert name in names(tmp_path, TRAP.replace(old, new))


@pytest.mark.parametrize("signal", ["USR1", "TERM"])
@pytest.mark.parametrize("step", ["", ".0"])
def test_a_trap_that_signals_the_tasks_by_scancel_is_sound(signal, step, tmp_path):
    sent = f'scancel --signal={signal} "$SLURM_JOB_ID{step}"'
    text = TRAP.replace('kill -USR1 "$pid"', sent).replace("TERM@", "USR1@")
    text = text.replace("' TERM\n", "' USR1\n")
    assert names(tmp_path, text) == set()
    text = text.replace("python train.py", "torchrun train.py")
    assert names(tmp_path, text) == ({"signal.not-handled"} if signal == "USR1" else set())


LIMIT = (
    TRAP.replace('kill -USR1 "$pid"', "told=1; {}")
    .replace("TERM@", "USR1@")
    .replace("' TERM\n", "' USR1\n")
)
TO_STEP = 'scancel --signal=TERM "$SLURM_JOB_ID.0"'


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("step=", "trap 'kill $smi' EXIT\nstep=", None),
        ("step=", 'echo "kill -TERM $pid to stop"\nstep=', None),
        ('wait "$pid"\nwait', 'while kill -0 "$pid"; do wait "$pid"; done\nwait', None),
        ('wait "$pid"\nwait', 'until wait "$pid"; do :; done\n#', None),
        ("told=1; ", "wait; ", None),
        (f"'told=1; {TO_STEP}'", "on_limit", None),
        (f"'told=1; {TO_STEP}'", "''", "signal.not-passed"),
        (f"; {TO_STEP}", "", "signal.not-passed"),
        ("--signal=TERM", "--batch --signal=TERM", "signal.not-passed"),
        ("step=", "srun hostname\nstep=", "signal.not-passed"),
        ("step=", 'if [ "$FIRST" ]; then\nsrun hostname\nfi\nstep=', None),
        ('wait "$pid"\nwait "$pid"\n', "", "signal.no-wait"),
        ('wait "$pid"\nwait', "wait", "signal.no-wait"),
        ("pid=$!\n", "pid=$!\nwait $pid\n", "signal.no-trap"),
    ],
)
def test_what_the_trap_of_the_signal_does_is_judged(old, new, name, tmp_path):
    text = LIMIT.replace("{}", TO_STEP)
    assert old in text
    text = text.replace(old, new, 1).replace(
        "step=", f"on_limit() {{\n  {TO_STEP}\n  wait\n}}\nstep=", 1
    )
    assert names(tmp_path, text) == ({name} if name else set())


def test_ckptctl_run_in_place_of_the_shell_gets_the_signal(tmp_path):
    text = GOOD.replace("TERM@", "B:TERM@").replace("--nodes=4", "--nodes=1")
    assert names(tmp_path, text.replace(SRUN, f"exec ckptctl run --root r -- {SRUN}")) == set()


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (f"srun mkdir -p /local\nsrun tar -xf a.tar\n{SRUN}", set()),
        ("srun -K python -u -m submitit.core._submit /jobs", set()),
        ("/opt/venv/bin/python train.py --resume auto", {"signal.no-step"}),
        ("uv run train.py --resume auto", {"signal.no-step"}),
        ("apptainer exec a.sif python train.py --resume auto", {"signal.no-step"}),
        ("bash run_training.sh", {"script.no-training"}),
        ("echo srun python train.py", {"script.no-training"}),
        ("srun hostname", {"script.no-training"}),
        (f"train() {{\n  {SRUN}\n}}\ntrain", set()),
        (f"{SRUN} || echo failed", {"exit-code.swallowed"}),
        (f"{SRUN} | tee log || true", {"exit-code.swallowed"}),
        (f"if ! {SRUN}; then\n  echo failed\n  exit 1\nfi", set()),
    ],
)
def test_only_a_command_that_trains_is_judged(new, expected, tmp_path):
    assert names(tmp_path, GOOD.replace(SRUN, new)) == expected


@pytest.mark.parametrize("end", ["\nexit 0", "; echo done", "\ntouch done"])
def test_an_end_with_another_code_is_found(end, tmp_path):
    text = GOOD.replace("set -euo pipefail\n", "").replace('"$ROOT")', '"$ROOT") || exit $?')
    assert names(tmp_path, text.replace(SRUN, SRUN + end)) == {"exit-code.swallowed"}


RUN = (
    TRAP.replace("TERM@", "USR1@")
    .replace("' TERM\n", "' USR1\n")
    .replace(
        "srun --kill-on-bad-exit=1",
        "ckptctl run --root r -- srun --kill-on-bad-exit=1 '--nodes={nodes}' '--ntasks={nodes}'",
    )
    .replace(
        "#SBATCH --requeue", "#SBATCH --nodes=4 --ntasks-per-node=1 --no-kill\n#SBATCH --requeue"
    )
    .replace("step=", "srun --relative=1 bash -c 'sleep 9; scontrol requeue health' &\nstep=")
)


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("kill -USR1", "kill -TERM", None),
        (" --no-kill", "", "sbatch.no-kill"),
        ("--nodes=4 --ntasks-per-node=1 --no-kill", "--nodes=1 --ntasks-per-node=1", None),
        (" '--ntasks={nodes}'", "", "srun.ntasks"),
        (" '--nodes={nodes}' '--ntasks={nodes}'", " -N {nodes} -n {world_size}", None),
    ],
)
def test_run_uses_the_nodes_that_are_left(old, new, name, tmp_path):
    assert old in RUN
    assert names(tmp_path, RUN.replace(old, new)) == ({name} if name else set())


def test_a_pipe_hides_a_crash(tmp_path):
    text = GOOD.replace("set -euo pipefail", "set -e").replace(SRUN, SRUN + " | tee log")
    assert names(tmp_path, text) == {"exit-code.pipe"}


def test_a_later_command_hides_a_crash(tmp_path):
    text = GOOD.replace("set -euo pipefail\n", "").replace('"$ROOT")', '"$ROOT") || exit')
    assert names(tmp_path, text + "echo done\n") == {"exit-code.swallowed"}


def test_a_job_that_never_resumes_is_found(tmp_path):
    text = GOOD.replace('step=$(ckptctl pick "$ROOT")\n', "").replace(' --resume-from "$step"', "")
    assert names(tmp_path, text) == {"resume.absent"}


PLAIN = GOOD.replace('step=$(ckptctl pick "$ROOT")\n', "").replace(
    'python train.py --resume-from "$step"', "{}"
)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("torchrun -m torchtitan.train --module llama3 --checkpoint.enable", "resume.unknown"),
        ("torchrun -m torchtitan.train --job.config_file x.toml", "resume.unknown"),
        ("torchrun -m torchtitan.train --checkpoint.enable=False", "resume.unknown"),
        ("python -m verl.trainer.main_ppo data.train_batch_size=8", "resume.unknown"),
        ("torchrun run_clm.py --model_name_or_path gpt2 --output_dir out", "resume.absent"),
        ("axolotl train x.yml", "resume.unknown"),
        ("torchrun run_train.py --config-file x.yaml", "resume.unknown"),
        ("python train.py $TRAIN_ARGS", "resume.unknown"),
        ('python train.py "$@"', "resume.unknown"),
        ("python pretrain.py --batch-size 8 --epochs 3", "resume.absent"),
        ("python main.py fit --config c.yaml --ckpt_path last", None),
    ],
)
def test_what_the_script_does_not_show_of_a_resume_is_no_fault(tmp_path, command, name):
    text = PLAIN.replace("{}", command)
    assert names(tmp_path, text) == ({name} if name else set())
    script = tmp_path / "job.sh"
    assert ckptctl.doctor(str(script)).exit_code == 0


@pytest.mark.parametrize(
    ("signal", "launch", "name"),
    [
        ("USR1@60", "srun -K torchrun", "signal.not-handled"),
        ("SIGUSR1@60", "srun -K python -m torch.distributed.run", "signal.not-handled"),
        ("10@60", "srun -K torchrun", "signal.not-handled"),
        ("USR1@60", "srun -K torchrun --signals-to-handle SIGTERM,SIGUSR1", None),
        ("USR1@60", "srun -K python", None),
        ("TERM@60", "srun -K torchrun", None),
        ("B:TERM@60", "exec srun -K python", "signal.srun-killed"),
        ("B:USR1@60", "exec srun -K python", None),
        ("B:TERM@60", "exec torchrun", None),
        ("USR1@60", "TORCHELASTIC_SIGNALS_TO_HANDLE=USR1 srun -K torchrun", "signal.not-handled"),
        ("USR1@60", "PET_SIGNALS_TO_HANDLE=TERM,USR1 srun -K torchrun", None),
        ("USR1@60", "PET_SIGNALS_TO_HANDLE=$SIGNALS srun -K torchrun", None),
        ("USR1@60", "srun -K ft_launcher", "signal.not-handled"),
    ],
)
def test_a_signal_that_the_launcher_does_not_pass_on_is_found(tmp_path, signal, launch, name):
    text = GOOD.replace("TERM@300", signal).replace("srun --kill-on-bad-exit=1 python", launch)
    assert names(tmp_path, text) == ({name} if name else set())


MANIFEST = "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: train}\n"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (MANIFEST, r"a manifest of Kubernetes \(PyTorchJob\)"),
        ("import torch\n", "a program in Python"),
        ('{"kind": 1}', "JSON"),
    ],
)
@pytest.mark.parametrize("words", [("slurm",), ()])
def test_a_file_that_is_no_batch_script_is_a_usage_error(tmp_path, text, what, words):
    file = tmp_path / "job"
    file.write_text(text)
    with pytest.raises(UsageError, match=what):
        ckptctl.doctor(*words, str(file))


def test_a_folder_is_written_to_only_if_it_is_named_as_a_storage(tmp_path):
    with pytest.raises(UsageError) as raised:
        ckptctl.doctor(str(tmp_path))
    assert raised.value.next_command == f"ckptctl doctor storage {tmp_path}"
    assert [*tmp_path.iterdir()] == []


def test_the_document_names_the_line_and_a_fault_ends_with_29(tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(GOOD.replace("--kill-on-bad-exit=1 ", ""))
    ran = run_ckptctl("doctor", "slurm", script, "--json")
    document = validated(ran.stdout)
    assert ran.returncode == document["exit_code"] == 29
    assert [(each["name"], each["where"]) for each in document["advice"]] == [
        ("srun.no-kill", "job.sh:8")
    ]


def test_a_script_from_standard_input_is_read(tmp_path):
    for words in (("slurm", "-"), ("-",)):
        ran = run_ckptctl("doctor", *words, "--json", input=GOOD)
        assert json.loads(ran.stdout)["advice"] == []


@pytest.mark.parametrize("words", [("slurm",), ("storage",), ("env", "x")])
def test_a_word_too_many_or_too_few_is_a_usage_error(words):
    ran = run_ckptctl("doctor", *words)
    assert ran.returncode == 2
    assert "ckptctl doctor" in ran.stderr

"""Nothing in the current folder runs, which may be a root where others write."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import clean_environment

from ckptctl.starting import child_environment, find_program, own_command, python_command

# Each is planted alone. Python imports the first three when it starts, or `-m ckptctl` does.
PLANTED = ("typing.py", "ckptctl/__init__.py", "sitecustomize.py", "signal.py")
PROGRAMS = ("ckptctl", "bash", "py-spy", "unshare", "sh", "mount", "python3", "srun")
SAFE = (sys.executable, "-P", "-m", "ckptctl")

IN_A_BLOCK = """import sys
from ckptctl.runbook.executing import execute
ended = execute("ckptctl --version && ckptctl explain 20 --quiet", {}, {}, print)
sys.exit(ended.exit_code)"""

LEASES = """import pathlib, sys, types
from ckptctl.drill.drilling import StalledStorage
folder = pathlib.Path(sys.argv[1])
job = types.SimpleNamespace(names={"step_100": 100}, folder=folder, files_of=lambda name: [])
try:
    StalledStorage(job)
except Exception as error:
    print(error)"""


@pytest.fixture
def planted(checkpoints, tmp_path) -> Path:
    """A root to which the tests add code that leaves a file `ran` beside the root."""
    return shutil.copytree(checkpoints / "fsdp_2", tmp_path / "root")


def plant(root: Path, name: str) -> None:
    path = root / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"open({str(root.parent / 'ran')!r}, 'w')\n")


def plant_program(root: Path, name: str) -> None:
    path = root / name
    path.write_text(f"#!/bin/sh\n: > {shlex.quote(str(root.parent / 'ran'))}\nexit 0\n")
    path.chmod(0o755)


def run_in(root: Path, *words: object, without: str = "", **variables: str):
    """Run a program in the root, as somebody does who looks after it."""
    environment = clean_environment(**variables)
    environment.pop(without, None)
    return subprocess.run(
        [*map(str, words)], cwd=root, env=environment, capture_output=True, text=True
    )


def nothing_ran(root: Path) -> bool:
    return not (root.parent / "ran").exists()


def launchers(root: Path) -> dict[str, str]:
    path = f"PATH={os.environ['PATH']}"
    package = f"PYTHONPATH={clean_environment()['PYTHONPATH']}"
    return {
        "as it is": "env",
        "cleared": f"env -i {path} {package}",
        "without our variables": "env -u PYTHONSAFEPATH",
        "in another folder": f"env -C {root}",
    }


@pytest.mark.parametrize("name", [None, *PLANTED])
@pytest.mark.parametrize("launcher", ["as it is", "cleared", "without our variables"])
def test_a_launcher_starts_no_code_of_the_root(planted, launcher, name):
    if name is not None:
        plant(planted, name)
    done = run_in(planted, *SAFE, "preflight", ".", "--launcher", launchers(planted)[launcher])
    assert nothing_ran(planted)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", PLANTED)
def test_a_relative_import_path_is_that_of_this_process_after_a_change_of_folder(
    planted, tmp_path, name
):
    plant(planted, name)
    own = tmp_path / "own"
    own.mkdir()
    path = f"{clean_environment()['PYTHONPATH']}:modules"
    launcher = launchers(planted)["in another folder"]
    words = ("preflight", planted, "--launcher", launcher)
    done = run_in(own, *SAFE, *words, PYTHONPATH=f"{path}:")
    assert nothing_ran(planted)
    assert done.returncode == 0, done.stderr


def test_a_process_that_ignores_variables_starts_one_that_does(planted):
    plant(planted, "typing.py")
    shown = "from ckptctl.starting import own_command; print(*own_command().words)"
    # Isolated mode imports an installed package only.
    code = f"import sys; sys.path.append({clean_environment()['PYTHONPATH']!r}); {shown}"
    done = run_in(planted, sys.executable, "-I", "-c", code, PYTHONPATH=".")
    assert done.stdout.split()[1:] == ["-P", "-E", "-s", "-m", "ckptctl"], done.stderr
    isolated = (*done.stdout.split()[:4], "-c", "import typing")
    assert run_in(planted, *isolated, PYTHONPATH=".").returncode == 0
    assert nothing_ran(planted)


@pytest.mark.parametrize("name", [None, *PLANTED])
def test_a_block_of_a_runbook_starts_no_code_of_the_root(planted, name):
    if name is not None:
        plant(planted, name)
    done = run_in(planted, sys.executable, "-P", "-c", IN_A_BLOCK)
    assert nothing_ran(planted)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ckptctl ")


@pytest.mark.parametrize("path", [".:{}", ":{}", "{}", None])
def test_a_block_of_a_runbook_starts_no_program_of_the_root(planted, path):
    for name in PROGRAMS:
        plant_program(planted, name)
    variables = {} if path is None else {"PATH": path.format(os.environ["PATH"])}
    done = run_in(planted, sys.executable, "-P", "-c", IN_A_BLOCK, without="PATH", **variables)
    assert nothing_ran(planted)
    assert done.returncode == 0, done.stderr


def test_a_launcher_that_starts_the_installed_ckptctl_takes_none_from_the_root(planted, tmp_path):
    plant_program(planted, "ckptctl")
    plant_program(planted, "env")
    installed = tmp_path / "bin"
    installed.mkdir()
    (installed / "ckptctl").write_text(f'#!/bin/sh\nexec {shlex.join(SAFE)} "$@"\n')
    (installed / "ckptctl").chmod(0o755)
    path = f".:{installed}:{os.environ['PATH']}"
    done = run_in(planted, *SAFE, "preflight", ".", "--launcher", "env ckptctl", PATH=path)
    assert nothing_ran(planted)
    assert done.returncode == 0, done.stderr


def test_a_launcher_that_only_the_current_folder_holds_is_named(planted):
    plant_program(planted, "start-there")
    words = ("preflight", ".", "--launcher", "start-there")
    done = run_in(planted, *SAFE, *words, PATH=f".:{os.environ['PATH']}")
    assert nothing_ran(planted)
    assert done.returncode == 2
    assert "no command 'start-there' in the absolute folders of PATH" in done.stderr


@pytest.mark.parametrize("name", PLANTED)
def test_the_stalled_storage_of_a_drill_starts_no_code_of_the_root(planted, tmp_path, name):
    plant(planted, name)
    done = run_in(planted, sys.executable, "-P", "-c", LEASES, tmp_path)
    assert nothing_ran(planted)
    assert "the file system of the copies has no leases" in done.stdout, done.stderr


def test_the_job_of_a_drill_imports_the_modules_beside_its_script(planted, tmp_path):
    """`-P` holds for ckptctl alone: PYTHONSAFEPATH in its environment would reach the job."""
    (tmp_path / "beside.py").write_text("print('imported')\n")
    (tmp_path / "job.py").write_text("import beside\n")
    own = own_command("run", "--root", str(planted), "--", sys.executable, str(tmp_path / "job.py"))
    environment = own.environment | clean_environment()
    done = subprocess.run(own.words, env=environment, capture_output=True, text=True)
    assert "imported" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PATH": "/usr/bin:/bin"}, {"PATH": "/usr/bin:/bin"}),
        ({"PATH": ".:/usr/bin::bin:/bin:"}, {"PATH": "/usr/bin:/bin"}),
        ({"PATH": "."}, {"PATH": os.defpath}),
        ({"PATH": ""}, {"PATH": os.defpath}),
        ({}, {"PATH": os.defpath}),
        ({"PYTHONPATH": "/a:/b"}, {"PYTHONPATH": "/a:/b"}),
        ({"PYTHONPATH": ":/a:src"}, {"PYTHONPATH": "{here}:/a:{here}/src"}),
        ({"PYTHONPATH": ""}, {"PYTHONPATH": ""}),
        ({"PYTHONHOME": "python"}, {"PYTHONHOME": "{here}/python"}),
        ({"PYTHONSAFEPATH": "1", "KEY": "."}, {"PYTHONSAFEPATH": "1", "KEY": "."}),
    ],
)
def test_a_child_gets_no_relative_folder(tmp_path, monkeypatch, variables, expected):
    monkeypatch.chdir(tmp_path)
    wanted = {name: value.format(here=tmp_path) for name, value in expected.items()}
    assert child_environment(variables) == {"PATH": os.defpath, **wanted}


def test_the_environment_that_is_given_is_the_one_that_is_returned():
    own = own_command("scan", "/root", environment={"PATH": "/bin", "KEY": "secret"})
    assert own.environment == {"PATH": "/bin", "KEY": "secret"}
    assert own.words == (*python_command("-m", "ckptctl"), "scan", "/root")


def test_a_program_is_found_in_absolute_folders_only(tmp_path, monkeypatch):
    plant_program(tmp_path, "py-spy")
    monkeypatch.chdir(tmp_path)
    assert find_program("py-spy", {"PATH": ".:"}) is None
    assert find_program("py-spy", {"PATH": f".:{tmp_path}"}) == str(tmp_path / "py-spy")

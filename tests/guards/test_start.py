"""What the commands import: `ckptctl pick` runs before every training job."""

import shutil
import sys

import pytest
from command_line import run_program

TOO_HEAVY = [
    *("torch", "numpy", "pydantic", "rich", "asyncio", "ssl", "zstandard"),
    *("fsspec", "s3fs", "aiobotocore", "botocore", "boto3", "obstore"),
    "argparse",
]

SCRIPT = """
import os, sys
# What `os._exit` would leave unsaid, said just before it.
leave = os._exit
def said(code):
    print(" ".join(sorted(sys.modules)), file=sys.stderr)
    sys.stderr.flush()
    leave(code)
os._exit = said
sys.argv = ["ckptctl", *sys.argv[1:]]
from ckptctl.cli.main import main
main()
"""


def modules_of(*command, **env):
    """The names of the modules that a command has imported at its end."""
    done = run_program(sys.executable, "-c", SCRIPT, *command, **env)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout, set(done.stderr.splitlines()[-1].split())


@pytest.fixture(scope="module")
def root(framework_roots, tmp_path_factory):
    root = tmp_path_factory.mktemp("start") / "run"
    shutil.copytree(framework_roots / "kempnerforge" / "checkpoints", root, symlinks=True)
    return root


@pytest.fixture(scope="module")
def loaded(root):
    stdout, loaded = modules_of("pick", root)
    assert stdout == f"{root}/step_30\n"
    return loaded


@pytest.mark.parametrize("name", TOO_HEAVY)
def test_a_pick_on_a_local_root_does_without(loaded, name):
    assert name not in loaded


def test_importing_the_package_imports_no_function_of_it():
    script = "import ckptctl, sys; print(*[m for m in sys.modules if m.startswith('ckptctl')])"
    done = run_program(sys.executable, "-c", script)
    assert done.stdout.split() == ["ckptctl"]


def test_only_the_command_that_was_called_is_imported(loaded):
    assert "ckptctl.cli.pick" in loaded
    assert not {"ckptctl.cli.scan", "ckptctl.cli.show", "ckptctl.cli.explain"} & loaded


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CKPTCTL_SEAL_KEY", "9fA2" * 16),
        ("CKPTCTL_HEARTBEAT_KEY", "9fA2" * 16),
        ("CKPTCTL_SUPERVISED", "75d8da8e5303e1a7e76b9dc6d479dac9@/shared/ckpt"),
    ],
)
def test_the_variables_of_a_supervised_job_import_no_other_command(root, name, value):
    _, found = modules_of("pick", root, **{name: value})
    assert not {"ckptctl.cli.scan", "ckptctl.cli.show", "ckptctl.cli.explain"} & found

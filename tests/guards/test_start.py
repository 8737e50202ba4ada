"""What is not there when `ckptctl pick` starts: it stands in front of every training job."""

import shutil
import subprocess
import sys

import pytest
from command_line import clean_environment

TOO_HEAVY = [
    *("torch", "numpy", "pydantic", "rich", "asyncio", "ssl", "zstandard"),
    *("fsspec", "s3fs", "aiobotocore", "botocore", "boto3", "obstore"),
]

SCRIPT = """
import os, sys
# What `os._exit` would leave unsaid, said just before it.
leave = os._exit
def said(code):
    print(" ".join(sorted({name.split(".")[0] for name in sys.modules})), file=sys.stderr)
    sys.stderr.flush()
    leave(code)
os._exit = said
sys.argv = ["ckptctl", *sys.argv[1:]]
from ckptctl.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def loaded(framework_roots, tmp_path_factory):
    root = tmp_path_factory.mktemp("start") / "run"
    shutil.copytree(framework_roots / "kempnerforge" / "checkpoints", root, symlinks=True)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "pick", root],
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, f"{root}/step_30\n")
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("name", TOO_HEAVY)
def test_a_pick_on_a_local_root_does_without(loaded, name):
    assert name not in loaded


def test_the_modules_were_really_seen(loaded):
    assert {"ckptctl", "typer"} <= loaded


def test_importing_the_package_imports_no_function_of_it():
    script = "import ckptctl, sys; print(*[m for m in sys.modules if m.startswith('ckptctl')])"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["ckptctl"]


def test_only_the_command_that_was_called_is_imported(framework_roots):
    script = SCRIPT.replace('name.split(".")[0]', "name")
    root = framework_roots / "kempnerforge" / "checkpoints"
    done = subprocess.run(
        [sys.executable, "-c", script, "pick", root],
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    loaded = done.stderr.splitlines()[-1].split()
    assert "ckptctl.cli.pick" in loaded
    assert not {"ckptctl.cli.scan", "ckptctl.cli.show", "ckptctl.cli.explain"} & set(loaded)

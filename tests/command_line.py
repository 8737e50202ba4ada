"""Run the command line, and check its documents against their schemas."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from forking import ForkServer
from jsonschema import Draft202012Validator, FormatChecker
from made_checkpoints import checkpoints

from ckptctl.cli.explain import schema

REPOSITORY = Path(__file__).resolve().parent.parent
COMMAND = (sys.executable, "-m", "ckptctl")

_NEEDS_TORCH = ("distributed", "integrations", "train")
_CLIENTS = ("s3fs", "obstore", "services.botocore_data")
_RUNBOOK = """import runpy, sys
sys.executable = {!r}
runpy.run_module("ckptctl", run_name="__main__", alter_sys=True)"""
"""The command, and the ten that a runbook starts with the Python that runs it, are forked."""


def clean_environment(**changes: str) -> dict[str, str]:
    """The environment without what would change the answers: colour, width, our own variables."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CKPTCTL_", "_CKPTCTL"))
        # An installed package is compiled: so is this one.
        and name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM", "PYTHONDONTWRITEBYTECODE")
    }
    return {**kept, "PYTHONPATH": str(REPOSITORY), **changes}


def run_ckptctl(
    *args: object, env: dict[str, str] | None = None, **kwargs: object
) -> subprocess.CompletedProcess[str]:
    """Run `ckptctl` with `args`; what it writes is kept unless `kwargs` say otherwise.

    Its process is forked, or started where `env` or `kwargs` ask for what only that can give.
    """
    words = list(map(str, args))
    variables = clean_environment(**(env or {}))
    server = _server()
    if server.forks(variables) and kwargs.keys() <= {"cwd", "input"}:
        start = ("-c", _RUNBOOK.format(server.python)) if words[:1] == ["runbook"] else COMMAND[1:]
        return server.run([*start, *words], env=variables, **kwargs)
    return subprocess.run(
        [*COMMAND, *words],
        env=variables,
        encoding="utf-8",
        errors="surrogateescape",
        **{"capture_output": True, **kwargs},
    )


def run_program(
    *words: object, cwd: object = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a clean environment with `variables`; what it writes is kept."""
    return subprocess.run(
        [*map(str, words)],
        cwd=cwd,
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
    )


def forked_python() -> str:
    """A program in the place of `python` for commands of ckptctl, which are forked."""
    return _server().python


@cache
def torch_server() -> ForkServer:
    """Forks processes that have imported torch and `ckptctl.train`: each would take two seconds."""
    own = (path.stem for path in sorted((REPOSITORY / "ckptctl/train").glob("[a-z]*.py")))
    # The first optimizer of a process would import `torch._dynamo`, for a second.
    loaded = ["torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"]
    variables = clean_environment(OMP_NUM_THREADS="1")
    loaded += [*_CLIENTS, *(f"ckptctl.train.{name}" for name in own)]
    return ForkServer("torch", loaded, variables)


@cache
def _server() -> ForkServer:
    """Forks processes that have imported and used ckptctl without torch, and clients of S3."""
    paths = (path.relative_to(REPOSITORY) for path in (REPOSITORY / "ckptctl").rglob("*.py"))
    modules = [
        ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for path in paths
        if path.parts[1] not in _NEEDS_TORCH and path.name != "__main__.py"
    ]
    modules = [*sorted(modules), *_CLIENTS, "first_uses"]
    variables = clean_environment(CKPTCTL_TEST_CHECKPOINTS=str(checkpoints()))
    return ForkServer("commands", modules, variables)


def validated(text: str) -> dict:
    """The one document in `text`, after it was held against its schema."""
    document = json.loads(text, parse_constant=_refuse)
    name = document["schema"].removeprefix("ckptctl.").removesuffix("/1")
    validator = Draft202012Validator(schema(name), format_checker=FormatChecker())
    validator.validate(document)
    return document


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def interpreter(version: str) -> str:
    """A Python of that version on the path, or of pyenv."""
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "--version"], capture_output=True).returncode == 0:
        return found
    for path in sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python")):
        return str(path)
    pytest.skip(f"no Python {version} on this machine")


_FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
n_bytes = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))
from ckptctl.__main__ import main
sys.exit(main())
"""


def run_on_full_disk(n_bytes: int, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a command whose files cannot grow beyond `n_bytes`.

    It writes no byte code: Python would leave that truncated beside the modules.
    """
    command = [sys.executable, "-B", "-c", _FULL, str(n_bytes), *map(str, words)]
    return run_program(*command)

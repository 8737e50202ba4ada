"""Running the command line in a process of its own; its documents against their schemas."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator, FormatChecker
from next_commands import follow

from ckptctl.cli.schemas import schema

REPOSITORY = Path(__file__).resolve().parent.parent
COMMAND = (sys.executable, "-m", "ckptctl")


def clean_environment(**changes: str) -> dict[str, str]:
    """The environment without what would change the answers: colour, width, our own variables."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CKPTCTL_", "_CKPTCTL"))
        and name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM", "PYTHONDONTWRITEBYTECODE")
    }
    # An installed package is compiled: so is this one, where it cannot lie in the tree.
    compiled = str(REPOSITORY / ".cache" / "bytecode")
    paths = {"PYTHONPATH": str(REPOSITORY), "PYTHONPYCACHEPREFIX": compiled}
    return {**kept, **paths, **changes}


def run_ckptctl(
    *args: object, env: dict[str, str] | None = None, **kwargs: object
) -> subprocess.CompletedProcess[str]:
    """Run `ckptctl` with `args`; what it writes is kept unless `kwargs` say otherwise."""
    return subprocess.run(
        [*COMMAND, *map(str, args)],
        env=clean_environment(**(env or {})),
        encoding="utf-8",
        errors="surrogateescape",
        **{"capture_output": True, **kwargs},
    )


def run_and_follow(
    *args: object, env: dict[str, str] | None = None, **kwargs: object
) -> subprocess.CompletedProcess[str]:
    """Run `ckptctl` as `run_ckptctl` does, and what its `next:` says; see `next_commands`."""
    done = run_ckptctl(*args, env=env, **kwargs)
    said = (done.stdout or "") + (done.stderr or "")
    cwd = Path(str(kwargs.get("cwd") or Path.cwd()))
    variables = clean_environment(**(env or {}))
    follow([*map(str, args)], done.returncode, said, cwd=cwd, env=variables)
    return done


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

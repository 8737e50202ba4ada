"""Frameworks for the tests that run them, from an environment of their own.

`make frameworks` installs it, or `CKPTCTL_FRAMEWORKS` names the Python of another one. A test
whose framework cannot be imported there is skipped, with the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from command_line import REPOSITORY, clean_environment, run_ckptctl

ENVIRONMENT = REPOSITORY / ".cache" / "framework-venv" / "bin" / "python"
RECORD = REPOSITORY / ".cache" / "compatibility.jsonl"
JOBS = Path(__file__).parent / "jobs"
DISTRIBUTIONS = {
    "composer": "mosaicml",
    "olmo_core": "ai2-olmo-core",
    "megatron.core": "megatron-core",
    "lightning.fabric": "lightning",
}
"""Where the name of a module is not that of its distribution."""

_OPERATORS = (
    "import torch; [torch.library.define(f'torchvision::{name}', '(Tensor a, Tensor b, "
    "float c) -> Tensor') for name in ('nms', 'qnms')]; "
)
BEFORE = {"composer": _OPERATORS, "timm": _OPERATORS}
"""What has to run before an import: torchvision lacks its operators without CUDA."""

Run = Callable[..., subprocess.CompletedProcess[str]]


def interpreter() -> str:
    """The Python that can import frameworks, if any can."""
    named = os.environ.get("CKPTCTL_FRAMEWORKS")
    return named or str(ENVIRONMENT if ENVIRONMENT.exists() else sys.executable)


@cache
def version_of(framework: str) -> str:
    """The version of a framework that can be imported; skips the test if it cannot."""
    code = f"{BEFORE.get(framework, '')}import {framework}, torch"
    code += "; from importlib.metadata import version as v"
    code += f"; print(v({DISTRIBUTIONS.get(framework, framework)!r}))"
    done = subprocess.run([interpreter(), "-c", code], capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it was ended"])[-1]
        pytest.skip(f"{framework} cannot be imported ({why}); `make frameworks` installs it")
    return done.stdout.split()[-1]


def torchrun(n_ranks: int = 2) -> Sequence[str]:
    """The arguments of Python that start a script on so many ranks."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks))


def seal_by_watch(root: Path) -> None:
    """Seal what a framework without an integration that seals has saved."""
    for _ in range(2):  # a step is sealed once two listings of it are equal
        done = run_ckptctl("watch", root, "--once", "--grace", 0)
        assert done.returncode == 0, done.stdout


def record(framework: str, variant: str = "", **facts: object) -> None:
    """Keep what a test has shown of a framework, for `tools/compatibility.py`.

    `variant` is what a framework can save besides its usual steps.
    """
    code = "from importlib.metadata import version as v; import sys; print(v(sys.argv[1]))"
    names = (DISTRIBUTIONS.get(framework, framework).replace("_", "-"), "torch")
    version, torch = (
        subprocess.check_output([interpreter(), "-c", code, name], text=True).strip()
        for name in names
    )
    line = {"framework": names[0], "variant": variant, "version": version, "torch": torch}
    with open(RECORD, "a", encoding="utf-8") as file:
        file.write(json.dumps(line | facts) + "\n")


def job_environment(**changes: str) -> dict[str, str]:
    kept = clean_environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONWARNINGS="ignore")
    return {**kept, **changes}

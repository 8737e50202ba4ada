"""What the tests of the integrations share."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from live_frameworks import JOBS, Run, interpreter, job_environment, torchrun, version_of


@pytest.fixture(scope="session")
def run_job() -> Run:
    """A function that runs the job of a framework; by default on two ranks of torchrun."""

    def run(
        framework: str,
        root: Path,
        *options: object,
        n_ranks: int = 2,
        launcher: Sequence[str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        version_of(framework)
        start = torchrun(n_ranks) if launcher is None else launcher
        job = JOBS / f"{framework.replace('.', '_')}_job.py"
        return subprocess.run(
            [interpreter(), *start, str(job), str(root), *map(str, options)],
            env=job_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # in one file, as a job script redirects it
            text=True,
        )

    return run

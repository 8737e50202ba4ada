"""Running `small_job.py`, and reading what it printed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from command_line import REPOSITORY, clean_environment, torch_server

N_SAMPLES = 96


def run_job(folder: Path, *options: object, name: str = "run", **variables: str):
    """Run the job to its end, through all attempts; its output is in `folder/NAME.jsonl`."""
    files = ("--root", folder / name, "--out", folder / f"{name}.jsonl")
    words = ["-m", "small_job", *map(str, files), *map(str, options)]
    paths = f"{Path(__file__).parent}:{REPOSITORY}"
    return torch_server().run(
        words, env=clean_environment(PYTHONPATH=paths, OMP_NUM_THREADS="1", **variables)
    )


def codes_of(done: subprocess.CompletedProcess[str]) -> list[int]:
    """How each attempt ended."""
    assert done.stdout, done.stderr
    codes: list[int] = json.loads(done.stdout.splitlines()[-1])["codes"]
    return codes


def rows_of(folder: Path, name: str = "run") -> dict[int, dict]:
    """The result of the run: for each step the line of the attempt that kept it."""
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def losses(rows: dict[int, dict]) -> dict[int, float]:
    return {step: row["loss"] for step, row in rows.items()}


def samples(rows: dict[int, dict]) -> list[int]:
    """All samples consumed, in the order of the run."""
    return [each for step in sorted(rows) for each in rows[step]["ids"]]


def report_of(folder: Path, name: str = "run") -> dict:
    """The report of the newest resume."""
    newest = max((folder / name / ".ckptctl" / "attempts").glob("*.resume.json"))
    found: dict = json.loads(newest.read_text())
    return found

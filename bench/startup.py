"""Start of commands, against a Python that does nothing: processor time of whole processes.

On a local root of 20 steps that a framework wrote, and `pick` on one of 3,000.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

from measuring import REPOSITORY, Row, Size, ckptctl, folder, least, processes, python
from metadata_files import write_metadata, write_shards

N_STEPS, MANY_STEPS = 20, 3_000
GOALS = {
    "--version": 10,
    "--help": 12,
    "explain": 15,
    "pick --level listing": 20,
    "pick": 20,
    "scan": 24,  # of the three steps alone
    "verify": 24,
    "preflight": 24,
}
"""How many times as long as `python -c pass` each may take."""


def extracted(parent: Path) -> Path:
    """A root of the three steps that a framework wrote."""
    with tarfile.open(REPOSITORY / "fixtures" / "frameworks.tar.xz") as tar:
        tar.extractall(parent, filter="data")
    return parent / "frameworks" / "kempnerforge" / "checkpoints"


def make_root(root: Path, written: Path) -> Path:
    """The same root, and 17 copies of its first step as older ones."""
    shutil.copytree(written, root, symlinks=True)
    others = [number for number in range(1, 30) if number % 10][: N_STEPS - 3]
    for number in others:
        shutil.copytree(written / "step_10", root / f"step_{number}")
    return root


def make_steps(root: Path, n_steps: int) -> Path:
    """A root of steps of which only listing and metadata are sound."""
    for number in range(n_steps):
        step = root / f"step_{number}"
        write_metadata(step, n_tensors=5, n_ranks=2)
        write_shards(step, n_tensors=5, n_ranks=2)
    return root


def rows(size: Size) -> Iterator[Row]:
    """Each command beside `python -c pass`; `pick` on many steps beside `pick` on few."""
    with folder() as name:
        written = extracted(Path(name))
        root = make_root(Path(name, "many-copies"), written)
        few = make_steps(Path(name, "few"), N_STEPS)
        many = make_steps(Path(name, "many"), size.of(MANY_STEPS, least=N_STEPS))
        commands = {
            "pass": python("pass"),
            "--version": ckptctl("--version"),
            "--help": ckptctl("--help"),
            "explain": ckptctl("explain", "shard.truncated"),
            "pick --level listing": ckptctl("pick", root, "--level", "listing"),
            "pick": ckptctl("pick", root),
            "scan": ckptctl("scan", written),
            "verify": ckptctl("verify", root / "step_30"),
            "preflight": ckptctl("preflight", root),
            "few": ckptctl("pick", few, "--level", "listing"),
            "many": ckptctl("pick", many, "--level", "listing"),
        }
        taken = processes(commands, 3 * size.rounds)
        n_many = len(list(many.glob("step_*")))
    milliseconds = {what: 1_000 * least(taken, what) for what in taken}
    for what, goal in GOALS.items():
        yield Row(
            f"`ckptctl {what}`",
            milliseconds[what],
            "ms",
            milliseconds["pass"],
            "`python -c pass`",
            goal=goal,
        )
    yield Row(
        f"`ckptctl pick --level listing` on {n_many:,} steps",
        milliseconds["many"],
        "ms",
        milliseconds["few"],
        f"on {N_STEPS}",
        goal=2,
    )

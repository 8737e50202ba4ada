"""Rank files that frameworks write, interrupted in the middle of saves, and loaded by them.

While a framework saves on several ranks, all its processes are stopped at many moments and the
root is copied: it then holds what SIGKILL at that moment leaves, since nothing that a process
still has in memory reaches a file. At the last moment they are killed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import REPOSITORY
from live_frameworks import interpreter, job_environment, record, torchrun, version_of

import ckptctl
from ckptctl import Level, Severity

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.long]

DISTRIBUTIONS = {
    "transformers": "transformers",
    "trl": "trl",
    "zero1": "deepspeed",
    "zero3": "deepspeed",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "verl": "verl",
    "nvrx": "nvidia_resiliency_ext",
    "composer": "composer",
    "torchtune": "torchtune",
}
FOLDERS = {"accelerate": "checkpoints", "nvrx": "session"}
"""Where the steps of a framework are in the folder that it is given."""
N_SAVES, WIDTH = 12, 192
N_RANKS = 2


def command(framework: str, out: Path, *arguments: object, n_ranks: int = N_RANKS) -> Sequence[str]:
    script = REPOSITORY / "fixtures" / "rank_files.py"
    options = ("--width", WIDTH, *arguments)
    return [interpreter(), *torchrun(n_ranks), str(script), framework, str(out), *map(str, options)]


def lines(journal: Path) -> list[Mapping[str, object]]:
    """What a job has recorded; a line that is being written is left out."""
    text = journal.read_text() if journal.exists() else ""
    return [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]


def signal_ranks(job: subprocess.Popen[bytes], number: int) -> None:
    """Signal every rank of torchrun: its children, which lead sessions of their own."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    for pid in map(int, children):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
        while number == signal.SIGSTOP and is_running(pid):
            time.sleep(0.0005)


def is_running(pid: int) -> bool:
    """Whether a thread of a process runs or waits for the disk, until the stop takes effect."""
    states = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            states.append((thread / "stat").read_text().rpartition(")")[2].split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return any(state not in "TtZX" for state in states)


@dataclass(frozen=True)
class Moment:
    """A copy of the root of a job, and the steps whose save had ended on every rank."""

    root: Path
    saved: frozenset[int]


@dataclass(frozen=True)
class Interrupted:
    framework: str
    moments: Sequence[Moment]
    digests: Mapping[int, str]
    """What every rank held in memory when the save of a step began."""


@pytest.fixture(scope="module", params=DISTRIBUTIONS)
def interrupted(request, tmp_path_factory) -> Interrupted:
    """A job that was stopped many times in its saves, and killed in the last."""
    framework = request.param
    version_of(DISTRIBUTIONS[framework])
    folder = tmp_path_factory.mktemp(framework)
    out, journal = folder / "run", folder / "journal"
    root = out / FOLDERS.get(framework, "")
    with open(folder / "console", "wb") as console:
        job = subprocess.Popen(
            command(framework, out, "--saves", N_SAVES + 2, "--journal", journal),
            env=job_environment(),
            stdout=console,
            stderr=subprocess.STDOUT,
        )
    moments: list[Moment] = []
    try:
        for _ in moments_of(job, journal, root):
            signal_ranks(job, signal.SIGSTOP)
            saved = frozenset(line["saved"] for line in lines(journal) if "saved" in line)
            moments.append(Moment(folder / f"moment-{len(moments)}", saved))
            shutil.copytree(root, moments[-1].root, symlinks=True)
            signal_ranks(job, signal.SIGCONT)
        signal_ranks(job, signal.SIGKILL)
    finally:
        job.kill()
        job.wait()
    recorded = lines(journal)
    digests = {line["saving"]: line["digest"] for line in recorded if "saving" in line}
    assert len(digests) >= N_SAVES, (folder / "console").read_text()[-3000:]
    return Interrupted(framework, moments, digests)


def moments_of(job: subprocess.Popen[bytes], journal: Path, root: Path) -> Iterator[None]:
    """Return at each moment at which a job is to be stopped, until the last save.

    In the first two saves that is whenever a file appears: nothing older is there to compare
    the first one with. In the others it is once, at a part of what those two took.
    """
    took_s = 0.0
    for number in range(N_SAVES):
        while _count("saving", journal) <= number:
            if job.poll() is not None:
                return
            time.sleep(0.0005)
        began, before = time.monotonic(), names_in(root)
        while number < 2 and _count("saved", journal) <= number:
            if before != (before := names_in(root)):
                yield
            time.sleep(0.0005)
        if number < 2:
            took_s = time.monotonic() - began
        else:
            time.sleep(took_s * (number - 2) / (N_SAVES - 3))
            yield


def _count(event: str, journal: Path) -> int:
    return sum(event in line for line in lines(journal))


def names_in(root: Path) -> frozenset[str]:
    return frozenset(os.path.join(at, name) for at, _, names in os.walk(root) for name in names)


def test_a_save_that_has_ended_is_never_refused(interrupted):
    for moment in interrupted.moments:
        chosen = ckptctl.pick(str(moment.root), grace_s=0)
        assert not moment.saved or chosen.step >= max(moment.saved), chosen.message


def test_the_framework_restores_what_is_called_complete(interrupted, tmp_path):
    complete: dict[str, int] = {}
    for moment in interrupted.moments:
        for report in ckptctl.scan(str(moment.root), level=Level.CONTENT, grace_s=0).reports:
            is_complete = report.verdict.value in ("complete", "unverifiable")
            assert is_complete or report.number not in moment.saved, report.findings
            # Of torchtune's epochs only the last has an optimizer: the others start a new run.
            is_whole = is_complete and report.state.optimizer.found
            if is_whole and report.number not in moment.saved:
                complete[report.url] = report.number
    chosen = ckptctl.pick(str(resumable(interrupted)), grace_s=0)
    complete[chosen.path] = chosen.step
    assert loaded_by(interrupted.framework, tmp_path, *complete) == {
        path: interrupted.digests[step] for path, step in complete.items()
    }
    record(DISTRIBUTIONS[interrupted.framework], stopped=len(interrupted.moments))


def resumable(interrupted: Interrupted) -> Path:
    """The root at the last moment in which an optimizer can be restored from it.

    torchtune writes over that of the epoch before, which a kill can leave without one.
    """
    roots = [moment.root for moment in reversed(interrupted.moments)]
    chosen = (ckptctl.pick(str(root), grace_s=0).chosen for root in roots)
    return next(root for root, one in zip(roots, chosen, strict=True) if one.state.optimizer.found)


def _halved(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def _emptied(data: bytes) -> bytes:
    return b""


ARCHIVES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")
FAULTS = {
    None: set(),  # deleted: where no name states that it was there, the step before shows it
    _halved: {"record.framing", "file.unreadable"},
    _flipped: {"record.crc", "record.framing", "file.unreadable"},
    _emptied: {"file.unreadable", "file.missing"},
}
"""What can be found in a damaged archive."""


def test_damage_is_found_or_does_no_harm(interrupted, tmp_path):
    """Of each file in turn: deleted, halved, a byte flipped, emptied."""
    root = tmp_path / "root"
    shutil.copytree(resumable(interrupted), root, symlinks=True)
    chosen = ckptctl.pick(str(root), grace_s=0)
    of_step = re.compile(rf"(?<![0-9])0*{chosen.step}(?![0-9])")
    harmless: dict[str, int] = {}
    n_damaged = 0
    for name in sorted(names_in(root)):
        path = Path(name)
        is_of_step = path.name == "recipe_state.pt" or of_step.search(str(path.relative_to(root)))
        if path.is_symlink() or not is_of_step:
            continue
        data = path.read_bytes()
        for damage, codes in FAULTS.items():
            if damage is _flipped and path.suffix == ".safetensors":
                continue  # nothing proves its bytes but a seal
            n_damaged += 1
            if damage is None:
                path.unlink()
            else:
                path.write_bytes(damage(data))
            found = ckptctl.pick(
                str(root), level="content", accept_unverifiable=True, grace_s=0, max_fallback=9
            )
            is_named = found.chosen is not None and found.absent != chosen.absent
            if found.chosen is not None and found.path == chosen.path and not is_named:
                copied = tmp_path / f"harmless-{len(harmless)}"
                shutil.copytree(root, copied, symlinks=True)
                harmless[found.path.replace(str(root), str(copied))] = chosen.step
            elif path.suffix in ARCHIVES and damage is not None:
                report = ckptctl.verify(f"{root}@{chosen.step}", level="content", grace_s=0)
                faults = {one.code for one in report.with_severity(Severity.FAULT)}
                assert faults, path
                assert faults <= codes | {"record.unverifiable"}, report.findings
            path.write_bytes(data)
    assert not harmless or loaded_by(interrupted.framework, tmp_path, *harmless) == dict.fromkeys(
        harmless, interrupted.digests[chosen.step]
    )
    record(DISTRIBUTIONS[interrupted.framework], damaged=n_damaged)


@pytest.mark.parametrize(
    ("framework", "of_ranks"),
    [
        ("transformers", "rng_state_{}.pth"),
        ("zero3", "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"),
        ("accelerate", "random_states_{}.pkl"),
        ("verl", "actor/optim_world_size_4_rank_{}.pt"),
        ("nvrx", "{0}/iter_0000008_{0}_local.pt"),
    ],
)
def test_on_four_ranks_each_rank_counts(framework, of_ranks, tmp_path):
    version_of(DISTRIBUTIONS[framework])
    out, journal = tmp_path / "run", tmp_path / "journal"
    arguments = ("--saves", 4, "--journal", journal)
    saved = subprocess.run(
        command(framework, out, *arguments, n_ranks=4),
        env=job_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    digests = {line["saving"]: line["digest"] for line in lines(journal) if "saving" in line}
    assert len(digests) > 1, saved.stdout[-3000:]
    chosen = ckptctl.pick(str(out / FOLDERS.get(framework, "")), grace_s=0)
    assert (chosen.step, chosen.chosen.world_size.size) == (max(digests), 4)
    loaded = loaded_by(framework, tmp_path, chosen.path, n_ranks=4)
    assert loaded == {chosen.path: digests[chosen.step]}
    for rank in range(4):
        path = Path(chosen.path.partition("@")[0], of_ranks.format(rank))
        aside = path.rename(tmp_path / "aside")
        report = ckptctl.verify(chosen.path, level="structure", grace_s=0)
        # Where no name states the number of ranks, the step before shows the last one.
        assert path.name in str(report.findings) or "file.fewer" in str(report.findings)
        aside.rename(path)
    record(DISTRIBUTIONS[framework], ranks=4)


def loaded_by(
    framework: str, folder: Path, *steps: str, n_ranks: int = N_RANKS
) -> Mapping[str, str]:
    """The digest of what the framework restored from each step."""
    journal = folder / "loaded"
    arguments = ("--saves", N_SAVES + 2, "--journal", journal, "--load", *steps)
    done = subprocess.run(
        command(framework, folder / "run", *arguments, n_ranks=n_ranks),
        env=job_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return {line["loaded"]: line["digest"] for line in lines(journal)}

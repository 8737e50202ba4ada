"""`--require-seal`: what it promises is compared, by every command, at its default level."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptctl
from ckptctl import Level, Verdict
from ckptctl.errors import CkptctlError
from ckptctl.selection.targets import roots_in
from ckptctl.supervisor.options import RunOptions
from ckptctl.supervisor.restarting import WatchedRoots
from ckptctl.train import resolve

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

KEY = b"a key of thirty-two bytes or so."


@pytest.fixture
def sealed(root: Path) -> Path:
    """Step 500 alone, with a file of train state and one of nobody, sealed with the key."""
    for step in root.iterdir():
        if step.name != "step_500":
            shutil.rmtree(step) if step.is_dir() else step.unlink()
    (root / "step_500" / "config.json").write_text('{"layers": 2}')
    torch.save({"step": 500}, root / "step_500" / "train_state.pt")
    (root / "step_500" / "notes.bin").write_bytes(b"anything" * 100)
    written_s = (root / "step_500" / ".metadata").stat().st_mtime
    for name in ("config.json", "train_state.pt", "notes.bin"):
        os.utime(root / "step_500" / name, (written_s, written_s))
    ckptctl.seal(f"{root}@500", key=KEY)
    return root


def flip(path: Path, at: int | None = None) -> None:
    """Change one byte in the middle of a file, and keep its size and times."""
    about, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 0xFF
    path.write_bytes(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def picked(root: Path, **asked: object) -> int:
    return ckptctl.pick(str(root), **asked).exit_code


def preflighted(root: Path, **asked: object) -> int:
    return ckptctl.preflight(str(root), **asked).exit_code


def scanned(root: Path, **asked: object) -> int:
    scan = ckptctl.scan(str(root), **asked)
    (report,) = scan.reports
    assert (scan.exit_code == 0) == report.usable
    return scan.exit_code


def verified(root: Path, **asked: object) -> int:
    return ckptctl.verify(f"{root}@500", **asked).exit_code


def resolved(root: Path, **asked: object) -> int:
    try:
        assert resolve("auto", str(root), **asked) == str(root / "step_500")
    except CkptctlError as error:
        return error.exit_code
    return 0


def resolved_by_number(root: Path, **asked: object) -> int:
    try:
        assert resolve(500, str(root), **asked) == str(root / "step_500")
    except CkptctlError as error:
        return error.exit_code
    return 0


def supervised(root: Path, **asked: object) -> int:
    options = RunOptions().with_keywords(asked)
    return WatchedRoots(roots_in(str(root)), options).inspect().code


COMMANDS: tuple[Callable[..., int], ...] = (
    picked,
    preflighted,
    scanned,
    verified,
    resolved,
    resolved_by_number,
    supervised,
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_a_sound_sealed_step_is_accepted_by_every_command(sealed, command):
    assert command(sealed, require_seal=True, key=KEY) == 0


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
@pytest.mark.parametrize(
    "name", ["__1_0.distcp", ".metadata", "train_state.pt", "config.json", "notes.bin"]
)
def test_one_changed_byte_in_any_file_is_refused_by_every_command(sealed, name, command):
    flip(sealed / "step_500" / name)
    assert command(sealed, require_seal=True, key=KEY) != 0


@pytest.mark.parametrize("level", [Level.LISTING, Level.STRUCTURE])
@pytest.mark.parametrize("key", [None, KEY])
def test_a_level_that_compares_no_bytes_does_not_answer_for_a_required_seal(root, key, level):
    ckptctl.seal(f"{root}@500", key=key)
    report = ckptctl.verify(f"{root}@500", level=level, require_seal=True, key=key)
    assert (report.exit_code, report.verdict) == (22, Verdict.UNVERIFIABLE)
    (fault,) = report.with_severity(ckptctl.Severity.FAULT)
    assert fault.code == "seal.not-compared"
    assert f"level {level.value} does not compare the bytes" in fault.message
    assert "--level content" in (fault.next_command or "")
    assert ckptctl.verify(f"{root}@500", require_seal=True, key=key).level is Level.CONTENT


def test_a_part_of_the_bytes_does_not_prove_a_required_seal(sealed):
    asked = {"require_seal": True, "key": KEY}
    for part in ({"subset": "1/7"}, {"deadline_s": 0.0}):
        report = ckptctl.verify(f"{sealed}@500", **part, **asked)
        assert report.exit_code == 22
        assert "seal.not-compared" in {finding.code for finding in report.findings}


def test_a_step_without_a_seal_is_refused_before_its_bytes_are_read(root):
    report = ckptctl.verify(f"{root}@500", require_seal=True)
    assert (report.exit_code, report.level) == (22, Level.STRUCTURE)


def test_what_a_required_seal_demands_is_not_given_up_by_accepting_the_unverifiable(sealed):
    (sealed / "step_500" / ".ckptctl" / "seal.json").unlink()
    asked = {"require_seal": True, "key": KEY, "accept_unverifiable": True}
    assert picked(sealed, **asked) == 11
    assert picked(sealed, accept_unverifiable=True) == 0


def test_an_older_step_is_compared_too_before_it_replaces_a_damaged_one(root):
    for number in (400, 500):
        ckptctl.seal(f"{root}@{number}", key=KEY)
    flip(root / "step_500" / "__1_0.distcp")
    found = ckptctl.pick(str(root), require_seal=True, key=KEY)
    assert (found.step, found.level) == (400, Level.CONTENT)
    flip(root / "step_400" / "__1_0.distcp")
    assert picked(root, require_seal=True, key=KEY) == 11

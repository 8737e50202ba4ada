"""What the holder of no key can put into a root: steps of another run, older saves, more files.

Each is accepted without `--require-seal`, with a warning, and refused with it. Copies that are
meant, steps that are removed and seals that are made at once are refused by neither.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import ckptctl
from ckptctl import Level, Report, Severity, UsageError
from ckptctl.formats.own.seals import SEAL, EarlierSeal, parse_seal, seal_bytes, seal_digest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

Copy = Callable[[Path], Path]
KEY = b"a key of thirty-two bytes or so."
SEALED = {"require_seal": True, "key": KEY}


@pytest.fixture
def run(checkpoints: Path, copy_of: Copy) -> Path:
    """Steps 100 to 500, of which 300 to 500 are sealed with the key in their order."""
    root = copy_of(checkpoints / "run_fsdp4")
    for number in (300, 400, 500):
        ckptctl.seal(f"{root}@{number}", key=KEY)
    return root


def found(root: Path, number: int, **asked: object) -> Report:
    return ckptctl.verify(f"{root}@{number}", level=Level.CONTENT, key=KEY, **asked)


def codes(report: Report, severity: Severity = Severity.WARNING) -> set[str]:
    return {one.code for one in report.with_severity(severity)}


def refused(root: Path, number: int, code: str) -> None:
    """The step has a warning of this code, and where a seal is required it is no step to use."""
    report = found(root, number)
    assert (report.exit_code, codes(report)) == (0, {code})
    required = found(root, number, require_seal=True)
    assert (required.exit_code, codes(required, Severity.FAULT)) == (22, {"seal.required"})
    assert code in codes(required)
    chosen = ckptctl.pick(str(root), **SEALED).chosen
    assert chosen is None or chosen.number != number


def seal_of(root: Path, number: int):
    return parse_seal((root / f"step_{number}" / SEAL).read_bytes())


def save_again(root: Path, number: int) -> None:
    """Another save of the step: the same tensors, with another file beside them, and its seal."""
    (root / f"step_{number}" / "config.json").write_text('{"save": 2}')
    ckptctl.seal(f"{root}@{number}", replace=True, key=KEY)


# A sound root


def test_seals_of_one_root_name_its_run_their_order_and_each_other(run):
    seals = [seal_of(run, number) for number in (300, 400, 500)]
    document = json.loads((run / ".ckptctl" / "root.json").read_text())
    assert {seal.run for seal in seals} == {document["run"]}
    assert [seal.sequence for seal in seals] == [1, 2, 3]
    assert [(one.name, one.sequence, one.seal) for one in seals[2].earlier] == [
        ("step_300", 1, seal_digest(seals[0])),
        ("step_400", 2, seal_digest(seals[1])),
    ]
    report = found(run, 500, require_seal=True)
    assert (report.exit_code, codes(report)) == (0, set())
    assert (report.seal_run, report.seal_sequence) == (document["run"], 3)


def test_a_root_that_was_moved_or_mirrored_with_its_sentinel_is_accepted(run, tmp_path):
    mirror = shutil.copytree(run, tmp_path / "mirror")
    assert ckptctl.pick(str(mirror), **SEALED).step == 500


@pytest.mark.parametrize("gone", [(300,), (400,), (300, 400), (500,)])
def test_removed_steps_contradict_no_seal(run, gone):
    for number in gone:
        shutil.rmtree(run / f"step_{number}")
    for number in {300, 400, 500} - set(gone):
        assert found(run, number, require_seal=True).exit_code == 0


def test_a_step_that_was_saved_and_sealed_again_is_accepted_and_so_are_the_others(run):
    save_again(run, 300)
    ckptctl.seal(f"{run}@200", key=KEY)
    for number in (200, 300, 400, 500):
        report = found(run, number, require_seal=True)
        assert (report.exit_code, codes(report)) == (0, set())
    assert seal_of(run, 300).sequence == 4


def test_steps_that_are_sealed_at_once_are_all_accepted(checkpoints, copy_of):
    root = copy_of(checkpoints / "run_fsdp4")
    numbers = (100, 200, 300, 400, 500)
    threads = [
        threading.Thread(target=ckptctl.seal, args=(f"{root}@{number}",), kwargs={"key": KEY})
        for number in numbers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ckptctl.seal(f"{root}@500", replace=True, key=KEY)
    for number in numbers:
        assert found(root, number, require_seal=True).exit_code == 0


def test_marks_are_no_files_that_were_added(run):
    ckptctl.mark(f"{run}@500", "pinned")
    assert found(run, 500, require_seal=True).exit_code == 0


# Another run


@pytest.fixture
def other(checkpoints: Path, copy_of: Copy) -> Path:
    """Step 500 of another run, sealed with the same key."""
    root = copy_of(checkpoints / "run_fsdp4")
    ckptctl.seal(f"{root}@500", key=KEY)
    return root


def test_a_step_of_another_run_is_refused(run, other):
    shutil.rmtree(run / "step_500")
    shutil.copytree(other / "step_500", run / "step_500")
    refused(run, 500, "seal.other-run")


def test_a_root_that_records_no_run_contradicts_no_seal_and_proves_none(other):
    (other / ".ckptctl" / "root.json").unlink()
    assert codes(found(other, 500)) == set()
    required = found(other, 500, require_seal=True)
    assert (required.exit_code, codes(required)) == (22, {"seal.other-run"})
    named = seal_of(other, 500).run
    assert found(other, 500, require_seal=True, seal_run=named).exit_code == 0


def test_the_caller_names_the_run_that_seals_must_be_of(run, other):
    own, another = (seal_of(root, 500).run for root in (run, other))
    assert found(run, 500, require_seal=True, seal_run=own).exit_code == 0
    assert found(run, 500, require_seal=True, seal_run=another).exit_code == 22
    # Where all of the root was replaced, its sentinel agrees with it.
    shutil.rmtree(run)
    shutil.copytree(other, run)
    assert found(run, 500, require_seal=True).exit_code == 0
    assert found(run, 500, require_seal=True, seal_run=own).exit_code == 22
    with pytest.raises(UsageError, match="32 hexadecimal digits"):
        found(run, 500, seal_run="run-1234")


# An older save


def test_an_older_save_in_the_place_of_a_newer_one_is_refused(run, tmp_path):
    old = shutil.copytree(run / "step_400", tmp_path / "step_400")
    save_again(run, 400)
    save_again(run, 500)
    shutil.rmtree(run / "step_400")
    shutil.copytree(old, run / "step_400")
    refused(run, 400, "seal.rolled-back")
    assert found(run, 500, require_seal=True).exit_code == 0


def test_an_older_save_is_refused_by_what_a_later_seal_took_over_from_one_that_is_gone(
    run, tmp_path
):
    old = shutil.copytree(run / "step_300", tmp_path / "step_300")
    save_again(run, 300)
    save_again(run, 400)  # names the new seal of 300
    shutil.rmtree(run / "step_300")
    save_again(run, 500)  # finds that only in the seal of 400
    shutil.rmtree(run / "step_400")
    shutil.copytree(old, run / "step_300")
    refused(run, 300, "seal.rolled-back")


def test_a_step_under_another_number_is_corrupt_and_under_another_name_refused(run):
    (run / "step_500").rename(run / "step_600")
    assert found(run, 600, require_seal=True).exit_code == 21
    (run / "step_600").rename(run / "step-500")
    refused(run, 500, "seal.renamed")


def test_a_root_that_was_set_back_shows_by_the_place_of_its_newest_seal(run, tmp_path):
    before = shutil.copytree(run, tmp_path / "before")
    save_again(run, 500)
    newest = found(run, 500, require_seal=True).seal_sequence
    assert newest == 4
    asked = {"require_seal": True, "seal_sequence": newest}
    assert found(run, 500, **asked).exit_code == 0
    assert found(run, 300, **asked).exit_code == 0
    report = found(before, 500, **asked)
    assert (report.exit_code, codes(report)) == (22, {"seal.set-back"})
    shutil.rmtree(run / "step_500")
    assert ckptctl.pick(str(run), key=KEY, **asked).exit_code == 11


def test_a_seal_of_somebody_without_the_key_is_no_evidence_against_a_step(run):
    forged = seal_of(run, 500)
    step = shutil.copytree(run / "step_500", run / "step_700")
    made = replace(forged, earlier=(EarlierSeal("step_400", 400, 10**9, "ab" * 32),), hmac=None)
    (step / SEAL).write_bytes(seal_bytes(made, b"a key of somebody else, long"))
    assert found(run, 400, require_seal=True).exit_code == 0


# More files


@pytest.mark.parametrize("name", ["train_state.pt", "consolidated/model.safetensors"])
def test_a_file_that_a_framework_may_load_cannot_be_added(run, name):
    path = run / "step_500" / name
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".pt":
        torch.save({"step": 500}, path)
    else:
        path.write_bytes((2).to_bytes(8, "little") + b"{}")
    refused(run, 500, "seal.extra")


def test_a_file_that_a_tool_of_the_user_added_is_part_of_the_next_seal(run):
    (run / "step_500" / "notes.txt").write_text("converted")
    refused(run, 500, "seal.extra")
    ckptctl.seal(f"{run}@500", replace=True, key=KEY)
    assert found(run, 500, require_seal=True).exit_code == 0


def test_a_link_that_was_added_is_refused(run):
    (run / "step_500" / "extra.bin").symlink_to("__0_0.distcp")
    required = found(run, 500, require_seal=True)
    assert (required.exit_code, codes(required, Severity.FAULT)) == (2, {"step.linked"})


# Adopting a step


def test_a_copy_that_is_meant_is_adopted_and_the_seal_records_who_and_why(run, other):
    shutil.rmtree(run / "step_500")
    shutil.copytree(other / "step_500", run / "step_500")
    sealed_for, digest = seal_of(other, 500).run, seal_digest(seal_of(other, 500))
    done = ckptctl.seal(f"{run}@500", adopt="restored from the other cluster", key=KEY)
    assert done.exit_code == 0
    report = found(run, 500, require_seal=True)
    assert (report.exit_code, codes(report)) == (0, set())
    adopted = seal_of(run, 500).adopted
    assert (adopted.run, adopted.seal) == (sealed_for, digest)
    assert adopted.reason == "restored from the other cluster"
    assert adopted.by
    assert adopted.at


def test_only_what_matches_its_seal_is_adopted(run, other):
    shutil.rmtree(run / "step_500")
    shutil.copytree(other / "step_500", run / "step_500")
    shard = run / "step_500" / "__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0xFF
    shard.write_bytes(data)
    before = (run / "step_500" / SEAL).read_bytes()
    assert ckptctl.seal(f"{run}@500", adopt="meant", key=KEY).exit_code == 21
    with pytest.raises(UsageError, match="cannot be adopted"):
        ckptctl.seal(f"{run}@200", adopt="meant", key=KEY)
    with pytest.raises(UsageError, match="nothing to adopt"):
        ckptctl.seal(f"{run}@400", adopt="meant", key=KEY)
    with pytest.raises(UsageError, match=r"cannot be adopted: seal\.no-key"):
        ckptctl.seal(f"{other}@500", adopt="meant")
    assert (run / "step_500" / SEAL).read_bytes() == before

"""A copy under a further number is reported; folders that were renamed on purpose are not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from storage.faulty import FaultyStore

import ckptctl
from ckptctl import Level, Report, Severity, Verdict
from ckptctl.findings import ClaimName, ClaimState
from ckptctl.formats.frameworks.layouts import step_name
from ckptctl.inspection.inspecting import inspect_step
from ckptctl.inspection.open_step import OpenStep
from ckptctl.options import Requirements
from ckptctl.selection.roots import neighbours_of
from ckptctl.storage.contract import StoreKind
from ckptctl.storage.local import LocalStore

pytestmark = pytest.mark.torch


def told(report: Report) -> list[str]:
    about = ("step.wrong-step", "metadata.foreign")
    return [finding.code for finding in report.findings if finding.code in about]


def test_a_copy_under_a_further_number_is_passed_over(root):
    shutil.copytree(root / "step_300", root / "step_700")
    report = ckptctl.verify(f"{root}@700")
    assert (report.verdict, report.exit_code) == (Verdict.CORRUPT, 21)
    assert told(report) == ["step.wrong-step"]
    (finding,) = report.with_severity(Severity.FAULT)
    assert "step_700 holds another step" in finding.message
    assert "that of step 500 beside it 500" in finding.message
    chosen = ckptctl.pick(str(root))
    assert (chosen.step, [over.report.number for over in chosen.passed_over]) == (500, [700])


def test_who_accepts_it_has_it(root):
    shutil.copytree(root / "step_300", root / "step_700")
    said = ckptctl.mark(f"{root}@700", "accepted", reason="back to 300 on purpose")
    assert said.path is not None
    assert ckptctl.pick(str(root)).step == 700
    report = ckptctl.verify(f"{root}@700")
    assert (report.exit_code, told(report)) == (0, ["metadata.foreign"])
    assert ckptctl.mark(f"{root}@700", "accepted").path is None  # reported once
    # The mark applies to this folder, and to no copy of it.
    shutil.copytree(root / "step_700", root / "step_800")
    assert told(ckptctl.verify(f"{root}@800")) == ["step.wrong-step"]


def test_a_folder_that_was_renamed_and_left_nothing_is_another_step_until_it_is_accepted(root):
    (root / "step_500").rename(root / "step_700")
    report = ckptctl.verify(f"{root}@700")
    assert (report.exit_code, told(report)) == (21, ["step.wrong-step"])
    assert ckptctl.pick(str(root)).step == 400
    ckptctl.mark(f"{root}@700", "accepted", reason="renamed on purpose")
    assert ckptctl.pick(str(root)).step == 700


@pytest.mark.parametrize("number", [1, 250])
def test_an_earlier_number_is_a_contradiction_where_the_steps_beside_count_their_names(
    number, root
):
    shutil.copytree(root / "step_500", root / f"step_{number}")
    report = ckptctl.verify(f"{root}@{number}")
    assert (report.exit_code, told(report)) == (21, ["step.wrong-step"])


@pytest.mark.parametrize("number", [499, 501])
def test_a_neighbouring_number_is_no_contradiction(number, root):
    shutil.copytree(root / "step_500", root / f"step_{number}")
    report = ckptctl.verify(f"{root}@{number}")
    assert (report.exit_code, told(report)) == (0, ["metadata.foreign"])


def test_a_count_of_something_else_is_no_witness(checkpoints, tmp_path):
    # This run counts 100 at its step 200.
    for source, number in ((200, 200), (200, 700)):
        step = checkpoints / "async_2" / f"step_{source}"
        shutil.copytree(step, tmp_path / f"step_{number}")
    report = ckptctl.verify(f"{tmp_path}@700")
    assert (report.exit_code, told(report)) == (0, ["metadata.foreign"])


def test_copies_of_nothing_that_is_there_contradict_nothing(checkpoints, tmp_path):
    for number in (600, 700):
        shutil.copytree(checkpoints / "run_fsdp4" / "step_500", tmp_path / f"step_{number}")
    assert told(ckptctl.verify(f"{tmp_path}@700")) == ["metadata.foreign"]


def test_every_step_of_a_run_is_what_it_is_called(framework_roots):
    roots = [path.parent for path in framework_roots.rglob("*") if step_name(path.name)]
    reports = [
        report
        for one in sorted({path for path in roots if (path.is_dir())})
        for report in ckptctl.scan(str(one)).reports
        if report.parts
    ]
    assert len(reports) > 10
    assert [told(report) for report in reports] == [[]] * len(reports)


def test_on_an_object_store_the_count_is_asked_where_the_name_is_odd(root):
    shutil.copytree(root / "step_300", root / "step_700")

    def inspected(name: str) -> tuple[list[str], int]:
        store = FaultyStore(LocalStore(str(root)), kind=StoreKind.OBJECT)
        named, older = step_name(name), step_name("step_400")
        assert named is not None
        assert older is not None
        step = OpenStep(store, named)
        beside = neighbours_of(lambda: [older], named.number)
        found = inspect_step(step, Requirements(), level=Level.LISTING, neighbours=beside)
        return told(found.report), store.calls["span"]

    assert inspected("step_500") == ([], 0)
    codes, n_spans = inspected("step_700")
    assert codes == ["step.wrong-step"]
    assert n_spans < 20


def save_by_file(root: Path, number: int, count: int, *, seed: int | None = None) -> Path:
    """A step of one process whose only counter is that of its optimizer."""
    torch = pytest.importorskip("torch")
    step = root / f"step_{number}"
    step.mkdir(parents=True)
    torch.manual_seed(number if seed is None else seed)
    state = {0: {"step": torch.tensor(float(count)), "exp_avg": torch.randn(8)}}
    state[0]["exp_avg_sq"] = torch.rand(8)
    torch.save({"w": torch.randn(8)}, step / "pytorch_model.bin")
    torch.save({"state": state, "param_groups": [{"lr": 0.1}]}, step / "optimizer.bin")
    for file in step.iterdir():
        os.utime(file, (1.7e9, 1.7e9))
    return step


@pytest.mark.torch
@pytest.mark.parametrize("how", ["renamed", "copied", "renamed over the last"])
@pytest.mark.parametrize("taken", [100, 200, 300])
def test_a_step_that_only_its_optimizer_counts_is_told_under_another_name(tmp_path, how, taken):
    if how != "copied" and taken == 100:
        pytest.skip("the first step may have been pruned, and the optimizer begun anew")
    for number in (100, 200, 300, 400):
        save_by_file(tmp_path, number, number)
    further = 400 if how == "renamed over the last" else 500
    shutil.rmtree(tmp_path / f"step_{further}", ignore_errors=True)
    if how == "copied":
        shutil.copytree(tmp_path / f"step_{taken}", tmp_path / f"step_{further}")
    else:
        (tmp_path / f"step_{taken}").rename(tmp_path / f"step_{further}")
    left = (number for number in (400, 300, 200) if (tmp_path / f"step_{number}").exists())
    newest = next(number for number in left if number != further)
    chosen = ckptctl.pick(str(tmp_path))
    assert chosen.step == newest
    assert told(ckptctl.verify(f"{tmp_path}@{further}")) == ["step.wrong-step"]


@pytest.mark.torch
@pytest.mark.parametrize("is_pruned", [False, True])
def test_an_optimizer_that_began_anew_contradicts_no_name(tmp_path, is_pruned):
    for number, count in ((100, 100), (200, 200), (300, 300), (400, 100)):
        save_by_file(tmp_path, number, count)
    if is_pruned:
        shutil.rmtree(tmp_path / "step_100")
    assert ckptctl.pick(str(tmp_path)).step == 400


def save_counted(root: Path, number: int, count: int, *, apart: bool) -> None:
    """A step of which the train state counts its number and the optimizer `count`."""
    torch = pytest.importorskip("torch")
    save_by_file(root, number, count)
    step = root / f"step_{number}"
    state = {"step": number, "w": torch.full((8,), float(number))}
    if not apart:
        state["optimizer"] = torch.load(step / "optimizer.bin")
        (step / "optimizer.bin").unlink()
    torch.save(state, step / "last.pt")


@pytest.mark.torch
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("numbers", [(0, 100, 200), (100, 200, 300), (0, 200, 300, 400)])
def test_an_optimizer_that_began_anew_leaves_open_which_step_it_is(tmp_path, numbers, apart):
    for number in numbers[:-1]:
        save_counted(tmp_path, number, number, apart=apart)
    save_counted(tmp_path, numbers[-1], 100, apart=apart)
    chosen = ckptctl.pick(str(tmp_path))
    assert (chosen.step, chosen.passed_over) == (numbers[-1], ())
    assert chosen.chosen.claim(ClaimName.IDENTITY).state is ClaimState.UNKNOWN


@pytest.mark.torch
def test_an_optimizer_that_another_step_holds_too_lies_in_the_wrong_step(tmp_path):
    for number in (100, 200, 300):
        save_counted(tmp_path, number, number, apart=True)
    shutil.copy2(tmp_path / "step_200" / "optimizer.bin", tmp_path / "step_300")
    codes = [finding.code for finding in ckptctl.verify(f"{tmp_path}@300").findings]
    assert "state.mixed" in codes
    assert ckptctl.pick(str(tmp_path)).step == 200


@pytest.mark.torch
@pytest.mark.parametrize("counts", [(100, 200, 200), (100, 100, 100)])
def test_a_copy_of_the_best_weights_counts_its_own_step(tmp_path, counts):
    torch = pytest.importorskip("torch")
    for number, count in zip((100, 200, 300), counts, strict=True):
        save_by_file(tmp_path, number, number)
        torch.manual_seed(count)
        best = {"model": {"w": torch.randn(8)}, "step": count}
        torch.save(best, tmp_path / f"step_{number}" / "best.pt")
    chosen = ckptctl.pick(str(tmp_path))
    assert (chosen.step, chosen.passed_over) == (300, ())
    assert chosen.chosen.claim(ClaimName.IDENTITY).is_proven

"""The storage folder of a Ray Train job: its snapshot states the order of its checkpoints."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import fsspec
import pytest
from command_line import run_ckptctl
from made_saves import optimizer, weights, write

import ckptctl
from ckptctl.errors import UsageError

SNAPSHOT = "checkpoint_manager_snapshot.json"
NAMES = {
    8: "checkpoint_2026-11-26_11-31-24.927433",
    16: "checkpoint_2026-11-26_11-31-40.158092",
    24: "checkpoint_2026-11-26_11-31-56.004711",
}


def save(root: Path, number: int, **more: object) -> None:
    held = {"net": weights(number), "opt": optimizer(number), "step": number, **more}
    write(root / NAMES[number] / "model.pt", held)


def snapshot(
    root: Path, metrics: Mapping[int, dict[str, object]], order: list[int], **changed: object
) -> None:
    """The snapshot of the checkpoints in `metrics`, of which the last is the latest."""

    def result(number: int) -> dict[str, object]:
        return {"version": 0, "checkpoint_dir_name": NAMES[number], "metrics": metrics[number]}

    numbers = [*metrics]
    content: dict[str, object] = {
        "ray_version": "2.60.0",
        "checkpoint_results": [result(number) for number in order],
        "checkpoint_report_indices": [numbers.index(number) for number in order],
        "latest_checkpoint_result": result(numbers[-1]),
    }
    (root / SNAPSHOT).write_text(json.dumps({**content, **changed}))


STEPS = {number: {"step": number, "loss": 1 / number} for number in NAMES}
EPOCHS = {number: {"epoch": 7, "iter": 100, "loss": 1 / number} for number in NAMES}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "exp"
    for number in NAMES:
        save(root, number)
    (root / ".validate_storage_marker").touch()
    return root


@pytest.mark.parametrize("order", [[8, 16, 24], [24, 8, 16]])
@pytest.mark.parametrize(
    "metrics", [STEPS, EPOCHS, {n: {} for n in NAMES}], ids=["steps", "epochs", "nothing"]
)
def test_the_latest_report_is_chosen_in_whatever_order_the_list_is(root, metrics, order):
    snapshot(root, metrics, order)
    found = ckptctl.pick(str(root))
    assert found.chosen is not None
    assert found.path == f"{root}/{NAMES[24]}"
    assert found.chosen.state.step.value == 24
    assert found.step == (24 if metrics is STEPS else 3)
    assert not found.findings


def test_a_run_that_went_back_is_numbered_by_its_reports(root):
    metrics = {8: {"step": 8}, 24: {"step": 24}, 16: {"step": 16}}
    snapshot(root, metrics, [8, 24, 16])
    assert ckptctl.pick(str(root)).path == f"{root}/{NAMES[16]}"


@pytest.mark.parametrize("content", [None, "", '{"checkpoint_results": [{}]}'])
def test_without_a_snapshot_the_counts_in_the_files_decide(root, content):
    if content is not None:
        (root / SNAPSHOT).write_text(content)
    found = ckptctl.pick(str(root))
    assert (found.step, found.path) == (24, f"{root}/{NAMES[24]}")
    assert ckptctl.verify(f"{root}@16").url == f"{root}/{NAMES[16]}"


def test_the_counts_decide_on_an_object_store_too(root):
    url = f"memory://ray-{root.parent.name}/exp"
    files = fsspec.filesystem("memory")
    files.put(str(root), url, recursive=True)
    assert ckptctl.pick(url).step == 24


def test_without_a_snapshot_and_counts_nothing_is_chosen(tmp_path):
    for name in NAMES.values():
        write(tmp_path / name / "model.pt", {"net": weights(1), "opt": optimizer(1)})
    with pytest.raises(UsageError, match="no name gives a step number"):
        ckptctl.pick(str(tmp_path))


def test_a_checkpoint_that_the_snapshot_names_and_that_is_missing_is_reported(root):
    snapshot(root, STEPS, [*NAMES])
    shutil.rmtree(root / NAMES[24])
    done = run_ckptctl("pick", root, "--detailed-exitcode")
    assert (done.returncode, done.stdout) == (3, f"{root}/{NAMES[16]}\n")
    assert f"{SNAPSHOT} names {NAMES[24]} (step 24), which does not exist" in done.stderr
    for number in (8, 16):
        shutil.rmtree(root / NAMES[number])
    lost = ckptctl.pick(str(root), allow_fresh=True)
    assert (lost.exit_code, lost.reason) == (11, "lost-steps")


def test_a_checkpoint_that_the_snapshot_does_not_name_is_not_chosen_and_is_reported(root):
    snapshot(root, {n: STEPS[n] for n in (8, 16)}, [8, 16])
    found = ckptctl.pick(str(root))
    assert found.step == 16
    (finding,) = found.findings
    assert (finding.code, finding.where) == ("root.further", NAMES[24])


def test_a_damaged_latest_checkpoint_is_passed_over(root):
    snapshot(root, STEPS, [*NAMES])
    path = root / NAMES[24] / "model.pt"
    path.write_bytes(path.read_bytes()[:-100])
    assert ckptctl.pick(str(root)).step == 16


def test_digits_of_a_time_are_no_step_number(root):
    for number, name in NAMES.items():
        assert ckptctl.verify(f"{root}/{name}").number == number
    with pytest.raises(UsageError, match="digits of a time"):
        ckptctl.pick(str(root), pattern=r"checkpoint_.+\.(?P<step>[0-9]{6})")


def test_a_folder_that_ray_has_prepared_is_that_of_a_new_run(tmp_path):
    (tmp_path / ".validate_storage_marker").touch()
    assert ckptctl.pick(str(tmp_path), allow_fresh=True).exit_code == 0


def test_the_storage_path_leads_to_the_folder_of_the_job(root):
    snapshot(root, STEPS, [*NAMES])
    with pytest.raises(UsageError, match="but exp in it does") as refused:
        ckptctl.pick(str(root.parent))
    assert refused.value.next_command == f"ckptctl scan {root}"


def test_a_report_is_called_by_its_training_step_too(root):
    snapshot(root, EPOCHS, [*NAMES])
    assert ckptctl.pick(str(root)).message == "resume from step 3 (training step 24)"
    assert "resume from step 3 (training step 24): " in run_ckptctl("scan", root).stdout

"""What a root without known steps is: empty, a wrong path, or not as empty as it looks."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import pytest

import ckptctl
from ckptctl.errors import PathNotFound, StorageUnavailable, UsageError
from ckptctl.selection.roots import list_root
from ckptctl.selection.targets import check_root_there
from ckptctl.storage.opening import open_store


@pytest.fixture
def step(framework_roots: Path) -> Path:
    """A whole step, of a framework that writes one folder of DCP."""
    return framework_roots / "torchtitan" / "sync" / "checkpoint" / "step-20"


@pytest.mark.parametrize(
    "name", ["last.ckpt", "hpc_ckpt_3.ckpt", "ckpt.pt", "model_final.pth", "optimizer.pt"]
)
def test_a_checkpoint_file_that_names_no_step_is_no_fresh_run(tmp_path, name):
    (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(UsageError, match="gives a step number") as caught:
        ckptctl.pick(str(tmp_path))
    assert caught.value.next_command == f"ckptctl verify {tmp_path / name}"
    with pytest.raises(UsageError, match="gives a step number"):
        ckptctl.scan(str(tmp_path))


@pytest.mark.parametrize("name", ["step-24", "checkpoint-24", "global_step24", "24"])
def test_a_file_that_is_named_as_the_folder_of_a_step_is_refused_as_a_file(tmp_path, name):
    torch = pytest.importorskip("torch")
    file = tmp_path / name
    torch.save({"model": {"w": torch.ones(4, 4)}, "step": 24}, file)
    for command in (ckptctl.verify, ckptctl.show, ckptctl.seal):
        with pytest.raises(UsageError, match=f"{name} is a file, not a step") as caught:
            command(str(file))
        assert caught.value.next_command == f"ckptctl convert {file} {file}-dcp"
    folder = tmp_path / "run" / name  # of one file that has its name
    folder.mkdir(parents=True)
    file.rename(folder / name)
    assert ckptctl.verify(str(folder)).number == 24  # no error


@pytest.mark.parametrize("name", ["last.ckpt", "release", "save-100-final", "best"])
def test_a_checkpoint_folder_that_names_no_step_is_no_fresh_run(tmp_path, step, name):
    shutil.copytree(step, tmp_path / name)
    with pytest.raises(UsageError, match=rf"unknown content \({name}\)"):
        ckptctl.pick(str(tmp_path))


@pytest.mark.parametrize("name", ["step_99999999999999999999", "iter_10000000000000000000000"])
def test_a_number_that_no_step_has_is_reported(tmp_path, step, name):
    shutil.copytree(step, tmp_path / name)
    with pytest.raises(UsageError, match=name):
        ckptctl.pick(str(tmp_path))
    shutil.copytree(step, tmp_path / "step-20")
    for found in (ckptctl.pick(str(tmp_path)), ckptctl.scan(str(tmp_path))):
        (finding,) = (one for one in found.findings if one.code == "step.number")
        assert finding.where == name
    assert ckptctl.pick(str(tmp_path)).step == 20


def test_of_lightning_s_versions_of_a_step_the_highest_is_taken(tmp_path, framework_roots):
    (saved,) = framework_roots.glob("lightning/**/*step=30.ckpt")
    # The oldest file is the newest version: times prove nothing.
    for age, name in enumerate(("step=30-v2.ckpt", "step=30-v1.ckpt", "step=30.ckpt")):
        shutil.copytree(saved, tmp_path / name)
        for file in (tmp_path / name, *(tmp_path / name).rglob("*")):
            os.utime(file, (1_700_000_000 + age, 1_700_000_000 + age))
    found = ckptctl.pick(str(tmp_path))
    assert found.path == str(tmp_path / "step=30-v2.ckpt")
    assert "step.duplicate" not in [finding.code for finding in found.findings]


@pytest.mark.parametrize("name", ["train.log", "config.yaml", "tokenizer.json", "dataset.csv"])
def test_other_files_do_not_keep_a_run_from_being_fresh(tmp_path, name):
    (tmp_path / name).write_text("x")
    assert ckptctl.pick(str(tmp_path)).exit_code == 10
    assert ckptctl.scan(str(tmp_path)).exit_code == 10


def test_a_step_that_is_given_as_a_root_is_a_usage_error(tmp_path):
    for name in ("actor/model_world_size_2_rank_0.pt", "data.pt"):
        file = tmp_path / "global_step_20" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"PK")
    with pytest.raises(UsageError, match="is a step itself"):
        ckptctl.pick(str(tmp_path / "global_step_20"))


def test_a_folder_above_the_root_is_a_usage_error(step):
    above = step.parent.parent
    with pytest.raises(UsageError, match="holds no steps itself, but checkpoint in it does"):
        ckptctl.scan(str(above))


@pytest.mark.parametrize(
    ("name", "content"),
    [("latest_checkpointed_iteration.txt", "20\n"), ("latest", "global_step20"), ("LATEST", "20")],
)
def test_a_pointer_without_any_step_says_that_steps_are_gone(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    found = ckptctl.pick(str(tmp_path), allow_fresh=True)
    assert (found.exit_code, found.answer.value) == (11, "none-usable")
    assert f"{name} names step 20" in found.message
    assert ckptctl.scan(str(tmp_path)).exit_code == 11


def test_a_link_to_a_step_that_is_gone_says_so_too(tmp_path):
    (tmp_path / "latest").symlink_to("step_30")
    assert ckptctl.pick(str(tmp_path)).exit_code == 11


@pytest.mark.parametrize("which", ["latest", "auto", "20"])
def test_a_step_of_a_root_is_no_root(step, which):
    root = step.parent
    for function in (ckptctl.pick, ckptctl.scan):
        with pytest.raises(UsageError, match="a root is required") as caught:
            function(f"{root}@{which}")
        assert caught.value.next_command == f"ckptctl scan {shlex.quote(str(root))}"


def test_a_folder_whose_name_looks_like_a_selected_step_is_itself(tmp_path, step):
    root = tmp_path / "run@1200"
    shutil.copytree(step, root / "step-20")
    assert ckptctl.pick(str(root)).step == 20
    assert ckptctl.verify(f"{root}@20").number == 20
    (tmp_path / "empty@1200").mkdir()
    assert ckptctl.pick(str(tmp_path / "other")).exit_code == 10


def test_a_file_that_is_given_as_a_root_is_a_usage_error(step):
    with pytest.raises(UsageError, match="is a file"):
        ckptctl.pick(str(step / ".metadata"))


def test_a_root_that_is_a_link_to_nowhere_is_not_fresh(tmp_path):
    (tmp_path / "root").symlink_to(tmp_path / "gone")
    with pytest.raises(StorageUnavailable, match="is a link to"):
        ckptctl.pick(str(tmp_path / "root"))


def test_a_root_that_is_given_as_a_step_is_a_usage_error(step):
    for function in (ckptctl.verify, ckptctl.show):
        with pytest.raises(UsageError, match="is a root that holds steps"):
            function(str(step.parent))


def test_a_marker_beside_a_step_says_that_its_save_did_not_end(tmp_path, step):
    for number in (10, 20):
        shutil.copytree(step, tmp_path / f"run--step={number}-last")
    (tmp_path / "run--step=20-last-unfinished").touch()
    found = ckptctl.pick(str(tmp_path), grace_s=0)
    assert found.step == 10
    assert "interrupted save" in found.passed_over[0].reason


def test_a_root_that_another_process_makes_after_the_listing_is_missing_and_no_file(tmp_path):
    root = tmp_path / "new"
    with open_store(str(root)) as store:
        listing = list_root(store)
        root.mkdir()
        with pytest.raises(PathNotFound, match="does not exist"):
            check_root_there(store, listing)


@pytest.mark.parametrize("name", ["gpt-step_200", "step_200.tar.gz", "run7_step-00200_fp32"])
def test_a_checkpoint_beside_the_steps_that_is_further_by_its_name_is_reported(
    tmp_path, step, name
):
    shutil.copytree(step, tmp_path / "step-20")
    if name.endswith(".gz"):
        (tmp_path / name).write_bytes(b"\x1f\x8b")
    else:
        shutil.copytree(step, tmp_path / name)
    for found in (ckptctl.pick(str(tmp_path)), ckptctl.scan(str(tmp_path))):
        (finding,) = (one for one in found.findings if one.code == "root.further")
        assert (finding.where, found.exit_code) == (name, 0)
        assert "step 200" in finding.message


@pytest.mark.parametrize("name", ["gpt-step_10", "logs_step_200", "best", "step_200.txt"])
def test_what_is_older_or_no_checkpoint_is_not_further(tmp_path, step, name):
    shutil.copytree(step, tmp_path / "step-20")
    if name.startswith("gpt"):
        shutil.copytree(step, tmp_path / name)
    else:
        (tmp_path / name).mkdir()
    assert "root.further" not in [one.code for one in ckptctl.pick(str(tmp_path)).findings]


@pytest.mark.parametrize("is_there", [True, False])
def test_no_older_step_replaces_one_that_is_a_link_out_of_the_root(tmp_path, step, is_there):
    root = tmp_path / "root"
    shutil.copytree(step, root / "step-20")
    if is_there:
        shutil.copytree(step, tmp_path / "elsewhere")
    (root / "step-30").symlink_to("../elsewhere")
    for ask in (ckptctl.pick, ckptctl.scan):
        found = ask(str(root))
        assert (found.exit_code, found.chosen) == (2, None)
        assert "step-30 is a link to ../elsewhere; links are not followed" in found.message
        follow = f"ckptctl scan {root} --follow-links {tmp_path}"
        assert found.next_command == (follow if is_there else f"ls -ld {root}/step-30")
    assert ckptctl.pick(str(root), skip=[30]).step == 20


def test_a_link_to_a_step_of_the_root_is_passed_over(tmp_path, step):
    shutil.copytree(step, tmp_path / "step-20")
    (tmp_path / "step-30").symlink_to("step-20")
    assert ckptctl.pick(str(tmp_path)).step == 20

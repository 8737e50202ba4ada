"""Several roots of one run: local disks beside shared storage, some of which may be absent."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from storage.faulty import FaultyStore

import ckptctl
from ckptctl.errors import AccessDenied, StorageUnavailable, UsageError
from ckptctl.selection import targets
from ckptctl.selection.choosing import Answer
from ckptctl.storage.opening import open_store


@pytest.fixture
def shared(checkpoints: Path, tmp_path: Path) -> Path:
    """A root with steps 10 and 20."""
    return Path(shutil.copytree(checkpoints / "run_bare4", tmp_path / "shared"))


@pytest.fixture
def local(shared: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(shared, tmp_path / "local"))


@pytest.fixture
def break_store(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that has the store of one root fail as a test orders; the others are real."""

    def breaks(root: Path, order: Callable[[FaultyStore], None]) -> None:
        def opened(url: str, *args: object, **kwargs: object):
            store = FaultyStore(open_store(url, *args, **kwargs))
            if url == str(root):
                order(store)
            return store

        monkeypatch.setattr(targets, "open_store", opened)

    return breaks


def codes(found) -> list[str]:
    return [finding.code for finding in found.findings]


def test_the_newest_step_of_all_roots_is_taken_wherever_it_is(shared, local):
    shutil.rmtree(shared / "step_20")
    assert ckptctl.pick(str(shared), str(local)).path == f"{local}/step_20"
    assert ckptctl.scan(str(shared), str(local)).chosen == f"{local}/step_20"


def test_at_one_step_the_earlier_root_is_preferred(shared, local):
    assert ckptctl.pick(str(local), str(shared)).path == f"{local}/step_20"
    optional = ckptctl.pick(str(shared), optional_roots=[str(local)])
    assert optional.path == f"{shared}/step_20"
    both = ckptctl.pick(str(local), str(shared), optional_roots=[str(local)])
    assert both.path == f"{local}/step_20"


def test_an_optional_root_that_is_absent_is_a_warning(shared, tmp_path):
    found = ckptctl.pick(str(shared), optional_roots=[str(tmp_path / "gone")])
    assert (found.exit_code, found.path) == (0, f"{shared}/step_20")
    assert "root.unavailable" in codes(found)
    scanned = ckptctl.scan(str(shared), optional_roots=[str(tmp_path / "gone")])
    assert "root.unavailable" in codes(scanned)


@pytest.mark.parametrize("error", [StorageUnavailable("EIO"), AccessDenied("denied")])
def test_an_optional_root_that_does_not_answer_is_a_warning(shared, local, break_store, error):
    shutil.rmtree(shared / "step_20")
    break_store(local, lambda store: store.fail("list_dir", error, lasts=True))
    found = ckptctl.pick(str(shared), optional_roots=[str(local)])
    assert (found.exit_code, found.path) == (0, f"{shared}/step_10")
    assert "root.unavailable" in codes(found)


def test_a_mandatory_root_that_does_not_answer_is_an_error(shared, local, break_store):
    error = StorageUnavailable("EIO")
    break_store(local, lambda store: store.fail("list_dir", error, lasts=True))
    with pytest.raises(StorageUnavailable):
        ckptctl.pick(str(shared), str(local))


def test_a_mandatory_root_that_does_not_exist_beside_one_with_steps_is_an_error(shared, tmp_path):
    for command in (ckptctl.pick, ckptctl.scan):
        with pytest.raises(StorageUnavailable, match="a newer step may be") as raised:
            command(str(shared), str(tmp_path / "gone"))
        assert raised.value.exit_code == 75


def test_a_step_of_an_optional_root_that_does_not_answer_is_passed_over(shared, local, break_store):
    shutil.rmtree(shared / "step_20")
    error = StorageUnavailable("EIO")
    break_store(local, lambda store: store.fail("list_tree", error, lasts=True, path="step_20"))
    found = ckptctl.pick(str(shared), optional_roots=[str(local)])
    assert (found.answer, found.path) == (Answer.FELL_BACK, f"{shared}/step_10")
    mandatory = ckptctl.pick(str(shared), str(local))
    assert (mandatory.answer, mandatory.exit_code) == (Answer.UNKNOWN, 75)


def test_an_optional_root_that_does_not_answer_is_no_fresh_run(local, tmp_path, break_store):
    (tmp_path / "empty").mkdir()
    error = StorageUnavailable("EIO")
    break_store(local, lambda store: store.fail("list_dir", error, lasts=True))
    with pytest.raises(StorageUnavailable):
        ckptctl.pick(str(tmp_path / "empty"), optional_roots=[str(local)])


def test_an_optional_root_that_is_absent_leaves_a_fresh_run_fresh(tmp_path):
    (tmp_path / "empty").mkdir()
    found = ckptctl.pick(str(tmp_path / "empty"), optional_roots=[str(tmp_path / "gone" / "run")])
    assert found.answer is Answer.FRESH


@pytest.mark.parametrize("command", [ckptctl.pick, ckptctl.scan])
def test_at_least_one_root_is_mandatory(shared, command):
    with pytest.raises(UsageError, match="at least one must be mandatory"):
        command(str(shared), optional_roots=[str(shared)])
    with pytest.raises(UsageError, match="no checkpoint root"):
        command()


def test_a_rejection_counts_for_the_copy_of_the_same_save_in_another_root(shared, local):
    ckptctl.mark(f"{shared}/step_20", "rejected", reason="the loss jumped")
    for roots in ((str(shared), str(local)), (str(local), str(shared))):
        found = ckptctl.pick(*roots)
        assert found.step == 10
        reasons = [over.reason for over in found.passed_over]
        assert any("which holds the same save" in reason for reason in reasons)


def test_a_rejection_does_not_count_for_another_save_of_that_number(shared, local, checkpoints):
    shutil.rmtree(local / "step_20")
    shutil.copytree(checkpoints / "run_fsdp4" / "step_100", local / "step_20")
    ckptctl.mark(f"{shared}/step_20", "rejected", reason="the loss jumped")
    found = ckptctl.pick(str(shared), str(local), allow_missing_state=True, max_fallback=5)
    assert not any("same save" in over.reason for over in found.passed_over)


def test_resolve_takes_the_newest_step_of_several_roots(shared, local, tmp_path):
    from ckptctl.train import resolve

    shutil.rmtree(shared / "step_20")
    gone = str(tmp_path / "gone")
    roots = [str(shared), str(local)]
    assert resolve("auto", roots, optional_roots=[gone]) == f"{local}/step_20"
    assert resolve(20, roots) == f"{local}/step_20"
    assert resolve(10, roots) == f"{shared}/step_10"
    assert resolve("auto", str(shared), optional_roots=[gone]) == f"{shared}/step_10"
    with pytest.raises(UsageError, match="holds no step 30"):
        resolve(30, roots)
    with pytest.raises(StorageUnavailable, match="a newer step may be"):
        resolve("auto", [str(shared), gone])


def test_a_missing_root_that_is_mandatory_is_not_called_optional(tmp_path):
    picked = ckptctl.pick(str(tmp_path / "run"))
    assert picked.exit_code == 10
    assert "root.unavailable" not in {finding.code for finding in picked.findings}

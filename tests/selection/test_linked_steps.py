"""Steps whose files were moved to another tier, with links in their place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from made_roots import make_templates, put_step, script

import ckptctl
from ckptctl.errors import LinkNotFollowed, NothingToResume, StorageError, UsageError
from ckptctl.findings import ClaimName, ClaimState, Verdict
from ckptctl.selection.choosing import Answer
from ckptctl.storage.contract import Span
from ckptctl.storage.opening import open_store

SHARD = "__0_0.distcp"


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_templates(tmp_path_factory.mktemp("templates"))


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    folder = tmp_path / "cold"
    folder.mkdir()
    return folder


@pytest.fixture
def root(tmp_path: Path, templates: Path) -> Path:
    folder = tmp_path / "run"
    for number in (100, 200):
        put_step(templates, folder, number)
    return folder


def to_tier(path: Path, cold: Path) -> None:
    """Move a file or a folder to the tier, and leave a link."""
    target = shutil.move(path, cold / path.name)
    path.symlink_to(target)


def linked_shard(step: Path, cold: Path) -> None:
    to_tier(step / SHARD, cold)


def linked_metadata(step: Path, cold: Path) -> None:
    to_tier(step / ".metadata", cold)


def linked_step(step: Path, cold: Path) -> None:
    to_tier(step, cold)


def every_file_linked(step: Path, cold: Path) -> None:
    for path in [*step.iterdir()]:
        if path.is_file():
            to_tier(path, cold)


TO_TIER = [linked_shard, linked_metadata, linked_step, every_file_linked]


@pytest.mark.parametrize("link", TO_TIER)
def test_a_link_is_unknown_and_no_older_step_replaces_it(root, cold, link):
    link(root / "step_200", cold)
    found = ckptctl.pick(str(root))
    assert (found.answer, found.exit_code, found.chosen) == (Answer.UNKNOWN, 2, None)
    assert found.next_command == f"ckptctl scan {root} --follow-links {cold}"
    assert ckptctl.pick(str(root), skip=[200]).step == 100
    if link is linked_step:
        with pytest.raises(LinkNotFollowed):
            ckptctl.verify(f"{root}@200")
        return
    report = ckptctl.verify(f"{root}@200")
    assert (report.verdict, report.exit_code) == (Verdict.UNKNOWN, 2)
    assert [one.code for one in report.findings] == ["step.linked"]
    assert all(one.state is ClaimState.UNKNOWN for one in report.claims)


@pytest.mark.parametrize("link", TO_TIER)
def test_a_tier_that_is_allowed_is_followed(root, cold, link):
    before = ckptctl.verify(f"{root}@200", level="content")
    link(root / "step_200", cold)
    after = ckptctl.verify(f"{root}@200", level="content", follow_links=[str(cold)])
    assert (after.verdict, after.exit_code) == (Verdict.COMPLETE, 0)
    assert (after.n_bytes, after.bytes_proven) == (before.n_bytes, before.bytes_proven)
    assert after.claim(ClaimName.BYTES).state is ClaimState.PROVEN
    assert ckptctl.pick(str(root), follow_links=[str(cold)]).step == 200


@pytest.mark.parametrize("link", TO_TIER)
def test_damage_behind_a_link_is_seen(root, cold, link):
    link(root / "step_200", cold)
    shard = root / "step_200" / SHARD
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0xFF
    (shard if link is linked_metadata else Path(os.path.realpath(shard))).write_bytes(data)
    report = ckptctl.verify(f"{root}@200", level="content", follow_links=[str(cold)])
    assert report.exit_code == 21


def test_a_resume_stops_and_supersedes_nothing(root, cold):
    linked_shard(root / "step_200", cold)
    with script(root) as ckpt, pytest.raises(NothingToResume) as caught:
        ckpt.resume("auto")
    assert caught.value.exit_code == 2
    os.remove(root / "step_200" / SHARD)
    shutil.move(cold / SHARD, root / "step_200" / SHARD)
    assert ckptctl.verify(f"{root}@200").exit_code == 0


def test_a_resume_loads_what_lies_in_an_allowed_tier(root, cold):
    linked_shard(root / "step_200", cold)
    with script(root, follow_links=[str(cold)]) as ckpt:
        assert ckpt.resume("auto").step == 200


@pytest.mark.parametrize("link", TO_TIER)
def test_prune_removes_nothing_through_a_link(root, cold, link):
    link(root / "step_100", cold)
    before = sorted(path for path in cold.rglob("*"))
    found = ckptctl.prune(str(root), 1, apply=True, follow_links=[str(cold)])
    assert found.decisions[-1].reason == "links lead out of it: left to a person"
    assert sorted(path for path in cold.rglob("*")) == before


def test_a_link_to_the_file_of_another_step_is_not_followed_silently(root):
    (root / "step_200" / SHARD).unlink()
    (root / "step_200" / SHARD).symlink_to(f"../step_100/{SHARD}")
    assert ckptctl.pick(str(root)).exit_code == 2


def test_a_link_that_holds_no_state_is_no_doubt(root, cold):
    (cold / "notes.txt").write_text("notes")
    (root / "step_200" / "README.md").symlink_to(cold / "notes.txt")
    assert ckptctl.pick(str(root)).step == 200


def test_a_link_to_nothing_is_unknown(root):
    (root / "step_200" / SHARD).unlink()
    (root / "step_200" / SHARD).symlink_to("/not/mounted/here")
    found = ckptctl.pick(str(root))
    assert found.exit_code == 2
    assert found.next_command == f"ls -ld {root}/step_200/{SHARD}"


@pytest.mark.parametrize("target", [".", "..", "step_300", "../run"])
def test_a_link_that_leads_back_to_the_root_is_never_followed(root, target):
    (root / "step_300").symlink_to(target)
    for tiers in ((), (str(root.parent),), (str(root),)):
        command = ckptctl.scan(str(root), follow_links=tiers).next_command
        assert command is not None
        assert command.startswith("ls -ld "), (tiers, command)


def test_a_folder_to_follow_must_exist(root):
    with pytest.raises(UsageError, match="is no folder"):
        ckptctl.pick(str(root), follow_links=[str(root / "gone")])


# The store


def reads(root: Path, path: str, *follow: Path) -> Callable[[], object]:
    def use() -> object:
        with open_store(str(root), follow_links=[str(one) for one in follow]) as store:
            return list(store.read_spans([Span(path, 0, 1)]))

    return use


@pytest.mark.parametrize("chain", ["direct", "through a link in the tier", "out of the tier"])
def test_only_targets_in_the_tier_are_read(root, cold, tmp_path, chain):
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    (cold / "data").write_bytes(b"data")
    (cold / "inner").symlink_to("data")
    (cold / "leak").symlink_to(outside)
    target = {"direct": "data", "through a link in the tier": "inner"}.get(chain, "leak")
    (root / "step_200" / "part").symlink_to(cold / target)
    use = reads(root, "step_200/part", cold)
    if chain == "out of the tier":
        with pytest.raises(LinkNotFollowed):
            use()
    else:
        assert use() == [(Span("step_200/part", 0, 1), b"d")]


def test_a_name_that_begins_like_the_tier_is_not_in_it(root, cold, tmp_path):
    other = tmp_path / "colder"
    other.mkdir()
    (other / "data").write_bytes(b"data")
    (root / "step_200" / "part").symlink_to(other / "data")
    with pytest.raises(LinkNotFollowed):
        reads(root, "step_200/part", cold)()


def test_links_behind_a_link_are_listed_and_not_followed(root, cold):
    (cold / "folder").mkdir()
    (cold / "folder" / "loop").symlink_to(cold / "folder")
    (cold / "folder" / "data").write_bytes(b"data")
    (root / "step_200" / "part").symlink_to(cold / "folder")
    with open_store(str(root), follow_links=[str(cold)]) as store:
        shown = {file.path: file.kind for file in store.list_tree("step_200/part")}
    assert shown == {"step_200/part/data": "file", "step_200/part/loop": "link"}


def test_a_pipe_in_the_tier_is_not_read(root, cold):
    os.mkfifo(cold / "pipe")
    (root / "step_200" / "part").symlink_to(cold / "pipe")
    with pytest.raises(StorageError, match="not a regular file"):
        reads(root, "step_200/part", cold)()

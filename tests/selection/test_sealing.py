"""Damage that only a seal can detect, on real checkpoints, and seals that are wrong."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from services.plugin import S3Server

import ckptctl
from ckptctl import Level, Report, Severity, UsageError, Verdict
from ckptctl.errors import StorageUnavailable
from ckptctl.formats.own.files import canonical, digest_of
from ckptctl.formats.own.seals import SEAL
from ckptctl.selection import sealing
from ckptctl.storage.local import LocalStore
from ckptctl.storage.opening import open_store

pytestmark = pytest.mark.torch

Copy = Callable[[Path], Path]
KEY = b"a key of thirty-two bytes or so."


@pytest.fixture
def bare(checkpoints: Path, copy_of: Copy) -> Path:
    """A private copy of steps 10 and 20, whose shards have the same sizes and no train state."""
    return copy_of(checkpoints / "run_bare4")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Steps 10 and 20 of two tensors, each in a file of its own, and all files of one size."""
    import torch

    root = tmp_path / "weights"
    for number in (10, 20):
        state = {name: torch.rand(1000) for name in ("a", "b")}
        save(state, root / f"step_{number}")
        age(root / f"step_{number}")
    return root


def save(state: dict[str, object], step: Path) -> None:
    """What torch writes: a file for each entry."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it is alone
        writer = dcp.FileSystemWriter(step, single_file_per_rank=False)
        dcp.save(state, storage_writer=writer, no_dist=True)


def age(step: Path) -> None:
    """Make the files of a step a few years old."""
    for path in step.iterdir():
        if path.is_file():
            os.utime(path, (1.7e9, 1.7e9))


def every_byte(step: Path, **asked: object) -> Report:
    """What an inspection at level `content` finds."""
    return ckptctl.verify(str(step), level=Level.CONTENT, **asked)


def faults(report: Report) -> list[tuple[str, str]]:
    return [(f.code, f.where) for f in report.with_severity(Severity.FAULT)]


def codes(report: Report) -> set[str]:
    return {finding.code for finding in report.findings if finding.code.startswith("seal.")}


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


# Making a seal.


@pytest.mark.parametrize("key", [None, KEY])
def test_a_sealed_step_is_proven_at_every_level(root, key):
    sealed = ckptctl.seal(f"{root}@500", key=key)
    assert (sealed.exit_code, sealed.path) == (0, str(root / "step_500" / SEAL))
    assert (sealed.n_files, sealed.n_bytes) == (5, sealed.report.n_bytes)
    for level in (Level.LISTING, Level.STRUCTURE):
        report = ckptctl.verify(f"{root}@500", level=level, key=key)
        assert (report.exit_code, report.findings, report.seal) == (0, (), sealed.kind)
    report = every_byte(root / "step_500", require_seal=True, key=key)
    assert (faults(report), codes(report)) == ([], set())
    assert report.bytes_read > report.n_bytes


def test_nothing_is_written_but_the_seal_and_the_id_of_the_run(root):
    before = tree(root)
    ckptctl.seal(f"{root}@500")
    after = tree(root)
    assert set(after) - set(before) == {f"step_500/{SEAL}", ".ckptctl/root.json"}
    assert {name: after[name] for name in before} == before


def test_a_seal_says_which_step_it_is_of(root):
    ckptctl.seal(f"{root}@500")
    metadata = pickle.loads((root / "step_500" / ".metadata").read_bytes())
    step = json.loads((root / "step_500" / SEAL).read_text())["step"]
    assert (step["number"], step["name"], step["world_size"]) == (500, "step_500", 4)
    assert step["save_ids"] == [metadata.storage_meta.save_id]
    assert step["tokens"] == ckptctl.verify(f"{root}@500").state.tokens.value
    assert "optimizer" in step["state"]


def test_the_seal_is_counted_as_no_file_of_the_step(root):
    before = ckptctl.verify(f"{root}@500")
    ckptctl.seal(f"{root}@500")
    after = ckptctl.verify(f"{root}@500")
    assert (after.n_files, after.n_bytes, after.written_s) == (
        before.n_files,
        before.n_bytes,
        before.written_s,
    )


def test_a_step_that_is_not_whole_is_refused_with_its_exit_code(root):
    (root / "step_500" / "__1_0.distcp").unlink()
    before = tree(root)
    refused = ckptctl.seal(f"{root}@500")
    assert (refused.path, refused.exit_code) == (None, 20)
    assert refused.report.verdict is Verdict.INCOMPLETE
    assert tree(root) == before


def test_a_step_that_changes_while_it_is_digested_is_refused(root):
    def touch(done: int, total: int) -> None:
        os.utime(root / "step_500" / "__1_0.distcp", (1.8e9, 1.8e9))

    refused = ckptctl.seal(f"{root}@500", on_progress=touch)
    assert (refused.path, refused.exit_code) == (None, 26)
    assert not (root / "step_500" / SEAL).exists()


def test_progress_comes_to_all_bytes(root):
    told: list[tuple[int, int]] = []
    sealed = ckptctl.seal(f"{root}@500", jobs=3, on_progress=lambda *far: told.append(far))
    # Read twice: once to see that it is whole, once to digest it.
    assert told[-1] == (2 * sealed.n_bytes, 2 * sealed.n_bytes)
    assert told == sorted(told)


def test_a_seal_is_replaced_only_where_that_is_asked_for(root):
    ckptctl.seal(f"{root}@500")
    before = (root / "step_500" / SEAL).read_bytes()
    with pytest.raises(UsageError, match="already sealed"):
        ckptctl.seal(f"{root}@500", key=KEY)
    assert (root / "step_500" / SEAL).read_bytes() == before
    assert ckptctl.seal(f"{root}@500", key=KEY, replace=True).replaced
    assert ckptctl.verify(f"{root}@500", require_seal=True, key=KEY).exit_code == 0


def test_replacing_a_seal_does_not_launder_a_step_that_changed(root):
    ckptctl.seal(f"{root}@500")
    with (root / "step_500" / "notes.txt").open("w") as file:
        file.write("x")
    ckptctl.seal(f"{root}@500", replace=True)
    (root / "step_500" / "notes.txt").write_text("something longer")
    refused = ckptctl.seal(f"{root}@500", replace=True)
    assert (refused.path, refused.exit_code) == (None, 21)


def test_another_sealer_in_the_same_moment_is_not_overwritten(root, monkeypatch):
    def other_first(*args):
        files = digested(*args)
        other = root / "step_500" / SEAL
        other.parent.mkdir()
        other.write_text("of the other")
        return files

    digested = sealing.digested
    monkeypatch.setattr(sealing, "digested", other_first)
    with pytest.raises(UsageError, match="already sealed"):
        ckptctl.seal(f"{root}@500")
    assert (root / "step_500" / SEAL).read_text() == "of the other"


def test_a_format_that_nothing_can_prove_is_sealed_on_request(checkpoints, copy_of):
    root = copy_of(checkpoints / "run_fsdp4")
    step = root / "step_600"
    step.mkdir()
    (step / "manifest.ocdbt").write_bytes(b"of no format" * 80)
    assert ckptctl.seal(str(step)).exit_code == 22
    assert ckptctl.seal(str(step), accept_unverifiable=True).exit_code == 0
    (step / "manifest.ocdbt").write_bytes(b"of another one" * 80)
    assert ("seal.digest", "manifest.ocdbt") in faults(every_byte(step))


def test_records_without_checksums_are_proven_by_a_seal_alone(checkpoints, copy_of):
    step = copy_of(checkpoints / "no_crc_2") / "step_100"
    assert ckptctl.verify(str(step), level=Level.CONTENT).exit_code == 22
    refused = ckptctl.seal(str(step))
    assert (refused.exit_code, refused.path) == (22, None)
    assert refused.next_command == f"ckptctl seal {step} --accept-unverifiable"
    sealed = ckptctl.seal(str(step), accept_unverifiable=True)
    assert "without proof that it is complete" in sealed.message
    assert ckptctl.verify(str(step), level=Level.CONTENT).exit_code == 0
    data = bytearray((step / "__1_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (step / "__1_0.distcp").write_bytes(data)
    assert ("seal.digest", "__1_0.distcp") in faults(every_byte(step))


@pytest.mark.parametrize("key", [b"", b"short"])
def test_a_key_that_is_too_short_is_refused(root, key):
    with pytest.raises(UsageError, match="16 or more"):
        ckptctl.seal(f"{root}@500", key=key)


# Damage that only a seal detects.


def test_a_shard_of_another_step_is_seen(weights):
    ckptctl.seal(f"{weights}@20")
    shutil.copy2(weights / "step_10" / "__0_1.distcp", weights / "step_20" / "__0_1.distcp")
    assert ckptctl.verify(f"{weights}@20", level=Level.STRUCTURE).exit_code == 0
    report = every_byte(weights / "step_20")
    assert faults(report) == [("seal.digest", "__0_1.distcp")]
    assert (report.verdict, report.exit_code) == (Verdict.CORRUPT, 21)


def test_a_shard_of_another_step_is_not_seen_without_a_seal_and_the_report_says_so(weights):
    shutil.copy2(weights / "step_10" / "__0_1.distcp", weights / "step_20" / "__0_1.distcp")
    report = every_byte(weights / "step_20")
    assert faults(report) == []
    assert "seal.missing" in codes(report)


def test_two_swapped_shards_of_one_size_are_seen(weights):
    step = weights / "step_20"
    ckptctl.seal(str(step))
    (step / "__0_0.distcp").rename(step / "aside")
    (step / "__0_1.distcp").rename(step / "__0_0.distcp")
    (step / "aside").rename(step / "__0_1.distcp")
    assert ckptctl.verify(str(step), level=Level.STRUCTURE).exit_code == 0
    report = every_byte(step)
    assert faults(report) == [("seal.digest", "__0_0.distcp"), ("seal.digest", "__0_1.distcp")]
    assert "what was sealed as __0_1.distcp" in report.findings[0].message
    assert report.exit_code == 21


def test_a_shard_of_another_step_of_four_ranks_is_seen(bare):
    ckptctl.seal(f"{bare}@20")
    shutil.copy2(bare / "step_10" / "__1_0.distcp", bare / "step_20" / "__1_0.distcp")
    report = every_byte(bare / "step_20")
    # The optimizer's counts show it too.
    assert faults(report) == [("seal.digest", "__1_0.distcp"), ("state.mixed", "__1_0.distcp")]
    assert report.exit_code == 21


def test_metadata_of_another_step_is_seen_by_the_listing_alone(bare):
    ckptctl.seal(f"{bare}@20")
    shutil.copy2(bare / "step_10" / ".metadata", bare / "step_20" / ".metadata")
    report = ckptctl.verify(f"{bare}@20")
    assert faults(report) == [("seal.digest", ".metadata")]
    assert report.exit_code == 21


def test_a_tensor_that_the_metadata_lost_is_seen_by_the_listing_alone(bare):
    ckptctl.seal(f"{bare}@20")
    path = bare / "step_20" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    fqn = next(iter(metadata.state_dict_metadata))
    del metadata.state_dict_metadata[fqn]
    for index in [index for index in metadata.storage_data if index.fqn == fqn]:
        del metadata.storage_data[index]
    path.write_bytes(pickle.dumps(metadata))
    report = ckptctl.verify(f"{bare}@20")
    assert faults(report) == [("seal.digest", ".metadata")]
    assert report.exit_code == 21


def test_a_save_over_the_step_that_was_cut_off_is_seen(weights):
    ckptctl.seal(f"{weights}@20")
    # The new save got so far: one shard of its own, and the old metadata.
    shutil.copyfile(weights / "step_10" / "__0_0.distcp", weights / "step_20" / "__0_0.distcp")
    assert ckptctl.verify(f"{weights}@20", level=Level.STRUCTURE).exit_code == 20
    report = every_byte(weights / "step_20")
    assert faults(report) == [("seal.digest", "__0_0.distcp")]
    assert report.exit_code == 21


def test_a_save_over_the_step_that_came_to_its_end_lapses_the_seal(weights):
    import torch

    step = weights / "step_20"
    ckptctl.seal(str(step))
    save({name: torch.rand(1000) for name in ("a", "b")}, step)
    for report in (ckptctl.verify(str(step)), every_byte(step)):
        assert (report.exit_code, codes(report)) == (0, {"seal.outdated"})
        assert report.seal is None
    required = ckptctl.verify(str(step), require_seal=True)
    assert (required.exit_code, faults(required)) == (22, [("seal.required", SEAL)])
    assert ckptctl.seal(str(step), replace=True).exit_code == 0
    assert ckptctl.verify(str(step), require_seal=True).exit_code == 0


def test_a_train_state_of_another_step_is_seen(framework_roots, copy_of):
    root = copy_of(framework_roots / "kempnerforge" / "checkpoints")
    ckptctl.seal(f"{root}@30")
    shutil.copy2(root / "step_20" / "train_state.pt", root / "step_30" / "train_state.pt")
    report = every_byte(root / "step_30")
    of_the_file = [("seal.digest", "train_state.pt"), ("state.mixed", "train_state.pt")]
    assert sorted(faults(report)) == of_the_file


def test_a_sealed_file_that_is_gone_is_told_once(root):
    ckptctl.seal(f"{root}@500")
    (root / "step_500" / "__1_0.distcp").unlink()
    report = every_byte(root / "step_500")
    assert faults(report) == [("shard.missing", "__1_0.distcp")]


def test_a_rename_of_a_sealed_step_is_seen(root):
    ckptctl.seal(f"{root}@500")
    (root / "step_500").rename(root / "step_900")
    report = ckptctl.verify(f"{root}@900")
    assert faults(report) == [("step.foreign", "step_900")]
    assert ckptctl.pick(str(root)).step == 400


# Seals that are wrong.


def reseal(path: Path, change: Callable[[dict], object]) -> None:
    """Change a seal as one who knows how they are made."""
    document = json.loads(path.read_text())
    change(document)
    rest = {
        key: value for key, value in document.items() if key not in ("digest", "hmac", "signature")
    }
    path.write_bytes(canonical({**document, "digest": digest_of(rest)}))


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda seal: os.truncate(seal, seal.stat().st_size // 2), "seal.invalid"),
    "empty": (lambda seal: os.truncate(seal, 0), "seal.invalid"),
    "enormous": (lambda seal: os.truncate(seal, 1 << 40), "seal.invalid"),
    "a link": (
        lambda seal: (seal.rename(seal.parent / "x"), seal.symlink_to("x")),
        "seal.invalid",
    ),
    "a pipe": (lambda seal: (seal.unlink(), os.mkfifo(seal)), "seal.invalid"),
    "with a field too many": (
        lambda seal: reseal(seal, lambda document: document.update(trust=1)),
        "seal.invalid",
    ),
    "downgraded": (
        lambda seal: reseal(seal, lambda document: document.update(algorithm="crc32")),
        "seal.unsupported",
    ),
    "of a newer version": (
        lambda seal: reseal(seal, lambda document: document.update(schema="ckptctl.seal/2")),
        "seal.unsupported",
    ),
    "partial": (
        lambda seal: reseal(seal, lambda document: document["files"].pop(1)),
        "seal.partial",
    ),
    "of another step": (
        lambda seal: shutil.copy(seal.parents[2] / "step_400" / SEAL, seal),
        "seal.foreign",
    ),
    "taken away": (lambda seal: seal.unlink(), ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_seal_is_told_and_proves_nothing(root, name):
    spoil, code = WRONG[name]
    ckptctl.seal(f"{root}@400")
    ckptctl.seal(f"{root}@500")
    spoil(root / "step_500" / SEAL)
    report = ckptctl.verify(f"{root}@500")
    assert (report.exit_code, codes(report)) == (0, {code} if code else set())
    required = ckptctl.verify(f"{root}@500", require_seal=True)
    assert (required.exit_code, faults(required)) == (22, [("seal.required", SEAL)])
    assert ckptctl.pick(str(root), require_seal=True).step == 400
    assert ckptctl.pick(str(root)).step == 500


def test_a_seal_that_was_forged_for_changed_shards_fails_its_key(weights):
    ckptctl.seal(f"{weights}@20", key=KEY)
    shutil.copy2(weights / "step_10" / "__0_1.distcp", weights / "step_20" / "__0_1.distcp")
    (weights / "step_20" / SEAL).unlink()
    ckptctl.seal(f"{weights}@20", key=b"the key of somebody else")
    report = ckptctl.verify(f"{weights}@20", key=KEY)
    assert (report.exit_code, faults(report)) == (22, [("seal.bad-signature", SEAL)])


def test_a_signed_seal_without_the_key_is_no_fault_and_shows_damage(weights):
    ckptctl.seal(f"{weights}@20", key=KEY)
    report = ckptctl.verify(f"{weights}@20")
    assert (report.exit_code, codes(report)) == (0, {"seal.no-key"})
    assert ckptctl.verify(f"{weights}@20", require_seal=True).exit_code == 22
    shutil.copy2(weights / "step_10" / "__0_1.distcp", weights / "step_20" / "__0_1.distcp")
    assert faults(every_byte(weights / "step_20")) == [("seal.digest", "__0_1.distcp")]


def test_a_seal_without_a_key_does_where_none_was_demanded(root):
    ckptctl.seal(f"{root}@500")
    report = ckptctl.verify(f"{root}@500", key=KEY)
    assert (report.exit_code, codes(report)) == (0, {"seal.unkeyed"})
    assert ckptctl.verify(f"{root}@500", key=KEY, require_seal=True).exit_code == 22


def test_a_seal_knows_the_world_size_that_files_can_only_bound(root):
    ckptctl.seal(f"{root}@500", saved_world_size=4)
    (root / "step_500" / "__9_0.distcp").write_bytes(b"left over")
    os.utime(root / "step_500" / "__9_0.distcp", (1.7e9, 1.7e9))
    world_size = ckptctl.verify(f"{root}@500").world_size
    assert (world_size.size, world_size.source) == (4, "seal")


@pytest.mark.server
@pytest.mark.parametrize("server_name", ["s3_moto", "s3_ceph"])
def test_a_step_in_an_object_store_is_sealed_and_proven(request, weights, server_name):
    server: S3Server = request.getfixturevalue(server_name)
    url = f"s3://{server.bucket}/{uuid.uuid4().hex}"
    how = {"storage_options": server.options}
    with open_store(url, storage_options=server.options) as store:
        for path in sorted((weights / "step_20").iterdir()):
            store.put(f"step_20/{path.name}", path.read_bytes())
        assert ckptctl.seal(f"{url}@20", key=KEY, **how).exit_code == 0
        with pytest.raises(UsageError, match="already sealed"):
            ckptctl.seal(f"{url}@20", key=KEY, **how)
        assert ckptctl.seal(f"{url}@20", key=KEY, replace=True, **how).replaced
        proven = ckptctl.verify(f"{url}@20", require_seal=True, key=KEY, **how)
        assert (proven.exit_code, proven.seal) == (0, "sha256 with a key")
        time.sleep(1.1)  # the store keeps whole seconds
        other = (weights / "step_10" / "__0_1.distcp").read_bytes()
        store.put("step_20/__0_1.distcp", other, replace=True)
        assert ckptctl.verify(f"{url}@20", level=Level.STRUCTURE, **how).exit_code == 20
        report = ckptctl.verify(f"{url}@20", level=Level.CONTENT, **how)
    assert faults(report) == [("seal.digest", "__0_1.distcp")]


def test_a_storage_that_fails_while_it_is_digested_leaves_no_seal(root, monkeypatch):
    class Failing(LocalStore):
        n_opened = 0

        def open_file(self, path: str):
            # The first pass opens each of the four shards; the second gets so far.
            Failing.n_opened += 1
            if Failing.n_opened > 6:
                raise StorageUnavailable("no answer")
            return super().open_file(path)

    monkeypatch.setattr("ckptctl.storage.opening.LocalStore", Failing)
    with pytest.raises(StorageUnavailable):
        ckptctl.seal(f"{root}@500")
    assert not (root / "step_500" / SEAL).exists()


def test_a_seal_of_files_that_were_written_before_1970_is_sound(weights):
    step = weights / "step_20"
    for file in step.iterdir():
        os.utime(file, (-86_400.5, -86_400.5))
    assert ckptctl.seal(str(step)).exit_code == 0
    report = ckptctl.verify(str(step), require_seal=True)
    assert (report.exit_code, report.seal) == (0, "xxh3-128")

"""Roots that the frameworks' own code wrote: what is in them, and which step `pick` takes."""

from __future__ import annotations

import json
import shutil

import pytest

import ckptctl
from ckptctl import Answer, Level, Severity, Verdict
from ckptctl.model import STATE_KINDS

ROOTS = {
    "torchtitan": "sync/checkpoint",
    "kempnerforge": "checkpoints",
    "megatron-core": "torch_dist_0.16.1",
    "transformers": "trainer_fsdp2",
    "lightning": "trainer_mp/checkpoints",
    "olmo-core": "run",
}
LAYOUTS = {"megatron-core": "megatron"}
MISSING = {
    # What its own code does not save (`about.json`, `state`).
    "torchtitan": {"rng"},
    "kempnerforge": set(),
    "megatron-core": set(),
    "transformers": set(),
    "lightning": {"rng", "dataloader", "tokens"},
    "olmo-core": {"scheduler"},
}


@pytest.mark.parametrize("name", ROOTS)
def test_every_step_is_sound_at_every_level(framework_roots, name):
    scanned = ckptctl.scan(str(framework_roots / name / ROOTS[name]), level=Level.STRUCTURE)
    assert scanned.reports
    for report in scanned.reports:
        assert (report.verdict, report.level) == (Verdict.COMPLETE, Level.STRUCTURE), report
        assert report.with_severity(Severity.WARNING) == ()


@pytest.mark.parametrize("name", ROOTS)
def test_the_counts_of_entries_and_the_writers_are_as_its_framework_says(framework_roots, name):
    folder = framework_roots / name
    about = json.loads((folder / "about.json").read_text())
    (told,) = (r for r in about["roots"].values() if r["root"] == ROOTS[name])
    root = folder / told["root"]
    scanned = ckptctl.scan(str(root))
    assert sorted(report.number for report in scanned.reports) == told["steps"]
    for report in scanned.reports:
        contents = ckptctl.show(report.url)
        inside = {
            part: facts
            for part, facts in told["expected"]["dcp"].items()
            if (folder / told["root"].split("/")[0] / part).is_relative_to(report.url)
            or (root / part).is_relative_to(report.url)
        }
        assert inside
        assert len(contents.tensors) == sum(f["tensor_count"] for f in inside.values())
        assert len(contents.bytes_entries) == sum(f["bytes_object_count"] for f in inside.values())
        assert report.world_size is not None
        assert report.world_size.size == told["world"]


@pytest.mark.parametrize("name", ROOTS)
def test_pick_says_what_a_resume_restores(framework_roots, name):
    chosen = ckptctl.pick(str(framework_roots / name / ROOTS[name])).chosen
    assert chosen is not None
    assert set(STATE_KINDS) - set(chosen.state.held) == MISSING[name]
    assert chosen.layout == LAYOUTS.get(name, name)
    if chosen.state.step.value is not None:
        assert chosen.state.step.value == chosen.number


def test_torchtitans_last_step_is_weights_only_and_passed_over(framework_roots):
    root = str(framework_roots / "torchtitan" / ROOTS["torchtitan"])
    chosen = ckptctl.pick(root)
    assert (chosen.step, chosen.answer) == (20, Answer.FELL_BACK)
    (over,) = chosen.passed_over
    assert over.report.number == 30
    assert "optimizer" in over.reason
    assert ckptctl.pick(root, allow_missing_state=True).step == 30


def test_the_tokens_that_torchtitan_counts_on_each_rank_are_those_of_all(framework_roots, copy_of):
    root = copy_of(framework_roots / "torchtitan" / ROOTS["torchtitan"])
    tokens = ckptctl.show(str(root / "step-20")).state.tokens
    assert (tokens.value, tokens.of_each_rank) == (2 * 5120, 5120)


def test_a_pointer_that_names_the_chosen_step_is_no_remark(framework_roots):
    for name in ("kempnerforge", "megatron-core", "lightning"):
        assert ckptctl.pick(str(framework_roots / name / ROOTS[name])).findings == ()


def test_a_pointer_that_names_another_step_is_a_remark(framework_roots, copy_of):
    root = copy_of(framework_roots / "megatron-core" / ROOTS["megatron-core"])
    (root / "latest_checkpointed_iteration.txt").write_text("20\n")
    chosen = ckptctl.pick(str(root))
    assert chosen.step == 30
    assert [finding.code for finding in chosen.findings] == ["pointer.differs"]


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("olmo-core", "step30/.metadata.json"),
        ("lightning", "epoch=0-step=30.ckpt/meta.pt"),
        ("transformers", "checkpoint-30/trainer_state.json"),
        ("megatron-core", "iter_0000030/metadata.json"),
    ],
)
def test_a_step_without_the_file_that_is_written_last_is_incomplete(
    framework_roots, copy_of, name, last
):
    root = copy_of(framework_roots / name / ROOTS[name])
    (root / last).unlink()
    report = ckptctl.verify(f"{root}@30", grace_s=0)
    assert [f.code for f in report.with_severity(Severity.FAULT)] == ["file.missing"]
    assert (report.exit_code, report.interrupted) == (20, True)
    assert ckptctl.pick(str(root), grace_s=0).step == 20


def test_a_part_that_is_gone_is_state_that_the_predecessor_holds(framework_roots, copy_of):
    root = copy_of(framework_roots / "transformers" / ROOTS["transformers"])
    shutil.rmtree(root / "checkpoint-30" / "optimizer_0")
    chosen = ckptctl.pick(str(root))
    assert chosen.step == 20
    assert "lacks optimizer" in chosen.passed_over[0].reason


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("kempnerforge", "step_30/train_state.pt"),
        ("olmo-core", "step30/train/rank0.pt"),
        ("transformers", "checkpoint-30/trainer_state.json"),
    ],
)
@pytest.mark.parametrize("keep", [0, 30])
def test_a_train_state_that_was_cut_short_is_damage(framework_roots, copy_of, name, file, keep):
    root = copy_of(framework_roots / name / ROOTS[name])
    path = root / file
    path.write_bytes(path.read_bytes()[:keep])
    report = ckptctl.verify(f"{root}@30", grace_s=0)
    assert [f.code for f in report.with_severity(Severity.FAULT)] == ["file.unreadable"]
    assert report.exit_code == 21


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("olmo-core", "step30/train/rank1.pt"),
        ("transformers", "checkpoint-30/rng_state_1.pth"),
    ],
)
def test_the_train_state_of_a_later_rank_that_was_cut_short_is_damage_too(
    framework_roots, copy_of, name, file
):
    root = copy_of(framework_roots / name / ROOTS[name])
    path = root / file
    path.write_bytes(path.read_bytes()[:-100])
    report = ckptctl.verify(f"{root}@30", grace_s=0)
    assert [(f.code, f.where) for f in report.with_severity(Severity.FAULT)] == [
        ("file.unreadable", file.split("/", 1)[1])
    ]
    assert ckptctl.pick(str(root), grace_s=0).step == 20


@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: bytes(len(data))])
def test_a_file_beside_the_shards_that_was_cut_short_is_damage_whatever_it_is_called(
    framework_roots, copy_of, damage
):
    root = copy_of(framework_roots / "kempnerforge" / ROOTS["kempnerforge"])
    data = (root / "step_30" / "train_state.pt").read_bytes()
    for number in (10, 20, 30):
        for rank in (0, 1, 2):
            path = root / f"step_{number}" / f"peer_{rank}" / "outer.pt"
            path.parent.mkdir()
            path.write_bytes(data)
    assert ckptctl.pick(str(root), grace_s=0).step == 30
    (root / "step_30/peer_1/outer.pt").write_bytes(damage(data))
    report = ckptctl.verify(f"{root}@30", grace_s=0)
    assert [(f.code, f.where) for f in report.with_severity(Severity.FAULT)] == [
        ("file.unreadable", "peer_1/outer.pt")
    ]
    assert ckptctl.pick(str(root), grace_s=0).step == 20


@pytest.mark.parametrize("name", ["sampler.bin", "dataloader_1.bin", "rng_state_1.pt"])
def test_values_that_begin_with_zeros_are_no_damage(framework_roots, copy_of, monkeypatch, name):
    monkeypatch.setattr("ckptctl.inspection.sidecars.MAX_SIDECAR_BYTES", 1_000_000)
    root = copy_of(framework_roots / "kempnerforge" / ROOTS["kempnerforge"])
    for number in (10, 20, 30):
        numbers = b"".join(n.to_bytes(4, "little") for n in range(500_000))
        (root / f"step_{number}" / name).write_bytes(numbers)
    report = ckptctl.verify(f"{root}@30", grace_s=0)
    assert not any(found.code == "file.unreadable" for found in report.findings)
    assert ckptctl.pick(str(root), grace_s=0).step == 30


@pytest.mark.parametrize(
    ("name", "file", "code", "exit_code"),
    [
        ("kempnerforge", "step_30/metadata.json", "file.truncated", 0),
        ("olmo-core", "step30/config.json", "file.truncated", 0),
        ("olmo-core", "step30/.metadata.json", "file.unreadable", 21),
        ("megatron-core", "iter_0000030/metadata.json", "file.unreadable", 21),
    ],
)
def test_a_document_that_was_cut_short_is_told_and_counts_where_a_load_needs_it(
    framework_roots, copy_of, name, file, code, exit_code
):
    root = copy_of(framework_roots / name / ROOTS[name])
    path = root / file
    path.write_bytes(path.read_bytes().rstrip()[:-1])
    report = ckptctl.verify(f"{root}@30", grace_s=0)
    told = [f for f in report.findings if f.severity is not Severity.NOTE]
    assert [(f.code, f.where) for f in told] == [(code, file.split("/", 1)[1])]
    assert report.exit_code == exit_code


@pytest.mark.parametrize("text", ['{"a": 1}\n{"a": 2}\n', "{a: 1}", "no: json", '{"a": NaN}\n'])
def test_a_document_in_another_form_is_nobody_s_business(framework_roots, copy_of, text):
    root = copy_of(framework_roots / "torchtitan" / ROOTS["torchtitan"])
    (root / "step-20" / "notes.json").write_text(text)
    report = ckptctl.verify(f"{root}@20", grace_s=0)
    assert report.with_severity(Severity.FAULT) == report.with_severity(Severity.WARNING) == ()


def test_a_step_that_lacks_its_train_state_file_is_passed_over(framework_roots, copy_of):
    root = copy_of(framework_roots / "kempnerforge" / ROOTS["kempnerforge"])
    (root / "step_30" / "train_state.pt").unlink()
    chosen = ckptctl.pick(str(root))
    assert chosen.step == 20
    assert "rng" in chosen.passed_over[0].reason

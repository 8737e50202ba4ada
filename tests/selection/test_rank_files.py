"""Rank-file steps: complete as their framework wrote them, damaged one file at a time."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import run_ckptctl
from storage.faulty import FaultyStore

import ckptctl
from ckptctl.errors import UsageError
from ckptctl.findings import Severity, Verdict
from ckptctl.formats.frameworks.layouts import is_saved
from ckptctl.inspection.inspecting import inspect_step
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import Level
from ckptctl.options import Requirements
from ckptctl.storage.local import LocalStore

NEWEST = {
    "verl": "global_step_30",
    "zero1": "global_step6",
    "zero3": "global_step6",
    "transformers": "checkpoint-6",
    "accelerate": "checkpoint_2",
    "lightning": "epoch=0-step=6.ckpt",
}
OLDER = {
    "verl": "global_step_20",
    "zero1": "global_step4",
    "zero3": "global_step4",
    "transformers": "checkpoint-4",
    "accelerate": "checkpoint_1",
    "lightning": "epoch=0-step=4.ckpt",
}
RANKS = {"verl": 2, "zero1": 2, "zero3": 2, "transformers": 2, "accelerate": 2, "lightning": None}
RANKED = re.compile(r"world_size|zero_pp_rank|rng_state")
LOSES = {
    "verl": {"tokens"},
    "zero1": {"rng", "dataloader"},
    "zero3": {"rng", "dataloader"},
    "transformers": {"tokens"},
    "accelerate": {"dataloader", "tokens"},
    "lightning": {"rng", "dataloader", "tokens"},
}


@pytest.fixture
def root(rank_files, copy_of, request) -> Path:
    """A private copy of the root of one framework."""
    return copy_of(rank_files / request.param)


each_framework = pytest.mark.parametrize("root", NEWEST, indirect=True)


def faults(report: ckptctl.Report) -> set[str]:
    return {finding.code for finding in report.with_severity(Severity.FAULT)}


@each_framework
def test_the_newest_step_is_picked(root):
    chosen = ckptctl.pick(str(root))
    assert chosen.exit_code == 0
    assert chosen.path == str(root / NEWEST[root.name])


@each_framework
def test_ranks_and_train_state_are_those_that_the_framework_wrote(root):
    report = ckptctl.verify(str(root / NEWEST[root.name]), level="structure")
    assert (report.exit_code, report.layout in (root.name, "deepspeed")) == (0, True)
    assert (report.world_size and report.world_size.size) == RANKS[root.name]
    lost = set(ckptctl.model.STATE_KINDS) - set(report.state.held)
    assert lost == LOSES[root.name]


def test_the_base_model_of_an_adapter_is_not_in_the_step_and_this_is_reported(rank_files):
    chosen = ckptctl.pick(str(rank_files / "trl"))
    assert (chosen.exit_code, chosen.step, chosen.chosen.layout) == (0, 6, "transformers")
    assert chosen.chosen.state.model.of_adapter
    assert "no base model of the adapter is recognized in the step" in chosen.about_state
    found = {one.code: one for one in ckptctl.verify(chosen.path).findings}
    assert found["state.adapter"].where == "adapter_model.safetensors"
    assert found["state.adapter"].severity is Severity.NOTE
    shown = run_ckptctl("show", chosen.path).stdout
    assert "restores model (an adapter, without its base model), optimizer" in shown
    whole = ckptctl.verify(str(rank_files / "transformers" / "checkpoint-6"))
    assert not whole.state.model.of_adapter


def tensors_in(value: object, path: str = "") -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """What torch loads: keys, dtype and shape of each tensor, of a DTensor those of its part."""
    import torch

    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        yield path, str(local.dtype).removeprefix("torch."), tuple(local.shape)
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_in(item, f"{path}.{key}" if path else str(key))


@pytest.mark.torch
@pytest.mark.parametrize("root", ["verl", "transformers", "accelerate", "lightning"], indirect=True)
def test_show_lists_the_tensors_that_torch_loads(root):
    import torch
    from safetensors.torch import load_file

    step = root / NEWEST[root.name]
    contents = ckptctl.show(str(step))
    files = [step] if step.is_file() else [path for path in step.rglob("*") if path.is_file()]
    wanted = {}
    for path in files:
        if path.name == "training_args.bin":
            wanted[path] = set()  # an object of transformers, which is not installed here
        elif path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl"):
            loaded = torch.load(path, map_location="cpu", weights_only=False)
            wanted[path] = {*tensors_in(loaded)}
        elif path.suffix == ".safetensors":
            wanted[path] = {*tensors_in(load_file(path))}
    listed = {path: set() for path in wanted}
    for row in contents.tensors:
        listed[step / row.file if step.is_dir() else step].add((row.fqn, row.dtype, row.shape))
    assert listed == wanted
    assert contents.unlisted == ()
    n_params = {"verl": 2336, "transformers": 2080, "accelerate": 676, "lightning": 676}
    assert contents.n_params == n_params[root.name]


@pytest.mark.parametrize("root", ["zero3"], indirect=True)
def test_show_names_a_file_whose_tensors_cannot_be_listed(root):
    step = root / NEWEST[root.name]
    shown = ckptctl.show(str(step))
    assert shown.n_params is None  # each rank holds a part, and no file says which
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (step / name).write_bytes((step / name).read_bytes()[:-100])
    damaged = ckptctl.show(str(step))
    assert damaged.unlisted == (name,)
    assert {row for row in shown.tensors if row.file != name} == {*damaged.tensors}


@each_framework
def test_every_byte_is_verified_but_those_of_safetensors(root):
    report = ckptctl.verify(str(root / NEWEST[root.name]), level="content")
    has_safetensors = root.name in ("transformers", "accelerate")
    assert faults(report) == ({"record.unverifiable"} if has_safetensors else set())
    assert report.bytes_proven == report.bytes_in_records > 0


def archives(step: Path) -> list[Path]:
    files = [step] if step.is_file() else sorted(step.rglob("*"))
    suffixes = (".pt", ".pth", ".ckpt", ".pkl", ".bin")
    return [file for file in files if file.suffix in suffixes and file.stem != "training_args"]


def write(file: Path, data: bytes) -> None:
    """Change the content of a file and not its time, which would be that of a save in flight."""
    was = file.stat()
    file.write_bytes(data)
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))


def save_over(root: Path) -> None:
    """Put a file of the older step in the place of the newest one's."""
    step = root / NEWEST[root.name]
    older = root / OLDER[root.name]
    for file in archives(step):
        other = older if step.is_file() else older / file.relative_to(step)
        if other.read_bytes() != file.read_bytes():
            write(file, other.read_bytes())
            return


def damaged(data: bytes, how: str) -> bytes:
    return {
        "empty": b"",
        "cut in half": data[: len(data) // 2],
        "without its last byte": data[:-1],
        "without its beginning": data[64:],
    }[how]


@each_framework
@pytest.mark.parametrize(
    "how", ["empty", "cut in half", "without its last byte", "without its beginning"]
)
def test_a_damaged_file_rules_the_step_out(root, how):
    step = root / NEWEST[root.name]
    for file in archives(step):
        whole = file.read_bytes()
        write(file, damaged(whole, how))
        report = ckptctl.verify(str(step), level="structure")
        assert report.exit_code == 21, (file, report.findings)
        assert faults(report) <= {"record.framing", "file.unreadable", "file.missing"}
        assert ckptctl.pick(str(root)).path != str(step)
        write(file, whole)


@each_framework
def test_a_flipped_bit_is_found_by_content(root):
    step = root / NEWEST[root.name]
    for file in archives(step):
        whole = file.read_bytes()
        for place in (0, len(whole) // 3, len(whole) // 2, len(whole) - 40):
            data = bytearray(whole)
            data[place] ^= 4
            write(file, bytes(data))
            report = ckptctl.verify(str(step), level="content")
            # A bit in the name of a global makes it one that no load may run.
            assert report.exit_code in (21, 25), (file, place, report.findings)
        write(file, whole)


@pytest.mark.parametrize("root", ["verl", "zero1", "zero3", "transformers"], indirect=True)
def test_a_rank_that_left_no_file_is_named(root):
    step = root / NEWEST[root.name]
    of_ranks = [file for file in archives(step) if RANKED.search(file.name)]
    assert len(of_ranks) >= 2
    for file in of_ranks:
        aside = file.rename(root / "aside")
        report = ckptctl.verify(str(step), level="structure")
        assert report.exit_code == 20, (file, report.findings)
        assert file.name in " ".join(f.message for f in report.with_severity(Severity.FAULT))
        aside.rename(file)


@pytest.mark.parametrize("root", ["accelerate"], indirect=True)
def test_fewer_ranks_than_in_the_step_before_are_not_known_to_be_whole(root):
    (root / "checkpoint_2" / "random_states_1.pkl").unlink()
    report = ckptctl.verify(str(root / "checkpoint_2"), level="structure")
    assert report.exit_code == 22
    assert "file.fewer" in {finding.code for finding in report.findings}


@pytest.mark.parametrize("root", ["transformers"], indirect=True)
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "trainer_state.json"])
def test_a_step_without_what_the_one_before_held_is_passed_over(root, name):
    (root / "checkpoint-6" / name).unlink()
    assert ckptctl.pick(str(root)).path == str(root / "checkpoint-4")


@pytest.mark.parametrize("root", ["transformers"], indirect=True)
@pytest.mark.parametrize("data", [b"", b'{"model_type": "gpt2",', bytes(9), b'{"a": "\xff"}'])
def test_a_configuration_that_the_trainer_cannot_parse_is_damage(root, data):
    (root / "checkpoint-6" / "config.json").write_bytes(data)
    report = ckptctl.verify(str(root / "checkpoint-6"), grace_s=0)
    assert (report.exit_code, faults(report)) == (21, {"file.unreadable"})
    (root / "checkpoint-6" / "config.json").unlink()  # not every model has one
    assert ckptctl.verify(str(root / "checkpoint-6")).exit_code == 0


@pytest.mark.parametrize("root", ["transformers", "accelerate"], indirect=True)
def test_a_step_without_weights_is_incomplete(root):
    (root / NEWEST[root.name] / "model.safetensors").unlink()
    report = ckptctl.verify(str(root / NEWEST[root.name]))
    assert (report.exit_code, faults(report)) == (20, {"file.missing"})


@pytest.mark.parametrize("root", ["verl"], indirect=True)
def test_files_of_two_world_sizes_in_one_folder_are_a_fault(root):
    actor = root / "global_step_30" / "actor"
    for rank in range(4):
        shutil.copy2(
            actor / f"model_world_size_2_rank_{rank % 2}.pt",
            actor / f"model_world_size_4_rank_{rank}.pt",
        )
    report = ckptctl.verify(str(root / "global_step_30"))
    assert (report.exit_code, faults(report)) == (21, {"state.mixed"})


@pytest.mark.parametrize(
    ("root", "code", "command"),
    [
        ("verl", 24, "verl.model_merger"),
        ("zero1", 24, "ds_to_universal"),
        ("transformers", 0, None),
        ("lightning", 0, None),
    ],
    indirect=["root"],
)
def test_shards_load_only_at_the_world_size_that_wrote_them(root, code, command):
    report = ckptctl.verify(str(root / NEWEST[root.name]), world_size=4)
    assert report.exit_code == code
    fixed = [f.next_command or "" for f in report.findings if f.code == "world-size.fixed"]
    assert [command in text for text in fixed] == ([True] if command else [])
    assert ckptctl.verify(str(root / NEWEST[root.name]), world_size=2).exit_code == 0


@each_framework
def test_a_seal_proves_the_step_and_notices_a_save_over_it(root):
    step = root / NEWEST[root.name]
    assert ckptctl.seal(str(step), accept_unverifiable=True).exit_code == 0
    report = ckptctl.verify(str(step), level="content", require_seal=True)
    assert (report.exit_code, faults(report)) == (0, set())
    save_over(root)
    assert ckptctl.verify(str(step), level="content", require_seal=True).exit_code != 0


@each_framework
def test_with_a_seal_the_file_of_another_rank_or_step_is_found(root):
    step, older = root / NEWEST[root.name], root / OLDER[root.name]
    assert ckptctl.seal(str(step), accept_unverifiable=True).exit_code == 0
    every = [step] if step.is_file() else [f for f in sorted(step.rglob("*")) if f.is_file()]
    for file in (one for one in every if ".ckptctl" not in one.parts):
        whole = file.read_bytes()
        of_rank = file.with_name(
            re.sub(r"(rank_|rng_state_|random_states_)0", r"\g<1>1", file.name)
        )
        of_step = older if step.is_file() else older / file.relative_to(step)
        for other in (of_rank, of_step):
            if other.exists() and other.read_bytes() != whole:
                write(file, other.read_bytes())
                report = ckptctl.verify(str(step), level="content")
                assert report.exit_code in (20, 21), (file, other, report.findings)
        write(file, whole)
    assert ckptctl.verify(str(step), level="content").exit_code == 0


OF_ANOTHER_STEP = {
    "verl": ("actor/optim_world_size_2_rank_1.pt",),
    "zero1": ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"),
    "zero3": ("zero_pp_rank_1_mp_rank_00_model_states.pt",),
    "transformers": ("trainer_state.json",),
    "lightning": ("",),
}


@pytest.mark.parametrize("root", OF_ANOTHER_STEP, indirect=True)
def test_without_a_seal_the_file_of_the_step_before_is_found_by_the_steps_that_it_counts(root):
    step, older = root / NEWEST[root.name], root / OLDER[root.name]
    for name in OF_ANOTHER_STEP[root.name]:
        file = step / name
        whole = file.read_bytes()
        write(file, (older / name).read_bytes())
        report = ckptctl.verify(str(step), grace_s=0)
        assert (report.exit_code, faults(report)) == (21, {"state.mixed"}), name
        assert ckptctl.pick(str(root), grace_s=0).path == str(older)
        write(file, whole)
    assert ckptctl.pick(str(root)).path == str(step)


LEFT_BY_TOOLS = (
    ".~tmp~/{}",
    ".rsync-partial/{}",
    ".{}.aB3xY9",
    "._{}",
    ".nfs00000000000a1b2c0000001f",
    ".DS_Store",
    "__MACOSX/._{}",
    ".snapshot/hourly.0/{}",
)


@pytest.mark.parametrize("root", ["zero1", "transformers"], indirect=True)
def test_what_copying_tools_and_file_systems_leave_in_a_step_is_no_part_of_it(root):
    step = root / NEWEST[root.name]
    file = archives(step)[-1]
    left = [step / name.format(file.name) for name in LEFT_BY_TOOLS]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.read_bytes()[:100])
        os.utime(path, (0, 0))
    assert ckptctl.pick(str(root), grace_s=0).path == str(step)
    assert ckptctl.seal(str(step), accept_unverifiable=True).exit_code == 0
    for path in left:
        path.unlink()
    report = ckptctl.verify(str(step), level="content", require_seal=True)
    assert (report.exit_code, faults(report)) == (0, set())


def test_a_hidden_file_with_an_extension_of_six_letters_is_part_of_a_step():
    assert is_saved("7/.x.distcp")
    assert is_saved(".model.pt.sha256")
    assert not is_saved("7/.x.distcp.aB3xY9")


@each_framework
def test_a_mark_lapses_when_the_step_is_saved_anew(root):
    step = root / NEWEST[root.name]
    ckptctl.mark(str(step), "rejected", reason="the loss rose")
    assert ckptctl.verify(str(step)).exit_code == 27
    assert ckptctl.pick(str(root)).path != str(step)
    save_over(root)
    assert "mark.outdated" in {finding.code for finding in ckptctl.verify(str(step)).findings}


@each_framework
def test_a_file_that_is_being_written_is_no_damage(root):
    step = root / NEWEST[root.name]
    file = archives(step)[-1]
    file.write_bytes(file.read_bytes()[:1000])
    os.utime(file)
    report = ckptctl.verify(str(step), grace_s=600)
    assert report.exit_code == 26, report.findings
    assert ckptctl.verify(str(step), grace_s=0).exit_code == 21


@each_framework
def test_prune_keeps_what_pick_takes(root):
    step = root / NEWEST[root.name]
    ckptctl.prune(str(root), keep=1, apply=True, unsealed=True)
    assert ckptctl.pick(str(root)).path == str(step)


def test_a_file_whose_name_states_nothing_is_a_step_by_its_content(tmp_path, rank_files):
    step = tmp_path / "step_10"
    step.mkdir()
    shutil.copy2(rank_files / "lightning" / NEWEST["lightning"], step / "part_a.pt")
    report = ckptctl.verify(str(step))
    assert (report.exit_code, faults(report)) == (0, set())


@pytest.mark.parametrize("framework", ["lightning", "transformers", "verl", "zero3"])
def test_a_root_that_is_given_as_a_step_is_a_usage_error(rank_files, framework):
    with pytest.raises(UsageError, match="is a root that holds steps"):
        ckptctl.verify(str(rank_files / framework))


def test_a_last_save_that_holds_a_folder_of_deepspeed_is_a_step(tmp_path, rank_files):
    last = tmp_path / "last"
    shutil.copytree(rank_files / "transformers" / "checkpoint-6", last)
    shutil.copytree(rank_files / "zero3" / "global_step6", last / "global_step6")
    assert ckptctl.verify(str(last)).verdict is Verdict.COMPLETE


def test_a_file_of_torch_save_is_a_step(tmp_path, rank_files):
    shutil.copy2(rank_files / "lightning" / NEWEST["lightning"], tmp_path / "step_10.pt")
    assert ckptctl.pick(str(tmp_path)).path == str(tmp_path / "step_10.pt")


@each_framework
def test_at_structure_the_digests_of_archives_come_from_the_bytes_that_were_read(root):
    alone = OpenStep(LocalStore(str(root)), NEWEST[root.name]).digests
    assert alone
    store = FaultyStore(LocalStore(str(root)))
    opened = OpenStep(store, NEWEST[root.name])
    assert all(part.structure.n_records or not part.metadata for part in opened.parts)
    n_read = store.calls["span"]
    assert n_read
    assert opened.digests == alone
    assert store.calls["span"] == n_read
    report = inspect_step(opened, Requirements(), level=Level.STRUCTURE).report
    assert dict(report.digests) == alone

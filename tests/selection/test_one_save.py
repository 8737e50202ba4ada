"""Files of two saves in one step, and steps under the names of others."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from made_saves import optimizer, torch, weights, write

import ckptctl
from ckptctl import Report, Severity, Verdict
from ckptctl.findings import ClaimName, ClaimState

dcp = pytest.importorskip("torch.distributed.checkpoint")

STEPS = (10, 20, 30, 40)
MINUTE_S = 60.0
DAY_S = 86_400.0


def train(root: Path, write_step: object, *, interval_s: float, took_s: float = 1.0) -> None:
    """Write steps a day ago, so far apart; the metadata of each is its last file."""
    for place, number in enumerate(STEPS):
        write_step(root, number)
        began_s = time.time() - DAY_S + place * interval_s
        for path in files_of(root / f"step_{number}"):
            is_last = path.name == ".metadata"
            os.utime(path, (began_s, began_s + took_s * (1.0 if is_last else 0.5)))


def files_of(step: Path) -> list[Path]:
    return sorted(path for path in step.rglob("*") if path.is_file())


def sharded(root: Path, number: int) -> None:
    state = {
        "model": {"w": torch.full((6,), float(number))},
        "optimizer": {"state": {"w": {"exp_avg": torch.ones(6)}}},
        "step": number,
    }
    dcp.save(state, checkpoint_id=root / f"step_{number}", no_dist=True)


def uncounted(root: Path, number: int) -> None:
    state = {"model": {"w": torch.full((6,), float(number))}}
    dcp.save(state, checkpoint_id=root / f"step_{number}", no_dist=True)


def with_sidecar(root: Path, number: int) -> None:
    sharded(root, number)
    write(root / f"step_{number}" / "train_state.pt", {"step": number})


def counted(number: int) -> dict[str, object]:
    state = {"exp_avg": torch.full((8, 8), number / 7), "step": torch.tensor(float(number))}
    return {"state": {0: state}, "param_groups": [{"lr": 0.1}]}


def of_ranks(root: Path, number: int) -> None:
    for rank in range(3):
        write(root / f"step_{number}" / f"model_{rank}.pt", weights(number))
        write(root / f"step_{number}" / f"optimizer_{rank}.pt", counted(number))
    write(root / f"step_{number}" / "extra.pt", {"step": number})


def of_optimizer(root: Path, number: int) -> None:
    """The only count is in the optimizer."""
    for rank in range(3):
        write(root / f"step_{number}" / f"model_{rank}.pt", weights(number))
        write(root / f"step_{number}" / f"optimizer_{rank}.pt", counted(number))


def of_batches(root: Path, number: int) -> None:
    """As LitGPT saves: a counter of batches, of which two are a step."""
    state = {"iter_num": 2 * number, "step_count": number}
    path = root / f"step_{number}" / "lit_model.pth"
    write(path, {"model": weights(number), "optimizer": counted(number), **state})


def codes(report: Report, severity: Severity = Severity.FAULT) -> list[str]:
    return [finding.code for finding in report.with_severity(severity)]


def later(path: Path, by_s: float) -> None:
    at_s = path.stat().st_mtime + by_s
    os.utime(path, (at_s, at_s))


# Saved again in place


def test_a_shard_that_was_written_after_the_metadata_is_of_another_save(tmp_path):
    train(tmp_path, sharded, interval_s=30 * MINUTE_S)
    later(tmp_path / "step_40" / "__0_0.distcp", 90)
    assert codes(ckptctl.verify(f"{tmp_path}@40")) == ["step.two-saves"]
    assert ckptctl.pick(str(tmp_path)).step == 30


def test_files_of_two_saves_are_seen_where_steps_follow_each_other_within_seconds(tmp_path):
    train(tmp_path, of_ranks, interval_s=20)
    later(tmp_path / "step_40" / "model_1.pt", 90)
    assert codes(ckptctl.verify(f"{tmp_path}@40")) == ["step.two-saves"]


def test_files_further_apart_than_in_the_steps_beside_are_a_doubt(tmp_path):
    train(tmp_path, of_ranks, interval_s=30 * MINUTE_S)
    later(tmp_path / "step_40" / "model_1.pt", 90)
    found = ckptctl.pick(str(tmp_path))
    assert (found.step, codes(found.chosen, Severity.WARNING)) == (40, ["step.times"])
    assert found.chosen.claim(ClaimName.ONE_SAVE).state is ClaimState.UNKNOWN
    ckptctl.prune(str(tmp_path), 1, unsealed=True, apply=True)
    assert (tmp_path / "step_30").exists()


@pytest.mark.parametrize("by_s", [140, 250])
def test_one_slow_file_is_a_doubt_where_the_run_cannot_have_come_back_so_soon(tmp_path, by_s):
    train(tmp_path, of_ranks, interval_s=30 * MINUTE_S)
    later(tmp_path / "step_40" / "model_1.pt", by_s)
    found = ckptctl.pick(str(tmp_path))
    assert (found.step, codes(found.chosen, Severity.WARNING)) == (40, ["step.times"])
    later(tmp_path / "step_40" / "model_1.pt", 9 * MINUTE_S - by_s)
    assert codes(ckptctl.verify(f"{tmp_path}@40")) == ["step.two-saves"]


@pytest.mark.parametrize("save", [of_ranks, sharded, with_sidecar])
@pytest.mark.parametrize("by_s", [140, 540])
def test_one_other_step_does_not_show_how_long_a_save_takes(tmp_path, save, by_s):
    train(tmp_path, save, interval_s=30 * MINUTE_S)
    for number in (10, 20):
        shutil.rmtree(tmp_path / f"step_{number}")
    later(next(path for path in files_of(tmp_path / "step_40") if path.name != ".metadata"), by_s)
    found = ckptctl.pick(str(tmp_path))
    assert (found.step, codes(found.chosen, Severity.WARNING)) == (40, ["step.times"])
    assert not found.chosen.claim(ClaimName.ONE_SAVE).is_proven


def test_a_step_that_may_be_of_two_saves_is_sealed_on_request_only(tmp_path):
    train(tmp_path, of_ranks, interval_s=30 * MINUTE_S)
    later(tmp_path / "step_40" / "model_1.pt", 90)
    sealed = ckptctl.seal(f"{tmp_path}@40")
    assert (sealed.path, sealed.exit_code) == (None, 22)
    assert ckptctl.seal(f"{tmp_path}@40", accept_unverifiable=True).path is not None


def test_a_sidecar_that_is_older_than_its_whole_sharded_part_is_of_another_save(tmp_path):
    train(tmp_path, with_sidecar, interval_s=30 * MINUTE_S)
    for name in (".metadata", "__0_0.distcp"):
        later(tmp_path / "step_40" / name, 9 * MINUTE_S)
    assert codes(ckptctl.verify(f"{tmp_path}@40")) == ["step.two-saves"]


def test_a_shard_from_before_the_previous_save_is_of_another_save(tmp_path):
    train(tmp_path, uncounted, interval_s=30 * MINUTE_S)
    later(tmp_path / "step_40" / "__0_0.distcp", -45 * MINUTE_S)
    assert codes(ckptctl.verify(f"{tmp_path}@40")) == ["step.two-saves"]


def test_a_file_of_the_step_before_is_seen_in_the_third_step_of_a_run(tmp_path):
    """Its time leaves no training between the two saves: the other steps show that there was."""
    train(tmp_path, of_ranks, interval_s=30 * MINUTE_S)
    shutil.rmtree(tmp_path / "step_40")
    later(tmp_path / "step_30" / "model_1.pt", -30 * MINUTE_S)
    assert codes(ckptctl.verify(f"{tmp_path}@30")) == ["step.two-saves"]
    assert ckptctl.pick(str(tmp_path)).step == 20


def test_a_sealed_file_that_was_written_again_is_of_another_save(tmp_path):
    train(tmp_path, sharded, interval_s=30 * MINUTE_S)
    assert ckptctl.seal(f"{tmp_path}@40").exit_code == 0
    later(tmp_path / "step_40" / "__0_0.distcp", 5)
    report = ckptctl.verify(f"{tmp_path}@40", level="listing")
    assert (codes(report), report.verdict) == (["step.two-saves"], Verdict.INCOMPLETE)
    assert ckptctl.verify(f"{tmp_path}@40", level="content").exit_code == 0


# Sound


def test_a_seal_after_which_nothing_was_written_proves_one_save(tmp_path):
    train(tmp_path, of_ranks, interval_s=30 * MINUTE_S)
    later(tmp_path / "step_40" / "model_1.pt", 90)
    ckptctl.seal(f"{tmp_path}@40", accept_unverifiable=True)
    claim = ckptctl.verify(f"{tmp_path}@40").claim(ClaimName.ONE_SAVE)
    assert (claim.state, claim.by) == (ClaimState.PROVEN, "seal")


def test_shards_that_are_minutes_older_than_their_metadata_are_of_one_save(tmp_path):
    train(tmp_path, sharded, interval_s=60 * MINUTE_S, took_s=16 * MINUTE_S)
    found = ckptctl.pick(str(tmp_path))
    assert (found.step, codes(found.chosen, Severity.WARNING)) == (40, [])
    assert found.chosen.claim(ClaimName.ONE_SAVE).is_proven


def test_a_copy_that_writes_the_metadata_first_is_sound(tmp_path):
    train(tmp_path, sharded, interval_s=30 * MINUTE_S)
    began_s = time.time() - DAY_S
    for place, path in enumerate(files_of(tmp_path)):
        os.utime(path, (began_s, began_s + 50 * place))
    found = ckptctl.pick(str(tmp_path))
    assert (found.step, found.exit_code) == (40, 0)


def test_a_copy_of_single_files_in_any_order_is_no_branch(tmp_path):
    order = (20, 50, 10, 40, 60, 30)
    for place, number in enumerate(order):
        path = tmp_path / f"ckpt_step{number}.pt"
        state = {"model": weights(number), "optimizer": optimizer(number), "step": number}
        write(path, state)
        os.utime(path, (0, 1_700_000_000 + 600 * place))
    found = ckptctl.pick(str(tmp_path))
    assert (found.step, found.exit_code) == (60, 0)


# Under the name of another step


@pytest.mark.parametrize("layout", [sharded, uncounted, of_ranks, of_optimizer, of_batches])
@pytest.mark.parametrize("order", [(10, 20, 40, 30), (10, 30, 40, 20), (20, 10)])
def test_steps_that_were_swapped_are_other_steps(tmp_path, layout, order: Sequence[int]):
    train(tmp_path, layout, interval_s=1)
    for number in STEPS:
        (tmp_path / f"step_{number}").rename(tmp_path / f"was_{number}")
    for number, was in zip(STEPS, order, strict=False):
        (tmp_path / f"was_{was}").rename(tmp_path / f"step_{number}")
    displaced = [n for n, was in zip(STEPS, order, strict=False) if n != was]
    for number in displaced:
        assert codes(ckptctl.verify(f"{tmp_path}@{number}")) == ["step.wrong-step"]
    for sound in set(STEPS[: len(order)]).difference(displaced):
        assert codes(ckptctl.verify(f"{tmp_path}@{sound}")) == []


def epochs_of(root: Path) -> Iterator[tuple[int, int]]:
    """A counter that begins again with each epoch of 15 steps."""
    for number in STEPS:
        state = {"model": weights(number), "optimizer": optimizer(number), "step": number % 15}
        write(root / f"step_{number}" / "state.pt", state)
        yield number, number % 15


def test_a_counter_that_begins_again_contradicts_no_name(tmp_path):
    for number, count in epochs_of(tmp_path):
        assert codes(ckptctl.verify(f"{tmp_path}@{number}")) == [], count
    assert ckptctl.pick(str(tmp_path)).step == 40


# Files of another step


def test_a_counter_within_an_epoch_contradicts_no_name(tmp_path):
    for number in STEPS:
        state = {"model": weights(1.0), "optimizer": optimizer(1), "step": number % 25}
        write(tmp_path / f"step_{number}" / "state.pt", state)
    report = ckptctl.verify(f"{tmp_path}@30")
    assert report.exit_code == 0, report.findings
    assert not report.claim(ClaimName.IDENTITY).is_proven
    assert ckptctl.pick(str(tmp_path)).step == 40


def test_an_optimizer_of_another_step_is_seen_by_its_count(tmp_path):
    train(tmp_path, of_ranks, interval_s=1)
    for rank in range(3):
        name = f"optimizer_{rank}.pt"
        (tmp_path / "step_40" / name).write_bytes((tmp_path / "step_20" / name).read_bytes())
    report = ckptctl.verify(f"{tmp_path}@40")
    (finding,) = report.with_severity(Severity.FAULT)
    assert finding.code == "state.mixed"
    assert "counts 40 steps, and the optimizer 20" in finding.message
    assert ckptctl.pick(str(tmp_path)).step == 30


def of_two_networks(pace: int) -> Callable[[Path, int], None]:
    """As a GAN is saved: one of two optimizers makes `pace` steps where the other makes one."""

    def save(root: Path, number: int) -> None:
        for name, steps in (("g", number), ("d", pace * number)):
            write(root / f"step_{number}" / f"net_{name}.pt", weights(number))
            write(root / f"step_{number}" / f"adam_{name}.pt", counted(steps))
        write(root / f"step_{number}" / "trainer.pt", {"step": number})

    return save


@pytest.mark.parametrize("pace", [1, 5])
@pytest.mark.parametrize("name", ["adam_g.pt", "adam_d.pt"])
@pytest.mark.parametrize("counts", [True, False])
def test_each_of_two_optimizers_is_compared(tmp_path, pace, name, counts):
    train(tmp_path, of_two_networks(pace), interval_s=1)
    if not counts:
        for path in tmp_path.glob("*/trainer.pt"):
            path.unlink()
    assert codes(ckptctl.verify(f"{tmp_path}@40")) == []
    (tmp_path / "step_40" / name).write_bytes((tmp_path / "step_20" / name).read_bytes())
    report = ckptctl.verify(f"{tmp_path}@40")
    assert codes(report) == ["state.mixed"], report.findings
    assert ckptctl.pick(str(tmp_path)).step == 30


def test_an_optimizer_of_another_step_alone_is_a_mixture_and_no_other_step(tmp_path):
    train(tmp_path, of_optimizer, interval_s=1)
    for rank in range(3):
        name = f"optimizer_{rank}.pt"
        (tmp_path / "step_40" / name).write_bytes((tmp_path / "step_20" / name).read_bytes())
    assert codes(ckptctl.verify(f"{tmp_path}@40")) == ["state.mixed"]


def test_an_optimizer_that_is_younger_than_the_run_is_sound(tmp_path):
    for number in STEPS:
        of_ranks(tmp_path, number)
        for rank in range(3):
            write(tmp_path / f"step_{number}" / f"optimizer_{rank}.pt", counted(number - 7))
    assert codes(ckptctl.verify(f"{tmp_path}@40")) == []


def test_metadata_and_shards_of_another_step_are_seen_beside_a_count_of_this_one(tmp_path):
    def in_part(root: Path, number: int) -> None:
        path = root / f"step_{number}"
        dcp.save({"model": {"w": torch.ones(6)}}, checkpoint_id=path / "model", no_dist=True)
        write(path / "train_state.pt", {"step": number})

    train(tmp_path, in_part, interval_s=1)
    for path in files_of(tmp_path / "step_20" / "model"):
        (tmp_path / "step_40" / "model" / path.name).write_bytes(path.read_bytes())
    assert "state.mixed" in codes(ckptctl.verify(f"{tmp_path}@40"))

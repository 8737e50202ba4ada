"""A loss that is not finite or jumps: all ranks detect it, and none resumes from its steps."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from train_ranks import ends, ranks

import ckptctl
from ckptctl.errors import UsageError
from ckptctl.train import LossAction, LossGuard, LossKind
from ckptctl.train.loss_guard import why_lost

pytestmark = pytest.mark.torch


def fed(guard: LossGuard, *losses: float) -> list[LossAction]:
    return [guard.check(step, loss).action for step, loss in enumerate(losses, 1)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("action", ["warn", "skip", "stop"])
def test_a_loss_that_is_not_finite_is_answered_with_the_action(bad: float, action: str):
    verdict = LossGuard(action).check(7, bad)
    assert (verdict.kind, verdict.action) == (LossKind.NOT_FINITE, LossAction(action))
    assert (verdict.ok, verdict.skip, verdict.stop) == (False, action == "skip", action == "stop")
    assert verdict.message.startswith(f"step 7: the loss is {bad:g}")


def test_a_spike_is_above_the_factor_times_the_largest_recent_loss():
    guard = LossGuard("skip", spike_factor=3)
    fed(guard, *[2.0] * 9, 4.0)
    assert guard.check(11, 12.0).ok
    verdict = guard.check(12, 36.1)
    assert verdict.message == (
        "step 12: the loss is 36.1, more than 3 times the largest of the last ones"
    )
    assert guard.check(13, 30.0).ok


def test_few_losses_say_nothing_about_spikes_and_old_ones_are_forgotten():
    assert set(fed(LossGuard("stop", spike_factor=2), *(3.0**n for n in range(9)))) == {
        LossAction.GO_ON
    }
    guard = LossGuard("warn", spike_factor=2, recent=10)
    assert fed(guard, 100.0, *[1.0] * 10, 3.0)[-1] is LossAction.WARN


def test_losses_below_zero_and_a_factor_of_0_know_no_spikes():
    assert set(fed(LossGuard("stop"), *[-5.0] * 10, -0.01, 3.0)) == {LossAction.GO_ON}
    assert set(fed(LossGuard("stop", spike_factor=0), *[1.0] * 10, 1e9)) == {LossAction.GO_ON}


def test_a_bad_loss_is_no_measure_for_the_next_one():
    guard = LossGuard("warn", spike_factor=2)
    fed(guard, *[1.0] * 10)
    assert [guard.check(n, 3.0).kind for n in (11, 12)] == [LossKind.SPIKE] * 2


def test_so_many_bad_ones_in_a_row_stop_and_a_sound_one_starts_the_count_again():
    guard = LossGuard("warn", after=3)
    nan = math.nan
    assert fed(guard, nan, nan, 1.0, nan, nan) == [
        *[LossAction.WARN] * 2,
        LossAction.GO_ON,
        *[LossAction.WARN] * 2,
    ]
    verdict = guard.check(6, nan)
    assert verdict.stop
    assert verdict.in_a_row == 3
    assert verdict.message == (
        "step 6: the loss is nan, 3 bad losses in a row; do not resume from the newest step"
    )


def test_a_tensor_is_a_loss():
    import torch

    assert LossGuard().check(1, torch.tensor(1.5)).ok
    assert not LossGuard().check(1, torch.tensor(float("nan"))).ok


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"action": "panic"}, "'panic' is not an action; expected one of warn, skip, stop"),
        ({"spike_factor": 0.5}, "spike_factor is 0.5"),
        ({"spike_factor": math.nan}, "spike_factor is nan"),
        ({"after": 0}, "after is 0"),
        ({"recent": 0}, "recent is 0"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict, says: str):
    with pytest.raises(UsageError, match=says):
        LossGuard(**wrong)


# The marks


@pytest.fixture
def root(framework_roots: Path, tmp_path: Path) -> Path:
    saved = framework_roots / "kempnerforge" / "checkpoints" / "step_30"
    for number in (100, 200, 300):
        shutil.copytree(saved, tmp_path / "root" / f"step_{number}")
    return tmp_path / "root"


def stopped_at(root: Path, first: int) -> tuple[int, ...]:
    """The steps that a guard rejects which stops after two bad losses from `first` on."""
    guard = LossGuard("warn", after=2, root=root)
    assert guard.check(first, math.nan).rejected == ()
    verdict = guard.check(first + 1, math.nan)
    assert verdict.next_command == f"ckptctl pick {root}"
    return tuple(int(Path(each).name.removeprefix("step_")) for each in verdict.rejected)


def test_steps_that_were_saved_since_the_loss_went_bad_are_rejected(root: Path):
    assert stopped_at(root, 250) == (300,)
    found = ckptctl.pick(str(root))
    assert found.step == 200
    (over,) = found.passed_over
    assert "the loss went bad at step 250, and training stopped at 251" in over.reason


def test_the_step_whose_weights_gave_the_first_bad_loss_is_rejected(root: Path):
    assert stopped_at(root, 201) == (300, 200)


def test_where_no_step_was_saved_since_the_newest_is_passed_over(root: Path):
    assert stopped_at(root, 450) == (300,)
    assert ckptctl.pick(str(root)).step == 200


def test_a_mark_that_cannot_be_written_does_not_keep_the_training_going(root: Path):
    own = root / "step_300" / ".ckptctl"
    shutil.rmtree(own, ignore_errors=True)
    own.write_text("a file in the way")
    verdict = LossGuard("stop", root=root).check(400, math.nan)
    assert verdict.stop
    assert verdict.rejected == ()
    assert f"{root}/step_300 could not be rejected" in verdict.message
    assert verdict.next_command.startswith(f"ckptctl reject {root}/step_300 --reason '")


def test_a_step_that_cannot_be_rejected_leaves_no_other_usable(root: Path):
    shutil.rmtree(root / "step_300")
    (root / "step_300").symlink_to("step_300")
    guard = LossGuard("stop", root=root)
    verdict = guard.check(150, math.nan)
    assert f"{root}/step_300 could not be rejected" in verdict.message
    assert ckptctl.verify(f"{root}/step_200").verdict.value == "rejected"


def test_the_next_command_repeats_every_option_of_the_storage_and_no_secret(root: Path):
    options = {"anon": True, "secret": "hunter2", "cache_dir": "a b"}
    guard = LossGuard("stop", root=root, storage_options=options, timeout_s=7.5)
    assert guard.check(400, math.nan).next_command == (
        f"ckptctl pick {root} --storage-option anon=true "
        '--storage-option secret="$CKPTCTL_STORAGE_SECRET" '
        "--storage-option 'cache_dir=a b' --timeout 7.5"
    )


# Several ranks


@pytest.mark.slow
def test_one_bad_rank_is_a_verdict_on_all_and_is_named(tmp_path: Path):
    code = """
from ckptctl.train import LossGuard
guard = LossGuard("skip", spike_factor=5)
for step in range(1, 14):
    loss = 1.0
    if rank == 1 and step == 12:
        loss = float("nan")
    if rank == 2 and step >= 12:
        loss = 7.0
    verdict = guard.check(step, loss)
    if not verdict.ok:
        say(verdict.kind.value, verdict.action.value, verdict.rank, verdict.message)
"""
    with ranks(code, 3, tmp_path) as started:
        ended = ends(started)
    assert [code for code, _, _ in ended] == [0] * 3, ended
    for rank, (_, out, _) in enumerate(ended):
        here = ("nan" if rank == 1 else "not finite", "7" if rank == 2 else "bad")
        assert out[0] == f"not-finite skip 1 step 12: the loss is {here[0]} (on rank 1)"
        assert out[1] == (
            f"spike skip 2 step 13: the loss is {here[1]}, more than 5 times the largest of the "
            "last ones (on rank 2)"
        )


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2", "bfloat16"])
@pytest.mark.parametrize("sparse", [False, True])
def test_parameters_of_any_dtype_and_layout_are_searched_for_nan(name: str, sparse: bool):
    import torch

    bad = torch.tensor([[1.0, math.nan], [0.0, 1.0]])
    model = torch.nn.ParameterDict()
    model["w"] = torch.nn.Parameter(
        torch.zeros(8, dtype=torch.uint8).view(getattr(torch, name)), False
    )
    model["lazy"] = torch.nn.Parameter(torch.empty(3, device="meta"))
    assert why_lost(model, math.nan) == ""
    model["bad"] = torch.nn.Parameter(bad.to_sparse() if sparse else bad)
    assert why_lost(model, math.inf).startswith("the loss was inf, and 1 of 3 parameters")
    assert why_lost(model, 1.0) == ""

"""One process: what is restored, what is refused, and what becomes of broken steps."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest
from command_line import validated
from damage import flip, flip_tensor
from jsonschema import Draft202012Validator, FormatChecker

torch = pytest.importorskip("torch")

from oldest_torch import not_with_oldest  # noqa: E402
from one_process import N_STEPS, Job, run  # noqa: E402
from running import codes_of, run_job  # noqa: E402
from small_job import Lines, train_one  # noqa: E402

import ckptctl  # noqa: E402
from ckptctl.cli.explain import schema  # noqa: E402
from ckptctl.errors import (  # noqa: E402
    Fenced,
    ModelDiffers,
    NothingToResume,
    SaveFailed,
    StateRefused,
    StorageUnavailable,
    UsageError,
)
from ckptctl.formats.own.files import line_bytes  # noqa: E402
from ckptctl.formats.own.ledger import LedgerEvent, read_line  # noqa: E402
from ckptctl.formats.own.seals import SEAL  # noqa: E402
from ckptctl.train import Checkpointer, GlobalLoader, resolve  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Job:
    """What one process comes to that nobody kills; its root is there to be copied."""
    root = tmp_path_factory.mktemp("unbroken") / "run"
    job = run(root)
    job.root = root
    return job


@pytest.fixture
def root(unbroken, tmp_path) -> Path:
    """A root with steps 3, 6, 9 and 12."""
    return Path(shutil.copytree(unbroken.root, tmp_path / "run"))


@pytest.fixture
def half(unbroken, root) -> Path:
    """The same, killed after step 6."""
    for step in (9, 12):
        shutil.rmtree(root / f"step_{step}")
    return root


# What is restored


def test_a_resumed_run_goes_on_to_the_last_bit(unbroken, half):
    job = run(half)
    assert job.start.step == 6
    assert job.losses == {step: unbroken.losses[step] for step in range(7, N_STEPS + 1)}
    assert job.samples == {step: unbroken.samples[step] for step in range(7, N_STEPS + 1)}


@pytest.mark.parametrize("forgotten", ["optimizer", "scheduler", "dataloader"])
def test_what_a_script_forgets_to_give_shows_in_the_losses(unbroken, half, forgotten):
    with pytest.raises(StateRefused, match=f"cannot restore {forgotten} .*the script gives none"):
        run(half, forget=forgotten)
    job = run(half, forget=forgotten, accept_lost=[forgotten])
    assert job.losses != {step: unbroken.losses[step] for step in range(7, N_STEPS + 1)}


def test_random_numbers_that_are_forgotten_show_in_the_losses(unbroken, half):
    job = Job(half)
    start = job.resume()
    torch.manual_seed(100)
    job.train(start.step + 1, N_STEPS)
    job.die()
    assert job.losses[7] != unbroken.losses[7]
    assert job.samples[7] == unbroken.samples[7]


def test_a_step_that_is_forgotten_shows_when_it_is_saved_again(half):
    job = Job(half)
    job.resume()
    with pytest.raises(UsageError, match="step 3 cannot be saved: the run is already at step 6"):
        job.train(1, 3)
    job.die()


def test_every_kind_of_state_is_needed_unless_the_script_lets_it_go(half):
    job = Job(half, forget="optimizer", accept_lost=["optimizer"])
    job.resume()
    job.train(7, 9)
    job.die()
    whole = Job(half)
    with pytest.raises(StateRefused, match="step 9 cannot restore optimizer") as refused:
        whole.resume(9)
    assert refused.value.exit_code == 23
    whole.die()
    careless = Job(half, accept_lost=("optimizer",))
    start = careless.resume(9)
    assert start.report["state"]["lost"] == ["optimizer"]
    careless.die()


def test_states_of_any_form_come_back_as_they_were(tmp_path):
    class Meter:
        def __init__(self):
            self.state = {}

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    meter = Meter()
    meter.state = {"empty": {}, 3: [1.5, None, ()], "nested": {"list": [], "text": "so"}}
    job = Job(tmp_path / "run", extra={"meter": meter})
    job.resume()
    job.train(1, 3)
    job.die()
    again = Meter()
    later = Job(tmp_path / "run", extra={"meter": again})
    later.resume()
    assert again.state == meter.state
    later.die()


@not_with_oldest("loads any class")
def test_a_state_that_could_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path):
    class Bad:
        def state_dict(self):
            return {"where": self}

        def load_state_dict(self, state):
            pass

    job = Job(tmp_path / "run", extra={"bad": Bad()})
    job.resume()
    with pytest.raises(UsageError, match=r"extra\.bad is a dict, which can be saved but"):
        job.train(1, 3)
    assert not (tmp_path / "run" / "step_3").exists()
    job.die()


def test_another_model_is_an_error_and_no_reason_to_fall_back(half):
    job = Job(half, forget="optimizer")
    job.ckpt._job.parts.model.head = torch.nn.Linear(16, 7)
    with pytest.raises(ModelDiffers, match=r"head\.weight is \(7, 16\) here and \(11, 16\)"):
        job.resume()
    job.die()


def test_a_step_with_another_naming_of_the_model_is_refused_with_a_name_that_it_holds(tmp_path):
    job = Job(tmp_path / "run")
    state = {"model": {f"{name}.other": one for name, one in job.model.state_dict().items()}}
    path = tmp_path / "run" / "step_2"
    torch.distributed.checkpoint.save(state, checkpoint_id=path)
    with pytest.raises(ModelDiffers, match=r"it holds model\..*\.other, .*different model"):
        job.ckpt.resume(str(path))
    job.die()


def with_buffer(buffer: torch.Tensor) -> torch.nn.Module:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("held", buffer)
    return model


def on_meta() -> torch.nn.Module:
    with torch.device("meta"):
        return with_buffer(torch.ones(3))


def expanded() -> torch.nn.Module:
    return with_buffer(torch.ones(1).expand(3))


@pytest.mark.parametrize(
    ("make", "why"),
    [(on_meta, "model.weight is on the meta device"), (expanded, "is an expanded view")],
)
def test_a_tensor_that_cannot_be_loaded_into_is_no_reason_to_fall_back(tmp_path, make, why):
    root = str(tmp_path / "run")
    with Checkpointer(root, model=with_buffer(torch.ones(3))) as ckpt:
        ckpt.resume()
        ckpt.save(1)
    with pytest.raises(UsageError, match=why):
        Checkpointer(root, model=make()).resume()


def test_a_model_without_memory_is_refused_when_it_is_saved(tmp_path):
    with Checkpointer(str(tmp_path / "run"), model=on_meta()) as ckpt:
        ckpt.resume()
        with pytest.raises(UsageError, match=r"model\.weight is on the meta device"):
            ckpt.save(1)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
@pytest.mark.parametrize("n_workers", [0, 2])
def test_a_stateful_loader_goes_on_where_it_was_also_over_the_end_of_an_epoch(tmp_path, n_workers):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def job(name, last):
        torch.manual_seed(11)
        loader = loaders.StatefulDataLoader(
            Lines(), batch_size=24, shuffle=True, num_workers=n_workers
        )
        made = Job(tmp_path / name, dataloader=loader)
        step = made.resume().step + 1
        while step <= last:
            for batch, ids in loader:  # four batches an epoch
                made.losses[step] = train_one(
                    made.model, made.optimizer, made.scheduler, batch
                ).item()
                made.samples[step] = ids.tolist()
                if step in (6, 11):
                    made.ckpt.save(step)
                step += 1
                if step > last:
                    break
        made.die()
        return made

    whole, first, second = job("whole", 11), job("cut", 6), job("cut", 11)
    assert {**first.samples, **second.samples} == whole.samples
    assert {**first.losses, **second.losses} == whole.losses


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
@pytest.mark.parametrize(("before", "now"), [(0, 2), (2, 0), (2, 1)])
def test_another_number_of_workers_of_a_stateful_loader_is_refused(tmp_path, before, now):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def job(n_workers, **options):
        loader = loaders.StatefulDataLoader(Lines(), batch_size=24, num_workers=n_workers)
        return Job(tmp_path / "run", dataloader=loader, **options)

    first = job(before)
    first.resume()
    first.train(1, 2, save_every=2)
    first.die()
    second = job(now)
    counted = "1 worker" if before == 1 else f"{before} workers"
    with pytest.raises(StateRefused, match=f"by {counted} of the loader, and there are {now} now"):
        second.resume()
    second.die()
    third = job(now, accept_repetition=True)
    assert third.resume().report["state"]["lost"] == ["dataloader"]
    assert next(iter(third.loader))[1].tolist() == list(range(24))
    third.die()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
def test_a_stateful_loader_whose_order_cannot_be_saved_is_refused(tmp_path):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")
    drawn = torch.utils.data.RandomSampler(Lines())
    batches = torch.utils.data.BatchSampler(drawn, 8, drop_last=False)
    for given in ({"sampler": drawn}, {"batch_sampler": batches}):
        loader = loaders.StatefulDataLoader(Lines(), **given)
        with pytest.raises(UsageError, match="from a RandomSampler of torch, whose order cannot"):
            Job(tmp_path / "run", dataloader=loader)
        Job(tmp_path / "run", dataloader=loader, accept_repetition=True).die()
    sound = [
        loaders.StatefulDataLoader(Lines(), shuffle=True),
        loaders.StatefulDataLoader(Lines(), sampler=samplers.RandomSampler(Lines())),
    ]
    for loader in sound:
        Job(tmp_path / "run", dataloader=loader).die()


def test_another_data_set_is_told_before_it_does_harm(half):
    class Fewer(Lines):
        def __len__(self):
            return 90

    other = Job(half, dataloader=GlobalLoader(Fewer(), 8, seed=3))
    with pytest.raises(StateRefused, match="the data set differs from that of the step"):
        other.resume()
    other.die()
    told = Job(half, dataloader=GlobalLoader(Fewer(), 8, seed=3), accept_repetition=True)
    told.resume()
    assert any("the same positions are other samples" in line for line in told.said)
    told.die()


def test_another_global_batch_and_another_seed_are_told(half):
    job = Job(half, dataloader=GlobalLoader(Lines(), 6, seed=4))
    job.resume()
    assert "note: global_batch was 8 and is 6 now" in job.said
    assert "note: seed was 3 and is 4 now; the saved one is used" in job.said
    assert job.loader.order.seed == 3
    job.die()


# Fresh, none usable, could not look


def test_an_absent_root_is_a_fresh_run_and_bears_a_sentinel_from_then_on(tmp_path):
    job = Job(tmp_path / "run")
    start = job.resume()
    assert (start.fresh, start.step, start.path, start.fell_back) == (True, 0, None, False)
    validated((tmp_path / "run" / ".ckptctl" / "root.json").read_text())
    validated((tmp_path / "run" / ".ckptctl" / "fence" / "0000000001.json").read_text())
    assert validated(Path(start.report_path).read_text())["step"] is None
    job.die()


def test_a_resume_records_in_the_sentinel_that_a_step_was_usable(half):
    job = Job(half)
    job.resume()
    job.die()
    assert validated((half / ".ckptctl" / "root.json").read_text())["usable_step"] == 6


def test_a_restarted_job_that_finds_nothing_is_told_that_its_storage_is_missing(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    job = Job(tmp_path / "run")
    with pytest.raises(StorageUnavailable, match="SLURM_RESTART_COUNT is 2"):
        job.resume()
    assert not (tmp_path / "run").exists()
    with pytest.raises(StorageUnavailable):
        resolve("auto", str(tmp_path / "run"))
    job.die()


def test_a_restarted_job_that_had_begun_and_saved_nothing_begins_again(tmp_path, monkeypatch):
    Job(tmp_path / "run").resume()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    job = Job(tmp_path / "run")
    assert job.resume().fresh
    job.die()


def test_a_fresh_start_is_never_taken_over_damaged_steps(half):
    for step in (3, 6):
        flip(half / f"step_{step}" / ".metadata", 5)
    job = Job(half)
    with pytest.raises(NothingToResume) as none:
        job.resume()
    assert none.value.exit_code == 11
    with pytest.raises(UsageError, match="needs its own root"):
        job.ckpt.resume("none")
    job.die()


def test_a_first_save_that_was_cut_short_is_no_reason_to_stay_away(tmp_path):
    begun = Job(tmp_path / "run")
    begun.resume()
    begun.train(1, 3)
    (tmp_path / "run" / "step_3" / ".metadata").unlink()
    shutil.rmtree(tmp_path / "run" / "step_3" / ".ckptctl")
    begun.die()
    job = Job(tmp_path / "run")
    with pytest.raises(NothingToResume):  # the record says that step 3 was saved: it is lost
        job.resume()
    job.die()
    for ledger in (tmp_path / "run" / ".ckptctl" / "attempts").glob("*.jsonl"):
        kept = [line for line in ledger.read_text().splitlines() if '"saved"' not in line]
        ledger.write_text("".join(line + "\n" for line in kept))
    job = Job(tmp_path / "run")
    start = job.resume()
    assert start.fresh
    assert [one.step for one in start.rejected] == [3]
    job.train(1, 3)
    assert len(list((tmp_path / "run" / ".ckptctl" / "aside").iterdir())) == 1
    job.die()


def test_a_run_from_the_beginning_needs_a_root_of_its_own(half):
    job = Job(half)
    with pytest.raises(UsageError, match="holds 2 steps, step_6 the newest"):
        job.resume("none")
    job.die()


# Falling back


@pytest.mark.parametrize(
    "damage",
    [
        flip_tensor,
        lambda step: flip(step / ".metadata", 5),
        lambda step: os.truncate(step / "__0_0.distcp", 1000),
        lambda step: (step / "__0_0.distcp").unlink(),
        lambda step: (step / ".metadata").unlink(),
        shutil.rmtree,
    ],
    ids=["flipped tensor", "metadata", "short", "no shard", "no metadata", "gone"],
)
def test_a_damaged_step_is_passed_over_and_never_again_taken(root, damage):
    damage(root / "step_12")
    job = Job(root)
    start = job.resume()
    assert start.step == 9
    job.train(10, 12)
    job.die()
    later = Job(root)
    assert later.resume().step == 12
    later.die()


def test_a_step_that_does_not_load_is_told_with_the_reason(root):
    flip_tensor(root / "step_12")
    job = Job(root, level="listing")
    start = job.resume()
    assert (start.step, start.fell_back) == (9, True)
    (refused,) = start.rejected
    assert refused.step == 12
    assert "checksum" in refused.reason
    assert start.report["superseded"] == [12]
    listed = ckptctl.verify(str(root / "step_12"), level=ckptctl.Level.LISTING)
    assert listed.verdict.value == "superseded"
    assert any(line.startswith("not from step 12: ") for line in job.said)
    job.die()


def test_a_step_that_is_removed_between_choice_and_load_is_passed_over(root, monkeypatch):
    from ckptctl.train import resuming

    opened = resuming.open_on_all

    def removed(chosen, *others):
        if chosen.number == 12:
            shutil.rmtree(chosen.url)
        return opened(chosen, *others)

    monkeypatch.setattr(resuming, "open_on_all", removed)
    job = Job(root)
    start = job.resume()
    assert (start.step, start.fell_back) == (9, True)
    job.die()


def test_too_many_steps_that_do_not_load_make_the_storage_suspect(root):
    for step in (6, 9, 12):
        flip_tensor(root / f"step_{step}")
    job = Job(root, level="listing")
    with pytest.raises(NothingToResume, match="check the storage") as refused:
        job.resume()
    assert refused.value.next_command == f"ckptctl runbook run rb-7 {root}"
    job.die()


def test_shards_of_another_step_are_seen_at_level_content(root):
    step = root / "step_12"
    times = (step / "__0_0.distcp").stat()
    assert (root / "step_9" / "__0_0.distcp").stat().st_size == times.st_size
    shutil.copy(root / "step_9" / "__0_0.distcp", step)
    os.utime(step / "__0_0.distcp", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert resolve("auto", str(root), level="content") == str(root / "step_9")
    job = Job(root, level="content")
    start = job.resume()
    assert start.step == 9
    assert "counts 9 steps" in start.rejected[0].reason
    job.die()


def test_a_named_step_that_does_not_load_is_not_replaced_by_another(root):
    flip_tensor(root / "step_9")
    job = Job(root, level="listing")
    with pytest.raises(NothingToResume, match="could not be loaded"):
        job.resume(9)
    job.die()


@pytest.mark.parametrize("word", ["latest", "newest", "-1", "step_9"])
def test_a_word_that_names_no_step_is_refused_with_those_that_do(root, word):
    wanted = f"resume_from is '{word}'; expected auto, none, a step number, or the path of a step"
    with pytest.raises(UsageError, match=wanted) as refused:
        resolve(word, str(root))
    assert refused.value.next_command == f"ckptctl scan {root}"
    n_attempts = len(list((root / ".ckptctl" / "attempts").iterdir()))
    job = Job(root)
    with pytest.raises(UsageError, match=wanted):
        job.resume(word)
    assert len(list((root / ".ckptctl" / "attempts").iterdir())) == n_attempts
    job.die()


def test_a_step_of_the_working_folder_is_named_by_its_name_alone(root, monkeypatch):
    monkeypatch.chdir(root)
    assert resolve("step_9", str(root)).endswith("step_9")
    monkeypatch.chdir(root.parent)
    assert resolve("run@6", str(root)).endswith("run/step_6")


# Lineage, and one writer


def test_resuming_from_an_older_step_supersedes_the_newer_ones(root):
    job = Job(root)
    start = job.resume(6)
    assert start.report["superseded"] == [9, 12]
    job.train(7, 9)
    job.die()
    assert len(list((root / ".ckptctl" / "aside").glob("step_9.*"))) == 1
    found = ckptctl.pick(str(root))
    assert found.step == 9
    seal = json.loads((root / "step_9" / ".ckptctl" / "seal.json").read_text())
    assert seal["origin"]["attempt"] == start.report["attempt"]
    assert seal["origin"]["resumed_from"] == 6


def confirmed(root: Path) -> list[tuple[int, str]]:
    """The steps of a root that are confirmed, with what is reported of it."""
    return [
        (report.number or 0, finding.message)
        for report in ckptctl.scan(str(root)).reports
        for finding in report.findings
        if finding.code == "step.confirmed"
    ]


def test_a_resumed_step_is_confirmed_once_training_has_gone_on_for_long_enough(half):
    job = run(half, 9, confirm_after=4)
    assert confirmed(half) == []
    job = run(half, 12, confirm_after=3)
    ((step, why),) = confirmed(half)
    assert step == 9
    assert f"attempt {job.start.report['attempt']}" in why
    assert "3 steps after a resume from it, step 12 was saved; all losses finite" in why
    assert len(list((half / "step_9" / ".ckptctl" / "marks").iterdir())) == 1


@pytest.mark.parametrize(
    "how", ["0 confirms none", "a loss", "a loss of the save", "no loss", "removed", "saved again"]
)
def test_a_resumed_step_is_not_confirmed_after_a_failure_or_where_it_is_gone(half, how):
    job = Job(half, confirm_after=0 if how == "0 confirms none" else 3)
    job.resume()
    if how == "a loss":
        job.ckpt.note(7, loss=math.nan)
    if how == "removed":
        shutil.rmtree(half / "step_6")
    if how == "saved again":
        (half / "step_6" / ".metadata").write_bytes((half / "step_3" / ".metadata").read_bytes())
    if how in ("a loss of the save", "no loss"):
        job.ckpt.save(9, loss=math.nan if how == "a loss of the save" else None)
    else:
        job.train(7, 9)
    job.die()
    assert (half / "step_9").exists()
    assert confirmed(half) == []
    assert (half / "step_6").exists() == (how != "removed")
    why = "note: step 6 is not confirmed: no loss was given to note or save"
    assert (why in job.said) == (how == "no loss")


def test_a_confirmation_that_cannot_be_written_is_reported_and_the_save_succeeds(half):
    job = Job(half, confirm_after=3)
    job.resume()
    (half / "step_6" / ".ckptctl" / "marks").write_text("no folder")
    job.train(7, 9)
    job.die()
    assert ckptctl.verify(str(half / "step_9"), require_seal=True).usable
    (told,) = [line for line in job.said if "is not confirmed" in line]
    assert "step 6 is not confirmed" in told
    assert "marks" in told


@pytest.mark.parametrize("after", [-1, 1.5, math.nan, "100", None, True])
def test_confirm_after_is_a_number_of_steps(tmp_path, after):
    with pytest.raises(UsageError, match="confirm_after is"):
        Job(tmp_path / "run", confirm_after=after)


def test_of_two_jobs_on_one_root_the_later_one_writes(half):
    first, second = Job(half), Job(half)
    first.resume()
    second.resume()
    with pytest.raises(Fenced, match="took the root over") as fenced:
        first.train(7, 9)
    assert fenced.value.exit_code == 93
    assert not (half / "step_9").exists()
    second.train(7, 9)
    assert ckptctl.verify(str(half / "step_9"), require_seal=True).usable
    for job in (first, second):
        job.die()


@pytest.mark.parametrize(("asked", "left"), [(2, "no metadata"), (3, "no seal")])
def test_an_orphan_that_wakes_up_in_a_save_publishes_nothing_more(half, monkeypatch, asked, left):
    from ckptctl.train import saving

    orphan, heir = Job(half), Job(half)
    orphan.resume()
    n_asked = 0
    check = saving.check_token

    def taken_over(*args):
        nonlocal n_asked
        n_asked += 1
        if n_asked == asked:
            heir.resume()
        check(*args)

    monkeypatch.setattr(saving, "check_token", taken_over)
    with pytest.raises(Fenced):
        orphan.train(7, 9)
    assert (half / "step_9" / ".metadata").exists() is (left == "no seal")
    assert not (half / "step_9" / ".ckptctl" / "seal.json").exists()
    for job in (orphan, heir):
        job.die()


# What attempts say


def fail(root: Path, error: BaseException | None = None, *, at: int = 8, loss: float = 1.0) -> int:
    """An attempt that resumes, comes to a step and fails; where it had resumed from."""
    job = Job(root)
    step = job.resume().step
    job.ckpt.note(at, loss=loss)
    if error is not None:
        with suppress(BaseException), job.ckpt:
            raise error
    else:
        job.die()
    return step


def test_a_step_that_two_attempts_fail_after_alike_is_passed_over(half):
    assert [fail(half, loss=math.nan) for _ in range(2)] == [6, 6]
    job = Job(half)
    start = job.resume()
    assert start.step == 3
    report = ckptctl.verify(str(half / "step_6"))
    assert report.verdict.value == "rejected"
    assert "non-finite loss" in report.findings[0].message
    job.die()


def test_what_says_nothing_against_a_step_never_counts(half):
    endings = [
        KeyboardInterrupt(),
        SystemExit(1),
        RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer"),
        OSError(5, "Input/output error"),
        ValueError("a bug"),
        TypeError("another"),
        None,
        None,
    ]
    assert [fail(half, error) for error in endings] == [6] * len(endings)


def test_a_failure_long_after_the_resume_says_nothing_against_the_step(half):
    assert [fail(half, ValueError("late"), at=27) for _ in range(3)] == [6, 6, 6]


def test_a_failure_that_follows_every_step_is_no_step_s_fault(root):
    before = [fail(root, ValueError("a bug in the script"), at=13) for _ in range(2)]
    assert before == [12, 12]
    after = [fail(root, ValueError("a bug in the script"), at=10) for _ in range(3)]
    assert after == [9, 9, 9]


def test_what_followed_an_older_save_says_nothing_against_a_step_saved_anew(half):
    assert [fail(half, loss=math.nan) for _ in range(2)] == [6, 6]
    job = run(half, 6)
    assert job.start.step == 3
    # As after a kill right behind the seal: the record does not know of the save.
    ledger = Path(job.start.report_path.replace(".resume.json", ".jsonl"))
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(line for line in lines if '"saved"' not in line))
    assert [fail(half, loss=math.nan) for _ in range(2)] == [6, 6]
    assert fail(half) == 3  # the same now holds of the step that was saved anew


def test_an_older_save_still_shows_that_a_failure_is_no_step_s_fault(half):
    assert fail(half, ValueError("a bug in the script")) == 6
    job = Job(half)
    job.resume(3)
    job.train(4, 9)
    job.die()
    after = [fail(half, ValueError("a bug in the script"), at=10) for _ in range(3)]
    assert after == [9, 9, 9]


def test_each_line_of_a_ledger_is_as_its_schema_says_and_reads_back_as_it_was_written(half):
    fail(half, ValueError("a bug in the script"))
    job = Job(half, keep=1)
    job.resume()
    job.train(7, 12)
    job.die()
    lines = [
        line
        for ledger in (half / ".ckptctl" / "attempts").glob("*.jsonl")
        for line in ledger.read_bytes().splitlines(keepends=True)
    ]
    validator = Draft202012Validator(schema("ckptctl.ledger/1"), format_checker=FormatChecker())
    for line in lines:
        validator.validate(json.loads(line))
        assert line_bytes(read_line(line)) == line
    assert {type(read_line(line)) for line in lines} == set(get_args(LedgerEvent))


# Saving


def test_a_whole_step_is_not_written_over(root):
    job = Job(root)
    job.resume(6)
    ckptctl.mark(str(root / "step_9"), "accepted")
    with pytest.raises(UsageError, match="step_9 already exists and is complete"):
        job.train(7, 9)
    assert ckptctl.verify(str(root / "step_9"), level="content", require_seal=True).usable
    job.die()


@pytest.mark.parametrize("mount_point", [True, False])
def test_a_save_is_refused_while_the_storage_is_not_mounted(tmp_path: Path, mount_point: bool):
    root, storage = tmp_path / "mount" / "run", tmp_path / "storage"
    root.parent.mkdir()
    job = Job(root)
    job.resume()
    job.train(1, 3)
    job.ckpt._attempt.ledger.drain(600)
    root.rename(storage)
    if mount_point:
        root.mkdir()
    why = "another folder is in its place" if mount_point else "it does not exist any more"
    with pytest.raises(SaveFailed, match=f"the folder that was opened before: {why}") as failed:
        job.train(4, 6)
    assert failed.value.exit_code == 75
    job.ckpt._attempt.ledger.drain(600)
    assert [*root.parent.rglob("*")] == [root] * mount_point  # nothing lies below the mount point
    if mount_point:
        root.rmdir()
    storage.rename(root)
    job.ckpt.save(6)
    job.ckpt.close()
    assert ckptctl.pick(str(root)).chosen.number == 6


def test_a_disk_that_is_full_leaves_older_steps_and_says_so(half, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    job = Job(half)
    job.resume()
    with monkeypatch.context() as patched:
        patched.setattr("ckptctl.storage.local.write_in_place", full)
        with pytest.raises(SaveFailed, match="No space left on device"):
            job.train(7, 9)
    assert ckptctl.pick(str(half), grace_s=0).step == 6
    job.train(9, 9)  # the next try takes its place
    assert ckptctl.pick(str(half)).step == 9
    job.die()


def test_a_seal_that_cannot_be_written_leaves_a_whole_step(half, monkeypatch):
    from ckptctl.train import saving

    job = Job(half)
    job.resume()
    check = saving.check_token

    def in_the_way(*args):
        check(*args)
        if (half / "step_9" / ".metadata").exists():
            (half / "step_9" / SEAL).mkdir()  # a folder where a file should be

    monkeypatch.setattr(saving, "check_token", in_the_way)
    with pytest.raises(SaveFailed, match="step 9 is complete but was not sealed"):
        job.train(7, 9)
    (half / "step_9" / SEAL).rmdir()
    assert ckptctl.pick(str(half)).step == 9
    job.die()


def test_only_whole_and_sealed_steps_count_as_kept(root):
    shutil.rmtree(root / "step_9" / ".ckptctl")  # whole, and not sealed
    ckptctl.mark(str(root / "step_3"), "pinned")
    job = Job(root, keep=2)
    job.resume()
    job.train(13, 18)
    assert sorted(path.name for path in root.glob("step_*")) == [
        *("step_12", "step_15", "step_18", "step_3")
    ]
    job.die()


def test_the_step_resumed_from_stays(root):
    job = Job(root, keep=1)
    job.resume()
    job.train(13, 18)
    assert sorted(path.name for path in root.glob("step_*")) == ["step_12", "step_18"]
    job.die()


def test_a_save_beside_the_training_holds_what_was_there_when_it_began(unbroken, tmp_path):
    job = Job(tmp_path / "run")
    job.resume()
    job.train(1, N_STEPS, save=job.ckpt.save_async)
    job.ckpt.close()
    for step in (3, 6, 9, 12):
        assert ckptctl.verify(str(tmp_path / "run" / f"step_{step}"), require_seal=True).usable
    shutil.rmtree(tmp_path / "run" / "step_12")
    assert run(tmp_path / "run").losses == {step: unbroken.losses[step] for step in (10, 11, 12)}


def test_what_goes_wrong_beside_the_training_is_raised_at_the_next_call(half):
    job, other = Job(half), Job(half)
    job.resume()
    other.resume()
    job.train(7, 9, save=job.ckpt.save_async)
    with pytest.raises(Fenced):
        job.ckpt.save(10)
    job.ckpt.flush()  # raised once
    for each in (job, other):
        each.die()


def test_a_step_whose_save_beside_the_training_failed_can_be_saved_again(half):
    job = Job(half)
    job.resume()
    away = half.with_name("unmounted")
    half.rename(away)
    job.train(7, 9, save=job.ckpt.save_async)
    with pytest.raises(SaveFailed):
        job.ckpt.flush()
    away.rename(half)
    job.ckpt.save(9)
    assert ckptctl.pick(str(half)).step == 9
    job.die()


def test_an_exit_that_reports_success_does_not_hide_a_save_that_is_lost(half):
    job, other = Job(half), Job(half)
    job.resume()
    other.resume()
    job.train(7, 9, save=job.ckpt.save_async)
    with pytest.raises(Fenced), job.ckpt:
        sys.exit(0)
    with pytest.raises(SystemExit), other.ckpt:
        sys.exit(3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep": 0},
        {"rng": "keep"},
        {"level": "deep"},
        {"accept_lost": ("weights",)},
        {"optimizer": object()},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_argument_is_told_before_anything_is_written(tmp_path, wrong):
    with pytest.raises(UsageError):
        Checkpointer(str(tmp_path / "run"), **wrong)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step_format", ["step", "{}", "weights_{}", "step_{}/x", "step_{:x}"])
def test_names_that_nobody_would_take_for_steps_are_refused(tmp_path, step_format):
    with pytest.raises(UsageError, match="are not recognized as steps"):
        Checkpointer(str(tmp_path), step_format=step_format)


def test_steps_are_named_as_other_frameworks_do(tmp_path):
    job = Job(tmp_path / "run", step_format="step-{:08}")
    job.resume()
    job.train(1, 3)
    assert ckptctl.pick(str(tmp_path / "run")).path.endswith("step-00000003")
    job.die()


# resolve


def test_resolve_answers_as_pick_does(root):
    assert resolve("auto", str(root)) == ckptctl.pick(str(root)).path
    assert resolve("9", str(root)) == str(root / "step_9")
    assert resolve(9, str(root)) == str(root / "step_9")
    assert resolve(str(root / "step_6"), str(root)) == str(root / "step_6")
    assert resolve("none", str(root)) is None
    assert resolve("auto", str(root / "nothing-yet")) is None
    flip(root / "step_12" / ".metadata", 5)
    assert resolve("auto", str(root)) == str(root / "step_9")
    with pytest.raises(NothingToResume, match="step_12 was requested, but it is corrupt") as bad:
        resolve(12, str(root))
    assert bad.value.exit_code == 21


@pytest.mark.parametrize("resume_from", ["auto", 100])
def test_resolve_accepts_at_level_content_what_nothing_can_prove_where_pick_does(
    checkpoints, resume_from
):
    root = str(checkpoints / "no_crc_2")
    with pytest.raises(NothingToResume, match=r"not be loaded|did not load"):
        resolve(resume_from, root, level="content")
    accepted = {"level": "content", "accept_unverifiable": True}
    assert resolve(resume_from, root, **accepted) == ckptctl.pick(root, **accepted).path


def test_processes_that_do_not_know_of_each_other_are_told(tmp_path, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="init_process_group"):
        resolve("auto", str(tmp_path))


# A loss that is not finite


def spoil(job: Job) -> None:
    with torch.no_grad():
        next(job.model.parameters()).view(-1)[0] = math.nan


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_steps_saved_after_the_loss_and_the_weights_became_nan_are_rejected(half, how):
    job = Job(half, keep=2)
    start = job.resume()
    spoil(job)
    job.train(start.step + 1, 12, save=None if how == "save" else job.ckpt.save_async)
    job.ckpt.close()
    assert [step for step, loss in job.losses.items() if math.isnan(loss)] == [*range(7, 13)]
    assert sum("is saved and rejected: the loss was nan" in said for said in job.said) == 2
    found = ckptctl.pick(str(half))
    assert (found.step, [one.report.verdict.value for one in found.passed_over]) == (
        6,
        ["rejected", "rejected"],
    )
    assert (half / "step_3").is_dir()  # the rejected ones do not count for `keep`
    assert run(half, last=6).start.step == 6


def test_the_loss_that_was_noted_counts_where_a_save_is_given_none(half):
    job = Job(half)
    job.resume()
    spoil(job)
    job.ckpt.note(7, loss=math.nan)
    job.ckpt.save(7)
    assert ckptctl.verify(str(half / "step_7")).exit_code == 27
    job.die()


def test_a_single_bad_loss_that_left_the_weights_alone_rejects_nothing(half):
    job = Job(half)
    job.resume()
    job.ckpt.note(7, loss=math.inf)
    job.ckpt.save(7, loss=math.nan)
    job.die()
    assert ckptctl.pick(str(half)).step == 7


@pytest.mark.parametrize(("moment", "then"), [("metadata", 0), ("seal", 11)])
def test_a_job_that_is_killed_while_it_saves_lost_weights_leaves_no_step_that_is_chosen(
    tmp_path, moment, then
):
    hook = tmp_path / "hook.py"
    hook.write_text("next(model.parameters()).data.fill_(float('nan'))")
    killed = ("--ranks", 1, "--steps", 3, "--kill", f"{moment}:1", "--hook", hook)
    # Killed before the metadata, the job starts again; behind it, there is only the bad step.
    assert codes_of(run_job(tmp_path, *killed)) == [-9, then]
    report = ckptctl.verify(str(tmp_path / "run" / "step_3"))
    assert (report.exit_code, report.seal is None) == (27, moment == "seal")
    with pytest.raises(NothingToResume):
        resolve("auto", str(tmp_path / "run"))


def one_layer(root: object) -> Checkpointer:
    ckpt = Checkpointer(str(root), model=torch.nn.Linear(2, 2), tell=lambda _: None)
    ckpt.resume()
    return ckpt


@pytest.mark.parametrize("step", [2.0, 1.5, "7", None, 2**63, 10**30, torch.tensor(1.0)])
@pytest.mark.parametrize("save", ["save", "save_async"])
def test_a_step_that_no_resume_would_find_is_refused(tmp_path, step, save):
    ckpt = one_layer(tmp_path / "run")
    with pytest.raises(UsageError, match=r"step is .* a whole number|no resume would recognize"):
        getattr(ckpt, save)(step)
    ckpt.close()
    assert not list((tmp_path / "run").glob("step_*"))


@pytest.mark.parametrize("given", [{"tokens": "x"}, {"samples": 1.5}, {"loss": "x"}, {"loss": 1j}])
def test_a_count_or_loss_that_is_no_number_is_refused(tmp_path, given):
    ckpt = one_layer(tmp_path / "run")
    with pytest.raises(UsageError, match=f"{next(iter(given))} is .*: expected"):
        ckpt.save(1, **given)
    ckpt.close()


def test_numbers_of_numpy_and_torch_are_those_of_python(tmp_path):
    numpy = pytest.importorskip("numpy")
    with one_layer(tmp_path / "run") as ckpt:
        ckpt.note(numpy.int64(1), loss=torch.tensor(2.5))
        ckpt.save(numpy.int64(1), tokens=torch.tensor(8), loss=numpy.float32(2.5))
    start = Checkpointer(str(tmp_path / "run"), model=torch.nn.Linear(2, 2)).resume()
    assert (start.step, start.tokens) == (1, 8)


@pytest.mark.parametrize("save", ["save", "save_async"])
def test_nothing_is_saved_after_close(tmp_path, save):
    ckpt = one_layer(tmp_path / "run")
    ckpt.close()
    with pytest.raises(UsageError, match="close was called before"):
        getattr(ckpt, save)(1)

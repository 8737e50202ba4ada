"""The data ledger: repeated and skipped samples are found, and right runs are not accused."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import xxhash
from command_line import REPOSITORY, clean_environment, run_ckptctl, torch_server, validated
from one_process import Job
from running import codes_of, rows_of, run_job, samples

import ckptctl
from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.errors import UsageError
from ckptctl.formats.own.data_ledger import (
    DATA_FILE,
    MOST_ROWS,
    DataFields,
    LedgerRow,
    data_bytes,
    joined_rows,
    parse_data,
    sum_of,
    sum_of_indices,
)
from ckptctl.goodput.data_use import (
    EpochState,
    EpochUse,
    data_use,
    epochs_of,
)
from ckptctl.train import Checkpointer, DataLedger, GlobalLoader, Order

N_CASES = 200
KINDS = ("order", "ids", "digests")


# The digest


def test_the_digest_does_not_depend_on_the_order_and_adds_up():
    ids = list(range(5_000))
    shuffled = random.Random(0).sample(ids, len(ids))
    assert sum_of(shuffled) == sum_of(ids) == sum_of_indices(5_000)
    assert (sum_of(ids[:70]) + sum_of(ids[70:])) % 2**128 == sum_of(ids)
    assert sum_of(()) == 0


def test_the_digest_is_the_sum_of_xxh3_hashes_of_eight_bytes_or_of_text():
    hashes = [xxhash.xxh3_128_intdigest(one) for one in (b"\x07" + 7 * b"\0", b"\xff" * 8)]
    assert sum_of([7, -1]) == sum(hashes) % 2**128
    assert sum_of(["a/7", "ü"]) == sum(map(xxhash.xxh3_128_intdigest, (b"a/7", b"\xc3\xbc"))) % (
        2**128
    )
    assert sum_of([7, "a"]) == (sum_of([7]) + sum_of(["a"])) % 2**128


@pytest.mark.parametrize("sample", [1.5, None, 2**63, b"a"])
def test_other_ids_are_refused(sample):
    with pytest.raises(UsageError, match="expected an integer of 64 bits, or text"):
        sum_of([1, sample])


def test_many_rows_are_joined_and_their_sums_kept():
    rows = [LedgerRow(step, step, step // 9_000, 2, step) for step in range(1, 20_001)]
    joined = joined_rows(rows)
    assert len(joined) <= MOST_ROWS
    for epoch in range(3):
        own, own_joined = ([r for r in some if r.epoch == epoch] for some in (rows, joined))
        assert sum(r.total for r in own) == sum(r.total for r in own_joined)
        assert sum(r.n_samples for r in own) == sum(r.n_samples for r in own_joined)
        assert (own[0].first, own[-1].last) == (own_joined[0].first, own_joined[-1].last)


@pytest.mark.parametrize("samples", [4, ["a", "b", "c", "d"]])
def test_ids_that_are_not_of_the_data_set_are_unknown_and_never_right(samples):
    ledger = DataLedger(samples=samples, keep_ids=True)
    ids = [0, 1, 2, 4] if isinstance(samples, int) else ["a", "b", "c", "e"]
    ledger.add(1, ids)
    ledger.add(2, [], epoch=1)
    fields = ledger.collect(2, ProcessGroup(), 0, 1)
    assert fields is not None
    first, _ = epochs_of(fields)
    assert first.state is EpochState.UNKNOWN
    assert str(first.why).startswith("ids are not of the data set")


def test_steps_and_epochs_are_whole_numbers_and_long_ids_are_not_kept():
    ledger = DataLedger(keep_ids=True)
    with pytest.raises(UsageError, match="epochs count from 0 on"):
        ledger.add(1, [1], epoch=-1)
    ledger.add(torch.tensor(1), ["a" * 5_000], epoch=torch.tensor(0))
    fields = ledger.collect(1, ProcessGroup(), 0, 1)
    assert fields is not None
    read = parse_data(data_bytes({**fields, "metadata": "0" * 64}))
    assert (read["epochs"][0]["count"], read["epochs"][0]["ids"]) == (1, None)


def test_a_ledger_continues_where_the_samples_of_an_epoch_are_not_known_and_not_on_other_data():
    first = DataLedger(samples=4)
    first.add(1, [0, 1, 2, 3])
    fields = first.collect(1, ProcessGroup(), 0, 1)
    for n, continues, count in ((4, True, 5), (None, True, 5), (5, False, 1)):
        ledger = DataLedger(samples=n)
        assert ledger.begin(1, fields) is continues
        ledger.add(2, [3])
        later = ledger.collect(2, ProcessGroup(), 0, 1)
        assert later is not None
        assert later["epochs"][0]["count"] == count
        (use,) = epochs_of(later)
        assert (use.state is EpochState.WRONG) is (n == 4)


def test_a_ledger_of_a_data_set_beyond_all_bounds_is_unknown_at_once():
    for n, epoch in ((2**62, 0), (30_000_000, 0)):
        ledger = DataLedger(samples=n)
        ledger.add(1, [0], epoch=epoch)
        fields = ledger.collect(1, ProcessGroup(), 0, 1)
        assert fields is not None
        assert fields["expected"] is not None
        fields["expected"]["order"] = {"seed": 0, "shuffle": True}
        fields["expected"]["sum"] = f"{0:032x}"
        fields["epochs"][0]["spans"] = [{"start": 0, "count": 1, "after": 0}]
        (use,) = epochs_of(fields)
        assert use.state is EpochState.UNKNOWN


# Made runs


@dataclass(frozen=True, slots=True)
class Run:
    """A made run: what it trained of each epoch, and how much of the order it went through."""

    fields: DataFields
    trained: dict[int, Counter[int]]
    end: int


def made_run(seed: int, *, is_right: bool, kind: str) -> Run:
    """A run of several attempts, of other batch sizes, with its ledger.

    `kind` is `order` (a `GlobalLoader`), `ids` (kept) or `digests`. Unless it `is_right`, one
    resume continues at another position.
    """
    draw = random.Random(seed)
    n = draw.randrange(12, 120)
    n_epochs = draw.randrange(1, 4)
    end = n * n_epochs + draw.randrange(1, n // 2)
    n_attempts = draw.randrange(2, 5)
    bad = 0 if is_right else draw.randrange(1, n_attempts)
    saved: DataFields | None = None
    position, step = 0, 0
    taken: list[int] = []  # of the branch, as positions
    for attempt in range(n_attempts):
        goal = end if attempt == n_attempts - 1 else draw.randrange(min(position, end - 1), end)
        if attempt == bad and attempt:
            limit = max(1, n // 3)
            shift = draw.choice([*range(-min(limit, position), 0), *range(1, limit)] or [1])
            position = max(0, position + shift)
        goal = max(goal, position + 1)
        loader = GlobalLoader(range(n), draw.randrange(1, n), seed=seed)
        ledger = DataLedger(samples=n, keep_ids=kind == "ids")
        if kind == "order":
            ledger = DataLedger()
            assert ledger.follow(loader, 1)
        assert ledger.begin(step, saved) is (saved is not None)
        loader.position = position
        every = draw.randrange(1, 4)
        branch, now = list(taken), step
        for batch in loader:
            places = range(loader.position - len(batch), loader.position)
            branch += places
            now += 1
            epochs = sorted({place // n for place in places})
            if kind != "order":
                for epoch in epochs:
                    ids = [loader.order.sample_at(p) for p in places if p // n == epoch]
                    ledger.add(now, ids, epoch=epoch)
            else:
                ledger.note(now)
            is_last = loader.position >= goal
            # Attempts that are not the last end after a step that no save holds.
            if now % every == 0 or (is_last and attempt == n_attempts - 1):
                fields = ledger.collect(now, ProcessGroup(), 0, 1)
                assert fields is not None
                ledger.saved(fields)
                saved = parse_data(data_bytes({**fields, "metadata": "0" * 64}))
                step, position, taken = now, loader.position, list(branch)
            if is_last:
                break
    assert saved is not None
    trained: dict[int, Counter[int]] = {}
    for place in taken:
        sample = loader.order.sample_at(place)
        trained.setdefault(place // n, Counter())[sample] += 1
    return Run(saved, trained, position)


def uses_of(run: Run) -> tuple[EpochUse, ...]:
    return tuple(epochs_of(run.fields))


def runs(kind: str, *, is_right: bool) -> Iterator[tuple[int, Run, int]]:
    n_runs, seed = 0, 0
    while n_runs < N_CASES // len(KINDS):
        run = made_run(seed, is_right=is_right, kind=kind)
        expected = run.fields["expected"]
        assert expected is not None
        n = expected["count"]
        # A fault of an attempt that saved nothing is in no step.
        if is_right or has_fault(run, seed, n):
            n_runs += 1
            yield seed, run, n
        seed += 1


def faults_in(run: Run, seed: int, n: int, epoch: int) -> tuple[set[int], set[int]]:
    """The samples of an epoch that were repeated, and those that were skipped."""
    seen = run.trained[epoch]
    missing = set(range(n)) - set(seen)
    if epoch == max(run.trained):  # what is behind the last sample is still to come
        order = [Order(n, seed).sample_at(epoch * n + place) for place in range(n)]
        missing &= set(order[: 1 + max(order.index(sample) for sample in seen)])
    return {sample for sample, times in seen.items() if times > 1}, missing


def has_fault(run: Run, seed: int, n: int) -> bool:
    """Whether an epoch has repeated or skipped samples and has ended, so that digests show it."""
    ended = sorted(run.trained)[:-1]
    return any(any(faults_in(run, seed, n, epoch)) for epoch in ended)


@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
def test_right_runs_of_any_batch_size_world_size_and_epochs_are_not_accused(kind):
    for seed, run, n in runs(kind, is_right=True):
        uses = uses_of(run)
        assert [one.epoch for one in uses] == sorted(run.trained), seed
        for one in uses:
            if one.trained == n:
                assert one.state is EpochState.ONCE, (seed, one)
            elif kind in ("order", "ids"):
                assert one.state is EpochState.ONCE_SO_FAR, (seed, one)
            else:
                assert one.state is EpochState.UNKNOWN, (seed, one)


@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
def test_repeated_and_skipped_samples_are_found_and_counted(kind):
    n_exact = 0
    for seed, run, n in runs(kind, is_right=False):
        uses = {one.epoch: one for one in uses_of(run)}
        for epoch, seen in run.trained.items():
            one = uses[epoch]
            again, missing = faults_in(run, seed, n, epoch)
            has_ended = epoch < max(run.trained)
            if not again and not missing:
                assert one.state is not EpochState.WRONG, (seed, one)
                continue
            if has_ended or kind == "order":
                assert one.state is EpochState.WRONG, (seed, one)
            if kind in ("ids", "order"):
                n_exact += 1
                assert one.repeated == len(again), (seed, one)
                assert set(one.first_repeated) <= again
                if has_ended or kind == "order":
                    assert one.skipped == len(missing), (seed, one)
                    assert set(one.first_skipped) <= missing
            assert one.least_repeated <= sum(seen.values()) - len(seen), (seed, one)
            assert one.least_skipped <= len(missing), (seed, one)
    assert n_exact or kind not in ("order", "ids")


# With real steps


@pytest.mark.torch
def test_a_resume_continues_the_ledger_of_its_step_and_leaves_an_abandoned_branch_out(tmp_path):
    first = Job(tmp_path / "run")
    first.resume()
    first.train(1, 7)
    first.ckpt.close()
    second = Job(tmp_path / "run", batch=5)
    assert second.resume(3).step == 3
    second.train(4, 20, save_every=1)
    second.ckpt.close()
    use = data_use(str(tmp_path / "run"))
    assert (use.verdict, use.exit_code, use.step) == ("excluded", 0, 20)
    assert [(one.epoch, one.state, one.trained) for one in use.epochs] == [
        (0, EpochState.ONCE, 96),
        (1, EpochState.ONCE_SO_FAR, 3 * 8 + 17 * 5 - 96),
    ]
    assert ckptctl.verify(str(tmp_path / "run" / "step_20"), level="content").usable


@pytest.mark.torch
def test_data_that_a_resume_repeats_or_skips_is_found_with_its_ids_after_prune(tmp_path):
    job = Job(tmp_path / "run")
    job.resume()
    job.train(1, 3)
    job.ckpt.close()
    for shift, first, last in ((24, 4, 6), (-8, 7, 9)):
        job = Job(tmp_path / "run", keep=1)
        job.resume()
        job.loader.position += shift
        job.train(first, last)
        job.ckpt.close()
    assert not (tmp_path / "run" / "step_3").exists()  # the next is that of the resume
    use = data_use(str(tmp_path / "run"))
    (epoch,) = use.epochs
    order = [job.loader.order.sample_at(place) for place in range(96)]
    assert use.message == "epoch 0: 24 of 96 samples were skipped; 8 of 96 samples were repeated"
    assert (epoch.once, epoch.repeated, epoch.skipped, epoch.to_come) == (56, 8, 24, 8)
    assert list(epoch.first_skipped) == order[24:34]
    assert list(epoch.first_repeated) == order[64:72]
    assert epoch.after_step == 3
    done = run_ckptctl("data", tmp_path / "run", "--json")
    assert done.returncode == 30
    assert validated(done.stdout)["epochs"][0]["skipped"] == 24
    assert "first after step 3" in run_ckptctl("data", tmp_path / "run").stdout


@pytest.mark.torch
@pytest.mark.parametrize(("shift", "state"), [(0, "excluded"), (24, "found"), (-8, "found")])
def test_loss_finds_or_excludes_repeated_data_by_the_ledger_of_the_run(tmp_path, shift, state):
    job = Job(tmp_path / "run")
    job.resume()
    job.train(1, 3)
    job.ckpt.close()
    log = tmp_path / "train.log"

    def data_fault() -> dict[str, str]:
        rows = (f"step {n} loss {2 + 1 / n:.4f}" for n in (*range(1, 4), *range(4, 9)))
        log.write_text("\n".join(rows) + "\n")
        given = ("--resume-step", 3, "--resume-report", tmp_path / "run")
        report = validated(run_ckptctl("loss", log, *given, "--json").stdout)
        (fault,) = [one for one in report["faults"] if one["name"] == "data repeated or skipped"]
        return fault

    assert data_fault()["state"] == "open"
    job = Job(tmp_path / "run")
    job.resume()
    assert data_fault()["why"].startswith("the data ledger holds the steps after 0, up to 3")
    job.loader.position += shift
    job.train(4, 6)
    job.ckpt.close()
    fault = data_fault()
    assert fault["state"] == state
    assert "data ledger up to step 6" in fault["why"]


@pytest.mark.torch
def test_a_resharded_step_holds_the_ledger_and_a_resume_from_it_continues(tmp_path):
    job = Job(tmp_path / "run")
    job.resume()
    job.train(1, 7)
    job.ckpt.close()
    (tmp_path / "new").mkdir()
    made = ckptctl.reshard(
        str(tmp_path / "run" / "step_6"), str(tmp_path / "new" / "step_6"), world_size=3
    )
    assert made.written
    before, after = (data_use(str(tmp_path / name) + "@6") for name in ("run", "new"))
    assert (after.verdict, after.epochs) == (before.verdict, before.epochs)
    job = Job(tmp_path / "new", accept_lost=("rng",))
    assert job.resume().step == 6
    job.train(7, 12)
    job.ckpt.close()
    use = data_use(str(tmp_path / "new"))
    assert (use.verdict, use.step, use.epochs[0].state) == ("excluded", 12, EpochState.ONCE)


@pytest.mark.torch
def test_a_ledger_that_is_damaged_or_of_another_save_proves_nothing(tmp_path):
    job = Job(tmp_path / "run")
    job.resume()
    job.train(1, 6)
    job.ckpt.close()
    files = [tmp_path / "run" / f"step_{step}" / DATA_FILE for step in (3, 6)]
    older, newer = (file.read_bytes() for file in files)
    for damaged, why in (
        (older, "that of another save"),
        (
            newer.replace(b'"count":96', b'"count":95').replace(b'"count":48', b'"count":47'),
            "digest",
        ),
        (None, "has no data ledger"),
    ):
        files[1].unlink() if damaged is None else files[1].write_bytes(damaged)
        use = data_use(str(tmp_path / "run"))
        assert (use.verdict, use.exit_code, use.step) == ("unknown", 31, None)
        assert why in use.message
    job = Job(tmp_path / "run")
    job.resume()
    assert "note: the data ledger begins after step 6: step_6 has no data ledger" in job.said
    job.train(7, 12)
    job.ckpt.close()
    use = data_use(str(tmp_path / "run"))
    assert (use.verdict, use.since) == ("unknown", 6)
    assert "began after step 6" in use.message
    assert use.epochs[0].would_show


@pytest.mark.torch
def test_samples_of_a_script_that_adds_them_are_named_and_unrecorded_steps_are_unknown(tmp_path):
    ledger = DataLedger(samples=[f"line-{number}" for number in range(24)], keep_ids=True)
    model = torch.nn.Linear(2, 1)
    with Checkpointer(str(tmp_path), model=model, data_ledger=ledger) as ckpt:
        ckpt.resume()
        for step in (1, 2, 3):
            ledger.add(step, [f"line-{8 * step - one}" for one in range(1, 9 - (step == 2))])
        ledger.add(4, ["line-1"], epoch=1)
        ckpt.save(4)
        use = data_use(str(tmp_path))
        assert use.verdict == "found"
        assert use.message.startswith("epoch 0: at least 1 of 24 samples were skipped")
        ledger.add(6, torch.arange(3), epoch=2)
        ckpt.save(6)
        with pytest.raises(UsageError, match="already at step 6"):
            ledger.add(6, [1])
    use = data_use(str(tmp_path))
    assert use.unrecorded_steps == 1
    assert use.epochs[0].state is EpochState.UNKNOWN
    assert "1 step recorded no samples" in use.message


@pytest.mark.torch
@pytest.mark.parametrize("missing", [[], [3], [2, 3]])
def test_ranks_that_train_the_same_samples_count_once_and_one_that_records_nothing_is_noticed(
    missing,
):
    paths = f"{Path(__file__).parent}:{REPOSITORY}"
    done = torch_server().run(
        ["-m", "ledger_ranks", json.dumps({"missing": missing})],
        env=clean_environment(PYTHONPATH=paths, OMP_NUM_THREADS="1"),
    )
    assert done.returncode == 0, done.stderr
    fields = json.loads(done.stdout)
    (use,) = epochs_of(fields)
    if 2 in missing:  # the first rank of its position, which counts for both
        assert fields["unrecorded"] == {"count": 1, "first": 2, "last": 2}
        assert (use.state, use.trained) == (EpochState.UNKNOWN, 6)
    else:
        assert fields["unrecorded"] is None
        assert (use.state, use.trained) == (EpochState.ONCE, 8)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("save", [[], ["--lazy"]], ids=["save", "save_async"])
def test_ranks_that_are_killed_and_restarted_in_other_numbers_train_every_sample_once(
    tmp_path, save
):
    kills = ("--kill", "0.1", "metadata:1", "seal:2")
    ranks = ("--ranks", 4, 2, 3, 1)
    done = run_job(tmp_path, *ranks, "--steps", 20, "--save-every", 2, *save, *kills)
    assert codes_of(done)[-1] == 0, done.stderr
    use = data_use(str(tmp_path / "run"))
    assert (use.verdict, use.step) == ("excluded", 20)
    assert [one.trained for one in use.epochs] == [96, 64]
    rows = rows_of(tmp_path)
    assert Counter(samples(rows)[:96]) == Counter(range(96))
    for step in (tmp_path / "run").glob("step_*"):
        # Each step that a killed attempt left holds what was trained up to it.
        fields = parse_data((step / DATA_FILE).read_bytes())
        assert sum(one["count"] for one in fields["epochs"]) == 8 * fields["step"]
        taken = [one for at in range(1, fields["step"] + 1) for one in rows[at]["ids"]]
        assert sum(int(one["sum"], 16) for one in fields["epochs"]) % 2**128 == sum_of(taken)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize("batch_size", [4, None])
def test_a_stateful_loader_records_its_samples_through_resumes(tmp_path, n_workers, batch_size):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    data = torch.utils.data.TensorDataset(torch.arange(24.0), torch.arange(24))
    step, seen = 0, []
    for last in (2, 7, 13, 15):  # each attempt ends in the middle of a pass
        loader = loaders.StatefulDataLoader(
            data, batch_size=batch_size, shuffle=True, num_workers=n_workers
        )
        ckpt = Checkpointer(
            str(tmp_path / "run"),
            model=torch.nn.Linear(1, 1),
            dataloader=loader,
            data_ledger=DataLedger(keep_ids=True),
        )
        step = ckpt.resume().step
        seen = seen[: step * (batch_size or 1)]
        while step < last:
            for _, ids in loader:
                step += 1
                seen += ids.reshape(-1).tolist()
                if step == last - 1 or step % 6 == 0:
                    ckpt.save(step)
                if step == last:
                    break
        assert loader.dataset is data
        ckpt.close()
    use = data_use(str(tmp_path / "run"))
    assert (use.verdict, use.step) == ("excluded", 14)
    assert sum(one.trained for one in use.epochs) == 14 * (batch_size or 1)
    fields = parse_data((tmp_path / "run" / "step_14" / DATA_FILE).read_bytes())
    kept = [one for epoch in fields["epochs"] if not epoch["is_whole"] for one in epoch["ids"]]
    assert kept == seen[len(seen) - len(kept) - (batch_size or 1) : -(batch_size or 1)]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
def test_a_stateful_loader_that_begins_anew_repeats_samples_and_one_that_drops_some_is_unknown(
    tmp_path,
):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    data = torch.utils.data.TensorDataset(torch.arange(10))
    for name, drops, verdict in (("anew", False, "found"), ("drops", True, "unknown")):
        for first, last in ((1, 1), (2, 5)):
            n_workers = int(name == "anew" and first > 1)
            loader = loaders.StatefulDataLoader(
                data, batch_size=4, drop_last=drops, num_workers=n_workers
            )
            ckpt = Checkpointer(
                str(tmp_path / name),
                model=torch.nn.Linear(1, 1),
                dataloader=loader,
                accept_repetition=True,
            )
            ckpt.resume()
            step = first
            while step <= last:
                for _ in loader:
                    ckpt.save(step)
                    step += 1
                    if step > last:
                        break
            ckpt.close()
        use = data_use(str(tmp_path / name))
        assert use.verdict == verdict
    assert use.epochs[0].why == "the samples that an epoch has to contain are not known"
    anew = data_use(str(tmp_path / "anew"))
    assert anew.message == "epoch 0: at least 4 of 10 samples were repeated"

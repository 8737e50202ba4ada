"""Whether all files of a step are there, under whatever names: families of files."""

import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from every_case import all_cases
from made_roots import written_hours_apart
from storage.faulty import FaultyStore

import ckptctl
from ckptctl import Level
from ckptctl.errors import StorageUnavailable
from ckptctl.findings import ClaimName, ClaimState, Severity
from ckptctl.formats.families import families_of
from ckptctl.formats.frameworks.layouts import step_name
from ckptctl.inspection.inspecting import inspect_step
from ckptctl.inspection.open_step import OpenStep
from ckptctl.options import Requirements
from ckptctl.selection.roots import neighbours_of
from ckptctl.storage.local import LocalStore

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.checkpoint")
save_file = pytest.importorskip("safetensors.torch").save_file

SCHEMES = [
    ("model_{r}.pt", "optimizer_{r}.pt"),
    ("model-{r}-of-{n}.pt", "optimizer-{r}-of-{n}.pt"),
    ("model-{r1:05}-of-{n:05}.bin", "optim-{r1:05}-of-{n:05}.bin"),
    ("model_tp{r}.pt", "optim_tp{r}.pt"),
    ("model/{r}.pt", "optim/{r}.pt"),
    ("{r}/model.pt", "{r}/optimizer.pt"),
    ("rank{r}/model.pt", "rank{r}/optimizer.pt"),
    ("consolidated.{r:02}.pth", "optim.{r:02}.pth"),
    ("model_{r}.safetensors", "optim_{r}.pt"),
    ("net.{r}.pt", "adam.{r}.pt"),
    ("state-{r:04}.ckpt", "moments-{r:04}.ckpt"),
    ("p{r}.pth", "q{r}.bin"),
    ("mp{r}_weights.pt", "mp{r}_moments.pt"),
    ("worker-{r}/w.pth", "worker-{r}/o.pth"),
    ("shard_{r1}.pt", "shard_{r1}_optim.pt"),
    ("x_world_size_{n}_rank_{r}.pt", "y_world_size_{n}_rank_{r}.pt"),
    ("weights_ws{n}_{r}.pt", "adam_ws{n}_{r}.pt"),
    ("gpu{r}.pt", "gpu{r}.opt.pt"),
    ("{r:03}.model.pt", "{r:03}.optim.pt"),
    ("tp{t}_pp{p}.pt", "opt_tp{t}_pp{p}.pt"),
    ("node{p}/local{t}.pt", "node{p}/local{t}_opt.pt"),
    ("model_rank_{r}_of_{n}.pth", "optimizer_rank_{r}_of_{n}.pth"),
    ("fsdp.{r}.{n}.pt", "adamw.{r}.{n}.pt"),
    ("ckpt/part{r}.pth.tar", "ckpt/opt{r}.pth.tar"),
    ("r{r}w{n}.pt", "r{r}w{n}_opt.pt"),
    ("part.{r1}.of.{n}.pth", "opt.{r1}.of.{n}.pth"),
    ("model-{r:05}-of-{n:05}.safetensors", "optim-{r:05}-of-{n:05}.pt"),
    ("pytorch_model_fsdp_rank{r}.bin", "optimizer_rank{r}.bin"),
]
"""Names of the files that each rank writes: `r` is the rank, `n` their number, `t` and `p` its
place in a mesh."""

LOSSES = {
    "a hole": (("optimizer", 2),),
    "the last of one kind": (("model", 3),),
    "the first of one kind": (("optimizer", 0),),
    "the last rank": (("model", 3), ("optimizer", 3)),
    "the first rank": (("model", 0), ("optimizer", 0)),
    "a rank between": (("model", 1), ("optimizer", 1)),
    "two ranks": (("model", 2), ("optimizer", 2), ("model", 3), ("optimizer", 3)),
}


def names_of(scheme: tuple[str, str], ranks: int) -> dict[tuple[str, int], str]:
    return {
        (kind, r): name.format(r=r, r1=r + 1, n=ranks, t=r % 2, p=r // 2)
        for kind, name in zip(("model", "optimizer"), scheme, strict=True)
        for r in range(ranks)
    }


def save_step(
    folder: Path, scheme: tuple[str, str], ranks: int = 4, number: int = 0, n_rows: int = 8
) -> None:
    """A step whose weights, `n_rows` by 2, are split over the ranks."""
    for (kind, rank), name in names_of(scheme, ranks).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = torch.full((n_rows // ranks, 2), float(number + rank))
        if name.endswith(".safetensors"):
            save_file({"w": rows}, path)
        elif kind == "model":
            torch.save({"model": {"w": rows}, "step": number}, path)
        else:
            moments = {0: {"exp_avg": rows, "exp_avg_sq": rows, "step": number}}
            groups = [{"lr": 0.1, "params": [0]}]
            torch.save({"optimizer": {"state": moments, "param_groups": groups}}, path)


@pytest.fixture(params=SCHEMES, ids=lambda scheme: scheme[0])
def scheme(request):
    return request.param


def test_a_file_that_is_lost_rules_a_step_out_whatever_it_is_called(tmp_path, scheme):
    for number in (10, 20, 30):
        save_step(tmp_path / f"step-{number}", scheme, number=number)
    newest, names = tmp_path / "step-30", names_of(scheme, 4)

    def check(lost: tuple[tuple[str, int], ...]) -> None:
        kept = {names[one]: (newest / names[one]).read_bytes() for one in lost}
        for name in kept:
            (newest / name).unlink()
        report = ckptctl.verify(str(newest), grace_s=0)
        chosen = ckptctl.pick(str(tmp_path), grace_s=0)
        for name, data in kept.items():
            (newest / name).write_bytes(data)
        assert report.exit_code in (20, 22), report.findings
        assert report.claim(ClaimName.WHOLE).state is not ClaimState.PROVEN
        assert chosen.step == 20

    chosen = ckptctl.pick(str(tmp_path))
    assert (chosen.step, chosen.passed_over) == (30, ())
    assert chosen.chosen.claim(ClaimName.WHOLE).is_proven
    with all_cases() as case:
        for name, lost in LOSSES.items():
            with case(name):
                check(lost)


def test_ranks_that_each_later_save_lacks_are_missed_in_all_of_them(tmp_path, scheme):
    """As after a node died, or a disk that is not mounted: the step before shows the same files."""
    names = names_of(scheme, 4)
    for number in (10, 20, 30, 40):
        save_step(tmp_path / f"step-{number}", scheme, number=number)
    with all_cases() as case:
        for name, lost in LOSSES.items():
            for number in (30, 40):
                for one in lost:
                    (tmp_path / f"step-{number}" / names[one]).unlink()
            with case(name):
                chosen = ckptctl.pick(str(tmp_path), grace_s=0)
                assert chosen.step == 20, chosen.message
                report = ckptctl.verify(str(tmp_path / "step-40"), grace_s=0)
                assert report.exit_code in (20, 22), report.findings
                assert report.claim(ClaimName.WHOLE).state is not ClaimState.PROVEN
            for number in (30, 40):
                save_step(tmp_path / f"step-{number}", scheme, number=number)


def test_a_run_that_went_on_with_fewer_ranks_goes_on_being_whole(tmp_path, scheme):
    save_step(tmp_path / "step-10", scheme, number=10)
    for number in (20, 30, 40):
        save_step(tmp_path / f"step-{number}", scheme, ranks=2, number=number)
    assert ckptctl.pick(str(tmp_path)).step == 40


def test_a_step_of_fewer_ranks_is_whole_where_its_files_show_it(tmp_path, scheme):
    save_step(tmp_path / "step-10", scheme, number=10)
    save_step(tmp_path / "step-20", scheme, number=20)
    save_step(tmp_path / "step-30", scheme, ranks=2, number=30)
    assert ckptctl.pick(str(tmp_path)).step == 30
    save_step(tmp_path / "step-40", scheme, ranks=8, number=40)
    assert ckptctl.pick(str(tmp_path)).step == 40


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4)])
def test_one_kind_of_file_is_whole_on_one_rank_too(tmp_path, before, after):
    for number, ranks in ((10, before), (20, after)):
        (tmp_path / f"step-{number}").mkdir()
        for rank in range(ranks):
            rows = torch.full((8 // ranks, 2), float(rank))
            moments = {"state": {0: {"exp_avg": rows}}, "param_groups": [{"params": [0]}]}
            state = {"model": {"w": rows}, "optimizer": moments, "step": number}
            torch.save(state, tmp_path / f"step-{number}" / f"state_{rank}.pt")
    assert ckptctl.pick(str(tmp_path)).step == 20


def test_a_kind_of_file_that_no_rank_wrote_is_missed(tmp_path):
    for number in (10, 20, 30):
        save_step(tmp_path / f"step-{number}", SCHEMES[0], number=number)
        for rank in range(4):
            path = tmp_path / f"step-{number}" / f"extra_{rank}.pt"
            torch.save({"anything": torch.ones(2)}, path)
    for path in (tmp_path / "step-30").glob("extra_*"):
        path.unlink()
    (over,) = ckptctl.pick(str(tmp_path)).passed_over
    assert "extra_N.pt" in over.reason


def stated(scheme: tuple[str, str]) -> bool:
    words = ("of-{n", "of_{n", "of.{n", "size_{n", "ws{n", "w{n")
    return any(word in name for word in words for name in scheme)


def test_the_only_step_is_unverifiable_unless_its_names_or_the_caller_state_how_many(
    tmp_path, scheme
):
    save_step(tmp_path / "step-10", scheme, number=10)
    report = ckptctl.verify(str(tmp_path / "step-10"))
    assert report.exit_code == (0 if stated(scheme) else 22), report.findings
    if "{t}" in scheme[0]:
        return  # --saved-world-size does not state a mesh
    report = ckptctl.verify(str(tmp_path / "step-10"), saved_world_size=4)
    assert report.exit_code == 0, report.findings
    names = names_of(scheme, 4)
    for kind in ("model", "optimizer"):
        (tmp_path / "step-10" / names[kind, 3]).unlink()
    report = ckptctl.verify(str(tmp_path / "step-10"), saved_world_size=4, grace_s=0)
    assert report.exit_code == 20, report.findings


def faults(report: ckptctl.Report) -> Iterator[str]:
    return (finding.code for finding in report.with_severity(Severity.FAULT))


def test_a_lost_file_is_named_with_what_shows_it(tmp_path):
    for number in (10, 20):
        save_step(tmp_path / f"step-{number}", SCHEMES[0], number=number)
    (tmp_path / "step-20" / "optimizer_2.pt").unlink()
    report = ckptctl.verify(str(tmp_path / "step-20"), grace_s=0)
    (finding,) = report.with_severity(Severity.FAULT)
    assert (finding.code, finding.where) == ("file.missing", "optimizer_2.pt")
    assert finding.message == (
        "1 of 4 files optimizer_N.pt is missing: optimizer_2.pt; their numbers have a hole"
    )


def test_pictures_logs_and_names_with_other_numbers_are_no_ranks(tmp_path):
    for number in (10, 20):
        folder = tmp_path / f"step-{number}"
        save_step(folder, SCHEMES[0], number=number)
        for n in range(1, number // 5):
            (folder / f"sample_{3 * n}.png").write_bytes(b"picture")
            (folder / f"log-{2 * n}.txt").write_text("text")
            torch.save({"x": n}, folder / f"buffer_{n * 1000 + number}.pt")
    chosen = ckptctl.pick(str(tmp_path))
    assert (chosen.step, chosen.passed_over) == (20, ())


def test_a_step_of_files_that_nobody_recognizes_is_unverifiable_and_no_interrupted_save(tmp_path):
    for number in (10, 20):
        save_step(tmp_path / f"step-{number}", ("p{r}", "q{r}.xyz"), number=number)
    report = ckptctl.verify(str(tmp_path / "step-20"))
    assert (report.exit_code, [*faults(report)]) == (22, ["format.unsupported"])
    assert ckptctl.pick(str(tmp_path)).exit_code == 11


def chosen_without(root: Path, *lost: str) -> int:
    """The step that is chosen where files are lost, which are put back."""
    kept = {root / path: (root / path).read_bytes() for path in lost}
    for path in kept:
        path.unlink()
    chosen = ckptctl.pick(str(root), grace_s=0)
    for path, data in kept.items():
        path.write_bytes(data)
    return chosen.step


@pytest.mark.parametrize("words", ["abcd", ("alpha", "bravo", "carol", "node17")])
@pytest.mark.parametrize("names", [("{}.pt", "{}.optim.pt"), ("{}/w.pt", "{}/o.pt")])
def test_a_lost_file_without_a_number_is_shown_by_the_steps_beside(tmp_path, words, names):
    def save(number: int, ranks: int) -> None:
        save_step(tmp_path / "numbered", ("{r}.pt", "{r}.optim.pt"), ranks, number)
        for rank, word in enumerate(words[:ranks]):
            for name, saved in zip(names, (f"{rank}.pt", f"{rank}.optim.pt"), strict=True):
                path = tmp_path / "run" / f"step-{number}" / name.format(word)
                path.parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / "numbered" / saved).rename(path)

    for number in (10, 20, 30):
        save(number, 4)
    root = tmp_path / "run"
    assert ckptctl.pick(str(root)).step == 30
    for word in words:
        assert chosen_without(root, f"step-30/{names[1].format(word)}") == 20
    assert chosen_without(root, *(f"step-30/{name.format(words[3])}" for name in names)) == 20
    save(40, 2)
    assert ckptctl.pick(str(root)).step == 40


KINDS = {"generator.pt": 9, "discriminator.pt": 33, "ema/weights.bin": 17, "replay.pkl": 70}


def save_kinds(step: Path, number: int, *beside: str) -> None:
    """A step of a script of one process: the optimizer, and files of kinds that nobody lists."""
    for name, size in {**KINDS, **dict.fromkeys(beside, 5)}.items():
        (step / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"w": torch.full((size, 8), float(number))}, step / name)
    moments = {key: torch.full((8,), float(number)) for key in ("exp_avg", "exp_avg_sq")}
    state = {0: {"step": torch.tensor(float(number)), **moments}}
    torch.save({"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}, step / "optim.pt")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("form", ["files", "beside DCP"])
def test_a_kind_of_file_that_the_steps_before_hold_is_missed(tmp_path, name, form):
    for number in (10, 20, 30):
        step = tmp_path / f"step_{number}"
        save_kinds(step, number, *(["best.pt"] if number == 20 else []))
        if form == "beside DCP":
            torch.distributed.checkpoint.save(
                {"model": {"w": torch.full((8, 8), float(number))}}, checkpoint_id=step
            )
    assert ckptctl.pick(str(tmp_path)).step == 30
    assert chosen_without(tmp_path, f"step_30/{name}") == 20
    (tmp_path / "step_30" / name).unlink()
    report = ckptctl.verify(f"{tmp_path}@30", grace_s=0)
    whole = report.claim(ClaimName.WHOLE)
    assert (whole.state, whole.finding) == (ClaimState.UNKNOWN, "file.dropped")
    assert name in whole.by
    assert ckptctl.pick(str(tmp_path), allow_missing_state=True, grace_s=0).step == 30
    assert ckptctl.seal(str(tmp_path / "step_30")).exit_code == 22
    pruned = ckptctl.prune(str(tmp_path), 1, unsealed=True)
    assert not any(one.removed for one in pruned.decisions if one.number == 20)


def named(step: Path, name: str, value: object) -> None:
    (step / name).parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".safetensors"):
        save_file(value, step / name)
    elif name.endswith((".pt", ".pth")):
        torch.save(value, step / name)
    else:
        (step / name).write_bytes(b"\x93NUMPY")


WEIGHTS = {"w": torch.ones(9, 8)}


@pytest.mark.parametrize(
    ("gone", "new"),
    [
        ({"samples.npz": b"", "rank0_trace.json.gz": b"", "DONE": b""}, {}),
        ({"scaler.pt": {"scale": 65536.0, "growth_tracker": 3}}, {}),
        ({"net.pt": WEIGHTS}, {"net.safetensors": WEIGHTS}),
        (
            {"ckpt_kqwzab.pt": {"x": torch.ones(77, 3)}},
            {"ckpt_xyrtpl.pt": {"x": torch.ones(77, 3)}},
        ),
    ],
    ids=" ".join,
)
def test_files_that_come_and_go_keep_the_newest_step(tmp_path, gone, new):
    for number in (10, 20, 30):
        step = tmp_path / f"step_{number}"
        save_kinds(step, number)
        for name, value in (new if number == 30 else gone).items():
            named(step, name, value)
    chosen = ckptctl.pick(str(tmp_path))
    assert (chosen.step, chosen.passed_over) == (30, ())
    assert ckptctl.verify(f"{tmp_path}@30").claim(ClaimName.WHOLE).finding != "file.dropped"
    # Safetensors have no checksums.
    assert ckptctl.seal(str(tmp_path / "step_30"), accept_unverifiable=bool(new)).exit_code == 0


TWINS = {
    "twins": {"actor.pt": WEIGHTS, "critic.pt": WEIGHTS},
    "average": {"model.pt": WEIGHTS, "ema.pt": {"shadow": WEIGHTS}},
    "best": {"model.pt": WEIGHTS, "best.pt": {"model": WEIGHTS, "step": 10}},
}


@pytest.mark.parametrize("files", TWINS.values(), ids=TWINS)
@pytest.mark.parametrize("form", ["files", "beside DCP"])
def test_a_twin_that_both_steps_before_hold_leaves_the_step_unverifiable(tmp_path, files, form):
    for number in (10, 20, 30):
        save_kinds(tmp_path / f"step_{number}", number)
        for name, value in files.items():
            named(tmp_path / f"step_{number}", name, value)
        if form == "beside DCP":
            state = {"w": torch.full((8, 8), float(number))}
            torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / f"step_{number}")
    assert ckptctl.pick(str(tmp_path)).step == 30
    (tmp_path / "step_30" / [*files][-1]).unlink()
    report = ckptctl.verify(f"{tmp_path}@30", grace_s=0)
    assert (report.exit_code, [*faults(report)]) == (22, ["file.fewer"])
    assert report.claim(ClaimName.WHOLE).finding == "file.fewer"
    assert ckptctl.pick(str(tmp_path)).step == 20
    assert ckptctl.pick(str(tmp_path), accept_unverifiable=True).step == 30
    assert ckptctl.seal(str(tmp_path / "step_30")).exit_code == 22
    assert ckptctl.seal(str(tmp_path / "step_30"), accept_unverifiable=True).exit_code == 0
    assert ckptctl.pick(str(tmp_path)).step == 30


@pytest.mark.parametrize("files", TWINS.values(), ids=TWINS)
@pytest.mark.parametrize("held_by", [[10], [20], [10, 20, 40, 50], [50]])
def test_a_twin_that_some_steps_hold_is_missed_in_no_other(tmp_path, files, held_by):
    (first, value), (twin, copy) = files.items()
    for number in (10, 20, 30, 40, 50, 60):
        step = tmp_path / f"step_{number}"
        save_kinds(step, number, *(["other.pt", "third.pt"]))
        named(step, first, value)
        for rank in range(2):
            torch.save({"rng": torch.full((16,), number)}, step / f"seeds_{rank}.pt")
        if number in held_by:
            named(step, twin, copy)
    last = 20 if held_by == [10] else 60
    for number in range(last + 10, 70, 10):
        shutil.rmtree(tmp_path / f"step_{number}")
    chosen = ckptctl.pick(str(tmp_path))
    assert (chosen.step, chosen.passed_over) == (last, ())


def test_copies_in_two_formats_that_one_step_holds_are_missed_in_no_other(tmp_path):
    for number in (10, 20):
        step = tmp_path / f"step_{number}"
        save_kinds(step, number)
        for name in ("model", "ema", "best") if number == 10 else ("model", "ema"):
            named(step, f"{name}.pt", WEIGHTS)
            named(step, f"{name}.safetensors", WEIGHTS)
    chosen = ckptctl.pick(str(tmp_path))
    assert (chosen.step, chosen.passed_over) == (20, ())


@pytest.mark.parametrize("lost", ["actor.pt", "critic.pt", "config.json"])
def test_a_step_that_lost_a_twin_or_a_known_file_is_not_proven_whole(tmp_path, lost):
    for number in (10, 20, 30):
        step = tmp_path / f"step_{number}"
        step.mkdir()
        for name in ("actor.pt", "critic.pt"):
            torch.save({"w": torch.full((64, 8), float(number))}, step / name)
        (step / "config.json").write_text("{}")
    (tmp_path / "step_30" / lost).unlink()
    report = ckptctl.verify(f"{tmp_path}@30", level="content", grace_s=0)
    assert report.claim(ClaimName.WHOLE).state is ClaimState.UNKNOWN
    pruned = ckptctl.prune(str(tmp_path), 1, unsealed=True)
    assert not any(one.removed for one in pruned.decisions if one.number == 20)


def test_one_file_is_not_all_where_the_step_before_has_others(tmp_path):
    for number in (10, 20):
        for word in "abc" if number == 10 else "a":
            named(tmp_path / f"step_{number}", f"{word}.pt", WEIGHTS)
    whole = ckptctl.verify(f"{tmp_path}@20", grace_s=0).claim(ClaimName.WHOLE)
    assert whole.state is ClaimState.UNKNOWN
    assert ckptctl.pick(str(tmp_path)).step == 20
    for word in "bc":
        (tmp_path / "step_10" / f"{word}.pt").unlink()
    assert ckptctl.verify(f"{tmp_path}@20", grace_s=0).claim(ClaimName.WHOLE).is_proven


def test_what_only_the_step_before_holds_is_not_of_each_save(tmp_path):
    for number in (10, 20):
        save_kinds(tmp_path / f"step_{number}", number, *(["init.pt"] if number == 10 else []))
    assert ckptctl.pick(str(tmp_path)).step == 20


def test_a_kind_that_two_steps_lack_leaves_open_whether_the_later_one_is_whole(tmp_path):
    for number in (10, 20, 30, 40):
        save_kinds(tmp_path / f"step_{number}", number)
    written_hours_apart(tmp_path)
    for number in (30, 40):
        (tmp_path / f"step_{number}" / "generator.pt").unlink()
    assert not ckptctl.verify(f"{tmp_path}@40", grace_s=0).claim(ClaimName.WHOLE).is_proven
    pruned = ckptctl.prune(str(tmp_path), 1, unsealed=True)
    assert [one.number for one in pruned.decisions if one.counts] == [20]


def test_a_copy_under_a_later_number_of_two_steps_removes_no_step(tmp_path):
    save_kinds(tmp_path / "step_10", 10)
    torch.save({"step": 10}, tmp_path / "step_10" / "trainer.pt")
    shutil.copytree(tmp_path / "step_10", tmp_path / "step_20")
    pruned = ckptctl.prune(str(tmp_path), 1, unsealed=True)
    assert not any(one.removed for one in pruned.decisions), pruned.decisions


@pytest.mark.parametrize("value", [None, 7, "weights"])
@pytest.mark.parametrize("name", ["model.pt", "optimizer.pt"])
def test_a_file_without_state_is_not_what_its_name_states(tmp_path, name, value):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    for number in (10, 20):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        folder = tmp_path / f"step_{number}"
        folder.mkdir()
        torch.save(model.state_dict(), folder / "model.pt")
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    assert ckptctl.pick(str(tmp_path)).step == 20
    torch.save(value, folder / name)
    assert ckptctl.pick(str(tmp_path)).step == 10


def test_a_kind_that_grows_by_a_file_a_step_is_whole(tmp_path):
    for number in (10, 20, 30, 40):
        step = tmp_path / f"step_{number}"
        save_kinds(step, number)
        for part in range(number // 10):
            torch.save({"x": torch.full((90, 4), float(part))}, step / f"buffer_{part}.pt")
    assert ckptctl.pick(str(tmp_path)).step == 40
    for number in (10, 20, 30, 40):
        assert ckptctl.verify(f"{tmp_path}@{number}").exit_code == 0
    assert chosen_without(tmp_path, "step_40/buffer_1.pt") == 30


def test_a_kind_that_grew_until_the_step_before_and_lost_its_last_file_is_unverifiable(tmp_path):
    for number in (10, 20, 30, 40, 50):
        step = tmp_path / f"step_{number}"
        save_kinds(step, number)
        for part in range(min(number // 10, 3)):
            torch.save({"x": torch.full((90, 4), float(part))}, step / f"buffer_{part}.pt")
    report = ckptctl.verify(f"{tmp_path}@40", grace_s=0)
    assert (report.exit_code, [*faults(report)]) == (22, ["file.fewer"])
    # Two steps of the same number of files show that it no longer grows.
    assert ckptctl.pick(str(tmp_path)).step == 50


@pytest.mark.parametrize("has", [(1, 1, 0), (0, 0, 1), (1, 0, 1)])
def test_a_tokenizer_holds_no_state_and_may_come_and_go(tmp_path, has):
    for number, is_there in zip((10, 20, 30), has, strict=True):
        step = tmp_path / f"step_{number}"
        save_kinds(step, number)
        if is_there:
            (step / "tokenizer.model").write_bytes(b"\n\x0e" + bytes(5000))
    chosen = ckptctl.pick(str(tmp_path))
    assert (chosen.step, chosen.passed_over) == (30, ())
    assert ckptctl.verify(f"{tmp_path}@30").claim(ClaimName.WHOLE).is_proven


def test_the_files_of_an_only_step_are_not_proven_to_be_all(tmp_path):
    save_kinds(tmp_path / "step_10", 10)
    assert ckptctl.verify(f"{tmp_path}@10").claim(ClaimName.WHOLE).state is ClaimState.UNKNOWN
    save_kinds(tmp_path / "step_20", 20)
    for number in (10, 20):
        whole = ckptctl.verify(f"{tmp_path}@{number}").claim(ClaimName.WHOLE)
        assert whole.is_proven, whole


def codes_with(root: Path, failing: str) -> set[str]:
    """The findings of step 30 where the storage does not answer for a file."""
    store = FaultyStore(LocalStore(str(root)))
    store.fail("span", StorageUnavailable("no answer"), path=failing, lasts=True)
    named = [step_name(f"step_{number}") for number in (30, 20, 10)]
    beside = neighbours_of(lambda: named[1:], 30)
    step = OpenStep(store, named[0])
    asked = Requirements(grace_s=0)
    found = inspect_step(step, asked, level=Level.LISTING, neighbours=beside)
    return {finding.code for finding in found.report.findings}


def test_what_a_step_before_holds_and_nobody_could_read_is_no_loss(tmp_path):
    for number in (10, 20, 30):
        save_kinds(tmp_path / f"step_{number}", number)
    (tmp_path / "step_30" / "generator.pt").unlink()
    assert "file.dropped" in codes_with(tmp_path, "")
    codes = codes_with(tmp_path, "step_20/generator.pt")
    assert "file.gone" in codes
    assert not codes & {"file.dropped", "step.unknown"}


def test_names_of_a_step_before_that_nobody_could_read_are_no_loss(tmp_path):
    for number in (10, 20, 30):
        step = tmp_path / f"step_{number}"
        step.mkdir()
        for word in "abcd" if number < 30 else "ab":
            torch.save({"w": torch.full((64, 8), float(number))}, step / f"{word}.pt")
    assert "file.fewer" in codes_with(tmp_path, "step_20/a.pt")
    (tmp_path / "step_10").rename(tmp_path / "other")
    assert "step.unknown" not in codes_with(tmp_path, "step_20/a.pt")


HOSTS = ("node17", "node923", "node441")


@pytest.mark.parametrize(
    "names",
    [
        ("alpha/state.pt", "bravo/state.pt", "carol/state.pt"),
        ("alice.pt", "bob.pt", "carol.pt"),
        ("fold10.pt", "fold20.pt", "fold30.pt", "fold40.pt"),
        ("cn-000.pt", "cn-412.pt", "cn-977.pt"),
    ],
)
def test_an_only_step_of_files_that_words_tell_apart_is_usable_and_not_proven(tmp_path, names):
    """Agents and folds of a test are whole models; by the files, hosts' ranks look the same."""
    save_step(tmp_path / "numbered", ("m{r}.pt", "o{r}.pt"), 1, 10)
    of_one = [torch.load(tmp_path / "numbered" / name) for name in ("m0.pt", "o0.pt")]
    root = tmp_path / "run"
    for name in names:
        path = root / "step-10" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({**of_one[0], **of_one[1]}, path)
    report = ckptctl.verify(f"{root}@10")
    assert (report.exit_code, [*faults(report)]) == (0, [])
    assert report.claim(ClaimName.WHOLE).state is ClaimState.UNKNOWN
    assert ckptctl.pick(str(root)).step == 10


@pytest.mark.parametrize("kind", ["rank{}.data.pt", "host-a.rank{}.data.pt", "pos_{}.pkl"])
def test_files_of_ranks_without_tensors_are_no_marker_that_comes_and_goes(tmp_path, kind):
    for number in (10, 20, 30):
        save_kinds(tmp_path / f"step_{number}", number)
        for rank in range(4):
            path = tmp_path / f"step_{number}" / kind.format(rank)
            path.parent.mkdir(exist_ok=True)
            torch.save({"shard": rank, "place": number}, path)
    assert ckptctl.pick(str(tmp_path)).step == 30
    for rank in range(4):
        (tmp_path / "step_30" / kind.format(rank)).unlink()
    report = ckptctl.verify(f"{tmp_path}@30", grace_s=0)
    assert (report.exit_code, [*faults(report)]) == (22, ["file.fewer"])


@pytest.mark.parametrize("has_tensors", [False, True])
@pytest.mark.parametrize(
    ("of_rank", "of_one"),
    [
        ("data_rank{}.pt", "data.pt"),
        ("rank{}/pos.pkl", "pos.pkl"),
        ("pos_{}.pt", "pos.pt"),
    ],
)
def test_one_rank_writes_one_file_instead_of_those_of_ranks(tmp_path, of_rank, of_one, has_tensors):
    state = {"place": 10, "ema": {"w": torch.ones(9, 8)}} if has_tensors else {"place": 10}
    for number in (10, 20, 30):
        step = tmp_path / f"step_{number}"
        save_kinds(step, number)
        names = [of_one] if number == 30 else [of_rank.format(rank) for rank in range(4)]
        for name in names:
            (step / name).parent.mkdir(exist_ok=True)
            torch.save(state, step / name)
    report = ckptctl.verify(f"{tmp_path}@30", grace_s=0)
    assert (report.exit_code, [*faults(report)]) == (0, [])
    assert "file.gone" in {finding.code for finding in report.findings}
    assert ckptctl.pick(str(tmp_path), grace_s=0).step == 30


@pytest.mark.parametrize("lost", ["model{:06}.pt", "ema_0.9999_{:06}.pt", "ema_0.999_{:06}.pt"])
def test_averages_whose_decay_is_in_their_names_are_missed(tmp_path, lost):
    for number in (10, 20, 30):
        save_kinds(tmp_path / f"step_{number}", number)
        for name in ("model{:06}.pt", "ema_0.9999_{:06}.pt", "ema_0.999_{:06}.pt"):
            named(tmp_path / f"step_{number}", name.format(number), WEIGHTS)
    assert ckptctl.pick(str(tmp_path)).step == 30
    (tmp_path / "step_30" / lost.format(30)).unlink()
    assert ckptctl.pick(str(tmp_path), grace_s=0).step == 20
    (tmp_path / "step_30" / "ema_0.9999_000030.pt").unlink(missing_ok=True)
    (tmp_path / "step_30" / "ema_0.999_000030.pt").unlink(missing_ok=True)
    assert ckptctl.pick(str(tmp_path), grace_s=0).step == 20


@pytest.mark.parametrize("n_steps", [2, 3])
@pytest.mark.parametrize("words", ["abcd", HOSTS])
def test_a_lost_file_of_one_kind_is_missed_where_each_holds_an_optimizer(tmp_path, words, n_steps):
    for number in range(10, 10 * n_steps + 1, 10):
        save_step(tmp_path / "numbered", ("m{r}.pt", "o{r}.pt"), 4, number)
        for rank, word in enumerate(words):
            states = [torch.load(tmp_path / "numbered" / f"{kind}{rank}.pt") for kind in "mo"]
            path = tmp_path / "run" / f"step-{number}" / word / "state.pt"
            path.parent.mkdir(parents=True)
            torch.save({**states[0], **states[1]}, path)
    root, newest = tmp_path / "run", 10 * n_steps
    assert ckptctl.pick(str(root)).step == newest
    for word in words:
        assert chosen_without(root, f"step-{newest}/{word}/state.pt") == newest - 10
    all_but_one = (f"step-{newest}/{word}/state.pt" for word in words[1:])
    assert chosen_without(root, *all_but_one) == newest - 10


def test_a_file_without_bytes_is_none_of_its_family(tmp_path):
    for number in (10, 20):
        save_step(tmp_path / f"step-{number}", ("model_{r}.pkl", "optim_{r}.pkl"), number=number)
    (tmp_path / "step-20" / "optim_2.pkl").write_bytes(b"")
    assert ckptctl.pick(str(tmp_path), grace_s=0).step == 10


@pytest.mark.parametrize("name", ["53c0cd9580b60b1c", "0000000000000001", "a0d15681da84d7b2"])
@pytest.mark.parametrize("data", [b"", b"{"])
def test_a_file_that_ckptctl_did_not_finish_is_none_of_the_save(tmp_path, name, data):
    state = {"model": {"w": torch.ones(8, 8)}}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "step_10")
    (tmp_path / "step_10" / f".ckptctl-{name}.tmp").write_bytes(data)
    assert ckptctl.verify(f"{tmp_path}@10", level="content").exit_code == 0
    (tmp_path / "step_10" / ".metadata").unlink()
    assert ckptctl.verify(f"{tmp_path}@10", grace_s=0).exit_code == 20


def test_a_first_file_that_another_step_lost_does_not_shift_the_numbers(tmp_path):
    for number in (10, 20, 30):
        save_step(tmp_path / f"step-{number}", ("part{r1}.pt", "opt{r1}.pt"), number=number)
    assert chosen_without(tmp_path, "step-20/part1.pt") == 30


@pytest.mark.parametrize("name", ["optimizer_3.pt", "optimizer_2.pt", "model_3.pt"])
def test_a_file_that_each_step_lost_is_shown_by_the_other_kind(tmp_path, name):
    for number in (10, 20, 30):
        save_step(tmp_path / f"step-{number}", SCHEMES[0], number=number)
        (tmp_path / f"step-{number}" / name).unlink()
    chosen = ckptctl.pick(str(tmp_path), grace_s=0)
    assert (chosen.exit_code, chosen.chosen) == (11, None)


@pytest.mark.parametrize("name", ["o.1.1.pt", "o.0.1.pt"])
def test_a_place_of_a_mesh_that_each_step_lost_is_shown_by_the_other_kind(tmp_path, name):
    for number in (10, 20):
        save_step(tmp_path / f"step-{number}", ("w.{t}.{p}.pt", "o.{t}.{p}.pt"), number=number)
        (tmp_path / f"step-{number}" / name).unlink()
    assert ckptctl.pick(str(tmp_path), grace_s=0).exit_code == 11


def save_stages(folder: Path, n_stages: int, ranks: int, number: int) -> None:
    """A model in `n_stages` files, and optimizer and RNG states in one for each rank."""
    save_step(folder, ("stage{r}.pt", "x{r}"), n_stages, number)
    for rank in range(n_stages):
        (folder / f"x{rank}").unlink()
    save_step(folder, ("x{r}", "dp{r}.pt"), ranks, number)
    for rank in range(ranks):
        (folder / f"x{rank}").unlink()
        torch.save({"rng": torch.zeros(4, dtype=torch.uint8)}, folder / f"seed{rank}.pt")


@pytest.mark.parametrize(
    ("before", "after"), [((2, 4), (1, 2)), ((2, 4), (2, 2)), ((1, 2), (2, 4))]
)
def test_kinds_of_which_fewer_ranks_write_are_whole_in_another_world_too(tmp_path, before, after):
    save_stages(tmp_path / "step-10", *before, 10)
    report = ckptctl.verify(str(tmp_path / "step-10"))
    assert report.exit_code == 22, report.findings
    save_stages(tmp_path / "step-20", *before, 20)
    assert ckptctl.pick(str(tmp_path)).step == 20
    save_stages(tmp_path / "step-30", *after, 30)
    assert ckptctl.pick(str(tmp_path)).step == 30


def test_a_count_beside_the_number_of_a_first_rank_states_nothing():
    names = [f"shard-00001-model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
    (family,) = families_of(names)
    assert not family.stated
    (family,) = families_of([name.removeprefix("shard-00001-") for name in names])
    assert family.stated


def test_an_index_that_the_steps_beside_have_is_missing(tmp_path):
    for number in (10, 20):
        folder = tmp_path / f"step-{number}" / "model"
        for n in (1, 2):
            folder.mkdir(parents=True, exist_ok=True)
            save_file({f"w{n}": torch.ones(4)}, folder / f"model-{n:05}-of-00002.safetensors")
        named = {f"w{n}": f"model-{n:05}-of-00002.safetensors" for n in (1, 2)}
        index = {"metadata": {}, "weight_map": named}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert ckptctl.pick(str(tmp_path)).step == 20
    assert chosen_without(tmp_path, "step-20/model/model.safetensors.index.json") == 10


HALVES_TWICE = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
for number in (10, 20):
    folder = Path(sys.argv[1]) / f"step-{number}"
    folder.mkdir()
    for rank in range(4):
        half = torch.full((4, 2), float(rank // 2 + number))
        whole = DTensor.from_local(half, mesh, [Shard(0), Replicate()], run_check=False)
        torch.save({"model": {"w": whole}, "step": number}, folder / f"state_{rank}.pt")
"""


def test_two_copies_of_one_half_of_a_tensor_are_not_its_whole(tmp_path):
    subprocess.run([sys.executable, "-c", HALVES_TWICE, str(tmp_path)], check=True)
    assert ckptctl.pick(str(tmp_path)).step == 20
    for rank in (2, 3):
        (tmp_path / "step-20" / f"state_{rank}.pt").unlink()
    assert ckptctl.pick(str(tmp_path), grace_s=0).step == 10


@pytest.mark.parametrize("ranks", [(4, 4, 2), (2, 2, 4), (4, 2, 4)])
def test_ranks_that_count_from_one_do_so_on_another_number_of_ranks(tmp_path, ranks):
    scheme = ("rank_{r1}.pt", "rank_{r1}.opt.pt")
    for number, n_ranks in zip((10, 20, 30), ranks, strict=True):
        save_step(tmp_path / f"step-{number}", scheme, n_ranks, number)
    assert ckptctl.pick(str(tmp_path)).step == 30
    for name in ("rank_1.pt", "rank_1.opt.pt"):
        (tmp_path / "step-30" / name).unlink()
    assert ckptctl.pick(str(tmp_path), grace_s=0).step == 20


def save_pipeline(step: Path, number: int, stages: int) -> None:
    """A pipeline of 8 layers, each of which one stage holds with its moments."""
    step.mkdir()
    for stage in range(stages):
        layers = [layer for layer in range(8) if layer * stages // 8 == stage]
        model = {f"layers.{layer}.w": torch.full((4, 4), float(number)) for layer in layers}
        moments = {n: {"exp_avg": torch.ones(4, 4), "step": number} for n, _ in enumerate(layers)}
        groups = [{"lr": 0.1, "params": [*moments]}]
        torch.save(model, step / f"stage{stage}.model.pt")
        torch.save({"state": moments, "param_groups": groups}, step / f"stage{stage}.optim.pt")
        torch.save({"last_epoch": number, "base_lrs": [0.1]}, step / f"stage{stage}.sched.pt")


@pytest.mark.parametrize("stages", [(4, 4, 2), (2, 2, 4), (4, 2, 4)])
def test_a_pipeline_of_other_stages_is_whole_where_it_holds_as_much(tmp_path, stages):
    for number, n_stages in zip((10, 20, 30), stages, strict=True):
        save_pipeline(tmp_path / f"step-{number}", number, n_stages)
    assert ckptctl.pick(str(tmp_path)).step == 30
    for path in (tmp_path / "step-30").glob(f"stage{stages[-1] - 1}.*"):
        path.unlink()
    assert ckptctl.pick(str(tmp_path), grace_s=0).step == 20


def test_a_rank_that_holds_no_weights_or_moments_may_be_missing_from_as_many(tmp_path):
    for number in (10, 20, 30):
        step = tmp_path / f"step-{number}"
        save_step(step, ("m{r}.pt", "o{r}.pt"), 1, number)
        held = {**torch.load(step / "m0.pt"), **torch.load(step / "o0.pt")}
        for rank in range(4):
            state = {"rng": torch.get_rng_state(), "index": rank}
            torch.save(held | state if rank == 0 else state, step / f"ckpt_rank{rank}.pt")
        for name in ("m0.pt", "o0.pt"):
            (step / name).unlink()
    assert ckptctl.pick(str(tmp_path)).step == 30
    (tmp_path / "step-30" / "ckpt_rank3.pt").unlink()
    report = ckptctl.verify(f"{tmp_path}@30", grace_s=0)
    assert (report.exit_code, [*faults(report)]) == (22, ["file.fewer"])
    assert ckptctl.pick(str(tmp_path), grace_s=0).step == 20


def test_no_pickle_is_read_where_the_files_are_as_large_as_in_the_step_before(
    tmp_path, monkeypatch
):
    for number in (10, 20, 30):
        save_step(tmp_path / f"step-{number}", ("m{r}.pt", "o{r}.pt"), 4, number)
    read: list[str] = []
    of_step = OpenStep.tensors_in_files.func
    reading = property(lambda step: read.append(step.name) or of_step(step))
    monkeypatch.setattr(OpenStep, "tensors_in_files", reading)
    assert ckptctl.verify(f"{tmp_path}@30", level=Level.LISTING, grace_s=0).exit_code == 0
    assert read == []


def save_with_loaders(step: Path, number: int, ranks: int) -> None:
    """Shards of DCP and the place in the data, each of `ranks`."""
    dcp = torch.distributed.checkpoint
    state = {f"w{rank}": torch.full((8, 8), float(number)) for rank in range(ranks)}
    writer = dcp.FileSystemWriter(step, thread_count=ranks)
    dcp.save(state, storage_writer=writer, no_dist=True)
    metadata = pickle.loads((step / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        name = re.sub("__0_([0-9]+)", r"__\1_0", place.relative_path)
        if (step / place.relative_path).exists():
            (step / place.relative_path).rename(step / name)
        object.__setattr__(place, "relative_path", name)
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    (step / "dataloader").mkdir()
    for rank in range(ranks):
        torch.save({"_num_yielded": number + rank}, step / "dataloader" / f"_{rank}.pt")


@pytest.mark.parametrize("ranks", [(4, 4, 2), (2, 2, 4), (4, 2, 4)])
def test_as_many_files_of_ranks_as_shards_are_whole_on_another_number_of_ranks(tmp_path, ranks):
    for number, n_ranks in zip((10, 20, 30), ranks, strict=True):
        save_with_loaders(tmp_path / f"step-{number}", number, n_ranks)
    report = ckptctl.verify(f"{tmp_path}@30")
    assert (report.exit_code, [*faults(report)]) == (0, [])
    assert ckptctl.pick(str(tmp_path)).step == 30
    (tmp_path / "step-30" / "dataloader" / f"_{ranks[-1] - 1}.pt").unlink()
    report = ckptctl.verify(f"{tmp_path}@30", grace_s=0)
    assert (report.exit_code, [*faults(report)]) == (20, ["file.missing"])


def test_the_optimizers_of_fewer_ranks_show_that_no_random_state_is_missing(tmp_path):
    for number, ranks in ((10, 4), (20, 4), (30, 2)):
        step = tmp_path / f"checkpoint-{number}"
        save_step(step, ("m{r}.pt", "optimizer_rank{r}.pt"), ranks, number)
        for rank in range(4):
            (step / f"m{rank}.pt").unlink(missing_ok=True)
            if rank < ranks:
                torch.save({"cpu": torch.get_rng_state()}, step / f"rng_state_{rank}.pth")
        save_file({"w": torch.ones(8, 2)}, step / "model.safetensors")
        (step / "trainer_state.json").write_text(json.dumps({"global_step": number}))
    assert ckptctl.pick(str(tmp_path)).step == 30
    (tmp_path / "checkpoint-30" / "rng_state_1.pth").unlink()
    assert ckptctl.pick(str(tmp_path), grace_s=0).step == 20


@pytest.mark.parametrize("ranks", [(4, 2), (2, 4)])
@pytest.mark.parametrize("left", [0, 1])
def test_files_of_another_number_of_ranks_in_a_step_are_of_two_saves(tmp_path, ranks, left):
    """As after a job that went on with other ranks was killed while it saved a step again."""
    scheme = ("net.{r}.pt", "adam.{r}.pt")
    for number in (10, 20, 30):
        save_step(tmp_path / f"step-{number}", scheme, ranks[0], number, n_rows=4000)
    save_step(tmp_path / "again", scheme, ranks[1], 30, n_rows=4000)
    kept = max(ranks) - 1 if ranks[0] == 4 else left
    for path in (tmp_path / "again").iterdir():
        if f".{kept}." not in path.name:
            shutil.copy(path, tmp_path / "step-30")
    shutil.rmtree(tmp_path / "again")
    report = ckptctl.verify(f"{tmp_path}@30", grace_s=0)
    assert (report.exit_code, [*faults(report)]) == (21, ["state.mixed"])
    assert ckptctl.pick(str(tmp_path), grace_s=0).step == 20
    save_step(tmp_path / "step-40", scheme, ranks[0], 40, n_rows=4000)
    assert ckptctl.pick(str(tmp_path), grace_s=0).step == 40


def test_moments_of_an_expert_that_come_later_are_of_one_save(tmp_path):
    """Of experts that no token reached yet, the optimizer holds nothing."""
    for number in (10, 20, 30):
        step = tmp_path / f"step-{number}"
        step.mkdir()
        for expert in range(4):
            held = {0: {"exp_avg": torch.ones(900, 4), "exp_avg_sq": torch.ones(900, 4)}}
            states = held if expert == 0 or (expert == 1 and number == 30) else {}
            optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": [0]}]}
            state = {"model": {"w": torch.ones(900, 4)}, "optimizer": optimizer, "step": number}
            torch.save(state, step / f"expert_{expert}.pt")
    assert ckptctl.pick(str(tmp_path)).step == 30


def test_parts_of_a_replay_buffer_that_fill_one_after_the_other_are_of_one_save(tmp_path):
    for number, rows in ((10, 500), (20, 500), (30, 900)):
        step = tmp_path / f"step_{number}"
        save_kinds(step, number)
        for part, n_rows in enumerate((500, rows)):
            torch.save({"observations": torch.ones(n_rows, 8)}, step / f"buffer_{part}.pt")
    assert ckptctl.pick(str(tmp_path)).step == 30


SHARDS_OF_RANKS = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
mesh = init_device_mesh("cpu", (4,))
for number in range(3):
    folder = Path(sys.argv[1]) / f"checkpoint_{number}"
    folder.mkdir()
    for rank in range(4):
        part = DTensor.from_local(torch.full((2, 2), float(rank)), mesh, [Shard(0)])
        torch.save({"w": part}, folder / f"pytorch_model_fsdp_rank{rank}.bin")
        moments = {"exp_avg": part, "exp_avg_sq": part, "step": torch.tensor(number * 10.0)}
        groups = [{"lr": 0.1, "params": ["w"]}]
        optimizer = {"state": {"w": moments}, "param_groups": groups}
        torch.save(optimizer, folder / f"optimizer_rank{rank}.bin")
"""


def test_shards_that_state_their_whole_tensor_show_that_the_last_rank_is_lost(tmp_path):
    """Each shard is as large as in the step before, so only what they state of the whole does."""
    subprocess.run([sys.executable, "-c", SHARDS_OF_RANKS, str(tmp_path)], check=True)
    newest = tmp_path / "checkpoint_2"
    assert ckptctl.verify(str(newest)).exit_code == 0
    for name in ("pytorch_model_fsdp_rank3.bin", "optimizer_rank3.bin"):
        (newest / name).unlink()
    report = ckptctl.verify(str(newest), grace_s=0)
    assert report.exit_code == 20
    assert "file.missing" in {finding.code for finding in report.findings}
    accepting = ckptctl.PickPolicy(accept_unverifiable=True)
    assert ckptctl.pick(str(tmp_path), policy=accepting, grace_s=0).step == 1

"""Whether all files of a step are there, under whatever names: families of files."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from every_case import all_cases
from safetensors.torch import save_file

import ckptctl
from ckptctl.claims import ClaimName, ClaimState
from ckptctl.findings import Severity

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


def save_step(folder: Path, scheme: tuple[str, str], ranks: int = 4, number: int = 0) -> None:
    """A step whose weights, 8 by 2, are split over the ranks."""
    for (kind, rank), name in names_of(scheme, ranks).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = torch.full((8 // ranks, 2), float(number + rank))
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


def test_a_step_of_fewer_ranks_is_whole_where_its_files_show_it(tmp_path, scheme):
    save_step(tmp_path / "step-10", scheme, number=10)
    save_step(tmp_path / "step-20", scheme, number=20)
    save_step(tmp_path / "step-30", scheme, ranks=2, number=30)
    assert ckptctl.pick(str(tmp_path)).step == 30
    save_step(tmp_path / "step-40", scheme, ranks=8, number=40)
    assert ckptctl.pick(str(tmp_path)).step == 40


def stated(scheme: tuple[str, str]) -> bool:
    return any(word in name for word in ("of-{n", "of_{n", "size_{n", "ws{n") for name in scheme)


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

"""Which branch of a run a step is on, by the times of the writes."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from command_line import run_ckptctl, validated
from made_roots import make_templates, put_step, script

import ckptctl
from ckptctl.cli.pictures import CLAIM_MARKS
from ckptctl.errors import NothingToResume
from ckptctl.findings import Claim, ClaimName, ClaimState
from ckptctl.inspection.one_save import SaveTimes
from ckptctl.selection.branches import BranchState, to_compare, write_order
from ckptctl.selection.choosing import Answer

HOUR_S = 3600.0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A function that returns a step as torch saves it, each saved once."""
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    folder = tmp_path_factory.mktemp("saved")

    def step(number: int) -> Path:
        path = folder / f"step_{number}"
        if not path.exists():
            moments = {"w": {"exp_avg": torch.ones(6)}}
            model = {"w": torch.full((6,), float(number))}
            state = {"model": model, "optimizer": {"state": moments}, "step": number}
            dcp.save(state, checkpoint_id=path, no_dist=True)
        return path

    return step


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def train(saved: Callable[[int], Path], root: Path) -> Callable[..., None]:
    """A function that saves steps an hour apart, the last one so many hours ago."""

    def put(numbers: Sequence[int], last_hours_ago: float) -> None:
        for n, number in enumerate(reversed(numbers)):
            step = Path(shutil.copytree(saved(number), root / f"step_{number}"))
            set_times(step, last_hours_ago + n)

    return put


def set_times(step: Path, hours_ago: float) -> None:
    then_s = time.time() - hours_ago * HOUR_S
    for path in (*step.iterdir(), step):
        os.utime(path, (then_s, then_s))


def branch(root: Path, **options: object) -> Claim:
    chosen = ckptctl.pick(str(root), **options).chosen
    assert chosen is not None
    return chosen.claim(ClaimName.BRANCH)


# A run that went back


def test_no_step_is_chosen_of_a_run_that_went_back(train, root):
    train((100, 200, 300, 400, 500), 24)
    train((110, 120, 130), 1)
    found = ckptctl.pick(str(root))
    assert (found.answer, found.exit_code, found.chosen) == (Answer.UNDECIDED, 2, None)
    for word in ("step 500", "step 130", "--before 131", "--skip 110,120,130"):
        assert word in found.message
    assert found.next_command == f"ckptctl pick {root} --before 131"
    assert [one.code for one in found.findings] == ["root.two-branches"]


def test_each_branch_can_be_chosen_and_the_decision_lasts(train, root):
    train((100, 200, 300, 400, 500), 24)
    train((110, 120, 130), 1)
    assert ckptctl.pick(str(root), before=131).step == 130
    assert ckptctl.pick(str(root), skip=(110, 120, 130)).step == 500
    for number in (200, 300, 400, 500):
        ckptctl.mark(f"{root}@{number}", "rejected", reason="of the branch that the run left")
    found = ckptctl.pick(str(root))
    assert (found.step, found.exit_code) == (130, 0)
    assert found.chosen.claim(ClaimName.BRANCH).state is ClaimState.PROVEN


def test_the_older_branch_is_chosen_once_the_steps_of_the_other_are_rejected(train, root):
    train((100, 200, 300), 24)
    train((110,), 1)
    assert ckptctl.pick(str(root)).answer is Answer.UNDECIDED
    ckptctl.mark(f"{root}@110", "rejected", reason="a trial")
    assert ckptctl.pick(str(root)).step == 300


def test_a_save_that_was_interrupted_after_the_run_went_back_counts(train, root):
    train((100, 200, 300), 24)
    train((110,), 1)
    (root / "step_110" / ".metadata").unlink()
    assert ckptctl.pick(str(root)).answer is Answer.UNDECIDED


def test_a_fallback_to_the_branch_that_was_left_stops(train, root):
    train((100, 200, 300), 48)
    train((150, 160), 24)
    train((400,), 1)
    assert branch(root).state is ClaimState.PROVEN
    os.truncate(root / "step_400" / "__0_0.distcp", 10)
    found = ckptctl.pick(str(root))
    assert (found.answer, found.exit_code) == (Answer.UNDECIDED, 2)
    assert "step 160" in found.message


def test_prune_removes_nothing_of_either_branch(train, root):
    train((100, 200, 300, 400, 500), 24)
    train((110, 120, 130), 1)
    found = ckptctl.prune(str(root), 1, unsealed=True, apply=True)
    assert not any(one.removed for one in found.decisions)
    assert len([*root.iterdir()]) == 8
    assert "went back" not in found.decisions[0].reason
    assert "written after step 500" in found.decisions[0].reason
    assert found.decisions[-1].reason == "the run may have gone back: undecided"


def test_prune_removes_steps_once_the_run_is_past_the_branch_that_it_left(train, root):
    train((100, 200, 300), 24)
    train((110, 210, 310, 410), 1)
    ckptctl.prune(str(root), 1, unsealed=True, apply=True)
    assert [path.name for path in root.iterdir()] == ["step_410"]


def test_scan_shows_the_branch_of_each_step(train, root):
    train((100, 200, 300), 24)
    train((110, 120), 1)
    found = ckptctl.scan(str(root))
    assert (found.exit_code, found.chosen) == (2, None)
    states = {one.number: one.claim(ClaimName.BRANCH).state.value for one in found.reports}
    left = {300: "contradicted", 200: "contradicted"}
    assert states == {**left, 120: "proven", 110: "proven", 100: "proven"}
    assert [one.code for one in found.findings] == ["root.two-branches"]


def test_scan_shows_no_step_of_the_branch_that_was_left_as_one_that_lacks_state(train, root):
    train((100, 200, 300), 24)
    train((110, 120), 1)
    (row,) = [
        line
        for line in run_ckptctl("scan", root).stdout.splitlines()
        if line.split()[1:2] == ["300"]
    ]
    assert row.startswith("◇   300  complete ")
    assert "were written after step 300" in row


def test_scan_compares_no_step_with_the_epoch_of_an_export(train, root):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    torch = pytest.importorskip("torch")
    train((100, 200, 300), 24)
    dcp.save({"model": {"w": torch.ones(6)}}, checkpoint_id=root / "epoch_3", no_dist=True)
    set_times(root / "epoch_3", 1)
    claims = {one.number: one.claim(ClaimName.BRANCH) for one in ckptctl.scan(str(root)).reports}
    assert {claims[number].state for number in (100, 200, 300)} == {ClaimState.PROVEN}


def test_scan_compares_older_steps_that_it_does_not_show(train, root):
    train((100, 200, 300, 400, 500), 1)
    os.utime(root / "step_100")
    oldest = ckptctl.scan(str(root), last=3).reports[-1]
    assert (oldest.number, oldest.claim(ClaimName.BRANCH).state) == (300, ClaimState.PROVEN)


def test_scan_shows_that_a_person_has_accepted_the_step_to_go_on_from(train, root):
    train((100, 200, 300), 24)
    train((110, 120), 1)
    ckptctl.mark(f"{root}@200", "rejected", reason="x")
    ckptctl.mark(f"{root}@200", "accepted", reason="the run goes on from it")
    claims = {one.number: one.claim(ClaimName.BRANCH) for one in ckptctl.scan(str(root)).reports}
    assert claims[200].by == "accepted by a person"
    assert claims[300].state is ClaimState.CONTRADICTED


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_templates(tmp_path_factory.mktemp("templates"))


def test_a_resume_stops_until_a_step_is_named_and_its_marks_decide_it(templates, root):
    for number, hours in ((100, 9), (300, 7), (400, 6), (200, 1)):
        set_times(put_step(templates, root, number), hours)
    with script(root) as ckpt, pytest.raises(NothingToResume, match="step 200") as caught:
        ckpt.resume("auto")
    assert caught.value.exit_code == 2
    assert ckptctl.preflight(str(root)).exit_code == 2
    with script(root) as ckpt:
        assert ckpt.resume(200).step == 200
    found = ckptctl.pick(str(root))
    assert (found.step, found.exit_code, found.findings) == (200, 0, ())


def linear(train, root, templates):
    train((100, 200, 300), 1)


def single(train, root, templates):
    train((100,), 1)


def gone_back(train, root, templates):
    train((100, 200, 300), 24)
    train((110, 120), 1)


def rejected(train, root, templates):
    gone_back(train, root, templates)
    for number in (200, 300):
        ckptctl.mark(f"{root}@{number}", "rejected", reason="of the branch that the run left")


def superseded(train, root, templates):
    for number, hours in ((100, 9), (200, 8), (300, 7), (400, 6)):
        set_times(put_step(templates, root, number), hours)
    with script(root) as ckpt:
        ckpt.resume(200)


def copied(train, root, templates):
    train((100, 200, 300), 24)
    for step in root.iterdir():
        set_times(step, 1)


def damaged(train, root, templates):
    train((100, 200, 300, 400), 24)
    os.truncate(root / "step_400" / "__0_0.distcp", 10)
    (root / "step_200" / ".metadata").unlink()
    for number in (200, 400):
        set_times(root / f"step_{number}", 30 - number / 100)


MADE = (linear, single, gone_back, rejected, superseded, copied, damaged)


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_every_command_shows_the_same_claims_of_a_step(train, root, templates, make):
    make(train, root, templates)
    ask = ("--level", "listing")
    scanned = validated(run_ckptctl("scan", root, *ask, "--json").stdout)
    claims = {report["number"]: report["claims"] for report in scanned["reports"]}
    glyphs = {state: symbol.glyph for state, symbol in CLAIM_MARKS.items()}
    row = re.compile(rf"^. +(\d+) .* ([{''.join(glyphs.values())}]{{6}}) ", re.MULTILINE)
    shown = row.findall(run_ckptctl("scan", root, *ask).stdout)
    cells = {int(number): cell for number, cell in shown}
    assert cells == {
        number: "".join(glyphs[claim["state"]] for claim in of_step)
        for number, of_step in claims.items()
    }
    assert len(cells) == len([*root.glob("step_*")])
    for report in scanned["reports"]:  # after a damaged step the next one is inspected in full
        words = ("verify", report["url"], "--level", report["level"], "--json")
        verified = validated(run_ckptctl(*words).stdout)
        assert verified["report"]["claims"] == report["claims"]
    picked = validated(run_ckptctl("pick", root, *ask, "--json").stdout)
    if picked["chosen"] is not None:
        assert picked["chosen"]["claims"] == claims[picked["step"]]


# A run that did not


def test_a_run_that_never_went_back_proves_its_branch(train, root):
    train((100, 200, 300, 400), 1)
    claim = branch(root)
    assert (claim.state, claim.by) == (
        ClaimState.PROVEN,
        "steps written in the order of their numbers",
    )


def test_a_report_that_was_added_to_an_older_step_is_no_save(train, root):
    train((100, 200, 300), 24)
    (root / "step_100" / "eval.json").write_text("{}")
    (root / "step_200" / "events.log").write_text("done")
    assert ckptctl.pick(str(root)).step == 300


def test_a_file_that_was_added_to_the_step_that_was_left_hides_nothing(train, root):
    train((100, 200, 300), 24)
    train((110, 120), 1)
    (root / "step_300" / "samples").write_text("of an evaluation")
    assert ckptctl.pick(str(root)).answer is Answer.UNDECIDED


def test_the_only_step_is_on_the_branch(train, root):
    train((100,), 1)
    assert branch(root).state is ClaimState.PROVEN


# Copies

NUMBERS = (20, 40, 60, 80, 100, 120, 200, 1000)


def in_turn(copy: Callable[[Path, Path], object], *, shuffle: bool) -> Callable[..., None]:
    def run(root: Path, into: Path) -> None:
        steps = sorted(root.iterdir(), key=lambda path: path.name)
        if shuffle:
            random.Random(7).shuffle(steps)
        into.mkdir(exist_ok=True)
        for step in steps:
            copy(step, into / step.name)

    return run


def with_tool(*words: str) -> Callable[[Path, Path], None]:
    def run(root: Path, into: Path) -> None:
        if shutil.which(words[0]) is None:
            pytest.skip(f"{words[0]} is not installed")
        subprocess.run([*words, f"{root}/.", str(into)], check=True)

    return run


def bare(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=shutil.copyfile)


COPIES = {
    "cp -r": with_tool("cp", "-r"),
    "cp -a": with_tool("cp", "-a"),
    "rsync -r": with_tool("rsync", "-r"),
    "rsync -a": with_tool("rsync", "-a"),
    "by name": in_turn(bare, shuffle=False),
    "in random order": in_turn(bare, shuffle=True),
}


@pytest.mark.parametrize("name", COPIES)
def test_the_highest_step_of_a_copy_is_chosen(train, root, tmp_path, name):
    train(NUMBERS, 5)
    COPIES[name](root, tmp_path / "copy")
    found = ckptctl.pick(str(tmp_path / "copy"))
    assert (found.step, found.exit_code) == (1000, 0)
    state = found.chosen.claim(ClaimName.BRANCH).state
    keeps_times = name in ("cp -a", "rsync -a")
    assert state is (ClaimState.PROVEN if keeps_times else ClaimState.UNKNOWN)


@pytest.mark.parametrize("n_before", [1, 2, 4, 7])
@pytest.mark.parametrize("hours", [0.2, 3])
def test_an_interrupted_and_continued_copy_is_no_branch(train, root, tmp_path, n_before, hours):
    train(NUMBERS, 5)
    copy = tmp_path / "copy"
    names = sorted(path.name for path in root.iterdir())
    for name in names[:n_before]:
        bare(root / name, copy / name)
        set_times(copy / name, hours)
    for name in names[n_before:]:
        bare(root / name, copy / name)
    found = ckptctl.pick(str(copy))
    assert (found.step, found.exit_code) == (1000, 0)
    assert found.chosen.claim(ClaimName.BRANCH).state is ClaimState.UNKNOWN


def test_training_after_a_copy_proves_the_branch_again(train, root):
    train(NUMBERS, 9)
    for path in root.iterdir():
        set_times(path, 9)
    train((1200, 1400), 1)
    assert branch(root).state is ClaimState.PROVEN


def test_a_run_that_went_back_after_it_was_copied_is_seen(train, root):
    train(NUMBERS, 9)
    for path in root.iterdir():
        set_times(path, 9)
    train((130, 140), 1)
    assert ckptctl.pick(str(root)).answer is Answer.UNDECIDED


# The decision alone


def times(number: int, first_s: float, took_s: float = 10, largest: int = 0) -> SaveTimes:
    last_s = first_s + took_s
    return SaveTimes(f"step_{number}", number, first_s, last_s, took_s, largest, last_s)


def test_one_later_save_soon_after_a_copy_is_a_doubt():
    copied = [times(number, 0.01 * number, 0.1) for number in (100, 200, 300)]
    assert write_order(copied[-1], [*copied, times(110, 9_000)]).state is BranchState.DOUBTFUL


def test_one_later_save_among_saves_of_training_is_a_branch():
    trained = [times(number, 10 * number) for number in (100, 200, 300)]
    assert write_order(trained[-1], [*trained, times(110, 9_000)]).state is BranchState.WENT_BACK


def test_a_save_within_the_difference_of_clocks_is_a_doubt():
    trained = [times(number, 10 * number) for number in (100, 200, 300)]
    assert write_order(trained[-1], [*trained, times(110, 3_100)]).state is BranchState.DOUBTFUL


def test_large_files_that_follow_each_other_as_by_a_copy_are_no_branch():
    n_bytes = 100 * 10**9
    by_name = [times(n, 1_000 * place, 0, n_bytes) for place, n in enumerate((1000, 200, 300))]
    assert write_order(by_name[0], by_name).state is BranchState.COPIED


def test_storage_without_times_proves_nothing():
    assert write_order(None, ()).claim.state is ClaimState.UNKNOWN


# How much is listed


def test_few_of_many_older_steps_are_listed_where_that_takes_requests():
    older = [f"step_{n}" for n in range(200, 0, -1)]
    names, n_silent = to_compare(older, {}, 0.0, n_local_files=None)
    assert names == [older[n - 1] for n in (1, 2, 3, 4, 8, 16, 32, 64, 128)]
    assert n_silent == 191


def test_folders_that_changed_last_are_listed_and_the_others_prove_that_nothing_was_written():
    older = [f"step_{n}" for n in range(200, 0, -1)]
    folders = dict.fromkeys(older, 100.0) | {"step_7": 900.0}
    names, n_silent = to_compare(older, folders, 500.0, n_local_files=None)
    assert names[-1] == "step_7"
    assert n_silent == 0


def test_what_was_not_compared_leaves_the_branch_unknown():
    claim = write_order(times(300, 3_000), [times(200, 2_000)], 7).claim
    assert (claim.state, claim.by) == (ClaimState.UNKNOWN, "7 older steps were not compared")

"""RB-7 on eight broken roots: each ends with one next action, and none leads in a circle."""

from __future__ import annotations

import itertools
import shlex
import shutil
from pathlib import Path

import pytest
from command_line import run_ckptctl
from damage import flip
from next_commands import next_command
from rb_7_inputs import RB_7, settings
from resumed_logs import rows

from ckptctl.errors import NothingToResume
from ckptctl.runbook.engine import who

RESUME = 'echo "$STEP" > "$ROOT/../resumed"'


def run(root: Path, *options: str, env: dict[str, str] | None = None, **inputs: object):
    given = settings(**RB_7 | {"RESUME": RESUME} | inputs)
    return run_ckptctl("runbook", "run", "rb-7", root, "--yes", *options, *given, env=env)


def ends(done, exit_code: int, says: str) -> list[str]:
    """The words of the one next action, after a run that ended so."""
    said = done.stdout + done.stderr
    assert done.returncode == exit_code, said
    assert says in said.replace("\n  ", " ")
    assert sum(text.startswith("next:") for text in said.splitlines()) == 1, said
    return shlex.split(next_command(said) or "")


def leads_to_a_person(words: list[str], root: Path, *, without: str) -> None:
    """The same runbook, continued, with the question that was not answered."""
    assert words[:5] == ["ckptctl", "runbook", "run", "rb-7", str(root)]
    assert words[-1] == "--continue"
    assert "--yes" not in words
    assert not any(word.startswith(f"{without}=") for word in words)


def resumed(root: Path) -> str | None:
    path = root.parent / "resumed"
    return Path(path.read_text().strip()).name if path.exists() else None


def damage(root: Path, *numbers: int) -> None:
    """Damage the framing of a record, which level structure sees."""
    for number in numbers:
        shard = root / f"step_{number}" / "__1_0.distcp"
        flip(shard, shard.stat().st_size * 7 // 10)


def test_three_damaged_steps_are_passed_over_as_far_as_a_person_accepts(root):
    damage(root, 500, 400, 300)
    words = ends(run(root), 11, "nobody stated how far back is acceptable (OLDEST)")
    leads_to_a_person(words, root, without="OLDEST")
    words = ends(run(root, "--new", OLDEST=300), 11, "the newest sound step is older than OLDEST")
    leads_to_a_person(words, root, without="OLDEST")
    assert resumed(root) is None
    ends(run(root, "--new", OLDEST=200), 31, "the loss was not checked")
    assert resumed(root) == "step_200"
    mark = run_ckptctl("verify", root / "step_400")
    assert "RB-7: corrupt: __1_0.distcp: the record of" in mark.stdout
    # The decision is recorded: the next incident needs no other.
    assert run_ckptctl("pick", root, "--quiet").stdout == f"{root}/step_200\n"


@pytest.mark.torch
def test_the_library_names_the_same_way_past_damaged_steps(root):
    from ckptctl.train import resolve

    damage(root, 500, 400, 300)
    with pytest.raises(NothingToResume) as refused:
        resolve("auto", str(root))
    assert (refused.value.exit_code, refused.value.next_command) == (
        11,
        f"ckptctl runbook run rb-7 {root}",
    )


def test_more_steps_that_only_their_bytes_show_as_damaged_take_the_same_way(root):
    for number in (500, 400, 300):
        flip(root / f"step_{number}" / "__1_0.distcp")
    words = ends(run(root), 11, "nobody stated how far back is acceptable (OLDEST)")
    leads_to_a_person(words, root, without="OLDEST")
    codes = [run_ckptctl("verify", root / f"step_{n}").returncode for n in (500, 400, 300)]
    assert codes == [27, 27, 0]  # two are passed over without a person
    words = ends(run(root, "--new", OLDEST=300), 11, "the step is older than OLDEST")
    assert resumed(root) is None
    ends(run(root, "--new", OLDEST=200), 31, "the loss was not checked")
    assert resumed(root) == "step_200"


def test_a_root_without_a_sound_step_ends_at_the_storage(root):
    damage(root, 500, 400, 300, 200, 100)
    chain = [["runbook", "run", "rb-7", str(root)]]
    done = run(root)
    for _ in range(4):
        words = shlex.split(next_command(done.stdout + done.stderr) or "")[1:]
        if words[:2] != ["runbook", "run"]:
            break
        assert words not in chain
        chain.append(words)
        done = run_ckptctl(*words, "--yes")
        assert done.returncode == 11
    assert [words[2] for words in chain] == ["rb-7", "storage-corruption"]
    assert "hand the storage to its owner" in done.stdout
    assert words == ["explain", "11"]


def test_a_mount_that_vanished_is_asked_again(root):
    away = root.with_name("away")
    root.rename(away)
    root.symlink_to(root.with_name("gone"))
    assert ends(run(root), 75, "does not exist") == ["findmnt", "--real"]
    root.unlink()
    root.mkdir()
    restarted = {"SLURM_RESTART_COUNT": "1"}
    words = ends(run(root, env=restarted), 75, "nothing is known")
    assert words[:3] != ["ckptctl", "runbook", "run"]
    assert resumed(root) is None
    shutil.rmtree(root)
    away.rename(root)
    ends(run(root, "--new"), 31, "the loss was not checked")


def test_a_storage_that_the_nodes_do_not_share_is_no_damage(root):
    for shard in itertools.chain(root.glob("*/__2_0.distcp"), root.glob("*/__3_0.distcp")):
        shard.unlink()
    words = ends(run(root), 11, "no step is usable")
    assert words == ["ckptctl", "explain", "root.not-shared"]
    assert resumed(root) is None


def test_hardware_that_is_named_is_kept_away_first(root, tmp_path):
    log = tmp_path / "xid.log"
    log.write_text(
        "Nov 22 03:00:01 gpu-17 kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
    )
    words = ends(run(root, LOG=log), 93, "hardware failed and was not drained")
    leads_to_a_person(words, root, without="DRAINED")
    refused = run(root, "--new", LOG=log, DRAINED="y")
    assert refused.returncode == 2
    assert "DRAINED is 'y', and must be a reason in three words or more" in refused.stderr
    ends(run(root, "--new", LOG=log, DRAINED="gpu-17 is excluded, ticket 4711"), 31, "not checked")
    assert resumed(root) == "step_500"


def test_a_job_that_failed_by_its_own_code_is_mended_first(root, tmp_path):
    log = tmp_path / "train.log"
    log.write_text('Traceback (most recent call last):\n  File "a.py", line 3\nValueError: x\n')
    words = ends(run(root, LOG=log, MENDED=None), 93, "nobody stated what keeps the job from")
    leads_to_a_person(words, root, without="MENDED")
    # Without a log the cause is as little known.
    words = ends(run(root, "--new", MENDED=None), 93, "nobody stated what keeps the job from")
    leads_to_a_person(words, root, without="MENDED")
    ends(run(root, "--new", LOG=log, MENDED="commit 1a2b3c mends it"), 31, "not checked")


def test_too_few_ranks_are_waited_for_or_accepted(root):
    words = ends(run(root, WORLD_SIZE=2), 93, "there are fewer ranks than saved the step")
    leads_to_a_person(words, root, without="ELASTIC")
    words = ends(run(root, "--new", WORLD_SIZE=2, ELASTIC="no"), 75, "the job waits for capacity")
    leads_to_a_person(words, root, without="ELASTIC")
    words = ends(run(root, "--new", WORLD_SIZE=None), 93, "give WORLD_SIZE")
    assert "WORLD_SIZE=SIZE" in words
    assert run(root, "--new", WORLD_SIZE="four").returncode == 2
    assert resumed(root) is None
    ends(run(root, "--new", WORLD_SIZE=2, ELASTIC="yes"), 31, "not checked")


def test_a_suspect_loss_is_accepted_by_name_and_never_a_plain_success(root, tmp_path):
    before, ready, after = (tmp_path / name for name in ("before.log", "ready.log", "after.log"))
    before.write_text(rows(401, 540))
    ready.write_text(rows(501, 600, raised_after=540))
    logs = {"LOG": before, "NEW_LOG": after, "WAIT": 5, "RESUME": f"cp {ready} {after}"}
    words = ends(run(root, **logs, CONFIRMED="the plot looks fine"), 32, "the loss is suspect")
    leads_to_a_person(words, root, without="DIFFERENCE")
    assert run(root, "--new", **logs, DIFFERENCE="y").returncode == 2
    options = ("--new", "--transcript", str(tmp_path / "t"))
    done = run(root, *options, **logs, DIFFERENCE="the new data mix is harder")
    assert done.returncode == 35, done.stderr
    accepted = f"accepted against what was found: the loss is suspect ({who()}: the new data mix"
    assert accepted in done.stdout.replace("\n  ", " ")
    assert next_command(done.stdout) is None
    head = (tmp_path / "t" / "transcript.md").read_text().partition("## ")[0]
    assert f"with exit code 35: {accepted}" in head


@pytest.mark.parametrize("wrong", ["step", "file", "absent", "above"])
def test_a_wrong_path_is_a_mistake_before_anything_is_recorded(root, wrong):
    path = {
        "step": root / "step_500",
        "file": root / "step_500" / ".metadata",
        "absent": root / "other",
        "above": root.parent,
    }[wrong]
    before = sorted(root.parent.rglob("*"))
    words = ends(run(path), 2, str(path))
    assert sorted(root.parent.rglob("*")) == before
    assert words[0] == "ckptctl"
    if wrong == "step":
        assert words[1:] == ["runbook", "run", "rb-7", str(root)]
    # Also a step that holds marks or a seal is no root.
    assert run_ckptctl("reject", root / "step_500", "--reason", "a test").returncode == 0
    assert run(root / "step_500").returncode == 2
    assert not (root / "step_500" / ".ckptctl" / "runbooks").exists()

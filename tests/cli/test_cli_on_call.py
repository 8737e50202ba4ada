"""The commands that an on-call engineer is led to form no circle and contradict none."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_line import clean_environment, validated
from damage import name_step
from next_commands import follow
from storage.faulty import FaultyStore

import ckptctl
from ckptctl import AccessDenied
from ckptctl.cli.app import run
from ckptctl.cli.commands import load
from ckptctl.selection import targets, verifying
from ckptctl.selection.branches import MAX_LOCAL
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import open_store

MONTH_S = 30 * 86400


def flip(step: Path) -> None:
    """Flip the byte in the middle of a tensor record: only its checksum shows it."""
    shard = step / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    at = data.index(b"data/0") + 200
    data[at] ^= 0xFF
    shard.write_bytes(data)
    age(step)


def age(step: Path) -> None:
    """Make a step a month old, so that no save in it can be running."""
    old_s = time.time() - MONTH_S
    for path in step.rglob("*"):
        os.utime(path, (old_s, old_s))


def next_of(text: str) -> str:
    (line,) = [each for each in text.splitlines() if each.startswith("next:")]
    return line.removeprefix("next:").strip()


@pytest.fixture
def corrupt_root(sound_root: Path) -> Path:
    """Steps 10, 20 and 30, where the bytes of 20 and 30 do not match their checksums."""
    for name in ("step_20", "step_30"):
        flip(sound_root / name)
    return sound_root


STRICT = ("--level", "content", "--max-fallback", "1")


def test_pick_that_gives_up_names_the_newest_step_that_is_sound(ckptctl, corrupt_root):
    done = ckptctl("pick", corrupt_root, *STRICT)
    assert (done.returncode, done.stdout) == (11, "")
    assert "the newest step that is sound at content is 10" in done.stderr
    assert next_of(done.stderr) == f"ckptctl runbook run rb-7 {corrupt_root}"
    document = validated(ckptctl("pick", corrupt_root, *STRICT, "--json").stdout)
    assert document["newest_sound"] == f"{corrupt_root}/step_10"


def test_pick_that_gives_up_says_that_no_step_is_sound(ckptctl, corrupt_root):
    flip(corrupt_root / "step_10")
    done = ckptctl("pick", corrupt_root, *STRICT)
    assert done.returncode == 11
    assert "no step is sound at content: the step before is not" in done.stderr
    every = ckptctl("pick", corrupt_root, "--level", "content")
    assert every.returncode == 11
    assert "no step is sound at content" in every.stderr


@pytest.mark.parametrize("options", [(), ("--level", "content"), STRICT, ("--before", "20")])
def test_the_first_line_of_scan_is_the_answer_of_pick(ckptctl, corrupt_root, options):
    picked = ckptctl("pick", corrupt_root, *options, "--json")
    scanned = ckptctl("scan", corrupt_root, *options)
    assert scanned.returncode == picked.returncode
    answer = validated(picked.stdout)
    if picked.returncode:
        assert scanned.stdout.startswith(answer["message"])
    else:
        assert scanned.stdout.startswith(f"resume from step {answer['step']}: complete")
    document = validated(ckptctl("scan", corrupt_root, *options, "--json").stdout)
    assert (document["chosen"], document["message"]) == (answer["path"], answer["message"])


def test_the_table_of_scan_shows_no_row_that_contradicts_its_first_line(ckptctl, corrupt_root):
    done = ckptctl("scan", corrupt_root, *STRICT)
    rows = {each.split()[1]: each.split()[2] for each in done.stdout.splitlines() if "KiB" in each}
    assert rows["30"] == rows["20"] == "corrupt"
    assert rows["10"] == "complete"
    assert "the newest step that is sound at content is 10" in done.stdout.splitlines()[0]


def denied(monkeypatch: pytest.MonkeyPatch, path: str, next_command: str | None = None) -> None:
    """Deny every access to a file or folder of the roots that are opened from now on."""

    def opened(url: str, *args: object, **kwargs: object) -> Store:
        store = FaultyStore(open_store(url, *args, **kwargs))
        error = AccessDenied(f"{url}/{path}: permission denied", next_command=next_command)
        for verb in ("list_tree", "list_dir", "read", "span"):
            store.fail(verb, error, path=path, lasts=True)
        return store

    for module in (targets, verifying):
        monkeypatch.setattr(module, "open_store", opened)


def test_a_step_that_may_not_be_read_is_the_answer_of_scan(sound_root, capsys, monkeypatch):
    denied(monkeypatch, "step_30")
    assert run(["scan", str(sound_root)]) == 77
    said = capsys.readouterr().out
    assert said.startswith("step 30 could not be inspected, so no older one is chosen: unknown: ")
    assert "none of the" not in said
    (row,) = [each for each in said.splitlines() if each.startswith("?")]
    assert row.split()[1:5] == ["30", "unknown", "○" * 6, "-"]
    assert next_of(said) == f"ckptctl doctor storage {sound_root}"


@pytest.mark.parametrize("command", ["scan", "pick", "preflight"])
def test_expired_credentials_are_renewed_before_a_step_is_skipped(
    sound_root, capsys, monkeypatch, command
):
    denied(monkeypatch, "step_30", "aws sts get-caller-identity")
    assert run([command, str(sound_root)]) == 77
    printed = capsys.readouterr()
    assert next_of(printed.out + printed.err) == "aws sts get-caller-identity"


def test_no_shard_is_shown_as_whole_where_one_could_not_be_read(sound_root, capsys, monkeypatch):
    denied(monkeypatch, "step_30/__1_0.distcp")
    assert run(["verify", f"{sound_root}@30", "--level", "content"]) == 77
    said = capsys.readouterr().out
    assert "every byte was compared" not in said
    assert "  □?\n" in said
    assert "? 1 not readable   □ 1 present, not checked" in said


@pytest.mark.parametrize("damage", ["truncated", "missing"])
@pytest.mark.parametrize("level", ["structure", "content"])
def test_no_shard_is_shown_as_checked_where_the_metadata_cannot_be_read(
    sound_root, capsys, damage, level
):
    metadata = sound_root / "step_30" / ".metadata"
    if damage == "missing":
        metadata.unlink()
    else:
        metadata.write_bytes(metadata.read_bytes()[:100])
    words = ["verify", f"{sound_root}@30", "--level", level, "--grace", "0"]
    assert run(words) in (20, 21)
    said = capsys.readouterr().out
    assert "every byte was compared" not in said
    assert "  □□\n  □ 2 present, not checked\n" in said


@pytest.mark.torch
def test_a_step_of_weights_alone_is_no_green_row_wherever_it_is(ckptctl, torch_root):
    done = ckptctl("scan", torch_root)
    rows = [each.split() for each in done.stdout.splitlines() if " KiB " in each]
    shown = {row[1]: (row[0], row[2]) for row in rows}
    assert shown["20"] == ("◒", "lacks")
    assert shown["10"][0] == shown["30"][0] == "◇"


@pytest.fixture
def torch_root(sound_root: Path, checkpoints: Path) -> Path:
    """Steps 10, 20 and 30, of which 20 holds the weights of a model and nothing else."""
    shutil.rmtree(sound_root / "step_20")
    shutil.copytree(checkpoints / "dtypes_1" / "step_100", sound_root / "step_20")
    name_step(sound_root / "step_20")
    age(sound_root / "step_20")
    return sound_root


def test_a_lost_file_and_a_kind_that_was_never_saved_are_told_apart(ckptctl, ranks_root):
    done = ckptctl("scan", ranks_root)
    assert "of 2 ranks, which step 20 holds" in done.stdout
    (row,) = [each for each in done.stdout.splitlines() if each.split()[1:2] == ["30"]]
    assert "lacks state" in row
    assert "passed over: older steps hold" not in done.stdout


@pytest.fixture
def ranks_root(framework_roots: Path, tmp_path: Path) -> Path:
    """Steps 10, 20 and 30; the newest has lost the random state of one of two ranks."""
    saved = framework_roots / "transformers" / "trainer_fsdp2"
    root = Path(shutil.copytree(saved, tmp_path / "ranks"))
    (root / "checkpoint-30" / "rng_state_1.pth").unlink()
    age(root / "checkpoint-30")
    return root


def test_scan_shows_the_newest_steps_and_how_to_see_more(ckptctl, many_steps):
    done = ckptctl("scan", many_steps)
    rows = [each for each in done.stdout.splitlines() if " KiB " in each and " days " in each]
    assert len(rows) == 50
    assert (
        "10 older steps of 60 not shown (--before 11 continues, --last 0 shows all)" in done.stdout
    )
    more = ckptctl("scan", many_steps, "--before", "11")
    assert more.stdout.startswith("resume from step 10: complete")
    document = validated(ckptctl("scan", many_steps, "--json").stdout)
    assert (document["n_steps"], document["n_older"], document["more_before"]) == (60, 10, 11)
    everything = validated(ckptctl("scan", many_steps, "--last", "0", "--json").stdout)
    assert (len(everything["reports"]), everything["n_older"]) == (60, 0)


@pytest.fixture
def many_steps(checkpoints: Path, tmp_path: Path) -> Path:
    """Sixty steps of one save."""
    root = tmp_path / "many"
    for number in range(1, 61):
        shutil.copytree(checkpoints / "run_bare4" / "step_20", root / f"step_{number}")
        age(root / f"step_{number}")
    return root


def test_a_scan_of_many_steps_lists_only_those_that_it_shows(many_steps, monkeypatch):
    made: list[FaultyStore] = []

    def opened(url: str, *args: object, **kwargs: object) -> Store:
        made.append(FaultyStore(open_store(url, *args, **kwargs)))
        return made[-1]

    monkeypatch.setattr(targets, "open_store", opened)
    ckptctl.scan(str(many_steps), last=5)
    # Those that are shown, the newest once more after it was inspected, each step beside them
    # once, because the counts differ from the names, and those whose times are compared.
    assert made[0].calls["list_tree"] <= 5 + 1 + 8 + MAX_LOCAL


def test_the_chosen_step_is_shown_wherever_it_is(ckptctl, many_steps):
    for number in range(6, 61):
        assert run(["reject", f"{many_steps}@{number}", "--reason", "abandoned", "-q"]) == 0
    done = ckptctl("scan", many_steps)
    assert done.stdout.startswith("resume from step 5: complete")
    rows = [each.split()[1] for each in done.stdout.splitlines() if "KiB" in each][:51]
    assert (rows[0], rows[49], rows[50]) == ("60", "11", "5")
    assert "9 older steps of 60 not shown (--before 11" in done.stdout


def test_scan_names_checkpoints_without_a_step_number(ckptctl, sound_root):
    shutil.copytree(sound_root / "step_30", sound_root / "final")
    (sound_root / "last.ckpt").write_bytes(b"PK\x03\x04")
    (sound_root / "logs").mkdir()
    done = ckptctl("scan", sound_root)
    assert done.returncode == 0
    (line,) = [each for each in done.stdout.splitlines() if "root.unnumbered" in each]
    assert "last.ckpt, final look like checkpoints without a step number" in line
    assert "logs" not in line


def test_verify_inspects_as_deep_as_pick(ckptctl, sound_root):
    picked = validated(ckptctl("pick", sound_root, "--json").stdout)
    verified = validated(ckptctl("verify", f"{sound_root}@auto", "--json").stdout)
    assert verified["report"]["level"] == picked["level"] == "structure"


def test_auto_means_the_step_that_pick_takes_under_the_same_conditions(ckptctl, sound_root):
    (sound_root / "step_30" / ".metadata").unlink()  # a save that may be running
    for path in (sound_root / "step_30").rglob("*"):
        os.utime(path)
    wanted = ("--require", "model,optimizer", "--saved-world-size", "2", "--grace", "0")
    done = ckptctl("verify", f"{sound_root}@auto", *wanted, "--json")
    assert validated(done.stdout)["report"]["number"] == 20
    # Three ranks wrote none of them: `auto` has no answer, where it once gave the newest.
    none = ckptctl("verify", f"{sound_root}@auto", "--saved-world-size", "3")
    assert none.returncode == 11


CARRIED: Sequence[tuple[tuple[str, ...], str]] = [
    (
        ("verify", "run@30", "--level", "content", "--require", "model", "--grace", "5"),
        "ckptctl pick run --before 30 --level content --require model --grace 5",
    ),
    (
        ("verify", "run@30", "--marks", "m.jsonl", "--world-size", "2", "--timeout", "60"),
        "ckptctl pick run --before 30 --world-size 2 --marks m.jsonl --timeout 60",
    ),
    # `show` takes neither conditions nor a level.
    (
        ("verify", "run@10", "--require", "tokens,rng"),
        "ckptctl verify run/step_10 --level content --require tokens,rng",
    ),
    (
        ("scan", "run", "--require-seal", "--skip", "30", "--grace", "60"),
        "ckptctl verify run/step_10 --grace 60 --require-seal",
    ),
    (
        ("scan", "run", "--saved-world-size", "2", "--last", "2"),
        "ckptctl verify run/step_10 --level content --saved-world-size 2",
    ),
    (
        ("pick", "run", "--before", "5", "--allow-missing-state", "--print", "step"),
        "ckptctl verify run/step_10 --level content",
    ),
]


@pytest.mark.parametrize(("words", "following"), CARRIED, ids=lambda each: " ".join(each)[:40])
def test_a_next_command_repeats_the_conditions_of_the_answer(
    ckptctl, broken_root, words, following
):
    (broken_root.parent / "m.jsonl").touch()
    done = ckptctl(*words)
    assert next_of(done.stdout + done.stderr) == following


@pytest.mark.parametrize("name", ["CKPTCTL_GRACE", "CKPTCTL_REQUIRE"])
def test_a_condition_in_the_environment_is_not_repeated(ckptctl, broken_root, name):
    given = {"CKPTCTL_GRACE": "60", "CKPTCTL_REQUIRE": "model"}[name]
    done = ckptctl("verify", f"{broken_root.name}@30", env={name: given})
    assert next_of(done.stdout) == f"ckptctl pick {broken_root.name} --before 30"


def test_no_damaged_step_is_offered_to_be_accepted(ckptctl, sound_root):
    shutil.copytree(sound_root / "step_20", sound_root / "step_40")
    done = ckptctl("verify", sound_root / "step_40")
    assert done.returncode == 21
    assert "step.wrong-step" in done.stdout
    assert next_of(done.stdout) == f"ckptctl pick {sound_root} --before 40"


def test_a_next_command_that_leads_nowhere_new_is_caught(sound_root):
    """The helper that follows next commands in these tests sees a circle and an empty answer."""
    run_in = {"cwd": sound_root.parent, "env": clean_environment()}
    circle = "next: ckptctl verify run@30"
    with pytest.raises(AssertionError, match="names itself"):
        follow(["verify", "run@30"], 0, circle, **run_in)
    with pytest.raises(AssertionError, match="leads to"):
        follow(["pick", "run"], 11, "next: ckptctl show run --no-such-option", **run_in)
    (sound_root / "step_30" / ".metadata").unlink()
    for file in (sound_root / "step_30").glob("*.*"):
        file.unlink()
    with pytest.raises(AssertionError, match="empty `show`"):
        follow(["scan", "run"], 0, "next: ckptctl show run/step_30 --tensors", **run_in)
    flip(sound_root / "step_20")
    (sound_root / "step_20" / "__0_0.distcp").write_bytes(b"")
    age(sound_root / "step_20")
    with pytest.raises(AssertionError, match="accept a damaged step"):
        follow(["verify", "x"], 20, "next: ckptctl accept run/step_20", **run_in)


@pytest.mark.parametrize(
    "words",
    [
        ("scan", "--", "-run"),
        ("pick", "--require", "dataloader", "--", "-run"),
        ("pick", "--optional-root", "-run", "absent"),
        ("verify", "--", "-run@30"),
        ("verify", "--", "-run/step_20"),
        ("show", "--", "-run/step_20"),
        ("seal", "--", "-run@20"),
        ("diff", "--", "-run@10", "-run@20"),
        ("reshard", "--world-size", "2", "--", "-run@10", "-new/step_10"),
        ("convert", "--", "-run@20", "-new/step_20"),
        ("preflight", "--", "-run"),
        ("prune", "--keep", "1", "--", "-run"),
        ("cost", "--", "-run"),
        ("history", "--", "-run"),
        ("loss", "--", "-train.log"),
        ("classify", "--", "-train.log"),
        ("run", "--root", "-run", "--backoff", "0", "--max-restarts", "0", "--", "false"),
        ("rerun", "--root", "-run", "--log", "-train.log", "--step", "30", "--", "true", "{root}"),
    ],
    ids=" ".join,
)
def test_a_path_that_begins_with_a_dash_is_no_option_in_the_next_command(
    ckptctl, broken_root, words
):
    broken_root.rename(broken_root.with_name("-run"))
    broken_root.with_name("-train.log").write_text("nothing\n")
    done = ckptctl(*words)  # follows `next:`, which must parse
    assert done.returncode != 1
    shown = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("next:")]
    paths = [word for line in shown for word in line.partition(" -- ")[0].split()]
    assert not [word for word in paths if word.startswith(("-run", "-train", "-new"))]


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize(
    "words",
    [
        ("scan", "run"),
        ("pick", "run", "--level", "content"),
        ("verify", "run@20"),
        ("verify", "run@10", "--level", "content"),
        ("show", "run@10", "--tensors"),
        ("diff", "run@10", "run@10"),
        ("history", "run"),
        ("cost", "--interval", "1h", "--mtbf", "8h", "--save-time", "60"),
        ("preflight", "run"),
        ("prune", "run", "--keep", "1"),
        ("doctor", "env"),
        ("doctor", "storage", "run"),
        ("reshard", "run@10", "new/step_10", "--world-size", "4"),
        ("seal", "run@10"),
        ("reject", "run@10", "--reason", "test"),
        ("classify", "old.log", "--exit-code", "137"),
        ("loss", "old.log", "new.log"),
        ("explain", "shard.truncated"),
        ("runbook", "list"),
    ],
    ids=" ".join,
)
def test_a_narrow_terminal_breaks_no_path_and_no_number(ckptctl, broken_root, words, columns):
    old = [f"step {n} loss {8 / n:.4f} grad_norm {1 / n:.4f}" for n in range(1, 60)]
    folder = broken_root.parent
    folder.joinpath("old.log").write_text("\n".join(old))
    folder.joinpath("new.log").write_text("\n".join(old[40:]))
    if words[0] == "history":
        ckptctl("run", "--root", "run", "--backoff", "0", "--max-restarts", "1", "--", "false")
    done = ckptctl(*words, env=clean_environment(CKPTCTL_COLUMNS=str(columns)))
    assert done.returncode not in (1, 2)
    wide = [each for each in (done.stdout + done.stderr).splitlines() if len(each) > columns]
    # A word that is wider than the terminal can only be broken by it.
    assert [each for each in wide if " " in each.strip() and "ckptctl " not in each] == []


def test_help_fits_a_narrow_terminal(ckptctl):
    def wide(command):
        text = ckptctl(command, "--help", env=clean_environment(COLUMNS="40")).stdout
        return [each for each in text.splitlines() if len(each) > 40]

    for command in ("pick", "run", "runbook", "loss"):
        # A command is never broken.
        assert [each.strip() for each in wide(command)] == [
            each for each in load(command).examples if len(each) > 38
        ]

"""Settings from a file: what they set, what comes first, and what a file may not do."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ckptctl.cli.app import run
from ckptctl.cli.commands import command_of, keys_of
from ckptctl.cli.config import CONFIGURED, ONLY_IF_NAMED
from ckptctl.runbook.executing import execute


@pytest.fixture
def folder(sound_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the root `run`; we are in a folder below it."""
    at = sound_root.parent
    (at / "job").mkdir()
    monkeypatch.chdir(at / "job")
    for name in [*os.environ]:
        if name.startswith("CKPTCTL_"):
            monkeypatch.delenv(name)
    return at


def called(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    exit_code = run(words)
    printed = capsys.readouterr()
    return exit_code, printed.out, printed.err


def test_a_file_above_the_current_folder_gives_root_and_requirements(folder, capsys):
    (folder / "ckptctl.toml").write_text('root = "run"\nrequire = ["model", "tokens"]\n')
    (folder / "job" / "pyproject.toml").write_text("[tool.ckptctl]\nroot = 'other'\n")
    exit_code, out, err = called(capsys, "pick")
    assert (exit_code, out) == (0, f"{folder}/run/step_30\n")
    assert f"ckptctl: settings from {folder}/ckptctl.toml: root, require\n" in err
    assert "step, tokens (--require" in err


def test_a_byte_order_mark_is_no_mistake(folder, capsys):
    (folder / "ckptctl.toml").write_bytes(b"\xef\xbb\xbfbefore = 30\n")
    assert called(capsys, "pick", "-q", "../run")[1] == "../run/step_20\n"


@pytest.mark.parametrize("value", ["2.9", "true"])
def test_the_number_of_steps_to_keep_is_never_rounded(folder, capsys, value):
    (folder / "ckptctl.toml").write_text(f"keep = {value}\n")
    exit_code, out, err = called(capsys, "prune", "../run")
    assert (exit_code, out) == (2, "")
    assert f"{folder}/ckptctl.toml" in err


def test_a_switch_is_true_or_false_as_the_file_states(folder, capsys):
    path = folder / "ckptctl.toml"
    path.write_text("accept_unverifiable = false\nbefore = '30'\ngrace = 1.5\n")
    assert called(capsys, "pick", "-q", "../run")[:2] == (0, "../run/step_20\n")
    path.write_text("require_seal = true\n")
    assert called(capsys, "pick", "-q", "../run")[0] != 0


@pytest.mark.parametrize("switch", ["-q", "--json"])
def test_a_script_sees_on_standard_error_that_a_file_changed_the_answer(folder, capsys, switch):
    (folder / "ckptctl.toml").write_text("before = 30\n")
    _, _, err = called(capsys, "pick", switch, "../run")
    assert err == f"ckptctl: settings from {folder}/ckptctl.toml: before\n"


def test_a_root_from_the_file_is_shown_in_an_error(folder, capsys):
    (folder / "other.toml").write_text('root = "memory://bucket-aBc9/run"\n')
    _, _, err = called(capsys, "pick", "--config", "../other.toml")
    assert "error: memory://bucket-aBc9/run does not exist" in err


def test_a_runbook_names_the_settings_that_it_does_not_use(folder, capsys):
    path = folder / "ckptctl.toml"
    path.write_text('before = 30\nrequire = "model"\ntimeout = 60\nkeep = 2\n')
    _, _, err = called(capsys, "runbook", "run", "rb-7", "../run", "--dry-run")
    assert f"{path} also sets before, require: this runbook does not use them\n" in err
    assert "also sets" not in called(capsys, "runbook", "list")[2]


@pytest.mark.parametrize("command", CONFIGURED)
def test_every_command_that_reads_settings_says_so_in_its_help(folder, capsys, command):
    _, out, _ = called(capsys, command, "--help")
    assert "--config FILE" in out
    assert "require" in keys_of(command) or command in ("loss", "runbook", "run", "watch")


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(
    folder, capsys, monkeypatch
):
    (folder / "ckptctl.toml").write_text('root = "run"\nbefore = 30\n')
    assert called(capsys, "pick", "-q")[1] == f"{folder}/run/step_20\n"
    monkeypatch.setenv("CKPTCTL_BEFORE", "20")
    assert called(capsys, "pick", "-q")[1] == f"{folder}/run/step_10\n"
    assert called(capsys, "pick", "-q", "--before", "31")[1] == f"{folder}/run/step_30\n"


def test_the_table_of_a_command_comes_before_what_all_share(folder, capsys):
    (folder / "ckptctl.toml").write_text('root = "run"\nbefore = 30\n[pick]\nbefore = 20\n')
    assert called(capsys, "pick", "-q")[1] == f"{folder}/run/step_10\n"
    assert called(capsys, "preflight", "-q")[1] == f"{folder}/run/step_20\n"


def test_a_named_file_is_read_instead_and_none_reads_none(folder, capsys, monkeypatch):
    (folder / "ckptctl.toml").write_text('root = "run"\n')
    (folder / "other.toml").write_text('root = "run"\nbefore = 20\n')
    assert called(capsys, "pick", "-q", "--config", "../other.toml")[1].endswith("step_10\n")
    monkeypatch.setenv("CKPTCTL_CONFIG", str(folder / "other.toml"))
    assert called(capsys, "pick", "-q")[1].endswith("step_10\n")
    assert called(capsys, "pick", "--config", "none")[2].startswith("error: missing argument")


def test_a_next_command_names_the_file_that_the_caller_named(folder, capsys):
    (folder / "other.toml").write_text("[pick]\nbefore = 5\n")
    _, _, err = called(capsys, "pick", "../run", "--config", "../other.toml")
    assert re.search(r"^next: .* --config ../other.toml$", err, re.M), err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lanucher = 'srun'", "there is no setting lanucher; did you mean launcher?"),
        ("[pick]\nreqire = 'model'", "there is no setting reqire in [pick]; did you mean require?"),
        ("[pik]\nroot = 'run'", "there is no setting [pik]; did you mean [pick]?"),
        ("apply = true", "there is no setting apply"),
        ("json = true", "there is no setting json"),
        ("node_probe = 'x'", "there is no setting node_probe"),
        ("print = 'path'", "there is no setting print"),
        ("detailed_exitcode = true", "there is no setting detailed_exitcode"),
        ("allow_fresh = true", "there is no setting allow_fresh"),
        ("verbose = true", "there is no setting verbose"),
        ("before = [1, 2]", "before takes one value"),
        ("before = 60.9", "invalid value for before in {path}: '60.9' is not a whole number"),
        ("before = true", "before is true, but is no switch"),
        ("skip = [true]", "skip is true, but is no switch"),
        ("require_seal = 2", "require_seal"),
        ("scan = 3", "scan is no table"),
        ("[[scan]]", "scan is no table"),
        ("[[pick]]", "pick is no table"),
        ("'' = 3", "there is no setting ''"),
        ("[pick]\n' ' = 3", "there is no setting ' ' in [pick]"),
        ("[pick]\nroot = []", "root is an empty list"),
        ("before = {a = 1}", "there is no setting [before]"),
        ("require = [{a = 1}]", "require is no text, number, true or false"),
        ("before = 'x'", "invalid value for before in {path}: 'x' is not a whole number"),
        ("require = 'x'", "require in {path}: 'x' is no kind of train state"),
        ("root = 'run", "error: {path} is no TOML"),
        ("a = " + "[" * 100_000, "error: {path} is no TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named_and_nothing_is_chosen(folder, capsys, text, message):
    path = folder / "ckptctl.toml"
    path.write_text(f"{text}\n")
    exit_code, out, err = called(capsys, "pick", "../run")
    assert (exit_code, out) == (2, "")
    assert message.format(path=path) in err


@pytest.mark.parametrize("key", [key for keys in ONLY_IF_NAMED.values() for key in keys])
def test_a_file_that_was_only_found_starts_and_writes_nothing(folder, capsys, key):
    """Whoever can write into the folder would have the caller do it."""
    path = folder / "job" / "ckptctl.toml"
    path.write_text(f"{key} = 'touch {folder}/ran'\n")
    command = next(name for name in CONFIGURED if key in keys_of(name))
    words = {"loss": ["../x"], "runbook": ["run", "rb-7", "../run"]}.get(command, ["../run"])
    words = ["--root", "../run", "--", "true"] if command == "run" else words
    words = [*words, "--keep", "1"] if command == "prune" else words
    exit_code, out, err = called(capsys, command, *words)
    assert (exit_code, out) == (2, "")
    assert f"{path}: {key} states " in err
    assert re.search(rf"^next: .* --config {path}", err, re.M)
    assert not (folder / "ran").exists()
    assert not (folder / "run" / ".ckptctl").exists()


@pytest.mark.parametrize(
    "key", ["root", "optional_root", "other_root", "resume_from", "resume_report", "key_file"]
)
def test_a_file_that_was_only_found_reaches_no_other_storage(folder, capsys, key):
    path = folder / "job" / "ckptctl.toml"
    path.write_text(f"{key} = 's3://bucket/run'\n")
    command = next(name for name in CONFIGURED if key in keys_of(name))
    words = {"loss": ["../x"], "prune": ["../run", "--keep", "1"]}.get(command, ["../run"])
    exit_code, out, err = called(capsys, command, *words)
    assert (exit_code, out) == (2, "")
    assert f"{path}: {key} states another storage" in err
    assert re.search(rf"^next: .* --config {path}", err, re.M)


def test_a_file_of_another_user_is_refused_unless_it_is_named(folder, capsys):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    path = folder / "ckptctl.toml"
    path.write_text("before = 30\n")
    os.chown(path, 4711, 4711)
    exit_code, out, err = called(capsys, "pick", "../run")
    assert (exit_code, out) == (2, "")
    assert f"error: {path} belongs to uid 4711" in err
    assert called(capsys, "pick", "../run", "-q", "--config", str(path))[0] == 0


def test_a_file_that_everybody_can_write_is_refused(folder, capsys):
    path = folder / "ckptctl.toml"
    path.write_text("before = 30\n")
    path.chmod(0o666)
    exit_code, out, err = called(capsys, "pick", "../run")
    assert (exit_code, out) == (2, "")
    assert f"error: {path} can be written by every user" in err


def test_a_link_pipe_or_folder_of_that_name_ends_nothing_in_a_wait(folder, capsys):
    os.mkfifo(folder / "ckptctl.toml")
    assert called(capsys, "pick", "../run")[0] != 0


def test_a_secret_is_refused_in_a_file(folder, capsys):
    path = folder / "other.toml"
    path.write_text("storage_option = ['anon=true', 'secret=Xy7pQ2wZ9kLm']\n")
    exit_code, _, err = called(capsys, "pick", "s3://bucket/run", "--config", str(path))
    assert exit_code == 2
    assert "the storage option secret may be a secret" in err
    assert "Xy7pQ2wZ9kLm" not in err


def test_a_block_of_a_runbook_reads_no_settings(folder, capsys):
    """What it checks is defined by its page; a job that it starts reads its own."""
    (folder / "ckptctl.toml").write_text('root = "run"\nrequire = "model"\n')
    assert called(capsys, "pick", "-q")[0] == 0
    lines: list[str] = []
    assert execute("ckptctl pick --quiet", {}, {}, lines.append).exit_code == 2
    assert "error: missing argument 'ROOT...'" in lines
    ended = execute('eval "$RESUME"', {"RESUME": "echo [${CKPTCTL_CONFIG:-}]"}, {}, lines.append)
    assert ended.printed == ("[]",)


def test_every_key_that_starts_writes_or_reaches_something_is_one_of_a_command():
    every = {key for name in CONFIGURED for key in keys_of(name)}
    assert {key for keys in ONLY_IF_NAMED.values() for key in keys} <= every


def test_the_key_of_an_option_is_its_variable_in_small_letters():
    variables = {option.envvar for name in CONFIGURED for option in command_of(name).params}
    keys = {key for name in CONFIGURED for key in keys_of(name)} - {"root"}
    assert {f"CKPTCTL_{key.upper()}" for key in keys} <= variables

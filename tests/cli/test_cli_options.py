"""How options are read, and which of them a next command repeats."""

import subprocess
import sysconfig
from pathlib import Path

import msgspec
import pytest
from command_line import REPOSITORY, interpreter
from made_results import contents

import ckptctl
from ckptctl.cli.app import run
from ckptctl.cli.options import parse_counts, parse_storage_options, parts
from ckptctl.cli.output import Output
from ckptctl.cli.show import show
from ckptctl.errors import UsageError
from ckptctl.model import STATE_KINDS
from ckptctl.options import Requirements, StorageOptions
from ckptctl.selection.verifying import TensorRow


@pytest.mark.parametrize(
    ("pair", "key", "value"),
    [
        ("anon=true", "anon", True),
        ("max_retries=3", "max_retries", 3),
        ('client_kwargs={"region_name": "eu"}', "client_kwargs", {"region_name": "eu"}),
        ("profile=training", "profile", "training"),
        ('key="0123"', "key", "0123"),
        ("secret=a=b==", "secret", "a=b=="),
        ("token=", "token", ""),
    ],
)
def test_a_storage_option_is_json_where_it_is_json(pair, key, value):
    assert parse_storage_options([pair]) == {key: value}


def test_without_storage_options_there_are_none():
    assert parse_storage_options([]) is None


@pytest.mark.parametrize("pair", ["anon", "=true", ""])
def test_a_storage_option_without_a_key_or_a_value_is_a_mistake(pair):
    with pytest.raises(UsageError, match="KEY=VALUE"):
        parse_storage_options([pair])


def test_kinds_of_train_state_come_with_commas_or_one_by_one():
    requirements = Requirements(require=parts(["rng, optimizer", "model", "rng"]))
    assert requirements.require == ("model", "optimizer", "rng")


def test_an_unknown_kind_of_train_state_is_a_mistake_that_names_the_known_ones():
    with pytest.raises(UsageError, match=", ".join(STATE_KINDS)):
        Requirements(require=parts(["model,brains"]))


def test_steps_come_with_commas_or_one_by_one():
    assert parse_counts(["1400, 1600", "1200", "1400"], "--skip", "step numbers", "1") == (
        1400,
        1600,
        1200,
    )
    assert parse_counts(None, "--skip", "step numbers", "1") == ()


@pytest.mark.parametrize("word", ["-1", "1.5", "latest", "²", "9" * 20])
def test_what_is_no_step_number_is_a_mistake(word):
    with pytest.raises(UsageError, match="step numbers"):
        parse_counts([word], "--skip", "step numbers", "1400,1600")


def shown_next(capsys, monkeypatch, *options, command="ckptctl pick s3://b/run", env=()) -> str:
    """What becomes of a next command when these options were given to `show`."""
    for name in ("PATTERN", "ENDPOINT_URL", "STORAGE_OPTION"):
        monkeypatch.delenv(f"CKPTCTL_{name}", raising=False)
    for name, value in dict(env).items():
        monkeypatch.setenv(name, value)

    def answer(*args, storage: StorageOptions, **keywords):
        raise UsageError("no", next_command=command)

    monkeypatch.setattr(ckptctl, "show", answer)
    assert run(["show", "run@1", "--color", "never", *options]) == 2
    return capsys.readouterr().err.partition("next:")[2].strip()


def test_a_next_command_repeats_how_the_storage_is_reached(capsys, monkeypatch):
    shown = shown_next(
        capsys,
        monkeypatch,
        *("--endpoint-url", "http://ceph:7480", "--storage-option=anon=true"),
        *("--storage-option", "secret=hunter2", "--storage-option", "client_kwargs={}"),
    )
    assert shown == (
        "ckptctl pick s3://b/run --storage-option anon=true "
        '--storage-option secret="$CKPTCTL_STORAGE_SECRET" '
        "--storage-option 'client_kwargs={}' --endpoint-url http://ceph:7480"
    )


def test_what_stands_in_the_environment_is_not_repeated(capsys, monkeypatch):
    env = {"CKPTCTL_ENDPOINT_URL": "http://ceph:7480", "CKPTCTL_STORAGE_OPTION": "anon=true"}
    assert shown_next(capsys, monkeypatch, env=env) == "ckptctl pick s3://b/run"


@pytest.mark.parametrize("command", ["ckptctl explain shard.truncated", "df -h /shared"])
def test_a_command_that_reaches_no_storage_is_left_as_it_is(capsys, monkeypatch, command):
    given = ("--endpoint-url", "http://ceph:7480")
    assert shown_next(capsys, monkeypatch, *given, command=command) == command


def test_quiet_show_spells_out_what_a_terminal_would_obey(capsys, monkeypatch):
    hostile = contents(TensorRow("w\x1b[2J\nnext: rm", "float32", (1,), 1, 4, "model"))
    monkeypatch.setattr(ckptctl, "show", lambda *args, **kwargs: hostile)
    out = Output("show")
    out.configure(quiet=True)
    show("run@1", requirements=Requirements(), storage=StorageOptions(), out=out)
    assert capsys.readouterr().out == "w\\x1b[2J\\nnext: rm\n"


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        (("prune", "ROOT", "--keep", "1"), "APPLY"),
        (("prune", "ROOT", "--keep", "1", "--quiet"), "APPLY"),
        (("prune", "ROOT", "--keep", "1"), "UNSEALED"),
        (("pin", "ROOT@30", "--reason", "release"), "OFF"),
        (("reshard", "ROOT@30", "new", "--world-size", "2"), "APPLY"),
    ],
)
def test_a_switch_that_changes_or_removes_is_not_read_from_the_environment(
    ckptctl, sound_root, command, variable
):
    words = [word.replace("ROOT", str(sound_root)) for word in command]
    with_variable = ckptctl(*words, env={f"CKPTCTL_{variable}": "1"})
    option = "--" + variable.lower()
    expected = f"warning: CKPTCTL_{variable} is set and has no effect: {option} is read from the"
    assert with_variable.stderr.startswith(expected), with_variable.stderr
    assert with_variable.returncode == 0
    steps = sorted(path.name for path in sound_root.iterdir() if path.is_dir())
    assert {"step_10", "step_20", "step_30"} <= set(steps)
    marks = sound_root / "step_30" / ".ckptctl" / "marks"
    assert not any("unpinned" in path.name for path in marks.glob("*.json"))


def test_the_same_switch_on_the_command_line_needs_no_warning(ckptctl, sound_root):
    done = ckptctl("prune", sound_root, "--keep", "3", "--apply", env={"CKPTCTL_APPLY": "1"})
    assert "has no effect" not in done.stderr


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_every_python_reads_the_declarations(version):
    """The annotations of parameters are not the same in all of them."""
    python = interpreter(version)
    # msgspec is compiled for one version of Python; the packages of others lack it.
    packages = f"{sysconfig.get_path('purelib')}:{Path(msgspec.__file__).parent.parent}"
    variables = {"PYTHONPATH": f"{REPOSITORY}:{packages}", "PYTHONDONTWRITEBYTECODE": "1"}
    if subprocess.run(
        [python, "-c", "import msgspec"], env=variables, capture_output=True
    ).returncode:
        pytest.skip(f"no msgspec for Python {version} on this machine")
    done = subprocess.run(
        [python, "-m", "ckptctl", "explain", "20", "--quiet"],
        env=variables,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "incomplete\n"), done.stderr

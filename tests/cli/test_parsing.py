"""What `parsing` makes of a command line is what typer makes of it."""

import random
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import typer
from command_line import REPOSITORY, interpreter
from typer.main import get_command

from ckptctl.cli.binding import Bound, with_common
from ckptctl.cli.commands import COMMANDS, load
from ckptctl.cli.output import Output
from ckptctl.cli.parsing import Parameter, parse
from ckptctl.cli.typer_app import for_typer

TEXTS = ("a", "", "-", "-5", "=", "a=b", "0", "7", "0.5", "1e3", "nan", " 1", "١", "x y", "--json")


def bound(command: str) -> Bound:
    return with_common(load(command).function, Output(command))


def by_typer(command: Bound) -> Callable[[list[str]], object]:
    """A function that returns the values which typer hands to the command, or None."""
    reached = []

    def run(**values: object) -> int:
        reached.append(values)
        return 0

    app = typer.Typer(
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command("it")(for_typer(Bound(command.parameters, run)))
    built = get_command(app)

    def values(argv: list[str]) -> object:
        reached.clear()
        try:
            built.main(args=argv, standalone_mode=False)
        except Exception:  # noqa: BLE001 - typer has several classes for mistakes
            return None
        return reached[0] if reached else None

    return values


def plausible(parameter: Parameter, rng: random.Random) -> str:
    """A text that the parameter may take."""
    if parameter.words:
        return rng.choice(parameter.words)
    return rng.choice(["1", "3"] if parameter.kind in (int, float) else ["a", "b c", "s3://x/y"])


def words_of(parameter: Parameter, rng: random.Random) -> list[str]:
    """The parameter as a caller may write it, mostly as it should be."""
    text = plausible(parameter, rng) if rng.random() < 0.9 else rng.choice(TEXTS)
    names = parameter.declared.names
    if not names:
        return [text]
    name = rng.choice(names)
    if parameter.kind is bool:
        return [name] if rng.random() < 0.95 else [f"{name}=true"]
    return [name, text] if rng.random() < 0.6 else [f"{name}={text}"]


def command_lines(parameters: tuple[Parameter, ...], rng: random.Random) -> list[str]:
    arguments = [each for each in parameters if not each.declared.names]
    options = [each for each in parameters if each.declared.names]
    chosen = [each for each in arguments if rng.random() < 0.95]
    chosen += rng.sample(options, rng.randrange(4))
    needed = [each for each in options if each.default is ... and each not in chosen]
    chosen += [each for each in needed if rng.random() < 0.95]
    rng.shuffle(chosen)
    words = [word for each in chosen for word in words_of(each, rng)]
    if rng.random() < 0.1:
        words.insert(
            rng.randrange(len(words) + 1), rng.choice(["--", "--no-such", "-q", "-h", "-"])
        )
    return words


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_line_means_the_same_to_typer(name):
    rng = random.Random(name)
    command = bound(name)
    typed = by_typer(command)
    n_parsed = 0
    for _ in range(200):
        argv = command_lines(command.parameters, rng)
        found = parse(command.parameters, argv, {})
        expected = typed(argv)
        if found is not None:
            n_parsed += 1
            assert repr(found) == repr(expected), argv  # NaN is not equal to itself
        elif expected is not None:
            # What is left to typer is unusual: it costs time and changes no answer.
            assert {"--", "-"} & set(argv) or any(word in TEXTS for word in argv), argv
    assert n_parsed > 50


@pytest.mark.parametrize("name", ["pick", "verify", "show", "prune"])
def test_variables_mean_the_same_to_typer(name, monkeypatch):
    rng = random.Random(name)
    command = bound(name)
    variables = [each for each in command.parameters if each.declared.envvar]
    typed = by_typer(command)
    n_parsed = 0
    for _ in range(150):
        with monkeypatch.context() as patched:
            environment = {
                each.declared.envvar: (
                    plausible(each, rng)
                    if rng.random() < 0.7 and each.kind is not bool
                    else rng.choice(["", "1", "yes", "Off", "a b", "maybe", "0"])
                )
                for each in rng.sample(variables, 2)
            }
            for variable, value in environment.items():
                patched.setenv(variable, value)
            argv = command_lines(command.parameters, rng)
            found = parse(command.parameters, argv, environment)
            if found is not None:
                n_parsed += 1
                assert repr(found) == repr(typed(argv)), (environment, argv)
    assert n_parsed > 20


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

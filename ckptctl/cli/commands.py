"""The commands: their names, their help, and the command line that typer parses for each.

A command is a function. Its own parameters are declared in its signature; for an options object
that it takes, the command line has the options of the object's fields, and for `AnswerOptions`
every command has them. A command is imported only when it is called, or its help is asked for.

An answer that was given under `--require`, `--level` or `--endpoint-url` leads to a command that
asks under the same. An option is repeated where the next command has the very same one: two
options of one name with different help mean different things.
"""

from __future__ import annotations

import inspect
import math
import os
import shlex
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Annotated, Any, NamedTuple, TypeAlias

import typer
from typer.core import TyperGroup
from typer.main import get_command

import ckptctl
from ckptctl.cli.config import CONFIGURED, IN_NO_FILE, Settings, read_settings
from ckptctl.cli.options import (
    COMMAND_LINE_ONLY,
    HEADINGS,
    AnswerOptions,
    Option,
    option_names,
    options_of,
    typed_option,
    variable_of,
)
from ckptctl.cli.output import Output, check_output_file
from ckptctl.cli.rendering import EMPTY, Line, StyledText, line, padded, wrapped
from ckptctl.errors import OptionError, StorageUnavailable, UsageError
from ckptctl.formatting import command_line, path_word
from ckptctl.options import TIMEOUT_S, Parameter
from ckptctl.redaction import hide_arguments, keep, shell_command
from ckptctl.storage.waiting import Watchdog

VERSION = f"ckptctl {ckptctl.__version__}"

SUMMARIES: Mapping[str, Mapping[str, str]] = {
    "Every day": {
        "scan": "List the steps of a root with their verdicts and the step that pick would choose.",
        "verify": "Inspect one step and report every finding.",
        "pick": "Choose the step to resume from.",
        "loss": "Check whether the loss is continuous across a resume.",
        "runbook": "List, show and run runbooks.",
    },
    "The job": {
        "preflight": "Check that a job can start here and now, and choose its step.",
        "run": "Run a job, and restart it after failures within a budget.",
        "watch": "Verify and seal each step that a job finishes, from a process beside it.",
        "prune": "Remove old steps that are no longer needed.",
        "doctor": "Find mistakes in a job script, an environment or a storage.",
        "drill": "Inject faults into your own job, on a copy of its newest step, and grade how "
        "it survives.",
        "cost": "Estimate what a failure of a run costs, and the best interval between saves.",
    },
    "Evidence": {
        "show": "Show the contents of a step: tensors, sizes, ranks, and what a resume restores.",
        "classify": "Classify a failure by the logs of a job, and print what to do.",
        "explain": "Explain a code or word that ckptctl prints, and what to do about it.",
        "diff": "Compare two steps: entries, shapes, dtypes, values.",
        "history": "Show the attempts of runs, and how much of their time was training that is "
        "kept.",
        "data": "Show which samples of each epoch were trained once, repeated or skipped.",
        "rerun": "Replay a suspicious step on the same and on other nodes, to find faulty "
        "hardware.",
    },
    "Change": {
        "seal": "Verify a step and record its digests.",
        "reject": "Reject a step, so that nothing resumes from it.",
        "accept": "Lift a rejection, so that the step may be used again.",
        "confirm": "Confirm a step: training has shown that it is good.",
        "pin": "Pin a step, so that retention keeps it.",
        "reshard": "Rewrite a step for another world size in constant memory.",
        "convert": "Convert a step to one torch.save file or to safetensors, or either of them to "
        "a step.",
    },
}
"""The first line of each command's help, under the headings of `ckptctl --help`."""

COMMANDS = tuple(name for summaries in SUMMARIES.values() for name in summaries)

# A command is a function of its name in the module of its name, but for these: the `EXAMPLES` and
# `EXIT_CODES` of a module with several commands are by command.
_MODULES = {
    **dict.fromkeys(("seal", "reject", "accept", "confirm", "pin", "prune"), "marks"),
    **dict.fromkeys(("reshard", "convert", "diff"), "resharding"),
    **dict.fromkeys(("history", "cost", "data"), "goodput"),
    **dict.fromkeys(("drill", "rerun"), "drill"),
    **dict.fromkeys(("run", "watch"), "run"),
}


class Command(NamedTuple):
    """A command, and what the end of its help lists."""

    function: Callable[..., int]
    examples: tuple[str, ...]
    exit_codes: tuple[int, ...]


def load(name: str) -> Command:
    """The command called `name`, one of `COMMANDS`."""
    module = import_module(f"ckptctl.cli.{_MODULES.get(name, name)}")
    examples, exit_codes = module.EXAMPLES, module.EXIT_CODES
    if name in _MODULES:
        examples, exit_codes = examples[name], exit_codes[name]
    return Command(getattr(module, name), examples, exit_codes)


# The command line


class _Commands(TyperGroup):
    """The commands, each imported when it is called."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        return command_of(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ARG002
        if args[0] in COMMANDS:
            return args[0], command_of(args[0]), args[1:]
        message = f"no such command {args[0]!r}"
        close = get_close_matches(args[0], COMMANDS)
        if not close:
            raise UsageError(message, next_command="ckptctl --help")
        meant = ", ".join(map(repr, close))  # the most similar one first
        raise UsageError(f"{message}; did you mean {meant}?", instead_of=args[0], instead=close[0])


def _print_help(context: typer.Context, asked: bool, *, whole: bool) -> None:
    if asked:
        out: Output = context.obj
        out.lines(help_lines(context.command, whole=whole))
        raise typer.Exit


def _short_help(context: typer.Context, asked: bool) -> None:
    _print_help(context, asked, whole=False)


def _whole_help(context: typer.Context, asked: bool) -> None:
    _print_help(context, asked, whole=True)


def _declared(name: str, kind: Any, default: Any, info: Any) -> inspect.Parameter:
    """A parameter as typer reads it from a signature."""
    annotation = Annotated[kind, info]
    return inspect.Parameter(name, _KEYWORD, default=default, annotation=annotation)


_KEYWORD = inspect.Parameter.KEYWORD_ONLY

_HELP = tuple(
    _declared(
        name,
        bool,
        False,
        typer.Option(
            option,
            help=text,
            callback=show,
            is_eager=True,
            rich_help_panel=HEADINGS[AnswerOptions],
        ),
    )
    for name, option, text, show in (
        ("short_help", "-h", "Show the options that are used most.", _short_help),
        (
            "whole_help",
            "--help",
            "Show all options but those that only scripts use, which the reference lists.",
            _whole_help,
        ),
    )
)


@cache
def command_group() -> Any:
    """The whole command line, as typer parses it."""

    def root(
        *, context: typer.Context, version: bool, show_completion: str | None, **_: Any
    ) -> None:
        out: Output = context.obj
        if version:
            out.bare([VERSION])
        elif show_completion is not None:
            from ckptctl.cli.completion import script

            out.bare(script(show_completion).splitlines())
        elif context.invoked_subcommand is None:
            raise UsageError("no command is given", next_command="ckptctl --help")
        else:
            return
        raise typer.Exit

    version = typer.Option("--version", help="Print the version and exit.")
    completion = typer.Option(
        "--show-completion",
        metavar="SHELL",
        help="Print the completion script of bash, fish or zsh, and exit.",
    )
    declared = (
        _declared("version", bool, False, version),
        _declared("show_completion", str | None, None, completion),
    )
    app = _app(_Commands)
    app.callback(invoke_without_command=True)(_with_signature(root, declared))
    return get_command(app)


@cache
def command_of(name: str) -> Any:
    """The command line of one command, as typer parses it; its classes are not public."""
    app = _app(None)
    app.command(name)(_for_typer(load(name).function))
    return get_command(app)


def sets_option(word: str, command: str | None) -> bool:
    """Whether a word is an option of a command, or the variable of one; of any, where it is None.

    Cost: the first time an import of the command, or of all.
    """
    if command is None:
        return any(sets_option(word, name) for name in COMMANDS)
    return any(word in (*option.opts, option.envvar) for option in command_of(command).params)


def _app(cls: type[TyperGroup] | None) -> typer.Typer:
    return typer.Typer(
        cls=cls,
        rich_markup_mode=None,
        add_completion=False,
        add_help_option=False,
        pretty_exceptions_enable=False,
    )


# What typer reads of a command


def _for_typer(function: Callable[..., int]) -> Callable[..., int]:
    """The function with options in the place of options objects.

    `--debug` has no effect but in `app`, which prints tracebacks. A storage that hangs in
    the kernel ends the process with 75.
    """
    own, objects = _taken(function)
    options = _options(own, objects)
    paths = [option.name for option, _ in options if option.is_path]

    def run(context: typer.Context, **given: Any) -> int:
        try:
            return answer_of(context, given)
        except OptionError as error:
            command: Any = context.command
            for option in command.params:
                if error.option in option.opts and (name := source_of(context, option)):
                    error.blame(name)  # the variable or the key that has set the option
            raise

    def answer_of(context: typer.Context, given: dict[str, Any]) -> int:
        out: Output = context.obj
        for parameter in _HELP:
            del given[parameter.name]
        for name in paths:  # no later command takes them for options
            value = given[name]
            if isinstance(value, list):
                given[name] = [*map(path_word, value)]
            elif isinstance(value, str):
                given[name] = path_word(value)
        keep(*(str(path) for name in paths if given[name] for path in _several(given[name])))
        timeout_s = given.get("timeout") or TIMEOUT_S
        if not math.isfinite(timeout_s):
            raise OptionError("--timeout", f"is {timeout_s} s", instead="--timeout 120")
        for name in ("metrics", "report", "plot", "hosts_file"):
            if given.get(name) is not None:
                check_output_file(f"--{name.replace('_', '-')}", given[name])
        repeated = _repeated(context, given)
        given.pop("config", None)
        answer = _made(AnswerOptions, options_of(AnswerOptions), given, own)
        out.configure(
            as_json=answer.json,
            quiet=answer.quiet,
            color=answer.color,
            report_file=answer.report,
            complete=lambda command: _with_options(command, repeated, function.__name__),
        )
        out.lines(_ignored_lines(given), to=out.err)
        # Also with --quiet and --json: a file changes the answer that a script reads.
        out.lines(_settings_lines(context, given), to=out.err)
        for name, (kind, offered) in objects.items():
            given[name] = _made(kind, offered, given, own)
        for name, option in own.items():
            if (value := option.value(given.pop(name))) is not None:
                given[name] = value
        if "storage" not in objects:
            return function(**given, out=out)

        def stalled(error: StorageUnavailable) -> None:
            error.next_command = command_line("explain", error.exit_code)
            out.error(error)

        own_output = function.__name__ in _WRITES_ITSELF
        shown = nullcontext() if own_output else out.at_work(function.__name__)
        with Watchdog(_PATIENCE * timeout_s, stalled), shown:
            return function(**given, out=out)

    run.__doc__ = function.__doc__
    is_configured = function.__name__ in CONFIGURED
    declared = [
        _declared(
            option.name,
            option.kind,
            option.default,
            _typer_info(option, heading, hidden=is_configured and option.declared.setting),
        )
        for option, heading in options
    ]
    return _with_signature(run, [*declared, _CONFIG] if is_configured else declared)


def source_of(context: typer.Context, option: Any) -> str | None:
    """What a message calls the variable or the key that has set an option; else None."""
    source = context.get_parameter_source(option.name)
    if source is None or source.name not in ("ENVIRONMENT", "DEFAULT_MAP"):
        return None
    if source.name == "ENVIRONMENT":
        return str(option.envvar)
    settings: Settings = context.meta[_SETTINGS]
    return f"{settings.keys[option.name]} in {settings.path}"


# Settings from a file

_SETTINGS = "ckptctl.settings"


def _read_settings(context: typer.Context, named: str | None) -> str | None:
    """Take the defaults of the other parameters from a file, before they are read."""
    name = context.command.name or ""
    settings = context.meta[_SETTINGS] = read_settings(name, named, keys_of)
    options: Any = {parameter.name: parameter for parameter in context.command.params}
    for parameter, value in settings.values.items():
        names = options[parameter].opts[:1]
        is_option = options[parameter].param_type_name == "option"
        for text in _several(value):
            hide_arguments([*(names if is_option else ()), str(text)], names.__contains__)
    context.default_map = {**settings.values}
    return named


@cache
def keys_of(command: str) -> Mapping[str, Option]:
    """The keys that a file with settings may have for a command."""
    keys = {}
    for option, heading in _options(*_taken(load(command).function)):
        variable = variable_of(option.declared)
        is_option = bool(option_names(option.declared)) and not option.declared.hidden
        if is_option and variable is not None and heading != HEADINGS[AnswerOptions]:
            key = variable.removeprefix("CKPTCTL_").lower()
        elif not option_names(option.declared) and option.name in ("root", "roots"):
            key = "root"
        else:
            continue
        if key not in IN_NO_FILE:
            keys[key] = option
    return keys


def _settings_lines(context: typer.Context, given: Mapping[str, Any]) -> Iterator[Line]:
    """Which settings come from a file, and which of them a runbook leaves out."""
    settings: Settings = context.meta.get(_SETTINGS, Settings())
    used = [
        key
        for name, key in settings.keys.items()
        if (source := context.get_parameter_source(name)) and source.name == "DEFAULT_MAP"
    ]
    if used:
        yield line(f"ckptctl: settings from {settings.path}: {', '.join(used)}", hang=2)
    if context.command.name == "runbook" and given["action"] == "run":
        unused = [key for key in settings.unused if key in keys_of("pick")]
        if unused:
            yield line(
                f"ckptctl: {settings.path} also sets {', '.join(unused)}: this runbook does not "
                "use them",
                hang=2,
            )


_CONFIG = _declared(
    "config",
    str | None,
    None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Read settings from FILE, TOML with a key for each option; by default from the first "
        "ckptctl.toml in the current folder or above it. none: from no file.",
        envvar="CKPTCTL_CONFIG",
        show_envvar=False,
        callback=_read_settings,
        is_eager=True,
        rich_help_panel=HEADINGS[AnswerOptions],
    ),
)


_WRITES_ITSELF = frozenset({"run"})
"""Commands whose child process writes to the terminal."""

_PATIENCE = 4
"""A mounted file system may be silent for so many times `--timeout`: then the process ends."""

_Objects: TypeAlias = "dict[str, tuple[type, tuple[Option, ...]]]"


def _taken(function: Callable[..., int]) -> tuple[dict[str, Option], _Objects]:
    """The parameters of a command, and the options objects that it takes with what it offers."""
    own, objects = {}, {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        kind = getattr(parameter.annotation, "__origin__", parameter.annotation)
        about = next(iter(getattr(parameter.annotation, "__metadata__", ())), None)
        if isinstance(about, Parameter):
            own[name] = typed_option(name, "", kind, parameter.default, about)
        elif isinstance(kind, type) and is_dataclass(kind):
            offered = options_of(kind)
            objects[name] = (kind, tuple(o for o in offered if about is None or o.name in about))
    return own, objects


def _options(own: Mapping[str, Option], objects: _Objects) -> list[tuple[Option, str | None]]:
    options: list[tuple[Option, str | None]] = [(option, None) for option in own.values()]
    for kind, offered in (*objects.values(), (AnswerOptions, options_of(AnswerOptions))):
        # A command may have its own words for one of them.
        options += [(option, HEADINGS.get(kind)) for option in offered if option.name not in own]
    return options


def _made(
    kind: type, offered: Iterable[Option], given: dict[str, Any], own: Collection[str]
) -> Any:
    """The options object of what the command line gave, which is taken out of `given`.

    A parameter of the command's own stays there: its own words mean something else, but
    for `--timeout`, which the storage obeys, too.
    """
    values = {}
    for option in offered:
        value = given[option.name] if option.name in own else given.pop(option.name)
        value = option.value(value)
        if value is not None:
            values[option.field] = value
    return kind(**values)


def _with_signature(
    function: Callable[..., Any], declared: Iterable[inspect.Parameter]
) -> Callable[..., Any]:
    """The function with the signature from which typer reads its parameters, help included."""
    context = inspect.Parameter("context", _KEYWORD, annotation=typer.Context)
    parameters = (context, *declared, *_HELP)
    function.__annotations__ = {each.name: each.annotation for each in parameters}
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


def _typer_info(option: Option, heading: str | None, *, hidden: bool) -> Any:
    declared = option.declared
    names = option_names(declared)
    if not names:
        return typer.Argument(metavar=declared.spec, help=declared.help)
    kinds = [kind for kind in option.kinds if kind in (int, float)]
    return typer.Option(
        *names,
        metavar=declared.spec.partition(" ")[2] or None if len(names) == 1 else None,
        help=declared.help,
        envvar=variable_of(declared),
        show_default=option.shown or True,
        show_envvar=False,  # help states once that every option has a variable
        parser=_number(kinds[0], declared.min) if kinds else None,
        hidden=declared.hidden or hidden,
        rich_help_panel=heading,
    )


def _number(kind: type[int] | type[float], least: float | None) -> Callable[[Any], float]:
    """What makes a number of a text; typer's message has the names of types in it."""

    def number(text: Any) -> float:
        try:
            value = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise typer.BadParameter(f"{text!r} is not {what}") from None
        if least is not None and value < least:
            raise typer.BadParameter(f"{text} is less than {least:g}")
        return value

    return number


def _several(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _ignored_lines(given: Mapping[str, Any]) -> Iterator[Line]:
    """Name each variable that is set for an option which is read from the command line only."""
    for parameter, value in given.items():
        name = "--" + parameter.replace("_", "-")
        variable = "CKPTCTL_" + parameter.upper()
        if name in COMMAND_LINE_ONLY and not value and os.environ.get(variable):
            yield line(
                f"warning: {variable} is set and has no effect: {name} is read from the "
                "command line only"
            )


# The caller's options in the next command

_OF_ONE_ACT = frozenset(
    {
        *("--reason", "--evidence", "--by"),
        *("--new", "--continue", "--dry-run", "--set"),
        *("--subset", "--deadline"),
    }
)
"""Options of one mark, one run of a runbook, one partial inspection: not repeated in the next."""

_EXCLUDED = {"--format": "--pattern"}
"""Options that are not repeated where the next command has another one."""

_WRITES = frozenset({"--metrics"})
"""Options with a file, in which another command would write something else."""


class _ParsedOption(NamedTuple):
    name: str
    help: str
    words: tuple[str, ...]


def _repeated(context: typer.Context, given: Mapping[str, Any]) -> tuple[_ParsedOption, ...]:
    """The options on the command line that say what is asked, not how it is shown.

    Those in the environment are not repeated: the next command reads them there. Nor are
    switches that change something, which have no variable: consent is given each time.
    """
    found = []
    command: Any = context.command
    for option in command.params:
        source = context.get_parameter_source(option.name)
        if source is None or source.name != "COMMANDLINE" or option.envvar is None:
            continue
        name = option.opts[0]
        is_shown = option.rich_help_panel == HEADINGS[AnswerOptions] and name != "--config"
        if name not in _OF_ONE_ACT and not is_shown:
            found.append(
                _ParsedOption(name, option.help, tuple(_written(name, given[option.name])))
            )
    return tuple(found)


def _written(name: str, value: object) -> Iterator[str]:
    if isinstance(value, bool):
        yield name
        return
    for item in _several(value):
        yield name
        if isinstance(item, Enum):
            yield str(item.value)
        else:
            yield f"{item:.15g}" if isinstance(item, float) else str(item)


def _with_options(command: str, repeated: Sequence[_ParsedOption], caller: str) -> str:
    """A next command with the caller's options that it takes and does not have yet."""
    own, dashes, behind = command.partition(" -- ")
    try:
        words = shlex.split(own)
    except ValueError:
        return command
    if not repeated or words[:1] != ["ckptctl"] or len(words) < 2 or words[-1] == "--help":
        return command
    name = words[1]
    if name not in COMMANDS or (name == "runbook" and words[2:3] != ["run"]):
        return command  # it runs nothing
    there = {word.partition("=")[0] for word in words}
    takes = {(option.opts[0], getattr(option, "help", "")) for option in command_of(name).params}
    for given in repeated:
        is_same = name == caller or (given.name not in _WRITES and given[:2] in takes)
        if is_same and there.isdisjoint((given.name, _EXCLUDED.get(given.name))):
            own += f" {shell_command(given.words)}"
    return own + dashes + behind


# Help

_LEFT = 26
"""The width of the column with the names of options."""
_WIDEST = 100


def help_lines(command: Any, *, whole: bool) -> Iterator[Line]:
    """The help of a command, or of the group of all commands."""
    of_all = isinstance(command, TyperGroup)
    lines = _group_help() if of_all else _command_help(command, whole=whole)
    yield from _filled(lines)


def _group_help() -> Iterator[Line]:
    yield line("Usage: ckptctl COMMAND [OPTIONS] [ARGUMENTS]", solid=True)
    yield EMPTY
    yield line("Which checkpoint do we resume from, and did the resume work?")
    for heading, summaries in SUMMARIES.items():
        yield EMPTY
        yield line(StyledText(f"{heading}:", "strong"))
        yield from (_entry(name, text, 11) for name, text in summaries.items())
    yield from _sections(command_group().params)
    yield EMPTY
    yield line("Options of several commands: ckptctl help options")
    yield line("Every finding code, verdict and exit code is explained by: ckptctl explain")


def shared_help_lines() -> Iterator[Line]:
    """The options of the options objects, which several commands take."""
    yield line("Each command has some of these options; its own --help names them.")
    for kind, heading in HEADINGS.items():
        yield EMPTY
        yield line(StyledText(f"{heading}:", "strong"))
        for declared in (option.declared for option in options_of(kind)):
            yield from _filled([_entry(declared.spec.replace(" -", ", -"), declared.help, _LEFT)])


def _filled(lines: Iterable[Line]) -> Iterator[Line]:
    """The lines in the width of the terminal, of COLUMNS, or of 80 columns."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    for text in lines:
        yield from wrapped(text, width)


def _command_help(command: Any, *, whole: bool) -> Iterator[Line]:
    loaded = load(command.name)
    arguments = [argument for argument in command.params if argument.param_type_name == "argument"]
    words = [
        argument.metavar if argument.required else f"[{argument.metavar}]" for argument in arguments
    ]
    yield line(" ".join(["Usage: ckptctl", command.name, "[OPTIONS]", *words]), hang=7)
    for paragraph in command.help.split("\n\n"):
        yield EMPTY
        yield line(" ".join(paragraph.split()))
    rare = {
        option.name: heading
        for option, heading in _options(*_taken(loaded.function))
        if not option.declared.common
    } | {"config": None}
    shared = [
        parameter.opts[0]
        for parameter in command.params
        if rare.get(parameter.name) and not parameter.hidden
    ]
    yield from _sections(
        parameter
        for parameter in command.params
        if parameter.name not in rare or (whole and rare[parameter.name] is None)
    )
    yield EMPTY
    if whole:
        yield line(f"Also (ckptctl help options): {', '.join(shared)}", hang=2)
        settings = [key for key, about in keys_of(command.name).items() if about.declared.setting]
        if settings and command.name in CONFIGURED:
            yield line(f"Settings, in ckptctl.toml: {', '.join(settings)}", hang=2)
    else:
        yield line(f"All options: ckptctl {command.name} --help")
    yield line(
        "Variables set options too (--max-fallback: CKPTCTL_MAX_FALLBACK), but no switches that "
        "change or remove something."
    )
    yield EMPTY
    yield line(StyledText("Examples:", "strong"))
    yield from (line("  ", StyledText(example, "code"), solid=True) for example in loaded.examples)
    yield EMPTY
    yield line(StyledText("Exit codes:", "strong"))
    codes = exit_codes()
    yield from (line(f"  {code:<3} {codes[code].title}", hang=6) for code in loaded.exit_codes)


class ExitCodeText(NamedTuple):
    """`title` is an exit code in a few words; `advice` is what a caller does next.

    `retry` begins with `yes` if the same command may succeed later, else with `no` or
    `not needed`; what helps may follow.
    """

    title: str
    advice: str
    retry: str = "no"


@cache
def explanations() -> Mapping[str, Any]:
    """What exit codes and verdicts mean, and what to do: the tables of `explanations.toml`.

    The help texts, `ckptctl explain NUMBER` and the documents are generated from them or compared
    with them. Codes are added and never change. Cost: a read, which only help needs.
    """
    import tomllib
    from importlib import resources

    file = resources.files("ckptctl.cli") / "explanations.toml"
    return tomllib.loads(file.read_text("utf-8"))


@cache
def exit_codes() -> Mapping[int, ExitCodeText]:
    """Every exit code by its number, with its text."""
    codes = explanations()["exit-codes"]
    return {int(number): ExitCodeText(**texts) for number, texts in codes.items()}


def _sections(parameters: Iterable[Any]) -> Iterator[Line]:
    headings: dict[str, list[Any]] = {"Arguments": [], "Options": []}
    for parameter in parameters:
        if parameter.hidden:
            continue
        heading = "Arguments" if parameter.param_type_name == "argument" else "Options"
        headings.setdefault(parameter.rich_help_panel or heading, []).append(parameter)
    for heading, listed in headings.items():
        if listed:
            yield EMPTY
            yield line(StyledText(f"{heading}:", "strong"))
            yield from (_entry(*record_of(parameter), _LEFT) for parameter in listed)


def record_of(parameter: Any) -> tuple[str, str]:
    """A parameter of a command as help lists it, and what it means."""
    if parameter.param_type_name == "argument":
        return parameter.metavar, parameter.help
    default = default_of(parameter)
    note = f" [default: {default}]" if default else " [required]" if parameter.required else ""
    return f"{', '.join(parameter.opts)} {value_of(parameter)}".rstrip(), parameter.help + note


def value_of(option: Any) -> str:
    """What help calls the value of an option: its words, where they are listed."""
    if option.is_flag:
        return ""
    return option.metavar or "|".join(option.type.choices)


def default_of(parameter: Any) -> str:
    """The default of an option as a caller writes it; empty where there is none."""
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    default = getattr(parameter.default, "value", parameter.default)
    if default in (None, False, ()) or parameter.required:
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default)


def _entry(left: str, text: str, width: int) -> Line:
    """A name and what it means, in two columns."""
    cell = padded(f"  {left}", width + 2)
    return line(StyledText(cell.text, "name"), "  ", text, hang=width + 4)

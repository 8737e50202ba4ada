"""Build the command line for typer: help, completion and messages about mistakes.

`parsing` parses what is left, without importing this module.
"""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ckptctl.cli.app import VERSION
from ckptctl.cli.binding import Bound, with_common
from ckptctl.cli.commands import SUMMARIES, load
from ckptctl.cli.completion import script
from ckptctl.cli.exit_codes import EXIT_CODES
from ckptctl.cli.options import COMMON_GROUP
from ckptctl.cli.output import Output
from ckptctl.cli.parsing import REQUIRED, Parameter
from ckptctl.errors import UsageError


def build_app(commands: Sequence[str], out: Output, *, whole: bool = True) -> typer.Typer:
    """The command line with the commands named, or with no more than their names and summaries."""
    app = typer.Typer(
        help="Which checkpoint do we resume from, and did the resume work?",
        epilog="Every finding code, verdict and exit code is explained by: ckptctl explain",
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings=_help_settings(),
    )

    @app.callback(invoke_without_command=True)
    def root(
        context: typer.Context,
        version: Annotated[
            bool, typer.Option("--version", help="Print the version and exit.")
        ] = False,
        show_completion: Annotated[
            str | None,
            typer.Option(
                "--show-completion",
                metavar="SHELL",
                help="Print the completion script of bash, fish or zsh, and exit.",
            ),
        ] = None,
    ) -> None:
        if version:
            out.bare([VERSION])
            raise typer.Exit
        if show_completion is not None:
            out.bare(script(show_completion).splitlines())
            raise typer.Exit
        if context.invoked_subcommand is None:
            raise UsageError("no command is given", next_command="ckptctl --help")

    for name in commands:
        if not whole:
            app.command(name, short_help=SUMMARIES[name])(lambda: None)
            continue
        command = load(name)
        app.command(
            name,
            cls=_Command,
            help=inspect.cleandoc(command.function.__doc__ or "").replace("-", _HYPHEN),
            epilog=_end(command.examples, command.exit_codes),
            short_help=SUMMARIES[name],
            context_settings=_help_settings(),
        )(for_typer(with_common(command.function, out)))
    return app


def for_typer(command: Bound) -> Callable[..., int]:
    """The call of a command with the signature from which typer reads its options."""

    def run(**values: Any) -> int:
        return command.run(**values)

    parameters = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each.default is REQUIRED else each.default,
            annotation=Annotated[each.annotation.__origin__, _declaration(each)],
        )
        for each in command.parameters
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _declaration(parameter: Parameter) -> Any:
    declared = parameter.declared
    if declared is None:
        raise TypeError(f"the command line does not declare {parameter.name}")
    if not declared.names:
        return typer.Argument(metavar=declared.metavar, help=declared.help)
    return typer.Option(
        *declared.names,
        metavar=declared.metavar,
        min=declared.min,
        help=declared.help,
        envvar=declared.envvar,
        rich_help_panel=parameter.group or None,
        show_envvar=False,  # help states once that every option has a variable
    )


class _Command(TyperCommand):
    """A command whose help lists its options under headings."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(_HYPHEN, "-")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is None:
                continue
            heading = "Arguments" if each.param_type_name == "argument" else "Options"
            heading = getattr(each, "rich_help_panel", None) or heading
            heading = COMMON_GROUP if each.name == "help" else heading
            groups.setdefault(heading, []).append((record[0], _plain(record[1])))
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    is_narrow = formatter.width < _LEAST_OF_TYPER
                    formatter.write_dl(records, col_max=_NARROW if is_narrow else _WIDE)


_LEAST = re.compile(r"\bx>=([0-9.]+)(?=[\];])")
_HYPHEN = "\N{NON-BREAKING HYPHEN}"
"""Stands for each hyphen of help while it is filled: `--log-dir` stays on one line."""
_WHOLE = re.compile(r"(?<=default: )([0-9]+)\.0(?=[\];])")


def _plain(text: str) -> str:
    """The help of an option with its bounds in words: `[default: 600; at least 0]`."""
    return _WHOLE.sub(r"\1", _LEAST.sub(r"at least \1", text)).replace("-", _HYPHEN)


_LEAST_OF_TYPER = 52
"""The narrowest terminal that typer fills help for by itself."""
_WIDE, _NARROW = 30, 12
"""The width of the column with the names of options; a longer name gets a line of its own."""


def _columns() -> int:
    return min(shutil.get_terminal_size().columns, 80)


def _help_settings() -> dict[str, Any]:
    names = {"help_option_names": ["-h", "--help"]}
    return names if _columns() >= _LEAST_OF_TYPER else names | {"terminal_width": _columns()}


def _end(examples: Sequence[str], exit_codes: Sequence[int]) -> str:
    """The end of the help of a command."""
    # typer indents by two columns, leaves two free, and does not fill a block that begins
    # with a backspace.
    width = _columns() - 4
    variables = (
        "Variables set options too (--max-fallback: CKPTCTL_MAX_FALLBACK), but no "
        "switches that change or remove something."
    )
    shown = [f"  {line}" for example in examples for line in _folded(example, width - 2)]
    codes = [line for code in exit_codes for line in _exit_code(code, width)]
    blocks = (["Examples:", *shown], ["Exit codes:", *codes])
    filled = variables.replace("-", _HYPHEN)
    return "\n\n".join([filled, *("\n".join(["\b", *block]) for block in blocks)])


def _exit_code(code: int, width: int) -> list[str]:
    return textwrap.wrap(
        EXIT_CODES[code].title, width, initial_indent=f"  {code:<3} ", subsequent_indent=" " * 6
    )


_WORD = r"""(?:"[^"]*"|'[^']*'|[^\s"'])+"""
_PIECE = re.compile(rf"-\S+ (?!-){_WORD}|{_WORD}")
"""A word, or an option with its value, which stay on one line."""
_CONTINUED = " \\"


def _folded(example: str, width: int) -> Iterator[str]:
    """A command in lines of at most `width` columns, continued as in a shell."""
    line, indent = "", ""
    for piece in _PIECE.findall(example):
        if line and len(indent) + len(line) + 1 + len(piece) > width - len(_CONTINUED):
            yield f"{indent}{line}{_CONTINUED}"
            line, indent = "", "  "
        line = f"{line} {piece}" if line else piece
    yield indent + line

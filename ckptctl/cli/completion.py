"""Complete a command line for bash, zsh and fish.

A script in `shells/` calls ckptctl with the words up to the cursor, and gets a candidate a line;
typer's own scripts do not see `ROOT@1200` in bash, which breaks words at `@`. No storage is asked
but local folders: a key press waits for it. Where there is no candidate, the shell completes files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import resources
from itertools import pairwise
from typing import Any

from ckptctl.cli.commands import COMMANDS, SUMMARIES, command_group, command_of
from ckptctl.errors import CkptctlError, UsageError
from ckptctl.options import StorageOptions

SHELLS = ("bash", "fish", "zsh")


def script(shell: str) -> str:
    """The script that makes a shell complete ckptctl."""
    if shell not in SHELLS:
        raise UsageError(
            f"there is no completion for {shell!r}; the shells are {', '.join(SHELLS)}",
            instead="--show-completion bash",
        )
    file = resources.files("ckptctl.cli") / "shells" / f"ckptctl.{shell}"
    return file.read_text("utf-8")


def candidates(words: Sequence[str]) -> list[str]:
    """What the last word may become, each with a tab and a description where there is one."""
    *before, word = words or ("",)
    name = next((typed for typed in before if typed in COMMANDS), None)
    if name is not None:
        # Behind `--` is the command line of another program.
        offered = [] if "--" in before else [*_of_command(name, before, word)]
    else:
        options = command_group().params
        offered = [
            *(command for summaries in SUMMARIES.values() for command in summaries.items()),
            *((name, option.help) for option in options for name in option.opts),
        ]
    return [f"{text}\t{help_text}" for text, help_text in offered if text.startswith(word)]


def _of_command(name: str, before: Sequence[str], word: str) -> Iterator[tuple[str, str]]:
    parameters = command_of(name).params
    options = {
        option: parameter
        for parameter in parameters
        for option in parameter.opts
        if option[0] == "-"
    }
    takes_value = {option for option, parameter in options.items() if not parameter.is_flag}
    if before[-1] in takes_value:
        yield from _values(name, options[before[-1]], word)
    elif word.startswith("-"):
        for option, parameter in options.items():
            if not parameter.hidden:
                yield option, parameter.help.partition(". ")[0]
    else:
        arguments = [
            parameter for parameter in parameters if parameter.param_type_name == "argument"
        ]
        behind = before[before.index(name) :]
        place = sum(
            not typed.startswith("-") and previous not in takes_value
            for previous, typed in pairwise(behind)
        )
        if arguments:
            yield from _values(name, arguments[min(place, len(arguments) - 1)], word)


def _values(name: str, parameter: Any, word: str) -> Iterator[tuple[str, str]]:
    """The values of an argument or an option, as far as they can be listed."""
    if parameter.metavar == "CODE" and name == "explain":
        from ckptctl.cli.explain import all_pages

        yield from ((page.name, page.title) for page in all_pages())
    elif parameter.metavar == "NAME" and name == "runbook":
        from ckptctl.runbook.document import find_runbook, runbook_names

        yield from ((book, find_runbook(book).title) for book in runbook_names())
    elif "@" in word:
        yield from _steps(word.rpartition("@")[0])
    else:
        yield from ((choice, "") for choice in getattr(parameter.type, "choices", ()))


def _steps(root: str) -> Iterator[tuple[str, str]]:
    """The steps of a local root as `ROOT@1200`, newest first."""
    from ckptctl.selection.roots import list_root
    from ckptctl.storage.opening import is_local, open_store

    yield f"{root}@auto", "what pick chooses"
    yield f"{root}@latest", "the newest by number"
    if not is_local(root):
        return
    try:
        with open_store(root, StorageOptions()) as store:
            for step in list_root(store).steps:
                if step.number is not None:
                    yield f"{root}@{step.number}", step.name
    except CkptctlError:
        return

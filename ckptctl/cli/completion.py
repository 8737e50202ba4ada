"""Complete a command line for bash, zsh and fish.

A script in `shells/` calls ckptctl with the words up to the cursor, and gets a candidate a line.
Nothing is imported but what the answer needs, and no storage is asked but local folders: a
key press waits for it. Where there is no candidate, the shell completes files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import resources

from ckptctl.cli.binding import with_common
from ckptctl.cli.commands import COMMANDS, SUMMARIES, load
from ckptctl.cli.output import Output
from ckptctl.cli.parsing import Parameter
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


def candidates(words: Sequence[str], out: Output) -> list[str]:
    """What the last word may become, each with a tab and a description where there is one."""
    *before, word = words or ("",)
    command = next((each for each in before if each in COMMANDS), None)
    if command is None:
        offered: Iterable[tuple[str, str]] = (
            *SUMMARIES.items(),
            ("--help", "Show the commands."),
            ("--version", "Print the version."),
        )
    elif "--" in before:
        offered = ()
    else:
        parameters = with_common(load(command).function, out).parameters
        offered = _of_command(command, parameters, before[before.index(command) + 1 :], word)
    return [
        f"{text}\t{help_text.partition('. ')[0]}"
        for text, help_text in offered
        if text.startswith(word)
    ]


def _of_command(
    command: str, parameters: Sequence[Parameter], before: Sequence[str], word: str
) -> Iterator[tuple[str, str]]:
    options = {name: each for each in parameters if each.declared for name in each.declared.names}
    last = options.get(before[-1]) if before else None
    if last is not None and last.kind is not bool:
        yield from _values(command, last, word)
        return
    if word.startswith("-"):
        for name, each in options.items():
            yield name, each.declared.help if each.declared else ""
        return
    arguments = [each for each in parameters if each.declared and not each.declared.names]
    place = sum(
        not each.startswith("-") and not _takes_value(options.get(previous))
        for previous, each in zip(("", *before), before, strict=False)
    )
    if arguments:
        yield from _values(command, arguments[min(place, len(arguments) - 1)], word)


def _takes_value(option: Parameter | None) -> bool:
    return option is not None and option.kind is not bool


def _values(command: str, parameter: Parameter, word: str) -> Iterator[tuple[str, str]]:
    """The values of an argument or an option, as far as they can be listed."""
    if parameter.words:
        yield from ((word, "") for word in parameter.words)
        return
    metavar = parameter.declared.metavar if parameter.declared else None
    if metavar == "CODE" and command == "explain":
        from ckptctl.cli.explain import all_pages

        yield from ((each.name, each.title) for each in all_pages())
    elif metavar == "NAME" and command == "runbook":
        from ckptctl.runbook.reading import find_runbook, runbook_names

        yield from ((name, find_runbook(name).title) for name in runbook_names())
    elif "@" in word:
        yield from _steps(word.rpartition("@")[0])


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

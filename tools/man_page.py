"""Write the manual page from the command line.

    python tools/man_page.py

`docs/man/ckptctl.1` is installed with the wheel: `man ckptctl`. A test compares it. The macros
are those of man(7).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptctl.cli.commands import (
    COMMANDS,
    VERSION,
    command_of,
    default_of,
    exit_codes,
    load,
    value_of,
)
from ckptctl.cli.options import HEADINGS, AnswerOptions

_COMMON = HEADINGS[AnswerOptions]
PAGE = Path(__file__).resolve().parent.parent / "docs" / "man" / "ckptctl.1"


def main() -> int:
    """Write the page anew."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(manual_page())
    return 0


def manual_page() -> str:
    """The whole page."""
    return "".join(f"{line}\n" for line in _lines())


def _lines() -> Iterator[str]:
    yield f'.TH CKPTCTL 1 "" "{VERSION}" "User Commands"'
    yield ".nh"  # an option that is broken at a hyphen cannot be copied
    yield ".ad l"
    yield ".SH NAME"
    yield r"ckptctl \- choose the checkpoint to resume from, and check that the resume worked"
    yield ".SH SYNOPSIS"
    yield r".B ckptctl"
    yield r"\fICOMMAND\fR [\fIOPTIONS\fR] [\fIARGUMENTS\fR]"
    yield ".SH DESCRIPTION"
    yield from _prose(
        "Inspects sharded torch checkpoints on file systems and in object stores, chooses the "
        "step to resume from, and checks the resume by its losses. It runs no code from a "
        "checkpoint and never calls a storage error an empty root."
    )
    yield ".SH COMMANDS"
    for name in COMMANDS:
        yield from _command(name)
    yield ".SH COMMON OPTIONS"
    for option in command_of("pick").params:
        if getattr(option, "rich_help_panel", None) == _COMMON:
            yield from _option(option)
    yield ".SH EXIT STATUS"
    for number, code in exit_codes().items():
        yield ".TP"
        yield rf"\fB{number}\fR"
        yield _text(f"{code.title}. {code.advice}")
    yield ".SH ENVIRONMENT"
    yield from _prose(
        "Every option has a variable, such as CKPTCTL_MAX_FALLBACK for --max-fallback, except "
        "those that change or remove something. The command line takes precedence."
    )
    yield ".SH SEE ALSO"
    yield from _prose(
        "ckptctl explain CODE prints the page of a finding, a verdict or an exit code; "
        "ckptctl COMMAND --help the help of a command."
    )


def _command(name: str) -> Iterator[str]:
    command = command_of(name)
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    usage = " ".join(
        text if each.required else f"[{text}]"
        for each in arguments
        if (text := rf"\fI{_text(each.metavar)}\fR")
    )
    yield f'.SS "{name}"'
    yield rf"\fBckptctl {name}\fR [\fIOPTIONS\fR] {usage}".rstrip()
    for paragraph in command.help.split("\n\n"):
        yield ".PP"
        yield _text(paragraph)
    for each in arguments:
        yield ".TP"
        yield rf"\fI{_text(each.metavar)}\fR"
        yield _text(each.help)
    for each in command.params:
        if each not in arguments and not each.hidden and each.rich_help_panel != _COMMON:
            yield from _option(each)
    yield ".PP"
    yield "Examples:"
    for example in load(name).examples:
        yield ".PP"
        yield rf"    {_text(example)}"


def _option(option: Any) -> Iterator[str]:
    value = value_of(option)
    names = ", ".join(rf"\fB{_text(name)}\fR" for name in option.opts)
    yield ".TP"
    yield names + (rf" \fI{_text(value)}\fR" if value else "")
    default = default_of(option)
    yield _text(f"{option.help} Default: {default}." if default else option.help)


def _prose(text: str) -> Iterator[str]:
    yield ".PP"
    yield _text(text)


def _text(text: str) -> str:
    """Text as troff takes it: hyphens are minus signs, so that they can be copied."""
    plain = re.sub(r"\s+", " ", text).replace("\\", r"\e").replace("-", r"\-")
    plain = re.sub("`([^`]+)`", r"\\fB\1\\fR", plain.replace("…", "...").replace("×", "x"))
    return rf"\&{plain}" if plain[:1] in (".", "'") else plain


if __name__ == "__main__":
    sys.exit(main())

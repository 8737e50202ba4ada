"""Parse a SLURM batch script: directives, commands, the training command.

No shell is run. Continued lines are joined; comments and the bodies of here-documents are
left out; the text inside `bash -c "…"` is part of the command. `slurm_checks` finds the
mistakes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_LAUNCH = re.compile(
    r"(?:^|[\s;&|(]|\bexec\s+)(?P<launcher>srun|torchrun|mpirun|mpiexec|ft_launcher|deepspeed|"
    r"accelerate\s+launch|python3?(?:\.\d+)?\s+(?:-\w\s+)*(?:-m\s+torch\.distributed\.\w+|\S+\.py))(?![\w-])"
)
_SUBSTITUTED = re.compile(r"\$\([^()]*\)")
_NOT_TRAINING = re.compile(
    r"\bckptctl\s+(?!run\b)|nvidia-smi|hostname|--version|\bpip\b|preflight|\becho\b|\bsbcast\b|health|"
    r"^\s*\w+=\$\("
)


@dataclass(frozen=True, slots=True)
class Command:
    """One logical line: `line` is where it begins, counted from 1."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Training:
    """The line that starts the training, and how the shell runs it."""

    line: int
    text: str
    launcher: str
    is_exec: bool
    in_background: bool
    in_pipeline: bool


@dataclass(frozen=True, slots=True)
class Script:
    """The parts of a batch script. `options` are the `#SBATCH` lines that SLURM reads."""

    lines: tuple[str, ...]
    options: tuple[Command, ...]
    late_options: tuple[Command, ...]
    commands: tuple[Command, ...]
    trainings: tuple[Training, ...]

    def option(self, *names: str) -> tuple[int, str] | None:
        """Line and value of the last `#SBATCH` option of these names; an empty value for none."""
        found = None
        for each in self.options:
            for name in names:
                joined = "" if name.startswith("--") else r"?"
                match = re.search(
                    rf"(?:^|\s){re.escape(name)}(?:[=\s]{joined}([^\s#]+))?(?=\s|$)", each.text
                )
                if match:
                    found = (each.line, match[1] or "")
        return found

    def search(self, pattern: str) -> tuple[int, re.Match[str]] | None:
        """The first command that matches the pattern, with its line."""
        for each in self.commands:
            match = re.search(pattern, each.text)
            if match:
                return each.line, match
        return None


def read_script(text: str) -> Script:
    """Parse the text of a batch script."""
    lines = tuple(line.removesuffix("\r") for line in text.split("\n"))
    commands = tuple(_commands(lines))
    first = commands[0].line if commands else len(lines) + 1
    options = [
        Command(number, line.removeprefix("#SBATCH").strip())
        for number, line in enumerate(lines, 1)
        if line.startswith("#SBATCH")
    ]
    return Script(
        tuple(text.split("\n")),
        tuple(each for each in options if each.line < first),
        tuple(each for each in options if each.line >= first),
        commands,
        tuple(_trainings(commands)),
    )


def _commands(lines: tuple[str, ...]) -> Iterator[Command]:
    begun, text, until = 0, "", ""
    for number, line in enumerate(lines, 1):
        if until:
            until = "" if line.strip() == until else until
            continue
        stripped = line.strip()
        if not text and (not stripped or stripped.startswith("#")):
            continue
        begun = begun or number
        if line.rstrip().endswith("\\"):
            text += line.rstrip()[:-1] + " "
            continue
        text += _without_comment(line)
        heredoc = _HEREDOC.search(text)
        until = heredoc[2] if heredoc else ""
        if text.strip():
            yield Command(begun, text.strip())
        begun, text = 0, ""
    if text.strip():
        yield Command(begun, text.strip())


def _without_comment(line: str) -> str:
    quote = ""
    for at, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at].rstrip()
    return line


def _trainings(commands: tuple[Command, ...]) -> Iterator[Training]:
    for each in commands:
        # What a substitution runs is not the training: --resume-from "$(ckptctl pick ROOT)".
        plain = _SUBSTITUTED.sub("$()", each.text)
        match = _LAUNCH.search(plain)
        if match is None or _NOT_TRAINING.search(plain):
            continue
        bare = re.sub(r"'[^']*'|\"[^\"]*\"", "''", each.text)
        yield Training(
            each.line,
            each.text,
            match["launcher"].split()[0],
            is_exec=bool(re.search(r"(?:^|[;&|]\s*)exec\s", bare)),
            in_background=bool(re.search(r"(?<!&)&\s*(?:$|[;#]|\w+=)", bare)),
            in_pipeline=bool(re.search(r"(?<!\|)\|(?!\|)&?", bare)),
        )

"""Find the known mistakes in a SLURM batch script.

The first part parses the script: directives, commands, the training command. No shell is run.
Continued lines are joined; comments and the bodies of here-documents are left out; the text inside
`bash -c "…"` is part of the command. The second part is what the trap of a script does with the
signal before the time limit, the third the checks. Each covers a way in which jobs were lost that a
resume should have saved: a signal that did not reach Python, an exit code that a pipe hid, a step
that was chosen by its mtime. Only what the text of the script proves is a fault.

bash runs a trap when the foreground command has ended, or at once in `wait`, which then ends with a
code above 128: the script goes on behind it while the training still saves.

Source: bash 5.2, "Signals"; scancel of SLURM 22.05, on which `tests/jobs/test_signals_on_slurm.py`
runs each way to pass a signal on: `--batch` signals the batch shell alone, `--full` the shell and
srun, and without them the tasks of all steps get the signal. Steps are numbered from 0 in the order
of their start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from signal import Signals
from typing import NamedTuple

from ckptctl.diagnostics.advice import Advice, advice_of
from ckptctl.findings import Severity
from ckptctl.logs.log_lines import Deadline
from ckptctl.outside_numbers import clamped, whole

_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_SUBSTITUTED = re.compile(r"\$\([^()]*\)")
_STEPS = ("srun", "mpirun", "mpiexec")
_LAUNCHERS = (
    *("torchrun", "ft_launcher", "deepspeed", "axolotl", "composer", "llamafactory-cli"),
    *("litgpt", "lightning", "fairseq-train", "fairseq-hydra-train"),
)
_PAIRS = (("accelerate", "launch"), ("tune", "run"))
# What starts another program that its own words name.
_WRAPPERS = (
    *("uv", "poetry", "pixi", "pdm", "hatch", "conda", "mamba", "micromamba", "apptainer"),
    *("singularity", "docker", "podman", "enroot", "timeout", "nice", "ionice", "numactl"),
    *("taskset", "stdbuf", "env", "nsys", "ncu", "sudo"),
)
_PYTHON = re.compile(r"python3?(?:\.\d+)?")
_SHELL = ("bash", "sh", "zsh")
_PREPARES = re.compile(r"preflight|health|setup|download|prepare|preprocess|convert|check_", re.I)
_TOOLS = (
    "pip",
    "venv",
    "ensurepip",
    "json.tool",
    "http.server",
    "compileall",
    "zipfile",
    "tarfile",
)
_NAMED_TRAINING = re.compile(r"train|run|launch|finetun|sft|start|main", re.I)
_IN_VARIABLE = re.compile(r"[\"']?\$\{?\w*(?:CMD|COMMAND|LAUNCH|PYTHON|TRAIN|SCRIPT|RUN)", re.I)
_PREFIX = re.compile(
    r"(?:(?:if|then|else|elif|do|while|until|time|exec|nohup|command|!|\{)(?=\s)|\(|"
    r"\w+\+?=(?:\"[^\"]*\"|'[^']*'|[^\s\"'])*(?=\s|$))\s*"
)
_FUNCTION = re.compile(r"(?:function\s+)?([\w-]+)\s*\(\s*\)\s*\{?|function\s+([\w-]+)\s*\{?")


@dataclass(frozen=True, slots=True)
class LogicalLine:
    """One logical line: `line` is where it begins, counted from 1."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Simple:
    """One simple command of a line, and the operator behind it: `;`, `&`, `&&`, `||`, `|` or none.

    `program` is the name of the program without its folder, and `words` are its words, without
    assignments and words of the shell such as `if` and `exec`.
    """

    line: int
    text: str
    operator: str
    prefix: str
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """The name of the program, without its folder; empty for assignments alone."""
        return _base(self.words[0]) if self.words else ""


@dataclass(frozen=True, slots=True)
class Training:
    """The command that starts the training, and how the shell runs it.

    `at` is its place in `Script.main`.
    """

    line: int
    text: str
    launcher: str
    is_exec: bool
    in_background: bool
    in_pipeline: bool
    at: int = -1


@dataclass(frozen=True, slots=True)
class Script:
    """The parts of a batch script. `options` are the `#SBATCH` lines that SLURM reads."""

    lines: tuple[str, ...]
    options: tuple[LogicalLine, ...]
    late_options: tuple[LogicalLine, ...]
    commands: tuple[LogicalLine, ...]
    trainings: tuple[Training, ...]
    main: tuple[Simple, ...]
    functions: Mapping[str, tuple[Simple, ...]]

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
    main, functions = _parts(commands)
    if not any(_is_training(command) for command in main):
        # A function starts it: where it is called is not followed.
        main = tuple(part for command in commands for part in simple_commands(command))
    first = commands[0].line if commands else len(lines) + 1
    options = [
        LogicalLine(number, line.removeprefix("#SBATCH").strip())
        for number, line in enumerate(lines, 1)
        if line.startswith("#SBATCH")
    ]
    return Script(
        tuple(text.split("\n")),
        tuple(each for each in options if each.line < first),
        tuple(each for each in options if each.line >= first),
        commands,
        tuple(_trainings(main)),
        main,
        functions,
    )


def _commands(lines: tuple[str, ...]) -> Iterator[LogicalLine]:
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
            yield LogicalLine(begun, text.strip())
        begun, text = 0, ""
    if text.strip():
        yield LogicalLine(begun, text.strip())


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


def simple_commands(command: LogicalLine) -> Iterator[Simple]:
    """The simple commands of a line; quotes, substitutions and arithmetic are not split."""
    text, begun, at, quote, depth = command.text, 0, 0, "", 0
    while at < len(text):
        char, width = text[at], 1
        if char == "\\" and quote != "'":
            width = 2
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"`":
            quote = char
        elif char == "(" and (
            depth or text[at - 1 : at] in ("$", "<", ">") or text[at + 1 :][:1] == "("
        ):
            depth += 1
        elif char == ")" and depth:
            depth -= 1
        elif not depth and char in ";&|\n":
            width = 2 if text[at : at + 2] in ("&&", "||", ";;", "|&") else 1
            is_redirection = (
                char == "&" and width == 1 and ">" in (text[at - 1 : at], text[at + 1 : at + 2])
            )
            if not is_redirection:
                operator = text[at : at + width]
                yield from _simple(command.line, text[begun:at], _OPERATORS.get(operator, operator))
                begun = at + width
        at += width
    yield from _simple(command.line, text[begun:], "")


_OPERATORS = {";;": ";", "\n": ";", "|&": "|"}


def _simple(line: int, text: str, operator: str) -> Iterator[Simple]:
    text = text.strip()
    at = 0
    while match := _PREFIX.match(text, at):
        at = match.end()
    if text:
        yield Simple(line, text, operator, text[:at], tuple(text[at:].split()))


def _parts(
    commands: tuple[LogicalLine, ...],
) -> tuple[tuple[Simple, ...], dict[str, tuple[Simple, ...]]]:
    main: list[Simple] = []
    functions: dict[str, tuple[Simple, ...]] = {}
    body: list[Simple] = []
    name = ""
    for command in commands:
        text = command.text
        begins = None if name else _FUNCTION.match(text)
        if begins:
            name, body = begins[1] or begins[2], []
            text = text[begins.end() :].strip()
        if not name:
            main.extend(simple_commands(command))
            continue
        ends = text == "}" or bool(begins and text.endswith("}"))
        body.extend(
            simple_commands(LogicalLine(command.line, text.removesuffix("}") if ends else text))
        )
        if ends:
            functions[name] = tuple(body)
            name = ""
    # A function without an end is none.
    return tuple(main + body if name else main), functions


def _base(word: str) -> str:
    return word.strip("'\"();").rpartition("/")[2]


def _trainings(main: tuple[Simple, ...]) -> Iterator[Training]:
    for at, command in enumerate(main):
        if not _is_training(command):
            continue
        end = at
        while main[end].operator in ("&&", "||", "|") and end + 1 < len(main):
            end += 1
        before = main[at - 1] if at else None
        yield Training(
            command.line,
            command.text,
            _launcher(command),
            is_exec=re.search(r"\bexec\b", command.prefix) is not None,
            in_background=main[end].operator == "&",
            in_pipeline=command.operator == "|"
            or (before is not None and before.line == command.line and before.operator == "|"),
            at=at,
        )


def _launcher(command: Simple) -> str:
    for word in command.words:
        base = _base(word)
        if base in (*_STEPS, *_LAUNCHERS, "accelerate"):
            return base
        if _PYTHON.fullmatch(base):
            return "python"
    return command.program


def _is_training(command: Simple) -> bool:
    """Whether a command starts a program that trains, as far as its words show."""
    words = _SUBSTITUTED.sub("$()", " ".join(command.words)).split()
    program = command.program
    following = words[1:2]
    if program == "ckptctl" or "--version" in words:
        return program == "ckptctl" and following == ["run"]
    is_step = program in _STEPS
    if program in _SHELL and not any(re.fullmatch("-[a-z]*c", word) for word in words[1:4]):
        return False
    starts = is_step or program in (*_SHELL, *_WRAPPERS, *_LAUNCHERS, *(pair[0] for pair in _PAIRS))
    if not (starts or _PYTHON.fullmatch(program) or program.endswith(".py")):
        return False
    bases = [_base(word) for word in words]
    for at, (word, base) in enumerate(zip(words, bases, strict=True)):
        if base == "ckptctl":
            return bases[at + 1 : at + 2] == ["run"]
        if base in _LAUNCHERS or tuple(bases[at : at + 2]) in _PAIRS:
            return True
        if base.endswith(".py"):
            return not _PREPARES.search(base)
        if (
            base == "-m"
            and at
            and any(_PYTHON.fullmatch(base) for base in bases[max(0, at - 4) : at])
        ):
            return bases[at + 1 : at + 2] != [] and bases[at + 1] not in _TOOLS
        is_script = base.endswith(".sh") or word.startswith("./")
        if is_step and is_script and _NAMED_TRAINING.search(base):
            return not _PREPARES.search(base)
        if is_step and "=" not in word and "/" not in word and _IN_VARIABLE.match(word):
            return True
    return False


# What the trap of a script does with the signal before the time limit


_TRAP = re.compile(
    r"trap\s+(?:--\s+)?(?:'([^']*)'|\"((?:[^\"\\]|\\.)*)\"|([^\s'\"]+))\s+(.*)", re.DOTALL
)
_OPENED = re.compile(r"trap\s+(?:--\s+)?(['\"])")
_KILL = re.compile(r"kill\s+(?:-s\s*|-)?(?:SIG)?([A-Z][A-Z0-9]{1,8}|\d{1,2}\b)?[^$]{0,200}\$")
_SCANCEL_SIGNAL = re.compile(r"\s(?:--signal[= ]|-s\s*)(?:SIG)?([A-Z0-9]{1,9})\b")
_STEP = re.compile(r"\$\{?SLURM_JOB_?ID\}?\"?\.(\d{1,6})\b")
_OPENS, _CLOSES = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")


class Trap(NamedTuple):
    """A trap: its line, the signal it sends, whether srun gets it; why it is lost or unwaited."""

    line: int
    sent: str | None
    is_to_srun: bool
    lost: str = ""
    unwaited: str = ""


def signal_name(signal: str) -> str:
    """The name of a signal that may be a number: `USR1` for 10."""
    number = whole(signal)
    if number is None or number not in {known.value for known in Signals}:
        return signal.removeprefix("SIG")
    return Signals(number).name.removeprefix("SIG")


def trap_of(script: Script, training: Training, signal: str) -> Trap | None:
    """The trap that the shell has for a signal while it waits for a training; None without one."""
    main = script.main
    waits = [at for at in range(training.at + 1, len(main)) if main[at].program == "wait"]
    until = waits[0] if training.in_background and waits else len(main)
    latest: tuple[int, str] | None = None
    for at in range(until):
        if main[at].program != "trap":
            continue
        body, signals = _read(script, main[at])
        if signal in {signal_name(word.strip("'\";")) for word in signals}:
            latest = None if body == "-" else (main[at].line, body)
    if latest is None:
        return None
    line, body = latest
    actions = [*_actions(script, LogicalLine(line, body))]
    later = [] if not waits else [*main[waits[0] + 1 :]]
    sent, is_to_srun, lost = _sent(script, training, actions, later)
    return Trap(line, sent, is_to_srun, lost, _unwaited(script, waits, actions))


def _read(script: Script, trap: Simple) -> tuple[str, list[str]]:
    """The body of a trap and its signals; a quote may end on a later line."""
    text = trap.text[len(trap.prefix) :]
    opened = _OPENED.match(text)
    if opened and text.count(opened[1]) == 1:
        for command in script.commands:
            if command.line > trap.line:
                text += "\n" + command.text
                if opened[1] in command.text:
                    break
    match = _TRAP.match(text)
    if match is None:
        return "-", []
    body = next((part for part in match.groups()[:3] if part is not None), "")
    return body, match[4].split()


def _actions(script: Script, body: LogicalLine) -> Iterator[Simple]:
    for command in simple_commands(body):
        yield command
        yield from script.functions.get(command.program, ())


def _sent(
    script: Script, training: Training, actions: Iterable[Simple], later: Iterable[Simple]
) -> tuple[str | None, bool, str]:
    """The signal that is sent, whether srun gets it itself, and why it misses the training.

    A trap that only sets a variable leaves it to the commands behind the wait.
    """
    actions = [*actions]
    for command in (*actions, *later):
        text = command.text[len(command.prefix) :]
        if command.program == "scancel":
            name = _SCANCEL_SIGNAL.search(text)
            options = command.words
            step = _STEP.search(text)
            lost = ""
            if "--batch" in options or "-b" in options:
                lost = "scancel --batch signals the batch shell itself, and no task"
            elif step and clamped(step[1]) < (earlier := _steps_before(script, training)):
                lost = (
                    f"scancel signals step {step[1]}, and the training is step {earlier} or later: "
                    "each srun before it is a step"
                )
            is_full = "--full" in options or "-f" in options
            return (signal_name(name[1]) if name else None), is_full, lost
        asks = re.match(r"kill\s+(?:-s\s*|-)0\b", text)
        if command.program == "kill" and not asks and (match := _KILL.match(text)):
            return signal_name(match[1] or "TERM"), True, ""
    silent = ("", "true", ":", "echo", "printf", "date")
    if any(command.program not in silent for command in actions):
        return None, False, ""
    return (
        None,
        False,
        "the trap sends nothing to the training, and no command behind the wait does",
    )


def _steps_before(script: Script, training: Training) -> int:
    """How many steps have certainly begun before the training."""
    depth = n_steps = 0
    for command in script.main[: training.at]:
        opening = (*command.prefix.split(), command.program)
        depth += sum(word in _OPENS for word in opening)
        is_sure = depth == 0 and command.operator not in ("||",)
        if is_sure and (command.program == "srun" or re.search(r"\$\(\s*srun\b", command.text)):
            n_steps += 1
        depth -= command.program in _CLOSES
    return n_steps


def _unwaited(script: Script, waits: list[int], actions: list[Simple]) -> str:
    """Why the script ends before the save; empty if it waits for it."""
    if not waits:
        return "nothing waits for the background command: the script ends, and the job with it"
    if any(_waits(command) for command in actions):
        return ""
    first = script.main[waits[0]]
    is_in_loop = _loops(script.main[: waits[0] + 1]) > 0
    is_plain = first.operator not in ("||", "&&") and not first.prefix.strip(" {(")
    if is_plain and not is_in_loop and _exits_on_error(script, waits[0]):
        return (
            f"the signal ends the wait of line {first.line} with a code above 128, and set -e then "
            "ends the script before the save is written"
        )
    if is_in_loop or any(_waits(command) for command in script.main[waits[0] + 1 :]):
        return ""
    return (
        f"the signal ends the wait of line {first.line}, the only one: the script goes on to its "
        "end before the save is written"
    )


def _loops(commands: Iterable[Simple]) -> int:
    depth = 0
    for command in commands:
        opening = (*command.prefix.split(), command.program)
        depth += sum(word in ("for", "while", "until") for word in opening)
        depth -= command.program == "done"
    return depth


def _waits(command: Simple) -> bool:
    return command.program in ("wait", "sleep") or "--pid" in command.text


def _exits_on_error(script: Script, until: int) -> bool:
    is_set = False
    for command in script.main[:until]:
        if command.program == "set":
            words = command.words[1:]
            for sign, value in (("-", True), ("+", False)):
                flags = any(re.fullmatch(rf"\{sign}[a-z]*e[a-z]*", word) for word in words)
                if flags or (f"{sign}o" in " ".join(words) and "errexit" in words):
                    is_set = value
    return is_set


_LEAST_NOTICE_S = 60
MAX_ADVICE = 1000
"""More mistakes in one script are not listed."""
_MOST_S = 10**9
_MOST_TRAPS = 30
"""Later trainings are judged by the trap of the last of these, in linear time."""
_SHOWN = 100
"""Characters of the script that a message shows of one word."""
_SIGNAL = re.compile(r"^(?:(?=[A-Z]*B)[A-Z]+:)?(?:SIG)?(\w+?)(?:@(\d+))?$")
# `ckptctl run` in the batch shell, and not in a step of its own.
_SUPERVISED = re.compile(r"(?:(?!\bsrun\b).)*\bckptctl\s+run\b", re.DOTALL)
# Of `--save-timeout 90`: the name, which has to hold both words of `_PATIENCE`, and the number.
_NUMBERED = re.compile(r"(?<!\S)([\w.-]+)[=\s]+(\d+)(?:\.\d+)?\b")
_PATIENCE = (
    re.compile("shutdown|preempt|exit|save|sigterm|grace", re.IGNORECASE),
    re.compile("timeout|time|grace|sec|deadline|duration|period", re.IGNORECASE),
)
_BY_TIME = re.compile(r"\bls\s+(?:-\w+\s+)*-\w*t\w*\b|-printf\s+['\"]?%T@")
_SORTED_BY_TIME = (re.compile(r"\bls\b"), re.compile("--sort[= ]time"))


class Mistake(NamedTuple):
    """A check of `doctor` that applies to a line; `severity` and `fix` are the check's if None."""

    check: str
    line: int
    detail: str = ""
    fix: str | None = None
    severity: Severity | None = None


def check_script(name: str, script: Script, deadline: Deadline | None = None) -> tuple[Advice, ...]:
    """The mistakes in the script, in the order of its lines.

    Where the deadline passes, `script.unread` states which checks were not made.
    """
    deadline = deadline or Deadline()
    found: list[Mistake] = []
    unread: list[Mistake] = []
    for n_made, check in enumerate(_CHECKS):
        for mistake in check(script):
            found.append(mistake)
            if len(found) > MAX_ADVICE or deadline.passed():
                break
        if len(found) > MAX_ADVICE or deadline.passed():
            why = "takes longer than any script" if deadline.reached else "has too many mistakes"
            made = f"{n_made} of {len(_CHECKS)} groups of checks were made to their end"
            unread.append(Mistake("script.unread", 1, f"it {why}: {made}"))
            break
    return tuple(
        advice_of(check, f"{name}:{line}", detail, fix, severity)
        for check, line, detail, fix, severity in (*unread, *sorted(found, key=lambda m: m.line))
    )


def _form(script: Script) -> Iterator[Mistake]:
    if not script.lines or not script.lines[0].startswith("#!"):
        yield Mistake("script.shebang", 1)
    if any(line.endswith("\r") for line in script.lines[:1]):
        yield Mistake("script.line-ends", 1)
    for option in script.late_options:
        yield Mistake("sbatch.ignored", option.line, f"#SBATCH {option.text}")
    for option in script.options:
        if re.search(r"\$\{?\w", option.text):
            yield Mistake("sbatch.variable", option.line, f"#SBATCH {option.text}")
    if not script.trainings:
        yield Mistake("script.no-training", 1)


def _signals(script: Script) -> Iterator[Mistake]:
    given = script.option("--signal")
    if given is None:
        yield Mistake("signal.none", 1)
        return
    line, value = given
    match = _SIGNAL.match(value)
    seconds = clamped(match[2], _MOST_S) if match and match[2] else 60
    signal = signal_name(match[1]) if match else value
    yield from _notice(line, script, seconds)
    to_shell = value.partition(":")[0].count("B") > 0 and ":" in value
    own_handlers = script.search(r"\bPET_SIGNALS_TO_HANDLE=(\S{1,200})")
    trap = None
    for n_judged, training in enumerate(script.trainings):
        if to_shell and n_judged < _MOST_TRAPS:
            trap = trap_of(script, training, signal)
        received = signal if training.is_exec or not to_shell else trap and trap.sent
        if own_handlers is None or not re.search(rf"{received}|\$", own_handlers[1][1]):
            yield from _to_agent(training, received)
        if to_shell:
            yield from _to_shell(line, trap, training, signal)
        elif training.launcher != "srun":
            yield Mistake(
                "signal.no-step",
                line,
                f"--signal={value}, and line {training.line} starts {training.launcher}",
                f"start it with srun, or use --signal=B:{signal}@{seconds} and exec",
            )
        elif _SUPERVISED.match(training.text):
            yield Mistake(
                "signal.not-run",
                line,
                f"--signal={value}, and line {training.line}",
                f"#SBATCH --signal=B:{signal}@{seconds}, with exec or a trap that passes it on to "
                "`ckptctl run`",
            )


_AGENT = re.compile(
    r"\b(?:torchrun|ft_launcher)\b|\btorch\.distributed\.run\b|\baccelerate\s+launch\b"
)
_HANDLED = ("TERM", "INT", "HUP", "QUIT")
"""Source: torch 2.13 `torch/distributed/launcher/api.py`, which sets
`TORCHELASTIC_SIGNALS_TO_HANDLE` from `--signals-to-handle`; NVRx 0.4.1, which lacks that option."""


def _to_agent(training: Training, signal: str | None) -> Iterator[Mistake]:
    agent = _AGENT.search(training.text)
    if signal is None or signal in _HANDLED or agent is None:
        return
    if re.search(
        rf"--signals[-_]to[-_]handle[= ]\S{{0,80}}{re.escape(signal)}", training.text, re.I
    ):
        return
    yield Mistake("signal.not-handled", training.line, f"{agent[0]} and {signal}")


def _to_shell(line: int, trap: Trap | None, training: Training, signal: str) -> Iterator[Mistake]:
    # exec replaces the shell with Python, which then receives its signals.
    at = training.line
    is_srun_alone = training.launcher == "srun" and not _SUPERVISED.match(training.text)
    to_srun = Mistake("signal.srun-killed", at)
    if training.is_exec and not training.in_pipeline:
        if is_srun_alone and signal == "TERM":
            yield to_srun
        return
    if trap is None:
        yield Mistake(
            "signal.no-trap",
            line,
            fix=f"remove B: (--signal={signal}@300 signals the step), or trap it and pass it on",
        )
    elif not training.in_background:
        yield Mistake("signal.foreground", at, f"the trap of line {trap.line}")
    elif training.in_pipeline and trap.sent and trap.is_to_srun:
        yield Mistake("signal.pipeline", at)
    elif trap.lost:
        yield Mistake("signal.not-passed", trap.line, trap.lost)
    elif trap.unwaited:
        yield Mistake("signal.no-wait", at, trap.unwaited)
    elif is_srun_alone and trap.sent == "TERM" and trap.is_to_srun:
        yield to_srun


def _search_both(script: Script, first: str, then: str) -> int | None:
    patterns = re.compile(first), re.compile(then)
    return next(
        (command.line for command in script.commands if in_order(*patterns, command.text)), None
    )


def in_order(first: re.Pattern[str], then: re.Pattern[str], text: str) -> bool:
    """Whether a text has `first` and, behind it, `then`, in linear time.

    `first.*then` would be searched again from every place of `first`.
    """
    found = first.search(text)
    return found is not None and then.search(text, found.end()) is not None


def _notice(line: int, script: Script, seconds: int) -> Iterator[Mistake]:
    for command in script.commands:
        for match in _NUMBERED.finditer(command.text):
            given_s = clamped(match[2], _MOST_S)
            if given_s > seconds and in_order(*_PATIENCE, match[1]):
                yield Mistake(
                    "signal.notice-short",
                    line,
                    f"the notice is {seconds} s, and line {command.line} gives the save up to "
                    f"{given_s} s ({match[1][:_SHOWN]})",
                    f"@{given_s + 60} or more: SLURM may signal up to a minute late",
                )
    if seconds < _LEAST_NOTICE_S:
        detail = f"the notice is {seconds} s"
        yield Mistake("signal.notice-short", line, detail, severity=Severity.WARNING)


def _wrapped(script: Script) -> Iterator[Mistake]:
    for training in script.trainings:
        inner = re.search(r"\b(?:bash|sh|zsh)\s+(?:-\w+\s+)*-\w*c\s+(['\"])(.*)\1", training.text)
        is_srun = training.launcher == "srun"
        # bash execs a single command by itself.
        if inner and is_srun and "exec " not in inner[2] and re.search(r"[;&|\n]", inner[2]):
            yield Mistake("signal.wrapped", training.line)


def _allocation(script: Script) -> Iterator[Mistake]:
    """What becomes of the job after a failure: its requeue, `scancel`, the nodes that are left."""
    given = script.option("--requeue")
    if given is None and script.search(r"\bscontrol\s+requeue\b|\bsbatch\b") is None:
        yield Mistake("requeue.none", 1)
    elif script.option("--open-mode") is None and given is not None:
        yield Mistake("requeue.log-lost", given[0])
    line, value = script.option("--signal") or (0, "")
    handled = re.search(r":(?:SIG)?(?:TERM|15)\b", value) and _search_both(
        script, r"\btrap\b", r"\b(?:SIG)?TERM\b"
    )
    if handled and script.search(r"\bscontrol\s+requeue\b|\bsbatch\b"):
        yield Mistake("requeue.cancelled", line)
    nodes, kept = script.option("--nodes", "-N"), script.option("--no-kill", "-k")
    several = nodes is not None and nodes[1] != "1"
    if several and kept and not _search_both(script, r"\bsrun\b", r"\bscontrol\s+requeue\b"):
        yield Mistake("sbatch.shell-lost", kept[0])
    for training in script.trainings:
        if not (training.launcher == "srun" and _SUPERVISED.match(training.text)):
            continue
        if several and not kept:
            yield Mistake("sbatch.no-kill", training.line)
        asked = script.option("--ntasks", "-n", "--ntasks-per-node")
        fewer = re.search(r"['\"\s](?:--nodes[= ]|-N\s*)['\"]?\{nodes\}", training.text)
        if (
            asked
            and fewer
            and not re.search(r"['\"\s](?:--ntasks[= ]|-n\s*['\"{\d$])", training.text)
        ):
            yield Mistake("srun.ntasks", training.line)


_OPTION = re.compile(
    r"resume|ckptctl|\brestore|--load\b|load[-_](?:dir|path|step|checkpoint)|ckpt[-_.]?(?:path|step)|"
    r"from[-_.]?(?:checkpoint|ckpt|latest)|init[-_]from|auto[-_]?restart",
    re.IGNORECASE,
)
_CONFIGURED = re.compile(
    r"--(?:config|cfg|conf|recipe|params?)(?:[-_.]?(?:file|path|name|dir))?\b|"
    r"\S\.(?:ya?ml|toml|json|gin|cfg|ini)\b",
    re.IGNORECASE,
)
# Arguments that the line does not show: all of the script, an array, a variable of its own.
_ELSEWHERE = re.compile(
    r"\"?\$(?:@|\*|\{\w+\[[@*]\]\}|\{?\w*(?:ARGS?|OPTS?|OPTIONS|FLAGS|EXTRA|CMD)\w*)", re.IGNORECASE
)


def _resume(script: Script) -> Iterator[Mistake]:
    for command in script.commands:
        pipe = command.text.split("|")
        if _BY_TIME.search(command.text) or any(in_order(*_SORTED_BY_TIME, part) for part in pipe):
            yield Mistake("resume.by-mtime", command.line)
    if any(_OPTION.search(command.text) for command in script.commands if "=" in command.text):
        return
    for training in script.trainings:
        if _OPTION.search(training.text):
            continue
        decided_elsewhere = _CONFIGURED.search(training.text) or _ELSEWHERE.search(training.text)
        is_open = decided_elsewhere or not re.search(r"\.py\b", training.text)
        yield Mistake("resume.unknown" if is_open else "resume.absent", training.line)


_SILENT = ("true", ":", "echo", "printf", "logger")
"""Programs that change nothing."""


def _exit_codes(script: Script) -> Iterator[Mistake]:
    strict = _search_both(script, r"\bset\b", r"\bpipefail\b") is not None
    saved = script.search(r"PIPESTATUS")
    exits_on_error = (
        script.search(r"\bset\s+-\w*e\w*\b") is not None
        or _search_both(script, r"\bset\b", r"\berrexit\b") is not None
    )
    keeps = re.compile(r"\$\?|\bwait\b|\bexit\b(?!\s+0\b)")
    last_kept = max(
        (at for at, simple in enumerate(script.main) if keeps.search(simple.text)), default=-1
    )
    last = len(script.main) - 1
    for training in script.trainings:
        if training.in_pipeline and not strict and not saved:
            yield Mistake("exit-code.pipe", training.line)
        end = training.at
        while script.main[end].operator == "|" and end < last:
            end += 1
        after = script.main[end + 1] if end < last else None
        begun = script.main[training.at].prefix.split()[:1]
        is_plain = after is not None and not after.prefix and after.program in _SILENT
        if after and script.main[end].operator == "||" and is_plain:
            yield Mistake("exit-code.swallowed", training.line, f"|| {after.words[0]}")
        elif (
            after
            and last_kept <= training.at
            and not exits_on_error
            and script.main[end].operator not in ("&&", "||")
            and begun not in (["if"], ["while"], ["until"], ["elif"])
        ):
            ending = f"`{script.main[last].text[:_SHOWN]}` of line {script.main[last].line}"
            yield Mistake(
                "exit-code.swallowed",
                training.line,
                f"{ending} ends the script",
                severity=Severity.WARNING,
            )
    texts_after = [*(later.text for later in script.commands[1:]), ""]
    for command, following in zip(script.commands, texts_after, strict=False):
        picked = re.match(
            r"(?:(local|export|declare|readonly)\s+)?\w+=\"?\$\(\s*ckptctl", command.text
        )
        checked = re.search(r"\|\||&&|;\s*(?:case|if)|\bif\b", command.text)
        if picked and not (exits_on_error or checked or "$?" in following):
            yield Mistake("exit-code.pick", command.line)
        if picked and picked[1]:
            yield Mistake("exit-code.masked", command.line, picked[1])


def _hangs(script: Script) -> Iterator[Mistake]:
    in_environment = script.search(r"\bSLURM_KILL_BAD_EXIT=1\b")
    for training in script.trainings:
        if training.launcher != "srun" or in_environment:
            continue
        if not re.search(r"--kill-on-bad-exit|\s-K(?:[01])?\b", training.text):
            yield Mistake("srun.no-kill", training.line)


_CHECKS: tuple[Callable[[Script], Iterator[Mistake]], ...] = (
    _form,
    _signals,
    _wrapped,
    _allocation,
    _resume,
    _exit_codes,
    _hangs,
)

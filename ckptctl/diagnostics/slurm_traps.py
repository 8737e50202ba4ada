"""What the trap of a batch script does with the signal before the time limit.

bash runs a trap when the foreground command has ended, or at once in `wait`, which then ends with a
code above 128: the script goes on behind it while the training still saves.

Source: bash 5.2, "Signals"; scancel of SLURM 22.05: `--batch` signals the batch shell alone,
`--full` the shell and srun, and without them the tasks of all steps get the signal. Steps are
numbered from 0 in the order of their start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from signal import Signals
from typing import NamedTuple

from ckptctl.diagnostics.slurm_script import Command, Script, Simple, Training, simple_commands
from ckptctl.outside_numbers import clamped, whole

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
    actions = [*_actions(script, Command(line, body))]
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


def _actions(script: Script, body: Command) -> Iterator[Simple]:
    """The simple commands of a trap, and of the functions that it calls."""
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
    """In how many loops the last of the commands is."""
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

"""Find the known mistakes in a SLURM batch script.

Each check covers a way in which jobs were lost that a resume should have saved: a signal
that did not reach Python, an exit code that a pipe hid, a step that was chosen by its
mtime. Only what the text of the script proves is a fault.

Source: SLURM 22.05, on which `tests/jobs/test_signals_on_slurm.py` runs each way to pass a signal
on; bash 5.2, "Signals": a trap runs when the foreground command has ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ckptctl.diagnostics.advice import Advice, advice_of
from ckptctl.diagnostics.slurm_script import (
    Script,
    Simple,
    Training,
    Trap,
    signal_name,
    trap_of,
)
from ckptctl.findings import Severity
from ckptctl.logs.log_lines import Deadline
from ckptctl.outside_numbers import clamped

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


def _no_training(script: Script) -> Iterator[Mistake]:
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
    """The line of the first command with `first` and, behind it, `then`."""
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
        if inner and training.launcher == "srun" and "exec " not in inner[2] and _is_list(inner[2]):
            yield Mistake("signal.wrapped", training.line)


def _is_list(text: str) -> bool:
    # bash execs a single command by itself.
    return bool(re.search(r"[;&|\n]", text))


def _requeue(script: Script) -> Iterator[Mistake]:
    given = script.option("--requeue")
    if given is None and script.search(r"\bscontrol\s+requeue\b|\bsbatch\b") is None:
        yield Mistake("requeue.none", 1)
    elif script.option("--open-mode") is None and given is not None:
        yield Mistake("requeue.log-lost", given[0])


def _allocation(script: Script) -> Iterator[Mistake]:
    """Find what undoes `scancel`, and what keeps `ckptctl run` from using the nodes left."""
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
        if after and script.main[end].operator == "||" and _says_only(after):
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


def _says_only(command: Simple) -> bool:
    return not command.prefix and command.program in ("true", ":", "echo", "printf", "logger")


def _hangs(script: Script) -> Iterator[Mistake]:
    in_environment = script.search(r"\bSLURM_KILL_BAD_EXIT=1\b")
    for training in script.trainings:
        if training.launcher != "srun" or in_environment:
            continue
        if not re.search(r"--kill-on-bad-exit|\s-K(?:[01])?\b", training.text):
            yield Mistake("srun.no-kill", training.line)


_CHECKS: tuple[Callable[[Script], Iterator[Mistake]], ...] = (
    _form,
    _no_training,
    _signals,
    _wrapped,
    _requeue,
    _allocation,
    _resume,
    _exit_codes,
    _hangs,
)

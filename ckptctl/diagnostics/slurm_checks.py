"""Find the known mistakes in a SLURM batch script.

Each check is a way in which jobs were lost that a resume should have saved: a signal that
did not reach Python, an exit code that a pipe hid, a step that was chosen by its mtime. Only
what the text of the script proves is a fault.

Source: sbatch and srun of SLURM 25.05 (`--signal`, `--requeue`, `--kill-on-bad-exit`);
bash 5.2, "Signals": a trap runs when the foreground command has ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ckptctl.diagnostics.results import Advice
from ckptctl.diagnostics.slurm_script import Script, Training
from ckptctl.findings import Severity

_LEAST_NOTICE_S = 60
_SIGNAL = re.compile(r"^(?:[A-Z]*B[A-Z]*:)?(?:SIG)?(\w+?)(?:@(\d+))?$")
_RESUMES = re.compile(
    r"resume|ckptctl|\brestore|--load\b|load[-_](?:dir|path|step|checkpoint)|ckpt[-_.]?(?:path|step)|"
    r"from[-_.]?(?:checkpoint|ckpt|latest)|init[-_]from|auto[-_]?restart",
    re.IGNORECASE,
)
_PATIENCE = re.compile(
    r"(?:^|\s)-{0,2}[\w.-]*(?:shutdown|preempt|exit|save|sigterm|grace)[\w.-]*(?:timeout|time|grace|sec|deadline|"
    r"duration|period)[\w.-]*[=\s]+(\d+)(?:\.\d+)?\b",
    re.IGNORECASE,
)
_BY_TIME = re.compile(
    r"\bls\s+(?:-\w+\s+)*-\w*t\w*\b|\bls\b[^|]*--sort[= ]time|-printf\s+['\"]?%T@"
)


def check_script(name: str, script: Script) -> tuple[Advice, ...]:
    """The mistakes in the script, in the order of its lines."""
    found = [each for check in _CHECKS for each in check(name, script)]
    return tuple(sorted(found, key=_line_of))


def _line_of(advice: Advice) -> int:
    number = advice.where.rpartition(":")[2]
    return int(number) if number.isdecimal() else 0


def _fault(name: str, where: str, message: str, fix: str) -> Advice:
    return Advice(name, Severity.FAULT, where, message, fix)


def _warning(name: str, where: str, message: str, fix: str) -> Advice:
    return Advice(name, Severity.WARNING, where, message, fix)


def _form(name: str, script: Script) -> Iterator[Advice]:
    if not script.lines or not script.lines[0].startswith("#!"):
        yield _fault(
            "script.shebang",
            f"{name}:1",
            "the first line names no shell: sbatch refuses the script",
            "begin it with #!/bin/bash",
        )
    if any(line.endswith("\r") for line in script.lines[:1]):
        yield _fault(
            "script.line-ends",
            f"{name}:1",
            "the lines end as on Windows: the shell takes the CR for part of each word",
            "sed -i 's/\\r$//' FILE",
        )
    for each in script.late_options:
        yield _fault(
            "sbatch.ignored",
            f"{name}:{each.line}",
            f"#SBATCH {each.text}: behind the first command, SLURM does not read it",
            "move it above the first command",
        )
    for each in script.options:
        if re.search(r"\$\{?\w", each.text):
            yield _fault(
                "sbatch.variable",
                f"{name}:{each.line}",
                f"#SBATCH {each.text}: no shell reads these lines, the variable stays as it is",
                "write the value, or give it to sbatch on the command line; in file names %j is "
                "the job",
            )


def _signals(name: str, script: Script) -> Iterator[Advice]:
    given = script.option("--signal")
    if given is None:
        yield _warning(
            "signal.none",
            f"{name}:1",
            "no --signal: at the time limit a job has the 30 s of KillWait, whatever a save takes",
            "#SBATCH --signal=TERM@300 with srun, or --signal=B:TERM@300 with a trap that passes "
            "it on",
        )
        return
    line, value = given
    where = f"{name}:{line}"
    match = _SIGNAL.match(value)
    seconds = int(match[2] or 60) if match else 60
    signal = match[1] if match else value
    yield from _notice(where, script, seconds)
    to_shell = value.partition(":")[0].count("B") > 0 and ":" in value
    for each in script.trainings:
        if to_shell:
            yield from _to_shell(name, where, script, each, signal)
        elif each.launcher not in ("srun",):
            yield _fault(
                "signal.no-step",
                where,
                f"--signal={value} goes to job steps, and line {each.line} starts "
                f"{each.launcher} without srun: nobody gets it",
                f"start it with srun, or use --signal=B:{signal}@{seconds} and exec",
            )


def _to_shell(
    name: str, where: str, script: Script, training: Training, signal: str
) -> Iterator[Advice]:
    # exec gives Python's process the place of the shell, and with it its signals.
    if training.is_exec and not training.in_pipeline:
        return
    trap = script.search(rf"\btrap\b.*\b(?:SIG)?{re.escape(signal)}\b")
    if trap is None:
        yield _fault(
            "signal.no-trap",
            where,
            f"B: sends {signal} to the batch shell alone, which has no trap for it and dies: "
            "Python never gets it",
            f"leave B: out (--signal={signal}@300 signals the step), or trap it and pass it on",
        )
        return
    if not training.in_background:
        yield _fault(
            "signal.foreground",
            f"{name}:{training.line}",
            f"the trap of line {trap[0]} runs only after this command has ended: bash waits for "
            "what runs in the foreground",
            'put & behind it, keep its process id (pid=$!), and: wait "$pid"',
        )
    elif training.in_pipeline and re.search(r"\$\{?!|\$pid|\$\{?PID|\$child", _traps(script)):
        yield _fault(
            "signal.pipeline",
            f"{name}:{training.line}",
            "$! is the last command of the pipeline: the trap signals that one, not the training",
            "write to the log with --output or > FILE 2>&1, without a pipe",
        )
    elif script.search(r"\bwait\b") is None:
        yield _fault(
            "signal.no-wait",
            f"{name}:{training.line}",
            "nothing waits for the command in the background: the script ends, and the job with it",
            'wait "$pid" behind it, and once more after the trap has run',
        )


def _traps(script: Script) -> str:
    named = " ".join(each.text for each in script.commands if each.text.startswith("trap"))
    bodies = " ".join(each.text for each in script.commands if "kill " in each.text)
    return f"{named} {bodies}"


def _notice(where: str, script: Script, seconds: int) -> Iterator[Advice]:
    for each in script.commands:
        for match in _PATIENCE.finditer(each.text):
            if int(match[1]) > seconds:
                yield _fault(
                    "signal.notice-short",
                    where,
                    f"the notice is {seconds} s, and line {each.line} gives the save up to "
                    f"{match[1]} s ({match[0].split('=')[0].split()[0]}): the kill comes first",
                    f"@{int(match[1]) + 60} or more: SLURM may signal up to a minute late",
                )
    if seconds < _LEAST_NOTICE_S:
        yield _warning(
            "signal.notice-short",
            where,
            f"the notice is {seconds} s; a save of many ranks takes longer",
            "@300, or what `ckptctl cost` says of your saves and a minute more",
        )


def _wrapped(name: str, script: Script) -> Iterator[Advice]:
    for each in script.trainings:
        inner = re.search(r"\b(?:bash|sh|zsh)\s+(?:-\w+\s+)*-\w*c\s+(['\"])(.*)\1", each.text)
        if inner and each.launcher == "srun" and "exec " not in inner[2] and _is_list(inner[2]):
            yield _fault(
                "signal.wrapped",
                f"{name}:{each.line}",
                "srun signals the shell of bash -c, and that does not pass it on to Python",
                "exec before the last command inside of the quotes",
            )


def _is_list(text: str) -> bool:
    # bash execs a lone command by itself.
    return bool(re.search(r"[;&|\n]", text))


def _requeue(name: str, script: Script) -> Iterator[Advice]:
    given = script.option("--requeue")
    if given is None and script.search(r"\bscontrol\s+requeue\b|\bsbatch\b") is None:
        yield _warning(
            "requeue.none",
            f"{name}:1",
            "neither --requeue nor scontrol requeue: after a node failure or a preemption nobody "
            "starts it again",
            "#SBATCH --requeue",
        )
    elif script.option("--open-mode") is None and given is not None:
        yield _warning(
            "requeue.log-lost",
            f"{name}:{given[0]}",
            "a requeued job overwrites its log: the error of the first attempt is gone",
            "#SBATCH --open-mode=append",
        )


def _resume(name: str, script: Script) -> Iterator[Advice]:
    for each in script.commands:
        if _BY_TIME.search(each.text):
            yield _fault(
                "resume.by-mtime",
                f"{name}:{each.line}",
                "the step is chosen by its mtime, which copies, rsync and touch change; and it "
                "may be half written",
                'step=$(ckptctl pick "$ROOT")',
            )
    for training in script.trainings:
        told = " ".join([training.text, *(c.text for c in script.commands if "=" in c.text)])
        if not _RESUMES.search(told):
            yield _fault(
                "resume.absent",
                f"{name}:{training.line}",
                "nothing tells the training to resume: a requeued job begins at step 0",
                'train.py --resume-from "$(ckptctl pick "$ROOT")", or --resume-from auto',
            )


def _exit_codes(name: str, script: Script) -> Iterator[Advice]:
    strict = script.search(r"\bset\b.*\bpipefail\b")
    saved = script.search(r"PIPESTATUS")
    exits_on_error = script.search(r"\bset\s+-\w*e\w*\b|\bset\b.*\berrexit\b") is not None
    last = script.commands[-1] if script.commands else None
    for each in script.trainings:
        where = f"{name}:{each.line}"
        if each.in_pipeline and not strict and not saved:
            yield _fault(
                "exit-code.pipe",
                where,
                "the exit code is that of the last command of the pipe: a crash ends with 0",
                "set -o pipefail",
            )
        if re.search(r"\|\|\s*(?:true|:)\s*$", each.text):
            yield _fault(
                "exit-code.swallowed",
                where,
                "|| true: the job ends with 0 whatever happened, and nobody restarts it",
                "leave it out, or act on $?",
            )
        elif last is not None and last.line > each.line and not exits_on_error:
            kept = any(
                re.search(r"\$\?|\bwait\b|\bexit\b", c.text)
                for c in script.commands
                if c.line > each.line
            )
            if not kept and "$?" not in each.text:
                yield _warning(
                    "exit-code.swallowed",
                    where,
                    f"the job ends with the exit code of line {last.line}, not with this one",
                    "set -e, or: exit_code=$? ... exit $exit_code",
                )
    if exits_on_error:
        return
    for command in script.commands:
        picked = re.match(
            r"(?:(?:local|export|declare|readonly)\s+)?\w+=\"?\$\(\s*ckptctl", command.text
        )
        checked = re.search(r"\|\||&&|;\s*(?:case|if)|\bif\b", command.text)
        following = next((c.text for c in script.commands if c.line > command.line), "")
        if picked and not checked and "$?" not in following:
            yield _fault(
                "exit-code.pick",
                f"{name}:{command.line}",
                "nobody looks at the exit code of ckptctl: with 75 the path is empty, and the job "
                "starts fresh",
                'step=$(ckptctl pick "$ROOT") || exit $?',
            )


def _masked(name: str, script: Script) -> Iterator[Advice]:
    for command in script.commands:
        if re.match(r"(?:local|export|declare|readonly)\s+\w+=\"?\$\(\s*ckptctl", command.text):
            yield _fault(
                "exit-code.masked",
                f"{name}:{command.line}",
                f"{command.text.split()[0]} has an exit code of its own, which hides that of "
                "ckptctl, also under set -e",
                'step=$(ckptctl pick "$ROOT") || exit $?, and export step behind it',
            )


def _hangs(name: str, script: Script) -> Iterator[Advice]:
    in_environment = script.search(r"\bSLURM_KILL_BAD_EXIT=1\b")
    for each in script.trainings:
        if each.launcher != "srun" or in_environment:
            continue
        if not re.search(r"--kill-on-bad-exit|\s-K(?:[01])?\b", each.text):
            yield _fault(
                "srun.no-kill",
                f"{name}:{each.line}",
                "when one rank dies, the others wait for it until their timeout, or for ever",
                "srun --kill-on-bad-exit=1",
            )


_CHECKS: tuple[Callable[[str, Script], Iterator[Advice]], ...] = (
    _form,
    _signals,
    _wrapped,
    _requeue,
    _resume,
    _exit_codes,
    _masked,
    _hangs,
)

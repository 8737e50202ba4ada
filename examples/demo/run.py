"""Kill a job in the middle of a save, and resume it from the newest complete step.

Trains a small model on four ranks, kills it while it saves, shows what `ckptctl` reports, and
starts the job again. Every command is shown before it runs, and can be repeated by hand. Ends
with a code other than 0 if a command or a loss is not as expected. Works below `demo/` in the
current folder, which it removes first.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

TRAIN = shlex.quote(os.path.relpath(Path(__file__).with_name("train.py")))
ROOT = "demo/checkpoints"
STEPS, SAVE_EVERY = 80, 20
WHOLE = f"{ROOT}/step_{STEPS - SAVE_EVERY}"
HALF = f"{ROOT}/step_{STEPS}"


def main() -> None:
    shutil.rmtree("demo", ignore_errors=True)
    os.makedirs("demo")
    _say(
        f"Four ranks train a small language model and save every {SAVE_EVERY} steps. "
        f"While they save step {STEPS}, all of them are killed, as when a node is lost."
    )
    train = f"torchrun --standalone --nproc-per-node 4 {TRAIN} --root {ROOT} --steps {STEPS}"
    train += f" --save-every {SAVE_EVERY}"
    killed = _run(f"{train} --die-during-save {STEPS}", expect=-signal.SIGKILL, capture=True)
    _check_that_the_save_was_cut_short()

    _say("`scan` lists the steps, and the one that `pick` would choose:")
    _run(f"ckptctl scan {ROOT}", expect=0)

    _say(
        f"Step {STEPS} is the newest, and its save was interrupted. The job has ended, so nothing "
        "writes to it: with `--grace 0` it does not count as a save in progress."
    )
    _run(f"ckptctl verify {ROOT}@latest --grace 0", expect=20)

    _say(
        "A job script gets one path on standard output: the newest step that can be used. "
        "The reasons go to standard error."
    )
    path = _run(f"ckptctl pick {ROOT}", expect=0, capture=True).strip()
    if path != WHOLE:
        _fail(f"pick answered {path!r}, and the newest whole step is {WHOLE!r}")

    _say(
        "The same job is started again: with `--resume-from auto` every rank loads that step. "
        f"Step {STEPS} is then saved anew; what was left of it is moved aside."
    )
    resumed = _run(f"{train} --resume-from auto", expect=0, capture=True)
    _run(f"ckptctl verify {HALF} --level content --require-seal", expect=0)

    before, after = _losses(killed), _losses(resumed)
    again = sorted(before.keys() & after.keys())
    if again != [70, 80] or any(before[step] != after[step] for step in again):
        _fail(f"the losses were {before} and are {after}: the resume was not exact")
    _say(
        "The resumed run trained steps 70 and 80 a second time, with the same losses in every "
        "digit: weights, optimizer, schedule, random numbers and data were all restored."
    )
    ckptctl = os.path.relpath(Path(sys.executable).with_name("ckptctl"))
    print(f"\nThe steps are kept. To list them:\n  {ckptctl} scan {ROOT}", flush=True)
    print(f"\nresumed from: {path}\nloss at step {again[-1]}: {after[again[-1]]}", flush=True)


def _losses(printed: str) -> dict[int, str]:
    """The losses that a training job has printed, by step, in all their digits."""
    return {
        int(step): loss for step, loss in re.findall(r"^step +(\d+) +loss (\S+)", printed, re.M)
    }


def _run(command: str, *, expect: int, capture: bool = False) -> str:
    """Show a command, run it, and stop the demonstration if it does not end with `expect`."""
    print(f"\n$ {command}", flush=True)
    # The commands of the environment that runs this, whether it is activated or not.
    tools = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))
    written = []
    with subprocess.Popen(
        shlex.split(command),
        stdout=subprocess.PIPE if capture else None,
        text=True,
        env={**os.environ, "PATH": tools, "OMP_NUM_THREADS": "1"},
        # The terminal sends Ctrl-C to this process alone: torchrun would print a traceback.
        start_new_session=True,
    ) as process:
        try:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                written.append(line)
            process.wait()
        except BaseException:
            _end(process)
            raise
    if process.returncode != expect:
        _fail(f"{command}: {_ending(process.returncode)}, expected: {_ending(expect)}")
    print(f"({_ending(process.returncode)})", flush=True)
    return "".join(written)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a command and its ranks: torchrun puts each into a session of its own.

    All are stopped before the first is killed, or others would print that they lost it.
    """
    process.send_signal(signal.SIGSTOP)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    ranks = children.read_text().split() if children.exists() else []
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(int(rank), number)
    process.kill()


def _stop(number: int, _frame: object) -> None:
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    print(f"\nstopped by {name}", flush=True)
    raise SystemExit(128 + number)


def _check_that_the_save_was_cut_short() -> None:
    left = {path.name: path.stat().st_size for path in Path(HALF).glob("*")}
    if ".metadata" in left or not left:
        _fail(f"{HALF} was to be left half-written, and holds {sorted(left)}")
    # A hard space keeps a number and its unit on one line.
    sizes = ", ".join(f"{name} {size:,}\xa0bytes" for name, size in sorted(left.items()))
    text = textwrap.fill(f"left in {HALF}: {sizes}; no .metadata", 80)
    print(text.replace("\xa0", " "), flush=True)


def _ending(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _say(text: str) -> None:
    print("\n" + textwrap.fill(text, 80), flush=True)


def _fail(reason: str) -> None:
    raise SystemExit(f"\nthe demonstration failed: {reason}")


if __name__ == "__main__":
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _stop)
    main()

"""Q: records of a runbook that were found under a root, damaged or written to attack.

A run of a small page is left before its command, and its record is changed: random bytes,
fields of other types, inputs that shells and loaders interpret, steps in other places. Then
the run is continued unattended. Whatever the record holds, the run ends with a result or a
documented error, no command of the record runs, and a block receives from the record only
the names that the page declares.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

from hostile_and_odd import mutated
from oracle import Outcome

from ckptctl.errors import CkptctlError
from ckptctl.runbook.document import Block, Input, Runbook, State, Value, parse
from ckptctl.runbook.document import Outcome as Row
from ckptctl.runbook.engine import NoTerminal, run_runbook

N_RECORDS = 400

PAGE = """# RB-1: Small

## Inputs

| input | what it is | if not given |
|---|---|---|
| `ROOT` | the root | required |
| `LOG...` | logs | - |
| `LEVEL` | how deep | `content` |
| `RESUME` | the command | - |

## Flow

```mermaid
stateDiagram-v2
    [*] --> Look
    Look --> Act: found
    Act --> [*]: done
```

### Look

```sh name=look reads sets=STEP
env -0 > "$ROOT/../env"; printf '%s\\n' "$LEVEL" "${LOG[@]}" > "$ROOT/../given"; echo "$ROOT/step_1"
```

| ends with | prints | then | because |
|---|---|---|---|
| 0 | | Act | there |
| other | | stop 75 | not there |

### Act

```sh name=act changes needs=STEP,RESUME
eval "$RESUME"
```

| ends with | prints | then | because |
|---|---|---|---|
| 0 | | done | done |
| not run | | stop 93 | not run |
| other | | stop 93 | failed |
"""
BOOK = parse(PAGE, "rb-1.md")


class Nobody:
    """An unattended run that consents to changes, and to nothing that a record holds."""

    attended = assumes = False
    columns = None
    repeated = ("--yes",)

    def report(self, text: str) -> None: ...
    def entering(self, state: State) -> None: ...
    def about_to(self, block: Block, command: str | None, values: Mapping[str, Value]) -> None: ...
    def silent(self, waited_s: float) -> None: ...
    def asked(self, wanted: Input, suggestion: str | None) -> Value | None: ...
    def printed(self, text: str) -> None: ...
    def ended(self, block: Block, outcome: Row, exit_code: int | None) -> None: ...

    def continues(self, run: str, begun: str) -> bool | None:
        """Nobody says so."""
        raise NoTerminal("nobody")

    def decided(self, block: Block, decision: Input) -> str | None:
        """Nobody decides."""
        return ""

    def may(self, block: Block, *, again: bool, found: Sequence[str]) -> bool | None:
        """Agree to what is of this call."""
        if found or again:
            raise NoTerminal(f"nobody; {found}")
        return True


def found_record(number: int, chance: Random, root: Path, outcome: Outcome) -> None:
    """Change the record of a run, continue it, and check the outcome."""
    top = root.parent
    shutil.rmtree(top, ignore_errors=True)
    root.mkdir(parents=True)
    canary = top / "canary"
    run = run_runbook(BOOK, str(root), {"LOG": ["a b", "c"]}, Nobody(), how="new")
    folder = root / ".ckptctl" / "runbooks" / "rb-1" / run.run
    given = number % 4 == 0
    outcome.about = _spoil(number, chance, folder, canary)
    inputs = {"RESUME": f'touch "{top}/resumed-${{STEP##*/}}"'} if given else {}
    try:
        ended = run_runbook(BOOK, str(root), inputs, Nobody(), how="continue")
        outcome.verdict = f"exit {ended.exit_code}"
    except CkptctlError as error:
        outcome.verdict, outcome.caught = f"exit {error.exit_code}", "listing"
    if canary.exists():
        outcome.problem = "missed: a command of the record ran"
    elif _foreign_names(top / "env"):
        outcome.problem = f"missed: {_foreign_names(top / 'env')} came from the record"
    elif list(top.glob("resumed-*")) not in ([], [top / "resumed-step_1"]):
        outcome.problem = "missed: the command took the step of the record"


def _foreign_names(file: Path) -> list[str]:
    """The variables of a block that are neither this process's nor the page's."""
    if not file.exists():
        return []
    names = {entry.partition("=")[0] for entry in os.fsdecode(file.read_bytes()).split("\0")}
    own = {"", "_", "PWD", "SHLVL", "OLDPWD", "BECAUSE", "RECORD", "PICTURE"}
    return sorted(names - own - set(os.environ) - set(Runbook.variables.fget(BOOK)))


def _spoil(number: int, chance: Random, folder: Path, canary: Path) -> str:
    files = sorted(folder.glob("0*.json"))
    file = chance.choice(files)
    if number % 2:
        file.write_bytes(mutated(file.read_bytes(), chance))
        return f"random bytes of {file.name}"
    event = json.loads(file.read_bytes())
    command = f"touch {canary}"
    hostile = (
        {
            "BASH_ENV": str(_script(canary)),
            "LD_PRELOAD": "/x.so",
            "PATH": "/x",
            "PS4": f"$({command})",
        },
        {"RESUME": command},
        {"LEVEL": f"$({command})"},
        {"LOG": f"x; {command}"},
        {"LOG": [f"$({command})", "--report", str(canary)]},
        {"STEP": f"/elsewhere/step_9; {command}"},
        {"ROOT": "/elsewhere"},
        {"LOG": {"a": 1}, "LEVEL": 3, "RESUME": None},
    )
    if "inputs" in event and chance.random() < 0.7:
        event["inputs"] |= (planted := chance.choice(hostile))
        about = f"inputs {sorted(planted)}"
    else:
        name = chance.choice(sorted(event))
        event[name] = chance.choice(
            [
                None,
                -1,
                1e400,
                [],
                {},
                "x" * 100_000,
                "/elsewhere/step_9",
                f"$({command})",
                "\0",
                True,
            ]
        )
        about = f"field {name} of {event.get('event')}"
    file.write_text(json.dumps(event))
    return about


def _script(canary: Path) -> Path:
    script = canary.with_name("hook.sh")
    script.write_text(f"touch {canary}\n")
    return script

"""G: commands with too little memory.

Whole commands under a limit on their address space, from what they need to start up to
2 GiB, and with allocations of Python that fail: one, or a hundred in a row. On steps
that are sound, damaged, and made to attack. The answer is the right one, or that the
inspection failed; never a wrong verdict, and never an older step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

from hostile_and_odd import HOSTILE
from oracle import Outcome, digest_of
from sound_steps import Harm, Sound, place_of, put, tree
from starved import __file__ as server
from test_hostile_pickles import MEANT_WELL

import ckptctl
from ckptctl import Level, Verdict

N_CASES = 1000

COULD_NOT_LOOK = 75
BAD = {Verdict.UNSAFE, Verdict.CORRUPT, Verdict.INCOMPLETE, Verdict.UNVERIFIABLE}
LIMITS = (256 << 20, 512 << 20, 1 << 30, 2 << 30)
KINDS = ("sound", "sound", "sound", "damaged", "hostile")
COMMANDS = ("pick", "scan", "verify", "seal")
FIRST = 64
"""Earlier allocations are the interpreter's own, on its way into the command."""

MOST = 17
"""So many bits has the number of allocations of a command on these steps."""


class Starved:
    """The process that forks commands, and how large it is before they begin."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._process = subprocess.Popen(
            [sys.executable, server, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"},
        )
        self.n_bytes = 0
        self.ask(argv=["--version"])
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        self.n_bytes = int(status.partition("VmSize:")[2].split()[0]) << 10

    def ask(self, **order: object) -> dict[str, Any]:
        """Run one command; see `starved`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def short_of_memory(
    number: int, chance: Random, subject: Sound, root: Path, starved: Starved, outcome: Outcome
) -> None:
    """Run one command with too little memory, then again with enough."""
    kind, command = chance.choice(KINDS), COMMANDS[number % len(COMMANDS)]
    order, said = _shortage(number, chance, starved.n_bytes)
    step = tree(root, subject)
    bad = _spoiled(kind, chance, subject, step)
    older = None if subject.older is None else root / subject.older.name
    before = digest_of(step)
    outcome.about = f"{command}, {kind}: {bad or 'nothing wrong'}; {said}"
    answer = starved.ask(argv=_argv(command, root, step), **order)
    outcome.verdict, outcome.said = f"exit {answer['code']}", answer["err"][-300:]
    exact = "from" in order
    outcome.problem = _ended_wrong(answer, exact) or _WRONG[command](answer, step, older, bool(bad))
    if bad and answer["code"] not in (None, 1, COULD_NOT_LOOK) and answer["code"] >= 0:
        outcome.harm, outcome.caught = "values", "content"
    generous = order.get("limit", 0) >= LIMITS[0]
    if generous and answer["code"] == COULD_NOT_LOOK:
        outcome.problem = f"could not look with {order['limit'] >> 20} MiB"
    outcome.problem = outcome.problem or _left_behind(step, before, bool(bad))


def _shortage(number: int, chance: Random, taken: int) -> tuple[dict[str, int], str]:
    how = number // len(COMMANDS) % 5
    if how == 0:
        limit = chance.choice(LIMITS)
        return {"limit": limit}, f"{limit >> 20} MiB in all"
    if how == 1:
        more = int(2 ** chance.uniform(12, 26))
        return {"limit": taken + more}, f"{more >> 10:,} KiB more than nothing"
    first = FIRST + int(2 ** chance.uniform(6, MOST))
    n = 1 if how < 4 else int(2 ** chance.uniform(1, 8))
    return {"from": first, "to": first + n}, f"allocations {first} to {first + n - 1} fail"


def _spoiled(kind: str, chance: Random, subject: Sound, step: Path) -> str:
    """Damage the step if the case asks for it; returns what was done."""
    if kind == "hostile":
        name = chance.choice([one for one in HOSTILE if one not in MEANT_WELL])
        put(step / ".metadata", HOSTILE[name])
        return name
    if kind == "damaged":
        name = chance.choice(subject.shards)
        spans = subject.bytes_with_values(name)
        while True:  # a byte of a compressed record may change no value
            at = place_of(spans, chance.randrange(sum(b - a for a, b in spans)))
            data = bytearray(subject.files[name])
            data[at] ^= 0xFF
            if _harms(subject, name, bytes(data)):
                put(step / name, bytes(data))
                return f"byte {at} of {name}"
    return ""


def _harms(subject: Sound, name: str, held: bytes) -> bool:
    return any(
        record.harm(held[record.start : record.start + len(record.data)]) is Harm.VALUES
        for record in subject.records[name]
    )


def _argv(command: str, root: Path, step: Path) -> list[str]:
    target = str(root if command in ("pick", "scan") else step)
    level = [] if command == "seal" else ["--level", "content"]
    as_json = ["--json"] if command in ("scan", "verify") else []
    return [command, target, *level, *as_json]


def _ended_wrong(answer: dict[str, Any], exact: bool) -> str | None:
    """The endings that no command may have."""
    code, err = answer["code"], answer["err"]
    if code is None:
        return "does not end"
    if code < 0 or code == 1:
        # Python itself does not survive every failed allocation.
        own = code in (-6, -11) or "SystemError" in err or "SystemError" in answer["out"]
        return None if exact and own else f"ends with {code}: {err[-200:]}"
    noted = err.replace("Exception ignored in", "").count("Traceback")
    return f"a traceback: {err[-300:]}" if noted > err.count("Exception ignored in") else None


def _document(answer: dict[str, Any]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(answer["out"])
    except ValueError:
        return {}
    return found


def _wrong_pick(answer: dict[str, Any], step: Path, older: Path | None, bad: bool) -> str | None:
    code, path = answer["code"], answer["out"].strip()
    if code == 0:
        right = str(older if bad else step)
        return None if path == right else f"pick takes {path}, where {right} is right"
    if path:
        return f"pick ends with {code} and says {path}"
    none_usable = bad and older is None and code == 11
    return None if none_usable or _unsaid(answer) else f"pick ends with {code}"


def _wrong_scan(answer: dict[str, Any], step: Path, older: Path | None, bad: bool) -> str | None:
    if _unsaid(answer) and not _document(answer).get("reports"):
        return None
    for report in _document(answer).get("reports", [{"url": str(step), "verdict": "none"}]):
        wrong = _wrong_verdict(report["verdict"], bad and report["url"] == str(step))
        if wrong:
            return wrong
    return None


def _wrong_verify(answer: dict[str, Any], step: Path, older: Path | None, bad: bool) -> str | None:
    report = _document(answer).get("report")
    if report is None:
        return None if _unsaid(answer) else f"verify ends with {answer['code']}"
    return _wrong_verdict(report["verdict"], bad)


def _wrong_seal(answer: dict[str, Any], step: Path, older: Path | None, bad: bool) -> str | None:
    sealed = (step / ".ckptctl" / "seal.json").exists()
    if sealed and bad:
        return "a bad step was sealed"
    if answer["code"] == 0:
        return None if sealed else "seal says so, and there is none"
    damaged = bad and answer["code"] in {verdict.exit_code for verdict in BAD}
    return None if damaged or _unsaid(answer) else f"seal ends with {answer['code']}"


_WRONG = {"pick": _wrong_pick, "scan": _wrong_scan, "verify": _wrong_verify, "seal": _wrong_seal}


def _unsaid(answer: dict[str, Any]) -> bool:
    """The inspection failed, or Python itself ended; the caller has checked for the latter."""
    return answer["code"] in (COULD_NOT_LOOK, 1) or answer["code"] < 0


def _wrong_verdict(said: str, bad: bool) -> str | None:
    if said == Verdict.UNKNOWN.value:
        return None
    if bad:
        return None if said in {one.value for one in BAD} else f"a bad step is called {said}"
    return None if said == Verdict.COMPLETE.value else f"a sound step is called {said}"


def _left_behind(step: Path, before: str, bad: bool) -> str | None:
    """The faults of the answer once there is enough memory."""
    own = step / ".ckptctl"
    if own.exists():
        left = [path.name for path in own.iterdir() if path.name != "seal.json"]
        if left:
            return f"left {', '.join(left)} behind"
    report = ckptctl.verify(str(step), level=Level.CONTENT)
    if (report.verdict is Verdict.COMPLETE) is bad:
        return f"with memory again, the step is {report.verdict.value}"
    if any(finding.code.startswith("seal.") and finding.verdict for finding in report.findings):
        return "the seal is a bad one"
    for path in own.rglob("*"):
        path.unlink()
    if own.exists():
        own.rmdir()
    return None if digest_of(step) == before else "the step was changed"

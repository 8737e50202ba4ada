"""Run many processes on one root at once for minutes, and check every answer.

    python tests/campaign/soak.py [--minutes 2] [--seed 1]

One saves steps as torch does, some of them damaged or never finished; one prunes; others
pick, verify, scan, seal, reject, accept and pin. Each command is a process of its own.
This process records what was saved and what was answered, and checks every answer: the
step that `pick` chooses is whole, was not rejected before, and is the newest such step; no
sound step is reported as damaged; marks and pins last; every exit code is documented.
Ends with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
for place in (REPOSITORY, REPOSITORY / "tests", HERE, REPOSITORY / "tests" / "formats"):
    sys.path.insert(0, str(place))

from made_checkpoints import checkpoints  # noqa: E402
from short_memory import Starved  # noqa: E402

from ckptctl.cli.commands import exit_codes  # noqa: E402

SUBJECT = "run_bare4/step_20"
GONE = (2, 20, 26)
"""What may be said of a step that was removed meanwhile."""


@dataclass
class Truth:
    """The truth about one step; times are of `time.monotonic`, and inf for never."""

    sound: bool
    whole_s: float = float("inf")
    marks: list[tuple[str, float, float]] = field(default_factory=list)

    def rejected(self, at_s: float) -> bool | None:
        """Whether it was rejected then; None while a command was changing that."""
        word = False
        for what, began_s, ended_s in self.marks:
            if began_s <= at_s:
                if ended_s > at_s:
                    return None
                word = {"reject": True, "accept": False}.get(what, word)
        return word

    def marked_since(self, at_s: float) -> bool:
        """Whether a command marked it after that, or had begun to."""
        return any(ended_s >= at_s for _, _, ended_s in self.marks)


class Root:
    """The root, the truth about it, and the answers."""

    def __init__(self, folder: Path, until_s: float, seed: int) -> None:
        self.path = folder / "run"
        self.path.mkdir()
        self.folder = folder
        self.until_s = until_s
        self.seed = seed
        self.truth: dict[int, Truth] = {}
        self.lock = threading.Lock()
        self.codes: Counter[tuple[str, int]] = Counter()
        self.problems: list[str] = []
        source = checkpoints() / SUBJECT
        self.files = {one.name: one.read_bytes() for one in source.iterdir() if one.is_file()}

    def step(self, number: int) -> Path:
        """The folder of a step."""
        return self.path / f"step_{number}"

    def stands(self, number: int) -> bool:
        """Whether the step exists, and no command has begun to remove it."""
        return (self.step(number) / ".metadata").is_file()

    def problem(self, said: str) -> None:
        """Record a check that failed."""
        with self.lock:
            self.problems.append(said)

    def some(self, draw: random.Random) -> int:
        """A step that was saved lately."""
        with self.lock:
            known = list(self.truth)[-8:]
        return draw.choice(known) if known else 0

    def newest_sound(self, began_s: float) -> int | None:
        """The newest step that was sound, not rejected and left alone from then until now."""
        with self.lock:
            known = list(self.truth.items())
        for number, truth in reversed(known):
            usable = truth.sound and truth.whole_s < began_s and truth.rejected(began_s) is False
            if usable and not truth.marked_since(began_s) and self.stands(number):
                return number
        return None


class Caller:
    """One user at a terminal: every command is a process of its own."""

    def __init__(self, root: Root, name: str) -> None:
        self.root = root
        self.draw = random.Random(f"{root.seed}-{name}")
        self._server = Starved(root.folder / name)

    def ask(self, *argv: object) -> dict[str, Any]:
        """Run a command, and count how it ended."""
        answer = self._server.ask(argv=[str(one) for one in argv])
        code, command = answer["code"], str(argv[0])
        with self.root.lock:
            self.root.codes[command, code] += 1
        if code not in exit_codes() or code == 1 or "Traceback" in answer["err"]:
            self.root.problem(f"{command} ends with {code}: {answer['err'][-300:]}")
        return answer

    def close(self) -> None:
        """Stop the user's commands."""
        self._server.close()


def save(root: Root, draw: random.Random, number: int) -> None:
    """Save one step in torch's order: shards, metadata under another name, its rename."""
    decision = draw.choice(("sound",) * 7 + ("damaged", "damaged", "interrupted"))
    truth = Truth(sound=decision == "sound")
    with root.lock:
        root.truth[number] = truth
    step = root.step(number)
    step.mkdir()
    shards = sorted(name for name in root.files if name.endswith(".distcp"))
    bad = draw.choice(shards)
    for name in shards:
        data = bytearray(root.files[name])
        if name == bad and decision == "damaged":
            data[len(data) // 2 : len(data) // 2 + 512] = bytes(512)
        if name == bad and decision == "interrupted":
            return
        with (step / name).open("wb") as file:
            for at in range(0, len(data), 16_384):
                file.write(data[at : at + 16_384])
                file.flush()
        time.sleep(draw.uniform(0, 0.01))
    (step / ".metadata.tmp").write_bytes(root.files[".metadata"])
    time.sleep(draw.uniform(0, 0.01))
    (step / ".metadata.tmp").rename(step / ".metadata")
    truth.whole_s = time.monotonic()


def writer(root: Root) -> None:
    """Save one step after the other."""
    draw = random.Random(f"{root.seed}-writer")
    number = 1000  # the step that all are copies of would show that they hold its name
    while time.monotonic() < root.until_s:
        number += 10
        save(root, draw, number)
        time.sleep(draw.uniform(0.05, 0.4))


def picker(root: Root, me: Caller) -> None:
    """Pick, and verify the step that was chosen."""
    began_s = time.monotonic()
    answer = me.ask("pick", root.path, "--level", "content", "-q")
    ended_s = time.monotonic()
    newest = root.newest_sound(began_s)
    if answer["code"] not in (0, 10, 11):
        root.problem(f"pick ends with {answer['code']}: {answer['err'][-300:]}")
    if answer["code"] != 0:
        # More than two damaged steps in a row stop it: that is a right answer, too.
        if answer["code"] == 10 and newest is not None:
            root.problem(f"pick says that there is no step, and {newest} is there")
        return
    number = int(answer["out"].strip().rpartition("_")[2])
    truth = root.truth[number]
    if not truth.sound or truth.whole_s > ended_s:
        root.problem(f"pick takes {number}, which is not whole")
    if truth.rejected(began_s) and not truth.marked_since(began_s):
        root.problem(f"pick takes {number}, which was rejected before")
    if newest is not None and number < newest:
        root.problem(f"pick takes {number}, and {newest} was there: {answer['err'][-600:]}")
    verify(root, me, number)


def verify(root: Root, me: Caller, number: int | None = None) -> None:
    """Verify a step, and compare the answer with what was saved."""
    number = root.some(me.draw) if number is None else number
    if not number:
        return
    began_s = time.monotonic()
    whole = root.truth[number].whole_s < began_s and root.stands(number)
    answer = me.ask("verify", root.step(number), "--level", "content")
    code = answer["code"]
    truth = root.truth[number]
    if code == 0 and not truth.sound:
        root.problem(f"verify calls {number} complete, which is not")
    if not (truth.sound and whole) or code in (0, 27):
        return
    time.sleep(0.05)
    if code not in GONE or root.stands(number):
        said = answer["out"][:600]
        root.problem(f"verify ends with {code} on {number}, which is sound and there: {said}")


def sealer(root: Root, me: Caller) -> None:
    """Seal a step; one that is not sound is refused."""
    number = root.some(me.draw)
    code = me.ask("seal", root.step(number), "-q")["code"] if number else None
    if code == 0 and not root.truth[number].sound:
        root.problem(f"{number} was sealed, which is not sound")


def marker(root: Root, me: Caller) -> None:
    """Reject, accept or pin a step."""
    number, word = root.some(me.draw), me.draw.choice(("reject", "reject", "accept", "pin"))
    if not number:
        return
    truth = root.truth[number]
    began_s = time.monotonic()
    entry = len(truth.marks)
    truth.marks.append((word, began_s, float("inf")))
    reason = [] if word == "pin" else ["--reason", "soak"]
    code = me.ask(word, root.step(number), *reason, "--by", "soak", "-q")["code"]
    said = word if code == 0 else "nothing"
    truth.marks[entry] = (said, began_s, time.monotonic())
    time.sleep(me.draw.uniform(0.1, 0.5))


def pruner(root: Root, me: Caller) -> None:
    """Remove what may go; a pinned step may not."""
    began_s = time.monotonic()
    answer = me.ask("prune", root.path, "--keep", 3, "--unsealed", "--apply", "--json")
    if answer["code"] == 0:
        for one in json.loads(answer["out"])["decisions"]:
            number = int(one["url"].rpartition("_")[2]) if one["removed"] else 0
            marks = root.truth[number].marks if number else ()
            if any(word == "pin" and ended_s < began_s for word, _, ended_s in marks):
                root.problem(f"{number} was removed, which was pinned before")
    time.sleep(me.draw.uniform(0.2, 0.8))


def scanner(root: Root, me: Caller) -> None:
    """Scan all steps; only the exit code is checked."""
    me.ask("scan", root.path, "--level", me.draw.choice(("listing", "structure")), "--json")
    time.sleep(me.draw.uniform(0, 0.3))


ROLES: tuple[tuple[str, Callable[[Root, Caller], None]], ...] = (
    ("picker-0", picker),
    ("picker-1", picker),
    ("verifier", verify),
    ("sealer", sealer),
    ("marker-0", marker),
    ("marker-1", marker),
    ("pruner", pruner),
    ("scanner", scanner),
)


def soak(folder: Path, minutes: float, seed: int) -> Root:
    """Run all users on one root until the time limit, then check once more without them."""
    with _callers(Root(folder, float("inf"), seed)) as (root, callers):
        root.until_s = time.monotonic() + 60 * minutes
        threads = [threading.Thread(target=_guarded, args=(root, lambda: writer(root)))]
        for (_, act), me in zip(ROLES, callers, strict=True):
            threads.append(threading.Thread(target=_guarded, args=(root, _until(root, act, me))))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _in_quiet(root, callers[0])
    return root


@contextmanager
def _callers(root: Root) -> Iterator[tuple[Root, list[Caller]]]:
    callers = [Caller(root, name) for name, _ in ROLES]
    try:
        yield root, callers
    finally:
        for caller in callers:
            caller.close()


def _until(root: Root, act: Callable[[Root, Caller], None], me: Caller) -> Callable[[], None]:
    def run() -> None:
        while time.monotonic() < root.until_s:
            act(root, me)

    return run


def _guarded(root: Root, run: Callable[[], None]) -> None:
    try:
        run()
    except Exception as error:
        root.problem(f"{type(error).__name__}: {error}")
        raise


def _in_quiet(root: Root, me: Caller) -> None:
    """What must be true when nobody writes any more."""
    picked = [me.ask("pick", root.path, "--level", "content", "-q", "--max-fallback", 99)
              for _ in range(2)]  # fmt: skip
    if picked[0]["out"] != picked[1]["out"]:
        root.problem(f"pick says {picked[0]['out']} and then {picked[1]['out']}")
    newest = root.newest_sound(time.monotonic())
    expected = "" if newest is None else str(root.step(newest))
    if picked[0]["out"].strip() != expected:
        root.problem(f"in quiet, pick says {picked[0]['out']!r} where {expected!r} is right")
    for number, truth in root.truth.items():
        if truth.rejected(time.monotonic()) and truth.sound and root.stands(number):
            code = me.ask("verify", root.step(number), "-q")["code"]
            if code != 27:
                root.problem(f"{number} was rejected, and verify ends with {code}")
    left = [path.name for path in root.path.rglob("*") if path.name.endswith((".tmp", ".part"))]
    if any(name != ".metadata.tmp" for name in left):
        root.problem(f"left behind: {', '.join(left)}")


def main() -> int:
    """Run the soak, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=memory))
    try:
        root = soak(folder, asked.minutes, asked.seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    by: dict[str, list[str]] = {}
    for (command, code), n in sorted(root.codes.items()):
        by.setdefault(command, []).append(f"{code}: {n:,}")
    for command, codes in by.items():
        print(f"{command:8} {', '.join(codes)}")
    print(f"{len(root.truth):,} steps saved, {sum(root.codes.values()):,} commands, "
          f"{len(root.problems)} problems")  # fmt: skip
    for problem in root.problems[:40]:
        print("PROBLEM", problem)
    return 1 if root.problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Simulate a power cut at every write of ckptctl, and check what is lost.

    python tests/campaign/power_cuts.py [--share 0.05] [--seed 0] [--jobs 2] [--only save]
                                        [--systems ext4 xfs] [--page tests/campaign/results.md]

Each writer is run once and watched: at its end everything must be flushed, by the
guarantees of POSIX, without relying on a journal. Then, on a disk of its own, it is stopped
right before each of its calls that change files, and after the last. The disk is cut off,
with all, only the names, or nothing of the unflushed data on it; it is mounted again, and
inspected. Finally the same writer is run again, and must succeed.

Ends with 1 if something is wrong, with 3 if no disk can be cut off on this machine.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import re
import shutil
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
for folder in (REPOSITORY, REPOSITORY / "tests", REPOSITORY / "tests/train", HERE):
    sys.path.insert(0, str(folder))

from cut_disk import Disk, Left, System, why_not  # noqa: E402
from watched_calls import Unflushed, stop_before, watch  # noqa: E402
from written_things import WRITERS, Writer, make_base, scratch  # noqa: E402

WITHOUT_DISKS = 3
_PATIENCE_S = 600
"""How long a process may take that does one thing, before it is ended and says where it hung."""

_RECLAIMED = re.compile(r"name removed: .*/\.ckptctl/resharding(/|$)")
"""Left-overs of finished work: whether they are gone or back, nobody reads them."""


@dataclass(frozen=True)
class Cut:
    """A power cut before call `number` of a writer; one past the last is its end."""

    writer: type[Writer]
    number: int
    left: Left
    system: System

    def __str__(self) -> str:
        left = self.left.name.lower()
        return f"{self.writer.name}, call {self.number}, {left} left, {self.system.value}"


def main() -> None:
    asked = _parsed()
    if "CKPTCTL_CUTS_ALONE" not in os.environ and not any(map(why_not, asked.systems)):
        # In a mount namespace of its own: nothing stays mounted when this process ends.
        os.environ["CKPTCTL_CUTS_ALONE"] = "1"
        os.execvp("unshare", ["unshare", "--mount", sys.executable, *sys.argv])
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["OMP_NUM_THREADS"] = "1"
    import one_process  # noqa: F401 - torch is there before processes are forked
    import torch._dynamo  # noqa: F401 - which the first optimizer of a process would import

    if asked.hook:
        exec(compile(asked.hook.read_text(), str(asked.hook), "exec"), {})
    with scratch() as folder:
        base = Path(folder) / "base"
        base.mkdir()
        chosen = [each for each in WRITERS if not asked.only or each.name in asked.only]
        in_child(lambda: _made(base, chosen))
        n_calls, problems = watched(chosen, base, Path(folder))
        print(f"{len(n_calls)} writers, {sum(n_calls.values())} calls; not flushed at the end of")
        print(f"them, or renamed before: {len(problems)}\n{''.join(problems)}", flush=True)
        for system in asked.systems:
            if why := why_not(system):
                print(f"no power was cut on {system.value}: {why}")
                sys.exit(1 if problems else WITHOUT_DISKS)
        cuts = planned(n_calls, asked)
        print(f"{len(cuts)} power cuts, seed {asked.seed}", flush=True)
        results = []
        for result in cut_all(cuts, base, Path(folder), asked.jobs):
            results.append(result)
            if len(results) % 100 == 0:
                print(f"{len(results)} of {len(cuts)}", flush=True)
    problems += [f"{cut}: {said}\n" for cut, _, said in results if said]
    lines = table(results, n_calls)
    print("\n".join(lines))
    if asked.page:
        publish(asked.page, lines)
    sys.exit("".join(["\n", *problems]) if problems else 0)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cut the power under all that is written.")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", nargs="+", choices=[writer.name for writer in WRITERS])
    parser.add_argument("--systems", nargs="+", type=System, default=list(System))
    parser.add_argument("--page", type=Path, help="a page with a place for the table")
    parser.add_argument("--hook", type=Path, help="a file to run first, to break something")
    return parser.parse_args()


def _made(base: Path, writers: Sequence[type[Writer]]) -> None:
    make_base(base)
    for writer in writers:
        writer(base)


def watched(
    writers: Sequence[type[Writer]], base: Path, folder: Path
) -> tuple[dict[type[Writer], int], list[str]]:
    """How many calls each writer makes, and what it leaves unflushed."""
    n_calls, problems = {}, []
    for writer in writers:
        disk = folder / "watched"
        disk.mkdir()
        seen = in_child(lambda writer=writer, disk=disk: _watched(writer(base), disk))
        n_calls[writer] = seen["calls"]
        problems += [f"{writer.name}: {one}\n" for one in seen["problems"]]
        shutil.rmtree(disk)
    return n_calls, problems


def _watched(writer: Writer, disk: Path) -> dict[str, Any]:
    writer.prepare(disk)
    ready = writer.ready(disk)
    seen = Unflushed()
    watch(disk, seen)
    writer.write(disk, ready)
    n_calls = len(seen.calls)
    left = [one for one in seen.left() if not _RECLAIMED.match(one)]
    return {"calls": n_calls, "problems": [*seen.too_early, *left]}


def planned(n_calls: dict[type[Writer], int], asked: argparse.Namespace) -> list[Cut]:
    """The cuts: all, or a random share with at least one for each writer, in order."""
    draw = Random(asked.seed)
    cuts = []
    for writer, n in n_calls.items():
        every = [
            Cut(writer, number, left, system)
            for system, number, left in product(asked.systems, range(1, n + 2), Left)
        ]
        n_drawn = max(1, round(asked.share * len(every)))
        cuts += sorted(draw.sample(every, n_drawn), key=every.index)
    return cuts


Result = tuple[Cut, bool, str]


def cut_all(cuts: Sequence[Cut], base: Path, folder: Path, jobs: int) -> Iterator[Result]:
    """Run the cuts in so many processes; each has a disk of its own."""
    ends = []
    for job in range(jobs):
        own = folder / f"job-{job}"
        own.mkdir()
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_fd)
            with os.fdopen(write_fd, "w") as told:
                _work(cuts[job::jobs], base, own, told)
            os._exit(0)
        os.close(write_fd)
        ends.append((pid, cuts[job::jobs], os.fdopen(read_fd)))
    for pid, own_cuts, told in ends:
        n_told = 0
        for cut, line in zip(own_cuts, told, strict=False):
            returned, said = json.loads(line)
            if said:
                print(f"{cut}: {said}", flush=True)
            yield cut, returned, said
            n_told += 1
        os.waitpid(pid, 0)
        for cut in own_cuts[n_told:]:
            yield cut, False, "it was not run: the process of the campaign has died"


def _work(cuts: Sequence[Cut], base: Path, folder: Path, told: Any) -> None:
    disk, there = Disk(folder), None
    for cut in cuts:
        writer = cut.writer(base)
        if there != (cut.writer, cut.system):
            disk.make(cut.system)
            in_child(lambda writer=writer: writer.prepare(disk.mounted))
            disk.keep()
            there = (cut.writer, cut.system)
        try:
            outcome = cut_one(cut, writer, disk)
        except (Failed, RuntimeError, OSError) as error:
            outcome = (False, f"{type(error).__name__}: {error}")
        told.write(json.dumps(outcome) + "\n")
        told.flush()


def cut_one(cut: Cut, writer: Writer, disk: Disk) -> tuple[bool, str]:
    """Whether the writer had returned before the power cut, and what is wrong after it."""
    disk.restore()
    try:
        pid = forked(lambda: _write_and_stop(cut.number, writer, disk))
        _, status = os.waitpid(pid, os.WUNTRACED)
        stopped = os.WIFSTOPPED(status)
        disk.cut(cut.left)
        if stopped:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        elif status:
            return False, f"the writer ended with {os.waitstatus_to_exitcode(status)}"
        disk.unmount()
        disk.mount()
        problems = in_child(lambda: list(writer.judged(disk.mounted, returned=not stopped)))
        if not problems:
            again = in_child(lambda: _again(writer, disk.mounted))
            problems = [f"and when it was run again: {one}" for one in again]
    finally:
        disk.unmount()
    return not stopped, "; ".join(problems)


def _write_and_stop(number: int, writer: Writer, disk: Disk) -> None:
    ready = writer.ready(disk.mounted)
    disk.settle()
    watch(disk.mounted, stop_before(number))
    writer.write(disk.mounted, ready)


def _again(writer: Writer, disk: Path) -> list[str]:
    writer.again(disk)
    return list(writer.judged(disk, returned=True))


def forked(work: Callable[[], object]) -> int:
    """A process that does this and nothing else; its number."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    faulthandler.dump_traceback_later(_PATIENCE_S, exit=True)
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must not go on as what it was forked from
        traceback.print_exc()
    finally:
        os._exit(code)


class Failed(Exception):
    """A call in a process of its own did not return."""


def in_child(work: Callable[[], Any]) -> Any:
    """The result of a call in a process of its own. Raises `Failed`."""
    read_fd, write_fd = os.pipe()

    def told() -> None:
        os.close(read_fd)
        try:
            said = {"gave": work()}
        except BaseException:  # noqa: BLE001 - the same
            said = {"raised": traceback.format_exc()}
        with os.fdopen(write_fd, "w") as file:
            json.dump(said, file)

    pid = forked(told)
    os.close(write_fd)
    with os.fdopen(read_fd) as file:
        text = file.read()
    os.waitpid(pid, 0)
    said = json.loads(text or '{"raised": "it died"}')
    if "raised" in said:
        raise Failed(said["raised"])
    return said["gave"]


HEAD = "| written | calls that change files | power cuts | after its end | something wrong |"


def table(results: Sequence[Result], n_calls: dict[type[Writer], int]) -> list[str]:
    """A line for each writer, and one for all of them."""
    cuts = Counter(cut.writer for cut, _, _ in results)
    ended = Counter(cut.writer for cut, returned, _ in results if returned)
    wrong = Counter(cut.writer for cut, _, said in results if said)
    lines = [HEAD, "|---|---:|---:|---:|---:|"]
    for writer, n in n_calls.items():
        numbers = (n, cuts[writer], ended[writer], wrong[writer])
        lines.append(f"| {writer.name} | {' | '.join(f'{each:,}' for each in numbers)} |")
    sums = (sum(each.values()) for each in (n_calls, cuts, ended, wrong))
    return [*lines, f"| all | {' | '.join(f'{each:,}' for each in sums)} |"]


def publish(page: Path, lines: Sequence[str]) -> None:
    """Put the table between the marks of a page."""
    block = re.compile(r"(<!-- power cuts -->\n).*?(<!-- end -->)", re.DOTALL)
    body = "\n".join(lines)
    page.write_text(block.sub(lambda match: f"{match[1]}{body}\n{match[2]}", page.read_text()))


if __name__ == "__main__":
    main()

"""S: roots of runs in file names that nobody knows: lost, mixed, renamed, abandoned, or sound.

A run of two to five ranks saves three or four steps in files whose names are made at random:
words, the place and padding of the rank, a count, folders, an ending. The tensors are split over
the ranks, one file counts the steps, and the write times are those of training. Then the newest
step loses files, or is saved again in part; an older step gets its name; the run goes back; or
nothing is wrong: another world size, a copy with new times in any order. A step that is not whole,
not of one save or not the step of its name is never chosen, and sound steps always are. `prune`
leaves a sound step.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random

from oracle import Outcome

import ckptctl

N_CASES = 1200

NOW_S = 1_790_000_000.0
_ROWS = 240

Names = Callable[[str, int, int], str]
"""The path of the file of a kind, for a rank among so many."""


def made_run(chance: Random, root: Path, outcome: Outcome) -> None:
    """Make a root, spoil its newest step or not, and run `pick`, `verify` and `prune`."""
    run = _Run(chance, root)
    for number in run.numbers:
        run.save(number)
    newest = run.numbers[-1]
    how, harmed = chance.choice(_EVENTS)
    event = how(run)
    if event is None:  # the event makes no difference in such a run
        how, harmed, event = _untouched, False, _untouched(run)
    outcome.step, outcome.about = f"step_{newest}", f"{event}; {run.names('KIND', 1, run.n_ranks)}"
    outcome.harm = "values" if harmed else "none"
    found = ckptctl.pick(str(root), grace_s=0, max_fallback=5)
    chosen = found.chosen.number if found.chosen is not None else None
    outcome.verdict = f"{chosen}" if chosen is not None else found.message
    outcome.said = found.message
    if harmed:
        is_told = any(one.code == "root.two-branches" for one in found.findings)
        is_missed = chosen in run.spoiled and not is_told
        outcome.problem = "missed" if is_missed else None
        outcome.caught = None if is_missed else "listing"
    elif chosen != run.newest:
        outcome.problem = "false alarm"
    if outcome.problem is None:
        ckptctl.prune(str(root), 1, unsealed=True, apply=True, grace_s=0)
        left = {int(path.name.removeprefix("step_")) for path in root.glob("step_*")}
        if not left & run.sound:
            outcome.problem = "prune removed every sound step"


class _Run:
    """A run with file names of its own; `spoiled` are steps that must not be chosen."""

    def __init__(self, chance: Random, root: Path) -> None:
        self.chance, self.root = chance, root
        self.n_ranks = chance.choice((2, 3, 4, 5))
        words = [_word(chance) for _ in range(3)]
        self.kinds = words[: chance.choice((2, 2, 3))]
        self.names = _names(chance)
        spacing = chance.choice((10, 25, 100, 1000))
        self.numbers = [spacing * n for n in range(1, chance.choice((4, 5)))]
        self.interval_s = chance.choice((40.0, 600.0, 20_000.0))
        self.sound: set[int] = set()
        self.spoiled: set[int] = set()

    @property
    def newest(self) -> int:
        return max(self.sound)

    def save(self, number: int, n_ranks: int | None = None, at_s: float | None = None) -> None:
        """Write a step: all files within two seconds."""
        n_ranks = n_ranks or self.n_ranks
        place = self.numbers.index(number) if number in self.numbers else 0
        began_s = NOW_S + place * self.interval_s if at_s is None else at_s
        for path, content in self.contents(number, n_ranks):
            _write(path, content, began_s + self.chance.uniform(0.0, 2.0))
        self.sound.add(number)

    def contents(self, number: int, n_ranks: int) -> Iterator[tuple[Path, object]]:
        """The files of a step, and what they hold."""
        import torch

        rows = _ROWS // n_ranks
        for rank in range(n_ranks):
            values = torch.full((rows, 2), float(number + rank))
            moments = {"exp_avg": values * 0.5, "exp_avg_sq": values * 0.25, "step": float(number)}
            held: list[object] = [
                {"weights": {"w": values}, "step": number},
                {"state": {0: moments}, "param_groups": [{"lr": 0.1, "params": [0]}]},
                {"anything": values * 3.0},
            ]
            for kind, content in zip(self.kinds, held, strict=False):
                yield self.path(number, kind, rank, n_ranks), content

    def path(self, number: int, kind: str, rank: int, n_ranks: int | None = None) -> Path:
        return self.root / f"step_{number}" / self.names(kind, rank, n_ranks or self.n_ranks)

    def files(self, number: int) -> list[Path]:
        return [path for path, _ in self.contents(number, self.n_ranks)]

    def spoil(self, number: int) -> None:
        self.sound.discard(number)
        self.spoiled.add(number)


def _word(chance: Random) -> str:
    return "".join(chance.choice("bdfgklmnprstvz") + chance.choice("aeiou") for _ in range(3))


def _names(chance: Random) -> Names:
    base, width = chance.choice((0, 0, 0, 1)), chance.choice((1, 1, 2, 5))
    ending = chance.choice((".pt", ".pth", ".bin", ".ckpt", ".pth.tar"))
    sep, word = chance.choice("_-."), chance.choice(("", "", "rank", "tp", _word(chance)))
    form = chance.choice(
        (
            "{kind}{sep}{word}{rank}{end}",
            "{kind}{sep}{word}{rank}{sep}of{sep}{n}{end}",
            "{word}{rank}{sep}{kind}{end}",
            "{kind}/{word}{rank}{end}",
            "{word}{rank}/{kind}{end}",
            "{kind}{sep}ws{n}{sep}r{rank}{end}",
        )
    )

    def name(kind: str, rank: int, n_ranks: int) -> str:
        number = f"{rank + base:0{width}}"
        return form.format(kind=kind, sep=sep, word=word, rank=number, n=n_ranks, end=ending)

    return name


def _write(path: Path, content: object, at_s: float) -> None:
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    os.utime(path, (at_s, at_s))


def _untouched(_run: _Run) -> str:
    return "as it was saved"


def _resized(run: _Run) -> str | None:
    """The job went on with another number of ranks."""
    other = run.chance.choice([n for n in (2, 3, 4, 5, 6) if n != run.n_ranks])
    newest = run.numbers[-1]
    shutil.rmtree(run.root / f"step_{newest}")
    run.save(newest, n_ranks=other)
    return f"{other} ranks after {run.n_ranks}"


def _copied(run: _Run) -> str:
    """Copied without times, file by file in any order, once with a pause between two files."""
    files = [path for path in run.root.rglob("*") if path.is_file()]
    run.chance.shuffle(files)
    at_s, pause_at = NOW_S + 900_000.0, run.chance.randrange(2 * len(files))
    for place, path in enumerate(files):
        at_s += run.chance.uniform(0.0, 0.2) + (7200.0 if place == pause_at else 0.0)
        os.utime(path, (at_s, at_s))
    return "copied in any order"


def _lost(run: _Run) -> str:
    """Files of the newest step are gone: one, all of a rank, or all of a kind."""
    newest, ranks = run.numbers[-1], range(run.n_ranks)
    kind, rank = run.chance.choice(run.kinds), run.chance.choice(ranks)
    losses: Mapping[str, list[Path]] = {
        f"{kind} of rank {rank}": [run.path(newest, kind, rank)],
        "the last rank": [run.path(newest, one, run.n_ranks - 1) for one in run.kinds],
        f"rank {rank}": [run.path(newest, one, rank) for one in run.kinds],
        f"every {kind}": [run.path(newest, kind, one) for one in ranks],
    }
    what = run.chance.choice([*losses])
    for path in losses[what]:
        path.unlink()
    run.spoil(newest)
    return f"without {what}"


def _mixed(run: _Run) -> str:
    """The newest step was saved again in place, and the save was killed before its last files."""
    newest = run.numbers[-1]
    files = [*run.contents(newest, run.n_ranks)]
    run.chance.shuffle(files)
    gap_s = run.chance.choice((700.0, 50_000.0, 300_000.0))
    n_again = run.chance.randrange(1, len(files))
    again_s = NOW_S + (len(run.numbers) - 1) * run.interval_s + gap_s
    for path, content in files[:n_again]:
        _write(path, content, again_s + run.chance.uniform(0.0, 2.0))
    run.spoil(newest)
    return f"{n_again} of {len(files)} files saved again after {gap_s:.0f} s"


def _renamed(run: _Run) -> str:
    """An older step has the name of one that is further than all."""
    further = run.numbers[-1] + (run.numbers[1] - run.numbers[0])
    older = run.chance.choice(run.numbers[:-1])
    (run.root / f"step_{older}").rename(run.root / f"step_{further}")
    run.sound.discard(older)
    run.spoil(further)
    return f"step {older} called {further}"


def _went_back(run: _Run) -> str:
    """The run went back to its first step, and saved others since."""
    first, spacing = run.numbers[0], run.numbers[1] - run.numbers[0]
    at_s = NOW_S + len(run.numbers) * max(run.interval_s, 600.0)
    for place in range(run.chance.choice((2, 3))):
        number = first + (place + 1) * max(1, spacing // 5)
        run.save(number, at_s=at_s + place * max(run.interval_s, 600.0))
    for number in run.numbers[1:]:
        run.spoiled.add(number)
    return "went back"


_EVENTS: tuple[tuple[Callable[[_Run], str | None], bool], ...] = (
    (_untouched, False),
    (_resized, False),
    (_copied, False),
    (_lost, True),
    (_lost, True),
    (_mixed, True),
    (_mixed, True),
    (_renamed, True),
    (_went_back, True),
)

"""P: retention of random roots; `pick` chooses the same step before and after it.

Roots of the steps of a real job: complete, without their scheduler, weights alone; sealed or
not, marked, pinned, damaged in every way of `made_roots`, copied under further numbers, of
several attempts. Then `prune --apply`, once to three times, at random levels.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

from made_roots import NUMBERS, VARIANTS, damage, damage_a_mark, put_step, taken, unseal
from oracle import Outcome

import ckptctl
from ckptctl import Level

N_CASES = 1_000

DAMAGE = ("none", "none", "none", "flip", "cut", "lost", "interrupted", "metadata")
MARKS = ("none", "none", "none", "rejected", "superseded", "pinned", "pinned and damaged")
LEVELS = (None, Level.LISTING, Level.STRUCTURE, Level.CONTENT)


def retained(chance: Random, templates: Path, root: Path, outcome: Outcome) -> None:
    """Make a root, prune it, and compare what `pick` chooses before and after."""
    root.mkdir(parents=True)
    pinned = _made(chance, templates, root)
    for _ in range(chance.randint(1, 3)):
        quick, sure = taken(root), taken(root, level=Level.CONTENT)
        keep, level, unsealed = chance.randint(1, 3), chance.choice(LEVELS), chance.random() < 0.5
        ckptctl.prune(str(root), keep, level=level, unsealed=unsealed, apply=True)
        outcome.about = f"keep {keep}, level {level}, unsealed {unsealed}"
        now = taken(root, level=Level.CONTENT)
        if sure is not None and (now is None or now < sure):
            outcome.problem = f"{sure} was sound at level content, and {now} is taken now"
        elif quick is not None and (taken(root) or 0) < quick:
            outcome.problem = f"{quick} was taken, and {taken(root)} is now"
        lost = sorted(name for name in pinned if not (root / name).exists())
        if lost:
            outcome.problem = f"{', '.join(lost)} was pinned and is gone"
        if outcome.problem:
            return


def _made(chance: Random, templates: Path, root: Path) -> list[str]:
    pinned = []
    for _ in range(chance.randint(1, 7)):
        number, attempt = chance.choice(NUMBERS), chance.choice((0, 0, 0, 1, 2))
        step = root / f"step_{number}{f'.attempt-{attempt}' if attempt else ''}"
        if step.exists():
            continue
        source = chance.choice(NUMBERS) if chance.random() < 0.2 else number
        put_step(templates, root, source, chance.choice((*VARIANTS, "whole")), name=step.name)
        if chance.random() < 0.5:
            unseal(step)
        mark = chance.choice(MARKS)
        if mark != "none":
            ckptctl.mark(str(step), mark.partition(" ")[0], reason="campaign")
        if mark.endswith("damaged"):
            damage_a_mark(step)
        damage(step, chance.choice(DAMAGE), chance)
        # An interrupted save has lost its marks as well.
        if any(step.glob(".ckptctl/marks/*-pinned-*")):
            pinned.append(step.name)
    return pinned

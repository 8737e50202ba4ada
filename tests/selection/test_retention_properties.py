"""Whatever lies in a root, no retention takes away what `pick` would take.

Random roots: steps that lack state, that are sealed or not, marked, pinned, damaged, copied
under further numbers, saved by several attempts. Then random sequences of `prune`, of jobs
that resume and save with `keep=`, and of pins. After each of them `pick` takes nothing
older than before, and what it takes when it looks at every byte is still there.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch")

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from made_roots import (
    NUMBERS,
    VARIANTS,
    damage,
    damage_a_mark,
    make_templates,
    put_step,
    script,
    taken,
    unseal,
)

import ckptctl
from ckptctl import Level
from ckptctl.errors import CkptctlError

pytestmark = pytest.mark.torch


@dataclass(frozen=True)
class Made:
    """How one step of a root came to be."""

    number: int
    variant: str
    sealed: bool
    damage: str
    mark: str
    copied_from: int | None
    attempt: int


def steps() -> st.SearchStrategy[Made]:
    """Steps as a run leaves them, most of them sound."""
    return st.builds(
        Made,
        number=st.sampled_from(NUMBERS),
        variant=st.sampled_from((*VARIANTS, "whole", "whole")),
        sealed=st.booleans(),
        damage=st.sampled_from(
            ("none", "none", "none", "none", "flip", "cut", "lost", "interrupted", "metadata")
        ),
        mark=st.sampled_from(
            ("none", "none", "none", "rejected", "superseded", "pinned", "pinned and damaged")
        ),
        copied_from=st.one_of(st.none(), st.none(), st.sampled_from(NUMBERS)),
        attempt=st.sampled_from((0, 0, 0, 1, 2)),
    )


Action = tuple[str, int, bool, Level | None]


def actions() -> st.SearchStrategy[Sequence[Action]]:
    """What is done to a root: `prune`, a job that saves, a pin."""
    one = st.tuples(
        st.sampled_from(("prune", "prune", "prune", "job", "pin")),
        st.integers(1, 3),
        st.booleans(),
        st.sampled_from((None, Level.LISTING, Level.STRUCTURE, Level.CONTENT)),
    )
    return st.lists(one, min_size=1, max_size=4)


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_templates(tmp_path_factory.mktemp("templates"))


def put(templates: Path, root: Path, made: Made, chance: random.Random) -> None:
    suffix = f".attempt-{made.attempt}" if made.attempt else ""
    step = root / f"step_{made.number}{suffix}"
    if step.exists():
        return
    source = made.copied_from if made.copied_from is not None else made.number
    put_step(templates, root, source, made.variant, name=step.name)
    if not made.sealed:
        unseal(step)
    word = made.mark.partition(" ")[0]
    if word != "none":
        ckptctl.mark(str(step), word, reason="said so")
    if "damaged" in made.mark:
        damage_a_mark(step)
    damage(step, made.damage, chance)


def pinned(root: Path) -> set[str]:
    return {str(path.parents[2]) for path in root.glob("step_*/.ckptctl/marks/*-pinned-*")}


def act(root: Path, action: Action) -> None:
    what, keep, unsealed, level = action
    if what == "prune":
        ckptctl.prune(str(root), keep, unsealed=unsealed, level=level, apply=True)
    elif what == "pin":
        for name in sorted(path.name for path in root.glob("step_*"))[-keep:]:
            ckptctl.mark(str(root / name), "pinned")
    else:
        job = script(root, keep=keep, settle_s=0.0)
        try:
            start = job.resume("auto")
            for step in (start.step + 50, start.step + 60):
                job.save(step)
        except CkptctlError as error:
            note(f"the job ended: {error.message}")
        finally:
            job.flush()
            job._leave("test")


def where(root: Path, number: int) -> bool:
    return any(
        path.name.partition(".")[0] == f"step_{number}" for path in root.glob(f"step_{number}*")
    )


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(made=st.lists(steps(), min_size=1, max_size=7), done=actions(), seed=st.integers(0, 2**16))
def test_no_retention_takes_away_what_pick_would_take(templates, made, done, seed):
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        root.mkdir()
        for one in made:
            put(templates, root, one, chance)
        copies = {one.number for one in made if one.copied_from not in (None, one.number)}
        for action in done:
            names = sorted(path.name for path in root.glob("step_*"))
            quick, sure, kept = taken(root), taken(root, level=Level.CONTENT), pinned(root)
            act(root, action)
            note(f"{action} on {names}: {sorted(path.name for path in root.glob('step_*'))}")
            now = taken(root, level=Level.CONTENT)
            # What a copy holds is older than its number, and a job goes on from there.
            if sure is not None and not (action[0] == "job" and sure in copies):
                assert now is not None, f"{sure} was sound, and nothing is left that is"
                assert now >= sure, f"{now} is taken where {sure} was sound"
            if action[0] != "job":
                # A job may find while it loads that what a quick look takes is damaged.
                assert (taken(root) or 0) >= (quick or 0)
                assert sure is None or where(root, sure)
                assert quick is None or where(root, quick)
            assert {path for path in kept if not Path(path).exists()} == set()
        shutil.rmtree(root)

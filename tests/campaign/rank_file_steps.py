"""R: rank-file steps of real frameworks, damaged at random, or sound in other surroundings.

The roots are those of the fixture: verl, DeepSpeed ZeRO, transformers, accelerate, Lightning.
A file of the newest step is removed, truncated, extended, zeroed in part, flipped in a bit, or
replaced by that of the step before if a seal proves the step. A damaged step is never chosen
at level `content`; one that was only renamed, touched or given a stray file is.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from oracle import Outcome

import ckptctl
from ckptctl import Level

N_CASES = 600

_NEWEST = re.compile(r"(?:global_step_?|checkpoint[-_]|.*step=)(?P<step>[0-9]+)(?:\.ckpt)?")
_BY_NAME_ALONE = re.compile(r"training_args\.bin|.*\.(?:json|txt|jinja|md|py)|README.*")
"""Files without a checksum that no seal is asked for."""
_LAST_RANK = re.compile(r"random_states_1\.pkl|rng_state_1\.pth")
"""Files whose names do not state how many there are: their loss is a warning."""


def _cut(data: bytes, chance: Random) -> bytes:
    return data[: chance.randrange(len(data))]


def _flipped(data: bytes, chance: Random) -> bytes:
    changed = bytearray(data)
    changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _zeroed(data: bytes, chance: Random) -> bytes:
    at = chance.randrange(len(data))
    end = min(len(data), at + chance.choice((1, 64, 4096)))
    return data[:at] + bytes(end - at) + data[end:]


def _longer(data: bytes, chance: Random) -> bytes:
    return data + chance.randbytes(chance.choice((1, 100, 5000)))


_CHANGES: Sequence[Callable[[bytes, Random], bytes]] = (_cut, _cut, _flipped, _zeroed, _longer)


def rank_file_step(chance: Random, roots: Path, root: Path, outcome: Outcome) -> None:
    """Copy a root, damage its newest step or not, and run `pick`."""
    source = chance.choice(sorted(path for path in roots.iterdir() if path.is_dir()))
    shutil.copytree(source, root, symlinks=True)
    steps = {int(m["step"]): path for path in root.iterdir() if (m := _NEWEST.fullmatch(path.name))}
    step, older = steps[max(steps)], steps[sorted(steps)[-2]]
    outcome.step, outcome.sealed = f"{source.name}/{step.name}", chance.random() < 0.5
    if outcome.sealed:
        for path in steps.values():
            ckptctl.seal(str(path), accept_unverifiable=True)
    harmed = chance.random() < 0.8 and _harm(step, older, chance, outcome)
    if not harmed:
        _leave_whole(root, step, chance, outcome)
    outcome.harm = "values" if harmed else "none"
    chosen = ckptctl.pick(
        str(root), level=Level.CONTENT, accept_unverifiable=True, grace_s=0, max_fallback=5
    ).path
    outcome.verdict = "chosen" if chosen == str(step) else "passed over"
    outcome.caught = "content" if harmed and chosen != str(step) else None
    if harmed and chosen == str(step):
        outcome.problem = "missed"
    elif not harmed and chosen != str(step):
        outcome.problem = "false alarm"


def _harm(step: Path, older: Path, chance: Random, outcome: Outcome) -> bool:
    """Damage a file; False where nothing can detect it."""
    file = chance.choice(_files(step))
    is_proven = outcome.sealed or file.suffix != ".safetensors"
    how = chance.randrange(len(_CHANGES) + 2)
    outcome.about = f"{file.name}: {how}"
    was = file.stat()
    if how == len(_CHANGES):
        if file == step or (_LAST_RANK.fullmatch(file.name) and not outcome.sealed):
            return False
        file.unlink()
        return True
    data = file.read_bytes()
    if how > len(_CHANGES):
        other = older if file == step else older / file.relative_to(step)
        changed = other.read_bytes() if outcome.sealed and other.exists() else data
    else:
        outcome.about = f"{file.name}: {_CHANGES[how].__name__}"
        changed = _CHANGES[how](data, chance)
        if how > 1 and len(changed) == len(data):
            changed = changed if is_proven else data
    file.write_bytes(changed)
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    return changed != data


def _files(step: Path) -> list[Path]:
    if step.is_file():
        return [step]
    files = (path for path in step.rglob("*") if path.is_file() and ".ckptctl" not in path.parts)
    return sorted(path for path in files if not _BY_NAME_ALONE.fullmatch(path.name))


def _leave_whole(root: Path, step: Path, chance: Random, outcome: Outcome) -> None:
    """Change what leaves the step sound."""
    how = chance.randrange(4)
    outcome.about = f"{outcome.about}; whole: {how}".lstrip("; ")
    if how == 0:
        for path in [root, *root.rglob("*")]:
            os.utime(path, (chance.randrange(2_000_000_000),) * 2, follow_symlinks=False)
    elif how == 1 and step.is_dir():
        (step / "README.md").write_text("a note\n")
    elif how == 2:
        (root / "latest").write_text("global_step999")
    elif how == 3:
        (root / "tensorboard").mkdir()
        (root / "tensorboard" / "events.out.tfevents.1").write_bytes(chance.randbytes(100))

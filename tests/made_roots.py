"""Roots of small steps that `Checkpointer` wrote: whole, or without some of the state.

Each step is saved once, under its own number, and copied with its times from then on.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from damage import flip_tensor

import ckptctl

NUMBERS = tuple(range(100, 900, 100))
VARIANTS = ("whole", "no-scheduler", "weights")


def script(root: Path, variant: str = "whole", **options: Any) -> Any:
    """A job with a small model; `variant` is what it saves."""
    import torch

    from ckptctl.train import Checkpointer

    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(16)).sum().backward()
    optimizer.step()
    given: dict[str, Any] = {"model": model, "tell": lambda _: None}
    if variant != "weights":
        given["optimizer"] = optimizer
    if variant == "whole":
        given["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return Checkpointer(str(root), **given, **options)


def make_templates(folder: Path) -> Path:
    """Save every step of `NUMBERS` in every variant: `FOLDER/VARIANT/step_N`, sealed."""
    pytest.importorskip("torch")
    folder.mkdir(parents=True, exist_ok=True)
    for variant in VARIANTS:
        with script(folder / variant, variant) as ckpt:
            ckpt.resume("none")
            for number in NUMBERS:
                ckpt.save(number)
    return folder


def put_step(
    templates: Path, root: Path, number: int, variant: str = "whole", *, name: str = ""
) -> Path:
    """Copy a step into a root, with its seal and its times."""
    source = templates / variant / f"step_{number}"
    return Path(shutil.copytree(source, root / (name or f"step_{number}")))


def unseal(step: Path) -> None:
    """Take the seal away; the step was written a day ago, an hour after the one 100 below it."""
    (step / ".ckptctl" / "seal.json").unlink(missing_ok=True)
    at_s = time.time() - 86_400 + 36 * int(re.sub("[^0-9]", "", step.name))
    for file in step.rglob("*"):
        os.utime(file, (at_s, at_s))


def interrupt(step: Path) -> None:
    """Leave what a save leaves that was killed long ago, before its metadata."""
    shutil.rmtree(step / ".ckptctl", ignore_errors=True)
    (step / ".metadata").unlink(missing_ok=True)
    for file in step.rglob("*"):
        os.utime(file, (1_600_000_000, 1_600_000_000))


def damage(step: Path, how: str, chance: random.Random) -> None:
    """Break a step: `flip`, `cut`, `lost`, `interrupted`, `metadata` or `none`."""
    shards = sorted(step.glob("*.distcp"))
    if how == "flip":
        flip_tensor(step)
    elif how == "cut":
        os.truncate(shards[0], chance.randrange(shards[0].stat().st_size))
    elif how == "lost":
        shards[0].unlink()
    elif how == "interrupted":
        interrupt(step)
    elif how == "metadata":
        data = bytearray((step / ".metadata").read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (step / ".metadata").write_bytes(data)


def damage_a_mark(step: Path) -> None:
    """Change one bit of the newest mark."""
    mark = max((step / ".ckptctl" / "marks").glob("*.json"))
    data = bytearray(mark.read_bytes())
    data[len(data) // 2] ^= 1
    mark.write_bytes(data)


def taken(root: Path, **options: Any) -> int | None:
    """The number of the step that `pick` takes; None for none."""
    found = ckptctl.pick(str(root), max_fallback=99, **options)
    return None if found.chosen is None else found.chosen.number


def written_hours_apart(root: Path) -> None:
    """As training wrote the steps without a seal, and no copy: with an hour between two."""
    steps = sorted(root.glob("*[0-9]"), key=lambda path: path.name)
    first_s = max(file.stat().st_mtime for file in steps[0].rglob("*"))
    for place, step in enumerate(steps):
        for file in () if (step / ".ckptctl" / "seal.json").exists() else step.rglob("*"):
            os.utime(file, (first_s + 3600 * place, first_s + 3600 * place))

"""Compare how existing tools and ckptctl report a damaged step.

    python tools/damage_table.py            # measure, and write the table of docs/complete.md

One step of a run that four real ranks saved is damaged in one way at a time.
Each time the usual sign (`.metadata` is there), stock `dcp.load` and `ckptctl
verify` are asked, and every tensor that was loaded is compared with what was
saved.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ckptctl
from ckptctl import Level

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "complete.md"
_BLOCK = re.compile(r"(<!-- measured -->\n).*?(?=<!-- end -->)", re.DOTALL)

Damage = Callable[[Path], None]
DAMAGES: dict[str, Damage] = {}


def main() -> int:
    """Measure, and renew the page."""
    with tempfile.TemporaryDirectory() as folder:
        make = REPOSITORY / "fixtures" / "make.py"
        saved = [sys.executable, str(make), "--out", folder, "--only", "run_bare4"]
        subprocess.run(saved, check=True)
        PAGE.write_text(renewed(PAGE.read_text(), Path(folder) / "run_bare4"))
    return 0


def renewed(text: str, root: Path) -> str:
    """The page with its table measured anew on the run at `root`."""
    return _BLOCK.sub(lambda match: match[1] + table(root), text)


@dataclass(frozen=True, slots=True)
class Row:
    """The answers about one kind of damage."""

    damage: str
    marker: str
    load: str
    verify: str

    def __str__(self) -> str:
        return f"| {self.damage} | {self.marker} | {self.load} | {self.verify} |\n"


def table(root: Path) -> str:
    """The table, in Markdown: a row for each damage of step 20, which has step 10 before it."""
    saved = _load(root / "step_20")
    head = Row("damage", "`.metadata` is there", "stock `dcp.load`", "`ckptctl verify`")
    rows = (str(_row(root, what, saved)) for what in ("nothing", *DAMAGES))
    return f"{head}|---|---|---|---|\n{''.join(rows)}"


def _row(root: Path, what: str, saved: dict[str, Any]) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(root, Path(folder) / "run"))
        step = copy / "step_20"
        if what in DAMAGES:
            DAMAGES[what](step)
        marker = "yes" if (step / ".metadata").exists() else "no"
        return Row(what, marker, _loaded(step, saved), _verified(step))


def _loaded(step: Path, saved: dict[str, Any]) -> str:
    import torch
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        found = _load(step, like=saved)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        return f"raises {type(cause).__name__}"
    wrong = sum(not torch.equal(found[name], tensor) for name, tensor in saved.items())
    if not wrong:
        return "loads"
    return f"**loads {wrong} of {len(saved)} tensors wrong without an error**"


def _load(step: Path, like: dict[str, Any] | None = None) -> dict[str, Any]:
    """The tensors of a step, read by stock torch; those of `like` are what is asked for."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if like is None:
        entries = FileSystemReader(step).read_metadata().state_dict_metadata
        like = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if hasattr(entry, "chunks")
        }
    state = {name: torch.full_like(tensor, 7) for name, tensor in like.items()}
    dcp.load(state, storage_reader=FileSystemReader(step), no_dist=True)
    return state


def _verified(step: Path) -> str:
    for level in Level:
        report = ckptctl.verify(str(step), level=level)
        if report.exit_code:
            fault = report.findings[0]
            return f"{report.verdict.value} ({report.exit_code}), {level.value}: `{fault.code}`"
    return "complete (0)"


def _damage(name: str) -> Callable[[Damage], Damage]:
    def register(damage: Damage) -> Damage:
        DAMAGES[name] = damage
        return damage

    return register


def _shard(step: Path, rank: int = 1) -> Path:
    return step / f"__{rank}_0.distcp"


def _rot(path: Path, data: bytes | bytearray) -> None:
    """Change bytes of a file as a disk does: its write time stays."""
    written = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))


def _payload(data: bytes) -> int:
    """A place in the middle of the largest tensor of a shard file."""
    starts = [match.end() for match in re.finditer(rb"/data/0", data)]
    ends = [data.find(b"PK", start) for start in starts]
    size, start = max((end - start, start) for start, end in zip(starts, ends, strict=True))
    return start + size // 2


@_damage("the metadata is missing")
def _no_metadata(step: Path) -> None:
    (step / ".metadata").unlink()


@_damage("the metadata was truncated to half")
def _half_metadata(step: Path) -> None:
    path = step / ".metadata"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@_damage("the metadata lacks one chunk")
def _dropped_chunk(step: Path) -> None:
    import pickle

    path = step / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    entries = metadata.state_dict_metadata.items()
    name, entry = next(pair for pair in entries if len(getattr(pair[1], "chunks", ())) > 1)
    gone = entry.chunks.pop(1)
    for index in list(metadata.storage_data):
        if index.fqn == name and index.offset == gone.offsets:
            del metadata.storage_data[index]
    path.write_bytes(pickle.dumps(metadata))


@_damage("a save over the step was killed before its metadata")
def _saved_over(step: Path) -> None:
    for rank in range(4):
        shutil.copyfile(_shard(step.parent / "step_10", rank), _shard(step, rank))
    shutil.copyfile(step.parent / "step_10" / ".metadata", step / ".metadata.tmp")


@_damage("a shard file is missing")
def _no_shard(step: Path) -> None:
    _shard(step).unlink()


@_damage("a shard file lost its last byte")
def _cut_shard(step: Path) -> None:
    _shard(step).write_bytes(_shard(step).read_bytes()[:-1])


@_damage("a bit of a tensor flipped")
def _flipped_bit(step: Path) -> None:
    data = bytearray(_shard(step).read_bytes())
    data[_payload(bytes(data))] ^= 0x40
    _rot(_shard(step), data)


@_damage("a block of a tensor was zeroed")
def _zeroed(step: Path) -> None:
    data = bytearray(_shard(step).read_bytes())
    start = _payload(bytes(data))
    data[start : start + 32] = bytes(32)
    _rot(_shard(step), data)


@_damage("a shard of the step before")
def _stale_shard(step: Path) -> None:
    shutil.copyfile(_shard(step.parent / "step_10"), _shard(step))


if __name__ == "__main__":
    raise SystemExit(main())

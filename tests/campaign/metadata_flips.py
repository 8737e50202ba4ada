"""Flip single bits of metadata, and count the flips that no check detects.

Decodes each result with little memory, and sorts it:

- rejected: the decoder refuses it;
- same: it decodes to the same content (an index that is only a hint, for example);
- caught: it decodes to other content, and an inspection of the step finds a fault;
- invisible: the only changes are in fields that neither a load nor a record can
  show, counted by their names;
- missed: anything else. The count must be 0.

    python tests/campaign/metadata_flips.py STEP [--flips 12000] [--seed 1]

`STEP` is a step directory of DCP. Without `--flips`, one random bit of every byte.
Ends with 1 if a flip was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from ckptctl import Level, verify
from ckptctl.errors import MetadataUnreadable, MetadataUnsafe
from ckptctl.formats.dcp.metadata import decode_metadata
from ckptctl.model import ByteRange, Metadata

INVISIBLE = frozenset(
    {
        "checkpoint_id",
        "save_id",
        "version",
        "requires_grad",
        "memory_format",
        "pin_memory",
        "shape without elements",
    }
)
"""torch writes these, and nothing of them is left in what a load returns."""

Flip = tuple[int, int]
"""A byte and one of its bits."""

Caught = Callable[[bytes], str | None]
"""The code of a fault that is found with this metadata in place of the real one."""


@dataclass
class Tally:
    """The number of flips by outcome."""

    rejected: Counter[str] = field(default_factory=Counter)
    same: int = 0
    caught: Counter[str] = field(default_factory=Counter)
    invisible: Counter[str] = field(default_factory=Counter)
    missed: list[tuple[Flip, list[str]]] = field(default_factory=list)

    @property
    def n_flips(self) -> int:
        """All of them."""
        counted = (self.rejected, self.caught, self.invisible)
        return sum(map(Counter.total, counted)) + self.same + len(self.missed)


def campaign(data: bytes, flips: Iterable[Flip], caught: Caught) -> Tally:
    """Decode `data` with each of `flips` in it; `caught` is asked where the content is another."""
    tally = Tally()
    original = decode_metadata(data)
    for at, bit in flips:
        changed = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
        try:
            decoded = decode_metadata(changed)
        except (MetadataUnreadable, MetadataUnsafe) as error:
            tally.rejected[error.code] += 1
            continue
        names = sorted(set(differences(original, decoded)))
        if not names:
            tally.same += 1
        elif code := caught(changed):
            tally.caught[code] += 1
        elif INVISIBLE.issuperset(names):
            tally.invisible[" + ".join(names)] += 1
        else:
            tally.missed.append(((at, bit), names))
    return tally


def differences(one: Metadata, other: Metadata) -> Iterator[str]:
    """The names of the fields in which two metadata differ."""
    for name in ("checkpoint_id", "save_id", "version"):
        if getattr(one, name) != getattr(other, name):
            yield name
    if one.planner_paths != other.planner_paths:
        yield "path"
    if one.strays != other.strays:
        yield "stray"
    if list(one.tensors) != list(other.tensors):
        yield "fqn"
    if list(one.bytes_entries) != list(other.bytes_entries):
        yield "fqn"
    for fqn in one.bytes_entries.keys() & other.bytes_entries.keys():
        yield from _ranges(one.bytes_entries[fqn].byte_range, other.bytes_entries[fqn].byte_range)
    for fqn in one.tensors.keys() & other.tensors.keys():
        mine, theirs = one.tensors[fqn], other.tensors[fqn]
        for name in mine.__slots__:
            if name != "chunks" and getattr(mine, name) != getattr(theirs, name):
                empty = name == "shape" and prod(mine.shape) == prod(theirs.shape) == 0
                yield "shape without elements" if empty else name
        if len(mine.chunks) != len(theirs.chunks):
            yield "chunks"
        for here, there in zip(mine.chunks, theirs.chunks, strict=False):
            if here.offsets != there.offsets:
                yield "chunk.offsets"
            if here.sizes != there.sizes:
                yield "chunk.sizes"
            yield from _ranges(here.byte_range, there.byte_range)


def _ranges(one: ByteRange | None, other: ByteRange | None) -> Iterator[str]:
    if one is None or other is None:
        if one is not other:
            yield "range"
        return
    for name in one.__slots__:
        if getattr(one, name) != getattr(other, name):
            yield f"range.{name}"


class Step:
    """A copy of a step whose metadata can be replaced."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.path = folder / source.name
        self.path.mkdir()
        for file in source.iterdir():
            if file.is_file() and file.name != ".metadata":
                os.link(file, self.path / file.name)
        shutil.copy2(source / ".metadata", self.path)
        self._normal = set(self._faults())

    def caught(self, changed: bytes) -> str | None:
        """The code of the first fault that the step has with this metadata, and else has not."""
        (self.path / ".metadata").write_bytes(changed)
        return next((code for code in self._faults() if code not in self._normal), None)

    def _faults(self) -> Iterator[str]:
        """The codes of what is found, at the shallowest level first."""
        for level in Level:
            for finding in verify(str(self.path), level=level).findings:
                if finding.verdict is not None:
                    yield finding.code


def chosen(data: bytes, n_flips: int | None, seed: int) -> list[Flip]:
    """Random flips: one in every byte, or as many as are asked for, none of them twice."""
    chance = random.Random(seed)
    if n_flips is None:
        return [(at, chance.randrange(8)) for at in range(len(data))]
    picked = chance.sample(range(8 * len(data)), min(n_flips, 8 * len(data)))
    return [divmod(number, 8) for number in picked]


def main() -> int:
    """Run the campaign on one step and print its tally."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step", type=Path)
    parser.add_argument("--flips", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--memory-mib", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    limit = asked.memory_mib << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    data = (asked.step / ".metadata").read_bytes()
    with tempfile.TemporaryDirectory(dir=asked.step.parent, prefix=".flips-") as folder:
        step = Step(asked.step, Path(folder))
        tally = campaign(data, chosen(data, asked.flips, asked.seed), step.caught)
    shown = {
        "flips": tally.n_flips,
        "rejected": dict(tally.rejected),
        "same": tally.same,
        "caught": dict(tally.caught),
        "invisible": dict(tally.invisible),
        "missed": [{"byte": at, "bit": bit, "fields": names} for (at, bit), names in tally.missed],
    }
    if asked.json:
        print(json.dumps(shown))
    else:
        for name, value in shown.items():
            print(f"{name:10}{value}")
    return 1 if tally.missed else 0


if __name__ == "__main__":
    sys.exit(main())

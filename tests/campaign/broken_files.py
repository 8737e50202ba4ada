"""Break the files of a step: the number of a case determines what is done.

A: bytes of a shard change. B: a file is truncated or extended. C: files are missing,
renamed, of another kind, or superfluous. L: all files are well-formed, and the step is wrong.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from oracle import Case, Claim
from sound_steps import Harm, Sound, place_of, put

Make = Callable[[int, Random, Sound], Case]


def damaged_bytes(number: int, chance: Random, subject: Sound) -> Case:
    """Change a bit, a byte, a sector, a page or 64 KiB of a shard."""
    name = chance.choice(subject.shards)
    data = bytearray(subject.files[name])
    kind = ("bit", "byte", "values", "sector", "page", "region", "stale", "shift")[number % 8]
    at = chance.randrange(len(data))
    spans = subject.bytes_with_values(name)
    if kind == "values" and spans:
        at = place_of(spans, chance.randrange(sum(b - a for a, b in spans)))
    if kind in ("bit", "values"):
        data[at] ^= 1 << chance.randrange(8)
    elif kind == "byte":
        data[at] ^= chance.randrange(1, 256)
    elif kind == "shift":
        _shift(data, at, chance)
    else:
        n = {"sector": 512, "page": 4096, "region": 65536, "stale": 512}[kind]
        at = at // min(n, 4096) * min(n, 4096)
        n = len(data[at : at + n])
        older = subject.older_bytes(name) or bytes(len(data))
        filled = {"region": chance.randbytes(n), "stale": older[at : at + n].ljust(n, b"\0")}
        data[at : at + n] = filled.get(kind, bytes(n))
    about = f"{kind} at {at:,} of {name}"
    return Case(about, lambda step: put(step / name, bytes(data)), sealed=number % 3 == 0)


def _shift(data: bytearray, at: int, chance: Random) -> None:
    """Insert or remove a few bytes, and keep the length of the file."""
    n, length = chance.choice([1, 2, 8, 64]), len(data)
    if chance.random() < 0.5:
        data[at:at] = chance.randbytes(n)
    else:
        del data[at : at + n]
    data[:] = bytes(data[:length]).ljust(length, b"\0")


def cut_files(number: int, chance: Random, subject: Sound) -> Case:
    """Truncate or extend a file: at 0, 1, at the edges of records and pages, anywhere."""
    name = chance.choice([*subject.shards, ".metadata"])
    data = subject.files[name]
    edges = [0, 1, len(data) - 1, len(data) // 2, chance.randrange(len(data))]
    for record in subject.records.get(name, ()):
        end = record.start + len(record.data)
        edges += [record.start, record.start + 1, end - 1, end]
    edges += [page + by for page in range(4096, len(data), 4096) for by in (-1, 0, 1)]
    if number % 4 == 0:
        more = chance.choice([b"\0", bytes(512), chance.randbytes(100), data[-4096:]])
        whole = Harm.NONE if name != ".metadata" else Harm.BYTES
        return Case(
            f"{name} goes on for {len(more):,} bytes",
            lambda step: put(step / name, data + more),
            harm=whole,
            sealed=number % 3 == 0,
            may_refuse=number % 3 == 0,  # a seal holds the length of each file
        )
    at = chance.choice([edge for edge in edges if edge < len(data)])
    return Case(
        f"{name} ends at {at:,} of {len(data):,}",
        lambda step: put(step / name, data[:at]),
        harm=Harm.VALUES if name == ".metadata" else None,
        sealed=number % 3 == 0,
    )


def odd_folders(number: int, chance: Random, subject: Sound) -> Case:
    """Remove, rename or replace files, or add some that nothing needs."""
    kinds = ("gone", "renamed", "cased", "folder", "pipe", "socket", "link", "extra", "leftover")
    kind = kinds[number % len(kinds)]
    sealed = number % 4 == 0
    names = [*subject.shards, ".metadata"]
    some = chance.sample(names, chance.randint(1, min(3, len(names))))
    about = f"{kind}: {', '.join(some)}"
    if kind in ("extra", "leftover"):
        return _beside(kind, chance, subject, sealed)
    harm = None if ".metadata" not in some else Harm.VALUES

    def spoil(step: Path) -> None:
        for name in some:
            path = step / name
            data = path.read_bytes()
            path.unlink()
            if kind == "renamed":
                put(step / f"{name}.bak", data)
            elif kind == "cased":
                put(step / name.upper(), data)
            elif kind == "folder":
                path.mkdir()
            elif kind == "pipe":
                os.mkfifo(path)
            elif kind == "socket":
                _bind(path)
            elif kind == "link":
                put(step.parent.parent / f"outside-{name}", data)
                path.symlink_to(f"../../outside-{name}")

    linked = kind == "link"
    return Case(about, spoil, Harm.NONE if linked else harm, sealed=sealed, may_refuse=linked)


def _bind(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _beside(kind: str, chance: Random, subject: Sound, sealed: bool) -> Case:
    """Add files that no metadata names: a note for each, whatever its name."""
    extra = ["__97_0.distcp", ".nfs000000012ab", "core.1234", "notes.txt", "__97_0.distcp.tmp"]
    name = chance.choice(extra if kind == "extra" else [".metadata.tmp", ".metadata.tmp.x"])
    data = chance.choice([b"", b"left over", subject.files[subject.shards[0]]])
    if kind == "leftover":
        data = chance.choice([b"", data, subject.files[".metadata"]])
    return Case(
        f"beside it lies {name} of {len(data):,} bytes",
        lambda step: put(step / name, data),
        Harm.NONE,
        sealed=sealed,
        may_refuse=kind == "leftover",  # the trace of a save in flight
    )


def wrong_but_sound(number: int, chance: Random, subject: Sound) -> Case:
    """Replace files by others that torch wrote, or could have: of another step, or swapped."""
    kinds = ("stale", "swapped", "moved", "dropped", "hole", "no chunks", "dtype", "shape")
    kind = kinds[number % len(kinds)]
    sealed = number // len(kinds) % 2 == 0
    if kind == "stale":
        names = [n for n in subject.shards if subject.older_bytes(n) is not None]
        if names:
            some = chance.sample(names, chance.randint(1, max(1, len(names) - 1)))
            olds = {name: subject.older_bytes(name) or b"" for name in some}
            about = f"of the step before: {', '.join(some)}"
            return Case(about, lambda s: _put_all(s, olds), claim=Claim.SEAL, sealed=sealed)
        kind = "swapped"
    if kind == "swapped":
        two = chance.sample(subject.shards, 2) if len(subject.shards) > 1 else []
        if two:
            swapped = {two[0]: subject.files[two[1]], two[1]: subject.files[two[0]]}
            about = f"swapped: {two[0]}, {two[1]}"
            return Case(about, lambda s: _put_all(s, swapped), claim=Claim.SEAL, sealed=sealed)
        kind = "hole"
    metadata = pickle.loads(subject.files[".metadata"])
    about, claim = _change(kind, metadata, chance)
    changed = pickle.dumps(metadata)
    harm = Harm.VALUES if about else Harm.NONE
    return Case(
        f"{kind}: {about or 'nothing to change'}",
        lambda step: put(step / ".metadata", changed),
        harm,
        claim=claim,
        sealed=sealed,
        may_refuse=sealed,  # metadata that was written anew is not what was sealed
    )


def _put_all(step: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        put(step / name, data)


def _change(kind: str, metadata: Any, chance: Random) -> tuple[str, Claim]:
    """Change metadata to another valid content; returns what was changed, or nothing."""
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    held = [f for f, e in entries.items() if getattr(e, "chunks", None) and 0 not in e.size]
    fqn = chance.choice(held)
    entry = entries[fqn]
    if kind == "dropped":
        del entries[fqn]
        for index in [index for index in places if index.fqn == fqn]:
            del places[index]
        return fqn, Claim.SEAL
    if kind == "moved":
        alike = [
            index
            for index in places
            if index.fqn in held and index != next(iter(places)) and _of_one_kind(entries, index)
        ]
        pairs = [
            (a, b)
            for a in alike
            for b in alike
            if a.fqn < b.fqn and _form(entries, a) == _form(entries, b)
        ]
        if not pairs:
            return "", Claim.SEAL
        a, b = chance.choice(pairs)
        places[a], places[b] = places[b], places[a]
        return f"{a.fqn} and {b.fqn} lie in each other's place", Claim.SEAL
    if kind == "hole":
        entry.chunks.pop(chance.randrange(len(entry.chunks)))
    elif kind == "no chunks":
        entry.chunks.clear()
    elif kind == "dtype":
        import torch

        other = torch.int16 if entry.properties.dtype != torch.int16 else torch.int64
        entry.properties.dtype = other
    else:
        import torch

        entry.size = torch.Size([*(entry.size or [1]), 2])
    return fqn, Claim.CONTENT


def _of_one_kind(entries: Any, index: Any) -> bool:
    return len(entries[index.fqn].chunks) == 1


def _form(entries: Any, index: Any) -> tuple[object, ...]:
    entry = entries[index.fqn]
    return (entry.properties.dtype, tuple(entry.size))


MAKERS: dict[str, tuple[Make, int]] = {
    "A": (damaged_bytes, 3000),
    "B": (cut_files, 1200),
    "C": (odd_folders, 1000),
    "L": (wrong_but_sound, 1000),
}
"""By category, with how many cases there are in a whole campaign."""

"""Steps made to attack their reader: nothing runs, nothing outside is read, memory is bounded.

Each begins as a sound step that torch wrote; one thing in it is then made hostile by
code. All questions are asked in a process of its own with little memory, which notes
what happens (`watched_inspection`). The payloads would create a file.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from every_case import all_cases
from made_records import Made, archive, members_of

from ckptctl.formats.archive.directory import parse_directory
from ckptctl.formats.archive.writing import fold_of
from ckptctl.formats.own.seals import SEAL

pytestmark = pytest.mark.torch

WATCHED = Path(__file__).parent.parent / "watched_inspection.py"
LIMIT_MIB = 200
"""Beyond what Python and all modules take: two buffers, two threads, and what is decoded."""

CANARY = "canary"
PAYLOAD = b"\x80\x02cposix\nsystem\n(X\x0c\x00\x00\x00touch canaryt\x52."
SHARD = "__0_0.distcp"
MIB = 1 << 20

Spoil = Callable[[Path], object]


def metadata_of(step: Path) -> object:
    return pickle.loads((step / ".metadata").read_bytes())


def with_metadata(change: Callable[[object], object]) -> Spoil:
    """A step whose metadata was changed by one who knows its classes."""

    def spoil(step: Path) -> None:
        metadata = metadata_of(step)
        change(metadata)
        (step / ".metadata").write_bytes(pickle.dumps(metadata))

    return spoil


def first(metadata: object, of: str = "tensor") -> object:
    """The index of the first tensor with elements, or of the first bytes entry."""
    for index in metadata.storage_data:
        entry = metadata.state_dict_metadata[index.fqn]
        if hasattr(entry, "chunks") == (of == "tensor") and index.fqn not in ("step",):
            return index
    raise LookupError(of)


def moved_to(path: str) -> Spoil:
    """The first shard of the metadata is said to lie at another path."""

    def change(metadata: object) -> None:
        for place in metadata.storage_data.values():
            if place.relative_path == SHARD:
                place.relative_path = path

    return with_metadata(change)


def with_record(
    make: Callable[[bytes], bytes], of: str = "tensor", transforms: tuple[str, ...] = ()
) -> Spoil:
    """The record of one entry is another, in a file of its own."""

    def spoil(step: Path) -> None:
        metadata = metadata_of(step)
        place = metadata.storage_data[first(metadata, of)]
        data = (step / place.relative_path).read_bytes()
        made = make(data[place.offset : place.offset + place.length])
        (step / "made.distcp").write_bytes(made)
        place.relative_path, place.offset, place.length = "made.distcp", 0, len(made)
        place.transform_descriptors = transforms or None
        (step / ".metadata").write_bytes(pickle.dumps(metadata))

    return spoil


def with_pickle(data: bytes) -> Callable[[bytes], bytes]:
    """Another pickle in a record that is torch's in everything else."""

    def make(record: bytes) -> bytes:
        members = members_of(record)
        pickled = next(member for member in members if member.name == "data.pkl")
        pickled.data = data
        made = archive(members)
        fold = fold_of(parse_directory(made, len(made)))
        members[-1].data = members[-1].data[:20] + b"%020d" % fold
        return archive(members)

    return make


def with_members(*more: Made) -> Callable[[bytes], bytes]:
    return lambda record: archive([*members_of(record), *more])


def with_70_000_members(record: bytes) -> bytes:
    return with_members(*(Made(f"x/{n}", b"") for n in range(70_000)))(record)


def deflated(n_bytes: int) -> Callable[[bytes], bytes]:
    """The elements are compressed: a megabyte that comes to many."""

    def make(record: bytes) -> bytes:
        import zlib

        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        # After a full flush the next megabyte is packed as the first one was.
        megabyte = packer.compress(bytes(MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
        stored = megabyte * (n_bytes // MIB) + packer.flush()
        members = members_of(record)
        for member in members:
            if member.name.startswith("data/"):
                member.data, member.method, member.size = stored, 8, n_bytes
                member.stored = len(stored)
        return archive(members)

    return make


def zstd_bomb(record: bytes) -> bytes:
    import zstandard

    packer = zstandard.ZstdCompressor(level=1).compressobj()
    return b"".join(packer.compress(bytes(MIB)) for _ in range(4096)) + packer.flush()


def in_place_of(name: str, make: Callable[[Path], object]) -> Spoil:
    """Something that is no file stands in the place of one."""

    def spoil(step: Path) -> None:
        path = step / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        make(path)

    return spoil


def a_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def sparse(n_bytes: int) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        path.touch()
        os.truncate(path, n_bytes)

    return make


def a_linked_shard(step: Path) -> None:
    outside = step.parent.parent.parent / "outside.distcp"
    shutil.copy2(step / SHARD, outside)
    (step / SHARD).unlink()
    (step / SHARD).symlink_to(outside)


def a_linked_step(step: Path) -> None:
    outside = step.parent.parent.parent / "outside"
    shutil.copytree(step, outside, dirs_exist_ok=True)
    shutil.rmtree(step)
    step.symlink_to(outside)


def a_name_for_terminals(metadata: object) -> None:
    """An FQN that would clear the screen, run on, and look like another line."""
    name = "\x1b]0;owned\x07\x1b[2J\n✓ complete: x\u202e\r" + "w" * MIB
    entries = metadata.state_dict_metadata
    index = first(metadata)
    entries[name] = entries.pop(index.fqn)
    for other in [one for one in metadata.storage_data if one.fqn == index.fqn]:
        place = metadata.storage_data.pop(other)
        metadata.storage_data[type(other)(name, other.offset, other.index)] = place
    if metadata.planner_data:
        metadata.planner_data.pop(index.fqn, None)
        metadata.planner_data[name] = (name,)


def in_seal(text: bytes) -> Spoil:
    return in_place_of(SEAL, lambda path: path.write_bytes(text))


def in_mark(make: Callable[[Path], object]) -> Spoil:
    name = ".ckptctl/marks/20260101T000000Z-rejected-76acf1dff443bcbf.json"
    return in_place_of(name, make)


DEEP = b'{"schema":"ckptctl.seal/1","files":' + b"[" * 100_000 + b"]" * 100_000 + b"}"

HOSTILE: Mapping[str, tuple[Spoil, int, set[str]]] = {
    # Paths
    "path absolute": (moved_to("/etc/hostname"), 25, {"path.escape"}),
    "path above": (moved_to("../../../outside.distcp"), 25, {"path.escape"}),
    "path down and above": (moved_to("a/../../b"), 25, {"path.escape"}),
    "path with a drive": (moved_to("C:\\windows"), 25, {"path.escape"}),
    "path with a zero": (moved_to("a\0b"), 25, {"path.escape"}),
    "path of metadata": (moved_to(".metadata"), 20, {"shard.truncated"}),
    "path empty": (moved_to(""), 25, {"path.escape"}),
    "path in percent": (moved_to("%2e%2e/x"), 20, {"shard.missing"}),
    "path of five thousand": (moved_to("x" * 5000), 20, {"shard.missing"}),
    "path for terminals": (moved_to("\x1b[2J\n✓"), 20, {"shard.missing"}),
    "link of a shard": (a_linked_shard, 2, {"step.linked"}),
    "link of the step": (a_linked_step, 2, set()),
    "name for terminals": (with_metadata(a_name_for_terminals), 0, set()),
    # What is no file
    "metadata a pipe": (in_place_of(".metadata", os.mkfifo), 25, {"path.escape"}),
    "metadata a socket": (in_place_of(".metadata", a_socket), 25, {"path.escape"}),
    "metadata a link to zeros": (
        in_place_of(".metadata", lambda path: path.symlink_to("/dev/zero")),
        2,
        {"step.linked"},
    ),
    "metadata of a terabyte": (
        in_place_of(".metadata", sparse(1 << 40)),
        21,
        {"metadata.unreadable"},
    ),
    "shard a pipe": (in_place_of(SHARD, os.mkfifo), 25, {"path.escape"}),
    "shard a folder": (in_place_of(SHARD, Path.mkdir), 20, {"shard.missing"}),
    # Records
    "record with a payload": (with_record(with_pickle(PAYLOAD)), 25, {"record.unsafe"}),
    "entry with a payload": (with_record(with_pickle(PAYLOAD), "bytes"), 25, {"record.unsafe"}),
    "entry of a plain payload": (
        with_record(lambda _: PAYLOAD, "bytes"),
        25,
        {"record.unsafe", "record.unverifiable"},
    ),
    "record with a member twice": (
        with_record(with_members(Made("data/0", b"x"))),
        21,
        {"record.framing"},
    ),
    "record with a member above": (
        with_record(with_members(Made("../../canary", b"x"))),
        21,
        {"record.framing"},
    ),
    "record after junk": (with_record(lambda record: b"#!junk" + record), 21, {"record.framing"}),
    "record of 70,000 members": (
        with_record(with_70_000_members),
        0,
        set(),
    ),
    "record that is a bomb": (with_record(deflated(1 << 30)), 21, {"record.framing"}),
    "record that is a zstd bomb": (
        with_record(zstd_bomb, transforms=("stream.zstd/1",)),
        21,
        {"record.framing"},
    ),
    "record through what nobody knows": (
        with_record(bytes, transforms=("evil/1",)),
        22,
        {"format.unsupported"},
    ),
    "record through zstd twice": (
        with_record(bytes, transforms=("stream.zstd/1", "stream.zstd/1")),
        22,
        {"format.unsupported"},
    ),
    # Seals and marks
    "seal deeply nested": (in_seal(DEEP), 0, {"seal.invalid"}),
    "seal of infinity": (in_seal(b'{"schema":"ckptctl.seal/1","n":1e999}'), 0, {"seal.invalid"}),
    "seal of surrogates": (in_seal(b'{"schema":"\\ud800"}'), 0, {"seal.invalid"}),
    "seal of digits": (in_seal(b'{"n":' + b"9" * MIB + b"}"), 0, {"seal.invalid"}),
    "seal of a terabyte": (in_place_of(SEAL, sparse(1 << 40)), 0, {"seal.invalid"}),
    "seal a pipe": (in_place_of(SEAL, os.mkfifo), 0, {"seal.invalid"}),
    "mark deeply nested": (
        in_mark(lambda path: path.write_bytes(DEEP)),
        27,
        {"mark.damaged", "step.rejected"},
    ),
    "mark of a terabyte": (in_mark(sparse(1 << 40)), 27, {"mark.damaged", "step.rejected"}),
    "mark a pipe": (in_mark(os.mkfifo), 27, {"mark.damaged", "step.rejected"}),
    "mark a link": (
        in_mark(lambda path: path.symlink_to("/dev/zero")),
        27,
        {"mark.damaged", "step.rejected"},
    ),
}


@dataclass(frozen=True)
class Outcome:
    codes: tuple[int, ...]
    findings: frozenset[str]
    events: tuple[str, ...]


@pytest.fixture(scope="module")
def outcomes(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Outcome]:
    """What became of each; the canary would be in the working folder."""
    folder, work = tmp_path_factory.mktemp("hostile") / "roots", tmp_path_factory.mktemp("work")
    folder.mkdir()
    source = checkpoints / "async_2" / "step_100"
    for name in ("sound", *HOSTILE):
        step = folder / name / "step_100"
        shutil.copytree(source, step)
        if name in HOSTILE:
            HOSTILE[name][0](step)
            if step.is_dir() and not step.is_symlink():
                for path in step.rglob("*"):
                    os.utime(path, (1.7e9, 1.7e9), follow_symlinks=False)
    done = subprocess.run(
        [sys.executable, str(WATCHED), str(LIMIT_MIB), str(folder)],
        cwd=work,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3_000:]
    assert not list(work.iterdir()), "a payload ran"
    found = {}
    for line in done.stdout.splitlines():
        name, codes, findings, events = json.loads(line)
        found[name] = Outcome(tuple(codes), frozenset(findings), tuple(events))
    return found


def test_the_payload_would_run_in_python_s_own_unpickler(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickle.loads(PAYLOAD)
    assert (tmp_path / CANARY).exists()


def test_the_sound_step_is_sound_where_it_is_watched(outcomes):
    assert outcomes["sound"] == Outcome((0, 0, 0, 0), frozenset(), ())


def test_it_is_told_for_what_it_is(outcomes):
    with all_cases() as case:
        for name, (_, code, findings) in HOSTILE.items():
            with case(name):
                assert outcomes[name].codes[0] == code, outcomes[name]
                assert findings <= outcomes[name].findings


def test_looking_runs_starts_and_opens_nothing_outside(outcomes):
    assert outcomes.keys() == {"sound", *HOSTILE}
    assert {name: found.events for name, found in outcomes.items() if found.events} == {}

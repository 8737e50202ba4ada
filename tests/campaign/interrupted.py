"""Build the states that an interrupted save can leave.

Replays the operations of real saves (`recorded_saves`) up to one of them, or to the
middle of it, and then removes what a power cut may remove: data that was not synced,
and names in a folder that was not synced.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

from oracle import SUSPICIONS, Case, Claim
from recorded_saves import __file__ as recorder
from recorded_saves import record
from sound_steps import OLD_S, Harm, Sound, put, sound

import ckptctl

N_CASES = 3000
LATER_S = OLD_S + 86_400
Files = dict[str, bytes]
VARIANTS = ("as it was", "half of a write", "unsynced data lost", "unsynced data zeros", "names")


@dataclass(frozen=True)
class Save:
    """A recorded save: what lay there before, what after, and each operation between."""

    name: str
    before: Files
    after: Files
    operations: list[list[object]]
    old: Sound | None
    new: Sound
    seal: bytes


def recorded(cache: Path) -> list[dict[str, object]]:
    """The saves of the torch that is installed, recorded once."""
    from importlib.metadata import version

    digest = hashlib.sha256(version("torch").encode() + Path(recorder).read_bytes()).hexdigest()
    file = cache / f"saves-{digest[:16]}.json"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(".part")
        record(aside)
        aside.rename(file)
    return json.loads(file.read_text())


def saves(cache: Path, folder: Path) -> list[Save]:
    """The recorded saves, with the sound steps that they begin with and lead to."""
    found = []
    for number, one in enumerate(recorded(cache)):
        before = {name: base64.b64decode(data) for name, data in one["before"].items()}
        after = {name: base64.b64decode(data) for name, data in one["after"].items()}
        older = folder / f"save-{number}" / "step_10"
        new = sound(_written(folder / f"save-{number}" / "new" / "step_20", after), older)
        _written(older, after)
        old, seal = None, b""
        if before:
            step = _written(folder / f"save-{number}" / "old" / "step_20", before)
            old = sound(step, older)
            ckptctl.seal(str(step))
            seal = (step / ".ckptctl" / "seal.json").read_bytes()
        found.append(Save(str(one["name"]), before, after, one["operations"], old, new, seal))
    return found


def _written(step: Path, files: Files) -> Path:
    step.mkdir(parents=True)
    for name, data in files.items():
        put(step / name, data)
    return step


class _Folder:
    """A step as the operations leave it; what was synced, and which names were there at first."""

    def __init__(self, before: Files) -> None:
        self.files = dict(before)
        self.first = dict(before)
        self.unsynced: set[str] = set()

    def apply(self, operation: list[object], *, half: bool = False) -> None:
        what, name = operation[0], str(operation[1])
        if what == "open":
            self.files[name] = b""
            self.unsynced.add(name)
        elif what == "write":
            at, data = int(str(operation[2])), base64.b64decode(str(operation[3]))
            data = data[: len(data) // 2] if half else data
            held = self.files[name].ljust(at, b"\0")
            self.files[name] = held[:at] + data + held[at + len(data) :]
            self.unsynced.add(name)
        elif what == "sync":
            self.unsynced.discard(name)
        elif what == "rename":
            self.files[str(operation[2])] = self.files.pop(name)
            if name in self.unsynced:
                self.unsynced.add(str(operation[2]))
        elif what == "remove":
            self.files.pop(name, None)

    def lose(self, how: str, chance: Random) -> None:
        """Remove what a power cut may remove."""
        if how.startswith("unsynced"):
            for name in self.unsynced & self.files.keys():
                data = self.files[name]
                keep = chance.choice([0, len(data) // 2, chance.randint(0, len(data))])
                rest = bytes(len(data) - keep) if how.endswith("zeros") else b""
                self.files[name] = data[:keep] + rest
        elif how == "names":
            # The folder was never synced: the rename may not have happened yet.
            if ".metadata.tmp" not in self.files and ".metadata" in self.files:
                self.files[".metadata.tmp"] = self.files.pop(".metadata")
            if ".metadata" in self.first and chance.random() < 0.5:
                self.files.setdefault(".metadata", self.first[".metadata"])


def interrupted(number: int, chance: Random, all_: list[Save]) -> tuple[Case, Save]:
    """One state that a save can leave."""
    save = all_[number % len(all_)]
    at = chance.choice([len(save.operations), chance.randint(0, len(save.operations))])
    at = chance.randint(0, len(save.operations)) if number % 20 else at
    how = chance.choice(VARIANTS)
    folder = _Folder(save.before)
    for operation in save.operations[:at]:
        folder.apply(operation)
    if how == "half of a write" and at < len(save.operations):
        folder.apply(save.operations[at], half=True)
    folder.lose(how, chance)
    sealed = bool(save.seal) and chance.random() < 0.5

    def spoil(step: Path) -> None:
        for path in step.iterdir():
            if path.is_file():
                path.unlink()
        for name, data in folder.files.items():
            put(step / name, data, OLD_S if data == save.before.get(name) else LATER_S)
        if sealed:
            (step / ".ckptctl").mkdir(exist_ok=True)
            put(step / ".ckptctl" / "seal.json", save.seal)

    about = f"{save.name}: {at} of {len(save.operations)} operations, {how}"
    # The step before stands in for one of the run: it holds what the new save holds.
    case = Case(about, spoil, sealed=sealed, suspicions=SUSPICIONS - {"shard.stale"})
    case.harm, case.claim = _truth(save, folder.files)
    # The old step is complete with its metadata: a new file beside it shows a save.
    case.may_refuse = case.harm is Harm.NONE and ".metadata.tmp" in folder.files
    if (
        sealed
        and case.harm is Harm.NONE
        and folder.files.get(".metadata") == save.before.get(".metadata")
    ):
        case.may_refuse = folder.files != save.before
    return case, save


def _truth(save: Save, files: Files) -> tuple[Harm, Claim]:
    """What a load of these files would give: the old step, the new one, or neither."""
    metadata = files.get(".metadata")
    whole = [one for one in (save.old, save.new) if one and one.files[".metadata"] == metadata]
    if not whole:
        return Harm.VALUES, Claim.CONTENT
    harms = [_harm(one, files) for one in whole]
    if Harm.NONE in harms:
        return Harm.NONE, Claim.CONTENT
    known = {
        r.data for one in (save.old, save.new) if one for rs in one.records.values() for r in rs
    }
    held = {
        files.get(name, b"")[record.start : record.start + len(record.data)]
        for name, records in whole[0].records.items()
        for record in records
    }
    # Every record is one that torch wrote, some in one save and some in another.
    return max(harms, key=list(Harm).index), Claim.SEAL if held <= known else Claim.CONTENT


def _harm(one: Sound, files: Files) -> Harm:
    worst = Harm.NONE
    for name, records in one.records.items():
        for one_record in records:
            end = one_record.start + len(one_record.data)
            harm = one_record.harm(files.get(name, b"")[one_record.start : end])
            worst = max(worst, harm, key=list(Harm).index)
    return worst

"""Attacks (K), random mutations (M), odd names and times (N), and sound steps (O).

K: pickles made to attack, in place of the metadata. M: mutations of metadata, records,
seals and marks, read by their readers. N: roots whose steps have odd names and times.
O: sound steps of every kind, copied in every way: no fault may be reported.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random

from metadata_flips import INVISIBLE, differences
from oracle import Case, Outcome
from sound_steps import Harm, Library, Sound, put, tree
from test_hostile_pickles import bombs, payloads

import ckptctl
from ckptctl import Level, Verdict
from ckptctl.errors import CkptctlError
from ckptctl.formats.dcp.metadata import decode_metadata
from ckptctl.formats.own.marks import parse_mark
from ckptctl.formats.own.seals import parse_seal
from ckptctl.records.verification import check_whole

HOSTILE: Mapping[str, bytes] = {**payloads(), **bombs()}
N_HOSTILE = 2 * len(HOSTILE)
N_MUTATIONS, N_NAMES, N_SOUND = 20_000, 600, 900


def hostile(number: int, subject: Sound) -> Case:
    """Replace the metadata by a pickle that attacks."""
    name, data = list(HOSTILE.items())[number // 2]
    where = (".metadata", "__0.metadata")[number % 2]

    def spoil(step: Path) -> None:
        (step / ".metadata").unlink()
        put(step / where, data)

    return Case(f"{name} as {where}", spoil, Harm.VALUES)


def mutated(data: bytes, chance: Random) -> bytes:
    """Change a bit, some bytes, a run of them, or sometimes the length."""
    made = bytearray(data)
    at = chance.randrange(len(made))
    how = chance.randrange(8)
    if how < 4:
        made[at] ^= 1 << chance.randrange(8)
    elif how == 4:
        made[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF])
    elif how == 5:
        for _ in range(chance.randint(2, 8)):
            made[chance.randrange(len(made))] = chance.randrange(256)
    elif how == 6:
        n = chance.randint(1, 64)
        made[at : at + n] = made[chance.randrange(len(made)) :][:n]
    else:
        n = chance.randint(1, 16)
        made[at : at + chance.randint(0, 16)] = chance.randbytes(n)
    return bytes(made)


def mutation(number: int, chance: Random, subject: Sound, root: Path, outcome: Outcome) -> None:
    """Mutate bytes, read them, and compare what was read with what was there."""
    kind = ("metadata", "metadata", "record", "record", "seal")[number % 5]
    outcome.about = kind
    if kind == "metadata":
        _mutated_metadata(chance, subject, root, outcome)
    elif kind == "record":
        records = [record for name in subject.shards for record in subject.records[name]]
        record = chance.choice(records)
        if record.data[:2] != b"PK":
            return  # a compressed one
        held = mutated(record.data, chance)
        outcome.harm = record.harm(held).value
        checked = check_whole(memoryview(held))
        if checked.unreadable or checked.wrong:
            outcome.caught = "content"
    else:
        _mutated_seal(number, chance, subject, outcome)
    if outcome.harm == "values" and outcome.caught is None and outcome.claim == "content":
        outcome.problem = "missed"
    if outcome.harm == "none" and outcome.caught is not None:
        outcome.problem = "false alarm"


def _mutated_metadata(chance: Random, subject: Sound, root: Path, outcome: Outcome) -> None:
    data = mutated(subject.files[".metadata"], chance)
    outcome.harm = "values"
    try:
        decoded = decode_metadata(data)
    except CkptctlError as error:
        outcome.caught, outcome.verdict = "listing", str(error.exit_code)
        return
    names = set(differences(decode_metadata(subject.files[".metadata"]), decoded))
    if names <= INVISIBLE:
        outcome.harm = "bytes" if names else "none"
        return
    step = tree(root, subject)
    put(step / ".metadata", data)
    for level in Level:
        report = ckptctl.verify(str(step), level=level)
        if report.verdict is not Verdict.COMPLETE:
            outcome.caught, outcome.verdict = level.value, report.verdict.value
            return
    outcome.about += f": {', '.join(sorted(names))}"
    if names <= INVISIBLE | {"fqn"}:
        # A pickle holds a name once: a tensor was renamed consistently. A load of
        # the model misses it, and a seal detects it; nothing else in the step can.
        outcome.claim = "seal"


@cache
def _marks(step: Path, folder: Path) -> tuple[bytes, ...]:
    root = folder / "marks"
    shutil.copytree(step.parent, root)
    for word in ("rejected", "accepted", "pinned"):
        ckptctl.mark(str(root / step.name), word, reason="it did not go on", by="campaign")
    found = tuple(path.read_bytes() for path in (root / step.name / ".ckptctl").rglob("*.json"))
    shutil.rmtree(root)
    return found


def _mutated_seal(number: int, chance: Random, subject: Sound, outcome: Outcome) -> None:
    marks = _marks(subject.path, subject.path.parent.parent.parent)
    data, parse = (subject.seal, parse_seal) if number % 2 else (chance.choice(marks), parse_mark)
    made = mutated(data, chance)
    outcome.harm = "none" if made == data else "values"
    try:
        same = parse(made) == parse(data)
    except CkptctlError:
        outcome.caught = "listing" if made != data else None
        return
    outcome.harm = "bytes" if same else "values"


NAMES = (
    ("step_{n}", True),
    ("step-{n}", True),
    ("step_{n:08d}", True),
    ("global_step_{n}", True),
    ("iter_{n:07d}", True),
    ("checkpoint-{n}", True),
    ("step_{n}.tmp", False),
    ("tmp_step_{n}", False),
    ("step_1e{n}", False),
    ("step_-{n}", False),
    ("step_٣{n}", False),
    ("old step_{n} copy", False),
)


def odd_names(number: int, chance: Random, subject: Sound, root: Path, outcome: Outcome) -> None:
    """Steps with odd names and times: the newest by number is chosen."""
    root.mkdir(parents=True)
    held = {}
    style = chance.choice([name for name, is_step in NAMES[:6] if is_step])
    known = [0, 1, 9, 10, 99, 100, 1000, 10**9, 2**31, 2**40, chance.randrange(10**6)]
    # Beside the step itself, a copy of it under a further number is reported as a copy.
    own = int(subject.path.name.removeprefix("step_"))
    numbers = chance.sample([n for n in known if n != own], 4)
    for n in numbers:
        folder = root / style.format(n=n)
        shutil.copytree(subject.path, folder, copy_function=os.link)
        held[n] = folder
    for style, _ in chance.sample(NAMES[6:], 2):
        odd = root / style.format(n=max(numbers) + 5)
        if not odd.exists():
            shutil.copytree(subject.path, odd, copy_function=os.link)
    at_s = chance.choice([0.0, 1.0, 1.6e9, 4e9, 2.0**33])
    put(held[max(numbers)] / ".metadata", subject.files[".metadata"], at_s)
    if chance.random() < 0.5:
        (root / "latest").symlink_to(chance.choice(["latest", "nowhere", held[min(numbers)].name]))
    if chance.random() < 0.5:
        (root / "latest_checkpointed_iteration.txt").write_text(str(chance.choice(numbers)))
    outcome.about = f"{sorted(held)} as {held[max(numbers)].name}"
    chosen = ckptctl.pick(str(root))
    outcome.verdict = f"exit {chosen.exit_code}"
    if chosen.chosen is None or chosen.step != max(numbers):
        step = None if chosen.chosen is None else chosen.step
        outcome.problem = f"pick takes {step} ({chosen.message[:100]})"


UNPROVEN = ("no_crc_2", "hf_2", "hf_consolidated_2", "hf_whole_2", "safetensors_2", "flat_1")


@cache
def _sound_steps(library: Library) -> tuple[Path, ...]:
    found = [
        path
        for top in (library.checkpoints, library.versions)
        for path in sorted(top.rglob("step_*"))
        if path.is_dir() and path.parent.name not in UNPROVEN
    ]
    return tuple(found)


def sound_copies(number: int, chance: Random, library: Library, root: Path) -> Case:
    """A sound step, as it is or as people copy it, beside the older ones of its run."""
    steps = _sound_steps(library)
    source = steps[number % len(steps)]
    how = ("as it is", "without times", "in reverse", "slowly", "linked")[number // len(steps) % 5]
    step = root / source.name
    root.mkdir(parents=True)
    shutil.copytree(source, step, copy_function=os.link if how == "linked" else shutil.copy2)
    files = sorted((path for path in step.rglob("*") if path.is_file()), key=lambda p: p.name)
    for place, path in enumerate(reversed(files) if how == "in reverse" else files):
        at_s = {"without times": 1.7e9, "in reverse": 1.7e9 + place, "slowly": 1.7e9 + 90 * place}
        if how in at_s:
            os.utime(path, (at_s[how], at_s[how]))
    for older in source.parent.glob("step_*"):
        if older.is_dir() and int(older.name[5:]) < int(source.name[5:]):
            shutil.copytree(older, root / older.name, copy_function=os.link)
    return Case(f"{source.parent.name}/{source.name} {how}", lambda _: None, Harm.NONE)

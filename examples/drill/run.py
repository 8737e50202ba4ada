"""The runbook against real failures: does it end where it should, every time?

    python examples/drill/run.py [--only NAME …] [--seed N] [--interactive]

A real training job is killed, and what it left is damaged, in one way at a time. For
each the runbook RB-7 runs unattended from beginning to end: it classifies the failure,
finds and proves a step, falls back, starts the job again, and judges its loss. Then the
drill compares where it ended with where it should have, and every loss after the resume
with those of a run that nobody killed.

`--interactive` asks you instead, as RB-7 does at three in the morning; nothing tells you
what was broken. Works below `drill/` in the current folder, and leaves a transcript there
for every failure.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

TRAIN = Path(__file__).with_name("train.py")
STEPS, SAVE_EVERY = 40, 8
DIES_AT = 30
NEWEST, OLDER, OLDEST = 24, 16, 8

Breaks = Callable[[Path, random.Random], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that goes wrong, and where the runbook has to end.

    `killed` are the options with which the job is killed; `breaks` damages what is left;
    `steps` are those that it has to resume from, one after the other; none where it must
    not resume at all. `resumed_with` is a mistake that the job makes with every resume.
    `logged` is what the kernel of a node logged beside the job.
    """

    name: str
    about: str
    killed: tuple[str, ...]
    breaks: Breaks | None
    steps: tuple[int, ...]
    exit_code: int = 0
    resumed_with: str = ""
    logged: str = ""


XID = "Nov 22 03:00:01 gpu-17 kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
KILLED = ("--kill-rank", str(DIES_AT))
KILLED_IN_SAVE = ("--kill-save", str(NEWEST + SAVE_EVERY))


def main() -> int:
    """Run the drill; 0 where every failure ended as it should."""
    options = _parse()
    folder = Path("drill").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    print(f"a run of {options.ranks} ranks that nobody kills, to compare with", flush=True)
    right = _losses(_trained(folder / "uninterrupted", options.ranks, ()))
    bases = {
        killed: _killed(folder, n, options.ranks, killed)
        for n, killed in enumerate(dict.fromkeys(each.killed for each in options.failures))
    }
    wrong = [
        failure.name
        for failure in options.failures
        if not _drilled(failure, bases[failure.killed], folder, right, options)
    ]
    said = f"wrong: {', '.join(wrong)}" if wrong else "every one ended where it should"
    print(f"\n{len(options.failures)} failures, seed {options.seed}: {said}", flush=True)
    return 1 if wrong else 0


def _trained(place: Path, ranks: int, options: tuple[str, ...]) -> Path:
    """Train below `place` until the end, or until the job is killed; gives its log."""
    place.mkdir(parents=True)
    log = place / "before.log"
    command = [*_launch(ranks), str(TRAIN), "--root", str(place / "root"), *options]
    with log.open("wb") as out:
        done = subprocess.run(
            command, stdout=out, stderr=subprocess.STDOUT, env=_environment(), check=False
        )
    if bool(done.returncode) is not bool(options):
        raise SystemExit(f"the job ended with {done.returncode}; see {log}")
    return log


def _killed(folder: Path, n: int, ranks: int, options: tuple[str, ...]) -> Path:
    print(f"a run that is killed: {' '.join(options)}", flush=True)
    place = folder / f"killed-{n}"
    _trained(place, ranks, options)
    return place


def _drilled(
    failure: Failure, base: Path, folder: Path, right: dict[int, str], options: argparse.Namespace
) -> bool:
    """One failure, from its damage to the end of the runbook; whether it ended as it should."""
    place = Path(shutil.copytree(base, folder / failure.name, symlinks=True))
    root = place / "root"
    draw = random.Random(f"{options.seed} {failure.name}")
    if failure.breaks is not None:
        failure.breaks(root, draw)
    shown = "something is broken" if options.interactive else failure.about
    print(f"\n== {shown}", flush=True)
    begun = time.monotonic()
    exit_code = _runbook(failure, place, options)
    took = time.monotonic() - begun
    problems = list(_problems(failure, place, exit_code, right))
    verdict = "; ".join(problems) or "as it should be"
    print(f"   {failure.name}: exit code {exit_code} after {took:.0f} s: {verdict}", flush=True)
    return not problems


def _runbook(failure: Failure, place: Path, options: argparse.Namespace) -> int:
    after = shlex.quote(str(place / "after.log"))
    resume = (
        f'{shlex.join(_launch(options.ranks))} {shlex.quote(str(TRAIN))} --root "$ROOT" '
        f'--resume-from "$STEP" {failure.resumed_with} > {after} 2>&1'
    )
    inputs = [
        ("LOG", place / "before.log"),
        ("NEW_LOG", place / "after.log"),
        ("WORLD_SIZE", options.ranks),
        ("SEEN_BY", "the drill has this node only"),
        ("RESUME", resume),
        ("WAIT", 60),
    ]
    if failure.logged:
        (place / "dmesg.log").write_text(failure.logged)
        inputs.append(("LOG", place / "dmesg.log"))
    command = [sys.executable, "-m", "ckptctl", "runbook", "run", "rb-7", str(place / "root")]
    command += ["--transcript", str(place / "transcript")]
    command += [word for name, value in inputs for word in ("--set", f"{name}={value}")]
    if options.interactive:
        return subprocess.run(command, env=_environment(), check=False).returncode
    with (place / "runbook.log").open("wb") as out:
        command.append("--yes")
        return subprocess.run(
            command, stdout=out, stderr=subprocess.STDOUT, env=_environment(), check=False
        ).returncode


def _problems(
    failure: Failure, place: Path, exit_code: int, right: dict[int, str]
) -> Iterator[str]:
    """What is not as it should be."""
    if exit_code != failure.exit_code:
        yield f"expected exit code {failure.exit_code}"
    resumed = [
        Path(event["values"]["STEP"]).name
        for event in _events(place)
        if event["event"] == "began" and event["block"] == "resume"
    ]
    expected = [f"step_{step}" for step in failure.steps]
    if resumed != expected:
        yield f"it resumed from {resumed}, and should from {expected}"
    if failure.exit_code:
        return
    found = _losses(place / "after.log")
    if sorted(found) != list(range(failure.steps[-1] + 1, STEPS + 1)):
        yield f"after the resume it logged the steps {sorted(found)}"
    differing = [step for step, row in found.items() if row != right[step]]
    if differing:
        yield f"the losses of the steps {differing} differ from the run that nobody killed"


def _events(place: Path) -> list[dict]:
    text = (place / "transcript" / "transcript.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def _losses(log: Path) -> dict[int, str]:
    """What was logged of each step, in every digit: its loss and its samples."""
    rows = (json.loads(line) for line in log.read_text().splitlines() if line[:8] == '{"step":')
    return {row["step"]: f"{row['loss']!r} {row['samples_digest']}" for row in rows}


def _launch(ranks: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


# What is done to a root that a killed job left: the steps 8, 16 and 24, all whole.


def _shard(root: Path, draw: random.Random, step: int = NEWEST) -> Path:
    return draw.choice(sorted((root / f"step_{step}").glob("__*.distcp")))


def _flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _flip_a_bit(root: Path, draw: random.Random) -> None:
    _flip(_shard(root, draw), draw)


def _lose_a_shard(root: Path, draw: random.Random) -> None:
    _shard(root, draw).unlink()


def _halve_a_shard(root: Path, draw: random.Random) -> None:
    shard = _shard(root, draw)
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])


def _put_an_older_shard(root: Path, draw: random.Random) -> None:
    shard = _shard(root, draw)
    shutil.copyfile(root / f"step_{OLDER}" / shard.name, shard)


def _lose_the_metadata(root: Path, _: random.Random) -> None:
    (root / f"step_{NEWEST}" / ".metadata").unlink()


def _lose_the_rng(root: Path, _: random.Random) -> None:
    """Take the random numbers out of the newest step's metadata, as a save without them."""
    path = root / f"step_{NEWEST}" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for name in [name for name in metadata.state_dict_metadata if "rng" in name]:
        del metadata.state_dict_metadata[name]
        if metadata.planner_data:
            metadata.planner_data.pop(name, None)
    for index in [index for index in metadata.storage_data if "rng" in index.fqn]:
        del metadata.storage_data[index]
    path.write_bytes(pickle.dumps(metadata))
    shutil.rmtree(path.parent / ".ckptctl", ignore_errors=True)


def _damage_three(root: Path, draw: random.Random) -> None:
    for step in (NEWEST, OLDER, OLDEST):
        _flip(_shard(root, draw, step), draw)


FAILURES = (
    Failure("rank-killed", "one rank is killed", KILLED, None, (NEWEST,)),
    Failure("killed-in-save", "all ranks are killed in a save", KILLED_IN_SAVE, None, (NEWEST,)),
    Failure("flipped-bit", "a bit of a shard flipped", KILLED, _flip_a_bit, (OLDER,)),
    Failure("lost-shard", "a shard is missing", KILLED, _lose_a_shard, (OLDER,)),
    Failure("half-shard", "half of a shard is there", KILLED, _halve_a_shard, (OLDER,)),
    Failure("stale-shard", "a shard is of an older step", KILLED, _put_an_older_shard, (OLDER,)),
    Failure("lost-metadata", "the metadata is gone", KILLED, _lose_the_metadata, (OLDER,)),
    Failure("three-damaged", "three steps are damaged", KILLED, _damage_three, (), 11),
    # One jump may be the step's fault; after two the runbook says that it is the job's.
    Failure(
        "weights-only",
        "the job loads weights and nothing else",
        KILLED,
        None,
        (NEWEST, OLDER),
        30,
        "--weights-only",
    ),
    # No step is at fault, so that none is rejected and no other one is tried.
    Failure(
        "other-step",
        "the job loads another step than was chosen",
        KILLED,
        None,
        (NEWEST,),
        30,
        f"--older-step {OLDER}",
    ),
    Failure(
        "bad-gpu",
        "a GPU failed, and its node is not drained",
        KILLED,
        None,
        (),
        93,
        logged=XID,
    ),
    Failure("lost-rng", "a step lacks the random numbers", KILLED, _lose_the_rng, (OLDER,)),
    Failure("slow", "the resumed job is half as fast", KILLED, None, (NEWEST,), 32, "--slow"),
)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The runbook against real failures.")
    names = [failure.name for failure in FAILURES]
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=names, help=", ".join(names))
    parser.add_argument("--seed", type=int, default=0, help="which byte, which rank")
    parser.add_argument("--ranks", type=int, default=4, help="how many ranks train")
    parser.add_argument("--interactive", action="store_true", help="you decide")
    options = parser.parse_args()
    chosen = [each for each in FAILURES if options.only is None or each.name in options.only]
    if options.interactive:
        random.Random(options.seed).shuffle(chosen)
    options.failures = tuple(chosen)
    return options


if __name__ == "__main__":
    raise SystemExit(main())

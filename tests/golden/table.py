"""Freeze what the commands answer for every sound, damaged and odd root.

    python tests/golden/table.py           # write tests/golden/answers.tsv anew
    python tests/golden/table.py --check   # compare, and print each difference

One row per root and command: exit code, verdicts with the codes of their faults and
warnings, and the next command. A change that only reshapes the code leaves every row
as it is; a change of behaviour shows here row by row. The damaged steps are cases of
the fault campaign (`tests/campaign`), seed 1.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
TESTS = REPOSITORY / "tests"
for folder in (REPOSITORY, TESTS, TESTS / "campaign", TESTS / "formats"):
    sys.path.insert(0, str(folder))

from made_checkpoints import checkpoints, unpacked  # noqa: E402

ANSWERS = HERE / "answers.tsv"
N_DAMAGED = 32
"""How many cases of each category of the campaign: its kinds of damage repeat after that."""

LEVELS = ("listing", "structure", "content")
ROOT_COMMANDS = (
    ("pick",),
    ("pick", "--level", "content"),
    ("pick", "--allow-fresh"),
    ("scan",),
    ("preflight",),
)


def rows() -> Iterator[str]:
    """Every row of the table, in a fixed order."""
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        for name, root in sound_roots():
            yield from asked_of_root(name, root)
            for step in sorted(root.iterdir()):
                if step.is_dir() and not step.is_symlink():
                    yield asked(f"{name}/{step.name}", root, ["verify", "--level=content"], step)
        yield from damaged_steps(Path(folder))
        for name, make in ODD_ROOTS.items():
            parent = Path(folder) / "odd" / name.replace(" ", "-")
            parent.mkdir(parents=True)
            yield from asked_of_root(f"odd: {name}", make(parent))


def sound_roots() -> Iterator[tuple[str, Path]]:
    """The roots of the fixtures: older torch versions, frameworks, and the torch installed."""
    for name, folder in (
        ("versions", unpacked("dcp-versions")),
        ("frameworks", unpacked("frameworks")),
        ("made", checkpoints()),
    ):
        metadata = {path.parent for path in folder.rglob(".metadata")}
        roots = {path.parent for path in metadata}
        outermost = [root for root in roots if not any(up in metadata for up in root.parents)]
        for root in sorted(outermost):
            yield f"{name}/{root.relative_to(folder).as_posix()}", root


def damaged_steps(folder: Path) -> Iterator[str]:
    """Cases of the campaign that damage one step of a run."""
    from broken_files import MAKERS
    from cases import _library
    from hostile_and_odd import N_HOSTILE, hostile
    from sound_steps import tree

    library = _library(folder)
    for category in (*MAKERS, "K"):
        n_cases = N_HOSTILE if category == "K" else MAKERS[category][1]
        for number in range(min(N_DAMAGED, n_cases)):
            chance = Random(f"1-{category}-{number}")
            subjects = library.all()
            subject = subjects[chance.randrange(len(subjects))]
            if category == "K":
                case = hostile(number, subject)
            else:
                case = MAKERS[category][0](number, chance, subject)
            root = folder / f"case-{category}-{number}" / "run"
            step = tree(root, subject, sealed=case.sealed and bool(subject.seal))
            case.spoil(step)
            name = f"{category} {number} {_without_counts(case.about)}"
            for level in LEVELS:
                yield asked(name, root, ["verify", f"--level={level}"], step)
            yield from asked_of_root(name, root)
            shutil.rmtree(root.parent)


def _with(*names: str) -> Callable[[Path], Path]:
    """A root that holds these entries: files of a few bytes, or folders where they end in /."""

    def make(parent: Path) -> Path:
        root = parent / "run"
        root.mkdir()
        for name in names:
            path = root / name
            if name.endswith("/"):
                path.mkdir(parents=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"PK\x03\x04")
        return root

    return make


ODD_ROOTS: dict[str, Callable[[Path], Path]] = {
    "empty": _with(),
    "missing": lambda parent: parent / "run",
    "missing with its parent": lambda parent: parent / "not-mounted" / "run",
    "logs only": _with("train.log", "config.yaml", "tensorboard/"),
    "a file without a step number": _with("last.ckpt"),
    "final weights": _with("final/model.safetensors"),
    "safetensors": _with("model.safetensors"),
    "bin": _with("pytorch_model.bin"),
    "a safetensors step": _with("step_100.safetensors"),
    "rank files of NVRx": _with("s0/r0/iter_0000030_0_local.pt"),
    "rank files of verl": _with("global_step_20/actor/model_world_size_2_rank_0.pt"),
    "rank files of DeepSpeed": _with("global_step20/mp_rank_00_model_states.pt", "latest"),
    "rank files of Megatron": _with("iter_0000010/mp_rank_00/model_optim_rng.pt"),
    "an empty step": _with("step_100/"),
    "shards without metadata": _with("step_100/__0_0.distcp", "step_100/__1_0.distcp"),
    "a pointer without its step": _with("latest_checkpointed_iteration.txt"),
}


def asked_of_root(name: str, root: Path) -> Iterator[str]:
    for command in ROOT_COMMANDS:
        yield asked(name, root, list(command), root)


def asked(name: str, root: Path, command: list[str], path: Path) -> str:
    """One row: what `command` answers about `path`."""
    arguments = [command[0], str(path), *command[1:]]
    exit_code, stdout = _run([*arguments, "--json"])
    document = json.loads(stdout)
    said = sorted(set(_said(document)))
    row = (
        name,
        " ".join(command),
        str(exit_code),
        " ".join(said) or "-",
        str(document.get("next_command") or "-"),
    )
    return "\t".join(_neutral(cell, root) for cell in row)


def _run(arguments: list[str]) -> tuple[int, str]:
    from ckptctl.cli.app import run

    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        exit_code = run(arguments)
    return exit_code, stdout.getvalue()


def _said(document: object) -> Iterator[str]:
    """Verdicts of steps, and codes of faults, warnings and errors, wherever they stand."""
    if isinstance(document, dict):
        step = str(document.get("number", "") or document.get("step", "") or "")
        for key in ("verdict", "answer"):
            if isinstance(document.get(key), str) and "code" not in document:
                yield f"{step}={document[key]}" if step else str(document[key])
        if "code" in document and document.get("severity") != "note":
            yield str(document["code"])
        for value in document.values():
            yield from _said(value)
    if isinstance(document, list):
        for value in document:
            yield from _said(value)


def _without_counts(about: str) -> str:
    """A case's name without byte counts: torch writes the path of the step into `.metadata`."""
    return re.sub(r"(?<![\w.])\d[\d,]*(?![\w.])", "N", about)


def _neutral(text: str, root: Path) -> str:
    """Without what differs from machine to machine: paths, and numbers of this minute."""
    text = text.replace(str(root), "ROOT").replace(str(root.parent), "PARENT")
    text = re.sub(r"[\t\n]", " ", text)
    return re.sub(r"/tmp/golden-\w+", "TMP", text)


def difference() -> list[str]:
    """Each row that is not as it was frozen, as lines of a diff."""
    frozen = ANSWERS.read_text().splitlines()
    return [
        line
        for line in difflib.unified_diff(frozen, list(rows()), "frozen", "now", lineterm="", n=0)
        if not line.startswith("@@")
    ]


def main() -> int:
    """Write the table, or compare it."""
    for name in [name for name in os.environ if name.startswith("CKPTCTL_")]:
        del os.environ[name]
    if "--check" in sys.argv[1:]:
        found = difference()
        print("\n".join(found) or "no difference")
        return int(bool(found))
    ANSWERS.write_text("\n".join(rows()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

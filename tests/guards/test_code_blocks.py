"""Every code block in the README and in docs/ runs, from top to bottom of its page.

Each page has a folder of its own, with a real checkpoint root in `ckpt`: steps
100 to 500, the newest of them whole. A fence says what becomes of its block:

    ```sh                    run by bash; must end with 0
    ```sh exit=11            ... with 11
    ```sh no-run WHY         not run, for a reason; must be sound in form
    ```console               commands behind `$ `; where lines follow one, they are its
                             output, and `...` stands for anything
    ```python                run by Python

A block of another language, or of none, is no code.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import clean_environment, forked_python, torch_server
from damage import name_step

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PAGES = [
    *sorted(REPOSITORY.glob("*.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted((REPOSITORY / "fixtures").glob("*.md")),
]
_FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
_RUN = ("sh", "console", "python")


@dataclass(frozen=True)
class Block:
    language: str
    words: tuple[str, ...]
    code: str

    @property
    def runs(self) -> bool:
        return "no-run" not in self.words

    @property
    def exit_code(self) -> int:
        codes = [word.removeprefix("exit=") for word in self.words if word.startswith("exit=")]
        return int(codes[0]) if codes else 0

    @property
    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """What a console block runs, each with the output that it shows."""
        command, shown = "", []
        for line in self.code.splitlines():
            if line.startswith("$ "):
                if command:
                    yield command, shown
                command, shown = line[2:], []
            else:
                shown.append(line)
        yield command, shown


def blocks(page: Path) -> list[Block]:
    return [
        Block(words[0], tuple(words[1:]), match["code"])
        for match in _FENCE.finditer(page.read_text())
        if (words := match["info"].split()) and words[0] in _RUN
    ]


@pytest.fixture
def folder(framework_roots: Path, tmp_path: Path) -> Path:
    """A folder with the root `ckpt` and a `ckptctl` on the path."""
    saved = framework_roots / "kempnerforge" / "checkpoints"
    for number, source in enumerate(("step_10", "step_10", "step_20", "step_20", "step_30"), 1):
        step = Path(shutil.copytree(saved / source, tmp_path / "ckpt" / f"step_{number}00"))
        name_step(step)
        # As training wrote them: an hour apart.
        written_s = time.time() - 3600 * (6 - number)
        for file in step.rglob("*"):
            os.utime(file, (written_s, written_s))
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "ckptctl"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(forked_python())} -m ckptctl "$@"\n')
    command.chmod(0o755)
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    return tmp_path


def run(code: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = clean_environment()
    environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
    return subprocess.run(code, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page)],
    ids=lambda page: str(page.relative_to(REPOSITORY)),
)
def test_the_code_blocks_of_a_page_run(page, folder):
    for block in blocks(page):
        if not block.runs:
            check_form(block)
        elif block.language == "console":
            for command, shown in block.commands:
                done = run(["bash", "-c", command], folder)
                assert done.returncode == block.exit_code, f"{command}\n{done.stderr}"
                check_output(command, shown, done.stdout + done.stderr)
        else:
            # A reader copies a block into a script, which ends at the first command that fails.
            start = ["bash", "-e"] if block.language == "sh" else [torch_server().python]
            done = run([*start, "-c", block.code], folder)
            assert done.returncode == block.exit_code, f"{block.code}\n{done.stderr}"


@pytest.mark.slow
def test_the_commands_of_the_pages_of_findings_run(folder):
    """On a root with the steps that they name, none ends as a mistake of usage."""
    keys, of_pattern = ("--key-file", "--require-signature"), "--pattern '(?P<step>[0-9]+)-state'"
    of_other_data = (*keys, of_pattern, "convert", "--follow")
    roots = re.compile("/shared/ckpt/run-1234|/nvme/ckpt/run-1234|s3://bucket/run-1234")
    root = folder / "ckpt"
    for name in ("step_1100", "step_1200", "checkpoint-1200", "final"):
        shutil.copytree(root / "step_500", root / name)
    rows = [f'{{"step": {step}, "loss": {9 - step / 1000}}}\n' for step in range(1100, 1300)]
    for name in ("train.jsonl", "train.log", "old.jsonl", "new.jsonl"):
        (folder / name).write_text("".join(rows))
    commands: dict[str, None] = {}
    for page in sorted((REPOSITORY / "ckptctl" / "pages").glob("*.md")):
        for block in blocks(page):
            commands |= dict.fromkeys(block.code.splitlines())
    wrong = []
    for command in commands:
        runs_here = command.startswith(("ckptctl", "ls", "find", "head"))
        if not runs_here or any(each in command for each in of_other_data):
            continue
        done = run(["bash", "-c", roots.sub("ckpt", command)], folder)
        if done.returncode in (1, 2, 127) and "is already sealed" not in done.stderr:
            wrong.append(f"{command}\n{done.stderr}")
    assert wrong == []


def check_form(block: Block) -> None:
    """A block that is not run says why, and is at least something that could be."""
    assert len(block.words) > 1, f"no-run needs a reason: {block.code}"
    if block.language == "python":
        ast.parse(block.code)
        return
    code = block.code
    if block.language == "console":
        code = "\n".join(command for command, _ in block.commands)
    done = subprocess.run(["bash", "-n", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def check_output(command: str, shown: list[str], written: str) -> None:
    if any(line.strip() for line in shown):
        pattern = ".*".join(re.escape(part) for part in "\n".join(shown).split("..."))
        assert re.search(pattern, written, re.DOTALL), f"{command}\n{written}"


def test_there_are_blocks_to_run():
    assert sum(block.runs for page in PAGES for block in blocks(page)) > 10


def test_links_between_the_documents_lead_somewhere():
    broken = []
    for page in PAGES:
        text = _FENCE.sub("", page.read_text())
        for target, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
            if "://" in target or target.startswith("mailto:"):
                continue
            found = (page.parent / target) if target else page
            if not found.exists() or (heading and heading not in anchors(found)):
                broken.append(f"{page.relative_to(REPOSITORY)}: {target}#{heading}")
    assert broken == []


def anchors(page: Path) -> set[str]:
    """The addresses of a page's headings: lower case, no punctuation, a hyphen for each space."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}

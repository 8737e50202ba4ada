"""Score `ckptctl classify` on incidents that other people published, fetched by address.

    python tools/outside_scores.py                    # fetch from GitHub, verify, score
    python tools/outside_scores.py --mirrors DIR      # read files from clones DIR/OWNER+NAME/repo
    python tools/outside_scores.py --threads DIR      # keep threads in DIR, and read them there

The texts are not part of this repository: `tests/failures/outside.tsv` holds for each the part
(`seen`: read while rules were written; `held`: only scored), the class that its source
states, the address, and the SHA-256 of the text. A text with another digest is not scored.

The address of lines in a file ends with their numbers. The address of lines in an issue thread
ends with the beginning of the digest of the first line, and the number of lines. GitHub
answers some 60 requests an hour, more with `GITHUB_TOKEN`; threads need two or more each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ckptctl.failures.classifying import decide
from ckptctl.failures.matching import FailureLogReader, folded
from ckptctl.failures.results import CLASSES

CORPUS = Path(__file__).resolve().parent.parent / "tests" / "failures" / "outside.tsv"
_FILE = re.compile(
    r"https://raw\.githubusercontent\.com/([\w.-]+)/([\w.-]+)/([0-9a-f]{40})/(.+)#L(\d+)-L(\d+)"
)
_THREAD = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)/issues/(\d+)#([0-9a-f]{12})\+(\d+)")


@dataclass(frozen=True)
class Places:
    """Folders that are read instead of GitHub: clones of repositories, and threads."""

    mirrors: str | None = None
    threads: str | None = None


@dataclass(frozen=True)
class Outcome:
    """How one excerpt was classified; `word` compares the domains."""

    part: str
    stated: str
    answer: str
    confidence: str
    address: str

    @property
    def word(self) -> str:
        """What the answer is worth to somebody who acts on its domain."""
        if self.answer == "unknown":
            return "silent"
        if CLASSES[self.stated].domain is CLASSES[self.answer].domain:
            return "right domain"
        return "wrong with high" if self.confidence == "high" else "wrong"


@lru_cache
def document(owner: str, name: str, commit: str, path: str, mirrors: str | None) -> str:
    """The file at one commit."""
    if mirrors is not None:
        folder = f"{mirrors}/{owner}+{name}/repo"
        command = ["git", "-C", folder, "show", f"{commit}:{path}"]
        return subprocess.run(command, check=True, capture_output=True).stdout.decode()
    url = f"https://raw.githubusercontent.com/{owner}/{name}/{commit}/{path}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


@lru_cache
def thread(repository: str, number: str, folder: str | None) -> str:
    """The text of an issue and its comments."""
    kept = Path(folder, f"{repository.replace('/', '+')}+{number}.txt") if folder else None
    if kept is not None and kept.exists():
        return kept.read_text()
    url = f"https://api.github.com/repos/{repository}/issues/{number}"
    texts = [str(_json(url)["body"])]
    page = 1
    while comments := _json(f"{url}/comments?per_page=100&page={page}"):
        texts += [str(comment["body"]) for comment in comments]
        page += 1
    text = "\n".join(texts)
    if kept is not None:
        kept.write_text(text)
    return text


def _json(url: str):  # type: ignore[no-untyped-def]
    request = urllib.request.Request(url)
    if token := os.environ.get("GITHUB_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def excerpt(address: str, places: Places) -> str:
    """The lines at an address; of a line of source code the text between its quotes."""
    if found := _THREAD.fullmatch(address):
        repository, number, key, n_lines = found.groups()
        lines = plain_lines(thread(repository, number, places.threads))
        first = next(
            (i for i, line in enumerate(lines) if digest(line).startswith(key)), len(lines)
        )
        return "\n".join(lines[first : first + int(n_lines)])
    if (found := _FILE.fullmatch(address)) is None:
        raise SystemExit(f"not an address: {address}")
    owner, name, commit, path, begin, end = found.groups()
    whole = document(owner, name, commit, path, places.mirrors).splitlines()
    lines = whole[int(begin) - 1 : int(end)]
    if path.endswith(".go"):
        lines = [line[line.find('"') + 1 : line.rfind('"')] for line in lines]
    return "\n".join(line.strip() for line in lines)


def plain_lines(text: str) -> list[str]:
    """The lines of a thread without the marks of quotes and code, and without empty lines."""
    lines = (" ".join(line.lstrip("> ").strip("` ").split()) for line in text.splitlines())
    return [line for line in lines if line]


def digest(text: str) -> str:
    """The SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def outcomes(places: Places, parts: tuple[str, ...]) -> Iterator[Outcome]:
    """The answer for each excerpt of the parts; `changed` where the text is another one now."""
    for row in CORPUS.read_text().splitlines():
        part, stated, address, expected = row.split("\t")
        if part not in parts:
            continue
        text = excerpt(address, places)
        if digest(text) != expected:
            print(f"changed: {address}")
            continue
        reader = FailureLogReader(address)
        numbered = [*enumerate(text.splitlines(), 1)]
        decision = decide(folded((reader, found) for found in reader.take(numbered)))
        answer = decision.decisive.failure if decision.decisive else "unknown"
        yield Outcome(part, stated, answer, decision.confidence, address)


def table(found: list[Outcome]) -> Iterator[str]:
    """Each stated class: excerpts, right class, right domain, silent, wrong domain."""
    yield "| stated class | excerpts | right class | right domain | silent | wrong domain |"
    yield "|---|---|---|---|---|---|"
    for name in [*CLASSES, "all"]:
        of = [each for each in found if name in ("all", each.stated)]
        words = Counter(each.word for each in of)
        exact = sum(each.answer == each.stated for each in of)
        wrong = words["wrong"] + words["wrong with high"]
        if of:
            yield (
                f"| `{name}` | {len(of)} | {exact} | {words['right domain']} "
                f"| {words['silent']} | {wrong} |"
            )


def main() -> int:
    """Print every answer that differs in its domain, and a table for each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mirrors", help="folder of git clones, named OWNER+NAME/repo")
    parser.add_argument("--threads", help="folder of the texts of threads")
    parser.add_argument("--part", action="append", choices=("seen", "held"))
    given = parser.parse_args()
    parts = tuple(given.part or ("seen", "held"))
    found = [*outcomes(Places(given.mirrors, given.threads), parts)]
    for each in found:
        if each.word != "right domain":
            print(f"{each.word}: {each.stated}, {each.answer} ({each.confidence}): {each.address}")
    for part in parts:
        print(f"\n{part}, {Counter(each.word for each in found if each.part == part)}\n")
        print("\n".join(table([each for each in found if each.part == part])))
    return 0


if __name__ == "__main__":
    sys.exit(main())

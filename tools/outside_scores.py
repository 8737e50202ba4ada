"""Score `ckptctl classify` on lines that other people published, fetched by address.

    python tools/outside_scores.py                    # fetch from GitHub, verify, score
    python tools/outside_scores.py --mirrors DIR      # read git clones DIR/OWNER+NAME/repo instead

The texts are not part of this repository: `tests/failures/outside.tsv` holds for each the part
(`seen`: looked at while rules were written; `held`: only scored), the class that its source
states, the address with the lines, and the SHA-256 of the text. A text with another digest is
not scored.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from functools import lru_cache
from pathlib import Path

from ckptctl.failures.classes import CLASSES
from ckptctl.failures.deciding import decide
from ckptctl.failures.matching import LogReader, folded

CORPUS = Path(__file__).resolve().parent.parent / "tests" / "failures" / "outside.tsv"
_ADDRESS = re.compile(
    r"https://raw\.githubusercontent\.com/([\w.-]+)/([\w.-]+)/([0-9a-f]{40})/(.+)#L(\d+)-L(\d+)"
)


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


def excerpt(address: str, mirrors: str | None) -> str:
    """The lines at an address; of a line of source code the text between its quotes."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise SystemExit(f"not an address: {address}")
    owner, name, commit, path, first, last = found.groups()
    lines = document(owner, name, commit, path, mirrors).splitlines()[int(first) - 1 : int(last)]
    if path.endswith(".go"):
        lines = [line[line.find('"') + 1 : line.rfind('"')] for line in lines]
    return "\n".join(line.strip() for line in lines)


def digest(text: str) -> str:
    """The SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> int:
    """Print the score of each part by domain, and every answer that differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mirrors", help="folder of git clones, named OWNER+NAME/repo")
    mirrors = parser.parse_args().mirrors
    counts: Counter[tuple[str, str]] = Counter()
    for row in CORPUS.read_text().splitlines():
        part, failure, address, expected = row.split("\t")
        text = excerpt(address, mirrors)
        if digest(text) != expected:
            counts[part, "changed"] += 1
            continue
        reader = LogReader(address)
        numbered = [*enumerate(text.splitlines(), 1)]
        decision = decide(folded((reader, found) for found in reader.take(numbered)))
        answer = decision.decisive.failure if decision.decisive else "unknown"
        word = _compared(failure, answer, decision.confidence)
        counts[part, "all"] += 1
        counts[part, word] += 1
        if word != "right domain":
            print(f"{word}: {failure} is taken for {answer} ({decision.confidence}): {address}")
    for part in sorted({part for part, _ in counts}):
        print(part, {word: n for (of, word), n in sorted(counts.items()) if of == part})
    return 0


def _compared(failure: str, answer: str, confidence: str) -> str:
    if CLASSES[failure].domain is CLASSES[answer].domain:
        return "right domain"
    if answer == "unknown":
        return "silent"
    return "wrong with high" if confidence == "high" else "wrong"


if __name__ == "__main__":
    sys.exit(main())

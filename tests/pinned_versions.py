"""Read the files that releases are built from."""

from __future__ import annotations

import re
from pathlib import Path

_HASHES = r"((?: \\\n    --hash=sha256:[0-9a-f]{64})+)"
ENTRY = re.compile(rf"^([a-z0-9-]+)==([0-9][0-9A-Za-z.+!]*){_HASHES}\n", re.MULTILINE)


def normalized(name: str) -> str:
    """The name of a distribution as the index compares it."""
    return re.sub("[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, str]:
    """The version of each package in such a file."""
    return {name: version for name, version, _ in ENTRY.findall(path.read_text())}

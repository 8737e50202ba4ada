"""Write the versions and hashes that releases are built from.

    python tools/release_pins.py      (requirements/archive.txt, requirements/release.txt)

`archive.txt` is what `ckptctl.pyz` holds beside ckptctl, `release.txt` the tools that build a
release, the build backend among them. The versions are those of `constraints.txt`, or else the
newest that pip finds; the hashes those of the wheels that pip downloads for every Python and
machine of the archive. Review the difference before you commit it: from then on no other
files become part of a release.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CONSTRAINTS = REPOSITORY / "constraints.txt"
ARCHIVE = REPOSITORY / "requirements" / "archive.txt"
RELEASE = REPOSITORY / "requirements" / "release.txt"
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
LIBC = ("manylinux2014", "manylinux_2_17", "manylinux_2_28")
_HEAD = """# {}
# Written by tools/release_pins.py. pip installs these files only (--require-hashes).
"""


def main() -> int:
    """Resolve anew, and write both files."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    base = project["project"]["dependencies"]
    tools = [*project["build-system"]["requires"], *project["dependency-groups"]["dist"]]
    write(ARCHIVE, "What ckptctl.pyz holds beside ckptctl.", base)
    write(RELEASE, "The tools that build a release, with the build backend.", tools)
    return 0


def write(target: Path, title: str, requirements: list[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        download(sys.executable, folder, PYTHONS[0], MACHINES[0], f"-c{CONSTRAINTS}", *requirements)
        exact = sorted("==".join(distribution(path)) for path in folder.iterdir())
        for python in PYTHONS:
            for machine in MACHINES:
                download(sys.executable, folder, python, machine, "--no-deps", *exact)
        hashes: dict[str, set[str]] = {}
        for path in folder.iterdir():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            hashes.setdefault("==".join(distribution(path)), set()).add(content)
    lines = [_HEAD.format(title)]
    for name, found in sorted(hashes.items()):
        lines.append(" \\\n    ".join((name, *(f"--hash=sha256:{each}" for each in sorted(found)))))
        lines.append("\n")
    target.write_text("".join(lines))
    print(f"{len(hashes):3} packages, {sum(map(len, hashes.values()))} wheels: {target}")


def download(python: str, folder: Path, version: str, machine: str, *what: str) -> None:
    """Have pip download wheels for a Python of that version on that machine into the folder."""
    target = (f"--python-version={version}", *(f"--platform={libc}_{machine}" for libc in LIBC))
    pip = (python, "-m", "pip", "--disable-pip-version-check", "-qq", "download")
    subprocess.run([*pip, "--only-binary=:all:", *target, f"--dest={folder}", *what], check=True)


def distribution(wheel: Path) -> tuple[str, str]:
    """The normalized name and the version of a wheel."""
    name, version = wheel.name.split("-")[:2]
    return re.sub("[-_.]+", "-", name).lower(), version


if __name__ == "__main__":
    sys.exit(main())

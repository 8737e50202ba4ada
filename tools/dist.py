"""Build what a release consists of.

    python tools/dist.py [FOLDER]       (dist/)

The wheel and the source archive; `ckptctl.pyz`, one file with all base
dependencies for every Python and machine in `PYTHONS` and `MACHINES`; a
CycloneDX list of what it holds; and the SHA-256 of each file. Files of other
projects are used only if their hash is in `requirements/`: the build backend
and the other tools, which are installed into an environment of their own, and
the dependencies. The archive is the same, byte for byte, from the same source.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from release_pins import ARCHIVE, MACHINES, PYTHONS, RELEASE, REPOSITORY, download

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")


def main() -> int:
    """Build everything anew."""
    dist = Path(sys.argv[1] if len(sys.argv) > 1 else REPOSITORY / "dist").absolute()
    shutil.rmtree(dist, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        python = tools(Path(temporary) / "tools")
        # Isolation would install the newest build backend.
        run(python, "-m", "build", "--no-isolation", "--outdir", dist, REPOSITORY)
        (wheel,) = dist.glob("*.whl")
        wheels = [wheel, *dependencies(python, wheel, Path(temporary) / "wheels")]
        archive(wheels, dist / "ckptctl.pyz")
        components(python, dist / "ckptctl.pyz", Path(temporary) / "content", dist)
    files = sorted(dist.iterdir())
    (dist / "SHA256SUMS").write_text("".join(f"{sha256(path)}  {path.name}\n" for path in files))
    for path in files:
        print(f"{path.stat().st_size:>12,} bytes  {path}")
    return 0


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def tools(environment: Path) -> str:
    """The Python of a new environment that holds the tools of `requirements/release.txt`."""
    venv.create(environment, with_pip=False)
    python = str(environment / "bin" / "python")
    install = ("install", "--require-hashes", "--only-binary=:all:", "-r", RELEASE)
    run(*PIP, "--python", python, *install)
    return python


def dependencies(python: str, wheel: Path, folder: Path) -> list[Path]:
    """Wheels of the base dependencies for every Python and machine.

    pip fails where a file is not of `requirements/archive.txt`, or something is missing there.
    """
    folder.mkdir()
    pinned = folder / "pinned.txt"
    pinned.write_text(f"-r {ARCHIVE}\n{wheel} --hash=sha256:{sha256(wheel)}\n")
    for version in PYTHONS:
        for machine in MACHINES:
            download(python, folder, version, machine, "--require-hashes", "-r", str(pinned))
    return sorted(path for path in folder.glob("*.whl") if path.name != wheel.name)


def archive(wheels: list[Path], target: Path) -> None:
    """One zip archive that Python starts, with the packages of all `wheels`.

    Wheels of one version for several Pythons share their modules.
    """
    files: dict[str, bytes] = {}
    for path in wheels:
        with zipfile.ZipFile(path) as opened:
            for name in opened.namelist():
                if name.endswith(("/", ".dist-info/RECORD", ".dist-info/WHEEL")):
                    continue
                data = opened.read(name)
                if files.setdefault(name, data) != data:
                    sys.exit(f"error: {name} differs between wheels of one release")
    native = sorted({f".{Path(name).name.partition('.')[2]}" for name in files if ".so" in name})
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\n".encode())
    start = (REPOSITORY / "tools" / "pyz_start.py").read_text()
    start = start.replace("@DIGEST@", digest.hexdigest())
    start = start.replace('"@SUFFIXES@"', ", ".join(f'"{suffix}"' for suffix in native))
    with target.open("wb") as opened:
        opened.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(opened, "w", zipfile.ZIP_DEFLATED) as written:
            for name, data in sorted({**files, "__main__.py": start.encode()}.items()):
                written.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    target.chmod(0o755)


def components(python: str, pyz: Path, environment: Path, dist: Path) -> None:
    """Write what the archive holds as CycloneDX."""
    venv.create(environment, with_pip=False)
    (packages,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(pyz) as opened:
        opened.extractall(packages)
    cyclonedx = (python, "-m", "cyclonedx_py", "environment", "--output-reproducible")
    root = f"--pyproject={REPOSITORY / 'pyproject.toml'}"
    content = environment / "bin" / "python"
    run(*cyclonedx, root, "-o", dist / "ckptctl.cdx.json", content)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())

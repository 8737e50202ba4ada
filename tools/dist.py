"""Build what a release consists of.

    python tools/dist.py [FOLDER]       (dist/)

The wheel and the source archive; `ckptctl.pyz`, one file with all base
dependencies for every Python and machine in `PYTHONS` and `MACHINES`; a
CycloneDX list of its components; and the SHA-256 of each file. The archive is
the same, byte for byte, from the same source and the same dependencies.
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

REPOSITORY = Path(__file__).resolve().parent.parent
CONSTRAINTS = REPOSITORY / "constraints.txt"
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
LIBC = ("manylinux2014", "manylinux_2_17", "manylinux_2_28")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")


def main() -> int:
    """Build everything anew."""
    dist = Path(sys.argv[1] if len(sys.argv) > 1 else REPOSITORY / "dist")
    shutil.rmtree(dist, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", str(dist), str(REPOSITORY))
    (wheel,) = dist.glob("*.whl")
    with tempfile.TemporaryDirectory() as temporary:
        wheels = [wheel, *dependencies(wheel, Path(temporary) / "wheels")]
        archive(wheels, dist / "ckptctl.pyz")
        components(wheel, Path(temporary) / "environment", dist / "ckptctl.cdx.json")
    files = sorted(dist.iterdir())
    (dist / "SHA256SUMS").write_text("".join(f"{sha256(path)}  {path.name}\n" for path in files))
    for path in files:
        print(f"{path.stat().st_size:>12,} bytes  {path}")
    return 0


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def dependencies(wheel: Path, folder: Path) -> list[Path]:
    """Wheels of the base dependencies for every Python and machine.

    The versions are those that the oldest Python takes: the archive holds one of each.
    """
    folder.mkdir()
    pinned = folder / "constraints.txt"  # without those of newer Pythons
    pinned.write_text("".join(line for line in CONSTRAINTS.open() if "python_version" not in line))
    download(folder, PYTHONS[0], MACHINES[0], f"--constraint={pinned}", str(wheel))
    found = [path for path in folder.glob("*.whl") if path.name != wheel.name]
    exact = ["==".join(path.name.split("-")[:2]) for path in found]
    for python in PYTHONS:
        for machine in MACHINES:
            download(folder, python, machine, "--no-deps", *exact)
    return sorted(path for path in folder.glob("*.whl") if path.name != wheel.name)


def download(folder: Path, python: str, machine: str, *what: str) -> None:
    target = (f"--python-version={python}", *(f"--platform={libc}_{machine}" for libc in LIBC))
    run(*PIP, "download", "--only-binary=:all:", *target, f"--dest={folder}", *what)


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


def components(wheel: Path, environment: Path, target: Path) -> None:
    """The packages of an environment that holds the wheel and what it needs, as CycloneDX."""
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    run(*(*PIP, "--python", str(python), "install", f"--constraint={CONSTRAINTS}", str(wheel)))
    cyclonedx = (sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible")
    run(*cyclonedx, f"--pyproject={REPOSITORY / 'pyproject.toml'}", f"-o{target}", str(python))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())

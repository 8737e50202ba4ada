"""What `make dist` builds works where nothing is installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from command_line import interpreter
from pinned_versions import normalized, pins

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHONS = ("3.11", "3.12", "3.13")

pytestmark = [pytest.mark.long, pytest.mark.slow]


def built(folder: Path) -> Path:
    script = REPOSITORY / "tools" / "dist.py"
    subprocess.run([sys.executable, script, folder / "dist"], check=True)
    return folder / "dist"


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("built"))


def start(pyz: Path, *words: str, python: str = sys.executable, **variables: str):
    """Run the archive without the environment and the installed packages of this process."""
    return subprocess.run(
        [python, "-I", "-S", pyz, *words], env=variables, capture_output=True, text=True
    )


@pytest.mark.parametrize("version", PYTHONS)
def test_every_python_scans_with_the_archive_alone(dist, checkpoints, tmp_path, version):
    python = interpreter(version)
    answers = [
        start(
            dist / "ckptctl.pyz", "scan", checkpoints / "fsdp_2", python=python, HOME=str(tmp_path)
        )
        for _ in range(2)
    ]
    assert [each.returncode for each in answers] == [0, 0], answers[0].stderr
    assert re.search("resume from step [0-9]+: complete", answers[0].stdout)
    assert answers[0].stdout == answers[1].stdout
    (extracted,) = (tmp_path / ".cache" / "ckptctl" / "pyz").iterdir()
    assert re.fullmatch("[0-9a-f]{64}", extracted.name)


def test_a_runbook_runs_with_the_archive_alone(dist, checkpoints, tmp_path):
    python = os.path.realpath(sys.executable)
    words = ("runbook", "run", "rb-7", checkpoints / "fsdp_2", "--dry-run")
    path = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = start(dist / "ckptctl.pyz", *words, python=python, **path)
    assert done.returncode == 31, done.stdout + done.stderr


def test_the_next_command_starts_the_archive(dist, checkpoints, tmp_path):
    step = checkpoints / "fsdp_2" / "step_100"
    done = start(dist / "ckptctl.pyz", "pick", step, HOME=str(tmp_path))
    assert done.returncode == 2
    command = done.stderr.splitlines()[-1].removeprefix("next:  ")
    home = {"HOME": str(tmp_path)}
    again = subprocess.run(command, shell=True, cwd="/", env=home, capture_output=True, text=True)
    assert again.returncode == 0, command + again.stderr


def test_a_python_without_native_modules_in_the_archive_is_told_which_there_are(dist, tmp_path):
    other = tmp_path / "other.pyz"
    with zipfile.ZipFile(dist / "ckptctl.pyz") as archive:
        start_text = archive.read("__main__.py").decode()
    suffixes = re.search("SUFFIXES = [(](.*),[)]", start_text)
    assert suffixes is not None
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("__main__.py", start_text.replace(suffixes[1], '".cpython-39-x.so"'))
    done = start(other, "--version")
    assert done.returncode == 2
    assert "none of those that ckptctl.pyz was built for: cpython-39-x" in done.stderr


@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_works_in_an_empty_environment_without_an_index(
    dist, checkpoints, tmp_path, version
):
    environment = tmp_path / "environment"
    subprocess.run([interpreter(version), "-m", "venv", environment], check=True)
    wheels = tmp_path / "wheels"
    (wheel,) = dist.glob("*.whl")
    pip = (environment / "bin" / "python", "-m", "pip", "-qq")
    subprocess.run([*pip, "download", "--dest", wheels, wheel], check=True)
    offline = ("install", "--no-index", "--find-links", wheels, wheel)
    subprocess.run([*pip, *offline], check=True)
    verify = (environment / "bin" / "ckptctl", "verify", f"{checkpoints / 'fsdp_2'}@auto")
    done = subprocess.run([*verify, "--level", "content"], env={}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "every byte verified" in done.stdout


def metadata_in(archive: Path) -> dict[str, str]:
    """The versions of the distributions in a wheel or in `ckptctl.pyz`."""
    with zipfile.ZipFile(archive) as opened:
        names = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        found = [Parser().parsestr(opened.read(name).decode()) for name in names]
    return {normalized(each["Name"]): each["Version"] for each in found}


def test_the_list_of_components_is_what_the_archive_holds(dist):
    document = json.loads((dist / "ckptctl.cdx.json").read_text())
    listed = [document["metadata"]["component"], *document["components"]]
    versions = {normalized(each["name"]): each["version"] for each in listed}
    assert len(versions) == len(listed)
    assert versions == metadata_in(dist / "ckptctl.pyz")


def test_what_the_archive_holds_is_what_ckptctl_needs_with_the_pinned_versions(dist):
    (wheel,) = dist.glob("*.whl")
    pinned = pins(REPOSITORY / "requirements" / "archive.txt") | metadata_in(wheel)
    assert metadata_in(dist / "ckptctl.pyz") == pinned
    document = json.loads((dist / "ckptctl.cdx.json").read_text())
    needs = {each["ref"]: each.get("dependsOn", []) for each in document["dependencies"]}
    reached, asked = set(), [document["metadata"]["component"]["bom-ref"]]
    while asked:
        reached.add(ref := asked.pop())
        asked += set(needs[ref]) - reached
    assert reached == set(needs)
    assert len(reached) == len(pinned)


def test_every_package_in_the_archive_belongs_to_a_component(dist):
    with zipfile.ZipFile(dist / "ckptctl.pyz") as opened:
        tops = {name.split("/")[0] for name in opened.namelist()}
    packages = {top for top in tops if not top.endswith((".dist-info", ".data", ".py", ".so"))}
    own = {each.replace("-", "_") for each in metadata_in(dist / "ckptctl.pyz")}
    assert packages - {"markdown_it"} <= own, packages - own


def test_the_build_backend_is_the_pinned_one(dist):
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [each for each in opened.namelist() if each.endswith(".dist-info/WHEEL")]
        made = Parser().parsestr(opened.read(name).decode())
    pinned = pins(REPOSITORY / "requirements" / "release.txt")
    assert made["Generator"] == f"hatchling {pinned['hatchling']}"


@pytest.mark.parametrize("what", ["another hash", "left out"])
def test_a_dependency_that_is_not_pinned_so_is_refused(dist, tmp_path, what):
    (wheel,) = dist.glob("*.whl")
    pinned = (REPOSITORY / "requirements" / "archive.txt").read_text()
    if what == "left out":
        other = re.sub(r"^mdurl==.*\n.*\n", "", pinned, flags=re.MULTILINE)
    else:
        other = re.sub(r"(mdurl==\S+ \\\n +--hash=sha256:)\w{4}", r"\g<1>0000", pinned)
    assert other != pinned
    (tmp_path / "archive.txt").write_text(other)
    code = (
        "import sys; from pathlib import Path; import dist; dist.ARCHIVE = sys.argv[1]; "
        "dist.dependencies(sys.executable, Path(sys.argv[2]), Path(sys.argv[3]))"
    )
    words = (sys.executable, "-c", code, tmp_path / "archive.txt", wheel, tmp_path / "wheels")
    done = subprocess.run(words, cwd=REPOSITORY / "tools", capture_output=True, text=True)
    assert done.returncode == 1
    reason = "DO NOT MATCH THE HASHES" if what == "another hash" else "--require-hashes"
    assert reason in done.stderr


def test_the_checksums_are_those_of_the_files(dist):
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=dist, check=True)


def test_the_same_source_gives_the_same_bytes(dist, tmp_path):
    again = built(tmp_path)
    assert (again / "SHA256SUMS").read_text() == (dist / "SHA256SUMS").read_text()

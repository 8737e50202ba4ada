"""`ckptctl.pyz` runs no code that another user has put where it extracts to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
OTHER = 65534
"""The user `nobody`."""
CODE = """import os, sys
def main():
    print(__file__, flush=True)
    if sys.argv[1:] == ["fork"]:
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        print(os.path.exists(__file__), flush=True)
    os._exit(int(os.environ.get("CODE", "3")))
"""
WHERE = Path("ckptctl/cli/main.py")

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")


@pytest.fixture(scope="module")
def pyz(tmp_path_factory) -> Path:
    """An archive as `tools/dist.py` builds it, of a package that prints where it is."""
    folder = tmp_path_factory.mktemp("pyz")
    with zipfile.ZipFile(folder / "ckptctl-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("ckptctl/__init__.py", "")
        wheel.writestr("ckptctl/cli/__init__.py", "")
        wheel.writestr(str(WHERE), CODE)
        wheel.writestr(f"native{EXTENSION_SUFFIXES[0]}", "")
    script = (
        "import sys; from pathlib import Path; import dist; "
        "dist.archive([Path(sys.argv[1])], Path(sys.argv[2]))"
    )
    words = (folder / "ckptctl-1-py3-none-any.whl", folder / "ckptctl.pyz")
    subprocess.run([sys.executable, "-c", script, *words], cwd=REPOSITORY / "tools", check=True)
    return folder / "ckptctl.pyz"


@pytest.fixture
def place(tmp_path) -> Path:
    """A home, and a folder where everybody may create files, as in `/tmp`."""
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    return tmp_path


AS_OTHER = f"""import encodings.cp437, hashlib, pkgutil, runpy, shutil, tempfile, zipfile, zlib
import os, sys
os.setgroups([])
os.setgid({OTHER})
os.setuid({OTHER})
runpy.run_path(sys.argv.pop(1), run_name="__main__")"""
"""Start an archive as another user, with a Python that this user may not be able to read."""


def start(pyz: Path, place: Path, *words: str, as_other: bool = False, **variables: str):
    python = (os.path.realpath(sys.executable), "-I", "-S")
    environment = {"HOME": f"{place}/home", "TMPDIR": f"{place}/tmp", "PATH": os.environ["PATH"]}
    return subprocess.run(
        [*python, *(("-c", AS_OTHER) if as_other else ()), pyz, *words],
        env=environment | variables,
        capture_output=True,
        text=True,
    )


def lasting(place: Path) -> Path:
    return place / "home" / ".cache" / "ckptctl" / "pyz"


def runs_in(done: subprocess.CompletedProcess[str], folder: Path) -> bool:
    """Whether the package that ran was extracted below this folder, without an error."""
    assert (done.returncode, done.stderr) == (3, "")
    return Path(done.stdout.splitlines()[0]).is_relative_to(folder.resolve())


def runs_and_leaves_nothing(done: subprocess.CompletedProcess[str], place: Path) -> bool:
    """Whether it ran from a temporary folder, which is gone."""
    return runs_in(done, place / "tmp") and list((place / "tmp").glob("ckptctl-pyz-*")) == []


def planted(folder: Path, digest: str, uid: int) -> None:
    """An extracted archive of another user, with other code."""
    at = folder / digest / WHERE
    at.parent.mkdir(parents=True)
    at.write_text("def main():\n    print('PLANTED', flush=True)\n")
    (at.parent / "__init__.py").touch()
    (at.parents[1] / "__init__.py").touch()
    for path in (folder, *folder.rglob("*")):
        os.chown(path, uid, uid, follow_symlinks=False)
        path.chmod(0o700 if path.is_dir() else 0o600)


def digest_of(pyz: Path, place: Path) -> str:
    start(pyz, place)
    (folder,) = lasting(place).iterdir()
    shutil.rmtree(place / "home" / ".cache")
    return folder.name


def test_the_first_start_extracts_for_all_others(pyz, place):
    for _ in range(2):
        assert runs_in(start(pyz, place), lasting(place))
    (folder,) = lasting(place).iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list((place / "tmp").iterdir()) == []


def test_a_home_behind_a_link_works(pyz, place):
    (place / "home").rename(place / "moved")
    (place / "home").symlink_to("moved")
    assert runs_in(start(pyz, place), place / "moved")


def test_a_folder_with_the_group_of_its_parent_works(pyz, place):
    (place / "home").chmod(0o2755)
    assert runs_in(start(pyz, place), lasting(place))


def test_without_a_cache_folder_a_temporary_one_is_made_and_removed(pyz, place):
    assert runs_and_leaves_nothing(start(pyz, place, HOME="/proc"), place)


def test_a_process_that_is_forked_does_not_remove_the_temporary_folder(pyz, place):
    done = start(pyz, place, "fork", HOME="/proc")
    assert runs_and_leaves_nothing(done, place)
    assert done.stdout.splitlines()[1] == "True"


def test_a_relative_cache_folder_is_ignored(pyz, place):
    done = start(pyz, place, XDG_CACHE_HOME="cache")
    assert runs_in(done, lasting(place))


@pytest.mark.parametrize("part", ["", ".cache", ".cache/ckptctl", ".cache/ckptctl/pyz"])
def test_a_cache_in_which_others_can_write_is_not_used(pyz, place, part):
    folder = place / "home" / part
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o777)
    assert runs_and_leaves_nothing(start(pyz, place), place)
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_an_extracted_folder_that_others_can_read_or_write_is_not_used(pyz, place):
    digest = digest_of(pyz, place)
    planted(lasting(place), digest, os.getuid())
    (lasting(place) / digest).chmod(0o777)
    assert runs_and_leaves_nothing(start(pyz, place), place)


def test_a_link_in_the_place_of_the_extracted_folder_is_not_followed(pyz, place):
    digest = digest_of(pyz, place)
    planted(place / "elsewhere", digest, os.getuid())
    lasting(place).mkdir(parents=True)
    (lasting(place) / digest).symlink_to(place / "elsewhere" / digest)
    assert runs_and_leaves_nothing(start(pyz, place), place)


@pytest.mark.parametrize("how", ["writable", "link", "file"])
def test_a_named_folder_that_is_not_private_is_an_error_that_names_what_to_do(pyz, place, how):
    named = place / "tmp" / "named"
    if how == "writable":
        named.mkdir()
        named.chmod(0o777)
    elif how == "link":
        named.symlink_to(place / "home")
    else:
        named.touch()
    done = start(pyz, place, CKPTCTL_PYZ_DIR=str(named))
    assert done.returncode == 2
    assert str(named) in done.stderr.splitlines()[0]
    assert done.stderr.splitlines()[1].startswith("next: mkdir -m 700 ")
    assert list((place / "home").iterdir()) == []


def test_a_named_folder_is_used_and_created(pyz, place):
    assert runs_in(start(pyz, place, CKPTCTL_PYZ_DIR=f"{place}/a/b", HOME="/proc"), place / "a")


def test_an_archive_with_other_content_is_not_extracted(pyz, place):
    other = place / "other.pyz"
    with zipfile.ZipFile(pyz) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name) + (b"#" if name == str(WHERE) else b""))
    done = start(other, place)
    assert done.returncode == 2
    assert "is damaged: its content is not what it was built with" in done.stderr
    assert list(lasting(place).iterdir()) == []


def test_no_place_at_all_is_an_error_with_both_reasons(pyz, place):
    (place / "tmp").chmod(0o777)
    done = start(pyz, place, HOME="/proc")
    assert done.returncode == 2
    assert f"{place}/tmp is writable by other users" in done.stderr
    assert "/proc/.cache" in done.stderr
    assert list((place / "tmp").iterdir()) == []


# With a second user


@as_root
@pytest.mark.parametrize("part", [".cache", ".cache/ckptctl", ".cache/ckptctl/pyz"])
def test_a_cache_of_another_user_is_not_used(pyz, place, part):
    digest = digest_of(pyz, place)
    planted(lasting(place), digest, os.getuid())
    os.chown(place / "home" / part, OTHER, OTHER)
    assert runs_and_leaves_nothing(start(pyz, place), place)


@as_root
def test_code_that_another_user_has_extracted_is_not_used(pyz, place):
    digest = digest_of(pyz, place)
    lasting(place).mkdir(parents=True)
    planted(lasting(place), digest, OTHER)
    os.chown(lasting(place), 0, 0)
    assert runs_and_leaves_nothing(start(pyz, place), place)


@as_root
@pytest.mark.parametrize("name", ["ckptctl-pyz-{}", "ckptctl", "ckptctl/pyz", ".cache/ckptctl/pyz"])
@pytest.mark.parametrize("is_link", [False, True])
def test_what_another_user_has_put_into_tmp_is_not_used(pyz, place, name, is_link):
    """Under the names of a cache, in a home that cannot be written."""
    digest = digest_of(pyz, place)
    folder = place / "tmp" / name.format(os.getuid())
    made = place / "of-other" if is_link else folder
    made.mkdir(parents=True)
    planted(made, digest, OTHER)
    if is_link:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(made)
        os.chown(folder, OTHER, OTHER, follow_symlinks=False)
    done = start(pyz, place, HOME="/proc", XDG_CACHE_HOME=str(place / "tmp"))
    assert "PLANTED" not in done.stdout
    runs_in(done, place / "tmp")


@as_root
@pytest.mark.parametrize("owner", [0, OTHER])
def test_a_link_in_tmp_is_not_followed_whoever_has_made_it(pyz, place, owner):
    mine = place / "mine"
    mine.mkdir(mode=0o700)
    link = place / "tmp" / "cache"
    link.symlink_to(mine)
    os.chown(link, owner, owner, follow_symlinks=False)
    assert runs_and_leaves_nothing(start(pyz, place, XDG_CACHE_HOME=str(link)), place)
    assert list(mine.iterdir()) == []


@as_root
def test_a_user_who_is_not_root_has_a_cache_and_refuses_that_of_another(pyz, place, tmp_path):
    for path in {*pyz.parents, *tmp_path.parents, tmp_path}:
        if path.stat().st_mode & 0o077 == 0:  # pytest's folders are root's alone
            path.chmod(0o755)
    os.chown(place / "home", OTHER, OTHER)
    assert runs_in(start(pyz, place, as_other=True), lasting(place))
    os.chown(lasting(place), 1, 1)
    assert runs_and_leaves_nothing(start(pyz, place, as_other=True), place)

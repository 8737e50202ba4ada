"""The start of `ckptctl.pyz`: extract the packages once, and run the command line.

This file becomes `__main__.py` of the archive, where `tools/dist.py` has put in
the digest of its content and the native modules that it holds. It imports
nothing but the standard library and parses on every Python since 3.6.
"""

import hashlib
import os
import shutil
import stat
import sys
import tempfile
import zipfile

DIGEST = "@DIGEST@"
SUFFIXES = ("@SUFFIXES@",)
VARIABLE = "CKPTCTL_PYZ_DIR"
USAGE = 2
MOST_LINKS = 40


def main():
    """Put the extracted packages on the path, and start ckptctl."""
    from importlib.machinery import EXTENSION_SUFFIXES

    if EXTENSION_SUFFIXES[0] not in SUFFIXES:
        built = ", ".join(suffix.split(".")[1] for suffix in SUFFIXES)
        fail(
            f"this Python ({EXTENSION_SUFFIXES[0].split('.')[1]}) is none of those that "
            f"ckptctl.pyz was built for: {built}",
            "python3.12 ckptctl.pyz, or: pip install ckptctl",
        )
    sys.path.insert(0, extracted())
    from ckptctl.cli.main import main as ckptctl

    ckptctl()


def extracted():
    """The folder of the extracted packages, in which no other user can put anything.

    It is made by the first start of this archive. Where no lasting folder can be had, it is a
    temporary one, which is removed when this process ends.
    """
    named, refused = os.environ.get(VARIABLE), []
    base = named or os.path.join(cache(), "ckptctl", "pyz")
    try:
        return lasting(private(os.path.abspath(base)))
    except OSError as error:
        refused.append(f"{base}: {error.strerror or error}")
    if not named:
        try:
            folder = tempfile.mkdtemp(prefix="ckptctl-pyz-")
            remove_at_end(folder)
            extract(private(folder))
            return folder
        except OSError as error:
            refused.append(f"{tempfile.gettempdir()}: {error.strerror or error}")
    return fail(
        "no folder to extract to: " + "; ".join(refused),
        f'mkdir -m 700 "$HOME/ckptctl-pyz"; {VARIABLE}="$HOME/ckptctl-pyz" python3 ckptctl.pyz',
    )


def cache():
    """The cache folder of the user; a relative one would be in the current folder."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return named if os.path.isabs(named) else os.path.expanduser("~/.cache")


def private(path):
    """The path of a folder of this user without links; what is missing of it is created.

    Raises `OSError` where another user could replace a part of the path or write into the
    folder. Who owns `/` can do that anyway; inside a container this need not be root.
    """
    rest, here, n_links = path.split("/"), "/", 0
    found = os.lstat(here)
    trusted = {0, os.getuid(), found.st_uid}
    while rest:
        name = rest.pop(0)
        if name in ("", "."):
            continue
        is_shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if is_shared and not found.st_mode & stat.S_ISVTX:
            raise OSError(f"{here} is writable by other users")
        here = os.path.join(here, name)
        try:
            found = os.lstat(here)
        except FileNotFoundError:
            os.mkdir(here, 0o700)
            found = os.lstat(here)
        if found.st_uid not in ({0, os.getuid()} if is_shared else trusted):
            raise OSError(f"{here} belongs to another user")
        if stat.S_ISLNK(found.st_mode):
            n_links += 1
            if is_shared or n_links > MOST_LINKS:
                raise OSError(f"{here} is a link")
            target = os.path.join(os.path.dirname(here), os.readlink(here))
            rest, here = os.path.normpath(target).split("/") + rest, "/"
            found = os.lstat(here)
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise OSError(f"{here} is no folder of this user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{here} is writable by other users")
    return here


def lasting(base):
    """The folder of this archive in `base`, extracted beside it and renamed when it is complete."""
    folder = os.path.join(base, DIGEST)
    if not os.path.lexists(folder):
        part = tempfile.mkdtemp(prefix=".part-", dir=base)
        try:
            extract(part)
            os.rename(part, folder)
        except BaseException as error:
            shutil.rmtree(part, ignore_errors=True)
            # Another start that was faster has extracted the same bytes.
            if not (isinstance(error, OSError) and os.path.lexists(folder)):
                raise
    found = os.lstat(folder)
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_own or found.st_mode & 0o777 != 0o700:
        raise OSError(f"{folder} is no folder that this user alone can read and write")
    return folder


def extract(folder):
    """Extract the packages, if they are those that the archive was built with."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(sys.argv[0]) as archive:
        names = sorted(set(archive.namelist()) - {"__main__.py"})
        for name in names:
            content = hashlib.sha256(archive.read(name)).hexdigest()
            digest.update(f"{name}\0{content}\n".encode())
        if digest.hexdigest() == DIGEST:
            archive.extractall(folder, names)
            return
    fail(
        f"{sys.argv[0]} is damaged: its content is not what it was built with",
        "sha256sum --check --ignore-missing SHA256SUMS",
    )


def remove_at_end(folder):
    """Remove the folder when this process ends, which ckptctl does by `os._exit`."""
    own, leave = os.getpid(), os._exit

    def end(code):
        try:
            if os.getpid() == own:  # and not a process that it has forked
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            leave(code)

    import atexit

    atexit.register(lambda: os.getpid() == own and shutil.rmtree(folder, ignore_errors=True))
    os._exit = end


def fail(message, command):
    """Print the error in ckptctl's form, and end."""
    sys.stderr.write(f"error: {message}\nnext: {command}\n")
    sys.exit(USAGE)


if __name__ == "__main__":
    main()

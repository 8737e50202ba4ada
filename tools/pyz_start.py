"""The start of `ckptctl.pyz`: extract the packages once, and run the command line.

This file becomes `__main__.py` of the archive, where `tools/dist.py` has put in
the digest of its content and the native modules that it holds. It imports
nothing but the standard library and parses on every Python since 3.6.
"""

import os
import stat
import sys
import tempfile
import zipfile

DIGEST = "@DIGEST@"
SUFFIXES = ("@SUFFIXES@",)
VARIABLE = "CKPTCTL_PYZ_DIR"
USAGE = 2


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
    """The folder of the extracted packages, made by the first start of this archive."""
    refused = []
    for base in candidates():
        folder = os.path.join(base, DIGEST)
        try:
            os.makedirs(base, mode=0o700, exist_ok=True)
            check_owner(base)
            if not os.path.isdir(folder):
                extract(folder)
        except OSError as error:
            refused.append(f"{base}: {error.strerror or error}")
        else:
            return folder
    return fail(
        "no folder to extract to: " + "; ".join(refused),
        f"{VARIABLE}=/a/folder/of/yours python3 ckptctl.pyz",
    )


def candidates():
    """The folder that the caller named, or else the cache of the user, or else one in /tmp."""
    if os.environ.get(VARIABLE):
        return [os.environ[VARIABLE]]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    own = f"ckptctl-pyz-{os.getuid()}"
    return [os.path.join(cache, "ckptctl", "pyz"), os.path.join(tempfile.gettempdir(), own)]


def check_owner(folder):
    """Refuse a folder in which another user could put code."""
    found = os.stat(folder)
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError("it belongs to another user or is writable by others")


def extract(folder):
    """Extract beside `folder` and rename, so that no start sees half of it."""
    part = tempfile.mkdtemp(prefix=".part-", dir=os.path.dirname(folder))
    try:
        with zipfile.ZipFile(sys.argv[0]) as archive:
            archive.extractall(part, [n for n in archive.namelist() if n != "__main__.py"])
        os.rename(part, folder)
    except BaseException as error:
        import shutil

        shutil.rmtree(part, ignore_errors=True)
        # Another start that was faster has extracted the same bytes.
        if not (isinstance(error, OSError) and os.path.isdir(folder)):
            raise


def fail(message, command):
    """Print the error in ckptctl's form, and end."""
    sys.stderr.write(f"error: {message}\nnext: {command}\n")
    sys.exit(USAGE)


if __name__ == "__main__":
    main()

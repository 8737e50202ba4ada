"""Start ckptctl, Python and programs of the system in other processes.

The current folder is often a checkpoint root, where other users may write: a `typing.py`, a
folder `ckptctl` or a program `bash` there must not run. What this module returns imports from
where this process imports, and finds programs in the absolute folders of PATH only. `run` gives
the environment of its caller to the job unchanged.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from typing import NamedTuple

_FOLDER_LISTS = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONPYCACHEPREFIX")
"""Variables by which Python finds code. Source: Python 3.11 to 3.14, *Environment variables*."""


class OwnCommand(NamedTuple):
    """How this ckptctl is started in another process: its arguments and its environment."""

    words: tuple[str, ...]
    environment: dict[str, str]


def own_command(*arguments: str, environment: Mapping[str, str] | None = None) -> OwnCommand:
    """Start this ckptctl with `arguments`: the archive, or the installed package.

    `environment` is that of the process before it is made safe; None is that of this process.
    The words alone start no code of the current folder, also where a launcher passes no
    variable on. Put in front of them what starts a process elsewhere, such as `srun`.
    """
    path = archive()
    program = ("-m", "ckptctl") if path is None else (path,)
    return OwnCommand((*python_command(*program), *arguments), child_environment(environment))


def python_command(*words: str) -> tuple[str, ...]:
    """Start this Python without the current folder in its import path.

    PYTHONSAFEPATH would also reach the job, whose script imports modules beside it: `-P` does
    not. A flag by which this process ignores variables or folders holds for the other one too.
    """
    flags = {
        "-E": sys.flags.ignore_environment,
        "-s": sys.flags.no_user_site,
        "-S": sys.flags.no_site,
    }
    return (sys.executable, "-P", *(flag for flag, is_set in flags.items() if is_set), *words)


def child_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of `environment`, or that of this process, that names no folder by a relative path.

    PATH keeps its absolute folders. Python has read the other variables at the start of this
    process, in the same folder: they get absolute paths, because a launcher or a block of a
    runbook may change the folder.
    """
    child = dict(os.environ if environment is None else environment)
    # Without PATH, bash searches folders that were chosen when it was built.
    folders = filter(os.path.isabs, child.get("PATH", "").split(os.pathsep))
    child["PATH"] = os.pathsep.join(folders) or os.defpath
    for name in _FOLDER_LISTS:
        if child.get(name):
            child[name] = os.pathsep.join(
                folder if os.path.isabs(folder) else os.path.abspath(folder)
                for folder in child[name].split(os.pathsep)
            )
    return child


def find_program(name: str, environment: Mapping[str, str] | None = None) -> str | None:
    """The path of a program; None where no absolute folder of PATH holds it."""
    import shutil

    return shutil.which(name, path=child_environment(environment)["PATH"])


def archive() -> str | None:
    """The path of `ckptctl.pyz` where this process was started from it."""
    path = getattr(getattr(sys.modules["__main__"], "__loader__", None), "archive", None)
    return None if path is None else os.path.abspath(path)


def as_started(command: str) -> str:
    """A command of ckptctl with the words that start it here: those of the archive, if any."""
    program, space, rest = command.partition(" ")
    if program != "ckptctl" or archive() is None:
        return command
    return f"{shlex.join(own_command().words)}{space}{rest}"

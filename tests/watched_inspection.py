"""Inspect steps as a user does, and record every unexpected audit event.

Run as `python watched_inspection.py MEBIBYTES FOLDER`: each folder in `FOLDER` is a root with
one step; every question that reads one is asked of it, and each outcome is printed as
a line of JSON: the findings at the deepest level, the exit codes, and the events that no
reader has a reason to cause. All modules are loaded before that; from then on memory is
limited to so much more than is taken by then.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

from loaded_modules import load_all_modules

import ckptctl
from ckptctl import Level, Report, Severity
from ckptctl.errors import CkptctlError

_NEVER = (
    "exec",
    "compile",
    "pickle.find_class",
    "marshal",
    "code.__new__",
    "ctypes",
    "subprocess",
    "socket",
    "shutil",
    "tempfile",
    "webbrowser",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.putenv",
    "os.chmod",
    "os.kill",
    "sys.addaudithook",
)
_MAY_OPEN = ("/proc/", "/sys/", "/etc/mtab")


def main() -> None:
    mebibytes, folder = int(sys.argv[1]), Path(sys.argv[2])
    events: list[str] = []
    watching = False

    def note(event: str, args: tuple[object, ...]) -> None:
        if not watching:
            return
        if event.startswith(_NEVER):
            events.append(event)
        elif event == "open" and isinstance(args[0], str) and args[0].startswith("/"):
            inside = args[0].startswith((str(folder), *_MAY_OPEN, sys.prefix, sys.base_prefix))
            if not inside:
                events.append(f"open {args[0]}")

    sys.addaudithook(note)
    load_all_modules()
    ask(folder / "sound")
    with open("/proc/self/statm") as file:
        n_mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit = n_mapped + (mebibytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for root in sorted(folder.iterdir()):
        events.clear()
        watching = True
        codes, found = ask(root)
        watching = False
        print(json.dumps([root.name, codes, found, events]), flush=True)


def ask(root: Path) -> tuple[list[int], list[str]]:
    """The exit codes of every question, and the codes of what the deepest inspection found."""
    codes, found = [], set()
    for question in (
        lambda: ckptctl.verify(f"{root}@100", level=Level.CONTENT, nan_scan=True, jobs=1),
        lambda: ckptctl.pick(str(root), level=Level.STRUCTURE),
        lambda: ckptctl.scan(str(root), level=Level.LISTING),
        lambda: ckptctl.show(f"{root}@100"),
    ):
        try:
            answer = question()
        except CkptctlError as error:
            codes.append(error.exit_code)
            continue
        codes.append(answer.exit_code)
        if isinstance(answer, Report):
            found = {f.code for f in answer.findings if f.severity is not Severity.NOTE}
    return codes, sorted(found)


if __name__ == "__main__":
    main()

"""Install the torch that `constraints.txt` names, or another, and never CUDA by accident.

    python tools/install_torch.py [torch==VERSION]

On Linux the default package index serves torch with gigabytes of CUDA
libraries. What would be installed is resolved first; if CUDA is in it, this
stops and names the options. Set ALLOW_CUDA=1 to take it all the same.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
CUDA = re.compile(r"nvidia-|cuda-|triton$")

HELP = """\
error: {torch} would bring CUDA ({packages}), some gigabytes
  a CPU build of torch is enough here, and pip found none for this Python
next:  PIP_EXTRA_INDEX_URL=URL make demo   with an index of CPU builds; pytorch.org names one
       ALLOW_CUDA=1 make demo              to take CUDA all the same"""


def main() -> int:
    torch = sys.argv[1] if len(sys.argv) > 1 else _pinned()
    packages = _would_install(torch)
    cuda = sorted(name for name in packages if CUDA.match(name))
    if cuda and os.environ.get("ALLOW_CUDA") != "1":
        print(HELP.format(torch=torch, packages=_shortened(cuda)), file=sys.stderr)
        return 1
    if not packages:
        return 0
    print(f"installing {torch} ({'CUDA' if cuda else 'CPU'})", flush=True)
    constraints = ["-c", str(CONSTRAINTS)] if torch == _pinned() else []
    command = [*PIP, "install", "-qq", *constraints, torch]
    return subprocess.run(command, check=False).returncode


def _shortened(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def _pinned() -> str:
    """The requirement on torch itself, such as `torch==2.13.0`."""
    (line,) = (x for x in CONSTRAINTS.read_text().splitlines() if x.startswith("torch=="))
    return line


def _would_install(requirement: str) -> set[str]:
    """Names of the distributions that pip would download for `requirement`."""
    command = [*PIP, "install", "-qq", "--dry-run", "--report", "-", requirement]
    report = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    return {item["metadata"]["name"].lower() for item in json.loads(report)["install"]}


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt:
        code = 130
    raise SystemExit(code)

"""Install the frameworks that `tests/integrations` runs, beside the test environment.

    python tools/install_frameworks.py [NAME...]

Each framework has a file of requirements, with the distribution that is installed without what
it demands behind `# --no-deps`. The new environment, `.cache/framework-venv`, sees
the packages of `.venv`, torch among them, and pip may not replace that torch. A framework that
cannot be installed within its time is named, and its tests are skipped.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
REQUIREMENTS = REPOSITORY / "tests" / "integrations" / "requirements"
ENVIRONMENT = REPOSITORY / ".cache" / "framework-venv"
TIMEOUT_S = 180


def main() -> int:
    python = ENVIRONMENT / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.check_output([str(python), "-c", code], text=True).strip()
    (Path(packages) / "of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraint:
        constraint.write(f"torch=={version('torch')}\n")
        constraint.flush()
        for file in sorted(REQUIREMENTS.glob("*.txt")):
            if sys.argv[1:] and file.stem not in sys.argv[1:]:
                continue
            print(f"installing {file.stem}", flush=True)
            command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
            alone = re.findall(r"^# (--no-deps) (.*)$", file.read_text(), re.MULTILINE)
            failed = None
            for what in [["-c", constraint.name, "-r", str(file)], *map(list, alone)]:
                try:
                    done = subprocess.run([*command, *what], timeout=TIMEOUT_S, check=False)
                    failed = failed or (done.returncode and f"pip ended with {done.returncode}")
                except subprocess.TimeoutExpired:
                    failed = f"pip took longer than {TIMEOUT_S} s"
            if failed:
                print(f"{file.stem} was not installed ({failed}); its tests are skipped")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""NVRx loads the newest local checkpoint whose files are sound on every rank."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from command_line import REPOSITORY
from live_frameworks import JOBS, interpreter, job_environment, record, version_of

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.long]

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(script: Path, *arguments: object) -> str:
    done = subprocess.run(
        [interpreter(), *TORCHRUN, str(script), *map(str, arguments)],
        env=job_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def found(out: Path) -> str:
    """What `find_latest` of the integration answers, on both ranks."""
    return re.search(r"found (.*)", run(JOBS / "nvrx_job.py", out, "session"))[1]


def test_a_damaged_local_checkpoint_is_not_found(tmp_path):
    version_of("nvidia_resiliency_ext")
    run(REPOSITORY / "fixtures" / "rank_files.py", "nvrx", tmp_path)
    for path in tmp_path.glob("session/*/iter_0000006_*.pt"):
        # NVRx keeps one iteration, and for a moment the one before it.
        shutil.copyfile(path, path.with_name(path.name.replace("0006", "0004")))
    assert found(tmp_path) == "[6, 6]"
    newest = tmp_path / "session" / "1" / "iter_0000006_1_local.pt"
    data = newest.read_bytes()
    newest.write_bytes(data[:-5000] + bytes([data[-5000] ^ 1]) + data[-4999:])
    assert found(tmp_path) == "[4, 4]"
    (tmp_path / "session" / "0" / "iter_0000004_0_local.pt").write_bytes(b"")
    assert found(tmp_path) == "[-1, -1]"
    record("nvidia_resiliency_ext", passed_over=True)

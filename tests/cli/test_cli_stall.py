"""A mount that hangs in the kernel ends the command, rather than hang the job."""

import json
import subprocess
import sys

# A read that never comes back and takes no signal from Python: as on a hard mount
# whose server is gone. The store, the watchdog and the process are the real ones.
HANGS = """
import sys, threading
from ckptctl.cli.main import main
from ckptctl.storage import local
from ckptctl.storage.waiting import busy

def hang(self, path=""):
    with busy(f"{self.url}: listing"):
        threading.Event().wait()

local.LocalStore.list_dir = hang
sys.argv = ["ckptctl", *sys.argv[1:]]
main()
"""


def stalled(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HANGS, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_it_ends_with_75_and_says_what_hangs(tmp_path):
    done = stalled("pick", str(tmp_path), "--timeout", "0.2")
    assert (done.returncode, done.stdout) == (75, "")
    assert f"error: {tmp_path}: listing: no progress for 0.8 s" in done.stderr
    assert done.stderr.endswith("next:  ckptctl explain 75\n")
    assert "Traceback" not in done.stderr


def test_the_document_is_there_too(tmp_path):
    done = stalled("scan", str(tmp_path), "--timeout", "0.2", "--json")
    assert done.returncode == 75
    document = json.loads(done.stdout)
    assert (document["ok"], document["exit_code"]) == (False, 75)

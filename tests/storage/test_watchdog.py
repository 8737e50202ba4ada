"""A process ends when its storage hangs in a call that no exception interrupts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import forked_python, run_program
from services.counting_proxy import Fault
from services.processes import wait_until

from ckptctl.storage.waiting import beat, busy

# A local store whose read opens a pipe and waits for a writer that never comes:
# in the kernel, like a read from a server that is gone.
_STUCK = """
import os, sys
from ckptctl.storage.local import LocalStore
from ckptctl.storage.waiting import Watchdog

class Stuck(LocalStore):
    def _whole(self, path, limit):
        with open(os.path.join(self._root.path, path), "rb") as pipe:
            return pipe.read()

def say(error):
    print(f"error: {error.message}", file=sys.stderr, flush=True)
    CALLBACK

with Watchdog(0.4, say):
    Stuck(sys.argv[1]).read("pipe", limit=1)
print("not stuck")
"""

_SILENT = """
import sys
from ckptctl.storage.opening import open_store
from ckptctl.storage.waiting import Watchdog
say = lambda error: print(f"error: {error.message}", file=sys.stderr, flush=True)
options = {"key": "a", "secret": "b", "client": sys.argv[3]}
with Watchdog(0.4, say):
    open_store(sys.argv[1], storage_options=options, endpoint_url=sys.argv[2]).list_dir()
"""


@pytest.mark.parametrize(
    "callback",
    ["pass", "raise ValueError('in the callback')", "import time; time.sleep(1000)"],
    ids=["returns", "raises", "hangs"],
)
def test_a_read_stuck_in_the_kernel_ends_the_process_with_75(tmp_path, callback):
    os.mkfifo(tmp_path / "pipe")
    code = _STUCK.replace("CALLBACK", callback)
    if "sleep" in callback:
        code = code.replace("import os, sys", "import os, sys\nimport ckptctl.storage.waiting as w"
                            "\nw._PRINTING_S = 0.2", 1)  # fmt: skip
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 75
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {tmp_path}/pipe: no progress for 0.4 s; the storage")


@pytest.mark.server
@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_a_server_that_never_answers_ends_the_process_before_its_timeouts_do(
    s3_moto, counting_proxy, client
):
    proxy = counting_proxy(s3_moto.endpoint)
    proxy.break_request("LIST", Fault.SILENT, lasts=True)
    done = run_program(forked_python(), "-c", _SILENT, "s3://bucket/run", proxy.url, client)
    assert done.returncode == 75
    assert done.stderr.startswith("error: s3://bucket/run: no progress for 0.4 s")


_MOVING = """
import time
from ckptctl.storage.waiting import Watchdog, beat, busy
with Watchdog(0.5, lambda error: None):
    for _ in range(3):
        with busy("many short ones"):
            time.sleep(0.2)
    with busy("a long one that comes along"):
        for _ in range(20):
            time.sleep(0.05)
            beat()
    time.sleep(1)
with busy("nobody watches any more"):
    time.sleep(1)
print("done")
"""


def test_what_comes_along_is_left_alone():
    command = [sys.executable, "-c", _MOVING]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


_STOPPED = """
import sys, time
from ckptctl.storage.waiting import Watchdog, busy
with Watchdog(1.5, lambda error: None):
    with busy("a wait of which most is spent stopped"):
        print("waiting", flush=True)
        sys.stdin.readline()
print("done")
"""


def test_a_process_that_was_stopped_is_not_stuck():
    with subprocess.Popen(
        [sys.executable, "-c", _STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGSTOP)
        state = Path(f"/proc/{process.pid}/stat")
        wait_until(lambda: ") T " in state.read_text(), what="the stop")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        process.stdin.write("\n")
        process.stdin.flush()
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read() == "done\n"
        assert process.wait() == 0


def test_without_a_watchdog_nothing_is_kept():
    assert busy("a") is busy("b")
    with busy("a"):
        beat()

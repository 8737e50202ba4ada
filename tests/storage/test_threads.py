"""A system without threads to spare is reported as such."""

from __future__ import annotations

import sys
import threading

import pytest
from command_line import run_program

from ckptctl.errors import OutOfMemory
from ckptctl.storage.waiting import start_daemon

_FEW_THREADS = """
import resource, sys, threading
from ckptctl.errors import OutOfMemory
from ckptctl.storage.contract import Span
from ckptctl.storage.in_flight import read_in_flight

held = threading.Event()
def read(span):
    return bytes(span.length)

taken = 0
for line in open("/proc/self/status"):
    if line.startswith("VmSize:"):
        taken = int(line.split()[1]) << 10
stack = 8 << 20
threading.stack_size(stack)
room = int(float(sys.argv[1]) * stack)
resource.setrlimit(resource.RLIMIT_AS, (taken + room, taken + room))
spans = [Span("a", 0, n) for n in range(40)]
try:
    print(sum(len(data) for _, data in read_in_flight(read, spans)))
except OutOfMemory as error:
    print(error.exit_code, error.message)
"""


@pytest.mark.parametrize(
    ("room", "said"), [("3.5", "780\n"), ("0.5", "75 no thread can be started")]
)
def test_fewer_threads_than_wanted_do_and_none_is_not_damage(room, said):
    done = run_program(sys.executable, "-c", _FEW_THREADS, room, MALLOC_ARENA_MAX="1")
    assert done.stdout.startswith(said), done.stderr


def test_a_thread_that_finds_no_memory_for_its_own_start_is_not_waited_for(monkeypatch):
    def fails(_):
        raise MemoryError

    monkeypatch.setattr(threading.Thread, "_bootstrap_inner", fails)
    with pytest.raises(OutOfMemory, match="no thread can be started"):
        start_daemon("test", pytest.fail)

"""Real checkpoints for tests, and the order in which workers run test files.

Everything that a fixture here returns is shared by all tests and all workers:
read it, and break only copies that `copy_of` makes. Servers are in
`tests/services`.
"""

from __future__ import annotations

import gc
import os
import re
import shlex
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import made_checkpoints
import pytest
from forking import whole_run
from hypothesis import settings

from ckptctl import redaction

pytest_plugins = ["services.plugin"]

# A busy machine is no fault, and a change is not to fail by the chance of an example that has
# nothing to do with it: `make properties` looks for those.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("chance", deadline=None)
settings.load_profile("fixed")

# A process that was started in the background of a shell, or under nohup, ignores signals:
# the programs that tests interrupt would inherit that, and never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# To look for garbage after every 700 objects takes a thirtieth of a worker's time.
gc.set_threshold(50_000, 20, 20)

# Other users may read what tests write, as on most machines.
os.umask(0o022)

# A second thread of torch has nothing to do in models this small but to wait busily for the first:
# a training job of a test takes eight times the processor time on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _no_secrets_of_other_tests():
    """A process hides what it received for as long as it runs; a test is as a process."""
    redaction.forget()  # those of a fixture that several tests share
    yield
    redaction.forget()


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that another user can reach, unlike those of pytest."""
    made = Path(tempfile.mkdtemp(prefix="shared-place-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


_MEMORY = Path("/dev/shm")
_NEEDED_BYTES = 4 << 30


def _has_room(folder: Path) -> bool:
    """Whether a folder has space for the files of a run, and programs in it can be started."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    may_write = os.access(folder, os.W_OK | os.X_OK) and not found.f_flag & os.ST_NOEXEC
    return may_write and found.f_bavail * found.f_frsize >= _NEEDED_BYTES


# On a disk, a sixth of a run's time would be to make and remove small files.
if "TMPDIR" not in os.environ and _has_room(_MEMORY):
    tempfile.tempdir = str(_MEMORY)

# Tests write their folders into commands and messages without quotes.
if shlex.quote(tempfile.gettempdir()) != tempfile.gettempdir():
    tempfile.tempdir = "/tmp"

# What tests and their programs leave behind lies in the folder of the run, which is gone with it;
# pytest keeps its own folders of tests that failed.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
_, _RUN = whole_run()  # before the workers are started
os.environ["TMPDIR"] = tempfile.tempdir = str(_RUN)

# The local copies of the states of `ckptctl run`, which outlive the folders of the tests.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="states-")

_WAITING = ("jobs", "runbook", "storage", "supervisor", "train")
"""Where tests start processes and wait for them and for servers: half the time of `make test`."""

ROOT = Path(__file__).resolve().parent.parent


def pytest_xdist_auto_num_workers() -> int:
    """Two workers for each processor: many tests wait for processes that they started."""
    return 2 * len(os.sched_getaffinity(0))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mix the files whose tests wait with those whose tests compute, and end with the latter.

    Workers that all wait leave the processors idle, and a long file that begins last would run
    alone.
    """
    files = dict.fromkeys(item.path for item in items)
    waiting = [file for file in files if file.parent.name in _WAITING]
    computing = [file for file in files if file.parent.name not in _WAITING]
    place = {file: 0.8 * n / len(waiting) for n, file in enumerate(waiting)}
    place |= {file: n / len(computing) for n, file in enumerate(computing)}
    items.sort(key=lambda item: place[item.path])


def pytest_collection_finish() -> None:
    """Leave the tests and what they import out of every later garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Show a failure when it happens; its place in the summary is minutes away."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_ShownAtOnce(config))
        if config.getoption("tx", None):
            config.option.tx = [f"{each}//python={_forked_worker()}" for each in config.option.tx]


@cache
def _forked_worker() -> Path:
    """A program in the place of `python` for workers: each would take two seconds to import torch.

    Where a variable changes what Python does when it starts, a worker is started.
    """
    from command_line import torch_server

    program = _RUN / "worker"
    server, root = shlex.quote(torch_server().python), shlex.quote(str(ROOT))
    # Its first word is the `-u` of execnet, which opens the streams itself.
    program.write_text(f'#!/bin/sh\nshift\nPYTHONPATH=${{PYTHONPATH:-{root}}} exec {server} "$@"\n')
    program.chmod(0o755)
    return program


def _reasons(reporter: pytest.TerminalReporter) -> Counter[str]:
    """Why tests were skipped, with how many."""
    skipped = reporter.getreports("skipped")
    return Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write each reason to skip tests once, with how many it skipped."""
    reasons = _reasons(terminalreporter)
    if reasons:
        terminalreporter.section("skipped")
    for reason, n in reasons.most_common():
        not_listed = " (not in tests/allowed_skips.txt)" if not _may_skip(reason) else ""
        terminalreporter.write_line(f"{n:5,} {reason}{not_listed}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run in which tests were skipped for want of what it should have installed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or os.environ.get("CKPTCTL_TEST_SKIPS") != "listed":
        return
    if session.exitstatus == 0 and not all(map(_may_skip, _reasons(reporter))):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _may_skip(reason: str) -> bool:
    return any(pattern.fullmatch(reason) for pattern in _allowed_skips())


@cache
def _allowed_skips() -> Sequence[re.Pattern[str]]:
    lines = (ROOT / "tests" / "allowed_skips.txt").read_text().splitlines()
    patterns = (line.partition("  #")[0] for line in lines if line and not line.startswith("#"))
    return [re.compile(pattern) for pattern in patterns]


class _ShownAtOnce:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal = self._config.pluginmanager.get_plugin("terminalreporter")
            terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})", red=True)
            terminal.write_line(report.longreprtext)


@pytest.fixture(scope="session")
def dcp_versions() -> Path:
    """Checkpoints written by four older torch versions; `fixtures/README.md` says which."""
    return made_checkpoints.unpacked("dcp-versions")


@pytest.fixture(scope="session")
def framework_roots() -> Path:
    """Checkpoint roots written by six training frameworks, each with an `about.json`."""
    return made_checkpoints.unpacked("frameworks")


@pytest.fixture(scope="session")
def rank_files() -> Path:
    """Roots of rank files, each written by the framework that it is named after."""
    return made_checkpoints.unpacked("rank-files")


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """Every variant that `fixtures/make.py` writes, as `NAME/step_N`, with real torch."""
    return made_checkpoints.checkpoints()


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """A function that gives a private copy of a folder or file, to break.

    The copy bears the name of its source and keeps modification times and
    links, so that a save of last month does not become one in flight.
    """

    def copy(path: Path) -> Path:
        n_copies = sum(1 for p in tmp_path.iterdir() if p.name.startswith("copy-"))
        target = tmp_path / f"copy-{n_copies}" / path.name
        target.parent.mkdir()
        if path.is_dir():
            shutil.copytree(path, target, symlinks=True)
        else:
            shutil.copy2(path, target)
        return target

    return copy


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that gives a folder which one worker of this run makes for all: `NAME`, `make`."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return partial(made_checkpoints.made_once, folder=shared)

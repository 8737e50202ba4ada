"""What `ckptctl run --torchrun` uses of torch's elastic launcher, all in this module.

The supervisors of all nodes are members of one rendezvous of torch (`Members`), which numbers
them, holds the store in which they exchange documents, and notices a member that is gone. Each
attempt is one torchrun a node: `main` of this module, which is torch's own agent without
restarts, and ends with the exit code of a rank where torchrun ends with 1.

Source: torch 2.13, `torch/distributed/run.py`, `elastic/agent/server/api.py`,
`elastic/rendezvous/dynamic_rendezvous.py`. Private are `_state_holder`, which has the members, and
`_parse_rendezvous_config`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import (
    _parse_rendezvous_config,
    parse_rendezvous_endpoint,
)
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.run import (
    determine_local_world_size,
    get_args_parser,
    parse_min_max_nnodes,
    run,
)

import ckptctl
from ckptctl.distributed.launcher import NoRendezvous
from ckptctl.distributed.process_group import OWN_STORE
from ckptctl.errors import Unknown, UsageError, guarded
from ckptctl.starting import python_command
from ckptctl.storage.waiting import start_daemon

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

_TIMES = {
    "join_timeout": 600,
    "last_call_timeout": 30,
    "close_timeout": 30,
    "read_timeout": 60,
    "keep_alive_interval": 5,
    "keep_alive_max_attempt": 3,
}
"""The times of a rendezvous, in seconds, and how many keep-alives may be missing."""
_SHUTDOWN_S = "30"
"""How long torchrun lets its ranks end after a signal. Source: `LaunchConfig.shutdown_timeout`."""
_PROGRAM = f"import sys; sys.path.append({{path!r}}); from {__name__} import main; main()"
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


@dataclass(frozen=True, slots=True)
class Launch:
    """The arguments of torchrun, and what it reads in them itself."""

    arguments: tuple[str, ...]
    script: str
    n_ranks: int
    """The ranks of this node."""
    rendezvous: RendezvousParameters
    shutdown_s: float
    """How long the ranks may take to end after a signal."""

    def time_s(self, name: str) -> int:
        """One of the times of the rendezvous, in seconds."""
        return int(self.rendezvous.get(name, _TIMES[name]))

    def free_address(self) -> str:
        """Host and port of this node, for the store of one attempt; the port is not reserved."""
        port = get_free_port()  # type: ignore[no-untyped-call]
        return f"{self.rendezvous.local_addr or socket.getfqdn()}:{port}"

    def command(self, address: str, rank: int, size: int) -> list[str]:
        """The torchrun of node `rank` of `size` in one attempt, with its store at an address."""
        package = os.path.dirname(next(iter(ckptctl.__path__)))
        return [
            *python_command("-c", _PROGRAM.format(path=package)),
            *(str(os.getpid()), address, str(rank), str(size), *self.arguments),
        ]


def read_launch(arguments: Sequence[str]) -> Launch:
    """The arguments of torchrun; raises `UsageError` for those that no agent of ours can have."""

    def refuse(message: str) -> NoReturn:
        raise UsageError(f"torchrun: {message}", next_command="torchrun --help")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    parsed = parser.parse_args([*arguments])
    if parsed.standalone or parsed.rdzv_backend not in ("static", "c10d"):
        refuse("--torchrun needs the rendezvous c10d, and for one node `run ... -- torchrun ...`")
    if parsed.max_restarts:
        refuse("--max-restarts is that of ckptctl run, before the --")
    try:
        min_nodes, max_nodes = parse_min_max_nnodes(parsed.nnodes)
        settings: dict[str, Any] = _parse_rendezvous_config(parsed.rdzv_conf)
        n_ranks = determine_local_world_size(parsed.nproc_per_node)
        _, port = parse_rendezvous_endpoint(parsed.rdzv_endpoint, DEFAULT_PORT)
        rendezvous = RendezvousParameters(
            "c10d",
            parsed.rdzv_endpoint,
            parsed.rdzv_id,
            min_nodes,
            max_nodes,
            parsed.local_addr,
            **settings,
        )
        rendezvous.get_as_bool("is_host")
        given_s = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_S)
        shutdown_s = float(given_s if parsed.shutdown_timeout is None else parsed.shutdown_timeout)
        launch = Launch(tuple(arguments), parsed.training_script, n_ranks, rendezvous, shutdown_s)
        least = min(_TIMES, key=launch.time_s)
    except (ValueError, RuntimeError, TypeError) as error:
        refuse(str(error))
    if not parsed.rdzv_endpoint or not port:
        refuse("--rdzv-endpoint HOST:PORT is missing: where the nodes meet, the same on all")
    if n_ranks < 1:
        refuse(f"--nproc-per-node {n_ranks} is no number of ranks")
    if launch.time_s(least) < 1:
        refuse(f"--rdzv-conf {least}={launch.time_s(least)} must be 1 or more")
    return launch


@dataclass(slots=True)
class Round:
    """One meeting of the members: the number of this one among them, and the store they share.

    Every method raises `NoRendezvous` where the store does not answer in time.
    """

    _members: Members
    _store: Store
    rank: int
    size: int

    def put(self, key: str, data: bytes) -> None:
        """Set a value for all members."""
        self._members.ask(lambda: self._store.set(key, data))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes | None:
        """A value; None before a member has set it."""
        return self._members.ask(lambda: self._store.get(key) if self._store.check([key]) else None)

    def count(self, key: str) -> int:
        """How many members have called this, this one among them."""
        return self._members.ask(lambda: self._store.add(key, 1))


class Members:
    """The supervisors of one job in torch's rendezvous. Torch closes it when one of them does."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._handler: RendezvousHandler | None = None
        self._number = 0
        self._lost = ""
        # This one is for the supervisors alone; torch would make another store for their ranks.
        os.environ[OWN_STORE] = "1"

    def ask(self, question: Callable[[], T]) -> T:
        """The answer of the rendezvous or its store within `read_timeout`.

        Raises `NoRendezvous` where there is none, and at once when it was raised before: torch
        waits without a limit for a host that is silent, and the ranks must be ended meanwhile.
        """
        if self._lost:
            raise NoRendezvous(self._lost)
        limit_s = self._launch.time_s("read_timeout")
        try:
            return _asked(question).result(limit_s)
        except TimeoutError as error:
            self._lost = f"no answer within {limit_s} s"
            raise NoRendezvous(self._lost) from error

    def meeting(self) -> Future[Round]:
        """The next meeting of the members, once they are there; else `NoRendezvous`.

        They are waited for `join_timeout`. A member that does not send its keep-alive
        (`keep_alive_interval`) `keep_alive_max_attempt` times is none any more, by the clocks of
        the nodes.
        """
        return _asked(self._meet)

    def _meet(self) -> Round:
        until_s = time.monotonic() + self._launch.time_s("join_timeout")
        while self._handler is None:
            try:
                self._handler = get_rendezvous_handler(self._launch.rendezvous)
            except RendezvousConnectionError:
                if time.monotonic() > until_s:  # the first node may start later
                    raise
                time.sleep(1.0)
        info = self._handler.next_rendezvous()
        self._number = self._state().round
        return Round(self, info.store, info.rank, info.world_size)

    def present(self) -> set[int]:
        """The members of the last meeting that are still there, by number."""
        self.n_waiting()
        state = self._state()
        is_same = state.complete and state.round == self._number
        return {*state.participants.values()} if is_same else set()

    def n_waiting(self) -> int:
        """How many nodes wait to become members, where there may be more."""
        handler = self._handler
        return 0 if handler is None else self.ask(handler.num_nodes_waiting)

    def close(self) -> None:
        """End the rendezvous for all members, and for the nodes that wait to become one."""
        if self._handler is not None:
            self.ask(self._handler.shutdown)

    def _state(self) -> Any:
        return self._handler._state_holder.state  # type: ignore[union-attr]


def _asked(question: Callable[[], T]) -> Future[T]:
    """The answer of the rendezvous or its store; `NoRendezvous` where it fails.

    A thread asks: no signal reaches Python in the main thread while torch waits there.
    """
    answer = Future[T]()

    def ask() -> None:
        try:
            result = guarded("the rendezvous", question, raises=_FAILURES)
        except _FAILURES as error:
            result = Unknown(_why(error))
        if isinstance(result, Unknown):
            answer.set_exception(NoRendezvous(result.message))
        else:
            answer.set_result(result)

    start_daemon("ckptctl-rendezvous", ask)
    return answer


_FAILURES = (RendezvousError, RuntimeError, ValueError, TimeoutError)


def _why(error: Exception) -> str:
    """What torch reports, without its stack."""
    if isinstance(error, RendezvousTimeoutError):
        return "fewer nodes came than --nnodes states (--rdzv-conf join_timeout=SECONDS)"
    if isinstance(error, (RendezvousClosedError, RendezvousGracefulExitError)):
        return "the job of the other nodes has ended"
    cause = error.__cause__ or error
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    return lines[0][:300]


# The torchrun of one attempt


def most_telling(codes: Iterable[int]) -> int:
    """Of the exit codes of failures, in their order, the one that states most; 0 where none is.

    1 is that of any exception, and those of signals come of the end of other ranks.
    """
    return min(codes, key=lambda code: code == 1 or code > 128, default=0)


def main() -> None:
    """Run torchrun for one attempt, and end it when its supervisor is killed.

    The arguments are the process of the supervisor, the address of its store, the number of this
    node, how many there are, and those of torchrun. Ends with the exit code of a rank, or 128 + N
    after signal N.
    """
    supervisor, address, rank, size, *arguments = sys.argv[1:]
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != int(supervisor):  # it was killed while torch was imported
        sys.exit(128 + signal.SIGTERM)
    parsed = get_args_parser().parse_args(arguments)
    parsed.rdzv_backend, parsed.rdzv_endpoint = "static", address
    parsed.node_rank, parsed.nnodes, parsed.max_restarts = int(rank), size, 0
    try:
        record(run)(parsed)
    except ChildFailedError as error:
        traceback.print_exc()
        failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        codes = (failure.exitcode for failure in failures)
        sys.exit(most_telling(128 - code if code < 0 else code for code in codes))
    except SignalException as error:
        sys.exit(128 + error.sigval)

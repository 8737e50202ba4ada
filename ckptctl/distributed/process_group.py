"""The processes that work on one result, and the collectives among them.

A command that torchrun or srun starts several times joins its processes; a training job
already has a process group, beside which `make_group` creates one with its own timeout. A
single process is a group of one, which needs neither torch nor a network.
"""

from __future__ import annotations

import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ckptctl.distributed.launcher import LaunchedRank, launched_size
from ckptctl.errors import CkptctlError, MissingExtra, RanksLost, UsageError
from ckptctl.options import JOB_TIMEOUT_S
from ckptctl.outside_numbers import whole

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")
K = TypeVar("K")

OnProgress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in total."""

COMMAND_TIMEOUT_S = 300.0
"""How long a process of a command waits for the slowest; a dead one is detected at once."""

_BACKEND = "gloo"
"""It needs no GPU, and detects a dead process by its closed connection."""

_MEET_EVERY_S = 1.0
_BEFORE_S = 10.0
"""How long a store of an earlier command of the same job step may still answer."""
_last: deque[dist.Work] = deque(maxlen=8)
"""The last small collectives, also those that failed, which nothing else holds.

A thread of gloo releases a collective soon after its end. Where it is the last that holds it, it
frees the tensors, for which it needs the GIL, and in a process that ends meanwhile it ends with
SIGABRT instead. Source: torch 2.13, `ProcessGroupGloo::runLoop`.
"""
_MAX_HELD_BYTES = 8 << 20
"""The memory of a larger one is not held; 4,000 ranks gather 2,000 bytes of each in it."""


@dataclass(frozen=True, slots=True)
class RankOutcome(Generic[T]):
    """The result of a call on one rank, or its error in a form that every process can read.

    `raised` is an error of another class, of the job's own code for example. It stays on its
    rank; the others get its class and message.
    """

    value: T | None = None
    error: tuple[type[CkptctlError], str, dict[str, Any]] | None = None
    raised: Exception | None = None

    @classmethod
    def of(cls, act: Callable[[], T]) -> RankOutcome[T]:
        """Call `act`, and keep its result or its error: the other ranks wait for either."""
        try:
            return cls(act())
        except RanksLost:
            raise  # communication is no longer possible
        except CkptctlError as error:
            return cls(error=(type(error), error.message, dict(error.__dict__)))
        except Exception as error:  # noqa: BLE001 - raised again on this rank
            first, *_ = str(error).splitlines() or [""]
            message = f"{type(error).__name__}: {first[:300]}"
            return cls(error=(CkptctlError, message, {"next_command": None}), raised=error)

    def __reduce__(self) -> tuple[type[RankOutcome[T]], tuple[object, object]]:
        error = self.error
        if error is not None:
            try:
                pickle.dumps(error)
            except Exception:  # noqa: BLE001 - a class or a field of the job's own code
                kind, message, fields = error
                known = {"next_command": fields.get("next_command"), "exit_code": kind.exit_code}
                error = (CkptctlError, message, known)
        return type(self), (self.value, error)

    def get(self, who: str = "") -> T:
        """The value. Raises the error again, with `who` (the rank) before its message."""
        if self.raised is not None:
            raise self.raised
        if self.error is None:
            return self.value  # type: ignore[return-value]
        kind, message, fields = self.error
        # Without `__init__`, whose parameters differ by class; not `kind.__new__`, which is
        # refused for a class whose second base is a builtin error.
        error = Exception.__new__(kind)
        error.__dict__.update(fields)
        error.message = f"{who}{message}"
        error.args = (error.message,)
        raise error


def _without_kept(outcome: RankOutcome[tuple[T, K]]) -> RankOutcome[tuple[T, K | None]]:
    """The outcome as other processes get it."""
    if outcome.value is None:
        return RankOutcome(error=outcome.error)
    return RankOutcome((outcome.value[0], None))


class _OtherRankFailed(CkptctlError):
    """Another process failed, so this one stops working."""


class ProcessGroup:
    """The processes that share one piece of work; by default this process alone.

    Every method that communicates must be called by every rank, in the same order. It
    raises `RanksLost` if a process died or did not answer within the group's timeout.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, handle: dist.ProcessGroup | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.handle = handle
        self.host = os.uname().nodename
        self._on_progress: OnProgress | None = None
        self._progress = (0, 0)
        self._next_meeting_s = 0.0
        self._n_shared = 0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which decides, writes marks and seals, and reports."""
        return self.rank == 0

    def gather(self, value: T) -> tuple[T, ...]:
        """The value of every rank, by rank, on every rank."""
        if self.size == 1:
            return (value,)
        import torch
        import torch.distributed as dist

        own = _as_tensor(pickle.dumps(value))
        sizes = torch.empty(self.size, 1, dtype=torch.int64)
        size = torch.tensor([len(own)])
        self._communicate(
            lambda: dist.all_gather([*sizes.unbind()], size, self.handle, async_op=True)
        )
        n_bytes = sizes.flatten().tolist()
        most = max(n_bytes)
        padded = torch.nn.functional.pad(own, (0, most - len(own)))
        found = torch.empty(self.size, most, dtype=torch.uint8)
        self._communicate(
            lambda: dist.all_gather([*found.unbind()], padded, self.handle, async_op=True),
            n_bytes=found.numel(),
        )
        return tuple(map(_unpacked, found.unbind(), n_bytes))

    def from_first(self, act: Callable[[], T]) -> T:
        """Call `act` on rank 0; its result, or its error, on every rank."""
        return self.from_first_keeping(lambda: (act(), None))[0]

    def from_first_keeping(self, act: Callable[[], tuple[T, K]]) -> tuple[T, K | None]:
        """As `from_first`, and what rank 0 keeps for itself: `act` returns both."""
        own: RankOutcome[tuple[T, K]] = RankOutcome.of(act) if self.is_first else RankOutcome()
        shared = _without_kept(own)
        if self.size > 1:
            shared = self._broadcast(shared)
        return own.get() if self.is_first else shared.get()

    def _broadcast(self, value: T) -> T:
        """The value of rank 0, on every rank."""
        import torch
        import torch.distributed as dist

        if self.is_first:
            data = _as_tensor(pickle.dumps(value))
        size = torch.tensor([len(data) if self.is_first else 0])
        self._communicate(lambda: dist.broadcast(size, 0, self.handle, async_op=True))
        if not self.is_first:
            data = torch.empty(int(size), dtype=torch.uint8)
        self._communicate(
            lambda: dist.broadcast(data, 0, self.handle, async_op=True), n_bytes=len(data)
        )
        return value if self.is_first else _unpacked(data, len(data))

    def from_all(self, act: Callable[[], T]) -> tuple[T, ...]:
        """Call `act` on every rank; the results by rank, or the first rank's error, on all."""
        return self.from_all_keeping(lambda: (act(), None))[0]

    def on_all(self, act: Callable[[], K]) -> K:
        """Call `act` on every rank; its own result, or the first rank's error, on each."""
        return self.from_all_keeping(lambda: (None, act()))[1]

    def from_all_keeping(self, act: Callable[[], tuple[T, K]]) -> tuple[tuple[T, ...], K]:
        """As `from_all`, and what this rank keeps for itself: `act` returns both."""
        own = RankOutcome.of(act)
        outcomes = self.gather((self.host, _without_kept(own)))
        if own.raised is not None:
            raise own.raised
        for rank, (host, outcome) in enumerate(outcomes):
            if outcome.error is not None and outcome.error[0] is not _OtherRankFailed:
                outcome.get(f"rank {rank} on {host}: " if self.size > 1 else "")
        return tuple(outcome.get()[0] for _, outcome in outcomes), own.get()[1]

    def bytes_from(self, sources: Sequence[int], data: bytes | None) -> bytes | None:
        """The bytes of another rank: `sources` names one for each rank, itself where it needs none.

        `data` are those of this rank; None where it has none to give. They are sent as they are,
        from rank to rank: ranks of one machine need no group of their own for it.
        """
        sizes = self.gather(0 if data is None else len(data))
        source = sources[self.rank]
        n_bytes = sizes[source]
        others = [rank for rank, other in enumerate(sources) if other == self.rank != rank]
        if not n_bytes or (source == self.rank and not others):
            return data
        import torch
        import torch.distributed as dist

        if data and others:
            sent = _as_tensor(data)
            for rank in others:
                self._communicate(partial(dist.isend, sent, rank, self.handle), n_bytes=n_bytes)
            return data
        received = torch.empty(n_bytes, dtype=torch.uint8)
        self._communicate(lambda: dist.irecv(received, source, self.handle), n_bytes=n_bytes)
        return bytes(received.numpy().data)

    def most(self, *numbers: int) -> tuple[int, ...]:
        """The maximum of each number over all ranks: one small message, cheap at every step."""
        return self._reduced(numbers, "MAX")

    def added(self, *numbers: int) -> tuple[int, ...]:
        """The sum of each number over all ranks, which must be less than 2^63: one message."""
        return self._reduced(numbers, "SUM")

    def _reduced(self, numbers: tuple[int, ...], operation: str) -> tuple[int, ...]:
        if self.size == 1 or not numbers:
            return numbers
        import torch
        import torch.distributed as dist

        totals = torch.tensor(numbers)
        reduction = getattr(dist.ReduceOp, operation)
        self._communicate(lambda: dist.all_reduce(totals, reduction, self.handle, async_op=True))
        return tuple(totals.tolist())

    def dcp_arguments(self, call: Callable[..., object]) -> dict[str, Any]:
        """The arguments of `dcp.save` or `dcp.load` that make it use this group."""
        arguments: dict[str, Any] = {"process_group": self.handle}
        # torch before 2.7 has no `no_dist` and detects it itself.
        import inspect

        if "no_dist" in inspect.signature(call).parameters:
            arguments["no_dist"] = self.size == 1
        return arguments

    # Long work, shared among the processes

    def watch(self, on_progress: OnProgress | None) -> OnProgress | None:
        """A callback for this process's progress, which reports that of all to `on_progress`.

        The processes synchronize in it once a second: if one has died, the others end with
        an error, instead of counting it as one that found nothing. `share` ends the
        synchronization.
        """
        if self.size == 1:
            return on_progress
        self._on_progress = on_progress
        return self._report

    def share(self, act: Callable[[], T]) -> tuple[T, ...]:
        """Like `from_all`, for work after `watch`: synchronize until all processes are done.

        A group's timeout limits one synchronization, not the work.
        """
        outcome = RankOutcome.of(act)
        if self.size > 1:
            if outcome.error is None:  # the last callback may have come before the last byte
                self._progress = (self._progress[1], self._progress[1])
            while self._meet(is_done=True, has_failed=outcome.error is not None)[0] < self.size:
                time.sleep(_MEET_EVERY_S / 10)
        self._n_shared += 1
        return self.from_all(outcome.get)

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Raise an error of this process, before it calls `share`, in the `share` of all others.

        Without this the others would wait in `share` for a process that never calls it.
        """
        n_shared = self._n_shared
        try:
            yield
        except RanksLost:
            raise
        except CkptctlError as error:
            if self.size > 1 and self._n_shared == n_shared:
                self.share(partial(_raise, error))
            raise

    def agree(self, exit_code: int) -> int:
        """The exit code of rank 0, on every rank.

        A process that failed before it shared anything does not wait and keeps its own: the
        others detect that it has ended.
        """
        if self.size == 1 or not self._n_shared:
            return exit_code
        agreed = self.from_first(lambda: exit_code)
        self.gather(None)  # rank 0 serves the others' connections until all have read
        return agreed

    def _report(self, done: int, total: int) -> None:
        self._progress = (done, total)
        if time.monotonic() >= self._next_meeting_s:
            _, n_failed = self._meet()
            if n_failed:
                raise _OtherRankFailed("another process failed")
            self._next_meeting_s = time.monotonic() + _MEET_EVERY_S

    def _meet(self, *, is_done: bool = False, has_failed: bool = False) -> tuple[int, int]:
        """Add up the progress of all; how many are done, and how many of them failed."""
        n_done, n_failed, done, total = self.added(int(is_done), int(has_failed), *self._progress)
        if self._on_progress is not None:
            self._on_progress(done, total)
        return n_done, n_failed

    def _communicate(self, start: Callable[[], dist.Work | None], *, n_bytes: int = 0) -> None:
        """Start a collective, which is None on a rank that is not in the group, and await it.

        `n_bytes` are those of its tensors, where they may be many.
        """
        try:
            work = start()
            if work is not None:
                if n_bytes <= _MAX_HELD_BYTES:
                    _last.append(work)
                work.wait()
        except RuntimeError as error:  # torch raises these for a lost peer and for a timeout
            raise ranks_lost(error) from error


def _as_tensor(data: bytes) -> torch.Tensor:
    import torch

    # A bytearray, because torch warns of tensors over memory that must not be written to.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpacked(data: torch.Tensor, n_bytes: int) -> Any:
    return pickle.loads(data[:n_bytes].numpy().data)  # noqa: S301 - from a rank of this job


def _raise(error: CkptctlError) -> None:
    raise error


OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""At 1 each attempt of torchrun (2.13) has a store of its own, in place of one for all of them."""


def ranks_lost(error: BaseException) -> RanksLost:
    """The error for a collective that failed."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if restarted and "connectFullMesh" in first:
        return RanksLost(
            "the ranks do not reach each other after a restart by torchrun, whose store still "
            f"holds the addresses of the attempt before ({first[:200]})",
            next_command=f"{OWN_STORE}=1 torchrun ...",
        )
    return RanksLost(
        f"a rank of this job has ended, or did not answer in time ({first[:200]})",
        next_command="ckptctl classify LOG",
    )


def raise_interruption(failures: Mapping[int, Any], own_rank: int) -> None:
    """Raise what ended a rank, such as Ctrl-C, again there, and an error of ckptctl on the others.

    `failures` are those of torch's `CheckpointException`, which has them beside errors of the
    checkpoint: an interruption is none, and no reason to take an older step. Nor is an exception
    of the script's own, which a handler of a signal may raise at any moment.
    """
    ended = {
        rank: one
        for rank, (one, _) in failures.items()
        if not isinstance(one, Exception) or type(one).__module__ == "__main__"
    }
    if own_rank in ended:
        raise ended[own_rank]
    for rank, one in sorted(ended.items()):
        message = f"rank {rank} was interrupted ({type(one).__name__})"
        # `RankOutcome` shares an `Exception` with the others, which have to be there for that.
        is_shared = all(isinstance(error, Exception) for error in ended.values())
        raise CkptctlError(message) if is_shared else RanksLost(message)


@contextmanager
def joined(launched: LaunchedRank | None, command: str = "") -> Iterator[ProcessGroup]:
    """The group of all processes that a launcher started for one command; all must call this.

    A port proves nothing about who else is there: the group has keys of its own in the store where
    it meets, and its first message compares `command`, which must be the same in all.

    Raises `MissingExtra` without torch, `RanksLost` if not all of them start in time,
    `UsageError` if two have one rank, or if they run different commands.
    """
    if launched is None:
        yield ProcessGroup()
        return
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise MissingExtra(
            f"{launched.size} processes were started, which need torch to share the work",
            next_command="pip install 'ckptctl[torch]'",
        ) from error
    timeout = timedelta(seconds=COMMAND_TIMEOUT_S)
    _check_variables(launched)
    try:
        store = _own_store(launched, timeout)
        dist.init_process_group(
            _BACKEND, store=store, rank=launched.rank, world_size=launched.size, timeout=timeout
        )
    except RuntimeError as error:
        raise ranks_lost(error) from error
    try:
        group = ProcessGroup(launched.rank, launched.size)
        (first_host, first), *others = group.gather((group.host, command))
        for rank, (host, other) in enumerate(others, 1):
            if other != first:
                raise UsageError(
                    f"rank {rank} on {host} runs `{other}`, and rank 0 on {first_host} `{first}`: "
                    "processes that share the work must run the same command"
                )
        yield group
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _check_variables(launched: LaunchedRank) -> None:
    """Raise `UsageError` where the variables of the launcher cannot be those of a rank."""
    if launched.rank >= launched.size:
        raise UsageError(
            f"RANK is {launched.rank}, and WORLD_SIZE is {launched.size}: the last rank is "
            f"{launched.size - 1}; unset both to run one process"
        )
    port = os.environ.get("MASTER_PORT", "")
    if launched.address is None and not 0 < (whole(port) or 0) < 65536:
        state = f"is {port[:100]!r}" if port else "is not set"
        raise UsageError(
            f"RANK and WORLD_SIZE name {launched.size} processes, and MASTER_PORT {state}: set it "
            "to the port of rank 0, or unset RANK and WORLD_SIZE to run one process"
        )


def _own_store(launched: LaunchedRank, timeout: timedelta) -> Store:
    """The keys of this group in the store where it meets, in which this is the only such rank."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    until_s = time.monotonic() + _BEFORE_S
    while True:
        shared: Store
        if launched.address is None:  # torchrun names it in its variables
            shared, _, _ = next(rendezvous("env://", launched.rank, launched.size, timeout=timeout))
        else:
            host, port = launched.address
            is_first = launched.rank == 0
            shared = TCPStore(host, port, None, is_first, timeout, wait_for_workers=False)
        store = PrefixStore(f"ckptctl/{launched.step}/{launched.size}", shared)
        if store.add(f"rank/{launched.rank}", 1) == 1:
            return store
        # Where two commands follow each other in one step, the store of the first is about to end.
        if time.monotonic() > until_s:
            raise UsageError(
                f"two processes have rank {launched.rank} of {launched.size}: several commands "
                "were started with the variables of one launcher"
            )
        time.sleep(_BEFORE_S / 20)


def make_group(timeout_s: float = JOB_TIMEOUT_S) -> ProcessGroup:
    """A group of all ranks of the training job that this process belongs to.

    It is separate from the job's own process group: a collective that waits here does not
    block one of the training. Every rank calls it. Raises `UsageError` if a launcher
    started several processes and no process group is initialized, because each would act
    alone.
    """
    try:
        import torch.distributed as dist
    except ModuleNotFoundError:
        initialized = False  # `resolve` works without torch
    else:
        initialized = dist.is_available() and dist.is_initialized()
    if not initialized:
        n_launched = launched_size(os.environ)
        if n_launched > 1:
            raise UsageError(
                f"{n_launched} processes were launched, but no process group is initialized: "
                "call torch.distributed.init_process_group() before ckptctl.train"
            )
        return ProcessGroup()
    if dist.get_world_size() == 1:
        return ProcessGroup()
    try:
        handle = dist.new_group(backend=_BACKEND, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise ranks_lost(error) from error
    return ProcessGroup(dist.get_rank(), dist.get_world_size(), handle)

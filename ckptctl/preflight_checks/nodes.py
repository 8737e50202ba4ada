"""Collect what each node sees of the storage, compare it among nodes, and probe it with writes.

One listing of the root, the chosen step's metadata, some megabytes of one of its shard files, the
mount and the space that is left. A node whose mount is missing, stale or another one is named.

The probe writes files whose content anyone can compute again to a folder of its own below the
root's `.ckptctl/`, flushes them, drops them from the cache of this node, reads them back and
compares: on the node that wrote them, and on another where there are several. It is bounded in
bytes and in time, and its folder is always removed.

On other nodes `srun`, `kubectl exec`, `ssh` or any other command runs `ckptctl preflight
--node-report`, which prints one line of JSON for each process: several nodes are compared in one
way, however they were started.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from ckptctl.distributed.commands import run_bounded
from ckptctl.errors import AccessDenied, OptionError, StorageError, StorageUnavailable, UsageError
from ckptctl.findings import EXIT_DENIED
from ckptctl.formats.bounded_json import decode_json
from ckptctl.formats.digests import sha256_of
from ckptctl.formats.frameworks.layouts import METADATA, OWN_FOLDER
from ckptctl.formatting import command_line, counted, some_of
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import NonNegative
from ckptctl.options import StorageOptions
from ckptctl.preflight_checks.results import Check, CheckOutcome, NodeFacts
from ckptctl.starting import find_program, own_command
from ckptctl.storage.contract import Store, list_if_there, read_range
from ckptctl.storage.opening import absolute_url, join_url, name_below, open_store

PROBE_BYTES = 16 << 20
_SOME_BYTES = 1 << 20
_MAX_METADATA = 4 << 30


def facts_of_this_node(store: Store, step: str | None, rank: int = 0) -> NodeFacts:
    """What this process sees; an error is one of the facts, nothing is raised.

    `step` is the name of the chosen step, None where it is in another root. `rank` spreads
    the reads over the shard files.
    Cost: two listings, one read of each metadata file, one read of at most `PROBE_BYTES`.
    """
    host = socket.gethostname()
    try:
        names = _names(store)
        system = store.folders.file_system() if store.folders is not None else None
        metadata, n_read, read_s = ("", 0, 0.0) if step is None else _read(store, step, rank)
    except StorageError as error:
        # What rank 0 found and this node does not is no usage error: it is another storage.
        denied = isinstance(error, AccessDenied)
        return NodeFacts(host, error=error.message, error_code=EXIT_DENIED if denied else 75)
    return NodeFacts(
        host=host,
        mount=system.mount if system else None,
        read_only=system is not None and system.read_only,
        free=system.free_bytes if system else None,
        n_names=len(names),
        listing=_digest("\n".join(sorted(names)).encode("utf-8", "surrogateescape")),
        metadata=metadata,
        read_bytes=n_read,
        read_s=read_s,
    )


def _names(store: Store) -> list[str]:
    entries = list_if_there(store, "")
    return [f"{one.kind} {one.path}" for one in entries if one.path != OWN_FOLDER]


def _read(store: Store, name: str, rank: int) -> tuple[str, int, float]:
    digests = hashlib.sha256()
    step = OpenStep(store, name)
    files = [file.at(step.in_store(file.path)) for file in step.files if file.kind == "file"]
    for path in sorted(file.path for file in files if file.path.endswith(METADATA)):
        digests.update(store.read(path, limit=_MAX_METADATA))
    shards = [one for one in files if one.size]
    if not shards:
        return digests.hexdigest()[:16], 0, 0.0
    largest = sorted(shards, key=lambda one: (-one.size, one.path))
    file = largest[rank % len(largest)]
    began_s = time.monotonic()
    n_read = len(read_range(store, file.path, 0, min(file.size, PROBE_BYTES)))
    return digests.hexdigest()[:16], n_read, max(time.monotonic() - began_s, 1e-6)


def _digest(data: bytes) -> str:
    return sha256_of(data)[:16]


def check_nodes(root: str, nodes: Sequence[NodeFacts], room: int | None) -> Iterator[Check]:
    """Whether every node can read, sees the same, and has `room` bytes for the next saves.

    With `room` None nothing is to be saved: it may be read-only, and full.
    """
    blind = [one for one in nodes if one.error is not None]
    if blind:
        yield _failed(
            f"{_hosts(blind)} cannot read the root: {blind[0].error}",
            command_line("scan", root),
            max(one.error_code for one in blind),
        )
        return
    yield from _check_same(root, nodes)
    if room is None:
        return
    for one in nodes:
        if one.read_only:
            yield _failed(f"read-only on {one.host}: nothing can be saved", "findmnt --real")
            return
    least = min((one for one in nodes if one.free is not None), key=_free, default=None)
    if least is not None and _free(least) < room:
        yield _failed(
            f"{_free(least):,} bytes are free on {least.host}, and the next saves need "
            f"{room:,}: nothing can be saved",
            command_line("prune", root, "--keep", "3"),
        )


def _check_same(root: str, nodes: Sequence[NodeFacts]) -> Iterator[Check]:
    first = nodes[0]
    for what, of in (("names under the root", "listing"), ("metadata of the step", "metadata")):
        others = [one for one in nodes if getattr(one, of) != getattr(first, of)]
        if others:
            other = others[0]
            seen = f" ({other.n_names} names there, {first.n_names} here)"
            mounts = f"{other.mount or 'no mount'} there, {first.mount or 'no mount'} here"
            if first.mount == other.mount:
                mounts = "a stale mount, or one that is still being updated"
            yield _failed(
                f"{_hosts(others)} sees other {what} than {first.host}"
                f"{seen if of == 'listing' else ''}: {mounts}",
                f"srun --ntasks-per-node=1 {command_line('preflight', root)}",
            )
            return
    yield Check("storage", CheckOutcome.OK, _seen(nodes))


def _seen(nodes: Sequence[NodeFacts]) -> str:
    first = nodes[0]
    hosts = len({one.host for one in nodes})
    by = f"{hosts} nodes see the same" if hosts > 1 else f"{first.host} sees it"
    # What is read of a small file proves nothing about the storage.
    read = [one.read_bytes / one.read_s / 1e6 for one in nodes if one.read_bytes >= _SOME_BYTES]
    speed = f", read at {min(read):,.0f} MB/s or more" if read else ""
    free = [_free(one) for one in nodes if one.free is not None]
    room = f", {min(free) / 1e9:,.1f} GB free" if free else ""
    return f"{by}: {first.n_names} names under the root{speed}{room}" + (
        f" ({first.mount})" if first.mount else ""
    )


def _hosts(nodes: Sequence[NodeFacts]) -> str:
    return some_of(sorted({one.host for one in nodes}), 5)


def _free(node: NodeFacts) -> int:
    return node.free if node.free is not None else 0


def _failed(message: str, next_command: str, exit_code: int = 75) -> Check:
    return Check("storage", CheckOutcome.FAILED, message, exit_code, next_command)


FILE_BYTES = 8 << 20
N_FILES = 8
LIMIT_S = 60.0
_BLOCK = 1 << 20
_WRONG_CONTENT = 11  # as for damaged steps: page someone, and trust nothing from here


@dataclass(frozen=True, slots=True)
class Written:
    """What one process wrote for a probe."""

    host: str
    """The name of the machine."""
    token: str
    """`ID/N`, of a probe that wrote N files."""
    seconds: NonNegative
    """How long that took."""
    error: str | None = None
    """Why it could not be done; null where it could."""
    error_code: int = 0
    """The exit code of that error; 0 without one."""

    @property
    def folder(self) -> str:
        """The folder of the files, under the root."""
        return f"{OWN_FOLDER}/probe-{self.token.partition('/')[0]}"

    @property
    def seeds(self) -> range:
        """The seed of each file's content."""
        name, _, n_files = self.token.partition("/")
        return range(int(name, 16), int(name, 16) + int(n_files))

    @property
    def names(self) -> tuple[str, ...]:
        """The files, under the root."""
        return tuple(f"{self.folder}/{number}.bin" for number in range(len(self.seeds)))


@dataclass(frozen=True, slots=True)
class Compared:
    """What one process read back of a probe."""

    host: str
    """The name of the machine."""
    n_bytes: int
    """Bytes that were read."""
    seconds: NonNegative
    """How long that took."""
    wrong: tuple[str, ...] = ()
    """What differs from what was written, in words."""
    error: str | None = None
    """Why it could not be done; null where it could."""
    error_code: int = 0
    """The exit code of that error; 0 without one."""


class StorageProbe:
    """The probe of one process. Its folder is removed at the end of the `with`."""

    def __init__(self, store: Store) -> None:
        if store.folders is None:
            raise UsageError(
                f"{store.url}: --probe-storage is for file systems: object stores compare "
                "what they receive with its checksum"
            )
        self._store = store
        self._folders = store.folders
        # A seed and a name that no other process has; nothing here is a secret.
        self._id = os.urandom(6).hex()
        self._folder = f"{OWN_FOLDER}/probe-{self._id}"
        self._names: list[str] = []
        self._own_existed = os.path.isdir(self._folders.path_of(OWN_FOLDER))

    def __enter__(self) -> StorageProbe:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove(Written("", f"{self._id}/{len(self._names)}", 0.0))
        if not self._own_existed:
            # Made by the probe; where something else is in it by now, it stays.
            with suppress(StorageError):
                self._store.remove(OWN_FOLDER)

    def remove(self, written: Written) -> None:
        """Remove what this or another process wrote."""
        with suppress(StorageError):
            for name in written.names:
                self._store.remove(name)
            self._store.remove(written.folder)

    def write(self) -> Written:
        """Write the files, each durably; an error is part of the answer."""
        began_s = time.monotonic()
        n_files = 0
        failed: StorageError | None = None
        try:
            for number in range(N_FILES):
                if time.monotonic() - began_s > LIMIT_S:
                    break
                name = f"{self._folder}/{number}.bin"
                self._names.append(name)
                self._store.put_pieces(
                    name, partial(_content, int(self._id, 16) + number), FILE_BYTES
                )
                n_files += 1
                self._forget(name)
        except StorageError as error:
            failed = error
        return Written(
            socket.gethostname(),
            f"{self._id}/{n_files}",
            time.monotonic() - began_s,
            failed.message if failed else None,
            failed.exit_code if failed else 0,
        )

    def compare(self, written: Written) -> Compared:
        """Read what this or another process wrote; an error is part of the answer."""
        host = socket.gethostname()
        began_s = time.monotonic()
        n_bytes = 0
        wrong: list[str] = []
        try:
            for number, seed in enumerate(written.seeds):
                if time.monotonic() - began_s > LIMIT_S:
                    break
                name = f"{written.folder}/{number}.bin"
                for offset, expected in enumerate(_content(seed)):
                    found = read_range(self._store, name, offset * _BLOCK, _BLOCK)
                    n_bytes += len(found)
                    if found != expected:
                        wrong.append(_difference(number, offset * _BLOCK, expected, found))
        except StorageError as error:
            took_s = time.monotonic() - began_s
            return Compared(host, n_bytes, took_s, tuple(wrong), error.message, error.exit_code)
        return Compared(host, n_bytes, time.monotonic() - began_s, tuple(wrong))

    def _forget(self, name: str) -> None:
        """Ask the system to drop the file from its cache, so that the storage is what is read."""
        fd = os.open(
            self._folders.path_of(name),
            os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
        )
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _content(seed: int) -> Iterator[memoryview]:
    """The blocks of one file, without a byte of zero: a lost block differs in every byte."""
    import random

    made = random.Random(seed)  # noqa: S311 - the same bytes again are what is wanted
    for _ in range(FILE_BYTES // _BLOCK):
        yield memoryview(made.randbytes(_BLOCK).replace(b"\0", b"\1"))


def _difference(number: int, offset: int, expected: memoryview, found: bytes) -> str:
    places = [at for at in range(len(expected)) if expected[at] != found[at]]
    zeros = " of zeros" if not any(found[places[0] : places[-1] + 1]) else ""
    return (
        f"file {number}: {len(places):,} bytes{zeros} from {offset + places[0]:,} "
        f"to {offset + places[-1]:,} are not what was written"
    )


def check_probe(written: Sequence[Written], compared: Sequence[Compared]) -> Check:
    """What the probes of all processes add up to."""
    each: tuple[Written | Compared, ...] = (*written, *compared)
    failed = [one for one in each if one.error is not None]
    wrong = [(one, words) for one in compared for words in one.wrong]
    if wrong:
        one, words = wrong[0]
        more = f", and {len(wrong) - 1} more places" if len(wrong) > 1 else ""
        return Check(
            "probe",
            CheckOutcome.FAILED,
            f"the storage does not return what was written: {one.host}: {words}{more}",
            _WRONG_CONTENT,
            "dmesg --level err,warn",
        )
    if failed:
        first = failed[0]
        words = f"{first.host}: {first.error}"
        return Check("probe", CheckOutcome.FAILED, words, first.error_code, "findmnt --real")
    n_bytes = sum(one.n_bytes for one in compared)
    wrote = [len(one.seeds) * FILE_BYTES / max(one.seconds, 1e-6) / 1e6 for one in written]
    read = [one.n_bytes / max(one.seconds, 1e-6) / 1e6 for one in compared]
    return Check(
        "probe",
        CheckOutcome.OK,
        f"{n_bytes / 1e6:,.0f} MB written, read back and compared: written at "
        f"{min(wrote):,.0f} MB/s, read at {min(read):,.0f} MB/s, the slowest of "
        f"{counted(len(written), 'process', 'processes')}",
    )


SCHEMA = "ckptctl.node/1"
PATIENCE = 10
"""A launcher may take so many times the timeout of the storage: it may have to wait for nodes."""
_MOST_PROCESSES = 4096
_MOST_BYTES = 1 << 20
"""The report of one process."""
_TOKEN = re.compile(r"[0-9a-f]{12}/[0-9]{1,2}")
# They are about the process that was typed, and not about those on other nodes.
_NOT_HANDED_ON = (
    "CKPTCTL_JSON",
    "CKPTCTL_QUIET",
    "CKPTCTL_REPORT",
    "CKPTCTL_LAUNCHER",
    "CKPTCTL_HEARTBEAT_KEY",
)


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What one process on a node saw, and prints as a line of JSON."""

    roots: tuple[NodeFacts, ...]
    """What this process found in each root, in their order."""
    written: Written | None = None
    """What this process wrote for the probe; null without one."""
    compared: Compared | None = None
    """What this process read of the probe that it was given; null without one."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """A command that runs another one on nodes of the job, as a list of arguments.

    The last argument may be the ckptctl that is there (`kubectl exec worker-0 -- ckptctl`);
    otherwise this one is run by its path, as on a shared file system.
    """

    words: tuple[str, ...]
    timeout_s: float = 300.0

    def reports(
        self, arguments: Sequence[str], variables: Mapping[str, str], n_roots: int
    ) -> tuple[NodeReport, ...]:
        """What the processes report that `ckptctl preflight ARGUMENTS` started, of `n_roots`.

        They get `variables` where the launcher passes its environment on, as `srun` does.
        Raises `UsageError` where there is no such command, `StorageUnavailable` where it
        fails, takes too long, or no process reports.
        """
        kept = {k: v for k, v in os.environ.items() if k not in _NOT_HANDED_ON}
        own = own_command("preflight", *arguments, environment={**kept, **variables})
        if os.path.basename(self.words[-1]) == "ckptctl":
            own = own._replace(words=("preflight", *arguments))
        name = self.words[0]
        if find_program(name, own.environment) is None:
            raise OptionError(
                "--launcher", f": there is no command {name!r} in the absolute folders of PATH"
            )
        try:
            words = [*self.words, *own.words]
            done = run_bounded(words, self.timeout_s, environment=own.environment)
        except TimeoutError as error:
            raise StorageUnavailable(
                f"the launcher {name} did not end within {self.timeout_s:,.0f} s; it is unknown "
                "what the nodes of the job see"
            ) from error
        code, printed, stderr = done
        reports = tuple(_reports_in(printed, n_roots))
        if code or not reports:
            lines = stderr.strip().splitlines() or ["it printed nothing on standard error"]
            last = next((line for line in lines if "error:" in line), lines[-1])
            what = "printed no report" if not code else f"ended with {code}"
            raise StorageUnavailable(
                f"the launcher {name} {what}, so it is unknown what the nodes of the job see: "
                f"{last[:400]}",
                next_command="ckptctl preflight --help",
            )
        return reports


def _reports_in(printed: str, n_roots: int) -> Iterator[NodeReport]:
    """The reports among the lines; `srun --label` and `kubectl --prefix` put words in front."""
    n_found = 0
    for line in printed.splitlines():
        start = line.find('{"schema": "' + SCHEMA)
        if start < 0 or n_found == _MOST_PROCESSES:
            continue
        n_found += 1
        try:
            report = msgspec.convert(
                decode_json(line[start:], max_bytes=_MOST_BYTES), type=NodeReport
            )
            if len(report.roots) != n_roots:
                raise ValueError("roots")
            if report.written is not None:
                probe_of(report.written.token)
        except (ValueError, msgspec.ValidationError, UsageError) as error:
            raise StorageUnavailable(
                f"a node printed a report that cannot be read ({type(error).__name__}): "
                f"{line[start : start + 200]}"
            ) from error
        yield report


def probe_of(token: str) -> Written:
    """What the probe with this token wrote; raises `UsageError` for another word."""
    if _TOKEN.fullmatch(token) is None:
        raise UsageError(f"{token!r} is not the name of a storage probe")
    return Written("", token, 0.0)


def report_from_here(
    roots: Sequence[str], step: str, probe: str | None, storage: StorageOptions
) -> dict[str, object]:
    """What this process sees of the roots, as a document.

    `step` is the URL of the chosen step, empty where there is none; it is inspected in the
    root that holds it. `probe` is the token of a probe in the first root: its files are
    compared, and files of this process are written and left for the one who asked.
    """
    with ExitStack() as stack:
        stores = [stack.enter_context(open_store(root, storage)) for root in roots]
        report = NodeReport(
            tuple(facts_of_this_node(store, step_in(store, step)) for store in stores)
        )
        if probe is not None:
            own_probe = StorageProbe(stores[0])
            compared = own_probe.compare(probe_of(probe))
            report = replace(report, written=own_probe.write(), compared=compared)
        return {"schema": SCHEMA, **msgspec.to_builtins(report)}


def holds(store: Store, step: str) -> bool:
    """Whether a step, by its URL, is in this root."""
    return bool(step) and join_url(store.url, name_below(store.url, step)) == step


def step_in(store: Store, step: str) -> str | None:
    """The name of a step in this root; None where it is in another."""
    return name_below(store.url, step) if holds(store, step) else None


def arguments(
    roots: Sequence[str], step: str, probe: Written | None, storage: StorageOptions
) -> list[str]:
    """The arguments of the `preflight` that reports from a node; none is a secret.

    Secrets reach the storage through the environment: see `StorageOptions.variables`.
    """
    words = [absolute_url(root) for root in roots]
    words += ["--config", "none"]
    words += ["--node-report", f"{absolute_url(step)}" if step else "none"]
    words += ["--node-probe", probe.token] if probe is not None else []
    return [*words, *storage.public().arguments()]

"""Collect what this node sees of the storage, and compare it among nodes.

One listing of the root, the chosen step's metadata, some megabytes of one of its shard
files, the mount and the space that is left. A node whose mount is missing, stale or
another one is named. Writing is `probing`'s question.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import socket
import time
from collections.abc import Iterator, Sequence

from ckptctl.errors import AccessDenied, PathNotFound, StorageError, StorageUnavailable
from ckptctl.findings import EXIT_DENIED
from ckptctl.formats.frameworks.layouts import METADATA, OWN_FOLDER
from ckptctl.preflight_checks.results import Check, NodeFacts, Outcome
from ckptctl.storage.contract import Span, Store
from ckptctl.storage.files import mount_of
from ckptctl.storage.opening import absolute_url, is_local
from ckptctl.storage.watchdog import busy

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
        mount, read_only, free = _space(store)
        metadata, n_read, read_s = ("", 0, 0.0) if step is None else _read(store, step, rank)
    except StorageError as error:
        # What rank 0 found and this node does not is no usage error: it is another storage.
        denied = isinstance(error, AccessDenied)
        return NodeFacts(host, error=error.message, error_code=EXIT_DENIED if denied else 75)
    return NodeFacts(
        host=host,
        mount=mount,
        read_only=read_only,
        free=free,
        n_names=len(names),
        listing=_digest("\n".join(sorted(names)).encode("utf-8", "surrogateescape")),
        metadata=metadata,
        read_bytes=n_read,
        read_s=read_s,
    )


def _names(store: Store) -> list[str]:
    """What lies under the root; nothing where it is not there yet."""
    try:
        entries = store.list_dir("")
    except PathNotFound:
        return []
    return [f"{one.kind} {one.path}" for one in entries if one.path != OWN_FOLDER]


def _space(store: Store) -> tuple[str | None, bool, int | None]:
    """The mount in words, whether it is read-only, and the bytes that are free."""
    if not is_local(store.url):
        return None, False, None
    folder = absolute_url(store.url)
    if not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    with busy(store.url):
        mount = mount_of(folder)
        try:
            about = os.statvfs(folder)
        except OSError as error:
            raise StorageUnavailable(
                f"{store.url}: {error.strerror or type(error).__name__}"
            ) from error
    words = None if mount is None else f"{mount.type} {mount.source} on {mount.at}"
    return words, bool(about.f_flag & os.ST_RDONLY), about.f_bavail * about.f_frsize


def _read(store: Store, name: str, rank: int) -> tuple[str, int, float]:
    digests = hashlib.sha256()
    files = [one for one in store.list_tree(name) if one.kind == "file"]
    for path in sorted(one.path for one in files if one.path.endswith(METADATA)):
        digests.update(store.read(path, limit=_MAX_METADATA))
    shards = [one for one in files if one.size]
    if not shards:
        return digests.hexdigest()[:16], 0, 0.0
    largest = sorted(shards, key=lambda one: (-one.size, one.path))
    file = largest[rank % len(largest)]
    began_s = time.monotonic()
    span = Span(file.path, 0, min(file.size, PROBE_BYTES))
    n_read = sum(len(data) for _, data in store.read_spans([span]))
    return digests.hexdigest()[:16], n_read, max(time.monotonic() - began_s, 1e-6)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def check_nodes(root: str, nodes: Sequence[NodeFacts], room: int | None) -> Iterator[Check]:
    """Whether every node can read, sees the same, and has `room` bytes for the next saves.

    With `room` None nothing is to be saved: it may be read-only, and full.
    """
    blind = [one for one in nodes if one.error is not None]
    if blind:
        yield _failed(
            f"{_hosts(blind)} cannot read the root: {blind[0].error}",
            f"ckptctl scan {shlex.quote(root)}",
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
            f"ckptctl prune {shlex.quote(root)} --keep 3",
        )


def _check_same(root: str, nodes: Sequence[NodeFacts]) -> Iterator[Check]:
    first = nodes[0]
    for what, of in (("names under the root", "listing"), ("metadata of the step", "metadata")):
        others = [one for one in nodes if getattr(one, of) != getattr(first, of)]
        if others:
            seen = f" ({others[0].n_names} names there, {first.n_names} here)"
            yield _failed(
                f"{_hosts(others)} sees other {what} than {first.host}"
                f"{seen if of == 'listing' else ''}: {_mounts(first, others[0])}",
                f"srun --ntasks-per-node=1 ckptctl preflight {shlex.quote(root)}",
            )
            return
    yield Check("storage", Outcome.OK, _seen(nodes))


def _seen(nodes: Sequence[NodeFacts]) -> str:
    first = nodes[0]
    hosts = len({one.host for one in nodes})
    by = f"{hosts} nodes see the same" if hosts > 1 else f"{first.host} sees it"
    # What is read of a small file says nothing about the storage.
    read = [one.read_bytes / one.read_s / 1e6 for one in nodes if one.read_bytes >= _SOME_BYTES]
    speed = f", read at {min(read):,.0f} MB/s or more" if read else ""
    free = [_free(one) for one in nodes if one.free is not None]
    room = f", {min(free) / 1e9:,.1f} GB free" if free else ""
    return f"{by}: {first.n_names} names under the root{speed}{room}" + (
        f" ({first.mount})" if first.mount else ""
    )


def _mounts(first: NodeFacts, other: NodeFacts) -> str:
    if first.mount == other.mount:
        return "a stale mount, or one that is still being updated"
    return f"{other.mount or 'no mount'} there, {first.mount or 'no mount'} here"


def _hosts(nodes: Sequence[NodeFacts]) -> str:
    hosts = sorted({one.host for one in nodes})
    return ", ".join(hosts[:5]) + (f" and {len(hosts) - 5} more" if len(hosts) > 5 else "")


def _free(node: NodeFacts) -> int:
    return node.free if node.free is not None else 0


def _failed(message: str, next_command: str, exit_code: int = 75) -> Check:
    return Check("storage", Outcome.FAILED, message, exit_code, next_command)

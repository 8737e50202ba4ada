"""The heartbeat of a rank: one small file, from which a supervisor on the same node reads.

`ckptctl.train` writes it, `ckptctl run` reads it. It holds no times: the supervisor measures
by its own clock since when a heartbeat has not changed.

A heartbeat is bound to its attempt: it ends with a MAC whose key only the processes of that
attempt have, in their environment.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
from typing import Annotated, Literal, TypedDict, get_args

from msgspec import Meta

from ckptctl.distributed.launcher import NO_LAUNCHER, Cluster
from ckptctl.distributed.process_table import Process
from ckptctl.errors import OwnFileUnreadable
from ckptctl.formats.own.files import parsed, typed
from ckptctl.model import Count, Pid

FOLDER_VARIABLE = "CKPTCTL_HEARTBEATS"
"""The variable in which `ckptctl run` gives its job the folder of the heartbeats."""

KEY_VARIABLE = "CKPTCTL_HEARTBEAT_KEY"
"""The variable in which `ckptctl run` gives its job the key of the heartbeats of an attempt.

Only root and the user of the job can read the environment of a process. The key is written nowhere.
"""

MAX_BYTES = 1024
"""Of one heartbeat; a larger file is none."""

Reported = Literal["setup", "first-step", "step", "checkpoint", "evaluation", "outside"]
"""The sections that a rank reports, one at a time.

`setup` ends when the job has resumed, `first-step` with its first step. `outside` is
everything else.
"""
Section = Literal[Reported, "async-save"]
"""The parts of a job that have limits of their own; `async-save` runs beside the others."""

REPORTED: tuple[Reported, ...] = get_args(Reported)
SECTIONS: tuple[Section, ...] = get_args(Section)

MAX_RANK = 1 << 20
_NAME = re.compile(r"rank-([0-9]{1,7})\.json")

_Node = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,252}$")]
_Signal = Annotated[int, Meta(ge=1, le=64)]


class Heartbeat(TypedDict):
    """The state of one rank when it wrote last."""

    rank: Annotated[int, Meta(ge=0, le=MAX_RANK - 1)]
    local_world_size: Annotated[int, Meta(ge=0, le=MAX_RANK)] | None
    """How many ranks the launcher started on this node; null where it does not state it."""
    world_size: Annotated[int, Meta(ge=0, le=MAX_RANK)] | None
    """How many ranks the job has; null where nothing states it."""
    node: _Node
    pid: Pid
    started: Count
    """When the process was started, in clock ticks after the boot, as `/proc/PID/stat` has it."""
    count: Count
    """How often the rank has reported."""
    section: Reported
    step: Count | None
    saving: Count | None
    """The step of the asynchronous save in flight."""
    stack_signal: _Signal | None
    """The signal that makes the process write its stacks; null where it has no handler."""


def first_heartbeat(rank: int, process: Process, cluster: Cluster) -> Heartbeat:
    """The heartbeat of a rank that has not reported yet."""
    return Heartbeat(
        rank=rank,
        local_world_size=cluster.local_world_size,
        world_size=1 if cluster.launcher == NO_LAUNCHER else cluster.world_size,
        node=cluster.node,
        pid=process.pid,
        started=process.started,
        count=0,
        section="outside",
        step=None,
        saving=None,
        stack_signal=None,
    )


def file_name(rank: int) -> str:
    """The name of a rank's heartbeat."""
    return f"rank-{rank}.json"


def stacks_name(rank: int) -> str:
    """The name of the file to which a rank adds its stacks."""
    return f"rank-{rank}.stacks"


def rank_in(name: str) -> int | None:
    """The rank whose heartbeat has this name; None for other files."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found and int(found[1]) < MAX_RANK else None


def new_key() -> str:
    """A key for the heartbeats of one attempt."""
    return secrets.token_hex(32)


def heartbeat_bytes(beat: Heartbeat, key: str) -> bytes:
    """The heartbeat as it is written."""
    return json.dumps({**beat, _MAC: _mac(beat, key)}, separators=(",", ":")).encode()


def read_heartbeat(data: bytes, key: str) -> Heartbeat:
    """The heartbeat in a file, of an attempt with this key.

    Raises `OwnFileUnreadable` for anything else: for values out of bounds, and for a heartbeat
    that no process of the attempt wrote.
    """
    document = parsed(data, MAX_BYTES)
    found = document.pop(_MAC, None)
    beat = typed(Heartbeat, document)
    expected = _mac(beat, key)
    if not isinstance(found, str) or not hmac.compare_digest(found.encode(), expected.encode()):
        raise OwnFileUnreadable("no process of this attempt wrote it")
    return beat


_MAC = "mac"


def _mac(beat: Heartbeat, key: str) -> str:
    content = json.dumps(beat, separators=(",", ":"), sort_keys=True)
    return hmac.new(key.encode(), content.encode(), "sha256").hexdigest()

"""Check the arguments that several functions share."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ckptctl.errors import UsageError
from ckptctl.inspection.reports import Conditions
from ckptctl.model import STATE_KINDS, Level

if TYPE_CHECKING:
    from ckptctl.inspection.marks_file import MarksInFile


def conditions(
    require: Collection[str],
    world_size: int | None,
    saved_world_size: int | None,
    grace_s: float,
    *,
    require_seal: bool = False,
    key: bytes | None = None,
    marks: str | None = None,
    remote_checksums: bool = False,
) -> Conditions:
    """What the caller asks of a step, checked; raises `UsageError`.

    `marks` is the path of a file of marks. It is read here, once.
    """
    if isinstance(require, str):
        require = require.split(",")
    for kind in require:
        if kind not in STATE_KINDS:
            raise UsageError(
                f"{kind!r} is no kind of train state; they are {', '.join(STATE_KINDS)}"
            )
    for name, size in (("world-size", world_size), ("saved-world-size", saved_world_size)):
        if size is not None and size < 1:
            raise UsageError(f"--{name} is {size}; a job has at least 1 rank")
    return Conditions(
        tuple(kind for kind in STATE_KINDS if kind in require),
        world_size,
        saved_world_size,
        not_negative("grace", grace_s),
        require_seal,
        known_key(key),
        remote_checksums,
        _marks_in(marks) if marks is not None else None,
    )


def _marks_in(path: str) -> MarksInFile:
    from ckptctl.inspection.marks_file import read_marks_file

    return read_marks_file(path)


MIN_KEY_BYTES = 16


def known_key(key: bytes | None) -> bytes | None:
    """The key for seals, if it is long enough to be one; raises `UsageError`."""
    if key is not None and len(key) < MIN_KEY_BYTES:
        raise UsageError(
            f"the key for seals has {len(key)} bytes; it must have {MIN_KEY_BYTES} or more",
            next_command="openssl rand -hex 32",
        )
    return key


def not_negative(name: str, value: float) -> float:
    """The value, if it is 0 or more; raises `UsageError` with the option's name."""
    if not value >= 0:
        raise UsageError(f"--{name} is {value}; it must be 0 or more")
    return value


def known_level(level: Level | str | None) -> Level | None:
    """The level, by its word where it is given as one; raises `UsageError`."""
    if level is None:
        return None
    try:
        return Level(level)
    except ValueError:
        words = ", ".join(one.value for one in Level)
        raise UsageError(f"{level!r} is no level; they are {words}") from None

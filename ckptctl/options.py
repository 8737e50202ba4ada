"""The options that functions take together, as frozen objects.

Made once at the edge (command line, public function, `Checkpointer`) and passed on
whole, so that no function on the way can drop one of them. An object checks its values
when it is made and raises `UsageError` with the option's name on the command line.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ckptctl.errors import UsageError
from ckptctl.model import STATE_KINDS, Level

MIN_KEY_BYTES = 16
"""A key for seals has at least so many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """Conditions on a step beyond being complete.

    `require` names kinds of train state that must be there, as a list or as
    `model,optimizer`. `world_size` is how many ranks will load the step,
    `saved_world_size` how many wrote it and must each have left a shard file. An
    unfinished save counts as running until `grace_s` seconds after its last write.
    `require_seal` demands a seal that proves the step; `key` is the key that seals must
    have been made with, at least `MIN_KEY_BYTES` bytes. `remote_checksums` compares the
    store's own checksums with the seal. `marks` is the path of a file of marks that
    apply beside those in the steps.
    """

    require: Collection[str] = ()
    world_size: int | None = None
    saved_world_size: int | None = None
    grace_s: float = 600.0
    require_seal: bool = False
    key: bytes | None = field(default=None, repr=False)
    remote_checksums: bool = False
    marks: str | None = None

    def __post_init__(self) -> None:
        kinds = self.require.split(",") if isinstance(self.require, str) else self.require
        for kind in kinds:
            if kind not in STATE_KINDS:
                raise UsageError(
                    f"{kind!r} is no kind of train state; they are {', '.join(STATE_KINDS)}"
                )
        # In the order in which reports show them, whatever order was typed.
        object.__setattr__(self, "require", tuple(kind for kind in STATE_KINDS if kind in kinds))
        for name, size in (
            ("world-size", self.world_size),
            ("saved-world-size", self.saved_world_size),
        ):
            if size is not None and size < 1:
                raise UsageError(f"--{name} is {size}; a job has at least 1 rank")
        not_negative("grace", self.grace_s)
        if self.key is not None and len(self.key) < MIN_KEY_BYTES:
            raise UsageError(
                f"the key for seals has {len(self.key)} bytes; it must have {MIN_KEY_BYTES} or "
                "more",
                next_command="openssl rand -hex 32",
            )


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

"""The options that functions take together, as frozen objects.

They are made once at the edge (command line, public function, `Checkpointer`) and passed
on whole, so that no function on the way can drop one of them. An object checks its values
when it is made and raises `UsageError` with the option's name on the command line.

A public function that takes such an object takes each of its fields as a keyword, too:
`pick(root, endpoint_url=…)` is `pick(root, storage=StorageOptions(endpoint_url=…))`. The
`…Keywords` classes declare this for type checkers; `options_from` puts keywords and objects
together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict, TypeVar, overload

from ckptctl.errors import UsageError
from ckptctl.model import STATE_KINDS, Level
from ckptctl.redaction import hide, hide_address, hide_options, is_harmless_option

TIMEOUT_S = 30.0
"""How long one answer of a storage is waited for, by default."""

_RUN = re.compile("[0-9a-f]{32}")

MIN_KEY_BYTES = 16
"""A key for seals has at least so many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """How to reach a storage; a folder of this machine needs none of it.

    `storage_options` go to the client of an object store as they are, and win over its
    environment and configuration; `endpoint_url` is the address of a service that is not
    Amazon's. `timeout_s` bounds each connection and each wait for bytes, in seconds. A
    request that failed in a way that may pass is repeated `retries` times, and then until
    `retry_for_s` seconds have passed. Of a file system, links that lead into a folder of
    `follow_links` are followed; no other link is.
    """

    storage_options: Mapping[str, object] | None = field(default=None, repr=False)
    endpoint_url: str | None = None
    timeout_s: float = TIMEOUT_S
    retries: int = 4
    retry_for_s: float = 0.0
    follow_links: Collection[str] = ()

    def __post_init__(self) -> None:
        hide_options(self.storage_options or {})
        hide_address(self.endpoint_url or "")
        object.__setattr__(self, "follow_links", tuple(self.follow_links))
        for folder in self.follow_links:
            if not os.path.isdir(folder):
                raise UsageError(
                    f"--follow-links {folder} is no folder: a link into it cannot be followed",
                    next_command="findmnt --real",
                )

    def arguments(self) -> list[str]:
        """The options of a command line that reaches the same storage; defaults are left out.

        They may hold secrets: `command_line` shows none of them, and a process is started with
        those of `public` only.
        """
        import json  # most commands need no such words, and start sooner without

        words = ["--endpoint-url", self.endpoint_url] if self.endpoint_url else []
        for key, value in (self.storage_options or {}).items():
            text = value if isinstance(value, str) else json.dumps(value)
            words += ["--storage-option", f"{key}={text}"]
        if self.timeout_s != TIMEOUT_S:
            words += ["--timeout", f"{self.timeout_s:g}"]
        for folder in self.follow_links:
            words += ["--follow-links", folder]
        return words

    def secrets(self) -> dict[str, object]:
        """The storage options that are not known to be harmless, and such an endpoint."""
        options = dict(self.storage_options or {})
        if self.endpoint_url is not None:
            options["endpoint_url"] = self.endpoint_url
        return {key: each for key, each in options.items() if not is_harmless_option(key, each)}

    def public(self) -> StorageOptions:
        """The options without `secrets`: these may be arguments of a process."""
        secrets = self.secrets()
        options = {
            key: each for key, each in (self.storage_options or {}).items() if key not in secrets
        }
        endpoint = None if "endpoint_url" in secrets else self.endpoint_url
        return replace(self, storage_options=options or None, endpoint_url=endpoint)

    def variables(self) -> dict[str, str]:
        """Variables with which a ckptctl that this process starts reaches the same storage.

        They may hold secrets: the environment of a process is visible to its user only.
        """
        import json

        found: dict[str, str] = {}
        if self.timeout_s != TIMEOUT_S:
            found["CKPTCTL_TIMEOUT"] = str(self.timeout_s)
        if self.endpoint_url is not None:
            found["CKPTCTL_ENDPOINT_URL"] = self.endpoint_url
        if self.storage_options:
            # The variable is split at spaces, which occur only in texts.
            found["CKPTCTL_STORAGE_OPTION"] = " ".join(
                f"{key}={json.dumps(each, separators=(',', ':'))}".replace(" ", r"\u0020")
                for key, each in self.storage_options.items()
            )
        return found


class StorageKeywords(TypedDict, total=False):
    """The fields of `StorageOptions` as keywords of a function."""

    storage_options: Mapping[str, object] | None
    endpoint_url: str | None
    timeout_s: float
    retries: int
    retry_for_s: float
    follow_links: Collection[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What counts as a step, and what is required of it beyond being complete.

    `pattern` is a regular expression for the names of step directories that ckptctl does
    not know; its group `step` is the number. `require` names kinds of train state that
    must be there, as a list or as `model,optimizer`. `world_size` is how many ranks will
    load the step, `saved_world_size` how many wrote it and must each have left a shard
    file. An unfinished save counts as running until `grace_s` seconds after its last write.
    `require_seal` demands a seal that proves the step, to the last byte: where no level is
    given, sealed steps are inspected at `content`. `key` is the key that seals must
    have been made with, of at least `MIN_KEY_BYTES` bytes. `seal_run` is the id of the run
    that they must be of, by default the one that the root records; the newest seal of the root
    must have at least the place `seal_sequence` in the order of its seals. `remote_checksums`
    compares the store's own checksums with the seal. `marks` is the path of a file of marks
    that apply beside those in the steps. `allow_globals` are the run's own classes in pickles,
    `module.Name` each, as a list or joined with commas: `pickle.unknown` does not report them.
    A global that can act is never allowed. `state_keys` map train state that is not recognized:
    each a kind of train state and a whole key path or file name, as `dataloader=data_pos`.
    """

    pattern: str | None = None
    require: Collection[str] = ()
    state_keys: Collection[str] = ()
    world_size: int | None = None
    saved_world_size: int | None = None
    grace_s: float = 600.0
    require_seal: bool = False
    seal_run: str | None = None
    seal_sequence: int | None = None
    key: bytes | None = field(default=None, repr=False)
    remote_checksums: bool = False
    marks: str | None = None
    allow_globals: Collection[str] = ()

    def reads_every_byte(self, level: Level | None) -> bool:
        """Whether the bytes of a step that has a seal are to be compared.

        A required seal proves nothing at a shallower level, so it raises the level that
        nobody asked for. Checksums of the store replace that only where there is no key: they
        do not show intent.
        """
        if level is not None:
            return level is Level.CONTENT
        return self.require_seal and (self.key is not None or not self.remote_checksums)

    def __post_init__(self) -> None:
        allowed = self.allow_globals
        allowed = allowed.split(",") if isinstance(allowed, str) else allowed
        for name in allowed:
            parts = name.split(".")
            if len(parts) < 2 or not all(part.isidentifier() for part in parts):
                raise UsageError(
                    f"--allow-globals is {name!r}; expected the name of a class with its module, "
                    "such as mypackage.config.Config"
                )
        object.__setattr__(self, "allow_globals", tuple(dict.fromkeys(allowed)))
        kinds = self.require.split(",") if isinstance(self.require, str) else self.require
        for kind in kinds:
            if kind not in STATE_KINDS:
                raise UsageError(
                    f"{kind!r} is no kind of train state; they are {', '.join(STATE_KINDS)}"
                )
        pairs = [self.state_keys] if isinstance(self.state_keys, str) else self.state_keys
        object.__setattr__(self, "state_keys", tuple(pairs))
        for pair in pairs:
            kind, equals, key = pair.partition("=")
            if kind not in STATE_KINDS or not (equals and key):
                raise UsageError(
                    f"--state is KIND=KEY with a kind of train state ({', '.join(STATE_KINDS)}), "
                    f"not {pair!r}",
                    instead="--state dataloader=data_pos",
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
        if self.key is not None:
            hide(self.key)
        if self.seal_run is not None and not _RUN.fullmatch(self.seal_run):
            raise UsageError(
                f"--seal-run is {self.seal_run!r}; the id of a run has 32 hexadecimal digits"
            )
        if self.seal_sequence is not None and self.seal_sequence < 1:
            raise UsageError(f"--seal-sequence is {self.seal_sequence}; it must be 1 or more")
        if self.key is not None and len(self.key) < MIN_KEY_BYTES:
            raise UsageError(
                f"the key for seals has {len(self.key)} bytes; it must have {MIN_KEY_BYTES} or "
                "more",
                next_command="openssl rand -hex 32",
            )

    @property
    def state_map(self) -> tuple[tuple[str, str], ...]:
        """The pairs of `state_keys`: a kind, and the key path or file name that holds it."""
        return tuple(
            (kind, key) for kind, _, key in (pair.partition("=") for pair in self.state_keys)
        )


class StepKeywords(StorageKeywords, total=False):
    """The fields of `Requirements` and `StorageOptions` as keywords of a function."""

    pattern: str | None
    require: Collection[str]
    state_keys: Collection[str]
    world_size: int | None
    saved_world_size: int | None
    grace_s: float
    require_seal: bool
    seal_run: str | None
    seal_sequence: int | None
    key: bytes | None
    remote_checksums: bool
    marks: str | None
    allow_globals: Collection[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PickPolicy:
    """Which step `pick` takes of those that are there.

    `level` is how deep each step is inspected; None is as deep as is cheap on its storage,
    and `content` where a seal is required.
    `before` excludes that step and all newer ones, `skip` single ones. `max_fallback` is
    how many damaged steps may be passed over. `allow_missing_state` takes a step that lacks
    train state which an older one holds, `accept_unverifiable` one that nothing in it can
    prove good. `ignore` are patterns (`*`, `?`, `[...]`) of names and paths below the root of
    files and folders that are no saves: before a run is called new, all others are compared.
    """

    level: Level | None = None
    before: int | None = None
    skip: Collection[int] = ()
    max_fallback: int = 2
    allow_missing_state: bool = False
    accept_unverifiable: bool = False
    ignore: Collection[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "level", known_level(self.level))
        object.__setattr__(self, "skip", frozenset(self.skip))
        ignore = (self.ignore,) if isinstance(self.ignore, str) else self.ignore
        object.__setattr__(self, "ignore", tuple(ignore))
        object.__setattr__(
            self, "max_fallback", int(not_negative("max-fallback", self.max_fallback))
        )


class PickKeywords(StepKeywords, total=False):
    """The fields of `PickPolicy`, `Requirements` and `StorageOptions` as keywords."""

    level: Level | str | None
    before: int | None
    skip: Collection[int]
    max_fallback: int
    allow_missing_state: bool
    accept_unverifiable: bool
    ignore: Collection[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentOptions:
    """How much of a step's bytes level `content` compares, and how.

    `subset` compares a part of the records, `3/7` or `10%` of the bytes. After `deadline_s`
    seconds no further byte is read. `jobs` is how many threads read a file system; None
    chooses a number that is good for it. `nan_scan` looks for NaN and infinity in the
    values of floating-point tensors, `state_check` at what the optimizer keeps.
    """

    subset: str | None = None
    deadline_s: float | None = None
    jobs: int | None = None
    nan_scan: bool = False
    state_check: bool = False

    def __post_init__(self) -> None:
        if self.deadline_s is not None:
            not_negative("deadline", self.deadline_s)
        if self.jobs is not None and self.jobs < 1:
            raise UsageError(f"--jobs is {self.jobs}; it must be 1 or more")


class VerifyKeywords(StepKeywords, total=False):
    """The fields of `ContentOptions`, `Requirements` and `StorageOptions` as keywords."""

    subset: str | None
    deadline_s: float | None
    jobs: int | None
    nan_scan: bool
    state_check: bool


SETTLE_S = 60.0
"""How long a rank waits to see the files of rank 0: NFS caches folder listings for that long."""

JOB_TIMEOUT_S = 1800.0
"""How long a rank of a job waits for the slowest one, which may still be loading."""

RNG_POLICIES = ("reseed", "refuse")
EPOCH_ENDS = ("next", "rest")
KINDS_LOST = ("model", "optimizer", "scheduler", "rng", "dataloader", "grad_scaler", "extra")
"""The kinds of state that `accept_lost` may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """How a `Checkpointer` names and seals its steps, and what it does about lost state.

    `step_format` makes the name of a step from its number; with `seal` each step is sealed.
    `seed` is the run's seed, from which random states are derived at another number of
    ranks. `dp_rank` and `dp_size` are this rank's position among the data-parallel ranks, by
    default among all. `rng` at another number of ranks: `reseed` (from seed, step and rank)
    or `refuse`. `accept_repetition` continues although samples would be repeated or skipped.
    `epoch_end` states what a script begins with after a step that was saved at the last batch of a
    pass over its data: the `next` pass, or the `rest` of that one, which is empty; by default it
    follows from the epochs that the script sets.
    `accept_lost` are kinds of state that the step or the job alone may have, wholly or in part.
    `names` maps kinds of state, and names in `extra`, to keys of steps that another program saved.
    `per_rank` are names of state, or patterns (`experts.*`), of which each rank saves its own.
    `settle_s` is how long a rank waits to see the files of rank 0, `patience_s` how long
    it waits for the slowest rank.
    """

    step_format: str = "step_{}"
    seal: bool = True
    seed: int = 0
    dp_rank: int | None = None
    dp_size: int | None = None
    rng: str = "reseed"
    accept_repetition: bool = False
    epoch_end: str | None = None
    accept_lost: Collection[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    per_rank: Collection[str] = ()
    settle_s: float = SETTLE_S
    patience_s: float = JOB_TIMEOUT_S

    def __post_init__(self) -> None:
        object.__setattr__(self, "accept_lost", tuple(self.accept_lost))
        per_rank = (self.per_rank,) if isinstance(self.per_rank, str) else self.per_rank
        object.__setattr__(self, "per_rank", tuple(per_rank))
        if self.rng not in RNG_POLICIES:
            raise UsageError(f"{self.rng!r} is not a policy for rng; expected reseed or refuse")
        if self.epoch_end not in (None, *EPOCH_ENDS):
            raise UsageError(f"{self.epoch_end!r} is no value of epoch_end; expected next or rest")
        unknown = [kind for kind in self.accept_lost if kind not in KINDS_LOST]
        if unknown:
            raise UsageError(
                f"{unknown[0]!r} is not a kind of state; expected one of {', '.join(KINDS_LOST)}"
            )


class TrainKeywords(PickKeywords, total=False):
    """The fields of `TrainOptions` and of the options of `pick` as keywords."""

    step_format: str
    seal: bool
    seed: int
    dp_rank: int | None
    dp_size: int | None
    rng: str
    accept_repetition: bool
    epoch_end: str | None
    accept_lost: Collection[str]
    names: Mapping[str, str]
    per_rank: Collection[str]
    settle_s: float
    patience_s: float


_A = TypeVar("_A", bound="Options")
_B = TypeVar("_B", bound="Options")
_C = TypeVar("_C", bound="Options")
_D = TypeVar("_D", bound="Options")
Options = StorageOptions | Requirements | PickPolicy | ContentOptions | TrainOptions


@overload
def options_from(keywords: Mapping[str, Any], first: _A, /) -> _A: ...
@overload
def options_from(keywords: Mapping[str, Any], first: _A, second: _B, /) -> tuple[_A, _B]: ...
@overload
def options_from(
    keywords: Mapping[str, Any], first: _A, second: _B, third: _C, /
) -> tuple[_A, _B, _C]: ...
@overload
def options_from(
    keywords: Mapping[str, Any], first: _A, second: _B, third: _C, fourth: _D, /
) -> tuple[_A, _B, _C, _D]: ...
def options_from(
    keywords: Mapping[str, Any], /, *options: Options
) -> Options | tuple[Options, ...]:
    """The options, each with those of its fields that a caller gave as keywords.

    A keyword wins over the field of an object. Raises `TypeError` for a keyword that is a
    field of none, as Python does for a parameter that a function does not have.
    """
    left = dict(keywords)
    made = []
    for one in options:
        own = {each.name: left.pop(each.name) for each in fields(one) if each.name in left}
        made.append(replace(one, **own) if own else one)
    if left:
        raise TypeError(f"unexpected keyword argument {next(iter(left))!r}")
    return made[0] if len(made) == 1 else tuple(made)


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

"""The options that functions take together, as frozen objects.

They are made once at the edge (command line, public function, `Checkpointer`) and passed
on whole, so that no function on the way can drop one of them. An object checks its values
when it is made and raises `UsageError` with the option's name on the command line.

A public function that takes such an object takes each of its fields as a keyword, too:
`pick(root, endpoint_url=…)` is `pick(root, storage=StorageOptions(endpoint_url=…))`. The
`…Keywords` classes declare this for type checkers; `options_from` puts keywords and objects
together. A field that the command line sets has its `Parameter` in its annotation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar, TypeVarTuple, cast

from ckptctl.errors import OptionError, UsageError
from ckptctl.model import STATE_KINDS, Level, Preference
from ckptctl.redaction import hide, hide_address, hide_options, is_harmless_option
from ckptctl.signatures import private_key, public_key

TIMEOUT_S = 30.0
"""How long one answer of a storage is waited for, by default."""

_RUN = re.compile("[0-9a-f]{32}")

MIN_KEY_BYTES = 16
"""A key for seals has at least so many bytes."""


class Parameter(NamedTuple):
    """How the command line has a field of an options object, or a parameter of a command.

    `spec` is an option as help shows it (`--quiet -q`, `--mtbf TIME`), or the name of an
    argument (`ROOT...`). A number is at least `min`. An option that is not `common` is left out
    of the help of `-h`, one that is `hidden` of `--help` too; a `setting`, which a run states once
    in a file, is there by its key alone. `variable` is its environment variable, where the one of
    its name belongs to an option of another meaning.
    """

    spec: str
    help: str
    min: float | None = None
    common: bool = True
    hidden: bool = False
    setting: bool = False
    variable: str = ""


LEVEL = Parameter(
    "--level",
    "How deep to inspect: listing reads the metadata, structure also the framing of "
    "every record, content every byte. Default: structure on a file system where that "
    "takes at most 10,000 reads, else listing.",
)
PATTERN = Parameter(
    "--pattern REGEX",
    "A regular expression for names of step folders that ckptctl does not know; it "
    "must match the whole name, and its group (?P<step>[0-9]+) is the number.",
    common=False,
)
MARKS = Parameter(
    "--marks FILE",
    "File of marks for read-only roots, one per line; read in addition to the marks in the steps.",
    common=False,
)
ROOT_ENV = Parameter(
    "--root-env NAME",
    "The environment variable in which the job finds its root, instead of {root}.",
    common=False,
)
IGNORE = Parameter(
    "--ignore PATTERN,...",
    "Names or paths below the root (with * and ?) of files and folders that are no saves, "
    "so that a root without steps that holds them may be a new run.",
    common=False,
)
"""Options that commands have beside these objects, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """How to reach a storage; a folder of this machine needs none of it.

    `storage_options` win over the environment and configuration of the client. `timeout_s` bounds
    each connection and each wait for bytes. A request that failed in a way that may pass is
    repeated `retries` times, and then until `retry_for_s` seconds have passed.
    """

    storage_options: Annotated[
        Mapping[str, object] | None,
        Parameter(
            "--storage-option KEY=VALUE",
            "Option for the storage client; may be given several times. A JSON value is "
            "passed as JSON.",
            common=False,
        ),
    ] = field(default=None, repr=False)
    endpoint_url: Annotated[
        str | None,
        Parameter(
            "--endpoint-url URL", "Address of an S3 service other than Amazon's.", common=False
        ),
    ] = None
    timeout_s: Annotated[
        float,
        Parameter(
            "--timeout SECONDS",
            "How long to wait for one answer of the storage; a mount that hangs four times "
            "as long ends the command with 75.",
            min=0.1,
            common=False,
        ),
    ] = TIMEOUT_S
    retries: int = 4
    retry_for_s: float = 0.0
    follow_links: Annotated[
        Collection[str],
        Parameter(
            "--follow-links DIR",
            "Follow links of steps and their files that lead into this folder, such as a slower "
            "storage; may be given several times. Other links are not followed (2).",
            common=False,
        ),
    ] = ()

    def __post_init__(self) -> None:
        hide_options(self.storage_options or {})
        hide_address(self.endpoint_url or "")
        object.__setattr__(self, "follow_links", tuple(self.follow_links))
        for folder in self.follow_links:
            if not os.path.isdir(folder):
                raise OptionError(
                    "--follow-links",
                    f"{folder} is no folder: a link into it cannot be followed",
                    next_command="findmnt --real",
                )

    def arguments(self) -> list[str]:
        """The options of a command line that reaches the same storage; defaults are left out.

        They may hold secrets, of which `command_line` shows none; a process that is started gets
        them by `variables`.
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

    def public(self) -> StorageOptions:
        """The options that may be arguments of a process: those that are known to be harmless."""
        options = {
            key: value
            for key, value in (self.storage_options or {}).items()
            if is_harmless_option(key, value)
        }
        endpoint = self.endpoint_url
        if endpoint is not None and not is_harmless_option("endpoint_url", endpoint):
            endpoint = None
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

    Each field is what the help of its option says. `require` and `allow_globals` are lists, or
    texts with commas. `key` has at least `MIN_KEY_BYTES` bytes. `require_signature` holds the
    contents of files with public keys, `signing_key` of one with a private key without a password.
    """

    require: Annotated[
        Collection[str],
        Parameter(
            "--require KIND,...",
            f"Train state that the step must have: {', '.join(STATE_KINDS)}.",
        ),
    ] = ()
    state_keys: Annotated[
        Collection[str],
        Parameter(
            "--state KIND=KEY",
            "What an entry or a file holds that is not recognized, by its whole key path or name "
            "(dataloader=data_pos); may be given several times.",
            common=False,
            variable="CKPTCTL_STATE_KEYS",
        ),
    ] = ()
    world_size: Annotated[
        int | None,
        Parameter(
            "--world-size N",
            "How many ranks will load the step; reports what that requires, or that it is "
            "impossible.",
            min=1,
        ),
    ] = None
    saved_world_size: Annotated[
        int | None,
        Parameter(
            "--saved-world-size N",
            "How many ranks wrote the step; each must have written a shard file.",
            min=1,
            common=False,
        ),
    ] = None
    pattern: Annotated[str | None, PATTERN] = None
    grace_s: Annotated[
        float,
        Parameter(
            "--grace SECONDS",
            "How long after its last write an unfinished save counts as running.",
            min=0,
            common=False,
        ),
    ] = 600.0
    require_seal: Annotated[
        bool,
        Parameter(
            "--require-seal",
            "Require a seal that proves the step, made with the key if one is given; compares "
            "every byte unless --level is lower, which is then 22.",
            common=False,
        ),
    ] = False
    seal_run: Annotated[
        str | None,
        Parameter(
            "--seal-run ID",
            "The id of the run that seals must be of; by default the one that the root records.",
            setting=True,
        ),
    ] = None
    seal_sequence: Annotated[
        int | None,
        Parameter(
            "--seal-sequence N",
            "With --require-seal: the newest seal of the root must have at least this place in "
            "the order of its seals; an older one shows that the root was set back.",
            min=1,
            setting=True,
        ),
    ] = None
    key: Annotated[
        bytes | None,
        Parameter(
            "--key-file FILE",
            "File with the key of seals, which only you can read (chmod 600); without it "
            "CKPTCTL_SEAL_KEY is the key, if it is set.",
            common=False,
        ),
    ] = field(default=None, repr=False)
    require_signature: Annotated[
        Collection[bytes] | None,
        Parameter(
            "--require-signature FILE",
            "Require a seal as --require-seal does, signed by the private key of the public key in "
            "FILE (Ed25519 or ECDSA P-256, of OpenSSH or PEM); may be given several times: by any "
            "of them.",
            common=False,
        ),
    ] = None
    signing_key: Annotated[
        bytes | None,
        Parameter(
            "--sign FILE",
            "Sign the seal with the private key in FILE, which only you can read (chmod 600); "
            "CKPTCTL_SIGN_PASSWORD is its password, if it has one.",
            common=False,
        ),
    ] = field(default=None, repr=False)
    remote_checksums: Annotated[
        bool,
        Parameter(
            "--remote-checksums",
            "Also compare the checksums that the object store keeps with those in the seal, "
            "and download nothing for it; 22 where there are none.",
            common=False,
        ),
    ] = False
    marks: Annotated[str | None, MARKS] = None
    allow_globals: Annotated[
        Collection[str],
        Parameter(
            "--allow-globals NAME,...",
            "Classes of the run in its pickles, each with its module, about which no warning is "
            "needed; one that can run code is never allowed.",
            setting=True,
        ),
    ] = ()
    owners: Annotated[
        Collection[str],
        Parameter(
            "--owners NAME,...",
            "What each process of the run writes into a step, by its folder or file in it "
            "(actor,critic,data.pt): a step without one of them is incomplete.",
            setting=True,
        ),
    ] = ()

    def reads_every_byte(self, level: Level | None) -> bool:
        """Whether the bytes of a step that has a seal are to be compared.

        A required seal proves nothing at a shallower level, so it raises the level that
        nobody asked for. Checksums of the store replace that only where there is no key: they
        do not show intent.
        """
        if level is not None:
            return level is Level.CONTENT
        return self.require_seal and (self.detects_intent or not self.remote_checksums)

    @property
    def detects_intent(self) -> bool:
        """Whether a seal that another person made is refused: there are keys to check it with."""
        return self.key is not None or bool(self.require_signature)

    def __post_init__(self) -> None:
        allowed = self.allow_globals
        allowed = allowed.split(",") if isinstance(allowed, str) else allowed
        for name in allowed:
            parts = name.split(".")
            if len(parts) < 2 or not all(part.isidentifier() for part in parts):
                raise OptionError(
                    "--allow-globals",
                    f"is {name!r}; expected the name of a class with its module, "
                    "such as mypackage.config.Config",
                )
        object.__setattr__(self, "allow_globals", tuple(dict.fromkeys(allowed)))
        owners = self.owners.split(",") if isinstance(self.owners, str) else self.owners
        object.__setattr__(self, "owners", tuple(owner.strip("/") for owner in owners))
        kinds = self.require.split(",") if isinstance(self.require, str) else self.require
        for kind in kinds:
            if kind not in STATE_KINDS:
                raise OptionError(
                    "--require",
                    f": {kind!r} is no kind of train state; they are {', '.join(STATE_KINDS)}",
                    instead=f"--require {','.join(STATE_KINDS[:2])}",
                )
        pairs = [self.state_keys] if isinstance(self.state_keys, str) else self.state_keys
        object.__setattr__(self, "state_keys", tuple(pairs))
        for pair in pairs:
            kind, equals, key = pair.partition("=")
            if kind not in STATE_KINDS or not (equals and key):
                raise OptionError(
                    "--state",
                    f"is KIND=KEY with a kind of train state ({', '.join(STATE_KINDS)}), "
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
                raise OptionError(f"--{name}", f"is {size}; a job has at least 1 rank")
        not_negative("grace", self.grace_s)
        if self.key is not None:
            hide(self.key)
        given = self.require_signature
        keys = (given,) if isinstance(given, bytes) else tuple(given or ())
        if given is not None:
            if not keys:
                # A pattern that matches no file must not lift the requirement.
                raise OptionError("--require-signature", "has no public key; leave it out for none")
            object.__setattr__(self, "require_signature", keys)
        for number, public in enumerate(keys, 1):
            if not isinstance(public, bytes):
                raise OptionError("--require-signature", "takes the content of files, as bytes")
            public_key(public, f"public key {number}")
        if keys:
            object.__setattr__(self, "require_seal", True)
        if self.signing_key is not None:
            hide(self.signing_key)
            object.__setattr__(self, "signing_key", private_key(self.signing_key, None))
            hide(self.signing_key)
        if self.seal_run is not None and not _RUN.fullmatch(self.seal_run):
            raise OptionError(
                "--seal-run", f"is {self.seal_run!r}; the id of a run has 32 hexadecimal digits"
            )
        if self.seal_sequence is not None and self.seal_sequence < 1:
            raise OptionError("--seal-sequence", f"is {self.seal_sequence}; it must be 1 or more")
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
    require_signature: Collection[bytes] | None
    signing_key: bytes | None
    remote_checksums: bool
    marks: str | None
    allow_globals: Collection[str]
    owners: Collection[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PickPolicy:
    """Which step `pick` takes of those that are there.

    Each field is what the help of its option says. `level` None is as deep as is cheap on the
    storage of a step, and `content` where a seal is required.
    """

    level: Annotated[Level | None, LEVEL] = None
    allow_missing_state: Annotated[
        bool,
        Parameter(
            "--allow-missing-state", "Allow a step without train state that older steps have."
        ),
    ] = False
    accept_unverifiable: Annotated[
        bool,
        Parameter(
            "--accept-unverifiable",
            "Allow a step that cannot be proven good at the requested level.",
        ),
    ] = False
    before: Annotated[
        int | None, Parameter("--before STEP", "Only steps older than this one.", min=0)
    ] = None
    skip: Annotated[
        Collection[int],
        Parameter(
            "--skip STEP,...", "Steps to skip, even if they cannot be inspected.", common=False
        ),
    ] = ()
    max_fallback: Annotated[
        int,
        Parameter(
            "--max-fallback N",
            "How many damaged steps may be skipped; interrupted saves do not count.",
            min=0,
            common=False,
        ),
    ] = 2
    ignore: Annotated[Collection[str], IGNORE] = ()
    prefer: Annotated[
        Preference,
        Parameter(
            "--prefer WORD",
            "Take the newest sound step, or the newest that training has confirmed.",
            common=False,
        ),
    ] = Preference.NEWEST

    def __post_init__(self) -> None:
        object.__setattr__(self, "level", known_level(self.level))
        object.__setattr__(self, "prefer", _known(Preference, self.prefer, "a preference"))
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
    prefer: Preference | str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentOptions:
    """How much of a step's bytes level `content` compares, and how: see the help of each option."""

    subset: Annotated[
        str | None,
        Parameter(
            "--subset PART",
            "Level content: compare only a part of the records, 3/7 or 10% by bytes; the same "
            "PART always selects the same records.",
            common=False,
        ),
    ] = None
    deadline_s: Annotated[
        float | None,
        Parameter(
            "--deadline TIME",
            "Level content: stop comparing after this time, 120s or 5m, and report what is "
            "proven until then; 22 where that is not everything.",
        ),
    ] = None
    jobs: Annotated[
        int | None,
        Parameter(
            "--jobs N",
            "Level content: how many threads read; the default depends on the storage.",
            min=1,
            common=False,
        ),
    ] = None
    nan_scan: Annotated[
        bool,
        Parameter(
            "--nan-scan",
            "Level content: also look for NaN and infinity in floating-point tensors; what "
            "is found is a warning.",
        ),
    ] = False
    state_check: Annotated[
        bool,
        Parameter(
            "--state-check",
            "Level content: also see whether the state of the optimizer is real: moments that "
            "are zero, below zero, of another shape, or those of the step before.",
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.deadline_s is not None:
            not_negative("deadline", self.deadline_s)
        if self.jobs is not None and self.jobs < 1:
            raise OptionError("--jobs", f"is {self.jobs}; it must be 1 or more")


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

CONFIRM_AFTER_STEPS = 100
"""So many steps of training after a resume confirm the step that it loaded."""

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
    `contract` is what the job states of itself, such as its global batch, its tokenizer and the
    revision of its code; each step keeps it, and a resume names what differs.
    A resumed step is marked confirmed with the first save `confirm_after` steps later, if a loss
    was given by then and none was lost; 0 confirms none.
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
    contract: Mapping[str, object] = field(default_factory=dict)
    confirm_after: int = CONFIRM_AFTER_STEPS
    settle_s: float = SETTLE_S
    patience_s: float = JOB_TIMEOUT_S

    def __post_init__(self) -> None:
        object.__setattr__(self, "accept_lost", tuple(self.accept_lost))
        per_rank = (self.per_rank,) if isinstance(self.per_rank, str) else self.per_rank
        object.__setattr__(self, "per_rank", tuple(per_rank))
        after: object = self.confirm_after
        if not isinstance(after, int) or isinstance(after, bool) or after < 0:
            raise UsageError(f"confirm_after is {after!r}; it must be a whole number, 0 or more")
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
    contract: Mapping[str, object]
    confirm_after: int
    settle_s: float
    patience_s: float


Options = StorageOptions | Requirements | PickPolicy | ContentOptions | TrainOptions
_Given = TypeVarTuple("_Given")


def options_from(keywords: Mapping[str, Any], /, *options: *_Given) -> tuple[*_Given]:
    """The options, each with those of its fields that a caller gave as keywords.

    A keyword wins over the field of an object. Raises `TypeError` for a keyword that is a
    field of none, as Python does for a parameter that a function does not have.
    """
    left = dict(keywords)
    made = []
    for one in cast(tuple[Options, ...], options):
        own = {each.name: left.pop(each.name) for each in fields(one) if each.name in left}
        made.append(replace(one, **own) if own else one)
    if left:
        raise TypeError(f"unexpected keyword argument {next(iter(left))!r}")
    return cast(tuple[*_Given], tuple(made))


def not_negative(name: str, value: float) -> float:
    """The value, if it is 0 or more; raises `UsageError` with the option's name."""
    if not value >= 0:
        raise OptionError(f"--{name}", f"is {value}; it must be 0 or more")
    return value


def known_level(level: Level | str | None) -> Level | None:
    """The level, by its word where it is given as one; raises `UsageError`."""
    return None if level is None else _known(Level, level, "a level")


_Word = TypeVar("_Word", bound=StrEnum)


def _known(words: type[_Word], word: str, what: str) -> _Word:
    """The word of an enumeration; raises `UsageError` for another."""
    try:
        return words(word)
    except ValueError:
        known = ", ".join(one.value for one in words)
        raise UsageError(f"{word!r} is not {what}; expected one of {known}") from None

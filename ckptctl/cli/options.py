"""Define the options that several commands share, and how an option is declared.

Every option has an environment variable `CKPTCTL_…`, except those in `COMMAND_LINE_ONLY`.
`binding` gives a command the options of the options objects that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

from ckptctl.cli.output import Color
from ckptctl.cli.values import (
    SEAL_KEY,
    parse_duration,
    parse_kinds,
    parse_names,
    parse_steps,
    parse_storage_options,
    parts,
    seal_key,
    tuple_of,
)
from ckptctl.model import STATE_KINDS, Level
from ckptctl.options import TIMEOUT_S, ContentOptions, PickPolicy, Requirements, StorageOptions

COMMAND_LINE_ONLY = frozenset(
    {
        "--apply",
        "--create",
        "--ignore",
        "--notify",
        "--off",
        "--replace",
        "--reset-budget",
        "--take-over",
        "--unsealed",
        "--yes",
    }
)
"""Switches that change or remove something, or that consent to it.

They have no variable: an exported variable acts on every later command, also on
those of somebody who does not know that it is set.
"""


OTHER_VARIABLES: Mapping[str, str] = {"--state KIND=KEY": "CKPTCTL_STATE_KEYS"}
"""Variables of options whose own name means something else to another command.

`CKPTCTL_STATE` is the folder of `run`, whose job may call `pick`.
"""


def variable_of(name: str) -> str:
    """The environment variable of an option: `--skip` has `CKPTCTL_SKIP`."""
    return "CKPTCTL_" + name.strip("-").replace("-", "_").upper()


class Declared(NamedTuple):
    """How the command line has a parameter: an argument if it has no names, else an option."""

    names: tuple[str, ...]
    help: str
    metavar: str | None = None
    min: float | None = None
    envvar: str | None = None


def option(spec: str, help_text: str, *, min: float | None = None) -> Declared:  # noqa: A002
    """An option of a command, as help shows it: `--quiet -q`, `--mtbf TIME`.

    It has a variable unless it is in `COMMAND_LINE_ONLY`.
    """
    names = tuple(word for word in spec.split() if word.startswith("-"))
    metavar = spec.partition(" ")[2] if len(names) == 1 else ""
    variable = None
    if names[0] not in COMMAND_LINE_ONLY:
        variable = OTHER_VARIABLES.get(spec) or variable_of(names[0])
    return Declared(names, help_text, metavar or None, min, variable)


def argument(metavar: str, help_text: str) -> Declared:
    """An argument of a command."""
    return Declared((), help_text, metavar)


RootsArg = Annotated[
    list[str],
    argument(
        "ROOT...",
        "One root, or several roots with steps of the same run; if two hold the same "
        "step, the earlier root is used.",
    ),
]
OptionalRootOpt = Annotated[
    list[str] | None,
    option(
        "--optional-root ROOT",
        "Another root of the same run that may be missing or unavailable, such as a "
        "local disk; may be given several times. It comes after the other roots, or "
        "keeps its place if it is also named among them.",
    ),
]
StepArg = Annotated[
    str,
    argument(
        "STEP",
        "PATH of a step, ROOT@1200, ROOT@latest (newest by number) or ROOT@auto (what "
        "pick chooses).",
    ),
]
LevelOpt = Annotated[
    Level | None,
    option(
        "--level",
        "How deep to inspect: listing reads the metadata, structure also the framing of "
        "every record, content every byte. Default: structure on a file system where that "
        "takes at most 10,000 reads, else listing.",
    ),
]
AllowFreshOpt = Annotated[
    bool,
    option(
        "--allow-fresh",
        "Exit with 0 and print nothing for a new run; for a root that does not exist "
        "only with --create.",
    ),
]
CreateOpt = Annotated[
    bool,
    option(
        "--create",
        "With --allow-fresh: create the root of a new run and its sentinel, which shows "
        "later starts that the storage is mounted.",
    ),
]
PatternOpt = Annotated[
    str | None,
    option(
        "--pattern REGEX",
        "A regular expression for names of step folders that ckptctl does not know; it "
        "must match the whole name, and its group (?P<step>[0-9]+) is the number.",
    ),
]
GraceOpt = Annotated[
    float,
    option(
        "--grace SECONDS",
        "How long after its last write an unfinished save counts as running.",
        min=0,
    ),
]

KeyFileOpt = Annotated[
    str | None,
    option(
        "--key-file FILE",
        f"File with the key of seals, which only you can read (chmod 600); without it {SEAL_KEY} "
        "is the key, if it is set.",
    ),
]
OnlyOpt = Annotated[str | None, option("--only KIND", "Keep only this kind of train state: model.")]
MemoryOpt = Annotated[
    str,
    option(
        "--memory SIZE", "How much memory to use at most, whatever the size of the step: 256M, 1G."
    ),
]
JobsOpt = Annotated[
    int | None,
    option("--jobs N", "How many threads read; the default depends on the storage.", min=1),
]
AcceptAsItIsOpt = Annotated[
    bool, option("--accept-unverifiable", "Accept a step that cannot be proven good.")
]
RootEnvOpt = Annotated[
    str | None,
    option(
        "--root-env NAME",
        "The environment variable in which the job finds its root, instead of {root}.",
    ),
]
HtmlOpt = Annotated[
    str | None,
    option("--html FILE", "Also write the answer to FILE as one self-contained HTML page."),
]
MetricsOpt = Annotated[
    str | None,
    option(
        "--metrics FILE", "Also write the figures to FILE for the textfile collector of Prometheus."
    ),
]
NotifyOpt = Annotated[
    str | None,
    option(
        "--notify COMMAND|URL",
        "Run COMMAND with the JSON document of what went wrong on standard input, or POST it "
        "to URL; a command is split into words, and no shell runs it.",
    ),
]
MarksOpt = Annotated[
    str | None,
    option(
        "--marks FILE",
        "File of marks for read-only roots, one per line; read in addition to the marks "
        "in the steps.",
    ),
]


class Offer(NamedTuple):
    """An option of the command line that sets a field of an options object.

    `field` is the field's name where it is another than the parameter's, `read` makes its
    value of what the command line gives.
    """

    option: Any
    default: Any
    field: str = ""
    read: Callable[[Any], Any] | None = None


def _offer(
    kind: Any,
    default: Any,
    spec: str,
    help_text: str,
    *,
    min: float | None = None,  # noqa: A002
    field: str = "",
    read: Callable[[Any], Any] | None = None,
) -> Offer:
    """The offer of an option that no command declares itself."""
    return Offer(Annotated[kind, option(spec, help_text, min=min)], default, field, read)


IGNORE_HELP = (
    "Names or paths below the root (with * and ?) of files and folders that are no saves, so "
    "that a root without steps that holds them may be a new run."
)

OFFERS: Mapping[type, Mapping[str, Offer]] = {
    PickPolicy: {
        "level": Offer(LevelOpt, None),
        "allow_missing_state": _offer(
            bool,
            False,
            "--allow-missing-state",
            "Allow a step without train state that older steps have.",
        ),
        "accept_unverifiable": _offer(
            bool,
            False,
            "--accept-unverifiable",
            "Allow a step that cannot be proven good at the requested level.",
        ),
        "before": _offer(
            int | None, None, "--before STEP", "Only steps older than this one.", min=0
        ),
        "skip": _offer(
            list[str] | None,
            None,
            "--skip STEP,...",
            "Steps to skip, even if they cannot be inspected.",
            read=parse_steps,
        ),
        "max_fallback": _offer(
            int,
            2,
            "--max-fallback N",
            "How many damaged steps may be skipped; interrupted saves do not count.",
            min=0,
        ),
        "ignore": _offer(
            list[str] | None,
            None,
            "--ignore PATTERN,...",
            IGNORE_HELP,
            read=parts,
        ),
    },
    Requirements: {
        "require": _offer(
            list[str] | None,
            None,
            "--require KIND,...",
            f"Train state that the step must have: {', '.join(STATE_KINDS)}.",
            read=parse_kinds,
        ),
        "state": _offer(
            list[str] | None,
            None,
            "--state KIND=KEY",
            "What an entry or a file holds that is not recognized, by its whole key path or name "
            "(dataloader=data_pos); may be given several times.",
            field="state_keys",
            read=tuple_of,
        ),
        "world_size": _offer(
            int | None,
            None,
            "--world-size N",
            "How many ranks will load the step; reports what that requires, or that it is "
            "impossible.",
            min=1,
        ),
        "saved_world_size": _offer(
            int | None,
            None,
            "--saved-world-size N",
            "How many ranks wrote the step; each must have written a shard file.",
            min=1,
        ),
        "pattern": Offer(PatternOpt, None),
        "grace": Offer(GraceOpt, 600.0, "grace_s"),
        "require_seal": _offer(
            bool,
            False,
            "--require-seal",
            "Require a seal that proves the step, made with the key if one is given; compares "
            "every byte unless --level is lower, which is then 22.",
        ),
        "seal_run": _offer(
            str | None,
            None,
            "--seal-run ID",
            "The id of the run that seals must be of; by default the one that the root records.",
        ),
        "seal_sequence": _offer(
            int | None,
            None,
            "--seal-sequence N",
            "With --require-seal: the newest seal of the root must have at least this place in "
            "the order of its seals; an older one shows that the root was set back.",
            min=1,
        ),
        "key_file": Offer(KeyFileOpt, None, "key", seal_key),
        "remote_checksums": _offer(
            bool,
            False,
            "--remote-checksums",
            "Also compare the checksums that the object store keeps with those in the seal, "
            "and download nothing for it; 22 where there are none.",
        ),
        "marks": Offer(MarksOpt, None),
        "allow_globals": _offer(
            list[str] | None,
            None,
            "--allow-globals NAME,...",
            "Classes of the run in its pickles, each with its module, about which no warning is "
            "needed; one that can run code is never allowed.",
            read=parse_names,
        ),
    },
    ContentOptions: {
        "subset": _offer(
            str | None,
            None,
            "--subset PART",
            "Level content: compare only a part of the records, 3/7 or 10% by bytes; the same "
            "PART always selects the same records.",
        ),
        "deadline": _offer(
            str | None,
            None,
            "--deadline TIME",
            "Level content: stop comparing after this time, 120s or 5m, and report what is "
            "proven until then; 22 where that is not everything.",
            field="deadline_s",
            read=parse_duration,
        ),
        "jobs": _offer(
            int | None,
            None,
            "--jobs N",
            "Level content: how many threads read; the default depends on the storage.",
            min=1,
        ),
        "nan_scan": _offer(
            bool,
            False,
            "--nan-scan",
            "Level content: also look for NaN and infinity in floating-point tensors; what "
            "is found is a warning.",
        ),
        "state_check": _offer(
            bool,
            False,
            "--state-check",
            "Level content: also see whether the state of the optimizer is real: moments that "
            "are zero, below zero, of another shape, or those of the step before.",
        ),
    },
    StorageOptions: {
        "storage_option": _offer(
            list[str] | None,
            None,
            "--storage-option KEY=VALUE",
            "Option for the storage client; may be given several times. A JSON value is "
            "passed as JSON.",
            field="storage_options",
            read=parse_storage_options,
        ),
        "endpoint_url": _offer(
            str | None, None, "--endpoint-url URL", "Address of an S3 service other than Amazon's."
        ),
        "timeout": _offer(
            float,
            TIMEOUT_S,
            "--timeout SECONDS",
            "How long to wait for one answer of the storage; a mount that hangs four times "
            "as long ends the command with 75.",
            min=0.1,
            field="timeout_s",
        ),
        "follow_links": _offer(
            list[str] | None,
            None,
            "--follow-links DIR",
            "Follow links of steps and their files that lead into this folder, such as a slower "
            "storage; may be given several times. Other links are not followed (2).",
            read=lambda folders: tuple(folders or ()),
        ),
    },
}
"""The options that set the fields of each options object, by their parameters.

A command takes the object; `with_common` puts the options in its place and makes the object
of what they give. So no command can offer one of them and drop its value.
"""


GROUPS: Mapping[type, str] = {
    PickPolicy: "Choice of the step",
    Requirements: "Requirements on a step",
    ContentOptions: "Comparison of every byte",
    StorageOptions: "Storage",
}
"""The headings of help for the options of each options object."""

COMMON_GROUP = "Output and help"

COMMON = {
    "as_json": _offer(
        bool, False, "--json", "Write one JSON document to standard output, also on failure."
    ),
    "quiet": _offer(bool, False, "--quiet -q", "Print only the result."),
    "report": _offer(
        str | None, None, "--report FILE", "Also write the JSON document to this file, atomically."
    ),
    "color": _offer(
        Color, "auto", "--color", "When to use colour; auto follows NO_COLOR and FORCE_COLOR."
    ),
    "debug": _offer(bool, False, "--debug", "Show the traceback of an error."),
}
"""What every command has: how an answer is shown, which is no part of what was asked."""


def only(*names: str) -> frozenset[str]:
    """What a command offers of an options object, by parameters.

    Used as `requirements: Annotated[Requirements, only("marks", "pattern")]`.
    """
    return frozenset(names)


OfStep = Annotated[Requirements, frozenset(OFFERS[Requirements]) - {"remote_checksums"}]
"""What `pick` and the commands that choose as it does require of a step."""

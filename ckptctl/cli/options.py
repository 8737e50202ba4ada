"""Define the options that several commands share, and how an option is declared.

Every option has an environment variable `CKPTCTL_…`, except those in
`COMMAND_LINE_ONLY`. A command takes options objects whole; `with_common` puts the options
of the command line in their place, and adds those that every command has.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple

import typer

from ckptctl.cli.commands import COMMANDS, load
from ckptctl.cli.output import Color, Output
from ckptctl.cli.repeating import definition_of, given_options, with_options
from ckptctl.cli.text import Line, line
from ckptctl.cli.values import (
    SEAL_KEY,
    LevelChoice,
    level_of,
    parse_duration,
    parse_kinds,
    parse_steps,
    parse_storage_options,
    seal_key,
)
from ckptctl.errors import UsageError
from ckptctl.model import STATE_KINDS
from ckptctl.options import (
    TIMEOUT_S,
    ContentOptions,
    PickPolicy,
    Requirements,
    StorageOptions,
)
from ckptctl.storage.watchdog import Watchdog

COMMAND_LINE_ONLY = frozenset(
    {
        "--apply",
        "--create",
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


def variable_of(name: str) -> str:
    """The environment variable of an option: `--skip` has `CKPTCTL_SKIP`."""
    return "CKPTCTL_" + name.strip("-").replace("-", "_").upper()


def option(*names: str, **about: Any) -> Any:
    """An option of a command, with its variable unless it is in `COMMAND_LINE_ONLY`."""
    variable = None if names[0] in COMMAND_LINE_ONLY else variable_of(names[0])
    # Help says once that every option has one, instead of naming each.
    return typer.Option(*names, envvar=variable, show_envvar=False, **about)


RootArg = Annotated[
    str, typer.Argument(metavar="ROOT", help="Folder or URL that holds the steps of one run.")
]
RootsArg = Annotated[
    list[str],
    typer.Argument(
        metavar="ROOT...",
        help="One root, or several roots with steps of the same run; if two hold the same "
        "step, the earlier root is used.",
    ),
]
OptionalRootOpt = Annotated[
    list[str] | None,
    option(
        "--optional-root",
        metavar="ROOT",
        help="Another root of the same run that may be missing or unavailable, such as a "
        "local disk; may be given several times. It comes after the other roots, or "
        "keeps its place if it is also named among them.",
    ),
]
StepArg = Annotated[
    str,
    typer.Argument(
        metavar="STEP",
        help="PATH of a step, ROOT@1200, ROOT@latest (newest by number) or ROOT@auto (what "
        "pick chooses).",
    ),
]
LevelOpt = Annotated[
    LevelChoice | None,
    option(
        "--level",
        help="How deep to inspect: listing reads the metadata, structure also the framing of "
        "every record, content every byte. Default: as deep as is cheap on that storage.",
    ),
]
RequireOpt = Annotated[
    list[str] | None,
    option(
        "--require",
        metavar="KIND,...",
        help=f"Train state that the step must have: {', '.join(STATE_KINDS)}.",
    ),
]
WeightsOpt = Annotated[
    bool,
    option(
        "--allow-missing-state",
        help="Allow a step without train state that older steps have.",
    ),
]
AcceptUnverifiableOpt = Annotated[
    bool,
    option(
        "--accept-unverifiable",
        help="Allow a step that cannot be proven good at the requested level.",
    ),
]
BeforeOpt = Annotated[
    int | None,
    option("--before", metavar="STEP", min=0, help="Only steps older than this one."),
]
SkipOpt = Annotated[
    list[str] | None,
    option(
        "--skip",
        metavar="STEP,...",
        help="Steps to skip, even if they cannot be inspected.",
    ),
]
MaxFallbackOpt = Annotated[
    int,
    option(
        "--max-fallback",
        metavar="N",
        min=0,
        help="How many damaged steps may be skipped; interrupted saves do not count.",
    ),
]
AllowFreshOpt = Annotated[
    bool,
    option(
        "--allow-fresh",
        help="Exit with 0 and print nothing for a new run; for a root that does not exist "
        "only with --create.",
    ),
]
CreateOpt = Annotated[
    bool,
    option(
        "--create",
        help="With --allow-fresh: create the root of a new run and its sentinel, which shows "
        "later starts that the storage is mounted.",
    ),
]
WorldSizeOpt = Annotated[
    int | None,
    option(
        "--world-size",
        metavar="N",
        min=1,
        help="How many ranks will load the step; reports what that requires, or that it is "
        "impossible.",
    ),
]
SavedWorldSizeOpt = Annotated[
    int | None,
    option(
        "--saved-world-size",
        metavar="N",
        min=1,
        help="How many ranks wrote the step; each must have written a shard file.",
    ),
]
PatternOpt = Annotated[
    str | None,
    option(
        "--pattern",
        metavar="REGEX",
        help="A regular expression for names of step folders that ckptctl does not know; it "
        "must match the whole name, and its group (?P<step>[0-9]+) is the number.",
    ),
]
GraceOpt = Annotated[
    float,
    option(
        "--grace",
        metavar="SECONDS",
        min=0,
        help="How long after its last write an unfinished save counts as running.",
    ),
]

RequireSealOpt = Annotated[
    bool,
    option(
        "--require-seal",
        help="Require a seal that proves the step, made with the key if one is given.",
    ),
]
KeyFileOpt = Annotated[
    str | None,
    option(
        "--key-file",
        metavar="FILE",
        help=f"File with the key of seals; without it {SEAL_KEY} is the key, if it is set.",
    ),
]
OnlyOpt = Annotated[
    str | None,
    option("--only", metavar="KIND", help="Leave out all train state except this: model."),
]
MemoryOpt = Annotated[
    str,
    option(
        "--memory",
        metavar="SIZE",
        help="How much memory to use at most, whatever the size of the step: 256M, 1G.",
    ),
]
JobsOpt = Annotated[
    int | None,
    option(
        "--jobs",
        metavar="N",
        min=1,
        help="How many threads read; the default depends on the storage.",
    ),
]
AcceptAsItIsOpt = Annotated[
    bool,
    option(
        "--accept-unverifiable",
        help="Accept a step that cannot be proven good.",
    ),
]
MarksOpt = Annotated[
    str | None,
    option(
        "--marks",
        metavar="FILE",
        help="File of marks for read-only roots, one per line; read in addition to the marks "
        "in the steps.",
    ),
]
ReasonOpt = Annotated[
    str,
    option("--reason", metavar="TEXT", help="The reason, in one sentence."),
]
EvidenceOpt = Annotated[
    list[str] | None,
    option(
        "--evidence",
        metavar="TEXT",
        help="Evidence: a URL or a log file; may be given several times.",
    ),
]
ByOpt = Annotated[
    str | None,
    option(
        "--by",
        metavar="NAME",
        help="Who decided it; by default the user and the host.",
    ),
]

RemoteChecksumsOpt = Annotated[
    bool,
    option(
        "--remote-checksums",
        help="Also compare the checksums that the object store keeps with those in the seal, "
        "and download nothing for it; 22 where there are none.",
    ),
]
SubsetOpt = Annotated[
    str | None,
    option(
        "--subset",
        metavar="PART",
        help="Level content: compare only a part of the records, 3/7 or 10% by bytes; the same "
        "words always mean the same records.",
    ),
]
DeadlineOpt = Annotated[
    str | None,
    option(
        "--deadline",
        metavar="TIME",
        help="Level content: stop comparing after this time, 120s or 5m, and report what is "
        "proven until then; 22 where that is not everything.",
    ),
]
ContentJobsOpt = Annotated[
    int | None,
    option(
        "--jobs",
        metavar="N",
        min=1,
        help="Level content: how many threads read a file system; by default as many as is "
        "good for it.",
    ),
]
NanScanOpt = Annotated[
    bool,
    option(
        "--nan-scan",
        help="Level content: also look for NaN and infinity in floating-point tensors; what "
        "is found is a warning.",
    ),
]

_StorageOptionOpt = Annotated[
    list[str] | None,
    option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="Option for the storage client; may be given several times. A JSON value is "
        "passed as JSON.",
    ),
]
_EndpointUrlOpt = Annotated[
    str | None,
    option(
        "--endpoint-url",
        metavar="URL",
        help="Address of an S3 service other than Amazon's.",
    ),
]
_TimeoutOpt = Annotated[
    float,
    option(
        "--timeout",
        metavar="SECONDS",
        min=0.1,
        help="How long to wait for one answer of the storage; a mount that hangs four times "
        "as long ends the command with 75.",
    ),
]
_JsonOpt = Annotated[
    bool,
    option(
        "--json",
        help="Write one JSON document to standard output, also on failure.",
    ),
]
_QuietOpt = Annotated[
    bool,
    option("--quiet", "-q", help="Print only the result."),
]
_ReportOpt = Annotated[
    str | None,
    option(
        "--report",
        metavar="FILE",
        help="Also write the JSON document to this file, atomically.",
    ),
]
_ColorOpt = Annotated[
    Color,
    option(
        "--color",
        help="When to use colour; auto follows NO_COLOR and FORCE_COLOR.",
    ),
]
_DebugOpt = Annotated[
    bool,
    option("--debug", help="Show the traceback of an error."),
]

_COMMON = {
    "as_json": (_JsonOpt, False),
    "quiet": (_QuietOpt, False),
    "report": (_ReportOpt, None),
    "color": (_ColorOpt, Color.AUTO),
    "debug": (_DebugOpt, False),
}


class _Offer(NamedTuple):
    """An option of the command line that sets a field of an options object.

    `field` is the field's name where it is another than the parameter's, `read` makes its
    value of what the command line gives.
    """

    option: Any
    default: Any
    field: str = ""
    read: Callable[[Any], Any] | None = None


_OFFERS: Mapping[type, Mapping[str, _Offer]] = {
    PickPolicy: {
        "level": _Offer(LevelOpt, None, read=level_of),
        "allow_missing_state": _Offer(WeightsOpt, False),
        "accept_unverifiable": _Offer(AcceptUnverifiableOpt, False),
        "before": _Offer(BeforeOpt, None),
        "skip": _Offer(SkipOpt, None, read=parse_steps),
        "max_fallback": _Offer(MaxFallbackOpt, 2),
    },
    Requirements: {
        "require": _Offer(RequireOpt, None, read=parse_kinds),
        "world_size": _Offer(WorldSizeOpt, None),
        "saved_world_size": _Offer(SavedWorldSizeOpt, None),
        "pattern": _Offer(PatternOpt, None),
        "grace": _Offer(GraceOpt, 600.0, "grace_s"),
        "require_seal": _Offer(RequireSealOpt, False),
        "key_file": _Offer(KeyFileOpt, None, "key", seal_key),
        "remote_checksums": _Offer(RemoteChecksumsOpt, False),
        "marks": _Offer(MarksOpt, None),
    },
    ContentOptions: {
        "subset": _Offer(SubsetOpt, None),
        "deadline": _Offer(DeadlineOpt, None, "deadline_s", parse_duration),
        "jobs": _Offer(ContentJobsOpt, None),
        "nan_scan": _Offer(NanScanOpt, False),
    },
    StorageOptions: {
        "storage_option": _Offer(_StorageOptionOpt, None, "storage_options", parse_storage_options),
        "endpoint_url": _Offer(_EndpointUrlOpt, None),
        "timeout": _Offer(_TimeoutOpt, TIMEOUT_S, "timeout_s"),
    },
}
"""The options that set the fields of each options object, by their parameters.

A command takes the object; `with_common` puts the options in its place and makes the object
of what they give. So no command can offer one of them and drop its value.
"""


def only(*names: str) -> frozenset[str]:
    """What a command offers of an options object, by parameters.

    Used as `requirements: Annotated[Requirements, only("marks", "pattern")]`.
    """
    return frozenset(names)


OfStep = Annotated[Requirements, frozenset(_OFFERS[Requirements]) - {"remote_checksums"}]
"""What `pick` and the commands that choose as it does require of a step."""


def _offers_of(annotation: Any) -> tuple[type, Mapping[str, _Offer]] | None:
    """The options object that a parameter takes, with what the command offers of it."""
    made = getattr(annotation, "__origin__", annotation)
    if not isinstance(made, type) or made not in _OFFERS:
        return None
    chosen = next(iter(getattr(annotation, "__metadata__", ())), None)
    offers = _OFFERS[made]
    return made, {name: each for name, each in offers.items() if chosen is None or name in chosen}


_PATIENCE = 4
"""A mounted file system may be silent for so many times `--timeout`: then the process ends."""


def with_common(command: Callable[..., int], out: Output) -> Callable[..., int]:
    """The command with the options of the objects that it takes, and those that every one has.

    typer reads options from a signature, so the one that it sees is put together
    here. `--debug` has no effect but in `main`, which prints tracebacks. A storage
    that hangs in the kernel ends the process with 75.
    """
    own = dict(inspect.signature(command, eval_str=True).parameters)
    del own["out"]
    objects = {name: found for name, each in own.items() if (found := _offers_of(each.annotation))}
    parameters = _expanded(own)

    def run(**given: Any) -> int:
        common = {name: given.pop(name) for name in _COMMON}
        timeout_s = given.get("timeout") or TIMEOUT_S
        if not math.isfinite(timeout_s):
            raise UsageError(f"--timeout is {timeout_s} s", instead="--timeout 120")
        # How an answer is shown is no part of what was asked.
        asked = [each for each in parameters if each.name not in _COMMON]
        repeated = given_options(asked, given)
        out.configure(
            as_json=common["as_json"],
            quiet=common["quiet"],
            color=common["color"],
            report_file=common["report"],
            complete=lambda each: with_options(each, repeated, partial(_takes, out.command)),
        )
        out.lines(_ignored_lines(given), to=out.err)
        for name, (made, offers) in objects.items():
            given[name] = _made(made, offers, given, keep=own)
        if "storage" not in objects:
            return command(**given, out=out)
        with Watchdog(_PATIENCE * timeout_s, out.error):
            return command(**given, out=out)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _expanded(own: Mapping[str, inspect.Parameter]) -> list[inspect.Parameter]:
    """The parameters of a command, with options in the place of options objects, as keywords."""
    of_objects: dict[str, tuple[Any, Any]] = {}
    for each in own.values():
        found = _offers_of(each.annotation)
        if found is not None:
            of_objects |= {name: (one.option, one.default) for name, one in found[1].items()}
    plain = [each for each in own.values() if _offers_of(each.annotation) is None]
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in plain]
    # A command may have its own words for one of them.
    added = {name: each for name, each in of_objects.items() if name not in own} | _COMMON
    return parameters + [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
        for name, (option, default) in added.items()
    ]


def _made(
    made: type, offers: Mapping[str, _Offer], given: dict[str, Any], *, keep: Collection[str]
) -> object:
    """The options object of what the command line gave, which is taken out of `given`.

    A parameter of the command's own stays there: its own words mean something else, but
    for `--timeout`, which the storage obeys, too.
    """
    values = {}
    for name, offer in offers.items():
        value = given[name] if name in keep else given.pop(name)
        if name in keep and value is None:
            continue
        values[offer.field or name] = value if offer.read is None else offer.read(value)
    return made(**values)


def _ignored_lines(given: Mapping[str, Any]) -> Iterator[Line]:
    """Name each variable that is set for an option which is read from the command line only."""
    for parameter, value in given.items():
        name = "--" + parameter.replace("_", "-")
        if name in COMMAND_LINE_ONLY and not value and os.environ.get(variable_of(name)):
            yield line(
                f"warning: {variable_of(name)} is set and has no effect: {name} is read from the "
                "command line only"
            )


def _takes(own: str | None, command: str, definition: object) -> bool:
    """Whether a command takes an option that was given to the command `own`."""
    if command == own:
        return True
    if command not in COMMANDS:
        return False
    theirs = inspect.signature(load(command).function, eval_str=True).parameters
    return any(definition_of(each.annotation) is definition for each in _expanded(theirs))

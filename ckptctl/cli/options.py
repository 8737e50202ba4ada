"""Define the options that several commands share, and how an option is declared.

Every option has an environment variable `CKPTCTL_…`, except those in
`COMMAND_LINE_ONLY`. The options that every command has are added by
`with_common`, so that no command can lack one.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any

import typer

from ckptctl.cli.commands import COMMANDS, load
from ckptctl.cli.output import Color, Output
from ckptctl.cli.repeating import definition_of, given_options, with_options
from ckptctl.cli.text import Line, line
from ckptctl.cli.values import SEAL_KEY, LevelChoice, parse_storage_options
from ckptctl.errors import UsageError
from ckptctl.model import STATE_KINDS
from ckptctl.options import TIMEOUT_S, StorageOptions
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
        help="One root, or several that hold steps of the same run; at the same step the earlier "
        "root is preferred.",
    ),
]
OptionalRootOpt = Annotated[
    list[str] | None,
    option(
        "--optional-root",
        metavar="ROOT",
        help="Another root of the same run that may be absent or not answer, such as a local "
        "disk; may be given several times. It comes after the others, or keeps its place where "
        "it is named among them too.",
    ),
]
StepArg = Annotated[
    str,
    typer.Argument(
        metavar="STEP",
        help="PATH of a step, ROOT@1200, ROOT@latest (newest by number) or ROOT@auto (what pick "
        "takes).",
    ),
]
LevelOpt = Annotated[
    LevelChoice | None,
    option(
        "--level",
        help="How deep to look: listing reads the metadata, structure also the frame of every "
        "record, content every byte. Default: as deep as is cheap on that storage.",
    ),
]
RequireOpt = Annotated[
    list[str] | None,
    option(
        "--require",
        metavar="KIND,...",
        help=f"Train state that must be there: {', '.join(STATE_KINDS)}.",
    ),
]
WeightsOpt = Annotated[
    bool,
    option(
        "--allow-missing-state",
        help="Take a step that lacks train state which older steps hold.",
    ),
]
AcceptUnverifiableOpt = Annotated[
    bool,
    option(
        "--accept-unverifiable",
        help="Take a step that nothing in it can prove good at the level asked for.",
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
        help="Steps to leave out, also when they cannot be looked at.",
    ),
]
MaxFallbackOpt = Annotated[
    int,
    option(
        "--max-fallback",
        metavar="N",
        min=0,
        help="How many damaged steps may be passed over; interrupted saves do not count.",
    ),
]
AllowFreshOpt = Annotated[
    bool,
    option(
        "--allow-fresh",
        help="Exit with 0 and print nothing where the run is new; on a root that does not exist "
        "only with --create.",
    ),
]
CreateOpt = Annotated[
    bool,
    option(
        "--create",
        help="With --allow-fresh: make the root of a new run and its sentinel, by which a later "
        "start of the run knows that the storage is there.",
    ),
]
WorldSizeOpt = Annotated[
    int | None,
    option(
        "--world-size",
        metavar="N",
        min=1,
        help="How many ranks will load the step: say what that needs, or that it cannot be.",
    ),
]
SavedWorldSizeOpt = Annotated[
    int | None,
    option(
        "--saved-world-size",
        metavar="N",
        min=1,
        help="How many ranks wrote the step: each must have left a shard file.",
    ),
]
PatternOpt = Annotated[
    str | None,
    option(
        "--pattern",
        metavar="REGEX",
        help="How step folders are named, where ckptctl does not know; the whole name must match, "
        "and the group (?P<step>[0-9]+) is the number.",
    ),
]
GraceOpt = Annotated[
    float,
    option(
        "--grace",
        metavar="SECONDS",
        min=0,
        help="How long after its last write an unfinished save counts as still running.",
    ),
]

RequireSealOpt = Annotated[
    bool,
    option(
        "--require-seal",
        help="Only a step that a seal proves will do, made with the key where one is given.",
    ),
]
KeyFileOpt = Annotated[
    str | None,
    option(
        "--key-file",
        metavar="FILE",
        help=f"File that holds the key of seals; without it {SEAL_KEY} is the key, where it is "
        "set.",
    ),
]
OnlyOpt = Annotated[
    str | None,
    option("--only", metavar="KIND", help="Leave out all train state but this: model."),
]
MemoryOpt = Annotated[
    str,
    option(
        "--memory",
        metavar="SIZE",
        help="How much memory may be used, whatever the size of the step: 256M, 1G.",
    ),
]
JobsOpt = Annotated[
    int | None,
    option(
        "--jobs",
        metavar="N",
        min=1,
        help="How many threads read; by default as many as is good for the storage.",
    ),
]
AcceptAsItIsOpt = Annotated[
    bool,
    option(
        "--accept-unverifiable",
        help="Take a step that nothing in it can prove good, as it is.",
    ),
]
MarksOpt = Annotated[
    str | None,
    option(
        "--marks",
        metavar="FILE",
        help="File of marks for roots that cannot be written to, one a line; read beside the "
        "marks in the steps.",
    ),
]
ReasonOpt = Annotated[
    str,
    option("--reason", metavar="TEXT", help="Why; in a sentence."),
]
EvidenceOpt = Annotated[
    list[str] | None,
    option(
        "--evidence",
        metavar="TEXT",
        help="Where to look: a URL, a log file; may be given several times.",
    ),
]
ByOpt = Annotated[
    str | None,
    option(
        "--by",
        metavar="NAME",
        help="Who says so; by default the user and the host.",
    ),
]

_StorageOptionOpt = Annotated[
    list[str] | None,
    option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="Option for the fsspec file system; may be given several times. A value that is JSON "
        "is taken as JSON.",
    ),
]
_EndpointUrlOpt = Annotated[
    str | None,
    option(
        "--endpoint-url",
        metavar="URL",
        help="Address of an S3 service that is not Amazon's.",
    ),
]
_TimeoutOpt = Annotated[
    float,
    option(
        "--timeout",
        metavar="SECONDS",
        min=0.1,
        help="How long to wait for one answer of the storage; "
        "a mount that hangs for four times as long ends the command with 75.",
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
    option("--quiet", "-q", help="Print the bare answer and no talk."),
]
_ReportOpt = Annotated[
    str | None,
    option(
        "--report",
        metavar="FILE",
        help="Also write the JSON document to this file, whole or not at all.",
    ),
]
_ColorOpt = Annotated[
    Color,
    option(
        "--color",
        help="When to colour; auto obeys NO_COLOR and FORCE_COLOR.",
    ),
]
_DebugOpt = Annotated[
    bool,
    option("--debug", help="Show the traceback of an error."),
]

_STORAGE = {
    "storage_option": (_StorageOptionOpt, None),
    "endpoint_url": (_EndpointUrlOpt, None),
    "timeout": (_TimeoutOpt, TIMEOUT_S),
}
_COMMON = {
    "as_json": (_JsonOpt, False),
    "quiet": (_QuietOpt, False),
    "report": (_ReportOpt, None),
    "color": (_ColorOpt, Color.AUTO),
    "debug": (_DebugOpt, False),
}


_PATIENCE = 4
"""A mounted file system may be silent for so many times `--timeout`: then the process ends."""


def with_common(command: Callable[..., int], out: Output) -> Callable[..., int]:
    """The command with the options that every command has.

    What they say is handed to it as `out`, and as `storage` where it takes that.
    typer reads options from a signature, so the one that it sees is put together
    here. `--debug` has no effect but in `main`, which prints tracebacks. A storage
    that hangs in the kernel ends the process with 75.
    """
    own = dict(inspect.signature(command, eval_str=True).parameters)
    del own["out"]
    takes_storage = own.pop("storage", None) is not None
    added = {**_STORAGE, **_COMMON} if takes_storage else _COMMON
    # A command may have its own words for one of them.
    added = {name: each for name, each in added.items() if name not in own}

    def run(**given: Any) -> int:
        common = {name: given.pop(name) for name in added}
        timeout_s = common.get("timeout") or given.get("timeout") or TIMEOUT_S
        if not math.isfinite(timeout_s):
            raise UsageError(f"--timeout is {timeout_s} s", instead="--timeout 120")
        # How an answer is shown is no part of what was asked.
        asked = [each for each in parameters if each.name not in _COMMON]
        repeated = given_options(asked, {**given, **common})
        if takes_storage:
            given["storage"] = StorageOptions(
                storage_options=parse_storage_options(common["storage_option"] or ()),
                endpoint_url=common["endpoint_url"],
                timeout_s=timeout_s,
            )
        out.configure(
            as_json=common["as_json"],
            quiet=common["quiet"],
            color=common["color"],
            report_file=common["report"],
            complete=lambda each: with_options(each, repeated, partial(_takes, out.command)),
        )
        out.lines(_ignored_lines(given), to=out.err)
        if not takes_storage:
            return command(**given, out=out)
        with Watchdog(_PATIENCE * timeout_s, out.error):
            return command(**given, out=out)

    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own.values()]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
        for name, (option, default) in added.items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


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
    parameters = inspect.signature(load(command).function, eval_str=True).parameters
    taken = [definition_of(each.annotation) for each in parameters.values()]
    if "storage" in parameters:
        taken += [definition_of(each) for each, _ in _STORAGE.values()]
    return any(each is definition for each in taken)

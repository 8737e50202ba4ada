"""Which options do the commands share, and how is each written?

Every option has an environment variable `CKPTCTL_…`. Those that every command
has are added by `with_common`, so that no command can lack one.
"""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Annotated, Any

import typer

from ckptctl.cli.output import Color, Output
from ckptctl.errors import UsageError
from ckptctl.model import STATE_KINDS, Level
from ckptctl.storage.watchdog import Watchdog

Storage = dict[str, Any]
"""The keyword arguments of the library that say how to reach a storage."""


class LevelChoice(str, Enum):
    """The levels that can be asked for."""

    LISTING = "listing"
    STRUCTURE = "structure"
    CONTENT = "content"


SEAL_KEY = "CKPTCTL_SEAL_KEY"
"""The environment variable that holds the key itself: it never stands on a command line."""


def option(*names: str, **about: Any) -> Any:
    """An option of a command; its variable is its long name: `--skip` has `CKPTCTL_SKIP`."""
    variable = "CKPTCTL_" + names[0].strip("-").replace("-", "_").upper()
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
VerifyLevelOpt = Annotated[
    LevelChoice,
    option(
        "--level",
        help="How deep to look: listing reads the metadata, structure also the frame of every "
        "record, content every byte.",
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
        "--weights-ok",
        help="Take a step that lacks train state which older steps hold.",
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

_TIMEOUT_S = 30.0

_STORAGE = {
    "storage_option": (_StorageOptionOpt, None),
    "endpoint_url": (_EndpointUrlOpt, None),
    "timeout": (_TimeoutOpt, _TIMEOUT_S),
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
        timeout_s = common.get("timeout") or given.get("timeout") or _TIMEOUT_S
        repeated = ""
        if takes_storage:
            repeated = _repeated(common, given.get("pattern"))
            given["storage"] = {
                "storage_options": parse_storage_options(common["storage_option"] or ()),
                "endpoint_url": common["endpoint_url"],
                "timeout_s": timeout_s,
            }
        out.configure(
            as_json=common["as_json"],
            quiet=common["quiet"],
            color=common["color"],
            report_file=common["report"],
            repeated=repeated,
        )
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


def parse_storage_options(given: Sequence[str]) -> dict[str, object] | None:
    """`KEY=VALUE` pairs as keyword arguments of an fsspec file system.

    A value that is JSON (`true`, `{"region_name": "eu"}`) is taken as that; a number
    is, too: quote it (`key='"0123"'`) where a string is meant.
    """
    options: dict[str, object] = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise UsageError(
                f"--storage-option is KEY=VALUE, not {pair!r}",
                next_command="ckptctl scan ROOT --storage-option anon=true",
            )
        options[key] = _json_or_text(value)
    return options or None


def _json_or_text(value: str) -> object:
    import json

    try:
        return json.loads(value)
    except ValueError:
        return value


_MAX_KEY_BYTES = 4096


def seal_key(key_file: str | None) -> bytes | None:
    """The key of seals: what is in the file, or in the environment, or None.

    A line end behind it is not part of it. Raises `UsageError` for a file that cannot
    be read, or is too large to be a key.
    """
    if key_file is None:
        key = os.environb.get(SEAL_KEY.encode(), b"")
    else:
        try:
            with open(key_file, "rb") as file:
                key = file.read(_MAX_KEY_BYTES + 1)
        except OSError as error:
            raise UsageError(f"the key file {key_file}: {error.strerror}") from error
        if not key.strip() or len(key) > _MAX_KEY_BYTES:
            raise UsageError(
                f"the key file {key_file} has {'no key' if not key.strip() else 'more than a key'}"
                " in it",
                next_command="openssl rand -hex 32",
            )
    return key.rstrip(b"\r\n") or None


def level_of(choice: LevelChoice | None) -> Level | None:
    """The level that was asked for, if one was."""
    return None if choice is None else Level(choice.value)


def parse_kinds(given: Sequence[str] | None) -> tuple[str, ...]:
    """The kinds of train state in `--require`, given with commas or several times."""
    kinds = [kind.strip() for each in given or () for kind in each.split(",") if kind.strip()]
    unknown = [kind for kind in kinds if kind not in STATE_KINDS]
    if unknown:
        raise UsageError(
            f"--require does not know {unknown[0]!r}; the kinds of train state are "
            f"{', '.join(STATE_KINDS)}",
            next_command=f"ckptctl pick ROOT --require {','.join(STATE_KINDS[:2])}",
        )
    return tuple(dict.fromkeys(kinds))


def parse_steps(given: Sequence[str] | None) -> tuple[int, ...]:
    """The step numbers in `--skip`, given with commas or several times."""
    words = [word.strip() for each in given or () for word in each.split(",") if word.strip()]
    for word in words:
        if not (word.isascii() and word.isdigit()) or len(word) > 19:
            raise UsageError(
                f"--skip takes step numbers, not {word!r}",
                next_command="ckptctl pick ROOT --skip 1400,1600",
            )
    return tuple(dict.fromkeys(map(int, words)))


_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def parse_duration(text: str | None, name: str = "--deadline") -> float | None:
    """The seconds in an option that is a time: `90`, `120s`, `5m`, `1.5h`, `2d`."""
    if text is None:
        return None
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text[len(number) :].strip()
    if unit in _SECONDS and number.replace(".", "", 1).isdecimal() and number.isascii():
        return float(number) * _SECONDS[unit]
    raise UsageError(
        f"{name} is a time like 90, 120s, 5m or 1.5h, not {text!r}",
        next_command="ckptctl verify STEP --level content --deadline 120s"
        if name == "--deadline"
        else None,
    )


_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(name: str, text: str) -> int:
    """The bytes in an option: `268435456`, `256M`, `1.5G`, `256MiB`."""
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = number[-1:] if number[-1:] in _SIZES else ""
    digits = number.removesuffix(unit).strip()
    if digits.replace(".", "", 1).isdecimal() and digits.isascii():
        return int(float(digits) * _SIZES[unit])
    raise UsageError(f"--{name} is a size like 256M or 1.5G, not {text!r}")


_SECRETS = ("key", "secret", "token", "password")


def without_secrets(words: Sequence[str]) -> list[str]:
    """Words of a command line, with the values of what looks like a secret as `***`."""
    return [_without_secret(word) for word in words]


def _without_secret(word: str) -> str:
    key, equals, _ = word.partition("=")
    return f"{key}=***" if equals and any(name in key.lower() for name in _SECRETS) else word


def _repeated(common: dict[str, Any], pattern: str | None) -> str:
    """The options that a next command needs again; those in the environment it has already."""
    words: list[str] = []
    if pattern is not None and pattern != os.environ.get("CKPTCTL_PATTERN"):
        words += ["--pattern", pattern]
    url = common["endpoint_url"]
    if url is not None and url != os.environ.get("CKPTCTL_ENDPOINT_URL"):
        words += ["--endpoint-url", url]
    pairs = common["storage_option"] or []
    if pairs != os.environ.get("CKPTCTL_STORAGE_OPTION", "").split():
        for pair in without_secrets(pairs):
            words += ["--storage-option", pair]
    return shlex.join(words)

"""The options of several commands, and how the values of options are read.

What commands take as an options object is declared on its fields (`ckptctl/options.py`); here
are the options that set no field of one. Every option has an environment variable `CKPTCTL_…`,
except those in `COMMAND_LINE_ONLY`.
"""

from __future__ import annotations

import inspect
import os
import shlex
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache, partial
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from ckptctl.cli.output import Color
from ckptctl.errors import OptionError, UsageError
from ckptctl.model import Level
from ckptctl.options import (
    LEVEL,
    ContentOptions,
    Parameter,
    PickPolicy,
    Requirements,
    StorageOptions,
)
from ckptctl.redaction import hide
from ckptctl.signatures import PASSWORD, private_key, public_key

COMMAND_LINE_ONLY = frozenset(
    {
        "--accept-drift",
        "--apply",
        "--create",
        "--ignore",
        "--notify",
        "--off",
        "--replace",
        "--reset-budget",
        "--unsealed",
        "--yes",
    }
)
"""Switches that change or remove something, or that consent to it.

They have no variable: an exported variable acts on every later command, also on
those of somebody who does not know that it is set.
"""


def option_names(declared: Parameter) -> list[str]:
    """The names of an option; none of an argument."""
    return [word for word in declared.spec.split() if word.startswith("-")]


def variable_of(declared: Parameter) -> str | None:
    """The environment variable of an option: `--skip` has `CKPTCTL_SKIP`."""
    name = declared.spec.split()[0]
    if name in COMMAND_LINE_ONLY:
        return None
    return declared.variable or "CKPTCTL_" + parameter_name(name).upper()


def parameter_name(option: str) -> str:
    """The parameter that an option sets: `--key-file` sets `key_file`."""
    return option.strip("-").replace("-", "_")


RootsArg = Annotated[
    list[str],
    Parameter(
        "ROOT...",
        "One root, or several roots with steps of the same run; if two hold the same "
        "step, the earlier root is used.",
    ),
]
OptionalRootOpt = Annotated[
    list[str] | None,
    Parameter(
        "--optional-root ROOT",
        "Another root of the same run that may be missing or unavailable, such as a "
        "local disk; may be given several times. It comes after the other roots, or "
        "keeps its place if it is also named among them.",
        common=False,
    ),
]
StepArg = Annotated[
    str,
    Parameter(
        "STEP",
        "PATH of a step, ROOT@1200, ROOT@latest (newest by number) or ROOT@auto (what "
        "pick chooses).",
    ),
]
LevelOpt = Annotated[Level | None, LEVEL]
AllowFreshOpt = Annotated[
    bool,
    Parameter(
        "--allow-fresh",
        "Exit with 0 and print nothing for a new run; for a root that does not exist "
        "only with --create.",
    ),
]
CreateOpt = Annotated[
    bool,
    Parameter(
        "--create",
        "With --allow-fresh: create the root of a new run and its sentinel, which shows "
        "later starts that the storage is mounted.",
    ),
]
OnlyOpt = Annotated[
    str | None, Parameter("--only KIND", "Keep only this kind of train state: model.")
]
MemoryOpt = Annotated[
    int,
    Parameter(
        "--memory SIZE", "How much memory to use at most, whatever the size of the step: 256M, 1G."
    ),
]
JobsOpt = Annotated[
    int | None,
    Parameter("--jobs N", "How many threads read; the default depends on the storage.", min=1),
]
AcceptAsItIsOpt = Annotated[
    bool, Parameter("--accept-unverifiable", "Accept a step that cannot be proven good.")
]
MetricsOpt = Annotated[
    str | None,
    Parameter(
        "--metrics FILE",
        "Also write the figures to FILE for the textfile collector of Prometheus; a file that "
        "does not hold such figures is not overwritten.",
        common=False,
    ),
]
AlarmAfterOpt = Annotated[
    float,
    Parameter(
        "--alarm-after N",
        "Raise an alarm where no newer proven step comes for N save intervals; 0 raises none.",
        min=0,
        common=False,
    ),
]
NotifyOpt = Annotated[
    str | None,
    Parameter(
        "--notify COMMAND",
        "Run COMMAND with the JSON document of what went wrong on standard input; it is split "
        "into words, and no shell runs it.",
        common=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How an answer is shown, which is no part of what was asked: every command has these."""

    json: Annotated[
        bool,
        Parameter("--json", "Write one JSON document to standard output, also on failure."),
    ] = False
    quiet: Annotated[bool, Parameter("--quiet -q", "Print only the result.")] = False
    report: Annotated[
        str | None,
        Parameter(
            "--report FILE",
            "Also write the JSON document to this file, atomically; a file that is not a document "
            "of ckptctl is not overwritten.",
            common=False,
        ),
    ] = None
    color: Annotated[
        Color,
        Parameter(
            "--color", "When to use colour; auto follows NO_COLOR and FORCE_COLOR.", common=False
        ),
    ] = "auto"
    debug: Annotated[
        bool, Parameter("--debug", "Show the traceback of an error.", common=False)
    ] = False


HEADINGS: Mapping[type, str] = {
    PickPolicy: "Choice of the step",
    Requirements: "Requirements on a step",
    ContentOptions: "Comparison of every byte",
    StorageOptions: "Storage",
    AnswerOptions: "Output and help",
}
"""The headings of help for the options of each options object."""


def only(*names: str) -> frozenset[str]:
    """What a command offers of an options object, by parameters.

    Used as `requirements: Annotated[Requirements, only("marks", "pattern")]`.
    """
    return frozenset(names)


SEAL_KEY = "CKPTCTL_SEAL_KEY"
"""The environment variable that holds the key itself: it never stands on a command line."""


def parse_storage_options(given: Sequence[str] | None) -> dict[str, object] | None:
    """`KEY=VALUE` pairs as keyword arguments of an fsspec file system.

    A value that is JSON (`true`, `{"region_name": "eu"}`) is taken as that; a number
    is, too: quote it (`key='"0123"'`) where a string is meant.
    """
    if not given:
        return None
    from ckptctl.formats.bounded_json import NotJson, decode_json

    options: dict[str, object] = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise OptionError(
                "--storage-option",
                "is KEY=VALUE, and one of those given has no such form",
                instead="--storage-option anon=true",
            )
        try:
            options[key] = decode_json(value, max_bytes=_MAX_OPTION)
        except NotJson:
            options[key] = value
    return options


_MAX_OPTION = 1 << 20

# Keys


def seal_key(key_file: str | None) -> bytes | None:
    """The key of seals: what is in the file, or in the environment, or None.

    A line end behind it is not part of it. Raises `UsageError` for a file that cannot
    be read, is too large to be a key, or that others can read or replace.
    """
    if key_file is None:
        key = os.environb.get(SEAL_KEY.encode(), b"")
    else:
        key = _read_key_file(key_file, "openssl rand -hex 32")
    key = key.rstrip(b"\r\n")
    hide(key)
    return key or None


def signing_key(key_file: str | None) -> bytes | None:
    """The private key in a file, without its password; None where there is no file."""
    if key_file is None:
        return None
    data = _read_key_file(key_file, "ssh-keygen -t ed25519")
    return private_key(data, os.environb.get(PASSWORD.encode()) or None, f"the key file {key_file}")


def public_keys(key_files: Sequence[str] | None) -> tuple[bytes, ...] | None:
    """What files with one public key each hold; None where no files are given."""
    if key_files is None:
        return None
    found = []
    for path in key_files:
        data = _read_key_file(path, "ssh-keygen -t ed25519", is_public=True)
        public_key(data, f"the key file {path}")
        found.append(data)
    return tuple(found)


_MAX_KEY_BYTES = 4096


def _read_key_file(path: str, how_to_make: str, *, is_public: bool = False) -> bytes:
    """The content of a file with one key.

    A key that others know proves nothing. Accepted is a file of the caller or of root that only its
    owner can read; a file of root may also be readable by one of the caller's own groups, as the
    secrets are that Kubernetes mounts with an `fsGroup` (0440, behind the links of `..data`). The
    file is opened once, and what is read is what was checked. Raises `UsageError` where it cannot
    be read, is no key by its size, or others can write it, put another one in its place, or read
    it unless it `is_public`.
    """
    try:
        about = os.stat(path)
        if not (stat.S_ISREG(about.st_mode) or stat.S_ISFIFO(about.st_mode)):
            raise UsageError(f"the key file {path} is no regular file")
        # Before it is opened: the pipe of another user would never end.
        _check_key_file(path, about, is_public)
        with open(path, "rb") as file:
            _check_key_file(path, os.fstat(file.fileno()), is_public)
            key = file.read(_MAX_KEY_BYTES + 1)
    except OSError as error:
        raise UsageError(f"the key file {path}: {error.strerror}") from error
    if not key.strip() or len(key) > _MAX_KEY_BYTES:
        raise UsageError(
            f"the key file {path} has {'no key' if not key.strip() else 'more than a key'} in it",
            next_command=how_to_make,
        )
    return key


def _check_key_file(path: str, about: os.stat_result, is_public: bool) -> None:
    found = next(_weaknesses(path, about, is_public), None)
    if found is not None:
        why, what, mode = found
        raise UsageError(
            f"the key file {path} {why}; a key that others know, or can replace, proves nothing",
            next_command=f"chmod {mode} {shlex.quote(what)}" if mode else None,
        )


def _weaknesses(
    path: str, about: os.stat_result, is_public: bool
) -> Iterator[tuple[str, str, str | None]]:
    """Why a key file is refused, what is to be changed, and its mode for `chmod` if that helps."""
    own, mode = (os.geteuid(), 0), stat.S_IMODE(about.st_mode)
    better = "go-w" if is_public else "600"
    if about.st_uid not in own:
        yield f"belongs to the user {about.st_uid}, and neither to you nor to root", path, None
    if mode & 0o022:
        yield f"can be written by others (mode {mode:04o})", path, better
    if mode & 0o007 and not is_public:
        yield f"can be read by others (mode {mode:04o})", path, better
    own_group = about.st_gid in (os.getegid(), *os.getgroups())
    if mode & 0o070 and not (is_public or (about.st_uid == 0 and own_group)):
        yield f"can be read by its group (mode {mode:04o})", path, better
    if stat.S_ISFIFO(about.st_mode):
        return  # such as `<(command)`: it has no name that others could take
    link = os.lstat(path)
    if link.st_uid not in own:
        yield f"is a link of the user {link.st_uid}", path, None
    for folder in {os.path.dirname(os.path.abspath(path)), os.path.dirname(os.path.realpath(path))}:
        above = os.stat(folder)
        if above.st_uid not in own:
            yield f"is in a folder of the user {above.st_uid} ({folder})", folder, None
        by_others = above.st_mode & 0o002
        by_group = above.st_mode & 0o020 and not _is_private_group(above.st_gid)
        # With the sticky bit, only the owner of a file can replace it.
        if (by_others or by_group) and not above.st_mode & stat.S_ISVTX:
            mode = stat.S_IMODE(above.st_mode)
            yield (
                f"is in a folder that others can write ({folder}, mode {mode:04o})",
                folder,
                "go-w",
            )


def _is_private_group(group: int) -> bool:
    """Whether a group has only this user, as distributions create one for each."""
    import grp
    import pwd

    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    is_own = found.gr_name == user.pw_name and user.pw_gid == group
    return is_own and not {*found.gr_mem} - {user.pw_name}


# Values


def parts(given: Sequence[str] | None) -> list[str]:
    """The values of an option that is given with commas or several times."""
    return [word.strip() for text in given or () for word in text.split(",") if word.strip()]


def parse_counts(
    given: Sequence[str] | None, name: str, what: str, instead: str
) -> tuple[int, ...]:
    """The whole numbers in an option, given with commas or several times."""
    words = parts(given)
    for word in words:
        if not (word.isascii() and word.isdigit()) or len(word) > 19:
            raise OptionError(name, f"takes {what}, not {word!r}", instead=f"{name} {instead}")
    return tuple(dict.fromkeys(map(int, words)))


def parse_exit_codes(given: Sequence[str] | None, name: str) -> tuple[int, ...]:
    """The exit codes in an option."""
    what = "exit codes from 0 to 255"
    codes = parse_counts(given, name, what, "1,137")
    if any(code > 255 for code in codes):
        raise OptionError(name, f"takes {what}, not {max(codes)}", instead=f"{name} 1,137")
    return codes


_LONGEST_S = 100 * 365 * 86400.0
"""Waits of Python overflow at 292 years."""
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def parse_duration(text: str | None, name: str) -> float | None:
    """The seconds in an option that is a time: `90`, `120s`, `5m`, `1.5h`, `2d`."""
    if text is None:
        return None
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text[len(number) :].strip()
    if unit in _SECONDS and number.replace(".", "", 1).isdecimal() and number.isascii():
        seconds = float(number) * _SECONDS[unit]
        if seconds <= _LONGEST_S:
            return seconds
        raise OptionError(name, "is longer than 100 years", instead=f"{name} 5m")
    raise OptionError(
        name, f"is a time like 90, 120s, 5m or 1.5h, not {text!r}", instead=f"{name} 5m"
    )


_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(name: str, text: str | None) -> int | None:
    """The bytes in an option: `268435456`, `256M`, `1.5G`, `256MiB`."""
    if text is None:
        return None
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = number[-1:] if number[-1:] in _SIZES else ""
    digits = number.removesuffix(unit).strip()
    if digits.replace(".", "", 1).isdecimal() and digits.isascii():
        n_bytes = float(digits) * _SIZES[unit]
        if n_bytes < 1 << 63:
            return int(n_bytes)
    raise OptionError(name, f"is a size like 256M or 1.5G, not {text!r}", instead=f"{name} 1G")


def only_model(only: str | None) -> bool:
    """Whether all but the model is left out."""
    if only not in (None, "model"):
        raise OptionError("--only", f"{only!r}: there is only model", instead="--only model")
    return only is not None


def _reader(spec: str) -> Callable[[Any], Any] | None:
    """What makes the value of a parameter from its text, or from all of its texts."""
    name, _, metavar = spec.partition(" ")
    match metavar:
        case "TIME":
            return partial(parse_duration, name=name)
        case "SIZE":
            return partial(parse_size, name)
        case "NAME,..." | "PATTERN,..." | "NODE,..." | "KIND,...":
            return parts
        case "N,...":
            return partial(parse_counts, name=name, what="numbers of ranks", instead="64,56,48")
        case "STEP,...":
            return partial(parse_counts, name=name, what="step numbers", instead="1400,1600")
        case "CODE,...":
            return partial(parse_exit_codes, name=name)
        case "KEY=VALUE":
            return parse_storage_options
    return _KEYS.get(name)


_KEYS: Mapping[str, Callable[[Any], Any]] = {
    "--key-file": seal_key,
    "--sign": signing_key,
    "--require-signature": public_keys,
}
"""What reads the file of a key."""


_PATHS = frozenset({"A", "B", "DIR", "DST", "FILE", "LOG", "PATH", "ROOT", "SRC", "STEP", "TARGET"})
"""What help calls a value that is a path or an address."""


class Option(NamedTuple):
    """A parameter of a command; `field` is that of an options object, if it sets one."""

    name: str
    field: str
    kind: Any
    default: Any
    declared: Parameter
    shown: str = ""
    """The default as help shows it, where the value is made of a text."""

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The type, and those of which it is a union."""
        return (self.kind, *get_args(self.kind))

    @property
    def is_list(self) -> bool:
        """Whether it may be given several times."""
        return list[str] in self.kinds

    @property
    def is_switch(self) -> bool:
        """Whether it has no value."""
        return bool in self.kinds

    @property
    def is_path(self) -> bool:
        """Whether a value is a path or an address."""
        metavar = self.declared.spec.split()[-1].removesuffix("...")
        return metavar in _PATHS and (str in self.kinds or self.is_list)

    def value(self, given: Any) -> Any:
        """The value of the field; None where its default holds."""
        read = _reader(self.declared.spec)
        if read is not None:
            return read(given)
        return tuple(given) if self.field and isinstance(given, list) else given


@cache
def options_of(kind: type) -> tuple[Option, ...]:
    """The options that set the fields of an options object, in the order of the fields."""
    hints = get_type_hints(kind, include_extras=True)
    options = []
    for field in fields(kind):
        declared = next(iter(getattr(hints[field.name], "__metadata__", ())), None)
        if declared is not None:
            name = parameter_name(declared.spec.split()[0])
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            options.append(
                typed_option(name, field.name, hints[field.name].__origin__, default, declared)
            )
    return tuple(options)


def typed_option(name: str, field: str, kind: Any, default: Any, declared: Parameter) -> Option:
    """The parameter as typer reads it: what is made of texts later is a text, or a list of them."""
    shown = ""
    is_required = default is inspect.Parameter.empty
    if {get_origin(part) for part in (kind, *get_args(kind))} & {Collection, Mapping, Sequence}:
        kind = list[str] if is_required else list[str] | None
        default = default if is_required else None
    elif _reader(declared.spec) is not None and list[str] not in (kind, *get_args(kind)):
        shown = _shown(default)
        kind, default = str | None, None
    return Option(name, field, kind, default, declared, shown)


def _shown(default: Any) -> str:
    """A time or a size as a caller writes it."""
    if isinstance(default, float):
        minutes, rest = divmod(default, 60)
        return f"{default:g}s" if rest or not minutes else f"{minutes:g}m"
    return f"{default >> 20}M" if isinstance(default, int) else ""


_OF_STEP = only(*(option.name for option in options_of(Requirements))) - {"sign"}

OfOneStep = Annotated[Requirements, _OF_STEP]
"""What `verify` requires of a step."""

OfStep = Annotated[Requirements, _OF_STEP - {"remote_checksums"}]
"""What `pick` and the commands that choose as it does require of a step."""

OfNames = Annotated[Requirements, only("pattern")]
"""What commands take that read records or names alone."""

OfSource = Annotated[Requirements, only("pattern", "grace", "key_file")]
"""What `reshard` and `convert` take of a step that they rewrite."""

"""Settings of a run from a file: `ckptctl.toml`.

The command line comes first, then the environment, then the file. A key is the variable of an
option without `CKPTCTL_`, in small letters; keys of one command stand in a table of its name. A
file that was only found, in the current folder or one above it, may be another's: it is used if
root or this user owns it, and holds none of `ONLY_IF_NAMED` and no address
([decision](../../docs/decisions/options.md)).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, TypeAlias

from ckptctl.cli.options import Option
from ckptctl.errors import OptionError, UsageError
from ckptctl.redaction import is_harmless_option
from ckptctl.storage.shared_places import distrusted, open_named

CONFIGURED = ("scan", "verify", "pick", "loss", "runbook", "preflight", "run", "watch", "prune")
"""The commands that read settings from a file."""

ONLY_IF_NAMED: Mapping[str, tuple[str, ...]] = {
    "a program to start": ("launcher", "exclude_command", "set"),
    "another storage": ("storage_option", "endpoint_url", "follow_links"),
    "a file to write": (
        *("metrics", "plot", "transcript"),
        *("state", "log_dir", "evidence_dir", "hosts_file"),
    ),
}
"""Keys that are read only from a file that a person names, by what they state."""

IN_NO_FILE = frozenset(
    {"print", "detailed_exitcode", "allow_fresh", "verbose", "contract", "accept_drift"}
)
"""Keys that would change what a script reads, or consent to something: no file has them."""

_NAME = "ckptctl.toml"
_MAX_BYTES = 1 << 20
_PLAIN = (str, int, float)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the file at `path` sets for one command: `values` and their `keys` by parameters.

    The keys in `unused` are set for all commands, and this one has no such option.
    """

    path: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


Keys: TypeAlias = "Mapping[str, Option]"
"""The options that a file may set, by their keys."""
NO_FILE = "none"
"""As the name of the file: no settings are read."""


def read_settings(command: str, named: str | None, keys_of: Callable[[str], Keys]) -> Settings:
    """The settings for a command, from the file `named` or from the first one that is found.

    `keys_of` gives the options of a command by their keys; those of other commands are asked for
    only where a key is unknown to this one. Raises `UsageError` for a file
    that cannot be read, is another user's, or holds what it may not hold. Cost: a `stat` in each
    folder above, and one read.
    """
    file = _settings_file(named)
    if file is None:
        return Settings()
    path, document = file
    own = keys_of(command)
    values, keys, unused = {}, {}, []
    for name, value in _settings(command, path, document, keys_of):
        if (key := own.get(name)) is None:
            unused.append(name)
            continue
        if named is None:
            _check_found(path, name, value, key)
        values[key.name] = _value(path, name, value, key)
        keys[key.name] = name
    return Settings(path, values, keys, tuple(unused))


def _settings_file(named: str | None) -> tuple[str, Mapping[str, Any]] | None:
    """The file `named`, or the nearest one in the current folder or above; and its tables."""
    if named == NO_FILE:
        return None
    if named is not None:
        return named, _tables(named, is_named=True)
    folder = os.path.abspath(os.curdir)
    while True:
        path = os.path.join(folder, _NAME)
        if os.path.lexists(path):
            return path, _tables(path, is_named=False)
        above = os.path.dirname(folder)
        if above == folder:
            return None
        folder = above


def _tables(path: str, *, is_named: bool) -> Mapping[str, Any]:
    """The settings in a file; one that was only found may be another user's."""

    def error(problem: str) -> UsageError:
        return OptionError("--config", problem) if is_named else UsageError(problem)

    data, about = read_small(path, _MAX_BYTES, error)
    document: Mapping[str, Any] = parse_toml(path, data, _MAX_BYTES, error)
    why = None if is_named else distrusted(path, about)
    if why is not None:
        raise UsageError(
            f"{why}: its settings are used only if you name it with --config; --config {NO_FILE} "
            "uses none"
        )
    for name in CONFIGURED:
        if not isinstance(document.get(name, {}), dict):
            raise error(f"{path}: {name} is no table")
    return document


def read_small(
    path: str, limit: int, error: Callable[[str], UsageError]
) -> tuple[bytes, os.stat_result]:
    """A file as far as one byte after `limit`, and its owner and mode.

    Raises an `error` with what is wrong, and `PathUntrusted` as `open_named` does.
    """
    try:
        with os.fdopen(open_named(path), "rb") as file:
            return file.read(limit + 1), os.fstat(file.fileno())
    except OSError as cause:
        raise error(f"{path}: {cause.strerror}") from cause


def parse_toml(
    path: str, data: bytes, limit: int, error: Callable[[str], UsageError]
) -> dict[str, Any]:
    """The tables of a file of TOML; raises an `error` for any other, and for a larger one."""
    import tomllib

    if len(data) > limit:
        raise error(f"{path}: the file has more than {limit:,} bytes")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as cause:
        raise error(f"{path} is no TOML: {cause}") from cause


def _settings(
    command: str,
    path: str,
    document: Mapping[str, Any],
    keys_of: Callable[[str], Keys],
) -> Iterator[tuple[str, Any]]:
    """Each key that concerns the command with its value; those of its own table win."""
    own = document.get(command, {})
    tables = {name for name, value in document.items() if isinstance(value, dict)}
    if strange := sorted(tables - set(CONFIGURED)):
        raise _unknown(path, f"[{strange[0]}]", [f"[{name}]" for name in CONFIGURED])
    for key in own:
        if key not in keys_of(command):
            raise _unknown(path, key, keys_of(command), f" in [{command}]")
    for key, value in document.items():
        if key in tables or key in own:
            continue
        if key not in keys_of(command) and not any(key in keys_of(name) for name in CONFIGURED):
            every = {name: None for command in CONFIGURED for name in keys_of(command)}
            raise _unknown(path, key, every)
        yield key, value
    yield from own.items()


def _unknown(
    path: str, key: str, known: Mapping[str, Any] | Sequence[str], where: str = ""
) -> UsageError:
    close = get_close_matches(key, known)
    meant = f"; did you mean {close[0]}?" if close else ""
    shown = key if key.split() == [key] else repr(key)
    return UsageError(f"{path}: there is no setting {shown}{where}{meant}")


def _check_found(path: str, name: str, value: Any, key: Option) -> None:
    values = value if isinstance(value, list) else [value]
    if key.is_path and any("://" in str(item) for item in values):
        what: str | None = "another storage"
    else:
        what = next((what for what, keys in ONLY_IF_NAMED.items() if name in keys), None)
    if what is not None:
        raise UsageError(
            f"{path}: {name} states {what}, and is read only from a file that you name",
            instead=f"--config {path}",
        )


def _value(path: str, name: str, value: Any, key: Option) -> Any:
    """The value of a key as it is typed on the command line, which reads and checks it.

    Paths are those beside the file.
    """
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(item, _PLAIN) for item in values):
        raise UsageError(f"{path}: {name} is no text, number, true or false, and no list of these")
    for item in values:
        if isinstance(item, bool) and not key.is_switch:
            raise UsageError(f"{path}: {name} is {str(item).lower()}, but is no switch")
    texts = [*map(str, values)]
    for pair in texts if name == "storage_option" else ():
        option, _, text = pair.partition("=")
        if not is_harmless_option(option, text):
            raise UsageError(
                f"{path}: the storage option {option} may be a secret, which no file of settings "
                "holds; CKPTCTL_STORAGE_OPTION and the configuration of the client do"
            )
    if key.is_path:
        folder = os.path.dirname(os.path.abspath(path))
        texts = [
            text if "://" in text else os.path.join(folder, os.path.expanduser(text))
            for text in texts
        ]
    if name in ("root", "require_signature") and not texts:
        raise UsageError(f"{path}: {name} is an empty list")
    if key.is_list:
        return texts
    if len(texts) != 1:
        raise UsageError(f"{path}: {name} takes one value")
    return texts[0]

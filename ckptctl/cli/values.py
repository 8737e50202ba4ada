"""Parse the values of options.

Durations, sizes, step numbers, kinds of state, keys. Which options there are is the
question of `options`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckptctl.errors import UsageError
from ckptctl.model import STATE_KINDS
from ckptctl.redaction import hide

SEAL_KEY = "CKPTCTL_SEAL_KEY"
"""The environment variable that holds the key itself: it never stands on a command line."""


def parse_storage_options(given: Sequence[str] | None) -> dict[str, object] | None:
    """`KEY=VALUE` pairs as keyword arguments of an fsspec file system.

    A value that is JSON (`true`, `{"region_name": "eu"}`) is taken as that; a number
    is, too: quote it (`key='"0123"'`) where a string is meant.
    """
    options: dict[str, object] = {}
    for pair in given or ():
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(
                "--storage-option is KEY=VALUE, and one of those given has no such form",
                instead="--storage-option anon=true",
            )
        options[key] = _json_or_text(value)
    return options or None


def _json_or_text(value: str) -> object:
    from ckptctl.formats.bounded_json import NotJson, decode_json

    try:
        return decode_json(value, max_bytes=_MAX_OPTION)
    except NotJson:
        return value


_MAX_OPTION = 1 << 20


def seal_key(key_file: str | None) -> bytes | None:
    """The key of seals: what is in the file, or in the environment, or None.

    A line end behind it is not part of it. Raises `UsageError` for a file that cannot
    be read, is too large to be a key, or that others can read or replace.
    """
    if key_file is None:
        key = os.environb.get(SEAL_KEY.encode(), b"")
    else:
        from ckptctl.cli.key_files import MAX_BYTES, read_key_file

        key = read_key_file(key_file)
        if not key.strip() or len(key) > MAX_BYTES:
            raise UsageError(
                f"the key file {key_file} has {'no key' if not key.strip() else 'more than a key'}"
                " in it",
                next_command="openssl rand -hex 32",
            )
    key = key.rstrip(b"\r\n")
    hide(key)
    return key or None


def parts(given: Sequence[str] | None) -> list[str]:
    """The values of an option that is given with commas or several times."""
    return [word.strip() for each in given or () for word in each.split(",") if word.strip()]


def parse_kinds(given: Sequence[str] | None) -> tuple[str, ...]:
    """The kinds of train state in `--require`, given with commas or several times."""
    kinds = parts(given)
    unknown = [kind for kind in kinds if kind not in STATE_KINDS]
    if unknown:
        raise UsageError(
            f"--require does not know {unknown[0]!r}; the kinds of train state are "
            f"{', '.join(STATE_KINDS)}",
            instead=f"--require {','.join(STATE_KINDS[:2])}",
        )
    return tuple(dict.fromkeys(kinds))


def parse_names(given: Sequence[str] | None) -> tuple[str, ...]:
    """The names in `--allow-globals`, given with commas or several times."""
    return tuple(dict.fromkeys(parts(given)))


def tuple_of(given: Sequence[str] | None) -> tuple[str, ...]:
    """The values of an option that may be given several times."""
    return tuple(given or ())


def parse_counts(
    given: Sequence[str] | None, name: str, what: str, instead: str
) -> tuple[int, ...]:
    """The whole numbers in an option, given with commas or several times."""
    words = parts(given)
    for word in words:
        if not (word.isascii() and word.isdigit()) or len(word) > 19:
            raise UsageError(f"{name} takes {what}, not {word!r}", instead=f"{name} {instead}")
    return tuple(dict.fromkeys(map(int, words)))


def parse_steps(given: Sequence[str] | None) -> tuple[int, ...]:
    """The step numbers in `--skip`."""
    return parse_counts(given, "--skip", "step numbers", "1400,1600")


_LONGEST_S = 100 * 365 * 86400.0
"""Waits of Python overflow at 292 years."""
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def parse_duration(text: str | None, name: str = "--deadline") -> float | None:
    """The seconds in an option that is a time: `90`, `120s`, `5m`, `1.5h`, `2d`."""
    if text is None:
        return None
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text[len(number) :].strip()
    if unit in _SECONDS and number.replace(".", "", 1).isdecimal() and number.isascii():
        seconds = float(number) * _SECONDS[unit]
        if seconds <= _LONGEST_S:
            return seconds
        raise UsageError(f"{name} is longer than 100 years", instead=f"{name} 5m")
    raise UsageError(
        f"{name} is a time like 90, 120s, 5m or 1.5h, not {text!r}", instead=f"{name} 5m"
    )


_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(name: str, text: str) -> int:
    """The bytes in an option: `268435456`, `256M`, `1.5G`, `256MiB`."""
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = number[-1:] if number[-1:] in _SIZES else ""
    digits = number.removesuffix(unit).strip()
    if digits.replace(".", "", 1).isdecimal() and digits.isascii():
        n_bytes = float(digits) * _SIZES[unit]
        if n_bytes < 1 << 63:
            return int(n_bytes)
    raise UsageError(f"--{name} is a size like 256M or 1.5G, not {text!r}", instead=f"--{name} 1G")


def only_model(only: str | None) -> bool:
    """Whether all but the model is left out."""
    if only not in (None, "model"):
        raise UsageError(f"--only {only!r}: there is only model", instead="--only model")
    return only is not None

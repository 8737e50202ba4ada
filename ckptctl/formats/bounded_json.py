"""Decode JSON that somebody else wrote, within bounds.

The one place in the package that parses JSON from outside: `json` itself raises
`RecursionError` for deep nesting, guesses the encoding, keeps the last of two
equal keys, and has no bound on size. Here a document that is too large, nested
too deeply, or not JSON is one error, `NotJson`, which each reader turns into what
a damaged file means to it.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any, Literal, NoReturn

MAX_DEPTH = 64
"""Lists and objects inside each other; documents of frameworks have fewer than 20."""

Numbers = Literal["any", "finite", "integers", "text"]
"""What becomes of numbers: parsed, NaN and infinity too (`any`) or refused (`finite`); refused
where they are no `integers`; or left as they are printed (`text`)."""


class NotJson(ValueError):
    """The text is not JSON, or exceeds a bound.

    `malformed` means that the text breaks the grammar of JSON, `cut_short` that it does so
    at its end; neither is true of a document that only exceeds a bound.
    """

    def __init__(self, message: str, *, malformed: bool = False, cut_short: bool = False) -> None:
        super().__init__(message)
        self.malformed = malformed
        self.cut_short = cut_short


def decode_json(
    data: bytes | str, *, max_bytes: int, numbers: Numbers = "any", unique_keys: bool = False
) -> object:
    """The value of one JSON document, in UTF-8; raises `NotJson`.

    `max_bytes` counts characters of a string. With `unique_keys` an object that has a
    key twice is refused. Cost: one pass over the text, and one over the lists and
    objects in it where there are more than `MAX_DEPTH`.
    """
    if len(data) > max_bytes:
        raise NotJson(f"it is {len(data):,} bytes long, and at most {max_bytes:,} are read")
    try:
        text = data if isinstance(data, str) else data.decode()
    except UnicodeDecodeError as error:
        raise NotJson(str(error)[:200], malformed=True) from error
    text = text.strip(" \t\r\n")
    value, end = decode_first_json(text, numbers=numbers, unique_keys=unique_keys)
    if end < len(text):
        raise NotJson(f"more text follows the document, from character {end}", malformed=True)
    return value


def decode_first_json(
    text: str, *, numbers: Numbers = "any", unique_keys: bool = False
) -> tuple[object, int]:
    """The value that `text` begins with, and where it ends; raises `NotJson`.

    The caller bounds the length of `text`.
    """
    try:
        value, end = _decoder(numbers, unique_keys).raw_decode(text)
    except json.JSONDecodeError as error:
        at_end = error.pos >= len(text)
        raise NotJson(str(error)[:200], malformed=True, cut_short=at_end) from error
    except RecursionError as error:
        raise NotJson(_TOO_DEEP) from error
    except NotJson:
        raise
    except ValueError as error:  # a number with more digits than Python parses
        raise NotJson(str(error)[:200]) from error
    if text.count("[", 0, end) + text.count("{", 0, end) > MAX_DEPTH:
        _check_depth(value)
    return value, end


_TOO_DEEP = f"lists and objects are nested more than {MAX_DEPTH} deep"


@functools.cache
def _decoder(numbers: Numbers, unique_keys: bool) -> json.JSONDecoder:
    parse: dict[Numbers, dict[str, Any]] = {
        "any": {},
        "finite": {"parse_constant": _refuse, "parse_float": _finite},
        "integers": {"parse_constant": _refuse, "parse_float": _refuse},
        "text": {"parse_constant": str, "parse_float": str, "parse_int": str},
    }
    hook = _unique if unique_keys else None
    return json.JSONDecoder(object_pairs_hook=hook, **parse[numbers])


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise NotJson("a key is there twice")
    return value


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)  # 1e999


def _refuse(number: str) -> NoReturn:
    raise NotJson(f"{number[:40]} is not a number that is allowed here")


def _check_depth(value: object) -> None:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, (dict, list))
        ]
    if level:
        raise NotJson(_TOO_DEEP)

"""Write the rules of `classify` as the package reads them.

    python tools/failure_rules.py            # ckptctl/failures/rules/*.toml -> rules.json
    python tools/failure_rules.py --check    # exit 1 where rules.json is not up to date

Rules are edited in TOML, where patterns need no escapes and a comment can stand beside
them. The package ships JSON, which is read much faster. `<<NAME>>` in a pattern stands for
an entry of `[fragments]`; an entry with a table `numbers` becomes one rule for each number.

`*` and `+` repeat at most 300 times in the JSON. An unlimited `.*` between two texts takes
quadratic time on a line that repeats the first text and lacks the second. Case is ignored: an
alternative in two cases doubles the time of a search, and is an error.

The literals of a rule are derived from its patterns: every match of a pattern contains one of
them. A line without any is not tried.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from re import _constants as sre
from re import _parser as parser
from typing import Any

_MAX_REPEAT = 300
# A pattern in pieces: an escape, a class of characters, or one character.
_PIECES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_BOTH_CASES = re.compile(
    r"\[([a-z])\1\]|(?<=[(:|])([\w ]+)\|(?:[^()]*\|)?\2(?=[|)])", re.IGNORECASE
)

PACKAGE = Path(__file__).resolve().parent.parent / "ckptctl" / "failures"
GENERATED = PACKAGE / "rules.json"
ORDER = (
    "own_errors",
    "xids",
    "kernel",
    "accelerators",
    "ray",
    "memory",
    "slurm",
    "schedulers",
    "kubernetes",
    "storage_errors",
    "checkpoints",
    "divergence",
    "cuda",
    "collectives",
    "stops",
    "frameworks",
    "errno",
    "programs",
)
"""The first rule that matches a line decides about it, so the order of the files counts."""


def rules() -> Iterator[dict[str, Any]]:
    """Every rule, in the order in which they are tried."""
    for name in ORDER:
        with (PACKAGE / "rules" / f"{name}.toml").open("rb") as file:
            table = tomllib.load(file)
        for entry in table["rule"]:
            rule = {**table.get("defaults", {}), **entry}
            numbers = rule.pop("numbers", {"": ""})
            for number, what in numbers.items():
                marks = {"{number}": number, "{what}": what}
                marks |= {f"<<{key}>>": text for key, text in table.get("fragments", {}).items()}
                filled = {key: _filled(value, marks) for key, value in rule.items()}
                patterns = [*map(_bounded, filled["patterns"])]
                found = [] if filled.get("ending") else literals(patterns)
                yield {**filled, "patterns": patterns, "literals": found}


def _bounded(pattern: str) -> str:
    if both := _BOTH_CASES.search(pattern):
        raise SystemExit(f"{both[0]!r} in {pattern!r} repeats a text in another case")
    limits = {"*": f"{{0,{_MAX_REPEAT}}}", "+": f"{{1,{_MAX_REPEAT}}}"}
    return "".join(limits.get(piece, piece) for piece in _PIECES.findall(pattern))


def _filled(value: Any, marks: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [_filled(each, marks) for each in value]
    if isinstance(value, str):
        for mark, text in marks.items():
            value = value.replace(mark, text)
    return value


_MAX_TEXTS = 32
_FREQUENT = {
    *("loss", "step", "steps", "iter", "iteration", "iterations", "epoch", "rank", "time", "node"),
    *("info", "error", "errors", "train", "training", "checkpoint", "memory", "grad norm"),
}
"""Words of healthy logs: a poor choice where a pattern has other text."""

_Texts = set[str] | None


def literals(patterns: Iterable[str]) -> list[str]:
    """Texts in lower case, of which every match of one of the patterns contains one."""
    found: set[str] = set()
    for pattern in patterns:
        _, required = _texts_of(parser.parse(pattern, re.IGNORECASE))
        if not required or not all(required):
            raise SystemExit(f"no text is in every match of {pattern!r}")
        found |= required
    return sorted(text for text in found if not any(o in text for o in found - {text}))


def _texts_of(parsed: Any) -> tuple[_Texts, _Texts]:
    """All texts that a parsed pattern matches, if they are few, and those that it requires."""
    candidates: list[set[str]] = []
    run, exact = {""}, True
    for operation, argument in parsed:
        whole, required = _texts_of_one(operation, argument)
        if whole is not None and len(run) * len(whole) <= _MAX_TEXTS:
            run = {before + after for before in run for after in whole}
            continue
        candidates += [run, required or {""}]
        run, exact = whole or {""}, False
    candidates.append(run)
    best = max(candidates, key=lambda texts: (min(map(_rarity, texts)), -len(texts)))
    return (run if exact else None), best


def _texts_of_one(operation: Any, argument: Any) -> tuple[_Texts, _Texts]:
    if operation is sre.LITERAL:
        # A JSON line has its quotes and backslashes escaped.
        return (None, None) if chr(argument) in '"\\\t' else ({chr(argument).lower()}, None)
    if operation is sre.IN and all(kind is sre.LITERAL for kind, _ in argument):
        each = [_texts_of_one(*one)[0] for one in argument]
        return (None, None) if None in each else (set(chain(*filter(None, each))), None)
    if operation is sre.SUBPATTERN:
        return _texts_of(argument[-1])
    if operation is sre.BRANCH:
        each = [_texts_of(branch) for branch in argument[1]]
        whole = (
            None
            if any(texts is None for texts, _ in each)
            else {*chain(*(t or () for t, _ in each))}
        )
        return whole, {*chain(*(required or ("",) for _, required in each))}
    if operation in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        least, most, repeated = argument
        whole, required = _texts_of(repeated)
        if (least, most) == (0, 1) and whole is not None:
            return whole | {""}, None
        return (whole if (least, most) == (1, 1) else None), (required if least else None)
    zero_width = operation in (sre.AT, sre.ASSERT, sre.ASSERT_NOT)
    return ({""}, None) if zero_width else (None, None)


def _rarity(text: str) -> float:
    if text.strip(" :=,") in _FREQUENT:
        return 1
    return sum(map(str.isalpha, text)) + sum(map(str.isdigit, text)) / 2


def main() -> int:
    """Write or check."""
    text = "[\n" + ",\n".join(json.dumps(rule, ensure_ascii=False) for rule in rules()) + "\n]\n"
    if "--check" in sys.argv[1:]:
        if GENERATED.read_text(encoding="utf-8") == text:
            return 0
        print("rules.json is not up to date; run: python tools/failure_rules.py", file=sys.stderr)
        return 1
    GENERATED.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

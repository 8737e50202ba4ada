"""Write the rules of `classify` as the package reads them.

    python tools/failure_rules.py            # ckptctl/failures/rules/*.toml -> rules.json
    python tools/failure_rules.py --check    # exit 1 where rules.json is not up to date

Rules are edited in TOML, where patterns need no escapes and a comment can stand beside
them. The package ships JSON: Python 3.10 reads no TOML. `<<NAME>>` in a pattern stands for
an entry of `[fragments]`; an entry with a table `numbers` becomes one rule for each number.

`*` and `+` repeat at most 300 times in the JSON. An unlimited `.*` between two texts takes
quadratic time on a line that repeats the first text and lacks the second.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MAX_REPEAT = 300
# A pattern in pieces: an escape, a class of characters, or one character.
_PIECES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)

PACKAGE = Path(__file__).resolve().parent.parent / "ckptctl" / "failures"
GENERATED = PACKAGE / "rules.json"
ORDER = (
    "own_errors",
    "xids",
    "kernel",
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
                yield {**filled, "patterns": [*map(_bounded, filled["patterns"])]}


def _bounded(pattern: str) -> str:
    limits = {"*": f"{{0,{_MAX_REPEAT}}}", "+": f"{{1,{_MAX_REPEAT}}}"}
    return "".join(limits.get(piece, piece) for piece in _PIECES.findall(pattern))


def _filled(value: Any, marks: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [_filled(each, marks) for each in value]
    if isinstance(value, str):
        for mark, text in marks.items():
            value = value.replace(mark, text)
    return value


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

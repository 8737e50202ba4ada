"""Write the tables of names that frameworks use as the package reads them.

    python tools/framework_tables.py            # formats/frameworks/tables/*.toml -> tables.json
    python tools/framework_tables.py --check    # exit 1 where tables.json is not up to date

The tables are edited in TOML, where patterns need no escapes and a comment can stand beside them.
The package ships JSON, which is read much faster. `<<NAME>>` in a text stands for an entry of
`[fragments]`, of its own file before those of others. Line breaks in a text, and the spaces behind
them, are left out.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent / "ckptctl" / "formats" / "frameworks"
GENERATED = PACKAGE / "tables.json"


def tables() -> dict[str, Any]:
    """All tables, with the fragments filled in."""
    found: dict[str, Any] = {}
    fragments: dict[str, str] = {}
    for name in ("files", "layouts", "words"):
        document = tomllib.loads((PACKAGE / "tables" / f"{name}.toml").read_text("utf-8"))
        own: dict[str, str] = {}
        for key, text in document.get("fragments", {}).items():
            own[key] = _filled(text, {**fragments, **own})
        fragments |= own
        found |= _filled(document["tables"], fragments)
    return found


def _filled(value: Any, fragments: dict[str, str]) -> Any:
    if isinstance(value, str):
        text = re.sub(r"(?:\A|\n) +", "", value)
        return re.sub("<<([a-z_]+)>>", lambda match: fragments[match[1]], text)
    if isinstance(value, dict):
        return {key: _filled(each, fragments) for key, each in value.items()}
    return [_filled(each, fragments) for each in value]


def main() -> int:
    """Write or check."""
    text = json.dumps(tables(), ensure_ascii=False, indent=1) + "\n"
    if "--check" not in sys.argv[1:]:
        GENERATED.write_text(text, "utf-8")
    elif GENERATED.read_text("utf-8") != text:
        print("tables.json is old; run: python tools/framework_tables.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

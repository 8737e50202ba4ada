"""Write what the live tests of the frameworks have shown, as `docs/compatibility.md`.

    python tools/compatibility.py

`tests/integrations` appends to `.cache/compatibility.jsonl`; of each fact the last counts. An
empty cell was not tried with that version.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
RECORD = REPOSITORY / ".cache" / "compatibility.jsonl"
PAGE = REPOSITORY / "docs" / "compatibility.md"
COLUMNS = {
    "stopped": "saves interrupted; each complete step loads",
    "damaged": "files damaged; each is detected or harmless",
    "ranks": "ranks; the missing file of each is detected",
    "sealed": "saves sealed",
    "passed_over": "damaged step passed over",
    "right": "verdict of a correct resume: console",
    "log": "its `train.jsonl`",
    "wrong": "of a wrong resume: console",
}
INTRODUCTION = (
    "# Compatibility\n\n"
    "Results of `tests/integrations` with real frameworks, on two ranks or more. "
    "`make compatibility` writes this page from the last runs. An empty cell was not tried with "
    "that version; a dash means that the test does not apply. *DCP*: the steps are DCP "
    "checkpoints; the [campaign](reliability.md) interrupts their saves and damages their files "
    "without the framework. [Frameworks](frameworks/README.md) describes each framework, "
    "[rank files](rank-files.md) the layouts.\n\n"
)


def page() -> str:
    """The page, of all facts that were recorded."""
    rows: dict[tuple[str, str, str], dict[str, object]] = defaultdict(dict)
    for line in RECORD.read_text().splitlines() if RECORD.exists() else ():
        facts = json.loads(line)
        name = ", ".join(filter(None, (facts["framework"], facts["variant"])))
        rows[name, facts["version"], facts["torch"]] |= facts
    table = [
        ["framework", "version", "torch", *COLUMNS.values()],
        ["---"] * (3 + len(COLUMNS)),
    ]
    for key, facts in sorted(rows.items()):
        cells = ["yes" if facts.get(name) is True else str(facts.get(name, "")) for name in COLUMNS]
        table.append([*key, *cells])
    return INTRODUCTION + "".join(f"| {' | '.join(row)} |\n" for row in table)


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

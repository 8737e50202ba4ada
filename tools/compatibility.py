"""Print what the live tests of the frameworks have shown, as a table in Markdown.

    python tools/compatibility.py

`tests/integrations` appends to `.cache/compatibility.jsonl`; of each fact the last counts. An
empty cell was not tried with that version.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

RECORD = Path(__file__).resolve().parent.parent / ".cache" / "compatibility.jsonl"
COLUMNS = {
    "stopped": "moments in saves; what is complete loads",
    "damaged": "damaged files found, or harmless",
    "sealed": "saves sealed",
    "passed_over": "damaged step passed over",
    "right": "loss of a right resume",
    "wrong": "loss of a wrong one",
}


def main() -> int:
    rows: dict[tuple[str, str, str], dict[str, object]] = defaultdict(dict)
    for line in RECORD.read_text().splitlines() if RECORD.exists() else ():
        facts = json.loads(line)
        rows[facts["framework"], facts["version"], facts["torch"]] |= facts
    print("| framework | version | torch |", *(f"{title} |" for title in COLUMNS.values()))
    print("|---|---|---|" + "---|" * len(COLUMNS))
    for key, facts in sorted(rows.items()):
        cells = ["yes" if facts.get(name) is True else facts.get(name, "") for name in COLUMNS]
        print("|", *(f"{cell} |" for cell in (*key, *cells)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

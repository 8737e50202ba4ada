"""Record which files of an unfinished step are written, and what they verify.

There is one small JSON file for each shard file, written when that is complete and
durable. A later call with the same plan continues from there; another plan has another
work folder. Nothing else reads these files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ckptctl.errors import PathNotFound
from ckptctl.formats.bounded_json import read_json
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.resharding.reading import Piece
from ckptctl.storage.contract import Store

SCHEMA = "ckptctl.reshard-journal/1"
MAX_BYTES = 64 << 20


def work_folder(identity: str) -> str:
    """The work folder of a plan, below the root that holds the new step."""
    return f"{OWN_FOLDER}/resharding/{identity}"


def note(
    store: Store, identity: str, name: str, path: str, size: int, proof: Sequence[Piece]
) -> None:
    """Record that a file of the new step `name` is written, and the runs that went into it."""
    document = {"schema": SCHEMA, "path": path, "size": size, "proof": [list(p) for p in proof]}
    data = json.dumps(document, separators=(",", ":")).encode()
    store.put(entry_path(identity, name, path), data, replace=True)


def noted(store: Store, identity: str, name: str, path: str, size: int) -> list[Piece] | None:
    """The runs that went into a written file; None if it is not recorded."""
    try:
        document = read_json(store, entry_path(identity, name, path), max_bytes=MAX_BYTES)
        if not isinstance(document, dict):
            return None
        if (document["schema"], document["path"], document["size"]) != (SCHEMA, path, size):
            return None
        return [
            Piece(str(f), int(s), int(a), int(n), int(c)) for f, s, a, n, c in document["proof"]
        ]
    except (PathNotFound, ValueError, TypeError, KeyError):
        return None


def entry_path(identity: str, name: str, path: str) -> str:
    """The path of the journal entry for a file of the new step `name`."""
    return f"{work_folder(identity)}/{name}.written/{path.replace('/', '+')}.json"

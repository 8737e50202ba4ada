"""Import to do what ckptctl does at the first use of a pattern, class or function.

Python runs a function slowly until it has run a few times. A third of the processor time of a
forked command would go into that: this is done once, before forking.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from ckptctl.cli.app import run
from ckptctl.formats.frameworks import state_keys
from ckptctl.formats.frameworks.layout_tables import TABLES


def _texts(value: object) -> Iterator[str]:
    """All texts in a table."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts((*value, *value.values()))
    elif isinstance(value, tuple | frozenset):
        for each in value:
            yield from _texts(each)


_TABLES = [getattr(TABLES, field) for field in TABLES.__struct_fields__]
for _pattern in {*_texts((*_TABLES, TABLES.words.rank)), *(row.name for row in TABLES.files)}:
    re.compile(_pattern)
state_keys.kinds_of([state_keys.Leaf(("an entry",))])


_REPOSITORY = Path(__file__).resolve().parent.parent
_LOG = str(_REPOSITORY / "tests/failures/logs/job-divergence--nan/job.txt")
_ROOT = f"{os.environ['CKPTCTL_TEST_CHECKPOINTS']}/run_fsdp4"
_STEP = f"{_ROOT}/step_400"
_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("scan", _ROOT),
    ("pick", _ROOT),
    ("pick", _ROOT, "--json"),
    ("preflight", _ROOT),
    ("verify", _STEP),
    ("verify", _STEP, "--level", "content"),
    ("show", _STEP),
    ("classify", _LOG),
    ("loss", _LOG, "--resume-step", "5"),
    ("runbook", "show", "nccl-hang"),
)
with open(os.devnull, "w") as _nowhere, redirect_stdout(_nowhere), redirect_stderr(_nowhere):
    for _words in _COMMANDS * 2:
        run(_words)

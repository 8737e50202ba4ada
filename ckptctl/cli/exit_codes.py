"""What exit codes and verdicts mean, and what to do, as `explanations.toml` has it.

The help texts, `ckptctl explain NUMBER` and the documents are generated from these
tables or compared with them. Codes are added and never change.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple


class ExitCode(NamedTuple):
    """`title` is the code in a few words; `advice` is what a caller does next.

    `retry` begins with `yes` if the same command may succeed later, else with `no` or
    `not needed`; what helps may follow.
    """

    title: str
    advice: str
    retry: str = "no"


def _tables() -> dict[str, Any]:
    return tomllib.loads((resources.files("ckptctl.cli") / "explanations.toml").read_text("utf-8"))


_TABLES = _tables()
EXIT_CODES: Mapping[int, ExitCode] = {
    int(number): ExitCode(**texts) for number, texts in _TABLES["exit-codes"].items()
}
VERDICTS: Mapping[str, str] = _TABLES["verdicts"]
LOSS_VERDICTS: Mapping[str, str] = _TABLES["loss-verdicts"]

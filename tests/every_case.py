"""Many cases in one test: each is tried, and all that fail are reported at once.

A test of its own for each row of a table costs more than to check the row: pytest collects it in
every worker, and xdist sends three reports of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest


@contextmanager
def all_cases() -> Iterator[Callable[[object], AbstractContextManager[None]]]:
    """Give `case`: `with case(NAME)` around each; at the end the test fails where one failed."""
    failed: list[str] = []

    @contextmanager
    def case(name: object) -> Iterator[None]:
        try:
            yield
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - shown at the end
            failed.append(f"{name}:\n{pytest.ExceptionInfo.from_current().getrepr()}")

    yield case
    if failed:
        pytest.fail("\n\n".join(failed), pytrace=False)

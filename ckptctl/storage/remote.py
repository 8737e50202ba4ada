"""Which client talks to the storage behind a URL?"""

from __future__ import annotations

from collections.abc import Mapping

from ckptctl.errors import UsageError
from ckptctl.storage.contract import Store


def open_remote(
    url: str, options: Mapping[str, object], *, timeout_s: float, retries: int
) -> Store:
    """The store for a URL that is not a folder of this machine."""
    raise UsageError(
        f"{url}: no store for such an address ({len(options)} options, {timeout_s}, {retries})"
    )

"""Arguments of `dcp.save` and `dcp.load` for a single process.

By `no_dist`, which torch takes from 2.7 on. Before that it finds out by itself that
there is no process group, and one of a single rank does no harm.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable


def alone_arguments(call: Callable[..., object], *, alone: bool) -> dict[str, bool]:
    """The arguments for `call`, torch's own `save` or `load`."""
    return {"no_dist": alone} if "no_dist" in inspect.signature(call).parameters else {}

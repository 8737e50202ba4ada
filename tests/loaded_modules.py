"""Import what commands import when they are called, before a test watches what they cause.

An import runs code, which the watchers report, and takes memory, which others limit.
"""

from __future__ import annotations

import importlib
import pkgutil
from contextlib import suppress


def load_all_modules() -> None:
    """Import the modules of the packages that read checkpoints."""
    for name in ("formats", "inspection", "records", "selection", "storage", "cli"):
        package = importlib.import_module(f"ckptctl.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            with suppress(ModuleNotFoundError):  # of an extra: no command can import it either
                importlib.import_module(module.name)
    for name in ("zstandard", "zlib_ng.zlib_ng", "xxhash", "json", "difflib"):
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)

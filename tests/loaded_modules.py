"""Import what commands import when they are called, before a test watches what they cause.

An import runs code, which the watchers report, and takes memory, which others limit.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from contextlib import suppress

import msgspec


def load_all_modules() -> None:
    """Import the modules of the packages that read checkpoints."""
    for name in ("formats", "inspection", "records", "selection", "storage", "cli"):
        package = importlib.import_module(f"ckptctl.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            with suppress(ModuleNotFoundError):  # of an extra: no command can import it either
                importlib.import_module(module.name)
    read_a_document_of_each_class()
    for name in ("zstandard", "zlib_ng.zlib_ng", "xxhash", "json", "difflib"):
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)


def read_a_document_of_each_class() -> None:
    """msgspec evaluates the annotations of a class when it reads the first document of it."""
    package = importlib.import_module("ckptctl.formats.own")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for kind in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(kind) and kind.__module__ == module.name:
                with suppress(msgspec.ValidationError, TypeError, NameError):
                    msgspec.convert({}, kind)
    from ckptctl.formats.frameworks.ray_train import _Snapshot

    with suppress(msgspec.ValidationError):
        msgspec.convert({}, _Snapshot)

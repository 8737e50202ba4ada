"""The error classes of the package."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import ckptctl
from ckptctl.errors import CkptctlError


def every_error(error: type[CkptctlError] = CkptctlError) -> Iterator[type[CkptctlError]]:
    """`error` and every class below it, in whichever module of the package it stands."""
    for module in pkgutil.walk_packages(ckptctl.__path__, "ckptctl."):
        try:
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        except ModuleNotFoundError:  # an adapter's framework, which need not be installed
            if not module.name.startswith("ckptctl.integrations."):
                raise
    return _below(error)


def _below(error: type[CkptctlError]) -> Iterator[type[CkptctlError]]:
    if error.__module__.startswith("ckptctl."):
        yield error
    for kind in error.__subclasses__():
        yield from _below(kind)

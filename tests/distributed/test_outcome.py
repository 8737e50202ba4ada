"""An error of one rank arrives on another as it was raised, whatever its class."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
from collections.abc import Iterator

import pytest

import ckptctl
from ckptctl.distributed.process_group import Outcome
from ckptctl.errors import CkptctlError

pytestmark = pytest.mark.torch


def classes(of: type[CkptctlError]) -> Iterator[type[CkptctlError]]:
    """Every error class of the package below `of`."""
    for kind in of.__subclasses__():
        if kind.__module__.startswith("ckptctl."):
            yield kind
            yield from classes(kind)


def test_an_error_of_any_class_is_raised_again_with_its_fields() -> None:
    for module in pkgutil.walk_packages(ckptctl.__path__, "ckptctl."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    kinds = set(classes(CkptctlError))
    assert len(kinds) > 40
    for kind in kinds:
        fields = {"next_command": "ckptctl explain 1", "extra": 7, "message": "full"}
        sent = pickle.dumps(Outcome(error=(kind, "full", fields)))
        with pytest.raises(kind) as caught:
            pickle.loads(sent).get("rank 3 on a: ")
        assert type(caught.value) is kind
        assert caught.value.message == "rank 3 on a: full"
        assert vars(caught.value)["extra"] == 7
        assert caught.value.next_command == "ckptctl explain 1"

"""Read each data file of botocore once for all clients of a process and of those forked from it.

A client of S3 costs 100 ms of processor time. 90 of them go into what is the same for each client:
JSON, the services that botocore knows, and signatures of its functions. Importing this module keeps
what botocore's own loader returns, and loads what S3 needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import botocore.hooks
import botocore.session
from botocore.loaders import JSONFileLoader, Loader

_load_file = JSONFileLoader.load_file
_list_services = Loader.list_available_services
_accepts_kwargs = botocore.hooks.accepts_kwargs
_services: dict[tuple[str, ...], list[str]] = {}


@cache
def _loaded(path: str) -> Any:
    return _load_file(JSONFileLoader(), path)


def _listed(loader: Loader, type_name: str) -> list[str]:
    key = (type_name, *loader.search_paths)
    if key not in _services:
        _services[key] = _list_services(loader, type_name)
    return _services[key]


def _takes_kwargs(function: Callable[..., object]) -> object:
    code = getattr(function, "__code__", None)
    return code.co_flags & inspect.CO_VARKEYWORDS if code else _accepts_kwargs(function)


JSONFileLoader.load_file = lambda _, path: _loaded(path)
Loader.list_available_services = _listed
botocore.hooks.accepts_kwargs = _takes_kwargs
botocore.session.get_session().create_client(
    "s3", aws_access_key_id="none", aws_secret_access_key="none", region_name="us-east-1"
)

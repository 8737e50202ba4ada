"""Do once what each client of S3 does again, for all of a process and of those forked from it.

A client of s3fs and its first answer cost 130 ms of processor time. 120 of them go into what is the
same for all: JSON, the certificates of a TLS context, rules for endpoints, names of events.
Importing this module keeps what functions of botocore and aiobotocore return, and makes one client.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import botocore.endpoint_provider
import botocore.hooks
import botocore.parsers
import botocore.session
import botocore.utils
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from botocore.hooks import EVENT_ALIASES, EventAliaser
from botocore.loaders import JSONFileLoader, Loader

_load_file = JSONFileLoader.load_file
_list_services = Loader.list_available_services
_accepts_kwargs = botocore.hooks.accepts_kwargs
_alias = EventAliaser._alias_event_name
_contexts = AIOHTTPSession._build_ssl_contexts
_RuleSet = botocore.endpoint_provider.RuleSet
_kept: dict[object, Any] = {}


@cache
def _loaded(path: str) -> Any:
    return _load_file(JSONFileLoader(), path)


def _listed(loader: Loader, type_name: str) -> list[str]:
    key = (type_name, *loader.search_paths)
    if key not in _kept:
        _kept[key] = _list_services(loader, type_name)
    return _kept[key]


def _takes_kwargs(function: Callable[..., object]) -> object:
    code = getattr(function, "__code__", None)
    return code.co_flags & inspect.CO_VARKEYWORDS if code else _accepts_kwargs(function)


@cache
def _aliased(name: str) -> str:
    return _alias(EventAliaser(None, EVENT_ALIASES), name)


def _tls(session: AIOHTTPSession, proxy_url: str | None) -> Any:
    key = (session._verify, session._cert_file, session._key_file, proxy_url)
    if key not in _kept:
        _kept[key] = _contexts(session, proxy_url)
    return _kept[key]


def _rule_set(*, rules: list[Any], **more: Any) -> Any:
    # `_loaded` keeps the rules, so that no others get their number.
    if id(rules) not in _kept:
        _kept[id(rules)] = _RuleSet(rules=rules, **more)
    return _kept[id(rules)]


JSONFileLoader.load_file = lambda _, path: _loaded(path)
Loader.list_available_services = _listed
AIOHTTPSession._build_ssl_contexts = _tls
EventAliaser._alias_event_name = lambda _, name: _aliased(name)
botocore.hooks.accepts_kwargs = _takes_kwargs
botocore.endpoint_provider.RuleSet = _rule_set
botocore.utils.parse_timestamp = lru_cache(botocore.utils.parse_timestamp)
botocore.parsers.DEFAULT_TIMESTAMP_PARSER = botocore.utils.parse_timestamp


async def _make_one() -> None:
    keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none"}
    async with AioSession().create_client("s3", region_name="us-east-1", **keys) as client:
        client._endpoint.http_session._build_ssl_contexts(None)


asyncio.run(_make_one())

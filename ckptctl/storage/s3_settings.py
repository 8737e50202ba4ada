"""Check what is set for S3 before a client sees it.

The clients read the same settings and fail on bad ones in ways of their own, a panic
among them, or take them for something else. Here each is a `UsageError` that names the
setting, and never shows a secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from ckptctl.errors import UsageError

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""The variables that name an endpoint; the first that is set counts."""

_SECRETS = {
    "key": "AWS_ACCESS_KEY_ID",
    "secret": "AWS_SECRET_ACCESS_KEY",
    "token": "AWS_SESSION_TOKEN",
    "access_key_id": "",
    "secret_access_key": "",
    "session_token": "",
}
"""Options of the two clients for credentials, each with the variable that says the same."""

_REGIONS = {"region": "AWS_REGION", "region_name": "AWS_DEFAULT_REGION"}
_REGION = re.compile(r"[A-Za-z0-9_-]{1,63}")
_PRINTABLE = re.compile(r"[\x21-\x7e]+")
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_IPV6 = re.compile(r"\[[0-9A-Fa-f:.]+\](:[0-9]*)?")  # obstore knows no zones
_FLAGS = {"true": True, "false": False}


def checked_settings(options: Mapping[str, object]) -> dict[str, object]:
    """The options without those that are None, and `anon` as a truth value.

    Raises `UsageError` for an endpoint that is no URL, and for credentials, regions and
    nested options that no client can mean, be they options or variables.
    """
    given = {name: value for name, value in options.items() if value is not None}
    nested = given.get("client_kwargs", {})
    for name in ("client_kwargs", "config_kwargs"):
        if not isinstance(given.get(name, {}), Mapping):
            raise UsageError(
                f"--storage-option {name} is {given[name]!r}; a JSON object is expected, such as "
                """client_kwargs='{"region_name": "eu-west-1"}'"""
            )
    for source, value in _named(given, nested if isinstance(nested, Mapping) else {}, _SECRETS):
        _check_secret(source, value)
    for source, value in _named(given, nested if isinstance(nested, Mapping) else {}, _REGIONS):
        if not isinstance(value, str) or not _REGION.fullmatch(value):
            raise UsageError(f"{source} is {value!r}, which is no name of a region (us-east-1)")
    source, endpoint = endpoint_of(given)
    if endpoint:
        check_endpoint(endpoint, source)
    if "anon" in given:
        flag = _FLAGS.get(str(given["anon"]).lower())
        if flag is None:
            raise UsageError(
                f"--storage-option anon is {given['anon']!r}; true or false is expected"
            )
        given["anon"] = flag
    return given


def endpoint_of(options: Mapping[str, object]) -> tuple[str, str]:
    """Where the endpoint was set, and what it is; two empty texts where it was not."""
    nested = options.get("client_kwargs")
    places = (
        *((f"the endpoint ({name})", options.get(name)) for name in ("endpoint_url", "endpoint")),
        (
            "client_kwargs' endpoint_url",
            nested.get("endpoint_url") if isinstance(nested, Mapping) else None,
        ),
        *((name, os.environ.get(name)) for name in ENDPOINTS),
    )
    return next(((source, str(value)) for source, value in places if value), ("", ""))


def check_endpoint(endpoint: str, source: str) -> None:
    """Raise `UsageError` where the endpoint is not the URL of a host, with or without a path."""
    expected = "http://HOST:PORT or https://HOST is expected"
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname or "", parts.port
    except ValueError as exc:
        raise UsageError(f"{source} is {endpoint!r} ({exc}); {expected}") from exc
    if parts.username is not None or parts.password is not None:
        raise UsageError(f"{source} has a user name in it; credentials are set by themselves")
    sound = _IPV6.fullmatch(parts.netloc) or _HOST.fullmatch(host)
    if (
        parts.scheme not in ("http", "https")
        or not endpoint.startswith(f"{parts.scheme}://")
        or not sound
        or port == 0
        or parts.query
        or parts.fragment
        or not _PRINTABLE.fullmatch(endpoint)
    ):
        raise UsageError(f"{source} is {endpoint!r}; {expected}")


def _named(
    options: Mapping[str, object], nested: Mapping[str, object], names: Mapping[str, str]
) -> Iterator[tuple[str, object]]:
    """Each setting of these names, with the place that it was set in."""
    for name, variable in names.items():
        if name in options:
            yield f"--storage-option {name}", options[name]
        if name in nested:
            yield f"client_kwargs' {name}", nested[name]
        if os.environ.get(variable):  # set and empty is not set, to both clients
            yield variable, os.environ[variable]


def _check_secret(source: str, value: object) -> None:
    if not isinstance(value, str):
        raise UsageError(
            f"{source} is read as {type(value).__name__}, and a text is expected; a value of "
            "digits is quoted twice: --storage-option key='\"0123\"'"
        )
    if not _PRINTABLE.fullmatch(value):
        raise UsageError(
            f"{source} is empty or has white space or a control character in it, as a file with "
            "Windows line ends leaves there; it is not shown"
        )

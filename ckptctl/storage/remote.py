"""Choose the client for a URL.

The scheme of the URL, the installed packages and the option `client` decide. The docstring
of each client states its limits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec

from ckptctl.errors import MissingExtra, UsageError
from ckptctl.storage.contract import Store
from ckptctl.storage.objects import Client, ObjectStore
from ckptctl.storage.s3 import checked_settings
from ckptctl.storage.waiting import Retries

_S3 = frozenset({"s3", "s3a"})
_BUCKET = re.compile(r"[A-Za-z0-9._\-]{1,255}")
_S3_CLIENTS = {"s3fs": "s3", "obstore": "obstore"}
"""The clients for S3 in order of preference, each with the extra that brings it."""


def open_remote(
    url: str, options: Mapping[str, object], *, timeout_s: float, retries: Retries
) -> Store:
    """The store for a URL that is not a local folder.

    The option `client` chooses between s3fs and obstore. Without it, s3fs is used if
    installed: the two find credentials in different places, and installing a package must
    not change which credentials are used.

    Raises `MissingExtra` and `UsageError`, see `open_store`.
    """
    protocol, _, path = url.partition("://")
    protocol = protocol.lower()
    others = {name: value for name, value in options.items() if name != "client"}
    if protocol in _S3:
        client = _s3_client(url, path, options.get("client"), others, timeout_s)
    else:
        client = _fsspec_client(protocol, url, others)
    return ObjectStore(client, url=url, retries=retries)


def _s3_client(
    url: str, path: str, chosen: object, options: Mapping[str, object], timeout_s: float
) -> Client:
    bucket, _, prefix = path.partition("/")
    if not _BUCKET.fullmatch(bucket):
        if "@" in bucket:  # it may contain a secret
            raise UsageError(
                "credentials in an s3:// address are not supported; set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY"
            )
        raise UsageError(
            f"{url}: {bucket!r} is not a valid bucket name; s3://BUCKET/PREFIX is expected"
        )
    if chosen is None:
        chosen = next((name for name in _S3_CLIENTS if find_spec(name)), "s3fs")
    if chosen not in _S3_CLIENTS:
        raise UsageError(f"client={chosen} is not one of {', '.join(_S3_CLIENTS)}")
    if find_spec(str(chosen)) is None:
        raise MissingExtra(
            f"{url}: opening s3:// needs the package {chosen}, which is an extra",
            next_command=f"pip install 'ckptctl[{_S3_CLIENTS[str(chosen)]}]'",
        )
    options = checked_settings(options)
    if chosen == "obstore":
        from ckptctl.storage.obstore_client import ObstoreClient

        return ObstoreClient(bucket, prefix, options, timeout_s=timeout_s)
    from ckptctl.storage.s3fs_client import S3fsClient

    return S3fsClient(bucket, prefix, options, timeout_s=timeout_s)


def _fsspec_client(protocol: str, url: str, options: Mapping[str, object]) -> Client:
    if find_spec("fsspec") is None:
        raise MissingExtra(
            f"{url}: opening {protocol}:// needs fsspec", next_command="pip install fsspec"
        )
    from fsspec.registry import known_implementations

    from ckptctl.storage.fsspec_client import FsspecClient

    try:
        return FsspecClient(protocol, url, options)
    except ImportError as exc:
        package = known_implementations.get(protocol, {}).get("class", protocol).split(".")[0]
        raise MissingExtra(
            f"{url}: opening {protocol}:// needs the package {package}",
            next_command=f"pip install {package}",
        ) from exc
    except (ValueError, TypeError) as exc:
        raise UsageError(f"{url}: {exc}") from exc

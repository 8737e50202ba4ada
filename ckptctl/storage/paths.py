"""Check a path inside a store.

The one rule for every store, checked before anything reaches a file system or
a request: names in metadata are written by others. Whether the path exists, or
leads through a link, only the store can say.
"""

from __future__ import annotations

from ckptctl.errors import PathEscape, PathNotFound


def parts_of(path: str) -> tuple[str, ...]:
    """The names along `path`; empty for the root, which is the empty path.

    Raises `PathEscape` for a path that is absolute, or has `.`, `..`, an empty
    name or a NUL in it; `PathNotFound` for a text that no storage can hold as a
    name (a lone surrogate).
    """
    if not path:
        return ()
    parts = tuple(path.split("/"))
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise PathEscape(f"{path!r} is not a plain path below the folder; it was not opened")
    _check_encodable(path)
    return parts


def key_of(path: str) -> str:
    """The same check for a key below a prefix; keys may have empty names between slashes.

    `.` and `..` mean nothing to an object store, but something to the HTTP
    client and the proxies on the way to it.
    """
    parts = path.split("/")
    around = parts[0] == "" or parts[-1] == ""
    if around or "\0" in path or "." in parts or ".." in parts:
        raise PathEscape(f"{path!r} is not a plain path below the prefix; it was not asked for")
    _check_encodable(path)
    return path


def _check_encodable(path: str) -> None:
    try:
        path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as exc:
        raise PathNotFound(f"{path!r} is not a text that a storage can have as a name") from exc

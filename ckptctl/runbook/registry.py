"""Find runbooks: those that ckptctl ships, and those in a folder of the user.

A runbook of the user replaces a shipped one of the same name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ckptctl.errors import UsageError
from ckptctl.runbook.document import Runbook, parse

_PACKAGED = Path(__file__).parent / "pages"
# In a source tree, the pages are at the top level.
_SOURCE = Path(__file__).parent.parent.parent / "runbooks"
_SHIPPED = _PACKAGED if _PACKAGED.is_dir() else _SOURCE
_MAX_PAGE_BYTES = 1 << 20


def names(folder: str | None = None) -> tuple[str, ...]:
    """The names of all runbooks, sorted."""
    return tuple(sorted({path.stem for path in _pages(folder)}))


def find(name: str, folder: str | None = None) -> Runbook:
    """The runbook of that name or in that file (`./mine.md`); raises `UsageError`."""
    if name.endswith(".md"):
        return read(Path(name))
    for path in _pages(folder):
        if path.stem == name.lower():
            return read(path)
    raise UsageError(
        f"there is no runbook {name!r}; there are {', '.join(names(folder))}",
        next_command="ckptctl runbook list",
    )


def read(path: Path) -> Runbook:
    """The runbook in a file; raises `UsageError` if it cannot be read or parsed."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_PAGE_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text in UTF-8: {error.reason}") from error
    if len(data) > _MAX_PAGE_BYTES:
        raise UsageError(f"{path} is larger than 1 MiB, which is too large for a runbook")
    book = parse(text, str(path))
    return replace(book, called=book.name) if path.parent == _SHIPPED else book


def _pages(folder: str | None) -> Iterator[Path]:
    """Every page, those of the user first."""
    if folder is not None:
        own = Path(folder)
        if not own.is_dir():
            raise UsageError(f"{folder} is not a folder of runbooks")
        yield from sorted(own.glob("*.md"))
    yield from sorted(_SHIPPED.glob("*.md"))

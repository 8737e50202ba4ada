"""Explain a file that was given where a step is expected.

A step is a folder, or a file whose name gives its number (`step_100.ckpt`). What else is
one file is told by its first bytes, with the command that makes use of it. Nothing in it
is decoded: that is `resharding`'s question.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ckptctl.errors import UsageError
from ckptctl.formats.frameworks.layouts import METADATA, shard_rank
from ckptctl.model import FileInfo
from ckptctl.storage.contract import Span, Store
from ckptctl.storage.opening import join_url, parent_url

_HEAD_BYTES = 9
_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80\x02"
"""Protocol 2, in which `torch.save` wrote files before torch 1.6."""


def check_no_lone_file(store: Store, name: str, files: Sequence[FileInfo]) -> None:
    """Raise `UsageError` where `name` under the store is one file; `files` is its listing.

    Cost: nothing for a folder; for a file one listing and one small read.
    """
    if [file.path for file in files] != [name]:
        return
    # A folder may hold one file of its own name.
    found = next((one for one in store.list_dir("") if one.path == name), None)
    if found is not None and found.kind == "file":
        raise _told(join_url(store.url, name), name, _head(store, found))


def _head(store: Store, file: FileInfo) -> bytes:
    length = min(_HEAD_BYTES, file.size)
    return b"".join(data for _, data in store.read_spans([Span(file.path, 0, length)]))


def _told(url: str, name: str, head: bytes) -> UsageError:
    what = f"{url} is a file, not a step"
    if name == METADATA or shard_rank(name) is not None:
        step = parent_url(url)
        return UsageError(
            f"{what}: it is a part of {step}", next_command=f"ckptctl verify {shlex.quote(step)}"
        )
    stem = name.rpartition(".")[0] or name
    words = ["ckptctl", "convert", url, join_url(parent_url(url), f"{stem}-dcp")]
    if head.startswith((_ZIP, _PICKLE)):
        return UsageError(
            f"{what}: it looks like a torch.save file; `ckptctl convert` can turn it into a step",
            next_command=shlex.join(words),
        )
    if name.endswith(".safetensors") and head[8:] == b"{":
        return UsageError(
            f"{what}: it looks like a safetensors file, which holds only weights; `ckptctl "
            "convert` can turn it into a step",
            next_command=shlex.join([*words, "--accept-unverifiable"]),
        )
    return UsageError(
        f"{what}, and does not look like any checkpoint that ckptctl knows",
        next_command="ckptctl explain format.unsupported",
    )

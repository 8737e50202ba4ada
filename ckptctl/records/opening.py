"""Is one record a sound archive that holds what the metadata says, by what was read of it?

Head and tail are enough. What the records of a part add up to is the question of
`structure`; a load asks this of the records that it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptctl.formats.archive.directory import (
    RecordDirectory,
    View,
    check_headers,
    check_texts,
    parse_directory,
    read_member,
    tail_needed,
    wrong_crcs,
)
from ckptctl.formats.values import TensorStub
from ckptctl.model import TensorEntry
from ckptctl.records.reads import Need
from ckptctl.records.tensor_records import Unfit, check_tensor, tensor_in

MAX_PICKLE_BYTES = 64 << 10
"""Bytes of pickle that are read of a wanted bytes entry."""

_MAX_HEAD = 1 << 20

_BEFORE_ARCHIVES = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The magic number, pickled, that began every file of `torch.save` before torch 1.6."""


@dataclass(frozen=True, slots=True)
class Framed:
    """What a sound record says: where its members lie, and the tensor that it describes.

    `stub` is None for a bytes entry; `byte_order` (`little` or `big`) where it says none.
    """

    directory: RecordDirectory
    stub: TensorStub | None
    byte_order: str | None


def framed(
    view: View, tensor: TensorEntry | None, chunk: int, *, wanted: bool = False
) -> Framed | Need:
    """What the record in `view` says, or what more of it must be read first.

    It should hold chunk number `chunk` of a tensor, or a bytes entry where `tensor` is
    None, whose pickle is looked at too where it is `wanted`. The checksum of every member
    that was read whole is right. Raises `RecordUnreadable` and `Unfit` where it is not so.
    """
    if is_before_archives(view.head):
        raise Unfit(
            "format.unsupported",
            "it is in the form that torch.save wrote before torch 1.6, with no checksum in it",
        )
    needed = tail_needed(view.tail, view.length)
    if needed > len(view.tail):
        return Need(len(view.head), needed)
    directory = parse_directory(view.tail, view.length)
    more = _more(directory, view, is_tensor=tensor is not None, wanted=wanted)
    if more is not None:
        return more
    check_headers(directory, view)
    wrong = wrong_crcs(directory, view)
    if wrong:
        raise Unfit("record.crc", f"{_first_few(wrong)} in it")
    check_texts(directory, view)
    said = read_member(directory, "byteorder", view)
    stub = None
    if tensor is not None:
        stub = tensor_in(directory, view)
        check_tensor(stub, directory, tensor, chunk)
    return Framed(directory, stub, None if said is None else said.decode())


def is_before_archives(head: bytes) -> bool:
    """Whether a record is in the form of torch before 1.6, by its first 16 bytes."""
    return head.startswith(_BEFORE_ARCHIVES, 2)


def is_plain_pickle(view: View) -> bool:
    """A planner of its own may hand over bytes, which are then not framed by torch."""
    return view.head[:1] == b"\x80" and view.head[1:2] <= b"\x05" and view.tail.endswith(b".")


def _more(directory: RecordDirectory, view: View, *, is_tensor: bool, wanted: bool) -> Need | None:
    """What must be read besides: all but the elements, or the pickle of a wanted entry."""
    head, tail = len(view.head), len(view.tail)
    if len(view.head) == view.length:
        return None
    pickle = directory.find("data.pkl")
    if is_tensor:
        elements = next((m for m in directory.members if m.name.startswith("data/")), pickle)
        if elements is not None:
            head = max(head, min(elements.start, _MAX_HEAD))
            tail = max(tail, min(directory.length - elements.end, _MAX_HEAD))
    elif wanted and pickle is not None and pickle.size <= MAX_PICKLE_BYTES:
        head = max(head, pickle.end)
    if (head, tail) == (len(view.head), len(view.tail)):
        return None
    return Need(head, tail)


def _first_few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3:,} more"

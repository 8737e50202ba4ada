"""Open records that differ from an earlier one only in their elements and checksums.

One version of torch writes the records of all chunks of one dtype and shape with the same
bytes, except the elements, their CRC-32 (behind them and in the directory), and the text
`.data/serialization_id` with its CRC-32. A record whose other bytes equal those of a record
that `open_record` accepted has the same directory and the same pickle. If its checksums agree
as well, `open_record` would accept it. Every other record is given to `open_record`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.formats.archive.directory import View, crc_offsets
from ckptctl.records.opening import (
    Expected,
    Need,
    OpenRecord,
    Unfit,
    check_transforms,
    is_plain_pickle,
    open_record,
    unpack,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

_MOST_TEMPLATES = 4096
"""Tensors have fewer dtypes, shapes and lengths; records of further ones are parsed."""

_IDENTITY = ".data/serialization_id"


@dataclass(frozen=True, slots=True)
class Template:
    """A record that was accepted, as a pattern for others of its length, dtype and shape.

    `head` is all before the elements, which lie from `start` to `end`. `fields` splits the
    `n_rest` bytes behind them into constant parts in turn with what differs: the CRC-32 of
    the elements, the serialization id, its CRC-32, and both checksums again in the directory.
    `differing` numbers the members of the elements and of the serialization id.
    """

    opened: OpenRecord
    head: bytes
    start: int
    end: int
    n_rest: int
    fields: Struct
    constant: tuple[bytes, ...]
    differing: tuple[int, int]
    crc32: Callable[[Buffer], int]

    @classmethod
    def of(cls, opened: OpenRecord, view: View) -> Template | None:
        """The template of a record; None for a record of another form."""
        from zlib_ng.zlib_ng import crc32

        directory, elements = opened.directory, opened.elements
        identity = directory.find(_IDENTITY)
        if elements is None or identity is None or not directory.has_crcs:
            return None
        head, rest = view.get(0, elements.start), view.get(elements.end, view.length)
        n_others = sum(member.name.startswith("data/") for member in directory.members) - 1
        if head is None or rest is None or n_others or not elements.size or not identity.size:
            return None
        differs = {identity.start: f"{identity.size}s"}
        for member in (elements, identity):
            differs.update(dict.fromkeys(crc_offsets(directory, member, view), "I"))
        form, at = "<", elements.end
        for offset, each in sorted(differs.items()):
            if offset < at:
                return None
            form += f"{offset - at}s{each}"
            at = offset + Struct(each).size
        fields = Struct(f"{form}{view.length - at}s")
        constant = fields.unpack(rest)[::2]
        names = [member.name for member in directory.members]
        differing = (names.index(elements.name), names.index(identity.name))
        place = (elements.start, elements.end, len(rest))
        return cls(opened, head, *place, fields, constant, differing, crc32)

    def checksums(self, rest: Buffer, at: int) -> tuple[int, int] | None:
        """The CRC-32 of the elements and of the id of a record, from what follows the elements.

        That begins at byte `at` of `rest`. None if it is not like the template.
        """
        found = self.fields.unpack_from(rest, at)
        _, crc, _, identity, _, identity_crc, _, crc_again, _, identity_crc_again, _ = found
        if (
            found[::2] == self.constant
            and crc == crc_again
            and identity_crc == identity_crc_again
            and identity.isdigit()
            and self.crc32(identity) == identity_crc
        ):
            return crc, identity_crc
        return None


class Alike(NamedTuple):
    """A record like a template, and the two checksums in which its directory differs."""

    template: Template
    crc: int
    identity_crc: int

    def opened(self) -> OpenRecord:
        """The record as `open_record` returns it."""
        found = self.template.opened
        members = list(found.directory.members)
        for number, crc in zip(self.template.differing, (self.crc, self.identity_crc), strict=True):
            members[number] = members[number]._replace(crc=crc)
        return replace(found, directory=replace(found.directory, members=tuple(members)))


class Templates:
    """The templates of one reading, by length, dtype and shape."""

    def __init__(self) -> None:
        self._templates: dict[tuple[int, Expected], Template] = {}

    def get(self, length: int, expected: Expected) -> Template | None:
        """The template of the records of this length, dtype and shape."""
        return self._templates.get((length, expected))

    def open(
        self, view: View, expected: Expected | None, *, with_pickle: bool = False
    ) -> OpenRecord | Need:
        """As `open_record`, which parses the records that are like none before."""
        alike = None if expected is None else self.like(view, expected)
        if alike is not None:
            return alike.opened()
        found = open_record(view, expected, with_pickle=with_pickle)
        if expected is not None and isinstance(found, OpenRecord):
            key = (view.length, expected)
            if key not in self._templates and len(self._templates) < _MOST_TEMPLATES:
                template = Template.of(found, view)
                if template is not None:
                    self._templates[key] = template
        return found

    def open_stored(
        self, view: View, expected: Expected | None, transforms: Sequence[str], limit: int
    ) -> tuple[View, OpenRecord] | Need:
        """The record in `view` with its content, decompressed to at most `limit` bytes.

        Its elements are those of this machine. Raises `RecordUnreadable` and `Unfit`.
        """
        if transforms:
            check_transforms(transforms)
            if len(view.head) < view.length:
                return Need(head=view.length)
            data = unpack(view.head, transforms, limit)
            view = View(len(data), data, data)
        if expected is None and is_plain_pickle(view.head, view.tail):
            raise Unfit(
                "format.unsupported",
                "it is a planner's own pickle, which cannot be read without running it",
            )
        found = self.open(view, expected)
        if isinstance(found, Need):
            return found
        if found.stub is not None and found.byte_order not in (None, sys.byteorder):
            raise Unfit("format.unsupported", f"it is {found.byte_order}-endian")
        return view, found

    def like(self, view: View, expected: Expected) -> Alike | None:
        """The record with its template; None for a record that must be parsed.

        Members that were read whole match their checksums.
        """
        template = self._templates.get((view.length, expected))
        if template is None:
            return None
        head, tail = view.head, view.tail
        at = len(tail) - template.n_rest
        if at < 0 or not head.startswith(template.head):
            return None
        checksums = template.checksums(tail, at)
        if checksums is None:
            return None
        if len(head) >= template.end or len(tail) >= view.length - template.start:
            elements = view.get(template.start, template.end)
            if elements is None or template.crc32(elements) != checksums[0]:
                return None
        return Alike(template, *checksums)

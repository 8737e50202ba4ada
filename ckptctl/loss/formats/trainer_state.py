"""Which rows are in a Hugging Face trainer's `trainer_state.json`?

A list `log_history` of records, in one document that is read as it comes; a document
that is nothing but a list of records is read, too. A resumed trainer goes on with the
history of its checkpoint, so the steps that it repeats are there once: compare the
file of the older checkpoint, or the console log.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping

from ckptctl.formats.bounded_json import NotJson, decode_first_json
from ckptctl.loss.formats.records import JsonLinesReader
from ckptctl.loss.rows import Marker, Place, Row

_LIST = re.compile(r'"log_history"\s*:\s*\[')
_MAX_RECORD = 1 << 20

# One value over several lines: a list of objects, or an object that begins with a newline.
_DOCUMENT = re.compile(rb"\s*(?:\{\s*\n|\[\s*\{)")


def is_document(name: str, head: bytes) -> bool:
    """Whether a file of this name that begins with `head` is such a document."""
    return name.endswith("trainer_state.json") or _DOCUMENT.match(head) is not None


class TrainerState:
    """One document, fed in pieces of any length; `damage` says where it makes no sense."""

    format = "trainer-state"
    n_without_step = 0

    def __init__(self, name: str, keys: Mapping[str, str] | None = None) -> None:
        self._name = name
        self._reader = JsonLinesReader(keys)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._began = False
        self._in_list = False
        self._n_records = 0
        self.damage: str | None = None

    def feed(self, data: bytes) -> Iterator[Row | Marker]:
        """What is whole with these bytes."""
        self._rest += self._utf8.decode(data)
        if not self._began:
            self._rest = self._rest.lstrip("\ufeff \t\r\n")
            if not self._rest:
                return
            self._began = True
            if self._rest[0] == "[":
                self._rest, self._in_list = self._rest[1:], True
        if not self._in_list:
            start = _LIST.search(self._rest)
            if start is None:
                # The list's name may be cut in two, and spaces may stand behind it.
                self._rest = self._rest[-100:]
                return
            self._rest, self._in_list = self._rest[start.end() :], True
        while self.damage is None:
            record = self._record()
            if record is None:
                return
            if isinstance(record, dict):
                place = Place(self._name, self._n_records)
                yield from self._reader.add(record, place)

    def end(self) -> Iterator[Row | Marker]:
        """The last row."""
        yield from self._reader.end()

    def _record(self) -> object | None:
        rest = self._rest.lstrip(" \t\r\n,")
        self._rest = rest
        if not rest or rest[0] == "]":
            return None
        try:
            record, end = decode_first_json(rest, numbers="text")
        except NotJson as error:
            if not error.malformed or len(rest) > _MAX_RECORD:
                self.damage = f"what follows record {self._n_records:,} is no JSON: {error}"
            return None
        self._rest = rest[end:]
        self._n_records += 1
        return object() if record is None else record

r"""Take the lines of a program out of the records in which a log collector keeps them.

`Unwrapper` turns the bytes of a log into the lines that the program printed. A line whose
record states a time and a source becomes what `kubectl logs --timestamps --prefix` prints:

    [pod/train-0] 2026-11-20T03:12:44.123Z step 12 loss 2.31

A log that no collector wrote passes through, as UTF-8. Line numbers stay those of the file:
the lines of one record are separated by `\r`, and a line in several records follows empty ones.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

from ckptctl.formats.log_records import MAX_DOCUMENT, MAX_RECORD, printed, record_in, records_of

_TRIED_BYTES = 4096
_TRIED_LINES = 50
"""A log whose first lines are no records of a collector is read as it is."""
_HEAD_BYTES = 64
_DOCUMENT = re.compile(r"\s*(?:\[\s*\{|\[\s*$|\{\s*\n|\{\s*\"\w+\"\s*:\s*[\[{])")
_OF_DOCUMENT = re.compile(
    r'"(?:textPayload|jsonPayload|insertId|ingestionTime|eventId|@message|__CURSOR|logEvents'
    r'|_source|tsNs|_raw|streams|labels|attributes)"\s*:'
)
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    *((codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be")),
    *((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")),
)
_UNMARKED = (
    (re.compile(rb"(?:[\t\n\r -~]\0){8}"), "utf-16-le"),
    (re.compile(rb"(?:\0[\t\n\r -~]){8}"), "utf-16-be"),
)


class Unwrapper:
    """Turns the bytes of one log, fed in pieces of any length, into those of its lines."""

    def __init__(self) -> None:
        self._decoder: codecs.IncrementalDecoder | None = None
        self._head: bytes | None = b""
        self._rest = b""
        self._is_tried = False
        self._n_tried = 0
        self._is_plain = False
        self._document: bytearray | None = None
        self._part = ""
        self._order = _Order()

    def feed(self, data: bytes) -> bytes:
        """The lines that these bytes complete."""
        if self._head is not None:
            self._head += data
            return b"" if len(self._head) < _HEAD_BYTES else self._begin()
        return self._take(data if self._decoder is None else _utf8(self._decoder.decode(data)))

    def end(self) -> bytes:
        """The lines that waited for more bytes."""
        out = b"" if self._head is None else self._begin()
        out += b"" if self._is_tried else self._take(b"", is_last=True)
        if self._document is not None:
            return out + _lines_of(bytes(self._document))
        rest, self._rest = self._rest, b""
        if rest:
            out += rest if self._is_plain else self._unwrapped(rest)
        return out + self._order.end() + _utf8(self._part)

    def _begin(self) -> bytes:
        data, self._head = self._head or b"", None
        mark, encoding = next((each for each in _MARKS if data.startswith(each[0])), (b"", ""))
        data = data[len(mark) :]
        encoding = encoding or next((name for form, name in _UNMARKED if form.match(data)), "")
        if encoding and encoding != "utf-8":
            self._decoder = codecs.getincrementaldecoder(encoding)("replace")
            data = _utf8(self._decoder.decode(data))
        return self._take(data)

    def _take(self, data: bytes, *, is_last: bool = False) -> bytes:
        if self._is_plain:
            data, self._rest = self._rest + data, b""
            return data
        if not self._is_tried:
            data, self._rest = self._rest + data, b""
            self._is_tried = len(data) >= _TRIED_BYTES or is_last
            head = data[:MAX_RECORD].decode("utf-8", "replace")
            if _DOCUMENT.match(head) is None:
                self._is_tried = True
            elif _OF_DOCUMENT.search(head):
                self._is_tried = True
                first, line_end, _ = head.partition("\n")
                if not line_end or record_in(first) is None:
                    self._document = bytearray()
            if not self._is_tried:
                self._rest = data
                return b""
        if self._document is not None:
            self._document += data
            if len(self._document) <= MAX_DOCUMENT:
                return b""
            data, self._document, self._is_plain = bytes(self._document), None, True
            return data
        whole, end, self._rest = (self._rest + data).rpartition(b"\n")
        if len(self._rest) > MAX_RECORD:
            whole, end, self._rest = whole + end + self._rest, b"", b""
        return self._lines(whole.split(b"\n"), end) if whole or end else b""

    def _lines(self, lines: list[bytes], end: bytes) -> bytes:
        out = bytearray()
        for at, line in enumerate(lines):
            out += self._unwrapped(line + (b"\n" if at + 1 < len(lines) else end))
            if self._is_plain:
                out += b"\n".join(lines[at + 1 :]) + (end if at + 1 < len(lines) else b"")
                break
        return bytes(out)

    def _unwrapped(self, line: bytes) -> bytes:
        body = line.rstrip(b"\r\n")
        if not body.strip():
            return self._order.add(line, "")
        record = record_in(body.decode("utf-8", "replace"))
        if record is None:
            self._n_tried += self._n_tried < _TRIED_LINES
            # A log with one record of a collector has others.
            self._is_plain = self._n_tried == _TRIED_LINES
            return self._order.add(line, "") + (self._order.end() if self._is_plain else b"")
        self._n_tried = _TRIED_LINES + 1
        end = line[len(body) :]
        if not record.whole:
            self._part += record.text
            if len(self._part) < MAX_RECORD:
                return self._order.add(end, "")
            record, self._part = record._replace(text=""), self._part
        record, self._part = record._replace(text=self._part + record.text), ""
        time = "" if record.in_order else record.time
        return self._order.add(_utf8(printed(record)) + end, time)


class _Order:
    """Holds back lines until their times show whether the log has its newest line first."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._n_bytes = 0
        self._first = ""
        self._descends: bool | None = None

    def add(self, line: bytes, time: str) -> bytes:
        """The lines whose place is known now that `line` follows; `time` is empty without one."""
        if self._descends is None and self._first and time and time != self._first:
            self._descends = time < self._first
        self._first = self._first or time
        if self._descends is False or not self._first:
            return self.end() + line
        self._held.append(line)
        self._n_bytes += len(line)
        if self._n_bytes > MAX_DOCUMENT:
            self._descends = False
        return self.end() if self._descends is False else b""

    def end(self) -> bytes:
        """The lines that were held back, in the order of time."""
        held, self._held, self._n_bytes = self._held, [], 0
        if self._descends and held:
            if not held[-1].endswith(b"\n"):
                held[-1] += b"\n"
            held.reverse()
        return b"".join(held)


def unwrapped(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The pieces of a log, with the lines of the program instead of a collector's records."""
    unwrapper = Unwrapper()
    for piece in pieces:
        if data := unwrapper.feed(piece):
            yield data
    if data := unwrapper.end():
        yield data


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _lines_of(document: bytes) -> bytes:
    """The lines of a document with records; the document itself for any other."""
    lines = (_utf8(printed(record)) + b"\n" for record in records_of(document))
    return b"".join(lines) or document

"""A proxy that counts the requests to an S3 endpoint, and breaks those that a test names.

It runs in a thread of the test's own process, and passes every request on unchanged
(the `Host` header too, which is part of the signature).
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Fault(Enum):
    """What the proxy does with a request that it breaks."""

    UNAVAILABLE = "503 with S3's SlowDown"
    DENIED = "403 with S3's AccessDenied"
    UNCONDITIONAL = "the condition of a write is ignored, as some stores do"
    NOT_IMPLEMENTED = "501 where a condition or a checksum of the whole is asked for"
    RESET = "the connection is reset in the middle of the body"
    SHORT = "the connection ends in order in the middle of the body"
    LOST = "the server does it, the answer is lost"
    SILENT = "accepted, never answered"
    DRIBBLE = "four bytes a second"
    FLIPPED = "one byte of what is sent arrives as another"
    NOT_THERE = "404, whatever is there"
    NO_LISTING = "200 with a page in HTML, like a login page"
    BROKEN = "500 with S3's InternalError"
    NO_KEY = "404 with S3's NoSuchKey"
    THERE = "412, as if the key were there"
    CONFLICT = "409, as if another writer wrote"
    CUT = "half of the content, and a length that says so"
    SHRUNK = "half of the content, as if the object had no more"
    STALE = "a page that lacks one of its keys"
    EMPTY = "a page that lacks all of its keys"
    NO_TOKEN = "half of a page that says that it goes on, and not where"


_ANSWERS = {
    Fault.UNAVAILABLE: (503, b"<Error><Code>SlowDown</Code></Error>"),
    Fault.BROKEN: (500, b"<Error><Code>InternalError</Code></Error>"),
    Fault.DENIED: (403, b"<Error><Code>AccessDenied</Code></Error>"),
    Fault.NOT_THERE: (404, b""),
    Fault.NO_KEY: (404, b"<Error><Code>NoSuchKey</Code></Error>"),
    Fault.THERE: (412, b"<Error><Code>PreconditionFailed</Code></Error>"),
    Fault.CONFLICT: (409, b"<Error><Code>ConditionalRequestConflict</Code></Error>"),
    Fault.NO_LISTING: (200, b"<html><body>Please log in</body></html>"),
}
"""What is answered without asking the server."""

_KEY = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
_COUNT = re.compile(rb"<KeyCount>\d+</KeyCount>")
_TRUNCATED = re.compile(rb"<IsTruncated>\w+</IsTruncated>")
_TOKEN = re.compile(rb"<NextContinuationToken>.*?</NextContinuationToken>", re.DOTALL)
_FOLDER = re.compile(rb"<CommonPrefixes>.*?</CommonPrefixes>", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """What the proxy answers instead of passing the request on: S3's error, as it is sent."""

    status: int
    code: str = ""
    more: str = ""
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Status and code."""
        return f"{self.status} {self.code}"

    @property
    def content(self) -> bytes:
        """The body: a code, a message and whatever else an error of S3 holds."""
        return f"<?xml version='1.0'?><Error><Code>{self.code}</Code>{self.more}</Error>".encode()


@dataclass
class _Order:
    verb: str
    nth: int
    fault: Fault | Answer | Callable[[], object]
    lasts: bool
    path: str
    n: int = 0


class CountingProxy:
    """`url` stands for the endpoint; `counts` is requests by LIST, GET, HEAD, PUT, …

    With `delay_s` every answer comes that much later, as from a server far away.
    """

    def __init__(self, endpoint: str, *, delay_s: float = 0) -> None:
        self.delay_s = delay_s
        self._upstream = urlsplit(endpoint).netloc
        self._lock = threading.Lock()
        self._orders: list[_Order] = []
        self.counts: Counter[str] = Counter()
        self.closing = threading.Event()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def upstream(self) -> str:
        """Host and port behind the proxy."""
        return self._upstream

    def reset(self) -> None:
        """Count from zero, and break nothing any more."""
        with self._lock:
            self.counts.clear()
            self._orders.clear()

    def break_request(
        self,
        verb: str,
        fault: Fault | Answer | Callable[[], object],
        *,
        nth: int = 1,
        lasts: bool = False,
        path: str = "",
    ) -> None:
        """Break the `nth` request of this kind from now on, or it and all later ones.

        With `path` only requests count whose path or a part of whose query ends so. A function is
        called before the request is passed on, which is not broken then.
        """
        with self._lock:
            self._orders.append(_Order(verb, nth, fault, lasts, path))

    def count(self, verb: str, path: str, query: str) -> Fault | Answer | None:
        """Count one request; what to do to it instead of passing it on."""
        names = (path, *query.split("&"))
        told = []
        with self._lock:
            self.counts[verb] += 1
            for order in self._orders:
                if order.verb == verb and any(name.endswith(order.path) for name in names):
                    order.n += 1
                    if order.n == order.nth or (order.lasts and order.n > order.nth):
                        told.append(order.fault)
        if not told:
            return None
        if isinstance(told[0], Fault | Answer):
            return told[0]
        told[0]()
        return None

    def close(self) -> None:
        """Close the port and the requests that were never answered."""
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: CountingProxy

    def log_message(self, *args: object) -> None:
        pass

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        address = urlsplit(self.path)
        fault = self.owner.count(self._verb(), address.path, address.query)
        if self.owner.delay_s:
            time.sleep(self.owner.delay_s)
        if fault is Fault.SILENT:
            self.owner.closing.wait()
            return
        if isinstance(fault, Answer):
            self._answer(fault.status, fault.content, fault.headers)
            return
        if fault in _ANSWERS:
            self._answer(*_ANSWERS[fault])
            return
        new = self.headers.get("If-None-Match") or self.headers.get("x-amz-checksum-type")
        if fault is Fault.NOT_IMPLEMENTED and new:
            self._answer(501, b"<Error><Code>NotImplemented</Code></Error>")
            return
        if fault is Fault.UNCONDITIONAL:
            del self.headers["If-None-Match"]
        if fault is Fault.FLIPPED and body:
            body = bytes([body[0] ^ 0xFF]) + body[1:]
        status, headers, content = self._ask_upstream(body)
        if fault is Fault.LOST:
            self._reset()
            return
        if fault is not None:
            headers, content = _changed(fault, headers, content)
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = next((v for n, v in headers if n.lower() == "content-length"), len(content))
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self._send(content, fault)

    # The names that the base class looks for.
    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815

    def _verb(self) -> str:
        listing = self.command == "GET" and "list-type=" in urlsplit(self.path).query
        return "LIST" if listing else self.command

    def _ask_upstream(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection(self.owner.upstream, timeout=60)
        try:
            # A client that takes this for its HTTP proxy sends the whole address.
            path = re.sub(r"^http://[^/]+", "", self.path)
            upstream.putrequest(self.command, path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    upstream.putheader(name, value)
            upstream.endheaders(body or None)
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            upstream.close()

    def _send(self, content: bytes, fault: Fault | None) -> None:
        half = len(content) // 2
        if fault is Fault.DRIBBLE:
            for at in range(len(content)):
                if self.owner.closing.is_set():
                    break
                self.wfile.write(content[at : at + 1])
                time.sleep(0.25)
        elif fault in (Fault.RESET, Fault.SHORT):
            self.wfile.write(content[:half])
            self.wfile.flush()
            self.close_connection = True
            if fault is Fault.RESET:
                self._reset()
        elif self.command != "HEAD":
            self.wfile.write(content)

    def _answer(
        self, status: int, content: bytes, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _reset(self) -> None:
        # With no time to linger, closing sends a reset instead of an orderly end.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        os.close(self.connection.detach())


def _changed(
    fault: Fault, headers: list[tuple[str, str]], content: bytes
) -> tuple[list[tuple[str, str]], bytes]:
    """What the server sent, with what a fault takes away from it."""
    if fault in (Fault.CUT, Fault.SHRUNK):
        content = content[: len(content) // 2]
        headers = [(n, v) for n, v in headers if n.lower() != "content-length"]
        if fault is Fault.SHRUNK:
            headers = [(n, _shrunk(v, len(content))) if n.lower() == "content-range" else (n, v)
                       for n, v in headers]  # fmt: skip
    elif fault in (Fault.STALE, Fault.EMPTY):
        content = _KEY.sub(b"", content, count=1 if fault is Fault.STALE else 0)
        content = _FOLDER.sub(b"", content) if fault is Fault.EMPTY else content
        content = _COUNT.sub(b"<KeyCount>%d</KeyCount>" % len(_KEY.findall(content)), content)
        headers = [(n, v) for n, v in headers if n.lower() != "content-length"]
    elif fault is Fault.NO_TOKEN:
        content = _TRUNCATED.sub(b"<IsTruncated>true</IsTruncated>", content)
        content = _TOKEN.sub(b"", content)
        keys = _KEY.findall(content)
        for key in keys[len(keys) // 2 :]:
            content = content.replace(key, b"")
        headers = [(n, v) for n, v in headers if n.lower() != "content-length"]
    return headers, content


def _shrunk(content_range: str, n_bytes: int) -> str:
    first = int(re.findall(r"\d+", content_range)[0])
    return f"bytes {first}-{first + n_bytes - 1}/{first + n_bytes}"

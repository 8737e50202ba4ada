"""How many requests did that take, and what if one of them fails?

A proxy in front of an S3 endpoint, in a thread of the test's own process. It
passes every request on unchanged (the `Host` header too, which is part of the
signature), counts it, and breaks those it was told to.
"""

from __future__ import annotations

import http.client
import os
import socket
import struct
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Fault(Enum):
    """What the proxy does with a request that it breaks."""

    UNAVAILABLE = "503 with S3's SlowDown"
    DENIED = "403"
    NOT_IMPLEMENTED = "501 where a condition or a checksum of the whole is asked for"
    RESET = "the connection is reset in the middle of the body"
    SHORT = "the connection ends in order in the middle of the body"
    LOST = "the server does it, the answer is lost"
    SILENT = "accepted, never answered"
    DRIBBLE = "four bytes a second"
    FLIPPED = "one byte of what is sent arrives as another"
    NOT_THERE = "404, whatever is there"
    NO_LISTING = "200 with a page in HTML, like a login page"


@dataclass
class _Order:
    verb: str
    nth: int
    fault: Fault
    lasts: bool


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

    def break_request(self, verb: str, fault: Fault, *, nth: int = 1, lasts: bool = False) -> None:
        """Break the `nth` request of this kind from now on, or it and all later ones."""
        with self._lock:
            self._orders.append(_Order(verb, self.counts[verb] + nth, fault, lasts))

    def count(self, verb: str) -> Fault | None:
        """Count one request; what to do to it instead of passing it on."""
        with self._lock:
            self.counts[verb] += 1
            for order in self._orders:
                n = self.counts[verb]
                if order.verb == verb and (n >= order.nth if order.lasts else n == order.nth):
                    return order.fault
            return None

    def close(self) -> None:
        """Let go of the port and of requests that were never answered."""
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
        fault = self.owner.count(self._verb())
        if self.owner.delay_s:
            time.sleep(self.owner.delay_s)
        if fault is Fault.SILENT:
            self.owner.closing.wait()
            return
        if fault is Fault.UNAVAILABLE:
            self._answer(503, b"<Error><Code>SlowDown</Code></Error>")
            return
        if fault is Fault.DENIED:
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
            return
        new = self.headers.get("If-None-Match") or self.headers.get("x-amz-checksum-type")
        if fault is Fault.NOT_IMPLEMENTED and new:
            self._answer(501, b"<Error><Code>NotImplemented</Code></Error>")
            return
        if fault is Fault.NOT_THERE:
            self._answer(404, b"")
            return
        if fault is Fault.NO_LISTING:
            self._answer(200, b"<html><body>Please log in</body></html>")
            return
        if fault is Fault.FLIPPED and body:
            body = bytes([body[0] ^ 0xFF]) + body[1:]
        status, headers, content = self._ask_upstream(body)
        if fault is Fault.LOST:
            self._reset()
            return
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
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
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

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _reset(self) -> None:
        # With no time to linger, closing sends a reset instead of an orderly end.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        os.close(self.connection.detach())

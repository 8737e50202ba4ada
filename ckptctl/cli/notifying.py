"""Send what happened to a command or to a webhook: `--notify`.

One thread sends, in order, so that a slow receiver delays no restart of a job. What cannot be
sent is a warning and changes no exit code.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import ckptctl
from ckptctl.cli.documents import error_document
from ckptctl.cli.output import MakeDocument, Output
from ckptctl.cli.rendering import line
from ckptctl.distributed.commands import run_bounded
from ckptctl.errors import CkptctlError, OptionError
from ckptctl.formatting import counted
from ckptctl.redaction import redacted_values
from ckptctl.unexpected import Unknown, guarded

if TYPE_CHECKING:
    from concurrent.futures import Future

TIMEOUT_S = 60.0
"""How long a command may run."""

REQUEST_TIMEOUT_S = 10.0
PAUSES_S = (1.0, 4.0, 10.0)
"""The pauses before the further requests to a webhook that does not take the first."""


class Notifier:
    """Sends documents to the receiver that `--notify` names; without one it sends nothing.

    As a context manager it sends the error that ends a command, too.

    Raises `UsageError` where `given` is no command and no address.
    """

    def __init__(self, given: str | None, out: Output) -> None:
        self._out = out
        self._sent: list[Future[None]] = []
        self._send = None
        if given is not None:
            from concurrent.futures import ThreadPoolExecutor

            self._send = _sender(given)
            self._thread = ThreadPoolExecutor(1)

    def send(self, document: MakeDocument) -> None:
        """Send a document, behind those that are not sent yet; returns at once."""
        if self._send is None:
            return
        body = guarded(
            "making the document", lambda: json.dumps(redacted_values(document())).encode()
        )
        if isinstance(body, Unknown):
            self._warn(f"{body.message}; it was not sent")
        else:
            self._sent.append(self._thread.submit(self._deliver, self._send, body))

    def __enter__(self) -> Notifier:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Send the error that ends the command; wait for what is not sent yet, two minutes."""
        if isinstance(error, CkptctlError):
            self.send(partial(error_document, error, self._out.command))
        if not self._sent:
            return
        from concurrent.futures import wait

        left = wait(self._sent, timeout=2 * TIMEOUT_S).not_done
        if left:
            warning = f"warning: --notify: {counted(len(left), 'document')} not sent in time"
            self._out.lines([line(warning, hang=2)], to=self._out.err)

    def _deliver(self, send: Callable[[bytes], str | None], body: bytes) -> None:
        sent = guarded("sending", lambda: send(body))
        why = sent.message if isinstance(sent, Unknown) else sent
        if why is not None:
            self._warn(why)

    def _warn(self, why: str) -> None:
        self._out.lines([line(f"warning: --notify {why}", hang=2)], to=self._out.err)


def _sender(given: str) -> Callable[[bytes], str | None]:
    """How a document is sent; it returns why that failed."""
    if given.startswith(("http://", "https://")):
        _check_url(given)
        return lambda body: _post(given, body)
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise OptionError("--notify", f"is {given!r}: {error}") from None
    if not words:
        raise OptionError("--notify", "is empty; it names the command to run, or a URL")
    return lambda body: _run(words, body)


def _check_url(url: str) -> None:
    """Refuse an address to which no request can be sent; no message contains it."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise OptionError("--notify", "is a URL whose host or port is malformed") from None
    if not host:
        raise OptionError("--notify", "is a URL without a host")
    if "@" in parts.netloc:
        raise OptionError(
            "--notify",
            "is a URL with a user name or a password, which is not supported; give a "
            "command: --notify 'curl --netrc -sS --data-binary @- URL'",
        )
    if not url.isascii() or not url.isprintable() or " " in url:
        raise OptionError(
            "--notify",
            "is a URL with a space, a control character or one outside ASCII; encode it, "
            "such as %20 for a space",
        )


def _run(words: list[str], body: bytes) -> str | None:
    """Run a command; what it prints is dropped. Its arguments may be secrets."""
    name = shlex.quote(words[0])
    try:
        code = run_bounded(words, TIMEOUT_S, data=body).code
    except TimeoutError:
        return f"{name} did not end within {TIMEOUT_S:.0f} s, and was ended"
    except OSError as error:
        return f"{name} could not be started: {error.strerror}"
    return f"{name} ended with {code}" if code else None


def _post(url: str, body: bytes) -> str | None:
    """POST to a webhook, several times if it is busy or does not answer."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class Stay(HTTPRedirectHandler):
        """A redirect is an answer like any other: urllib would follow it without the document."""

        def redirect_request(self, *_: object) -> None:
            return None

    headers = {"Content-Type": "application/json", "User-Agent": f"ckptctl/{ckptctl.__version__}"}
    request = Request(url, body, headers)  # noqa: S310 - http or https, by `_sender`
    why = ""
    for pause_s in (0.0, *PAUSES_S):
        time.sleep(pause_s)
        try:
            with build_opener(Stay).open(request, timeout=REQUEST_TIMEOUT_S):
                return None
        except HTTPError as error:
            error.close()
            why = f"answered {error.code} {error.reason}"
            if error.code < 500 and error.code not in (408, 429):
                break
        except (OSError, HTTPException, ValueError) as error:
            why = f"did not take the request: {getattr(error, 'reason', error)}"
    # The path of a webhook is its secret.
    return f"{urlsplit(url).scheme}://{urlsplit(url).hostname}/*** {why}"

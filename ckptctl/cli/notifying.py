"""Send what happened to a command: `--notify`.

One thread sends, in order, so that a slow receiver delays no restart of a job. What cannot be
sent is a warning and changes no exit code.
"""

from __future__ import annotations

import json
import shlex
from functools import partial
from typing import TYPE_CHECKING

from ckptctl.cli.documents import error_document
from ckptctl.cli.output import MakeDocument, Output
from ckptctl.cli.rendering import line
from ckptctl.distributed.commands import run_bounded
from ckptctl.errors import CkptctlError, OptionError, Unknown, guarded
from ckptctl.formatting import counted
from ckptctl.redaction import redacted_values

if TYPE_CHECKING:
    from concurrent.futures import Future

TIMEOUT_S = 60.0
"""How long a command may run."""


class Notifier:
    """Sends documents to the receiver that `--notify` names; without one it sends nothing.

    As a context manager it sends the error that ends a command, too.

    Raises `UsageError` where `given` is no command.
    """

    def __init__(self, given: str | None, out: Output) -> None:
        self._out = out
        self._sent: list[Future[None]] = []
        self._words: list[str] = []
        if given is not None:
            from concurrent.futures import ThreadPoolExecutor

            self._words = _words(given)
            self._thread = ThreadPoolExecutor(1)

    def send(self, document: MakeDocument) -> None:
        """Send a document, behind those that are not sent yet; returns at once."""
        if not self._words:
            return
        body = guarded(
            "making the document", lambda: json.dumps(redacted_values(document())).encode()
        )
        if isinstance(body, Unknown):
            self._warn(f"{body.message}; it was not sent")
        else:
            self._sent.append(self._thread.submit(self._deliver, body))

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

    def _deliver(self, body: bytes) -> None:
        sent = guarded("sending", lambda: _run(self._words, body))
        why = sent.message if isinstance(sent, Unknown) else sent
        if why is not None:
            self._warn(why)

    def _warn(self, why: str) -> None:
        self._out.lines([line(f"warning: --notify {why}", hang=2)], to=self._out.err)


def _words(given: str) -> list[str]:
    """The words of the command; raises `UsageError` for anything else."""
    if given.startswith(("http://", "https://")):
        raise OptionError(
            "--notify",
            "is a command, and not an address: --notify 'curl -fsS -H "
            "Content-Type:application/json --data-binary @- URL'",
        )
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise OptionError("--notify", f"is {given!r}: {error}") from None
    if not words:
        raise OptionError("--notify", "is empty; it names the command to run")
    return words


def _run(words: list[str], body: bytes) -> str | None:
    """Run a command; returns why that failed. What it prints is dropped.

    Its arguments may be secrets.
    """
    name = shlex.quote(words[0])
    try:
        code = run_bounded(words, TIMEOUT_S, data=body).code
    except TimeoutError:
        return f"{name} did not end within {TIMEOUT_S:.0f} s, and was ended"
    except OSError as error:
        return f"{name} could not be started: {error.strerror}"
    return f"{name} ended with {code}" if code else None

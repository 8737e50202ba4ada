"""`ckptctl watch`: verify and seal what a job saves, beside it."""

from __future__ import annotations

import json
import shlex
import subprocess
from typing import Annotated

import ckptctl
from ckptctl.cli.documents import Document, document
from ckptctl.cli.options import AcceptAsItIsOpt, JobsOpt, argument, only, option
from ckptctl.cli.output import Output
from ckptctl.cli.rendering import Line, Span, line, next_line
from ckptctl.cli.values import parse_duration, parse_size
from ckptctl.errors import UsageError
from ckptctl.options import Requirements, StorageOptions
from ckptctl.selection.watching import BYTES_PER_S, INTERVAL_S, Event, Watched

EXAMPLES = (
    "ckptctl watch /shared/ckpt/run-1234 --notify 'curl -sS --data-binary @- https://example.org'",
    "ckptctl watch s3://bucket/run-1234 --bandwidth 400M --accept-unverifiable",
    "ckptctl watch /shared/ckpt/run-1234 --once --grace 300 --notify /usr/local/bin/page",
)
EXIT_CODES = (0, 2, 20, 21, 22, 23, 25, 75, 77)

NOTIFY_TIMEOUT_S = 60.0


def watch(
    root: Annotated[
        str, argument(metavar="ROOT", help="Folder or URL that holds the steps of a run.")
    ],
    once: Annotated[
        bool,
        option(
            "--once",
            help="List the root once, and finish what an earlier watch saw; for cron.",
        ),
    ] = False,
    interval: Annotated[
        str,
        option("--interval", metavar="TIME", help="The pause between two listings of the root."),
    ] = f"{INTERVAL_S:.0f}s",
    bandwidth: Annotated[
        str,
        option("--bandwidth", metavar="SIZE", help="How many bytes are read per second at most."),
    ] = f"{BYTES_PER_S >> 20}M",
    notify: Annotated[
        str | None,
        option(
            "--notify",
            metavar="COMMAND",
            help="Run for each damaged step, with its JSON document on standard input; it is "
            "split into words, and no shell runs it.",
        ),
    ] = None,
    accept_unverifiable: AcceptAsItIsOpt = False,
    jobs: JobsOpt = None,
    *,
    requirements: Annotated[Requirements, only("pattern", "grace", "key_file", "marks")],
    storage: StorageOptions,
    out: Output,
) -> int:
    """Verify and seal each step that a job finishes, from a process beside it.

    A step is read once two listings, --grace apart, show the same files, and sealed if every byte
    is proven and it holds what the step before it holds. Nothing else is written into a step. A
    damaged step is reported once. Ends with 0 after SIGTERM; with --once with the exit code of
    the newest damaged step. With --json each event is one line, with --quiet only the addresses
    of damaged steps are printed.
    """
    from ckptctl.cli.main import Stopped

    command = _words(notify)
    rate = parse_size("bandwidth", bandwidth)
    if rate < 1:
        raise UsageError(f"--bandwidth is {bandwidth}; it must be 1 or more")
    exit_code, n_events = 0, 0
    try:
        for found in ckptctl.watch(
            root,
            once=once,
            interval_s=parse_duration(interval, "--interval") or 0.0,
            bytes_per_s=rate,
            accept_unverifiable=accept_unverifiable,
            jobs=jobs,
            requirements=requirements,
            storage=storage,
        ):
            n_events += 1
            exit_code = exit_code or found.exit_code
            # First the command: whoever reads the line may end the watch.
            if command and found.event is Event.DAMAGED:
                _notify(command, document("watched", found), out)
            _print(found, out)
    except Stopped:
        if once:
            raise
        return 0
    if out.talks and not n_events:
        out.lines([line("nothing to report; a step is read once it has not changed for --grace")])
    return exit_code


def _words(notify: str | None) -> list[str]:
    try:
        words = shlex.split(notify or "")
    except ValueError as error:
        raise UsageError(f"--notify is {notify!r}: {error}") from None
    if notify is not None and not words:
        raise UsageError("--notify is empty; it names the command to run")
    return words


def _print(found: Watched, out: Output) -> None:
    if out.as_json:
        out.document_line(document("watched", found))
    elif out.quiet:
        if found.event is Event.DAMAGED:
            out.lines([line(found.url or "", solid=True)])
    else:
        out.lines(watched_lines(found))


def watched_lines(found: Watched) -> list[Line]:
    """One event: what was found of which step, and what to run next."""
    word = Span(found.event.value, "good" if found.event is Event.SEALED else "bad")
    head = line(word, " ", Span(found.url or found.root, "name"), solid=True)
    return [head, line(f"  {found.message}", hang=4), *next_line(found.next_command)]


def _notify(command: list[str], found: Document, out: Output) -> None:
    """Run the command with the document; what it prints goes to standard error."""
    try:
        done = subprocess.run(
            command,
            input=json.dumps(found).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=NOTIFY_TIMEOUT_S,
            check=False,
        )
        why = f"ended with {done.returncode}" if done.returncode else None
    except subprocess.TimeoutExpired:
        why = f"did not end within {NOTIFY_TIMEOUT_S:.0f} s, and was ended"
    except OSError as error:
        why = f"could not be started: {error.strerror}"
    if why is not None:
        out.lines([line(f"warning: --notify {shlex.join(command)} {why}", hang=2)], to=out.err)

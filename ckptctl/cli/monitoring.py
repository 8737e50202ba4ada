"""Send what a command found to other programs: `--metrics` and `--notify`.

`--metrics` writes the text format of Prometheus, under its conventions: a prefix, base units,
`_total` for what only grows. A figure that was not recorded has no sample. `--notify` runs a
command. One thread sends, in order, so that a slow receiver delays no restart of a job. What cannot
be sent is a warning and changes no exit code.

Source: https://prometheus.io/docs/practices/naming/ and
https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.cli.documents import error_document
from ckptctl.cli.output import MakeDocument, Output, replace_text
from ckptctl.cli.rendering import line
from ckptctl.distributed.commands import run_bounded
from ckptctl.errors import CkptctlError, OptionError, Unknown, guarded
from ckptctl.findings import Verdict
from ckptctl.formatting import counted
from ckptctl.redaction import redacted_values

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ckptctl.goodput.history import Goodput, RunHistory
    from ckptctl.selection.picking import Scan
    from ckptctl.selection.watching import Event

_FAMILIES: Mapping[str, str] = {
    "ckptctl_run_up": "Whether the record of the run could be read.",
    "ckptctl_run_elapsed_seconds": "Time from the start of the first attempt to the end of the "
    "last.",
    "ckptctl_run_goodput_seconds": "Training that is kept.",
    "ckptctl_run_goodput_ratio": "Training that is kept, as a share of the time that counts.",
    "ckptctl_run_ettr_ratio": "Effective training time ratio: training that is kept, as a share "
    "of all time.",
    "ckptctl_run_badput_seconds": "Time that was not training that is kept, by bucket of "
    "ml-goodput-measurement.",
    "ckptctl_run_disruptions_total": "How often training had to start again.",
    "ckptctl_run_failures_total": "Attempts that failed.",
    "ckptctl_run_mtbf_seconds": "Running time per failure.",
    "ckptctl_run_max_productive_step": "Newest training step that is kept.",
    "ckptctl_root_exit_code": "Exit code of the last scan that answered.",
    "ckptctl_root_steps": "Steps in the root.",
    "ckptctl_root_inspected_steps": "Inspected steps, by verdict.",
    "ckptctl_root_newest_step": "Number of the newest inspected step.",
    "ckptctl_root_chosen_step": "Number of the step that pick takes.",
    "ckptctl_root_chosen_written_timestamp_seconds": "When the step that pick takes was written.",
    "ckptctl_root_inspected_timestamp_seconds": "When the root was inspected.",
    "ckptctl_watch_events_total": "Steps that watch reported, by event.",
    "ckptctl_watch_newest_step": "Number of the newest such step.",
    "ckptctl_watch_listed_timestamp_seconds": "When the root last answered, and its due steps "
    "were read.",
}
"""What each family is; those of `_total` are counters, all others gauges."""


class Sample(NamedTuple):
    """One value of one family; None where it is not known."""

    name: str
    labels: Mapping[str, str]
    value: float | None


def write_metrics(path: str, samples: Iterable[Sample]) -> None:
    """Replace the file of `--metrics`, whole."""
    replace_text(path, metrics_text(samples), "the metrics")


def metrics_text(samples: Iterable[Sample]) -> str:
    """The samples that have a value, grouped by name as the format demands."""
    found: dict[str, list[str]] = {name: [] for name in _FAMILIES}
    for sample in samples:
        # An integer may be larger than any float: then the figure is not known.
        if sample.value is not None and abs(sample.value) < sys.float_info.max:
            labels = ",".join(
                f'{name}="{_escaped(value)}"' for name, value in sample.labels.items()
            )
            found[sample.name].append(f"{sample.name}{{{labels}}} {sample.value:.12g}")
    return "".join(
        f"# HELP {name} {about}\n"
        f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n"
        + "".join(f"{sample}\n" for sample in found[name])
        for name, about in _FAMILIES.items()
        if found[name]
    )


def history_samples(found: RunHistory) -> Iterator[Sample]:
    """The figures of every run."""
    for root in found.roots:
        for name, labels, value in _values(root.goodput):
            yield Sample(name, {"root": root.root, **labels}, value)


def root_samples(found: Scan) -> Iterator[Sample]:
    """What `scan` found of a root, and of the step that `pick` takes."""
    root = {"root": found.root}
    yield Sample("ckptctl_root_exit_code", root, found.exit_code)
    yield Sample("ckptctl_root_steps", root, found.n_steps)
    verdicts = Counter(report.verdict for report in found.reports)
    for verdict in Verdict:
        yield Sample(
            "ckptctl_root_inspected_steps", {**root, "verdict": verdict.value}, verdicts[verdict]
        )
    newest = [report.number for report in found.reports if report.number is not None]
    yield Sample("ckptctl_root_newest_step", root, max(newest, default=None))
    for report in found.reports:
        if report.url == found.chosen:
            yield Sample("ckptctl_root_chosen_step", root, report.number)
            yield Sample("ckptctl_root_chosen_written_timestamp_seconds", root, report.written_s)
    yield Sample("ckptctl_root_inspected_timestamp_seconds", root, round(time.time()))


def watch_samples(
    root: str, counts: Mapping[Event, int], newest: Mapping[Event, int]
) -> Iterator[Sample]:
    """What `watch` found since it was started: how often, and the newest step of each event."""
    for event, n_found in counts.items():
        labels = {"root": root, "event": event.value}
        yield Sample("ckptctl_watch_events_total", labels, n_found)
        yield Sample("ckptctl_watch_newest_step", labels, newest.get(event))
    yield Sample("ckptctl_watch_listed_timestamp_seconds", {"root": root}, round(time.time()))


def _values(goodput: Goodput | None) -> Iterator[tuple[str, dict[str, str], float | None]]:
    from ckptctl.goodput.history import BUCKETS

    yield "ckptctl_run_up", {}, float(goodput is not None)
    if goodput is None:
        return
    yield "ckptctl_run_elapsed_seconds", {}, goodput.elapsed_s
    yield "ckptctl_run_goodput_seconds", {}, goodput.goodput_s
    yield "ckptctl_run_goodput_ratio", {}, goodput.goodput
    yield "ckptctl_run_ettr_ratio", {}, goodput.ettr
    for bucket in BUCKETS:
        seconds: float | None = getattr(goodput.badput, bucket)
        yield "ckptctl_run_badput_seconds", {"bucket": bucket}, seconds
    yield "ckptctl_run_disruptions_total", {}, float(goodput.disruptions)
    yield "ckptctl_run_failures_total", {}, float(goodput.mtbf.failures)
    yield "ckptctl_run_mtbf_seconds", {}, goodput.mtbf.mean_s
    step = goodput.max_productive_step
    yield "ckptctl_run_max_productive_step", {}, None if step is None else float(step)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


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
        if sent is not None:
            self._warn(sent.message if isinstance(sent, Unknown) else sent)

    def _warn(self, why: str) -> None:
        self._out.lines([line(f"warning: --notify {why}", hang=2)], to=self._out.err)


def _words(given: str) -> list[str]:
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
